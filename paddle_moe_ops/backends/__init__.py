# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Backend selection: registers the backends and chooses the one that runs an operator."""

from __future__ import annotations

import contextvars
import functools
import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paddle import Tensor

from .. import _env
from .._graphs import context_manager
from .._options import BackendName
from . import compiled
from .accumulation import accumulated, accumulated_each, why_not
from .base import (
    OPERATORS,
    Backend,
    GemmSpec,
    Maps,
    Matrices,
    MlpSpec,
    MoePermuteSpec,
    MoeUnpermuteSpec,
    QuantizeSpec,
    RouteSpec,
    RowMaps,
    RowmapSpec,
    TopkSpec,
    Validation,
)
from .compiled import direct
from .experts import Float8Matrices, connect_experts
from .float8_products import Float8Parts
from .stacking import lay_side_by_side, shared_memory, stack_or_view, view_of

__all__ = [
    "OPERATORS",
    "Backend",
    "Float8Matrices",
    "GemmSpec",
    "Maps",
    "Matrices",
    "MlpSpec",
    "MoePermuteSpec",
    "MoeUnpermuteSpec",
    "QuantizeSpec",
    "RouteSpec",
    "RowMaps",
    "RowmapSpec",
    "TopkSpec",
    "Validation",
    "accumulated",
    "accumulated_each",
    "chosen",
    "compiled_backend",
    "connect_experts",
    "direct",
    "explain_operators",
    "float8_parts",
    "has_operators",
    "lay_side_by_side",
    "layer_operator",
    "register",
    "register_note",
    "register_operators",
    "resolve",
    "shared_memory",
    "stack_or_view",
    "use_backend",
    "view_of",
    "why_not",
]

_modules: dict[str, str] = {}  # name -> module with `backend`, in order of preference
_automatic: dict[str, Collection[str]] = {}  # name -> operators
_dygraph_only: list[str] = []
_notes: list[Callable[[], str]] = []
_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("paddle_moe_ops_backend", default=None)
chosen = _chosen.get  # the backend of `use_backend` here, or None
compiled_backend = compiled.backend
layer_operator = compiled.moe_mlp
has_operators = compiled.has_operators


@functools.cache
def _automatic_for(operator: str, dtype: Any, in_graph: bool) -> tuple[str, ...]:
    """Backends that may be chosen automatically, in order of preference."""
    return tuple(
        name
        for name, operators in _automatic.items()
        if operator in operators and _has(name, operator, dtype) and not (in_graph and name in _dygraph_only)
    )


def register(name: str, module: str, *, automatic: Collection[str] = OPERATORS, dygraph_only: bool = False) -> None:
    """Register a backend.

    Args:
        name: the argument of `use_backend`.
        module: module to import on first use; its attribute ``backend`` is the `Backend`.
        automatic: operators for which it may be chosen automatically, if it implements them. Earlier registrations
            win.
        dygraph_only: whether static graphs run the compiled operators instead.
    """
    _modules[name] = module
    _automatic[name] = automatic
    _automatic_for.cache_clear()
    if dygraph_only:
        _dygraph_only.append(name)


def register_note(note: Callable[[], str]) -> Callable[[], str]:
    """Register a function whose text `explain` shows unless it is empty; a decorator."""
    _notes.append(note)
    return note


register("compiled", "paddle_moe_ops.backends.compiled")
# Runs operators without a compiled implementation, and all operators on GPUs without compiled kernels.
register("triton", "paddle_moe_ops.backends.triton", dygraph_only=True)
register("paddle", "paddle_moe_ops.backends.matmul")
# The oracle is orders of magnitude slower: it serves as a check and never replaces another backend silently.
register("reference", "paddle_moe_ops.backends.reference", automatic=())


@functools.cache
def _load(name: str) -> Backend:
    return importlib.import_module(_modules[name]).backend


def float8_parts(backend: str) -> Float8Parts:
    """The `Float8Parts` next to a backend: the oracle's, or the library's for all others."""
    name = "backends.reference" if backend == "reference" else "backends.layers"
    parts: Float8Parts = importlib.import_module(f"paddle_moe_ops.{name}").float8_parts
    return parts


def register_operators() -> None:
    """Register the compiled operators with Paddle if the library loads; a later call reports why it does not."""
    _load("compiled").unavailable()


@context_manager
def use_backend(name: BackendName) -> Iterator[None]:
    """Run the operators inside the ``with`` block on one backend; their backward passes stay on it.

    Operators that the backend lacks run on the automatically chosen backend; `explain` names it.

    Args:
        name: "compiled", "triton" (NVIDIA GPUs; ignored in static graphs), "paddle" (grouped_gemm
            by Paddle's matmul) or "reference".

    Raises:
        ValueError: no backend has this name.
        RuntimeError: the called operator raises it if the backend cannot run on this machine.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import permute, route, use_backend
        >>> x, plan = paddle.randn([3, 64]), route(paddle.to_tensor([[0, 1], [1, 2], [0, 2]]), num_experts=3)
        >>> with use_backend("reference"):
        ...     expected, _ = permute(x, plan)
        >>> paddle.equal_all(permute(x, plan)[0], expected).item()
        True
    """
    _check_name(name, "use_backend: name")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def _check_name(name: str, argument: str) -> None:
    if name not in _modules:
        raise ValueError(f"{argument} must be one of {', '.join(_modules)}, but got {name!r}")


def _requested() -> tuple[str, str] | None:
    """The requested backend and the source of the request, or None."""
    name = chosen()
    if name is not None:
        return name, "use_backend"
    name = _env.backend() if _env.environment.get(_env.BACKEND) else None
    if name is None:
        return None
    _check_name(name, _env.BACKEND)
    return name, _env.BACKEND


def resolve(operator: str, like: Tensor | None = None) -> Backend:
    """Return the backend that runs an operator.

    Args:
        operator: one of `OPERATORS`.
        like: the tensor whose device and dtype decide, or a value of a static graph. None: any device and dtype.

    Raises:
        RuntimeError: the requested backend cannot run on this machine, or none can.
        ValueError: PADDLE_MOE_OPS_BACKEND names no backend, or another variable has a value that the library rejects.
    """
    requested = _requested()
    in_graph = like is not None and not isinstance(like, Tensor)
    if (
        requested is not None
        and _serves(requested[0], operator, like)
        and not (in_graph and requested[0] in _dygraph_only)
    ):
        name, source = requested
        reason = _problem(name, like)
        if reason is not None:
            _env.check_cpu_settings()
            others = _alternatives(name, operator)
            raise RuntimeError(f"{operator}: the backend {name!r} chosen by {source} cannot run here: {reason}{others}")
        return _load(name)
    reasons = []
    for name in _automatic_for(operator, like.dtype if isinstance(like, Tensor) else None, in_graph):
        backend = _load(name)
        reason = backend.unavailable() or (None if like is None else backend.cannot_run_on(like))
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    _env.check_cpu_settings()
    raise RuntimeError(
        f"{operator}: no backend can run it here: {'; '.join(reasons)}. The slow NumPy oracle runs everywhere: "
        "use_backend('reference')"
    )


def _problem(name: str, like: Tensor | None) -> str | None:
    """The reason why a backend cannot run on a tensor's device or on a value of a graph, or None if it can."""
    backend = _load(name)
    return backend.unavailable() or (None if like is None else backend.cannot_run_on(like))


def _serves(name: str, operator: str, like: Tensor | None) -> bool:
    return _has(name, operator, like.dtype if isinstance(like, Tensor) else None)


def _has(name: str, operator: str, dtype: Any) -> bool:
    """True if a backend implements an operator, for rows of ``dtype`` unless that is None."""
    backend = _load(name)
    if backend.operators is not None and operator not in backend.operators:
        return False
    return dtype is None or dtype in backend.dtypes.get(operator, (dtype,))


def _alternatives(name: str, operator: str) -> str:
    others = [other for other in _modules if other != name and _serves(other, operator, None)]
    others = [other for other in others if _load(other).unavailable() is None]
    return f". Backends that can: {', '.join(others)}" if others else ""


def explain_operators(operator: str | None = None) -> str:
    """Return text that names the backend of each operator, or of one, and the reasons against the others."""
    lines = []
    for each in OPERATORS if operator is None else (operator,):
        try:
            choice = _choice_text(each)
        except (RuntimeError, ValueError) as error:
            choice = f"none ({error})"
        lines.append(f"{each}: {choice}")
    requested = _requested_text()
    lines += [f"chosen by: {requested}", f"backends on this machine, for {operator or 'all of these operators'}:"]
    for name in _modules:
        reason = _load(name).unavailable()
        kind = " (dygraph only)" if name in _dygraph_only else "" if _automatic[name] else " (on request only)"
        if name == "paddle":
            kind = " (GEMMs by kernels of this package, or by Paddle's matmul)"
        state = "available" if reason is None else f"unavailable: {reason}"
        if operator is not None and not _has(name, operator, None):
            state = f"has no {operator}"
        lines.append(f"backend {name}{kind}: {state}")
    lines += [f"GPU {gpu} runs on no compiled kernels: {why}" for gpu, why in compiled.gpus_without_kernels().items()]
    return "\n".join([*lines, *filter(None, (note() for note in _notes))])


def _choice_text(operator: str) -> str:
    """The backend of an operator, and its replacement on GPUs without compiled kernels and in static graphs."""
    backend = resolve(operator)
    name, requested = backend.name, _requested()
    if name in _dygraph_only:
        in_graphs = (each for each in _automatic_for(operator, None, True) if _problem(each, None) is None)
        return f"{name} in dygraph, {next(in_graphs, 'none')} in static graphs"
    if name == "compiled" and requested is None and compiled.gpus_without_kernels():
        on_triton = _load("triton").unavailable() is None
        return f"compiled; {'triton, in dygraph,' if on_triton else 'none'} on GPUs without compiled kernels"
    return name


def _requested_text() -> str:
    try:
        requested = _requested()
    except ValueError as error:
        return str(error)
    return "automatic (first available)" if requested is None else requested[1]
