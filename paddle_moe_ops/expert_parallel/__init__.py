# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that are spread over several processes, on `paddle.distributed`."""

from __future__ import annotations

from .clipping import ClipGradByGlobalNorm
from .fleet import distributed_optimizer
from .gradients import average_gradients
from .optimizers import gather_optimizer_state_dict, shard_optimizer_state_dict
from .parallel import ExpertParallel, Received
from .parameters import (
    gather_state_dict,
    is_expert_parameter,
    mark_expert_parameters,
    shard_state_dict,
)
from .scaling import GradScaler

__all__ = [
    "ClipGradByGlobalNorm",
    "ExpertParallel",
    "GradScaler",
    "Received",
    "average_gradients",
    "distributed_optimizer",
    "gather_optimizer_state_dict",
    "gather_state_dict",
    "is_expert_parameter",
    "mark_expert_parameters",
    "shard_optimizer_state_dict",
    "shard_state_dict",
]
