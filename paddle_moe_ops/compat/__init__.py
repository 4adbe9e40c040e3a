# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the functions of other packages, under their own names and signatures."""
