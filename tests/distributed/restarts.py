# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that are interrupted in one grid of ranks and continue in another, and the same run in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_moe_ops.expert_parallel import load_checkpoint, save_checkpoint

from .fleet_grids import Grid, Resumed, freeze, next_rate, optimizer_of, trained
from .fleet_models import ROWS, Whole, mean_square, parts
from .test_expert_parallel_layer import HIDDEN

FIRST, THEN = range(2), range(2, 5)


def data_of(grid: Grid, rank: int, step: int) -> Sequence[NDArray]:
    """The inputs and targets of one rank: those of all ranks depend only on the number of their micro-batches."""
    count = grid.losses * grid.turns
    x, y = np.random.default_rng(step).standard_normal([2, count, ROWS, HIDDEN]).astype(np.float32)
    own = slice(rank * grid.turns, (rank + 1) * grid.turns)
    return x[own].reshape(-1, HIDDEN), y[own].reshape(-1, HIDDEN)


def alone(grid: Grid, steps: range, load: str = "", copy: str = "", save: str = "") -> list[float]:
    """The losses of a part of a run in one process; without ``load`` it begins with new weights."""
    paddle.seed(3)
    net = Whole(parts(None, grid.kind, grid.blocks))
    freeze(net, grid.freezes)
    optimizer, losses = optimizer_of(net, grid), []
    if load:
        load_checkpoint(load, net, optimizer)
    if copy:
        save_checkpoint(copy, net, optimizer)
    for step in steps:
        losses.append(0.0)
        count = grid.losses * grid.turns
        x, y = (paddle.to_tensor(each) for each in data_of(Grid({}, "", turns=count), 0, step))
        for turn in range(count):
            rows = slice(turn * ROWS, (turn + 1) * ROWS)
            loss = mean_square(net(x[rows]), y[rows]) / count
            loss.backward()
            losses[-1] += float(loss)
        optimizer.step()
        optimizer.clear_grad()
        next_rate(optimizer)
    if save:
        save_checkpoint(save, net, optimizer)
    return losses


def losses_of(call: Any, grid: Grid, steps: range, **paths: Any) -> list[float]:
    """The losses of the global batches of a part of a run.

    Args:
        call: runs a function in a number of processes.
        grid: of the part.
        steps: of the part.
        paths: see `Resumed`.
    """
    if grid.processes == 1:
        return alone(grid, steps, **paths)
    found = call(grid.processes, trained, grid=grid, part=Resumed(steps, data_of, **paths))
    return (np.mean(found, 0) * grid.parts_of_tokens).tolist()


def contents(path: str) -> dict[str, NDArray]:
    """All tensors of a checkpoint, as Paddle reads them."""
    return {
        name: each.astype("float32").numpy()
        for name, each in paddle.distributed.load_merged_state_dict(path, safetensors=True).items()
    }


def assert_equal(found: dict[str, NDArray], expected: dict[str, NDArray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def restarted(call: Any, folder: Path, source: Grid, target: Grid) -> tuple[float, float]:
    """The largest differences to one process, after a restart in another grid: relative of losses, and of tensors.

    The tensors that the second grid has before its first step are compared bit for bit with those that were saved.
    Differences of tensors are those of parameters, or of their master weights.
    """
    first, uninterrupted, saved, copied, last = (str(folder / str(number)) for number in range(5))
    alone(target, range(0), save=first)
    expected = alone(target, range(THEN.stop), load=first, save=uninterrupted)
    losses = losses_of(call, source, FIRST, load=first, save=saved)
    losses += losses_of(call, target, THEN, load=saved, copy=copied, save=last)
    assert_equal(contents(copied), contents(saved))
    start, found, wanted = (contents(each) for each in (first, last, uninterrupted))
    assert found.keys() == wanted.keys()
    assert all(np.abs(wanted[name] - start[name]).max() > 1e-4 for name in start if name.endswith("gate_up"))
    names = [f"{name}.w_0" if f"{name}.w_0" in found else name for name in start]
    difference = max(float(np.abs(found[name] - wanted[name]).max()) for name in names)
    return float(np.abs(np.divide(losses, expected) - 1).max()), difference
