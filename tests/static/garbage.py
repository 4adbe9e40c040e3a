# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: each example with one of its arguments spoilt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.static.operators import NUMBERS, Example

INT_GARBAGE = (-1, 0, 7, 2**31 - 1, -(2**31))
INT64_GARBAGE = (*INT_GARBAGE, 2**62, -(2**62), 2**63 - 1)
FLOAT_GARBAGE = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan"))
GARBAGE = {"int": INT_GARBAGE, "int64": INT64_GARBAGE, "float": FLOAT_GARBAGE}
DTYPE_GARBAGE = ("float64", "float32", "float16", "int64", "int32", "int8", "bool")


def garbage_attributes(example: Example) -> Iterator[tuple[str, Example]]:
    kinds = example.operator.attributes
    for name, value in example.named().items():
        kind = kinds.get(name, "ints" if name == "list" else "int")  # of one that is part of a list
        if kind == "ints":
            lists = ([], [0], value[:-1], [*value, 0], [-1] * len(value), [*value[:-1], -5], [2**31 - 1] * len(value))
            values: tuple[Any, ...] = (*lists, [3] * 100000)
        else:
            values = (not value,) if kind == "bool" else GARBAGE[kind]
        for garbage in values:
            text = f"a list of {len(garbage)}: {garbage[:3]}..." if isinstance(garbage, list) else repr(garbage)
            yield f"{name}={text}", example.with_attribute(name, garbage)
    if "numbers" in kinds:
        numbers = example.attributes["numbers"]
        for count in (0, 1, len(NUMBERS) - 1):
            yield f"{count} numbers", example._replace(attributes={"numbers": numbers[:count]})


def garbage_types(example: Example) -> Iterator[tuple[str, Example]]:
    """Values that are not of the attribute's type. For dygraph only: Paddle itself aborts when it builds a program."""
    for name, kind in example.operator.attributes.items():
        for garbage in ("nonsense", None, 1.5, [[1]], *((2**62,) if kind == "int" else ())):
            yield f"{name}={garbage!r}", example._replace(attributes={**example.attributes, name: garbage})


def garbage_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "flat", array.reshape(-1)
    yield "with one more dimension", array[..., None]
    yield "0-D", np.ones((), array.dtype)
    yield "without its last row", array[:-1]
    yield "with a row more", np.concatenate([array, array[:1]])
    yield "without rows", array[:0]
    yield "with ten times the rows", np.concatenate([array] * 10)
    if array.ndim > 1:
        yield "without columns", array[:, :0]
        yield "without its last column", array[:, :-1]
        yield "with ten times the columns", np.concatenate([array] * 10, axis=1)
    for dtype in DTYPE_GARBAGE:
        if dtype != array.dtype.name:
            yield dtype, np.abs(array.astype(np.float32)).astype(dtype)
    if array.dtype.kind == "i":
        for value in (0, 1, -1, -2, 2**31 - 1, -(2**31)):
            yield f"full of {value}", np.full_like(array, value)


def garbage_inputs(example: Example) -> Iterator[tuple[str, Example]]:
    for name, array in example.inputs.items():
        if array is None:
            other = next(value for value in example.inputs.values() if value is not None)
            yield f"{name} given", example._replace(inputs={**example.inputs, name: other})
            continue
        yield f"{name} missing", example._replace(inputs={**example.inputs, name: None})
        for text, garbage in garbage_arrays(array):
            yield f"{name} {text}", example._replace(inputs={**example.inputs, name: garbage})
