# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that are spread over several processes, on `paddle.distributed`."""

from __future__ import annotations

from .parallel import ExpertParallel, Received

__all__ = ["ExpertParallel", "Received"]
