# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""These tests are collected only if PaddleFormers and its dependencies are installed (`make test-integrations`)."""

from __future__ import annotations

import importlib.util

import pytest

_NEEDED = ("paddleformers", "aistudio_sdk", "colorlog", "omegaconf", "requests", "transformers")

if all(importlib.util.find_spec(name) for name in _NEEDED):
    from . import stubs

    stubs.install()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """Models that are compared with patched ones run on a CPU."""
    from . import kernels

    kernels.install(monkeypatch)


@pytest.fixture(autouse=True)
def _without_patches():
    """Whatever a test leaves applied to classes is removed after it."""
    yield
    import paddle_moe_ops.integrations.paddleformers as pf

    pf.remove()
