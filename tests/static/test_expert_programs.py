# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts in programs: operators of the library on every device, so a program saved on one runs on another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_moe_ops import QuantizedMatrices, moe_mlp, quantize_experts, route
from paddle_moe_ops.backends import compiled, register_operators
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer
from tests.ops.problems import tensor
from tests.static.modes import predictor_of, static_mode

E, K, D, N = 6, 2, 64, 40  # sizes that the kernels for Hopper take
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LIMITS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
# Paddle's remarks about its own full_like, and about models without parameters.
pytestmark = [
    pytest.mark.compiled_only,
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
    pytest.mark.filterwarnings("ignore:no variable in your model"),
]


def layer(x, scores, gate_up, down):
    """float32 in and out; the experts are of the matrices' dtype."""
    probs, ids = paddle.topk(scores, K)
    plan = route(ids, num_experts=E)
    return moe_mlp(x.astype(gate_up.dtype), plan, probs, gate_up, down).astype("float32")


def products(x, scores, gate_up, down):
    plan = route(paddle.topk(scores, K)[1], num_experts=E)
    rows = grouped_gemm(x.astype(gate_up.dtype), gate_up, plan=plan, permute_x=True, transpose=False)
    return grouped_gemm(rows[:, :N], down, plan=plan, transpose=False, permute_y=True).astype("float32")


def arrays(rng: np.random.Generator, tokens: int, dtype: str) -> dict[str, np.ndarray]:
    shapes = {"x": (tokens, D), "scores": (tokens, E), "gate_up": (E, D, 2 * N), "down": (E, N, D)}
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    kind = DTYPES[dtype]
    return made | {name: (made[name] / 8).astype(kind) for name in ("gate_up", "down")}


def specs(dtype: str) -> list[InputSpec]:
    matrices = [InputSpec([E, D, 2 * N], dtype, "gate_up"), InputSpec([E, N, D], dtype, "down")]
    return [InputSpec([None, D], "float32", "x"), InputSpec([None, E], "float32", "scores"), *matrices]


def run(function, given: dict[str, np.ndarray], place: Any) -> dict[str, np.ndarray]:
    """The result, and the gradient of each input."""
    leaves = {name: tensor(array, place, gradient=True) for name, array in given.items()}
    out = function(*leaves.values())
    (out * paddle.linspace(-1, 1, out.shape[1])).sum().backward()
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"out": to_numpy(out), **{name: to_numpy(gradient) for name, gradient in found.items()}}


def assert_close(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], dtype: str) -> None:
    assert got.keys() >= expected.keys()  # a program gives zeros where dygraph gives no gradient
    for name, due in expected.items():
        one, other = (array.astype(np.float64) for array in (got[name], due))
        assert one.shape == other.shape, name
        assert np.linalg.norm(one - other) <= LIMITS[dtype] * np.linalg.norm(other), name


@BY_DTYPE
@pytest.mark.parametrize("function", [layer, products], ids=lambda function: function.__name__)
def test_a_traced_program_has_the_results_and_gradients_of_dygraph(function, dtype, rng, place):
    traced = paddle.jit.to_static(function, input_spec=specs(dtype), full_graph=True)
    for tokens in (1, 63, 300):
        given = arrays(rng, tokens, dtype)
        assert_close(run(traced, given, place), run(function, given, place), dtype)


def test_a_program_takes_matrices_of_any_inner_size(rng, place):
    any_size = {"gate_up": [E, D, None], "down": [E, None, D]}
    traced = paddle.jit.to_static(
        layer,
        input_spec=[InputSpec(any_size.get(each.name, each.shape), each.dtype, each.name) for each in specs("float32")],
        full_graph=True,
    )
    given = arrays(rng, 20, "float32")
    assert_close(run(traced, given, place), run(layer, given, place), "float32")


def test_a_traced_program_takes_a_plan_of_dygraph(rng, place):
    """Values of a tensor from outside cannot be read while a program is built."""
    rows, w, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((12, 7), (2, 7, 5), (2, 5)))
    plan = route(tensor(np.int32([[0], [1], [1], [0], [1]]), place), num_experts=2, padding_alignment=4, buffer_size=12)

    def product(rows, w, bias):
        return grouped_gemm(rows, w, plan=plan, transpose=False, bias=bias)

    traced, given = paddle.jit.to_static(product, full_graph=True), {"rows": rows, "w": w, "bias": bias}
    assert_close(run(traced, given, place), run(product, given, place), "float32")


def operators_of(function, dtype: str) -> list[str]:
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        inputs = [paddle.static.data(each.name, list(each.shape), each.dtype) for each in specs(dtype)]
        for each in inputs:
            each.stop_gradient = False
        out = function(*inputs)
        paddle.static.gradients([out.sum()], inputs)
        program = str(paddle.static.default_main_program())
    return re.findall(r'"(?:custom_op|pd_op)\.(\w+)"', program)


@BY_DTYPE
def test_a_program_has_one_operator_for_a_layer_and_none_that_reads_sizes(dtype, place):
    for function, operator, count in ((layer, "pmo_moe_mlp", 1), (products, "pmo_grouped_product", 2)):
        found = operators_of(function, dtype)
        assert found.count(operator) == found.count(f"{operator}_grad") == count
        assert not {"matmul", "split", "concat", "memcpy_d2h", "unbind"} & {*found}
        assert found.count("full_like") == 1  # the first gradient of the backward pass, and none for saved tensors


@BY_DTYPE
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "made again"])
@pytest.mark.parametrize("operator", ["moe_mlp", "moe_mlp_float8"])
def test_a_program_knows_shapes_and_dtypes_of_all_results(operator, keeps, dtype, rng, place):
    """Results of the operator: the sums, and for a backward pass the first product, and in float8 the matrices."""

    def call(x, scores, gate_up, down):
        plan = route(paddle.topk(scores, K)[1], num_experts=E)
        maps = plan.token_rows, plan.row_to_token, plan.tokens_per_expert, plan.expert_offsets, plan.slot_to_row
        weights = paddle.ones_like(plan.row_to_token, dtype="float32")
        operands = x.astype(gate_up.dtype), gate_up, down, weights
        return paddle._C_ops._run_custom_op(
            f"pmo_{operator}", *operands, *maps, False, keeps, *[False] * 5, 1 << 30, False, False
        )

    register_operators()
    out, hidden, *codes = call(*(tensor(each, place) for each in arrays(rng, 63, dtype).values()))
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        inputs = [paddle.static.data(each.name, list(each.shape), each.dtype) for each in specs(dtype)]
        known = [(list(each.shape), each.dtype) for each in call(*inputs)]
    assert [out.shape, hidden.shape] == [[63, D], [63 * K if keeps else 0, 2 * N]]
    results = [([-1, D], out.dtype), ([-1 if keeps else 0, 2 * N], hidden.dtype)]
    assert known == results + [(each.shape, each.dtype) for each in codes]
    assert [each.shape[0] > 3 * E * D * N for each in codes] == [keeps] * (operator == "moe_mlp_float8")


def test_a_backward_pass_of_a_graph_overwrites_nothing_that_is_kept(monkeypatch):
    """It may run twice, and no version of a tensor tells."""
    seen, original = [], compiled.moe_mlp

    def spy(*operands, **options):
        seen.append(options["in_place"])
        return original(*operands, **options)

    monkeypatch.setattr(compiled, "moe_mlp", spy)
    operators_of(layer, "float32")
    assert seen == [False]


def save(folder: Path, dtype: str) -> str:
    holder = paddle.nn.Layer()
    holder.forward = layer
    traced = paddle.jit.to_static(holder, input_spec=specs(dtype), full_graph=True)
    paddle.jit.save(traced, str(folder / "model"))
    return str(folder / "model")


@BY_DTYPE
@pytest.mark.parametrize("saved_on", ["cpu", "device"])
def test_a_program_runs_on_another_device_than_it_was_saved_on(saved_on, dtype, rng, place, tmp_path):
    here, there = (place, paddle.CPUPlace()) if saved_on == "device" else (paddle.CPUPlace(), place)
    given = arrays(rng, 63, dtype)
    try:
        paddle.set_device(here)
        model = save(tmp_path, dtype)
        expected = run(layer, given, here)["out"]
        paddle.set_device(there)
        loaded = paddle.jit.load(model)
        made = loaded(*(tensor(array, there) for array in given.values()))
    finally:
        paddle.set_device(place)
    assert_close({"out": to_numpy(made)}, {"out": expected}, dtype)


def test_the_inference_engine_serves_batches_of_other_sizes(rng, place, tmp_path):
    predictor = predictor_of(save(tmp_path, "float32"))
    for tokens in (1, 7, 200):
        given = arrays(rng, tokens, "float32")
        for name in predictor.get_input_names():
            predictor.get_input_handle(name).copy_from_cpu(given[name])
        predictor.run()
        (made,) = (predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names())
        expected = run(layer, given, place)["out"]
        np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cpu_only  # on the rig's device optimizers of programs change no parameter
@pytest.mark.parametrize("compute", [None, "fp8_1x128"])
def test_a_layer_that_is_made_in_a_program_is_trained_there(compute):
    x = np.random.default_rng(3).standard_normal([63, 32]).astype(np.float32)
    with static_mode(), paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        paddle.seed(5)
        tokens = paddle.static.data("x", [None, 32], "float32")
        layer = MoELayer(32, 16, num_experts=8, topk=2, compute=compute)
        loss = (layer(tokens) - tokens).square().mean()
        paddle.optimizer.SGD(1.0, parameters=layer.parameters()).minimize(loss)
        executor = paddle.static.Executor()
        executor.run(paddle.static.default_startup_program())
        fetched = [loss, layer.router.correction_bias]
        losses, biases = zip(*(executor.run(feed={"x": x}, fetch_list=fetched) for _ in range(10)), strict=True)
    assert losses[-1] < losses[0] - 0.05
    assert not np.any(biases)


@pytest.mark.parametrize("format", [None, "int8", "int4", "fp8_128x128"])
def test_the_executor_names_the_argument_of_another_size(format, place):
    wide = 130
    given = {"x": np.ones((5, wide), np.float32), "probs": np.ones((5, 1), np.float32)}
    given["ids"] = np.arange(5, dtype=np.int64).reshape(5, 1) % E
    matrices = np.ones((E, wide, 6), np.float32), np.ones((E, 3, wide), np.float32)
    tensors = [tensor(each, place) for each in matrices]
    codes = [] if format is None else [part for each in quantize_experts(*tensors, format=format) for part in each[:2]]
    arrays_of_codes = [(each.view("int8") if "float8" in str(each.dtype) else each).numpy() for each in codes]
    for number, each in enumerate(arrays_of_codes or matrices):
        given[f"m{number}"] = each
    with static_mode(), paddle.static.program_guard(paddle.static.Program()):
        data = {
            name: paddle.static.data(
                name, [-1, -1] if each.ndim == 2 and name in ("x", "probs") else each.shape, str(each.dtype)
            )
            for name, each in given.items()
        }
        stored = [data[f"m{number}"] for number in range(len(arrays_of_codes or matrices))]
        if format is not None:
            stored = [QuantizedMatrices(*stored[at : at + 2], format) for at in (0, 2)]
        out = moe_mlp(data["x"], route(data["ids"], num_experts=E), data["probs"], *stored)
        program, executor = paddle.static.default_main_program(), paddle.static.Executor()
        for name, array, text in (
            ("x", np.ones((5, wide - 2), np.float32), rf"x must be of shape \[.*, {wide}\]"),
            ("probs", np.ones((4, 1), np.float32), r"probs must be of shape \[5, 1\]"),
        ):
            with pytest.raises(ValueError, match=f"moe_mlp: {text}, but got"):
                executor.run(program, feed={**given, name: array}, fetch_list=[out])
        assert executor.run(program, feed=given, fetch_list=[out])[0].shape == (5, wide)
