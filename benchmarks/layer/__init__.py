# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The whole layer of experts, compared with other implementations: `python -m benchmarks.layer`."""
