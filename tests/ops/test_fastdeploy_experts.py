# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's GEMMs of experts against the oracle, and its module patched."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import fastdeploy as ops
from paddle_moe_ops.reference import fastdeploy as oracle
from paddle_moe_ops.reference import fastdeploy_quantization
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from tests.ops.problems import optional_tensor, ordinary, tensor
from tests.pairwise import pairwise
from tests.params import SUM_DTYPES

H, I, E = 12, 7, 4  # noqa: E741
SEGMENTS = {
    "all kinds": [3, 3, 4, 63],
    "no row": [0, 0, 0, 0],
    "one expert": [0, 0, 63, 63],
    "rows after the last": [1, 5, 6, 7],
}
FLAGS = {"no": False, "yes": True}
BITS = {"weight_only_int8": 8, "weight_only_int4": 4}


def call(
    place, rows, tokens, up_gate, down, bias=None, method="none", low_latency=False, activation="swiglu", **scales
):
    """The call as FastDeploy makes it, all arguments by position."""
    on_device = [tensor(each, place) for each in (rows, tokens, up_gate, down)]
    further = [optional_tensor(scales.get(name), place) for name in ("up_gate_scale", "down_scale")]
    bias = optional_tensor(bias, place)
    options = method, low_latency, -1, 128, activation
    return ops.moe_expert_ffn(*on_device, None, bias, *further, None, None, None, *options)


def assert_close(got, expected, rows, up_gate, down):
    """Sums of the first GEMM and the second, three roundings, bounded by the sums of magnitudes."""
    terms = np.abs(rows.astype(np.float64)).reshape(-1, H).sum(axis=1).max(initial=0)
    bound = terms * np.abs(up_gate).astype(np.float64).max()
    magnitude = np.full(expected.shape, 1.0 + I * (1 + bound) ** 2 * np.abs(down.astype(np.float64)).max())
    tolerance = dtype_tols(expected.dtype, H + I)
    tolerance = tolerance._replace(of_magnitude=tolerance.of_magnitude + 2 * tolerance.of_result)
    assert_close_sums(got, expected, magnitude, tolerance, what="rows")


@pairwise(
    {
        "segments": SEGMENTS,
        "dtype": SUM_DTYPES,
        "has_bias": FLAGS,
        "activation": ["swiglu", "swigluoai"],
        "method": ["none", "w16a16"],
        "count_dtype": [np.int32, np.int64],
    }
)
def test_experts(count_dtype, method, activation, has_bias, dtype, segments, rng, place, backend):
    ends = np.array(segments, count_dtype)
    rows = ordinary(rng, (ends[-1] + (3 if ends[-1] == 7 else 0), H), dtype)
    up_gate, down = ordinary(rng, (E, H, 2 * I), dtype), ordinary(rng, (E, I, H), dtype)
    bias = ordinary(rng, (E, 2 * I), dtype) if has_bias else None
    got = call(place, rows, ends, up_gate, down, bias, method, activation=activation)
    expected = oracle.moe_expert_ffn(rows, ends, up_gate, down, bias, activation=activation)
    assert_close(got, expected, rows, up_gate, down)
    assert not to_numpy(got)[ends[-1] :].any()


@pairwise(
    {"capacity": [0, 1, 9], "dtype": SUM_DTYPES, "has_bias": FLAGS, "activation": ["swiglu", "swigluoai"]},
    empty={"capacity": [0]},
)
def test_experts_with_rows_of_their_own(activation, has_bias, dtype, capacity, rng, place, backend):
    counts = np.array([0, capacity, capacity // 2, min(capacity, 1)], np.int64)
    rows = ordinary(rng, (E, capacity, H), dtype)
    rows[np.arange(capacity) >= counts[:, None]] = np.nan
    up_gate, down = ordinary(rng, (E, H, 2 * I), dtype), ordinary(rng, (E, I, H), dtype)
    bias = ordinary(rng, (E, 2 * I), dtype) if has_bias else None
    got = call(place, rows, counts, up_gate, down, bias, low_latency=True, activation=activation)
    expected = oracle.moe_expert_ffn(rows, counts, up_gate, down, bias, low_latency=True, activation=activation)
    assert_close(got, expected, np.where(np.isnan(rows), dtype.type(0), rows), up_gate, down)


def test_counts_that_are_not_checked_stay_within_the_rows_of_an_expert(rng, place, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    rows, up_gate, down = ordinary(rng, (E, 3, H)), ordinary(rng, (E, H, 2 * I)), ordinary(rng, (E, I, H))
    got = call(place, rows, np.array([9, -1, 3, 2**40]), up_gate, down, low_latency=True)
    assert_bits_equal(got, call(place, rows, np.array([3, 0, 3, 3]), up_gate, down, low_latency=True).numpy())


@pytest.mark.parametrize("method", BITS)
@pytest.mark.parametrize("by_group", [False, True], ids=["scales of channels", "scales of groups"])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("low_latency", [False, True], ids=["segments", "rows of their own"])
def test_packed_matrices_give_the_bits_of_dequantised_ones(low_latency, dtype, by_group, method, rng, place):
    hidden, inner, bits = 128, 64, BITS[method]
    rows = ordinary(rng, (E, 3, hidden) if low_latency else (63, hidden), dtype)
    tokens = np.array([3, 0, 1, 2] if low_latency else [3, 3, 20, 63])
    packed, scales, plain = [], [], []
    for shape in ((E, hidden, 2 * inner), (E, inner, hidden)):
        codes, scale = fastdeploy_quantization.quantize_weights(ordinary(rng, shape, dtype), bits)
        if by_group:
            scale = np.stack([scale, scale * dtype.type(2)], axis=1)
        packed.append(fastdeploy_quantization.pack_weights(codes, bits))
        scales.append(scale)
        plain.append(fastdeploy_quantization.dequantize_weights(codes, scale, dtype))
    by_name = {"up_gate_scale": scales[0], "down_scale": scales[1]}
    got = call(place, rows, tokens, *packed, None, method, low_latency, **by_name)
    assert_bits_equal(got, call(place, rows, tokens, *plain, low_latency=low_latency))


def test_versions_with_one_argument_less(rng, place):
    rows, ends = tensor(ordinary(rng, (5, H)), place), tensor(np.array([1, 1, 3, 5]), place)
    matrices = tensor(ordinary(rng, (E, H, 2 * I)), place), tensor(ordinary(rng, (E, I, H)), place)
    given = rows, ends, *matrices, None, None, None, None, None, None
    for options in (("w16a16", False, -1, 128, "swigluoai"), ("none", False, 0, 512, "swiglu")):
        wanted = ops.moe_expert_ffn(*given, None, *options)
        assert_bits_equal(ops.moe_expert_ffn(*given, *options), wanted.numpy())
    assert_bits_equal(ops.moe_expert_ffn(*given), wanted.numpy())


def names_of(module):
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


PATCHED = set(ops.__all__) - {
    *("patch_fastdeploy", "patched_fastdeploy", "unpatch_fastdeploy"),
    *("from_weight_quantize", "to_weight_quantize"),
}


def test_a_patched_module_has_all_operators_and_gets_its_own_back():
    module = ModuleType("gpu")
    module.noaux_tc, module.other = "FastDeploy's", "left alone"
    before = names_of(module)
    ops.patch_fastdeploy(module)
    ops.patch_fastdeploy(module)
    assert names_of(module) == {**{name: getattr(ops, name) for name in PATCHED}, "other": "left alone"}
    with ops.patched_fastdeploy(module):
        assert module.noaux_tc is ops.noaux_tc
    assert module.noaux_tc is ops.noaux_tc
    ops.unpatch_fastdeploy(module)
    ops.unpatch_fastdeploy(module)
    assert names_of(module) == before

    def fail():
        with ops.patched_fastdeploy(module):
            raise KeyError(module.moe_expert_ffn is ops.moe_expert_ffn)

    with pytest.raises(KeyError, match="True"):
        fail()
    assert names_of(module) == before


def test_fastdeploy_itself_is_found(monkeypatch):
    parts = ["fastdeploy", "model_executor", "ops", "gpu"]
    modules = [ModuleType(".".join(parts[: depth + 1])) for depth in range(len(parts))]
    for module in modules:
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with ops.patched_fastdeploy():
        assert modules[-1].moe_expert_reduce is ops.moe_expert_reduce
    assert not hasattr(modules[-1], "moe_expert_reduce")


def test_what_cannot_be_patched():
    for function in (ops.patch_fastdeploy, ops.unpatch_fastdeploy):
        with pytest.raises(TypeError, match=rf"^{function.__name__}: module must be a module or None, but got dict$"):
            function({})
        with pytest.raises(ImportError, match="fastdeploy"):
            function()
