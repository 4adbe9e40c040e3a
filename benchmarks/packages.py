# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Packages of peers of which single files are used."""

from __future__ import annotations

import sys
import types
from pathlib import Path

__all__ = ["register_without_init"]


def register_without_init(name: str, folder: Path) -> None:
    """Let modules of a package, and of those that contain it, be imported without running their ``__init__``.

    Args:
        name: of the package, with dots.
        folder: which contains the outermost package.
    """
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:count]))
        module.__path__ = [str(folder.joinpath(*parts[:count]))]
        sys.modules.setdefault(module.__name__, module)
