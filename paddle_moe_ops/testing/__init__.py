# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the operators, shipped with the package so that an installation can be checked in place.

`routing` draws the routings that occur, `equality` compares bits, `tolerances` bounds the error of sums in another
order, `selftest` is ``python -m paddle_moe_ops selftest``.
"""

from __future__ import annotations

from .._submodules import imported_on_use

__getattr__, __dir__ = imported_on_use(__name__)
