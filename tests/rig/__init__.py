# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
