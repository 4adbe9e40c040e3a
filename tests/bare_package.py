# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of the package that need no Paddle, where there is none."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def without_paddle(*, always: bool = False) -> None:
    """Put a bare module in the package's place, so that its parts import without it; only if Paddle is missing."""
    if (always or importlib.util.find_spec("paddle") is None) and "paddle_moe_ops" not in sys.modules:
        bare_package = types.ModuleType("paddle_moe_ops")
        bare_package.__path__ = [str(ROOT / "paddle_moe_ops")]
        sys.modules["paddle_moe_ops"] = bare_package
