# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Products of experts by Triton kernels, with gradients: the oracle's within the proved bound of a float32 sum."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from paddle_moe_ops.triton.gemm import schedule as schedules
from paddle_moe_ops.triton.gemm.configs import GemmConfig
from paddle_moe_ops.triton.gemm.grouped_gemm import grouped_gemm, grouped_gemm_backward
from paddle_moe_ops.triton.gemm.types import Groups, Tokens
from tests.reference.cases import assert_same_bits

from .interpreter import NumpyDevice
from .problems import halfway, ordinary

pytestmark = pytest.mark.long

HALVES = pytest.mark.parametrize(
    "dtype",
    [pytest.param(ml_dtypes.bfloat16, id="bfloat16"), pytest.param(np.float16, id="float16", marks=pytest.mark.slow)],
)
BY_LAYOUT = pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "plain"])
BY_LAYOUT_OR_SLOW = pytest.mark.parametrize(
    "transpose", [pytest.param(True, id="transposed"), pytest.param(False, id="plain", marks=pytest.mark.slow)]
)
SMALL_TILES = GemmConfig(32, 32, 32, 2, 2, 4, 1, tma=False)
CONFIGS = {
    "pointers": SMALL_TILES,
    "descriptors": SMALL_TILES._replace(tma=True),
    "a program for every tile": SMALL_TILES._replace(programs_per_sm=0),
    "a program for every tile, descriptors": SMALL_TILES._replace(programs_per_sm=0, tma=True),
    "descriptors, loading ahead": SMALL_TILES._replace(tma=True, max_flat_k=1 << 20),
    "wide bands": SMALL_TILES._replace(group_m=8, block_m=16, block_n=64),
}
BY_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


class Case(NamedTuple):
    """Rows in all, those of each expert, where they begin, and the size of a matrix."""

    num_rows: int
    sizes: list[int]
    offsets: list[int] | None = None
    inner: int = 40
    outer: int = 56

    def live(self) -> NDArray:
        """Mask of the rows that belong to a group."""
        starts = self.offsets or np.cumsum([0, *self.sizes])
        live = np.zeros(self.num_rows, np.bool_)
        for start, size in zip(starts, self.sizes, strict=False):
            live[start : start + size] = True
        return live


CASES = {
    "uneven": Case(74, [63, 0, 1, 10]),
    "no rows": Case(0, [0, 0, 0]),
    "empty groups only": Case(5, [0, 0]),
    "one group": Case(65, [65]),
    "rows after the last": Case(50, [3, 0, 5, 2]),
    "padding": Case(70, [3, 0, 35, 2], [0, 16, 16, 64, 68]),
    "padding in front": Case(56, [3, 0, 5, 2], [33, 40, 40, 50, 56]),
    "odd sizes": Case(37, [17, 20], None, 7, 67),
    "whole blocks": Case(64, [32, 16, 0], [0, 32, 48, 48], 32, 64),
    "many experts": Case(20, [0, 1] * 10),
    "as many experts as a program reads at a time": Case(9, [1, *[0] * 254, 2], inner=16, outer=16),
}
BY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Problem:
    """Operands whose rows of no group must not be read, and the oracle's results for them.

    With ``tokens``, x has rows of tokens, and a map from rows to tokens.
    """

    def __init__(self, rng, case: Case, dtype, transpose: bool, *, weighted=False, tokens=0):
        self.case, self.dtype, self.transpose = case, dtype, transpose
        experts, live = len(case.sizes), case.live()
        shape = (experts, case.outer, case.inner) if transpose else (experts, case.inner, case.outer)
        self.w = ordinary(rng, shape, dtype)
        self.row_to_token = self.weights = None
        if tokens:
            self.row_to_token = np.where(live, rng.integers(0, tokens, case.num_rows), -1).astype(np.int32)
        self.x = ordinary(rng, (tokens or case.num_rows, case.inner), dtype)
        self.d_out = np.where(live[:, None], ordinary(rng, (case.num_rows, case.outer), dtype), np.nan).astype(dtype)
        if not tokens:
            self.x = np.where(live[:, None], self.x, np.nan).astype(dtype)
        if weighted:
            self.weights = np.where(live, rng.random(case.num_rows), np.nan).astype(np.float32)

    def rows(self) -> NDArray:
        return self.x if self.row_to_token is None else self.x[self.row_to_token]

    def check(self, gpu, *, offset=0, strided=0, index_dtype=np.int32, wanted=(True, True, True), **configs):
        case, sizes = self.case, np.array(self.case.sizes, index_dtype)
        groups = Groups(
            gpu.array(sizes), None if case.offsets is None else gpu.array(np.array(case.offsets, index_dtype))
        )
        maps = {
            "tokens": None if self.row_to_token is None else maps_of_tokens(gpu, self.row_to_token, len(self.x)),
            "weights": None if self.weights is None else gpu.array(self.weights),
        }
        x, d_out = (placed(gpu, each, offset, strided) for each in (self.x, self.d_out))
        w, config = gpu.array(self.w, offset=offset), configs.get("config", SMALL_TILES)
        out = grouped_gemm(gpu, x, w, groups, self.transpose, **maps, config=config)
        gradients = grouped_gemm_backward(
            *(gpu, d_out, x, w, groups, self.transpose), **maps, wanted=wanted, config=config, weight_config=config
        )
        wanted = wanted if self.weights is not None else (*wanted[:2], False)
        assert [each is not None for each in gradients] == list(wanted)
        chains = case.inner, case.outer, max(case.sizes), case.outer + case.inner
        expected, magnitudes = self.oracle(np.asarray), self.oracle(np.abs)
        results = []
        for made, due, magnitude, chain, what in zip(
            (out, *gradients), expected, magnitudes, chains, ("out", "dX", "dW", "d_weights"), strict=True
        ):
            if made is not None:
                results.append(gpu.numpy(made))
                assert_close_sums(results[-1], due, magnitude, dtype_tols(due.dtype, chain), what=what)
        assert not np.asarray(results[0], np.float32)[~case.live()].any()
        return results

    def oracle(self, of):
        """The product and its gradients, of the operands or of their absolute values."""
        case, live = self.case, self.case.live()[:, None]
        x, d_out = (np.where(live, of(each.astype(np.float64)), 0) for each in (self.rows(), self.d_out))
        w = of(self.w.astype(np.float64))
        factor = np.ones((case.num_rows, 1)) if self.weights is None else np.where(live, self.weights[:, None], 0)
        where = case.sizes, self.transpose
        offsets = {"expert_offsets": case.offsets}
        product = reference.grouped_gemm(x, w, *where, **offsets)
        scaled = (factor * x).astype(np.float32).astype(self.dtype) if self.weights is not None else x
        d_x, _ = reference.grouped_gemm_backward(d_out, x, w, *where, **offsets)
        _, d_w = reference.grouped_gemm_backward(d_out, scaled.astype(np.float64), w, *where, **offsets)
        d_weights = (d_out * product).sum(axis=1).astype(np.float32)
        return [*(each.astype(self.dtype) for each in (factor * product, factor * d_x, d_w)), d_weights]


def maps_of_tokens(gpu, row_to_token: NDArray, num_tokens: int) -> Tokens:
    rows = [np.flatnonzero(row_to_token == token) for token in range(num_tokens)]
    token_rows = np.full((num_tokens, max(map(len, rows), default=0) + 1), -1, np.int32)
    for token, those in enumerate(rows):
        token_rows[token, : len(those)] = those
    return Tokens(gpu.array(row_to_token), gpu.array(token_rows))


def placed(gpu, values: NDArray, offset: int, strided: int):
    """The array, or the first columns of a wider one whose others must not be read."""
    if not strided:
        return gpu.array(values, offset=offset)
    wider = np.concatenate([values, np.full((len(values), strided), np.nan, values.dtype)], axis=1)
    return gpu.columns(gpu.array(wider, offset=offset), values.shape[1])


@pytest.mark.sampled(2)
@BY_LAYOUT
@HALVES
@BY_CASE
def test_products_and_gradients_follow_the_oracle(gpu, rng, case, dtype, transpose):
    Problem(rng, case, dtype, transpose).check(gpu)


@BY_LAYOUT_OR_SLOW
@BY_CONFIG
@pytest.mark.parametrize(
    "name",
    ["odd sizes", *(pytest.param(each, marks=pytest.mark.slow) for each in ("uneven", "padding", "whole blocks"))],
)
def test_however_the_product_is_cut(gpu, rng, name, config, transpose):
    Problem(rng, CASES[name], ml_dtypes.bfloat16, transpose).check(gpu, config=config)


@pytest.mark.sampled(2)
@BY_LAYOUT_OR_SLOW
@BY_CONFIG
def test_weighted_rows_and_the_gradient_of_weights(gpu, rng, config, transpose):
    Problem(rng, CASES["padding"], ml_dtypes.bfloat16, transpose, weighted=True).check(gpu, config=config)


@pytest.mark.sampled(2, 1)
@BY_LAYOUT_OR_SLOW
@BY_CONFIG
def test_rows_gathered_from_tokens(gpu, rng, config, transpose):
    Problem(rng, CASES["padding"], ml_dtypes.bfloat16, transpose, tokens=9).check(gpu, config=config)


def test_default_configurations(gpu, rng):
    for options in ({}, {"weighted": True}, {"tokens": 9}):
        Problem(rng, CASES["padding"], ml_dtypes.bfloat16, True, **options).check(gpu, config=None)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_wanted_are_made(gpu, rng, wanted):
    for weighted in (False, True):
        Problem(rng, CASES["uneven"], np.float16, True, weighted=weighted).check(gpu, wanted=wanted)


@pytest.mark.parametrize(("offset", "strided"), [(2, 0), (0, 3), (0, 8)])
@pytest.mark.parametrize("tma", [False, True])
def test_rows_may_lie_apart_and_begin_anywhere(gpu, rng, offset, strided, tma):
    config = SMALL_TILES._replace(tma=tma)
    problem = Problem(rng, CASES["padding"], ml_dtypes.bfloat16, True)
    problem.check(gpu, offset=offset, strided=strided, config=config, index_dtype=np.int64)


@pytest.mark.parametrize(
    ("sizes", "offsets", "cut", "starts"),
    [
        ([2, 9], [0, 3, 6], [2, 3], [0, 3, 6]),
        ([5, 2], [0, 3, 6], [5, 0], [0, 5, 6]),
        ([-4, 2], [-7, 3, 6], [0, 2], [0, 3, 6]),
        ([1, 2], [9, 99, 999], [0, 0], [6, 6, 6]),
        ([4, 9], None, [4, 2], [0, 4, 6]),
    ],
)
def test_groups_that_do_not_fit_are_cut(gpu, rng, sizes, offsets, cut, starts):
    x, w = ordinary(rng, (6, 8), np.float16), ordinary(rng, (2, 24, 8), np.float16)
    groups = Groups(gpu.array(np.int64(sizes)), None if offsets is None else gpu.array(np.int64(offsets)))
    out = grouped_gemm(gpu, gpu.array(x), gpu.array(w), groups, config=SMALL_TILES)
    good = Groups(gpu.array(np.int64(cut)), gpu.array(np.int64(starts)))
    expected = grouped_gemm(gpu, gpu.array(x), gpu.array(w), good, config=SMALL_TILES)
    assert_same_bits(gpu.numpy(out), gpu.numpy(expected))
    d_w = grouped_gemm_backward(gpu, out, gpu.array(x), gpu.array(w), groups, weight_config=SMALL_TILES)[1]
    due = grouped_gemm_backward(gpu, out, gpu.array(x), gpu.array(w), good, weight_config=SMALL_TILES)[1]
    assert_same_bits(gpu.numpy(d_w), gpu.numpy(due))


def test_more_experts_than_are_looked_at_at_once(gpu, rng):
    sizes = np.zeros(2100, np.int32)
    sizes[[0, 1023, 1024, 2099]] = 3, 1, 2, 4
    x, w = ordinary(rng, (12, 8), np.float16), ordinary(rng, (2100, 16, 8), np.float16)
    offsets = np.append(np.cumsum(sizes) - sizes + (np.arange(2100) > 1023), 11).astype(np.int32)
    for starts in (None, offsets):
        groups = Groups(gpu.array(sizes), None if starts is None else gpu.array(starts))
        out = gpu.numpy(grouped_gemm(gpu, gpu.array(x), gpu.array(w), groups, config=SMALL_TILES))
        assert_close_sums(
            out,
            reference.grouped_gemm(x, w, sizes, expert_offsets=starts),
            reference.grouped_gemm(np.abs(x), np.abs(w), sizes, expert_offsets=starts),
            dtype_tols(np.float16, 8),
            what="out",
        )


@pytest.mark.parametrize("tma", [False, True])
def test_gradients_of_more_experts_than_are_looked_at_at_once(gpu, rng, monkeypatch, tma):
    monkeypatch.setattr(schedules, "_EXPERTS_PER_BLOCK", 4)
    monkeypatch.setattr(schedules, "_MAX_EXPERTS_PER_BLOCK", 8)
    case = Case(50, [0, 1, 3] * 7, None, 16, 72)  # 3 tiles of 32 x 32 each, the last one cut
    Problem(rng, case, ml_dtypes.bfloat16, True).check(gpu, config=SMALL_TILES._replace(tma=tma))


def test_tokens_that_are_none_give_zeros(gpu, rng):
    x, w = ordinary(rng, (3, 16), np.float16), ordinary(rng, (1, 16, 16), np.float16)
    groups = Groups(gpu.array(np.int32([6])))
    arguments = gpu.array(x), gpu.array(w), groups
    # Numbers that no token has are none to the gather, which alone could read beyond the tokens.
    for tma, numbers in ((True, [0, -1, 2, -1, -1, 1]), (False, [0, -1, 2, 3, -7, 1])):
        config = SMALL_TILES._replace(tma=tma)
        row_to_token = np.int32(numbers)
        tokens = maps_of_tokens(gpu, row_to_token, 3)
        out = gpu.numpy(grouped_gemm(gpu, *arguments, tokens=tokens, config=config))
        found = (row_to_token >= 0) & (row_to_token < 3)
        rows = np.where(found[:, None], x[np.where(found, row_to_token, 0)], np.float16(0))
        expected = gpu.numpy(grouped_gemm(gpu, gpu.array(rows), *arguments[1:], config=config))
        assert_same_bits(out, expected)


@BY_LAYOUT
def test_rows_of_tokens_are_moved_first_for_descriptors_and_else_gathered(rng, gpu, monkeypatch, transpose):
    launched = []
    launch = gpu.launch
    monkeypatch.setattr(
        gpu, "launch", lambda kernel, *rest: launched.append(kernel.fn.__name__) or launch(kernel, *rest)
    )
    for tma, inner, outer, moved in ((True, 64, 56, 2), (False, 64, 56, 0), (True, 7, 56, 0)):
        launched.clear()
        case = CASES["uneven"]._replace(inner=inner, outer=outer)
        Problem(rng, case, ml_dtypes.bfloat16, transpose, tokens=9).check(gpu, config=SMALL_TILES._replace(tma=tma))
        assert launched.count("permute_kernel") == moved, (tma, inner, launched)


@pytest.mark.parametrize("tma", [False, True])
def test_bits_depend_neither_on_the_number_of_programs_nor_on_the_order_of_tiles(gpu, rng, tma):
    problem = Problem(rng, CASES["uneven"], ml_dtypes.bfloat16, True, weighted=True)
    results = [
        problem.check(gpu, config=SMALL_TILES._replace(programs_per_sm=programs, group_m=band, tma=tma))
        for programs, band in ((0, 1), (1, 2), (2, 8))
    ]
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert_same_bits(got, expected)


@settings(max_examples=15)
@given(st.data())
def test_any_groups_follow_the_oracle(gpu, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    gaps = data.draw(st.lists(st.integers(0, 20), min_size=len(sizes) + 1, max_size=len(sizes) + 1))
    starts = np.cumsum(gaps[:-1]) + np.cumsum([0, *sizes[:-1]])
    offsets = [*starts.tolist(), int(starts[-1]) + sizes[-1]] if any(gaps[:-1]) else None
    inner, outer = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    case = Case(sum(sizes) + sum(gaps), sizes, offsets, inner, outer)
    tokens = data.draw(st.integers(0, 5))
    problem = Problem(rng, case, ml_dtypes.bfloat16, data.draw(st.booleans()), tokens=tokens, weighted=not tokens)
    problem.check(gpu, config=SMALL_TILES._replace(tma=data.draw(st.booleans())))


@pytest.mark.cuda_only
@BY_LAYOUT
@pytest.mark.parametrize("form", [{}, {"weighted": True}, {"tokens": 1000}], ids=["rows", "weighted", "gathered"])
def test_sizes_of_models(gpu, rng, form, transpose):
    """Tiles as on a GPU, pipelined; the interpreter would take hours."""
    case = Case(2000, [600, 0, 129, 1, 1000, 128], [0, 640, 640, 800, 808, 1808, 2000], 1024, 768)
    problem = Problem(rng, case, ml_dtypes.bfloat16, transpose, **form)
    for tma in (False, True):
        config = GemmConfig(128, 256, 64, 8, 3, 8, 1, tma=tma)
        problem.check(gpu, config=config)
    assert not isinstance(gpu, NumpyDevice)


@pytest.mark.cuda_only
@BY_LAYOUT
@pytest.mark.parametrize(("inner", "outer", "strided"), [(768, 1024, 0), (520, 1000, 24), (40, 72, 8)])
def test_descriptors_of_rows_end_with_each_group(gpu, rng, inner, outer, strided, transpose):
    """Sizes around those of blocks, groups without rows, gaps of NaN, widths that tiles do not divide."""
    sizes, gaps = [600, 0, 129, 1, 1000, 128, 0, 64, 63, 33], [17, 40, 0, 31, 7, 0, 8, 0, 0, 1, 5]
    starts = np.cumsum(gaps[:-1]) + np.cumsum([0, *sizes[:-1]])
    case = Case(sum(sizes) + sum(gaps), sizes, [*starts.tolist(), sum(sizes) + sum(gaps)], inner, outer)
    problem = Problem(rng, case, ml_dtypes.bfloat16, transpose)
    for config in (None, GemmConfig(128, 256, 64, 8, 3, 8, 1, tma=True), GemmConfig(64, 64, 32, 8, 4, 4, 2, tma=True)):
        problem.check(gpu, strided=strided, config=config)
    assert not isinstance(gpu, NumpyDevice)


@HALVES
def test_products_halfway_between_two_numbers_get_the_even_one(gpu, dtype):
    rows, expected = halfway(dtype)
    x, w = np.ones((1, 3), dtype), rows[None]
    out = grouped_gemm(gpu, gpu.array(x), gpu.array(w), Groups(gpu.array(np.array([1], np.int32)), None), False)
    assert_same_bits(gpu.numpy(out), expected[None])
