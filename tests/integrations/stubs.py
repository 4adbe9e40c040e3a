# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for PaddleFleet, which no package index has: with them the model files of PaddleFormers can be imported.

Any name that is imported from them is an empty class, or a function that says no if it asks whether there is something.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

_PACKAGES = ("paddlefleet", "paddlefleet_ops")
# Class attributes that the files read while they are imported.
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "ModelType": {"encoder_or_decoder": None},
    "GPTConfig": {"transform_rules": {}},
}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = (lambda *_: False) if name.startswith("is_") else type(name, (), dict(_ATTRIBUTES.get(name, {})))
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _PACKAGES:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=__file__, is_package=True)
        spec.has_location = True  # PaddleFormers takes a package without a file for one that is not installed
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing runs."""


def install() -> None:
    """Make the packages importable, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
