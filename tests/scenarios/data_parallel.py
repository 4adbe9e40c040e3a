# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model that two processes train together, and of the same model alone."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray

from tests.scenarios.test_training import BLOCK_TYPES, CLASSES, H, make_net

PARTS = {"both": (slice(0, 5), slice(5, 16)), "one without tokens": (slice(0, 16), slice(16, 16))}


def data() -> tuple[NDArray, NDArray]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((16, H), np.float32), rng.integers(0, CLASSES, 16)


def gradients(net: paddle.nn.Layer, part: slice) -> dict[str, NDArray]:
    """Gradients of the sum of losses over a part of the data."""
    points, labels = data()
    x = paddle.to_tensor(points[part])
    x.stop_gradient = False  # without tokens, Paddle's matmul has a gradient of its weight only beside one of its input
    out = net(x)
    F.cross_entropy(out, paddle.to_tensor(labels[part]), reduction="sum").backward()
    return {name.removeprefix("_layers."): each.grad.numpy() for name, each in net.named_parameters()}


def gradients_of_rank() -> dict[str, NDArray]:
    """Gradients of all blocks and parts, for `tests.distributed.processes.run`."""
    results = {}
    for block in BLOCK_TYPES:
        for label, parts in PARTS.items():
            net = paddle.DataParallel(make_net(block))
            for name, gradient in gradients(net, parts[paddle.distributed.get_rank()]).items():
                results[f"{block.__name__}/{label}/{name}"] = gradient
    return results
