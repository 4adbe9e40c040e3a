# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle 2.6 cannot import the package itself: like the core tests, these use parts of it without its __init__."""

from __future__ import annotations

from tests.core import conftest as _bare_package  # noqa: F401
