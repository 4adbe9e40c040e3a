# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Importing this lets modules of paddle_moe_ops be imported where Paddle is missing: without its ``__init__``."""

from __future__ import annotations

import sys
import types
from pathlib import Path

if "paddle_moe_ops" not in sys.modules:
    package = types.ModuleType("paddle_moe_ops")
    package.__path__ = [str(Path(__file__).resolve().parents[1] / "paddle_moe_ops")]
    sys.modules["paddle_moe_ops"] = package
