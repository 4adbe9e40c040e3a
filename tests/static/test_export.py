# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs saved by paddle.jit.save, run by paddle.jit.load, an Executor and paddle.inference: the bits of dygraph.

Only the sums of Paddle's own matmul may differ.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import inference

from paddle_moe_ops import moe_permute, moe_unpermute, permute, route, unpermute
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.onednn import takes_bfloat16
from tests.packaging.subprocesses import run_forked
from tests.static.cases import CASES, FLOAT8_E5M2, ROUTERS, Case, layer, num_tokens
from tests.static.inputs import BFLOAT16, A, E, H, Inputs, token_inputs
from tests.static.modes import (
    assert_run_of,
    assert_same_run,
    feed_of,
    input_specs,
    predictor_of,
    random_d_outputs,
    run_dygraph,
    static_mode,
)

# Paddle's remarks about its own full_like, and about models without parameters.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
    pytest.mark.filterwarnings("ignore:no variable in your model"),
]
# A saved program cannot hold float8_e5m2: Paddle has no name for it there.
# Under paddle.inference a softmax is another library's, with other last bits.
CASES_TO_SAVE = [case for case in CASES if case is not FLOAT8_E5M2 and case not in ROUTERS]
TOKENS = (0, 1, 63, 200)
CASE = {case.name: case for case in CASES}


def exportable(case: Case) -> Case:
    """The case with bfloat16 outputs made float32: the inference engine hands bfloat16 out as garbage."""

    def function(*tensors):
        outputs = case.function(*tensors)
        return tuple(output.astype("float32") if output.dtype == paddle.bfloat16 else output for output in outputs)

    function.__signature__ = inspect.signature(case.function)  # where paddle.jit looks for the names of the inputs
    return case._replace(function=function)


def save(case: Case, folder: Path) -> str:
    layer_of_case = paddle.nn.Layer()
    layer_of_case.forward = case.function
    traced = paddle.jit.to_static(layer_of_case, input_spec=input_specs(case), full_graph=True)
    paddle.jit.save(traced, str(folder / "model"))
    return str(folder / "model")


def predict(predictor: inference.Predictor, inputs: Inputs) -> list[NDArray]:
    tensors = [to_tensor(inputs[name]) for name in predictor.get_input_names()]
    for name, tensor in zip(predictor.get_input_names(), tensors, strict=True):
        predictor.get_input_handle(name).share_external_data(tensor)  # copy_from_cpu takes no bfloat16
    predictor.run()
    return [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]


# Every second case: test_static_graph.py and test_to_static.py run all as programs.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (index % 2))
        for index, case in enumerate(CASES_TO_SAVE)
    ],
)
def test_saved_program_has_the_results_of_dygraph(case, tmp_path, rng, place):
    case = exportable(case)
    model = save(case, tmp_path)
    loaded = paddle.jit.load(model)
    predictor, predictor_without_onednn = predictor_of(model), predictor_of(model, onednn=False)
    for tokens in TOKENS:
        inputs = case.inputs(rng, tokens)
        expected = run_dygraph(case.function, inputs, ())
        assert_run_of(case, run_dygraph(loaded, inputs, ()), expected, inputs, None)
        # oneDNN, the default on a CPU, fails at any bfloat16 operator of Paddle that gets an empty tensor, and on some
        # CPUs at all of them.
        onednn = tokens >= 63 and (takes_bfloat16() or all(each.dtype != BFLOAT16 for each in inputs.values()))
        outputs = predict(predictor if onednn else predictor_without_onednn, inputs)
        assert_run_of(case, expected._replace(outputs=outputs), expected, inputs, None)


@pytest.mark.parametrize("name", ["layer", "unpermute-row-probs-bfloat16"])
def test_loaded_program_trains_with_the_gradients_of_dygraph(name, tmp_path, rng, place):
    case = CASE[name]
    loaded = paddle.jit.load(save(case, tmp_path))
    loaded.train()
    for tokens in TOKENS:
        inputs = case.inputs(rng, tokens)
        d_outputs = random_d_outputs(case, inputs, rng)
        expected = run_dygraph(case.function, inputs, case.leaves, d_outputs)
        assert_same_run(run_dygraph(loaded, inputs, case.leaves, d_outputs), expected)


def test_executor_runs_a_loaded_program(tmp_path, rng, place):
    case = CASE["layer"]
    model = save(case, tmp_path)
    inputs = case.inputs(rng, 29)
    with static_mode():
        executor = paddle.static.Executor()
        program, feed_names, fetch_targets = paddle.static.load_inference_model(model, executor)
        feed = {name: feed_of(inputs[name]) for name in feed_names}
        hidden_states, probs = executor.run(program, feed=feed, fetch_list=fetch_targets)
    expected = run_dygraph(case.function, inputs, ())
    assert_same_run(expected._replace(outputs=[hidden_states.view(BFLOAT16), probs]), expected)


def subnormal_sums(x, ids, probs):
    """Every sum of the package over rows so small that flush-to-zero would make them 0, and a product that shows it."""
    rows, rowmap, row_probs, _ = moe_permute(x, None, ids, probs, E, None, A)
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    same_rows, _ = permute(x, plan)
    count = num_tokens(ids)
    return (
        moe_unpermute(rows, rowmap, ids, row_probs, count, E)[0],
        moe_unpermute(rows, rowmap, ids, row_probs, count, E, using_weighted_combine=True)[0],
        unpermute(same_rows, plan),
        unpermute(same_rows, plan, plan.row_probs),
        unpermute(same_rows, plan, probs),
        x * probs[:, :1].astype(x.dtype),
    )


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_flush_to_zero_of_the_inference_engine_changes_no_sum(dtype, tmp_path, rng, place):
    case = exportable(Case("subnormal", subnormal_sums, token_inputs(dtype), ()))
    inputs = case.inputs(rng, 63)
    inputs["ids"] = np.sort(rng.permuted(np.tile(np.arange(E, dtype=np.int32), (63, 1)), axis=1)[:, :3], axis=1)
    inputs["probs"] = rng.uniform(0.25, 1, (63, 3)).astype(np.float32)
    smallest = np.finfo(np.float32).smallest_subnormal
    steps = 2.0 ** rng.integers(16, 22, (63, H))  # bfloat16 subnormals are multiples of 2**16 of these steps
    inputs["x"] = (np.float32(steps) * smallest).astype(dtype)
    *sums, product = run_dygraph(case.function, inputs, ()).outputs
    for array in sums:
        assert ((array != 0) & (np.abs(array.astype(np.float32)) < np.finfo(np.float32).tiny)).mean() > 0.9
    onednn = dtype != BFLOAT16 or takes_bfloat16()
    *predicted, predicted_product = predict(predictor_of(save(case, tmp_path), onednn=onednn), inputs)
    for index, (array, expected) in enumerate(zip(predicted, sums, strict=True)):
        assert_bits_equal(array, expected, what=f"sum {index}")
    if dtype == np.float32:
        assert np.any(product != 0)
        assert not np.any(predicted_product), "the engine does not flush to zero, so this test shows nothing"


LOAD = "import numpy as np, paddle; {package}; from paddle import inference\nmodel = {model!r}\n"
PREDICT = """
config = inference.Config(model + '.json', model + '.pdiparams')
config.disable_glog_info()
predictor = inference.create_predictor(config)
for name in predictor.get_input_names():
    predictor.get_input_handle(name).copy_from_cpu(np.load(f'{{model}}-{{name}}.npy'))
predictor.run()
np.save(model + '-out.npy', predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu())
"""
RUN_LOADED = """
loaded = paddle.jit.load(model)
outputs = loaded(*(paddle.to_tensor(np.load(f'{{model}}-{{name}}.npy')) for name in ('x', 'ids', 'probs')))
np.save(model + '-out.npy', outputs[0].numpy())
"""


@pytest.fixture
def saved_layer(tmp_path, rng, place):
    case = CASE["layer"]._replace(inputs=token_inputs())
    model = save(case, tmp_path)
    inputs = case.inputs(rng, 29)
    for name, array in inputs.items():
        np.save(f"{model}-{name}.npy", array)
    return model, run_dygraph(layer, inputs, ()).outputs[0]


def test_importing_the_package_is_enough_for_the_inference_engine(saved_layer):
    model, expected = saved_layer
    done = run_forked((LOAD + PREDICT).format(package="import paddle_moe_ops", model=model))
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(model + "-out.npy"), expected)


def test_importing_the_package_is_enough_for_jit_load(saved_layer):
    model, expected = saved_layer
    done = run_forked((LOAD + RUN_LOADED).format(package="import paddle_moe_ops", model=model))
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(model + "-out.npy"), expected)


def test_the_faq_quotes_what_paddle_says_of_a_forgotten_import(saved_layer):
    model, _ = saved_layer
    done = run_forked((LOAD + PREDICT).format(package="pass", model=model))
    assert done.returncode == 1
    message = "kernel output args (0) defs should equal op outputs"  # it names no operator
    assert message in done.stderr
    assert message in (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
