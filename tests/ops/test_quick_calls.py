# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that the library takes before Python's checks: which ones, that they give the same bits, what it declines."""

from __future__ import annotations

import inspect
from operator import attrgetter

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_moe_ops import (
    _quick,
    moe_mlp,
    moe_permute,
    moe_unpermute,
    permute,
    quantize_1x128,
    route,
    unpermute,
    use_backend,
)
from paddle_moe_ops.backends import compiled as compiled_module
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.compiled import QUICK, _declines
from paddle_moe_ops.backends.compiled import backend as compiled
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import make_problem, plan_tensors, tensor
from tests.ops.test_direct_calls import anything
from tests.params import ODD

pytestmark = pytest.mark.compiled_only


@pytest.fixture
def problem(rng, place):
    case = make_problem(rng, ODD)
    return tensor(case.x, place), plan_tensors(case.plan(), place)


@pytest.fixture
def answers(monkeypatch):
    """Return values of the quick calls."""
    given_back = []

    def recorded(function):
        def call(*arguments):
            given_back.append(function(*arguments))
            return given_back[-1]

        return call

    for name in QUICK:
        monkeypatch.setattr(compiled, name, recorded(getattr(compiled, name)))
    return given_back


@pytest.fixture
def long_way(monkeypatch):
    """A context without quick calls."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            for name in QUICK:
                patch.setattr(compiled, name, _declines)
            return function(*arguments)

    return call


@pytest.mark.parametrize(
    "function", [permute, unpermute, moe_permute, moe_unpermute, moe_mlp], ids=attrgetter("__name__")
)
def test_defaults_are_those_of_the_function(function):
    defaults = {
        name: each.default
        for name, each in inspect.signature(function).parameters.items()
        if each.default is not inspect.Parameter.empty
    }
    quick = inspect.signature(getattr(_quick, f"quick_{function.__name__}")).parameters
    assert {name: each.default for name, each in quick.items() if name in defaults}.items() <= defaults.items()
    if "amax_min" in quick:
        assert quick["amax_min"].default == inspect.signature(quantize_1x128).parameters["amax_min"].default


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_permute_takes_rows_of_every_dtype_and_gives_the_bits_of_the_long_way(problem, answers, long_way, dtype):
    x, plan = problem
    x = x.astype("float32").astype(dtype)
    rows, scales = permute(x, plan)
    assert answers[-1] is rows
    assert scales is None
    assert rows.stop_gradient
    expected, _ = long_way(permute, x, plan)
    assert_bits_equal(rows.view("uint8").cpu().numpy(), expected.view("uint8").cpu().numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("weights", ["none", "by row", "by slot"])
def test_unpermute_takes_every_kind_of_weights_and_gives_the_bits_of_the_long_way(
    problem, answers, long_way, dtype, weights
):
    x, plan = problem
    rows, _ = permute(x.astype(dtype), plan)
    by_slot = paddle.to_tensor(np.linspace(-2, 3, plan.num_tokens * plan.topk, dtype=np.float32), place=x.place)
    probs = {"none": None, "by row": plan.row_probs, "by slot": by_slot.reshape(plan.slot_to_row.shape)}[weights]
    out = unpermute(rows, plan, probs)
    assert answers[-1] is out
    assert_bits_equal(out.cpu().numpy(), long_way(unpermute, rows, plan, probs).cpu().numpy())


def test_strided_rows_and_no_rows_at_all_are_taken(problem, answers, long_way):
    x, plan = problem
    wide = paddle.concat([x, x], axis=1)[:, 1 : x.shape[1] + 1]
    rows, _ = permute(wide, plan)
    assert answers[-1] is rows
    assert_bits_equal(rows.cpu().numpy(), long_way(permute, wide, plan)[0].cpu().numpy())
    nothing = route(plan.slot_to_row[:0], num_experts=3)
    assert unpermute(permute(x[:0], nothing)[0], nothing).shape == [0, x.shape[1]]
    assert answers[-1] is not None


def test_the_padding_of_rows_is_zero(place):
    plan = route(tensor(np.array([[1], [0], [1]], np.int32), place), num_experts=3, padding_alignment=4)
    rows, _ = permute(tensor(np.full((3, 7), 5, np.float32), place), plan)
    assert rows.sum(axis=1).cpu().tolist() == [35, 0, 0, 0, 35, 35, 0, 0]


def test_a_backend_and_the_environment_are_left_to_python_and_gradients_to_paddle(problem, answers, monkeypatch):
    x, plan = problem
    with use_backend("compiled"):
        permute(x, plan)
        unpermute(permute(x, plan)[0], plan)
    assert answers == []
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "compiled")
    permute(x, plan)
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "no such backend")
    with pytest.raises(ValueError, match="PADDLE_MOE_OPS_BACKEND must be one of"):
        permute(x, plan)
    monkeypatch.delenv("PADDLE_MOE_OPS_BACKEND")
    probs = plan.row_probs.detach()
    probs.stop_gradient = False
    assert not unpermute(permute(x, plan)[0], plan, probs).stop_gradient
    x.stop_gradient = False
    assert not permute(x, plan)[0].stop_gradient
    assert ["rows" if isinstance(answer, paddle.Tensor) else answer for answer in answers] == [
        None,
        None,
        "rows",
        True,
        True,
    ]


def test_calls_with_anything_out_of_the_ordinary_are_not_even_tried(problem, answers, place):
    x, plan = problem
    rows, _ = permute(x, plan, tensor(np.ones((x.shape[0], 1), np.float32), place))
    permute(x, plan, fill_padding="none")
    permute(x, plan, quantize="fp8_1x128")
    for bad in ({"scale_layout": "col"}, {"amax_min": 0.0}, {"fill_padding": "some"}, {"quantize": "fp8"}):
        with pytest.raises(ValueError, match="permute: "):
            permute(x, plan, **bad)
    assert_bits_equal(permute(x, tuple(plan))[0], rows)
    with pytest.raises(TypeError, match=r"permute: plan must be a paddle_moe_ops\.Plan, but got tuple"):
        permute(x, tuple(plan)[1:])
    assert answers == []


def test_what_python_would_refuse_is_declined(problem):
    x, plan = problem
    maps = plan.slot_to_row, plan.token_rows, plan.row_to_token
    rows = compiled.quick_permute(x, *maps)
    by_row = plan.row_probs
    assert rows is not None
    for bad in (
        x.astype("int32"),
        x.astype("int64"),
        x.astype("float64"),
        x[:-1],
        x[:, :0],
        x[0],
        x.unsqueeze(0),
        x.cpu().numpy(),
        None,
    ):
        assert compiled.quick_permute(bad, *maps) is None
    sums = plan.token_rows, plan.row_to_token
    assert compiled.quick_unpermute(rows, *sums) is not None
    for bad in (rows.astype("float8_e4m3fn"), rows.astype("int32"), rows[:-1], rows[:, :0], rows[0], 3):
        assert compiled.quick_unpermute(bad, *sums) is None
        assert compiled.quick_unpermute_weighted(bad, by_row, *sums, plan.row_to_slot) is None
    by_slot = paddle.ones_like(plan.slot_to_row).astype("float32")
    assert compiled.quick_unpermute_weighted(rows, by_slot, *sums, plan.row_to_slot) is not None
    for bad in (by_row[:-1], by_row.unsqueeze(1), by_slot.T.contiguous(), by_row.astype("float64"), by_row.sum(), 1.0):
        assert compiled.quick_unpermute_weighted(rows, bad, *sums, plan.row_to_slot) is None


def test_a_library_of_other_sources_says_so(monkeypatch):
    monkeypatch.setattr(compiled_module, "QUICK", (*QUICK, "quick_nothing"))
    with pytest.raises(ImportError, match="it lacks quick_nothing, so it was built from other sources: "):
        compiled_module._load_direct()


@given(name=st.sampled_from(QUICK), arguments=st.lists(anything, max_size=7))
@settings(max_examples=150)
def test_arguments_of_any_kind_are_taken_or_declined(name, arguments):
    given_back = getattr(compiled, name)(*arguments)
    assert given_back is None or isinstance(given_back, paddle.Tensor | tuple)


# ---- moe_permute and moe_unpermute


def equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert_bits_equal(to_numpy(one.detach()), to_numpy(other.detach()))


@pytest.fixture
def moe(rng, place):
    """Tokens, ids and probabilities of a problem with unassigned slots, and its plan."""
    case = make_problem(rng, ODD)
    return tensor(case.x, place), tensor(case.ids, place), tensor(case.probs, place), case.plan()


@pytest.mark.parametrize("gradient", [False, True], ids=["without gradient", "with gradient"])
@pytest.mark.parametrize("options", ["counted", "list of counts", "static buffer", "int64 ids"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_moe_permute_gives_the_bits_of_the_long_way(moe, answers, long_way, dtype, options, gradient):
    x, ids, probs, plan = moe
    x = x.astype("float32").astype(dtype)
    counts = plan.routed_per_expert.tolist() if options == "list of counts" else None
    buffer_size = plan.num_rows - 3 if options == "static buffer" else -1
    ids = ids.astype("int64") if options == "int64 ids" else ids
    probs.stop_gradient = not gradient
    x.stop_gradient = not gradient or dtype == "float8_e4m3fn"
    arguments = x, None, ids, probs, ODD.E, counts, ODD.A, True, False, False, buffer_size
    outputs = moe_permute(*arguments)
    assert answers[-1] is True if gradient else answers[-1] is outputs
    equal(outputs, long_way(moe_permute, *arguments))
    assert [each.stop_gradient for each in outputs] == [x.stop_gradient, True, not gradient, True]


@pytest.mark.parametrize("gradient", [False, True], ids=["without gradient", "with gradient"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", ["vector", "column"])
def test_moe_unpermute_gives_the_bits_of_the_long_way(moe, answers, long_way, shape, weighted, gradient):
    x, ids, probs, _ = moe
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, ODD.E, None, ODD.A)
    row_probs = row_probs.unsqueeze(1) if shape == "column" else row_probs
    rows.stop_gradient = row_probs.stop_gradient = not gradient
    arguments = rows, rowmap, ids, row_probs, x.shape[0], ODD.E, True, weighted
    outputs = moe_unpermute(*arguments)
    assert answers[-1] is True if gradient else answers[-1] is outputs
    equal(outputs, long_way(moe_unpermute, *arguments))
    assert [each.stop_gradient for each in outputs] == [not gradient] * 2


def test_ids_that_seem_to_want_a_gradient_get_none_and_take_none_away(moe, answers):
    """Ids of `paddle.topk` have stop_gradient=False; see the scenarios of trained routers."""
    x, ids, probs, _ = moe
    ids.stop_gradient = False
    rows, rowmap, _, _ = moe_permute(x, None, ids, probs, ODD.E, None, ODD.A)
    assert answers == [True]
    assert rows.stop_gradient
    assert rowmap.stop_gradient
    x.stop_gradient = False
    moe_permute(x, None, ids, probs, ODD.E, None, ODD.A)[0].sum().backward()
    assert x.grad.shape == x.shape
    assert ids.grad is None


def test_no_grad_is_kept(moe):
    x, ids, probs, _ = moe
    x.stop_gradient = probs.stop_gradient = False
    with paddle.no_grad():
        outputs = moe_permute(x, None, ids, probs, ODD.E, None, ODD.A)
        sums = moe_unpermute(outputs[0], outputs[1], ids, outputs[2], x.shape[0], ODD.E)
    assert all(each.stop_gradient for each in (*outputs, *sums))


def test_bad_data_raises_what_the_long_way_says(moe, answers, monkeypatch):
    x, ids, probs, plan = moe
    ids[0, 0] = ODD.E
    message = r"^moe_permute: expert_routemap_topk must hold expert ids in \[-1, "
    for gradient in (False, True):
        x.stop_gradient = not gradient
        with pytest.raises(ValueError, match=message):
            moe_permute(x, None, ids, probs, ODD.E, None, ODD.A, validate=True)
        monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
        with pytest.raises(ValueError, match=message):
            moe_permute(x, None, ids, probs, ODD.E, None, ODD.A)
        assert set(answers) <= {None}
        monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
        assert len(moe_permute(x, None, ids, probs, ODD.E, None, ODD.A)) == 4
        monkeypatch.delenv("PADDLE_MOE_OPS_VALIDATE")
    ids[0, 0] = -1
    wrong = [int(count) + 1 for count in plan.routed_per_expert]
    if x.place.is_cpu_place():
        with pytest.raises(ValueError, match=r"^moe_permute: tokens_per_expert must be "):
            moe_permute(x, None, ids, probs, ODD.E, wrong, ODD.A)


def test_calls_of_moe_permute_with_anything_out_of_the_ordinary_are_not_even_tried(moe, answers, place):
    x, ids, probs, _ = moe
    sizes = ODD.E, None, ODD.A
    scale = tensor(np.ones((x.shape[0], 1), np.float32), place)
    moe_permute(x, scale, ids, probs, *sizes)
    moe_permute(x, None, ids, probs, *sizes, do_gather=False)
    moe_permute(x, None, ids, probs, *sizes, return_expert_indices=True)
    moe_permute(x, None, ids, probs, *sizes, return_overflow=True)
    moe_permute(x, None, ids, probs, *sizes, fill_padding="none")
    moe_permute(x, None, ids, probs, *sizes, validate=True)
    moe_permute(x, None, ids, probs, ODD.E, paddle.bincount(ids[ids >= 0], minlength=ODD.E), ODD.A)
    with pytest.raises(ValueError, match="moe_permute: tokens_per_expert must be of length"):
        moe_permute(x, None, ids, probs, ODD.E, [], ODD.A)
    with pytest.raises(TypeError, match="positional arguments"):
        moe_permute(x, None, ids, probs, *sizes, True, False, False, -1, None, "one more")
    rows, rowmap, row_probs, _ = moe_permute(x, scale, ids, probs, *sizes)[:4]
    with use_backend("compiled"):
        moe_permute(x, None, ids, probs, *sizes)
        moe_unpermute(rows, rowmap, ids, row_probs, x.shape[0], ODD.E)
    assert answers == []


def test_what_python_would_refuse_in_moe_permute_is_declined(moe):
    x, ids, probs, _ = moe
    good = {"x": x, "ids": ids, "probs": probs, "experts": ODD.E, "counts": [], "alignment": ODD.A, "buffer": -1}
    assert compiled.quick_moe_permute(*good.values()) is not None
    for name, values in {
        "x": (x.astype("int32"), x.astype("float64"), x[:-1], x[:, :0], x[0], None, 3),
        "ids": (ids.astype("float32"), ids[:-1], ids[:, :0], ids[0], ids > 0, None),
        "probs": (probs.astype("float64"), probs[:-1], probs[:, :-1], probs.T.contiguous(), None),
        "experts": (0, -1, 2**16 + 1, True, float(ODD.E), None, 2**70, np.int64(ODD.E)),
        "counts": ([1], [0] * ODD.E + [0], [-1] * ODD.E, [True] * ODD.E, [2**31] * ODD.E, [probs.sum()] * ODD.E, None),
        "alignment": (0, -1, 2**31, True, None),
        "buffer": (-2, 2**31, False, None),
    }.items():
        for gradient in (False, True):
            x.stop_gradient = not gradient
            for value in values:
                assert compiled.quick_moe_permute(*{**good, name: value}.values()) is None, (name, value)


def test_what_python_would_refuse_in_moe_unpermute_is_declined(moe):
    x, ids, probs, _ = moe
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, ODD.E, None, ODD.A)
    good = {"rows": rows, "rowmap": rowmap, "ids": ids, "probs": row_probs, "tokens": x.shape[0], "experts": ODD.E}
    changes = {
        "rows": (rows.astype("int32"), rows.astype("float8_e4m3fn"), rows[:-1], rows[:, :0], rows[0], None),
        "rowmap": (rowmap.astype("int64"), rowmap[:-1], rowmap[:, :-1], None),
        "ids": (ids.astype("float32"), ids[:-1], ids[:, :0], ids[0], None),
        "probs": (row_probs.astype("float64"), row_probs[:-1], row_probs.unsqueeze(0), row_probs.sum(), None),
        "tokens": (x.shape[0] + 1, -1, True, None),
        "experts": (ODD.E - 1, 0, 2**16 + 1, None),
    }
    for call in (compiled.quick_moe_unpermute, compiled.quick_moe_unpermute_weighted):
        assert call(*good.values()) is not None
        for name, values in changes.items():
            for gradient in (False, True):
                rows.stop_gradient = not gradient
                for value in values:
                    assert call(*{**good, name: value}.values()) is None, (name, value)
