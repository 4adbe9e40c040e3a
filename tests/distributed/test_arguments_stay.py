# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine over ranks leave views of buffers what they are, and read them anew in each call."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_moe_ops.expert_parallel import ExpertParallel

from . import fake_deep_ep
from .processes import run

pytestmark = pytest.mark.cpu_only

T, D, E, K = 7, 16, 6, 2
WAYS = {
    "exact": {"combine": "exact"},
    "reduced": {"combine": "reduced"},
    "float8": {"combine": "reduced", "payload": "fp8_1x128"},
    "peer": {"combine": "exact", "transport": "peer", "tokens_per_rank": 2 * T},
    "deepep": {"combine": "reduced", "transport": "deepep"},
}


def as_columns(values: paddle.Tensor) -> paddle.Tensor:
    """The first columns of a wider buffer, which hold the values."""
    return paddle.concat([values, values[:, :1]], axis=1)[:, : values.shape[1]]


def state(tensors: Any) -> list[Any]:
    return [(each.data_ptr(), each.strides, each.inplace_version, each.astype("float32").tolist()) for each in tensors]


def there_and_back(parallel: Any, given: list[paddle.Tensor], lay: Any) -> tuple[list[Any], bool]:
    """Results and gradients of dispatch and of combine; whether all that they were given stayed what it was."""
    x, ids, probs = given
    x.stop_gradient = probs.stop_gradient = False
    before = state(given)
    received = parallel.dispatch(x, ids, probs)
    arrived = received.rows if received.rows is not None else received.tokens
    out, d_arrived, d_result = (lay(each.detach() * 0.5) for each in (arrived, arrived, x))
    out.stop_gradient = False
    others = [out, d_arrived, d_result]
    before += state(others)
    result = parallel.combine(out, received)
    paddle.autograd.backward([result], [d_result])
    paddle.autograd.backward([arrived], [d_arrived])
    stayed = before == state([*given, *others])
    found = [each.astype("float32").tolist() for each in (arrived, result, x.grad, out.grad)]
    x.clear_gradient(False)
    return found, stayed


def of_ranks(options: dict[str, Any]) -> list[str]:
    """Arguments that a call changed, and results that differ from those of separate tensors."""
    fake_deep_ep.install()
    parallel, wrong = ExpertParallel(E, **options), []
    dtype = "bfloat16" if options.get("transport") == "deepep" else "float32"
    paddle.seed(paddle.distributed.get_rank())

    def data() -> list[paddle.Tensor]:
        ids = paddle.argsort(paddle.rand([T, E]), axis=1)[:, :K].astype("int32").clone()
        return [paddle.randn([T, D]).astype(dtype), ids, paddle.rand([T, K])]

    views = [as_columns(each) for each in data()]
    for step in range(2):
        new = data()
        with paddle.no_grad():
            for view, values in zip(views, new, strict=True):
                view.copy_(values, True)
        got, stayed = there_and_back(parallel, views, as_columns)
        expected, _ = there_and_back(parallel, new, lambda values: values)
        if not stayed:
            wrong.append(f"arguments of step {step}")
        if got != expected:
            wrong.append(f"results of step {step}")
    return wrong


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS.keys())
def test_columns_of_buffers_stay_what_they_are_and_are_read_anew(options):
    assert run(of_ranks, 2, options=options) == [[], []]
