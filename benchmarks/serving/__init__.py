# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of experts with few tokens, as programs that serve models have them."""
