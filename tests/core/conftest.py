# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Load the library for the tests of the C core, with or without Paddle.

PMO_CORE_LIBRARY names another build of the library, such as one with sanitizers, and is meant for a run of
this directory alone. In such a run, or where Paddle is missing, a bare module stands in for the package, so
that its parts that need no Paddle import without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.bare_package import ROOT, without_paddle

if TYPE_CHECKING:
    from .binding import Core

CHOSEN_LIBRARY = os.environ.get("PMO_CORE_LIBRARY")
LIBRARY = Path(CHOSEN_LIBRARY or ROOT / "build" / "core" / "libpmo_core.so")

without_paddle(always=CHOSEN_LIBRARY is not None)


@pytest.fixture(scope="session")
def core(request: pytest.FixtureRequest) -> Core:
    from .binding import Core

    if not LIBRARY.is_file():
        pytest.fail(f"{LIBRARY} does not exist; `make core` builds it", pytrace=False)
    if request.config.getoption("--core-device") == "cuda":
        from .cuda_core import CudaCore

        return CudaCore(LIBRARY)
    return Core(LIBRARY)
