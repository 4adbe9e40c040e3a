# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The contract test's calls for every operator. Run as a module, it calls in the form of tests/static/isolation.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from paddle_moe_ops import _C
from paddle_moe_ops.backends.arrays import to_numpy
from tests.static.garbage import garbage_attributes, garbage_inputs, garbage_types
from tests.static.isolation import report
from tests.static.modes import feed_of, static_mode
from tests.static.operators import FLOATS, Example, operator_names, record

TOKENS = (0, 1, 7)
FLOAT8_NAMES = ("float8_e4m3fn", "float8_e5m2")

Calls = list[tuple[str, Callable[[], str]]]


# ---- one call


def run_eagerly(example: Example) -> str:
    """Forward and backward; every element of every result is read."""
    tensors = example.tensors()
    outputs = example.run(tensors)
    backward(outputs, {index: np.ones(outputs[index].shape) for index in float_outputs(outputs)})
    for output in outputs:
        output.numpy()
    for name in example.wanting:
        tensor = tensors[name]
        gradient = None if tensor is None else tensor.grad
        if gradient is not None and (gradient.shape, gradient.dtype) != (tensor.shape, tensor.dtype):
            return f"the gradient of {name} is {gradient.dtype} {list(gradient.shape)}, not {list(tensor.shape)}"
    return "ok"


def run_directly(example: Example) -> str:
    """Without Paddle's machinery; every element of every result is read."""
    for output in example.run_directly():
        output.numpy()
    return "ok"


def compare_direct_call(example: Example) -> str:
    """The same call through Paddle and without it."""
    both = example.run_directly(), example.run(example.tensors())
    for name, one, other in zip(example.operator.outputs, *both, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape) or to_numpy(one).tobytes() != to_numpy(other).tobytes():
            return f"{name} is another"
        if not one.stop_gradient:
            return f"{name} has a gradient"
    return "ok"


def float_outputs(outputs: list[paddle.Tensor]) -> list[int]:
    return [index for index, output in enumerate(outputs) if output.dtype in FLOATS]


def backward(outputs: list[paddle.Tensor], d_outputs: dict[int, np.ndarray]) -> None:
    starts = [index for index in d_outputs if not outputs[index].stop_gradient]
    if starts:
        gradients = [paddle.to_tensor(d_outputs[index]).astype(outputs[index].dtype) for index in starts]
        paddle.autograd.backward([outputs[index] for index in starts], gradients)


class Built:
    """An example as a program, with the gradients from all outputs that have them."""

    def __init__(self, example: Example, free_sizes: bool = False) -> None:
        self.program = paddle.static.Program()
        # Paddle makes zero gradients for float8 results in a graph, but has none.
        has_float8 = any(array is not None and array.dtype.name in FLOAT8_NAMES for array in example.inputs.values())
        wanting = () if has_float8 else [name for name in example.wanting if example.inputs[name] is not None]
        with paddle.static.program_guard(self.program):
            self.inputs = {name: self._input(name, array, free_sizes) for name, array in example.inputs.items()}
            for name in wanting:
                self.inputs[name].stop_gradient = False
            self.outputs = example.run(self.inputs)
            targets = [self.outputs[index] for index in float_outputs(self.outputs)]
            leaves = [self.inputs[name] for name in wanting]
            values = paddle.static.gradients(targets, leaves) if targets and leaves else []
            gradients_by_name = zip(wanting, values, strict=True) if values else ()
            self.gradients = {name: value for name, value in gradients_by_name if value is not None}
            self.fetched = [
                value.astype("float32") if value.dtype in (paddle.float8_e4m3fn, paddle.float8_e5m2) else value
                for value in (*self.outputs, *self.gradients.values())
            ]
        self.feed = {
            name: feed_of(array.astype(np.float32) if array.dtype.name in FLOAT8_NAMES else array)
            for name, array in example.inputs.items()
            if array is not None
        }

    @staticmethod
    def _input(name: str, array: np.ndarray | None, free_sizes: bool) -> Any:
        if array is None:
            return None
        shape = [None, *array.shape[1:]] if free_sizes and array.ndim else list(array.shape)
        dtype = array.dtype.name
        if dtype in FLOAT8_NAMES:  # an Executor takes none
            return paddle.static.data(name, shape, "float32").astype(dtype)
        return paddle.static.data(name, shape, dtype)

    def run(self) -> list[np.ndarray]:
        return paddle.static.Executor().run(self.program, feed=self.feed, fetch_list=self.fetched)


def build_and_run(example: Example) -> str:
    with static_mode():
        try:
            built = Built(example)
        except Exception as error:
            return f"built: raised {type(error).__name__}: {error}"
        built.run()
    return "ok"


# ---- what is asked


def compare_shapes(example: Example, free_sizes: bool) -> str:
    """Shapes and dtypes when the program is built against those of dygraph; -1 only where a size is not known."""
    eager = example.run(example.tensors())
    with static_mode():
        built = Built(example, free_sizes)
        arrays = built.run()
    problems = []
    for name, value, tensor in zip(example.operator.outputs, built.outputs, eager, strict=True):
        unknown_is_right = free_sizes or not example.rows_are_known()
        same = all(
            size == true or (size == -1 and unknown_is_right)
            for size, true in zip(value.shape, tensor.shape, strict=True)
        )
        if value.dtype != tensor.dtype or len(value.shape) != len(tensor.shape) or not same:
            problems.append(f"{name}: {value.dtype} {list(value.shape)} for {tensor.dtype} {list(tensor.shape)}")
    for name, value in built.gradients.items():
        own = built.inputs[name]
        if (value.dtype, list(value.shape)) != (own.dtype, list(own.shape)):
            problems.append(f"gradient of {name}: {value.dtype} {list(value.shape)} for {own.dtype} {list(own.shape)}")
    for name, array, tensor in zip(example.operator.outputs, arrays, eager, strict=False):
        if list(array.shape) != list(tensor.shape):
            problems.append(f"{name} when run: {list(array.shape)} for {list(tensor.shape)}")
    for name, array in zip(built.gradients, arrays[len(eager) :], strict=True):
        if array.shape != example.inputs[name].shape:
            problems.append(f"gradient of {name} when run: {list(array.shape)}")
    return "; ".join(problems) or "ok"


def gradients(example: Example, d_outputs: dict[int, np.ndarray]) -> dict[str, np.ndarray | None]:
    tensors = example.tensors()
    backward(example.run(tensors), d_outputs)
    given = {name: tensors[name].grad for name in example.wanting}
    return {name: None if gradient is None else to_numpy(gradient) for name, gradient in given.items()}


def compare_undefined_gradients(example: Example, wanted: int) -> str:
    """An output gradient that was not computed counts as zeros."""
    outputs = example.run(example.tensors())
    rng = np.random.default_rng(0)
    zeros = {index: np.zeros(outputs[index].shape) for index in float_outputs(outputs)}
    d_output = {wanted: rng.standard_normal(outputs[wanted].shape)}
    alone, with_zeros = gradients(example, d_output), gradients(example, {**zeros, **d_output})
    for name, expected in with_zeros.items():
        got = alone[name]
        if got is None or not np.array_equal(got, np.zeros_like(got) if expected is None else expected):
            return f"the gradient of {name} is {got}, not {expected}"
    return "ok"


def start_from_constant_output(example: Example, wanted: int) -> str:
    """Backward from an output that does not depend on the inputs: zeros or no gradient."""
    tensors = example.tensors()
    output = example.run(tensors)[wanted]
    if not output.stop_gradient:
        output.astype("float32").sum().backward()
    for name in example.wanting:
        gradient = tensors[name].grad
        if gradient is not None and np.any(gradient.astype("float32").numpy()):
            return f"the gradient of {name} is not zero"
    return "ok"


def compare_unneeded(example: Example, flag: str) -> str:
    """A gradient that is not needed leaves the others as they are, and holds nothing left over from elsewhere."""
    outputs = example.run(example.tensors())
    rng = np.random.default_rng(0)
    d_outputs = {index: rng.standard_normal(outputs[index].shape) for index in float_outputs(outputs)}
    full = gradients(example, d_outputs)
    less = gradients(example.with_attribute(flag, False), d_outputs)
    changed = [name for name in full if not np.array_equal(less[name], full[name])]
    if len(changed) > 1:
        return f"{flag} changes the gradients of {', '.join(changed)}"
    if any(np.any(less[name].astype(np.float32)) for name in changed):
        return f"without {flag} the gradient of {changed[0]} holds something else than zeros"
    return "ok"


def compare_keyword_call(example: Example) -> str:
    outputs = getattr(_C, example.operator.name)(**example.tensors(), **example.attributes)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    for name, got, expected in zip(example.operator.outputs, outputs, example.run(example.tensors()), strict=True):
        if not np.array_equal(to_numpy(got), to_numpy(expected)):
            return f"{name} differs"
    return "ok"


# ---- all of it


def distinct(examples: list[Example]) -> list[Example]:
    """One example for every choice of optional inputs and of the source of the counts."""
    kinds = {}
    for example in examples:
        given = tuple(name for name, array in example.inputs.items() if array is not None)
        kinds.setdefault((given, example.named().get("source")), example)
    return list(kinds.values())


def questions(name: str, examples: dict[int, list[Example]]) -> dict[str, Calls]:
    """Every call for one operator, by the property that it tests."""
    every = [
        (f"example {i} with {tokens} tokens", each) for tokens in TOKENS for i, each in enumerate(examples[tokens])
    ]
    many = examples[TOKENS[-1]]
    full = [(f"example {index}", example) for index, example in enumerate(many)]
    bad = [call for example in distinct(many) for call in (*garbage_attributes(example), *garbage_inputs(example))]
    wrong_types = list(garbage_types(many[0])) if many else []
    return {
        "shapes": [(label, lambda e=e: compare_shapes(e, False)) for label, e in every],
        "shapes with free sizes": [(label, lambda e=e: compare_shapes(e, True)) for label, e in every],
        "undefined gradients": [
            (f"{label}, from {e.operator.outputs[i]}", lambda e=e, i=i: compare_undefined_gradients(e, i))
            for label, e in full
            for i in float_outputs(e.run(e.tensors()))
        ],
        "constant outputs": [
            (f"{label}, from {e.operator.outputs[i]}", lambda e=e, i=i: start_from_constant_output(e, i))
            for label, e in full
            for i, output in enumerate(e.run(e.tensors()))
            if output.dtype == paddle.int32
        ],
        "needs": [
            (f"{label}, {flag}", lambda e=e, flag=flag: compare_unneeded(e, flag))
            for label, e in full
            for flag, is_set in e.named().items()
            if flag.endswith("_grad") and is_set
        ],
        "keywords": [(label, lambda e=e: compare_keyword_call(e)) for label, e in full],
        "direct calls": [(label, lambda e=e: compare_direct_call(e)) for label, e in every],
        "garbage in direct calls": [(label, lambda e=e: run_directly(e)) for label, e in (*bad, *wrong_types)],
        "garbage in dygraph": [(label, lambda e=e: run_eagerly(e)) for label, e in (*bad, *wrong_types)],
        "garbage in a program": [(label, lambda e=e: build_and_run(e)) for label, e in bad],
    }


def main(begin: str, write_end: str) -> None:
    examples = {tokens: record(tokens) for tokens in TOKENS}
    calls = [
        (json.dumps([name, part, label]), call)
        for name in operator_names()
        for part, questioned in questions(name, {tokens: examples[tokens][name] for tokens in TOKENS}).items()
        for label, call in questioned
    ]
    report(calls, int(begin), int(write_end))


if __name__ == "__main__":
    main(*sys.argv[1:])
