# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/paddle_functions.md, from one call of each function: operators, gradients, graphs.

python -m tests.ops.paddle_table    # writes the table into the page
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_moe_ops.backends import compiled
from tests.ops.every_call import CALLS, Call, ones
from tests.ops.further_calls import FURTHER_CALLS
from tests.ops.problems import tensor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "paddle_functions.md"
# Module of a function -> the family of `patch_paddle` that serves it.
FAMILIES = {
    "functional": "permute",
    "compat.incubate_dispatch": "incubate",
    "compat.incubate_routing": "incubate",
    "compat.incubate_quant": "incubate",
    "compat.incubate_backward": "incubate",
    "compat.incubate_auto": "incubate",
    "compat.incubate_gemm": "gemm",
    "compat.fp8": "fp8",
    "compat.gshard": "gshard",
    "compat.paddlefleet": "PaddleFleet",
}
# Functions that change an argument in place, which other tests of all calls leave out.
_SUMS = {"x_unzipped": ones(2, 8), "idx_unzipped": np.array([3, 0], np.int64), "zipped_rows": 4}
IN_PLACE = [
    Call("compat.paddlefleet.tokens_zip_unique_add", {"x_zipped": ones(4, 8), **_SUMS}),
    Call(
        "compat.paddlefleet.tokens_zip_unique_add_subbatch",
        {"x_zipped": [ones(3, 8), ones(1, 8)], **_SUMS, "subbatch_rows": 3},
    ),
]
HEADER = ["| family | function | kernels of this package | gradients | graphs |", "|---|---|---|---|---|"]


def family_calls() -> dict[str, list[Call]]:
    """Good calls of each function of Paddle and PaddleFleet, by the name of the function's module and its own."""
    found: dict[str, list[Call]] = {}
    for module in FAMILIES:
        for name in importlib.import_module(f"paddle_moe_ops.{module}").__all__:
            own = [
                call for call in (*CALLS, *FURTHER_CALLS, *IN_PLACE) if getattr(call, "name", "") == f"{module}.{name}"
            ]
            if module != "functional" or name in ("moe_permute", "moe_unpermute"):
                found[f"{module}.{name}"] = own
    return found


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Collect the names of the compiled operators that run. Quick calls decline, so they run by name too."""
    names: set[str] = set()
    before, operators, custom = os.environ.get("PADDLE_MOE_OPS_VALIDATE"), dict(compiled._direct), paddle._C_ops

    def recording(name: str, run: Any) -> Any:
        def call(*arguments: Any) -> Any:
            names.add(name)
            return run(*arguments)

        return call

    run_custom = custom._run_custom_op
    os.environ["PADDLE_MOE_OPS_VALIDATE"] = "1"
    compiled._direct.update({name: recording(name, run) for name, run in operators.items()})
    custom._run_custom_op = lambda name, *rest: (names.add(name.removeprefix("pmo_")), run_custom(name, *rest))[1]
    try:
        yield names
    finally:
        custom._run_custom_op = run_custom
        compiled._direct.update(operators)
        if before is None:
            del os.environ["PADDLE_MOE_OPS_VALIDATE"]
        else:
            os.environ["PADDLE_MOE_OPS_VALIDATE"] = before


def runs_in_graphs(call: Call, place: Any) -> bool:
    """True if to_static compiles the call; False if the function refuses a graph's values by a TypeError."""
    names = [name for name, value in call.arguments.items() if isinstance(value, np.ndarray)]
    given = [tensor(call.arguments[name], place) for name in names]
    # Lists of tensors are values of the graph, too.
    lists = {name: value for name, value in call.arguments.items() if is_list_of_arrays(value)}
    sizes = {name: len(value) for name, value in lists.items()}
    items = [tensor(item, place) for value in lists.values() for item in value]

    @paddle.jit.not_to_static
    def run(values: list[Any]) -> Any:
        changes = dict(zip(names, values[: len(names)], strict=True))
        rest = list(values[len(names) :])
        for name, size in sizes.items():
            changes[name], rest = rest[:size], rest[size:]
        return call.run(place, **changes)

    def program(values: list[Any]) -> Any:
        return run(values)

    try:
        paddle.jit.to_static(program, full_graph=True)([*given, *items])
    except TypeError as error:
        if "static graph" not in str(error):
            raise
        return False
    return True


def function_of(full_name: str) -> Callable[..., Any]:
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(f"paddle_moe_ops.{module}"), name)


def is_list_of_arrays(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], np.ndarray)


def table(place: Any) -> str:
    """Return the lines of the table."""
    lines = list(HEADER)
    for full_name, calls in family_calls().items():
        module, _, name = full_name.rpartition(".")
        kernels: set[str] = set()
        for call in calls:
            with recorded() as operators:
                call.run(place)
            kernels |= operators
        in_graphs = {runs_in_graphs(call, place) for call in calls}
        gradients = ", ".join(f"`{each}`" for each in getattr(function_of(full_name), "differentiable_arguments", ()))
        shown = ", ".join(f"`{each}`" for each in sorted(kernels)) or "-"
        graphs = "yes" if in_graphs == {True} else "no"
        lines.append(f"| {FAMILIES[module]} | `{name}` | {shown} | {gradients or '-'} | {graphs} |")
    return "\n".join(lines)


def page_with(text: str, lines: str) -> str:
    """Return the page with another table."""
    before, _, rest = text.partition(HEADER[0])
    return before + lines + "\n\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), table(paddle.CPUPlace())), encoding="utf-8")
