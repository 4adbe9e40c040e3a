# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models of other packages on these operators, with one call each. No such package is needed before that call."""
