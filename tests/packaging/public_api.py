# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The public API as text: every name in a public ``__all__`` with its signature.

``python -m tests.packaging.public_api`` in the root of the checkout writes it to the file that the test compares with.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import paddle_moe_ops

SNAPSHOT = Path(__file__).with_name("public_api.txt")
COMMAND = "python -m tests.packaging.public_api"
# Modules of compat whose functions are public elsewhere: as `masked`, `dispatch`, `indexed` and `rowmaps`.
ELSEWHERE = ("row_maps", "te_jax", "te_masks", "te_torch", "te_triton", "unsloth")


def public_modules() -> Iterator[ModuleType]:
    """The package, and of the submodules that it announces those with ``__all__``, or the modules in them."""
    yield paddle_moe_ops
    for name in sorted(paddle_moe_ops._SUBMODULES):
        yield from _with_all(getattr(paddle_moe_ops, name))


def _with_all(module: ModuleType) -> Iterator[ModuleType]:
    if hasattr(module, "__all__"):
        yield module
        return
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not info.name.startswith("_") and info.name not in ELSEWHERE:
            yield from _with_all(importlib.import_module(f"{module.__name__}.{info.name}"))


def text() -> str:
    """A paragraph for each module, with a line for each name and each public member of a class."""
    paragraphs = []
    for module in public_modules():
        lines = [line for name in sorted(module.__all__) for line in _lines(name, getattr(module, name))]
        paragraphs.append("\n".join([f"[{module.__name__}]", *lines]))
    return "\n\n".join(paragraphs) + "\n"


def _lines(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}{f'({bases})' if bases else ''}"
        if hasattr(value, "_fields"):  # a NamedTuple's, which programs unpack in this order
            yield f"    {', '.join(value._fields)}"
        for member in sorted(_members(value)):
            yield f"    {_member(member, inspect.getattr_static(value, member, None))}"
    elif inspect.isroutine(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(value: type) -> set[str]:
    """Members that the package's own code adds to a class."""
    own = [base for base in value.__mro__ if base.__module__.split(".")[0] == paddle_moe_ops.__name__]
    names = {name for base in own for name in vars(base)}
    names |= {each.name for each in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    names -= {*getattr(value, "_fields", ())}
    return {name for name in names if name == "__init__" or not name.startswith("_")}


def _member(name: str, value: object) -> str:
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {name}{_signature(value.__func__)}"
    if inspect.isfunction(value):
        return f"{name}{_signature(value)}"
    return f"{name}: {'property' if isinstance(value, property) else 'field'}"


def _signature(function: object) -> str:
    """As Python prints it, but dtypes by their names, which versions of Paddle print in their own ways."""
    return re.sub(
        r"<DataType\.(\w+): \d+>", lambda found: f"paddle.{found[1].lower()}", str(inspect.signature(function))
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(text(), encoding="utf-8")
    print(f"wrote {SNAPSHOT}")
