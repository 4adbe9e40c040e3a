# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Static graphs (paddle.enable_static, static.gradients, Executor): the bits of dygraph, one program for any T.

Only the sums of Paddle's own matmul may differ.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops import (
    dequantize_1x128,
    moe_permute,
    moe_unpermute,
    permute,
    quantize_1x128,
    route,
    unpermute,
)
from tests.ops.operator_calls import GOOD_CALLS, by_position
from tests.static.cases import CASES, layer, permute_small_buffer
from tests.static.forms import FORMS
from tests.static.inputs import A, E, H, K, token_inputs
from tests.static.modes import (
    StaticGraph,
    assert_run_of,
    assert_same_run,
    free_shapes,
    random_d_outputs,
    run_dygraph,
    static_mode,
)

# Paddle says so of its own full_like, whenever it makes a gradient in a graph.
pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")

CASE = {case.name: case for case in CASES}


# The others are traced into one program for any number of tokens by test_to_static.py.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [*CASES, *FORMS], ids=str)
def test_results_of_dygraph_for_any_number_of_tokens(case, rng, place):
    graph = None
    for tokens in (63, 0, 1, 200):
        inputs = case.inputs(rng, tokens)
        d_outputs = random_d_outputs(case, inputs, rng)
        graph = graph or StaticGraph(case, d_outputs)
        expected = run_dygraph(case.function, inputs, case.leaves, d_outputs)
        assert_run_of(case, graph.run(inputs, d_outputs), expected, inputs, d_outputs)


@pytest.mark.parametrize("wanted", [0, 1], ids=["hidden_states", "expert_prob_topk"])
def test_gradient_of_one_output_alone(wanted, rng, place):
    case = CASE["layer"]
    inputs = case.inputs(rng, 29)
    d_output = {wanted: random_d_outputs(case, inputs, rng)[wanted]}
    expected = run_dygraph(layer, inputs, case.leaves, d_output)
    assert_same_run(StaticGraph(case, d_output).run(inputs, d_output), expected)


def test_list_of_counts_is_part_of_the_program_and_checked_when_it_runs(rng, place):
    inputs = token_inputs()(rng, 29)
    ids = inputs["ids"]
    counts = np.bincount(ids[ids >= 0], minlength=E).tolist()
    case = CASE["moe_permute-float32"]._replace(
        function=lambda x, ids, probs: moe_permute(x, None, ids, probs, E, counts, A)
    )
    d_outputs = random_d_outputs(case, inputs, rng)
    graph = StaticGraph(case, d_outputs)
    rows = sum(-(-count // A) * A for count in counts)
    assert list(graph.outputs[0].shape) == [rows, H]
    assert_same_run(graph.run(inputs, d_outputs), run_dygraph(case.function, inputs, case.leaves, d_outputs))
    inputs["ids"] = np.where(ids == 0, -1, ids)
    with pytest.raises(ValueError, match=r"moe_permute: tokens_per_expert must be \[0, "):
        graph.run(inputs, d_outputs)


@pytest.mark.parametrize("dtype", [paddle.int32, paddle.float32])
@pytest.mark.parametrize("operator", ["permute", "moe_permute"])
def test_a_scale_that_paddle_drops_keeps_its_dtype(operator, dtype, place):
    """An optional input without elements is none to Paddle, which is why attributes describe it."""
    scale = {"scale": None, "has_scale": True, "scale_cols": 0, "scale_dtype": dtype.value}
    tensors = {name: made for name, made in GOOD_CALLS[operator].items() if callable(made)}
    arrays = {name: made(place).numpy() for name, made in tensors.items()}
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        inputs = {name: paddle.static.data(name, array.shape, array.dtype.name) for name, array in arrays.items()}
        arguments = {**GOOD_CALLS[operator], **scale, **inputs}
        outputs = paddle._C_ops._run_custom_op(f"pmo_{operator}", *by_position(operator, arguments))
        scales = outputs[{"permute": 1, "moe_permute": 3}[operator]]
        assert scales.dtype == dtype
        (values,) = paddle.static.Executor().run(feed=arrays, fetch_list=[scales])
    assert values.dtype.name == str(dtype).rpartition(".")[2]


def test_a_free_number_of_tokens_may_be_given_as_the_shape_says_it(place):
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        rows = paddle.static.data("rows", [None, H], "float32")
        rowmap = paddle.static.data("rowmap", [None, E], "int32")
        ids = paddle.static.data("ids", [None, K], "int32")
        probs = paddle.static.data("probs", [None], "float32")
        for tokens in (rowmap.shape[0], paddle.shape(rowmap)[0]):
            out, _ = moe_unpermute(rows, rowmap, ids, probs, tokens, E)
            assert list(out.shape) == [-1, H]


def test_shapes_are_known_as_far_as_they_can_be(place):
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        x = paddle.static.data("x", [None, H], "bfloat16")
        ids = paddle.static.data("ids", [None, K], "int32")
        probs = paddle.static.data("probs", [None, K], "float32")
        rows, rowmap, row_probs, _, overflow = permute_small_buffer(x, ids, probs)
        assert [list(value.shape) for value in (rows, rowmap, row_probs, overflow)] == [[19, H], [-1, E], [19], []]
        assert rows.dtype == paddle.bfloat16
        plan = route(ids, num_experts=E)
        assert (plan.num_tokens, plan.topk, plan.num_rows) == (-1, K, -1)
        assert list(plan.expert_offsets.shape) == [E + 1]
        assert list(unpermute(permute(x, plan)[0], plan).shape) == [-1, H]


def test_maps_counts_and_scales_have_no_gradient(place):
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        x, ids, probs, scale = (
            paddle.static.data(name, *spec) for name, spec in free_shapes(CASE["moe_permute-scale"]).items()
        )
        x.stop_gradient = probs.stop_gradient = False
        rows, rowmap, row_probs, scales, indices = moe_permute(
            x, scale, ids, probs, E, None, A, return_expert_indices=True
        )
        assert not rows.stop_gradient
        assert not row_probs.stop_gradient
        assert [value.stop_gradient for value in (rowmap, scales, indices)] == [True] * 3
        plan = route(ids, probs, num_experts=E)
        wanting = [name for name, value in plan._asdict().items() if not getattr(value, "stop_gradient", True)]
        assert wanting == ["row_probs"]
        assert permute(x.astype("float8_e4m3fn"), plan)[0].stop_gradient


def test_float8_rows_of_trained_tokens_leave_the_gradient_to_the_probabilities(rng, place):
    def program(x, ids, probs):
        rows, _, row_probs, _ = moe_permute(x.astype("float8_e4m3fn"), None, ids, probs, E, None, A)
        return rows.astype("float32") * row_probs.unsqueeze(-1), 2 * x

    case = CASE["moe_permute-float32"]._replace(function=program, inputs=token_inputs(), leaves=("x", "probs"))
    inputs = case.inputs(rng, 29)
    d_outputs = random_d_outputs(case, inputs, rng)
    expected = run_dygraph(program, inputs, case.leaves, d_outputs)
    assert_same_run(StaticGraph(case, d_outputs).run(inputs, d_outputs), expected)


def test_shapes_that_cannot_fit_raise_when_the_program_is_built(place):
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        x = paddle.static.data("x", [7, H], "float32")
        ids = paddle.static.data("ids", [None, K], "int32")
        ids_of_six = paddle.static.data("ids_of_six", [6, K], "int32")
        probs = paddle.static.data("probs", [None, K + 1], "float32")
        rowmap = paddle.static.data("rowmap", [None, E + 1], "int32")
        with pytest.raises(
            ValueError, match=r"moe_permute: expert_prob_topk must be of shape \[-1, 3\], but got \[-1, 4\]"
        ):
            moe_permute(x, None, ids, probs, E, None, A)
        with pytest.raises(
            ValueError, match=r"moe_permute: expert_routemap_topk must be of shape \[7, topk\], but got \[6, 3\]"
        ):
            moe_permute(x, None, ids_of_six, probs, E, None, A)
        with pytest.raises(
            ValueError, match=r"moe_unpermute: zipped_expertwise_rowmap must be of shape \[7, 5\], but got"
        ):
            moe_unpermute(x, rowmap, ids, probs, 7, E)
        with pytest.raises(TypeError, match=r"route: probs must be of dtype float32, but got int32"):
            route(ids, ids_of_six, num_experts=E)
        with pytest.raises(TypeError, match=r"permute: x must be of dtype .*, but got int32"):
            permute(ids, route(ids, num_experts=E))


def test_sizes_that_do_not_fit_raise_when_the_program_runs(rng, place):
    case = CASE["moe_permute-float32"]
    inputs = case.inputs(rng, 29)
    graph = StaticGraph(case, {})
    with pytest.raises(ValueError, match="moe_permute: expert_routemap_topk must have one line per token"):
        graph.run({**inputs, "x": inputs["x"][:28]}, {})
    inputs["ids"][2, 0] = E + 3
    with pytest.raises(
        ValueError, match=rf"moe_permute: expert_routemap_topk must hold expert ids .* slot 0 holds {E + 3}"
    ):
        graph.run(inputs, {})


def test_dequantised_rows_stop_gradients_of_what_their_scales_are_made_of(rng, place):
    """Values of graphs are not detached, so the operator's output must stop gradients itself."""
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        x = paddle.static.data("x", [3, 128], "float32")
        factor = paddle.static.data("factor", [1], "float32")
        x.stop_gradient = factor.stop_gradient = False
        codes, scales = quantize_1x128(x)
        rows = dequantize_1x128(codes, scales * factor, dtype=paddle.float32)
        assert rows.stop_gradient
        gradients = paddle.static.gradients([(rows * factor).sum()], [factor])
        feed = {"x": np.ones((3, 128), np.float32), "factor": np.float32([2])}
        (d_factor,) = paddle.static.Executor(place).run(feed=feed, fetch_list=gradients)
    np.testing.assert_allclose(d_factor, 3 * 128 * 2, rtol=1e-3)
