# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients: a penalty on the gradient of every operator against the same in Paddle's own operators.

`CASES` says what is compared. A case that is in `UNSUPPORTED` has no gradient of its gradient, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import (
    masked,
    moe_permute,
    moe_unpermute,
    permute,
    reference,
    route,
    sort_chunks,
    unpermute,
    use_backend,
)
from paddle_moe_ops.backends import resolve
from paddle_moe_ops.routing import calculate_topk
from tests.ops.problems import Problem, make_problem, ordinary, plan_tensors, tensor
from tests.params import SMALL, Shape
from tests.static.modes import static_mode

Tensors = tuple[paddle.Tensor, ...]
Call = Callable[..., Tensors]

# Some slots have no row, some rows no slot, and no two sizes are equal.
SHAPE = Shape(11, 7, 5, 3, 2, "small: what is checked is linear algebra")


class Case(NamedTuple):
    """An operator as a function of its differentiable inputs, and the same function in plain Paddle."""

    inputs: tuple[NDArray, ...]
    call: Call
    dense: Call


def one_hot(columns: NDArray, width: int) -> paddle.Tensor:
    """[N, width] with a one where a line has its entry; a line of -1 is empty."""
    return paddle.to_tensor((columns[:, None] == np.arange(width)).astype(np.float32))


def plan_cases(place: Any, problem: Problem) -> dict[str, Case]:
    """The verbs that follow a plan."""
    plan = problem.plan()
    maps = plan_tensors(plan, place)
    rng = np.random.default_rng(2)
    rows = ordinary(rng, (plan.num_rows, SHAPE.H))
    from_tokens = one_hot(plan.row_to_token, SHAPE.T)  # rows = from_tokens @ x
    from_slots = one_hot(plan.row_to_slot, SHAPE.T * SHAPE.K)

    def weights_of_slots(probs: paddle.Tensor) -> paddle.Tensor:
        return from_slots @ probs.reshape([-1, 1])

    return {
        "route": Case(
            (problem.probs,),
            lambda p: (route(tensor(problem.ids, place), p, **problem.route_arguments).row_probs,),
            lambda p: (weights_of_slots(p).squeeze(-1),),
        ),
        "permute": Case((problem.x,), lambda x: (permute(x, maps)[0],), lambda x: (from_tokens @ x,)),
        "unpermute": Case((rows,), lambda y: (unpermute(y, maps),), lambda y: (from_tokens.T @ y,)),
        "unpermute-by-row": Case(
            (rows, ordinary(rng, (plan.num_rows,))),
            lambda y, p: (unpermute(y, maps, p),),
            lambda y, p: (from_tokens.T @ (y * p.unsqueeze(-1)),),
        ),
        "unpermute-by-slot": Case(
            (rows, problem.probs),
            lambda y, p: (unpermute(y, maps, p),),
            lambda y, p: (from_tokens.T @ (y * weights_of_slots(p)),),
        ),
        "slots_to_rows": Case(
            (problem.probs,),
            lambda p: (resolve("row_id_map").slots_to_rows(p, maps),),
            lambda p: (weights_of_slots(p).squeeze(-1),),
        ),
        "rows_to_slots": Case(
            (plan.row_probs,),
            lambda p: (resolve("row_id_map").rows_to_slots(p, maps),),
            lambda p: ((from_slots.T @ p.unsqueeze(-1)).reshape([SHAPE.T, SHAPE.K]),),
        ),
    }


def mask_cases(place: Any) -> dict[str, Case]:
    """Routing by a mask, and rows of probability zero, which permute drops, though gradients are sums over them."""
    rng = np.random.default_rng(3)
    mask = rng.random((SHAPE.T, SHAPE.E)) < 0.4
    probs = ordinary(rng, mask.shape)
    plan = reference.route(mask, probs, padding_alignment=2)
    places = np.where(plan.row_to_token >= 0, plan.row_to_token * SHAPE.E + plan.row_to_expert, -1)
    from_places = one_hot(places, SHAPE.T * SHAPE.E)
    x = ordinary(rng, (SHAPE.T, SHAPE.H))
    with_zeros = np.where(rng.random(mask.shape) < 0.5, 0, probs).astype(np.float32)
    from_tokens = one_hot(plan.row_to_token, SHAPE.T)
    kept = from_tokens * (from_places @ paddle.to_tensor(with_zeros).reshape([-1, 1]) != 0).astype("float32")

    def without_zeros(x: paddle.Tensor) -> Tensors:
        row_id_map, num_out = masked.make_row_id_map(tensor(mask, place), fp8_padding=2)
        weights = tensor(with_zeros, place)
        return (masked.permute_with_mask_map(x, row_id_map, num_out, weights, zero_prob_as_padding=True)[0],)

    return {
        "route-mask": Case(
            (probs,),
            lambda p: (route(tensor(mask, place), p, padding_alignment=2).row_probs,),
            lambda p: ((from_places @ p.reshape([-1, 1])).squeeze(-1),),
        ),
        "permute-zero-probs": Case(
            (x,), without_zeros, lambda x: (from_tokens @ x - ((from_tokens - kept) @ x).detach(),)
        ),
    }


def paddle_cases(place: Any, problem: Problem) -> dict[str, Case]:
    """Paddle's own two functions."""
    plan = problem.plan()
    ids, rowmap = tensor(problem.ids, place), tensor(reference.plan_to_rowmap(plan), place)
    rng = np.random.default_rng(4)
    rows = ordinary(rng, (plan.num_rows, SHAPE.H))
    from_tokens = one_hot(plan.row_to_token, SHAPE.T)
    from_slots = one_hot(plan.row_to_slot, SHAPE.T * SHAPE.K)

    def permuted(x: paddle.Tensor, probs: paddle.Tensor) -> Tensors:
        outputs = moe_permute(x, None, ids, probs, SHAPE.E, None, SHAPE.A)
        return outputs[0], outputs[2]

    def maps_only(x: paddle.Tensor, probs: paddle.Tensor) -> Tensors:
        outputs = moe_permute(x, None, ids, probs, SHAPE.E, None, SHAPE.A, do_gather=False)
        return outputs[0], outputs[2]

    def unpermuted(weighted: bool, compat: str | None = None) -> Call:
        def call(y: paddle.Tensor, probs: paddle.Tensor) -> Tensors:
            options = {"using_weighted_combine": weighted, "compat": compat}
            return moe_unpermute(y, rowmap, ids, probs, SHAPE.T, SHAPE.E, **options)

        return call

    def by_slot(probs: paddle.Tensor) -> paddle.Tensor:
        return (from_slots.T @ probs.reshape([-1, 1])).reshape([SHAPE.T, SHAPE.K])

    def row_probs(probs: paddle.Tensor) -> paddle.Tensor:
        return (from_slots @ probs.reshape([-1, 1])).squeeze(-1)

    return {
        "moe_permute": Case((problem.x, problem.probs), permuted, lambda x, p: (from_tokens @ x, row_probs(p))),
        "moe_permute-maps-only": Case(
            (problem.x, problem.probs), maps_only, lambda x, p: ((from_tokens @ x)[:0], row_probs(p))
        ),
        "moe_unpermute": Case((rows, plan.row_probs), unpermuted(False), lambda y, p: (from_tokens.T @ y, by_slot(p))),
        "moe_unpermute-compat": Case(
            (rows, plan.row_probs), unpermuted(False, "paddle"), lambda y, p: (from_tokens.T @ y, by_slot(p))
        ),
        "moe_unpermute-weighted": Case(
            (rows, plan.row_probs),
            unpermuted(True),
            lambda y, p: (from_tokens.T @ (y * p.unsqueeze(-1)), by_slot(p)),
        ),
        "moe_unpermute-weighted-column": Case(
            (rows, plan.row_probs[:, None]),
            unpermuted(True),
            lambda y, p: (from_tokens.T @ (y * p), by_slot(p)),
        ),
    }


def chunk_cases(place: Any) -> dict[str, Case]:
    rng = np.random.default_rng(5)
    sizes, order = tensor(np.array([3, 0, 2, 4]), place), tensor(np.array([2, 0, 3, 1], np.int32), place)
    x, probs = ordinary(rng, (SHAPE.T, SHAPE.H)), ordinary(rng, (SHAPE.T,))
    source = one_hot(np.array([3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10]), SHAPE.T)
    return {
        "sort_chunks": Case((x,), lambda x: (sort_chunks(x, sizes, order)[0],), lambda x: (source @ x,)),
        "sort_chunks-with-probs": Case(
            (x, probs),
            lambda x, p: sort_chunks(x, sizes, order, p)[:2],
            lambda x, p: (source @ x, (source @ p.unsqueeze(-1)).squeeze(-1)),
        ),
    }


def make_cases(place: Any) -> dict[str, Case]:
    problem = make_problem(np.random.default_rng(1), SHAPE)
    return {
        **plan_cases(place, problem),
        **mask_cases(place),
        **paddle_cases(place, problem),
        **chunk_cases(place),
    }


CASES = [*make_cases("cpu")]
WITH_TWO_INPUTS = [name for name, case in make_cases("cpu").items() if len(case.inputs) == 2]
WITH_TWO_OUTPUTS = [
    "moe_permute",
    "moe_unpermute",
    "moe_unpermute-compat",
    "moe_unpermute-weighted",
    "sort_chunks-with-probs",
]


@pytest.fixture
def case(request: pytest.FixtureRequest, place: Any) -> Case:
    return make_cases(place)[request.param]


def ramp(value: paddle.Tensor) -> paddle.Tensor:
    """Coefficients that differ for every element."""
    return paddle.linspace(0.5, 1.5, value.size).reshape(value.shape)


def cubes(values: Any) -> paddle.Tensor:
    """A scalar whose second derivatives depend on every element, those that are zero included."""
    return sum((ramp(value) * (value + 0.5) ** 3).sum() for value in values)


def leaves_of(case: Case, place: Any, wanted: tuple[bool, ...] = (True, True)) -> list[paddle.Tensor]:
    return [tensor(array, place, gradient=want) for array, want in zip(case.inputs, wanted, strict=False)]


def penalised_gradients(
    call: Call, leaves: list[paddle.Tensor], use: slice = slice(None), penalise: slice = slice(None)
) -> list[NDArray | None]:
    """The gradients of a loss and of a penalty on some of its gradients, from one backward."""
    wanted = [leaf for leaf in leaves if not leaf.stop_gradient]
    loss = cubes(call(*(leaf * 1.0 for leaf in leaves))[use])
    first = paddle.grad([loss], wanted, create_graph=True, allow_unused=True)
    (loss + cubes(gradient for gradient in first[penalise] if gradient is not None)).backward()
    return [None if leaf.grad is None else leaf.grad.numpy() for leaf in leaves]


def assert_close(got: list[NDArray | None], expected: list[NDArray | None]) -> None:
    for mine, wanted in zip(got, expected, strict=True):
        if wanted is None:
            assert mine is None or not mine.any()
        else:
            np.testing.assert_allclose(mine, wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())


def assert_as_dense(case: Case, place: Any, wanted: tuple[bool, ...] = (True, True), **options: slice) -> None:
    got, expected = (
        penalised_gradients(call, leaves_of(case, place, wanted), **options) for call in (case.call, case.dense)
    )
    assert any(gradient is not None for gradient in got)
    assert_close(got, expected)


@pytest.mark.compiled_only
@pytest.mark.parametrize("case", CASES, indirect=True)
class TestGradientPenalty:
    def test_on_all_gradients_is_that_of_plain_paddle(self, case, place):
        assert_as_dense(case, place)

    def test_differs_from_the_loss_alone(self, case, place):
        """So that a gradient without the penalty's part would not pass above."""
        inputs = leaves_of(case, place)
        cubes(case.call(*inputs)).backward()
        alone = [leaf.grad for leaf in inputs if leaf.grad is not None]
        both = [each for each in penalised_gradients(case.call, leaves_of(case, place)) if each is not None]
        for mine, other in zip(both, alone, strict=True):
            assert not mine.any() or np.abs(mine - other.numpy()).max() > 0.01 * np.abs(mine).max()


@pytest.mark.compiled_only
@pytest.mark.parametrize("case", WITH_TWO_INPUTS, indirect=True)
class TestTwoInputs:
    @pytest.mark.parametrize("penalised", [0, 1], ids=["rows", "probabilities"])
    def test_penalty_on_one_of_the_gradients(self, case, penalised, place):
        assert_as_dense(case, place, penalise=slice(penalised, penalised + 1))

    @pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rows only", "probabilities only"])
    def test_one_input_alone_wants_gradients(self, case, wanted, place, request):
        if "maps-only" in request.node.callspec.id and wanted[0]:
            return  # no output depends on the rows
        assert_as_dense(case, place, wanted)


@pytest.mark.compiled_only
@pytest.mark.parametrize("used", [0, 1], ids=["rows", "probabilities"])
@pytest.mark.parametrize("case", WITH_TWO_OUTPUTS, indirect=True)
def test_an_output_that_the_loss_does_not_use(case, used, place):
    assert_as_dense(case, place, use=slice(used, used + 1))


@pytest.mark.compiled_only
@pytest.mark.parametrize("case", CASES, indirect=True)
def test_gradients_have_no_history_unless_it_is_asked_for(case, place):
    inputs = leaves_of(case, place)
    loss = cubes(case.call(*inputs))
    plain = paddle.grad([loss], inputs, retain_graph=True, allow_unused=True)
    assert all(gradient is None or gradient.grad_fn is None for gradient in plain)
    with_history = paddle.grad([loss], inputs, create_graph=True, allow_unused=True)
    assert any(gradient is not None and gradient.grad_fn is not None for gradient in with_history)


NOT_LINEAR = {
    "unpermute-by-row",
    "unpermute-by-slot",
    "permute-zero-probs",
    "moe_unpermute-weighted",
    "moe_unpermute-weighted-column",
}


@pytest.mark.parametrize("name", CASES)
def test_where_python_connects_the_gradients_those_of_linear_operators_have_some(name, place):
    case = make_cases(place)[name]
    with use_backend("reference"):
        if name not in NOT_LINEAR:
            assert_as_dense(case, place)
            return
        with pytest.raises((RuntimeError, OSError), match=NOT_SUPPORTED):
            assert_as_dense(case, place)


@pytest.mark.parametrize("tokens", [0, 3])
def test_padding_rows_have_no_part_in_the_gradient_of_a_gradient(tokens, place, backend):
    ids = tensor(np.array([[0, 2], [2, 1], [0, 1]], np.int32)[:tokens], place)
    probs = tensor(np.full((tokens, 2), 0.5, np.float32), place, gradient=True)
    plan = route(ids, probs, num_experts=3, padding_alignment=4, buffer_size=12)
    of_rows = tensor(np.arange(1, 13, dtype=np.float32), place, gradient=True)  # the gradient of row_probs
    (once,) = paddle.grad([(plan.row_probs * of_rows).sum()], [probs], create_graph=True)
    (once**2).sum().backward()
    is_row = plan.row_to_slot.numpy() >= 0
    assert is_row.sum() == 2 * tokens
    np.testing.assert_array_equal(of_rows.grad.numpy(), np.where(is_row, 2 * of_rows.numpy(), 0))


HARDLY = {
    "permute": (3, lambda ids, x: permute(x, route(ids, num_experts=1))[0]),
    "unpermute": (3, lambda ids, y: unpermute(y, route(ids, num_experts=1))),
    "route": (1, lambda ids, probs: route(ids, probs, num_experts=1).row_probs),
    "moe_permute": (1, lambda ids, probs: moe_permute(probs.detach(), None, ids, probs, 1, None, 1)[2]),
}


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("name", HARDLY)
def test_gradients_of_gradients_of_hardly_any_token(name, tokens, place, backend):
    columns, function = HARDLY[name]
    ids = tensor(np.zeros((tokens, 1), np.int32), place)
    values = tensor(np.full((tokens, columns), 1.5, np.float32), place, gradient=True)
    (once,) = paddle.grad([(function(ids, values) ** 3).sum()], [values], create_graph=True)
    (once**2).sum().backward()  # of 9 x^4
    np.testing.assert_allclose(values.grad.numpy(), np.full(values.shape, 36 * 1.5**3), rtol=1e-6)


@pytest.mark.compiled_only
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_whole_layer_in_sixteen_bits(dtype, rng, place):
    """A penalty on the gradients of tokens and probabilities, within the error of the dtype."""
    problem = make_problem(rng, SMALL)

    def layer(x, probs, dtype):
        plan = route(tensor(problem.ids, place), probs, **problem.route_arguments)
        rows, _ = permute(x.astype(dtype), plan)
        experts = (rows.astype("float32") ** 2).astype(dtype)  # Paddle has few operators in 16 bits on the CPU
        return unpermute(experts, plan, plan.row_probs).astype("float32")

    def run(dtype):
        x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
        first = paddle.grad([layer(x, probs, dtype).sum()], [x, probs], create_graph=True)
        sum((gradient * gradient).sum() for gradient in first).backward()
        return x.grad.numpy(), probs.grad.numpy()

    for narrow, wide in zip(run(dtype), run("float32"), strict=True):
        np.testing.assert_allclose(narrow, wide, rtol=0.05, atol=0.02 * np.abs(wide).max())


@pytest.mark.compiled_only
def test_hessian(place):
    """Hessian of a weighted sum in its probabilities, by Paddle's own function."""
    case = make_cases(place)["unpermute-by-slot"]
    rows = tensor(case.inputs[0], place)
    hessians = []
    for call in (case.call, case.dense):
        probs = tensor(case.inputs[1].reshape(-1), place, gradient=True)
        value = cubes(call(rows, probs.reshape([SHAPE.T, SHAPE.K])))
        hessians.append(paddle.autograd.hessian(value, probs)[:].numpy())
    np.testing.assert_allclose(*hessians, rtol=1e-4, atol=1e-4 * np.abs(hessians[1]).max())
    assert hessians[0].any()


def topk(gating: paddle.Tensor) -> Tensors:
    return calculate_topk(gating, 3, True, True)[:1]


def topk_scores(gating: paddle.Tensor) -> Tensors:
    return calculate_topk(gating, 3, False, False, return_scores=True)[2:]


def weighted_like_paddle(place: Any) -> Call:
    problem = make_problem(np.random.default_rng(1), SHAPE)
    ids, rowmap = tensor(problem.ids, place), tensor(reference.plan_to_rowmap(problem.plan()), place)

    def call(y: paddle.Tensor, probs: paddle.Tensor) -> Tensors:
        options = {"using_weighted_combine": True, "compat": "paddle"}
        return moe_unpermute(y, rowmap, ids, probs, SHAPE.T, SHAPE.E, **options)

    return call


NOT_SUPPORTED = "second-order gradients are not supported"
UNSUPPORTED = {
    "calculate_topk": (
        lambda place: topk,
        ["gating"],
        f"calculate_topk: {NOT_SUPPORTED}; detach",
    ),
    "calculate_topk-scores": (lambda place: topk_scores, ["gating"], f"calculate_topk: {NOT_SUPPORTED}"),
    "moe_unpermute-weighted-compat": (
        weighted_like_paddle,
        ["rows", "probs"],
        f'moe_unpermute: {NOT_SUPPORTED} for the weighted combine with compat="paddle"',
    ),
}


@pytest.mark.compiled_only
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_has_no_second_order_gradient_says_so_when_it_is_needed(name, place):
    make_call, names, message = UNSUPPORTED[name]
    problem = make_problem(np.random.default_rng(1), SHAPE)
    plan = problem.plan()
    arrays = {
        "gating": ordinary(np.random.default_rng(6), (SHAPE.T, SHAPE.E)),
        "rows": ordinary(np.random.default_rng(7), (plan.num_rows, SHAPE.H)),
        "probs": plan.row_probs,
    }
    inputs = [tensor(arrays[each], place, gradient=True) for each in names]
    loss = cubes(make_call(place)(*inputs))
    plain = paddle.grad([loss], inputs, retain_graph=True)
    first = paddle.grad([loss], inputs, create_graph=True)
    for gradient, expected in zip(first, plain, strict=True):
        np.testing.assert_array_equal(gradient.numpy(), expected.numpy())
    with pytest.raises(RuntimeError, match=message):
        cubes(first).backward()


def by_plan(x: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    plan = route(ids, num_experts=SHAPE.E)
    rows, _ = permute(x, plan)
    return unpermute(rows, plan)


GRAPHS = {
    "none": lambda x, _: x,
    "plan": by_plan,
    "moe_permute": lambda x, ids: moe_permute(x, None, ids, ids.astype("float32"), SHAPE.E, None, 1)[0],
    "sort_chunks": lambda x, ids: sort_chunks(x, ids[0], ids[1])[0],
}


@pytest.mark.compiled_only
@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
@pytest.mark.parametrize("name", [*GRAPHS])
def test_a_static_graph_has_first_order_gradients_only(name):
    """Paddle takes the results of an operator's gradient for constants there; with its own operators it goes on."""
    function = GRAPHS[name]
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        x, ids = (
            paddle.static.data("x", [SHAPE.T, SHAPE.H], "float32"),
            paddle.static.data("ids", [SHAPE.T, 2], "int32"),
        )
        x.stop_gradient = False
        out = function(x, ids)
        (first,) = paddle.static.gradients([(out * out).sum()], [x])
        assert first is not None
        (second,) = paddle.static.gradients([(first * first).sum()], [x])
        assert (second is None) == (name != "none")
