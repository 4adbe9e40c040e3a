# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls with rows of several widths, traced by bytecode: from the second width on, the graph does not know it."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_permute, moe_unpermute, permute, route, sort_chunks, unpermute
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import tensor

pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")

T, E = 5, 4
WIDTHS = (12, 16, 20)
IDS = np.array([[0, 1], [2, 1], [3, 0], [1, 3], [0, 2]], np.int32)


def pair(x, ids, probs):
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, E, None, 1)
    return moe_unpermute(rows, rowmap, ids, row_probs, T, E)[0]


def weighted_pair(x, ids, probs):
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, E, None, 1)
    return moe_unpermute(rows, rowmap, ids, row_probs, T, E, using_weighted_combine=True)[0]


def by_plan(x, ids, probs):
    plan = route(ids, num_experts=E)
    return unpermute(permute(x, plan)[0], plan) + unpermute(permute(x, plan)[0], plan, probs)


def chunks(x, ids, probs):
    return sort_chunks(x, ids[0] + ids[1], ids[0])[0]


def gradients(function, x, *others):
    x = x.detach()
    x.stop_gradient = False
    out = function(x, *others)
    (out * out).sum().backward()
    return out, x.grad


@pytest.mark.parametrize("function", [pair, weighted_pair, by_plan, chunks], ids=lambda function: function.__name__)
def test_functions(function, rng, place):
    traced = paddle.jit.to_static(function, full_graph=False)
    ids, probs = tensor(IDS, place), tensor(rng.random((T, 2), np.float32), place)
    for width in WIDTHS:
        x = tensor(rng.standard_normal((T, width)).astype(np.float32), place)
        both = (gradients(each, x, ids, probs) for each in (traced, function))
        for name, made, due in zip(("out", "x"), *both, strict=True):
            assert_bits_equal(made, due, what=f"{name} of width {width}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [{}, {"activation": "geglu"}, {"expert_bias": True}, {"compute": "fp8_1x128"}], ids=str
)
def test_layers(options, rng, place):
    for width in WIDTHS:
        layer = MoELayer(width, 8, E, 2, **options)
        x = tensor(rng.standard_normal((T, width)).astype(np.float32), place)
        traced = paddle.jit.to_static(layer.forward, full_graph=False)
        for made, due in zip(gradients(traced, x), gradients(layer, x), strict=True):
            np.testing.assert_allclose(to_numpy(made), to_numpy(due), rtol=1e-4, atol=1e-5)
