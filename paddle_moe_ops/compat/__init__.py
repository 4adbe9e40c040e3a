# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the functions of other packages, under their own names and signatures."""

from __future__ import annotations

from .._submodules import imported_on_use

__getattr__, __dir__ = imported_on_use(__name__)
