# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Fleet's hybrid topology, in processes of their own, since Fleet stays."""

from __future__ import annotations

import contextlib
import re
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.base import core
from paddle.distributed import collective, fleet
from paddle.distributed.fleet.base import topology

from tests.distributed.processes import reserve_port

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_DEGREES = ("dp_degree", "sharding_degree", "mp_degree", "pp_degree", "sep_degree")
_topologies: dict[Any, Any] = {}  # of this process, since groups take time to connect
_stores: list[Any] = []  # a group on a GPU connects at its first exchange, to the store that rank 0 keeps
_ORDER = ["sharding", "moe_sharding", "pp", "sep", "dp", "ep", "mp"]


def start_fleet(sharding: dict[str, Any] | None = None, **degrees: int) -> Any:
    """Start Fleet, again if need be, and give its topology.

    Args:
        sharding: what ``sharding_configs`` says.
        degrees: those of ``hybrid_configs`` that are not 1.
    """
    strategy = fleet.DistributedStrategy()
    with_experts = {"order": _ORDER} if "ep_degree" in degrees else {}
    strategy.hybrid_configs = {**dict.fromkeys(_DEGREES, 1), **degrees, **with_experts}
    for name, value in (sharding or {}).items():
        setattr(strategy.hybrid_configs["sharding_configs"], name, value)
    key = tuple(sorted(degrees.items()))
    topology._HYBRID_PARALLEL_GROUP = _topologies.get(key)  # if there is one, Fleet keeps it
    with groups_one_after_the_other():
        fleet.init(is_collective=True, strategy=strategy)
    made = _topologies.setdefault(key, fleet.fleet._hcg)
    fleet.fleet._hcg = made
    return made


@contextlib.contextmanager
def groups_one_after_the_other() -> Iterator[None]:
    """Let each group meet in a store of its own.

    Gloo keeps all groups' addresses under the same keys of one store, so a rank may find those of the group before.
    """
    new_group = paddle.distributed.new_group

    def connected(ranks: list[int], **options: Any) -> Any:
        if len(ranks) > 1:
            _stores.append(_new_store())
            collective._set_default_store(_stores[-1])
        group = new_group(ranks, **options)
        paddle.distributed.barrier()
        return group

    before = collective._default_store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.distributed, "new_group", connected)
        yield
    collective._set_default_store(before)


def _new_store() -> Any:
    """A store of all ranks, at a port that the first of them finds free."""
    with reserve_port() as found:
        ports: list[int] = []
        paddle.distributed.all_gather_object(ports, found.getsockname()[1])
    is_first = paddle.distributed.get_rank() == 0
    if not is_first:
        time.sleep(0.2)  # who comes before the first rank listens tries again 3 s later
    return core.TCPStore("127.0.0.1", ports[0], is_first, len(ports), 60)


def scale_on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let scalers of losses work on a CPU, where Paddle's class does nothing."""
    tracer = types.SimpleNamespace(_expected_place=types.SimpleNamespace(is_gpu_place=lambda: True))
    patch.setattr(paddle.amp.grad_scaler, "_dygraph_tracer", lambda: tracer)


def code_of_guide(heading: str, page: str = "expert_parallel_fleet.md") -> list[str]:
    """Run the program of a section of the guide, which several processes start; gives the names that it defines."""
    text = (_DOCS / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```py\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    topology._HYBRID_PARALLEL_GROUP = None
    names: dict[str, Any] = {}
    with groups_one_after_the_other():
        exec(code, names)
    return sorted(names)
