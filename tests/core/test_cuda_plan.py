# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The plans of CUDA launches for many GPUs, without one: they fit the GPU, and cover the work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from .cases import EXAMPLES
from .compiling import CSRC, compile_cpp
from .operators.quantize import QuantizeParams

pytestmark = [pytest.mark.cpu_only, pytest.mark.own_program]

INT32_MAX = 2**31 - 1
WARP = 32
BLOCK_THREADS = 416
STATIC_SHARED, RESERVED_SHARED = 256, 1024
NONE, _, BULK = range(3)  # how rows are moved

LIBRARY = r"""
#include <algorithm>
#include <initializer_list>

#include "cuda/moe/fused_plan.h"
#include "cuda/moe/quantize_plan.h"

using namespace pmo::cuda;

static FusedSizes sizes_of(const int64_t* values) {
  FusedSizes sizes;
  sizes.num_tokens = values[0];
  sizes.topk = values[1];
  sizes.num_rows = values[2];
  sizes.num_experts = values[3];
  sizes.row_bytes = values[4];
  sizes.scale_bytes = values[5];
  sizes.fill = values[6] != 0;
  sizes.has_slot_to_row = values[7] != 0;
  return sizes;
}

static void put(std::initializer_list<int64_t> values, int64_t* out) { std::copy(values.begin(), values.end(), out); }

extern "C" void fused(const int* gpu, const int64_t* sizes, int64_t* out) {
  const FusedPlan p = plan_fused({gpu[0], gpu[1], gpu[2], gpu[3], gpu[4], gpu[5]}, sizes_of(sizes));
  put({p.fits, int64_t(p.move), p.blocks, p.cooperative, p.counts_everything, p.cleaned_in_shared, p.local_slots,
       p.pieces_per_token, p.piece_bytes, p.pieces_per_stage, p.num_stages, p.stage_bytes, p.shared_bytes},
      out);
}

extern "C" void few_slots(const int64_t* sizes, int64_t padding_alignment, int64_t* out) {
  const FewSlotsPlan p = plan_few_slots(sizes_of(sizes), padding_alignment);
  put({p.fits, p.threads, p.parts, p.blocks}, out);
}

extern "C" int turns(const pmo_quantize_params* params) { return transposes_scales(*params); }
"""


class Gpu(NamedTuple):
    major: int
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    registers_per_multiprocessor: int = 65536


KIB = 1024
GPUS = {
    "sm_75 T4": Gpu(7, 40, 64 * KIB, 64 * KIB, 1024),
    "sm_80 A100": Gpu(8, 108, 163 * KIB, 164 * KIB, 2048),
    "sm_80 A30, a slice": Gpu(8, 14, 163 * KIB, 164 * KIB, 2048),
    "sm_86 A10": Gpu(8, 72, 99 * KIB, 100 * KIB, 1536),
    "sm_87 Orin": Gpu(8, 16, 163 * KIB, 164 * KIB, 1536),
    "sm_89 L40S": Gpu(8, 142, 99 * KIB, 100 * KIB, 1536),
    "sm_90 H100": Gpu(9, 132, 227 * KIB, 228 * KIB, 2048),
    "sm_90 H20": Gpu(9, 78, 227 * KIB, 228 * KIB, 2048),
    "sm_100 B200": Gpu(10, 148, 227 * KIB, 228 * KIB, 2048),
    "sm_103 B300": Gpu(10, 160, 227 * KIB, 228 * KIB, 2048),
    "sm_110 Thor": Gpu(11, 20, 227 * KIB, 228 * KIB, 1536),
    "sm_120 RTX 5090": Gpu(12, 170, 99 * KIB, 100 * KIB, 1536),
    "sm_121 GB10": Gpu(12, 48, 99 * KIB, 100 * KIB, 1536),
}
H100 = GPUS["sm_90 H100"]


class Sizes(NamedTuple):
    tokens: int
    topk: int
    rows: int
    experts: int = 0
    row_bytes: int = 0
    scale_bytes: int = 0
    fill: bool = True
    has_slot_to_row: bool = True


class Plan(NamedTuple):
    fits: int
    move: int
    blocks: int
    cooperative: int
    counts_everything: int
    cleaned_in_shared: int
    local_slots: int
    pieces_per_token: int
    piece_bytes: int
    pieces_per_stage: int
    num_stages: int
    stage_bytes: int
    shared_bytes: int


class FewSlots(NamedTuple):
    fits: int
    threads: int
    parts: int
    blocks: int


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    return ctypes.CDLL(str(compile_cpp(tmp_path_factory.mktemp("plan") / "plan.so", LIBRARY, *options)))


@pytest.fixture(scope="module")
def plan_of(library: ctypes.CDLL) -> Callable[[Gpu, Sizes], Plan]:
    def plan(gpu: Gpu, sizes: Sizes) -> Plan:
        out = (ctypes.c_int64 * len(Plan._fields))()
        library.fused((ctypes.c_int * len(gpu))(*gpu), (ctypes.c_int64 * len(sizes))(*sizes), out)
        return Plan(*out)

    return plan


@pytest.fixture(scope="module")
def few_slots_of(library: ctypes.CDLL) -> Callable[..., FewSlots]:
    def plan(sizes: Sizes, padding_alignment: int = 1) -> FewSlots:
        out = (ctypes.c_int64 * len(FewSlots._fields))()
        library.few_slots((ctypes.c_int64 * len(sizes))(*sizes), ctypes.c_int64(padding_alignment), out)
        return FewSlots(*out)

    return plan


def resident_blocks(gpu: Gpu, sizes: Sizes, plan: Plan) -> int:
    """Blocks that a multiprocessor holds at once; a thread has 72 registers, or 48 if no rows are moved."""
    registers = BLOCK_THREADS * (72 if sizes.row_bytes else 48)
    shared = plan.shared_bytes + STATIC_SHARED + RESERVED_SHARED
    return min(
        gpu.threads_per_multiprocessor // BLOCK_THREADS,
        gpu.registers_per_multiprocessor // registers,
        gpu.shared_per_multiprocessor // shared,
    )


def check_limits(gpu: Gpu, sizes: Sizes, plan: Plan) -> None:
    assert plan.shared_bytes + STATIC_SHARED <= gpu.shared_per_block
    assert 1 <= plan.blocks <= 512
    if plan.cooperative:
        room = gpu.multiprocessors * resident_blocks(gpu, sizes, plan)
        assert plan.blocks <= room
        assert sizes.row_bytes or 4 * plan.blocks <= 3 * room  # kernels of collectives stay on the rest
    scratch = 0
    if sizes.experts:
        histograms = 0 if plan.counts_everything else 12 * sizes.experts
        scratch = 4 * (4 * sizes.experts + 3 + histograms + plan.local_slots)
        assert plan.counts_everything or plan.cooperative
        assert plan.counts_everything or plan.pieces_per_token == 1
        assert plan.counts_everything or sizes.has_slot_to_row
    assert plan.stage_bytes + scratch == plan.shared_bytes
    assert plan.stage_bytes % 128 == 0


def check_coverage(sizes: Sizes, plan: Plan) -> None:
    """As the kernel shares pieces out over its blocks, and each block over its stages."""
    pieces = sizes.tokens * plan.pieces_per_token
    each, rest = divmod(pieces, plan.blocks)
    block = np.arange(plan.blocks)
    first = block * each + np.minimum(block, rest)
    last = first + each + (block < rest)
    assert first[0] == 0
    assert last[-1] == pieces
    assert (first[1:] == last[:-1]).all()
    tokens = np.where(last > first, -(-last // plan.pieces_per_token) - first // plan.pieces_per_token, 0)
    if plan.counts_everything or plan.cleaned_in_shared:
        assert tokens.max() * sizes.topk <= plan.local_slots
    if not sizes.row_bytes:
        return
    assert plan.piece_bytes % 16 == 0
    assert plan.piece_bytes >= min(512, sizes.row_bytes)
    assert (plan.pieces_per_token - 1) * plan.piece_bytes < sizes.row_bytes <= plan.pieces_per_token * plan.piece_bytes
    assert plan.pieces_per_stage * plan.num_stages >= (last - first).max()
    assert plan.pieces_per_stage * (plan.piece_bytes + sizes.scale_bytes) <= plan.stage_bytes


def check_32_bits(sizes: Sizes, plan: Plan) -> None:
    """Assert that the kernels' int counters stay in range, also after a loop's last step."""
    assert sizes.tokens + 5 * 12 * WARP <= INT32_MAX
    assert sizes.tokens * plan.pieces_per_token + plan.pieces_per_stage * plan.num_stages <= INT32_MAX
    assert plan.pieces_per_stage * sizes.topk + WARP <= INT32_MAX


def check(gpu: Gpu, sizes: Sizes, plan: Plan) -> None:
    if not plan.fits:
        return
    check_limits(gpu, sizes, plan)
    check_coverage(sizes, plan)
    check_32_bits(sizes, plan)


TOO_LITTLE_ROOM = {
    "776 experts": Sizes(4096, 8, 32768, 776, 4096),
    "664 experts, many tokens": Sizes(80000, 8, 640000, 664, 4096),
    "scales of 16 KiB": Sizes(4096, 8, 32768, 320, 16384, 16384),
    "scales of 16 KiB, routing given": Sizes(4096, 8, 32768, 0, 16384, 16384),
    "a few hundred bytes for a piece": Sizes(100, 8, 4096, 1024, 16384, 16384),
    "1024 experts": Sizes(4096, 8, 32768, 1024, 14336),
    "the longest row": Sizes(3, 2, 12, 0, 2**30),
    "the longest row and scales": Sizes(3, 2, 12, 1024, 2**30, 16384),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("sizes", TOO_LITTLE_ROOM)
def test_where_rows_find_little_room_a_plan_is_made_all_the_same(plan_of: Any, gpu: str, sizes: str) -> None:
    plan = plan_of(GPUS[gpu], TOO_LITTLE_ROOM[sizes])
    check(GPUS[gpu], TOO_LITTLE_ROOM[sizes], plan)
    if GPUS[gpu].major < 9:
        assert not plan.fits  # rows move by bulk copies


@st.composite
def any_sizes(draw: st.DrawFn) -> Sizes:
    """Sizes that fused_routes and fused_moves accept."""

    def up_to(limit: int) -> int:
        """Any magnitude is as likely as any other."""
        return draw(st.integers(1, limit)) >> draw(st.integers(0, max(0, limit.bit_length() - 2))) or 1

    routes = draw(st.booleans())
    experts = up_to(1024) if routes else 0
    topk = up_to(32 if routes else INT32_MAX)
    tokens = up_to(max(1, (INT32_MAX - experts) // topk))
    if draw(st.booleans()):
        tokens = max(1, (INT32_MAX - experts) // topk - up_to(5000) + 1)  # about as many as there may be
    moves = not routes or draw(st.booleans())
    return Sizes(
        tokens,
        topk,
        draw(st.sampled_from([tokens * topk, up_to(INT32_MAX), INT32_MAX])),
        experts,
        16 * up_to(2**26) if moves else 0,
        draw(st.sampled_from([0, 16, 80, 224, 16 * up_to(1024), 16384])) if moves else 0,
        draw(st.booleans()),
        tokens * topk > 1024 or draw(st.booleans()),
    )


@EXAMPLES
@given(gpu=st.sampled_from(sorted(GPUS)), sizes=any_sizes())
@example(gpu="sm_90 H100", sizes=Sizes(1, 2**30, 8, 0, 2**25))
@example(gpu="sm_90 H100", sizes=Sizes(INT32_MAX - 1, 1, 7, 1))
def test_plans_fit_the_gpu_and_cover_the_work(plan_of: Any, gpu: str, sizes: Sizes) -> None:
    for name in (gpu, "sm_90 H100", "sm_120 RTX 5090"):
        check(GPUS[name], sizes, plan_of(GPUS[name], sizes))


@pytest.mark.parametrize("gpu", [name for name in GPUS if GPUS[name].major > 7])
@pytest.mark.parametrize("tokens", [1000, 153962])
@pytest.mark.parametrize("experts", [8, 256, 1024])
def test_routing_takes_one_launch_on_every_gpu(plan_of: Any, gpu: str, experts: int, tokens: int) -> None:
    sizes = Sizes(tokens, 10, 10 * tokens, experts)
    plan = plan_of(GPUS[gpu], sizes)
    assert plan.fits
    assert plan.cooperative
    check(GPUS[gpu], sizes, plan)


def test_routing_uses_three_quarters_of_the_blocks_that_fit(plan_of: Any) -> None:
    def per_multiprocessor(gpu: str, experts: int, tokens: int = 153962) -> float:
        return plan_of(GPUS[gpu], Sizes(tokens, 10, 10 * tokens, experts)).blocks / GPUS[gpu].multiprocessors

    assert per_multiprocessor("sm_90 H100", 1024) == 2.25
    assert per_multiprocessor("sm_90 H100", 1024, tokens=16384) == 2
    assert per_multiprocessor("sm_80 A100", 256) == 2.25
    assert per_multiprocessor("sm_80 A100", 1024) == 1.5
    assert per_multiprocessor("sm_89 L40S", 256) == pytest.approx(2.25, abs=0.01)
    assert per_multiprocessor("sm_89 L40S", 1024) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(INT32_MAX - 1, 1, 7, 1),
        Sizes(INT32_MAX - 4000, 1, 7, 1),
        Sizes(INT32_MAX - 1, 1, INT32_MAX, 0, 8192),
        Sizes(1, 2**30, 8, 0, 2**25),  # three pieces to a stage, each with 2^30 slots
        Sizes(1, INT32_MAX, 2**15, 0, 8192),
    ],
    ids=str,
)
def test_what_does_not_fit_32_bits_is_left_to_another_way(plan_of: Any, sizes: Sizes) -> None:
    assert not plan_of(H100, sizes).fits
    smaller = sizes._replace(tokens=max(1, sizes.tokens // 4), topk=max(1, sizes.topk // 4))
    if sizes.rows >= 4 * smaller.tokens or sizes.experts:
        assert plan_of(H100, smaller).fits


# On an H100 the plans that were measured (docs/kernels.md), as they were then.
MEASURED = {
    Sizes(16384, 8, 131072, 64, 16384): Plan(1, BULK, 264, 1, 0, 1, 512, 1, 16384, 6, 11, 98304, 104460),
    Sizes(4096, 8, 32768, 256, 14336): Plan(1, BULK, 264, 1, 0, 1, 136, 1, 14336, 6, 3, 86016, 102956),
    Sizes(16384, 6, 98304, 64, 5120): Plan(1, BULK, 264, 1, 0, 1, 384, 1, 5120, 21, 3, 107520, 113164),
    Sizes(4096, 8, 32768, 256, 7168, 224): Plan(1, BULK, 264, 1, 0, 1, 136, 1, 7168, 8, 2, 59136, 76076),
    Sizes(16384, 8, 131072, 0, 16384): Plan(1, BULK, 264, 1, 0, 0, 0, 1, 16384, 7, 9, 114688, 114688),
    Sizes(4096, 8, 32768, 0, 14336): Plan(1, BULK, 264, 1, 0, 0, 0, 1, 14336, 8, 2, 114688, 114688),
    Sizes(153962, 10, 217000, 8): Plan(1, NONE, 297, 1, 0, 0, 0, 1, 0, 0, 1, 0, 524),
    Sizes(4096, 8, 32768, 256): Plan(1, NONE, 264, 1, 0, 1, 136, 1, 0, 0, 1, 0, 16940),
    Sizes(128, 8, 1040, 128, 14336): Plan(1, BULK, 264, 0, 1, 0, 16, 2, 7168, 1, 1, 7168, 9292),
}


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_measured_plans_stay(plan_of: Any, sizes: Sizes) -> None:
    assert plan_of(H100, sizes) == MEASURED[sizes]


# ---- few slots


def check_few_slots(sizes: Sizes, plan: FewSlots) -> None:
    if not plan.fits:
        return
    assert plan.threads in (128, 256)
    assert plan.parts * plan.threads * 4 >= sizes.row_bytes // 16  # a thread holds four accesses
    assert plan.blocks > sizes.tokens * plan.parts  # one counts
    assert sizes.tokens * 8 < 2**15  # 16 bits, with a sign
    step = plan.threads // WARP * (plan.blocks - 1)
    first_row = sizes.tokens * sizes.topk + step
    assert max(first_row, sizes.rows - 1 + step) <= INT32_MAX


@EXAMPLES
@given(
    tokens=st.integers(1, 800),
    topk=st.integers(1, 9),
    rows=st.one_of(st.integers(1, 10000), st.integers(INT32_MAX - 10000, INT32_MAX)),
    row_bytes=st.integers(0, 26).map(lambda bits: 16 << bits) | st.just(0),
    padding_alignment=st.sampled_from([1, 16]),
)
def test_few_slots_are_covered_and_their_padding_ends(
    few_slots_of: Any, tokens: int, topk: int, rows: int, row_bytes: int, padding_alignment: int
) -> None:
    sizes = Sizes(tokens, topk, rows, 64, row_bytes)
    plan = few_slots_of(sizes, padding_alignment)
    check_few_slots(sizes, plan)
    usual = padding_alignment == 1 and topk <= 8 and tokens <= (768 if row_bytes else 576)
    assert plan.fits == (usual and (rows <= 10000 or max(tokens * 8, rows) + 2 * step_of(plan) <= INT32_MAX))


def step_of(plan: FewSlots) -> int:
    return plan.threads // WARP * plan.blocks


def test_few_slots_with_almost_2_to_the_31_rows_go_another_way(few_slots_of: Any, plan_of: Any) -> None:
    sizes = Sizes(3, 2, INT32_MAX, 7)
    assert not few_slots_of(sizes).fits
    assert plan_of(H100, sizes).fits
    assert few_slots_of(sizes._replace(rows=INT32_MAX - 10000)).fits


# ---- scales that are turned


def test_column_major_scales_without_slots_are_not_turned(library: ctypes.CDLL) -> None:
    """Turning looks at the tokens of rows; without slots there is only padding, which needs no workspace."""
    workspace = ctypes.create_string_buffer(1 << 16)

    def turns(**fields: int) -> bool:
        given = {"num_tokens": 5, "topk": 2, "num_rows": 16, "hidden": 512, "scale_layout": 1, **fields}
        params = QuantizeParams(workspace_bytes=len(workspace), **given)
        params.workspace = ctypes.addressof(workspace)
        return bool(library.turns(ctypes.byref(params)))

    assert turns()
    assert not turns(num_tokens=0)
    assert not turns(topk=0)
    assert not turns(scale_layout=0)
    assert not turns(ue8m0=1)
    assert not turns(num_tokens=1 << 14)  # the workspace is too small
