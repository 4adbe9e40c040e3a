# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Launchers of the grouped GEMM and its gradients.

M rows, K = ``inner`` and N = ``outer`` of a matrix, E experts. Sizes and offsets stay on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..launch.device import ITEM_BYTES, Array, Device, address, cdiv
from ..ops.permute import permute
from ..ops.row_sums import row_sums
from .configs import GemmConfig, gemm_config, wgrad_config
from .gpu_facts import gpu_at
from .kernels import grouped_gemm_kernel
from .operands import POINTERS, descriptor_memory, suits_tma, vector_of
from .schedule import experts_per_block, loops_over_experts, schedule
from .types import Groups, Rows, Schedule, Target, Tokens
from .wgrad import launch_wgrad

__all__ = [
    "grouped_gemm",
    "grouped_gemm_backward",
    "launch_gemm",
]


def _rows(device: Device, array: Array) -> Rows:
    height, width = array.shape
    return Rows(array, height, width, device.row_stride(array) if height > 1 else width)


def _permuted(device: Device, x: Array, tokens: Tokens) -> Any:
    """Rows for TMA: permuting them costs less than gathering through pointers, which excludes TMA."""
    return permute(device, x, None, tokens.token_rows, tokens.row_to_token, "all")[0]


class GemmOutputs(NamedTuple):
    """Outputs of `grouped_gemm_kernel`."""

    out: Any
    hidden: Any = None
    partial_dots: Any = None
    scaled_rows: Any = None


def launch_gemm(
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
    forward_rows: Rows | None = None,
    swiglu: bool = False,
    hidden: Array | None = None,
    chunk: int | None = None,
) -> GemmOutputs:
    """Launch `grouped_gemm_kernel`.

    Args:
        device: allocates and launches.
        source: the rows to multiply; tokens with ``row_to_token``.
        w: [E, N, K], or [E, K, N] without ``transpose``.
        tables: `schedule` for tiles of ``config.block_m`` rows.
        config: tile sizes.
        num_rows: M, all rows.
        out: [M, width] elements at least.
        transpose: whether the matrices are stored transposed.
        row_to_token: int32 [M], for gathered rows.
        weights: float32 [M] or None.
        bias: [E, N], dtype of ``w``, contiguous, or None.
        forward_rows: [M, N], the operand whose gradient the GEMM computes, or None.
        swiglu: whether the epilogue applies SwiGLU to the halves of the columns.
        hidden: [M, N], receives the halves, or None.
        chunk: index of the row chunk that ``source`` contains; None: all rows.
    """
    dtype = device.dtype_name(w)
    item = ITEM_BYTES[dtype]
    experts, *matrix = w.shape
    inner, outer = matrix[::-1] if transpose else matrix
    vector = vector_of(item, source, w, *([] if forward_rows is None else [forward_rows]))
    if outer * item % 16 or out.width * item % 16:
        vector = 1
    use_tma = uses_tma(config, vector, inner, transpose)
    flat_loop = use_tma and row_to_token is None and forward_rows is None and not swiglu and inner <= config.max_flat_k
    outputs = GemmOutputs(out.array, hidden)
    num_n_tiles = cdiv(out.width, config.block_n)
    if forward_rows is not None:
        partial_dots, scaled_rows = (
            device.empty([num_rows, *size], kind) for size, kind in (([num_n_tiles], "float32"), ([outer], dtype))
        )
        outputs = outputs._replace(partial_dots=partial_dots, scaled_rows=scaled_rows)
    if not num_rows:
        return outputs
    gpu = gpu_at(address(w))
    num_chunks = tables.num_chunks
    rows_of_chunk = num_rows if chunk is None else min(num_rows, source.height)
    pointer = POINTERS[dtype] + (":16" if vector > 1 else "")
    pointers = (pointer, pointer, "*i32", "*fp32", POINTERS[dtype], *[pointer] * 3, "*fp32", pointer, *["*i32"] * 5)
    addresses = (
        *(source.address(item), address(w), address(row_to_token), address(weights), address(bias)),
        *(0 if forward_rows is None else forward_rows.address(item), *map(address, outputs)),
        *map(address, (tables.group_starts, tables.group_ends, tables.tile_starts, tables.gap_starts)),
        address(tables.chunk_tiles) + ITEM_BYTES["int32"] * (num_chunks + 1 if chunk is None else chunk),
    )
    with descriptor_memory(device, use_tma):
        device.launch(
            grouped_gemm_kernel,
            config.grid(gpu, (cdiv(rows_of_chunk, config.block_m) + experts) * num_n_tiles),
            (*pointers, *["i32"] * 9, "i64", "i64"),
            (
                *addresses,
                *(experts, source.height, inner // vector, outer // vector, out.width // vector),
                *(out.first_column, source.first_row, chunk or 0, 1 if chunk is None else num_chunks),
                *(source.stride // vector, 0 if forward_rows is None else forward_rows.stride // vector),
            ),
            (
                *(vector, transpose, row_to_token is not None, weights is not None, bias is not None),
                *(forward_rows is not None, swiglu, hidden is not None, flat_loop),
                *(use_tma, inner % config.block_k == 0, out.width % config.block_n == 0),
                *(config.block_m, config.block_n, config.block_k, config.group_m, config.num_stages),
                *(experts_per_block(experts), loops_over_experts(experts)),
            ),
            config.num_warps,
        )
    return outputs


def uses_tma(config: GemmConfig, vector: int, inner: int, transpose: bool) -> bool:
    """True if TMA loads the operands of a GEMM; gathered rows are loaded through pointers in any case."""
    # Without TRANSPOSE, a K block of W that is not full would read into the next expert's matrix.
    return suits_tma(config, vector) and (transpose or inner % config.block_k == 0)


def _gemm(
    device: Device,
    x: Array,
    w: Array,
    groups: Groups,
    transpose: bool,
    tokens: Tokens | None = None,
    weights: Array | None = None,
    forward_rows: Array | None = None,
    config: GemmConfig | None = None,
    bias: Array | None = None,
) -> GemmOutputs:
    """A GEMM of all rows and all columns."""
    experts, *matrix = w.shape
    inner, outer = matrix[::-1] if transpose else matrix
    dtype = device.dtype_name(x)
    item = ITEM_BYTES[dtype]
    num_rows = (x if tokens is None else tokens.row_to_token).shape[0]
    config = config or gemm_config(gpu_at(address(x)), num_rows, experts, inner, outer)
    source, forward = _rows(device, x), None if forward_rows is None else _rows(device, forward_rows)
    out = Target(device.empty([num_rows, outer], dtype), 0, outer)
    vector = 1 if outer * item % 16 else vector_of(item, source, w)
    if tokens is not None and uses_tma(config, vector, inner, transpose):
        source, tokens = _rows(device, _permuted(device, x, tokens)), None
    return launch_gemm(
        device,
        source,
        w,
        schedule(device, groups, num_rows, config.block_m),
        config,
        num_rows,
        out,
        transpose=transpose,
        row_to_token=tokens and tokens.row_to_token,
        weights=weights,
        bias=bias,
        forward_rows=forward,
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
    """Return [M, N] of the dtype of ``x``, 0 in rows of no group.

    Args:
        device: allocates and launches.
        x: [M, K] float16 or bfloat16, rows in expert order; [T, K] with ``tokens``.
        w: [E, N, K], or [E, K, N] without ``transpose``; dtype of ``x``, contiguous.
        groups: rows of each expert.
        transpose: whether the matrices are stored transposed.
        tokens: routing maps if ``x`` is tokens, or None. If TMA loads the operands, a launch of `permute` precedes the
            GEMM; otherwise the GEMM gathers the rows.
        weights: float32 [M], factor of each row of the result before rounding, or None.
        bias: [E, N], dtype of ``x``, contiguous: added to the rows of each expert before the factor, or None. For its
            gradient see `bias_gradient`.
        config: overrides `configs.gemm_config`.
    """
    return _gemm(device, x, w, groups, transpose, tokens, weights, config=config, bias=bias).out


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
    """Return the gradients of the rows [M, K], of W, and of the weights [M]; None for those not wanted or absent.

    With ``tokens``, the first one is that of the rows in expert order. With ``weights``, wgrad reads rows multiplied by
    their weights and rounded; the gradient of a weight is the float32 dot product of its row and the row's gradient
    without the weight.

    Args:
        device: allocates and launches.
        d_out: [M, N] gradient of the GEMM's output.
        x: as in `grouped_gemm`.
        w: as in `grouped_gemm`.
        groups: as in `grouped_gemm`.
        transpose: as in `grouped_gemm`.
        tokens: as in `grouped_gemm`; not together with ``weights``.
        weights: as in `grouped_gemm`.
        wanted: which of the three gradients to compute.
        config: overrides `configs.gemm_config`, for dgrad.
        weight_config: overrides `configs.wgrad_config`.
    """
    need_rows, need_w, need_weights = wanted
    need_weights = need_weights and weights is not None
    d_rows, partial_dots = None, None
    operand = x
    if weights is not None and (need_w or need_weights):
        outputs = _gemm(device, d_out, w, groups, not transpose, weights=weights, forward_rows=x, config=config)
        d_rows, partial_dots, operand = outputs.out, outputs.partial_dots, outputs.scaled_rows
    elif need_rows:
        d_rows = _gemm(device, d_out, w, groups, not transpose, weights=weights, config=config).out
    d_w = None
    if need_w:
        d_w = wgrad(device, d_out, operand, w, groups, transpose, tokens, weight_config)
    return d_rows if need_rows else None, d_w, row_sums(device, partial_dots) if need_weights else None


def wgrad(
    device: Device,
    d_out: Array,
    x: Array,
    w: Array,
    groups: Groups,
    transpose: bool,
    tokens: Tokens | None,
    config: GemmConfig | None = None,
) -> Any:
    """Return d_out^T x of each group, transposed like W, whose values are not read."""
    d_w = device.empty(w.shape, device.dtype_name(x))
    num_rows = d_out.shape[0]
    gradients, rows = _rows(device, d_out), _rows(device, x)
    config = config or wgrad_config(gpu_at(address(w)), *w.shape[1:])
    use_tma = suits_tma(config, vector_of(ITEM_BYTES[device.dtype_name(x)], gradients, rows)) and num_rows > 0
    if tokens is not None and use_tma:
        rows, tokens = _rows(device, _permuted(device, x, tokens)), None
    p, q = (gradients, rows) if transpose else (rows, gradients)
    gathered = None if tokens is None else (tokens.row_to_token, transpose)
    tables = schedule(device, groups, num_rows, config.block_m)
    launch_wgrad(device, p, q, tables, config, num_rows, d_w, gathered=gathered)
    return d_w
