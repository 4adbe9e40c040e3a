# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend: its verbs and their arguments."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from paddle import Tensor

Tensors = tuple[Tensor, ...]
Matrices: TypeAlias = Tensor | Sequence[Tensor]  # matrices of all experts: one stacked tensor, or a list

OPERATORS = (
    "route",
    "permute",
    "unpermute",
    "sort_chunks",
    "row_id_map",
    "moe_permute",
    "moe_unpermute",
    "quantize_1x128",
    "permute_quantized",
    "dequantize_1x128",
    "quantized_experts",
    "calculate_topk",
    "grouped_gemm",
)


class Validation(enum.IntEnum):
    """The level of data checks; a higher level includes the lower ones."""

    OFF = 0  # bad ids and map entries count as -1, NaN is copied, overflow is counted
    DATA = 1  # ids, duplicates, NaN and maps raise
    ALL = 2  # dropped slots raise too

    def as_argument(self) -> bool | None:
        """Return the public ``validate`` argument that selects this level on the CPU."""
        return {Validation.OFF: False, Validation.DATA: None, Validation.ALL: True}[self]


class RouteSpec(NamedTuple):
    """The arguments of `Verbs.route` that are not tensors."""

    num_experts: int
    topk: int  # slots per token of a mask; -1 for ids, which have one column per slot
    padding_alignment: int
    counts: tuple[int, ...] | None  # rows per expert as host integers; None: counted, or in a tensor
    buffer_size: int  # rows of a static buffer, -1 without
    duplicates: str  # "first" or "each"
    validation: Validation


class MoePermuteSpec(NamedTuple):
    """The arguments of `Verbs.moe_permute` that are not tensors."""

    route: RouteSpec
    do_gather: bool
    return_expert_indices: bool
    fill_padding: str  # "all", "meta" or "none"


class MoeUnpermuteSpec(NamedTuple):
    """The arguments of `Verbs.moe_unpermute` that are not tensors."""

    num_experts: int
    weighted: bool
    compat_paddle: bool
    validation: Validation


class RowmapSpec(NamedTuple):
    """The format and the checks of a row map."""

    is_row_id_map: bool  # TransformerEngine's [T, 2E + 1], otherwise [T, E] rows
    num_rows: int  # N; -1: in a tensor
    check_range: bool  # rows outside [-1, N) raise, otherwise they count as -1
    check_repeats: bool  # repeated rows raise, otherwise the first entry owns the row


class Maps(NamedTuple):
    """The maps of a plan that `permute` follows."""

    slot_to_row: Tensor
    token_rows: Tensor
    row_to_token: Tensor


class RowMaps(NamedTuple):
    """The maps of a plan that permuting needs, read from a row map; slot e of a token is its expert e.

    slot_to_row and token_rows are [T, E], the others [N]; all int32, -1 = none.
    """

    slot_to_row: Tensor
    token_rows: Tensor
    row_to_token: Tensor
    row_to_slot: Tensor
    row_to_expert: Tensor
    leaves_out: bool = (
        False  # slot_to_row, which `permute` follows, lacks rows of token_rows, which its gradient follows
    )


class QuantizeSpec(NamedTuple):
    """The parameters of the quantisation of rows to float8."""

    ue8m0: bool
    scale_layout: str  # "row" or "col"
    amax_min: float


FLOAT8_ROWS = QuantizeSpec(False, "row", 2.0**-100)  # of operands of a layer: gradients may be small


class TopkSpec(NamedTuple):
    """The arguments of `Verbs.calculate_topk` that are not tensors."""

    top_k: int
    use_sigmoid: bool
    renormalize: bool
    pre_act: bool
    num_groups: int
    topk_groups: int
    scores_per_group: int
    scaling_factor: float
    return_scores: bool


class GemmSpec(NamedTuple):
    """The arguments of a grouped GEMM that have no gradient."""

    m_sizes: list[int] | Tensor  # [E]
    expert_offsets: list[int] | Tensor | None  # [E + 1]; None: the groups are adjacent
    transpose: bool
    plan: Any  # maps rows to tokens if the operand contains tokens, otherwise None
    validation: Validation  # whether to check sizes and offsets that are tensors, for backends that need not
    is_checked: bool = False  # whether sizes and offsets are numbers that are known to fit the rows
    deferral: Any = None  # a `deferred.Deferral` of the matrices; then the operand has their values


FLOAT8_WGRADS = "fp8_1x128_wgrad"  # of ``compute``: wgrads have float8 operands, too


class MlpSpec(NamedTuple):
    """The arguments of a layer of experts that have no gradient."""

    plan: Any  # maps tokens to rows
    weights_by_slot: bool  # whether the weights are [T, K] of the slots, not [M] of the rows
    transpose: bool
    keeps_hidden: bool  # whether the output of the first GEMM is saved for the backward pass
    workspace: int  # bytes
    accumulates: bool  # whether gradients of the matrices go to an `accumulation.Destination`
    validation: Validation  # as in GemmSpec
    compute: str | None = None  # "fp8_1x128": GEMMs but for wgrads have float8 operands; FLOAT8_WGRADS: all have
    quantized: Any = (
        None  # for kernels, the result of `quantize_experts`; for a backend, the `Float8Matrices` that contains it
    )
    hidden_in_float8: bool = False  # with compute, whether the first GEMM's output is saved as codes and scales
    deferral: Any = None  # a `deferred.Deferral` of both matrices; then the operands have their values

    @property
    def float8_wgrads(self) -> bool:
        return self.compute == FLOAT8_WGRADS


def maps_of_layer(plan: Any) -> Tensors:
    """The tensors of a plan that both passes of a layer read, in the order of the library's passes."""
    return plan.token_rows, plan.row_to_token, plan.tokens_per_expert, plan.expert_offsets, plan.slot_to_row


class Verbs(Protocol):
    """An implementation of the operators over Paddle tensors; callers have checked the arguments.

    `route` returns the ten tensors of a Plan in its order, `row_probs` with 0 elements without probabilities.
    The argument ``plan`` of a verb may be `RowMaps`.
    `moe_permute` returns hidden_states_unzipped, zipped_expertwise_rowmap, token_prob_unzipped, scale_unzipped,
    expert_indices, overflow, slot_to_row and token_rows; unrequested outputs have 0 elements.
    """

    @property
    def name(self) -> str:
        """The name of the backend, as `use_backend` accepts it."""

    @property
    def operators(self) -> frozenset[str] | None:
        """The subset of `OPERATORS` that it implements. None: all."""

    @property
    def dtypes(self) -> Mapping[str, Sequence[Any]]:
        """Supported dtypes of the first tensor, for operators limited to some dtypes."""

    def unavailable(self) -> str | None:
        """Return the reason why the backend cannot run on this machine, or None if it can."""

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        """Return the reason why an available backend cannot run on this tensor or graph value, or None if it can."""

    def calculate_topk(self, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
        """Return weights, ids and scores; unrequested scores have 0 elements."""

    def route(self, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
        """Return the maps of a plan."""

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        """Return rows and scales in expert order; scales have 0 elements without a scale."""

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        """Return the sum of each token's rows."""

    def unpermute_backward(
        self, d_out: Tensor, rows: Tensor | None, probs: Tensor | None, plan: Any, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the rows and of the probabilities, if any; these are not differentiable again.

        The compiled backend implements only the weighted sum, for callers with their own backward passes.
        """

    def quantize_1x128(self, x: Tensor, spec: QuantizeSpec) -> Tensors:
        """Return the codes and scales of rows."""

    def permute_quantized(self, x: Tensor, plan: Any, fill_padding: str, spec: QuantizeSpec) -> Tensors:
        """Return codes and scales in expert order."""

    def dequantize_1x128(self, codes: Tensor, scales: Tensor, scale_layout: str, dtype: Any) -> Tensor:
        """Return the rows of codes and scales in ``dtype``."""

    def moe_permute(
        self,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> Tensors:
        """Route and permute in one call."""

    def moe_unpermute(
        self, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> Tensors:
        """Return the sum of each token's rows, and the probabilities per slot."""

    def sort_chunks(
        self, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
    ) -> Tensors:
        """Return reordered rows and probabilities (0 elements without), and source_to_dest."""

    def chunk_sort_map(self, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation) -> Tensor:
        """Return source_to_dest alone; num_rows -1: the sum of the sizes."""

    def make_row_id_map(
        self, token_rows: Tensor, row_to_expert: Tensor, pad_offsets: Tensor | None, num_experts: int
    ) -> Tensor:
        """Return TransformerEngine's row_id_map [T, 2E + 1] of a plan."""

    def read_rowmap(
        self, rowmap: Tensor, pad_offsets: Tensor | None, num_rows: Tensor | None, spec: RowmapSpec
    ) -> RowMaps:
        """Return the maps that a row map encodes."""

    def slots_to_rows(self, slot_values: Tensor, maps: Any) -> Tensor:
        """Gather float32 values [T, K] of slots to their rows [N]; rows without a slot are 0."""

    def rows_to_slots(self, row_values: Tensor, maps: Any) -> Tensor:
        """Gather float32 values [N] of rows to their slots [T, K]; slots without a row are 0."""

    def grouped_gemm(self, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec) -> Tensor:
        """Return each expert's rows times its matrix, plus bias, times the weights; with a plan, ``x`` has tokens."""

    def explain_moe_mlp(
        self,
        x: Tensor,
        gate_up: Matrices,
        down: Matrices,
        weights: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
    ) -> list[str]:
        """Dry run of `moe_mlp`: lines on the kernels for these gradients; only in backends with that verb."""


class Backend(Verbs, Protocol):
    """A set of verbs whose results have the documented gradients; float8 rows have none."""

    @property
    def gathers_rows(self) -> bool:
        """True if `grouped_gemm` accepts a plan and tokens."""

    @property
    def takes_lists(self) -> bool:
        """True if `grouped_gemm` runs on a list of matrices directly. Otherwise it stacks them first."""

    def why_composed(self, x: Tensor, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> str | None:
        """Return the reason why `moe_mlp` rejects these operands and this spec, or None if it accepts them."""

    def grouped_gemm(
        self, x: Tensor, w: Matrices, weights: Tensor | None, bias: Matrices | None, spec: GemmSpec
    ) -> Tensor:
        """As `Verbs.grouped_gemm`, with lists of matrices, and of biases unless it `takes_lists`."""

    def moe_mlp(self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
        """Return each token's weighted sum of expert outputs; weights are per slot or per row, as in the spec."""


class Kernels(Verbs, Protocol):
    """A set of verbs without gradients, and their backward verbs; `gradients.WithGradients` wraps it as a `Backend`.

    ``wanted`` flags the forward pass's tensor inputs that require a gradient.
    """

    def calculate_topk_backward(
        self, d_weights: Tensor, d_scores: Tensor | None, gating: Tensor, ids: Tensor, spec: TopkSpec
    ) -> Tensor:
        """Return the gradient of the logits."""

    def route_backward(
        self,
        d_row_probs: Tensor,
        slot_to_row: Tensor,
        row_to_token: Tensor,
        row_to_expert: Tensor,
        mask_experts: int,
    ) -> Tensor:
        """Return the gradient of the probabilities: [T, mask_experts] of a mask, or [T, K] of ids if that is -1."""

    def permute_backward(self, d_rows: Tensor, token_rows: Tensor) -> Tensor:
        """Return the gradient of the tokens."""

    def moe_unpermute_backward(
        self,
        d_hidden: Tensor,
        d_prob_topk: Tensor,
        rows: Tensor | None,
        rowmap: Tensor,
        routemap: Tensor,
        probs: Tensor,
        spec: MoeUnpermuteSpec,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the rows and of the probabilities."""

    def sort_chunks_backward(self, d_out: Tensor, source_to_dest: Tensor) -> Tensor:
        """Return the gradient of the rows, or of the probabilities."""

    def gather_slots(self, row_values: Tensor, slot_to_row: Tensor) -> Tensor:
        """Gather values [N] of rows to slots, 0 without a row: the gradient of `moe_permute`'s probabilities."""

    def grouped_gemm_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        w: Tensor,
        weights: Tensor | None,
        bias: Tensor | None,
        spec: GemmSpec,
        wanted: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the rows or tokens (dgrad), the matrices (wgrad), the weights and the bias."""

    def grouped_wgrad(self, d_out: Tensor, x: Tensor, shape: Sequence[int], spec: GemmSpec) -> Tensor:
        """Return the gradient of matrices of this shape alone, of a call without weights."""

    def moe_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec, keeps: bool
    ) -> tuple[Tensor, Tensors, Tensor | None, Tensor | None]:
        """Return each token's sum of expert outputs, the saved first GEMM's output, the weights, and tables.

        The second result depends on ``keeps`` and the spec: empty, the first GEMM's output, or its codes and scales.
        The weights are per row, float32 [M], or None without weights. The tables contain a few numbers per expert for
        the backward pass and may be None. This verb and its gradient are optional. Kernels that implement them have an
        attribute ``overwrites_hidden``: whether the gradient overwrites the second result.
        """

    def moe_mlp_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, the matrices and the weights; ``weights`` are per row, ``hidden`` is overwritten.

        The gradient of the weights is per slot or per row, as in the spec. A matrix whose gradient went to an
        `accumulation.Destination` has None.
        """

    @property
    def defers_wgrads(self) -> bool:
        """True if `moe_mlp_dgrads` leaves work to `moe_mlp_wgrads`. Otherwise it computes the gradients of matrices."""

    def moe_mlp_dgrads(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor]]:
        """`moe_mlp_backward` without the matrices: gradients of x and the weights, and two tensors for the others.

        The first tensor belongs to gate_up, the gradient of the first GEMM's output, and the second to down, the
        weighted output of the activation.
        """

    def moe_mlp_wgrads(
        self,
        kept: tuple[Tensor | None, Tensor | None],
        d_out: Tensor,
        x: Tensor,
        inner: int,
        tables: Tensor | None,
        spec: MlpSpec,
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the matrices whose tensor is kept; None for those added to a destination."""
