# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models with experts on several ranks, trained with Fleet, give the losses and parameters of one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import mix_precision_utils, tensor_fusion_helper
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

from paddle_moe_ops.expert_parallel import (
    average_gradients,
    distributed_optimizer,
    gather_state_dict,
    is_expert_parameter,
)

from .fleets import code_of_guide, start_fleet
from .processes import Processes, run
from .test_expert_parallel_errors import caught
from .test_expert_parallel_layer import HIDDEN, SIZES, Net, arrays, batch

pytestmark = pytest.mark.long

STEPS = 4
DATA, SHARDING, EXPERTS = "data parallel", "sharding", "expert parallel"
TWO = {
    DATA: {"dp_degree": 2},
    SHARDING: {"sharding_degree": 2},
    EXPERTS: {"sharding_degree": 2, "moe_sharding_degree": 1, "ep_degree": 2},
}
FOUR = {
    DATA: {"dp_degree": 4},
    SHARDING: {"dp_degree": 2, "sharding_degree": 2},
    EXPERTS: {"sharding_degree": 4, "moe_sharding_degree": 2, "ep_degree": 2},
}


def group_of_experts(topology: Any, kind: str) -> Any:
    """The ranks that share the experts."""
    if kind == EXPERTS:
        return topology.get_expert_parallel_group()
    return topology.get_sharding_parallel_group() if kind == SHARDING else topology.get_data_parallel_group()


def steps(model: Any, optimizer: Any, tokens: tuple[int, ...], rank: int | None, turns: int) -> list[float]:
    """Train, each step on `turns` batches; the losses are parts of those over all tokens."""
    losses, parts = [], 1 if rank is None else len(tokens)
    for step in range(STEPS):
        total = 0.0
        for turn in range(turns):
            x, y = batch(tokens, rank, turns * step + turn)
            x.stop_gradient = False  # a rank without tokens has gradients of dense layers, too
            loss = (model(x) - y).square().sum() * (parts / sum(tokens))
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(total / parts)
    return losses


def trainable(net: nn.Layer) -> list[paddle.Tensor]:
    return [each for each in net.parameters() if not each.stop_gradient]


def freeze_dense(net: Net, freezes: bool) -> None:
    for each in (*net.first.parameters(), *net.moe.router.parameters(), *net.last.parameters()):
        each.stop_gradient = freezes


def optimizer_of(name: str, parameters: Any, clip: Any) -> Any:
    """Momentum shows a wrong factor of a gradient at once; AdamW has more states."""
    return {
        "Momentum": lambda: paddle.optimizer.Momentum(0.3, parameters=parameters, grad_clip=clip),
        "AdamW": lambda: paddle.optimizer.AdamW(0.02, parameters=parameters, grad_clip=clip),
    }[name]()


def with_fleet(
    degrees: dict[str, int],
    kind: str,
    tokens: tuple[int, ...],
    *,
    optimizer: str = "Momentum",
    sharding: dict[str, Any] | None = None,
    clips_experts: bool = False,
    same_seed: bool = True,
    turns: int = 1,
    main_grad: bool = False,
    freezes: bool = False,
    freezes_dense: bool = False,
    overlaps: str = "",
    save: str = "",
) -> Any:
    """The whole state before, the losses, and the state after, which is saved where ``save`` says.

    With ``freezes_dense`` the experts alone are trained, although the optimizer has all parameters.
    """
    topology = start_fleet(sharding, **degrees)
    group, rank = group_of_experts(topology, kind), paddle.distributed.get_rank()
    paddle.seed(7 if same_seed else group.ranks[0])
    net = Net(group)
    net.moe.experts.down.stop_gradient = freezes
    net.last.bias.name = overlaps or net.last.bias.name
    model: Any = mix_precision_utils.MixPrecisionLayer(net, dtype="bfloat16") if main_grad else net
    model = fleet.distributed_model(model)
    clip = (
        ClipGradForMOEByGlobalNorm(0.5, is_expert_parameter, group) if clips_experts else nn.ClipGradByGlobalNorm(0.5)
    )
    with pytest.MonkeyPatch.context() as patch:
        if sharding is not None:  # what Fleet's second optimizer needs of a GPU, and gloo lacks
            patch.setattr(tensor_fusion_helper, "__current_device_type__", "gpu")
            patch.setattr(paddle.distributed, "reduce_scatter", reduced_and_scattered)
        made = optimizer_of(optimizer, trainable(net), clip)
        made = distributed_optimizer(mix_precision_utils.MixPrecisionOptimizer(made) if main_grad else made)
        freeze_dense(net, freezes_dense)
        if overlaps:
            made._inner_opt._set_broadcast_overlap(True, net)
        start = arrays(gather_state_dict(net, group))
        losses = steps(model, made, tokens, rank, turns)
        if save:
            of_net = net.sharded_state_dict()
            paddle.distributed.save_state_dict(of_net | made.sharded_state_dict(of_net), save)
    return start, losses, arrays(gather_state_dict(net, group))


class Done:
    """A task of a collective that has ended."""

    def wait(self) -> None:
        pass


def reduced_and_scattered(out: Any, whole: Any, *, group: Any, **_: Any) -> Done:
    """`paddle.distributed.reduce_scatter`, which gloo lacks."""
    if group.nranks > 1:
        copy = whole.clone()
        paddle.distributed.all_reduce(copy, group=group)
        count = copy.shape[0] // group.nranks
        paddle.assign(copy[group.rank * count : (group.rank + 1) * count], out)
    return Done()


def assert_like_one_process(ranks: Any, degrees: dict[str, int], kind: str, tokens: tuple[int, ...], **options: Any):
    got = ranks(len(tokens), with_fleet, degrees=degrees, kind=kind, tokens=tokens, **options)
    start, _, end = got[0]
    for other_start, _, other in got[1:]:
        for name, value in other.items():
            np.testing.assert_array_equal(other_start[name], start[name], err_msg=name)
            np.testing.assert_array_equal(value, end[name], err_msg=name)
    net = Net()
    net.set_state_dict(start)
    net.moe.experts.down.stop_gradient = options.get("freezes", False)
    name, turns = options.get("optimizer", "Momentum"), options.get("turns", 1)
    optimizer = optimizer_of(name, trainable(net), nn.ClipGradByGlobalNorm(0.5))
    freeze_dense(net, options.get("freezes_dense", False))
    losses = steps(net, optimizer, tokens, None, turns)
    np.testing.assert_allclose(np.sum([each for _, each, _ in got], 0), losses, rtol=1e-5)
    if "save" in options:
        of_net = net.sharded_state_dict()
        expected = {key: each.local_tensor for key, each in (of_net | optimizer.sharded_state_dict(of_net)).items()}
        found = paddle.distributed.load_merged_state_dict(options["save"])
        assert found.keys() == expected.keys()
        for key, value in found.items():
            np.testing.assert_allclose(value.numpy(), expected[key].numpy(), rtol=2e-3, atol=2e-5, err_msg=key)
    for key, expected in arrays(net.state_dict()).items():
        np.testing.assert_allclose(end[key], expected, rtol=2e-4, atol=2e-5, err_msg=key)
    assert any(np.abs(end[key] - start[key]).max() > 0.01 for key in start if "experts" in key)


TOKENS = {"even": (8, 8), "one without tokens": (16, 0)}


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("kind", TWO)
def test_training_with_fleet_is_that_of_one_process(ranks, kind, tokens):
    assert_like_one_process(ranks, TWO[kind], kind, tokens)


@pytest.mark.parametrize("kind", TWO)
def test_a_clip_that_knows_experts_and_accumulation_work_too(ranks, kind):
    assert_like_one_process(ranks, TWO[kind], kind, (5, 11), clips_experts=True, turns=2, optimizer="AdamW")


@pytest.mark.cpu_only  # Fleet names the devices on which it runs, and a plug-in's is none of them
@pytest.mark.parametrize("kind", [SHARDING, EXPERTS])
def test_fleet_may_divide_each_parameter(ranks, kind):
    assert_like_one_process(ranks, TWO[kind], kind, (8, 8), sharding={"split_param": True}, main_grad=True)


@pytest.mark.parametrize("kind", [SHARDING, EXPERTS])  # paddle.DataParallel knows no main_grad
def test_main_gradients_are_those_of_one_process(ranks, kind):
    assert_like_one_process(ranks, TWO[kind], kind, (5, 11), main_grad=True, turns=2)


DIVIDED = {"sharding": {"split_param": True}, "main_grad": True}
WAYS = [(DATA, {}), (SHARDING, {}), (EXPERTS, {}), (SHARDING, DIVIDED), (EXPERTS, DIVIDED)]
NAMES_OF_WAYS = [f"{kind}, divided" if options else kind for kind, options in WAYS]


@pytest.mark.cpu_only  # Paddle moves checkpoints to GPUs, and a plug-in's are none
@pytest.mark.parametrize(("kind", "options"), WAYS, ids=NAMES_OF_WAYS)
def test_checkpoints_of_paddle_have_all_experts_and_what_optimizers_keep(ranks, kind, options, tmp_path):
    assert_like_one_process(ranks, TWO[kind], kind, (8, 8), optimizer="AdamW", save=str(tmp_path / "flex"), **options)


def unprepared(kind: str, splits: bool) -> list[str]:
    """Errors of Fleet's own optimizers of experts and of a deep copy of them, and of a model without experts."""
    topology = start_fleet({"split_param": splits}, **TWO[kind])
    net = Net(group_of_experts(topology, kind))
    texts = []
    for model in (net, copy.deepcopy(net), net.last):
        optimizer = paddle.optimizer.SGD(parameters=model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_fusion_helper, "__current_device_type__", "gpu")
            texts.append(caught(lambda made=optimizer: fleet.distributed_optimizer(made)))
    topology, optimizers = fleet.get_hybrid_communicate_group(), fleet.meta_optimizers.dygraph_optimizer
    sharding = optimizers.dygraph_sharding_optimizer
    for kind_of_optimizer in (sharding.DygraphShardingOptimizer, sharding.DygraphShardingOptimizerV2):
        optimizer = paddle.optimizer.SGD(parameters=net.parameters())
        texts.append(caught(lambda make=kind_of_optimizer, made=optimizer: make(made, topology)))
    return texts


@pytest.mark.parametrize("splits", [False, True], ids=["whole parameters", "divided parameters"])
@pytest.mark.parametrize("kind", TWO)
def test_optimizers_that_would_mix_experts_are_refused(ranks, kind, splits):
    for text, of_copy, without_experts, *of_sharding in ranks(2, unprepared, kind=kind, splits=splits):
        names = *["HybridParallelOptimizer"] * 2, "DygraphShardingOptimizer", "DygraphShardingOptimizerV2"
        for name, each in zip(names, (text, of_copy, *of_sharding), strict=True):
            assert each.startswith(f"ValueError: {name}: parameters must be parameters that all its ranks have; make ")
            assert "paddle_moe_ops.expert_parallel.distributed_optimizer, but got " in each
            assert each.endswith(", of experts on ranks [0, 1], each of which has others")
        assert without_experts == "nothing was raised"


def after_a_failure() -> list[str]:
    """Errors of a call of `distributed_optimizer` in which Fleet's fails, and then of Fleet's own."""
    start_fleet(**TWO[DATA])
    optimizer = paddle.optimizer.SGD(parameters=Net(paddle.distributed.get_group(0)).parameters())

    def failing(*_: Any) -> None:
        raise RuntimeError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "distributed_optimizer", failing)
        first = caught(lambda: distributed_optimizer(optimizer))
    return [first, caught(lambda: fleet.distributed_optimizer(optimizer))]


def test_optimizers_that_would_mix_experts_are_refused_after_a_failure_in_fleet(ranks):
    for first, then in ranks(2, after_a_failure):
        assert first == "RuntimeError: no memory"
        assert then.startswith("ValueError: HybridParallelOptimizer: parameters must be parameters that all its ranks ")


def sharded_by_group(level: str) -> str:
    """The error of `group_sharded_parallel`."""
    net = Net(paddle.distributed.get_group(0))
    optimizer = paddle.optimizer.AdamW(parameters=net.parameters())
    return caught(lambda: paddle.distributed.sharding.group_sharded_parallel(net, optimizer, level))


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_group_sharded_parallel_refuses_experts(level, custom_backend):
    name = "GroupShardedStage3" if level == "p_g_os" else "GroupShardedOptimizerStage2"
    for text in run(sharded_by_group, 2, custom_backend, level=level):
        assert text.startswith(f"ValueError: {name}: parameters must be parameters that all its ranks have; use ")
        assert "paddle_moe_ops.expert_parallel.group_sharded_parallel, but got " in text
        assert text.endswith(", of experts on ranks [0, 1], each of which has others")


def strange_programs() -> list[str]:
    """Errors when the optimizer is created."""
    texts = []

    def told(group: Any, sharding: Any = None, optimizer: Any = None, **degrees: int) -> None:
        topology = start_fleet(sharding, **degrees)
        net = Net(group_of_experts(topology, group) if isinstance(group, str) else group)
        made = optimizer or paddle.optimizer.SGD(parameters=net.parameters())
        texts.append(caught(lambda: distributed_optimizer(made)))

    everyone = paddle.distributed.get_group(0)
    told(everyone, mp_degree=2)
    told(everyone, {"tensor_fusion": True}, sharding_degree=2)
    told(everyone, {"comm_overlap": True}, sharding_degree=2)
    told(everyone, {"split_param": True, "free_grads_in_comm": True}, sharding_degree=2)
    told(SHARDING, {"split_param": True}, sharding_degree=2)
    told(DATA, optimizer=3, dp_degree=2)
    net = Net(everyone)
    net.moe = mix_precision_utils.MixPrecisionLayer(net.moe, dtype="bfloat16")
    told(SHARDING, {"split_param": True}, paddle.optimizer.SGD(parameters=net.parameters()), sharding_degree=2)
    groups = [{"params": net.first.parameters()}, {"params": net.last.parameters()}]
    told(DATA, optimizer=paddle.optimizer.SGD(parameters=groups), dp_degree=2)
    other = MoEPair(everyone, paddle.distributed.new_group([0, 1]))
    texts.append(caught(lambda: distributed_optimizer(paddle.optimizer.SGD(parameters=other.parameters()))))
    return texts


class MoEPair(nn.Layer):
    """Layers whose experts are shared by different groups."""

    def __init__(self, *groups: Any) -> None:
        super().__init__()
        self.layers = nn.LayerList([Net(group) for group in groups])


def test_what_is_not_known_to_be_right_is_refused(ranks):
    name = "distributed_optimizer"
    for unmarked, fused, overlapped, freed, split, kind, split_in_part, of_groups, groups in ranks(2, strange_programs):
        assert unmarked.startswith(f"ValueError: {name}: sequence_parallel must be set by mark_as_sequence_parallel_")
        assert fused == f"ValueError: {name}: tensor_fusion must be False for experts on several ranks, but got True"
        assert overlapped == f"ValueError: {name}: comm_overlap must be False without split_param, but got True"
        assert (
            freed == f"ValueError: {name}: free_grads_in_comm must be False for experts on several ranks, but got True"
        )
        assert split.startswith(f"ValueError: {name}: parameters must be ones with main_grad with split_param")
        assert split_in_part == split
        assert kind.startswith(f"TypeError: {name}: optimizer must be an optimizer of paddle.optimizer with a list")
        expected = "an optimizer of paddle.optimizer with a list of parameters"
        assert of_groups == f"TypeError: {name}: optimizer must be {expected}, but got SGD"
        assert groups.startswith(f"ValueError: {name}: experts must be shared by the ranks of one group, but got")


def alone_with_fleet() -> bool:
    """Return whether a model without experts on several ranks gets Fleet's optimizer unchanged."""
    start_fleet(dp_degree=2)
    layer = nn.Linear(2, 2, bias_attr=False)
    made = distributed_optimizer(paddle.optimizer.SGD(parameters=layer.parameters()))
    return type(made) is fleet.meta_optimizers.HybridParallelOptimizer


def test_a_model_without_experts_gets_fleets_own_optimizer(ranks):
    assert ranks(2, alone_with_fleet) == [True, True]


def averaged_by_hand() -> Any:
    """Gradients on two ranks after a backward pass in Fleet's group."""
    group = group_of_experts(start_fleet(**TWO[EXPERTS]), EXPERTS)
    paddle.seed(group.ranks[0])
    net = Net(group)
    net(batch((2, 5), paddle.distributed.get_rank(), 0)[0]).sum().backward()
    average_gradients(net.parameters(), group)
    return group.ranks, net.moe.experts.num_experts, [list(each.grad.shape) for each in net.moe.experts.parameters()]


def test_groups_of_fleet_are_taken(ranks):
    gradients = [[2, HIDDEN, 2 * SIZES[1]], [2, SIZES[1], HIDDEN]]
    assert ranks(2, averaged_by_hand) == [([0, 1], 2, gradients)] * 2


def test_the_guides_program_for_fleet_runs(ranks):
    for names in ranks(2, code_of_guide, heading="With Fleet"):
        assert {"model", "optimizer"} <= set(names)


# The tests of four processes follow each other, since a start takes seconds.


@pytest.mark.parametrize("kind", FOUR)
@pytest.mark.slow
def test_four_ranks_with_fleet_train_as_one_process(ranks, kind):
    assert_like_one_process(ranks, FOUR[kind], kind, (3, 0, 9, 4))


def sums_between_some_ranks() -> list[float]:
    """First exchanges of groups, when their start is over."""
    topology = start_fleet(**FOUR[SHARDING])
    found = []
    for group in (topology.get_sharding_parallel_group(), topology.get_data_parallel_group()):
        mine = paddle.to_tensor([float(paddle.distributed.get_rank())])
        paddle.distributed.all_reduce(mine, group=group)
        found.append(mine.item())
    return found


@pytest.mark.slow
def test_groups_of_four_ranks_connect_at_their_first_exchange(custom_backend):
    started = Processes(4, custom_backend)
    try:
        assert started.call(sums_between_some_ranks, {}) == [[1.0, 2.0], [1.0, 4.0], [5.0, 2.0], [5.0, 4.0]]
    finally:
        started.kill()


@pytest.mark.cpu_only
@pytest.mark.slow
def test_four_ranks_may_divide_each_parameter(ranks):
    options = {"sharding": {"split_param": True}, "main_grad": True, "optimizer": "AdamW"}
    assert_like_one_process(ranks, FOUR[EXPERTS], EXPERTS, (3, 0, 9, 4), **options)


@pytest.mark.cpu_only
@pytest.mark.slow
def test_dense_layers_may_be_frozen_later_where_fleet_divides_parameters(ranks):
    assert_like_one_process(ranks, FOUR[SHARDING], SHARDING, (3, 0, 9, 4), freezes_dense=True, **DIVIDED)


@pytest.mark.cpu_only
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [(SHARDING, {}), (EXPERTS, {}), (EXPERTS, DIVIDED)])
def test_checkpoints_of_paddle_have_each_expert_of_several_copies_once(ranks, kind, options, tmp_path):
    path = str(tmp_path / "flex")
    assert_like_one_process(ranks, FOUR[kind], kind, (3, 0, 9, 4), optimizer="AdamW", save=path, **options)


@pytest.mark.parametrize("kind", [SHARDING, EXPERTS])
@pytest.mark.slow
def test_copies_of_experts_start_as_one_on_four_ranks(ranks, kind):
    assert_like_one_process(ranks, FOUR[kind], kind, (4, 4, 4, 4), same_seed=False)


def reduced_float16(kind: str) -> float | None:
    """The gradient of experts that Fleet's optimizer applies on this rank; None if another rank updates them."""
    group = group_of_experts(start_fleet(**FOUR[kind]), kind)
    net = Net(group)
    net.moe.experts.to(dtype="float16")
    optimizer = distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    down = net.moe.experts.down
    down.grad = paddle.full(down.shape, 60000.0 + 32 * paddle.distributed.get_rank(), "float16")
    optimizer._hybrid_sync_grad(list(net.parameters()))
    own = optimizer._inner_opt._rank2params[optimizer._inner_opt._sharding_rank]
    return float(down.grad.astype("float32").max()) if any(each is down for each in own) else None


@pytest.mark.slow
def test_gradients_of_float16_are_added_up_between_copies_in_float32(ranks):
    """Ranks [0, 1] share the experts and [2, 3] have copies: sums over two ranks, divided by four."""
    found = ranks(4, reduced_float16, kind=EXPERTS)
    assert sorted(each for each in found if each is not None) == [30016.0, 30032.0]


def too_few_ranks() -> list[str]:
    """Experts shared by a part of the ranks that Fleet would average them between."""
    texts, this = [], paddle.distributed.get_rank()
    for degrees in (FOUR[DATA], {"sharding_degree": 4}, FOUR[SHARDING]):
        start_fleet(**degrees)
        halves = []
        for ranks in ([0, 3], [1, 2]):
            halves.append(paddle.distributed.new_group(ranks))
            paddle.distributed.barrier()
        net = Net(halves[0 if this in (0, 3) else 1])
        texts.append(caught(lambda net=net: distributed_optimizer(paddle.optimizer.SGD(parameters=net.parameters()))))
    return texts


@pytest.mark.slow
def test_four_ranks_whose_groups_do_not_fit_are_told(ranks):
    shared = "ValueError: distributed_optimizer: experts must be shared by Fleet's"
    for data, sharding, both in ranks(4, too_few_ranks):
        assert data.startswith(f"{shared} data parallel group, ranks [0, 1, 2, 3], but got by ranks [")
        assert sharding.startswith(f"{shared} sharding group, ranks [0, 1, 2, 3], but got by ranks [")
        assert both.startswith(f"{shared} data parallel group, ranks [")
        assert " or sharding group, ranks [" in both
