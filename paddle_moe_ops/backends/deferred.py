# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Deferred gradients of matrices: backward passes leave dW to `flush_dw`, or to Fleet's zero-bubble schedules.

A deferring call has the parameters as inputs of its node and returns None for their gradients. At the flush a node of
its own passes the gradients to Paddle, so hooks run, and ``grad`` is set or added to as in a backward pass.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.amp.auto_cast import amp_global_state
from paddle.amp.grad_scaler import AmpScaler
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.optimizer import Optimizer

from .._graphs import is_graph_value, to_dtype, without_autocast
from .._native import native
from .accumulation import Destination, destination_of, put
from .autograd import Call, Gradients, inputs_of_partial_gradient, wants_gradient
from .base import Matrices
from .stacking import destination_of_matrices, parts_of

__all__ = [
    "FLEET",
    "Deferral",
    "deferral_of",
    "detached",
    "discard_dw",
    "finished",
    "flush_dw",
    "owned",
    "reducing_wrapper",
    "refuse_pending",
    "wanted_among",
    "why_not_deferred",
]

FLEET = "fleet"  # the mode that follows `WeightGradStore.enabled`
_STORE = "paddle.distributed.fleet.meta_parallel.zero_bubble_utils"
_SHARDING = "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer"
_CLEARING = (  # Fleet's optimizers with a `clear_grad` of their own
    ("paddle.distributed.fleet.utils.mix_precision_utils", "MixPrecisionOptimizer"),
    (_SHARDING, "DygraphShardingOptimizer"),
    (_SHARDING, "DygraphShardingOptimizerV2"),
)

Destinations = tuple[Destination | None, ...]
Compute = Callable[[Destinations], Sequence[Matrices | None]]

_pending: deque[_Pending] = deque()  # for `flush_dw`
_flushing = threading.RLock()  # a flush ends when those of other threads have added the gradients that they took
_in_fleet: weakref.WeakSet[_Pending] = weakref.WeakSet()  # in Fleet's store, which owns them


class Deferral(NamedTuple):
    """The deferral of the gradients of a call's matrices.

    Attributes:
        matrices: parameters of each operand.
        mode: True, or `FLEET`.
        accumulates: whether the gradients go to an `accumulation.Destination`.
        fuses: whether kernels add to the destination.
    """

    matrices: tuple[Matrices, ...]
    mode: bool | str
    accumulates: bool
    fuses: bool

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for each in self.matrices for leaf in _listed(each)]

    def of(self, index: int) -> Deferral | None:
        """The deferral for one operand, whose gradient no kernel adds; None if the operand is frozen."""
        given = self.matrices[index]
        return self._replace(matrices=(given,), fuses=False) if wants_gradient(*_listed(given)) else None


def deferral_of(mode: bool | str, accumulates: bool, *matrices: Matrices) -> Deferral | None:
    """The deferral of a call's gradients, or None if it has none to defer."""
    if not mode or not wants_gradient(*(leaf for each in matrices for leaf in _listed(each))):
        return None
    return Deferral(matrices, mode, accumulates, accumulates)


def detached(given: Matrices) -> Matrices:
    """The values of matrices, without gradients."""
    return given.detach() if isinstance(given, Tensor) else [each.detach() for each in given]


def owned(gradient: Tensor) -> Tensor:
    """A copy of the gradient of a node's output: Paddle's engine may add to that tensor once the node has returned."""
    return gradient.detach().clone()


def why_not_deferred(parameter: Tensor) -> tuple[str, str] | None:
    """Expected and actual parameter, as texts, if its gradient cannot be deferred; otherwise None."""
    if is_graph_value(parameter):
        return "a tensor, outside static graphs, with defer_dw", "a value of a static graph"
    if not parameter.stop_gradient and not parameter.is_leaf:
        return "a leaf, such as a parameter, with defer_dw", "the result of another operator"
    return None


_REDUCING = {  # modules of wrappers that reduce gradients in the backward pass
    "paddle.distributed.parallel": "DataParallel",
    "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2": "GroupShardedStage2",
    "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3": "GroupShardedStage3",
}


def reducing_wrapper(leaves: Iterable[Tensor]) -> str | None:
    """The class whose forward function runs now, and which reduces gradients of the leaves before a flush."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module in _REDUCING and frame.f_code.co_name == "forward":
            name = _REDUCING[module]
            if name != "DataParallel" or _reduces(frame.f_locals["self"], leaves):
                return name
        frame = frame.f_back
    return None


def _reduces(wrapper: paddle.DataParallel, leaves: Iterable[Tensor]) -> bool:
    if wrapper._strategy.nranks < 2 or not wrapper.grad_need_sync:
        return False
    return any(not each.stop_gradient and not getattr(each, "no_sync", False) for each in leaves)


def are_among(inputs: Sequence[Tensor], given: Matrices) -> bool:
    """True if some of these matrices are among the inputs."""
    return any(each is one for each in _listed(given) for one in inputs)


def wanted_among(inputs: Sequence[Tensor] | None, wanted: Sequence[bool], given: Sequence[Matrices]) -> Sequence[bool]:
    """True for matrices whose gradients a pass computes: wanted ones, in `paddle.grad` only those of its inputs."""
    if inputs is None:
        return wanted
    return [want and are_among(inputs, each) for want, each in zip(wanted, given, strict=True)]


def _listed(given: Matrices) -> Sequence[Tensor]:
    return [given] if isinstance(given, Tensor) else given


class _Pending:
    """The gradients of the matrices of one backward pass that are still to be computed.

    Args:
        function: the name that begins an error text.
        deferral: the parameters, and the destination of their gradients.
        wanted: for each operand, whether its gradient is wanted.
        compute: returns the gradients of the operands, None where it added them to a destination. It owns the tensors
            that it reads.
        read: the tensors that it reads.
    """

    def __init__(
        self, function: str, deferral: Deferral, wanted: Sequence[bool], compute: Compute, read: Iterable[Tensor]
    ) -> None:
        self.function, self.deferral, self._wanted = function, deferral, wanted
        self._compute: Compute | None = compute
        self._watched = native.watch(*read)

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each leaf, None where there is none or it was accumulated. Frees what was kept for them."""
        compute, deferral = self._compute, self.deferral
        if compute is None:
            return [None] * len(deferral.leaves)
        if native.was_changed(self._watched):
            raise RuntimeError(
                f"{self.function}: a tensor that deferred gradients need was changed in place before flush_dw; with "
                f"defer_dw={self.deferral.mode!r} tokens and plans must stay as they are until then"
            )
        destinations = tuple(
            destination_of_matrices(each) if want and deferral.fuses else None
            for want, each in zip(self._wanted, deferral.matrices, strict=True)
        )
        with paddle.no_grad(), without_autocast():
            made = compute(destinations)
            self._compute = None
            results: list[Tensor | None] = []
            for want, given, gradient in zip(self._wanted, deferral.matrices, made, strict=True):
                gradient = gradient if want else None
                results += _accumulated(given, gradient) if deferral.accumulates else _of_leaves(given, gradient)
        return results

    def __call__(self) -> None:
        """Compute the gradients and pass them to Paddle, once; Fleet's store calls this."""
        made = zip(self.deferral.leaves, self.gradients(), strict=True)
        pairs = [(leaf, each) for leaf, each in made if each is not None and not leaf.stop_gradient]
        if pairs:
            leaves, gradients = zip(*pairs, strict=True)
            with paddle.enable_grad():
                _Delivered.apply(lambda: gradients, *leaves).backward()
            _master_gradients(leaves)

    def concerns(self, parameters: set[int]) -> bool:
        return self._compute is not None and any(id(each) in parameters for each in self.deferral.leaves)


def _of_leaves(given: Matrices, gradient: Matrices | None) -> list[Tensor | None]:
    """The gradient of each parameter of an operand, in its dtype. A tensor of all matrices may have a list of them."""
    if gradient is None:
        return [None] * len(_listed(given))
    if isinstance(given, Tensor):
        return [to_dtype(gradient if isinstance(gradient, Tensor) else paddle.stack(gradient), given.dtype)]
    parts = parts_of(gradient) if isinstance(gradient, Tensor) else gradient
    return [to_dtype(part, leaf.dtype) for leaf, part in zip(given, parts, strict=True)]


def _accumulated(given: Matrices, gradient: Matrices | None) -> list[Tensor | None]:
    """As `_of_leaves`, after gradients with a destination were added to it."""
    if gradient is not None and isinstance(given, Tensor) and not isinstance(gradient, Tensor):
        whole = destination_of(given)
        if whole is None:
            return _of_leaves(given, gradient)
        for number, each in enumerate(gradient):
            put(Destination(whole.tensor[number], whole.adds), to_dtype(each, given.dtype))
        return [None]
    results: list[Tensor | None] = []
    for leaf, each in zip(_listed(given), _of_leaves(given, gradient), strict=True):
        destination = None if each is None or leaf.stop_gradient else destination_of(leaf)
        if destination is not None:
            put(destination, each)
        results.append(each if destination is None else None)
    return results


def _master_gradients(leaves: Sequence[Tensor]) -> None:
    """Cast gradients to float32 as Paddle does after a backward pass with ``master_grad`` of `paddle.amp.decorate`."""
    state = amp_global_state()
    if state.use_master_grad:
        ids = {id(each) for each in state.model_parameters}
        core.eager.set_master_grads([leaf for leaf in leaves if id(leaf) in ids])


class _Delivered(PyLayer):
    """A node whose backward pass returns gradients that are known before."""

    @staticmethod
    def forward(ctx: Any, gradients: Callable[[], tuple[Tensor, ...]], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return paddle.zeros([1])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return ctx.gradients()  # Paddle would take a tuple of tensors for inputs


def finished(
    call: Call,
    deferral: Deferral,
    gradients: Gradients,
    wanted: Sequence[bool],
    compute: Compute,
    read: Iterable[Tensor],
) -> Gradients:
    """End the backward pass of a node whose inputs are those of ``gradients``, then the leaves; defer the latter's.

    Args:
        call: the call of the node.
        deferral: of the call.
        gradients: of the inputs before the leaves.
        wanted: see `_Pending`.
        compute: see `_Pending`.
        read: see `_Pending`.

    Returns:
        the gradients of all inputs; None for those that wait.
    """
    if paddle.is_grad_enabled():
        raise RuntimeError(f"{call.function}: create_graph=True is not supported with defer_dw={deferral.mode!r}")
    inputs = inputs_of_partial_gradient()
    wanted = wanted_among(inputs, wanted, deferral.matrices)
    pending = _Pending(call.function, deferral, wanted, compute, read)
    store = getattr(sys.modules.get(_STORE), "WeightGradStore", None)
    in_fleet = store is not None and store.enabled
    made: list[Tensor | None] = [None] * len(deferral.leaves)
    if deferral.mode == FLEET and not in_fleet:
        made = pending.gradients()
        if inputs is not None:  # Paddle refuses others
            pairs = zip(made, deferral.leaves, strict=True)
            made = [each if are_among(inputs, leaf) else None for each, leaf in pairs]
    elif inputs is not None:  # whose gradients alone are wanted
        if are_among(inputs, deferral.leaves):
            raise RuntimeError(
                f"{call.function}: paddle.grad of matrices is not supported with defer_dw={deferral.mode!r}, which "
                "computes their gradients after the backward pass; use backward() and flush_dw()"
            )
    else:
        _guard_optimizers()
        if store is not None and in_fleet:
            store.put(pending)
            _in_fleet.add(pending)
        else:
            _pending.append(pending)
    call.added = frozenset(number for number, each in enumerate(made, len(gradients)) if each is None)
    return (*gradients, *made)


def flush_dw() -> int:
    """Compute the gradients that calls with ``defer_dw=True`` have left out of their backward passes, and add them.

    Gradients are computed in the order of the backward passes and added to ``grad``, or with ``accumulate=True`` to
    ``main_grad``, with the bits that the backward pass would have computed. Hooks on the gradients of parameters run
    now. Without pending gradients it does nothing. The memory that was kept for a gradient is freed when it is
    computed.

    Call it before an optimizer's ``step`` or ``clear_grad`` and before unscaling by a ``GradScaler``, which raise while
    gradients of their parameters wait, and before other functions that read gradients. Gradients in Fleet's
    ``WeightGradStore`` are computed by its ``pop``, not here. A call flushes the backward passes of all threads; if
    another thread flushes, it waits until that has ended.

    Not differentiable. Deterministic. Host synchronisation as in the backward pass.

    Returns:
        the number of backward passes of layers, or of their GEMMs, whose gradients were added.

    Raises:
        RuntimeError: tokens or a plan were changed in place since the forward pass. Gradients of that pass and of later
            ones stay pending, and nothing was added for them.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import flush_dw, moe_mlp, route
        >>> x, plan = paddle.randn([16, 64]), route(paddle.randint(0, 8, [16, 1]), num_experts=8)
        >>> gate_up, down = (paddle.create_parameter(s, "float32") for s in ([8, 64, 96], [8, 48, 64]))
        >>> moe_mlp(x, plan, None, gate_up, down, defer_dw=True).square().mean().backward()
        >>> gate_up.grad is None
        True
        >>> flush_dw()
        1
        >>> gate_up.grad.shape
        [8, 64, 96]
    """
    count = 0
    with _flushing:
        while _pending:
            pending = _pending.popleft()
            try:
                pending()
            except BaseException:
                if pending._compute is not None:
                    _pending.appendleft(pending)
                raise
            count += 1
    return count


def discard_dw() -> int:
    """Drop the gradients that wait for `flush_dw`, and free their memory: after a backward pass that failed, say.

    It drops those of all threads. Gradients in Fleet's ``WeightGradStore`` are dropped by its ``clear``. Not
    differentiable. No host synchronisation.

    Returns:
        the number of backward passes of layers, or of their GEMMs, whose gradients were dropped.

    Examples:
        >>> from paddle_moe_ops import discard_dw
        >>> discard_dw()
        0
    """
    with _flushing:
        count = len(_pending)
        _pending.clear()
    return count


def refuse_pending(function: str, parameters: Iterable[Any]) -> None:
    """Raise a RuntimeError if gradients of some of the parameters are still deferred."""
    if not _pending and not _in_fleet:
        return
    groups = [each["params"] if isinstance(each, dict) else [each] for each in parameters]
    ids = {id(parameter) for group in groups for parameter in group}
    for waiting, instead in ((_pending, "flush_dw()"), (_in_fleet, "WeightGradStore.pop()")):
        count = sum(each.concerns(ids) for each in waiting)
        if count:
            raise RuntimeError(
                f"{function}: gradients of {count} backward passes with defer_dw are still to be computed; call "
                f"{instead} before, or discard_dw() to drop those that flush_dw() would compute"
            )


@functools.cache
def _guard_optimizers() -> None:
    """From now on let Paddle's optimizers and scalers raise if gradients of their parameters are deferred."""
    _guard(Optimizer, "_apply_optimize", "optimizer.step", lambda optimizer, *_: optimizer)
    _guard(AmpScaler, "_unscale", "GradScaler", lambda _, optimizer: optimizer)
    of_fleet = (getattr(sys.modules.get(module), name, None) for module, name in _CLEARING)
    for owner in (Optimizer, *(each for each in of_fleet if each is not None)):
        _guard(owner, "clear_grad", "optimizer.clear_grad", lambda optimizer, *_: optimizer)


def _guard(owner: type, method: str, function: str, optimizer_of: Callable[..., Any]) -> None:
    """Let a method raise if gradients of the optimizer's parameters are deferred."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        refuse_pending(function, getattr(optimizer_of(self, *arguments), "_parameter_list", None) or ())
        return original(self, *arguments, **keywords)

    del call.__wrapped__  # as in `changes`
    setattr(owner, method, call)
