# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""NumPy implementations of the Hopper kernels in csrc/include/pmo/grouped.h, for machines without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.triton import hopper_product
from paddle_moe_ops.triton.gemm import mlp
from paddle_moe_ops.triton.gemm.configs import GemmConfig
from paddle_moe_ops.triton.gemm.types import Gpu
from paddle_moe_ops.triton.hopper_float8 import AMAX_MIN, GroupedFloat8Params, QuantizeBlocksParams, bits_of
from paddle_moe_ops.triton.hopper_outer import GroupedOuterParams, grouped_outer_of
from paddle_moe_ops.triton.hopper_product import (
    GATED,
    PLAIN,
    TILE_COLUMNS,
    TILE_ROWS,
    TURNED_ROWS,
    WIDE_COLUMNS,
    GroupedProductParams,
    LibraryKernel,
    grouped_product_of,
)

__all__ = [
    "HOPPER",
    "TILES",
    "choose_small_tiles",
    "fields_in_header",
    "kernel_for",
    "launches_of",
    "numpy_float8_kernels",
    "numpy_grouped_outer",
    "numpy_grouped_product",
    "use_products",
]

HOPPER = Gpu(90, 132)
TILES = GemmConfig(128, 16, 16, 2, 2, 4, 1, tma=False)

_HEADERS = Path(__file__).parents[2] / "paddle_moe_ops/csrc/include/pmo"
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_DTYPES = {1: np.dtype(np.float16), 2: np.dtype(ml_dtypes.bfloat16)}


def _at(address: int | None, dtype: Any, *shape: int) -> NDArray:
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address or 0)
    return np.frombuffer(raw, np.uint8).view(kind).reshape(shape)


def _rows_at(address: int | None, dtype: Any, height: int, width: int, stride: int) -> NDArray:
    count = (height - 1) * stride + width if height else 0
    item = np.dtype(dtype).itemsize
    return np.lib.stride_tricks.as_strided(_at(address, dtype, count), (height, width), (stride * item, item))


def _groups(p: GroupedProductParams | GroupedFloat8Params, tile_rows: int) -> Iterator[tuple[int, slice]]:
    """Each tile of the window: its expert and rows."""
    experts = p.num_experts
    first, stop = (_at(each, np.int32, experts) for each in (p.first, p.stop))
    tiles, window = _at(p.tiles, np.int32, experts + 1), _at(p.window, np.int32, 2)
    for expert in range(experts):
        for tile in range(max(tiles[expert], window[0]), min(tiles[expert + 1], window[1])):
            begin = first[expert] + (tile - tiles[expert]) * tile_rows
            yield expert, slice(begin, min(begin + tile_rows, stop[expert]))


def _gathered(x: NDArray, p: GroupedProductParams | GroupedOuterParams) -> NDArray:
    """The rows of tokens."""
    tokens = _at(p.row_to_token, np.int32, p.num_rows)
    is_there = (tokens >= 0) & (tokens < p.num_sources)
    return np.where(is_there[:, None], x[np.where(is_there, tokens, 0)], 0).astype(x.dtype)


def _swiglu(hidden: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """SwiGLU and its derivatives by gate and up."""
    gate, up = np.split(hidden.astype(np.float64), 2, axis=1)
    share = 1 / (1 + np.exp(-gate))
    return gate * share * up, up * share * (1 + gate * (1 - share)), gate * share


def _entry(reference: Any, stream: Any) -> int:
    p: GroupedProductParams = reference._obj
    if p.struct_size != ctypes.sizeof(p) or (p.tile_rows != TURNED_ROWS and p.result != PLAIN):
        return 1
    if p.tile_rows != TURNED_ROWS and p.tile_columns not in (TILE_COLUMNS, WIDE_COLUMNS):
        return 1
    dtype = _DTYPES[p.dtype]
    shape = (p.outer, p.inner) if p.transpose else (p.inner, p.outer)
    matrices = _at(p.matrix, dtype, p.num_experts, *shape)
    x = _rows_at(p.x, dtype, p.num_sources, p.inner, p.x_row_stride)
    out = _at(p.out, dtype, p.num_rows, p.width)
    columns = slice(p.first_column, p.first_column + p.outer if p.result == GATED else p.first_column + p.width)
    for expert, rows in _groups(p, p.tile_rows):
        matrix = matrices[expert].T if p.transpose else matrices[expert]
        begin = 0 if p.gathers else p.first_row
        taken = (_gathered(x, p) if p.gathers else x)[rows.start - begin : rows.stop - begin]
        sums = taken.astype(np.float64) @ matrix[:, columns].astype(np.float64)
        weights = _at(p.weights, np.float32, p.num_rows)[rows, None] if p.weights else 1.0
        if p.result == PLAIN:
            out[rows] = sums * weights
            continue
        if p.result == GATED:
            halves = sums.astype(dtype)
            if p.hidden:
                _at(p.hidden, dtype, p.num_rows, p.outer)[rows] = halves
            out[rows] = _swiglu(halves)[0]
            continue
        hidden = _at(p.hidden, dtype, p.num_rows, 2 * p.width)[rows]
        live = np.ones((len(sums), 1), bool)
        if p.row_to_token:
            live = _at(p.row_to_token, np.int32, p.num_rows)[rows, None] >= 0
        act, by_gate, by_up = _swiglu(np.where(live, hidden, 0))
        act, sums = (np.where(live, each, 0).astype(dtype).astype(np.float64) for each in (act, sums))
        d_act = sums * np.where(live, weights, 0)
        hidden[...] = np.concatenate([d_act * by_gate, d_act * by_up], axis=1)
        out[rows] = act * np.where(live, weights, 0)
        if p.d_weights:
            tiles = -(-p.width // TILE_COLUMNS)
            shares = np.add.reduceat(act * sums, np.arange(0, p.width, TILE_COLUMNS), axis=1)
            _at(p.d_weights, np.float32, p.num_rows, tiles)[rows] = shares
    return 0


def _outer_entry(reference: Any, stream: Any) -> int:
    p: GroupedOuterParams = reference._obj
    if p.struct_size != ctypes.sizeof(p):
        return 1
    heights = [p.num_sources if p.gathered == number else p.num_rows for number in (1, 2)]
    left = _rows_at(p.p, _DTYPES[p.dtype], heights[0], p.p_columns, p.p_row_stride)
    right = _rows_at(p.q, _DTYPES[p.dtype], heights[1], p.q_columns, p.q_row_stride)
    if p.gathered == 1:
        left = _gathered(left, p)
    elif p.gathered == 2:
        right = _gathered(right, p)
    first, stop = (_at(each, np.int32, p.num_experts) for each in (p.first, p.stop))
    out = _at(p.out, _DTYPES[p.dtype], p.num_experts, p.out_rows, p.out_columns)
    out = out[:, p.first_p : p.first_p + p.p_columns, p.first_q : p.first_q + p.q_columns]
    for expert in range(p.num_experts):
        rows = slice(first[expert], stop[expert])
        out[expert] = left[rows].astype(np.float64).T @ right[rows].astype(np.float64)
    return 0


def _float8_entry(reference_to: Any, stream: Any) -> int:
    p: GroupedFloat8Params = reference_to._obj
    if p.struct_size != ctypes.sizeof(p) or p.amax_min != bits_of(AMAX_MIN):
        return 1
    bf16, depth, height = _DTYPES[2], -(-p.inner // 128), -(-p.outer // 128)
    codes = _at(p.matrix, _FLOAT8, p.num_experts, p.outer, p.inner)
    scales = _at(p.matrix_scales, np.float32, p.num_experts, height, depth)
    matrices = reference.dequantize_128x128(codes, scales, dtype=np.float32)
    x = _at(p.x, _FLOAT8, p.num_sources, p.inner)
    x = reference.dequantize_1x128(x, _at(p.x_scales, np.float32, p.num_sources, depth), dtype=np.float32)
    columns = slice(p.first_column, p.first_column + (p.outer if p.result == GATED else p.width))
    for expert, rows in _groups(p, TILE_ROWS):
        taken = x[rows.start - p.first_row : rows.stop - p.first_row].astype(np.float64)
        sums = taken @ matrices[expert, columns].T.astype(np.float64)
        weights = _at(p.weights, np.float32, p.num_rows)[rows, None] if p.weights else 1.0
        if p.result == PLAIN:
            _at(p.out, bf16, p.num_rows, p.width)[rows] = sums * weights
        elif p.result == GATED:
            halves = sums.astype(bf16)
            if p.hidden:
                _at(p.hidden, bf16, p.num_rows, p.outer)[rows] = halves
            act = _swiglu(halves)[0].astype(bf16)
            if p.out:
                _at(p.out, bf16, p.num_rows, p.width)[rows] = act
            _quantize_to(p.codes, p.scales, p.num_rows, rows, act)
            _quantize_to(p.hidden_codes, p.hidden_scales, p.num_rows, rows, halves)
        else:
            hidden = _at(p.hidden, bf16, p.num_rows, 2 * p.width)[rows]
            live = _at(p.row_to_token, np.int32, p.num_rows)[rows, None] >= 0
            act, by_gate, by_up = _swiglu(np.where(live, _dequantized(p, rows) if p.hidden_codes else hidden, 0))
            act, sums = act.astype(bf16).astype(np.float64), np.where(live, sums, 0)
            d_act = sums * np.where(live, weights, 0)
            hidden[...] = np.concatenate([d_act * by_gate, d_act * by_up], axis=1)
            _at(p.out, bf16, p.num_rows, p.width)[rows] = act * np.where(live, weights, 0)
            _quantize_to(p.codes, p.scales, p.num_rows, rows, hidden)
            if p.d_weights:
                shares = np.add.reduceat(act * sums, np.arange(0, p.width, TILE_COLUMNS), axis=1)
                _at(p.d_weights, np.float32, p.num_rows, p.width // TILE_COLUMNS)[rows] = shares
    return 0


def _quantize_to(to_codes: int | None, to_scales: int | None, num_rows: int, rows: slice, values: NDArray) -> None:
    if to_codes:
        columns = values.shape[1]
        codes, scales = reference.quantize_1x128(values, amax_min=AMAX_MIN)
        _at(to_codes, _FLOAT8, num_rows, columns)[rows] = codes
        _at(to_scales, np.float32, num_rows, columns // 128)[rows] = scales


def _dequantized(p: GroupedFloat8Params, rows: slice) -> NDArray:
    """Rows of hidden for a gradient, dequantized from float8."""
    codes = _at(p.hidden_codes, _FLOAT8, p.num_rows, 2 * p.width)[rows]
    scales = _at(p.hidden_scales, np.float32, p.num_rows, 2 * p.width // 128)[rows]
    return reference.dequantize_1x128(codes, scales, dtype=_DTYPES[2])


def _blocks_entry(reference_to: Any, stream: Any) -> int:
    p: QuantizeBlocksParams = reference_to._obj
    if p.struct_size != ctypes.sizeof(p) or p.amax_min != bits_of(AMAX_MIN):
        return 1
    x = _at(p.x, {0: np.dtype(np.float32), **_DTYPES}[p.dtype], p.num_matrices, p.num_rows, p.num_columns)
    for turned, to_codes, to_scales in ((False, p.codes, p.scales), (True, p.turned_codes, p.turned_scales)):
        if to_codes:
            codes, scales = reference.quantize_128x128(x.swapaxes(1, 2) if turned else x, amax_min=AMAX_MIN)
            _at(to_codes, _FLOAT8, *codes.shape)[...] = codes
            _at(to_scales, np.float32, *scales.shape)[...] = scales
    return 0


def fields_in_header(struct: str, header: str = "grouped.h") -> list[tuple[str, Any]]:
    """Fields of a struct in a header, as `ctypes` declares them; 32-bit numbers count as integers."""
    text = (_HEADERS / header).read_text(encoding="utf-8")
    body = re.search(rf"typedef struct {struct} \{{(.*?)\}} {struct};", text, re.DOTALL)[1]
    fields = re.findall(r"^ +(?:const )?(\w+)( |\* ?)(\w+);", body, re.MULTILINE)
    types = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_int32}
    return [(name, ctypes.c_void_p if "*" in star else types[kind]) for kind, star, name in fields]


def launches_of(name: str, params: type[ctypes.Structure], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """A list that takes the fields of each launch of a kernel from now on."""
    seen: list[dict[str, int]] = []
    run, fields = LibraryKernel.run, [field for field, *_ in params._fields_[1:]]

    def record(self: LibraryKernel, *arguments: Any) -> None:
        if self.__name__ == name:
            seen.append(dict(zip(fields, arguments[9:], strict=True)))
        run(self, *arguments)

    monkeypatch.setattr(LibraryKernel, "run", record)
    return seen


def choose_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers run as on a Hopper GPU, in small tiles."""
    for name in ("gated_config", "gemm_config", "wgrad_config"):
        monkeypatch.setattr(mlp, name, lambda *_: TILES)
    monkeypatch.setattr(mlp, "gpu_at", lambda _: HOPPER)


def kernel_for(gpu: Any, monkeypatch: pytest.MonkeyPatch, in_numpy: LibraryKernel, of_library: Any) -> LibraryKernel:
    """The kernel that a device launches in a test: on a GPU the library's, elsewhere the NumPy one with small tiles.

    Args:
        gpu: the device.
        monkeypatch: patches the choice of tiles.
        in_numpy: the kernel in NumPy.
        of_library: gives the kernel of a library that `ctypes` has loaded.
    """
    from .interpreter import NumpyDevice

    if isinstance(gpu, NumpyDevice):
        choose_small_tiles(monkeypatch)
        return in_numpy
    kernel = of_library(ctypes.CDLL(os.environ["PMO_CORE_LIBRARY"]))
    assert kernel is not None
    return kernel


def use_products(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, plain_rows: Callable[[], int], gathers: Callable[[], bool]
) -> None:
    """Have layers launch the library's grouped GEMMs and wgrad wherever these accept the operands.

    Args:
        gpu: the device.
        monkeypatch: for the choice of kernels.
        plain_rows: returns the rows of the tiles of plain results.
        gathers: returns whether GEMMs gather the rows of tokens.
    """
    from .interpreter import NumpyDevice

    kernel = kernel_for(gpu, monkeypatch, numpy_grouped_product(), grouped_product_of)
    if not isinstance(gpu, NumpyDevice):
        large = GemmConfig(128, 128, 64, 8, 4, 8, 1, tma=True)
        for name in ("gated_config", "gemm_config"):
            monkeypatch.setattr(mlp, name, lambda *_: large)
    monkeypatch.setattr(gpu, "grouped_product", kernel)
    monkeypatch.setattr(gpu, "grouped_outer", kernel_for(gpu, monkeypatch, numpy_grouped_outer(), grouped_outer_of))
    chosen = lambda gpu, result, *_: plain_rows() if result == PLAIN else TURNED_ROWS  # noqa: E731
    for module in (hopper_product, mlp):
        monkeypatch.setattr(module, "chosen_rows", chosen)
    monkeypatch.setattr(mlp, "gathers", lambda *_, **__: gathers())


def numpy_grouped_outer() -> LibraryKernel:
    return LibraryKernel("grouped_outer", _outer_entry, GroupedOuterParams, lambda: b"wrong struct")


def numpy_grouped_product() -> LibraryKernel:
    return LibraryKernel("grouped_product", _entry, GroupedProductParams, lambda: b"wrong struct")


def numpy_float8_kernels() -> tuple[LibraryKernel, LibraryKernel]:
    wrong = lambda: b"wrong struct"  # noqa: E731
    product = LibraryKernel("grouped_float8", _float8_entry, GroupedFloat8Params, wrong)
    return product, LibraryKernel("quantize_blocks", _blocks_entry, QuantizeBlocksParams, wrong)
