# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A caller's float settings (flush to zero, rounding mode) change no sum and are as they were afterwards."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference

from ..params import SUM_DTYPES
from ..reference.cases import assert_same_bits, ordinary_floats
from .binding import Core
from .cases import DENSE, make_plan
from .compiling import compile_cpp
from .guards import guarded_outputs
from .operators.quantize import quantize_params
from .operators.unpermute import unpermute_params
from .operators.unpermute_backward import unpermute_backward, unpermute_backward_params
from .structs import Params

pytestmark = pytest.mark.cpu_only

HIDDEN = 600  # 2050 rows of it are work for four threads, in 16 bits too

# Calls an operator under other settings and tells what they were when it came back.
CALLER = """
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
static uint64_t get() { return _mm_getcsr(); }
static void set(uint64_t control) { _mm_setcsr(static_cast<unsigned>(control)); }
#elif defined(__aarch64__)
static uint64_t get() { uint64_t control; asm volatile("mrs %0, fpcr" : "=r"(control)); return control; }
static void set(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#endif
extern "C" int call_with(uint64_t control, int (*entry)(const void*, void*), const void* params, uint64_t* after) {
  const uint64_t saved = get();
  set(control);
  const int status = entry(params, nullptr);
  *after = get();
  set(saved);
  return status;
}
extern "C" float add_with(uint64_t control, volatile float a, volatile float b) {
  const uint64_t saved = get();
  set(control);
  const volatile float sum = a + b;
  set(saved);
  return sum;
}
"""

# MXCSR with all exceptions masked: 0x8000 flushes results, 0x40 operands, 0x6000 chooses the rounding. The sticky flags
# of 0x9FE2 are what an inference engine leaves behind. FPCR: bit 24 flushes, bits 22 and 23 choose the rounding.
SETTINGS = {
    "x86_64": {"flush_to_zero": 0x9FE2, "round_down": 0x3F80, "round_up": 0x5F80, "truncate": 0x7F80},
    "aarch64": {"flush_to_zero": 1 << 24, "round_down": 2 << 22, "round_up": 1 << 22, "truncate": 3 << 22},
}[platform.machine()]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Any:
    target: Path = tmp_path_factory.mktemp("caller") / "libcaller.so"
    library = ctypes.CDLL(str(compile_cpp(target, CALLER, "-O1", "-shared", "-fPIC")))
    library.call_with.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)]
    library.add_with.argtypes = [ctypes.c_uint64, ctypes.c_float, ctypes.c_float]
    library.add_with.restype = ctypes.c_float
    return library


def run_with(caller: Any, setting: int, core: Core, operator: str, params: Params) -> None:
    after = ctypes.c_uint64()
    entry = ctypes.cast(core.entry(operator), ctypes.c_void_p)
    assert caller.call_with(setting, entry, ctypes.addressof(params), ctypes.byref(after)) == 0
    assert after.value == setting, "the caller's settings were not restored"


class Case(NamedTuple):
    """Rows around the smallest normal number: nearly all sums lose something to flushing or to the rounding."""

    plan: reference.Plan
    rows: NDArray
    weights: NDArray
    plain: NDArray
    weighted: NDArray
    d_rows: NDArray


@cache
def make_case(dtype: np.dtype) -> Case:
    plan = make_plan("uniform", DENSE, seed=1)
    rng = np.random.default_rng(2)
    smallest = 2.0**-14 if dtype == np.float16 else 2.0**-126
    rows = (rng.uniform(-2, 2, (plan.num_rows, HIDDEN)) * smallest).astype(dtype)
    weights = rng.uniform(-1, 1, plan.num_rows).astype(np.float32)
    d_rows, _ = reference.unpermute_backward(rows[: DENSE.T], plan, probs=weights)
    plain, weighted = reference.unpermute(rows, plan), reference.unpermute(rows, plan, weights)
    return Case(plan, rows, weights, plain, weighted, d_rows)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_do_change_ordinary_sums(caller: Any, setting: str) -> None:
    """Else the tests below would show nothing."""
    pairs = [(2.0**-127, 2.0**-149), (1.0, 3 * 2.0**-25), (-1.0, -3 * 2.0**-25), (1.0, 2.0**-30)]
    sums = [caller.add_with(SETTINGS[setting], *pair) for pair in pairs]
    assert sums != [np.float32(a) + np.float32(b) for a, b in pairs]


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_sums_do_not_follow_the_callers_settings(
    core: Core, caller: Any, setting: str, dtype: np.dtype, num_threads: int
) -> None:
    case = make_case(dtype)
    for weights, expected in ((None, case.plain), (case.weights, case.weighted)):
        with guarded_outputs() as output:
            out = output(expected.shape, dtype)
            params = unpermute_params(case.rows, case.plan.token_rows, out, weights, num_threads=num_threads)
            run_with(caller, SETTINGS[setting], core, "unpermute", params)
        assert_same_bits(out, expected)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_do_not_follow_the_callers_settings(
    core: Core, caller: Any, setting: str, dtype: np.dtype, num_threads: int
) -> None:
    case = make_case(dtype)
    inputs = (case.rows[: DENSE.T], case.plan.token_rows, case.plan.row_to_token)
    _, usual_d_weights = unpermute_backward(core, *inputs, case.rows, case.weights, wants_d_weights=True)
    with guarded_outputs() as output:
        d_rows, d_weights = output(case.rows.shape, dtype), output(case.weights.shape, np.float32)
        params = unpermute_backward_params(
            *inputs, d_rows, case.rows, case.weights, d_weights=d_weights, num_threads=num_threads
        )
        run_with(caller, SETTINGS[setting], core, "unpermute_backward", params)
    assert_same_bits(d_rows, case.d_rows)
    assert_same_bits(d_weights, usual_d_weights)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_codes_do_not_follow_the_callers_settings(
    core: Core, caller: Any, setting: str, dtype: np.dtype, num_threads: int
) -> None:
    plan = make_case(dtype).plan
    x = ordinary_floats((DENSE.T, HIDDEN), dtype, seed=3)
    expected_codes, expected_scales = reference.permute_quantized(x, plan)
    with guarded_outputs() as output:
        codes, scales = output(expected_codes.shape, expected_codes.dtype), output(expected_scales.shape, np.float32)
        params = quantize_params(x, codes, scales, plan.slot_to_row, plan.row_to_token, num_threads=num_threads)
        run_with(caller, SETTINGS[setting], core, "quantize", params)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)
