# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of Fleet that assume the same parameters on all ranks refuse experts, which differ between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from paddle import Tensor
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelOptimizer
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3

from .. import _checks
from .._graphs import context_manager
from .groups import expert_group_of

__all__ = ["mixing_prevented", "refuse_to_mix_experts"]

_MAKER = "paddle_moe_ops.expert_parallel.distributed_optimizer"
_STAGE_1 = f"parameters that all its ranks have; make the optimizer with {_MAKER}"
_OTHERS = f"parameters that all its ranks have; shard a model with experts by stage 1, with {_MAKER}"

_is_prevented = False


@context_manager
def mixing_prevented() -> Iterator[None]:
    """Let optimizers be made whose maker sees to it that no experts are mixed."""
    global _is_prevented
    _is_prevented = True
    try:
        yield
    finally:
        _is_prevented = False


@functools.cache
def refuse_to_mix_experts() -> None:
    """Let optimizers that would reduce and broadcast experts of several ranks raise a ValueError when they are made."""
    _check_first(DygraphShardingOptimizer, lambda optimizer, *_, **__: optimizer._parameter_list, _STAGE_1)
    _check_first(DygraphShardingOptimizerV2, _without_color, _STAGE_1)
    _check_first(HybridParallelOptimizer, _without_color, _STAGE_1)  # which may clip by another norm on each rank
    _check_first(GroupShardedOptimizerStage2, lambda params, *_, **__: params, _OTHERS)
    _check_first(GroupShardedStage3, lambda layer, *_, **__: layer.parameters(), _OTHERS)


def _without_color(optimizer: Any, *_: Any, **__: Any) -> list[Tensor]:
    """Those of which the second sharding optimizer does not know which ranks have copies."""
    listed = optimizer._parameter_list or ()
    groups = [each["params"] if isinstance(each, dict) else [each] for each in listed]
    return [each for group in groups for each in group if not isinstance(getattr(each, "color", None), dict)]


def _check_first(kind: type, parameters_of: Callable[..., Any], expected: str) -> None:
    """Check the parameters that objects of a class are made for."""
    make = kind.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def checked(self: Any, *arguments: Any, **options: Any) -> None:
        for each in () if _is_prevented else parameters_of(*arguments, **options):
            group = expert_group_of(each)
            if group is not None:
                given = f"{each.name!r}, of experts on ranks {group.ranks}, each of which has others"
                _checks.bad_value(kind.__name__, "parameters", expected, given)
        make(self, *arguments, **options)

    kind.__init__ = checked  # type: ignore[misc]
