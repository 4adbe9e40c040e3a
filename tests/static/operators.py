# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled operators as Paddle knows them, with example arguments that the public functions gave them."""

from __future__ import annotations

import functools
import inspect
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
from paddle.base.framework import OpProtoHolder

from paddle_moe_ops import _C, moe_permute, route
from paddle_moe_ops.backends import compiled
from paddle_moe_ops.backends.arrays import to_numpy, to_tensor
from tests.static.cases import CASES, Case
from tests.static.inputs import BFLOAT16, INNER, A, E, H, stacked, token_inputs

FLOAT8 = (paddle.float8_e4m3fn, paddle.float8_e5m2)
FLOATS = (paddle.float32, paddle.bfloat16, paddle.float16)
# The attributes that moe_permute gets as one list; the counts of a list follow them.
NUMBERS = (
    *("num_experts", "source", "align", "do_gather", "indices", "buffer", "fill", "checks", "hidden", "dtype"),
    *("x_grad", "prob_grad", "has_scale", "cols", "scale_type"),
)
# Paddle's numbers for the types of attributes.
ATTRIBUTE_TYPES = {0: "int", 1: "float", 2: "string", 3: "ints", 6: "bool", 9: "int64", 11: "int64s"}


class Operator(NamedTuple):
    """One operator: its inputs in order (True: optional), its outputs, its attributes in order with their types."""

    name: str
    inputs: dict[str, bool]
    outputs: list[str]
    attributes: dict[str, str]


class Example(NamedTuple):
    """One call of an operator: arrays for its inputs (None: not given), and its attributes."""

    operator: Operator
    inputs: dict[str, np.ndarray | None]
    attributes: dict[str, Any]
    wanting: tuple[str, ...]  # inputs that want a gradient

    def tensors(self) -> dict[str, paddle.Tensor | None]:
        tensors = {name: None if array is None else to_tensor(array) for name, array in self.inputs.items()}
        for name in self.wanting:
            if tensors[name] is not None:
                tensors[name].stop_gradient = False
        return tensors

    def run(self, tensors: dict[str, Any]) -> list[paddle.Tensor]:
        """Calls the operator as the package does: by position."""
        return paddle._C_ops._run_custom_op(self.operator.name, *self.arguments(tensors))

    def run_directly(self) -> tuple[paddle.Tensor, ...]:
        """The same without Paddle's machinery."""
        return compiled._direct[self.operator.name.removeprefix("pmo_")](*self.arguments(self.tensors()))

    def arguments(self, tensors: dict[str, Any]) -> list[Any]:
        return [*tensors.values(), *self.attributes.values()]

    def named(self) -> dict[str, Any]:
        """The attributes by name, those that are one list to Paddle as well."""
        named = dict(self.attributes)
        numbers = named.pop("numbers", None)
        if numbers is not None:
            named |= {**dict(zip(NUMBERS, numbers, strict=False)), "list": numbers[len(NUMBERS) :]}
        return named

    def with_attribute(self, name: str, value: Any) -> Example:
        """The same call with another value of one of the `named` attributes."""
        if name in self.attributes:
            return self._replace(attributes={**self.attributes, name: value})
        named = {**self.named(), name: value}
        return self._replace(attributes={"numbers": [*(int(named[each]) for each in NUMBERS), *named["list"]]})

    def rows_are_known(self) -> bool:
        """Return whether the attributes alone determine the buffer's number of rows."""
        named = self.named()
        return named.get("buffer", 0) >= 0 or bool(named.get("list"))


def _permute_with_list(x, ids, probs):
    return moe_permute(x, None, ids, probs, E, _list_of_counts(ids), A)


def _route_with_list(x, ids, probs):
    return route(ids, probs, num_experts=E, tokens_per_expert=_list_of_counts(ids))


def _list_of_counts(ids: paddle.Tensor) -> list[int]:
    return paddle.bincount(ids[ids >= 0], minlength=E).tolist()


def _experts_as_one_operator(x, ids, probs, gate_up, down, **float8):
    plan = route(ids, probs, num_experts=E, padding_alignment=A)
    options = {"transpose": False, "keeps_hidden": True, **float8}
    return (compiled.moe_mlp(x, gate_up, down, plan.row_probs, plan, **options),)


_float8_experts = partial(_experts_as_one_operator, float8=True)
_float8_wgrads = partial(_float8_experts, float8_wgrads=True)


# A list is part of a program, so these are no cases for any number of tokens. Nor is a layer, which on a CPU is several
# operators in dygraph.
LISTS = (
    Case("moe_permute-list", _permute_with_list, token_inputs(), ("x", "probs")),
    Case("route-list", _route_with_list, token_inputs(), ("probs",)),
    *(
        Case(
            f"{name}-{np.dtype(dtype).name}",
            function,
            token_inputs(dtype, gate_up=stacked(dtype, H, 2 * INNER), down=stacked(dtype, INNER, H)),
            ("x", "probs", "gate_up", "down"),
        )
        for name, function in (
            *(("moe_mlp", _experts_as_one_operator), ("moe_mlp_float8", _float8_experts)),
            ("moe_mlp_float8-wgrads", _float8_wgrads),
        )
        for dtype in (np.float32, BFLOAT16)
    ),
)


def operator_names() -> list[str]:
    """Every operator of the compiled library."""
    return sorted(name for name in dir(_C) if name.startswith("pmo_"))


def describe(name: str) -> Operator:
    proto = OpProtoHolder.instance().get_op_proto(name)
    inputs = {each.name.removesuffix("@OPTIONAL"): each.dispensable for each in proto.inputs}
    parameters = list(inspect.signature(getattr(_C, name)).parameters)
    attributes = {each.name: ATTRIBUTE_TYPES.get(each.type, f"type {each.type}") for each in proto.attrs}
    own = parameters[len(inputs) :]  # the others are Paddle's
    return Operator(name, inputs, [each.name for each in proto.outputs], {each: attributes[each] for each in own})


def record(tokens: int) -> dict[str, list[Example]]:
    """The calls that the cases make for some number of tokens, by operator."""
    operators = {name: describe(name) for name in operator_names()}
    examples: dict[str, list[Example]] = {name: [] for name in operators}
    original = paddle._C_ops._run_custom_op

    def recorder(name: str, *arguments: Any) -> Any:
        operator = operators[name]
        count = len(operator.inputs)
        given = dict(zip(operator.inputs, arguments[:count], strict=True))
        arrays = {key: None if value is None else to_numpy(value) for key, value in given.items()}
        wanting = tuple(key for key, value in given.items() if value is not None and not value.stop_gradient)
        attributes = dict(zip(operator.attributes, arguments[count:], strict=True))
        examples[name].append(Example(operator, arrays, attributes, wanting))
        return original(name, *arguments)

    def through_paddle(operator: str, *arguments: Any) -> Any:
        return recorder(f"pmo_{operator}", *arguments)

    direct = {operator: functools.partial(through_paddle, operator) for operator in compiled._direct}
    with mock.patch.object(compiled, "_direct", direct), mock.patch.object(paddle._C_ops, "_run_custom_op", recorder):
        for case in (*CASES, *LISTS):
            inputs = case.inputs(np.random.default_rng(tokens), tokens)
            tensors = {name: to_tensor(array) for name, array in inputs.items()}
            for name in case.leaves:
                tensors[name].stop_gradient = False
            case.function(*tensors.values())
    return examples
