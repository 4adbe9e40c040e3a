# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Which library the tests of the C core load, and how they do without Paddle.

PMO_CORE_LIBRARY names another build of the library, such as one with sanitizers, and is meant for a run of
this directory alone. In such a run, or where Paddle is missing, a bare module stands in for the package, so
that its parts that need no Paddle import without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paddle_moe_ops.testing.core import Core

ROOT = Path(__file__).resolve().parents[2]
CHOSEN_LIBRARY = os.environ.get("PMO_CORE_LIBRARY")
LIBRARY = Path(CHOSEN_LIBRARY or ROOT / "build" / "core" / "libpmo_core.so")

if (CHOSEN_LIBRARY or importlib.util.find_spec("paddle") is None) and "paddle_moe_ops" not in sys.modules:
    bare_package = types.ModuleType("paddle_moe_ops")
    bare_package.__path__ = [str(ROOT / "paddle_moe_ops")]
    sys.modules["paddle_moe_ops"] = bare_package


@pytest.fixture(scope="session")
def core(request: pytest.FixtureRequest) -> Core:
    from paddle_moe_ops.testing.core import Core

    if not LIBRARY.is_file():
        pytest.fail(f"{LIBRARY} does not exist; `make core` builds it", pytrace=False)
    if request.config.getoption("--core-device") == "cuda":
        from .cuda_core import CudaCore

        return CudaCore(LIBRARY)
    return Core(LIBRARY)
