# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM, wgrad, SwiGLU, and the fused layer of experts."""
