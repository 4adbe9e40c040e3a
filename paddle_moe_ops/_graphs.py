# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of public functions in dygraph and in static graphs, with arguments that carry an autograd graph."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import paddle
from paddle import Tensor
from paddle.base.core import set_eval_frame
from paddle.jit import ignore_module, not_to_static
from paddle.jit.dy2static.program_translator import _program_hash
from paddle.jit.marker import unified

from ._modes import GraphValue, mixed_modes, modes
from ._native import native

try:
    from paddle.jit.dy2static.parameter_recorder import _global_inplace_map, _global_parameter_recorder
except ImportError:  # Paddle 3.2
    from paddle.jit.pir_dy2static.parameter_recorder import _global_inplace_map, _global_parameter_recorder

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

FLOAT8 = frozenset((paddle.float8_e4m3fn, paddle.float8_e5m2))  # a hash is faster than comparing dtypes
_CARRIERS = (Tensor, tuple, list, dict)
_PLAIN = {int}  # lists of counts may be long

# paddle.jit.to_static(full_graph=True) leaves the source of functions in the folder of an ignored module as it is. A
# module without members stands for the package: Paddle looks through all members, and the modules among them.
_FOLDER = ModuleType("paddle_moe_ops")
_FOLDER.__file__ = str(Path(__file__).with_name("__init__.py"))
ignore_module([_FOLDER])


def public(
    *differentiable: str,
    quick: Callable[..., Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    owner: str | None = None,
    called: Mapping[str, str] | None = None,
    in_graphs: bool = True,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Mark a public function that works on tensors and on graph values alike.

    Every tensor among the arguments is detached, except the differentiable ones. Expert ids, masks, row maps, scales
    and counts have no gradient, but may carry a graph, as the ids of `paddle.topk` do. Paddle's engine would wait for
    their gradient and never run the nodes before them.

    paddle.jit.to_static calls such a function while it builds the program instead of rewriting its source, so that the
    checks run once, at build time, where shapes are known. A graph's backward pass does not wait: values of a graph are
    passed on as they are.

    Args:
        differentiable: names of the arguments that have a gradient.
        quick: called first, with the same arguments; its result is returned unless it is None.
        aliases: further names of arguments that callers may use as keywords, each with the name in the signature.
        owner: the name that begins errors about Paddle's mode, if it is not the function's.
        called: the caller's names of arguments in these errors, by the name in the signature.
        in_graphs: whether the function takes values of static graphs; if not, it refuses them itself.

    Returns:
        a decorator. The decorated function has the attribute ``differentiable_arguments``, a tuple of the names.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        unknown = set(differentiable) - set(signature.parameters)
        if unknown:
            raise TypeError(f"{function.__name__} has no arguments {sorted(unknown)}")
        by_keyword = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
        positional = [name for name, each in signature.parameters.items() if each.kind not in by_keyword]
        passed_on = frozenset(index for index, name in enumerate(positional) if name in differentiable)
        last = len(positional) - 1  # *tensors are all one argument
        names = [(called or {}).get(name, name) for name in positional]

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if aliases is not None:
                keywords = _own_names(function.__name__, aliases, positional[: len(arguments)], keywords)
            in_dygraph = modes._dygraph_tracer_ is not None
            if not in_dygraph and not modes._in_to_static_mode_:  # tracing takes tensors of dygraph for constants
                if in_graphs or GraphValue not in map(type, (*arguments, *keywords.values())):
                    refuse_other_mode(arguments, keywords)
            elif quick is not None:
                result = quick(*arguments, **keywords)
                if result is not None:
                    return result
            if in_dygraph:  # in line, since each step of a layer comes here many times
                for given in (arguments, (*keywords.values(),), *arguments, *keywords.values()):
                    if isinstance(given, (tuple, list)) and GraphValue in map(type, given):
                        refuse_other_mode(arguments, keywords)
            for index, argument in enumerate(arguments):
                if (index if index < last else last) in passed_on or not isinstance(argument, _CARRIERS):
                    continue
                if _carries_graph(argument):
                    arguments = (*arguments[:index], constant(argument), *arguments[index + 1 :])
            for name, argument in keywords.items():
                if isinstance(argument, _CARRIERS) and name not in differentiable and _carries_graph(argument):
                    keywords = {**keywords, name: constant(argument)}
            tracer = set_eval_frame(None)  # as `untraced`
            try:
                return function(*arguments, **keywords)
            except Exception:
                forget_failed_trace()
                raise
            finally:
                set_eval_frame(tracer)

        def refuse_other_mode(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            error = mixed_modes(owner or function.__name__, names, arguments, keywords)
            if error is not None:
                forget_failed_trace()
                raise error

        call.differentiable_arguments = differentiable  # type: ignore[attr-defined]
        call.__signature__ = signature  # type: ignore[attr-defined]  # paddle.jit does not look through wrappers
        return unified(call)

    return decorate


def context_manager(
    function: Callable[_Arguments, Iterator[_Result]],
) -> Callable[_Arguments, AbstractContextManager[_Result]]:
    """`contextlib.contextmanager` with its wrapper's code outside of the ignored folder."""
    return not_to_static(contextmanager(function))


def without_gradients(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`paddle.no_grad` as a decorator, whose wrapper's code lies outside of the ignored folder."""
    return not_to_static(paddle.no_grad()(function))


def untraced(function: Callable[..., _Result], *arguments: Any, **keywords: Any) -> _Result:
    """Call a function where tracing by bytecode does not follow.

    After a graph break, tracing would continue inside the functions that this one calls. It exhausts generators there,
    builds paths that lack their fields, and ends the process at calls of C functions by ctypes.
    """
    tracer = set_eval_frame(None)
    try:
        return function(*arguments, **keywords)
    finally:
        set_eval_frame(tracer)


def forget_failed_trace() -> None:
    """Let Paddle forget the parameters of the program that is traced, if any, when that program ends.

    If a trace raises, Paddle 3.3 keeps them under the number of the program. A later program with this number would use
    values that no longer exist, and end the process.
    """
    if paddle.in_dynamic_mode():
        return
    program = paddle.static.default_main_program()
    key = _program_hash(program)
    for records in (_global_parameter_recorder.params_dict, _global_parameter_recorder.tensor2value):
        weakref.finalize(program, records.pop, key, None)
    weakref.finalize(program, _global_inplace_map.params_dict.pop, key, None)


def _own_names(
    function: str, aliases: Mapping[str, str], given: Sequence[str], keywords: dict[str, Any]
) -> dict[str, Any]:
    """The keywords, with aliases replaced by the signature's names."""
    for alias, name in aliases.items():
        if alias in keywords:
            if name in keywords or name in given:
                raise TypeError(f"{function}: {name} was given twice, the second time as {alias}")
            keywords = {name if key == alias else key: value for key, value in keywords.items()}
    return keywords


def _carries_graph(value: Any) -> bool:
    """True if a tensor, or one in a tuple, a list or a dictionary, is part of an autograd graph."""
    if isinstance(value, Tensor):
        return not value.stop_gradient
    if isinstance(value, dict):
        value = value.values()
    elif set(map(type, value)) <= _PLAIN:
        return False
    found = native.carries_graph(*value)
    if found is not None:
        return found
    return any(isinstance(item, _CARRIERS) and _carries_graph(item) for item in value)


def constant(value: Any) -> Any:
    """The value without the graph that its tensors carry. A value of a static graph is unchanged.

    In a static graph, Paddle's detach shares memory that the program reuses for other values.
    """
    if isinstance(value, Tensor):
        return value if value.stop_gradient else value.detach()
    if not isinstance(value, _CARRIERS) or not _carries_graph(value):
        return value
    if isinstance(value, dict):
        return {key: constant(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [constant(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def constant_if_float8(tensor: Tensor) -> Tensor:
    """Return the tensor, without a gradient if it is float8: Paddle would cast that gradient to float8."""
    return constant(tensor) if not tensor.stop_gradient and tensor.dtype in FLOAT8 else tensor


def is_graph_value(value: object) -> bool:
    """True if the value stands for a tensor of a static graph."""
    return isinstance(value, GraphValue)


def of_shape(weight: Tensor, shape: list[int]) -> Tensor:
    """A weight whose sizes are known.

    If layers of one class are traced by bytecode and differ in a size, Paddle treats the sizes of their weights as
    unknown.
    """
    return weight.reshape(shape) if -1 in weight.shape else weight


def known_sizes(value: Tensor) -> list[Any]:
    """The sizes of a tensor, for reshape; those that a graph does not know are values of the graph."""
    return [size if size >= 0 else paddle.shape(value)[axis] for axis, size in enumerate(value.shape)]


def is_on_gpu(value: Tensor) -> bool:
    """True if a tensor lies on a GPU; for a value of a static graph, if Paddle's current device is a GPU."""
    if isinstance(value, GraphValue):
        return paddle.device.get_device().startswith("gpu")
    return value.place.is_gpu_place()


def filled(shape: list[Any], value: float, dtype: Any, like: Tensor) -> Tensor:
    """A new tensor of one value on another tensor's device, whichever device is the current one."""
    return beside(paddle.full(shape, value, dtype), like)


def beside(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor on another's device: empty results of a custom device's operators may be on the CPU."""
    return placed(tensor, like.place) if isinstance(like, Tensor) else tensor


def placed(tensor: Tensor, place: Any) -> Tensor:
    """The tensor itself if it is on that device, otherwise a copy."""
    return tensor if tensor.place == place else tensor._copy_to(place, True)


def with_elements(tensors: list[Tensor]) -> Tensor:
    """The first tensor that has elements, else the first: Paddle may leave an empty one on the host."""
    for each in tensors:
        if each.size > 0:
            return each
    return tensors[0]


def unpacked(tensor: Tensor, place: Any) -> Tensor:
    """A saved tensor of a backward pass, on the device of the forward pass's inputs.

    Recompute by hooks unpacks tensors without elements as tensors without a place.
    """
    return tensor if tensor.size > 0 else placed(paddle.empty(tensor.shape, tensor.dtype), place)


def numbers_of(like: Tensor) -> Tensor:
    """0, 1, 2, ... for the entries of an integer vector: of its dtype and on its device, unlike `paddle.arange`."""
    return paddle.cumsum(paddle.ones_like(like), dtype=like.dtype) - 1


def without_autocast() -> AbstractContextManager:
    """A context without mixed precision. It is empty if autocast is off: entering auto_cast would cost 50 us."""
    return paddle.amp.auto_cast(enable=False) if paddle.amp.is_autocast_enabled() else nullcontext()


def float32(tensor: Any) -> Any:
    """The tensor, if there is one, in float32; exact but for the bits of a NaN, and differentiable."""
    return tensor if tensor is None or tensor.dtype == paddle.float32 else tensor.astype("float32")


def dtype_name(dtype: Any) -> str:
    """The name of a Paddle dtype without the module."""
    return str(dtype).rpartition(".")[2]


def to_dtype(tensor: Any, dtype: Any) -> Any:
    """The tensor in a dtype; no copy if it has it."""
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def dense(tensor: Tensor) -> Tensor:
    """The tensor if it is contiguous, otherwise a contiguous copy; the tensor itself keeps its memory and strides.

    Paddle's `Tensor.contiguous` reallocates the tensor on which it is called, and all tensors that `detach` made from
    it: a caller's view of a buffer would no longer be a view.
    """
    return tensor if tensor.is_contiguous() else tensor.clone()


def ready_for_matmul(rows: Tensor, weight: Tensor) -> Tensor:
    """The rows, such that their matmul with a weight has a backward pass even if there are none.

    If only the weight requires a gradient and there are no rows, Paddle's backward pass of matmul fails. Rows that may
    be empty therefore require a gradient too, which is discarded.
    """
    if rows.stop_gradient and not weight.stop_gradient and min(rows.shape) <= 0:
        rows = rows.detach()
        rows.stop_gradient = False
    return rows


def index_sample(values: Tensor, ids: Tensor) -> Tensor:
    """`paddle.index_sample`, whose backward pass fails without rows if recompute by hooks has saved its operands."""
    if isinstance(values, GraphValue) or values.shape[0] > 0:
        return paddle.index_sample(values, ids)
    return values[:, :1].expand(ids.shape)


def in_float32(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function to tensors: unchanged on a GPU; otherwise in float32, rounded to the first tensor's dtype."""
    is_float32 = not paddle.amp.is_autocast_enabled()
    for tensor in tensors:
        is_float32 = is_float32 and tensor.dtype == paddle.float32
    if is_float32 or is_on_gpu(tensors[0]):
        return function(*tensors)
    with without_autocast():
        return function(*(tensor.astype("float32") for tensor in tensors)).astype(tensors[0].dtype)
