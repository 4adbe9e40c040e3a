# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""States of optimizers that are cut for ranks and put together again, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.communication.group import Group

from paddle_moe_ops.expert_parallel import (
    gather_optimizer_state_dict,
    mark_expert_parameters,
    shard_optimizer_state_dict,
)
from paddle_moe_ops.nn import SwiGLUExperts

RANKS, EXPERTS = 3, 6
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "Momentum": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "Lamb": {},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSProp": {},
    "Rprop": {},
}


@pytest.fixture(autouse=True)
def _on_the_host():
    device = paddle.get_device()
    paddle.set_device("cpu")
    yield
    paddle.set_device(device)


class Scales(nn.Layer):
    """A number for each expert, [E]."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.scale = self.create_parameter([experts])


def model_of(experts: int, dtype: str = "float32") -> nn.Layer:
    """Two layers of experts of odd sizes, a number for each, a dense layer and a frozen one."""
    net = nn.Sequential(
        nn.Linear(5, 7), SwiGLUExperts(experts, 5, 3), SwiGLUExperts(experts, 1, 7), Scales(experts), nn.Linear(3, 1)
    )
    for each in (net[1], net[2], net[3]):
        each.to(dtype=dtype)
        mark_expert_parameters(each)
    for parameter in net[4].parameters():
        parameter.stop_gradient = True
    return net


def optimizer_of(net: nn.Layer, name: str, **options: Any) -> Any:
    return getattr(paddle.optimizer, name)(learning_rate=0.01, parameters=net.parameters(), **options)


def step(net: nn.Layer, optimizer: Any, seed: int) -> None:
    """A step by gradients that are the same whatever the dtype."""
    rng = np.random.default_rng(seed)
    for parameter in net.parameters():
        if not parameter.stop_gradient:
            gradient = paddle.to_tensor(rng.standard_normal(parameter.shape).astype(np.float32))
            (parameter.astype("float32") * gradient).sum().backward()
    optimizer.step()
    optimizer.clear_grad()


def of_rank(rank: int) -> Group:
    """A group that connects nothing."""
    return Group(rank, 0, list(range(RANKS)))


def tensors_of(state: dict[str, Any]) -> dict[str, paddle.Tensor]:
    """All tensors of a state, by names of the model."""
    names = {key: name for name, key in state["parameter_names"].items()}
    found = {}
    flat = {key: each for key, each in state.items() if isinstance(each, paddle.Tensor)}
    flat |= {each.name: each for each in state.get("master_weights", {}).values()}
    for key, each in flat.items():
        (owner,) = (name for name in names if key.startswith(name + "_"))
        found[names[owner] + key[len(owner) :]] = each
    return found


def assert_parts_are_the_whole(whole: dict[str, Any], dtype: str = "float32") -> None:
    """Give each rank's part to an optimizer of its own, and put together what these have."""
    expected, parts = tensors_of(whole), []
    for rank in range(RANKS):
        net = model_of(EXPERTS // RANKS, dtype)
        part = shard_optimizer_state_dict(whole, net, of_rank(rank))
        optimizer = optimizer_of(net, "AdamW")
        optimizer.set_state_dict(part)  # without a step it gives back what it was given
        parts.append(tensors_of(gather_optimizer_state_dict(optimizer, net)))
    for name, value in expected.items():
        of_ranks = [part[name] for part in parts]
        is_split = not name.startswith("0.") and list(value.shape) != [1]
        made = paddle.concat(of_ranks) if is_split else of_ranks[0]
        assert list(made.shape) == list(value.shape)
        np.testing.assert_array_equal(made.astype("float32").numpy(), value.astype("float32").numpy(), err_msg=name)
        assert not is_split or value.shape[0] == EXPERTS
    for part in parts:
        assert part.keys() == expected.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_are_the_whole(name):
    net = model_of(EXPERTS)
    optimizer = optimizer_of(net, name, **OPTIMIZERS[name])
    for seed in range(2):
        step(net, optimizer, seed)
    whole = gather_optimizer_state_dict(optimizer, net)
    assert len(tensors_of(whole)) == len(optimizer.state_dict())
    assert_parts_are_the_whole(whole)


@pytest.mark.parametrize("name", ["AdamW", "Momentum", "Lamb"])
def test_parts_with_master_weights_are_the_whole(name):
    """Paddle makes the state before it finds that a CPU has no kernel for bfloat16."""
    net = model_of(EXPERTS, "bfloat16")
    optimizer = optimizer_of(net, name, multi_precision=True)
    with pytest.raises(RuntimeError, match="bfloat16"):
        step(net, optimizer, 0)
    rng = np.random.default_rng(1)
    state = optimizer.state_dict()
    for each in [*state["master_weights"].values(), *(each for key, each in state.items() if key != "master_weights")]:
        each.set_value(rng.standard_normal(each.shape).astype(np.float32))
    assert len(state["master_weights"]) == 5
    assert_parts_are_the_whole(gather_optimizer_state_dict(optimizer, net), "bfloat16")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_new_model_goes_on(name):
    net = model_of(EXPERTS)
    optimizer = optimizer_of(net, name, **OPTIMIZERS[name])
    step(net, optimizer, 0)
    other = model_of(EXPERTS)
    other.set_state_dict(net.state_dict())
    again = optimizer_of(other, name, **OPTIMIZERS[name])
    again.set_state_dict(shard_optimizer_state_dict(gather_optimizer_state_dict(optimizer, net), other))
    start = other.state_dict()["1.down"].numpy()
    for each, trained in ((net, optimizer), (other, again)):
        step(each, trained, 1)
    for key, value in net.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[key].numpy(), value.numpy(), err_msg=key)
    assert not np.array_equal(start, other.state_dict()["1.down"].numpy())


@pytest.mark.parametrize(("name", "dtype"), [("Momentum", "float32"), ("SGD", "bfloat16")])
def test_states_are_copies(name, dtype):
    """An optimizer keeps the master weights that it is given, and before its first step all that it is given."""
    net, other = model_of(EXPERTS, dtype), model_of(EXPERTS, dtype)
    optimizer, again = (optimizer_of(each, name, multi_precision=dtype == "bfloat16") for each in (net, other))
    step(net, optimizer, 0)
    whole = gather_optimizer_state_dict(optimizer, net)
    kept = {key: each.numpy() for key, each in tensors_of(whole).items()}
    assert len(kept) >= 5
    again.set_state_dict(shard_optimizer_state_dict(whole, other))
    for each, its in ((optimizer, net), (again, other)):
        state = each.state_dict()
        for value in [*state.pop("master_weights", {}).values(), *state.values()]:
            value.zero_()
        for key, value in tensors_of(whole).items():
            np.testing.assert_array_equal(value.numpy(), kept[key])
        assert not any(value.any() for value in tensors_of(gather_optimizer_state_dict(each, its)).values())


def test_entries_may_come_in_another_order():
    net, rate = model_of(EXPERTS), paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = paddle.optimizer.AdamW(rate, parameters=net.parameters())
    step(net, optimizer, 0)
    whole = gather_optimizer_state_dict(optimizer, net)
    part = shard_optimizer_state_dict(whole, net)
    reversed_part = shard_optimizer_state_dict(dict(reversed(whole.items())), net)
    assert next(reversed(whole)) == "parameter_names"
    assert part.keys() == reversed_part.keys() == optimizer.state_dict().keys()


def test_a_model_without_experts_and_a_schedule_pass_through():
    net, rate = nn.Linear(3, 2), paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = paddle.optimizer.ASGD(rate, batch_num=2, parameters=net.parameters())
    step(net, optimizer, 0)
    rate.step()
    whole = gather_optimizer_state_dict(optimizer, net)
    part = shard_optimizer_state_dict(whole, net, of_rank(1))
    assert part["LR_Scheduler"] == rate.state_dict()
    assert part.keys() == optimizer.state_dict().keys()
    for key in part.keys() - {"LR_Scheduler"}:
        np.testing.assert_array_equal(part[key].numpy(), optimizer.state_dict()[key].numpy())
    assert whole["parameter_names"] == {name: each.name for name, each in net.named_parameters()}


def test_the_longest_name_owns_a_key():
    net = nn.Layer()
    for name in ("w", "w_moment"):
        net.add_parameter(name, net.create_parameter([2], attr=paddle.ParamAttr(name=f"longest_{name}")))
    optimizer = optimizer_of(net, "Adagrad")
    step(net, optimizer, 0)
    new = nn.Layer()
    for name in ("w", "w_moment"):
        new.add_parameter(name, new.create_parameter([2], attr=paddle.ParamAttr(name=f"other_{name}")))
    part = shard_optimizer_state_dict(gather_optimizer_state_dict(optimizer, net), new)
    assert part.keys() == {"other_w_moment_0", "other_w_moment_moment_0"}
    for key, each in part.items():
        np.testing.assert_array_equal(each.numpy(), optimizer.state_dict()[key.replace("other", "longest")].numpy())


def raised(call: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as failed:
        call()
    return f"{failed.type.__name__}: {failed.value}"


def test_what_is_no_state_is_refused():
    net = model_of(2)
    optimizer = optimizer_of(net, "AdamW")
    step(net, optimizer, 0)
    down, gather, shard = net[1].down.name, gather_optimizer_state_dict, shard_optimizer_state_dict
    key, state = f"{down}_moment1_0", gather(optimizer, net)
    name, no_key = "shard_optimizer_state_dict", "must be what an optimizer keeps for parameters of the layer, but got"
    assert raised(lambda: gather(None, net)).endswith(
        "optimizer must be an optimizer of paddle.optimizer, but got NoneType"
    )
    assert raised(lambda: gather(optimizer, optimizer)).endswith("layer must be a Layer, but got AdamW")
    foreign = {f"other_{number}.w_0_moment1_0": state[key] for number in range(10)}
    shown = [f"other_{number}.w_0_moment1_0" for number in range(8)]
    assert (
        raised(lambda: shard(foreign, net))
        == f"ValueError: {name}: state {no_key} keys of no parameter: {shown} and 2 more"
    )
    text = raised(lambda: gather(optimizer, net[1]))
    assert text.startswith(
        f"ValueError: gather_optimizer_state_dict: optimizer.state_dict() {no_key} keys of no parameter: "
    )
    assert f"'{net[0].weight.name}_moment1_0'" in text
    assert "unlike_0" in raised(lambda: shard({"master_weights": {"unlike_0": state[key]}}, net))
    # a name alone is no key
    assert raised(lambda: shard({f"{down}_0": state[key]}, net)).endswith(f"keys of no parameter: ['{down}_0']")
    assert raised(lambda: shard([state], net)).startswith(f"TypeError: {name}: state must be a dict")
    assert raised(lambda: shard(state, state)).endswith("layer must be a Layer, but got dict")
    assert raised(lambda: shard({**state, "parameter_names": []}, net)).startswith(f"TypeError: {name}: state['par")
    assert raised(lambda: shard({**state, "master_weights": []}, net)).startswith(f"TypeError: {name}: state['mas")
    assert raised(lambda: shard({key: state[key].numpy()}, net)) == (
        f"TypeError: {name}: state[{key!r}] must be a tensor, but got ndarray"
    )
    assert raised(lambda: shard({key: state[key]}, net, of_rank(0))) == (
        f"ValueError: {name}: state[{key!r}] must be of shape [6, 3, 5], as its parameter '1.down' of experts is, "
        "or one number, but got [2, 3, 5]"
    )


def test_a_history_of_gradients_of_experts_is_refused():
    net = model_of(2)
    optimizer = paddle.optimizer.ASGD(0.1, batch_num=3, parameters=net.parameters())
    step(net, optimizer, 0)
    assert raised(lambda: gather_optimizer_state_dict(optimizer, net)) == (
        f"ValueError: gather_optimizer_state_dict: optimizer.state_dict()['{net[1].gate_up.name}_y_0'] must be of "
        "shape [2, 5, 6], as its parameter '1.gate_up' of experts is, or one number, but got [3, 2, 5, 6]"
    )


def test_an_optimizer_that_keeps_other_things_is_refused():
    net = nn.Linear(2, 2)
    optimizer = paddle.optimizer.LBFGS(parameters=net.parameters())
    assert "keys of no parameter: ['state']" in raised(lambda: gather_optimizer_state_dict(optimizer, net))


def test_a_second_optimizer_of_the_same_parameters_is_refused_by_paddle():
    net = model_of(2)
    optimizer = optimizer_of(net, "AdamW")
    step(net, optimizer, 0)
    again = optimizer_of(net, "AdamW")
    again.set_state_dict(shard_optimizer_state_dict(gather_optimizer_state_dict(optimizer, net), net))
    with pytest.raises(AssertionError, match="_moment1_1 should in state dict"):
        step(net, again, 1)
