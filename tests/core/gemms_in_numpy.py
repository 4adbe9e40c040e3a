# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles of the grouped GEMMs of pmo/grouped.h and pmo/grouped_float8.h: they compute on the arrays of params structs.

Each element of a GEMM is the same float32 sum however tiles and chunks are chosen.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops.reference import (
    MATRIX_FORMATS,
    dequantize_1x128,
    dequantize_matrices,
    quantize_1x128,
    quantize_128x128,
)
from paddle_moe_ops.reference.activations import activate, activation_factors

from .operators.float8_wgrad import OuterFloat8Params, QuantizeColumnsParams
from .operators.grouped_gemm import (
    FEW_ROWS,
    GROUP,
    PING_PONG,
    TILE_COLUMNS,
    Accumulation,
    Float8Params,
    Gathered,
    OuterParams,
    ProductParams,
    Result,
)
from .operators.matrices import QuantizeBlocksParams
from .structs import DTYPES, Params, RoutingKind, Status

__all__ = ["FUNCTION", "ORACLES", "callbacks"]

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
_NAMES = {number: dtype for dtype, number in DTYPES.items()}


def _array(params: Params, name: str, shape: tuple[int, ...], dtype: Any, stride: int | None = None) -> NDArray:
    """Memory that a pointer points to as an array, zeros for NULL; `stride` of rows in elements."""
    address, dtype = params.address(name), np.dtype(dtype)
    strides = None if stride is None else (stride * dtype.itemsize, dtype.itemsize)
    length = int(np.prod(shape)) if stride is None else (shape[0] - 1) * stride + shape[1]
    if address == 0 or length <= 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides)


def _sums(subscripts: str, left: NDArray, right: NDArray) -> NDArray:
    """Sums in float32. einsum computes each element the same way in every chunk, unlike a matrix library."""
    return np.einsum(subscripts, left.astype(np.float32), right.astype(np.float32), optimize=False)


def _groups(p: ProductParams | Float8Params, tile_rows: int) -> Iterator[tuple[int, slice]]:
    """Experts with rows in the window, and these rows."""
    experts = p.num_experts
    first, stop = (_array(p, name, (experts,), np.int32) for name in ("first", "stop"))
    tiles, window = _array(p, "tiles", (experts + 1,), np.int32), _array(p, "window", (2,), np.int32)
    for expert in np.flatnonzero(stop > first):
        begin = int(first[expert] + max(window[0] - tiles[expert], 0) * tile_rows)
        end = int(min(first[expert] + (window[1] - tiles[expert]) * tile_rows, stop[expert]))
        if begin < end:
            yield expert, slice(begin, end)


def _groups_of_sizes(p: ProductParams) -> Iterator[tuple[int, slice]]:
    """Experts with rows, and these rows, by the rules of pmo_grouped_tables_params."""
    ids = {RoutingKind.IDS32: np.int32, RoutingKind.IDS64: np.int64}
    sizes = _array(p, "sizes", (p.num_experts,), ids[RoutingKind(p.sizes_kind)])
    begins = np.cumsum([0, *np.clip(sizes, 0, p.num_rows)[:-1]])
    if p.address("offsets"):
        begins = _array(p, "offsets", (p.num_experts,), ids[RoutingKind(p.offsets_kind)])
    end_before = 0
    for expert, (size, begin) in enumerate(zip(sizes, np.clip(begins, 0, p.num_rows), strict=True)):
        end = max(min(int(begin) + max(int(size), 0), p.num_rows), end_before)
        first = max(int(begin), end_before)
        end_before = end
        if first < end:
            yield expert, slice(first, end)


def _gathered(source: NDArray, tokens: NDArray) -> NDArray:
    """Rows of tokens, zeros where there is no such token."""
    is_there = (tokens >= 0) & (tokens < len(source))
    return np.where(is_there[:, None], source[np.where(is_there, tokens, 0)], np.zeros(1, source.dtype))


def _check_launch(p: ProductParams | Float8Params) -> None:
    assert p.struct_size == ctypes.sizeof(p)
    assert p.width > 0
    assert not _array(p, "counters", (2,), np.int32).any()


def product(p: ProductParams) -> None:
    _check_launch(p)
    assert p.tile_rows != FEW_ROWS or (p.result != Result.GRADIENT and not p.address("hidden") and p.first_row == 0)
    assert p.gathers or p.window_rows <= p.num_sources
    dtype = _NAMES[p.dtype]
    multiply = _multiplication(p)
    source = _array(p, "x", (p.num_sources, p.inner), dtype, p.x_row_stride)
    owners = _array(p, "row_to_token", (p.num_rows,), np.int32)
    out = _array(p, "out", (p.num_rows, p.width), dtype)
    hidden = _array(p, "hidden", (p.num_rows, 2 * p.width), dtype)
    for expert, rows in _groups_of_sizes(p) if p.tile_rows == FEW_ROWS else _groups(p, p.tile_rows):
        x = _gathered(source, owners[rows]) if p.gathers else source[rows.start - p.first_row : rows.stop - p.first_row]
        assert len(x) == rows.stop - rows.start, "a tile reads rows behind its chunk"
        made = multiply(x, expert)
        if p.result == Result.PLAIN:
            out[rows] = made[:, p.first_column : p.first_column + p.width] * _weights(p, rows)
        elif p.result == Result.GATED:
            hidden[rows] = made
            out[rows] = activate(hidden[rows], "swiglu")
        else:
            hidden[rows], out[rows] = _gradient(p, rows, made.astype(dtype), hidden[rows])


def _multiplication(p: ProductParams) -> Callable[[NDArray, int], NDArray]:
    """The product of rows with the matrix of an expert, in float32."""
    experts, dtype = p.num_experts, _NAMES[p.dtype]
    if not p.address("matrix_scales"):
        shape = (p.outer, p.inner) if p.transpose else (p.inner, p.outer)
        values = _array(p, "matrix", (experts, *shape), dtype)
        return lambda x, expert: _sums("rk,kc->rc", x, values[expert].T if p.transpose else values[expert])
    assert p.tile_rows == FEW_ROWS
    assert p.transpose
    format = MATRIX_FORMATS[p.matrix_format]
    depth, is_packed = -(-p.inner // GROUP), format.startswith("int4")
    if format == "fp8_128x128":
        codes = _array(p, "matrix", (experts, p.outer, p.inner), FLOAT8)
        scales = _array(p, "matrix_scales", (experts, -(-p.outer // GROUP), depth), np.float32)
        return lambda x, expert: _float8_sums(*quantize_1x128(x, amax_min=p.amax_min), codes[expert], scales[expert])
    columns, dtype_of_codes = (p.inner // 2, np.uint8) if is_packed else (p.inner, np.int8)
    codes = _array(p, "matrix", (experts, p.outer, columns), dtype_of_codes)
    scales = _array(p, "matrix_scales", (experts, p.outer, depth) if format == "int4_1x128" else codes.shape[:2], "f4")

    def multiply(x: NDArray, expert: int) -> NDArray:
        options = {"format": format, "inner": p.inner, "transpose": True, "dtype": dtype}
        values = dequantize_matrices(codes[[expert]], scales[[expert]], **options)[0]
        return _sums("rk,ck->rc", x, np.ascontiguousarray(values))  # in the order of sums of contiguous values

    return multiply


def _float8_sums(x: NDArray, scales: NDArray, matrix: NDArray, matrix_scales: NDArray) -> NDArray:
    """Sums over groups of 128 columns, each times both scales: rows [R, K] and a matrix [N, K]."""
    made = np.zeros((len(x), len(matrix)), np.float32)
    for group in range(scales.shape[1]):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        factors = np.repeat(matrix_scales[:, group], GROUP)[: len(matrix)]
        made += _sums("rk,ck->rc", x[:, columns], matrix[:, columns]) * scales[:, group, None] * factors
    return made


def _weights(p: ProductParams | Float8Params, rows: slice) -> NDArray:
    weights = _array(p, "weights", (p.num_rows,), np.float32)[rows, None]
    return weights if p.address("weights") else np.ones_like(weights)


def _gradient(
    p: ProductParams | Float8Params, rows: slice, d_scaled: NDArray, hidden: NDArray
) -> tuple[NDArray, NDArray]:
    """The gradient of H and the weighted A; writes the gradients of the weights."""
    live = _array(p, "row_to_token", (p.num_rows,), np.int32)[rows, None] >= 0
    d_scaled, weights = (np.where(live, each.astype(np.float32), 0) for each in (d_scaled, _weights(p, rows)))
    pre = np.where(live, hidden, np.zeros(1, hidden.dtype))
    act = activate(pre, "swiglu").astype(np.float32)
    dots = _array(p, "d_weights", (p.num_rows, -(-p.width // TILE_COLUMNS)), np.float32)
    for tile in range(dots.shape[1]):
        columns = slice(TILE_COLUMNS * tile, TILE_COLUMNS * (tile + 1))
        dots[rows, tile] = (act[:, columns] * d_scaled[:, columns]).sum(axis=1)
    d_act = d_scaled * weights
    d_hidden = np.concatenate([d_act * factor for factor in activation_factors(pre, "swiglu")], axis=1)
    return d_hidden.astype(hidden.dtype), (act * weights).astype(hidden.dtype)


def outer(p: OuterParams) -> None:
    assert p.struct_size == ctypes.sizeof(p)
    dtype, experts = _NAMES[p.dtype], p.num_experts
    first, stop = (_array(p, name, (experts,), np.int32) for name in ("first", "stop"))
    owners = _array(p, "row_to_token", (p.num_rows,), np.int32)
    sum_dtype = np.dtype(np.float32) if p.accumulation == Accumulation.ADDS_FLOAT32 else dtype
    out = _array(p, "out", (experts, p.out_rows, p.out_columns), sum_dtype)
    out = out[:, p.first_p : p.first_p + p.p_columns, p.first_q : p.first_q + p.q_columns]
    assert not _array(p, "counters", (2,), np.int32).any()

    def operand(which: Gathered, name: str, columns: int, stride: int) -> Callable[[slice], NDArray]:
        is_gathered = p.gathered == which
        source = _array(p, name, (p.num_sources if is_gathered else p.num_rows, columns), dtype, stride)
        return lambda rows: _gathered(source, owners[rows]) if is_gathered else source[rows]

    of_p = operand(Gathered.P, "p", p.p_columns, p.p_row_stride)
    of_q = operand(Gathered.Q, "q", p.q_columns, p.q_row_stride)
    if p.accumulation == Accumulation.OVERWRITES:
        out[...] = np.zeros(1, dtype)
    for expert in np.flatnonzero(stop > first):
        rows = slice(int(first[expert]), int(stop[expert]))
        made = _sums("ri,rj->ij", of_p(rows), of_q(rows))
        if p.accumulation != Accumulation.OVERWRITES:
            made += out[expert].astype(np.float32)
        out[expert] = made


def float8(p: Float8Params) -> None:
    _check_launch(p)
    assert p.window_rows <= p.num_sources
    depth = -(-p.inner // GROUP)
    x, scales = _array(p, "x", (p.num_sources, p.inner), FLOAT8), _array(p, "x_scales", (p.num_sources, depth), "f4")
    matrices = _array(p, "matrix", (p.num_experts, p.outer, p.inner), FLOAT8)
    matrix_scales = _array(p, "matrix_scales", (p.num_experts, -(-p.outer // GROUP), depth), np.float32)
    out = _array(p, "out", (p.num_rows, p.width), BFLOAT16)
    hidden = _array(p, "hidden", (p.num_rows, 2 * p.width), BFLOAT16)
    for expert, rows in _groups(p, PING_PONG):
        taken = slice(rows.start - p.first_row, rows.stop - p.first_row)
        assert len(x[taken]) == rows.stop - rows.start, "a tile reads rows behind its chunk"
        made = _float8_sums(x[taken], scales[taken], matrices[expert], matrix_scales[expert])
        if p.result == Result.PLAIN:
            out[rows] = made[:, p.first_column : p.first_column + p.width] * _weights(p, rows)
        elif p.result == Result.GATED:
            hidden[rows] = made
            out[rows] = activate(hidden[rows], "swiglu")
            _quantize(p, "codes", "scales", rows, out[rows])
            _quantize(p, "hidden_codes", "hidden_scales", rows, hidden[rows])
        else:
            pre = _dequantized(p, rows) if p.address("hidden_codes") else hidden[rows]
            hidden[rows], out[rows] = _gradient(p, rows, made, pre)
            _quantize(p, "codes", "scales", rows, hidden[rows])


def _codes(p: Float8Params, codes: str, scales: str, columns: int) -> tuple[NDArray, NDArray]:
    shape = (p.num_rows, columns // GROUP)
    return _array(p, codes, (p.num_rows, columns), FLOAT8), _array(p, scales, shape, np.float32)


def _quantize(p: Float8Params, codes: str, scales: str, rows: slice, values: NDArray) -> None:
    if p.address(codes):
        to_codes, to_scales = _codes(p, codes, scales, values.shape[1])
        to_codes[rows], to_scales[rows] = quantize_1x128(values, amax_min=p.amax_min)


def _dequantized(p: Float8Params, rows: slice) -> NDArray:
    codes, scales = _codes(p, "hidden_codes", "hidden_scales", 2 * p.width)
    return dequantize_1x128(codes[rows], scales[rows], dtype=BFLOAT16)


def quantize_blocks(p: QuantizeBlocksParams) -> None:
    assert p.struct_size == ctypes.sizeof(p)
    x = _array(p, "x", (p.num_matrices, p.num_rows, p.num_columns), _NAMES[p.dtype])
    for turned, prefix in ((False, ""), (True, "turned_")):
        if p.address(f"{prefix}codes"):
            codes, scales = quantize_128x128(x.swapaxes(1, 2) if turned else x, amax_min=p.amax_min)
            _array(p, f"{prefix}codes", codes.shape, FLOAT8)[...] = codes
            _array(p, f"{prefix}scales", scales.shape, np.float32)[...] = scales


def _row_blocks(p: QuantizeColumnsParams | OuterFloat8Params) -> Iterator[tuple[int, slice]]:
    """Experts with rows, and their row blocks."""
    tiles = _array(p, "tiles", (p.num_experts + 1,), np.int32)
    for expert in np.flatnonzero(np.diff(tiles)):
        yield expert, slice(int(tiles[expert]), min(int(tiles[expert + 1]), p.num_blocks))


def quantize_columns(p: QuantizeColumnsParams) -> None:
    assert p.struct_size == ctypes.sizeof(p)
    columns = p.num_columns
    first, stop = (_array(p, name, (p.num_experts,), np.int32) for name in ("first", "stop"))
    owners = _array(p, "row_to_token", (p.num_rows,), np.int32)
    x = _array(p, "x", (p.num_sources, columns), _NAMES[p.dtype], p.x_row_stride)
    codes = _array(p, "codes", (p.num_blocks, columns, GROUP), FLOAT8)
    scales = _array(p, "scales", (p.num_blocks, -(-columns // GROUP) if p.by_blocks else columns), np.float32)
    values = _array(p, "values", (p.num_rows, columns), np.float32)
    for expert, blocks in _row_blocks(p):
        rows = slice(int(first[expert]), int(stop[expert]))
        given = (_gathered(x, owners[rows]) if p.address("row_to_token") else x[rows]).T
        if p.by_blocks:
            made, made_scales = (each[0] for each in quantize_128x128(given[None], amax_min=p.amax_min))
        else:
            made, made_scales = quantize_1x128(given, amax_min=p.amax_min)
        for number, block in enumerate(range(blocks.start, blocks.stop)):
            part = slice(number * GROUP, (number + 1) * GROUP)
            codes[block] = np.zeros(1, FLOAT8)
            codes[block, :, : made[:, part].shape[1]] = made[:, part]
            scales[block] = made_scales[:, number]
            infinite = np.isinf(given[:, part].astype(np.float32)).any(axis=1)
            if p.by_blocks:
                infinite = np.repeat(np.logical_or.reduceat(infinite, range(0, columns, GROUP)), GROUP)[:columns]
            codes[block, infinite] = np.float32(np.nan)
            made[infinite, part] = np.float32(np.nan)
            of_columns = np.repeat(scales[block], GROUP)[:columns] if p.by_blocks else scales[block]
            with np.errstate(invalid="ignore"):
                values[rows][part] = made[:, part].T.astype(np.float32) * of_columns


def outer_float8(p: OuterFloat8Params) -> None:
    """Products are summed within each row block, then scaled and added."""
    assert p.struct_size == ctypes.sizeof(p)
    sizes = {"a": p.a_columns, "b": p.b_columns}
    a, b = (_array(p, name, (p.num_blocks, size, GROUP), FLOAT8) for name, size in sizes.items())
    a_scales = _array(p, "a_scales", (p.num_blocks, p.a_columns), np.float32)
    b_scales = _array(p, "b_scales", (p.num_blocks, -(-p.b_columns // GROUP)), np.float32)
    is_float32 = p.accumulation == Accumulation.ADDS_FLOAT32
    out = _array(p, "out", (p.num_experts, p.out_rows, p.out_columns), np.float32 if is_float32 else BFLOAT16)
    rows, columns = (p.b_columns, p.a_columns) if p.transpose else (p.a_columns, p.b_columns)
    out = out[:, p.first_row : p.first_row + rows, p.first_column : p.first_column + columns]
    assert not _array(p, "counters", (2,), np.int32).any()
    if p.accumulation == Accumulation.OVERWRITES:
        out[...] = np.zeros(1, BFLOAT16)
    for expert, blocks in _row_blocks(p):
        made = np.zeros((p.a_columns, p.b_columns), np.float32)
        for block in range(blocks.start, blocks.stop):
            factors = np.repeat(b_scales[block], GROUP)[: p.b_columns]
            made += _sums("ir,jr->ij", a[block], b[block]) * (a_scales[block][:, None] * factors)
        made = made.T if p.transpose else made
        if p.accumulation != Accumulation.OVERWRITES:
            made = made + out[expert].astype(np.float32)
        out[expert] = made


# Oracle and struct of each operator.
ORACLES: dict[str, tuple[Callable[[Any], None], type[Params]]] = {
    "grouped_product": (product, ProductParams),
    "grouped_outer": (outer, OuterParams),
    "grouped_float8": (float8, Float8Params),
    "quantize_blocks": (quantize_blocks, QuantizeBlocksParams),
    "quantize_columns": (quantize_columns, QuantizeColumnsParams),
    "grouped_outer_float8": (outer_float8, OuterFloat8Params),
}


def callbacks() -> dict[str, Any]:
    """The oracles as functions that the core can call, by the names of the operators.

    An exception, which ctypes would ignore, becomes a status.
    """

    def callback(oracle: Callable[[Any], None], struct: type[Params]) -> Any:
        def call(address: int, stream: Any) -> int:
            try:
                oracle(struct.from_address(address))
            except Exception:
                traceback.print_exc()
                return Status.INTERNAL
            return Status.OK

        return FUNCTION(call)

    return {name: callback(*each) for name, each in ORACLES.items()}
