# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of experts on the library's float8 kernels: these on a GPU, elsewhere what their header says in NumPy."""

from __future__ import annotations

import copy
import ctypes
import os
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.tolerances import assert_close_float8
from paddle_moe_ops.triton import hopper_float8
from paddle_moe_ops.triton.float8_mlp import moe_mlp_float8, moe_mlp_float8_backward
from paddle_moe_ops.triton.gemm import mlp
from paddle_moe_ops.triton.gemm.types import Gpu, Groups, Layer, Tokens
from paddle_moe_ops.triton.hopper_float8 import GroupedFloat8Params, QuantizeBlocksParams, bits_of, float8_kernels_of
from paddle_moe_ops.triton.hopper_outer import grouped_outer_of
from paddle_moe_ops.triton.hopper_product import GATED, GRADIENT, TILE_ROWS
from tests.pairwise import in_turn
from tests.reference.cases import assert_same_bits

from .library_in_numpy import (
    HOPPER,
    fields_in_header,
    kernel_for,
    launches_of,
    numpy_float8_kernels,
    numpy_grouped_outer,
)
from .problems import EXPERTS_AT_LIMITS

pytestmark = pytest.mark.long

BY_LAYOUT = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
BF16 = ml_dtypes.bfloat16
LARGE = 1 << 28


class Case(NamedTuple):
    """T tokens of d columns, K slots, E experts of inner size n."""

    tokens: int
    hidden: int = 16
    inner: int = 128
    experts: int = 3
    topk: int = 2
    alignment: int = 1
    buffer: int = -1
    unassigned: float = 0.2


CASES = {
    "several tiles of an expert": Case(160, 144, 128, 1, unassigned=0.1),
    "a few rows": Case(7),
    "no tokens": Case(0),
    "nothing assigned": Case(9, unassigned=1.0),
    "padding": Case(40, alignment=16),
    "a static buffer with room": Case(20, buffer=100),
    "a static buffer that drops rows": Case(40, buffer=21),
    "more experts than a warp has lanes": Case(20, experts=40),
    "one expert": Case(50, 16, 256, 1, 1, unassigned=0.0),
}
# So that blocks are handed tiles after their first ones. Interpreted, it takes half a minute.
MANY_TILES = Case(1200, 48, 128, 700, 2, unassigned=0.0)


class Problem:
    def __init__(
        self,
        rng: np.random.Generator,
        case: Any,
        transpose: bool = False,
        weighted: bool = True,
        ids: NDArray | None = None,
    ) -> None:
        tokens, d, n, experts, topk = case[:5]
        if ids is None:
            ids = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :topk]
            ids = np.where(rng.random(ids.shape) < case.unassigned, -1, ids).astype(np.int32)
        self.ids = ids
        options = {"buffer_size": case.buffer} if case.buffer >= 0 else {}
        self.plan = reference.route(ids, num_experts=experts, padding_alignment=case.alignment, **options)
        self.transpose = transpose
        shapes = ((experts, 2 * n, d), (experts, d, n)) if transpose else ((experts, d, 2 * n), (experts, n, d))
        self.gate_up, self.down = ((rng.standard_normal(shape) * d**-0.5).astype(BF16) for shape in shapes)
        self.x = rng.standard_normal((tokens, d)).astype(BF16)
        self.d_out = (rng.standard_normal((tokens, d)) * 1e-7).astype(BF16)
        live = self.plan.row_to_token >= 0
        self.weights = np.where(live, rng.random(live.shape), np.nan).astype(np.float32) if weighted else None

    @property
    def end(self) -> int:
        """The end of the last expert's rows; rows beyond are not read."""
        return max(np.flatnonzero(self.plan.row_to_token >= 0), default=-1) + 1

    def layer(self, gpu: Any, workspace: int) -> Layer:
        plan = self.plan
        groups = Groups(*(gpu.array(each.astype(np.int32)) for each in (plan.tokens_per_expert, plan.expert_offsets)))
        tokens = Tokens(gpu.array(plan.row_to_token), gpu.array(plan.token_rows))
        weights = None if self.weights is None else gpu.array(self.weights)
        return Layer(gpu.array(self.gate_up), gpu.array(self.down), groups, tokens, weights, self.transpose, workspace)

    def run(
        self,
        gpu: Any,
        workspace: int = LARGE,
        *,
        keeps: bool = True,
        wanted: tuple = (True,) * 4,
        in_float8: bool = False,
    ) -> dict:
        layer, x = self.layer(gpu, workspace), gpu.array(self.x)
        out, kept = moe_mlp_float8(gpu, x, layer, keeps, hidden_in_float8=in_float8)
        found = {"out": gpu.numpy(out).copy()}
        if keeps and in_float8:
            names = ("hidden codes", "hidden scales")
            found |= {name: gpu.numpy(each)[: self.end].copy() for name, each in zip(names, kept.hidden, strict=True)}
        elif keeps:
            found["hidden"] = np.where(self.live, gpu.numpy(kept.hidden)[: self.end], 0)
        made = moe_mlp_float8_backward(gpu, gpu.array(self.d_out), x, kept, layer, wanted)
        names = ("x", "gate_up", "down", "weights")
        return found | {
            name: gpu.numpy(getattr(made, name)).copy() for name in names if getattr(made, name) is not None
        }

    @property
    def live(self) -> NDArray:
        return self.plan.row_to_token[: self.end, None] >= 0

    def due(self, in_float8: bool = False) -> dict:
        arguments = self.x, self.plan, self.gate_up, self.down, self.weights
        out, hidden = reference.moe_mlp_float8(*arguments, transpose=self.transpose)
        options = {"transpose": self.transpose, "hidden_in_float8": in_float8}
        made = reference.moe_mlp_float8_backward(self.d_out, *arguments, **options)
        found = {"out": out, "hidden": hidden[: self.end], "x": made.x, "gate_up": made.gate_up, "down": made.down}
        return found if made.weights is None else found | {"weights": made.weights}


def due_of_used_experts(problem: Problem, in_float8: bool = False) -> dict:
    """As `Problem.due` without padding or a static buffer; the oracle is slow for experts without rows."""
    few = copy.copy(problem)
    used = np.unique(np.append(problem.ids[problem.ids >= 0], 0))
    ids = np.where(problem.ids < 0, -1, np.searchsorted(used, problem.ids)).astype(np.int32)
    few.plan = reference.route(ids, num_experts=used.size)
    few.gate_up, few.down = problem.gate_up[used], problem.down[used]
    due = few.due(in_float8)
    for name in ("gate_up", "down"):
        gradient = np.zeros(getattr(problem, name).shape, due[name].dtype)
        gradient[used] = due[name]
        due[name] = gradient
    return due


def assert_near(made: dict, due: dict) -> None:
    for name, value in made.items():
        assert_close_float8(value, due[name], name)


@pytest.fixture
def device(gpu, monkeypatch) -> Any:
    """The device of the kernels, with the library's for float8 and for gradients of matrices."""
    monkeypatch.setattr(gpu, "grouped_outer", kernel_for(gpu, monkeypatch, numpy_grouped_outer(), grouped_outer_of))
    monkeypatch.setattr(gpu, "grouped_float8", kernel_for(gpu, monkeypatch, numpy_float8_kernels(), float8_kernels_of))
    return gpu


@in_turn({"case": CASES, "transpose": {"plain": False, "transposed": True}})
def test_results_and_gradients_are_those_of_the_oracle(rng, device, case, transpose):
    problem = Problem(rng, case, transpose)
    made, due = problem.run(device), problem.due()
    assert made.keys() == due.keys()
    assert_near(made, due)


@pytest.mark.cuda_only
@pytest.mark.parametrize("experts", EXPERTS_AT_LIMITS)
def test_results_and_gradients_of_many_experts_are_those_of_the_oracle(rng, device, experts):
    problem = Problem(rng, Case(min(experts, 600) + 1, 16, 128, experts, 4, unassigned=0.0))
    assert_near(problem.run(device), due_of_used_experts(problem))


@pytest.mark.cuda_only
@pytest.mark.parametrize("experts", [512, 1025, 1027, 2049])
def test_every_tile_of_many_experts_is_stored_once_in_every_launch(device, experts):
    """Gradients of full tiles, in memory that is poisoned before: equal bits in each launch, near the bf16 layer's."""
    import torch

    tokens, topk, d, n = 16 * experts, 8, 768, 768
    random = np.random.default_rng(experts)
    ids = np.argpartition(random.random((tokens, experts)), topk, axis=1)[:, :topk].astype(np.int32)
    plan = reference.route(ids, num_experts=experts)
    groups = Groups(*(device.array(each.astype(np.int32)) for each in (plan.tokens_per_expert, plan.expert_offsets)))
    generator = torch.Generator("cuda").manual_seed(experts)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return made.normal_(generator=generator)

    layer = Layer(
        *(normal(experts, d, 2 * n).mul_(d**-0.5), normal(experts, n, d).mul_(n**-0.5), groups),
        Tokens(device.array(plan.row_to_token), device.array(plan.token_rows)),
        *(torch.rand(tokens * topk, device="cuda", generator=generator), False, LARGE),
    )
    x, d_out = normal(tokens, d), normal(tokens, d)

    def passes(forward: Any, backward: Any) -> list[torch.Tensor]:
        out, kept = forward(device, x, layer, True)
        return [out, *backward(device, d_out, x, kept, layer, (True,) * 4)]

    due = passes(mlp.moe_mlp, mlp.moe_mlp_backward)
    first = passes(moe_mlp_float8, moe_mlp_float8_backward)
    for made, expected in zip(first, due, strict=True):
        parts = experts if made.ndim == 3 else 1  # a tile that lacks shows in its own matrix
        made, expected = (each.float().reshape(parts, -1) for each in (made, expected))
        errors, sizes = (made - expected).norm(dim=1), expected.norm(dim=1)
        assert bool((errors <= 0.15 * sizes).all())
    for _ in range(4):
        again = passes(moe_mlp_float8, moe_mlp_float8_backward)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("topk", [1, 2])
def test_without_weights_rows_are_added_up_as_they_are(rng, device, topk):
    problem = Problem(rng, Case(23, topk=topk), weighted=False)
    made = problem.run(device)
    assert "weights" not in made
    assert_near(made, problem.due())


def test_windows_change_no_bit(rng, device, monkeypatch):
    launched = launches_of("grouped_float8", GroupedFloat8Params, monkeypatch)
    problem = Problem(rng, Case(160, 528, 128, 2, 1, unassigned=0.0))
    whole = problem.run(device)
    assert max(each["first_row"] + each["first_column"] for each in launched) == 0
    launched.clear()
    in_parts = problem.run(device, 140 * 528 * 2)
    assert max(each["first_row"] for each in launched) > 0
    assert max(each["first_column"] for each in launched) > 0
    for name, value in whole.items():
        assert_same_bits(in_parts[name], value)


def test_windows_of_columns_begin_where_scales_do(rng, device, monkeypatch):
    """Also where layers of 16-bit numbers would take windows that fit tiles of 192 columns."""
    monkeypatch.setattr(device, "grouped_product", object())
    monkeypatch.setattr(mlp, "chosen_rows", lambda *_: TILE_ROWS)
    launched = launches_of("grouped_float8", GroupedFloat8Params, monkeypatch)
    problem = Problem(rng, Case(90, 528, 128, 2, 1, unassigned=0.0))
    problem.run(device, 75 * 528 * 2)
    assert {each["first_column"] for each in launched} == {0, 256, 512}


def test_the_first_product_is_made_again_where_it_was_not_kept(rng, device):
    problem = Problem(rng, Case(23))
    whole, again = problem.run(device), problem.run(device, keeps=False)
    for name, value in again.items():
        assert_same_bits(value, whole[name])


@pytest.mark.slow
@BY_LAYOUT
def test_results_and_gradients_of_many_tiles_are_those_of_the_oracle(rng, device, transpose):
    problem = Problem(rng, MANY_TILES, transpose)
    for in_float8 in (False, True):
        made, due = problem.run(device, in_float8=in_float8), problem.due(in_float8=in_float8)
        assert_near({name: each for name, each in made.items() if not name.startswith("hidden")}, due)


@in_turn({"case": CASES, "transpose": {"transposed": True, "plain": False}})
def test_gradients_where_the_first_product_was_kept_in_float8_are_those_of_the_oracle(rng, device, case, transpose):
    problem = Problem(rng, case, transpose)
    made, due = problem.run(device, in_float8=True), problem.due(in_float8=True)
    assert_near({name: each for name, each in made.items() if not name.startswith("hidden")}, due)


@pytest.mark.parametrize(
    "case", [pytest.param("several tiles of an expert", marks=pytest.mark.slow), "padding", "one expert"]
)
def test_what_is_kept_in_float8_is_the_first_product_by_the_rule_bit_for_bit(rng, device, case):
    problem = Problem(rng, CASES[case])
    gates = problem.gate_up[..., : CASES[case].inner]
    gates[0] *= BF16(2.0**-110)  # below the least that scales are made of
    wide, made = problem.run(device), problem.run(device, in_float8=True)
    assert_same_bits(made["out"], wide["out"])
    live = problem.live[:, 0]
    codes, scales = reference.quantize_1x128(wide["hidden"][live], amax_min=hopper_float8.AMAX_MIN)
    assert_same_bits(made["hidden codes"][live], codes)
    assert_same_bits(made["hidden scales"][live], scales)


def test_gradients_are_those_of_codes_times_scales_bit_for_bit(rng, device):
    """Numbers that float8 holds exactly come back as they were."""
    problem = Problem(rng, Case(61, 144, 256, 2, 1, unassigned=0.0))
    problem.x = np.zeros_like(problem.x)
    problem.x[np.arange(61), 2 * np.arange(61)] = BF16(1)
    grid = rng.integers(-15, 16, problem.gate_up.shape) * 2.0 ** rng.integers(-4, 1, problem.gate_up.shape)
    grid[:, :, ::128] = 28  # the scale is 1/16, of matrices and of rows
    problem.gate_up = grid.astype(BF16)
    wide, made = problem.run(device), problem.run(device, in_float8=True)
    assert np.unique(made["hidden scales"]).tolist() == [1 / 16]
    for name in ("out", "x", "gate_up", "down", "weights"):
        assert_same_bits(made[name], wide[name])


@pytest.mark.slow
def test_windows_change_no_bit_where_the_first_product_is_kept_in_float8(rng, device):
    problem = Problem(rng, Case(160, 528, 128, 2, 1, unassigned=0.0))
    whole, in_parts = problem.run(device, in_float8=True), problem.run(device, 140 * 528 * 2, in_float8=True)
    for name, value in whole.items():
        assert_same_bits(in_parts[name], value)


@pytest.mark.parametrize("number", range(4))
def test_only_what_is_wanted_is_made_of_a_first_product_in_float8(rng, device, number):
    problem = Problem(rng, Case(30))
    made = problem.run(device, wanted=tuple(each == number for each in range(4)), in_float8=True)
    assert_near({name: each for name, each in made.items() if not name.startswith("hidden")}, problem.due(True))


def test_rows_of_no_token_have_no_gradient_whatever_was_kept_of_them(rng, device):
    """Codes of padding may be NaN, and so may scales."""
    problem = Problem(rng, Case(40, alignment=16))
    layer, x = problem.layer(device, LARGE), device.array(problem.x)
    _, kept = moe_mlp_float8(device, x, layer, True, hidden_in_float8=True)
    codes, scales = (device.numpy(each).copy() for each in kept.hidden)
    empty = problem.plan.row_to_token < 0
    codes.view(np.uint8)[empty], scales[empty] = 0x7F, np.nan
    kept = kept._replace(hidden=hopper_float8.Codes(device.array(codes), device.array(scales)))
    made = moe_mlp_float8_backward(device, device.array(problem.d_out), x, kept, layer, (True,) * 4)
    names = ("x", "gate_up", "down", "weights")
    assert_near({name: device.numpy(getattr(made, name)) for name in names}, problem.due(True))


@pytest.mark.parametrize("number", range(4))
def test_only_what_is_wanted_is_made(rng, device, number):
    problem = Problem(rng, Case(30))
    wanted = tuple(each == number for each in range(4))
    made = problem.run(device, wanted=wanted)
    assert list(made) == ["out", "hidden", ("x", "gate_up", "down", "weights")[number]]
    assert_near(made, problem.due())


def test_nan_of_one_expert_stays_with_its_rows(rng, device):
    problem = Problem(rng, Case(31, topk=1, unassigned=0.0))
    problem.gate_up[1] = np.nan
    made = problem.run(device)
    first = problem.plan.expert_offsets[1]
    bad = np.zeros(31, bool)
    bad[problem.plan.row_to_token[first : first + problem.plan.tokens_per_expert[1]]] = True
    assert np.isnan(made["out"][bad].astype(np.float32)).all()
    for each in (made["out"][~bad], made["x"][~bad], made["gate_up"][[0, 2]], made["down"][[0, 2]]):
        assert np.isfinite(each.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"gpu": Gpu(100, 148)}, False),
        ({"gpu": Gpu(80, 108)}, False),
        ({"dtype": "float16"}, False),
        ({"hidden": 136}, False),
        ({"inner": 192}, False),
        ({"hidden": 0}, False),
        ({"kernels": None}, False),
    ],
)
def test_the_kernels_are_used_where_they_can_be(changes, expected):
    from .interpreter import NumpyDevice

    options = {"gpu": HOPPER, "dtype": "bfloat16", "hidden": 144, "inner": 128, "kernels": (object(), object())}
    options |= changes
    device = NumpyDevice()
    device.grouped_float8 = options.pop("kernels")
    assert hopper_float8.suits_float8(device, *options.values()) == expected


def test_a_library_without_the_kernels_has_none():
    assert float8_kernels_of(object()) is None


def test_the_structs_mirror_the_header():
    for name, params in (("grouped_float8", GroupedFloat8Params), ("quantize_blocks", QuantizeBlocksParams)):
        assert list(params._fields_) == fields_in_header(f"pmo_{name}_params", "grouped_float8.h")


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("inner", 72, "inner must be a multiple of 16"),
        ("outer", 12, "outer must be a multiple of 8"),
        ("width", 300, "width must be a multiple of 8"),
        ("first_column", 64, "first_column must be a multiple of 128 in the matrix"),
        ("result", 3, "result must be one of pmo_grouped_result"),
        ("result", 1, "outer must be a multiple of 8; of 256 if the result is gated"),
        ("x", 8, "x must be an array at a multiple of 16 bytes"),
        ("x_scales", 0, "x_scales must be an array"),
        ("codes", 1 << 20, "codes must be NULL if the result is plain"),
        ("hidden_codes", 1 << 20, "hidden_codes must be NULL if the result is plain"),
        ("num_rows", -1, "num_rows must be in"),
        ("window_rows", -1, "window_rows must be in"),
        ("tiles", 0, "tiles"),
        ("struct_size", 8, "struct_size must be the size of pmo_grouped_float8_params"),
    ],
)
def test_bad_params_are_refused_before_anything_is_launched(field, value, message):
    assert message in error_of({field: value})


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 1 << 20}, "hidden must be NULL if a gated result has hidden_codes"),
        ({"hidden_scales": 0}, "hidden_scales must be an array"),
        ({"hidden_codes": 8}, "hidden_codes must be an array at a multiple of 16 bytes"),
        ({"amax_min": 0}, "amax_min must be in [2^-100, FLT_MAX]"),
        ({"result": GRADIENT, "width": 256}, "hidden must be an array at a multiple of 16 bytes"),
    ],
)
def test_bad_params_of_a_first_product_in_float8_are_refused(changes, message):
    sizes = {"outer": 256, "result": GATED, "amax_min": bits_of(hopper_float8.AMAX_MIN)}
    assert message in error_of({**sizes, "hidden_codes": 1 << 20, "hidden_scales": 1 << 20, **changes})


def error_of(changes: dict[str, int]) -> str:
    """The library's error for params of a plain product with these changes."""
    library = ctypes.CDLL(os.environ["PMO_CORE_LIBRARY"])
    library.pmo_last_error.restype = ctypes.c_char_p
    sizes = {"num_rows": 4, "num_sources": 4, "num_experts": 1, "inner": 64, "outer": 128, "width": 128}
    names = ("x", "x_scales", "matrix", "matrix_scales", "first", "stop", "tiles", "window", "out", "counters")
    arrays = dict.fromkeys(names, 1 << 20)
    params = GroupedFloat8Params(ctypes.sizeof(GroupedFloat8Params), **sizes, **arrays, window_rows=4)
    for field, value in changes.items():
        setattr(params, field, value)
    assert library.pmo_grouped_float8_cuda(ctypes.byref(params), None) == 1
    return library.pmo_last_error().decode()
