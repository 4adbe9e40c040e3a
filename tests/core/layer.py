# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts of the core on NumPy arrays: GEMMs are callbacks, everything else is the core's CPU functions."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops.reference import Plan
from paddle_moe_ops.reference.activations import activate, activation_factors

from .binding import Core
from .guards import guarded_outputs
from .structs import DTYPES, Bytes, Floats, Int, Int32s, Params, RoutingKind, Size, Status, fields

FORWARD, BACKWARD = 0, 1
PLAIN, GATED, GRADIENT = range(3)
TILE_COLUMNS = 128
H100, H200 = (132, 3352), (132, 4916)  # SMs, GB/s
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Facts(Params):
    """pmo_layer_facts"""

    _fields_ = fields(
        (Size, "struct_size num_tokens num_rows num_experts hidden inner workspace"),
        (Int, "dtype num_sms memory_gbps backward keeps_hidden needs_d_weights"),
    )


class Choices(ctypes.Structure):
    """pmo_layer_plan"""

    _fields_ = fields(
        (Size, "chunk_rows num_chunks chunk_columns buffer_bytes tables_size bytes"),
        (Int, "gathers gathers_x gathers_d_out sum_tile_rows"),
    )


class LayerParams(Params):
    """pmo_layer_params"""

    _fields_ = fields(
        (Size, "struct_size slots_per_token"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Bytes, "gate_up down"),
        (Floats, "weights"),
        (Int32s, "token_rows row_to_token"),
        (Bytes, "sizes offsets hidden workspace out d_out"),
        (Size, "d_out_row_stride"),
        (Bytes, "d_x d_gate_up d_down"),
        (Floats, "d_weights"),
        (Int, "sizes_kind offsets_kind transpose clears_hidden"),
    )


class Gemm(ctypes.Structure):
    """pmo_grouped_product_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_sources num_experts inner outer first_column width first_row window_rows"),
        (ctypes.c_void_p, "x"),
        (Size, "x_row_stride"),
        (ctypes.c_void_p, "matrix row_to_token weights first stop tiles window out hidden counters d_weights"),
        (Int, "dtype result transpose tile_rows gathers tile_columns"),
    )


class Wgrad(ctypes.Structure):
    """pmo_grouped_outer_params"""

    _fields_ = fields(
        (Size, "struct_size num_rows num_experts p_columns q_columns out_rows out_columns first_p first_q"),
        (Size, "p_row_stride q_row_stride"),
        (ctypes.c_void_p, "p q first stop out"),
        (Size, "num_sources"),
        (ctypes.c_void_p, "row_to_token counters"),
        (Int, "dtype gathered"),
    )


_OPERATORS = {
    "tables": "grouped_tables",
    "permute": "permute",
    "gemm": "grouped_product",
    "wgrad": "grouped_outer",
    "row_sums": "row_sums",
    "unpermute": "unpermute",
    "clear": "grouped_clear",
}


class Kernels(ctypes.Structure):
    """pmo_layer_kernels"""

    _fields_ = tuple((name, _FUNCTION) for name in _OPERATORS)

    @staticmethod
    def of(library: Any, device: str, **others: Any) -> Kernels:
        """The functions of a library for a device, except `others`."""
        found = {
            name: ctypes.cast(getattr(library, f"pmo_{operator}_{device}"), _FUNCTION)
            for name, operator in _OPERATORS.items()
            if name not in others
        }
        return Kernels(**found, **others)


def choices(core: Core, **facts: int) -> Choices:
    made = Choices()
    core.check(core.library.pmo_layer_plan_of(ctypes.byref(Facts(**facts)), ctypes.byref(made)))
    return made


_NAMES = {number: dtype for dtype, number in DTYPES.items()}


def _array(address: int | None, shape: tuple[int, ...], dtype: Any, stride: int | None = None) -> NDArray:
    """Memory at an address as an array; `stride` of rows in elements."""
    dtype = np.dtype(dtype)
    strides = None if stride is None else (stride * dtype.itemsize, dtype.itemsize)
    length = int(np.prod(shape)) if stride is None else (shape[0] - 1) * stride + shape[1]
    if address is None or length <= 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides)


def _gemm(address: int, _: Any) -> int:
    g = Gemm.from_address(address)
    dtype, experts = _NAMES[g.dtype], g.num_experts
    first, stop = (_array(each, (experts,), np.int32) for each in (g.first, g.stop))
    tiles, window = _array(g.tiles, (experts + 1,), np.int32), _array(g.window, (2,), np.int32)
    shape = (g.outer, g.inner) if g.transpose else (g.inner, g.outer)
    matrices = _array(g.matrix, (experts, *shape), dtype)
    source = _array(g.x, (g.num_sources, g.inner), dtype, g.x_row_stride)
    owners = _array(g.row_to_token, (g.num_rows,), np.int32)
    out = _array(g.out, (g.num_rows, g.width), dtype)
    hidden = _array(g.hidden, (g.num_rows, 2 * g.width), dtype)
    dots = _array(g.d_weights, (g.num_rows, -(-g.width // TILE_COLUMNS)), np.float32)
    weights = _array(g.weights, (g.num_rows,), np.float32) if g.weights else np.ones(g.num_rows, np.float32)
    assert g.width > 0
    assert g.gathers or g.window_rows <= g.num_sources
    assert not _array(g.counters, (2,), np.int32).any()
    for expert in range(experts):
        begin = int(first[expert] + max(window[0] - tiles[expert], 0) * g.tile_rows)
        end = int(min(first[expert] + (window[1] - tiles[expert]) * g.tile_rows, stop[expert]))
        if end <= begin:
            continue
        rows = slice(begin, end)
        if g.gathers:
            x = np.where(owners[rows, None] >= 0, source[np.maximum(owners[rows], 0)], np.zeros(1, dtype))
        else:
            x = source[begin - g.first_row : end - g.first_row]
            assert len(x) == end - begin, "a tile reads rows behind its chunk"
        matrix = matrices[expert].T if g.transpose else matrices[expert]
        # einsum: each element is the same sum in every chunk, unlike that of a matrix library
        made = np.einsum("rk,kc->rc", x.astype(np.float32), matrix.astype(np.float32), optimize=False)
        if g.result == PLAIN:
            out[rows] = made[:, g.first_column : g.first_column + g.width] * weights[rows, None]
        elif g.result == GATED:
            pre = made.astype(dtype)
            out[rows] = activate(pre, "swiglu")
            if g.hidden:
                hidden[rows] = pre
        else:
            _gradient(made.astype(dtype), hidden[rows], out[rows], dots[rows], weights[rows], owners[rows] >= 0)
    return 0


def _gradient(
    d_scaled: NDArray, hidden: NDArray, out: NDArray, dots: NDArray, weights: NDArray, is_live: NDArray
) -> None:
    width = out.shape[1]
    live = is_live[:, None]
    d_scaled = np.where(live, d_scaled.astype(np.float32), 0)
    pre = np.where(live, hidden.astype(np.float32), 0)
    act = np.where(live, activate(pre.astype(out.dtype), "swiglu").astype(np.float32), 0)
    by_gate, by_up = activation_factors(pre, "swiglu")
    for tile in range(dots.shape[1]):
        columns = slice(TILE_COLUMNS * tile, TILE_COLUMNS * (tile + 1))
        dots[:, tile] = (act[:, columns] * d_scaled[:, columns]).sum(axis=1)
    d_act = d_scaled * weights[:, None]
    hidden[:, :width], hidden[:, width:] = d_act * by_gate, d_act * by_up
    out[:] = act * weights[:, None]


def _wgrad(address: int, _: Any) -> int:
    o = Wgrad.from_address(address)
    dtype, experts = _NAMES[o.dtype], o.num_experts
    first, stop = (_array(each, (experts,), np.int32) for each in (o.first, o.stop))
    owners = _array(o.row_to_token, (o.num_rows,), np.int32)
    out = _array(o.out, (experts, o.out_rows, o.out_columns), dtype)
    assert not _array(o.counters, (2,), np.int32).any()
    p, q = (
        _array(each, (o.num_sources if o.gathered == which else o.num_rows, columns), dtype, stride)
        for which, each, columns, stride in (
            (1, o.p, o.p_columns, o.p_row_stride),
            (2, o.q, o.q_columns, o.q_row_stride),
        )
    )
    for expert in range(experts):
        rows = slice(int(first[expert]), int(stop[expert]))
        taken = owners[rows]
        of_p, of_q = (
            np.where(taken[:, None] >= 0, each[np.maximum(taken, 0)], np.zeros(1, dtype))
            if o.gathered == which
            else each[rows]
            for which, each in ((1, p), (2, q))
        )
        made = np.einsum("ri,rj->ij", of_p.astype(np.float32), of_q.astype(np.float32), optimize=False)
        out[expert, o.first_p : o.first_p + o.p_columns, o.first_q : o.first_q + o.q_columns] = made
    return 0


class Layer(NamedTuple):
    """Operands of a layer."""

    plan: Plan
    gate_up: NDArray
    down: NDArray
    weights: NDArray | None
    transpose: bool = False
    workspace: int = 1 << 30
    gpu: tuple[int, int] = H100


class Results(NamedTuple):
    out: NDArray
    hidden: NDArray | None
    d_x: NDArray
    d_gate_up: NDArray
    d_down: NDArray
    d_weights: NDArray


def _params(layer: Layer, x: NDArray, backward: int, **arrays: NDArray | None) -> tuple[Facts, LayerParams]:
    plan, inner = layer.plan, layer.down.shape[2 if layer.transpose else 1]
    num_sms, memory_gbps = layer.gpu
    facts = Facts(
        num_tokens=len(x),
        num_rows=len(plan.row_to_token),
        num_experts=len(layer.down),
        hidden=x.shape[1],
        inner=inner,
        workspace=layer.workspace,
        dtype=DTYPES[x.dtype],
        num_sms=num_sms,
        memory_gbps=memory_gbps,
        backward=backward,
        keeps_hidden=int(arrays["hidden"] is not None),
        needs_d_weights=int(arrays.get("d_weights") is not None),
    )
    return facts, LayerParams(
        slots_per_token=plan.token_rows.shape[1],
        x=x,
        gate_up=layer.gate_up,
        down=layer.down,
        weights=layer.weights,
        token_rows=plan.token_rows,
        row_to_token=plan.row_to_token,
        sizes=plan.tokens_per_expert,
        offsets=plan.expert_offsets,
        sizes_kind=RoutingKind.IDS32,
        offsets_kind=RoutingKind.IDS32,
        transpose=int(layer.transpose),
        clears_hidden=1,
        **arrays,
    )


def _guarded(function: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
    """The function; an exception, which ctypes would ignore, becomes a status."""

    def call(address: int, stream: Any) -> int:
        try:
            return function(address, stream)
        except Exception:
            traceback.print_exc()
            return Status.INTERNAL

    return call


def run(core: Core, facts: Facts, params: LayerParams) -> None:
    """Run one pass with a poisoned workspace of the size that the plan says."""
    made = Choices()
    core.check(core.library.pmo_layer_plan_of(ctypes.byref(facts), ctypes.byref(made)))
    gemms = {"gemm": _FUNCTION(_guarded(_gemm)), "wgrad": _FUNCTION(_guarded(_wgrad))}
    kernels = Kernels.of(core.library, "cpu", **gemms)
    with guarded_outputs() as output:
        offset = -output(1, np.uint8).ctypes.data % 16
        workspace = output(made.bytes + 16, np.uint8, offset)
        workspace = workspace[-workspace.ctypes.data % 16 :][: made.bytes]
        workspace[:] = 0xFF  # NaN
        params.workspace = workspace.ctypes.data
        core.check(core.library.pmo_layer_run(ctypes.byref(facts), ctypes.byref(params), ctypes.byref(kernels), None))


def passes(core: Core, layer: Layer, x: NDArray, d_out: NDArray, keeps: bool = True) -> Results:
    """Both passes, with poisoned results."""
    dtype, inner = x.dtype, layer.down.shape[2 if layer.transpose else 1]
    rows = len(layer.plan.row_to_token)
    with guarded_outputs() as output:
        hidden = output((rows, 2 * inner), dtype) if keeps else None
        out, d_x = output(x.shape, dtype), output(x.shape, dtype)
        d_gate_up, d_down = output(layer.gate_up.shape, dtype), output(layer.down.shape, dtype)
        d_weights = output(rows, np.float32)
        run(core, *_params(layer, x, FORWARD, hidden=hidden, out=out))
        kept = None if hidden is None else hidden.copy()
        gradients = {"d_x": d_x, "d_gate_up": d_gate_up, "d_down": d_down, "d_weights": d_weights}
        run(core, *_params(layer, x, BACKWARD, hidden=hidden, d_out=d_out, **gradients))
    return Results(out, kept, d_x, d_gate_up, d_down, d_weights)
