# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""One usable params struct per operator, for tests that spoil single fields of it."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from paddle_moe_ops import reference

from ..params import Shape
from ..reference.cases import ordinary_floats
from . import binding as ctypes_core
from .binding import Core
from .cases import make_ids, make_mask, make_plan
from .guards import MakeOutput
from .structs import Check, Params
from .topk_binding import topk_backward_params, topk_params

SHAPE = Shape(5, 6, 4, 2, 2, "every field of every struct has something to point to")
PLAN = make_plan("uniform", SHAPE, seed=1)
N = PLAN.num_rows
FLOATS = ordinary_floats((max(N, SHAPE.T), SHAPE.H), np.float32, seed=2)


def route_count(core: Core, output: MakeOutput) -> Params:
    params = ctypes_core.route_params(
        make_ids("uniform", SHAPE, seed=1),
        ordinary_floats((SHAPE.T, SHAPE.K), np.float32, seed=3),
        num_experts=SHAPE.E,
        padding_alignment=SHAPE.A,
        num_rows=N,
        expected_per_expert=PLAN.routed_per_expert,
        routed_per_expert=output(SHAPE.E, np.int32),
        slot_to_row=output((SHAPE.T, SHAPE.K), np.int32),
        token_rows=output((SHAPE.T, SHAPE.K), np.int32),
        row_to_token=output(N, np.int32),
        row_to_slot=output(N, np.int32),
        row_to_expert=output(N, np.int32),
        row_probs=output(N, np.float32),
        tokens_per_expert=output(SHAPE.E, np.int32),
        expert_offsets=output(SHAPE.E + 1, np.int32),
        overflow=output(1, np.int32),
        rowmap=output((SHAPE.T, SHAPE.E), np.int32),
    )
    core.route_workspace(params)
    return params


def route(core: Core, output: MakeOutput) -> Params:
    params = route_count(core, output)
    core.run("route_count", params)
    return params


def route_count_mask(core: Core, output: MakeOutput) -> Params:
    params = ctypes_core.route_params(make_mask(SHAPE, seed=4), num_rows=N, routed_per_expert=output(SHAPE.E, np.int32))
    core.route_workspace(params)
    return params


def clean_rowmap(core: Core, output: MakeOutput) -> Params:
    return ctypes_core.clean_rowmap_params(
        np.full((SHAPE.T, SHAPE.E), -1, np.int32),
        make_ids("uniform", SHAPE, seed=1, dtype=np.int64),
        num_rows=N,
        row_values=np.zeros(N, np.float32),
        token_rows=output((SHAPE.T, SHAPE.E), np.int32),
        row_to_token=output(N, np.int32),
        slot_to_row=output((SHAPE.T, SHAPE.K), np.int32),
        slot_values=output((SHAPE.T, SHAPE.K), np.float32),
    )


def clean_rowmap_by_expert(core: Core, output: MakeOutput) -> Params:
    maps = {name: output(N, np.int32) for name in ("row_to_token", "row_to_slot", "row_to_expert")}
    return ctypes_core.clean_rowmap_params(
        np.full((SHAPE.T, SHAPE.E), -1, np.int32),
        topk=SHAPE.E,
        num_rows=N,
        token_rows=output((SHAPE.T, SHAPE.E), np.int32),
        slot_to_row=output((SHAPE.T, SHAPE.E), np.int32),
        **maps,
    )


def make_row_id_map(core: Core, output: MakeOutput) -> Params:
    row_id_map, pad_offsets = output((SHAPE.T, 2 * SHAPE.E + 1), np.int32), np.zeros(SHAPE.E, np.int32)
    return ctypes_core.make_row_id_map_params(PLAN.token_rows, PLAN.row_to_expert, row_id_map, pad_offsets)


def read_row_id_map(core: Core, output: MakeOutput) -> Params:
    row_id_map, pad_offsets = (
        reference.make_row_id_map(PLAN.token_rows, PLAN.row_to_expert, SHAPE.E),
        np.zeros(SHAPE.E, np.int32),
    )
    return ctypes_core.read_row_id_map_params(row_id_map, output((SHAPE.T, SHAPE.E), np.int32), pad_offsets)


def gather_slots(core: Core, output: MakeOutput) -> Params:
    slot_values = output((SHAPE.T, SHAPE.E), np.float32)
    return ctypes_core.slots_params(PLAN.slot_to_row, np.ones(N, np.float32), slot_values, PLAN.row_to_expert)


def scatter_slots(core: Core, output: MakeOutput) -> Params:
    slot_values = np.ones((SHAPE.T, SHAPE.E), np.float32)
    return ctypes_core.slots_params(PLAN.slot_to_row, output(N, np.float32), slot_values, PLAN.row_to_expert)


def permute(core: Core, output: MakeOutput) -> Params:
    x, scale = FLOATS[: SHAPE.T], np.ones((SHAPE.T, 1), np.float32)
    rows, row_scales = output((N, SHAPE.H), np.float32), output((N, 1), np.float32)
    return ctypes_core.permute_params(x, PLAN.slot_to_row, PLAN.row_to_token, rows, scale, row_scales)


def unpermute(core: Core, output: MakeOutput) -> Params:
    out = output((SHAPE.T, SHAPE.H), np.float32)
    weights = np.ones((SHAPE.T, SHAPE.K), np.float32)
    return ctypes_core.unpermute_params(FLOATS[:N], PLAN.token_rows, out, weights, PLAN.row_to_slot)


def unpermute_backward(core: Core, output: MakeOutput) -> Params:
    return ctypes_core.unpermute_backward_params(
        FLOATS[: SHAPE.T],
        PLAN.token_rows,
        PLAN.row_to_token,
        output((N, SHAPE.H), np.float32),
        FLOATS[:N],
        np.ones((SHAPE.T, SHAPE.K), np.float32),
        PLAN.row_to_slot,
        output((SHAPE.T, SHAPE.K), np.float32),
    )


def sort_chunks(core: Core, output: MakeOutput) -> Params:
    return ctypes_core.sort_chunks_params(
        FLOATS,
        np.array([1, 0, 3], np.int64),
        np.array([2, 0, 1], np.int64),
        output(FLOATS.shape, np.float32),
        np.ones(len(FLOATS), np.float32),
        output(len(FLOATS), np.float32),
        output(len(FLOATS), np.int32),
        checks=Check.ALL,
    )


def quantize(core: Core, output: MakeOutput) -> Params:
    codes, scales = output((N, SHAPE.H), ml_dtypes.float8_e4m3fn), output((N, 1), np.float32)
    maps = PLAN.slot_to_row, PLAN.row_to_token
    return ctypes_core.quantize_params(FLOATS[: SHAPE.T], codes, scales, *maps, workspace=np.zeros(SHAPE.T, np.float32))


def dequantize(core: Core, output: MakeOutput) -> Params:
    codes, scales = np.ones((N, SHAPE.H), ml_dtypes.float8_e4m3fn), np.ones((N, 1), np.float32)
    return ctypes_core.dequantize_params(codes, scales, output((N, SHAPE.H), np.float32))


def topk(core: Core, output: MakeOutput) -> Params:
    gating = np.ones((SHAPE.T, SHAPE.E), np.float32)
    weights, ids = output((SHAPE.T, SHAPE.K), np.float32), output((SHAPE.T, SHAPE.K), np.int64)
    scores, groups = output(gating.shape, np.float32), {"num_groups": 2, "topk_groups": 1}
    return topk_params(gating, weights, ids, scores, correction_bias=gating[0], pre_act=1, **groups)


def topk_backward(core: Core, output: MakeOutput) -> Params:
    gating, ids = np.ones((SHAPE.T, SHAPE.E), np.float32), np.zeros((SHAPE.T, SHAPE.K), np.int64)
    d_gating, d_weights = output(gating.shape, np.float32), np.ones(ids.shape, np.float32)
    return topk_backward_params(gating, ids, d_gating, d_weights, gating, pre_act=1)


# What is made here, and the operator that it is for.
VALID: dict[str, tuple[str, Callable[[Core, MakeOutput], Params]]] = {
    "route_count": ("route_count", route_count),
    "route_count_mask": ("route_count", route_count_mask),
    "route": ("route", route),
    "clean_rowmap": ("clean_rowmap", clean_rowmap),
    "clean_rowmap_by_expert": ("clean_rowmap", clean_rowmap_by_expert),
    "make_row_id_map": ("make_row_id_map", make_row_id_map),
    "read_row_id_map": ("read_row_id_map", read_row_id_map),
    "gather_slots": ("gather_slots", gather_slots),
    "scatter_slots": ("scatter_slots", scatter_slots),
    "permute": ("permute", permute),
    "unpermute": ("unpermute", unpermute),
    "unpermute_backward": ("unpermute_backward", unpermute_backward),
    "sort_chunks": ("sort_chunks", sort_chunks),
    "quantize": ("quantize", quantize),
    "dequantize": ("dequantize", dequantize),
    "topk": ("topk", topk),
    "topk_backward": ("topk_backward", topk_backward),
}
