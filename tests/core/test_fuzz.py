# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Random params structs: whatever a caller passes, a call returns a status and stays inside the arrays it was given.

Arrays always hold what the sizes of the struct say, as only the caller can know that. All else is random: sizes beyond
the limits, enums, missing and misaligned arrays, short workspaces, maps full of rows and ids that do not exist. Under
the sanitizers a read out of bounds fails as well. ``--fuzz-cases`` says how many structs each operator gets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from . import structs
from .binding import Core, CoreError
from .guards import MakeOutput, guarded_outputs
from .structs import Params, Status, TopkBackwardParams, TopkParams

INVALID_SIZES = (-1, -(2**31), -(2**63), 2**31, 2**40, 2**62, 2**63 - 1)
ODD_INTS = (-(2**31), -7, -2, 2**31 - 1)
WIDEST = 4  # bytes per element: with any dtype the rows stay inside their arrays


class Sizes:
    """Small random sizes; often 0."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.T, self.K, self.N, self.H, self.S = (int(rng.integers(0, top)) for top in (9, 6, 20, 40, 4))
        self.E = int(rng.integers(1, 10))


def ints(rng: np.random.Generator, shape: tuple[int, ...], limit: int, dtype: type = np.int32) -> NDArray:
    """Mostly usable indices below the limit, some -1, some that lead nowhere."""
    values = rng.integers(0, max(limit, 1), shape)
    kind = rng.random(shape)
    values = np.where(kind < 0.3, -1, values)
    odd = rng.choice([*ODD_INTS, limit], shape)
    return np.where(kind > 0.85, odd, values).astype(dtype)


def data(rng: np.random.Generator, rows: int, columns: int) -> NDArray:
    """Rows of any bits, wide enough for every dtype."""
    return rng.integers(0, 256, (rows, columns * WIDEST), np.uint8).view(np.float32).reshape(rows, columns)


def route(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    columns = max(s.K, s.E)
    routing = ints(rng, (s.T, columns), s.E, np.int64)
    params = structs.RouteParams(
        num_tokens=s.T,
        topk=s.K,
        num_experts=s.E,
        padding_alignment=int(rng.integers(1, 6)),
        num_rows=s.N,
        routing=routing,
        probs=data(rng, s.T, columns),
        routing_kind=int(rng.integers(0, 3)),
        duplicates=int(rng.integers(0, 2)),
        checks=int(rng.integers(0, 32)) if rng.random() < 0.3 else 0,
        num_threads=int(rng.integers(0, 4)),
        routed_per_expert=output(s.E, np.int32),
        expected_per_expert=ints(rng, (s.E,), 5),
        slot_to_row=output((s.T, s.K), np.int32),
        token_rows=output((s.T, s.K), np.int32),
        row_to_token=output(s.N, np.int32),
        row_to_slot=output(s.N, np.int32),
        row_to_expert=output(s.N, np.int32),
        row_probs=output(s.N, np.float32),
        tokens_per_expert=output(s.E, np.int32),
        expert_offsets=output(s.E + 1, np.int32),
        overflow=output(1, np.int32),
        rowmap=output((s.T, s.E), np.int32),
    )
    core.route_workspace(params)
    return params


def clean_rowmap(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    return structs.CleanRowmapParams(
        num_tokens=s.T,
        topk=s.K,
        num_experts=s.E,
        num_rows=s.N,
        rowmap=ints(rng, (s.T, s.E), s.N),
        ids=ints(rng, (s.T, s.K), s.E, np.int64),
        row_values=rng.random(s.N, np.float32),
        ids_kind=int(rng.integers(0, 2)),
        duplicates=int(rng.integers(0, 2)),
        checks=int(rng.integers(0, 4)) if rng.random() < 0.3 else 0,
        token_rows=output((s.T, s.E), np.int32),
        row_to_token=output(s.N, np.int32),
        slot_to_row=output((s.T, s.K), np.int32),
        slot_values=output((s.T, s.K), np.float32),
    )


def clean_rowmap_by_expert(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    return structs.CleanRowmapParams(
        num_tokens=s.T,
        topk=s.E,
        num_experts=s.E,
        num_rows=s.N,
        rowmap=ints(rng, (s.T, s.E), s.N),
        checks=int(rng.integers(0, 4)) if rng.random() < 0.3 else 0,
        token_rows=output((s.T, s.E), np.int32),
        row_to_token=output(s.N, np.int32),
        slot_to_row=output((s.T, s.E), np.int32),
        row_to_slot=output(s.N, np.int32),
        row_to_expert=output(s.N, np.int32),
    )


def row_id_map(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    """What either direction writes may be read by the other."""
    s = Sizes(rng)
    return structs.RowIdMapParams(
        num_tokens=s.T,
        topk=s.K,
        num_experts=s.E,
        num_rows=s.N,
        token_rows=ints(rng, (s.T, s.K), s.N),
        row_to_expert=ints(rng, (s.N,), s.E),
        pad_offsets=rng.choice([0, 3, -3, *ODD_INTS], s.E).astype(np.int32),
        row_id_map=ints(rng, (s.T, 2 * s.E + 1), max(s.N, s.E)),
        rowmap=output((s.T, s.E), np.int32),
        num_threads=int(rng.integers(0, 4)),
    )


def slots(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    return structs.SlotsParams(
        num_tokens=s.T,
        topk=s.K,
        num_experts=s.E if rng.random() < 0.5 else 0,
        num_rows=s.N,
        slot_to_row=ints(rng, (s.T, s.K), s.N),
        row_to_expert=ints(rng, (s.N,), s.E),
        row_values=output(s.N, np.float32),
        slot_values=output((s.T, max(s.K, s.E)), np.float32),
        accumulate=int(rng.integers(0, 2)),
    )


def permute(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    return structs.PermuteParams(
        num_tokens=s.T,
        topk=s.K,
        num_rows=s.N,
        hidden=s.H,
        scale_cols=s.S,
        x=data(rng, s.T, s.H),
        x_row_stride=s.H,
        scale=data(rng, s.T, s.S),
        scale_row_stride=s.S,
        slot_to_row=ints(rng, (s.T, s.K), s.N),
        row_to_token=ints(rng, (s.N,), s.T),
        rows=output((s.N, s.H), np.float32),
        row_scales=output((s.N, s.S), np.float32),
        dtype=int(rng.integers(0, 6)),
        scale_dtype=int(rng.integers(0, 6)),
        fill=int(rng.integers(0, 4)),
    )


def unpermute(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    weights = int(rng.integers(s.N, s.N + 10))
    return structs.UnpermuteParams(
        num_tokens=s.T,
        max_rows_per_token=s.K,
        num_rows=s.N,
        num_weights=weights,
        hidden=s.H,
        rows=data(rng, s.N, s.H),
        rows_row_stride=s.H,
        token_rows=ints(rng, (s.T, s.K), s.N),
        weights=data(rng, 1, weights)[0],
        weight_index=ints(rng, (s.N,), weights),
        out=output((s.T, s.H), np.float32),
        dtype=int(rng.integers(0, 3)),
        copy_single_row=int(rng.integers(0, 2)),
    )


def unpermute_backward(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    weights = int(rng.integers(s.N, s.N + 10))
    return structs.UnpermuteBackwardParams(
        num_tokens=s.T,
        max_rows_per_token=s.K,
        num_rows=s.N,
        num_weights=weights,
        hidden=s.H,
        d_out=data(rng, s.T, s.H),
        d_out_row_stride=s.H,
        rows=data(rng, s.N, s.H),
        rows_row_stride=s.H,
        token_rows=ints(rng, (s.T, s.K), s.N),
        row_to_token=ints(rng, (s.N,), s.T),
        weights=data(rng, 1, weights)[0],
        weight_index=ints(rng, (s.N,), weights),
        d_rows=output((s.N, s.H), np.float32),
        d_weights=output(weights, np.float32),
        dtype=int(rng.integers(0, 3)),
        copy_single_row=int(rng.integers(0, 2)),
    )


def sort_chunks(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    chunks = int(rng.integers(0, 12))
    # mostly sizes that fit; the kinds are drawn apart, so the arrays are as wide as either needs
    return structs.SortChunksParams(
        num_rows=s.N,
        num_chunks=chunks,
        hidden=s.H,
        x=data(rng, s.N, s.H),
        x_row_stride=s.H,
        split_sizes=ints(rng, (chunks,), 2 + s.N // (chunks + 1), np.int64),
        order=ints(rng, (chunks,), chunks, np.int64),
        probs=data(rng, 1, s.N)[0],
        out=output((s.N, s.H), np.float32),
        probs_out=output(s.N, np.float32),
        source_to_dest=output(s.N, np.int32),
        dtype=int(rng.integers(0, 6)),
        split_sizes_kind=int(rng.integers(0, 2)),
        order_kind=int(rng.integers(0, 2)),
        inverse=int(rng.integers(0, 2)),
        checks=int(rng.integers(0, 4)) if rng.random() < 0.3 else 0,
        num_threads=int(rng.integers(0, 4)),
    )


def quantize(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    hidden = int(rng.choice([s.H, s.H * 16]))
    has_map = rng.random() < 0.7
    num_rows = s.N if has_map else s.T
    groups = -(-hidden // 128)
    return structs.QuantizeParams(
        num_tokens=s.T,
        topk=s.K if has_map else 1,
        num_rows=num_rows,
        hidden=hidden,
        x=data(rng, s.T, hidden),
        x_row_stride=hidden,
        slot_to_row=ints(rng, (s.T, s.K), s.N) if has_map else None,
        row_to_token=ints(rng, (s.N,), s.T) if has_map else None,
        codes=output((num_rows, hidden), np.uint8),
        scales=output((num_rows + 3, groups), np.float32),
        dtype=int(rng.integers(0, 3)),
        ue8m0=int(rng.integers(0, 2)),
        scale_layout=int(rng.integers(0, 2)),
        fill=int(rng.integers(0, 4)),
        amax_min=float(rng.choice([2.0**-100, 1e-4, 1e30])),
        num_threads=int(rng.integers(0, 4)),
        workspace=np.empty(s.T * groups, np.float32),
        workspace_bytes=s.T * groups * 4,
    )


def dequantize(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    hidden = int(rng.choice([s.H, s.H * 16]))
    return structs.DequantizeParams(
        num_rows=s.N,
        hidden=hidden,
        codes=data(rng, s.N, hidden),
        codes_row_stride=hidden,
        scales=data(rng, s.N + 3, -(-hidden // 128)),
        out=output((s.N, hidden), np.float32),
        dtype=int(rng.integers(0, 3)),
        ue8m0=int(rng.integers(0, 2)),
        scale_layout=int(rng.integers(0, 2)),
        num_threads=int(rng.integers(0, 4)),
    )


def topk(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    groups, size = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    experts, kept = groups * size, int(rng.integers(1, groups + 1))
    topk = int(rng.integers(1, kept * size + 1))
    return TopkParams(
        num_tokens=s.T,
        topk=topk,
        num_experts=experts,
        num_groups=groups,
        topk_groups=kept,
        scores_per_group=int(rng.integers(1, 5)),
        gating=data(rng, s.T, experts),
        gating_row_stride=experts,
        correction_bias=data(rng, 1, experts)[0],
        weights=output((s.T, topk), np.float32),
        ids=output((s.T, topk), np.int64),
        scores=output((s.T, experts), np.float32),
        scaling_factor=2.0,
        **router_flags(rng),
    )


def topk_backward(rng: np.random.Generator, output: MakeOutput, core: Core) -> Params:
    s = Sizes(rng)
    return TopkBackwardParams(
        num_tokens=s.T,
        topk=s.K,
        num_experts=s.E,
        gating=data(rng, s.T, s.E),
        gating_row_stride=s.E,
        ids=ints(rng, (s.T, s.K), s.E, np.int64),
        d_weights=data(rng, s.T, s.K),
        d_scores=data(rng, s.T, s.E),
        d_gating=output((s.T, s.E), np.float32),
        scaling_factor=2.0,
        **router_flags(rng),
    )


def router_flags(rng: np.random.Generator) -> dict[str, int]:
    flags = {name: int(rng.integers(0, 2)) for name in ("use_sigmoid", "pre_act", "renormalize")}
    return {"dtype": int(rng.integers(0, 3)), "num_threads": int(rng.integers(0, 4)), **flags}


TARGETS: dict[str, tuple[tuple[str, ...], Callable[[np.random.Generator, MakeOutput, Core], Params]]] = {
    "route": (("route_count", "route"), route),
    "clean_rowmap": (("clean_rowmap",), clean_rowmap),
    "clean_rowmap_by_expert": (("clean_rowmap",), clean_rowmap_by_expert),
    "make_row_id_map": (("make_row_id_map",), row_id_map),
    "read_row_id_map": (("read_row_id_map",), row_id_map),
    "gather_slots": (("gather_slots",), slots),
    "scatter_slots": (("scatter_slots",), slots),
    "permute": (("permute",), permute),
    "unpermute": (("unpermute",), unpermute),
    "unpermute_backward": (("unpermute_backward",), unpermute_backward),
    "sort_chunks": (("sort_chunks",), sort_chunks),
    "quantize": (("quantize",), quantize),
    "dequantize": (("dequantize",), dequantize),
    "topk": (("topk",), topk),
    "topk_backward": (("topk_backward",), topk_backward),
}


def spoil(rng: np.random.Generator, params: Params, name: str, kind: type) -> None:
    """Change a field in a way that gives nobody the right to a stray access."""
    value = getattr(params, name)
    if kind is ctypes.c_int64:
        smaller = int(rng.integers(0, max(value, 0) + 1))
        # a longer stride or workspace than there is would lead out of the array, and nothing could tell
        only_smaller = name.endswith("_stride") or name == "workspace_bytes" or rng.random() < 0.5
        setattr(params, name, smaller if only_smaller else int(rng.choice(INVALID_SIZES)))
    elif kind is ctypes.c_int32:
        # a wider dtype than the four bytes at hand does not exist
        setattr(params, name, int(rng.choice([*ODD_INTS, -1, 0, 1, 2, 3, 64])))
    elif kind is ctypes.c_float:
        setattr(params, name, float(rng.choice([np.nan, np.inf, -1.0, 0.0, 1e-40, 1.0])))
    elif kind is ctypes.c_void_p or rng.random() < 0.5 or name not in params.arrays:
        setattr(params, name, None)
    else:
        setattr(params, name, ctypes.cast(params.arrays[name].ctypes.data + 1, kind))


def outcome(core: Core, operator: str, params: Params) -> tuple[Status, str]:
    try:
        core.run(operator, params)
    except CoreError as error:
        return error.status, error.text
    return Status.OK, ""


@pytest.mark.parametrize("target", TARGETS)
def test_no_params_lead_out_of_their_arrays(target: str, core: Core, request: pytest.FixtureRequest) -> None:
    operators, make = TARGETS[target]
    rng = np.random.default_rng(1)
    outcomes = dict.fromkeys(Status, 0)
    for _ in range(request.config.getoption("--fuzz-cases")):
        with guarded_outputs() as output:
            params = make(rng, output, core)
            fields = params._fields_
            for index in rng.choice(len(fields), rng.choice([0, 1, 1, 2, 3]), replace=False):
                spoil(rng, params, *fields[index])
            for operator in operators:
                status, text = outcome(core, operator, params)
                outcomes[status] += 1
                assert (status == Status.OK) == (text == "")
                if status != Status.OK:
                    break
    # the cases reach the kernels and the checks alike
    assert outcomes[Status.OK] > sum(outcomes.values()) // 10
    assert outcomes[Status.INVALID_ARGUMENT] > sum(outcomes.values()) // 10
    assert outcomes[Status.INTERNAL] == 0
    print(target, {status.name: count for status, count in outcomes.items()})
