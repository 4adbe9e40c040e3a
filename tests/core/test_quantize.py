# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""quantize: codes and scales of the oracle, bit for bit, for rows as they are and for rows in expert order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference

from ..pairwise import pairwise_of
from ..params import SUM_DTYPES, Shape
from ..reference.cases import assert_same_bits, assert_same_numbers, floats_of_every_kind, ordinary_floats
from .binding import Core, CoreError
from .cases import EXAMPLES, INT32, SHAPES, SMALL, Problem, make_ids, make_plan, make_problem, problems
from .guards import at_odd_address, is_poison, with_row_gaps
from .operators.dequantize import dequantize
from .operators.permute import permute
from .operators.quantize import QuantizeParams, quantize
from .structs import Fill, ScaleLayout

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = {"row": ScaleLayout.ROW, "col": ScaleLayout.COLUMN}
# One short group, whole groups, four to a packed word and one more, and more than a warp of them.
HIDDEN = (1, 7, 72, 128, 130, 512, 640, 1000, 7168)

by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_format = pytest.mark.parametrize("ue8m0", [False, True], ids=["float32", "ue8m0"])


def dtype_name(dtype: DTypeLike) -> str:
    return np.dtype(dtype).name


def check_rows(core: Core, x: NDArray, layout: str = "row", **options: Any) -> None:
    codes, scales = quantize(core, x, layout=LAYOUTS[layout], **options)
    options.pop("num_threads", None)
    options.pop("odd_codes", None)
    expected_codes, expected_scales = reference.quantize_1x128(x, scale_layout=layout, **options)
    assert_same_bits(codes.copy(), expected_codes)
    assert_same_bits(scales, expected_scales)


def check_permuted(
    core: Core, plan: reference.Plan, x: NDArray, layout: str = "row", *, num_threads: int = 0, **options: Any
) -> None:
    codes, scales = quantize(
        core, x, plan.slot_to_row, plan.row_to_token, layout=LAYOUTS[layout], num_threads=num_threads, **options
    )
    expected_codes, expected_scales = reference.permute_quantized(x, plan, scale_layout=layout, **options)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)


@pairwise_of(
    pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name),
    pytest.mark.parametrize("hidden", HIDDEN),
    by_format,
    by_layout,
    others_are_slow=True,
)
def test_rows_equal_the_oracle(core: Core, dtype: DTypeLike, hidden: int, ue8m0: bool, layout: str) -> None:
    for make in (floats_of_every_kind, ordinary_floats):
        check_rows(core, make((13, hidden), dtype, seed=hidden), layout, ue8m0=ue8m0)


@pytest.mark.parametrize("kind", ["half_unassigned", "zipf"])
@by_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permuted_rows_equal_the_oracle(core: Core, shape: Shape, layout: str, kind: str) -> None:
    plan = make_problem(make_ids(kind, shape, seed=1), shape.E, shape.A).plan
    x = floats_of_every_kind((shape.T, shape.H), BFLOAT16, seed=2)
    check_permuted(core, plan, x, layout, ue8m0=kind == "zipf")


@EXAMPLES
@given(
    problem=problems(with_probs=False),
    hidden=st.sampled_from([1, 7, 72, 128, 640]),
    dtype=st.sampled_from(SUM_DTYPES),
    ue8m0=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    amax_min=st.sampled_from([2.0**-100, 1e-4, 3.0]),
    num_threads=st.sampled_from([1, 3]),
)
def test_rows_of_any_routing_equal_the_oracle(
    core: Core,
    problem: Problem,
    hidden: int,
    dtype: DTypeLike,
    ue8m0: bool,
    layout: str,
    amax_min: float,
    num_threads: int,
) -> None:
    x = floats_of_every_kind((problem.plan.num_tokens, hidden), dtype, seed=3)
    options = {"ue8m0": ue8m0, "amax_min": amax_min}
    check_permuted(core, problem.plan, x, layout, num_threads=num_threads, **options)


@by_format
@pytest.mark.parametrize("hidden", [72, 640])
def test_quantise_then_permute_equals_quantise_while_permuting(core: Core, hidden: int, ue8m0: bool) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=4)
    maps = plan.slot_to_row, plan.row_to_token
    x = floats_of_every_kind((SMALL.T, hidden), BFLOAT16, seed=5)
    codes, scales = quantize(core, x, *maps, ue8m0=ue8m0)
    token_codes, token_scales = quantize(core, x, ue8m0=ue8m0)
    expected_codes, expected_scales = permute(core, token_codes, *maps, token_scales)
    assert expected_scales is not None
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)


# ---- the arithmetic


def every_16_bit_number(dtype: DTypeLike) -> NDArray:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)


def around_every_code(dtype: DTypeLike) -> NDArray:
    """Every float8 number, every midpoint between two, and their neighbours on both sides."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    steps = np.arange(-3, 4, dtype=np.int32)
    near = (points.view(np.int32)[:, None] + steps).view(np.float32).reshape(-1)
    return np.concatenate([near, -near]).astype(dtype)


def random_bits(dtype: DTypeLike) -> NDArray:
    return np.random.default_rng(6).integers(0, 1 << 32, 1 << 17, np.uint32).view(np.float32).astype(dtype)


def groups_with_scale_1(values: NDArray) -> NDArray:
    """The numbers that 448 does not exceed, and NaN, 127 to a group that a 448 goes before: the codes are their own."""
    with np.errstate(invalid="ignore"):
        values = values[~(np.abs(values.astype(np.float32)) > 448)]
    values = np.concatenate([values, np.zeros(-len(values) % 127, values.dtype)]).reshape(-1, 127)
    return np.concatenate([np.full((len(values), 1), 448, values.dtype), values], axis=1)


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (np.float16, every_16_bit_number),
        (BFLOAT16, every_16_bit_number),
        (np.float32, around_every_code),
        (np.float32, random_bits),
    ],
    ids=["float16", "bfloat16", "around-codes", "random-bits"],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_every_number_gets_the_nearest_code(
    core: Core, dtype: DTypeLike, numbers: Callable[[DTypeLike], NDArray]
) -> None:
    x = groups_with_scale_1(numbers(dtype))
    _, scales = quantize(core, x)
    assert (scales == 1).all()
    check_rows(core, x)


@by_format
def test_scales_of_every_size_equal_the_oracle(core: Core, ue8m0: bool) -> None:
    """One number to a group: division and rounding up to a power of two, from the smallest amax to the largest."""
    magnitudes = np.random.default_rng(7).integers(0, 0x7F800001, (1 << 14, 1), np.int32).view(np.float32)
    check_rows(core, magnitudes, ue8m0=ue8m0, amax_min=2.0**-100)
    powers = 448 * 2.0 ** np.arange(-110, 119)
    around = np.concatenate([powers.astype(np.float32).view(np.int32) + step for step in (-1, 0, 1)])
    check_rows(core, around.view(np.float32)[:, None], ue8m0=ue8m0, amax_min=2.0**-100)


def test_groups_of_nan_infinity_and_zeros(core: Core) -> None:
    x = np.zeros((5, 256), np.float32)
    x[0] = np.nan
    x[1, :3] = np.inf, -np.inf, 1e38
    x[2] = -0.0
    x[3] = 1e-45
    x[4, :2] = np.nan, 2
    codes, scales = quantize(core, x)
    bits = codes.view(np.uint8)
    assert (bits[0] == 0x7F).all()
    assert bits[1, :3].tolist() == [0x7E, 0xFE, 0x70]  # FLT_MAX is 448, so 1e38 is 131.7
    assert (bits[2] == 0x80).all()
    assert (bits[3] == 0).all()
    assert bits[4, :3].tolist() == [0x7F, 0x7E, 0]
    assert scales[[0, 2, 3], 0].tolist() == [np.float32(1e-4) / np.float32(448)] * 3
    check_rows(core, x)


@pytest.mark.parametrize("amax_min", [2.0**-100, 1e-30, 1.0, float(np.finfo(np.float32).max)])
@by_format
def test_amax_min_is_a_lower_limit(core: Core, ue8m0: bool, amax_min: float) -> None:
    check_rows(core, ordinary_floats((5, 300), np.float32, seed=8) * np.float32(1e-32), ue8m0=ue8m0, amax_min=amax_min)
    check_rows(core, ordinary_floats((5, 300), np.float32, seed=8), ue8m0=ue8m0, amax_min=amax_min)


# ---- where things are read and written


@by_layout
@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("fill", list(range(4)), ids=lambda bits: f"fill{bits}")
def test_padding_is_written_only_where_fill_says(core: Core, fill: int, num_threads: int, layout: str) -> None:
    plan = make_plan("half_unassigned", SMALL, seed=9, num_rows=241)
    padding = plan.row_to_token < 0
    assert padding.any()
    x = ordinary_floats((SMALL.T, 300), BFLOAT16, seed=10)
    codes, scales = quantize(
        core,
        x,
        plan.slot_to_row,
        plan.row_to_token,
        layout=LAYOUTS[layout],
        fill=fill,
        num_threads=num_threads,
    )
    expected_codes, expected_scales = reference.permute_quantized(x, plan)
    assert_same_bits(codes[~padding], expected_codes[~padding])
    assert is_poison(codes[padding]) if fill & Fill.ROWS == 0 else not codes[padding].view(np.uint8).any()
    behind = scales[:, len(padding) :]
    if layout == "col":
        assert behind.shape == (3, 3)
        assert is_poison(behind) if fill & Fill.SCALES == 0 else not behind.any()
        scales = np.ascontiguousarray(scales[:, : len(padding)].T)
    assert_same_bits(scales[~padding], expected_scales[~padding])
    assert is_poison(scales[padding]) if fill & Fill.SCALES == 0 else not scales[padding].any()


@by_layout
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_rows_may_lie_apart_or_in_reverse(core: Core, dtype: DTypeLike, layout: str) -> None:
    x = ordinary_floats((SMALL.T, 272), dtype, seed=11)
    for source in (with_row_gaps(x, 5), with_row_gaps(x, 16), x[::-1], np.broadcast_to(x[:1], x.shape)):
        check_rows(core, source, layout)
        check_permuted(core, make_plan("half_unassigned", SMALL, seed=12), source, layout)


@pytest.mark.cpu_only
@pytest.mark.parametrize("hidden", [1, 7, 128, 200, 600])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_rows_may_begin_at_any_address(core: Core, dtype: DTypeLike, hidden: int) -> None:
    x = floats_of_every_kind((13, hidden), dtype, seed=13)
    check_rows(core, at_odd_address(x), odd_codes=True)


@pytest.mark.parametrize("elements", [1, 4, 8])
@pytest.mark.parametrize("hidden", [128, 200, 640])
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_rows_may_begin_at_any_element(core: Core, dtype: DTypeLike, hidden: int, elements: int) -> None:
    x = floats_of_every_kind((13, hidden + elements), dtype, seed=14)
    check_rows(core, x[:, elements:])
    check_rows(core, np.ascontiguousarray(x[:, elements:]), odd_codes=True)


@pytest.mark.parametrize("bad", [INT32.min, -7, 240, INT32.max], ids=["min", "minus7", "N", "max"])
@by_layout
def test_slots_with_a_row_out_of_range_are_skipped(core: Core, bad: int, layout: str) -> None:
    plan = make_plan("uniform", SMALL, seed=15, num_rows=240)
    x = ordinary_floats((SMALL.T, 200), np.float16, seed=16)
    spoilt = np.random.default_rng(17).random(plan.slot_to_row.shape) < 0.3
    slot_to_row = np.where(spoilt, np.int32(bad), plan.slot_to_row)
    codes, scales = quantize(core, x, slot_to_row, plan.row_to_token, layout=LAYOUTS[layout], num_threads=3)
    expected_codes, expected_scales = reference.permute_quantized(x, plan)
    if layout == "col":
        scales = np.ascontiguousarray(scales.T)
    lost = np.zeros(plan.num_rows, np.bool_)
    lost[plan.slot_to_row[spoilt]] = True
    for actual, expected in ((codes, expected_codes), (scales, expected_scales)):
        assert_same_bits(actual[~lost], expected[~lost])
        assert is_poison(actual[lost])  # no slot writes them, and they are no padding


@pytest.mark.cuda_only
@pytest.mark.parametrize("fill", [Fill.NONE, Fill.ALL])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_column_major_scales_by_way_of_a_workspace_equal_the_oracle(core: Core, shape: Shape, fill: int) -> None:
    plan = make_problem(make_ids("half_unassigned", shape, seed=21), shape.E, shape.A).plan
    x = ordinary_floats((shape.T, shape.H), BFLOAT16, seed=22)
    options = {"layout": ScaleLayout.COLUMN, "fill": fill}
    padding = np.full_like(plan.row_to_token, -2)  # any negative number
    maps = plan.slot_to_row, np.where(plan.row_to_token < 0, padding, plan.row_to_token)
    workspace = np.empty((shape.T, -(-shape.H // 128)), np.float32)
    codes, scales = quantize(core, x, *maps, workspace=workspace, **options)
    expected_codes, expected_scales = quantize(core, x, *maps, **options)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(scales, expected_scales)
    _, scales = quantize(core, x, workspace=workspace, **options)
    assert_same_bits(scales, quantize(core, x, **options)[1])


@pytest.mark.cuda_only
def test_a_workspace_is_asked_for_where_many_words_are_to_be_turned(core: Core) -> None:
    def size(num_tokens: int, **fields: int) -> int:
        params = QuantizeParams(num_tokens=num_tokens, topk=8, num_rows=8 * num_tokens, hidden=7168, **fields)
        return core.workspace_bytes("quantize", params)

    assert size(4096, scale_layout=1) == 4096 * 56 * 4
    assert size(32, scale_layout=1) == 0
    assert size(4096) == 0
    assert size(4096, scale_layout=1, ue8m0=1) == 0
    assert size(-1, scale_layout=1) == 0
    assert core.workspace_bytes("quantize", None) == 0


def test_without_a_map_there_are_as_many_rows_as_tokens(core: Core) -> None:
    x = ordinary_floats((4, 6), np.float32, seed=18)
    with pytest.raises(CoreError, match="slot_to_row must be given, unless topk is 1 and num_rows is num_tokens"):
        quantize(core, x, row_to_token=np.full(5, -1, np.int32))


# ---- and back


@pairwise_of(
    pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name),
    pytest.mark.parametrize("hidden", HIDDEN),
    by_format,
    by_layout,
    others_are_slow=True,
)
def test_dequantised_rows_equal_the_oracle(core: Core, dtype: DTypeLike, hidden: int, ue8m0: bool, layout: str) -> None:
    x = floats_of_every_kind((13, hidden), np.float32, seed=19)
    codes, scales = reference.quantize_1x128(x, ue8m0=ue8m0, scale_layout=layout)
    expected = reference.dequantize_1x128(codes, scales, scale_layout=layout, dtype=dtype)
    options = {"layout": LAYOUTS[layout]}
    assert_same_numbers(dequantize(core, codes, scales, dtype, **options), expected)
    apart = with_row_gaps(codes, 3)
    assert_same_numbers(dequantize(core, apart, scales, dtype, num_threads=3, **options), expected)
    odd = np.dtype(dtype).itemsize
    assert_same_numbers(dequantize(core, codes, scales, dtype, odd_outputs=odd, **options).copy(), expected)


@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=dtype_name)
def test_every_code_times_any_scale_equals_the_oracle(core: Core, dtype: DTypeLike) -> None:
    scales = floats_of_every_kind((300, 2), np.float32, seed=20)
    codes = np.tile(np.arange(256, dtype=np.uint8), (300, 1)).view(ml_dtypes.float8_e4m3fn)
    actual = dequantize(core, codes, scales, dtype)
    assert_same_numbers(actual, reference.dequantize_1x128(codes, scales, dtype=dtype))


def test_an_exponent_of_zero_is_a_scale_of_zero(core: Core) -> None:
    scales = np.array([[0x7F]], np.int32)
    codes = np.ones((1, 256), ml_dtypes.float8_e4m3fn)
    assert dequantize(core, codes, scales, np.float32).tolist() == [[1.0] * 128 + [0.0] * 128]
