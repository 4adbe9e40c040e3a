# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`route_count` and `route`: the two steps from expert ids or a mask to maps, with one struct."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs, is_poison
from ..structs import (
    IDS_KINDS,
    NOWHERE,
    Bytes,
    Check,
    Duplicates,
    Findings,
    Floats,
    Int,
    Int32s,
    Params,
    RoutingKind,
    Size,
    fields,
)
from .base import TOO_MANY, TOO_MANY_EXPERTS, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..cases import Problem
    from ..inputs import Draw, Large, Small


class RouteParams(Params):
    """pmo_route_params"""

    _fields_ = fields(
        (Size, "struct_size num_tokens topk num_experts padding_alignment num_rows"),
        (Bytes, "routing"),
        (Floats, "probs"),
        (Int32s, "expected_per_expert"),
        (Int, "routing_kind duplicates checks num_threads"),
        (Bytes, "workspace"),
        (Size, "workspace_bytes"),
        (Int32s, "routed_per_expert slot_to_row token_rows row_to_token row_to_slot row_to_expert"),
        (Floats, "row_probs"),
        (Int32s, "tokens_per_expert expert_offsets overflow rowmap"),
    )

    def before_cuda(self, core: Core, operator: str) -> None:
        if operator == "route" and self.checks & Check.OVERFLOW:
            nothing = RouteFindings(bad_place=NOWHERE, duplicate_place=NOWHERE, nan_place=NOWHERE)
            route_report(core, self, nothing, self.arrays["routed_per_expert"])

    def after_cuda(self, core: Core, operator: str) -> None:
        if operator == "route_count" and self.checks:
            params = RouteParams.from_buffer_copy(self)
            params.checks &= ~Check.OVERFLOW  # of which only the second step knows
            findings = RouteFindings.from_buffer_copy(self.arrays["workspace"].data)
            route_report(core, params, findings, self.arrays["routed_per_expert"])


class RouteFindings(Findings):
    """pmo_route_findings"""

    _fields_ = fields((Size, "bad_place bad_value duplicate_place duplicate_expert duplicate_first nan_place"))


def route_params(
    routing: NDArray,
    probs: NDArray | None = None,
    *,
    num_experts: int | None = None,
    topk: int | None = None,
    duplicates: str = "first",
    **fields: Any,
) -> RouteParams:
    """Params of "route_count", "route" and "route_permute".

    Args:
        routing: int32 or int64 ids [T, K], or a bool or uint8 mask [T, E].
        probs: float32 in the shape of ``routing``.
        num_experts: E, needed for ids.
        topk: K of a mask, by default E.
        duplicates: "first" or "each".
        fields: Any other field of the struct; arrays for pointers. padding_alignment is 1 unless given.
    """
    kind = IDS_KINDS.get(routing.dtype, RoutingKind.MASK)
    columns = routing.shape[1]
    if kind == RoutingKind.MASK:
        num_experts, topk = columns, columns if topk is None else topk
    return RouteParams(
        **{
            "num_tokens": len(routing),
            "topk": columns if topk is None else topk,
            "num_experts": num_experts,
            "padding_alignment": 1,
            "routing": routing,
            "probs": probs,
            "routing_kind": kind,
            "duplicates": Duplicates[duplicates.upper()],
            **fields,
        }
    )


def route_report(core: Core, params: RouteParams, findings: RouteFindings, routed_per_expert: NDArray) -> None:
    """Raise CoreError for findings and int32 counts [E] that the params' checks cover."""
    report = core.function("pmo_route_report", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, Int32s)
    counts = routed_per_expert.ctypes.data_as(Int32s)
    core.check(report(ctypes.byref(params), ctypes.byref(findings), counts))


def padded_rows(core: Core, counts: NDArray, padding_alignment: int) -> int:
    """Rows of a buffer that holds int32 ``counts`` [E], each padded to the alignment."""
    function = core.function("pmo_padded_rows", Size, Int32s, Size, Size)
    return function(counts.ctypes.data_as(Int32s), len(counts), padding_alignment)


ROUTE_OUTPUTS = (
    *("slot_to_row", "token_rows", "row_to_token", "row_to_slot", "row_to_expert", "row_probs"),
    *("tokens_per_expert", "expert_offsets", "overflow", "rowmap"),
)


def make_maps(
    output: MakeOutput, num_tokens: int, topk: int, num_experts: int, num_rows: int, names: tuple[str, ...]
) -> dict[str, Any]:
    """Poisoned outputs of routing: the counts, and maps by name."""
    shapes: dict[str, tuple[int, ...] | int] = {
        "routed_per_expert": num_experts,
        "slot_to_row": (num_tokens, topk),
        "token_rows": (num_tokens, topk),
        "tokens_per_expert": num_experts,
        "expert_offsets": num_experts + 1,
        "overflow": (),
        "rowmap": (num_tokens, num_experts),
    }
    return {
        name: output(shapes.get(name, num_rows), np.float32 if name == "row_probs" else np.int32)
        for name in ("routed_per_expert", *names)
    }


def guarded_route_params(
    core: Core, output: MakeOutput, problem: Problem, outputs: tuple[str, ...], **fields: Any
) -> tuple[RouteParams, dict[str, NDArray]]:
    """Params with the number of rows that the problem's plan has, and their outputs. row_probs needs probs."""
    plan = problem.plan
    wanted = tuple(name for name in outputs if name != "row_probs" or problem.probs is not None)
    maps = make_maps(output, plan.num_tokens, plan.topk, plan.num_experts, plan.num_rows, wanted)
    params = route_params(problem.routing, problem.probs, **problem.options, num_rows=plan.num_rows, **maps, **fields)
    core.add_workspace("route", params)
    return params, maps


def route(
    core: Core, problem: Problem, *, outputs: tuple[str, ...] = ROUTE_OUTPUTS, **fields: Any
) -> dict[str, NDArray]:
    """Both steps of routing; its counts and the maps that are asked for."""
    with guarded_outputs() as output:
        params, maps = guarded_route_params(core, output, problem, outputs, **fields)
        core.run("route_count", params)
        assert all(is_poison(maps[name]) for name in maps if name != "routed_per_expert"), "counting writes no maps"
        core.run("route", params)
    return maps


def _valid_count(core: Core, output: MakeOutput, s: Small) -> Params:
    params = route_params(
        s.ids(),
        s.probs,
        num_experts=s.E,
        padding_alignment=s.A,
        num_rows=s.N,
        expected_per_expert=s.plan.routed_per_expert,
        **make_maps(output, s.T, s.K, s.E, s.N, ROUTE_OUTPUTS),
    )
    core.add_workspace("route", params)
    return params


def _valid_count_of_mask(core: Core, output: MakeOutput, s: Small) -> Params:
    params = route_params(s.mask, num_rows=s.N, routed_per_expert=output(s.E, np.int32))
    core.add_workspace("route", params)
    return params


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    params = _valid_count(core, output, s)
    core.run("route_count", params)
    return params


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    columns = max(s.K, s.E)
    params = RouteParams(
        **s.sizes("num_tokens topk num_experts"),
        routing=s.ints((s.T, columns), s.E, np.int64),
        padding_alignment=s.between(1, 6),
        num_rows=s.N,
        probs=s.data(s.T, columns),
        **s.choices(routing_kind=3, duplicates=2),
        checks=s.checks(32),
        num_threads=s.below(4),
        expected_per_expert=s.ints((s.E,), 5),
        **make_maps(output, s.T, s.K, s.E, s.N, ROUTE_OUTPUTS),
    )
    core.add_workspace("route", params)
    return params


def _work(large: Large, core: Core, num_threads: int) -> tuple[NDArray, ...]:
    return tuple(route(core, large.routed, num_threads=num_threads).values())


OPERATORS = (
    Operator(
        name="route_count",
        valid=_valid_count,
        bad_fields={
            "num_tokens": (-1, TOO_MANY),
            "topk": (-1, TOO_MANY, TOO_MANY // 5 + 1),  # 5 tokens: T * K reaches 2^31
            "num_experts": (0, -4, TOO_MANY_EXPERTS),
            "padding_alignment": (0, -2, TOO_MANY),
            "routing_kind": (-1, 3),
            "duplicates": (-1, 2),
            "workspace_bytes": (0, -1),
        },
        required=("routing", "workspace", "routed_per_expert"),
        aligned=("routing", "workspace", "probs", "expected_per_expert", "routed_per_expert"),
    ),
    Operator(
        name="route_count",
        form="mask",
        valid=_valid_count_of_mask,
        bad_fields={"topk": (5,)},
        required=("routing",),
    ),
    Operator(
        name="route",
        valid=_valid,
        bad_fields={
            "num_tokens": (-1,),
            "topk": (-1,),
            "num_experts": (0,),
            "padding_alignment": (0,),
            "num_rows": (-1, TOO_MANY),
            "routing_kind": (3,),
            "duplicates": (2,),
            "workspace_bytes": (8,),
        },
        required=("workspace", "routed_per_expert", "probs"),
        aligned=("workspace", "routed_per_expert", "probs", *ROUTE_OUTPUTS),
        fuzzed=_fuzzed,
        fuzzed_before="route_count",
        work=_work,
    ),
)
