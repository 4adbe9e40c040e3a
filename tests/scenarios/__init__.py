# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs as users write them: trained routers, training loops, several processes."""
