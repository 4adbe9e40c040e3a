# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The matrices of experts: one stacked tensor, or a list of them if each expert is a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import paddle
from paddle import Tensor, nn

from . import _checks
from ._graphs import is_graph_value, to_dtype
from ._options import ComputeFormat, Keep
from .backends import Backend, Matrices, accumulated, stack_or_view, why_not
from .backends.base import FLOAT8_WGRADS
from .backends.deferred import FLEET, reducing_wrapper, why_not_deferred
from .backends.quantized import FLOAT8_FORMAT, FORMATS, QuantizedMatrices, as_quantized

__all__ = [
    "EVEN_COLUMNS",
    "Matrices",
    "check_compute",
    "check_deferrable",
    "check_destinations",
    "check_memory_options",
    "check_quantized_options",
    "each_of",
    "in_dtype",
    "listed",
    "matrices",
    "named",
    "quantized_pair",
    "stacked",
]

COMPUTE = get_args(ComputeFormat)
EVEN_COLUMNS = "of 2 * n columns, n of the gate and n that it gates, n >= 1"

_FORMS = "a paddle.Tensor, or a list or a paddle.nn.ParameterList of them"
_FORMS_OR_CODES = "a paddle.Tensor, a list or a paddle.nn.ParameterList of them, or a QuantizedMatrices"


def listed(given: Any) -> Any:
    """The parameters of a `paddle.nn.ParameterList` as a list, quantised matrices as such; other values unchanged."""
    return list(given) if isinstance(given, nn.ParameterList) else as_quantized(given)


def matrices(
    function: str,
    argument: str,
    given: Any,
    dtypes: Sequence[Any],
    shape: Sequence[int | str],
    why: str = "",
    or_codes: bool = False,
) -> Matrices:
    """Check the matrices, or the biases, of experts.

    Args:
        function: name that begins the message.
        argument: name of the argument.
        given: the caller's value.
        dtypes: allowed Paddle dtypes; of a list, all matrices have that of the first.
        shape: of the stacked matrices, [E, ...]; matrices of a list have it without E. A dimension that is a name must
            be equal in all of them.
        why: text of the message after the shape.
        or_codes: whether the caller takes a `QuantizedMatrices`, too, which this function does not check.

    Returns:
        the tensor, or the list.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, (str, QuantizedMatrices))
    if not is_list and not isinstance(given, Tensor) and not is_graph_value(given):
        _checks.bad_type(function, argument, _FORMS_OR_CODES if or_codes else _FORMS, type(given).__name__)
    if not is_list:
        return _checks.tensor(function, argument, given, dtypes, shape, why=why)
    experts, *expected = shape
    if not given or (isinstance(experts, int) and 0 <= experts != len(given)):
        several = "vectors" if len(expected) == 1 else "matrices"
        wanted = f"{experts} {several}" if isinstance(experts, int) else "one matrix for each expert"
        _checks.bad_value(function, argument, f"a list of {wanted}", f"{len(given)} of them")
    for index, each in enumerate(given):
        _checks.tensor(function, f"{argument}[{index}]", each, dtypes, expected, why=why)
        if index == 0:
            dtypes, expected, why = (each.dtype,), each.shape, ""
    return given


def named(argument: str, given: Matrices | QuantizedMatrices) -> dict[str, Tensor]:
    """Each tensor by its name in messages."""
    if isinstance(given, QuantizedMatrices):
        return {f"{argument}.codes": given.codes, f"{argument}.scales": given.scales}
    if isinstance(given, Sequence):
        return {f"{argument}[{index}]": each for index, each in enumerate(given)}
    return {argument: given}


def each_of(change: Callable[[Tensor], Tensor], given: Matrices) -> Matrices:
    """The tensor, or each tensor of the list, changed by the function."""
    return [change(each) for each in given] if isinstance(given, Sequence) else change(given)


def stacked(given: Matrices) -> Tensor:
    """One tensor; a list is copied. The gradient goes to each matrix."""
    return paddle.stack(list(given)) if isinstance(given, Sequence) else given


def in_dtype(function: str, given: Matrices, dtype: Any, backend: Backend, *, accumulates: bool = False) -> Matrices:
    """The matrices in the form that a backend needs under mixed precision, by one cast if it needs one tensor.

    Args:
        function: the name that begins an error text.
        given: one tensor, or a list.
        dtype: of mixed precision.
        backend: the backend that runs on them.
        accumulates: whether `backends.accumulation` stores their gradients, which only parameters support.
    """
    if isinstance(given, Sequence) and not backend.takes_lists:
        return to_dtype(stack_or_view(given, function, accumulates=accumulates), dtype)
    if accumulates:
        given = each_of(accumulated, given)
    return each_of(lambda each: to_dtype(each, dtype), given)


def quantized_pair(function: str, gate_up: Any, down: Any, experts: int, hidden: int, transpose: bool) -> int:
    """Check matrices that are codes; the columns of the first, -1 if a graph does not know them."""
    for name, each, other in (("gate_up", gate_up, "down"), ("down", down, "gate_up")):
        if not isinstance(each, QuantizedMatrices):
            _checks.bad_type(function, name, f"a QuantizedMatrices, as {other} is", type(each).__name__)
        _checks.choice(function, f"{name}.format", each.format, FORMATS)
        _checks.flag(function, f"{name}.transpose", each.transpose)
        for field in ("format", "transpose"):
            mine, due = getattr(each, field), getattr(gate_up, field)
            if mine != due:
                _checks.bad_value(function, f"down.{field}", f"{due!r}, as that of gate_up", repr(mine))
        if each.format.startswith("int4") and getattr(each.codes, "dtype", None) == paddle.int8:
            expected = "uint8, in the order of paddle_moe_ops.reference.pack_int4"
            _checks.bad_type(function, f"{name}.codes", expected, "int8")
        _checks.tensor(function, f"{name}.codes", each.codes, _dtypes_of_codes(each), [experts, "rows", "columns"])
    if transpose and not gate_up.transpose:
        _checks.bad_value(function, "transpose", "False with quantised matrices that are not transposed", transpose)
    columns = gate_up.num_outputs
    if (columns % 2 and columns > 0) or columns == 0:
        _checks.bad_value(function, "gate_up.codes", EVEN_COLUMNS, columns)
    inner = columns // 2 if columns > 0 else -1
    _check_codes(function, "gate_up", gate_up, experts, hidden, columns)
    _check_codes(function, "down", down, experts, inner, hidden)
    return columns


def check_destinations(function: str, **given: Matrices) -> None:
    """Check that the matrices and biases have gradients to which a backward pass can add."""
    for argument, value in given.items():
        for name, each in named(argument, value).items():
            problem = why_not(each)
            if problem is not None:
                _checks.bad_value(function, name, *problem)


def check_deferrable(function: str, x: Tensor, defer_dw: bool | str, **given: Matrices) -> None:
    """Check that gradients of the matrices can be computed after the backward pass."""
    if is_graph_value(x):
        _checks.bad_value(function, "defer_dw", "False in a static graph", repr(defer_dw))
    leaves = {name: each for argument, value in given.items() for name, each in named(argument, value).items()}
    for name, each in leaves.items():
        problem = why_not_deferred(each)
        if problem is not None:
            _checks.bad_value(function, name, *problem)
    wrapper = reducing_wrapper(leaves.values()) if defer_dw is True else None
    if wrapper is not None:
        but = ", except in its no_sync()" if wrapper == "DataParallel" else ""
        expected = f"False in {wrapper}, which reduces gradients before they are flushed{but}"
        _checks.bad_value(function, "defer_dw", expected, repr(defer_dw))


def check_compute(
    function: str, compute: str | None, activation: str, has_biases: bool, keep: str, defer_dw: bool | str
) -> None:
    """Check the argument ``compute`` of `moe_mlp`, and options that layers with biases or other activations lack."""
    _checks.choice(function, "compute", compute, COMPUTE)
    if compute is None or (activation == "swiglu" and not has_biases):
        return
    others = "biases" if has_biases else f"the activation {activation!r}"
    where = f"with compute and {others}"
    if compute == FLOAT8_WGRADS:
        _checks.bad_value(function, "compute", f"None or 'fp8_1x128' with {others}", repr(compute))
    if keep == "h_fp8":
        _checks.bad_value(function, "keep", f"'h' or 'x' {where}", repr(keep))
    if defer_dw:
        _checks.bad_value(function, "defer_dw", f"False {where}", repr(defer_dw))


def check_memory_options(
    function: str, keep: str, workspace_mb: int, accumulate: bool, compute: str | None, defer_dw: bool | str = False
) -> None:
    """Check the options of `moe_mlp` about memory, and about the time at which it computes gradients of matrices."""
    _checks.choice(function, "keep", keep, get_args(Keep))
    if keep == "h_fp8" and compute is None:
        _checks.bad_value(function, "keep", "'h' or 'x' without compute", repr(keep))
    _checks.integer(function, "workspace_mb", workspace_mb, 1)
    _checks.flag(function, "accumulate", accumulate)
    if not isinstance(defer_dw, bool) and not (isinstance(defer_dw, str) and defer_dw == FLEET):
        kind = _checks.bad_value if isinstance(defer_dw, str) else _checks.bad_type
        kind(function, "defer_dw", f"True, False or {FLEET!r}", repr(defer_dw))


def check_quantized_options(
    function: str,
    matrix_format: str,
    keep: str,
    accumulate: bool,
    compute: str | None,
    float8_matrices: Any,
    defer_dw: bool | str,
) -> None:
    """Check the options of `moe_mlp` that depend on quantised matrices."""
    if accumulate:
        _checks.bad_value(function, "accumulate", "False with quantised matrices, which have no gradient", True)
    if defer_dw:
        expected = "False with quantised matrices, which have no gradient"
        _checks.bad_value(function, "defer_dw", expected, repr(defer_dw))
    if keep == "h_fp8":
        _checks.bad_value(function, "keep", "'h' or 'x' with quantised matrices", repr(keep))
    if compute is not None and matrix_format != FLOAT8_FORMAT:
        _checks.bad_value(function, "compute", f"None with quantised matrices of {matrix_format}", repr(compute))
    if float8_matrices is not None:
        _checks.bad_value(function, "float8_matrices", "None with quantised matrices", type(float8_matrices).__name__)


def _dtypes_of_codes(given: QuantizedMatrices) -> tuple[Any, ...]:
    if given.format == FLOAT8_FORMAT:
        return paddle.float8_e4m3fn, paddle.uint8, paddle.int8
    return (paddle.int8 if given.format == "int8" else paddle.uint8,)


def _check_codes(function: str, name: str, given: QuantizedMatrices, experts: int, inputs: int, outputs: int) -> None:
    """Check the shapes of codes and scales of matrices; a size of -1 is unknown."""

    def pieces(size: int, length: int) -> int:
        return -1 if size < 0 else -(-size // length)

    def stored(first: int, second: int) -> list[int]:
        return [experts, second, first] if given.transpose else [experts, first, second]

    rows = inputs
    if given.format.startswith("int4") and inputs >= 0:
        rows = 16 * pieces(inputs, 32)
    _checks.tensor(function, f"{name}.codes", given.codes, _dtypes_of_codes(given), stored(rows, outputs))
    if given.format == FLOAT8_FORMAT:
        scales = stored(pieces(inputs, 128), pieces(outputs, 128))
    elif given.format == "int4_1x128":
        scales = stored(pieces(inputs, 128), outputs)
    else:
        scales = [experts, outputs]
    dtypes = (paddle.float32, paddle.uint8) if given.format == FLOAT8_FORMAT else (paddle.float32,)
    _checks.tensor(function, f"{name}.scales", given.scales, dtypes, scales)
