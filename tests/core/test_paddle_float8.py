# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 operators of ``paddle.incubate.nn.functional``: exact codes and scales, and SwiGLU within its roundings."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops.reference import paddle_fp8 as oracle
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols

from ..pairwise import pairwise
from ..params import SUM_DTYPES
from ..reference.cases import assert_same_bits, floats_of_every_kind, ordinary_floats
from .binding import Core
from .operators.paddle_float8 import BFLOAT16, E4M3, E5M2, quantize, swiglu, swiglu_backward

FORMS = {"as is": (True, False), "transposed": (False, True), "both": (True, True)}
# A tile, parts of tiles, rows that end at any place, and more than four groups.
SHAPES = [(1, 1), (3, 5), (128, 128), (63, 132), (130, 513), (300, 640), (128, 300), (257, 8), (0, 4), (4, 0)]
KINDS = {"ordinary": ordinary_floats, "every kind": floats_of_every_kind}
FLOAT32_MAX = float(np.finfo(np.float32).max)


def expected(x: NDArray, blocks: bool, ue8m0: bool, by_column: bool, **options: Any) -> tuple[NDArray, NDArray]:
    """The oracle's codes and scales of one form; padded to whole blocks, whose zeros change no amax."""
    rows, columns = x.shape
    side = 128 if blocks else 1
    padded = np.zeros((-(-rows // side) * side, columns), np.float32)
    padded[:rows] = x.astype(np.float32)
    format = np.dtype(options.pop("dtype", E4M3)).type
    limits = options.pop("epsilon"), options.pop("pow2") or ue8m0
    codes, scales = oracle._quantize(padded, side, *limits, dtype=format, **options)
    if ue8m0:
        scales = oracle._packed_exponents(np.repeat(scales, side, axis=0)[:rows])
    return codes[:rows], np.ascontiguousarray(scales.T) if by_column else scales


def check(core: Core, x: NDArray, forms: tuple[bool, bool] = (True, False), **options: Any) -> None:
    options = {"blocks": False, "ue8m0": False, "by_column": False, "pow2": False, "epsilon": 0.0, **options}
    found = iter(quantize(core, x, forms=forms, **options))
    for wanted, given in zip(forms, (x, x.T), strict=True):
        if wanted:
            for due in expected(given, **options):
                assert_same_bits(next(found), due)


@pairwise(
    {
        "shape": SHAPES,
        "kind": KINDS,
        "dtype": SUM_DTYPES,
        "forms": FORMS,
        "blocks": [False, True],
        "scales": ["float32", "pow2", "ue8m0"],
        "by_column": [False, True],
        "codes": [E4M3, E5M2],
        "epsilon": [0.0, 1e-4, 3.0],
    }
)
def test_codes_and_scales_of_the_rule(
    core: Core,
    shape: tuple[int, int],
    kind: Any,
    dtype: DTypeLike,
    forms: tuple[bool, bool],
    blocks: bool,
    scales: str,
    by_column: bool,
    codes: np.dtype,
    epsilon: float,
) -> None:
    x = kind(shape, dtype, seed=sum(shape))
    options = {"blocks": blocks, "pow2": scales == "pow2", "ue8m0": scales == "ue8m0", "by_column": by_column}
    check(core, x, forms, epsilon=epsilon, dtype=codes, **options)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_rule_for_any_float32(core: Core, blocks: bool, pow2: bool) -> None:
    """Any bits, and groups of numbers of one size, from the smallest to the largest."""
    rng = np.random.default_rng(1)
    any_bits = rng.integers(0, 2**32, (1024, 200), np.uint32).view(np.float32)
    sizes = np.exp2(rng.integers(-148, 120, (1024, 1))).astype(np.float32)
    for x in (any_bits, ordinary_floats((1024, 200), np.float32, seed=2) * sizes):
        check(core, x, (True, True), blocks=blocks, pow2=pow2, overflow=np.float32(FLOAT32_MAX))


@pytest.mark.parametrize("codes", [E4M3, E5M2], ids=str)
def test_every_code_and_the_numbers_between_codes(core: Core, codes: np.dtype) -> None:
    """Groups whose multiplier is 1: numbers are codes, midpoints between two, and neighbours of both."""
    largest = np.float32(oracle.LARGEST_CODE[codes.type])
    numbers = np.arange(0x80, dtype=np.uint8).view(codes).astype(np.float32)
    numbers = numbers[np.abs(numbers) <= largest]
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    near = (points.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32).reshape(-1)
    near = np.concatenate([near, -near, [np.nan]]).astype(np.float32)
    near = near[~(np.abs(near) > largest)]
    near = np.concatenate([near, np.zeros(-len(near) % 127, np.float32)]).reshape(-1, 127)
    x = np.concatenate([np.full((len(near), 1), largest), near], axis=1)
    check(core, x, dtype=codes)
    assert (quantize(core, x, dtype=codes)[1] == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_every_16_bit_number_in_rows_columns_and_blocks(core: Core, dtype: DTypeLike) -> None:
    x = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(dtype).reshape(-1, 128)
    for blocks in (False, True):
        check(core, x, (True, True), blocks=blocks)


def unweighted(x: NDArray) -> NDArray:
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (63, 5), (7, 128), (40, 200), (13, 1024), (5, 1100), (0, 8), (4, 0)], ids=str
)
def test_quantised_swiglu(core: Core, shape: tuple[int, int], has_probs: bool, pow2: bool) -> None:
    rows, width = shape
    x = ordinary_floats((rows, 2 * width), BFLOAT16, seed=width)
    probs = np.abs(ordinary_floats((rows,), np.float32, seed=3)) if has_probs else None
    codes, scales = swiglu(core, x, probs, pow2=pow2)
    due_codes, due_scales = oracle.fused_weighted_swiglu_act_quant(x, probs, pow2)
    np.testing.assert_allclose(scales, due_scales, rtol=0 if pow2 else 2.0**-18)
    steps = np.abs(codes.view(np.uint8).astype(int) - due_codes.view(np.uint8).astype(int))
    assert steps.max(initial=0) <= 1
    assert np.count_nonzero(steps) <= 1e-3 * steps.size + 1


def test_quantised_swiglu_of_nan_infinity_and_zeros(core: Core) -> None:
    x = np.zeros((4, 512), BFLOAT16)
    x[1, 3], x[1, 256:] = np.nan, 1
    x[2, :256], x[2, 256:] = 1, 2.0**-130
    x[3] = 1e30
    for made, due in zip(swiglu(core, x, None), oracle.fused_weighted_swiglu_act_quant(x), strict=True):
        assert_same_bits(made, due)


@pytest.mark.parametrize(
    "shape", [(1, 1), (63, 5), (7, 128), (40, 200), (13, 1024), (5, 1100), (3, 2056), (0, 8), (4, 0)], ids=str
)
def test_gradients_of_weighted_swiglu(core: Core, shape: tuple[int, int]) -> None:
    rows, width = shape
    x, d_out = (ordinary_floats((rows, size), BFLOAT16, seed=size) for size in (2 * width, width))
    probs = np.abs(ordinary_floats((rows,), np.float32, seed=4))
    found = swiglu_backward(core, x, d_out, probs)
    due = oracle.fused_swiglu_weighted_bwd(x, d_out, probs)
    gate, up = np.split(np.abs(x.astype(np.float64)), 2, axis=1)
    terms = np.abs(d_out.astype(np.float64) * unweighted(x))
    of_gate = np.abs(d_out.astype(np.float64)) * probs[:, None] * up * (1 + gate)
    magnitudes = [
        np.abs(due.do1.astype(np.float64)) + np.concatenate([of_gate, 0 * gate], axis=1),
        terms.sum(axis=1),
        np.abs(due.o2_s.astype(np.float64)),
    ]
    for name, made, wanted, magnitude in zip(due._fields, found, due, magnitudes, strict=True):
        assert_close_sums(made, wanted, magnitude, dtype_tols(wanted.dtype, 24 + width), what=name)


def sigmoid_of_the_core(x: NDArray) -> NDArray:
    """The operations of csrc/common/scoring.h one by one in float32, so that hosts and GPUs have its bits."""
    f = np.float32
    magnitude = -np.minimum(np.abs(x), f(104))
    shifted = magnitude * f(float.fromhex("0x1.715476p0")) + f(float.fromhex("0x1.8p23"))
    n = shifted - f(float.fromhex("0x1.8p23"))
    r = (magnitude - n * f(float.fromhex("0x1.62e4p-1"))) - n * f(float.fromhex("0x1.7f7d1cp-20"))
    p = np.full_like(x, 1 / 5040)
    for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = p * r + f(term)
    e = p * np.exp2(n + f(100)).astype(f) * f(2.0**-100)
    return np.where(np.signbit(x), e, f(1)) / (f(1) + e)


@pytest.mark.parametrize("shape", [(63, 5), (40, 200), (13, 1024), (5, 1100), (3, 2056)], ids=str)
def test_swiglu_has_the_same_bits_on_every_device(core: Core, shape: tuple[int, int]) -> None:
    rows, width = shape
    x, d_out = (ordinary_floats((rows, size), BFLOAT16, seed=size) for size in (2 * width, width))
    x *= np.array(8, BFLOAT16)
    probs = ordinary_floats((rows,), np.float32, seed=6)
    gate, up = np.split(x.astype(np.float32), 2, axis=1)
    share, prob, given = sigmoid_of_the_core(gate), probs[:, None], d_out.astype(np.float32)
    silu = gate * share
    due = oracle._quantize(silu * up * prob, 1, 0.0, False, overflow=np.float32(FLOAT32_MAX))
    for made, wanted in zip(swiglu(core, x, probs), due, strict=True):
        assert_same_bits(made, wanted)
    product, weighted = silu * up, given * prob
    d_gate = weighted * up * (share * (np.float32(1) + gate - silu))
    terms = np.zeros((rows, -(-width // 1024) * 1024), np.float32)
    terms[:, :width] = given * product
    # Steps of 1024 columns, 128 partial sums of eight neighbouring columns.
    partial = np.zeros((rows, 128), np.float32)
    for step in np.moveaxis(terms.reshape(rows, -1, 128, 8), 1, 0):
        for column in np.moveaxis(step, -1, 0):
            partial = partial + column
    while partial.shape[1] > 1:
        low, high = np.split(partial, 2, axis=1)
        partial = low + high
    found = swiglu_backward(core, x, d_out, probs)
    assert_same_bits(found[0], np.concatenate([d_gate, weighted * silu], axis=1).astype(BFLOAT16))
    assert_same_bits(found[1], partial[:, 0])
    assert_same_bits(found[2], (product * prob).astype(BFLOAT16))


@pytest.mark.parametrize("width", [129, 1024, 3000])
def test_a_row_has_the_same_bits_wherever_it_is(core: Core, width: int) -> None:
    """Rows at any place, aligned or not, among any number of rows."""
    x, d_out = (ordinary_floats((9, size), BFLOAT16, seed=size) for size in (2 * width, width))
    probs = ordinary_floats((9,), np.float32, seed=5)
    for made, alone in (
        (swiglu(core, x, probs), swiglu(core, x[4:5], probs[4:5])),
        (swiglu_backward(core, x, d_out, probs), swiglu_backward(core, x[4:5], d_out[4:5], probs[4:5])),
    ):
        for all_rows, row in zip(made, alone, strict=True):
            assert_same_bits(all_rows[4:5], row)
