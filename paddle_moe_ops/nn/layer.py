# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The whole mixture-of-experts block."""

from __future__ import annotations

import inspect
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import paddle
from paddle import Tensor, nn
from paddle.jit import not_to_static
from paddle.jit.sot.psdb import in_sot

from .. import _checks
from .._activations import swiglu
from .._graphs import (
    GraphValue,
    filled,
    in_float32,
    is_graph_value,
    known_sizes,
    of_shape,
    public,
    ready_for_matmul,
)
from .._options import MatrixFormat
from ..backends import RouteSpec
from ..backends.quantized import FLOAT8_FORMAT
from ..expert_parallel.agreement import group_of, raising_together
from ..expert_parallel.alltoall import check_travel
from ..expert_parallel.dispatch import ExpertParallel, parallel_of_agreed, telling_of_errors
from ..expert_parallel.parameters import mark_expert_parameters, start_as_one
from ..expert_parallel.placement import placement_of
from ..expert_parallel.protocol import transport_option
from ..routing import Plan, planned
from ._common import described, misnamed, sizes, warn_user, weight
from ._counts import keep_first
from ._quantized import StateOfOneFormat
from .config import MoEConfig, config_of, options_of, with_group
from .experts import SwiGLUExperts
from .losses import loss_of_load, normalised, router_z_loss
from .router import TopKRouter, capacity_of

if TYPE_CHECKING:
    from .config import ConfigAndGroup, taking

_NAME = "MoELayer"


class SwiGLU(nn.Layer):
    """Gated MLP ``(silu(x W_gate) * x W_up) W_down`` without biases; as a shared expert it sees every token.

    Deterministic as far as Paddle's matmul is. No host synchronisation.

    Args:
        hidden_size: H.
        intermediate_size: I.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size below 1.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import SwiGLU
        >>> SwiGLU(64, 32)(paddle.randn([2, 8, 64])).shape
        [2, 8, 64]
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = sizes(
            "SwiGLU", hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        self.gate_up = weight(self, [self.hidden_size, 2 * self.intermediate_size], fan_in=self.hidden_size)
        self.down = weight(self, [self.intermediate_size, self.hidden_size], fan_in=self.intermediate_size)

    @not_to_static
    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to x [..., H]; the result has the same shape and dtype. Differentiable in x and the weights.

        Raises:
            TypeError: x is not a tensor of the weights' dtype.
            ValueError: the last dimension of x is not H.
        """
        return _swiglu_mlp(x, self.gate_up, self.down, self.hidden_size, self.intermediate_size)

    def extra_repr(self) -> str:
        """Return what ``print(layer)`` says of it."""
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        return described(self.gate_up, **sizes)


class MoELayer(StateOfOneFormat):
    """Mixture-of-experts block: router, permute, experts, weighted unpermute, plus shared experts.

    Deterministic. If kernels run the GEMMs (see `moe_mlp`), a forward pass has no host synchronisation; with a group it
    synchronises as `expert_parallel.ExpertParallel` does.

    Args:
        arguments: a `MoEConfig`, or its positional arguments.
        group: ranks that share the experts, a group of `paddle.distributed`; every rank constructs the layer, with the
            same arguments. The router and the shared experts are the same on all ranks, from the start. A rank has the
            experts that ``placement`` names, and tokens of its own; ``capacity_factor`` counts those. Only dygraph.
            Gradients: see `expert_parallel.average_gradients`. None: this process has all experts.
        options: the keyword arguments of a `MoEConfig`.

    The last forward pass sets these attributes; a copy of the layer starts without them. After a pass under
    paddle.jit.to_static they can be read inside the traced function, and with ``full_graph=True`` only inside it. Read
    the losses under ``recompute(..., use_reentrant=True)`` inside the recomputed function: outside they have no
    gradient.

    Attributes:
        config: the options.
        tokens_per_expert: load for ``router.update_correction_bias``, dropped slots included: E ints, or on a GPU and
            in graphs an int32 tensor [E]. With a group those of this rank's tokens. `ExpertLoad` adds up
            micro-batches and ranks.
        dropped_slots: slots dropped for the capacity or for ``tokens_per_rank``, a 0-D int32 tensor; 0 without either.
            With a group those of this rank's tokens.
        aux_loss: `load_balance_loss` of the router's scores, which are divided by their sum over the experts if the
            scoring is ``"sigmoid"``; None before the first pass. It is computed when it is read. With a group it is
            that of this rank's tokens. Tokens that a mask leaves out do not count.
        z_loss: `router_z_loss` of the router's logits; None before the first pass. It is computed when it is read.
            Tokens that a mask leaves out do not count.

    Raises:
        TypeError: a size is not an int, a flag is not a bool, or a factor is not a number.
        ValueError: a size out of range (see TopKRouter, SwiGLUExperts) or num_shared_experts below 0; ``compute`` with
            a group whose rows come back one by one; ``keep="h_fp8"`` without ``compute``, or with biases or another
            activation; ``defer_dw`` with ``compute`` and these.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import MoELayer
        >>> layer = MoELayer(64, 32, num_experts=8, topk=2, scoring="sigmoid", scaling_factor=2.5)
        >>> out = layer(paddle.randn([2, 8, 64]))
        >>> (out.square().mean() + 1e-3 * layer.aux_loss).backward()
        >>> layer.router.update_correction_bias(layer.tokens_per_expert)
        >>> out.shape, sum(layer.tokens_per_expert)
        ([2, 8, 64], 32)
    """

    _load_count: Any = None  # the LoadCount of an `ExpertLoad`

    if TYPE_CHECKING:

        @overload
        def __init__(self, config: MoEConfig, /, *, group: Any = None) -> None: ...
        @overload
        @taking(ConfigAndGroup)
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

    @misnamed(top_k="topk")
    def __init__(self, *arguments: Any, group: Any = None, **options: Any) -> None:
        super().__init__()
        self.config = config = config_of(*arguments, **options)
        travels = options_of(config, ExpertParallel)
        if group is None:
            travels.pop("placement")
            if config.placement is not None:
                _checks.bad_value(_NAME, "placement", "None without a group", "one")
            if config.transport == "peer" and config.tokens_per_rank is None:
                _checks.bad_value(_NAME, "group", 'given with transport="peer"', None)
            check_travel(_NAME, **travels)
        else:
            group = group_of(_NAME, group)
        settings = {**vars(config), "the default dtype": paddle.get_default_dtype()}
        settings["transport"] = transport_option(config.transport)
        with nullcontext() if group is None else raising_together(_NAME, group, settings):
            _checks.flag(_NAME, "expert_bias", config.expert_bias)
            num_shared_experts = _checks.integer(_NAME, "num_shared_experts", config.num_shared_experts, 0)
            hidden_size, inner, num_experts = config.hidden_size, config.intermediate_size, config.num_experts
            with _checks.renaming("TopKRouter", _NAME):
                self.router = TopKRouter(hidden_size, num_experts, config.topk, **options_of(config, TopKRouter))
            self.hidden_size = self.router.hidden_size
            placement = None
            if group is not None:
                placement = placement_of(_NAME, config.placement, self.router.num_experts, group.nranks)
            own_experts = num_experts if placement is None else placement.slots_per_rank
            with _checks.renaming("SwiGLUExperts", _NAME):
                sizes = own_experts, hidden_size, inner
                self.experts = SwiGLUExperts(*sizes, bias=config.expert_bias, **options_of(config, SwiGLUExperts))
            self.experts._name_in_errors = _NAME
            self.shared = SwiGLU(hidden_size, num_shared_experts * inner) if num_shared_experts else None
        self.parallel: ExpertParallel | None = None
        if group is not None:
            if config.compute is not None and config.combine != "reduced":
                _checks.bad_value(_NAME, "compute", 'None with combine="exact" between ranks', repr(config.compute))
            with _checks.renaming("ExpertParallel", _NAME):
                self.parallel = parallel_of_agreed(num_experts, group, **travels)
            self.experts.draw_those_of(self.parallel.group.rank, self.parallel.group.nranks)
            start_as_one((self.router, self.shared), self.parallel.group)
            keep_first(self.experts.parameters(), self.parallel.num_local_experts)
            self.experts.experts_moved()
            mark_expert_parameters(self.experts, group=self.parallel.group, placement=self.parallel.placement)
        # Load, dropped slots, scores, logits and mask. A tuple, since Paddle turns attributes that are tensors into
        # buffers.
        self._last: tuple[Any, ...] | _Traced | None = None

    @property
    def tokens_per_expert(self) -> list[int] | Tensor | None:
        if self._last is None:
            return [0] * self.router.num_experts
        last = self._last_pass()
        if last is None:
            return None
        load = last[0]
        return load if is_graph_value(load) or not load.place.is_cpu_place() else load.tolist()

    @property
    def dropped_slots(self) -> Tensor | None:
        if self._last is None or not self._may_drop():
            return filled([], 0, "int32", like=self.router.weight)
        last = self._last_pass()
        return None if last is None else last[1]

    @property
    def aux_loss(self) -> Tensor | None:
        last = self._last_pass()
        if last is None:
            return None
        self._warn_of_lost_graph("aux_loss", last)
        return self._balance(*last)

    @property
    def z_loss(self) -> Tensor | None:
        last = self._last_pass()
        if last is None:
            return None
        self._warn_of_lost_graph("z_loss", last)
        return router_z_loss(last[3], last[4])

    def _balance(self, load: Tensor, dropped: Tensor, scores: Tensor, logits: Tensor, mask: Tensor | None) -> Tensor:
        return loss_of_load(normalised(scores, logits, self.router.scoring == "sigmoid"), load, mask)

    def _warn_of_lost_graph(self, name: str, last: tuple[Any, ...]) -> None:
        """Warn if a loss is read to train the router, but its forward pass has recorded no graph."""
        logits = last[3]
        if not logits.stop_gradient or not (self.training and paddle.is_grad_enabled()):
            return
        if not self.router.weight.stop_gradient:
            warn_user(
                f"MoELayer: {name} has no gradient, since the pass it belongs to recorded none; under "
                "recompute(..., use_reentrant=True) read it inside the recomputed function, or use use_reentrant=False"
            )

    @not_to_static
    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, mask: Tensor | None = None) -> Tensor:
        """Run the block.

        Args:
            x: [T, H] or [B, S, H], dtype of the weights.
            is_first_microbatch: with ``compute``, whether the weights have changed since the last call, see
                `SwiGLUExperts`; TransformerEngine's layers have this argument as well.
            mask: bool [T] or [B, S], False for tokens that go to no expert, such as padding. They count in no load,
                capacity or loss, and get the output of the shared experts, or zeros. None: all tokens are routed. With
                a group and a capacity the host waits for their number.

        Returns:
            a tensor of the shape and dtype of x, differentiable in x and all weights.

        Raises:
            TypeError: x is not a tensor of the weights' dtype (under mixed precision, of bfloat16, float16 or float32).
            ValueError: x has another shape; ``is_first_microbatch=False`` in the first call, or either of its values in
                a static graph with ``compute``.
            RuntimeError: with a group, the layer was closed, or `expert_parallel.ExpertParallel.dispatch` raised.
        """
        if self.parallel is None:
            tokens, kept, ids, probs, scores, logits = self._routed(x, mask)
            plan = _plan(tokens, ids, kept, self.router.num_experts, self.router.capacity_factor)
            out = self.experts(tokens, plan=plan, probs=probs, combine=True, is_first_microbatch=is_first_microbatch)
            load, dropped = plan.routed_per_expert, plan.overflow
            shared = None if self.shared is None else self.shared(tokens)
        else:
            with telling_of_errors(self.parallel):
                tokens, kept, ids, probs, scores, logits = self._routed(x, mask)
            count = ids.shape[0]
            if kept is not None and self.router.capacity_factor is not None:
                count = int(kept.sum())
            capacity = capacity_of(count, ids.shape[1], self.router.num_experts, self.router.capacity_factor)
            given = tokens, ids, probs, capacity, is_first_microbatch
            out, shared, load, dropped = _over_ranks(self.parallel, self.experts, self.shared, *given)
        if self._load_count is not None:
            self._load_count.count(load, logits, self.training)
        last = load, dropped, scores, logits, kept
        self._last = _Traced(last) if isinstance(load, GraphValue) else last
        if in_sot():  # tracing reads a property of the actual layer, which describes the previous pass
            self.tokens_per_expert = load  # type: ignore[misc]
            self.dropped_slots = dropped  # type: ignore[misc]
            self.aux_loss = self._balance(*last)  # type: ignore[misc]
            self.z_loss = router_z_loss(logits, kept)  # type: ignore[misc]
        return _result(out, shared, x)

    def experts_moved(self) -> None:
        """Adopt the placement of the experts, for `expert_parallel.move_experts`."""
        if self.parallel is not None:
            self.config = replace(self.config, placement=self.parallel.placement)

    def close(self) -> None:
        """Free the memory that the ranks of the group share once nothing else uses it; parameters stay.

        Later forward passes raise; backward passes of earlier ones work. See `expert_parallel.ExpertParallel.close`.
        Without a group this does nothing.

        Examples:
            >>> import paddle
            >>> from paddle_moe_ops.nn import MoELayer
            >>> layer = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
            >>> loss = layer(paddle.randn([16, 64])).square().mean()
            >>> layer.close()
            >>> loss.backward()
        """
        if self.parallel is not None:
            self.parallel.close()

    def quantize_experts(self, format: MatrixFormat) -> MoELayer:
        """Replace the experts' weights by codes and scales, in place, to serve them; see `SwiGLUExperts.quantize`.

        The router and the shared experts stay as they are.

        Args:
            format: a format of `QuantizedMatrices`.

        Returns:
            this layer.

        Raises:
            ValueError: as `SwiGLUExperts.quantize`; "fp8_128x128" with a group whose rows come back one by one.

        Examples:
            >>> import paddle
            >>> from paddle_moe_ops.nn import MoELayer
            >>> layer = MoELayer(64, 32, num_experts=8, topk=2).quantize_experts("int4")
            >>> layer(paddle.randn([3, 64])).shape
            [3, 64]
        """
        if format == FLOAT8_FORMAT and self.parallel is not None and self.config.combine != "reduced":
            _checks.bad_value(_NAME, "format", 'one of integer codes with combine="exact" between ranks', repr(format))
        self.experts.quantize(format)
        return self

    def _routed(self, x: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
        """The tokens [T, H], their mask [T], and the router's output."""
        weights = self.experts.stored
        if self.experts.matrix_format is not None and self.shared is not None:
            weights = self.shared.gate_up  # codes go with tokens of any dtype
        tokens = _tokens(x, weights, self.hidden_size)
        kept = None if mask is None else _mask(mask, x)
        return tokens, kept, *self.router(tokens, kept)

    def extra_repr(self) -> str:
        """Return what ``print(layer)`` says of it."""
        options = self.config._changed()
        if self.parallel is not None:
            group = self.parallel.group
            options |= {"rank": f"{group.rank} of {group.nranks}", "layer": self.parallel._layer}
        return ", ".join(f"{name}={value}" for name, value in options.items())

    def _may_drop(self) -> bool:
        """True if a capacity, or the room for the tokens of a rank, may limit the number of slots."""
        return self.router.capacity_factor is not None or self.parallel is not None

    def _last_pass(self) -> tuple[Any, ...] | None:
        """The values of the last forward pass, unless it belongs to a finished program."""
        return self._last.values_in_graph() if isinstance(self._last, _Traced) else self._last

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _LEFT_BY_FORWARD:  # a traced pass assigns to these the values that they return anyway
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last": None, "_load_count": None}


MoELayer.__signature__ = with_group(inspect.signature(MoEConfig))
_LEFT_BY_FORWARD = frozenset(("tokens_per_expert", "dropped_slots", "aux_loss", "z_loss"))


class _Traced:
    """The values of a pass in a program, which must not be used once the program is built."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values, self._program = values, weakref.ref(paddle.static.default_main_program())

    def values_in_graph(self) -> tuple[Any, ...] | None:
        """The values if their program is being built, else None."""
        return self._values if self._program() is paddle.static.default_main_program() else None


@public("out", "shared", "x", owner=_NAME)
def _result(out: Tensor, shared: Tensor | None, x: Tensor) -> Tensor:
    """The sum of the rows [T, H] of all experts in the shape of x, [T, H] or [B, S, H]."""
    if shared is not None:
        out = in_float32(paddle.add, out, shared)
    if x.ndim > 2:
        out = out.reshape(known_sizes(x))
    return _checks.of_its_shape(_NAME, out)


@public("x", "weights", owner=_NAME, called={"weights": "the weight"})
def _tokens(x: Tensor, weights: Tensor, hidden: int) -> Tensor:
    """The tokens [T, H] of [T, H] or [B, S, H]."""
    rank = getattr(x, "ndim", 2)
    if rank not in (2, 3) or (isinstance(x, (Tensor, GraphValue)) and x.shape[-1] not in (hidden, -1)):
        _checks.bad_value(_NAME, "x", f"of shape [T, {hidden}] or [B, S, {hidden}]", list(x.shape))
    _checks.operand(_NAME, "x", x, weights, (*("B", "S")[3 - rank :], hidden))
    if x.shape[-1] < 0:  # traced by bytecode after inputs of another rank; fails to run if the width is another
        x = x.reshape([*(paddle.shape(x)[axis] for axis in range(rank - 1)), hidden])
    return x if rank == 2 else x.reshape([-1, hidden])


@public(owner=_NAME)
def _mask(mask: Tensor, x: Tensor) -> Tensor:
    """A mask [T] of tokens [T, H] or [B, S, H]."""
    _checks.tensor(_NAME, "mask", mask, (paddle.bool,), x.shape[:-1])
    return mask if mask.ndim == 1 else mask.reshape([-1])


def _over_ranks(
    parallel: ExpertParallel,
    experts: SwiGLUExperts,
    shared: nn.Layer | None,
    tokens: Tensor,
    ids: Tensor,
    probs: Tensor,
    capacity: int | None,
    is_first_microbatch: bool | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Outputs of experts over all ranks and of shared ones, the experts' load and the number of dropped slots.

    In both passes the shared experts overlap the exchange of combine, if the transport has a stream of its own. With
    "exact" they don't: the three gradients of the tokens would be added in another order.
    """
    overlaps = shared is not None and parallel.combines == "reduced" and parallel._overlaps(tokens)
    try:
        received = parallel.dispatch(tokens, ids, probs, capacity=capacity)
    except (TypeError, ValueError) as error:
        raise _checks.renamed(error, "ExpertParallel.dispatch", "MoELayer") from None
    if received.rows is not None:
        out = experts(received.rows, received.tokens_per_expert)
    else:
        options = {"combine": True, "is_first_microbatch": is_first_microbatch}
        out = experts(received.tokens, plan=received.plan, probs=received.probs, **options)
    if shared is not None and overlaps:
        handle = parallel.combine(out, received, async_op=True)
        out_of_shared = shared(handle.overlapped(tokens))
        out = handle.wait()
    else:
        out = parallel.combine(out, received)
        out_of_shared = None if shared is None else shared(tokens)
    return out, out_of_shared, received.routed_per_expert, received.dropped_slots.reshape([])


@public("tokens", owner=_NAME, called={"tokens": "x"})
def _plan(tokens: Tensor, ids: Tensor, mask: Tensor | None, num_experts: int, capacity_factor: float | None) -> Plan:
    """The row of each slot.

    On a GPU the rows are in a buffer with room for all slots, so the host need not read their number.
    """
    num_tokens, topk = ids.shape
    stays_here = isinstance(ids, GraphValue) or ids.place.is_cpu_place()
    buffer_size = -1 if stays_here else num_tokens * topk
    capacity = None
    if capacity_factor is not None:
        count = num_tokens if num_tokens >= 0 else paddle.shape(ids)[0]
        if mask is not None:
            count = mask.astype("int64").sum()
        capacity = capacity_of(count, topk, num_experts, capacity_factor)
    validation = _checks.validation(_NAME, None, ids)
    return planned(ids, None, None, capacity, RouteSpec(num_experts, -1, 1, None, buffer_size, "first", validation))


@public("x", "gate_up", "down", owner="SwiGLU")
def _swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, hidden: int, intermediate: int) -> Tensor:
    gate_up, down = of_shape(gate_up, [hidden, 2 * intermediate]), of_shape(down, [intermediate, hidden])
    rank = max(getattr(x, "ndim", 1), 1)
    _checks.operand("SwiGLU", "x", x, gate_up, [*["size"] * (rank - 1), hidden], f"[..., {hidden}]")
    return in_float32(_multiply_twice, x, gate_up, down)


def _multiply_twice(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    hidden = swiglu(paddle.matmul(ready_for_matmul(x, gate_up), gate_up))
    return paddle.matmul(hidden if is_graph_value(hidden) else ready_for_matmul(hidden, down), down)
