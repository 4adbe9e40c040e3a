# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Float8 experts in programs: one operator on every device, so a program saved on one runs on another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_moe_ops import Float8Matrices, moe_mlp, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.testing.tolerances import assert_close_float8
from tests.ops.problems import tensor
from tests.static.modes import plain_errors, predictor_of, static_mode
from tests.static.test_expert_programs import DTYPES, run

E, K, PADDING = 6, 2, 16
FLOAT8 = "fp8_1x128"
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
# The first ones are for the kernels for Hopper.
SIZES = pytest.mark.parametrize("sizes", [(64, 128), (7, 72)], ids=str)
TOKENS = (1, 63, 1025)  # in a program paddle.topk of no tokens gives ids of another shape
# Paddle's remarks about its own full_like, and about models without parameters.
pytestmark = [
    pytest.mark.compiled_only,
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
    pytest.mark.filterwarnings("ignore:no variable in your model"),
]


def plan_of(scores):
    """The plan and probabilities of a router with an idle last expert and slots without an expert."""
    probs, ids = paddle.topk(scores[:, : E - 1], K)
    has_none = (probs < -0.5).astype(ids.dtype)
    return route(ids - has_none * (ids + 1), num_experts=E, padding_alignment=PADDING), probs


def layer_with(**options: Any) -> Callable[..., Any]:
    """float32 in and out; the experts are of the matrices' dtype."""

    def layer(x, scores, gate_up, down):
        plan, probs = plan_of(scores)
        return moe_mlp(x.astype(gate_up.dtype), plan, probs, gate_up, down, **options).astype("float32")

    return layer


layer = layer_with(compute=FLOAT8)


def arrays(rng: np.random.Generator, tokens: int, dtype: str, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
    d, n = sizes
    shapes = {"x": (tokens, d), "scores": (tokens, E), "gate_up": (E, d, 2 * n), "down": (E, n, d)}
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    kind = DTYPES[dtype]
    return made | {name: (made[name] / 8).astype(kind) for name in ("gate_up", "down")}


def specs(dtype: str, sizes: tuple[int, int]) -> list[InputSpec]:
    d, n = sizes
    matrices = [InputSpec([E, d, 2 * n], dtype, "gate_up"), InputSpec([E, n, d], dtype, "down")]
    return [InputSpec([None, d], "float32", "x"), InputSpec([None, E], "float32", "scores"), *matrices]


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Relative to the norm of the second."""
    one, other = (each.astype(np.float64) for each in (one, other))
    assert one.shape == other.shape
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30))


def assert_near(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() >= expected.keys()  # a program gives zeros where dygraph gives no gradient
    for name, due in expected.items():
        assert_close_float8(got[name], due, name)


def traced(function: Callable[..., Any], dtype: str, sizes: tuple[int, int]) -> Any:
    return paddle.jit.to_static(function, input_spec=specs(dtype, sizes), full_graph=True)


@SIZES
@BY_DTYPE
def test_a_traced_program_has_the_results_and_gradients_of_dygraph(dtype, sizes, rng, place):
    program = traced(layer, dtype, sizes)
    for tokens in TOKENS:
        given = arrays(rng, tokens, dtype, sizes)
        made, due = run(program, given, place), run(layer, given, place)
        assert_near(made, due)
        if tokens:
            exact = run(layer_with(), given, place)
            assert 1e-3 < distance(made["out"], exact["out"]) < 0.2


@pytest.mark.parametrize("options", [{"keep": "x"}, {"workspace_mb": 1}], ids=str)
def test_what_is_kept_changes_no_bit(options, rng, place):
    given = arrays(rng, 63, "bfloat16", (64, 128))
    made, due = (
        run(traced(layer_with(compute=FLOAT8, **each), "bfloat16", (64, 128)), given, place) for each in (options, {})
    )
    for name, expected in due.items():
        np.testing.assert_array_equal(made[name], expected, err_msg=name)


def test_transposed_matrices(rng, place):
    given = arrays(rng, 63, "bfloat16", (64, 128))
    turned = {name: np.ascontiguousarray(given[name].swapaxes(1, 2)) for name in ("gate_up", "down")}
    function = layer_with(compute=FLOAT8, transpose=True)
    made = run(paddle.jit.to_static(function, full_graph=True), {**given, **turned}, place)
    due = run(layer, given, place)
    for name in turned:
        made[name] = made[name].swapaxes(1, 2)
    assert_near(made, due)


def program_of(dtype: str, sizes: tuple[int, int]) -> str:
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        inputs = [paddle.static.data(each.name, list(each.shape), each.dtype) for each in specs(dtype, sizes)]
        for each in inputs:
            each.stop_gradient = False
        paddle.static.gradients([layer(*inputs).sum()], inputs)
        return str(paddle.static.default_main_program())


@BY_DTYPE
def test_a_program_has_one_operator_for_a_layer_and_none_that_reads_sizes(dtype, place):
    found = re.findall(r'"(?:custom_op|pd_op)\.(\w+)"', program_of(dtype, (64, 128)))
    assert found.count("pmo_moe_mlp_float8") == found.count("pmo_moe_mlp_float8_grad") == 1
    assert not {"pmo_moe_mlp", "matmul", "split", "concat", "memcpy_d2h", "unbind"} & {*found}
    assert found.count("full_like") == 1  # the first gradient of the backward pass, and none for saved tensors


@pytest.mark.cpu_only  # on the rig's device Paddle's optimizers change nothing in programs
def test_a_program_with_an_optimizer_trains(rng, place):
    d, n = 64, 128
    given = arrays(rng, 48, "float32", (d, n))
    teacher = rng.standard_normal((d, d)).astype(np.float32) / 8
    with static_mode(), paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        x = paddle.static.data("x", [None, d], "float32")
        due = paddle.static.data("due", [None, d], "float32")
        matrices = {
            name: paddle.create_parameter(
                list(given[name].shape), "float32", default_initializer=paddle.nn.initializer.Assign(given[name])
            )
            for name in ("gate_up", "down")
        }
        router = paddle.create_parameter([d, E], "float32")
        loss = (layer(x, paddle.matmul(x, router), *matrices.values()) - due).square().mean()
        paddle.optimizer.Adam(1e-2).minimize(loss)
        executor = paddle.static.Executor()
        executor.run(paddle.static.default_startup_program())
        feed = {"x": given["x"], "due": np.tanh(given["x"] @ teacher)}
        losses = [float(executor.run(feed=feed, fetch_list=[loss])[0]) for _ in range(25)]
    assert losses[-1] < 0.7 * losses[0]


def save(folder: Path, dtype: str, sizes: tuple[int, int]) -> str:
    holder = paddle.nn.Layer()
    holder.forward = layer
    paddle.jit.save(traced(holder, dtype, sizes), str(folder / "model"))
    return str(folder / "model")


@BY_DTYPE
@pytest.mark.parametrize("saved_on", ["cpu", "device"])
def test_a_program_runs_on_another_device_than_it_was_saved_on(saved_on, dtype, rng, place, tmp_path):
    sizes = 64, 128
    here, there = (place, paddle.CPUPlace()) if saved_on == "device" else (paddle.CPUPlace(), place)
    given = arrays(rng, 63, dtype, sizes)
    try:
        paddle.set_device(here)
        model = save(tmp_path, dtype, sizes)
        expected = run(layer, given, here)["out"]
        paddle.set_device(there)
        made = paddle.jit.load(model)(*(tensor(array, there) for array in given.values()))
    finally:
        paddle.set_device(place)
    assert_near({"out": to_numpy(made)}, {"out": expected})


@SIZES
def test_the_inference_engine_serves_batches_of_other_sizes(sizes, rng, place, tmp_path):
    predictor = predictor_of(save(tmp_path, "float32", sizes))
    for tokens in (1, 7, 200):
        given = arrays(rng, tokens, "float32", sizes)
        for name in predictor.get_input_names():
            predictor.get_input_handle(name).copy_from_cpu(given[name])
        predictor.run()
        (made,) = (predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names())
        assert_near({"out": made}, {"out": run(layer, given, place)["out"]})


@pytest.mark.parametrize("form", ["by slot", "by row", "none"])
def test_weights_of_every_form(form, rng, place):
    given = arrays(rng, 63, "float32", (64, 128))

    def function(x, scores, gate_up, down):
        probs, ids = paddle.topk(scores, K)
        plan = route(ids, probs, num_experts=E)
        weights = {"by slot": probs, "by row": plan.row_probs, "none": None}[form]
        order = {"by row": "row"}.get(form)
        return moe_mlp(x, plan, weights, gate_up, down, compute=FLOAT8, weights_by=order)

    assert_near(run(traced(function, "float32", (64, 128)), given, place), run(function, given, place))


def test_lists_of_matrices(rng, place):
    given = arrays(rng, 63, "float32", (64, 128))

    def by_list(x, scores, gate_up, down):
        plan, probs = plan_of(scores)
        return moe_mlp(x, plan, probs, list(paddle.unbind(gate_up)), list(paddle.unbind(down)), compute=FLOAT8)

    assert_near(run(traced(by_list, "float32", (64, 128)), given, place), run(layer, given, place))


def test_tokens_of_more_dimensions(rng, place):
    given = arrays(rng, 24, "float32", (64, 128))

    def function(x, scores, gate_up, down):
        return layer(x.reshape([4, 6, 64]).flatten(0, 1), scores, gate_up, down)

    assert_near(run(traced(function, "float32", (64, 128)), given, place), run(function, given, place))


def test_mixed_precision(rng, place):
    given = arrays(rng, 63, "float32", (64, 128))

    def function(x, scores, gate_up, down):
        with paddle.amp.auto_cast(dtype="bfloat16", level="O1"):
            return layer(x, scores, gate_up, down)

    assert_near(run(traced(function, "float32", (64, 128)), given, place), run(function, given, place))


@pytest.mark.filterwarnings("ignore:.*")
def test_tracing_by_bytecode(rng, place):
    given = arrays(rng, 63, "float32", (64, 128))
    with plain_errors():
        made = run(paddle.jit.to_static(layer, full_graph=False), given, place)
    assert_near(made, run(layer, given, place))


NOT_IN_GRAPHS = "in a graph only SwiGLU without biases multiplies float8 operands"
BAD = {
    "biases": ({"down_bias": True}, f"None, since {NOT_IN_GRAPHS}, but got 'fp8_1x128'"),
    "an activation": ({"activation": "geglu"}, f"None, since {NOT_IN_GRAPHS}, but got 'fp8_1x128'"),
    "another word": ({"compute": "fp8"}, "one of None, 'fp8_1x128', 'fp8_1x128_wgrad', but got 'fp8'"),
}


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(changes, text, rng, place):
    given = arrays(rng, 5, "float32", (16, 8))

    def function(x, scores, gate_up, down):
        options = {"compute": FLOAT8, **changes}
        if "down_bias" in options:
            options["down_bias"] = paddle.zeros([E, 16])
        return layer_with(**options)(x, scores, gate_up, down)

    with pytest.raises(ValueError, match=f"moe_mlp: compute must be {re.escape(text)}"):
        run(traced(function, "float32", (16, 8)), given, place)


def test_kept_matrices_are_named(rng, place):
    given, kept = arrays(rng, 5, "float32", (16, 8)), Float8Matrices()
    function = layer_with(compute=FLOAT8, float8_matrices=kept)
    text = "float8_matrices must be None in a static graph, which quantises the matrices in each call, but got "
    with pytest.raises(ValueError, match=f"moe_mlp: {text}"):
        run(traced(function, "float32", (16, 8)), given, place)
    assert kept.is_empty


def test_gradients_of_another_shape_are_refused(rng, place):
    given = arrays(rng, 5, "float32", (16, 8))
    leaves = [tensor(array, place, gradient=True) for array in given.values()]
    out = traced(layer, "float32", (16, 8))(*leaves)
    with pytest.raises(ValueError, match="gradient"):
        paddle.autograd.backward([out], [paddle.ones([5, 17])])


def test_types_of_rows_are_those_of_the_tokens(rng, place):
    for dtype, kind in DTYPES.items():
        given = arrays(rng, 5, dtype, (16, 8))

        def function(x, scores, gate_up, down):
            return layer(x, scores, gate_up, down).astype(gate_up.dtype)

        made = run(traced(function, dtype, (16, 8)), given, place)
        assert made["out"].dtype == np.dtype(kind)
        assert made["gate_up"].dtype == np.dtype(kind)
