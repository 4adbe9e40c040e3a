# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels run in Triton's interpreter on NumPy arrays, or with --core-device=cuda on PyTorch tensors."""

from __future__ import annotations

import pytest

from tests.bare_package import without_paddle

without_paddle()


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest):
    """The device of the kernels, with ``array`` and ``numpy`` to bring arrays there and back."""
    if request.config.getoption("--core-device") == "cuda":
        from .torch_arrays import TorchArrays

        return TorchArrays()
    from .interpreter import NumpyDevice

    return NumpyDevice()
