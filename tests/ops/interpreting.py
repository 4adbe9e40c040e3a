# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the Triton backend on interpreted kernels; the fixture `interpreted` selects that backend."""

from __future__ import annotations

from paddle_moe_ops import use_backend
from tests.ops.problems import tensor
from tests.params import SMALL

SHAPE = SMALL._replace(T=5)  # a program takes ten milliseconds and more


def on_both(call):
    """Pairs of a function's results on Triton and on the oracle."""
    with use_backend("triton"):
        actual = call()
    with use_backend("reference"):
        expected = call()
    return list(zip(actual, expected, strict=True))


def loss_of(outputs, weights):
    return sum((output.astype("float32") * weight).sum() for output, weight in zip(outputs, weights, strict=True))


def gradients(call, arrays, weights, wanted):
    """The gradients of a call's inputs, of those that want one."""
    inputs = [tensor(array, "cpu", gradient=want) for array, want in zip(arrays, wanted, strict=True)]
    loss_of(call(*inputs), [tensor(weight, "cpu") for weight in weights]).backward()
    return [each.grad for each in inputs if each.grad is not None]
