# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Plans whose maps the caller has replaced: an error that names the field."""

from __future__ import annotations

import re

import paddle
import pytest

from paddle_moe_ops import moe_mlp, permute, quantize_experts, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import SwiGLUExperts

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, I, E, K = 5, 16, 8, 3, 2  # noqa: E741


def layer(format: str | None = None, **options):
    def call(plan):
        matrices = paddle.ones([E, H, 2 * I]), paddle.ones([E, I, H])
        if format is not None:
            matrices = quantize_experts(*matrices, format=format)
        else:
            for each in matrices:
                each.stop_gradient = False
        return moe_mlp(paddle.ones([T, H]), plan, paddle.ones([T, K]), *matrices, **options)

    return call


CALLS = {
    "layer": ("moe_mlp", layer()),
    "float8": ("moe_mlp", layer(compute="fp8_1x128")),
    "activation": ("moe_mlp", layer(activation="geglu")),
    "int8": ("moe_mlp", layer(format="int8")),
    "deferred": ("moe_mlp", layer(defer_dw=True)),
    "rows": ("permute", lambda plan: permute(paddle.ones([T, H]), plan)),
    "sums": ("unpermute", lambda plan: unpermute(paddle.ones([2 * T - 1, H]), plan, paddle.ones([T, K]))),
    "GEMM": (
        "grouped_gemm",
        lambda plan: grouped_gemm(paddle.ones([T, H]), paddle.ones([E, I, H]), plan=plan, permute_x=True),
    ),
    "experts": ("SwiGLUExperts", lambda plan: SwiGLUExperts(E, H, I)(paddle.ones([T, H]), plan=plan, combine=True)),
}
SHAPES = {
    "slot_to_row": [T, K],
    "token_rows": [T, K],
    "row_to_token": [2 * T - 1],
    "tokens_per_expert": [E],
    "expert_offsets": [E + 1],
}


@pytest.fixture
def plan():
    return route(paddle.to_tensor([[0, 1], [1, 2], [2, 0], [0, -1], [1, 0]]), num_experts=E)


@pytest.mark.parametrize("field", SHAPES)
@pytest.mark.parametrize("name", CALLS)
def test_a_map_that_is_missing_or_of_another_kind_is_named(name, field, plan):
    function, call = CALLS[name]
    call(plan)  # what passed the checks must not hide the next ones
    given = getattr(plan, field)
    begin = f"^{function}: plan.{field} must be "
    for wrong, error, text in (
        (None, TypeError, "a paddle.Tensor, but got NoneType"),
        (given.astype("int64"), TypeError, "of dtype int32, but got int64"),
        (given[:-1], ValueError, f"of shape {SHAPES[field]}, but got {list(given[:-1].shape)}"),
        (given[:0], ValueError, f"of shape {SHAPES[field]}, but got {list(given[:0].shape)}"),
        (paddle.concat([given, given]), ValueError, f"of shape {SHAPES[field]}, but got"),
    ):
        with pytest.raises(error, match=begin + re.escape(text)):
            call(plan._replace(**{field: wrong}))
