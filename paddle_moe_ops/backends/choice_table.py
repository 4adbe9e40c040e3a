# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Written by `python -m paddle_moe_ops.bench.backend_report`: by operator and dtype of the first tensor the longest row
and the smallest tensor, in bytes, from which Triton is faster."""

MEASURED: dict[tuple[str, str], tuple[int, int]] = {}
