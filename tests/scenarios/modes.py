# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to run a model and get the gradients of its leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed.fleet.utils import recompute

from tests.ops.problems import tensor
from tests.static.modes import static_mode

from .models import LEAVES, loss_of

Arrays = dict[str, NDArray]
Gradients = dict[str, NDArray | None]
Forward = Callable[..., Any]


def dygraph(forward: Forward, arrays: Arrays, place: Any) -> Gradients:
    leaves = [tensor(arrays[name], place, gradient=True) for name in LEAVES]
    loss_of(forward(*leaves)).backward()
    return {name: None if leaf.grad is None else leaf.grad.numpy() for name, leaf in zip(LEAVES, leaves, strict=True)}


def recomputed(forward: Forward, arrays: Arrays, place: Any, *, use_reentrant: bool) -> Gradients:
    def again(*leaves: paddle.Tensor) -> Any:
        return recompute(forward, *leaves, use_reentrant=use_reentrant)

    return dygraph(again, arrays, place)


def traced(forward: Forward, arrays: Arrays, place: Any, *, full_graph: bool) -> Gradients:
    return dygraph(paddle.jit.to_static(forward, full_graph=full_graph), arrays, place)


def static_graph(forward: Forward, arrays: Arrays, place: Any) -> Gradients:
    """As a program for an Executor, which knows no tensors."""
    program = paddle.static.Program()
    with static_mode(), paddle.static.program_guard(program):
        leaves = [paddle.static.data(name, arrays[name].shape, "float32") for name in LEAVES]
        for leaf in leaves:
            leaf.stop_gradient = False
        gradients = paddle.static.gradients([loss_of(forward(*leaves))], leaves)
        given = [gradient for gradient in gradients if gradient is not None]
        fetched = iter(paddle.static.Executor(place).run(program, feed=arrays, fetch_list=given))
    return {name: None if gradient is None else next(fetched) for name, gradient in zip(LEAVES, gradients, strict=True)}


def assert_same_gradients(got: Gradients, expected: Gradients, tolerance: float = 1e-5) -> None:
    """Checks gradients of which each may be off by so much of the largest of its leaf; 0 may be None."""
    assert np.abs(expected["x"]).max() > 1e-3
    assert np.abs(expected["router"]).max() > 1e-3
    for name, wanted in expected.items():
        if wanted is None or not wanted.any():
            assert got[name] is None or not got[name].any(), f"{name} has a gradient"
            continue
        assert got[name] is not None, f"{name} has no gradient"
        off = np.abs(got[name] - wanted).max() / np.abs(wanted).max()
        assert off <= tolerance, f"the gradient of {name} is off by {off:.3g} of its largest element"
