# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on `paddle.distributed`: experts distributed over the ranks of a group."""

from __future__ import annotations

from .checkpoint import gather_state_dict, shard_state_dict
from .deep_ep import DeepEP
from .dispatch import ExpertParallel
from .distributed_checkpoint import Saving, load_checkpoint, save_checkpoint
from .exchanges import ExchangeHandle
from .fleet import distributed_optimizer
from .group_sharded import group_sharded_parallel
from .hybrid_ep import HybridEP
from .loss_scaling import GradScaler
from .moving import move_experts
from .optimizers import gather_optimizer_state_dict, shard_optimizer_state_dict
from .parameters import is_expert_parameter, mark_expert_parameters
from .protocol import DispatchedTokens, LineTransport, TokenTransport, Transport
from .received import Received
from .training import ClipGradByGlobalNorm, average_gradients

__all__ = [
    "ClipGradByGlobalNorm",
    "DeepEP",
    "DispatchedTokens",
    "ExchangeHandle",
    "ExpertParallel",
    "GradScaler",
    "HybridEP",
    "LineTransport",
    "Received",
    "Saving",
    "TokenTransport",
    "Transport",
    "average_gradients",
    "distributed_optimizer",
    "gather_optimizer_state_dict",
    "gather_state_dict",
    "group_sharded_parallel",
    "is_expert_parameter",
    "load_checkpoint",
    "mark_expert_parameters",
    "move_experts",
    "save_checkpoint",
    "shard_optimizer_state_dict",
    "shard_state_dict",
]


def __dir__() -> list[str]:
    return __all__
