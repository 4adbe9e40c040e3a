# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle's operators by the kernels of tools/gpu_rig/device_kernels.cc: right results, and nothing on the host.

A stream that is captured refuses to be waited for. So a CUDA graph of a call shows that the host computes nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.triton.launch.paddle_device import device_of
from tests.captured import Graph

pytestmark = [
    pytest.mark.gpu_only,
    pytest.mark.skipif("RIG_DEVICE_KERNELS" not in os.environ, reason="the host computes Paddle's operators"),
]

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "int64": 0}
FLOATS, ALL = ("float32", "bfloat16"), ("float32", "bfloat16", "int64")
Call = Callable[..., paddle.Tensor]


def silu(x):
    return x / (1 + np.exp(-x))


def exponentials(x):
    return np.exp(x - x.max(-1, keepdims=True))


# Name, shapes of the operands, dtypes, operator of Paddle and of NumPy.
CASES: list[tuple[str, list[list[int]], tuple[str, ...], Call, Call]] = [
    ("add", [[3, 5, 7], [5, 1]], ALL, paddle.add, np.add),
    ("add to a column", [[6, 1], [4]], ALL, paddle.add, np.add),
    ("subtract", [[300, 3], [300, 3]], ALL, paddle.subtract, np.subtract),
    ("multiply", [[2, 1, 9], [4, 1]], ALL, paddle.multiply, np.multiply),
    ("scale", [[5, 9]], FLOATS, lambda x: paddle.scale(x, 0.5, 2.0), lambda x: x * 0.5 + 2),
    ("scale the sum", [[5, 9]], FLOATS, lambda x: paddle.scale(x, 0.5, 2.0, False), lambda x: (x + 2) * 0.5),
    ("clone", [[3, 50]], ALL, lambda x: x.clone(), lambda x: x),
    ("zeros", [[7, 3]], ALL, paddle.zeros_like, np.zeros_like),
    ("cast", [[17]], FLOATS, lambda x: x.astype("bfloat16").astype("float32"), lambda x: x),
    ("rsqrt", [[33]], ("float32",), lambda x: paddle.rsqrt(x * x + 1.0), lambda x: 1 / np.sqrt(x * x + 1)),
    ("mean", [[4, 300]], FLOATS, lambda x: x.mean(-1, keepdim=True), lambda x: x.mean(-1, keepdims=True)),
    ("softmax", [[2, 3, 700]], FLOATS, F.softmax, lambda x: exponentials(x) / exponentials(x).sum(-1, keepdims=True)),
    ("argmax", [[3, 2, 1000]], FLOATS, lambda x: x.argmax(-1), lambda x: x.argmax(-1)),
    ("transpose", [[3, 4, 5]], ALL, lambda x: x.transpose([2, 0, 1]).contiguous(), lambda x: x.transpose(2, 0, 1)),
    ("split", [[3, 7, 2]], ALL, lambda x: x.split([2, 5], 1)[1], lambda x: x[:, 2:]),
    ("halves", [[3, 8]], ALL, lambda x: x.split(2, -1)[1], lambda x: x[:, 4:]),
    ("concat", [[3, 2, 4], [3, 5, 4]], ALL, lambda x, y: paddle.concat([x, y], 1), lambda *x: np.concatenate(x, 1)),
    ("swiglu", [[3, 66]], FLOATS, F.swiglu, lambda x: silu(x[:, :33]) * x[:, 33:]),
    ("matmul", [[2, 3, 40], [40, 24]], FLOATS, paddle.matmul, np.matmul),
    (
        "transposed matmul",
        [[7, 40], [24, 40]],
        FLOATS,
        lambda x, y: paddle.matmul(x, y, False, True),
        lambda x, y: x @ y.T,
    ),
    ("batched matmul", [[2, 3, 5, 16], [2, 3, 16, 9]], FLOATS, paddle.matmul, np.matmul),
]


def captures() -> bool:
    """False for the stand-in for a GPU."""
    return hasattr(ctypes.CDLL("libcuda.so.1"), "cuStreamBeginCapture_v2")


def replayed(call: Call, *operands: paddle.Tensor) -> paddle.Tensor:
    """The result of a call, from a CUDA graph where there are any."""
    made = call(*operands)
    if not captures():
        return made
    graph = Graph(device_of(operands[0]).stream(), lambda: call(*operands))
    graph.launch()
    assert np.array_equal(to_numpy(graph.made), to_numpy(made))
    return graph.made


@pytest.mark.parametrize(
    ("shapes", "dtype", "call", "due"),
    [
        pytest.param(shapes, dtype, call, due, id=f"{name}-{dtype}")
        for name, shapes, dtypes, call, due in CASES
        for dtype in dtypes
    ],
)
def test_an_operator_runs_on_the_device(shapes, dtype, call, due):
    rng = np.random.default_rng(0)
    operands = [paddle.to_tensor(rng.integers(-9, 9, shape) / (1 if dtype == "int64" else 4)) for shape in shapes]
    operands = [each.astype(dtype) for each in operands]
    values = [to_numpy(each).astype(np.float64) for each in operands]
    made, expected = replayed(call, *operands), due(*values)
    assert made.shape == list(expected.shape)
    np.testing.assert_allclose(to_numpy(made).astype(np.float64), expected, TOLERANCES[dtype], TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", ALL)
def test_rows_are_gathered_and_scattered_in_place(dtype):
    table = paddle.arange(60).reshape([12, 5]).astype(dtype)
    ids = paddle.to_tensor([3, 0, 11])
    embedding = [] if dtype == "int64" else [lambda x, ids: F.embedding(ids, x)]
    for call in (paddle.gather, *embedding):
        np.testing.assert_array_equal(to_numpy(replayed(call, table, ids)), to_numpy(table)[[3, 0, 11]])
    rows, before = paddle.full([3, 5], 7).astype(dtype), to_numpy(table).copy()
    address = table.data_ptr()
    replayed(lambda table, ids, rows: table.scatter_(ids, rows), table, ids, rows)
    before[[3, 0, 11]] = 7
    np.testing.assert_array_equal(to_numpy(table), before)
    assert table.data_ptr() == address
