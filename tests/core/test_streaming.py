# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Outputs beyond the caches are written by other instructions: the same bits, at any address and of any length.

The tests lower the size from which that is done, so that small arrays take the path of large ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import pairwise
from ..params import ROW_DTYPES, SUM_DTYPES
from ..reference.cases import assert_same_bits, assert_same_numbers, floats_of_every_kind, ordinary_floats
from . import workload
from .binding import Core
from .cases import SMALL, make_plan
from .compiling import CSRC, compile_cpp, row_kernel_objects, run_clean
from .guards import GUARD, poison_byte
from .operators.permute import permute_params
from .operators.quantize import quantize_params
from .operators.unpermute import unpermute_params
from .operators.unpermute_backward import unpermute_backward_params

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.filterwarnings("ignore:invalid value encountered in isnan"),
]

LINE = 64
# Rows of whole lines and of less; outputs at the beginning of a line, inside of one, at odd addresses.
HIDDEN = (1, 7, 32, 33, 64, 72, 96, 200)
OFFSETS = (0, 1, 2, 16)


def dtype_name(dtype: DTypeLike) -> str:
    return np.dtype(dtype).name


@pytest.fixture
def streaming(core: Core) -> Iterator[Core]:
    """The core, which streams every output; the size is process-wide and is put back."""
    core.set_streaming_bytes(0)
    yield core
    core.set_streaming_bytes(-1)


class Output:
    """A poisoned array that begins `offset` bytes after the beginning of a line, between guard bands."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, offset: int) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.memory = np.full(size + 4 * LINE, GUARD, np.uint8)
        self.start = LINE + -self.memory.ctypes.data % LINE + offset
        payload = self.memory[self.start : self.start + size]
        payload[:] = poison_byte(dtype)
        self.array = payload.view(dtype).reshape(shape)

    def taken(self) -> NDArray:
        """The result, once nothing was written beside it."""
        assert (self.memory[: self.start] == GUARD).all()
        assert (self.memory[self.start + self.array.nbytes :] == GUARD).all()
        return self.array.copy()


@pairwise({"dtype": ROW_DTYPES, "hidden": HIDDEN, "offset": OFFSETS}, others_are_slow=True)
def test_streamed_rows_and_padding_equal_the_oracle(
    streaming: Core, dtype: DTypeLike, hidden: int, offset: int
) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=1)
    assert (plan.row_to_token < 0).any()
    x = floats_of_every_kind((SMALL.T, hidden), dtype, seed=2)
    scale = floats_of_every_kind((SMALL.T, 3), np.float32, seed=3)
    rows, scales = Output((plan.num_rows, hidden), dtype, offset), Output((plan.num_rows, 3), np.float32, offset)
    params = permute_params(
        x, plan.slot_to_row, plan.row_to_token, rows.array, scale, scales.array, fill=3, num_threads=3
    )
    streaming.run("permute", params)
    expected_rows, expected_scales = reference.permute(x, plan, scale)
    assert expected_scales is not None
    assert_same_bits(rows.taken(), expected_rows)
    assert_same_bits(scales.taken(), expected_scales)


@pairwise({"dtype": SUM_DTYPES, "hidden": HIDDEN, "offset": OFFSETS}, others_are_slow=True)
def test_streamed_sums_equal_the_oracle(streaming: Core, dtype: DTypeLike, hidden: int, offset: int) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=4)
    rows = floats_of_every_kind((plan.num_rows, hidden), dtype, seed=5)
    weights = floats_of_every_kind((plan.num_rows,), np.float32, seed=6)
    for probs in (None, weights):
        out = Output((SMALL.T, hidden), dtype, offset)
        streaming.run("unpermute", unpermute_params(rows, plan.token_rows, out.array, probs, num_threads=3))
        assert_same_numbers(out.taken(), reference.unpermute(rows, plan, probs))


@pairwise({"dtype": SUM_DTYPES, "hidden": HIDDEN, "offset": OFFSETS}, others_are_slow=True)
def test_streamed_gradients_equal_the_oracle(streaming: Core, dtype: DTypeLike, hidden: int, offset: int) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=7)
    d_out = floats_of_every_kind((SMALL.T, hidden), dtype, seed=8)
    rows = ordinary_floats((plan.num_rows, hidden), dtype, seed=9)
    maps = (plan.token_rows, plan.row_to_token)
    weights = floats_of_every_kind((plan.num_rows,), np.float32, seed=10)
    for probs in (None, weights):
        d_rows = Output((plan.num_rows, hidden), dtype, offset)
        d_weights = None if probs is None else np.empty_like(probs)
        params = unpermute_backward_params(d_out, *maps, d_rows.array, rows, probs, None, d_weights, num_threads=3)
        streaming.run("unpermute_backward", params)
        expected, _ = reference.unpermute_backward(d_out, plan, probs=probs)
        assert_same_numbers(d_rows.taken(), expected)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_streamed_codes_equal_the_oracle(streaming: Core, hidden: int, offset: int) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=11)
    x = floats_of_every_kind((SMALL.T, hidden), np.float16, seed=12)
    codes = Output((plan.num_rows, hidden), ml_dtypes.float8_e4m3fn, offset)
    scales = Output((plan.num_rows, -(-hidden // 128)), np.float32, 0)
    params = quantize_params(x, codes.array, scales.array, plan.slot_to_row, plan.row_to_token, num_threads=3)
    streaming.run("quantize", params)
    expected_codes, expected_scales = reference.permute_quantized(x, plan)
    assert_same_bits(codes.taken(), expected_codes)
    assert_same_bits(scales.taken(), expected_scales)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("operator", workload.OPERATORS)
def test_streaming_changes_no_bit(streaming: Core, operator: str, num_threads: int) -> None:
    run = workload.OPERATORS[operator]
    streamed = workload.bits(run(streaming, num_threads))
    streaming.set_streaming_bytes(1 << 62)
    assert streamed == workload.bits(run(streaming, 1))


PROGRAM = r"""
#include <cstdio>

#include "cpu/streaming.h"

int main() {
  const auto print = [](int64_t bytes) { std::printf("%d ", pmo::cpu::beyond_caches(bytes)); };
  print(0), print(1 << 16), print(int64_t{1} << 40);
  pmo_cpu_set_streaming_bytes(1000);
  print(1000), print(1001);
  pmo_cpu_set_streaming_bytes(-1);
  print(1 << 16), print(int64_t{1} << 40);
}
"""


@pytest.mark.own_program
def test_the_size_follows_the_machine_unless_it_is_set(tmp_path) -> None:
    sources = [str(CSRC / "cpu" / "streaming.cc"), *row_kernel_objects()]
    program = compile_cpp(tmp_path / "sizes", PROGRAM, *sources, "-O1", f"-I{CSRC}", f"-I{CSRC / 'include'}")
    assert run_clean([str(program)]).split() == ["0", "0", "1", "0", "1", "0", "1"]
