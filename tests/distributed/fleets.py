# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Fleet's hybrid topology, in processes of their own, since Fleet stays."""

from __future__ import annotations

from typing import Any

from paddle.distributed import fleet


def expert_parallel_group() -> Any:
    """Fleet's expert parallel group of two ranks, made by the first call. With gloo there may be no more of them."""
    if getattr(fleet.fleet, "_hcg", None) is None:
        strategy = fleet.DistributedStrategy()
        degrees = {"sharding_degree": 2, "moe_sharding_degree": 1, "ep_degree": 2}
        ones = dict.fromkeys(("dp_degree", "mp_degree", "pp_degree", "sep_degree"), 1)
        order = ["sharding", "moe_sharding", "pp", "sep", "dp", "ep", "mp"]
        strategy.hybrid_configs = {**ones, **degrees, "order": order}
        fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group().get_expert_parallel_group()
