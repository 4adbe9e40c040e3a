# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend is: the verbs it offers and the arguments they take."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import paddle
from paddle import Tensor

from .._graphs import constant

Tensors = tuple[Tensor, ...]
Matrices: TypeAlias = Tensor | Sequence[Tensor]  # those of all experts: one tensor, or a list

FLOAT8 = frozenset((paddle.float8_e4m3fn, paddle.float8_e5m2))  # comparing dtypes takes longer than a hash

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


def constant_if_float8(tensor: Tensor) -> Tensor:
    """The tensor, without a gradient if it has float8 rows: Paddle would cast their gradient to float8."""
    return constant(tensor) if not tensor.stop_gradient and tensor.dtype in FLOAT8 else tensor


class Validation(enum.IntEnum):
    """How much of the data is looked at; the higher levels include the lower ones."""

    OFF = 0  # bad ids and map entries count as -1, NaN is copied, overflow is counted
    DATA = 1  # ids, duplicates, NaN and maps raise
    ALL = 2  # dropped slots raise too

    def as_argument(self) -> bool | None:
        """The value of a public ``validate`` argument that means this level on the CPU."""
        return {Validation.OFF: False, Validation.DATA: None, Validation.ALL: True}[self]


class RouteSpec(NamedTuple):
    """Everything about a routing that is not a tensor."""

    num_experts: int
    topk: int  # slots per token of a mask; -1 for ids, whose columns say it
    padding_alignment: int
    counts: tuple[int, ...] | None  # rows per expert as host integers; None: counted, or in a tensor
    buffer_size: int  # rows of a static buffer, -1 without
    duplicates: str  # "first" or "each"
    validation: Validation


class MoePermuteSpec(NamedTuple):
    """Everything about a moe_permute call that is not a tensor."""

    route: RouteSpec
    do_gather: bool
    return_expert_indices: bool
    fill_padding: str  # "all", "meta" or "none"


class MoeUnpermuteSpec(NamedTuple):
    """Everything about a moe_unpermute call that is not a tensor."""

    num_experts: int
    weighted: bool
    compat_paddle: bool
    validation: Validation


class RowmapSpec(NamedTuple):
    """How a map of rows is to be read."""

    is_row_id_map: bool  # [T, 2E + 1] of TransformerEngine, else [T, E] rows
    num_rows: int  # N; -1: in a tensor
    check_range: bool  # rows outside [-1, N) raise, else they count as -1
    check_repeats: bool  # repeated rows raise, else the first entry gets the row


class Maps(NamedTuple):
    """The maps of a plan that `permute` follows."""

    slot_to_row: Tensor
    token_rows: Tensor
    row_to_token: Tensor


class RowMaps(NamedTuple):
    """The maps of a plan that moving needs, read from a map of rows; slot e of a token is its expert e.

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
    """How rows become float8."""

    ue8m0: bool
    scale_layout: str  # "row" or "col"
    amax_min: float


class TopkSpec(NamedTuple):
    """Everything about a calculate_topk call that is not a tensor."""

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
    """Everything about a grouped product that has no gradient."""

    m_sizes: list[int] | Tensor  # [E]
    expert_offsets: list[int] | Tensor | None  # [E + 1]; None: the groups follow each other
    transpose: bool
    plan: Any  # says whose rows are multiplied, where tokens are given, or None
    validation: Validation  # whether sizes and offsets that are tensors are looked at, for backends that need not


class MlpSpec(NamedTuple):
    """Everything about a layer of experts that has no gradient."""

    plan: Any  # where the rows of tokens are
    weights_by_slot: bool  # whether the weights are [T, K] of the slots, not [M] of the rows
    transpose: bool
    keeps_hidden: bool  # whether the first product is kept for the backward pass
    workspace: int  # bytes
    accumulates: bool  # whether gradients of the matrices go where `accumulation` says it
    validation: Validation  # as in GemmSpec
    compute: str | None = None  # "fp8_1x128": products take float8 operands
    quantized: Any = (
        None  # for kernels, what `quantize_experts` made; for a backend, the `Float8Matrices` it is kept in
    )
    hidden_in_float8: bool = False  # with compute, whether what is kept of the first product is codes and scales


class Verbs(Protocol):
    """One implementation of the operators over Paddle tensors, whose arguments are checked already.

    `route` returns the ten tensors of a Plan in its order, `row_probs` with 0 elements without probabilities.
    A plan that a verb takes may be `RowMaps`.
    `moe_permute` returns hidden_states_unzipped, zipped_expertwise_rowmap, token_prob_unzipped, scale_unzipped,
    expert_indices, overflow, slot_to_row and token_rows; outputs that were not asked for have 0 elements.
    """

    @property
    def name(self) -> str:
        """What `use_backend` takes."""

    @property
    def operators(self) -> frozenset[str] | None:
        """Those of `OPERATORS` that it has. None: all."""

    @property
    def dtypes(self) -> Mapping[str, Sequence[Any]]:
        """Dtypes of the first tensor, for operators that it has for these dtypes only."""

    def unavailable(self) -> str | None:
        """Why the backend cannot run here, or None when it can."""

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        """Why the backend cannot run on this tensor's device or graph value though it runs here, or None if it can."""

    def calculate_topk(self, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
        """Weights, ids and scores; the latter have 0 elements where they are not wanted."""

    def route(self, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
        """Make the maps of a plan."""

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        """Rows and scales in expert order; scales have 0 elements without a scale."""

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        """The sum of each token's rows."""

    def unpermute_backward(
        self, d_out: Tensor, rows: Tensor | None, probs: Tensor | None, plan: Any, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `unpermute`: of the rows, and of the probabilities if there are any. They have none.

        The compiled backend has it for the weighted sum only, for those who write their backward passes themselves.
        """

    def quantize_1x128(self, x: Tensor, spec: QuantizeSpec) -> Tensors:
        """Codes and scales of rows."""

    def permute_quantized(self, x: Tensor, plan: Any, fill_padding: str, spec: QuantizeSpec) -> Tensors:
        """Codes and scales in expert order."""

    def dequantize_1x128(self, codes: Tensor, scales: Tensor, scale_layout: str, dtype: Any) -> Tensor:
        """Rows of codes and scales in a dtype."""

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
        """The sum of each token's rows, and the probabilities per slot."""

    def sort_chunks(
        self, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
    ) -> Tensors:
        """Rows, probabilities (0 elements without) and source_to_dest of chunks in another order."""

    def chunk_sort_map(self, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation) -> Tensor:
        """source_to_dest alone; num_rows -1: the sum of the sizes."""

    def make_row_id_map(
        self, token_rows: Tensor, row_to_expert: Tensor, pad_offsets: Tensor | None, num_experts: int
    ) -> Tensor:
        """TransformerEngine's row_id_map [T, 2E + 1] of a plan."""

    def read_rowmap(
        self, rowmap: Tensor, pad_offsets: Tensor | None, num_rows: Tensor | None, spec: RowmapSpec
    ) -> RowMaps:
        """The maps that a map of rows stands for."""

    def slots_to_rows(self, slot_values: Tensor, maps: Any) -> Tensor:
        """The float32 value [T, K] of the slot that each row [N] belongs to, 0 without one."""

    def rows_to_slots(self, row_values: Tensor, maps: Any) -> Tensor:
        """The float32 value [N] of each slot's row, 0 without one."""

    def grouped_gemm(self, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec) -> Tensor:
        """Each expert's matrix times its own rows, plus its bias, times the weights; of tokens with a plan."""

    def explain_moe_mlp(
        self,
        x: Tensor,
        gate_up: Matrices,
        down: Matrices,
        weights: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
    ) -> list[str]:
        """Lines on what `moe_mlp` would run for these gradients, without running it; of what has that verb."""


class Backend(Verbs, Protocol):
    """Verbs whose results have the gradients that the public functions promise; float8 rows have none."""

    @property
    def gathers_rows(self) -> bool:
        """Whether grouped_gemm takes a plan and tokens."""

    @property
    def takes_lists(self) -> bool:
        """Whether grouped_gemm runs on the matrices of a list as they are. Others need one tensor, which they make."""

    def why_composed(self, x: Tensor, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> str | None:
        """Why `moe_mlp` does not take these operands and this spec, or None if it does."""

    def grouped_gemm(
        self, x: Tensor, w: Matrices, weights: Tensor | None, bias: Matrices | None, spec: GemmSpec
    ) -> Tensor:
        """As `Verbs.grouped_gemm`, with lists: of matrices, and of biases unless it `takes_lists`."""

    def moe_mlp(self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
        """The sums of what the experts of each token make of it; the spec says what the weights are by."""


class Kernels(Verbs, Protocol):
    """Verbs without gradients, and those that make them; `gradients.WithGradients` makes a `Backend` of it.

    ``wanted`` tells which of the forward's tensor inputs want a gradient.
    """

    def calculate_topk_backward(
        self, d_weights: Tensor, d_scores: Tensor | None, gating: Tensor, ids: Tensor, spec: TopkSpec
    ) -> Tensor:
        """The gradient of the logits."""

    def route_backward(
        self,
        d_row_probs: Tensor,
        slot_to_row: Tensor,
        row_to_token: Tensor,
        row_to_expert: Tensor,
        mask_experts: int,
    ) -> Tensor:
        """The gradient of the probabilities, [T, K], or [T, E] of a mask of so many experts; -1: of ids."""

    def permute_backward(self, d_rows: Tensor, token_rows: Tensor) -> Tensor:
        """The gradient of the tokens."""

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
        """The gradients of the rows and of the probabilities."""

    def sort_chunks_backward(self, d_out: Tensor, source_to_dest: Tensor) -> Tensor:
        """The gradient of the rows, or of the probabilities."""

    def gather_slots(self, row_values: Tensor, slot_to_row: Tensor) -> Tensor:
        """The value [N] of each slot's row, 0 without one: the gradient of the probabilities of `moe_permute`."""

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
        """The gradients of `grouped_gemm`: of the rows or tokens, the matrices, the weights and the bias."""

    def moe_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec, keeps: bool
    ) -> tuple[Tensor, Tensors, Tensor | None, Tensor | None]:
        """The sums of what the experts of each token make of it, the first product, the weights, and tables.

        The first product is what ``keeps`` and the spec say that is kept of it: nothing, itself, or its codes and
        scales. The tables, a few numbers for each expert that the backward pass takes, may be None. The weights are by
        row, float32 [M], or None without weights. Kernels need not have this verb, nor its gradient. Those that have
        it say with ``overwrites_hidden`` whether the gradient overwrites what was kept of the first product.
        """

    def multiplies_float8(self, x: Tensor, down: Matrices, transpose: bool) -> bool:
        """Whether `moe_mlp` can compute on float8 operands here; for kernels that have that verb."""

    def quantize_experts(self, gate_up: Tensor, down: Tensor, transpose: bool, both: bool) -> Any:
        """The matrices as `moe_mlp` takes them from a spec, and its gradient with ``both``; of kernels for float8."""

    def for_both_passes(self, quantized: Any) -> Any:
        """What `quantize_experts` makes with ``both`` of what it made, maybe without."""

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
        """The gradients of x, the matrices and the weights; these are by row, and ``hidden`` is overwritten.

        The gradient of the weights is by what the spec says.
        Those of the matrices are None where they went to an `accumulation.Destination`.
        """
