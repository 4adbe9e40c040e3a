# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Quantise rows to float8_e4m3fn with a scale per 128 columns, optionally while permuting, and dequantise.
Memory-bound.

    scale = max(|group|, amax_min) / 448, or the next power of two (ue8m0);  code = e4m3(x * (1 / scale))

Layout: x [T, H]; codes [N, H]. Scales are words of four bytes, a float32 or four packed ue8m0 exponents: word w of row
r is at r * W + w, or with scale_layout="col" at w * ceil4(N) + r.

Mapping: COLUMN_BLOCKS programs per token. Each loads its groups once, as a tile [GROUPS, 128], reduces and converts
them in registers and stores them to the token's rows, ROWS_PER_ROUND per round. Further programs of the same launch
zero the padding and the words that pad column-major scales. Dequantise has COLUMN_BLOCKS programs per row.

Conversion uses integer arithmetic and one rounding addition: every GPU and the interpreter give the same bits.

Bytes moved: T * H elements, N * (H + 4 W) bytes, and 4 * (T * K + N) of maps; dequantise N * (H + 4 W) bytes and N * H
elements.
"""

import struct
from typing import Any

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, cdiv, next_power_of_2
from .configs import rows_per_round
from .numerics import CARRIERS, load_row_ids, rounded, widened
from .permute import FILL_BLOCK, zero_padding

__all__ = ["dequantize", "quantize"]

_GROUP = 128
_PACKED = 4
_COLUMN_ALIGNMENT = 4
_WARP_COLUMNS = 512  # 16 per lane, and the four groups of one packed word
_MAX_WARPS = 4
_VECTOR = 16


@triton.jit
def _scale_bits(magnitudes, amax_min, UE8M0: tl.constexpr):
    """Bits of the scales [GROUPS] of groups, from bits without signs. All are positive and normal."""
    finite = tl.where(magnitudes > 0x7F800000, 0, magnitudes)  # NaN is ignored
    amax = tl.minimum(tl.maximum(tl.max(finite, axis=1), amax_min), 0x7F7FFFFF)
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), 448.0).to(tl.int32, bitcast=True)
    if UE8M0:
        scale = (scale + 0x7FFFFF) >> 23 << 23
    return scale


@triton.jit
def _to_e4m3(value):
    """Codes of float32 values: to nearest even, at most 448, 0x7F for NaN."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clipped = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = ((clipped + 0x7FFFF + (clipped >> 20 & 1)) >> 20) - (120 << 3)
    # Below 2^-6, codes are multiples of 2^-9. Adding 2^14, whose float32 ulp is 2^-9, rounds to one.
    shifted = clipped.to(tl.float32, bitcast=True) + 16384.0
    code = tl.where(clipped < 0x3C800000, shifted.to(tl.int32, bitcast=True) - 0x46800000, normal)
    code = code | (bits >> 24 & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.int8)


@triton.jit
def _from_e4m3(code):
    """float32 values of codes."""
    magnitude = code.to(tl.int32) & 0x7F
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120; exact, subnormals as well
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True))
    return (bits | (code.to(tl.int32) & 0x80) << 24).to(tl.float32, bitcast=True)


@triton.jit
def _word_places(part, words, scale_rows, GROUPS: tl.constexpr, UE8M0: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Scale words of a part of a row, their offsets from the row's first word, and the stride between rows."""
    count: tl.constexpr = GROUPS // 4 if UE8M0 else GROUPS
    word = part * count + tl.arange(0, count)
    if BY_COLUMN:
        return word, word * scale_rows.to(tl.int64), 1
    else:
        return word, word.to(tl.int64), words


@triton.jit
def _store_row(codes, scales, row, width, columns, code, word, words, places, row_step, scale):
    """Store one row of codes and scale words; row -1 stores nothing."""
    row = row.to(tl.int64)
    tl.store(codes + row * width + columns, code, mask=columns < tl.where(row >= 0, width, 0))
    tl.store(scales + row * row_step + places, scale, mask=word < tl.where(row >= 0, words, 0))


@triton.jit
def quantize_kernel(
    x,
    token_rows,
    row_to_token,
    codes,
    scales,
    num_tokens,
    num_rows,
    scale_rows,
    row_slots,
    num_groups,
    words,
    amax_min,
    vectors,
    x_stride_vectors,
    DTYPE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    UE8M0: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    FILL_CODES: tl.constexpr,
    FILL_SCALES: tl.constexpr,
    ROWS_PER_ROUND: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
    FILL: tl.constexpr,
):
    """COLUMN_BLOCKS programs per token, then COLUMN_BLOCKS per FILL rows. Without a map, row t is token t."""
    program = tl.program_id(0)
    token = program // COLUMN_BLOCKS
    part = program % COLUMN_BLOCKS
    groups = part * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    width = vectors.to(tl.int64) * VECTOR
    inside = columns < width
    word, places, row_step = _word_places(part, words, scale_rows, GROUPS, UE8M0, BY_COLUMN)
    if token < num_tokens:
        source = x + token.to(tl.int64) * (x_stride_vectors * VECTOR) + columns
        values = widened(tl.load(source, mask=inside, other=0), DTYPE)
        scale = _scale_bits(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, amax_min, UE8M0)
        inverse = tl.div_rn(1.0, scale.to(tl.float32, bitcast=True))
        code = _to_e4m3(values * inverse[:, None])
        if UE8M0:
            exponents = tl.where(groups < num_groups, scale >> 23, 0)
            bytes_of_words = tl.reshape(exponents, [GROUPS // 4, 4]) << (8 * tl.arange(0, 4))[None, :]
            scale = tl.sum(bytes_of_words, axis=1).to(tl.int32)
        if HAS_MAP:
            entries = token_rows + token.to(tl.int64) * row_slots
            first = 0
            while tl.load(entries + first, mask=first < row_slots, other=-1) >= 0:
                target_rows = load_row_ids(entries, first, row_slots, num_rows, ROWS_PER_ROUND)
                for k in tl.static_range(ROWS_PER_ROUND):
                    _store_row(
                        codes, scales, target_rows[k], width, columns, code, word, words, places, row_step, scale
                    )
                first += ROWS_PER_ROUND
        else:
            _store_row(codes, scales, token, width, columns, code, word, words, places, row_step, scale)
    else:
        first = (token - num_tokens) * FILL
        if HAS_MAP:
            if FILL_CODES:
                zero_padding(row_to_token, codes, first, num_rows, width, columns, inside, tl.int8, FILL)
        else:
            first += num_rows
        if FILL_SCALES:
            rows = first + tl.arange(0, FILL)
            empty = (rows >= num_rows) & (rows < scale_rows)
            if HAS_MAP:
                empty = empty | (tl.load(row_to_token + rows, mask=rows < num_rows, other=0) < 0)
            pointers = scales + rows.to(tl.int64)[:, None] * row_step + places[None, :]
            zeros = tl.zeros(pointers.shape, tl.int32)
            tl.store(pointers, zeros, mask=empty[:, None] & (word < words)[None, :])


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    out,
    scale_rows,
    words,
    vectors,
    stride_vectors,
    DTYPE: tl.constexpr,
    UE8M0: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """out[r] = codes[r] * scale, rounded once; COLUMN_BLOCKS programs per row."""
    program = tl.program_id(0)
    row = (program // COLUMN_BLOCKS).to(tl.int64)
    groups = program % COLUMN_BLOCKS * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    width = vectors.to(tl.int64) * VECTOR
    inside = columns < width
    word = groups // 4 if UE8M0 else groups
    if BY_COLUMN:
        place = row + word * scale_rows.to(tl.int64)
    else:
        place = row * words + word
    scale = tl.load(scales + place, mask=word < words, other=0)
    if UE8M0:
        scale = (scale >> (8 * (groups % 4)) & 0xFF) << 23
    code = tl.load(codes + row * (stride_vectors * VECTOR) + columns, mask=inside, other=0)
    value = _from_e4m3(code) * scale.to(tl.float32, bitcast=True)[:, None]
    tl.store(out + row * width + columns, rounded(value, DTYPE), mask=inside)


def quantize(
    device: Device,
    x: Array,
    token_rows: Array | None = None,
    row_to_token: Array | None = None,
    *,
    ue8m0: bool,
    scale_layout: str,
    amax_min: float,
    fill_padding: str = "all",
) -> tuple[Any, Any]:
    """Codes [N, H] in float8_e4m3fn, and scales [N, W], or with "col" [W, ceil4(N)]: float32, or int32 for ue8m0.

    Args:
        device: allocates and launches.
        x: [T, H] float32, float16 or bfloat16.
        token_rows: int32 [T, W] rows of each token, the first -1 ends a token; None: row t is token t.
        row_to_token: int32 [N], with token_rows.
        ue8m0: scales are powers of two, four exponents per int32.
        scale_layout: "row" or "col".
        amax_min: lower limit of a group's largest magnitude.
        fill_padding: "all", "meta" (scales only) or "none".
    """
    num_tokens, hidden = x.shape
    num_rows = num_tokens if row_to_token is None else row_to_token.shape[0]
    row_slots = 1 if token_rows is None else token_rows.shape[1]
    num_groups = cdiv(hidden, _GROUP)
    words = cdiv(num_groups, _PACKED) if ue8m0 else num_groups
    by_column = scale_layout == "col"
    scale_rows = cdiv(num_rows, _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT if by_column else num_rows
    codes = device.empty([num_rows, hidden], "float8_e4m3fn")
    scales = device.empty([words, scale_rows] if by_column else [num_rows, words], "int32" if ue8m0 else "float32")
    if not num_rows:
        return codes, scales
    has_map = row_to_token is not None
    fill_codes, fill_scales = fill_padding == "all", fill_padding != "none"
    fills = cdiv(scale_rows - (0 if has_map else num_rows), FILL_BLOCK) if fill_codes or fill_scales else 0
    dtype = device.dtype_name(x)
    stride = device.row_stride(x) if num_tokens > 1 else 0
    vector, aligned, columns, parts = _access_widths(hidden, stride, x, codes)
    device.launch(
        quantize_kernel,
        (num_tokens + fills) * parts,
        (CARRIERS[dtype] + aligned, "*i32", "*i32", "*i8" + aligned, "*i32", *["i32"] * 7, "i64", "i64"),
        (
            *map(address, (x, token_rows, row_to_token, codes, scales)),
            *(num_tokens, num_rows, scale_rows, row_slots, num_groups, words, _float_bits(amax_min)),
            *(hidden // vector, stride // vector),
        ),
        (
            *(dtype, has_map, ue8m0, by_column, fill_codes, fill_scales),
            rows_per_round(row_slots, num_rows, num_tokens),
            *(parts, columns // _GROUP, vector, FILL_BLOCK),
        ),
        columns // _WARP_COLUMNS,
    )
    return codes, scales


def dequantize(device: Device, codes: Array, scales: Array, scale_layout: str, dtype: str) -> Any:
    """[N, H] of float32, float16 or bfloat16: codes of `quantize` times their scales, rounded once."""
    num_rows, hidden = codes.shape
    out = device.empty([num_rows, hidden], dtype)
    if not num_rows:
        return out
    by_column = scale_layout == "col"
    words, scale_rows = scales.shape if by_column else (scales.shape[1], num_rows)
    stride = device.row_stride(codes) if num_rows > 1 else 0
    vector, aligned, columns, parts = _access_widths(hidden, stride, codes, out)
    device.launch(
        dequantize_kernel,
        num_rows * parts,
        ("*i8" + aligned, "*i32", CARRIERS[dtype] + aligned, "i32", "i32", "i64", "i64"),
        (*map(address, (codes, scales, out)), scale_rows, words, hidden // vector, stride // vector),
        (dtype, device.dtype_name(scales) == "int32", by_column, parts, columns // _GROUP, vector),
        columns // _WARP_COLUMNS,
    )
    return out


def _access_widths(hidden: int, stride: int, *arrays: Array) -> tuple[int, str, int, int]:
    """Elements per access, the alignment suffix of pointer types, columns per program, and programs per row."""
    counts = hidden, stride, *(array.data_ptr() for array in arrays)
    vector = _VECTOR if all(count % _VECTOR == 0 for count in counts) else 1
    columns = min(max(next_power_of_2(hidden), _WARP_COLUMNS), _WARP_COLUMNS * _MAX_WARPS)
    return vector, ":16" if vector > 1 else "", columns, cdiv(hidden, columns)


def _float_bits(value: float) -> int:
    """Bits of a number rounded to float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]
