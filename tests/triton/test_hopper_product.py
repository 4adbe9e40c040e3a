# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of experts on the compiled library's product: its kernel on a GPU, elsewhere what its header says in NumPy."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddle_moe_ops.triton import hopper_product
from paddle_moe_ops.triton.gemm import gpu_facts, mlp
from paddle_moe_ops.triton.gemm.types import Gpu
from paddle_moe_ops.triton.hopper_product import GroupedProductParams, LibraryKernel, grouped_product_of
from paddle_moe_ops.triton.launch.kernel_cache import KernelCache
from tests.pairwise import in_turn, pairwise

from .library_in_numpy import HOPPER, fields_in_header, launches_of, use_products
from .problems import EXPERTS_AT_LIMITS
from .test_moe_mlp import BY_LAYOUT, LAYOUTS, Case, Problem, assert_all_same

pytestmark = pytest.mark.long

CASES = {
    "several tiles of an expert": Case(170, 24, 8, 2, 2, unassigned=0.1),
    "a few rows": Case(13, 32, 8, 5, 2),
    "a static buffer with room": Case(20, 64, 136, 3, 2, buffer=150),
    "a static buffer that drops rows": Case(40, 64, 16, 4, 2, buffer=21),
    "nothing assigned": Case(9, 64, 16, 4, 2, unassigned=1.0),
    "more experts than a warp has lanes": Case(20, 32, 8, 40, 2),
}
# So that blocks are handed tiles after their first ones. Interpreted, they take long.
MANY_TILES = {"more tiles than multiprocessors": Case(1200, 24, 8, 700, 2)}


TILE_ROWS = [hopper_product.TILE_ROWS, hopper_product.TURNED_ROWS]


@pytest.fixture(params=TILE_ROWS)
def tile_rows(request) -> int:
    """Tile rows of the kernel for plain products."""
    return request.param


@pytest.fixture
def device(gpu, monkeypatch, tile_rows) -> Any:
    """The device of the kernels, with the library's products wherever it can take them."""
    use_products(gpu, monkeypatch, lambda: tile_rows, lambda: False)
    return gpu


@pytest.fixture
def launched(device, monkeypatch) -> list[dict[str, int]]:
    return launches_of("grouped_product", GroupedProductParams, monkeypatch)


def check_exact_sums(rng, device, launched, tile_rows, case, dtype, transpose):
    problem = Problem(rng, case, dtype, transpose)
    assert_all_same(problem.run(device), problem.due())
    results = [hopper_product.GATED, hopper_product.PLAIN, hopper_product.GRADIENT, hopper_product.PLAIN]
    assert [each["result"] for each in launched] == (results if problem.plan.num_rows else [])
    rows = {each["result"]: each["tile_rows"] for each in launched}
    others = dict.fromkeys((hopper_product.GATED, hopper_product.GRADIENT), hopper_product.TURNED_ROWS)
    assert rows == ({hopper_product.PLAIN: tile_rows, **others} if problem.plan.num_rows else {})


@pairwise(
    {"tile_rows": TILE_ROWS, "case": CASES, "transpose": [True, False]}, indirect=["tile_rows"], others_are_slow=True
)
def test_exact_sums_have_the_bits_of_the_oracle(rng, device, launched, tile_rows, case, transpose):
    check_exact_sums(rng, device, launched, tile_rows, case, ml_dtypes.bfloat16, transpose)


@pytest.mark.slow
@BY_LAYOUT
@pytest.mark.parametrize("case", [*CASES.values(), *MANY_TILES.values()], ids=[*CASES, *MANY_TILES])
def test_exact_sums_of_float16_have_the_bits_of_the_oracle(rng, device, launched, tile_rows, case, transpose):
    check_exact_sums(rng, device, launched, tile_rows, case, np.float16, transpose)


@pytest.mark.slow
@BY_LAYOUT
@pytest.mark.parametrize("case", MANY_TILES.values(), ids=MANY_TILES)
def test_exact_sums_of_many_tiles_have_the_bits_of_the_oracle(rng, device, launched, tile_rows, case, transpose):
    check_exact_sums(rng, device, launched, tile_rows, case, ml_dtypes.bfloat16, transpose)


@pytest.mark.cuda_only
@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_exact_sums_of_many_experts_have_the_bits_of_the_oracle(rng, device, launched, experts):
    problem = Problem(rng, Case(min(experts, 600) + 1, 24, 8, experts, 4), ml_dtypes.bfloat16, False)
    assert_all_same(problem.run(device), problem.due())
    assert len(launched) == 4


WIDE_CASES = {  # numbers of float16 would overflow
    "tiles of 192 columns": Case(150, 384, 40, 2, 2, unassigned=0.1),
    "tiles of 192 columns, of which a few are not there": Case(41, 376, 24, 2, 2),
    "two tiles of 128 columns": Case(41, 136, 24, 2, 2),
}


@pairwise(
    {"tile_rows": TILE_ROWS, "case": WIDE_CASES, "transpose": [True, False]},
    indirect=["tile_rows"],
    others_are_slow=True,
)
def test_several_tiles_of_columns_have_the_bits_of_the_oracle(rng, device, launched, tile_rows, case, transpose):
    problem = Problem(rng, case, ml_dtypes.bfloat16, transpose)
    assert_all_same(problem.run(device), problem.due())
    assert [each["tile_rows"] for each in launched if each["result"] == hopper_product.PLAIN] == [tile_rows] * 2


GATHERS = mlp.gathers


@pytest.fixture
def gathered(launched, monkeypatch) -> list[dict[str, int]]:
    """Has products gather the rows of tokens, whatever their sizes; the launches of the library's product."""
    monkeypatch.setattr(mlp, "gathers", lambda *_, **__: True)
    return launched


ONE_THAT_GATHERS = pytest.mark.parametrize("tile_rows", [hopper_product.TURNED_ROWS], indirect=True)
GATHERED_CASES = {
    **CASES,
    "padding rows": Case(23, 64, 16, 3, 2, alignment=16),
    "columns that fill no line": Case(41, 72, 328, 2, 2),
}


@ONE_THAT_GATHERS
@in_turn({"case": GATHERED_CASES, "transpose": LAYOUTS})
def test_rows_that_are_gathered_give_the_bits_of_the_oracle(rng, device, gathered, case, transpose):
    check_gathered_rows(rng, device, gathered, case, transpose)


@pytest.mark.slow
@ONE_THAT_GATHERS
@BY_LAYOUT
@pytest.mark.parametrize("case", [*MANY_TILES.values(), Case(900, 136, 128, 40, 4)], ids=[*MANY_TILES, "many experts"])
def test_rows_of_many_tiles_that_are_gathered_give_the_bits_of_the_oracle(rng, device, gathered, case, transpose):
    check_gathered_rows(rng, device, gathered, case, transpose)


def check_gathered_rows(rng, device, gathered, case, transpose):
    problem = Problem(rng, case, ml_dtypes.bfloat16, transpose)
    made, due = problem.run(device), problem.due()
    live = problem.plan.row_to_token[: problem.end] >= 0
    made[1], due[1] = made[1][live], due[1][live]
    assert_all_same(made, due)
    wide = [hopper_product.GATED, hopper_product.GRADIENT]
    assert all(each["gathers"] == (each["result"] in wide) for each in gathered)
    assert len(gathered) == (4 if problem.plan.num_rows else 0)


@ONE_THAT_GATHERS
def test_the_buffer_of_gathered_rows_holds_columns_alone(rng, device, gathered, monkeypatch):
    monkeypatch.setattr(mlp, "_COLUMN_STEP", 16)
    problem = Problem(rng, Case(50, 32, 8, 3, 2, unassigned=0.0), np.float16, False)
    assert_all_same(problem.run(device, 100 * 16 * 2), problem.due())
    assert {each["first_row"] for each in gathered} == {0}


@ONE_THAT_GATHERS
def test_without_tokens_the_library_gathers_nothing(rng, device, gathered):
    problem = Problem(rng, Case(0, 64, 16, 3, 2, buffer=40), ml_dtypes.bfloat16, False)
    assert_all_same(problem.run(device), problem.due())
    assert not any(each["gathers"] for each in gathered)


@ONE_THAT_GATHERS
@pytest.mark.parametrize("accumulates", [False, True])
def test_with_few_rows_both_passes_gather_unless_gradients_are_accumulated(
    rng, device, launched, monkeypatch, accumulates
):
    monkeypatch.setattr(mlp, "gathers", GATHERS)
    monkeypatch.setattr(mlp, "chosen_rows", lambda *_: hopper_product.TURNED_ROWS)
    problem = Problem(rng, Case(90, 64, 16, 3, 2), ml_dtypes.bfloat16, False)
    zeros = [np.zeros(each.shape, np.float32) for each in (problem.gate_up, problem.down)]
    into = tuple((device.array(each), True) for each in zeros) if accumulates else (None, None)
    problem.run(device, into=into)
    flags = {each["result"]: each["gathers"] for each in launched}
    expected = {hopper_product.GATED: 1, hopper_product.GRADIENT: int(not accumulates), hopper_product.PLAIN: 0}
    assert flags == expected


@ONE_THAT_GATHERS
def test_tokens_that_lie_apart_are_gathered(rng, device, gathered):
    problem = Problem(rng, Case(23, 64, 16, 3, 2), ml_dtypes.bfloat16, False)
    wide = np.full((23, 72), np.nan, ml_dtypes.bfloat16)
    wide[:, :64] = problem.x
    layer, x = problem.layer(device, 1 << 28), device.columns(device.array(wide), 64)
    out, kept = mlp.moe_mlp(device, x, layer, True)
    made = [device.numpy(out), device.numpy(kept.hidden)[: problem.end]]
    assert_all_same(made, problem.due()[:2])
    assert [each["x_row_stride"] for each in gathered][:1] == [72]


@in_turn({"tile_rows": TILE_ROWS, "transpose": LAYOUTS}, indirect=["tile_rows"])
def test_tiles_of_columns_may_be_half_empty(rng, device, tile_rows, transpose):
    problem = Problem(rng, Case(41, 72, 328, 2, 2), ml_dtypes.bfloat16, transpose)  # beyond what float16 has
    assert_all_same(problem.run(device), problem.due())


def test_windows_change_no_bit(rng, device, launched, monkeypatch):
    monkeypatch.setattr(mlp, "_COLUMN_STEP", 16)
    problem = Problem(rng, Case(110, 32, 8, 3, 2, unassigned=0.0), ml_dtypes.bfloat16, False)
    assert_all_same(problem.run(device, 170 * 32 * 2), problem.due())
    assert max(each["first_row"] for each in launched) > 0
    assert sum(each["result"] == hopper_product.PLAIN for each in launched) > 2


@ONE_THAT_GATHERS
@pytest.mark.parametrize("backward", [False, True])
def test_one_pass_may_gather_where_the_other_one_moves_windows(rng, device, launched, monkeypatch, backward):
    monkeypatch.setattr(mlp, "_COLUMN_STEP", 16)
    monkeypatch.setattr(mlp, "gathers", lambda *sizes: sizes[5] == backward)  # whether rows are moved twice
    problem = Problem(rng, Case(110, 32, 8, 3, 2, unassigned=0.0), ml_dtypes.bfloat16, False)
    assert_all_same(problem.run(device, 170 * 32 * 2), problem.due())
    moves = hopper_product.GATED if backward else hopper_product.GRADIENT
    assert {each["result"] for each in launched if each["first_row"] > 0} == {moves}


def test_windows_are_as_wide_as_tiles_where_they_can_be(rng, device, launched, tile_rows):
    """A window of 256 columns has one tile of 192 instead of two of 128."""
    problem = Problem(rng, Case(60, 384, 8, 2, 2, unassigned=0.0), ml_dtypes.bfloat16, False)
    assert_all_same(problem.run(device, 120 * 256 * 2), problem.due())
    widths = [192, 192] if tile_rows == hopper_product.TILE_ROWS else [256, 128]
    assert [each["width"] for each in launched if each["result"] == hopper_product.PLAIN] == 2 * widths


def test_the_first_product_is_made_again_where_it_was_not_kept(rng, device):
    problem = Problem(rng, Case(23, 64, 16, 3, 2), ml_dtypes.bfloat16, False)
    out, _, *gradients = problem.due()
    assert_all_same(problem.run(device, keeps=False), [out, *gradients])


def test_without_weights_rows_are_added_up_as_they_are(rng, device):
    problem = Problem(rng, Case(23, 64, 16, 3, 2), ml_dtypes.bfloat16, False, weighted=False)
    assert_all_same(problem.run(device), problem.due())


def test_padding_rows_may_hold_anything_and_their_weights_have_no_gradient(rng, device):
    problem = Problem(rng, Case(23, 64, 16, 3, 2, alignment=16), ml_dtypes.bfloat16, False)
    made, due = problem.run(device), problem.due()
    # The rows of H between experts are not written, and nothing reads them.
    live = problem.plan.row_to_token[: problem.end] >= 0
    made[1], due[1] = made[1][live], due[1][live]
    assert_all_same(made, due)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_random_numbers_are_within_the_bound_of_what_is_rounded(rng, device, dtype):
    problem = Problem(rng, Case(31, 72, 40, 4, 3), dtype, False)
    for name in ("x", "gate_up", "down", "d_out"):
        setattr(problem, name, rng.standard_normal(getattr(problem, name).shape).astype(dtype))
    for got, expected in zip(problem.run(device), problem.due(), strict=True):
        error = np.linalg.norm(got.astype(np.float64) - expected.astype(np.float64))
        assert error <= 4 * float(ml_dtypes.finfo(dtype).eps) * np.linalg.norm(expected.astype(np.float64))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_gate_far_below_zero_closes_whatever_it_gates(rng, device):
    """Also where the product of the two is not a number of float32."""
    problem = Problem(rng, Case(20, 64, 16, 3, 2), ml_dtypes.bfloat16, False)
    problem.gate_up[:] = 0
    problem.gate_up[:, 0] = np.where(np.arange(32) < 16, -1e20, 1e20)
    out, kept = mlp.moe_mlp(device, device.array(problem.x), problem.layer(device, 1 << 28), True)
    assert np.abs(device.numpy(kept.hidden)[: problem.end].astype(np.float32)).max() > 9e19
    assert not device.numpy(out).astype(np.float32).any()


def test_nan_of_one_expert_stays_with_its_rows(rng, device):
    problem = Problem(rng, Case(31, 64, 16, 3, 1, unassigned=0.0), ml_dtypes.bfloat16, False)
    problem.gate_up[1] = np.nan
    problem.down[1] = np.nan
    out, _, d_x, d_gate_up, d_down, _ = problem.run(device)
    bad = np.zeros(31, bool)
    rows = problem.plan.row_to_token
    first = problem.plan.expert_offsets[1]
    bad[rows[first : first + problem.plan.tokens_per_expert[1]]] = True
    assert np.isnan(out[bad].astype(np.float32)).all()
    for each in (out[~bad], d_x[~bad], d_gate_up[[0, 2]], d_down[[0, 2]]):
        assert np.isfinite(each.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"gpu": Gpu(100, 148)}, False),
        ({"gpu": Gpu(80, 108)}, False),
        ({"rows": 0}, False),
        ({"inner": 68}, False),
        ({"outer": 132}, False),
        ({"offset": 2}, False),
        ({"kernel": None}, False),
    ],
)
def test_the_kernel_is_used_where_it_can_be(monkeypatch, changes, expected):
    from .interpreter import NumpyDevice

    monkeypatch.setattr(hopper_product, "chosen_rows", lambda *sizes: sizes)
    options = {"gpu": HOPPER, "rows": 512 * 4, "inner": 64, "outer": 136, "offset": 0, "kernel": object()}
    options |= changes
    device = NumpyDevice()
    device.grouped_product = options["kernel"]
    w = device.array(np.zeros((4, 64, 136), ml_dtypes.bfloat16))
    array = device.array(np.zeros(8, ml_dtypes.bfloat16), offset=options["offset"])
    sizes = options["rows"], w, options["inner"], options["outer"], [array]
    made = hopper_product.library_rows(device, options["gpu"], hopper_product.PLAIN, *sizes)
    assert made == ((HOPPER, hopper_product.PLAIN, 512, 64, 136) if expected else 0)


@pytest.mark.parametrize(
    ("result", "mean_rows", "inner", "expected"),
    [
        (hopper_product.PLAIN, 128, 768, hopper_product.TURNED_ROWS),
        (hopper_product.PLAIN, 2048, 14336, hopper_product.TURNED_ROWS),
        (hopper_product.PLAIN, 127, 7168, 0),
        (hopper_product.PLAIN, 511, 760, 0),
        (hopper_product.PLAIN, 512, 504, hopper_product.TILE_ROWS),
        (hopper_product.PLAIN, 511, 504, 0),
        (hopper_product.PLAIN, 512, 512, hopper_product.TURNED_ROWS),
        (hopper_product.GATED, 128, 7168, hopper_product.TURNED_ROWS),
        (hopper_product.GATED, 127, 7168, 0),
        (hopper_product.GATED, 512, 760, 0),
        (hopper_product.GRADIENT, 128, 768, hopper_product.TURNED_ROWS),
        (hopper_product.GRADIENT, 512, 760, 0),
    ],
)
def test_the_choice_of_a_kernel_depends_on_rows_and_terms(result, mean_rows, inner, expected):
    assert hopper_product.chosen_rows(HOPPER, result, mean_rows, inner, 2560) == expected


@pytest.mark.parametrize(
    ("multiprocessors", "memory", "result", "mean_rows", "inner", "expected"),
    [
        (132, 4916, hopper_product.PLAIN, 1024, 2048, hopper_product.TILE_ROWS),
        (132, 4916, hopper_product.PLAIN, 1023, 2048, hopper_product.TURNED_ROWS),
        (132, 4916, hopper_product.PLAIN, 1024, 2056, hopper_product.TURNED_ROWS),
        (132, 4916, hopper_product.PLAIN, 512, 256, hopper_product.TILE_ROWS),
        (132, 3352, hopper_product.PLAIN, 1024, 2048, hopper_product.TURNED_ROWS),
        (132, 3352, hopper_product.PLAIN, 1024, 504, hopper_product.TILE_ROWS),
        (132, 35 * 132 - 1, hopper_product.PLAIN, 1024, 2048, hopper_product.TURNED_ROWS),
        (66, 35 * 66, hopper_product.PLAIN, 1024, 2048, hopper_product.TILE_ROWS),
        (132, 0, hopper_product.PLAIN, 1024, 2048, hopper_product.TURNED_ROWS),
        (132, 4916, hopper_product.GATED, 1024, 2048, hopper_product.TURNED_ROWS),
        (132, 4916, hopper_product.GRADIENT, 1024, 2048, hopper_product.TURNED_ROWS),
    ],
)
def test_with_fast_memory_plain_products_of_many_rows_have_small_tiles(
    multiprocessors, memory, result, mean_rows, inner, expected
):
    gpu = Gpu(90, multiprocessors, memory)
    assert hopper_product.chosen_rows(gpu, result, mean_rows, inner, 2560) == expected


@pytest.mark.parametrize(
    ("mean_rows", "inner", "columns", "expected"),
    [
        (1024, 3072, 768, hopper_product.TILE_ROWS),
        (1024, 3080, 768, hopper_product.TURNED_ROWS),
        (1023, 3072, 768, hopper_product.TURNED_ROWS),
        (1024, 1024, 4096, hopper_product.TILE_ROWS),
        (1024, 1032, 4096, hopper_product.TURNED_ROWS),
        (1024, 1024, 1024, hopper_product.TURNED_ROWS),
        (1024, 1024, 184, hopper_product.TILE_ROWS),
        (1024, 1024, 72, hopper_product.TURNED_ROWS),
    ],
)
def test_plain_products_of_many_rows_have_small_tiles_if_columns_fit(mean_rows, inner, columns, expected):
    gpu = Gpu(90, 132, 3352)
    assert hopper_product.chosen_rows(gpu, hopper_product.PLAIN, mean_rows, inner, columns) == expected


@pytest.mark.parametrize(
    ("inner", "most", "expected"),
    [(512, 1024, 960), (1032, 1024, 0), (1024, 2048, 0), (512, 768, 0), (512, 256, 192), (512, 128, 0)],
)
def test_windows_have_columns_that_fit_tiles(inner, most, expected):
    assert hopper_product.fitting_columns(inner, most) == expected


@pytest.mark.parametrize(("knows_its_memory", "memory"), [(True, 4916), (False, 0)])
def test_the_driver_says_how_fast_memory_is(monkeypatch, knows_its_memory, memory):
    facts = {16: 132, 75: 9, 76: 0}
    facts |= {36: 3_201_000, 37: 6144} if knows_its_memory else {}

    class Driver:
        def cuDeviceGetAttribute(self, value, number, ordinal):  # noqa: N802
            value._obj.value = facts.get(number, -1)
            return 0 if number in facts else 1

    monkeypatch.setattr(gpu_facts, "_library", Driver)
    assert gpu_facts._facts.__wrapped__(0) == Gpu(90, 132, memory)


def test_a_library_without_the_kernel_has_none():
    assert grouped_product_of(object()) is None


def test_what_the_library_refuses_is_an_error_that_names_the_kernel():
    kernel = LibraryKernel(
        "grouped_product", lambda *_: 1, GroupedProductParams, lambda: b"inner must be a multiple of 8"
    )
    assert KernelCache().compiled(kernel, (), (), 1) is kernel
    with pytest.raises(RuntimeError, match="grouped_product: inner must be a multiple of 8"):
        KernelCache.run(kernel, 0, 1, [0] * (len(GroupedProductParams._fields_) - 1))


def test_the_struct_mirrors_the_header():
    assert list(GroupedProductParams._fields_) == fields_in_header("pmo_grouped_product_params")
    assert (hopper_product.PLAIN, hopper_product.GATED, hopper_product.GRADIENT) == (0, 1, 2)


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("inner", 60, "inner must be a multiple of 8"),
        ("outer", 12, "outer must be a multiple of 8"),
        ("width", 300, "width must be a multiple of 8"),
        ("first_column", 136, "first_column must be a multiple of 8 in the matrix"),
        ("result", 3, "result must be one of pmo_grouped_result"),
        ("dtype", 0, "dtype must be PMO_FLOAT16 or PMO_BFLOAT16"),
        ("x", 8, "x must be an array at a multiple of 16 bytes"),
        ("x_row_stride", 56, "x_row_stride must be a multiple of 8 that holds a row"),
        ("num_rows", -1, "num_rows must be in"),
        ("window_rows", -1, "window_rows must be in"),
        ("tiles", 0, "tiles"),
        ("tile_rows", 0, "tile_rows must be PMO_GROUPED_TILE_ROWS"),
        ("counters", 0, "counters"),
        ("gathers", 1, "gathers must be 0 for a plain result"),
        ("struct_size", 8, "struct_size must be the size of pmo_grouped_product_params"),
    ],
)
def test_bad_params_are_refused_before_anything_is_launched(field, value, message):
    assert message in refusal({field: value})


@pytest.mark.cuda_only
@pytest.mark.parametrize("result", [hopper_product.GATED, hopper_product.GRADIENT])
def test_small_tiles_are_refused_unless_the_result_is_plain(result):
    message = refusal({"result": result, "tile_rows": hopper_product.TILE_ROWS})
    assert "tile_rows must be PMO_GROUPED_TURNED_ROWS unless the result is plain" in message


@pytest.mark.cuda_only
def test_tiles_of_other_widths_are_refused():
    message = refusal({"tile_rows": hopper_product.TILE_ROWS, "tile_columns": 160})
    assert "tile_columns must be PMO_GROUPED_TILE_COLUMNS or PMO_GROUPED_WIDE_COLUMNS" in message


def refusal(changes: dict[str, int]) -> str:
    """The library's error for valid params with these changes."""
    library = ctypes.CDLL(os.environ["PMO_CORE_LIBRARY"])
    library.pmo_last_error.restype = ctypes.c_char_p
    sizes = {
        "num_rows": 4,
        "num_sources": 4,
        "num_experts": 1,
        "inner": 64,
        "outer": 128,
        "width": 128,
        "window_rows": 4,
    }
    arrays = dict.fromkeys(("x", "matrix", "first", "stop", "tiles", "window", "out", "counters"), 1 << 20)
    options = {"x_row_stride": 64, "dtype": 2, "tile_rows": hopper_product.TURNED_ROWS}
    params = GroupedProductParams(ctypes.sizeof(GroupedProductParams), **sizes, **arrays, **options)
    for field, value in changes.items():
        setattr(params, field, value)
    assert library.pmo_grouped_product_cuda(ctypes.byref(params), None) == 1
    return library.pmo_last_error().decode()
