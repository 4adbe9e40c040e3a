# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models of other packages on these operators, with one call each. No such package is needed before that call."""

from __future__ import annotations

from .._submodules import imported_on_use

__getattr__, __dir__ = imported_on_use(__name__)
