# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The ways in which Paddle can run one function: dygraph (eager or traced) and a static graph with an Executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import inference

from paddle_moe_ops.backends.arrays import to_numpy, to_tensor
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from tests.static.cases import Case
from tests.static.inputs import Inputs

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Roundings in a row with Paddle's matmul: at most 200 rows of an expert, 20 and 6 columns, 3 rows of a token.
MATMUL_CHAIN = 256


class Run(NamedTuple):
    """Outputs of a function, and the gradients of the inputs that require one."""

    outputs: list[NDArray]
    gradients: dict[str, NDArray | None]


def run_dygraph(
    function: Callable[..., Any], inputs: Inputs, leaves: tuple[str, ...], d_outputs: dict[int, NDArray] | None = None
) -> Run:
    """Calls a function, plain or made by paddle.jit, and runs backward from the outputs that `d_outputs` names."""
    tensors = {name: to_tensor(array) for name, array in inputs.items()}
    for name in leaves:
        tensors[name].stop_gradient = False
    outputs = as_tuple(function(*tensors.values()))
    if d_outputs:
        gradients = [to_tensor(gradient) for gradient in d_outputs.values()]
        paddle.autograd.backward([outputs[index] for index in d_outputs], gradients)
    return Run(
        [to_numpy(output) for output in outputs],
        {name: None if tensors[name].grad is None else to_numpy(tensors[name].grad) for name in leaves},
    )


def as_tuple(outputs: Any) -> tuple[paddle.Tensor, ...]:
    """A loaded program returns its only output without a tuple."""
    return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)


def random_d_outputs(case: Case, inputs: Inputs, rng: np.random.Generator) -> dict[int, NDArray]:
    """A gradient for each output that has one, by its number."""
    tensors = {name: to_tensor(array) for name, array in inputs.items()}
    for name in case.leaves:
        tensors[name].stop_gradient = False
    return {
        index: rng.standard_normal(output.shape).astype(to_numpy(output).dtype)
        for index, output in enumerate(case.function(*tensors.values()))
        if not output.stop_gradient
    }


def assert_same_run(got: Run, expected: Run) -> None:
    """Checks that two runs gave the same bits; the expected one has every gradient."""
    for index, (output, wanted) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        assert_bits_equal(output, wanted, what=f"output {index}")
    for name, gradient in expected.gradients.items():
        assert gradient is not None, f"dygraph gives no gradient of {name}"
        assert got.gradients[name] is not None, f"no gradient of {name}"
        assert_bits_equal(got.gradients[name], gradient, what=f"gradient of {name}")


def assert_run_of(case: Case, got: Run, expected: Run, inputs: Inputs, d_outputs: dict[int, NDArray] | None) -> None:
    """Checks a run of a case against dygraph's: the same bits, but for the sums of Paddle's matmul."""
    if not case.by_matmul:
        assert_same_run(got, expected)
        return
    terms = run_dygraph(case.function, magnitudes(inputs), tuple(expected.gradients), magnitudes(d_outputs or {}))
    for index, (output, wanted) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        tolerance = dtype_tols(wanted.dtype, MATMUL_CHAIN)
        assert_close_sums(output, wanted, terms.outputs[index], tolerance, what=f"output {index}")
    for name, gradient in expected.gradients.items():
        tolerance = dtype_tols(gradient.dtype, MATMUL_CHAIN)
        what = f"gradient of {name}"
        assert_close_sums(got.gradients[name], gradient, terms.gradients[name], tolerance, what=what)


def magnitudes(arrays: dict[Any, NDArray]) -> dict[Any, NDArray]:
    """The absolute values of floats: a function that is linear in each makes the sums of its terms' magnitudes."""
    return {key: np.abs(array) if array.dtype.kind == "f" else array for key, array in arrays.items()}


def free_shapes(case: Case) -> dict[str, tuple[list[int | None], str]]:
    """Shape and dtype of each input, None where the size follows the number of tokens."""
    few, many = (case.inputs(np.random.default_rng(0), tokens) for tokens in (0, 64))
    return {
        name: (
            [size if size == other else None for size, other in zip(few[name].shape, array.shape, strict=True)],
            array.dtype.name,
        )
        for name, array in many.items()
    }


def input_specs(case: Case) -> list[paddle.static.InputSpec]:
    """For paddle.jit: every input with a free number of tokens."""
    return [
        paddle.static.InputSpec(shape, dtype, name, stop_gradient=name not in case.leaves)
        for name, (shape, dtype) in free_shapes(case).items()
    ]


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """An error while bytecode is traced, without its frames: showing those, as pytest does, crashes the process."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return
    raise AssertionError(text)


@contextlib.contextmanager
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    try:
        yield
    finally:
        paddle.disable_static()


def feed_of(array: NDArray) -> NDArray:
    """An Executor takes bfloat16 as uint16."""
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


class StaticGraph:
    """A case as one program with a free number of tokens, with the gradients from some outputs."""

    def __init__(self, case: Case, d_outputs: dict[int, NDArray]) -> None:
        self.case = case
        self.program = paddle.static.Program()
        self.executor = paddle.static.Executor()
        with static_mode(), paddle.static.program_guard(self.program):
            inputs = {
                name: paddle.static.data(name, shape, dtype) for name, (shape, dtype) in free_shapes(case).items()
            }
            for name in case.leaves:
                inputs[name].stop_gradient = False
            self.outputs = list(case.function(*inputs.values()))
            d_values = {
                index: paddle.static.data(f"d_{index}", self.outputs[index].shape, gradient.dtype.name)
                for index, gradient in d_outputs.items()
            }
            self.gradients = []
            if d_values:
                targets = [self.outputs[index] for index in d_values]
                leaves = [inputs[name] for name in case.leaves]
                self.gradients = paddle.static.gradients(targets, leaves, list(d_values.values()))

    def run(self, inputs: Inputs, d_outputs: dict[int, NDArray]) -> Run:
        feed = {**inputs, **{f"d_{index}": gradient for index, gradient in d_outputs.items()}}
        with static_mode():
            fetched = self.executor.run(
                self.program,
                feed={name: feed_of(array) for name, array in feed.items()},
                fetch_list=[*self.outputs, *self.gradients],
            )
        arrays = [
            array.view(BFLOAT16) if value.dtype == paddle.bfloat16 else array
            for array, value in zip(fetched, [*self.outputs, *self.gradients], strict=True)
        ]
        count = len(self.outputs)
        return Run(arrays[:count], dict(zip(self.case.leaves, arrays[count:], strict=True)))


def predictor_of(model: str, *, onednn: bool = True) -> inference.Predictor:
    """A predictor of a saved program on the current device."""
    config = inference.Config(model + ".json", model + ".pdiparams")
    kind, _, index = paddle.device.get_device().partition(":")
    if kind == "cuda_rig":
        config.enable_custom_device(kind, int(index))
    else:
        config.disable_gpu()
    config.disable_glog_info()
    if not onednn:
        config.disable_onednn()
    return inference.create_predictor(config)
