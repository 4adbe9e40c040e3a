# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A model of layers of experts on many GPUs, calibrated with measurements. Its predictions are the page scaling.md."""
