# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that a grid of Fleet's parallelisms saves and another one continues are those of one process."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle.distributed as dist
import pytest

from . import fleet_grids, processes
from .fleet_grids import Grid, Resumed, trained
from .restarts import FIRST, THEN, alone, data_of, losses_of, restarted
from .test_fleet_grids import DIVIDED, DUAL_PIPE_V, EXPERT, INTERLEAVED, PIPELINE

pytestmark = pytest.mark.cpu_only

PAGE = Path(__file__).resolve().parents[2] / "docs" / "expert_parallel_checkpoints.md"
TWO, SPLIT = {"sharding_degree": 2}, {"mp_degree": 2, "dp_degree": 2}


def grid(degrees: dict[str, Any], axis: str, **options: Any) -> Grid:
    """A grid in which all ranks together have four micro-batches, unless ``turns`` says another number."""
    made = Grid(degrees, axis, **{"adam": options.get("kind") != "narrow", **options})
    return made if "turns" in options else made._replace(turns=4 // made.losses)


ONE = functools.partial(grid, {}, "")
SHARDING, EP = functools.partial(grid, TWO, "sharding"), functools.partial(grid, EXPERT, "expert")
PP_DP, PP_SHARDING = (functools.partial(grid, PIPELINE[each], each) for each in ("data", "sharding"))
PP_EP = functools.partial(grid, PIPELINE["expert"], "expert")
SEP = functools.partial(grid, {"sep_degree": 2}, "sep")
MP_ROWS = functools.partial(grid, {"mp_degree": 2}, "model", divides_rows=True)
MP_DP = functools.partial(grid, SPLIT, "data", kind="split")
MP_SHARDING = functools.partial(grid, {"mp_degree": 2, **TWO}, "sharding")
PP_SEP = functools.partial(
    grid, {"pp_degree": 2, "sep_degree": 2}, "sep", parts=(3, 2), pipeline={"enable_dynamic_shape": True}
)
EIGHT = functools.partial(
    grid, {"pp_degree": 2, "mp_degree": 2, **EXPERT, "ep_degree": 4}, "expert", divides_rows=True, kind="plain"
)


class Restart(NamedTuple):
    """A row of the table in docs/expert_parallel_checkpoints.md.

    Attributes:
        source: the axes of the grid that saves.
        target: the axes of the grid that continues.
        grids: both.
        options: of both grids.
        note: the last words of the row.
    """

    source: str
    target: str
    grids: tuple[Any, Any]
    options: dict[str, Any] = {}  # noqa: RUF012
    note: str = ""

    def both(self) -> list[Grid]:
        return [each(**self.options) for each in self.grids]

    @property
    def name(self) -> str:
        return f"{self.source} to {self.target}{', ' + self.note if self.note else ''}"

    @property
    def cells(self) -> list[str]:
        counts = " to ".join(str(each.processes) for each in self.both())
        return [self.source, self.target, counts, self.note]


def divided(made: Any) -> Any:
    """A grid with Fleet's second sharding optimizer."""
    return functools.partial(made, **DIVIDED)


RESTARTS = [
    Restart("ep 2", "one process", (EP, ONE)),
    Restart("one process", "ep 2, V2", (ONE, divided(EP))),
    Restart("sharding 2, stage 1", "ep 2, V2", (SHARDING, divided(EP))),
    Restart("ep 2, V2", "sharding 2, stage 1", (divided(EP), SHARDING)),
    Restart("sharding 2, V2", "sharding 2, stage 1", (divided(SHARDING), SHARDING)),
    Restart("sep 2", "mp 2, sequence parallel", (SEP, MP_ROWS)),
    Restart("ep 2", "pp 2, ep 2", (EP, PP_EP)),
    Restart("pp 2, dp 2", "ep 2, V2", (PP_DP, divided(EP))),
    Restart("pp 2, sharding 2, stage 1", "ep 2", (PP_SHARDING, EP), {"kind": "tied"}, "tied parameters"),
    Restart("pp 2, sharding 2, V2", "ep 2", (divided(PP_SHARDING), EP), {"freezes": True}, "frozen matrices"),
    Restart("pp 2, sharding 2, stage 1", "ep 2", (PP_SHARDING, EP), {"kind": "narrow"}, "master weights"),
    Restart(
        "sharding 2, V2", "sharding 2, stage 1", (divided(SHARDING), SHARDING), {"kind": "narrow"}, "master weights"
    ),
    Restart("mp 2, dp 2", "ep 2", (MP_DP, EP), {"kind": "split"}, "experts split on mp"),
    Restart("ep 2, V2", "mp 2, sharding 2", (divided(EP), MP_SHARDING), {"kind": "split"}, "experts split on mp"),
    Restart("mp 2, sharding 2, V2", "ep 2", (divided(MP_SHARDING), EP), {"kind": "columns"}, "dense columns divided"),
    Restart("pp 2, dp 2", "pp 2, ep 2", (PP_DP, PP_EP)),
    Restart("pp 2, sep 2", "pp 2, sharding 2, V2", (PP_SEP, divided(PP_SHARDING))),
    Restart("mp 2, dp 2", "mp 2, sharding 2", (MP_DP, MP_SHARDING), {"kind": "split"}, "experts split on mp"),
    Restart("pp 2, mp 2, ep 4", "ep 2", (EIGHT, EP)),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """Calls a function in processes of its own, of which those of two numbers stay."""
    with processes.kept("gloo", most=6) as call:
        yield call


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    table = PAGE.read_text(encoding="utf-8").partition("\n## Grids")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", table, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[1:]]


def test_the_guide_lists_these_restarts():
    assert [each[:4] for each in rows()] == [each.cells for each in RESTARTS]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RESTARTS)), ids=[each.name for each in RESTARTS])
def test_another_grid_continues_as_one_process(ranks, number, tmp_path):
    """The guide lists both differences; ``pytest -s`` prints them."""
    losses, tensors = restarted(ranks, tmp_path, *RESTARTS[number].both())
    print(f"| {' | '.join(RESTARTS[number].cells)} | {losses:.1e} | {tensors:.1e} |")
    listed = [float(each) for each in rows()[number][4:]]
    assert losses <= 2 * listed[0]
    assert tensors <= 2 * listed[1]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["interleaved", "DualPipeV"])
def test_chunks_of_a_pipeline_have_the_names_of_one_process(source, tmp_path):
    """On the device with all collectives, which has no operators of AdamW."""
    options = {"interleaved": INTERLEAVED, "DualPipeV": DUAL_PIPE_V}[source]
    degrees = {"pp_degree": 4, "dp_degree": 2} if source == "interleaved" else PIPELINE["data"]
    pipeline = grid(degrees, "data", adam=False, **options)
    one = ONE(adam=False, turns=8, **{name: options[name] for name in ("kind", "blocks")})
    call = lambda count, function, **arguments: processes.run(function, count, "stub", **arguments)  # noqa: E731
    for name, grids in (("there", (pipeline, one)), ("back", (one, pipeline))):
        losses, tensors = restarted(call, tmp_path / name, *grids)
        assert losses < 1e-6
        assert tensors < 2e-7


def saved_by_paddle(made: Grid, first: str, path: str) -> None:
    """A checkpoint by Paddle's function of states that Fleet's second sharding optimizer divided."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_grids, "save_checkpoint", _save_by_paddle)
        trained(made, Resumed(FIRST, data_of, load=first, save=path))


def _save_by_paddle(path: str, model: Any, optimizer: Any, **_: Any) -> Any:
    state = getattr(model, "_layers", model).sharded_state_dict()
    dist.save_state_dict(state | optimizer.sharded_state_dict(state), path)
    return types.SimpleNamespace(wait=lambda: None)


@pytest.mark.slow
def test_a_checkpoint_of_paddle_with_divided_states_continues(ranks, tmp_path):
    first, saved, end = (str(tmp_path / name) for name in ("first", "saved", "end"))
    made = divided(EP)(adam=False)
    alone(made, range(0), save=first)
    expected = alone(made, range(THEN.stop), load=first, save=end)
    ranks(2, saved_by_paddle, made=made, first=first, path=saved)
    for target in (ONE(adam=False), SHARDING(adam=False)):
        losses = losses_of(ranks, target, THEN, load=saved)
        np.testing.assert_allclose(losses, expected[FIRST.stop :], rtol=1e-6)
