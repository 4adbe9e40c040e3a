# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Launches in a CUDA graph: replays follow new data in the same memory."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.triton.ops.permute import permute
from paddle_moe_ops.triton.ops.route import Routing, route
from paddle_moe_ops.triton.ops.unpermute import unpermute
from tests.params import MANY_TOKENS, SMALL
from tests.reference.cases import assert_same_bits

from .problems import make_problem, ordinary

pytestmark = pytest.mark.cuda_only


@pytest.mark.parametrize("shape", [SMALL, MANY_TOKENS], ids=str)
def test_a_captured_graph_follows_new_routings(gpu, rng, shape):
    import torch

    num_rows = shape.T * shape.K  # a static buffer
    options = {"buffer_size": num_rows, "duplicates": "first"}
    problems = [make_problem(rng, shape._replace(A=1), routing, **options) for routing in ("uniform", "zipf")]
    tokens = [ordinary(rng, (shape.T, shape.H), "float32") for _ in problems]
    ids, x = gpu.array(problems[0].ids), gpu.array(tokens[0])

    def step():
        maps = route(gpu, Routing(ids, None, shape.T, shape.K, shape.E, 1, False, True), num_rows)
        rows, _ = permute(gpu, x, None, maps.token_rows, maps.row_to_token, "all")
        return maps.row_to_token, rows, unpermute(gpu, rows, maps.token_rows)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row_to_token, rows, sums = step()
    for problem, new in zip(problems, tokens, strict=True):
        ids.copy_(gpu.array(problem.ids))
        x.copy_(gpu.array(new))
        graph.replay()
        torch.cuda.synchronize()
        plan = problem.plan
        assert_same_bits(gpu.numpy(row_to_token), plan.row_to_token)
        expected = np.where(plan.row_to_token[:, None] >= 0, new[plan.row_to_token], np.float32(0))
        assert_same_bits(gpu.numpy(rows), expected)
        assert_same_bits(gpu.numpy(sums), reference.unpermute(expected, plan))
