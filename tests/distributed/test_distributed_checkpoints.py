# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that save a checkpoint on some ranks and continue on others, with the losses of a run without a break."""

from __future__ import annotations

import functools
import threading
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.distributed.fleet.utils import mix_precision_utils
from paddle.optimizer.lr import StepDecay

from paddle_moe_ops.expert_parallel import (
    average_gradients,
    distributed_checkpoint,
    gather_state_dict,
    load_checkpoint,
    mark_expert_parameters,
    save_checkpoint,
)
from paddle_moe_ops.nn import MoELayer

from .fleet_grids import MasterSGD
from .processes import run
from .restarts import assert_equal, contents
from .test_expert_parallel_errors import caught

pytestmark = pytest.mark.cpu_only

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS = 6, 10, 5, 12
FIRST, THEN = range(3), range(3, 6)
PLACEMENTS: dict[str, list[int] | None] = {
    "in order": None,
    "with gaps": [1, 0, 1, 1, 0],
    "a rank without experts": [1, 1, 1, 1, 1],
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen experts": {"frozen": True},
    "accumulation": {"turns": 2},
    "master weights": {"narrow": True},
}


class Net(nn.Layer):
    """Dense layers around a layer of experts, which may be frozen or in bfloat16."""

    def __init__(self, group: Any, placement: list[int] | None, frozen: bool, narrow: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoELayer(HIDDEN, INTERMEDIATE, EXPERTS, 2, group=group, placement=placement)
        self.narrow = narrow
        if narrow:
            self.moe.to(dtype="bfloat16")
        for parameter in self.moe.experts.parameters() if frozen else ():
            parameter.stop_gradient = True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.first(x)
        out = self.moe(x.astype("bfloat16")).astype("float32") if self.narrow else self.moe(x)
        return self.last(x + out)


class Program:
    """A model and its optimizer on this rank, or alone; all numbers of ranks train on the same tokens."""

    def __init__(
        self, placement: list[int] | None = None, frozen: bool = False, narrow: bool = False, turns: int = 1
    ) -> None:
        self.group = dist.get_group(0) if dist.is_initialized() else None
        self.rank, self.ranks = (self.group.rank, self.group.nranks) if self.group is not None else (0, 1)
        paddle.seed(4)
        self.net, self.turns = Net(self.group, placement, frozen, narrow), turns
        trained = [each for each in self.net.parameters() if not each.stop_gradient]
        rate = StepDecay(0.05, step_size=2)
        if narrow:  # a CPU has no other operators for master weights
            self.optimizer: Any = MasterSGD(rate, parameters=trained, multi_precision=True)
        else:  # a small epsilon would turn roundings of small gradients into differences of updates
            self.optimizer = paddle.optimizer.AdamW(rate, parameters=trained, epsilon=1e-2)

    def train(self, steps: range) -> list[float]:
        """The mean losses of all ranks."""
        losses = []
        for step in steps:
            losses.append(0.0)
            rows = np.random.default_rng(step).standard_normal([self.turns, TOKENS, HIDDEN]).astype(np.float32)
            for turn in np.split(rows, self.ranks, 1)[self.rank]:
                x = paddle.to_tensor(turn)
                loss = (self.net(x) - x.flip([1])).square().mean() / self.turns
                loss.backward()
                losses[-1] += float(loss)
            average_gradients(self.net.parameters(), self.group)
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.optimizer._learning_rate.step()
        if self.ranks > 1:
            of_ranks: list[Any] = []
            dist.all_gather_object(of_ranks, losses, group=self.group)
            losses = np.mean(of_ranks, 0).tolist()
        return losses


def part_of_run(steps: range, load: str = "", save: str = "", copy: str = "", **options: Any) -> list[float]:
    """The losses of a part of a run between checkpoints; the loaded one is saved again as ``copy``."""
    program = Program(**options)
    if load:
        load_checkpoint(load, program.net, program.optimizer)
    if copy:
        save_checkpoint(copy, program.net, program.optimizer)
    losses = program.train(steps)
    if save:
        save_checkpoint(save, program.net, program.optimizer)
    return losses


def on(ranks: int, **options: Any) -> list[float]:
    return run(part_of_run, ranks, **options)[0] if ranks > 1 else part_of_run(**options)


class Uninterrupted:
    """Runs in one process: their first checkpoints, losses, and ends."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, {}

    def __call__(self, kind: str) -> tuple[str, list[float], str]:
        if kind not in self._runs:
            first, end = (str(self._folder / f"{kind}, {name}") for name in ("first", "end"))
            on(1, steps=range(0), save=first, **KINDS[kind])
            losses = on(1, steps=range(THEN.stop), load=first, save=end, **KINDS[kind])
            self._runs[kind] = first, losses, end
        return self._runs[kind]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


def check(uninterrupted, kind, folder, source, target, of_source=None, of_target=None):
    """Compare a run that moves from some ranks and a placement to others with one process."""
    saved, copied, last = (str(folder / name) for name in ("saved", "copied", "last"))
    first, expected, end = uninterrupted(kind)
    losses = on(source, steps=FIRST, load=first, save=saved, **KINDS[kind], **(of_source or {}))
    losses += on(target, steps=THEN, load=saved, copy=copied, save=last, **KINDS[kind], **(of_target or {}))
    assert_equal(contents(copied), contents(saved))
    found, wanted = contents(last), contents(end)
    assert found.keys() == wanted.keys()
    is_narrow = kind == "master weights"
    np.testing.assert_allclose(losses, expected, rtol=2e-2 if is_narrow else 1e-6)
    for name, value in wanted.items():
        tolerance = {"rtol": 0, "atol": 1e-2} if is_narrow else {"rtol": 1e-6, "atol": 5e-7}
        np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)
    if kind != "frozen experts":
        assert np.abs(wanted["moe.experts.down"] - contents(first)["moe.experts.down"]).max() > 1e-3


def in_ci(cases: list[Any], *chosen: Any) -> list[Any]:
    """The cases of a test, of which all but the chosen ones are slow."""
    of = [each if isinstance(each, tuple) else (each,) for each in cases]
    return [pytest.param(*each, marks=[] if each in chosen else pytest.mark.slow) for each in of]


DIRECTIONS = [(source, target, kind) for source, target in ((2, 1), (1, 2)) for kind in KINDS]


@pytest.mark.parametrize(
    ("source", "target", "kind"), in_ci(DIRECTIONS, (2, 1, "plain"), (1, 2, "frozen experts"), (2, 1, "master weights"))
)
def test_other_ranks_continue(uninterrupted, kind, source, target, tmp_path):
    check(uninterrupted, kind, tmp_path, source, target)


@pytest.mark.parametrize(("name", "other"), in_ci([("with gaps", 1), ("a rank without experts", 2)], ("with gaps", 1)))
def test_any_placement_continues(uninterrupted, name, other, tmp_path):
    given = {"placement": PLACEMENTS[name]}
    check(uninterrupted, "plain", tmp_path / "from", 2, other, of_source=given)
    check(uninterrupted, "plain", tmp_path / "to", other, 2, of_target=given)


@pytest.mark.parametrize("kind", in_ci(["plain", "master weights"], ("plain",)))
def test_the_same_ranks_continue_bit_for_bit(uninterrupted, kind, tmp_path):
    first, saved, end, last = (uninterrupted(kind)[0], *(str(tmp_path / name) for name in ("saved", "end", "last")))
    expected = on(2, steps=range(THEN.stop), load=first, save=end, **KINDS[kind])
    losses = on(2, steps=FIRST, load=first, save=saved, **KINDS[kind])
    assert losses + on(2, steps=THEN, load=saved, save=last, **KINDS[kind]) == expected
    assert_equal(contents(last), contents(end))


def trained_while_saving(folder: str, first: str) -> list[Any]:
    """Losses during a save, whether it ended before and after them, and the error of an early load."""
    program, resume = Program(), threading.Event()
    load_checkpoint(first, program.net, program.optimizer)
    program.train(FIRST)
    save_checkpoint(f"{folder}/plain", program.net, program.optimizer)
    write = distributed_checkpoint.write_tensors

    def late(*arguments: Any) -> None:
        resume.wait()
        write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_checkpoint, "write_tensors", late)
        saving = save_checkpoint(f"{folder}/async", program.net, program.optimizer, async_save=True)
        losses = program.train(THEN)
        states = [saving.is_done(), caught(lambda: load_checkpoint(f"{folder}/async", program.net))]
        resume.set()
        saving.wait()
    return [losses, *states, saving.is_done()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_has_the_values_of_its_call_while_training_continues(uninterrupted, ranks, tmp_path):
    arguments = {"folder": str(tmp_path), "first": uninterrupted("plain")[0]}
    found = run(trained_while_saving, 2, **arguments) if ranks > 1 else [trained_while_saving(**arguments)]
    for losses, was_done, early, is_done in found:
        np.testing.assert_allclose(losses, uninterrupted("plain")[1][FIRST.stop :], rtol=1e-6)
        assert (was_done, is_done) == (False, True)
        expected = f"a folder with one file *.metadata, {str(tmp_path / 'async')!r}, but got none"
        assert early == f"ValueError: load_checkpoint: path must be {expected}"
    assert_equal(contents(str(tmp_path / "async")), contents(str(tmp_path / "plain")))


def test_an_error_of_a_later_write_is_raised_by_wait(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(distributed_checkpoint, "write_tensors", full)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    saving = save_checkpoint(tmp_path / "a", nn.Linear(2, 2), async_save=True)
    for _ in range(2):
        assert caught(saving.wait) == "OSError: No space left on device"
    assert caught(lambda: save_checkpoint(tmp_path / "b", nn.Linear(2, 2))) == "OSError: No space left on device"


def saved_by_paddle(folder: str, first: str) -> None:
    """A checkpoint by Paddle's function, as programs of earlier versions wrote it."""
    program = Program()
    load_checkpoint(first, program.net, program.optimizer)
    program.train(FIRST)
    state = program.net.sharded_state_dict()
    dist.save_state_dict(state | program.optimizer.sharded_state_dict(state), folder)


@pytest.mark.parametrize("target", in_ci([1, 2], (1,)))
def test_a_checkpoint_of_paddle_continues(uninterrupted, target, tmp_path):
    first, expected, _ = uninterrupted("plain")
    run(saved_by_paddle, 2, folder=str(tmp_path / "old"), first=first)
    got = run(continued_from_paddle, 2, folder=str(tmp_path / "old")) if target > 1 else None
    losses = got[0] if got is not None else continued_from_paddle(str(tmp_path / "old"))
    np.testing.assert_allclose(losses, expected[FIRST.stop :], rtol=1e-6)


def continued_from_paddle(folder: str) -> list[float]:
    """The losses after a checkpoint without the schedule of the learning rate."""
    program = Program()
    load_checkpoint(folder, program.net, program.optimizer)
    for _ in FIRST:
        program.optimizer._learning_rate.step()
    return program.train(THEN)


def test_paddle_loads_what_was_saved(uninterrupted, tmp_path):
    path = str(tmp_path / "saved")
    on(2, steps=FIRST, load=uninterrupted("plain")[0], save=path)
    program = Program()
    program.train(range(1))  # Paddle loads states of an optimizer that has run a step
    state = program.net.sharded_state_dict()
    dist.load_state_dict(state | program.optimizer.sharded_state_dict(state), path, safetensors=True)
    program.optimizer._learning_rate.set_state_dict(paddle.load(f"{path}/learning_rate.pdopt"))
    np.testing.assert_allclose(program.train(THEN), uninterrupted("plain")[1][FIRST.stop :], rtol=1e-6)


class Scales(nn.Layer):
    """Experts of a user's class, marked by hand."""

    def __init__(self, group: Any, placement: list[int] | None = None) -> None:
        super().__init__()
        self.scales = self.create_parameter([4 // (1 if group is None else group.nranks), 3])
        self.register_buffer("count", paddle.to_tensor(3.0))
        mark_expert_parameters(self, group=group, placement=placement)


def of_marked(folder: str, load: bool) -> NDArray:
    group = dist.get_group(0)
    layer = Scales(group)
    layer.scales.set_value(np.full([2, 3], 1.0 + group.rank, np.float32))
    layer.count.set_value(paddle.to_tensor(5.0))
    if load:
        layer.scales.set_value(np.zeros([2, 3], np.float32))
        load_checkpoint(folder, layer)
    else:
        save_checkpoint(folder, layer)
    return gather_state_dict(layer, group)["scales"].numpy()


def test_experts_of_a_users_class(tmp_path):
    folder = str(tmp_path / "saved")
    (whole, _), layer = run(of_marked, 2, folder=folder, load=False), Scales(None)
    load_checkpoint(folder, layer)
    np.testing.assert_array_equal(layer.scales.numpy(), whole)
    np.testing.assert_array_equal(whole[:, 0], [1, 1, 2, 2])
    assert float(layer.count) == 5.0
    for each in run(of_marked, 2, folder=folder, load=True):
        np.testing.assert_array_equal(each, whole)


def save_copies(folder: str) -> None:
    """Save experts that each of two groups has; a rank's experts do not follow each other."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    layer = Scales(group, [1, 0, 1, 0])
    first = 1.0 - group.rank
    layer.scales.set_value(np.array([[first] * 3, [first + 2] * 3], np.float32))
    save_checkpoint(folder, layer)


@pytest.mark.slow
def test_groups_with_copies_of_experts_in_several_blocks_share_the_writing(tmp_path):
    run(save_copies, 4, folder=str(tmp_path))
    layer = Scales(None)
    load_checkpoint(tmp_path, layer)
    np.testing.assert_array_equal(layer.scales.numpy()[:, 0], [0, 1, 2, 3])


def test_a_step_after_the_first_load_starts_states_that_were_not_saved(tmp_path):
    """Experts that were frozen have no states; they are trained from new ones."""
    part_of_run(FIRST, save=str(tmp_path / "frozen"), frozen=True)
    program = Program()
    load_checkpoint(tmp_path / "frozen", program.net, program.optimizer)
    before = program.net.moe.experts.down.numpy()
    program.train(range(1))
    assert np.abs(program.net.moe.experts.down.numpy() - before).max() > 1e-3
    state = program.optimizer.state_dict()
    powers = {name: state[f"{parameter.name}_beta1_pow_acc_0"].item() for name, parameter in _trained(program)}
    assert powers["moe.experts.down"] == pytest.approx(0.9**2)  # Paddle's powers are one step ahead
    assert powers["first.weight"] == pytest.approx(0.9**5)


def _trained(program: Program) -> list[tuple[str, paddle.Tensor]]:
    return [(name, each) for name, each in program.net.named_parameters() if not each.stop_gradient]


# Memory of the host, which NumPy allocates. Tensors are much larger than everything else.

WIDE = 128


def net_of(layers: int) -> nn.Layer:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(layers)))


def peak_of(call: Any) -> int:
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_one_tensor_at_a_time_is_in_host_memory(tmp_path, monkeypatch):
    net, one, arrays = net_of(6), WIDE * WIDE * 4, []
    write = distributed_checkpoint.write_tensors

    def watched(values: Any) -> NDArray:
        assert [each for each in arrays if each() is not None] == []
        array = values()
        arrays.append(weakref.ref(array))
        return array

    def write_watched(path: Path, tensors: list[Any]) -> None:
        write(path, [(*each[:3], functools.partial(watched, each[3])) for each in tensors])

    monkeypatch.setattr(distributed_checkpoint, "write_tensors", write_watched)
    save_checkpoint(tmp_path / "a", net)
    assert len(arrays) == 12
    assert one < peak_of(lambda: load_checkpoint(tmp_path / "a", net)) < 2.5 * one


def peak_of_part(folder: str) -> tuple[int, int]:
    """The peak while this rank's experts load, and their bytes."""
    layer = MoELayer(WIDE, WIDE, 8, 2, group=dist.get_group(0))
    own = sum(each.size for each in layer.experts.parameters()) * 4
    return peak_of(lambda: load_checkpoint(folder, layer)), own


def test_a_rank_reads_its_experts_alone(tmp_path):
    whole = MoELayer(WIDE, WIDE, 8, 2)
    save_checkpoint(tmp_path / "a", whole)
    for peak, own in run(peak_of_part, 2, folder=str(tmp_path / "a")):
        assert peak < own  # the larger matrix is two thirds of it


def test_a_layer_with_gradients_in_float32_has_the_names_of_the_model(tmp_path):
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path, mix_precision_utils.MixPrecisionLayer(net, dtype="bfloat16"))
    load_checkpoint(tmp_path, other)
    np.testing.assert_array_equal(other.weight.numpy(), net.weight.numpy())
