# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""One process of two that train a model together: ``python -m tests.scenarios.data_parallel RANK PORT0 PORT1 OUT``.

It writes the gradients of a step to OUT. Without arguments to `gradients` the same model runs alone.
"""

from __future__ import annotations

import os
import sys

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


def main(rank: int, ports: list[str], out: str) -> None:
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    os.environ.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM="2",
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_DISTRI_BACKEND="gloo",
    )
    paddle.distributed.init_parallel_env()
    results = {}
    for block in BLOCK_TYPES:
        for label, parts in PARTS.items():
            net = paddle.DataParallel(make_net(block))
            for name, gradient in gradients(net, parts[rank]).items():
                results[f"{block.__name__}/{label}/{name}"] = gradient
    np.savez(out, **results)


if __name__ == "__main__":
    paddle.set_device("cpu")
    main(int(sys.argv[1]), sys.argv[2:4], sys.argv[4])
