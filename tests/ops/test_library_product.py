# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_mlp on the compiled library's product for Hopper, under Paddle on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import paddle_moe_ops.backends.triton as backend
from paddle_moe_ops.backends.triton_arrays import device_of
from paddle_moe_ops.triton import hopper_product
from paddle_moe_ops.triton.gemm import gather_heuristic, gpu_facts
from paddle_moe_ops.triton.hopper_product import LibraryKernel
from paddle_moe_ops.triton.launch import paddle_device
from tests.ops.problems import tensor
from tests.ops.test_moe_mlp import BY_LAYOUT, Layer, assert_close
from tests.params import Shape

pytestmark = pytest.mark.gpu_only

SHAPE = Shape(800, 72, 4, 2, 16, "hundreds of rows for each expert, and padding between them")


@pytest.fixture(params=[hopper_product.TILE_ROWS, hopper_product.TURNED_ROWS])
def tile_rows(request):
    """Tile rows of the kernel for plain products."""
    return request.param


@pytest.fixture
def launches(monkeypatch, place, tile_rows):
    """Launches of library kernels by Python, which uses them for layers of any size and repeats recordings itself."""
    seen = []
    run = LibraryKernel.run

    def record(self, *arguments):
        seen.append(self.__name__)
        run(self, *arguments)

    monkeypatch.setattr(LibraryKernel, "run", record)
    monkeypatch.setattr(backend, "runs_by_operator", lambda *_: False)  # as of layers that accumulate
    monkeypatch.setattr(device_of(tensor(np.zeros(1, np.float32), place)), "native", None)
    rows = {hopper_product.PLAIN: tile_rows}
    chosen = lambda gpu, result, *_: rows.get(result, hopper_product.TURNED_ROWS)  # noqa: E731
    monkeypatch.setattr(hopper_product, "chosen_rows", chosen)
    monkeypatch.setattr(gather_heuristic, "_MAX_GATHERED_N", 0)
    yield seen
    for device in paddle_device._devices.values():  # what was recorded in the test chose by its sizes
        device.recordings.clear()


@pytest.mark.parametrize("form", ["by slot", "by row", "none"])
@pytest.mark.parametrize("keep", ["h", "x"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
@BY_LAYOUT
def test_results_and_gradients_are_those_of_the_oracle_in_each_call(rng, place, launches, transpose, dtype, keep, form):
    for call in range(1, 4):  # the first is written down, the others repeat it with other operands
        layer = Layer(rng, SHAPE, dtype, transpose=transpose, form=form, sizes=(64, 136))
        assert_close(layer.run(place, keep=keep), layer.due(), dtype)
        gpu = gpu_facts.gpu_at(tensor(np.zeros(1, np.float32), place).data_ptr())
        products, outers = (5 if keep == "x" else 4, 2) if gpu.capability == 90 else (0, 0)
        assert launches.count("grouped_product") == products * call
        assert launches.count("grouped_outer") == outers * call


def test_where_no_kernel_is_chosen_triton_keeps_the_products(rng, place, launches, monkeypatch):
    monkeypatch.setattr(hopper_product, "chosen_rows", lambda *_: 0)
    layer = Layer(rng, SHAPE, ml_dtypes.bfloat16, sizes=(64, 136))
    assert_close(layer.run(place), layer.due(), ml_dtypes.bfloat16)
    assert "grouped_product" not in launches
