# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark calls the Triton kernels so that they give right results."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kernels.cpu_arrays import ArrayInputs
from benchmarks.kernels.cpu_check import ArrayCheck
from benchmarks.kernels.operators import OPERATIONS, Library, difference, implementations
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import Case, Shape

SHAPE = Shape("check", 13, 2, 5, 136)
CASES = [Case(SHAPE, "uniform"), Case(SHAPE, "half_unassigned", 7), Case(SHAPE, "half_unassigned", 7, fill=False)]


class DeviceInputs:
    """Inputs where the kernels run, with the routing as a mask, too."""

    def __init__(self, gpu, inputs):
        self.problem, self.inputs, self.gpu = inputs.problem, inputs, gpu

    def __getattr__(self, name):
        values = {"mask": np.ones_like(self.problem.ids, np.bool_), "probs_by_expert": self.problem.probs}.get(name)
        if values is None:
            return self.gpu.array(getattr(self.inputs, name))
        assigned = self.problem.ids >= 0
        wide = np.zeros((SHAPE.num_tokens, SHAPE.num_experts), values.dtype)
        wide[np.nonzero(assigned)[0], self.problem.ids[assigned]] = values[assigned]
        return self.gpu.array(wide)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.key)
@pytest.mark.parametrize("case", CASES, ids=["dense", "padded", "not filled"])
def test_every_way_gives_right_results(gpu, case, operation):
    inputs = ArrayInputs(make_problem(case))
    ways = [each for each in implementations(Library.TRITON, gpu, gpu=True) if each.offers(operation)]
    assert "triton" in {way.name for way in ways}
    for way in ways:
        body = way.prepare(operation, DeviceInputs(gpu, inputs))
        outputs = {name: gpu.numpy(array) for name, array in body.results(body.run()).items()}
        assert difference(operation, ArrayCheck(inputs, body.exactness), outputs) is None, way.name
