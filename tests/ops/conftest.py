# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The backend under test, and memory that holds garbage so that an output which is not written shows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from paddle_moe_ops import use_backend

# glibc's M_PERTURB; fresh memory is filled with the complement of the byte. Not a NaN: any NaN equals any NaN in sums.
_M_PERTURB, _POISON = -6, 0xA5


@pytest.fixture(scope="session", autouse=True)
def poison() -> Iterator[int]:
    """The byte that every new CPU tensor is filled with, instead of the zeros that a young process mostly gets."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_PERTURB, _POISON ^ 0xFF)
    yield _POISON
    libc.mallopt(_M_PERTURB, 0)


@pytest.fixture(params=["compiled", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on each backend; tests without it run on the one that is chosen by itself.

    "compiled" owns its gradients, "reference" gets them through PyLayers.
    """
    with use_backend(request.param):
        yield request.param
