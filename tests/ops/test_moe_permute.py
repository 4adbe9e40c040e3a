# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_permute: every output and every argument, bit for bit against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import moe_permute, permute, reference, route
from paddle_moe_ops.testing.equality import assert_all_bits_equal, assert_bits_equal
from paddle_moe_ops.testing.routing import GENERATORS
from tests.ops.problems import (
    SEEDS,
    buffer_sizes,
    every_kind,
    ids_and_experts,
    make_problem,
    optional_tensor,
    ordinary,
    tensor,
)
from tests.params import ALIGNMENTS, HIDDEN_SIZES, MOST_EXPERTS, ODD, ROW_DTYPES, SHAPES, SMALL

NAMES = ("hidden_states_unzipped", "zipped_expertwise_rowmap", "token_prob_unzipped", "scale_unzipped")
ALL_OUTPUTS = {"return_expert_indices": True, "return_overflow": True}


def assert_outputs(outputs, expected):
    names = [*NAMES, "expert_indices", "overflow"][: len(expected)]
    assert_all_bits_equal(outputs, expected, names)


def draw_scale(rng, ue8m0, num_tokens, num_scales):
    scale = every_kind(rng, (num_tokens, num_scales), np.float32)
    return scale.view(np.int32) if ue8m0 else scale


@given(data=st.data(), ids_and_experts=ids_and_experts(), seed=SEEDS)
@settings(max_examples=120)
def test_outputs_equal_the_oracle(data: st.DataObject, ids_and_experts, seed, place):
    rng = np.random.default_rng(seed)
    ids, num_experts = ids_and_experts
    x = every_kind(rng, (len(ids), data.draw(st.sampled_from([1, 7, 72, 200]))), data.draw(st.sampled_from(ROW_DTYPES)))
    probs = every_kind(rng, ids.shape)
    ue8m0 = data.draw(st.booleans())
    scale = draw_scale(rng, ue8m0, len(ids), data.draw(st.integers(1, 4))) if data.draw(st.booleans()) else None
    alignment = data.draw(st.sampled_from([*ALIGNMENTS]))
    plan = reference.route(ids, num_experts=num_experts, padding_alignment=alignment, validate=False)
    options: dict[str, Any] = {
        "do_gather": data.draw(st.booleans()),
        "using_ue8m0_scale": ue8m0,
        "return_expert_indices": data.draw(st.booleans()),
        "override_buffer_size": buffer_sizes(data.draw, plan.num_rows),
        "return_overflow": data.draw(st.booleans()),
        "validate": False,
    }
    counts = data.draw(st.sampled_from([None, plan.routed_per_expert.tolist()]))
    tensors = tensor(x, place), optional_tensor(scale, place), tensor(ids, place), tensor(probs, place)
    outputs = moe_permute(*tensors, num_experts, counts, alignment, **options)
    expected = reference.moe_permute(x, scale, ids, probs, num_experts, counts, alignment, **options)
    assert len(outputs) == 4 + options["return_expert_indices"] + options["return_overflow"]
    names = list(NAMES)
    names += ["expert_indices"] * options["return_expert_indices"] + ["overflow"] * options["return_overflow"]
    assert_all_bits_equal(outputs, expected, names)


@pytest.mark.parametrize("routing", GENERATORS)
@pytest.mark.parametrize("shape", [*SHAPES, MOST_EXPERTS], ids=str)
def test_outputs_of_named_shapes(shape, routing, rng, place):
    problem = make_problem(rng, shape, ROW_DTYPES[2], routing)
    sizes = (shape.E, problem.plan().routed_per_expert.tolist(), shape.A)
    tensors = tensor(problem.ids, place), tensor(problem.probs, place)
    outputs = moe_permute(tensor(problem.x, place), None, *tensors, *sizes, **ALL_OUTPUTS, validate=True)
    assert_outputs(outputs, reference.moe_permute(problem.x, None, problem.ids, problem.probs, *sizes, **ALL_OUTPUTS))


@pytest.mark.parametrize("ue8m0", [False, True], ids=["float32 scale", "ue8m0 scale"])
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_rows_of_every_width_and_dtype_with_scales(hidden, dtype, ue8m0, rng, place):
    problem = make_problem(rng, SMALL._replace(H=hidden, A=16), dtype)
    groups = -(-hidden // 128)
    scale = draw_scale(rng, ue8m0, SMALL.T, -(-groups // 4) if ue8m0 else groups)
    arguments = (SMALL.E, None, 16, True, ue8m0)
    tensors = tensor(problem.x, place), tensor(scale, place), tensor(problem.ids, place), tensor(problem.probs, place)
    outputs = moe_permute(*tensors, *arguments, **ALL_OUTPUTS)
    assert_outputs(
        outputs, reference.moe_permute(problem.x, scale, problem.ids, problem.probs, *arguments, **ALL_OUTPUTS)
    )


def count_forms(counts, place):
    return {
        "counted": None,
        "list": counts.tolist(),
        "list of 0-D tensors": list(tensor(counts, place)),
        "int32 tensor": tensor(counts.astype(np.int32), place),
        "int64 tensor": tensor(counts.astype(np.int64), place),
    }


@pytest.mark.parametrize("form", count_forms(np.zeros(1, np.int32), "cpu"))
def test_counts_may_come_in_any_form(form, rng, place, backend):
    problem = make_problem(rng, SMALL)
    counts = count_forms(problem.plan().routed_per_expert, place)[form]
    tensors = tensor(problem.x, place), None, tensor(problem.ids, place), tensor(problem.probs, place)
    outputs = moe_permute(*tensors, SMALL.E, counts, SMALL.A, **ALL_OUTPUTS)
    expected = reference.moe_permute(problem.x, None, problem.ids, problem.probs, SMALL.E, None, SMALL.A, **ALL_OUTPUTS)
    assert_outputs(outputs, expected)


@pytest.mark.parametrize("missing_rows", [None, 1, 0, -20], ids=["no rows", "one too few", "exact", "larger"])
@pytest.mark.parametrize("do_gather", [True, False], ids=["gather", "no gather"])
def test_static_buffer(missing_rows, do_gather, rng, place, backend):
    problem = make_problem(rng, SMALL, routing="uniform")
    last_row = np.flatnonzero(problem.plan(padding_alignment=1).row_to_token >= 0)[-1]
    size = 0 if missing_rows is None else int(last_row) + 1 - missing_rows
    scale = draw_scale(rng, False, SMALL.T, 2)
    options = {"do_gather": do_gather, "override_buffer_size": size, **ALL_OUTPUTS}
    arrays = problem.x, scale, problem.ids, problem.probs
    outputs = moe_permute(*(tensor(array, place) for array in arrays), SMALL.E, [], 1, **options)
    assert_outputs(outputs, reference.moe_permute(*arrays, SMALL.E, None, 1, **options))
    dropped = {None: problem.ids.size, 1: 1, 0: 0, -20: 0}[missing_rows]
    assert outputs[5].tolist() == dropped
    assert outputs[2].shape == [size]
    assert outputs[0].shape == [size if do_gather else 0, SMALL.H]


@pytest.mark.parametrize("fill_padding", ["all", "meta", "none"])
@pytest.mark.parametrize("buffer_size", [-1, 31, 120], ids=["padded", "too small", "too large"])
def test_padding_holds_what_was_asked_for(fill_padding, buffer_size, rng, place, backend):
    problem = make_problem(rng, SMALL)
    arrays = problem.x, draw_scale(rng, True, SMALL.T, 2), problem.ids, problem.probs
    arguments = (SMALL.E, None, 16, True, True)
    options = {"override_buffer_size": buffer_size, **ALL_OUTPUTS}
    tensors = [tensor(array, place) for array in arrays]
    outputs = moe_permute(*tensors, *arguments, **options, fill_padding=fill_padding)
    expected = reference.moe_permute(*arrays, *arguments, **options)
    is_padding = expected[4] < 0
    assert is_padding.any()
    assert not is_padding.all()
    for name, got, wanted in zip([*NAMES, "expert_indices", "overflow"], outputs, expected, strict=True):
        undefined = {"all": (), "meta": NAMES[:1], "none": (NAMES[0], *NAMES[2:])}[fill_padding]
        rows = ~is_padding if name in undefined else ...
        assert_bits_equal(got.numpy()[rows], wanted[rows], what=name)


def test_without_gather_only_the_rows_and_scales_are_missing(rng, place, backend):
    problem = make_problem(rng, SMALL)
    arrays = problem.x, draw_scale(rng, False, SMALL.T, 2), problem.ids, problem.probs
    tensors = [tensor(array, place) for array in arrays]
    whole = moe_permute(*tensors, SMALL.E, None, SMALL.A, **ALL_OUTPUTS)
    maps = moe_permute(*tensors, SMALL.E, None, SMALL.A, False, **ALL_OUTPUTS)
    for index in (1, 2, 4, 5):
        assert_bits_equal(maps[index], whole[index])
    assert (maps[0].shape, maps[3].shape) == ([0, SMALL.H], [0])
    assert (maps[0].dtype, maps[3].dtype) == (paddle.float32, paddle.float32)


def test_a_missing_scale_comes_out_as_an_empty_float32_tensor(rng, place, backend):
    problem = make_problem(rng, SMALL)
    tensors = tensor(problem.x, place), None, tensor(problem.ids, place), tensor(problem.probs, place)
    for ue8m0 in (False, True):
        scale = moe_permute(*tensors, SMALL.E, None, 1, using_ue8m0_scale=ue8m0)[3]
        assert (scale.shape, scale.dtype) == ([0], paddle.float32)


def test_paddles_positional_order_is_kept(rng, place):
    problem = make_problem(rng, SMALL)
    tensors = tensor(problem.x, place), None, tensor(problem.ids, place), tensor(problem.probs, place)
    by_position = moe_permute(*tensors, SMALL.E, None, 2, True, False, True, 64, "any name")
    by_name = moe_permute(
        hidden_states=tensors[0],
        scale=None,
        expert_routemap_topk=tensors[2],
        expert_prob_topk=tensors[3],
        num_experts=SMALL.E,
        tokens_per_expert=None,
        padding_alignment=2,
        do_gather=True,
        using_ue8m0_scale=False,
        return_expert_indices=True,
        override_buffer_size=64,
        name="any name",
    )
    assert len(by_position) == 5
    assert by_position[4].shape == [64]
    assert_outputs(by_position, [output.numpy() for output in by_name])


def test_it_agrees_with_route_and_permute(rng, place, backend):
    problem = make_problem(rng, ODD)
    x, ids, probs = (tensor(array, place) for array in (problem.x, problem.ids, problem.probs))
    outputs = moe_permute(x, None, ids, probs, ODD.E, None, 4, **ALL_OUTPUTS)
    plan = route(ids, probs, num_experts=ODD.E, padding_alignment=4)
    rowmap = np.full((ODD.T, ODD.E), -1, np.int32)
    for token, slot in np.argwhere(problem.ids >= 0):
        rowmap[token, problem.ids[token, slot]] = plan.slot_to_row.numpy()[token, slot]
    rows, _ = permute(x, plan)
    no_scale = np.zeros(0, np.float32)
    assert_outputs(outputs, (rows, rowmap, plan.row_probs, no_scale, plan.row_to_expert, plan.overflow))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bad_ids_and_repeated_ids_count_as_unassigned_without_validation(dtype, place, backend):
    ids = np.array([[0, 0, 5], [-7, 1, 1], [2, -1, 99]], dtype)
    cleaned = np.array([[0, -1, -1], [-1, 1, -1], [2, -1, -1]], np.int32)
    probs, x = np.arange(9, dtype=np.float32).reshape(3, 3), ordinary(np.random.default_rng(0), (3, 8))
    outputs = moe_permute(
        tensor(x, place), None, tensor(ids, place), tensor(probs, place), 3, None, 2, **ALL_OUTPUTS, validate=False
    )
    assert_outputs(outputs, reference.moe_permute(x, None, cleaned, probs, 3, None, 2, **ALL_OUTPUTS))
    np.testing.assert_array_equal(outputs[2].numpy(), [0, 0, 4, 0, 6, 0])
