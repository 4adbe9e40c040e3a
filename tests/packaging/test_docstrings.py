# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Docstrings of public functions have one style: Google sections, an imperative first line, every argument listed."""

from __future__ import annotations

import inspect
import re

import pytest

import paddle_moe_ops
from paddle_moe_ops import compat, dispatch, expert_parallel, gemm, indexed, masked, nn, routing
from paddle_moe_ops.compat import fastdeploy, transformer_engine, transformer_engine_jax
from paddle_moe_ops.integrations import paddleformers

MODULES = (
    *(paddle_moe_ops, compat, dispatch, expert_parallel, fastdeploy, gemm, indexed, masked, nn, paddleformers),
    routing,
)
COMPAT = (transformer_engine, transformer_engine_jax)  # arguments are those of the original


def functions_of(modules) -> dict[str, object]:
    """Public functions, and the methods of public classes that users call, by name."""
    found = {}
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            path = f"{module.__name__}.{name}"
            if inspect.isclass(value):
                methods = {key: each for key, each in vars(value).items() if inspect.isfunction(each)}
                found |= {f"{path}.{key}": each for key, each in methods.items() if not key.startswith("_")}
            elif callable(value):
                found[path] = value
    return found


FUNCTIONS = functions_of(MODULES)
NOT_IMPERATIVE = re.compile(r"([A-Z][a-z]*s|The|A|An|What|Whether|How|[a-z].*)$")


def arguments_in(docstring: str) -> list[str]:
    """The names under "Args:"."""
    (section,) = re.findall(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
    return re.findall(r"^    \*{0,2}(\w+): ", section, re.MULTILINE)


@pytest.mark.parametrize("name", [*FUNCTIONS, *functions_of(COMPAT)])
def test_the_first_line_is_imperative(name):
    docstring = inspect.getdoc({**FUNCTIONS, **functions_of(COMPAT)}[name])
    assert docstring is not None
    assert not NOT_IMPERATIVE.match(docstring.split()[0]), docstring.splitlines()[0]
    assert docstring.splitlines()[0].endswith((".", "::"))


@pytest.mark.parametrize("name", [name for name, each in FUNCTIONS.items() if "Args:" in (inspect.getdoc(each) or "")])
def test_every_argument_is_listed_in_its_order(name):
    function = FUNCTIONS[name]
    arguments = [argument for argument in inspect.signature(function).parameters if argument != "self"]
    assert arguments_in(inspect.getdoc(function) or "") == arguments
