# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The experts: gated MLPs, each for a segment of rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from paddle import Tensor
from paddle.jit import not_to_static

from .. import _checks
from .._activations import ACTIVATIONS
from .._matrices import check_compute, check_deferrable, check_memory_options
from .._options import Activation, ComputeFormat, Keep, MatrixFormat
from ..backends import Float8Matrices, accumulated
from ..expert_parallel.parameters import copy_marks, sharded_state_of_experts
from ..routing import Plan
from ._common import Size, casting_others, described, initial, sizes, weight
from ._counts import without_experts
from ._gradients import PLAIN_GRADIENTS, GradientOptions, gradient_options, gradients_of_call
from ._passes import NAME, Parameters, by_counts, by_plan, check_parameters, combined, combined_codes
from ._quantized import StateOfOneFormat, codes_of, refuse_sharded_state, replace_matrices, values_of


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
        self.activation = _checks.choice(NAME, "activation", activation, ACTIVATIONS)
        _checks.flag(NAME, "bias", bias)
        check_memory_options(NAME, keep, workspace_mb, accumulate, compute, defer_dw)
        check_compute(NAME, compute, activation, bias, keep, defer_dw)
        self.compute = compute
        self.float8_matrices = None if compute is None else Float8Matrices()
        self.matrix_format: MatrixFormat | None = None
        self._name_in_errors = NAME  # the layer that the user called
        options = {"keep": keep, "workspace_mb": Size(workspace_mb), "accumulate": accumulate, "defer_dw": defer_dw}
        self.memory_options: dict[str, Any] = options
        self.num_experts, self.hidden_size, self.intermediate_size = sizes(
            NAME, num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size
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
        _checks.flag(NAME, "combine", combine)
        if is_first_microbatch is not None:
            _checks.flag(self._name_in_errors, "is_first_microbatch", is_first_microbatch)
        if plan is None and probs is not None:
            _checks.bad_value(NAME, "probs", "None without a plan", type(probs).__name__)
        if plan is not None and tokens_per_expert is not None:
            _checks.bad_value(NAME, "tokens_per_expert", "None with a plan", type(tokens_per_expert).__name__)
        if plan is not None and padding_alignment != 1:
            _checks.bad_value(NAME, "padding_alignment", "1 with a plan", padding_alignment)
        if not self._has_experts:
            return without_experts(rows, self.parameters())
        sizes_of = self.num_experts, self.hidden_size, self.intermediate_size
        if combine:
            options = self.memory_options
            if self.matrix_format is not None:
                biases = self.gate_up_bias, self.down_bias
                how = self._name_in_errors, options["keep"], options["workspace_mb"]
                return combined_codes(
                    rows, codes_of(self), self.matrix_format, *biases, sizes_of, self.activation, plan, probs, *how
                )
            experts = Parameters(self.gate_up, self.down, self.gate_up_bias, self.down_bias)
            # Built without `|=` on a dictionary, at which tracing by bytecode stops.
            rest = self.compute, self.float8_matrices, is_first_microbatch, self._name_in_errors, self.training
            return combined(rows, experts, sizes_of, self.activation, plan, probs, *rest, **options)
        parameters, gradients = self._parameters_of_rows("rows", rows)
        if plan is not None:
            return by_plan(rows, parameters, sizes_of, self.activation, plan, probs, "rows", gradients)
        counts = tokens_per_expert, padding_alignment
        return by_counts(rows, parameters, sizes_of, self.activation, *counts, gradients)

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
        return by_plan(x, parameters, sizes_of, self.activation, plan, probs, "x", gradients)

    def _parameters_of_rows(self, argument: str, rows: Tensor) -> tuple[Parameters, GradientOptions]:
        """The parameters for calls that `moe_mlp` does not run, and the options about their gradients."""
        if self.compute is not None:
            _checks.bad_value(NAME, "combine", f"True with compute={self.compute!r}", False)
        is_plain = self.matrix_format is None
        gate_up, down = (self.gate_up, self.down) if is_plain else values_of(self, NAME, argument, rows)
        given = Parameters(gate_up, down, self.gate_up_bias, self.down_bias)
        options = self.memory_options
        if not (options["accumulate"] or options["defer_dw"]):
            return given, PLAIN_GRADIENTS
        how = gradients_of_call(NAME, rows, self.training, **gradient_options(options))
        if how.defer_dw:
            check_deferrable(NAME, rows, how.defer_dw, gate_up=gate_up, down=down)
        if not how.accumulate:
            return given, how
        check_parameters(NAME, given)
        kept = given[:2] if how.defer_dw else ()
        return Parameters(*kept, *(None if each is None else accumulated(each) for each in given[len(kept) :])), how
