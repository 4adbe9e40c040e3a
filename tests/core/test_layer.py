# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts, chunk by chunk: its choices, and both passes against the oracle. GEMMs are callbacks."""

from __future__ import annotations

import itertools
from ctypes import byref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.reference import Plan, moe_mlp, moe_mlp_backward, route

from .binding import Core, CoreError
from .layer import BACKWARD, FORWARD, H100, H200, Choices, Facts, Kernels, Layer, LayerParams, choices, passes
from .structs import DTYPES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SWAP_AB, PING_PONG = 160, 128  # tile rows
GIB = 1 << 30
# T, d, n, E, K
ERNIE_21B, ERNIE_300B, DSV3 = (16384, 2560, 1536, 64, 6), (16384, 8192, 3584, 64, 8), (4096, 7168, 2048, 256, 8)
SONIC_30B, FEW_TOKENS = (32768, 4096, 256, 256, 16), (64, 2560, 1536, 64, 6)


def of_model(
    core: Core, sizes: tuple[int, ...], which: int, gpu: tuple[int, int] = H100, workspace: int = GIB
) -> Choices:
    tokens, hidden, inner, experts, topk = sizes
    rows = {"num_tokens": tokens, "num_rows": tokens * topk, "num_experts": experts}
    facts = {"hidden": hidden, "inner": inner, "workspace": workspace, "num_sms": gpu[0], "memory_gbps": gpu[1]}
    options = {"dtype": DTYPES[BFLOAT16], "backward": which, "keeps_hidden": 1, "needs_d_weights": which}
    return choices(core, **rows, **facts, **options)


@pytest.mark.parametrize(
    ("sizes", "gpu", "forward", "backward"),
    [
        # chunks of rows (0: gathers), columns of a chunk, tile rows of the GEMM whose rows are summed
        (ERNIE_21B, H100, (0, 2560, SWAP_AB), (1, 2560, SWAP_AB)),
        (ERNIE_21B, H200, (0, 2560, PING_PONG), (1, 2560, SWAP_AB)),
        (ERNIE_300B, H100, (3, 4096, SWAP_AB), (3, 4096, SWAP_AB)),
        (DSV3, H100, (0, 7168, SWAP_AB), (0, 7168, SWAP_AB)),
        (SONIC_30B, H100, (0, 960, PING_PONG), (0, 960, PING_PONG)),
        (FEW_TOKENS, H100, (0, 2560, SWAP_AB), (0, 2560, SWAP_AB)),
    ],
)
def test_choices_for_models(
    core: Core,
    sizes: tuple[int, ...],
    gpu: tuple[int, int],
    forward: tuple[int, int, int],
    backward: tuple[int, int, int],
) -> None:
    for which, expected in ((FORWARD, forward), (BACKWARD, backward)):
        made = of_model(core, sizes, which, gpu)
        assert (made.num_chunks, made.chunk_columns, made.sum_tile_rows) == expected
        assert made.gathers == (made.num_chunks == 0)


def test_a_pass_fits_its_workspace_and_a_buffer_of_few_columns_of_all_rows(core: Core) -> None:
    for sizes, which, workspace in itertools.product((ERNIE_21B, ERNIE_300B, DSV3), (FORWARD, BACKWARD), (1, GIB)):
        made = of_model(core, sizes, which, workspace=workspace)
        rows = sizes[0] * sizes[4]
        assert made.buffer_bytes <= max(workspace, 256 * rows * 2)
        assert made.bytes >= made.buffer_bytes + 2 * rows * sizes[2]


def case(
    tokens: int, hidden: int, inner: int, experts: int, topk: int, seed: int = 0, buffer_size: int = -1
) -> tuple[NDArray, NDArray, Plan, NDArray, NDArray]:
    """x, d_out, plan, gate_up and down; an expert is empty if there are three or more."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk].astype(np.int32)
    if experts > 2:
        ids[ids == 1] = -1
    probs = rng.random(ids.shape).astype(np.float32)
    plan = route(ids, probs, num_experts=experts, padding_alignment=8, buffer_size=buffer_size)

    def normal(*shape: int) -> NDArray:
        return rng.standard_normal(shape).astype(BFLOAT16)

    x, d_out = normal(tokens, hidden), normal(tokens, hidden)
    return x, d_out, plan, normal(experts, hidden, 2 * inner), normal(experts, inner, hidden)


# Small layers gather, and the ping-pong kernel computes summed rows of 512 rows per expert. With n beyond 1536 and more
# than 160 E rows, rows are permuted, in chunks if the workspace is small.
SIZES = [
    *[(63, 8, 8, 7, 3), (700, 24, 16, 1, 1), (1, 24, 16, 1, 1), (40, 264, 8, 3, 2)],
    *[(60, 24, 1544, 1, 1), (400, 8, 1544, 2, 1)],
]


@pytest.mark.parametrize("keeps", [True, False], ids=["keeps H", "recomputes H"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_passes_are_those_of_the_oracle(core: Core, sizes: tuple[int, ...], keeps: bool) -> None:
    x, d_out, plan, gate_up, down = case(*sizes)
    made = passes(core, Layer(plan, gate_up, down, plan.row_probs), x, d_out, keeps)
    out, hidden = moe_mlp(x, plan, gate_up, down, plan.row_probs)
    gradients = moe_mlp_backward(d_out, x, plan, gate_up, down, plan.row_probs)
    pairs = [(made.out, out), (made.d_x, gradients.x), (made.d_gate_up, gradients.gate_up)]
    pairs += [(made.d_down, gradients.down), (made.d_weights, gradients.weights)]
    if keeps:
        pairs.append((made.hidden, hidden))
    for ours, expected in pairs:
        ours, expected = ours.astype(np.float64), expected.astype(np.float64)
        assert np.abs(ours - expected).max() <= 2e-2 * max(np.abs(expected).max(), 1e-30)


@pytest.mark.parametrize(("workspace", "num_chunks"), [(1, 3), (200_000, 2)])
@pytest.mark.parametrize("transpose", [False, True], ids=["as is", "transposed"])
def test_bits_do_not_depend_on_chunks(core: Core, transpose: bool, workspace: int, num_chunks: int) -> None:
    x, d_out, plan, gate_up, down = case(340, 264, 3200, 1, 1, buffer_size=400)
    sizes = {"num_tokens": 340, "num_rows": 400, "num_experts": 1, "hidden": 264, "inner": 3200, "dtype": 2}
    for backward in (0, 1):
        assert choices(core, **sizes, workspace=workspace, backward=backward).num_chunks == num_chunks
    if transpose:
        gate_up, down = (np.ascontiguousarray(each.transpose(0, 2, 1)) for each in (gate_up, down))
    layer = Layer(plan, gate_up, down, plan.row_probs, transpose)
    chunked = layer._replace(workspace=workspace)
    for ours, expected in zip(passes(core, chunked, x, d_out), passes(core, layer, x, d_out), strict=True):
        assert (ours.view(np.uint8) == expected.view(np.uint8)).all()


def test_rows_of_tokens_with_any_stride(core: Core) -> None:
    x, d_out, plan, gate_up, down = case(33, 16, 8, 4, 2)
    layer = Layer(plan, gate_up, down, None)
    wide = [np.full((33, 40), np.nan, BFLOAT16) for _ in range(2)]
    for each, rows in zip(wide, (x, d_out), strict=True):
        each[:, 8:24] = rows
    made = passes(core, layer, wide[0][:, 8:24], wide[1][:, 8:24])
    for ours, expected in zip(made, passes(core, layer, x, d_out), strict=True):
        assert (ours.view(np.uint8) == expected.view(np.uint8)).all()


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_layer_without_rows(core: Core, tokens: int) -> None:
    x, d_out, plan, gate_up, down = case(5, 16, 8, 4, 2, buffer_size=0)
    if tokens == 0:
        x, d_out, plan, gate_up, down = case(0, 16, 8, 4, 2)
    made = passes(core, Layer(plan, gate_up, down, plan.row_probs), x, d_out)
    for each in (made.out, made.d_x, made.d_gate_up, made.d_down):
        assert not each.astype(np.float32).any()


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"hidden": 12}, "hidden"),
        ({"inner": 0}, "inner"),
        ({"workspace": 0}, "workspace"),
        ({"dtype": 0}, "dtype"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_rows": -1}, "num_rows"),
        ({"struct_size": 8}, "struct_size"),
    ],
    ids=lambda value: str(value),
)
def test_facts_that_no_layer_has_are_refused(core: Core, bad: dict[str, int], name: str) -> None:
    good = {"num_tokens": 4, "num_rows": 8, "num_experts": 2, "hidden": 16, "inner": 8, "workspace": 1, "dtype": 2}
    choices(core, **good)
    with pytest.raises(CoreError, match=f"^INVALID_ARGUMENT: {name} must be"):
        choices(core, **{**good, **bad})


def test_float16(core: Core) -> None:
    x, d_out, plan, gate_up, down = case(33, 16, 8, 4, 2)
    x, d_out, gate_up, down = (each.astype(np.float16) for each in (x, d_out, gate_up, down))
    made = passes(core, Layer(plan, gate_up, down, plan.row_probs), x, d_out)
    out, _ = moe_mlp(x, plan, gate_up, down, plan.row_probs)
    assert np.abs(made.out.astype(np.float64) - out.astype(np.float64)).max() <= 2e-3 * np.abs(out).max()


def test_a_forward_pass_needs_no_memory_for_gradients(core: Core) -> None:
    sizes = {"num_tokens": 40, "num_rows": 80, "num_experts": 2, "hidden": 16, "inner": 136, "workspace": 1, "dtype": 2}
    forward = choices(core, **sizes).bytes
    assert choices(core, **sizes, needs_d_weights=1).bytes == forward
    backward = choices(core, **sizes, backward=1, keeps_hidden=1).bytes
    assert backward == forward
    of_hidden = choices(core, **sizes, backward=1).bytes - backward
    assert of_hidden == -(-80 * 2 * 136 * 2 // 256) * 256
    of_dots = choices(core, **sizes, backward=1, keeps_hidden=1, needs_d_weights=1).bytes - backward
    assert of_dots == -(-80 * 2 * 4 // 256) * 256  # two tiles of 128 columns


def call(core: Core, facts: Facts | None, params: LayerParams | None, kernels: Kernels | None) -> None:
    """The call itself, whose checks come first."""
    core.check(
        core.library.pmo_layer_run(*(None if each is None else byref(each) for each in (facts, params, kernels)), None)
    )


def test_a_missing_struct_is_refused(core: Core) -> None:
    structs: list[Any] = [Facts(), LayerParams(), Kernels()]
    for number in range(3):
        given = [None if place == number else each for place, each in enumerate(structs)]
        with pytest.raises(CoreError, match="facts, params and kernels must be given"):
            call(core, *given)


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"sizes_kind": 7}, "sizes_kind"),
        ({"offsets_kind": 7}, "sizes_kind"),
        ({"x": 8}, "x"),
        ({"x_row_stride": 12}, "x"),
        ({"x_row_stride": 8}, "x"),
        ({"d_out": 8}, "d_out"),
        ({"gate_up": None}, "gate_up"),
        ({"down": 4}, "down"),
        ({"hidden": None}, "hidden"),
        ({"d_weights": None}, "d_weights"),
        ({"workspace": None}, "workspace"),
        ({"struct_size": 8}, "struct_size"),
        ({"slots_per_token": -1}, "slots_per_token"),
    ],
    ids=lambda value: str(value),
)
def test_params_that_lead_out_of_their_arrays_are_refused(core: Core, bad: dict[str, Any], name: str) -> None:
    sizes = {"num_tokens": 4, "num_rows": 8, "num_experts": 2, "hidden": 16, "inner": 8, "workspace": 1, "dtype": 2}
    facts = Facts(**sizes, backward=1, keeps_hidden=1, needs_d_weights=1)
    numbers: dict[str, Any] = {"x_row_stride": 16, "d_out_row_stride": 16, "slots_per_token": 2}
    pointers: dict[str, Any] = dict.fromkeys(("x", "d_out", "gate_up", "down", "hidden", "d_weights", "workspace"), 16)
    for field, value in bad.items():
        (pointers if field in pointers else numbers)[field] = value
    params = LayerParams(**numbers)
    params.point_at(**{field: value or 0 for field, value in pointers.items()})
    with pytest.raises(CoreError, match=f"^INVALID_ARGUMENT: {name} must be"):
        call(core, facts, params, Kernels())
