# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Submodules that are imported when they are first read, as attributes of their package."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


def imported_on_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package of public submodules."""

    def names() -> list[str]:
        found = (module.name for module in pkgutil.iter_modules(sys.modules[package].__path__))
        return sorted(name for name in found if not name.startswith("_"))

    def get(name: str) -> Any:
        if name.startswith("_") or name not in names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f".{name}", package)

    return get, names
