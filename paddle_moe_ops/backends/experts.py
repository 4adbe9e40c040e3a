# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""GEMMs and layers of experts as autograd nodes, and a cache of float8 matrices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import paddle
from paddle import Tensor

from .._graphs import dense
from .autograd import Call, Gradients, connect, first_order_only, inputs_of_partial_gradient, wants_gradient
from .base import (
    Backend,
    GemmSpec,
    Kernels,
    Matrices,
    MlpSpec,
    QuantizeSpec,
    Tensors,
    Validation,
    maps_of_layer,
)
from .changes import Watched, changes_of, count_changes, samples_of
from .deferred import finished, owned, wanted_among
from .stacking import alias_of, destination_of_matrices, stack_or_view

__all__ = [
    "Float8Matrices",
    "GroupedGemm",
    "MoeMlp",
    "check_unchanged",
    "connect_experts",
    "connected_mlp",
    "holds_others",
    "is_default",
    "keep_by_default",
    "made_by",
    "make_default",
    "replaced_by",
]

_KEPT = "keeps_float8_matrices"  # an attribute of parameters


class Float8Matrices:
    """A cache of a layer's matrices in float8: `moe_mlp` calls with the same matrices quantise them once.

    The first call with an empty cache quantises both matrices and stores them in the forms that its passes read. They
    occupy 2 bytes per element, or 1 if no gradient is required or Paddle's matmul multiplies. If a later call requires
    a gradient, it transposes the codes of the forward pass. Later calls and their backward passes read the
    cache until the matrices change: then the next call quantises them again. `nn.keep_float8_matrices` lists the
    changes that are noticed; call `clear` after any other one.

    Each layer needs its own cache, and matrices that stay in the same memory: parameters, not tensors that are cast or
    stacked for each call. Calls with other matrices raise until `clear`. A backward pass reads the matrices of its
    forward pass, even if they have changed or the cache was cleared in between. Results are bitwise equal to those of
    calls without a cache. A copied or unpickled cache is empty.

    Attributes:
        is_empty: whether the next call quantises its matrices.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import Float8Matrices, moe_mlp, route
        >>> gate_up, down = (paddle.create_parameter(s, "float32") for s in ([8, 128, 256], [8, 128, 128]))
        >>> optimizer, kept = paddle.optimizer.SGD(parameters=[gate_up, down]), Float8Matrices()
        >>> options = {"compute": "fp8_1x128", "float8_matrices": kept}
        >>> for _ in range(2):  # micro-batches of one step
        ...     plan = route(paddle.randint(0, 8, [16, 1]), num_experts=8)
        ...     moe_mlp(paddle.randn([16, 128]), plan, None, gate_up, down, **options).mean().backward()
        >>> optimizer.step()
        >>> optimizer.clear_grad()
    """

    def __init__(self) -> None:
        self._of: Any = None  # aliases of the matrices, which keep their memory allocated, and facts about them
        self._made: Any = None
        self._is_default = False
        self._changes: tuple[int, ...] | None = None  # `changes_of` the matrices
        self._watched = Watched()
        self._samples: list[bytes] | None = None
        self._device_samples: Any = None  # a `samples.DeviceSamples`
        self._has_device_samples = False  # of the matrices
        self._lock = threading.RLock()  # calls of several threads may share a cache

    @property
    def is_empty(self) -> bool:
        return self._made is None

    def clear(self) -> None:
        """Empty the cache; its memory is freed when no backward pass needs it."""
        with self._lock:
            self._of = self._made = self._samples = None
            self._has_device_samples = False
            if self._has_found_change():
                self._device_samples = None

    def _has_found_change(self) -> bool:
        return self._device_samples is not None and self._device_samples.have_changed()

    def __repr__(self) -> str:
        with self._lock:
            return f"Float8Matrices({'empty' if self.is_empty else f'of {len(self._of[0])} tensors'})"

    def __reduce__(self) -> tuple[type, tuple]:
        return Float8Matrices, ()


def make_default(kept: Float8Matrices) -> None:
    """Clear a layer's cache and use it by default from the next call on; see `nn.keep_float8_matrices`."""
    kept.clear()
    kept._is_default = True


def keep_by_default(parameters: Iterable[Tensor]) -> None:
    """Let layers of these parameters use their caches by default."""
    for each in parameters:
        setattr(each, _KEPT, True)


def is_default(kept: Float8Matrices | None, matrices: Matrices | None = None) -> bool:
    """True if calls use the cache by default.

    Args:
        kept: the cache of a layer.
        matrices: of the layer; if `keep_by_default` was called for them, the cache becomes a default one.
    """
    if kept is None or kept._is_default:
        return kept is not None
    if matrices is not None and hasattr(_listed(matrices)[0], _KEPT):
        make_default(kept)
    return kept._is_default


def holds_others(kept: Float8Matrices, gate_up: Matrices, down: Matrices, transpose: bool) -> bool:
    """True if the cache contains other matrices. An empty one records these for `made_by`."""
    if kept._has_found_change():
        _raise_changed()
    count_changes()
    casts_to = paddle.amp.get_autocast_dtype() if paddle.amp.is_autocast_enabled() else None
    facts = transpose, casts_to, _facts_of(gate_up), _facts_of(down)
    with kept._lock:
        changes = changes_of(*_listed(gate_up), *_listed(down))
        has_moved = kept._of is not None and facts != kept._of[1]
        if kept._is_default if has_moved else changes != kept._changes:
            kept.clear()
        if kept._made is None:
            # Aliases, because a parameter may move to other memory.
            kept._changes, kept._of = changes, ([alias_of(each) for each in (*_listed(gate_up), *_listed(down))], facts)
            kept._watched.watch([*_listed(gate_up), *_listed(down)])
        return facts != kept._of[1]


def made_by(kept: Float8Matrices, name: str, make: Callable[[], Any]) -> Any:
    """Return the cached matrices of the backend ``name``; if there are none, ``make`` computes them first.

    If another thread has cleared the cache in between, it has found a change, and these matrices are not cached.
    """
    with kept._lock:
        of, found = kept._of, kept._made
    if found is not None and found[0] == name:
        return found[1]
    made = make()
    with kept._lock:
        if of is not None and kept._of is of:
            kept._made = name, made
    return made


def check_unchanged(
    kept: Float8Matrices, kernels: Any, gate_up: Tensor, down: Tensor, made: Any, validation: Validation
) -> None:
    """Check that the matrices have not changed since the first of these calls after `made_by`, unnoticed by the cache.

    Under validation a change raises. Otherwise the device compares: results of the call become NaN, and the next call
    after the comparison raises.

    Args:
        kept: the cache.
        kernels: their ``new_samples`` returns a `samples.DeviceSamples`, or None if they compare nothing.
        gate_up: the first matrices.
        down: the second ones.
        made: the cached result of `made_by`, in which codes and scales of both come first.
        validation: whether to compare on the host.
    """
    with kept._lock:
        if kept._made is None or kept._made[1] is not made:  # another thread has changed the cache
            return
        if validation != Validation.OFF:
            samples = samples_of((gate_up, down))
            if kept._samples is None:
                kept._samples = samples
            elif samples != kept._samples:
                _raise_changed()
            return
        if kept._device_samples is None:
            kept._device_samples = kernels.new_samples(gate_up)
        if kept._device_samples is None or len(made) < 4:  # kernels that compare nothing keep no codes
            return
        if kept._has_device_samples:
            kept._device_samples.compare((gate_up, down), (made[1], made[3]))
        else:
            kept._device_samples.take(gate_up, down)
            kept._has_device_samples = True


def _raise_changed() -> NoReturn:
    expected = "changed by calls that a Float8Matrices notices, or cleared from it, or given to keep_float8_matrices"
    given = "other values than those that were quantised"
    raise ValueError(f"moe_mlp: matrices with kept codes must be {expected}, but got {given}")


def replaced_by(kept: Float8Matrices, before: Any, made: Any) -> Any:
    """Replace the result ``before`` of `made_by` by ``made``, unless another thread has cleared the cache."""
    with kept._lock:
        found = kept._made
        if made is not before and found is not None and found[1] is before:
            kept._made = found[0], made
    return made


def _facts_of(matrices: Matrices) -> list[tuple]:
    """The address, dtype, shape and strides of each matrix, which identify it."""
    return [(matrix.data_ptr(), matrix.dtype, *matrix.shape, *matrix.strides) for matrix in _listed(matrices)]


def _listed(matrices: Matrices) -> Sequence[Tensor]:
    return [matrices] if isinstance(matrices, Tensor) else matrices


class _QuantizedExperts(Call):
    function = "quantized_experts"

    def __init__(
        self,
        kernels: Any,
        x: Tensor,
        tensors: Tensors,
        plan: Any,
        spec: QuantizeSpec,
        expert_fn: Callable[..., Tensor],
        expert_vjp: Callable[..., Tensors],
    ) -> None:
        super().__init__(kernels, x, *tensors)
        self.watch(plan.slot_to_row, plan.token_rows, plan.row_to_token)
        self.arguments: Any = (x, tensors)
        self.plan, self.spec = plan, spec
        self.expert_fn, self.expert_vjp = expert_fn, expert_vjp

    def run(self) -> Tensors:
        x, tensors = self.arguments
        self.arguments = None
        quantized = self.kernels.permute_quantized(x, self.plan, "all", self.spec)
        self.save(*quantized, *tensors)
        return (self.expert_fn(*quantized, *tensors),)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        made = self.expert_vjp(*gradients, *self.saved)
        d_rows, *d_tensors = (None if each is None else each.detach() for each in made)
        d_x = self.kernels.unpermute(d_rows, None, self.plan) if self.wanted[0] else None
        return first_order_only(self, (d_x, *d_tensors), *gradients, *self.saved)


def _contiguous(operands: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Contiguous operands, so that kernels and `Call.save` share one copy."""
    return tuple([each if each is None or each.is_contiguous() else dense(each) for each in operands])


def _groups(spec: GemmSpec) -> list[Tensor]:
    """The tensors that define the rows of a GEMM."""
    plan = spec.plan
    maps = () if plan is None else (plan.token_rows, plan.row_to_token)
    return [each for each in (spec.m_sizes, spec.expert_offsets, *maps) if isinstance(each, Tensor)]


class GroupedGemm(Call):
    function = "grouped_gemm"

    def __init__(
        self, kernels: Kernels, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec
    ) -> None:
        super().__init__(kernels, x, w, weights, bias)
        self.watch(*_groups(spec))
        self.operands: Any = (x, w, weights, bias)
        self.is_given = tuple(each is not None for each in self.operands)
        self.spec = spec

    def run(self) -> Tensors:
        operands, self.operands = _contiguous(self.operands), None
        self.save(*operands)
        out = self.kernels.grouped_gemm(*operands, self.spec)
        return (out,)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        saved, wanted = iter(self.saved), iter(self.wanted)
        operands = [next(saved) if given else None for given in self.is_given]
        all_wanted = tuple(given and next(wanted) for given in self.is_given)
        made = self.kernels.grouped_gemm_backward(*gradients, *operands, self.spec, all_wanted)
        made = tuple(each for each, given in zip(made, self.is_given, strict=True) if given)
        return first_order_only(self, made, *gradients, *operands)


class DeferredGemm(GroupedGemm):
    """A grouped GEMM whose wgrad is deferred. Its inputs are rows, weights, bias and the parameters."""

    def __init__(
        self, kernels: Kernels, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec
    ) -> None:
        super().__init__(kernels, x, w, weights, bias, spec)
        self.set_inputs(x, weights, bias, *spec.deferral.leaves)
        self.watch(*spec.deferral.leaves)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        kernels, spec, (d_out,) = self.kernels, self.spec._replace(deferral=None), gradients
        saved, wants = iter(self.saved), iter(self.wanted)
        operands: list[Any] = [next(saved) if given else None for given in self.is_given]
        x, w, weights, bias = operands
        want_x, want_weights, want_bias = (given and next(wants) for given in (True, *self.is_given[2:]))
        waits = weights is None  # otherwise wgrad reads a result of dgrad
        wanted = want_x, not waits, want_weights, want_bias
        d_x, d_w, d_weights, d_bias = kernels.grouped_gemm_backward(d_out, *operands, spec, wanted)
        shape = w.shape
        d_out = owned(d_out) if waits else d_out

        def compute(_: Any) -> tuple[Tensor]:
            return (kernels.grouped_wgrad(d_out, x, shape, spec) if waits else d_w,)

        made = d_x, *[d_weights] * (weights is not None), *[d_bias] * (bias is not None)
        read = (x, *_groups(spec)) if waits else ()
        return finished(self, self.spec.deferral, made, (True,), compute, read)


class MoeMlp(Call):
    function = "moe_mlp"

    def __init__(
        self,
        kernels: Kernels,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        spec: MlpSpec,
        parameters: tuple[Matrices, ...],
        owns_codes: bool,
    ) -> None:
        super().__init__(kernels, x, gate_up, down, weights)
        self.watch(*maps_of_layer(spec.plan))
        self.operands: Any = (x, gate_up, down, weights)
        self.spec, self.owns_codes = spec, owns_codes
        self.parameters = parameters if spec.accumulates else ()
        self.is_spent = False

    def run(self) -> Tensors:
        operands, self.operands = _contiguous(self.operands), None
        out, hidden, weights, self.tables = self.kernels.moe_mlp(*operands, self.spec, True)
        self.has_weights = weights is not None
        unread: Tensors = ()
        self.forms: tuple[Any, ...] = ()
        if self.spec.quantized is not None:
            self.forms = self.kernels.for_backward(self.spec.quantized, self.spec.keeps_hidden)
            self.spec = self.spec._replace(quantized=None)
            unread = operands[1], operands[2], *self.forms
        saved = self.forms if self.owns_codes else ()
        self.save(*operands[:3], weights, *hidden, *saved, unread=unread)
        if self.owns_codes:
            self.forms = tuple(each is not None for each in self.forms)
        return (out,)

    def _operands(self) -> tuple[Any, ...]:
        """The operands of the backward pass, which may overwrite some of them, and its spec."""
        x, gate_up, down, *others = self.saved
        weights = others.pop(0) if self.has_weights else None
        forms = self.forms
        if self.owns_codes:
            num_hidden = len(others) - sum(forms)
            others, codes = others[:num_hidden], iter(others[num_hidden:])
            forms = tuple(next(codes) if is_saved else None for is_saved in forms)
        if self.is_spent:
            raise RuntimeError(
                f"moe_mlp: a backward pass on the backend {self.kernels.name!r} has overwritten the first product of "
                "this call, so nothing can use it again, even with retain_graph=True; with keep='x' it can"
            )
        self.is_spent = bool(others) and self.kernels.overwrites_hidden
        spec = self.spec._replace(quantized=forms or None)
        return x, gate_up, down, weights, tuple(others), self.tables, spec

    def differentiate(self, *gradients: Tensor) -> Gradients:
        operands, wanted = self._operands(), [*self.wanted, False][:4]
        destinations: tuple[Any, ...] = (None, None)
        self.added = frozenset()
        if self.parameters:
            wanted[1:3] = wanted_among(inputs_of_partial_gradient(), wanted[1:3], self.parameters)
            pairs = zip(wanted[1:3], self.parameters, strict=True)
            destinations = tuple(destination_of_matrices(each) if want else None for want, each in pairs)
            kinds = zip((1, 2), wanted[1:3], destinations, strict=True)
            self.added = frozenset(number for number, want, each in kinds if each is not None or not want)
        made = self.kernels.moe_mlp_backward(*gradients, *operands, tuple(wanted), destinations)
        return first_order_only(self, made[: len(self.wanted)], *gradients, *operands[:4])


class DeferredMlp(MoeMlp):
    """A layer whose gradients of the matrices are deferred. Its inputs are tokens, weights and the parameters."""

    def __init__(
        self,
        kernels: Kernels,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        spec: MlpSpec,
        owns_codes: bool,
    ) -> None:
        super().__init__(kernels, x, gate_up, down, weights, spec, (), owns_codes)
        self.set_inputs(x, weights, *spec.deferral.leaves)
        self.has_d_weights = weights is not None
        if spec.quantized is None:
            self.watch(*spec.deferral.leaves)

    def differentiate(self, *gradients: Tensor) -> Gradients:
        kernels, deferral, tables, (d_out,) = self.kernels, self.spec.deferral, self.tables, gradients
        x, gate_up, down, *others, spec = self._operands()
        want_x, want_weights = self.wanted[0], self.has_d_weights and self.wanted[1]
        wanted = [not all(leaf.stop_gradient for leaf in _listed(each)) for each in deferral.matrices]
        d_x, d_weights, made = kernels.moe_mlp_dgrads(d_out, x, gate_up, down, *others, spec, (want_x, want_weights))
        kept = tuple(each if want else None for each, want in zip(made, wanted, strict=True))
        inner = gate_up.shape[1 if spec.transpose else 2] // 2
        spec, d_out = spec._replace(quantized=None, deferral=None), owned(d_out)  # codes would stay allocated

        def compute(destinations: Any) -> tuple[Tensor | None, Tensor | None]:
            return kernels.moe_mlp_wgrads(kept, d_out, x, inner, tables, spec, destinations)

        read = (x, *maps_of_layer(spec.plan)) if kernels.defers_wgrads else ()
        return finished(self, deferral, (d_x, d_weights)[: 1 + self.has_d_weights], wanted, compute, read)


def connect_experts(backend: Backend, x: Tensor, tensors: Tensors, *others: Any) -> Tensor:
    """Return expert outputs of quantised rows, differentiable in x and the tensors: one node for all backends.

    Args:
        backend: the backend that quantises, permutes and unpermutes rows.
        x: tokens [T, H].
        tensors: the arguments of the experts besides the rows.
        others: plan, spec, expert_fn and expert_vjp.
    """
    return connect(_QuantizedExperts(backend, x, tensors, *others), x, *tensors)[0]


def connected_mlp(
    kernels: Any, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec
) -> Tensor:
    """`Backend.moe_mlp` by kernels that implement it and its gradient."""
    given = gate_up, down
    gate_up, down = [  # isinstance of an abstract class such as Sequence is slow
        each if isinstance(each, Tensor) else stack_or_view(each, "moe_mlp", accumulates=spec.accumulates)
        for each in given
    ]
    trains = spec.deferral is not None or wants_gradient(x, gate_up, down, weights)
    owns_codes = spec.compute is not None and spec.quantized is None and spec.keeps_hidden and trains
    matrices = gate_up.detach(), down.detach(), spec.transpose
    if spec.quantized is not None:
        made = made_by(spec.quantized, kernels.name, lambda: kernels.quantize_experts(*matrices, trains))
        check_unchanged(spec.quantized, kernels, *matrices[:2], made, spec.validation)
        if trains:
            made = replaced_by(spec.quantized, made, kernels.for_both_passes(made))
        spec = spec._replace(quantized=made)
    elif owns_codes:
        spec = spec._replace(quantized=kernels.quantize_experts(*matrices, True))
    if not trains:
        return kernels.moe_mlp(x, gate_up, down, weights, spec, False)[0]
    operands = x, gate_up, down, weights
    if spec.deferral is not None:
        return connect(DeferredMlp(kernels, *operands, spec, owns_codes), x, weights, *spec.deferral.leaves)[0]
    return connect(MoeMlp(kernels, *operands, spec, given, owns_codes), *operands)[0]
