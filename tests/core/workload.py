# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every operator once, on arrays large enough that several threads share the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import reference

from ..params import Shape
from ..reference.cases import floats_of_every_kind, ordinary_floats
from ..routers import Router, deepseek_v3
from . import calls
from .binding import Core
from .cases import Problem, make_ids, make_plan, make_problem, make_probs
from .structs import ScaleLayout

# A thread joins for each MiB that is moved, and routing is cut into chunks of 16384 slots.
ROUTED = Shape(45_000, 0, 16, 8, 16, "360000 slots: 22 chunks of routing, and 5 MiB of values of slots")
MOVED = Shape(6_000, 80, 64, 8, 16, "48000 rows of 160 bytes: 7 MiB")

Results = tuple[NDArray, ...]


@cache
def routed() -> Problem:
    ids = make_ids("half_unassigned", ROUTED, seed=1, dtype=np.int64)
    return make_problem(ids, ROUTED.E, ROUTED.A, probs=make_probs(ids.shape, 2))


@cache
def moved() -> tuple[reference.Plan, NDArray, NDArray, NDArray]:
    """Plan, tokens, rows and weights."""
    plan = make_plan("zipf", MOVED, seed=3)
    x = floats_of_every_kind((MOVED.T, MOVED.H), ml_dtypes.bfloat16, seed=4)
    rows = ordinary_floats((plan.num_rows, MOVED.H), ml_dtypes.bfloat16, seed=5)
    return plan, x, rows, ordinary_floats((plan.num_rows,), np.float32, seed=6)


def route(core: Core, num_threads: int) -> Results:
    return tuple(calls.route(core, routed(), num_threads=num_threads).values())


def clean_rowmap(core: Core, num_threads: int) -> Results:
    problem = routed()
    rowmap = reference.plan_to_rowmap(problem.plan)
    token_rows, row_to_token, slot_to_row = calls.clean_rowmap(
        core, rowmap, problem.plan.num_rows, problem.routing, num_threads=num_threads
    )
    ends = np.cumsum(token_rows == -1, axis=1) > 0  # what stands behind the first -1 is undefined
    assert slot_to_row is not None
    return np.where(ends, -1, token_rows), row_to_token, slot_to_row


def gather_slots(core: Core, num_threads: int) -> Results:
    plan = routed().plan
    values = make_probs((plan.num_rows,), 7)
    by_slot = calls.gather_slots(core, plan.slot_to_row, values, num_threads=num_threads)
    return by_slot, calls.gather_slots(core, plan.slot_to_row, values, plan.row_to_expert, ROUTED.E, num_threads)


def scatter_slots(core: Core, num_threads: int) -> Results:
    plan = routed().plan
    values = make_probs(plan.slot_to_row.shape, 8)
    return (calls.scatter_slots(core, plan.slot_to_row, values, plan.num_rows, num_threads=num_threads),)


def permute(core: Core, num_threads: int) -> Results:
    plan, x, _, _ = moved()
    scale = x[:, :3].astype(np.float32)
    rows, scales = calls.permute(core, x, plan.slot_to_row, plan.row_to_token, scale, num_threads=num_threads)
    assert scales is not None
    return rows, scales


def unpermute(core: Core, num_threads: int) -> Results:
    plan, _, rows, weights = moved()
    plain = calls.unpermute(core, rows, plan.token_rows, num_threads=num_threads)
    return plain, calls.unpermute(core, rows, plan.token_rows, weights, num_threads=num_threads)


def unpermute_backward(core: Core, num_threads: int) -> Results:
    plan, _, rows, weights = moved()
    d_rows, d_weights = calls.unpermute_backward(
        core,
        rows[: MOVED.T],
        plan.token_rows,
        plan.row_to_token,
        rows,
        weights,
        wants_d_weights=True,
        num_threads=num_threads,
    )
    assert d_rows is not None
    assert d_weights is not None
    return d_rows, d_weights


def sort_chunks(core: Core, num_threads: int) -> Results:
    _, _, rows, weights = moved()
    sizes = np.random.default_rng(7).multinomial(len(rows) - 5, np.full(64, 1 / 64))
    order = np.random.default_rng(8).permutation(64)
    out, probs_out, source_to_dest = calls.sort_chunks(core, rows, sizes, order, weights, num_threads=num_threads)
    assert probs_out is not None
    return out, probs_out, source_to_dest


def quantize(core: Core, num_threads: int) -> Results:
    plan, x, _, _ = moved()
    maps = plan.slot_to_row, plan.row_to_token
    by_row = calls.quantize(core, x, *maps, num_threads=num_threads)
    by_column = calls.quantize(core, x, *maps, ue8m0=True, layout=ScaleLayout.COLUMN, num_threads=num_threads)
    return *by_row, *by_column


@cache
def quantized() -> Results:
    """Codes and packed scales of the rows."""
    return reference.quantize_1x128(moved()[2], ue8m0=True)


def dequantize(core: Core, num_threads: int) -> Results:
    return (calls.dequantize(core, *quantized(), ml_dtypes.bfloat16, num_threads=num_threads),)


@cache
def chosen() -> tuple[Router, Results]:
    """A router and what the oracle makes of it."""
    router = deepseek_v3(ml_dtypes.bfloat16, 700, np.random.default_rng(9))
    factor = router.scaling_factor
    return router, reference.calculate_topk(
        router.gating,
        *router.arguments,
        scaling_factor=factor,
        correction_bias=router.correction_bias,
        **router.groups,
    )


def topk(core: Core, num_threads: int) -> Results:
    return calls.topk(core, chosen()[0], num_threads=num_threads)


def topk_backward(core: Core, num_threads: int) -> Results:
    router, (weights, ids, scores) = chosen()
    gradients = np.ascontiguousarray(ids), weights, scores
    return (calls.topk_backward(core, router, *gradients, num_threads=num_threads),)


OPERATORS: dict[str, Callable[[Core, int], Results]] = {
    "route": route,
    "clean_rowmap": clean_rowmap,
    "gather_slots": gather_slots,
    "scatter_slots": scatter_slots,
    "permute": permute,
    "unpermute": unpermute,
    "unpermute_backward": unpermute_backward,
    "sort_chunks": sort_chunks,
    "quantize": quantize,
    "dequantize": dequantize,
    "topk": topk,
    "topk_backward": topk_backward,
}


def bits(results: Results) -> list[bytes]:
    return [array.tobytes() for array in results]
