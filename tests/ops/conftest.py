# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The backend under test. "compiled" owns its gradients, "reference" gets them through PyLayers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_moe_ops import use_backend


@pytest.fixture(params=["compiled", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on each backend; tests without it run on the one that is chosen by itself."""
    with use_backend(request.param):
        yield request.param
