# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The version of the package; the packaging metadata reads it from here."""

__version__ = "0.1.0"
