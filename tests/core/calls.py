# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of the core that give their outputs back: poisoned before the call, guarded against stray writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..routers import Router
from . import binding as ctypes_core
from . import structs
from .binding import Core
from .cases import Problem
from .guards import guarded_outputs, is_poison
from .structs import Check, Fill, ScaleLayout
from .topk_binding import topk_backward_params, topk_params

ROUTE_OUTPUTS = (
    "slot_to_row",
    "token_rows",
    "row_to_token",
    "row_to_slot",
    "row_to_expert",
    "row_probs",
    "tokens_per_expert",
    "expert_offsets",
    "overflow",
    "rowmap",
)


def route(
    core: Core, problem: Problem, *, outputs: tuple[str, ...] = ROUTE_OUTPUTS, **fields: Any
) -> dict[str, NDArray]:
    """Both steps of routing, with the number of rows that the problem's plan has. row_probs needs probs."""
    with guarded_outputs() as output:
        params, wanted = _route_params(output, problem, outputs, **fields)
        core.route_workspace(params)
        core.run("route_count", params)
        assert all(is_poison(params.arrays[name]) for name in wanted), "counting writes no maps"
        core.run("route", params)
    return {name: params.arrays[name] for name in ("routed_per_expert", *wanted)}


def route_permute(
    core: Core,
    problem: Problem,
    x: NDArray | None = None,
    scale: NDArray | None = None,
    *,
    outputs: tuple[str, ...] = ROUTE_OUTPUTS,
    fill: int = Fill.ALL,
    odd_outputs: bool = False,
    **fields: Any,
) -> tuple[dict[str, NDArray], NDArray | None, NDArray | None]:
    """Routing and, if there is an x, the moving of its rows, in one call of the core."""
    rows = scales = move = None
    with guarded_outputs() as output:
        params, wanted = _route_params(output, problem, outputs, **fields)
        core.route_workspace(params)
        if x is not None:
            num_rows = problem.plan.num_rows
            rows = output((num_rows, x.shape[1]), x.dtype, int(odd_outputs))
            scales = None if scale is None else output((num_rows, scale.shape[1]), scale.dtype)
            maps = params.arrays["slot_to_row"], params.arrays["row_to_token"]
            move = ctypes_core.permute_params(x, *maps, rows, scale, scales, fill=fill)
        core.route_permute(params, move)
    return {name: params.arrays[name] for name in ("routed_per_expert", *wanted)}, rows, scales


def _route_params(
    output: Callable[..., NDArray],
    problem: Problem,
    outputs: tuple[str, ...],
    *,
    checks: int = Check.NONE,
    num_threads: int = 0,
    **fields: Any,
) -> tuple[structs.RouteParams, list[str]]:
    """Params whose outputs are poisoned, and the names of these outputs."""
    plan = problem.plan
    shapes = {
        "slot_to_row": (plan.num_tokens, plan.topk),
        "token_rows": (plan.num_tokens, plan.topk),
        "tokens_per_expert": (plan.num_experts,),
        "expert_offsets": (plan.num_experts + 1,),
        "overflow": (1,),
        "rowmap": (plan.num_tokens, plan.num_experts),
    }
    wanted = [name for name in outputs if name != "row_probs" or problem.probs is not None]
    params = ctypes_core.route_params(
        problem.routing,
        problem.probs,
        **problem.options,
        num_rows=plan.num_rows,
        checks=checks,
        num_threads=num_threads,
        routed_per_expert=output(plan.num_experts, np.int32),
        **{
            name: output(shapes.get(name, (plan.num_rows,)), np.float32 if name == "row_probs" else np.int32)
            for name in wanted
        },
        **fields,
    )
    return params, wanted


def permute(
    core: Core,
    x: NDArray,
    slot_to_row: NDArray,
    row_to_token: NDArray,
    scale: NDArray | None = None,
    *,
    fill: int = Fill.ALL,
    num_threads: int = 0,
    odd_outputs: bool = False,
) -> tuple[NDArray, NDArray | None]:
    with guarded_outputs() as output:
        rows = output((len(row_to_token), x.shape[1]), x.dtype, int(odd_outputs))
        scales = None if scale is None else output((len(row_to_token), scale.shape[1]), scale.dtype, int(odd_outputs))
        params = ctypes_core.permute_params(
            x, slot_to_row, row_to_token, rows, scale, scales, fill=fill, num_threads=num_threads
        )
        core.run("permute", params)
    return rows, scales


def scales_shape(num_rows: int, hidden: int, *, ue8m0: bool, layout: ScaleLayout) -> tuple[int, int]:
    groups = -(-hidden // 128)
    words = -(-groups // 4) if ue8m0 else groups
    return (num_rows, words) if layout == ScaleLayout.ROW else (words, -(-num_rows // 4) * 4)


def quantize(
    core: Core,
    x: NDArray,
    slot_to_row: NDArray | None = None,
    row_to_token: NDArray | None = None,
    *,
    ue8m0: bool = False,
    layout: ScaleLayout = ScaleLayout.ROW,
    odd_codes: bool = False,
    **options: Any,
) -> tuple[NDArray, NDArray]:
    """Codes and scales of x, or with maps of its rows in expert order."""
    num_rows = len(x) if row_to_token is None else len(row_to_token)
    shape = scales_shape(num_rows, x.shape[1], ue8m0=ue8m0, layout=layout)
    with guarded_outputs() as output:
        codes = output((num_rows, x.shape[1]), ml_dtypes.float8_e4m3fn, int(odd_codes))
        scales = output(shape, np.int32 if ue8m0 else np.float32)
        params = ctypes_core.quantize_params(
            x, codes, scales, slot_to_row, row_to_token, layout=layout, ue8m0=ue8m0, **options
        )
        core.run("quantize", params)
    return codes, scales


def dequantize(
    core: Core, codes: NDArray, scales: NDArray, dtype: DTypeLike, *, odd_outputs: int = 0, **options: Any
) -> NDArray:
    with guarded_outputs() as output:
        out = output(codes.shape, dtype, odd_outputs)
        core.run("dequantize", ctypes_core.dequantize_params(codes, scales, out, **options))
    return out


def unpermute(
    core: Core,
    rows: NDArray,
    token_rows: NDArray,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    *,
    odd_outputs: bool = False,
    **options: Any,
) -> NDArray:
    with guarded_outputs() as output:
        out = output((len(token_rows), rows.shape[1]), rows.dtype, int(odd_outputs))
        core.run("unpermute", ctypes_core.unpermute_params(rows, token_rows, out, weights, weight_index, **options))
    return out


def unpermute_backward(
    core: Core,
    d_out: NDArray,
    token_rows: NDArray,
    row_to_token: NDArray,
    rows: NDArray | None = None,
    weights: NDArray | None = None,
    weight_index: NDArray | None = None,
    *,
    wants_d_rows: bool = True,
    wants_d_weights: bool = False,
    odd_outputs: bool = False,
    **options: Any,
) -> tuple[NDArray | None, NDArray | None]:
    with guarded_outputs() as output:
        d_rows = output((len(row_to_token), d_out.shape[1]), d_out.dtype, int(odd_outputs)) if wants_d_rows else None
        d_weights = output(weights.shape, np.float32) if wants_d_weights and weights is not None else None
        params = ctypes_core.unpermute_backward_params(
            d_out, token_rows, row_to_token, d_rows, rows, weights, weight_index, d_weights, **options
        )
        core.run("unpermute_backward", params)
    return d_rows, d_weights


def read_rowmap(core: Core, rowmap: NDArray, num_rows: int, *, checks: int = Check.NONE) -> reference.RowMaps:
    """clean_rowmap where slots are experts."""
    names = "row_to_token", "row_to_slot", "row_to_expert"
    with guarded_outputs() as output:
        slot_to_row, token_rows = output(rowmap.shape, np.int32), output(rowmap.shape, np.int32)
        by_row = {name: output(num_rows, np.int32) for name in names}
        params = ctypes_core.clean_rowmap_params(
            rowmap,
            topk=rowmap.shape[1],
            num_rows=num_rows,
            checks=checks,
            token_rows=token_rows,
            slot_to_row=slot_to_row,
            **by_row,
        )
        core.run("clean_rowmap", params)
    return reference.RowMaps(slot_to_row, token_rows, **by_row)


def make_row_id_map(core: Core, plan: reference.Plan, pad_offsets: NDArray | None = None) -> NDArray:
    with guarded_outputs() as output:
        row_id_map = output((plan.num_tokens, 2 * plan.num_experts + 1), np.int32)
        params = ctypes_core.make_row_id_map_params(plan.token_rows, plan.row_to_expert, row_id_map, pad_offsets)
        core.run("make_row_id_map", params)
    return row_id_map


def read_row_id_map(core: Core, row_id_map: NDArray, pad_offsets: NDArray | None = None) -> NDArray:
    with guarded_outputs() as output:
        rowmap = output((len(row_id_map), row_id_map.shape[1] // 2), np.int32)
        core.run("read_row_id_map", ctypes_core.read_row_id_map_params(row_id_map, rowmap, pad_offsets))
    return rowmap


def sort_chunks(
    core: Core,
    x: NDArray,
    split_sizes: NDArray,
    order: NDArray,
    probs: NDArray | None = None,
    *,
    odd_outputs: bool = False,
    **fields: Any,
) -> tuple[NDArray, NDArray | None, NDArray]:
    with guarded_outputs() as output:
        out = output(x.shape, x.dtype, int(odd_outputs))
        probs_out = None if probs is None else output(probs.shape, np.float32)
        source_to_dest = output(len(x), np.int32)
        params = ctypes_core.sort_chunks_params(x, split_sizes, order, out, probs, probs_out, source_to_dest, **fields)
        core.run("sort_chunks", params)
    return out, probs_out, source_to_dest


def gather_slots(
    core: Core,
    slot_to_row: NDArray,
    row_values: NDArray,
    row_to_expert: NDArray | None = None,
    num_experts: int = 0,
    num_threads: int = 0,
) -> NDArray:
    num_tokens, topk = slot_to_row.shape
    with guarded_outputs() as output:
        slot_values = output((num_tokens, topk if row_to_expert is None else num_experts), np.float32)
        params = ctypes_core.slots_params(slot_to_row, row_values, slot_values, row_to_expert, num_threads=num_threads)
        core.run("gather_slots", params)
    return slot_values


def scatter_slots(
    core: Core,
    slot_to_row: NDArray,
    slot_values: NDArray,
    num_rows: int,
    row_to_expert: NDArray | None = None,
    initial: NDArray | None = None,
    num_threads: int = 0,
) -> NDArray:
    """Adds to `initial` where it is given."""
    with guarded_outputs() as output:
        row_values = output(num_rows, np.float32)
        if initial is not None:
            row_values[:] = initial
        params = ctypes_core.slots_params(
            slot_to_row,
            row_values,
            slot_values,
            row_to_expert,
            accumulate=initial is not None,
            num_threads=num_threads,
        )
        core.run("scatter_slots", params)
    return row_values


def clean_rowmap(
    core: Core,
    rowmap: NDArray,
    num_rows: int,
    ids: NDArray | None = None,
    *,
    duplicates: str = "first",
    checks: int = Check.NONE,
    num_threads: int = 0,
) -> tuple[NDArray, NDArray, NDArray | None]:
    """token_rows [T, E], row_to_token [N] and, with ids, slot_to_row [T, K]."""
    with guarded_outputs() as output:
        token_rows, row_to_token = output(rowmap.shape, np.int32), output(num_rows, np.int32)
        slot_to_row = None if ids is None else output(ids.shape, np.int32)
        params = ctypes_core.clean_rowmap_params(
            rowmap,
            ids,
            duplicates=duplicates,
            num_rows=num_rows,
            checks=checks,
            num_threads=num_threads,
            token_rows=token_rows,
            row_to_token=row_to_token,
            slot_to_row=slot_to_row,
        )
        core.run("clean_rowmap", params)
    return token_rows, row_to_token, slot_to_row


def slot_values_of_rowmap(
    core: Core, rowmap: NDArray, row_values: NDArray, ids: NDArray, *, duplicates: str = "first", num_threads: int = 0
) -> NDArray:
    """[T, K], of clean_rowmap without slot_to_row."""
    with guarded_outputs() as output:
        values = output(ids.shape, np.float32)
        params = ctypes_core.clean_rowmap_params(
            rowmap,
            ids,
            duplicates=duplicates,
            num_rows=len(row_values),
            num_threads=num_threads,
            row_values=row_values,
            token_rows=output(rowmap.shape, np.int32),
            row_to_token=output(len(row_values), np.int32),
            slot_values=values,
        )
        core.run("clean_rowmap", params)
    return values


def topk(core: Core, router: Router, *, num_threads: int = 0, with_scores: bool = True) -> tuple[NDArray, ...]:
    """Weights, ids and, if they are wanted, scores."""
    gating = router.gating
    shape = len(gating), router.top_k
    with guarded_outputs() as output:
        weights, ids = output(shape, gating.dtype), output(shape, np.int64)
        scores = output(gating.shape, gating.dtype) if with_scores else None
        params = topk_params(
            gating,
            weights,
            ids,
            scores,
            correction_bias=router.correction_bias,
            scaling_factor=router.scaling_factor,
            num_threads=num_threads,
            **router_flags(router),
            **router.groups,
        )
        core.run("topk", params)
    return (weights, ids) if scores is None else (weights, ids, scores)


def topk_backward(
    core: Core,
    router: Router,
    ids: NDArray,
    d_weights: NDArray | None,
    d_scores: NDArray | None = None,
    *,
    num_threads: int = 0,
) -> NDArray:
    with guarded_outputs() as output:
        d_gating = output(router.gating.shape, router.gating.dtype)
        params = topk_backward_params(
            router.gating,
            ids,
            d_gating,
            d_weights,
            d_scores,
            scaling_factor=router.scaling_factor,
            num_threads=num_threads,
            **router_flags(router),
        )
        core.run("topk_backward", params)
    return d_gating


def router_flags(router: Router) -> dict[str, bool]:
    return {"use_sigmoid": router.use_sigmoid, "pre_act": router.pre_act, "renormalize": router.renormalize}
