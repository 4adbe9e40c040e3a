# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that mypy reads (make lint) and nothing runs: it reports an ignored error that it does not find."""

from __future__ import annotations

import paddle

from paddle_moe_ops import moe_mlp, permute, route, use_backend
from paddle_moe_ops.nn import MoEConfig, MoELayer

x, plan = paddle.zeros([1, 2]), route(paddle.zeros([1, 1]), num_experts=1)
MoELayer(1, 2, 3, 4, keep="x", group=None)
MoELayer(MoEConfig(1, 2, 3, 4), group=None)
permute(x, plan, quantize=None, scale_layout="row")
MoELayer(1, 2, 3, 4, keep="hh")  # type: ignore[call-overload]
MoELayer(1, 2, num_expert=3)  # type: ignore[call-overload]
MoEConfig(1, 2, 3, 4, transport="mail")  # type: ignore[arg-type]
moe_mlp(x, plan, None, x, x, compute="fp4")  # type: ignore[arg-type]
permute(x, plan, quantize="int8")  # type: ignore[arg-type]
use_backend("abacus")  # type: ignore[arg-type]
