# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""patch_paddle: Paddle's own functions run on this package, with Paddle's numbers, and come back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial

import numpy as np
import paddle
import pytest
from paddle.nn.functional import moe_permute as imported_before
from paddle.nn.functional import moe_unpermute as unpermute_imported_before

from paddle_moe_ops import explain, functional, patch_paddle, patched_paddle, reference, unpatch_paddle
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import make_problem, tensor
from tests.params import SMALL
from tests.static.modes import plain_errors

ORIGINAL_CODE = imported_before.__code__, unpermute_imported_before.__code__
PADDLES_SIGNATURES = {each.__name__: inspect.signature(each) for each in (imported_before, unpermute_imported_before)}


@pytest.fixture(autouse=True)
def paddle_as_it_was() -> Iterator[None]:
    yield
    unpatch_paddle()
    assert not is_patched()


def closure_over(variable):
    return lambda: variable


def is_patched() -> bool:
    """Return whether both functions run on this package; one of them alone never does."""
    permute_is, unpermute_is = (
        function.__code__ is not code
        for function, code in zip((imported_before, unpermute_imported_before), ORIGINAL_CODE, strict=True)
    )
    assert permute_is == unpermute_is
    return permute_is


def test_functions_imported_before_are_routed_too_and_have_gradients(rng, place):
    problem = make_problem(rng, SMALL)
    patch_paddle()
    assert paddle.nn.functional.moe_permute is imported_before
    x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
    ids = tensor(problem.ids, place)
    outputs = imported_before(x, None, ids, probs, SMALL.E, tokens_per_expert=None, padding_alignment=SMALL.A)
    expected = reference.moe_permute(problem.x, None, problem.ids, problem.probs, SMALL.E, None, SMALL.A)
    for got, wanted in zip(outputs, expected, strict=True):
        assert_bits_equal(got, wanted)
    paddle.autograd.backward([outputs[0]], [paddle.ones_like(outputs[0])])
    assert_bits_equal(x.grad, reference.permute_backward(np.ones_like(expected[0]), problem.plan()))


def test_one_row_is_not_weighted_and_bad_ids_are_passed_over_as_in_paddle(place):
    rows = tensor(np.array([[2.0], [3.0], [5.0]], np.float32), place)
    rowmap = tensor(np.array([[0, -1], [1, 2]], np.int32), place)
    ids = tensor(np.array([[0, 9], [0, 1]], np.int32), place)
    weights = tensor(np.array([0.5, 0.5, 0.25], np.float32), place)
    with patched_paddle():
        out, probs = unpermute_imported_before(rows, rowmap, ids, weights, 2, 2, using_weighted_combine=True)
    np.testing.assert_array_equal(out.numpy(), [[2.0], [3.0 * 0.5 + 5.0 * 0.25]])
    np.testing.assert_array_equal(probs.numpy(), [[0.5, 0.0], [0.5, 0.25]])


def test_patching_twice_is_patching_once():
    patch_paddle()
    patch_paddle()
    assert is_patched()
    unpatch_paddle()
    assert not is_patched()
    unpatch_paddle()
    assert not is_patched()


def test_the_block_leaves_the_state_as_it_was():
    with patched_paddle():
        assert is_patched()
        with patched_paddle():
            assert is_patched()
        assert is_patched()
    assert not is_patched()
    patch_paddle()
    with pytest.raises(KeyError), patched_paddle():
        raise KeyError
    assert is_patched()


def fail_inside(block):
    with pytest.raises(IndexError), block:
        raise IndexError
    assert is_patched()
    raise KeyError


def test_an_exception_in_the_outermost_block_gives_paddles_functions_back():
    inner, outer = patched_paddle(), patched_paddle()
    with pytest.raises(KeyError), outer:
        fail_inside(inner)
    assert not is_patched()


@pytest.mark.parametrize("name", ["moe_permute", "moe_unpermute"])
@pytest.mark.parametrize("instead", [None, len, closure_over("a variable")], ids=["missing", "built in", "closure"])
def test_where_one_function_cannot_be_replaced_neither_is(name, instead, monkeypatch):
    if instead is None:
        monkeypatch.delattr(paddle.nn.functional, name)
    else:
        monkeypatch.setattr(paddle.nn.functional, name, instead)
    with pytest.raises(RuntimeError, match=f"^patch_paddle: paddle.nn.functional.{name} must be a plain function"):
        patch_paddle()
    assert not is_patched()
    assert "Paddle itself" in explain()
    with pytest.raises(RuntimeError), patched_paddle():
        pytest.fail("the block must not run")


def test_paddles_own_functions_come_back_where_another_took_their_name(monkeypatch):
    def another():
        return "another"

    patch_paddle()
    monkeypatch.setattr(paddle.nn.functional, "moe_permute", another)
    unpatch_paddle()
    assert not is_patched()
    assert another() == "another"


@pytest.mark.parametrize("by_keyword", [False, True], ids=["by position", "by keyword"])
@pytest.mark.parametrize("patched", [imported_before, unpermute_imported_before], ids=lambda each: each.__name__)
def test_every_argument_of_paddles_signature_arrives_under_its_name(patched, by_keyword, monkeypatch):
    ours = inspect.signature(getattr(functional, patched.__name__))
    given = {name: object() for name in PADDLES_SIGNATURES[patched.__name__].parameters}
    arrived = []
    monkeypatch.setattr(functional, patched.__name__, lambda *some, **named: arrived.append(ours.bind(*some, **named)))
    with patched_paddle():
        patched(**given) if by_keyword else patched(*given.values())
    tolerant = {"validate": False} | ({"compat": "paddle"} if patched is unpermute_imported_before else {})
    of_paddle_3_2 = {"use_mix_precision": "using_mix_precision"}
    assert arrived[0].arguments == {of_paddle_3_2.get(name, name): each for name, each in given.items()} | tolerant


def permute_of_paddle_3_2(
    hidden_states,
    scale,
    expert_routemap_topk,
    expert_prob_topk,
    num_experts,
    tokens_per_expert,
    padding_alignment,
    do_gather=True,
    name=None,
): ...


def unpermute_of_paddle_3_2(
    hidden_states_unzipped,
    zipped_expertwise_rowmap,
    expert_routemap_topk,
    token_prob_unzipped,
    total_zipped_tokens,
    num_experts,
    use_mix_precision=True,
    name=None,
): ...


@pytest.mark.parametrize("by_keyword", [False, True], ids=["by position", "by keyword"])
def test_calls_with_the_arguments_of_paddle_3_2_run_as_those_of_newer_ones(by_keyword, rng, place, monkeypatch):
    monkeypatch.setattr(paddle.nn.functional, "moe_permute", permute_of_paddle_3_2)
    monkeypatch.setattr(paddle.nn.functional, "moe_unpermute", unpermute_of_paddle_3_2)
    problem = make_problem(rng, SMALL)
    x, ids, probs = (tensor(each, place) for each in (problem.x, problem.ids, problem.probs))

    def call(function, *values):
        named = dict(zip(inspect.signature(function).parameters, values, strict=True))
        return function(**named) if by_keyword else function(*values)

    with patched_paddle():
        rows, rowmap, row_probs, _ = call(
            permute_of_paddle_3_2, x, None, ids, probs, SMALL.E, None, SMALL.A, True, "a name"
        )
        out, _ = call(unpermute_of_paddle_3_2, rows, rowmap, ids, row_probs, SMALL.T, SMALL.E, True, "a name")
    expected = functional.moe_permute(x, None, ids, probs, SMALL.E, None, SMALL.A)
    assert_bits_equal(rows, expected[0])
    assert_bits_equal(out, functional.moe_unpermute(*expected[:2], ids, expected[2], SMALL.T, SMALL.E)[0])


def test_every_optional_argument_of_paddles_permute_has_its_effect(rng, place):
    problem = make_problem(rng, SMALL)
    packed = rng.integers(0, 2**31, (SMALL.T, 1), np.int32)
    x, ids, probs, scale = (tensor(each, place) for each in (problem.x, problem.ids, problem.probs, packed))
    patch_paddle()
    outputs = imported_before(x, scale, ids, probs, SMALL.E, [], SMALL.A, True, True, True, 17, "name")
    expected = reference.moe_permute(
        problem.x,
        packed,
        problem.ids,
        problem.probs,
        SMALL.E,
        [],
        SMALL.A,
        using_ue8m0_scale=True,
        return_expert_indices=True,
        override_buffer_size=17,
        validate=False,
    )
    assert len(outputs) == len(expected) == 5
    for got, wanted in zip(outputs, expected, strict=True):
        assert_bits_equal(got, wanted)
    rows, _, row_probs, _ = imported_before(x, None, ids, probs, SMALL.E, None, SMALL.A, False)
    assert rows.shape == [0, SMALL.H]
    assert len(row_probs) == problem.plan().num_rows


@pytest.mark.parametrize("patched", [imported_before, unpermute_imported_before], ids=lambda each: each.__name__)
def test_the_signature_stays_paddles(patched):
    expected = PADDLES_SIGNATURES[patched.__name__]
    with patched_paddle():
        assert inspect.signature(patched) == expected
        assert inspect.getfullargspec(patched).args == list(expected.parameters)
    assert inspect.signature(patched) == expected
    assert "__signature__" not in vars(patched)


@pytest.mark.parametrize("validate", [None, True])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("form", ["list", "array", "list of tensors with one element", "tensor"])
def test_counts_may_be_what_a_dispatcher_hands_out(form, traced, validate, rng, place):
    """Padded to the alignment, as a list or a tensor."""
    problem, alignment = make_problem(rng, SMALL), 8
    plan = problem.plan(padding_alignment=alignment)
    counts = np.diff(plan.expert_offsets).astype(np.int32)
    forms = {
        "list": counts.tolist(),
        "array": counts,
        "list of tensors with one element": list(tensor(counts[:, None], place)),
        "tensor": tensor(counts, place),
    }
    x, ids, probs = (tensor(each, place) for each in (problem.x, problem.ids, problem.probs))

    def call(x, ids, probs, counts):
        options = {} if validate is None else {"validate": validate}
        return imported_before(x, None, ids, probs, SMALL.E, counts, alignment, **options)[0]

    with patched_paddle():
        with plain_errors():
            rows = (paddle.jit.to_static(call, full_graph=True) if traced else call)(x, ids, probs, forms[form])
        assert_bits_equal(rows, reference.permute(problem.x, plan)[0])
        wrong = counts + alignment
        with pytest.raises(ValueError, match=r"^moe_permute: tokens_per_expert must be .* padding to a multiple of 8"):
            imported_before(x, None, ids, probs, SMALL.E, wrong, alignment, validate=True)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_rows_are_not_gathered_without_their_scale(dtype, rng, place):
    problem = make_problem(rng, SMALL)
    x, ids, probs = (tensor(each, place) for each in (problem.x, problem.ids, problem.probs))
    codes = x.astype(dtype)
    ours = functional.moe_permute(codes, None, ids, probs, SMALL.E, None, SMALL.A)
    with patched_paddle():
        with pytest.raises(ValueError, match=r"^moe_permute: scale must be given with float8 rows, unless do_gather="):
            imported_before(codes, None, ids, probs, SMALL.E, None, SMALL.A)
        maps = imported_before(codes, None, ids, probs, SMALL.E, None, SMALL.A, False)
        scale = tensor(np.ones((SMALL.T, 1), np.float32), place)
        moved = imported_before(codes, scale, ids, probs, SMALL.E, None, SMALL.A)
        imported_before(x, None, ids, probs, SMALL.E, None, SMALL.A)
    assert_bits_equal(maps[1], ours[1].numpy())
    assert_bits_equal(moved[0].view("uint8"), ours[0].view("uint8").numpy())


def test_this_packages_own_arguments_reach_the_patched_functions(place):
    x, probs = paddle.ones([2, 4]), paddle.ones([2, 1])
    bad = tensor(np.array([[0], [7]], np.int32), place)
    rowmap = tensor(np.array([[0, -1], [-1, 1]], np.int32), place)
    patch_paddle()
    imported_before(x, None, bad, probs, 2, None, 1)
    with pytest.raises(ValueError, match=r"^moe_permute: .*\[-1, 2\)"):
        imported_before(x, None, bad, probs, 2, None, 1, validate=True)
    unpermute = partial(unpermute_imported_before, using_weighted_combine=True)
    arguments = x, rowmap, bad, paddle.full([2], 0.5), 2, 2
    assert unpermute(*arguments)[0].tolist() == [[1.0] * 4] * 2
    assert unpermute(*arguments, compat=None)[0].tolist() == [[0.5] * 4] * 2
    with pytest.raises(ValueError, match=r"^moe_unpermute: .*\[-1, 2\)"):
        unpermute(*arguments, validate=True)


def test_paddles_own_function_is_back_after_the_block(rng, place):
    problem = make_problem(rng, SMALL)
    arguments = (tensor(problem.x, place), None, tensor(problem.ids, place), tensor(problem.probs, place), SMALL.E)
    with patched_paddle():
        imported_before(*arguments, None, SMALL.A)
    with pytest.raises((RuntimeError, TypeError, ValueError)):  # it needs a list of counts, bfloat16 rows and a GPU
        imported_before(*arguments, None, SMALL.A)


def test_explain_tells_whose_functions_are_called():
    assert "paddle.nn.functional.moe_permute and moe_unpermute: Paddle itself" in explain()
    with patched_paddle():
        assert "moe_unpermute: this package (patch_paddle)" in explain()
    assert "moe_unpermute: Paddle itself" in explain()


@pytest.mark.parametrize("full_graph", [True, False])
def test_a_traced_function_may_call_the_patched_functions(full_graph, rng, place):
    problem = make_problem(rng, SMALL)

    def round_trip(x, ids, probs):
        rows, rowmap, row_probs, _ = imported_before(x, None, ids, probs, SMALL.E, None, SMALL.A)
        return unpermute_imported_before(rows, rowmap, ids, row_probs, SMALL.T, SMALL.E)[0]

    arguments = tensor(problem.x, place), tensor(problem.ids, place), tensor(problem.probs, place)
    with patched_paddle():
        expected = round_trip(*arguments)
        with plain_errors():
            traced = paddle.jit.to_static(round_trip, full_graph=full_graph)(*arguments)
    assert_bits_equal(traced, expected.numpy())
