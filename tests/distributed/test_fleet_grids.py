# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts in grids of Fleet's parallelisms train as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from .fleet_grids import Grid, assert_like_one_process, trained
from .processes import run
from .restarts import restarted

pytestmark = [pytest.mark.long, pytest.mark.cpu_only]

DIVIDED: dict[str, Any] = {"sharding": {"split_param": True}, "main_grad": True}
RELEASED: dict[str, Any] = {"sharding": {"split_param": True, "release_gradients": True}, "main_grad": True}
OVERLAPPED: dict[str, Any] = {
    "sharding": {"split_param": True, "comm_overlap": True, "accumulate_steps": 2},
    "main_grad": True,
}
EXPERT = {"sharding_degree": 2, "moe_sharding_degree": 1, "ep_degree": 2}
PIPELINE = {
    "data": {"pp_degree": 2, "dp_degree": 2},
    "sharding": {"pp_degree": 2, "sharding_degree": 2},
    "expert": {"pp_degree": 2, **EXPERT},
}
INTERLEAVED: dict[str, Any] = {"kind": "residual", "blocks": 8, "virtual": 2, "turns": 4}
DUAL_PIPE_V: dict[str, Any] = {"kind": "residual", "blocks": 4, "turns": 4, "pipeline": {"use_dualpipev": True}}

GRIDS_OF_TWO = {
    "mp2, experts divided": Grid({"mp_degree": 2}, "model", divides_rows=True),
    "sep2, experts divided": Grid({"sep_degree": 2}, "sep", parts=(3, 2)),
    "sharding2, overlapped": Grid({"sharding_degree": 2}, "sharding", **OVERLAPPED),
}
SLOW_GRIDS_OF_TWO = {
    "sep2, a rank without tokens": Grid({"sep_degree": 2}, "sep", parts=(5, 0)),
    "dp2, no_sync": Grid({"dp_degree": 2}, "data", no_sync=True, turns=3),
    "sep2, narrow": Grid({"sep_degree": 2}, "sep", kind="narrow"),
    "ep2, divided": Grid(EXPERT, "expert", **DIVIDED),
    "ep2, released": Grid(EXPERT, "expert", **RELEASED),
    "ep2, overlapped": Grid(EXPERT, "expert", **OVERLAPPED),
    "sharding2, divided, scaler": Grid({"sharding_degree": 2}, "sharding", scaler="ours", **DIVIDED),
    "ep2, divided, scaler": Grid(EXPERT, "expert", scaler="ours", **DIVIDED),
}
GRIDS_OF_FOUR = {
    "pp2 dp2": Grid(PIPELINE["data"], "data", freezes=True, turns=3),
    "pp2 sharding2": Grid(PIPELINE["sharding"], "sharding", kind="narrow"),
    "pp2 sharding2, divided": Grid(PIPELINE["sharding"], "sharding", freezes=True, **DIVIDED),
    "pp2 ep2": Grid(PIPELINE["expert"], "expert", pipeline={"enable_dynamic_shape": True}),
    "pp2 dp2, recomputed": Grid(PIPELINE["data"], "data", kind="recomputed"),
    "pp2 dp2, late": Grid(PIPELINE["data"], "data", kind="late"),
    "pp2 sharding2, late": Grid(PIPELINE["sharding"], "sharding", kind="late"),
    "pp2 ep2, late": Grid(PIPELINE["expert"], "expert", kind="late", **DIVIDED),
    "pp2 dp2, tied": Grid(PIPELINE["data"], "data", kind="tied"),
    "pp2 sharding2, tied": Grid(PIPELINE["sharding"], "sharding", kind="tied"),
    "pp2 ep2, tied": Grid(PIPELINE["expert"], "expert", kind="tied", **DIVIDED),
    "pp2 dp2, balanced": Grid(PIPELINE["data"], "data", kind="balanced"),
    "pp2 ep2, balanced": Grid(PIPELINE["expert"], "expert", kind="balanced"),
    "mp2 dp2, experts replicated": Grid({"mp_degree": 2, "dp_degree": 2}, "data", kind="columns"),
    "mp2 dp2, experts divided": Grid({"mp_degree": 2, "dp_degree": 2}, "model", divides_rows=True),
    "mp2 dp2, rows divided": Grid({"mp_degree": 2, "dp_degree": 2}, "data", divides_rows=True),
    "mp2 dp2, experts split": Grid({"mp_degree": 2, "dp_degree": 2}, "data", kind="split"),
    "mp2 sharding2, experts split": Grid({"mp_degree": 2, "sharding_degree": 2}, "sharding", kind="split"),
    "mp2 ep4": Grid({"mp_degree": 2, **EXPERT, "ep_degree": 4}, "expert", divides_rows=True),
    "mp2 dp2, world": Grid({"mp_degree": 2, "dp_degree": 2}, "world", divides_rows=True),
    "mp2 sharding2": Grid({"mp_degree": 2, "sharding_degree": 2}, "sharding", kind="columns"),
    "mp2 sharding2, divided": Grid({"mp_degree": 2, "sharding_degree": 2}, "sharding", kind="columns", **DIVIDED),
    "sep2 dp2": Grid({"sep_degree": 2, "dp_degree": 2}, "sep"),
    "sep2 dp2, data": Grid({"sep_degree": 2, "dp_degree": 2}, "data"),
    "sep2 sharding2": Grid({"sep_degree": 2, "sharding_degree": 2}, "sharding"),
    "sep2 sharding2, divided": Grid({"sep_degree": 2, "sharding_degree": 2}, "sep", **DIVIDED),
    "dp2 sharding2, divided": Grid({"dp_degree": 2, "sharding_degree": 2}, "sharding", **DIVIDED),
    "dp2 sharding2, divided, scaler": Grid(
        {"dp_degree": 2, "sharding_degree": 2}, "sharding", scaler="ours", **DIVIDED
    ),
    "dp2 sharding2, overlapped": Grid({"dp_degree": 2, "sharding_degree": 2}, "data", **OVERLAPPED),
    "sep2 mp2": Grid({"sep_degree": 2, "mp_degree": 2}, "sep", divides_rows=True),
    "pp2 mp2": Grid({"pp_degree": 2, "mp_degree": 2}, "model", divides_rows=True),
    "pp2 sep2": Grid({"pp_degree": 2, "sep_degree": 2}, "sep", parts=(3, 2), pipeline={"enable_dynamic_shape": True}),
}
GRIDS_OF_EIGHT = {
    "pp2 mp2 dp2": Grid({"pp_degree": 2, "mp_degree": 2, "dp_degree": 2}, "data", kind="columns"),
    "pp2 mp2 sharding2": Grid({"pp_degree": 2, "mp_degree": 2, "sharding_degree": 2}, "model", divides_rows=True),
    "pp2 mp2 ep2": Grid({"pp_degree": 2, "mp_degree": 2, **EXPERT, "ep_degree": 4}, "expert", divides_rows=True),
    "sep2 mp2 sharding2": Grid({"sep_degree": 2, "mp_degree": 2, "sharding_degree": 2}, "sharding", divides_rows=True),
}
# Loss scaling does nothing on a CPU, Fleet recomputes stages on no CPU, and most schedules need batches of exchanges.
ON_STUB = {
    "dp2, scaler": Grid({"dp_degree": 2}, "data", scaler="ours"),
    "sharding2, scaler": Grid({"sharding_degree": 2}, "sharding", scaler="ours"),
    "ep2, fleet's scaler": Grid(EXPERT, "expert", scaler="fleet"),
    "pp2 dp2, scaler": Grid(PIPELINE["data"], "data", scaler="ours"),
    "pp2 ep2, fleet's scaler": Grid(PIPELINE["expert"], "expert", scaler="fleet"),
    "ep2, scaler of main_grad": Grid(EXPERT, "expert", scaler="ours", main_grad=True),
    "pp2 dp2, batched": Grid(PIPELINE["data"], "data"),
    "pp2 dp2, recomputed stages": Grid(PIPELINE["data"], "data", interval=1),
    "pp2 sharding2, recomputed stages": Grid(PIPELINE["sharding"], "sharding", interval=1, main_grad=True),
    "pp4 dp2": Grid({"pp_degree": 4, "dp_degree": 2}, "data", turns=4),
    "pp4 dp2, interleaved": Grid({"pp_degree": 4, "dp_degree": 2}, "data", **INTERLEAVED),
    "pp4 ep2, interleaved": Grid({"pp_degree": 4, **EXPERT}, "expert", **INTERLEAVED),
    "pp2 dp2, DualPipeV": Grid(PIPELINE["data"], "data", **DUAL_PIPE_V),
    "pp2 dp2, DualPipeV, deferred": Grid(PIPELINE["data"], "data", **{**DUAL_PIPE_V, "kind": "deferred"}),
    "pp2 ep2, DualPipeV": Grid(PIPELINE["expert"], "expert", **DUAL_PIPE_V),
}


def check(name: str, grid: Grid, got: list[Any]) -> None:
    """Compare with one process; ``pytest -s`` shows the differences that docs/expert_parallel_fleet.md lists."""
    print(f"{name}: {assert_like_one_process(grid, got):.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_STUB)
def test_a_device_with_all_collectives_trains_as_one_process(name):
    grid = ON_STUB[name]
    check(name, grid, run(trained, grid.processes, "stub", grid=grid))


# The first of these ends the processes of the tests above.


@pytest.mark.parametrize("name", GRIDS_OF_TWO)
def test_two_processes_train_as_one(ranks, name):
    check(name, GRIDS_OF_TWO[name], ranks(2, trained, grid=GRIDS_OF_TWO[name]))


def test_states_that_fleet_divided_continue_in_another_grid(ranks, tmp_path):
    """The cheapest of the restarts in test_restarts.py: parts of tensors, AdamW and a schedule of the rate."""
    source, target = Grid({"sharding_degree": 2}, "sharding", adam=True, **DIVIDED), Grid(EXPERT, "expert", adam=True)
    losses, tensors = restarted(ranks, tmp_path, source, target)
    assert losses < 1e-6
    assert tensors < 2e-7


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_GRIDS_OF_TWO)
def test_two_processes_train_as_one_in_more_ways(ranks, name):
    check(name, SLOW_GRIDS_OF_TWO[name], ranks(2, trained, grid=SLOW_GRIDS_OF_TWO[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS_OF_FOUR)
def test_four_processes_train_as_one(ranks, name):
    check(name, GRIDS_OF_FOUR[name], ranks(4, trained, grid=GRIDS_OF_FOUR[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS_OF_EIGHT)
def test_eight_processes_train_as_one(ranks, name):
    check(name, GRIDS_OF_EIGHT[name], ranks(8, trained, grid=GRIDS_OF_EIGHT[name]))
