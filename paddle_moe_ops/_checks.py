# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Argument checks: a ValueError or TypeError that names the argument, the expected value and the actual one.

They run in Python before any operator is called. In a static graph an unknown dimension (-1) passes; the operator
checks it at run time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from numbers import Real
from typing import Any, NoReturn, get_args

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from . import _env
from ._graphs import GraphValue, context_manager, dtype_name, forget_failed_trace, is_graph_value
from ._options import QuantizeFormat, ScaleLayout
from .backends import QuantizeSpec, Validation

MAX_EXPERTS = 2**16
_PASSED_KEPT = 1024

SUM_DTYPES = (paddle.bfloat16, paddle.float16, paddle.float32)
ROW_DTYPES = (*SUM_DTYPES, paddle.float8_e4m3fn, paddle.float8_e5m2)
ID_DTYPES = (paddle.int32, paddle.int64)
_NO_PLACE = paddle.base.core.Place()  # the place of empty tensors that recompute by hooks unpacked
_WIDENED = (paddle.bfloat16, paddle.float16)  # float32 represents their values exactly

UE8M0 = "fp8_1x128_ue8m0"
QUANTIZE_FORMATS = get_args(QuantizeFormat)
SCALE_LAYOUTS = get_args(ScaleLayout)
AMAX_LIMITS = (2.0**-100, (2 - 2.0**-23) * 2.0**127)


class Passed(set[Hashable]):
    """Signatures of arguments that passed checks which take longer than a lookup; None is never kept."""

    def keep(self, signature: Hashable) -> None:
        """Add a signature; a full set is emptied before."""
        if signature is None:
            return
        if len(self) >= _PASSED_KEPT:
            self.clear()
        self.add(signature)


def bad_value(function: str, argument: str, expected: str, given: object) -> NoReturn:
    """Raise the ValueError of this package."""
    forget_failed_trace()
    raise ValueError(f"{function}: {argument} must be {expected}, but got {given}")


def bad_type(function: str, argument: str, expected: str, given: object) -> NoReturn:
    """Raise the TypeError of this package."""
    forget_failed_trace()
    raise TypeError(f"{function}: {argument} must be {expected}, but got {given}")


@context_manager
def renaming(function: str, caller: str, **arguments: str) -> Iterator[None]:
    """Let errors that ``function`` raises inside name ``caller`` and its arguments instead.

    Args:
        function: the name that begins the messages.
        caller: the name that replaces it.
        arguments: the caller's names of the function's arguments.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        other = renamed(error, function, caller, **arguments)
        if other is error:
            raise
        raise other from None


def renamed(error: Exception, function: str, caller: str, **arguments: str) -> Exception:
    """Return an error of ``function`` as one of ``caller``, see `renaming`; other errors as they are."""
    name, _, text = str(error).partition(": ")
    if name != function:
        return error
    argument, _, rest = text.partition(" ")
    return type(error)(f"{caller}: {arguments.get(argument, argument)} {rest}")


def _remedy(given: Any, allowed: Sequence[str]) -> str:
    """End of a message about a dtype: how to obtain an allowed one, if there is a way."""
    if given in _WIDENED and allowed == ["float32"]:
        return '; convert it with .astype("float32")'
    if given == paddle.float8_e4m3fn and {"bfloat16", "float32"} & set(allowed):
        return "; codes need their scales: dequantize_1x128 for rows, QuantizedMatrices for matrices of moe_mlp"
    return ""


def tensor(
    function: str,
    argument: str,
    value: Any,
    dtypes: Sequence[Any],
    shape: Sequence[int | str],
    shape_text: str | None = None,
    given_shape: Sequence[int] | None = None,
    why: str = "",
) -> Tensor:
    """Check that a value is a dense tensor of one of the dtypes and of a shape.

    Args:
        function: name that begins the message.
        argument: name of the argument.
        value: the caller's value.
        dtypes: allowed Paddle dtypes.
        shape: for each dimension its size, or a name if any size will do.
        shape_text: the shape in the message, if it should say more.
        given_shape: the shape that the caller gave, if the value has been reshaped since.
        why: text of the message after the shape.

    Returns:
        the value.
    """
    if isinstance(value, Tensor):
        if not value.is_dense():
            kind = "a distributed tensor (auto parallel)" if value.is_dist() else "a sparse tensor"
            bad_type(function, argument, "a dense tensor", f"{kind}, which is not supported")
    elif not is_graph_value(value):
        bad_type(function, argument, "a paddle.Tensor", type(value).__name__)
    if value.dtype not in dtypes:
        names = [dtype_name(dtype) for dtype in dtypes]
        expected = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
        bad_type(function, argument, f"of dtype {expected}", dtype_name(value.dtype) + _remedy(value.dtype, names))
    given = value.shape
    matches = len(given) == len(shape)
    for want, size in zip(shape, given, strict=False):
        if want != size and size != -1 and want != -1 and not isinstance(want, str):
            matches = False
    if not matches:
        text = shape_text or f"[{', '.join(str(size) for size in shape)}]"
        bad_value(function, argument, f"of shape {text}{why}", list(given_shape or given))
    return value


def dtype_of_result(function: str, argument: str, value: Any, dtypes: Sequence[Any]) -> Any:
    """Check the dtype of a result, which may be given by its name; the Paddle dtype."""
    for dtype in dtypes:
        if value == dtype or (isinstance(value, str) and value == dtype_name(dtype)):
            return dtype
    names = ", ".join(dtype_name(dtype) for dtype in dtypes)
    bad_type(function, argument, f"one of {names}, as a paddle dtype or its name", repr(value))


def rows(
    function: str,
    argument: str,
    value: Any,
    dtypes: Sequence[Any],
    num_rows: int | str,
    reason: str = "",
    given_shape: Sequence[int] | None = None,
) -> Tensor:
    """Check a matrix of rows that have at least one column.

    Args:
        function: name that begins the message.
        argument: name of the argument.
        value: the caller's value.
        dtypes: allowed Paddle dtypes.
        num_rows: the required number of rows, or a name if any number will do.
        reason: why there must be this many, appended to the expected shape.
        given_shape: the shape that the caller gave, if the value has been reshaped since.

    Returns:
        the value.
    """
    text = f"[{num_rows}, hidden]{reason}"
    if given_shape is not None and len(given_shape) > 2:
        text = f"[..., hidden] with {num_rows} rows in all{reason}"
    tensor(function, argument, value, dtypes, [num_rows, "hidden"], text, given_shape)
    if value.shape[1] == 0:
        bad_value(function, argument, f"of shape [{num_rows}, hidden] with hidden >= 1", list(value.shape))
    return value


def operand(
    function: str, argument: str, x: Any, weight: Tensor, shape: Sequence[int | str], shape_text: str | None = None
) -> Tensor:
    """Check a tensor that is to be multiplied with a weight: its dtype, but under mixed precision, and its shape."""
    takes_any = paddle.amp.is_autocast_enabled() or weight.dtype not in SUM_DTYPES
    return tensor(function, argument, x, SUM_DTYPES if takes_any else (weight.dtype,), shape, shape_text)


def lines(function: str, argument: str, value: Any, dtypes: Sequence[Any], width: str) -> Tensor:
    """Check a tensor [..., width] of at least two dimensions and make it a matrix of all its rows."""
    rank = getattr(value, "ndim", 2)
    if rank < 2:
        bad_value(function, argument, f"of at least two dimensions, [..., {width}]", list(value.shape))
    tensor(function, argument, value, dtypes, [*(f"dim{i}" for i in range(rank - 1)), width])
    if rank == 2:
        return value
    *leading, columns = value.shape
    return value.reshape([-1 if -1 in leading else math.prod(leading), columns])


def instance(function: str, argument: str, value: Any, kind: type, expected: str) -> None:
    """Check the type of a value; a value of a static graph passes for a tensor."""
    if not isinstance(value, kind) and not (kind is Tensor and is_graph_value(value)):
        bad_type(function, argument, expected, type(value).__name__)


def of_dygraph(function: str, argument: str, value: Any) -> None:
    """Check that a value does not stand for a tensor of a static graph."""
    if is_graph_value(value):
        expected = "a tensor of dygraph, or of to_static with full_graph=False"
        bad_type(function, argument, expected, "a value of a static graph")


def same_place(function: str, **tensors: Tensor | None) -> None:
    """Check that all given tensors are on one device."""
    first_name = first_place = None
    for name, value in tensors.items():
        if value is None or isinstance(value, GraphValue):
            continue
        place = value.place
        if place == _NO_PLACE:
            continue
        if first_place is None:
            first_name, first_place = name, place
        elif place != first_place:
            bad_value(function, name, f"on the device of {first_name}, {first_place}", place)


def integer(function: str, argument: str, value: Any, minimum: int, maximum: int = 2**31 - 1) -> int:
    """Check a Python (or NumPy) integer."""
    if isinstance(value, bool):
        bad_type(function, argument, "an int", "a bool")
    try:
        number = operator.index(value)
    except TypeError:
        bad_type(function, argument, "an int", type(value).__name__)
    if not minimum <= number <= maximum:
        bad_value(function, argument, f"from {minimum} to {maximum}", number)
    return number


def _real(function: str, argument: str, value: Any, expected: str) -> None:
    """Check the type of a Python (or NumPy) number."""
    # most values are floats, and an abstract class's isinstance is slow
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        bad_type(function, argument, expected, type(value).__name__)


def number(function: str, argument: str, value: Any) -> float:
    """Check a finite number."""
    _real(function, argument, value, "a number")
    if not math.isfinite(value):
        bad_value(function, argument, "finite", value)
    return float(value)


def token_count(function: str, argument: str, value: Any, like: Tensor) -> int:
    """Check a number of tokens, which may also be a 0-D integer tensor; -1 if a graph does not know it yet.

    If ``like`` is a graph value, -1 stands for an unknown number, as in its shape.
    """
    if is_graph_value(value) or (is_graph_value(like) and isinstance(value, int) and value == -1):
        return -1
    if isinstance(value, Tensor):
        value = tensor(function, argument, value, ID_DTYPES, []).item()
    return integer(function, argument, value, 0)


def flag(function: str, argument: str, value: Any) -> bool:
    """Check a bool."""
    if not isinstance(value, bool):
        kind = type(value)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        bad_type(function, argument, "a bool", f"{value!r} of type {name}")
    return value


def choice(function: str, argument: str, value: Any, choices: Sequence[str | None]) -> Any:
    """Check one of a few values."""
    is_name = value is None or isinstance(value, str)  # the comparison of an array with a string may be no bool
    if not is_name or value not in choices:
        bad_value(function, argument, f"one of {', '.join(map(repr, choices))}", repr(value))
    return value


def quantization(function: str, ue8m0: bool, scale_layout: Any, amax_min: Any) -> QuantizeSpec:
    """Check how rows are to become float8."""
    choice(function, "scale_layout", scale_layout, SCALE_LAYOUTS)
    _real(function, "amax_min", amax_min, "a float")
    smallest = float(amax_min)
    lowest, highest = AMAX_LIMITS
    if not lowest <= smallest <= highest:
        bad_value(function, "amax_min", f"from 2^-100 to {highest:.8e}", smallest)
    return QuantizeSpec(ue8m0, scale_layout, smallest)


def counts(
    function: str, value: Any, num_experts: int, *, has_static_buffer: bool
) -> tuple[tuple[int, ...] | None, Tensor | None]:
    """Check tokens_per_expert.

    Args:
        function: name that begins the message.
        value: a list of ints or of integer tensors with one element, a 1-D integer array or tensor, or None.
        num_experts: the required number of counts.
        has_static_buffer: if True, the argument is ignored.

    Returns:
        the counts as host integers or None, and the counts as a tensor or None.
    """
    name = "tokens_per_expert"
    if value is None or has_static_buffer:
        return None, None
    if isinstance(value, Tensor) or is_graph_value(value):
        return None, tensor(function, name, value, ID_DTYPES, [num_experts])
    value = listed(
        function, name, value, "a list of ints or of int tensors with one element, a 1-D int array or tensor, or None"
    )
    if len(value) != num_experts:
        bad_value(function, name, f"of length num_experts={num_experts} (or None: counted)", f"length {len(value)}")
    if any(is_graph_value(item) for item in value):
        items = [_one_element(function, f"{name}[{i}]", item) for i, item in enumerate(value)]
        return None, paddle.stack([item.astype("int32").reshape([]) for item in items])
    numbers = []
    for i, item in enumerate(value):
        if isinstance(item, Tensor):
            item = _one_element(function, f"{name}[{i}]", item).item()
        numbers.append(integer(function, f"{name}[{i}]", item, 0))
    return tuple(numbers), None


def listed(function: str, argument: str, value: Any, expected: str) -> list[Any] | tuple[Any, ...]:
    """Check a list, or a 1-D NumPy array of integers, whose list it returns."""
    if isinstance(value, np.ndarray):
        if value.ndim == 1 and np.issubdtype(value.dtype, np.integer):
            return value.tolist()
        bad_type(function, argument, expected, f"an array of {value.dtype} {list(value.shape)}")
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        bad_type(function, argument, expected, type(value).__name__)
    return value


def permutation(function: str, argument: str, indices: NDArray[Any], order: NDArray[Any] | None = None) -> None:
    """Check that indices are a permutation of [0, N).

    The error names the first index out of range, or else the lowest of those that are repeated.

    Args:
        function: name that begins the message.
        argument: name of the argument.
        indices: [N].
        order: their stable argsort, if it is known.
    """
    order = np.argsort(indices, kind="stable") if order is None else order
    ascending = indices[order]
    if np.array_equal(ascending, np.arange(len(indices))):
        return
    expected = f"{function}: {argument} must be a permutation of [0, {len(indices)})"
    for place in np.flatnonzero((indices < 0) | (indices >= len(indices)))[:1]:
        raise ValueError(f"{expected}, but entry {place} is {indices[place]}")
    rank = np.flatnonzero(ascending[1:] == ascending[:-1])[0]
    first, second = order[rank : rank + 2]
    raise ValueError(f"{expected}, but entries {first} and {second} are both {ascending[rank]}")


def _one_element(function: str, argument: str, value: Any) -> Tensor:
    return tensor(function, argument, value, ID_DTYPES, [1] * max(getattr(value, "ndim", 0), 0))


def validation(function: str, value: bool | None, like: Tensor) -> Validation:
    """The level of a ``validate`` argument for data on the device of ``like``."""
    if value is not None and not isinstance(value, bool):
        bad_type(function, "validate", "True, False or None", f"{value!r} of type {type(value).__name__}")
    if value is None and _env.environment.get(_env.VALIDATE):
        value = _env.validate_default()
    if value is None:
        on_cpu = isinstance(like, GraphValue) or like.place.is_cpu_place()
        return Validation.DATA if on_cpu else Validation.OFF
    return Validation.ALL if value else Validation.OFF


def of_its_shape(function: str, out: Tensor) -> Tensor:
    """A result whose gradient must have its shape, which Paddle's own operators do not check in `paddle.grad`."""
    if not isinstance(out, GraphValue) and not out.stop_gradient:
        shape = out.shape

        def check(gradient: Tensor | None) -> None:
            if gradient is not None and gradient.shape != shape:
                bad_value(function, "the gradient of the result", f"of shape {list(shape)}", list(gradient.shape))

        out.register_hook(check)
    return out
