# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A matrix product per expert over its own rows, with gradients; the launchers of `grouped_gemm_kernels`.

M rows, D the inner and N the outer size of a matrix, E experts. Sizes and offsets stay on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..launch.device import ITEM_BYTES, Array, Device, address, blocks
from ..ops.permute import permute
from ..ops.row_sums import row_sums
from .configs import GemmConfig, product_config, weight_gradient_config
from .gpu_facts import gpu_at
from .kernels import product_kernel
from .operands import POINTERS, descriptor_memory, suits_tma, vector_of
from .schedule import experts_at_once, loops_over_experts, schedule
from .types import Groups, Rows, Schedule, Target, Tokens
from .wgrad import weight_gradient

__all__ = [
    "grouped_gemm",
    "grouped_gemm_backward",
    "product",
]


def _rows(device: Device, array: Array) -> Rows:
    height, width = array.shape
    return Rows(array, height, width, device.row_stride(array) if height > 1 else width)


def _permuted(device: Device, x: Array, tokens: Tokens) -> Any:
    """Rows for descriptors: what pointers lose to them, loading rows of tokens, is more than moving these costs."""
    return permute(device, x, None, tokens.token_rows, tokens.row_to_token, "all")[0]


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
    vector = vector_of(item, source, w, *([] if partner is None else [partner]))
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
    pointer = POINTERS[dtype] + (":16" if vector > 1 else "")
    pointers = (pointer, pointer, "*i32", "*fp32", POINTERS[dtype], *[pointer] * 3, "*fp32", pointer, *["*i32"] * 5)
    addresses = (
        *(source.address(item), address(w), address(row_to_token), address(weights), address(bias)),
        *(0 if partner is None else partner.address(item), *map(address, made)),
        *map(address, (tables.first, tables.stop, tables.tiles, tables.spare)),
        address(tables.windows) + ITEM_BYTES["int32"] * (windows + 1 if window is None else window),
    )
    with descriptor_memory(device, use_tma):
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
                *(experts_at_once(experts), loops_over_experts(experts)),
            ),
            config.warps,
        )
    return made


def uses_tma(config: GemmConfig, vector: int, inner: int, transpose: bool) -> bool:
    """Whether operands of a product come through descriptors; rows that are gathered never do."""
    # A block of W that is not transposed must not reach into the matrix of the next expert.
    return suits_tma(config, vector) and (transpose or inner % config.depth == 0)


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
    vector = 1 if outer * item % 16 else vector_of(item, source, w)
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
    use_tma = suits_tma(config, vector_of(ITEM_BYTES[device.dtype_name(x)], gradients, rows)) and num_rows > 0
    if tokens is not None and use_tma:
        rows, tokens = _rows(device, _permuted(device, x, tokens)), None
    p, q = (gradients, rows) if transpose else (rows, gradients)
    gathered = None if tokens is None else (tokens.row_to_token, transpose)
    tables = schedule(device, groups, num_rows, config.rows)
    weight_gradient(device, p, q, tables, config, num_rows, d_w, gathered=gathered)
    return d_w
