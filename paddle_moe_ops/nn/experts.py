# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The experts: gated MLPs, each for a segment of rows."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import paddle
from paddle import Tensor
from paddle.jit import not_to_static

from .. import _checks
from .._activations import ACTIVATIONS, FUNCTIONS, activate
from .._graphs import is_graph_value, of_shape, public
from .._matrices import check_compute, check_deferrable, check_destinations, check_memory_options
from .._options import Activation, ComputeFormat, Keep, MatrixFormat
from .._quick import quick_moe_mlp
from ..backends import Float8Matrices, GemmSpec, accumulated, resolve
from ..backends.experts import holds_others, is_default
from ..expert_parallel.parameters import copy_marks, sharded_state_of_experts
from ..gemm import multiplied
from ..mlp import (
    IN_GRAPH,
    LayerOptions,
    outputs_of,
    prepared_layer,
    prepared_quantized_layer,
)
from ..routing import Plan, as_plan, check_weights, row_probs, tokens_of
from ._common import Size, casting_others, described, initial, sizes, warn_user, weight
from ._counts import without_experts
from ._gradients import PLAIN_GRADIENTS, GradientOptions, gradient_options, gradients_of_call, operand_of
from ._quantized import StateOfOneFormat, codes_of, matrices_of, refuse_sharded_state, replace_matrices, values_of
from .microbatches import warn_of_codes_for_few_rows

_NAME = "SwiGLUExperts"


class SwiGLUExperts(StateOfOneFormat):
    """E gated MLPs with stacked weights, each applied to its own contiguous segment of rows.

    Only `MoELayer` makes one without experts, on a rank of a group; it returns its rows.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        keep: see `moe_mlp`, which runs calls that combine rows.
        workspace_mb: see `moe_mlp`.
        accumulate: see `moe_mlp`; it applies to all calls. A layer in ``eval()`` mode can be traced and saved with it:
            a graph returns its gradients to Paddle. In ``train()`` mode tracing raises.
        defer_dw: see `moe_mlp`; it applies to all calls, and is treated like ``accumulate`` in traced layers.
        activation: see `moe_mlp`.
        bias: whether both GEMMs have biases, which begin as zeros.
        compute: see `moe_mlp`. With it, calls that do not combine rows raise.

    Attributes:
        gate_up: weights [E, H, 2*I], the gate's columns first.
        down: weights [E, I, H].
        gate_up_bias: [E, 2*I], or None.
        down_bias: [E, H], or None.
        float8_matrices: with ``compute``, the matrices that calls keep, see `keep_float8_matrices`;
            ``float8_matrices.clear()`` frees them.
        matrix_format: None, or the format of the codes that `quantize` put in place of both weights.

    Raises:
        TypeError: a size is not an int, or a flag is not a bool.
        ValueError: a size below 1, or an unknown activation; ``keep="h_fp8"`` without ``compute``, or with biases or
            another activation; ``defer_dw`` with ``compute`` and these.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import route
        >>> from paddle_moe_ops.nn import SwiGLUExperts
        >>> plan = route(paddle.randint(0, 8, [16, 1]), num_experts=8)
        >>> SwiGLUExperts(8, 64, 32)(paddle.randn([16, 64]), plan=plan, combine=True).shape
        [16, 64]
    """

    # The axis that model parallel ranks split, and the number of matrices along it; biases of ``down`` are not split.
    split_axes: ClassVar = {"gate_up": (2, 2), "gate_up_bias": (1, 2), "down": (1, 1)}

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        keep: Keep = "h",
        workspace_mb: int = 1024,
        accumulate: bool = False,
        defer_dw: bool | Literal["fleet"] = False,
        activation: Activation = "swiglu",
        bias: bool = False,
        compute: ComputeFormat = None,
    ) -> None:
        super().__init__()
        self.activation = _checks.choice(_NAME, "activation", activation, ACTIVATIONS)
        _checks.flag(_NAME, "bias", bias)
        check_memory_options(_NAME, keep, workspace_mb, accumulate, compute, defer_dw)
        check_compute(_NAME, compute, activation, bias, keep, defer_dw)
        self.compute = compute
        self.float8_matrices = None if compute is None else Float8Matrices()
        self.matrix_format: MatrixFormat | None = None
        self._name_in_errors = _NAME  # the layer that the user called
        options = {"keep": keep, "workspace_mb": Size(workspace_mb), "accumulate": accumulate, "defer_dw": defer_dw}
        self.memory_options: dict[str, Any] = options
        self.num_experts, self.hidden_size, self.intermediate_size = sizes(
            _NAME, num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        self._has_experts = True  # a bool, since Paddle cannot compare a Size where bytecode is traced
        self.gate_up = weight(self, [num_experts, hidden_size, 2 * intermediate_size], fan_in=hidden_size)
        self.down = weight(self, [num_experts, intermediate_size, hidden_size], fan_in=intermediate_size)
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = self.create_parameter([num_experts, 2 * intermediate_size], is_bias=True)
            self.down_bias = self.create_parameter([num_experts, hidden_size], is_bias=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> SwiGLUExperts:
        """A copy with the marks of these parameters, see `expert_parallel.mark_expert_parameters`."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copy_marks(self, made)
        return made

    def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
        """Return the state for `paddle.distributed.save_state_dict` and `paddle.distributed.load_state_dict`.

        If several ranks share the experts, parameters have the shapes of the experts of all ranks and the offsets of
        this rank's. Experts that you mark by `expert_parallel.mark_expert_parameters` need its ``group`` for this.

        Args:
            structured_name_prefix: begins all keys, which otherwise are those of ``state_dict()``.

        Returns:
            a dict of Paddle's ``ShardedWeight``, which contain the parameters themselves.

        Raises:
            ValueError: the experts were marked without a group in a program of several ranks.
        """
        refuse_sharded_state(self)
        return sharded_state_of_experts(self, structured_name_prefix)

    def quantize(self, format: MatrixFormat) -> SwiGLUExperts:
        """Replace the weights by codes and scales, in place, to serve them.

        The weights become None, and the layer has the buffers ``gate_up_codes``, ``gate_up_scales``, ``down_codes`` and
        ``down_scales``, which `state_dict` and saved programs contain. To load such a state, quantise a new layer
        first. A cast of the layer does not change them. ``compute``, ``accumulate``, ``defer_dw`` and
        ``is_first_microbatch`` have no effect then; gradients of rows and biases stay. Calls with float8 codes must
        combine rows. Codes of a float8 checkpoint can be set by ``set_state_dict`` as well, as int8 bytes.

        Args:
            format: a format of `QuantizedMatrices`; "fp8_128x128" without biases and with SwiGLU only.

        Returns:
            this layer.

        Raises:
            ValueError: an unknown or unsupported format, or a layer that was quantised before.
            RuntimeError: Paddle is in static mode.

        Examples:
            >>> from paddle_moe_ops.nn import SwiGLUExperts
            >>> SwiGLUExperts(4, 64, 32).quantize("int8").gate_up_codes.shape
            [4, 64, 64]
        """
        replace_matrices(self, self._name_in_errors, format)
        self.compute = self.float8_matrices = None
        keep = "x" if self.memory_options["keep"] == "x" else "h"
        self.memory_options |= {"accumulate": False, "defer_dw": False, "keep": keep}
        return self

    def _apply(self, func: Any, device: Any, dtype: Any, blocking: Any, include_sublayers: bool = True) -> None:
        """Move and cast the layer for Paddle; codes and scales are only moved."""
        kept = () if self.matrix_format is None else codes_of(self)
        super()._apply(casting_others(func, kept), device, dtype, blocking, include_sublayers)

    @property
    def stored(self) -> Tensor:
        """A tensor of the dtype that rows must have, or codes if any dtype will do."""
        if self.matrix_format is None:
            return self.gate_up
        return self.gate_up_codes if self.gate_up_bias is None else self.gate_up_bias

    def draw_those_of(self, rank: int, num_ranks: int) -> None:
        """Draw the weights of every rank's experts and keep those of one, for ranks that started with one seed.

        Experts of different ranks then differ, and the next draw is the same on all ranks.

        Args:
            rank: owner of these experts; rank 0 keeps the present weights.
            num_ranks: the number of ranks.
        """
        for parameter, fan_in in ((self.gate_up, self.hidden_size), (self.down, self.intermediate_size)):
            kept = parameter.clone()
            for other in range(1, num_ranks):
                initial(fan_in)(parameter)
                kept = parameter.clone() if other == rank else kept
            parameter.set_value(kept)

    def experts_moved(self) -> None:
        """Adopt the number of experts of the parameters, for `expert_parallel.move_experts`."""
        self.num_experts = Size(self.gate_up.shape[0])
        self._has_experts = self.num_experts > 0
        if self.float8_matrices is not None:
            self.float8_matrices.clear()

    def extra_repr(self) -> str:
        """Return what ``print(layer)`` says of it."""
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        options = {"activation": self.activation, "bias": self.gate_up_bias is not None}
        options |= {} if self.compute is None else {"compute": self.compute}
        options |= {} if self.matrix_format is None else {"matrix_format": self.matrix_format}
        options |= {} if self.memory_options["keep"] == "h" else {"keep": self.memory_options["keep"]}
        return described(self.stored, num_experts=self.num_experts, **sizes, **options)

    @not_to_static
    def forward(
        self,
        rows: Tensor,
        tokens_per_expert: Sequence[int] | Tensor | None = None,
        padding_alignment: int = 1,
        *,
        plan: Plan | None = None,
        probs: Tensor | None = None,
        combine: bool = False,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """Apply each expert to its segment of rows, or to its tokens by a plan.

        Differentiable in the rows and the weights (and probs); an expert without rows gets a zero gradient.
        Deterministic. No host synchronisation with counts that are ints; otherwise as in `grouped_gemm`.

        Args:
            rows: rows in expert order, [N, H], as moe_permute returns them; with a plan tokens [T, H].
            tokens_per_expert: tokens of each expert, E ints in a list or an array, or an int tensor [E], as
                ``plan.tokens_per_expert``. A list is part of a static graph's program.
            padding_alignment: the alignment the rows were permuted with. Segments are the counts rounded up to
                multiples of it. Padding rows are not read: their result and their gradient are 0, whatever their
                values. Counts that include the padding name the same segments, but treat padding rows as tokens, so
                these must be defined.
            plan: the rows of the tokens, from `route`, in place of tokens_per_expert.
            probs: with a plan, factors of the result: float32 [T, K] of each token's slots, or [N].
                Without a plan it must be None.
            combine: with a plan, whether to add up the rows of each token, as `moe_mlp` does.
            is_first_microbatch: with ``compute``, whether the matrices have changed since the last call: True quantises
                them and keeps the codes, 2 bytes for each element, or 1 if no gradient is required; False reuses these
                codes until a change is noticed; None quantises the matrices in each call and ignores kept codes, unless
                `keep_float8_matrices` or `expert_parallel.distributed_optimizer` was called. Without ``compute`` it has
                no effect, and a warning says so. In a static graph each call quantises the matrices, and the argument
                must be None.

        Returns:
            [N, H], in expert order; with ``combine`` [T, H].

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape; a plan of another number of experts, or one together with
                tokens_per_expert or a padding_alignment; probs without a plan; padding_alignment is below 1, or the
                counts are not E ints >= 0 whose segments have N rows in all. Counts that are a tensor on a device or in
                a graph are not checked. Also ``is_first_microbatch=False`` before any codes are kept, or after the
                matrices have moved, or ``is_first_microbatch`` in a static graph with ``compute``.
        """
        _checks.flag(_NAME, "combine", combine)
        if is_first_microbatch is not None:
            _checks.flag(self._name_in_errors, "is_first_microbatch", is_first_microbatch)
        if plan is None and probs is not None:
            _checks.bad_value(_NAME, "probs", "None without a plan", type(probs).__name__)
        if plan is not None and tokens_per_expert is not None:
            _checks.bad_value(_NAME, "tokens_per_expert", "None with a plan", type(tokens_per_expert).__name__)
        if plan is not None and padding_alignment != 1:
            _checks.bad_value(_NAME, "padding_alignment", "1 with a plan", padding_alignment)
        if not self._has_experts:
            return without_experts(rows, self.parameters())
        sizes_of = self.num_experts, self.hidden_size, self.intermediate_size
        if combine:
            options = self.memory_options
            if self.matrix_format is not None:
                biases = self.gate_up_bias, self.down_bias
                how = self._name_in_errors, options["keep"], options["workspace_mb"]
                return _combined_codes(
                    rows, codes_of(self), self.matrix_format, *biases, sizes_of, self.activation, plan, probs, *how
                )
            experts = _Parameters(self.gate_up, self.down, self.gate_up_bias, self.down_bias)
            # Built without `|=` on a dictionary, at which tracing by bytecode stops.
            rest = self.compute, self.float8_matrices, is_first_microbatch, self._name_in_errors, self.training
            return _combined(rows, experts, sizes_of, self.activation, plan, probs, *rest, **options)
        parameters, gradients = self._parameters_of_rows("rows", rows)
        if plan is not None:
            return _by_plan(rows, parameters, sizes_of, self.activation, plan, probs, "rows", gradients)
        counts = tokens_per_expert, padding_alignment
        return _by_counts(rows, parameters, sizes_of, self.activation, *counts, gradients)

    @not_to_static
    def weighted_rows(self, x: Tensor, plan: Plan, probs: Tensor | None) -> Tensor:
        """Apply each token's experts to it, and weight the results; `unpermute` then adds up each token's rows.

        The same as ``forward`` with a plan, without the layer's hooks. Gradients, determinism and host synchronisation
        are those of ``forward``.

        Args:
            x: tokens [T, H].
            plan: their rows, from `route`.
            probs: weights of each token's slots, float32 [T, K], or of rows, [N], or None for rows as they are.

        Returns:
            [N, H], rows in expert order.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape; a plan of another number of experts.
        """
        sizes_of = self.num_experts, self.hidden_size, self.intermediate_size
        parameters, gradients = self._parameters_of_rows("x", x)
        return _by_plan(x, parameters, sizes_of, self.activation, plan, probs, "x", gradients)

    def _parameters_of_rows(self, argument: str, rows: Tensor) -> tuple[_Parameters, GradientOptions]:
        """The parameters for calls that `moe_mlp` does not run, and the options about their gradients."""
        if self.compute is not None:
            _checks.bad_value(_NAME, "combine", f"True with compute={self.compute!r}", False)
        is_plain = self.matrix_format is None
        gate_up, down = (self.gate_up, self.down) if is_plain else values_of(self, _NAME, argument, rows)
        given = _Parameters(gate_up, down, self.gate_up_bias, self.down_bias)
        options = self.memory_options
        if not (options["accumulate"] or options["defer_dw"]):
            return given, PLAIN_GRADIENTS
        how = gradients_of_call(_NAME, rows, self.training, **gradient_options(options))
        if how.defer_dw:
            check_deferrable(_NAME, rows, how.defer_dw, gate_up=gate_up, down=down)
        if not how.accumulate:
            return given, how
        _check_destinations(_NAME, given)
        kept = given[:2] if how.defer_dw else ()
        return _Parameters(*kept, *(None if each is None else accumulated(each) for each in given[len(kept) :])), how


class _Parameters(NamedTuple):
    """The experts' parameters, or the codes of their matrices."""

    gate_up: Any
    down: Any
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def _check_destinations(name: str, given: _Parameters) -> None:
    check_destinations(name, **{argument: each for argument, each in given._asdict().items() if each is not None})


@public("rows", "experts", owner=_NAME, called={"counts": "tokens_per_expert"})
def _by_counts(
    rows: Tensor,
    experts: _Parameters,
    sizes_of: tuple[int, int, int],
    activation: str,
    counts: Any,
    padding_alignment: int,
    how: GradientOptions,
) -> Tensor:
    """Each expert on its segment of rows; the sizes are E, H and I."""
    alignment = _checks.integer(_NAME, "padding_alignment", padding_alignment, 1)
    gate_up, down, first_bias, second_bias = _of_shapes(experts, *sizes_of)
    _checks.operand(_NAME, "rows", rows, gate_up, ["N", gate_up.shape[1]])
    counts, offsets = _groups(counts, gate_up.shape[0], rows, alignment)
    is_checked = isinstance(counts, list)
    groups = GemmSpec(counts, offsets, False, None, _checks.validation(_NAME, None, rows), is_checked)
    # Under mixed precision each GEMM casts its operands, which may change the backend.
    product = multiplied if paddle.amp.is_autocast_enabled() else resolve("grouped_gemm", rows).grouped_gemm
    of_gate_up = of_down = None
    if how[1]:  # defer_dw
        (gate_up, of_gate_up), (down, of_down) = operand_of(how, gate_up), operand_of(how, down)
    first = product(rows, gate_up, None, first_bias, groups._replace(deferral=of_gate_up))
    return product(FUNCTIONS[activation](first), down, None, second_bias, groups._replace(deferral=of_down))


@public("x", "experts", "probs", owner=_NAME, called={"x": "rows"})
def _by_plan(
    x: Tensor,
    experts: _Parameters,
    sizes_of: tuple[int, int, int],
    activation: str,
    plan: Plan,
    probs: Tensor | None,
    argument: str,
    how: GradientOptions,
) -> Tensor:
    """Each expert on its tokens; the sizes are E, H and I, ``argument`` is the caller's name of x."""
    gate_up, down, first_bias, second_bias = _of_shapes(experts, *sizes_of)
    plan = _plan_of_tokens(_NAME, argument, x, plan, gate_up, *sizes_of[:2])
    weights = probs
    if probs is not None and check_weights(_NAME, "probs", probs, plan):
        weights = row_probs(probs, plan)
    groups = GemmSpec(plan.tokens_per_expert, plan.expert_offsets, False, None, _checks.validation(_NAME, None, x))
    with _checks.renaming("grouped_gemm", _NAME, X=argument):
        of_gate_up = of_down = None
        if how[1]:  # defer_dw
            (gate_up, of_gate_up), (down, of_down) = operand_of(how, gate_up), operand_of(how, down)
        hidden = multiplied(x, gate_up, None, first_bias, groups._replace(plan=plan, deferral=of_gate_up))
        return multiplied(activate(hidden, activation), down, weights, second_bias, groups._replace(deferral=of_down))


@public("x", "experts", "probs", owner=_NAME, called={"x": "rows"})
def _combined(
    x: Tensor,
    experts: _Parameters,
    sizes_of: tuple[int, int, int],
    activation: str,
    plan: Plan | None,
    probs: Tensor | None,
    compute: str | None,
    kept: Float8Matrices | None,
    is_first_microbatch: bool | None,
    name: str,
    training: bool,
    *,
    keep: str,
    workspace_mb: int,
    accumulate: bool,
    defer_dw: bool | str,
) -> Tensor:
    """Each expert on its tokens, and the sums of their rows; the sizes are E, H and I, ``name`` begins errors."""
    if compute is None and is_first_microbatch is not None:
        warn_user(f'{name}: is_first_microbatch has no effect without compute="fp8_1x128"')
    if accumulate or defer_dw:
        accumulate, defer_dw = gradients_of_call(name, x, training, accumulate=accumulate, defer_dw=defer_dw)
    if accumulate:
        _check_destinations(name, experts)
    if defer_dw:
        check_deferrable(name, x, defer_dw, gate_up=experts.gate_up, down=experts.down)
    gate_up, down, gate_up_bias, down_bias = _of_shapes(experts, *sizes_of)
    if compute is None and gate_up_bias is None:
        options = {"activation": activation, "keep": keep, "workspace_mb": int(workspace_mb)}
        gradients = {"accumulate": accumulate, "defer_dw": defer_dw}
        out = quick_moe_mlp(x, plan, probs, gate_up, down, **options, **gradients)
        if out is not None:
            return out
    plan = _plan_of_tokens(name, "rows", x, plan, gate_up, *sizes_of[:2])
    by_slot = probs is not None and check_weights(name, "probs", probs, plan)
    _checks.same_place(name, rows=x, gate_up=gate_up, plan=plan.row_to_token, probs=probs)
    matrices = _matrices_of_call(name, kept, x, gate_up, down, is_first_microbatch)
    if compute is not None and matrices is None and not is_graph_value(x):
        warn_of_codes_for_few_rows(name, x, plan.num_rows, sizes_of[0])
    layer = LayerOptions(activation, False, keep, workspace_mb, accumulate, compute, defer_dw)
    operands = x, gate_up, down, probs, gate_up_bias, down_bias
    return outputs_of(prepared_layer(plan, operands, by_slot, layer, matrices))


@public("x", "gate_up_bias", "down_bias", "probs", owner=_NAME, called={"x": "rows"})
def _combined_codes(
    x: Tensor,
    codes: tuple[Tensor, ...],
    matrix_format: MatrixFormat,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    sizes_of: tuple[int, int, int],
    activation: str,
    plan: Plan | None,
    probs: Tensor | None,
    name: str,
    keep: str,
    workspace_mb: int,
) -> Tensor:
    """`_combined` with `_quantized.codes_of` a layer; tracing by bytecode passes tensors alone through."""
    plan = _plan_of_tokens(name, "rows", x, plan, codes[0] if gate_up_bias is None else gate_up_bias, *sizes_of[:2])
    by_slot = probs is not None and check_weights(name, "probs", probs, plan)
    _checks.same_place(name, rows=x, gate_up_codes=codes[0], plan=plan.row_to_token, probs=probs)
    layer = LayerOptions(activation, True, keep, workspace_mb, False, None)
    operands = x, *matrices_of(codes, matrix_format), probs, gate_up_bias, down_bias
    return outputs_of(prepared_quantized_layer(plan, operands, by_slot, layer))


def _matrices_of_call(
    name: str, kept: Float8Matrices | None, x: Tensor, gate_up: Tensor, down: Tensor, is_first_microbatch: bool | None
) -> Float8Matrices | None:
    """The store of a call's float8 matrices, filled or to be filled; None if the call keeps none."""
    if kept is None or (not is_default(kept, gate_up) and is_first_microbatch is None):
        return None
    if is_graph_value(x):  # `set_is_first_microbatch` affects only calls in dygraph
        if is_first_microbatch is not None:
            _checks.bad_value(name, "is_first_microbatch", f"None {IN_GRAPH}", is_first_microbatch)
        return None
    if is_first_microbatch:
        kept.clear()
    was_empty, expected = kept.is_empty, None
    if holds_others(kept, gate_up, down, False):
        expected = "True once the matrices have moved or changed their dtype"
    elif was_empty and is_first_microbatch is False:
        expected = "True or None before anything is kept"
    if expected is not None:
        _checks.bad_value(name, "is_first_microbatch", expected, is_first_microbatch)
    return kept


def _plan_of_tokens(
    function: str, argument: str, x: Tensor, plan: Plan | None, matrices: Tensor, num_experts: int, hidden: int
) -> Plan:
    """Check tokens [T, H] and their plan."""
    _checks.operand(function, argument, x, matrices, ["T", hidden])
    plan = as_plan(function, plan)
    if plan.num_experts != num_experts:
        _checks.bad_value(function, "plan", f"one of {num_experts} experts", f"one of {plan.num_experts}")
    if x.shape[0] != plan.num_tokens:
        _checks.rows(function, argument, x, _checks.SUM_DTYPES, *tokens_of(plan))
    return plan


def _of_shapes(experts: _Parameters, num_experts: int, hidden: int, intermediate: int) -> _Parameters:
    shapes = (
        [num_experts, hidden, 2 * intermediate],
        [num_experts, intermediate, hidden],
        [num_experts, 2 * intermediate],
        [num_experts, hidden],
    )
    found = zip(experts, shapes, strict=True)
    return _Parameters(*[None if each is None else of_shape(each, shape) for each, shape in found])


def _groups(counts: Any, num_experts: int, rows: Tensor, alignment: int) -> tuple[Any, Any]:
    """`m_sizes` and `expert_offsets` of `grouped_gemm`: rows of padding are between the groups."""
    name, argument, expected = _NAME, "tokens_per_expert", "a list of ints or a 1-D int array or tensor"
    if isinstance(counts, Tensor) or is_graph_value(counts):
        _checks.tensor(name, argument, counts, _checks.ID_DTYPES, [num_experts])
        if is_graph_value(counts) or is_graph_value(rows) or not counts.place.is_cpu_place():
            if alignment == 1:
                return counts, None
            segments = (counts + (alignment - 1)) // alignment * alignment
            ends = paddle.cumsum(segments, dtype=segments.dtype)
            return counts, paddle.concat([ends - segments, ends[-1:]])
        counts = counts.tolist()
    elif counts is None:
        _checks.bad_value(name, "tokens_per_expert or plan", "given", "neither")
    elif isinstance(counts, Plan):
        _checks.bad_type(name, argument, expected, "a Plan, which must be passed by keyword, as plan")
    else:
        counts = _checks.listed(name, argument, counts, expected)
    numbers = []
    for i, count in enumerate(counts):
        plain = type(count) is int and 0 <= count < 2**31
        numbers.append(count if plain else _checks.integer(name, f"{argument}[{i}]", count, 0))
    segments = numbers
    if alignment > 1:
        segments = [-(-number // alignment) * alignment for number in numbers]
    num_rows = rows.shape[0]
    if len(numbers) != num_experts or num_rows not in (-1, sum(segments)):
        expected = f"{num_experts} counts whose segments have {num_rows} rows in all"
        _checks.bad_value(name, argument, expected, numbers)
    return numbers, list(itertools.accumulate(segments, initial=0)) if alignment > 1 else None
