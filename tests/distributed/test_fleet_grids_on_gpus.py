# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts in grids of Fleet's parallelisms on two GPUs train as one GPU does."""

from __future__ import annotations

import pytest

from .fleet_grids import Grid, trained
from .processes import run
from .test_fleet_grids import DUAL_PIPE_V, GRIDS_OF_TWO, ON_STUB, SLOW_GRIDS_OF_TWO, check

pytestmark = pytest.mark.gpu_only

STAGES = {"pp_degree": 2}
PIPELINES = {
    "pp2": Grid(STAGES, "data", turns=3),
    "pp2, recomputed stages": Grid(STAGES, "data", interval=1),
    "pp2, DualPipeV": Grid(STAGES, "data", **DUAL_PIPE_V),
    "pp2, DualPipeV, deferred": Grid(STAGES, "data", **{**DUAL_PIPE_V, "kind": "deferred"}),
}
OF_TWO = {**GRIDS_OF_TWO, **SLOW_GRIDS_OF_TWO, **ON_STUB, **PIPELINES}
# On a device of a plug-in, Paddle's sharding V2 asserts that parts share their buffer.
GRIDS = {name: grid for name, grid in OF_TWO.items() if grid.processes == 2 and not grid.sharding}


@pytest.mark.parametrize("name", GRIDS)
def test_two_gpus_train_as_one(name, custom_backend):
    check(name, GRIDS[name], run(trained, 2, custom_backend, grid=GRIDS[name]))
