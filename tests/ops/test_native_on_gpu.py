# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that the compiled library repeats on a GPU have the bits of those that Triton launches."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest

import paddle_moe_ops.backends.triton as backend
from paddle_moe_ops import use_backend
from paddle_moe_ops.backends.triton_arrays import device_of
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import tensor
from tests.ops.test_explain_layer import arguments_of, launches_in, said_of
from tests.ops.test_moe_mlp import Layer
from tests.params import Shape

pytestmark = pytest.mark.gpu_only

SHAPE = Shape(300, 128, 8, 2, 16, "rows for descriptors, and padding between experts")


@pytest.fixture
def gpu(place, monkeypatch):
    """The device of the kernels, without recordings of other tests."""
    device = device_of(tensor(np.zeros(1, np.float32), place))
    device.recordings.clear()
    monkeypatch.setattr(backend, "has_layer_kernels", lambda *_: False)  # otherwise nothing is recorded
    with use_backend("triton"):
        yield device
    device.recordings.clear()


def in_python(gpu, monkeypatch, run):
    """Results of a function with Python repeating recorded calls."""
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "native", None)
        run()
        return run()


def assert_same(made, expected):
    for name, each in expected.items():
        assert_bits_equal(made[name].cpu(), each.cpu())


@pytest.mark.parametrize("form", ["by slot", "by row", "none"])
@pytest.mark.parametrize("keep", ["h", "x"])
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("sizes", [(128, 192), (40, 24)], ids=str)
def test_layers_and_their_gradients(gpu, rng, place, monkeypatch, sizes, transpose, keep, form):
    layer = Layer(rng, SHAPE, ml_dtypes.bfloat16, transpose=transpose, form=form, sizes=sizes)
    run = lambda: layer.run(place, keep=keep)  # noqa: E731
    expected = in_python(gpu, monkeypatch, run)
    for _ in range(3):  # the first is written down
        assert_same(run(), expected)
    natively = [each for each in gpu.recordings.values() if each is not None and each.native is not None]
    assert len(natively) == 2


@pytest.mark.parametrize("sizes", [(128, 192), (40, 24)], ids=str)
def test_explain_counts_the_launches_that_were_written_down(gpu, rng, place, sizes):
    layer = Layer(rng, SHAPE, ml_dtypes.bfloat16, sizes=sizes)
    layer.run(place)
    written = [len(each.launches) for each in gpu.recordings.values()]
    operands, options = arguments_of(layer, layer.leaves(place), place)
    said = said_of(operands, **options)
    assert [sum(launches_in(said[each]).values()) for each in ("forward", "backward")] == written
    assert len(gpu.recordings) == 2


def test_on_a_stream_of_the_user(gpu, device, rng, place, monkeypatch):
    layer = Layer(rng, SHAPE, ml_dtypes.bfloat16, sizes=(128, 192))
    expected = in_python(gpu, monkeypatch, lambda: layer.run(place))
    layer.run(place)
    stream = paddle.device.Stream(device)
    with paddle.device.stream_guard(stream):
        made = layer.run(place)
    stream.synchronize()
    assert_same(made, expected)
