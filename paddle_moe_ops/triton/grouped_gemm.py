# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A matrix product per expert over its own rows, with gradients; the launchers of `grouped_gemm_kernels`.

M rows, D the inner and N the outer size of a matrix, E experts. Sizes and offsets stay on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from .grouped_gemm_configs import ALLOCATOR, GemmConfig, gpu_at, product_config, weight_gradient_config
from .grouped_gemm_kernels import product_kernel, schedule_kernel
from .launching import ITEM_BYTES, Array, Device, address, blocks, sum_vector
from .permute import permute
from .recording import scratch_memory
from .row_sums import row_sums
from .schedules import Schedule
from .weight_gradient_kernel import weight_gradient_kernel

__all__ = [
    "Groups",
    "Rows",
    "Target",
    "Tokens",
    "fill_schedules",
    "grouped_gemm",
    "grouped_gemm_backward",
    "product",
    "schedule",
    "weight_gradient",
]

_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "int64": "*i64"}
# Of the table of experts: few sizes, since each is compiled for.
_EXPERTS_AT_ONCE, _MOST_EXPERTS_AT_ONCE = 256, 1024
_HEIGHTS_AT_ONCE = 3  # of `schedule_kernel`


class Groups(NamedTuple):
    """Which rows an expert has.

    Attributes:
        sizes: int32 or int64 [E].
        offsets: int32 or int64 [E] or more, first row of each; None: the groups follow each other.
    """

    sizes: Array
    offsets: Array | None = None


class Tokens(NamedTuple):
    """Whose rows are multiplied, where those of tokens are given.

    Attributes:
        row_to_token: int32 [M] token of each row, -1 for none.
        token_rows: int32 [T, W] rows of each token; the first -1 ends a token.
    """

    row_to_token: Array
    token_rows: Array


def schedule(device: Device, groups: Groups, num_rows: int, block_rows: int) -> Schedule:
    """Which tiles each expert has."""
    experts = groups.sizes.shape[0]
    array = device.empty([sum(Schedule.lengths(experts, 0))], "int32")
    fill_schedules(device, array, groups, num_rows, [block_rows])
    return Schedule.within(array, experts, 0)


def fill_schedules(
    device: Device,
    array: Array,
    groups: Groups,
    num_rows: int,
    heights: Sequence[int],
    window_rows: int = 0,
    covers_all: bool = True,
) -> None:
    """For tiles of each of these heights, which of them each expert has, and each window of so many rows, if there are.

    Without ``covers_all``, products leave the rows after the last group as they are.
    """
    sizes, offsets = groups
    experts = sizes.shape[0]
    windows = blocks(num_rows, window_rows) if window_rows else 0
    stride = sum(Schedule.lengths(experts, windows))
    pointers = [_POINTERS[device.dtype_name(sizes if each is None else each)] for each in groups]
    for number in range(0, len(heights), _HEIGHTS_AT_ONCE):
        at_once = heights[number : number + _HEIGHTS_AT_ONCE]
        tables = Schedule.within(array, experts, windows, number)
        padded = (*at_once, *[1] * (_HEIGHTS_AT_ONCE - len(at_once)))
        device.launch(
            schedule_kernel,
            len(at_once),
            (*pointers, *["*i32"] * 6, *["i32"] * (5 + _HEIGHTS_AT_ONCE)),
            (*map(address, (sizes, offsets, *tables)), stride, experts, num_rows, windows, window_rows, *padded),
            (offsets is not None, covers_all, _experts_at_once(experts)),
            4,
        )


def _experts_at_once(num_experts: int) -> int:
    return _EXPERTS_AT_ONCE if num_experts <= _EXPERTS_AT_ONCE else _MOST_EXPERTS_AT_ONCE


def _descriptors(device: Device, used: bool) -> contextlib.AbstractContextManager:
    """The context of a launch that makes tensor descriptors, or of another one."""
    return scratch_memory(device) if used else contextlib.nullcontext()


def _uses_tma(config: GemmConfig, vector: int) -> bool:
    return config.tma and ALLOCATOR is not None and vector > 1


class Rows(NamedTuple):
    """A matrix whose rows may lie apart: all rows in expert order, or a window of them or of their columns.

    Attributes:
        array: where it lies.
        height: how many rows.
        width: columns.
        stride: elements from one row to the next.
        offset: elements in front of it.
        first_row: which of all rows the first one is.
    """

    array: Array
    height: int
    width: int
    stride: int
    offset: int = 0
    first_row: int = 0

    def address(self, item: int) -> int:
        return self.array.data_ptr() + self.offset * item


class Target(NamedTuple):
    """Where a result goes: memory for it, and which of its columns are made."""

    array: Array
    first_column: int
    width: int


def _rows(device: Device, array: Array) -> Rows:
    height, width = array.shape
    return Rows(array, height, width, device.row_stride(array) if height > 1 else width)


def _permuted(device: Device, x: Array, tokens: Tokens) -> Any:
    """Rows for descriptors: what pointers lose to them, loading rows of tokens, is more than moving these costs."""
    return permute(device, x, None, tokens.token_rows, tokens.row_to_token, "all")[0]


def _vector(item: int, *operands: Rows | Array) -> int:
    """Elements that can be read at a time from all operands."""
    numbers = []
    for each in operands:
        if isinstance(each, Rows):
            numbers += [each.address(item), each.stride * item, each.width * item]
        else:
            numbers += [address(each), each.shape[-1] * item]
    return sum_vector(item, *numbers)


class _Product(NamedTuple):
    """What `product_kernel` makes."""

    out: Any
    hidden: Any = None
    partial: Any = None
    scaled: Any = None


def product(
    device: Device,
    source: Rows,
    w: Array,
    tables: Schedule,
    config: GemmConfig,
    num_rows: int,
    out: Target,
    *,
    transpose: bool,
    row_to_token: Array | None = None,
    weights: Array | None = None,
    bias: Array | None = None,
    partner: Rows | None = None,
    gated: bool = False,
    hidden: Array | None = None,
    window: int | None = None,
) -> _Product:
    """Launch `product_kernel`.

    Args:
        device: where to.
        source: the rows to multiply; tokens with ``row_to_token``.
        w: [E, N, D], or [E, D, N] without ``transpose``.
        tables: `schedule` of tiles of ``config.rows`` rows.
        config: how it is cut.
        num_rows: M, rows in all.
        out: [M, width] elements at least.
        transpose: whether the matrices are stored transposed.
        row_to_token: int32 [M], for rows that are gathered.
        weights: float32 [M] or None.
        bias: [E, N], dtype of ``w``, contiguous, or None.
        partner: [M, N] whose gradient is made, or None.
        gated: whether the result is SwiGLU of the halves of the product.
        hidden: [M, N], takes the halves, or None.
        window: of rows, which one ``source`` holds; None: all.
    """
    dtype = device.dtype_name(w)
    item = ITEM_BYTES[dtype]
    experts, *matrix = w.shape
    inner, outer = matrix[::-1] if transpose else matrix
    vector = _vector(item, source, w, *([] if partner is None else [partner]))
    if outer * item % 16 or out.width * item % 16:
        vector = 1
    use_tma = uses_tma(config, vector, inner, transpose)
    flat = use_tma and row_to_token is None and partner is None and not gated and inner <= config.flat_depth
    made = _Product(out.array, hidden)
    column_tiles = blocks(out.width, config.columns)
    if partner is not None:
        partial, scaled = (
            device.empty([num_rows, *size], kind) for size, kind in (([column_tiles], "float32"), ([outer], dtype))
        )
        made = made._replace(partial=partial, scaled=scaled)
    if not num_rows:
        return made
    gpu = gpu_at(address(w))
    windows = tables.num_windows
    rows_here = num_rows if window is None else min(num_rows, source.height)
    pointer = _POINTERS[dtype] + (":16" if vector > 1 else "")
    pointers = (pointer, pointer, "*i32", "*fp32", _POINTERS[dtype], *[pointer] * 3, "*fp32", pointer, *["*i32"] * 5)
    addresses = (
        *(source.address(item), address(w), address(row_to_token), address(weights), address(bias)),
        *(0 if partner is None else partner.address(item), *map(address, made)),
        *map(address, (tables.first, tables.stop, tables.tiles, tables.spare)),
        address(tables.windows) + ITEM_BYTES["int32"] * (windows + 1 if window is None else window),
    )
    with _descriptors(device, use_tma):
        device.launch(
            product_kernel,
            config.grid(gpu, (blocks(rows_here, config.rows) + experts) * column_tiles),
            (*pointers, *["i32"] * 9, "i64", "i64"),
            (
                *addresses,
                *(experts, source.height, inner // vector, outer // vector, out.width // vector),
                *(out.first_column, source.first_row, window or 0, 1 if window is None else windows),
                *(source.stride // vector, 0 if partner is None else partner.stride // vector),
            ),
            (
                *(vector, transpose, row_to_token is not None, weights is not None, bias is not None),
                *(partner is not None, gated, hidden is not None, flat),
                *(use_tma, inner % config.depth == 0, out.width % config.columns == 0),
                *(config.rows, config.columns, config.depth, config.band, config.stages),
                *(_experts_at_once(experts), experts > _MOST_EXPERTS_AT_ONCE),
            ),
            config.warps,
        )
    return made


def uses_tma(config: GemmConfig, vector: int, inner: int, transpose: bool) -> bool:
    """Whether operands of a product come through descriptors; rows that are gathered never do."""
    # A block of W that is not transposed must not reach into the matrix of the next expert.
    return _uses_tma(config, vector) and (transpose or inner % config.depth == 0)


def _product(
    device: Device,
    x: Array,
    w: Array,
    groups: Groups,
    transpose: bool,
    tokens: Tokens | None = None,
    weights: Array | None = None,
    partner: Array | None = None,
    config: GemmConfig | None = None,
    bias: Array | None = None,
) -> _Product:
    """A product of all rows and all columns."""
    experts, *matrix = w.shape
    inner, outer = matrix[::-1] if transpose else matrix
    dtype = device.dtype_name(x)
    item = ITEM_BYTES[dtype]
    num_rows = (x if tokens is None else tokens.row_to_token).shape[0]
    config = config or product_config(gpu_at(address(x)), num_rows, experts, inner, outer)
    source, other = _rows(device, x), None if partner is None else _rows(device, partner)
    out = Target(device.empty([num_rows, outer], dtype), 0, outer)
    vector = 1 if outer * item % 16 else _vector(item, source, w)
    if tokens is not None and uses_tma(config, vector, inner, transpose):
        source, tokens = _rows(device, _permuted(device, x, tokens)), None
    return product(
        device,
        source,
        w,
        schedule(device, groups, num_rows, config.rows),
        config,
        num_rows,
        out,
        transpose=transpose,
        row_to_token=tokens and tokens.row_to_token,
        weights=weights,
        bias=bias,
        partner=other,
    )


def grouped_gemm(
    device: Device,
    x: Array,
    w: Array,
    groups: Groups,
    transpose: bool = True,
    *,
    tokens: Tokens | None = None,
    weights: Array | None = None,
    bias: Array | None = None,
    config: GemmConfig | None = None,
) -> Any:
    """[M, N] of the dtype of ``x``, 0 in rows of no group.

    Args:
        device: where to.
        x: [M, D] float16 or bfloat16, rows in expert order; [T, D] with ``tokens``.
        w: [E, N, D], or [E, D, N] without ``transpose``; dtype of ``x``, contiguous.
        groups: the rows of each expert.
        transpose: whether the matrices are stored transposed.
        tokens: whose rows are multiplied: moved by a launch of their own where operands come through descriptors,
            else while they are loaded; or None.
        weights: float32 [M], what each row of the product is multiplied by before it is rounded, or None.
        bias: [E, N], dtype of ``x``, contiguous: what is added to the rows of each expert before that, or None; for its
            gradient see `bias_gradient`.
        config: instead of that of `grouped_gemm_configs.product_config`.
    """
    return _product(device, x, w, groups, transpose, tokens, weights, config=config, bias=bias).out


def grouped_gemm_backward(
    device: Device,
    d_out: Array,
    x: Array,
    w: Array,
    groups: Groups,
    transpose: bool = True,
    *,
    tokens: Tokens | None = None,
    weights: Array | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    config: GemmConfig | None = None,
    weight_config: GemmConfig | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of the rows [M, D], of W, and of the weights [M]; None for those not wanted or not there.

    With ``tokens`` the first is that of the rows. With ``weights`` the gradient of W is that of rows
    that were multiplied by their weights and rounded; that of a weight is the dot product, in float32, of its row and
    the gradient that the row would have without the weight.

    Args:
        device: where to.
        d_out: [M, N] gradient of the product.
        x: as in `grouped_gemm`.
        w: as in `grouped_gemm`.
        groups: as in `grouped_gemm`.
        transpose: as in `grouped_gemm`.
        tokens: as in `grouped_gemm`; not together with ``weights``.
        weights: as in `grouped_gemm`.
        wanted: which of the three are to be made.
        config: instead of that of `grouped_gemm_configs.product_config`, for the rows.
        weight_config: instead of that of `grouped_gemm_configs.weight_gradient_config`.
    """
    need_rows, need_w, need_weights = wanted
    need_weights = need_weights and weights is not None
    d_rows, partial = None, None
    operand = x
    if weights is not None and (need_w or need_weights):
        made = _product(device, d_out, w, groups, not transpose, weights=weights, partner=x, config=config)
        d_rows, partial, operand = made.out, made.partial, made.scaled
    elif need_rows:
        d_rows = _product(device, d_out, w, groups, not transpose, weights=weights, config=config).out
    d_w = None
    if need_w:
        d_w = _weight_gradient(device, d_out, operand, w, groups, transpose, tokens, weight_config)
    return d_rows if need_rows else None, d_w, row_sums(device, partial) if need_weights else None


def _weight_gradient(
    device: Device,
    d_out: Array,
    x: Array,
    w: Array,
    groups: Groups,
    transpose: bool,
    tokens: Tokens | None,
    config: GemmConfig | None,
) -> Any:
    """d_out^T x of each group, transposed like W."""
    d_w = device.empty(w.shape, device.dtype_name(x))
    num_rows = d_out.shape[0]
    gradients, rows = _rows(device, d_out), _rows(device, x)
    config = config or weight_gradient_config(gpu_at(address(w)), *w.shape[1:])
    use_tma = _uses_tma(config, _vector(ITEM_BYTES[device.dtype_name(x)], gradients, rows)) and num_rows > 0
    if tokens is not None and use_tma:
        rows, tokens = _rows(device, _permuted(device, x, tokens)), None
    p, q = (gradients, rows) if transpose else (rows, gradients)
    gathered = None if tokens is None else (tokens.row_to_token, transpose)
    tables = schedule(device, groups, num_rows, config.rows)
    weight_gradient(device, p, q, tables, config, num_rows, d_w, gathered=gathered)
    return d_w


def weight_gradient(
    device: Device,
    p: Rows,
    q: Rows,
    tables: Schedule,
    config: GemmConfig,
    num_rows: int,
    out: Array,
    *,
    window: tuple[int, int] = (0, 0),
    gathered: tuple[Array, bool] | None = None,
    adds: bool = False,
) -> None:
    """out[e, i : i + P, j : j + Q] = p^T q of each expert's rows, or added to it.

    Args:
        device: where to.
        p: [M, P].
        q: [M, Q].
        tables: `schedule` for any tiles.
        config: how it is cut.
        num_rows: M.
        out: [E, ...], dtype of ``p`` or float32.
        window: i and j; multiples of 8.
        gathered: row_to_token and whether q has the rows of tokens, else p has them; None: neither.
        adds: whether to add to what ``out`` holds.
    """
    dtype, out_dtype = device.dtype_name(p.array), device.dtype_name(out)
    item = ITEM_BYTES[dtype]
    experts, _, out_stride = out.shape
    vector = _vector(item, p, q, out)
    use_tma = _uses_tma(config, vector) and num_rows > 0 and gathered is None
    row_to_token, q_gathered = gathered or (None, False)
    place = (window[0] * out_stride + window[1]) * ITEM_BYTES[out_dtype]
    aligned = ":16" if vector > 1 else ""
    pointer = _POINTERS[dtype] + aligned
    sources = (q if q_gathered else p).height
    with _descriptors(device, use_tma):
        device.launch(
            weight_gradient_kernel,
            config.grid(gpu_at(address(out)), experts * blocks(p.width, config.rows) * blocks(q.width, config.columns)),
            (pointer, pointer, "*i32", _POINTERS[out_dtype] + aligned, "*i32", "*i32", *["i32"] * 5, *["i64"] * 4),
            (
                *(p.address(item), q.address(item), address(row_to_token), address(out) + place),
                *(address(tables.first), address(tables.stop)),
                *(experts, num_rows, sources, p.width // vector, q.width // vector),
                *(p.stride // vector, q.stride // vector, out.shape[1] * out_stride // vector, out_stride // vector),
            ),
            (
                *(vector, gathered is not None and not q_gathered, q_gathered, use_tma, adds),
                *(use_tma or p.width % config.rows == 0, use_tma or q.width % config.columns == 0),
                # What is gathered waits for its indices, which take every other stage.
                *(config.rows, config.columns, config.depth, config.band),
                config.stages if gathered is None else 2 * config.stages - 1,
                _experts_at_once(experts),
            ),
            config.warps,
        )
