# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The backend under test and memory that holds garbage, as for the tests of the operators."""

from __future__ import annotations

from tests.ops.conftest import backend, chosen_backend, interpreted, poison, pytest_generate_tests

__all__ = ["backend", "chosen_backend", "interpreted", "poison", "pytest_generate_tests"]
