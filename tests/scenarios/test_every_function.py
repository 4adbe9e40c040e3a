# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""No public function is missing from the programs with trained routers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import paddle_moe_ops
from paddle_moe_ops import patched_paddle
from paddle_moe_ops.backends import compiled
from tests.packaging.public_api import ELSEWHERE

from .models import model
from .modes import dygraph
from .test_trained_routers import ARRAYS, PROGRAMS

OF_INCUBATE = [f"incubate_{name}" for name in ("auto", "backward", "dispatch", "gemm", "quant", "routing")]
# Modules without public functions, by the first part of their names or in full. Also that of several processes, whose
# programs are in tests/distributed, and what is called under the names of Paddle, FastDeploy and PaddleFleet, whose
# programs are in test_ernie_moe.py, test_paddle_fp8.py, test_float8_dispatch.py, test_gshard_layers.py,
# test_fastdeploy_calls.py and test_paddlefleet_nodes.py.
INTERNAL = {"backends", "expert_parallel", "reference", "rowmaps", "testing", "triton"}
INTERNAL |= {f"compat.{name}" for name in ("fastdeploy", "gshard", "paddlefleet", *OF_INCUBATE, *ELSEWHERE)}
INTERNAL |= {f"compat.fp8{name}" for name in ("", ".activation", ".gemm", ".operators", ".quantize", ".rule")}

# Changes where parameters lie, not what a program gives; tests/ops/test_side_by_side.py trains with it.
OF_MEMORY = {"paddle_moe_ops.nn.memory.lay_side_by_side"}

# Quantised matrices are constants; test_quantized_layers.py trains what is around them.
OF_CONSTANTS = {"paddle_moe_ops.quantization.quantize_experts"}

# Programs have no hooks; test_expert_load.py trains with it.
OF_DYGRAPH = {"paddle_moe_ops.nn.losses.attach_loss"}


def public_modules() -> Iterator[Any]:
    yield paddle_moe_ops
    for found in pkgutil.walk_packages(paddle_moe_ops.__path__, "paddle_moe_ops."):
        name = found.name.partition(".")[2]
        parts = name.split(".")
        if "_" not in {part[0] for part in parts} and not INTERNAL & {parts[0], ".".join(parts[:2])}:
            yield importlib.import_module(found.name)


def takes_tensors(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any("Tensor" in str(parameter.annotation) for parameter in parameters)


def public_functions(modules: Iterable[Any]) -> dict[CodeType, str]:
    """The public functions and methods of modules that take tensors, by their code."""
    functions = []
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value):
                methods = inspect.getmembers(value, inspect.isfunction)
                functions += [method for label, method in methods if label in vars(value) and label[0] != "_"]
            elif inspect.isfunction(value):
                functions.append(value)
    return {
        inspect.unwrap(function).__code__: f"{function.__module__}.{function.__qualname__}"
        for function in functions
        if takes_tensors(function)
    }


@contextlib.contextmanager
def left_out(functions: dict[CodeType, str]) -> Iterator[set[str]]:
    """Add the names of the functions that the block does not call directly to the set, at its end.

    Directly: a public function that another one calls gets its arguments from that one.
    """
    called, names = set(), set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in functions:
            return
        caller = frame.f_back
        while caller is not None and caller.f_code not in functions:
            caller = caller.f_back
        if caller is None:
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)
    names |= {name for code, name in functions.items() if code not in called}


def test_the_programs_call_every_public_function_with_tensors(place, monkeypatch):
    for name in compiled.QUICK:  # which replace functions
        monkeypatch.setattr(compiled.backend, name, compiled._declines)
    functions = public_functions(public_modules())
    assert len(functions) > 40
    with left_out(functions) as names, patched_paddle():
        for program in PROGRAMS:
            dygraph(model(program.sparse), ARRAYS, place)
    assert names == OF_MEMORY | OF_CONSTANTS | OF_DYGRAPH
