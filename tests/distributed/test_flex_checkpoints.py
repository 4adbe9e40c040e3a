# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `paddle.distributed.save_state_dict` have the experts of all ranks, and load on any number of ranks.

`paddle.distributed.load_state_dict` runs as it is, but between processes on a CPU it needs a `Tensor.cuda` there.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.utils import unique_name

from paddle_moe_ops.expert_parallel import (
    gather_state_dict,
    is_expert_parameter,
    mark_expert_parameters,
    shard_state_dict,
)
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts

from . import test_optimizer_states
from .processes import run
from .test_expert_parallel_errors import caught
from .test_optimizer_states import EXPERTS, HIDDEN, INTERMEDIATE, Net, assert_same

pytestmark = pytest.mark.cpu_only

STEPS = 3
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "master weights": {"multi_precision": True}}


class Scales(nn.Layer):
    """Experts of a user's class, marked by hand: each is a number for each column."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        ranks, rank = (1, 0) if group is None else (group.nranks, group.rank)
        count = EXPERTS // ranks
        self.scales = self.create_parameter([count, HIDDEN])
        whole = np.random.default_rng(4).standard_normal([EXPERTS, HIDDEN]).astype(np.float32)
        self.scales.set_value(whole[rank * count : (rank + 1) * count])
        mark_expert_parameters(self, group=group)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.scales.mean(0)


class Various(Net):
    """The model with frozen experts, experts marked by hand in lists of layers, and a layer that is used twice."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.untrained = MoELayer(HIDDEN, INTERMEDIATE, EXPERTS, 2, group=group)
        for parameter in self.untrained.experts.parameters():
            parameter.stop_gradient = True
        self.own, self.twice = nn.LayerList([nn.LayerList([Scales(group)])]), self.moe

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = super().forward(x)
        x = x + self.untrained(x) + self.own[0][0](x)
        return x + self.twice(x.astype(self.moe.experts.down.dtype)).astype(x.dtype)


class Run(test_optimizer_states.Run):
    """A run whose states Paddle saves and loads."""

    model = Various

    def train(self, steps: range) -> list[float]:
        """Train, or with master weights, for which a CPU has no AdamW, draw what the optimizer keeps."""
        if not self.optimizer._multi_precision:
            return super().train(steps)
        trained = [each for each in self.net.parameters() if not each.stop_gradient]
        self.optimizer._create_accumulators(paddle.static.default_main_program().global_block(), trained)
        state = self.optimizer.state_dict()
        kept = {**state.pop("master_weights"), **state}
        experts = {each.name for each in trained if is_expert_parameter(each)}
        for number, (key, tensor) in enumerate(kept.items()):
            if isinstance(tensor, paddle.Tensor):
                of_rank = self.rank if any(key.startswith(name) for name in experts) and tensor.size > 1 else 0
                rng = np.random.default_rng([len(steps), number, of_rank])
                tensor.set_value(rng.standard_normal(tensor.shape).astype(np.float32))
        return []

    def sharded(self) -> dict[str, Any]:
        """Model and optimizer, as `paddle.distributed` takes them."""
        of_model = self.net.sharded_state_dict()
        return of_model | self.optimizer.sharded_state_dict(of_model)

    def save(self, path: str) -> None:
        dist.save_state_dict(self.sharded(), path)

    def load(self, path: str) -> None:
        self.train(range(1))  # an optimizer has tensors to load into after its first step
        load_on_cpu(self.sharded(), path)


def load_on_cpu(state: dict[str, Any], path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.Tensor, "cuda", lambda tensor: tensor)
        dist.load_state_dict(state, path)


def saved(path: str, **options: Any) -> dict[str, NDArray]:
    """The whole states that were saved."""
    with unique_name.guard():
        program = Run(**options)
        program.train(range(STEPS))
        program.save(path)
        return program.arrays()


def loaded(path: str, **options: Any) -> dict[str, NDArray]:
    """The whole states after loading into a model with other values and other names."""
    with unique_name.guard():
        program = Run(layers_before=1, **options)
        program.load(path)
        return program.arrays()


def parts_in(path: str) -> dict[str, list[tuple[Any, Any]]]:
    """The offsets and shapes of each tensor's parts in a checkpoint's files, which have each part once."""
    metadata = paddle.load(str(Path(path) / "0.metadata"))
    stored: dict[str, list[tuple[Any, Any]]] = {}
    for index, file in metadata.storage_metadata.items():
        part = paddle.load(str(Path(path) / file))[index.tensor_key]
        assert tuple(part.shape) == index.local_shape
        stored.setdefault(index.tensor_key, []).append((index.global_offset, index.local_shape))
    return {key: sorted(parts) for key, parts in stored.items()}


def _is_of_experts(key: str) -> bool:
    return ".experts." in key or key.startswith("own.")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function of the precision that returns a checkpoint of two ranks and the whole states in it."""
    folder, made = tmp_path_factory.mktemp("flex"), {}

    def of(precision):
        if precision not in made:
            path = str(folder / precision.replace(" ", "_"))
            made[precision] = path, run(saved, 2, path=path, **PRECISIONS[precision])[0]
        return made[precision]

    return of


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_ranks_load_what_two_ranks_saved(precision, checkpoint):
    path, there = checkpoint(precision)
    for found in run(loaded, 2, path=path, **PRECISIONS[precision]):
        assert_same(found, there)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_process_loads_what_two_ranks_saved(precision, checkpoint):
    path, there = checkpoint(precision)
    assert_same(loaded(path, **PRECISIONS[precision]), there)


def test_a_merged_checkpoint_is_the_state_of_one_process(checkpoint):
    path, there = checkpoint("float32")
    merged = dist.load_merged_state_dict(path)
    names = list(Various(None).state_dict())
    assert_same({name: merged[name].numpy() for name in names}, {name: there[name] for name in names})


def test_files_have_each_expert_once_and_other_tensors_whole(checkpoint):
    path, _ = checkpoint("master weights")
    parts, half = parts_in(path), EXPERTS // 2
    assert parts.keys() >= Various(None).state_dict().keys()
    for key, found in parts.items():
        first_shape = found[0][1]
        if first_shape == (1,) and key.endswith("_pow_acc_0"):
            assert found == [((0,), (1,))]
        elif _is_of_experts(key):
            rest = (0,) * (len(first_shape) - 1)
            shape = (half, *first_shape[1:])
            assert found == [((0, *rest), shape), ((half, *rest), shape)], key
        else:
            assert found == [((0,) * len(first_shape), first_shape)], key
    for key in ("twice.experts.down", "other.experts.gate_up.moment1_0", "moe.experts.down.w_0", "own.0.0.scales"):
        assert len(parts[key]) == 2
    assert not [key for key in parts if key.startswith("untrained.experts") and "moment" in key]


def of_keys() -> list[bool]:
    """Keys with and without a prefix, before the optimizer's first step, and the tensors behind them."""
    program = Run()
    state = program.net.sharded_state_dict()
    prefixed = program.net.sharded_state_dict(structured_name_prefix="net.")
    own = program.net.state_dict()
    return [
        state.keys() == own.keys(),
        all(state[key].local_tensor is own[key] for key in own),
        list(prefixed) == [f"net.{key}" for key in state],
        all(key == each.key for key, each in prefixed.items()),
        all(each.global_offset == state[key.removeprefix("net.")].global_offset for key, each in prefixed.items()),
        program.sharded().keys() == own.keys(),
        all(each.global_shape[0] == EXPERTS for key, each in state.items() if _is_of_experts(key)),
    ]


def test_keys_are_those_of_the_state():
    for found in run(of_keys, 2):
        assert found == [True] * 7


def marks() -> list[Any]:
    """Errors of a deep copy and of layers marked without a group, and shapes of copies that are marked."""
    group = dist.get_group(0)
    own, standard = Scales(group), MoELayer(HIDDEN, INTERMEDIATE, EXPERTS, 2, group=group)
    twin = nn.Sequential(copy.deepcopy(own))
    texts = [caught(twin.sharded_state_dict)]
    mark_expert_parameters(twin[0], group=group)
    found = twin.sharded_state_dict()["0.scales"]
    same = found.local_tensor is twin[0].scales
    of_twin = copy.deepcopy(standard).sharded_state_dict()["experts.down"]
    without, layer = SwiGLUExperts(2, 8, 4), nn.Linear(2, 2)
    for each in (without, layer):
        mark_expert_parameters(each)
        texts.append(caught(each.sharded_state_dict))
    return [texts, same, found.global_shape, of_twin.global_shape]


def test_marks_that_are_missing_are_named():
    group = "sharded_state_dict: group of mark_expert_parameters must be the ranks that share the experts of"
    expected = [
        "ValueError: sharded_state_dict: parameter '0.scales' must be one that mark_expert_parameters marked, again "
        "after a deep copy, but got no mark",
        f"ValueError: {group} 'gate_up', but got None",
        f"ValueError: {group} 'weight', but got None",
    ]
    for texts, same, of_hand, of_twin in run(marks, 2):
        assert texts == expected
        assert same
        assert of_hand == (EXPERTS, HIDDEN)
        assert of_twin == (EXPERTS, INTERMEDIATE, HIDDEN)


class Sized(SwiGLUExperts):
    """Experts whose class defines how they are saved."""

    def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
        return {f"{structured_name_prefix}mine": super().sharded_state_dict()["down"]}


def test_one_process_has_whole_experts_and_a_class_keeps_its_own_method():
    layer = SwiGLUExperts(3, 8, 4)
    mark_expert_parameters(layer)
    assert layer.sharded_state_dict()["gate_up"].global_shape == (3, 8, 8)
    own = Sized(3, 8, 4)
    mark_expert_parameters(own)
    assert list(nn.Sequential(own).sharded_state_dict()) == ["0.mine"]


def from_a_gathered_state(path: str, gathered: str) -> dict[str, NDArray]:
    """The whole state after loading a gathered checkpoint, which is saved again by Paddle."""
    net, group = Various(dist.get_group(0)), dist.get_group(0)
    net.set_state_dict(shard_state_dict(paddle.load(gathered), net, group))
    dist.save_state_dict(net.sharded_state_dict(), path)
    return {key: value.numpy() for key, value in gather_state_dict(net, group).items()}


def test_a_gathered_state_becomes_such_a_checkpoint(tmp_path):
    paddle.seed(8)
    whole, path = Various(None), str(tmp_path / "flex")
    paddle.save(whole.state_dict(), str(tmp_path / "whole.pdparams"))
    expected = {key: value.numpy() for key, value in whole.state_dict().items()}
    for found in run(from_a_gathered_state, 2, path=path, gathered=str(tmp_path / "whole.pdparams")):
        assert_same(found, expected)
    assert_same({key: value.numpy() for key, value in dist.load_merged_state_dict(path).items()}, expected)


# The tests of four processes follow each other, since a start takes seconds.


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_four_ranks_load_what_two_ranks_saved(precision, checkpoint):
    path, there = checkpoint(precision)
    for found in run(loaded, 4, path=path, **PRECISIONS[precision]):
        assert_same(found, there)


def of_two_groups(path: str, pairs: list[list[int]], load: bool) -> dict[str, NDArray]:
    """This rank's part after saving or loading a model whose layers have experts on two ranks and on four.

    Args:
        path: of the checkpoint.
        pairs: the ranks that share the first layer's experts; they have copies.
        load: whether to load.
    """
    groups = []
    for ranks in pairs:
        groups.append(dist.new_group(ranks))
        dist.barrier()
    pair = next(each for each in groups if dist.get_rank() in each.ranks)
    paddle.seed(9 + load)
    size = HIDDEN, INTERMEDIATE, EXPERTS, 2
    net = nn.Sequential(MoELayer(*size, group=pair), MoELayer(*size, group=dist.get_group(0)))
    if load:
        load_on_cpu(net.sharded_state_dict(), path)
    else:
        dist.save_state_dict(net.sharded_state_dict(), path)
    whole = gather_state_dict(net[0], pair), gather_state_dict(net[1], dist.get_group(0))
    return {f"{number}.{key}": each.numpy() for number, state in enumerate(whole) for key, each in state.items()}


@pytest.mark.slow
def test_layers_of_several_groups_load_in_other_groups_and_in_one_process(tmp_path):
    path = str(tmp_path / "groups")
    there, *others = run(of_two_groups, 4, path=path, pairs=[[0, 1], [2, 3]], load=False)
    for each in (*others, *run(of_two_groups, 4, path=path, pairs=[[0, 2], [1, 3]], load=True)):
        assert_same(each, there)
    assert [len(parts_in(path)[f"{layer}.experts.down"]) for layer in (0, 1)] == [2, 4]
    assert_same({key: value.numpy() for key, value in dist.load_merged_state_dict(path).items()}, there)


@pytest.mark.slow
def test_two_ranks_load_what_four_ranks_saved(tmp_path):
    path = str(tmp_path / "four")
    there = run(saved, 4, path=path)[0]
    for found in run(loaded, 2, path=path):
        assert_same(found, there)
