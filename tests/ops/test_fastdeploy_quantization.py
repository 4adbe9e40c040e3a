# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's row quantisers, and matrices in the layouts of weight_quantize, against the oracle and Paddle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.nn.quant import weight_quantize

from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import fastdeploy as ops
from paddle_moe_ops.compat.fastdeploy.codes import to_e4m3
from paddle_moe_ops.compat.fastdeploy.weights import dequantized
from paddle_moe_ops.reference import fastdeploy_quantization as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_float8
from tests.ops.problems import every_kind, ordinary, tensor
from tests.pairwise import pairwise
from tests.params import SUM_DTYPES

SIZES = {"no token": 0, "one token": 1, "odd": 63, "many tokens": 1025}
FORMATS = {"float32": False, "ue8m0": True}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BITS = {"weight_only_int8": 8, "weight_only_int4": 4}
OFFSET = 5e-7


def special_rows(hidden):
    """Amplitudes at which a scale is or exceeds a power of two, zeros, and values that are not finite."""
    largest = [448, 224, 224.0001, 56, 448 * 2**-10, 448 * 4e-7, 4.48e-8, 1e-12, 0, 3e38, np.inf, np.nan, -0.0, 1e-45]
    rows = np.zeros((len(largest), hidden), np.float32)
    rows[:, 0] = largest
    rows[:, 1::3] = rows[:, :1] / 3
    return rows


@pairwise(
    {
        "num_tokens": SIZES,
        "hidden": [1, 7, 128, 200, 1152],
        "dtype": SUM_DTYPES,
        "ue8m0": FORMATS,
        "block_size": [128, 32],
    },
    empty={"num_tokens": [0]},
)
def test_rows(block_size, ue8m0, dtype, hidden, num_tokens, rng, place):
    x = every_kind(rng, (num_tokens, hidden), dtype)
    codes, scales = ops.per_token_quant(tensor(x, place), block_size, ue8m0)
    wanted, wanted_scales = oracle.quantize_groups(x, block_size, ue8m0, offset=OFFSET)
    assert_bits_equal(codes, wanted, what="codes")
    assert_bits_equal(scales, wanted_scales, what="scales")


@pytest.mark.parametrize("ue8m0", FORMATS.values(), ids=FORMATS)
def test_rows_of_special_amplitudes(ue8m0, place):
    x = special_rows(256)
    for function, offset in ((ops.per_token_quant, OFFSET), (ops.per_token_quant_padding, OFFSET)):
        codes, scales = function(tensor(x, place), 128, ue8m0)
        wanted, wanted_scales = oracle.quantize_groups(x, 128, ue8m0, offset=offset)
        assert_bits_equal(codes, wanted)
        assert_bits_equal(scales.numpy()[: len(x)], wanted_scales)
    counts = tensor(np.full(1, len(x), np.int32), place)
    codes, scales = ops.masked_per_token_quant(tensor(x[None], place), counts, 128, ue8m0)
    wanted, wanted_scales = oracle.quantize_groups(x[None], 128, ue8m0)
    assert_bits_equal(codes, wanted)
    assert_bits_equal(scales, wanted_scales)


def test_scales_by_hand(place):
    x = np.float32([[448], [56], [0], [100]])
    codes, scales = ops.per_token_quant(tensor(x, place), 128)
    assert_bits_equal(scales, np.float32([[1], [0.125], [1e-10 / 448], [100 / 448]]))
    assert codes.astype("float32").flatten().tolist() == [448, 448, 0, 448]
    _, scales = ops.per_token_quant(tensor(x, place), 128, True)
    # The added 5e-7 raises the exponent of scales that are powers of two.
    assert scales.flatten().tolist() == [128, 125, 127 - 20, 125]
    _, scales = ops.masked_per_token_quant(tensor(x[None], place), tensor(np.int32([4]), place), 128, True)
    assert scales.flatten().tolist() == [127, 124, 127 - 33, 125]


@pairwise(
    {"num_tokens": SIZES, "hidden": [128, 1152], "dtype": SUM_DTYPES, "ue8m0": FORMATS}, empty={"num_tokens": [0]}
)
def test_rows_with_padded_columns_of_scales(ue8m0, dtype, hidden, num_tokens, rng, place):
    x, rows = every_kind(rng, (num_tokens, hidden), dtype), -(-num_tokens // 4) * 4
    codes, scales = ops.per_token_quant_padding(tensor(x, place), 128, ue8m0)
    wanted, by_row = oracle.quantize_groups(x, 128, ue8m0, offset=OFFSET)
    assert_bits_equal(codes, wanted)
    padded = np.zeros((rows, by_row.shape[1]), by_row.dtype)
    padded[:num_tokens] = by_row
    assert_bits_equal(scales, padded)
    assert scales.strides == [1, rows] or num_tokens == 0


@pairwise(
    {"capacity": [0, 1, 7, 64], "hidden": [1, 128, 200, 768], "dtype": SUM_DTYPES, "ue8m0": FORMATS},
    empty={"capacity": [0]},
)
def test_first_rows_of_experts(ue8m0, dtype, hidden, capacity, rng, place):
    counts = np.array([0, capacity // 2, capacity], np.int32)
    x = every_kind(rng, (3, capacity, hidden), dtype)
    codes, scales = ops.masked_per_token_quant(*(tensor(each, place) for each in (x, counts)), 128, ue8m0)
    wanted, by_row = oracle.masked_quant(x, counts, 128, ue8m0)
    assert_bits_equal(codes, wanted)
    assert_bits_equal(scales, by_row)
    rows, columns = -(-capacity // 4) * 4 if ue8m0 else capacity, by_row.shape[2]
    assert scales.strides == [columns * rows, 1, rows] or capacity == 0


@pairwise({"capacity": [0, 1, 7, 64], "inner": [1, 128, 200], "dtype": SUM_DTYPES, "ue8m0": FORMATS})
def test_swiglu_of_first_rows(ue8m0, dtype, inner, capacity, rng, place):
    counts = np.array([0, capacity // 2, capacity], np.int32)
    x = ordinary(rng, (3, capacity, 2 * inner), dtype)
    codes, scales = ops.fused_mask_swiglu_fp8_quant(*(tensor(each, place) for each in (x, counts)), 128, ue8m0)
    wanted, by_row = oracle.mask_swiglu_quant(x, counts, 128, ue8m0)
    assert (codes.shape, scales.shape) == ([3, capacity, inner], list(by_row.shape))
    # Scores of a sigmoid differ in the last bit, and codes then may be neighbours.
    assert_close_float8(to_numpy(codes).astype(np.float32), wanted.astype(np.float32))
    is_used = np.arange(capacity) < counts[:, None]
    assert not to_numpy(codes).astype(np.float32)[~is_used].any()
    assert not scales.numpy()[~is_used].any()
    if not ue8m0:
        np.testing.assert_allclose(scales.numpy(), by_row, rtol=2.0**-7)


def test_swiglu_is_rounded_before_it_is_quantised(place):
    """Gates so large that silu is the identity leave a product that is exact before it is rounded to bfloat16."""
    x = np.zeros((1, 1, 4), np.float32)
    x[0, 0] = [129, 200, 129, 1]  # 129 * 129 = 16641 is 16640 in bfloat16
    codes, scales = ops.fused_mask_swiglu_fp8_quant(
        tensor(x.astype(SUM_DTYPES[2]), place), tensor(np.int32([1]), place), 128
    )
    assert_bits_equal(scales, np.float32([[[np.float32(16640) / np.float32(448)]]]))
    assert codes.astype("float32").flatten().tolist()[0] == 448


def test_codes_of_every_float(place):
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 20, np.uint32)
    edges = np.float32([464, 465, 480, np.inf, -np.inf, np.nan, 448, -0.0, 0, 2.0**-10, 2.0**-9, 3 * 2.0**-11])
    values = np.concatenate([bits.view(np.float32), edges, -edges])
    with np.errstate(invalid="ignore"):
        wanted = np.clip(values, -448, 448).astype(E4M3).view(np.uint8)
    wanted = np.where(np.isnan(values), np.uint8(0x7F), wanted).view(E4M3)
    assert_bits_equal(to_e4m3(tensor(values, place)), wanted)


@pytest.mark.parametrize("algo", BITS)
@pytest.mark.parametrize("dtype", SUM_DTYPES[1:], ids=str)
@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("shape", [(64, 64), (192, 32), (128, 80)], ids=str)
def test_layouts_are_those_of_weight_quantize(shape, arch, dtype, algo, rng, place):
    w = ordinary(rng, (2, *shape), dtype)
    made = [weight_quantize(tensor(each, paddle.CPUPlace()), algo, arch=arch) for each in w]
    packed = np.stack([codes.numpy() for codes, _ in made])
    codes, scales = oracle.quantize_weights(w, BITS[algo])
    assert_bits_equal(np.stack([to_numpy(scale) for _, scale in made]), scales)
    assert_bits_equal(oracle.pack_weights(codes, BITS[algo]), packed)
    assert_bits_equal(ops.to_weight_quantize(tensor(codes, place), algo), packed)
    assert_bits_equal(ops.from_weight_quantize(tensor(packed, place), algo), codes)


@pytest.mark.parametrize("algo", BITS)
@pytest.mark.parametrize("group", [64, 128])
def test_layouts_with_scales_for_groups(group, algo, rng, place):
    w = ordinary(rng, (1, 256, 64), SUM_DTYPES[2])
    packed, scales = weight_quantize(tensor(w[0], paddle.CPUPlace()), algo, arch=80, group_size=group)
    codes = ops.from_weight_quantize(tensor(packed.numpy()[None], place), algo)
    assert scales.shape == [256 // group, 64]
    got = to_numpy(dequantized(codes, tensor(to_numpy(scales)[None], place), paddle.float32))
    step = np.repeat(to_numpy(scales).astype(np.float32), group, axis=0)
    assert (np.abs(got[0] - w[0].astype(np.float32)) <= 0.51 * step).all()


@pytest.mark.parametrize("algo", BITS)
def test_every_code_comes_back(algo, rng, place):
    largest = 2 ** (BITS[algo] - 1) - 1
    codes = rng.integers(-largest, largest + 1, (3, 128, 16)).astype(np.int8)
    packed = ops.to_weight_quantize(tensor(codes, place), algo)
    assert_bits_equal(packed, oracle.pack_weights(codes, BITS[algo]))
    assert_bits_equal(ops.from_weight_quantize(packed, algo), codes)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_dequantised_matrices(groups, dtype, rng, place):
    codes = rng.integers(-127, 128, (3, 64, 5)).astype(np.int8)
    scales = ordinary(rng, (3, groups, 5) if groups else (3, 5), dtype)
    got = dequantized(tensor(codes, place), tensor(scales, place), getattr(paddle, str(dtype)))
    assert_bits_equal(got, oracle.dequantize_weights(codes, scales, dtype))
