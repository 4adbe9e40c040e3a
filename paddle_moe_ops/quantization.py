# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Rows in float8 with a scale for each 128 columns, and experts that run on them.

T tokens, H hidden size, N rows of the permuted buffer, S = ceil(H / 128) scales per row. `permute` with ``quantize``
quantises while permuting.

The rule, for each group of 128 columns (the last may be shorter), in float32:

* amax is the largest magnitude without NaN, clamped to ``amax_min`` and to the largest finite number.
* The scale is amax / 448, or for ue8m0 the smallest power of two that is not less.
* The code is the float8_e4m3fn number nearest to x * (1 / scale), ties to even. Magnitudes above 448, including
  infinity, become 448; NaN becomes 0x7F.

The groups are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).

Scales are float32 [rows, S], or for ue8m0 int32 [rows, ceil(S / 4)]: four exponents, biased by 127, to an int32, the
lowest group in the lowest byte. With ``scale_layout="col"`` they are transposed and contiguous, with the rows padded to
a multiple of 4 by zeros, as grouped GEMMs load them by TMA: float32 [S, ceil4(rows)], int32 [ceil(S / 4), ceil4(rows)].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from . import _checks
from ._graphs import public
from ._matrices import EVEN_COLUMNS, Matrices, listed, matrices, named
from ._options import MatrixFormat, RowFormat, ScaleLayout
from .backends import connect_experts, resolve
from .backends.layers import quantized_matrices
from .backends.quantized import FLOAT8_FORMAT, FORMATS, QuantizedMatrices
from .routing import Plan, as_plan, tokens_of

__all__ = ["QuantizedMatrices", "dequantize_1x128", "quantize_1x128", "quantize_experts", "quantized_experts"]


@public()
def quantize_1x128(
    x: Tensor, *, ue8m0: bool = False, scale_layout: ScaleLayout = "row", amax_min: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Quantise rows to float8 with a scale for each 128 columns, by the rule of this module.

    Not differentiable: the results have ``stop_gradient=True`` (see `quantized_experts`). Deterministic: the same bits
    on every backend and run. No host synchronisation.

    Args:
        x: [T, H] bfloat16, float16 or float32; any H >= 1, rows may be strided.
        ue8m0: scales that are powers of two, packed four to an int32.
        scale_layout: "row" or "col".
        amax_min: lower limit of amax, from 2^-100 to the largest float32; it is rounded to float32.

    Returns:
        codes float8_e4m3fn [T, H], and scales.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import dequantize_1x128, quantize_1x128
        >>> x = paddle.randn([5, 256]).astype("bfloat16")
        >>> codes, scales = quantize_1x128(x)
        >>> codes.shape, scales.shape
        ([5, 256], [5, 2])
    """
    name = "quantize_1x128"
    _checks.rows(name, "x", x, _checks.SUM_DTYPES, "num_tokens")
    _checks.flag(name, "ue8m0", ue8m0)
    spec = _checks.quantization(name, ue8m0, scale_layout, amax_min)
    return resolve(name, x).quantize_1x128(x, spec)


@public()
def dequantize_1x128(
    codes: Tensor, scales: Tensor, *, scale_layout: ScaleLayout = "row", dtype: Any = paddle.bfloat16
) -> Tensor:
    """Multiply codes by their scales.

    The product is formed in float32 and rounded once. The result of padding rows (codes and scales 0) is 0. Not
    differentiable: the result has ``stop_gradient=True``. Deterministic: the same bits on every backend and run, except
    for NaN. No host synchronisation.

    Args:
        codes: [N, H] float8_e4m3fn.
        scales: float32, or int32 for packed ue8m0, as `quantize_1x128` and `permute` return them, distinguished by
            dtype.
        scale_layout: "row" or "col", the layout of the scales.
        dtype: dtype of the result: bfloat16, float16 or float32, as a Paddle dtype or its name.

    Returns:
        [N, H] of ``dtype``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import dequantize_1x128, quantize_1x128
        >>> x = paddle.randn([5, 256])
        >>> codes, scales = quantize_1x128(x, ue8m0=True)
        >>> values = dequantize_1x128(codes, scales, dtype="float32")
        >>> paddle.allclose(values, x, rtol=1 / 16, atol=1 / 64).item()
        True
    """
    name = "dequantize_1x128"
    _checks.rows(name, "codes", codes, (paddle.float8_e4m3fn,), "num_rows")
    _checks.choice(name, "scale_layout", scale_layout, _checks.SCALE_LAYOUTS)
    _checks.tensor(name, "scales", scales, (paddle.float32, paddle.int32), ["rows", "columns"])
    shape = _scales_shape(codes, scales.dtype == paddle.int32, scale_layout)
    _checks.tensor(name, "scales", scales, (paddle.float32, paddle.int32), shape)
    dtype = _checks.dtype_of_result(name, "dtype", dtype, _checks.SUM_DTYPES)
    _checks.same_place(name, codes=codes, scales=scales)
    return resolve(name, codes).dequantize_1x128(codes, scales, scale_layout, dtype)


@public()
def quantize_experts(
    gate_up: Tensor | Sequence[Tensor] | nn.ParameterList,
    down: Tensor | Sequence[Tensor] | nn.ParameterList,
    *,
    format: MatrixFormat,
    transpose: bool = False,
) -> tuple[QuantizedMatrices, QuantizedMatrices]:
    """Quantise the matrices of a layer of experts, for `moe_mlp`.

    ``"int8"`` and ``"int4"`` have one scale for each output of a matrix, ``"int4_1x128"`` one for each output and 128
    inputs. A scale is the largest magnitude, NaN left out, divided by 127 or 7 and rounded to the dtype of the matrix.
    A code is the element divided by the scale, rounded half away from zero. These are the numbers of
    `paddle.nn.quant.weight_quantize` on a CPU. A NaN becomes code 0. In float16 values may round to infinity if the
    largest magnitude is near 65504, and an int8 scale is 0, like all values, if it is below 3.8e-6.

    ``"fp8_128x128"`` has float8_e4m3fn codes and one scale for each 128 x 128 elements, with which a layer has the bits
    of ``compute="fp8_1x128"``.

    Not differentiable. Deterministic: the same bits on every device. Integer codes are computed expert by expert, with
    float32 values of one matrix at a time. No host synchronisation.

    Args:
        gate_up: [E, d, 2 * n] bfloat16, float16 or float32, or a list of E matrices, as in `moe_mlp`.
        down: [E, n, d], dtype of ``gate_up``, or a list of E matrices.
        format: "int8", "int4", "int4_1x128" or "fp8_128x128", see `QuantizedMatrices`.
        transpose: whether the matrices are stored transposed, [E, 2 * n, d] and [E, d, n]; codes then are, too.

    Returns:
        the codes and scales of both.

    Raises:
        TypeError: an argument of the wrong type or dtype; a value of a static graph.
        ValueError: an argument of the wrong value or shape.
        RuntimeError: "fp8_128x128" where the compiled library has no operators.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import moe_mlp, quantize_experts, route
        >>> gate_up, down = paddle.randn([8, 64, 96]), paddle.randn([8, 48, 64])
        >>> matrices = quantize_experts(gate_up, down, format="int8")
        >>> plan = route(paddle.randint(0, 8, [16, 1]), num_experts=8)
        >>> moe_mlp(paddle.randn([16, 64]), plan, None, *matrices).shape
        [16, 64]
    """
    name = "quantize_experts"
    _checks.choice(name, "format", format, FORMATS)
    _checks.flag(name, "transpose", transpose)
    gate_up, down = listed(gate_up), listed(down)
    for argument, given in (("gate_up", gate_up), ("down", down)):
        _checks.of_dygraph(name, argument, given)
    matrices(name, "gate_up", gate_up, _checks.SUM_DTYPES, ["E", "rows", "columns"])
    first = next(iter(named("gate_up", gate_up).values()))
    if 0 in first.shape:
        _checks.bad_value(name, "gate_up", "of sizes >= 1", list(first.shape))
    hidden, columns = first.shape[-2:][::-1] if transpose else first.shape[-2:]
    if columns % 2:
        _checks.bad_value(name, "gate_up", EVEN_COLUMNS, columns)
    shape = [len(gate_up), *((hidden, columns // 2) if transpose else (columns // 2, hidden))]
    matrices(name, "down", down, (first.dtype,), shape)
    _checks.same_place(name, **named("gate_up", gate_up), **named("down", down))
    with paddle.no_grad():
        return _quantized(gate_up, format, transpose), _quantized(down, format, transpose)


@public("x", "tensors")
def quantized_experts(
    x: Tensor,
    plan: Plan,
    expert_fn: Callable[..., Tensor],
    expert_vjp: Callable[..., Any],
    *tensors: Tensor,
    quantize: RowFormat = "fp8_1x128",
    scale_layout: ScaleLayout = "row",
    amax_min: float = 1e-4,
) -> Tensor:
    """Quantise tokens while permuting them, run experts on the float8 rows, and connect the gradients.

    One node of the autograd graph: float8 tensors, which can have no gradient in Paddle, exist only inside it. It keeps
    codes, scales and ``tensors`` for the backward pass, not ``x`` and not its rows in 16 bits. The gradient of ``x``
    goes straight through the quantisation: it is the ascending sum of each token's rows of d_rows, as in `permute`.

    Differentiable in ``x`` and ``tensors``. Works in dygraph and under paddle.jit.to_static with full_graph=False; a
    static graph cannot hold the two functions. Deterministic and without host synchronisation if the two functions are.

    Args:
        x: [T, H] bfloat16, float16 or float32; any H >= 1, rows may be strided.
        plan: the rows of each token.
        expert_fn: ``expert_fn(codes, scales, *tensors)`` -> a new tensor, bfloat16, float16 or float32, such as the
            experts' outputs [N, any]. Codes are [N, H]; codes and scales of padding rows are 0. Runs without
            recording gradients.
        expert_vjp: ``expert_vjp(d_out, codes, scales, *tensors)`` -> d_rows [N, H] in the dtype of ``x``, followed by
            one gradient for each of ``tensors``, or None if it has none. Without ``tensors``, d_rows alone is
            enough. Padding rows of d_rows are not read.
        tensors: tensors besides ``x`` that the result depends on, such as weights and ``plan.row_probs``.
        quantize: "fp8_1x128" or "fp8_1x128_ue8m0".
        scale_layout: "row" or "col".
        amax_min: as in `quantize_1x128`.

    Returns:
        the tensor that expert_fn returned.

    Raises:
        TypeError: an argument, or a result of expert_fn or expert_vjp, of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; gradients of the wrong number or shape.

    Examples:
        One expert of one matrix, whose GEMMs would read codes and scales:

        >>> import paddle
        >>> from paddle_moe_ops import dequantize_1x128, quantized_experts, route, unpermute
        >>> x, weight = paddle.randn([3, 256]), paddle.randn([256, 64])
        >>> x.stop_gradient = weight.stop_gradient = False
        >>> def expert_fn(codes, scales, weight):
        ...     return dequantize_1x128(codes, scales, dtype="float32") @ weight
        >>> def expert_vjp(d_out, codes, scales, weight):
        ...     return d_out @ weight.T, dequantize_1x128(codes, scales, dtype="float32").T @ d_out
        >>> plan = route(paddle.to_tensor([[0], [-1], [0]]), num_experts=1)
        >>> unpermute(quantized_experts(x, plan, expert_fn, expert_vjp, weight), plan).sum().backward()
        >>> x.grad.shape, weight.grad.shape
        ([3, 256], [256, 64])
    """
    name = "quantized_experts"
    _checks.of_dygraph(name, "x", x)
    plan = as_plan(name, plan)
    _checks.rows(name, "x", x, _checks.SUM_DTYPES, *tokens_of(plan))
    for argument, function in (("expert_fn", expert_fn), ("expert_vjp", expert_vjp)):
        if not callable(function):
            _checks.bad_type(name, argument, "a function", type(function).__name__)
    for index, tensor in enumerate(tensors):
        _checks.instance(name, f"tensors[{index}]", tensor, Tensor, "a paddle.Tensor")
    _checks.choice(name, "quantize", quantize, _checks.QUANTIZE_FORMATS[1:])
    _checks.same_place(name, x=x, plan=plan.slot_to_row)
    spec = _checks.quantization(name, quantize == _checks.UE8M0, scale_layout, amax_min)
    tensors = tuple(tensor if tensor.is_floating_point() else tensor.detach() for tensor in tensors)
    shape, dtype = [plan.num_rows, x.shape[1]], x.dtype

    def checked_fn(*arguments: Tensor) -> Tensor:
        return _check_rows_out(expert_fn(*arguments))

    def checked_vjp(d_out: Tensor, codes: Tensor, scales: Tensor, *tensors: Tensor) -> Any:
        return _check_gradients(expert_vjp(d_out, codes, scales, *tensors), shape, dtype, tensors)

    return connect_experts(resolve(name, x), x, tensors, plan, spec, checked_fn, checked_vjp)


def _quantized(given: Matrices, format: MatrixFormat, transpose: bool) -> QuantizedMatrices:
    """The codes of all matrices."""
    if format == FLOAT8_FORMAT:
        pairs = (
            [quantized_matrices(given)]
            if isinstance(given, Tensor)
            else [quantized_matrices(each[None]) for each in given]
        )
        codes = paddle.concat([codes.view("uint8") for codes, _ in pairs]).view(paddle.float8_e4m3fn)
        return QuantizedMatrices(codes, paddle.concat([scales for _, scales in pairs]), format, transpose)
    made = [_integer_codes(each.t() if transpose else each, format) for each in given]
    if transpose:
        made = [(codes.t(), scales.t() if scales.ndim == 2 else scales) for codes, scales in made]
    codes, scales = zip(*made, strict=True)
    return QuantizedMatrices(paddle.stack(codes), paddle.stack(scales), format, transpose)


def _integer_codes(matrix: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Codes [D, N], or [16 * ceil(D / 32), N] for int4, and scales [N] or [ceil(D / 128), N] of a matrix [D, N]."""
    inputs, outputs = matrix.shape
    limit = 127.0 if format == "int8" else 7.0
    group = 128 if format == "int4_1x128" else max(inputs, 1)
    num_groups = -(-inputs // group) if format == "int4_1x128" else 1
    values = F.pad(matrix.astype("float32"), [0, num_groups * group - inputs, 0, 0])
    values = values.reshape([num_groups, group, outputs])
    magnitudes = paddle.where(values.isnan(), paddle.zeros_like(values), values.abs())
    amax = magnitudes.max(axis=1, keepdim=True).clip(max=paddle.finfo(matrix.dtype).max)
    # A tensor as divisor: Paddle multiplies by the reciprocal of a number.
    scales = paddle.divide(amax, paddle.full([], limit)).astype(matrix.dtype).astype("float32")
    quotients = paddle.divide(values, scales).clip(-limit, limit)
    whole = quotients.trunc()
    rounded = whole + quotients.sign() * ((quotients - whole).abs() >= 0.5).astype("float32")
    is_number = paddle.logical_and(rounded.isfinite(), scales > 0)
    codes = paddle.where(is_number, rounded, paddle.zeros_like(rounded)).astype("int32")
    codes = codes.reshape([num_groups * group, outputs])[:inputs]
    scales = scales.reshape([num_groups, outputs])
    if format != "int4_1x128":
        scales = scales[0]
    return codes.astype("int8") if format == "int8" else _packed(codes), scales


def _packed(codes: Tensor) -> Tensor:
    """`reference.pack_int4` along axis 0."""
    inputs, outputs = codes.shape
    halves = F.pad(codes, [0, -inputs % 32, 0, 0]).reshape([-1, 2, 2, 8, outputs])
    low, high = (halves[:, :, half] + 16 * (halves[:, :, half] < 0).astype("int32") for half in range(2))
    return (low + high * 16).transpose([0, 2, 1, 3]).reshape([-1, outputs]).astype("uint8")


def _scales_shape(codes: Tensor, ue8m0: bool, scale_layout: str) -> list[int]:
    """The shape of the scales of codes; -1 for a size that a graph does not know."""
    num_rows, hidden = codes.shape
    groups = -1 if hidden < 0 else -(-hidden // 128)
    columns = -1 if groups < 0 else -(-groups // 4) if ue8m0 else groups
    if scale_layout == "row":
        return [num_rows, columns]
    return [columns, -1 if num_rows < 0 else -(-num_rows // 4) * 4]


def _check_rows_out(out: Any) -> Tensor:
    """The checked result of expert_fn."""
    return _checks.tensor("quantized_experts", "expert_fn's result", out, _checks.SUM_DTYPES, getattr(out, "shape", []))


def _check_gradients(result: Any, shape: list[int], dtype: Any, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """The checked result of expert_vjp: one gradient for the rows and one for each of the tensors."""
    name = "quantized_experts"
    gradients = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(gradients) != 1 + len(tensors):
        expected = f"{1 + len(tensors)} gradients: d_rows and one for each of the tensors"
        _checks.bad_value(name, "expert_vjp's result", expected, len(gradients))
    _checks.tensor(name, "d_rows of expert_vjp", gradients[0], (dtype,), shape)
    for index, (gradient, tensor) in enumerate(zip(gradients[1:], tensors, strict=True)):
        if gradient is not None:
            _checks.tensor(name, f"expert_vjp's gradient of tensors[{index}]", gradient, (tensor.dtype,), tensor.shape)
    return gradients


def __dir__() -> list[str]:
    return __all__
