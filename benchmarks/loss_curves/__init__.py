# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Loss curves of language models whose experts multiply float8 operands, beside bfloat16."""
