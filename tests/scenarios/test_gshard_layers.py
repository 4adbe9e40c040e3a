# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle's own MoE layer, ``paddle.incubate.distributed.models.moe.MoELayer``, on any device with patch_paddle."""

from __future__ import annotations

import contextlib

import numpy as np
import paddle
import pytest
from paddle import _C_ops, _legacy_C_ops, nn
from paddle.incubate.distributed.models.moe import MoELayer, moe_layer
from paddle.incubate.distributed.models.moe.gate import GShardGate, SwitchGate
from paddle.incubate.distributed.models.moe.utils import count_by_gate, limit_by_capacity

from paddle_moe_ops import patch_paddle, patched_paddle, unpatch_paddle
from paddle_moe_ops.compat.paddle import NAMES_OF_FAMILIES
from tests.ops.problems import tensor

B, S, H, INNER, E = 3, 11, 6, 8, 5
GATES = {"naive": 2, "gshard": 2, "switch": 1}
gates = pytest.mark.parametrize("kind", GATES)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same parameters and random numbers of gates in every run."""
    paddle.seed(5)


class Expert(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(H, INNER)
        self.down = nn.Linear(INNER, H)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def layer_with(kind, capacity=None):
    """A layer, and its gate's capacity if it has one."""
    experts = nn.LayerList([Expert() for _ in range(E)])
    gate = {"type": kind, "top_k": GATES[kind]}
    if capacity is not None:
        kinds = {"gshard": GShardGate, "switch": SwitchGate}
        gate = kinds[kind](H, E, 1, topk=GATES[kind], capacity=(capacity, capacity))
    return MoELayer(d_model=H, experts=experts, gate=gate)


def batch(rng, place, batch_size=B):
    """Tokens as a layer before would give them: the MoE layer reshapes its input in place."""
    return tensor(rng.standard_normal((batch_size, S, H)).astype(np.float32), place, gradient=True) * 1.0


def dense(layer, x, value, ids):
    """The layer from its gate's results, every expert on every token; dropped slots add nothing."""
    every = np.stack([expert(x).numpy() for expert in layer.experts], axis=1)
    ids = ids.numpy().reshape(len(every), -1)
    chosen = np.take_along_axis(every, np.maximum(ids, 0)[:, :, None], axis=1)
    return (np.where(ids >= 0, value.numpy().reshape(ids.shape), 0)[:, :, None] * chosen).sum(axis=1)


@gates
def test_a_layer_trains_with_each_gate(kind, rng, place):
    layer = layer_with(kind)
    optimizer = paddle.optimizer.Adam(2e-2, parameters=layer.parameters())
    values = rng.standard_normal((B, S, H)).astype(np.float32)
    target = tensor(np.tanh(values[..., ::-1]).copy(), place)
    losses = []
    with patched_paddle("gshard"):
        for _ in range(25):
            out = layer(tensor(values, place, gradient=True) * 1.0)
            loss = nn.functional.mse_loss(out, target)
            balance = layer.gate.get_loss()
            (loss if balance is None else loss + 0.01 * balance).backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.7 * losses[0]


@gates
def test_outputs_are_those_of_a_dense_formulation(kind, rng, place):
    layer = layer_with(kind)
    layer.eval()
    x = batch(rng, place)
    with patched_paddle("gshard"):
        paddle.seed(3)
        out = layer(x * 1.0)
        paddle.seed(3)
        value, ids = layer.gate(x.reshape([-1, H]))
    expected = dense(layer, x.reshape([-1, H]), value, ids).reshape(out.shape)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-5)
    if kind == "gshard":
        assert (ids.numpy() < 0).any()  # its random routing drops some


@pytest.mark.parametrize("kind", ["gshard", "switch"])
@pytest.mark.parametrize("capacity", [0.1, 0.25])
def test_tokens_beyond_an_experts_capacity_leave_it_alone(capacity, kind, rng, place):
    layer = layer_with(kind, capacity)
    layer.eval()
    layer.gate.gate.bias.set_value(np.float32([9, 0, 0, 0, 0]))  # all tokens choose expert 0 first
    x = batch(rng, place)
    room = int(np.ceil(capacity * B * S))
    with patched_paddle("gshard"):
        paddle.seed(3)
        out = layer(x * 1.0)
        paddle.seed(3)
        value, ids = layer.gate(x.reshape([-1, H]))
    assert np.flatnonzero((ids.numpy() == 0).any(axis=1)).tolist() == list(range(room))
    expected = dense(layer, x.reshape([-1, H]), value, ids).reshape(out.shape)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-5)
    (out**2).sum().backward()
    assert layer.experts[0].up.weight.grad is not None


@gates
def test_a_layer_without_gradients(kind, rng, place):
    layer = layer_with(kind)
    layer.eval()
    x = batch(rng, place)
    with patched_paddle("gshard"):
        paddle.seed(2)
        expected = layer(x * 1.0)
        paddle.seed(2)
        with paddle.no_grad():
            out = layer(x * 1.0)
    assert out.stop_gradient
    np.testing.assert_array_equal(out.numpy(), expected.numpy())


@pytest.mark.parametrize(
    ("kind", "batch_size", "capacity"),
    [
        ("naive", 0, None),
        # on the device of the rig, Paddle leaves results of no elements on the CPU
        pytest.param("gshard", 0, None, marks=pytest.mark.cpu_only),
        ("gshard", B, 0),
    ],
)
def test_layers_of_no_tokens_and_experts_without_room(kind, batch_size, capacity, rng, place):
    """Paddle's switch gate fails for both in operators of its own."""
    layer = layer_with(kind, capacity)
    values = rng.standard_normal((batch_size, S, H)).astype(np.float32)
    leaf = tensor(values, place, gradient=True)
    with patched_paddle("gshard"):
        out = layer(leaf * 1.0)
        out.sum().backward()
    assert out.shape == leaf.grad.shape == [batch_size, S, H]
    assert not out.numpy().any()
    assert not leaf.grad.numpy().any()


@pytest.mark.parametrize("top_k", [1, 2])
def test_counts_and_positions_of_no_tokens(top_k, place):
    with patched_paddle("gshard"):
        ids = tensor(np.zeros((0, top_k), np.int64), place)
        entries, local, everywhere = count_by_gate(ids, E, 1)
        assert entries.shape == [0]
        assert local.tolist() == everywhere.tolist() == [0] * E
        counts, _, pruned = limit_by_capacity(ids, E, 1, 3)
        assert counts.tolist() == [0] * E
        assert pruned.shape == [0, top_k]


def test_the_gradient_of_the_input_is_paddles_which_keeps_one_slot_of_a_token(rng, place, monkeypatch):
    """Paddle's MoEScatter overwrites a token's gradient by that of its other slot; docs/migrating.md says so."""
    layer = layer_with("naive")
    values = rng.standard_normal((1, S, H)).astype(np.float32)

    def gradient():
        leaf = tensor(values, place, gradient=True)
        (layer(leaf * 1.0) * 3).sum().backward()
        layer.clear_gradients()
        return leaf.grad.numpy()

    with patched_paddle("gshard"):
        got = gradient()

        def adding(rows, pos, size, maybe_overlap=True):
            return paddle.scatter_nd_add(paddle.zeros([size, rows.shape[-1]]), pos.unsqueeze(-1), rows)

        with monkeypatch.context() as patch:
            patch.setattr(moe_layer, "_local_gather", adding)
            right = gradient()
        quotient = np.zeros_like(values)
        with paddle.no_grad():
            for place_of in np.ndindex(values.shape):
                step = np.zeros_like(values)
                step[place_of] = 2.0**-8
                up, down = (float((layer(tensor(each, place)) * 3).sum()) for each in (values + step, values - step))
                quotient[place_of] = (up - down) * 2.0**7
    np.testing.assert_allclose(right, quotient, rtol=1e-2, atol=2e-2)
    assert np.abs(got - right).max() > 0.1


FAMILIES = tuple(NAMES_OF_FAMILIES)


def where_paddle_looks():
    """Every replaceable object by its name."""
    functions = {name: getattr(nn.functional, name).__code__ for name in NAMES_OF_FAMILIES["permute"]}
    names = {name for family in FAMILIES if family != "permute" for name in NAMES_OF_FAMILIES[family]}
    coded = {"fp8_gemm_blockwise", "fused_transpose_split_quant"}  # functions whose code is replaced, too
    functions |= {name: getattr(paddle.incubate.nn.functional, name).__code__ for name in coded}
    modules = {name: _legacy_C_ops if name == "random_routing" else _C_ops for name in names - coded}
    return functions | {name: getattr(module, name) for name, module in modules.items()}


# Each family first, last and beside each other one, forwards and backwards.
ORDERS = [FAMILIES[i:] + FAMILIES[:i] for i in range(len(FAMILIES))]


@pytest.mark.parametrize("order", [*ORDERS, *(each[::-1] for each in ORDERS)], ids="-".join)
def test_families_come_and_go_in_every_order(order, rng, place):
    before = where_paddle_looks()
    with contextlib.ExitStack() as stack:
        stack.callback(unpatch_paddle)
        for count, family in enumerate(order):
            patch_paddle((family,))
            now = where_paddle_looks()
            changed = {name for name in now if now[name] is not before[name]}
            assert changed == {name for each in order[: count + 1] for name in NAMES_OF_FAMILIES[each]}
        ids = tensor(np.array([[0, 2], [0, 2]], np.int64), place)
        assert count_by_gate(ids, E, 1)[0].tolist() == [2, 0, 3, 1]
        for count, family in enumerate(order):
            unpatch_paddle((family,))
            now = where_paddle_looks()
            changed = {name for name in now if now[name] is not before[name]}
            assert changed == {name for each in order[count + 1 :] for name in NAMES_OF_FAMILIES[each]}
    assert where_paddle_looks() == before


@pytest.mark.cpu_only
@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="Paddle has the operators itself")
def test_without_the_patch_paddle_says_that_a_cpu_has_no_kernel(rng, place):
    with pytest.raises(RuntimeError, match=r"number_count|expert count"):
        layer_with("naive")(batch(rng, place))
