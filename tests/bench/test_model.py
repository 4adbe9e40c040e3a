# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The least bytes of an operation, against counts made by hand and against the arrays themselves."""

from __future__ import annotations

import pytest

from benchmarks.kernels.model import Kind
from benchmarks.kernels.operators import OPERATIONS, OPERATORS, minimum_bytes, probe_work
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import Case, Operation, Shape

T, K, E, H = 50, 4, 9, 256
SHAPE = Shape("s", T, K, E, H)
DENSE = make_problem(Case(SHAPE, "uniform"))


def of(key, problem=DENSE):
    return minimum_bytes(Operation(*key.split(":")), problem)


def test_bytes_where_every_slot_has_a_row():
    due = [
        ("route:maps", 8 * T * K, 8 * T * K + 16 * T * K + 8 * E),
        ("permute:bf16", 2 * T * H + 4 * T * K, 2 * T * K * H),
        ("permute:fp8", T * (H + 8) + 4 * T * K, T * K * (H + 8)),
        ("route_permute:bf16", 2 * T * H + 8 * T * K, 2 * T * K * H + 8 * T * K + 8 * T * K + 8 * E),
        ("permute_quantized:row", 2 * T * H + 4 * T * K, T * K * (H + 8)),
        ("permute_quantized:ue8m0", 2 * T * H + 4 * T * K, T * K * (H + 4)),
        ("unpermute:plain", 2 * T * K * H + 4 * T * K, 2 * T * H),
        ("unpermute:weighted", 2 * T * K * H + 8 * T * K, 2 * T * H),
        ("moe_unpermute:weighted", 2 * T * K * H + 4 * T * E + 8 * T * K, 2 * T * H + 4 * T * K),
        ("unpermute_backward:plain", 2 * T * H + 4 * T * K, 2 * T * K * H),
        ("unpermute_backward:weighted", 2 * T * H + 2 * T * K * H + 8 * T * K, 2 * T * K * H + 4 * T * K),
        ("sort_chunks:forward", 2 * T * K * H + 8 * E, 2 * T * K * H + 4 * T * K),
        ("sort_chunks:backward", 2 * T * K * H + 8 * E, 2 * T * K * H),
        ("topk:softmax", 4 * T * E, 12 * T * K),
        ("unpermute_backward:dprob", 2 * T * H + 2 * T * K * H + 4 * T * K, 4 * T * K),
    ]
    assert [(key, *of(key)) for key, *_ in due] == due


def test_the_row_map_is_what_moe_permute_writes_more():
    assert of("moe_permute:bf16").written - of("route_permute:bf16").written == 4 * T * E
    assert of("moe_permute:bf16").read == of("route_permute:bf16").read


def test_padding_rows_count_only_where_they_are_written():
    filled = make_problem(Case(SHAPE, "uniform", alignment=16))
    bare = make_problem(Case(SHAPE, "uniform", alignment=16, fill=False))
    padding = filled.plan.num_rows - T * K
    assert padding > 0
    assert of("permute:bf16", filled).written - of("permute:bf16", bare).written == 2 * padding * H
    assert of("permute:bf16", bare) == of("permute:bf16")
    assert of("unpermute:plain", filled) == of("unpermute:plain")
    assert of("unpermute_backward:plain", bare).written == 2 * bare.plan.num_rows * H


def test_unassigned_slots_have_no_rows():
    half = make_problem(Case(SHAPE, "half_unassigned"))
    assert 0 < half.routed_rows < T * K
    assert of("permute:bf16", half) == (2 * T * H + 4 * T * K, 2 * half.routed_rows * H)


def test_every_operation_has_a_model():
    assert not [operation.key for operation in OPERATIONS if min(minimum_bytes(operation, DENSE)) <= 0]


@pytest.mark.parametrize("fill", [True, False])
def test_the_probe_moves_the_bytes_of_the_rows(fill):
    problem = make_problem(Case(Shape("wide", T, K, E, 65536), "uniform", alignment=16, fill=fill))
    padding = 65536 * 2 * (problem.plan.num_rows - problem.routed_rows)
    for operation in OPERATIONS:
        work = probe_work(operation, problem)
        if OPERATORS[operation.op].probe is None:
            assert work == (Kind.EMPTY, 0, 0), operation.key
            continue
        due = minimum_bytes(operation, problem).total
        if operation.key == "unpermute_backward:weighted":
            due -= padding  # the kernel has no stream that is only written
        # Bytes of maps and probabilities are negligible.
        assert work.total == pytest.approx(due, rel=1e-3), operation.key
