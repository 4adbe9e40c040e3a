# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A matrix product per expert over its own rows, with gradients; the launchers of `grouped_gemm_kernels`.

M rows, D the inner and N the outer size of a matrix, E experts. Sizes and offsets stay on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from .grouped_gemm_configs import ALLOCATOR, GemmConfig, gpu_at, product_config, weight_gradient_config
from .grouped_gemm_kernels import product_kernel, row_sums_kernel, schedule_kernel, weight_gradient_kernel
from .launching import ITEM_BYTES, Array, Device, address, blocks, next_power_of_2, sum_vector
from .permute import permute

__all__ = ["Groups", "Tokens", "grouped_gemm", "grouped_gemm_backward"]

_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "int64": "*i64"}
# Of the table of experts: few sizes, since each is compiled for.
_EXPERTS_AT_ONCE, _MOST_EXPERTS_AT_ONCE = 256, 1024
_SUM_ROWS = 32


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


class _Schedule(NamedTuple):
    first: Array
    stop: Array
    tiles: Array


def _schedule(device: Device, groups: Groups, num_rows: int, block_rows: int) -> _Schedule:
    sizes, offsets = groups
    experts = sizes.shape[0]
    tables = _Schedule(*(device.empty([length], "int32") for length in (experts + 1, experts, experts + 1)))
    pointers = [_POINTERS[device.dtype_name(sizes if each is None else each)] for each in groups]
    device.launch(
        schedule_kernel,
        1,
        (*pointers, *["*i32"] * 3, "i32", "i32"),
        (*map(address, (sizes, offsets, *tables)), experts, num_rows),
        (offsets is not None, block_rows, _experts_at_once(experts)),
        4,
    )
    return tables


def _experts_at_once(num_experts: int) -> int:
    return _EXPERTS_AT_ONCE if num_experts <= _EXPERTS_AT_ONCE else _MOST_EXPERTS_AT_ONCE


@contextlib.contextmanager
def _descriptors(device: Device, used: bool) -> Iterator[None]:
    """Give a launch memory for its tensor descriptors."""
    if ALLOCATOR is None or not used:
        yield
        return
    token = ALLOCATOR.set(lambda size, alignment, stream: device.empty([blocks(size, 4)], "int32"))
    try:
        yield
    finally:
        ALLOCATOR.reset(token)


def _uses_tma(config: GemmConfig, vector: int) -> bool:
    return config.tma and ALLOCATOR is not None and vector > 1


class _Rows(NamedTuple):
    """A matrix whose rows may lie apart."""

    array: Array
    stride: int

    @property
    def width(self) -> int:
        return self.array.shape[1]


def _rows(device: Device, array: Array) -> _Rows:
    return _Rows(array, device.row_stride(array) if array.shape[0] > 1 else array.shape[1])


def _permuted(device: Device, x: Array, tokens: Tokens) -> Any:
    """Rows for descriptors: what pointers lose to them, loading rows of tokens, is more than moving these costs."""
    return permute(device, x, None, tokens.token_rows, tokens.row_to_token, "all")[0]


def _vector(item: int, *operands: _Rows | Array) -> int:
    """Elements that can be read at a time from all operands."""
    numbers = []
    for operand in operands:
        array, stride = operand if isinstance(operand, _Rows) else (operand, operand.shape[-1])
        numbers += [address(array), stride * item, array.shape[-1] * item]
    return sum_vector(item, *numbers)


class _Product(NamedTuple):
    """What `product_kernel` makes."""

    out: Any
    partial: Any = None
    scaled: Any = None


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
) -> _Product:
    dtype = device.dtype_name(x)
    item = ITEM_BYTES[dtype]
    experts, *matrix = w.shape
    inner, outer = matrix[::-1] if transpose else matrix
    num_rows = (x if tokens is None else tokens.row_to_token).shape[0]
    source, other = _rows(device, x), None if partner is None else _rows(device, partner)
    gpu = gpu_at(address(x))
    config = config or product_config(gpu, num_rows, experts, outer)
    vector = _vector(item, source, w, *([] if other is None else [other]))
    if outer * item % 16:
        vector = 1
    # A block of W that is not transposed must not reach into the matrix of the next expert.
    use_tma = _uses_tma(config, vector) and (transpose or inner % config.depth == 0)
    if tokens is not None and use_tma:
        source, tokens = _rows(device, _permuted(device, x, tokens)), None
    column_tiles = blocks(outer, config.columns)
    made = _Product(device.empty([num_rows, outer], dtype))
    if other is not None:
        made = _Product(
            made.out, device.empty([num_rows, column_tiles], "float32"), device.empty([num_rows, outer], dtype)
        )
    if not num_rows:
        return made
    tables = _schedule(device, groups, num_rows, config.rows)
    pointer = _POINTERS[dtype] + (":16" if vector > 1 else "")
    with _descriptors(device, use_tma):
        device.launch(
            product_kernel,
            config.grid(gpu, (blocks(num_rows, config.rows) + experts) * column_tiles),
            (
                *(pointer, pointer, "*i32", "*fp32", pointer, pointer, "*fp32", pointer, *["*i32"] * 3),
                *(*["i32"] * 5, "i64", "i64"),
            ),
            (
                *map(address, (source.array, w, tokens and tokens.row_to_token, weights, partner, *made, *tables)),
                *(experts, num_rows, source.array.shape[0], inner // vector, outer // vector),
                *(source.stride // vector, 0 if other is None else other.stride // vector),
            ),
            (
                *(vector, transpose, tokens is not None, weights is not None, other is not None),
                *(use_tma, inner % config.depth == 0, outer % config.columns == 0),
                *(config.rows, config.columns, config.depth, config.band, config.stages),
                *(_experts_at_once(experts), experts > _MOST_EXPERTS_AT_ONCE),
            ),
            config.warps,
        )
    return made


def grouped_gemm(
    device: Device,
    x: Array,
    w: Array,
    groups: Groups,
    transpose: bool = True,
    *,
    tokens: Tokens | None = None,
    weights: Array | None = None,
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
        config: instead of that of `grouped_gemm_configs.product_config`.
    """
    return _product(device, x, w, groups, transpose, tokens, weights, config=config).out


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
        d_rows, partial, operand = _product(
            device, d_out, w, groups, not transpose, weights=weights, partner=x, config=config
        )
    elif need_rows:
        d_rows = _product(device, d_out, w, groups, not transpose, weights=weights, config=config).out
    d_w = None
    if need_w:
        d_w = _weight_gradient(device, d_out, operand, w, groups, transpose, tokens, weight_config)
    return d_rows if need_rows else None, d_w, _row_sums(device, partial) if need_weights else None


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
    dtype = device.dtype_name(x)
    d_w = device.empty(w.shape, dtype)
    experts = w.shape[0]
    num_rows = d_out.shape[0]
    gradients, rows = _rows(device, d_out), _rows(device, x)
    gpu = gpu_at(address(w))
    config = config or weight_gradient_config(gpu, *w.shape[1:])
    vector = _vector(ITEM_BYTES[dtype], gradients, rows)
    use_tma = _uses_tma(config, vector) and num_rows > 0
    if tokens is not None and use_tma:
        rows, tokens = _rows(device, _permuted(device, x, tokens)), None
    gathers = tokens is not None
    p, q = (gradients, rows) if transpose else (rows, gradients)
    tables = _schedule(device, groups, num_rows, config.rows)
    pointer = _POINTERS[dtype] + (":16" if vector > 1 else "")
    with _descriptors(device, use_tma):
        device.launch(
            weight_gradient_kernel,
            config.grid(gpu, experts * blocks(p.width, config.rows) * blocks(q.width, config.columns)),
            (pointer, pointer, "*i32", pointer, "*i32", "*i32", *["i32"] * 5, "i64", "i64"),
            (
                *map(address, (p.array, q.array, tokens and tokens.row_to_token, d_w, tables.first, tables.stop)),
                *(experts, num_rows, rows.array.shape[0], p.width // vector, q.width // vector),
                *(p.stride // vector, q.stride // vector),
            ),
            (
                *(vector, gathers and not transpose, gathers and transpose, use_tma),
                *(use_tma or p.width % config.rows == 0, use_tma or q.width % config.columns == 0),
                # What is gathered waits for its indices, which take every other stage.
                *(config.rows, config.columns, config.depth, config.band),
                2 * config.stages - 1 if gathers else config.stages,
                _experts_at_once(experts),
            ),
            config.warps,
        )
    return d_w


def _row_sums(device: Device, values: Any) -> Any:
    num_rows, width = values.shape
    out = device.empty([num_rows], "float32")
    if num_rows:
        device.launch(
            row_sums_kernel,
            blocks(num_rows, _SUM_ROWS),
            ("*fp32", "*fp32", "i32", "i32"),
            (*map(address, (values, out)), num_rows, width),
            (_SUM_ROWS, next_power_of_2(width)),
            4,
        )
    return out
