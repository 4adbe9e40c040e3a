# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Large-model training: mixed precision, recomputation, gradients of several batches accumulated in `main_grad`.

A rank may have no tokens.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import use_backend
from paddle_moe_ops.expert_parallel import average_gradients, gather_state_dict, is_expert_parameter

from .processes import run
from .test_expert_parallel_layer import Net, arrays, batch

TURNS = 3


def accumulated(net: Net, tokens: tuple[int, ...], rank: int | None, mixed: bool) -> dict[str, NDArray]:
    """The gradients of the mean loss of several batches, averaged over the ranks."""
    for each in net.moe.experts.parameters():
        each.main_grad = None
    parts = 1 if rank is None else len(tokens)
    for turn in range(TURNS):
        x, y = batch(tokens, rank, turn)
        x.stop_gradient = (
            False  # without tokens, Paddle's matmul has a gradient of its weight only beside one of its input
        )
        with paddle.amp.auto_cast(enable=mixed, dtype="float16"):
            out = net(x)
        ((out.astype("float32") - y).square().sum() * (parts / sum(tokens))).backward()
    if rank is not None:
        average_gradients(net.parameters(), paddle.distributed.get_group(0))
    found = {}
    for name, each in net.named_parameters():
        gradient = each.main_grad if "experts" in name else each.grad
        assert (each.grad is None) == ("experts" in name), name
        assert gradient.dtype == paddle.float32, name
        found[name] = gradient.numpy()
    return found


def over_ranks(tokens: tuple[int, ...], mixed: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    """The state of the whole model, and this rank's gradients."""
    paddle.seed(7)
    group = paddle.distributed.get_group(0)
    # all that runs on the stub
    on_device = use_backend("reference") if paddle.get_device().startswith("stub") else contextlib.nullcontext()
    with on_device:
        return _over_ranks(tokens, mixed, options, group)


def _over_ranks(tokens: tuple[int, ...], mixed: bool, options: dict[str, Any], group: Any) -> tuple[Any, Any]:
    net = Net(group, recomputes=True, accumulate=True, **options)
    assert all(is_expert_parameter(each) for each in net.moe.experts.parameters())
    return arrays(gather_state_dict(net, group)), accumulated(net, tokens, group.rank, mixed)


EXACT, EQUAL_PARTS = {"combine": "exact"}, {"combine": "reduced", "tokens_per_rank": 16}
PEERS = {**EQUAL_PARTS, "transport": "peer"}
TOKENS = pytest.mark.parametrize("tokens", [(5, 11), (16, 0)], ids=["uneven", "one without tokens"])


def errors(tokens: tuple[int, ...], options: dict[str, Any], backend: str | None = None) -> dict[str, float]:
    """Error of each gradient against one process in float32, relative to its maximum."""
    mixed = backend is not None
    ranks = run(over_ranks, len(tokens), backend, tokens=tokens, mixed=mixed, options=options)
    net = Net(recomputes=True, accumulate=True)
    net.set_state_dict({name: paddle.to_tensor(each) for name, each in ranks[0][0].items()})
    found = {}
    for name, expected in accumulated(net, tokens, None, mixed=False).items():
        of_ranks = [gradients[name] for _, gradients in ranks]
        if "experts" not in name:
            np.testing.assert_array_equal(of_ranks[1], of_ranks[0], err_msg=name)
            of_ranks = of_ranks[:1]
        assert np.abs(expected).max() > 0, name
        found[name] = float(np.abs(np.concatenate(of_ranks) - expected).max() / np.abs(expected).max())
    return found


@TOKENS
@pytest.mark.parametrize("options", [EXACT, EQUAL_PARTS, PEERS], ids=["exact", "parts of one size", "peers"])
def test_gradients_are_those_of_one_process(tokens, options):
    for name, error in errors(tokens, options).items():
        assert error < 1e-5, name


@TOKENS
@pytest.mark.parametrize("options", [EXACT, EQUAL_PARTS], ids=["exact", "parts of one size"])
def test_in_mixed_precision_they_differ_by_its_rounding(tokens, options, custom_backend):
    """On a custom device and in float16: on a CPU Paddle's `auto_cast` does nothing, there nothing for bfloat16."""
    found = errors(tokens, options, custom_backend)
    assert max(found.values()) < 0.05
    assert min(found.values()) > 1e-5
