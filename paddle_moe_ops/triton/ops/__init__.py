# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Row movement: routing maps, permute, unpermute, chunk sort, quantisation and top-k, with their gradients."""
