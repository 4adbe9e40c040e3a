# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The backend under test, and memory that holds garbage so that an output which is not written shows."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import paddle
import pytest

from paddle_moe_ops import use_backend

# glibc's M_PERTURB; fresh memory is filled with the complement of the byte. Not a NaN: any NaN equals any NaN in sums.
_M_PERTURB, _POISON = -6, 0xA5


@pytest.fixture(scope="session", autouse=True)
def poison() -> Iterator[int]:
    """The byte that every new CPU tensor is filled with, instead of the zeros that a young process mostly gets."""
    libc = ctypes.CDLL(None)
    # AddressSanitizer's allocator ignores mallopt and fills memory itself: ASAN_OPTIONS of make asan-triton.
    by_sanitizer = f"malloc_fill_byte={_POISON}:" in os.environ.get("ASAN_OPTIONS", "")
    assert libc.mallopt(_M_PERTURB, _POISON ^ 0xFF) or by_sanitizer
    yield _POISON
    libc.mallopt(_M_PERTURB, 0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``backend`` runs on each, or on the one that --backend names.

    A test on interpreted kernels chooses that backend itself, so it runs once.
    """
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend")
        all_of_them = ["compiled"] if "interpreted" in metafunc.fixturenames else ["compiled", "reference"]
        metafunc.parametrize("backend", [chosen] if chosen else all_of_them, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of the test; tests without it run on the one that is chosen automatically.

    "compiled" owns its gradients, the others get them through PyLayers.
    """
    with use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def chosen_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --backend every test runs on it."""
    name = request.config.getoption("--backend")
    with use_backend(name) if name else contextlib.nullcontext():
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CPU tensors count as tensors on a GPU whose kernels are interpreted."""
    from paddle_moe_ops.triton.launch import paddle_device

    from ..triton.interpreter import NumpyDevice

    class Interpreted(paddle_device.PaddleDevice):
        def __init__(self):
            self._place = paddle.CPUPlace()
            self.launches = []
            self.recordings = {}

        launch, compiled, run = NumpyDevice.launch, NumpyDevice.compiled, NumpyDevice.run
        ready, stream = NumpyDevice.ready, NumpyDevice.stream
        _check_guards = staticmethod(lambda: None)  # memory is Paddle's

    device = Interpreted()
    monkeypatch.setattr(paddle_device, "unavailable", lambda: None)
    monkeypatch.setattr(paddle_device, "cannot_run_on", lambda _: None)
    monkeypatch.setattr(paddle_device, "device_of", lambda *_: device)
    return device
