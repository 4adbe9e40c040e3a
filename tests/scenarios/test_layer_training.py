# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers in training: auxiliary losses, recomputation, narrow dtypes, mixed precision, copies."""

from __future__ import annotations

import copy
import warnings

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.tolerances import assert_close_sums, score_tols
from tests.ops.dense import (
    Options,
    assert_close,
    assert_equals_dense,
    assert_same,
    dense_layer,
    parameters_and_bias,
    results,
)
from tests.ops.problems import products_in_graphs_are
from tests.static.modes import plain_errors

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
    # Paddle's eager mixed precision does nothing on a CPU, and says so.
    pytest.mark.filterwarnings("ignore:amp_guard can only be enabled"),
    pytest.mark.filterwarnings("ignore:AmpScaler can only be enabled"),
]

T, H, I, E, K = 37, 12, 6, 8, 3  # noqa: E741


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(11)


def all_of(layer):
    """The output and both losses, each with a weight of its own."""
    return lambda x: (layer(x), 0.5 * layer.aux_loss, 0.25 * layer.z_loss)


# ---- auxiliary losses


def test_training_on_the_auxiliary_loss_evens_out_the_load():
    layer, x = MoELayer(H, I, E, K, correction_bias=False), paddle.randn([64, H]) + 1.0
    optimizer = paddle.optimizer.Adam(1e-2, parameters=layer.parameters())
    loads, losses = [], []
    for _ in range(60):
        layer(x)
        loss = layer.aux_loss
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        loads.append(max(layer.tokens_per_expert))
        losses.append(loss.item())
    assert loads[0] > 1.7 * 64 * K / E > 1.2 * loads[-1]
    assert losses[-1] < 1.05 < losses[0]


def test_training_on_the_z_loss_makes_logits_small():
    layer, x = MoELayer(H, I, E, K), 3 * paddle.randn([64, H])
    optimizer = paddle.optimizer.SGD(0.05, parameters=layer.parameters())
    first = last = None
    for _ in range(40):
        layer(x)
        (1e-1 * layer.z_loss).backward()
        optimizer.step()
        optimizer.clear_grad()
        last = layer.router(x).logits.abs().max().item()
        first = first or last
    assert last < 0.7 * first


# ---- recomputation


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.75, "scoring": "sigmoid"}], ids=["plain", "capacity"])
def test_recompute_gives_the_same_gradients(options, use_reentrant):
    layer, x = MoELayer(H, I, E, K, **options), paddle.randn([T, H])
    expected = results(layer, x, all_of(layer))
    calls = []
    layer.router.register_forward_post_hook(lambda *_: calls.append(paddle.is_grad_enabled()))
    assert_close(results(layer, x, lambda x: recompute(all_of(layer), x, use_reentrant=use_reentrant)), expected)
    assert len(calls) == 2


def test_losses_may_be_read_outside_of_what_hooks_recompute():
    layer, x = MoELayer(H, I, E, K), paddle.randn([T, H])
    expected = results(layer, x, all_of(layer))

    def run(x):
        out = recompute(layer, x, use_reentrant=False)
        return out, 0.5 * layer.aux_loss, 0.25 * layer.z_loss

    assert_close(results(layer, x, run), expected)


# ---- narrow dtypes


NUMPY_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
LAYERS = {
    "plain": ({}, {}),
    "no shared expert": ({"num_shared_experts": 0}, {}),
    "capacity": ({"capacity_factor": 0.75, "num_shared_experts": 2}, {"capacity": 11}),
    "sigmoid": (
        {"scoring": "sigmoid", "norm_topk_prob": False, "scaling_factor": 2.5},
        {"scoring": "sigmoid", "norm_topk_prob": False, "scaling_factor": 2.5},
    ),
}


def narrow_layer(dtype, **options):
    """A layer of a dtype, and the same in float32."""
    layer = MoELayer(H, I, E, K, **options).to(dtype=dtype)
    wide = MoELayer(H, I, E, K, **options)
    wide.set_state_dict({name: value.astype("float32") for name, value in layer.state_dict().items()})
    return layer, wide


def assert_narrow(got, expected, dtype):
    """Within a few roundings to the dtype, relative to the largest element of each tensor."""
    for name, wanted in expected.items():
        assert got[name].dtype == NUMPY_DTYPES[dtype], name
        wide = got[name].astype(np.float32)
        magnitude = np.full_like(wanted, np.abs(wanted).max())
        assert_close_sums(wide, wanted, magnitude, score_tols(NUMPY_DTYPES[dtype], E), what=name)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize(("told", "options"), LAYERS.values(), ids=LAYERS.keys())
def test_narrow_layer_is_close_to_the_dense_formulation_in_float32(told, options, dtype):
    layer, wide = narrow_layer(dtype, **told)
    x = paddle.randn([T, H]).astype(dtype)
    got = results(layer, x, all_of(layer))
    assert layer.aux_loss.dtype == layer.z_loss.dtype == paddle.float32

    def plain(x):
        found = dense_layer(parameters_and_bias(wide), x, Options(K, **options))
        return found.out, 0.5 * found.aux_loss, 0.25 * found.z_loss

    assert_narrow(got, results(wide, x.astype("float32"), plain), dtype)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_narrow_layer_without_tokens(dtype):
    layer, _ = narrow_layer(dtype)
    found = results(layer, paddle.zeros([0, 4, H], dtype), all_of(layer))
    assert found["out"].shape == (0, 4, H)
    assert not any(array.astype(np.float32).any() for array in found.values())


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("full_graph", [True, False], ids=["full_graph", "bytecode"])
def test_narrow_layer_traced_is_as_in_dygraph(full_graph, dtype):
    layer, _ = narrow_layer(dtype)
    x = paddle.randn([3, 5, H]).astype(dtype)
    expected = results(layer, x, layer)
    traced = paddle.jit.to_static(copy.deepcopy(layer), full_graph=full_graph)
    with plain_errors():
        got = results(traced, x, traced)
    assert_narrow(got, {name: array.astype(np.float32) for name, array in expected.items()}, dtype)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_narrow_layer_saved_is_as_in_dygraph(dtype, tmp_path):
    layer, _ = narrow_layer(dtype)
    spec = [paddle.static.InputSpec([None, H], dtype, "x")]
    paddle.jit.save(copy.deepcopy(layer), str(tmp_path / "layer"), input_spec=spec)
    loaded = paddle.jit.load(str(tmp_path / "layer"))
    for tokens in (T, 1, 0):
        x = paddle.randn([tokens, H]).astype(dtype)
        got, expected = loaded(x), layer(x)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(
            got.astype("float32").numpy(), expected.astype("float32").numpy(), rtol=1e-2, atol=1e-2
        )


# ---- mixed precision, as far as Paddle has it on a CPU


def test_a_training_step_without_mixed_precision_does_not_enter_it_to_turn_it_off(monkeypatch):
    """That would take as long on the host as the operators."""
    layer, x = MoELayer(H, I, E, K, activation="geglu"), paddle.randn([T, H])
    entered = []
    monkeypatch.setattr(paddle.amp, "auto_cast", lambda **options: entered.append(options))
    sum(each.sum() for each in all_of(layer)(x)).backward()
    assert layer.router.weight.grad.abs().sum() > 0
    assert not entered


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_automatic_mixed_precision_in_dygraph_changes_nothing(level):
    layer, x = MoELayer(H, I, E, K), paddle.randn([T, H])
    expected = results(layer, x, all_of(layer))
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    layer, optimizer = paddle.amp.decorate(layer, optimizer, level=level, dtype="bfloat16")

    def run(x):
        with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
            return all_of(layer)(x)

    got = results(layer, x, run)
    assert_close(got, expected)  # products in bfloat16 would be off by 1e-2


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("full_graph", [True, False], ids=["full_graph", "bytecode"])
def test_automatic_mixed_precision_in_a_program_leaves_the_layer_in_float32(full_graph, level):
    layer, x = MoELayer(H, I, E, K, capacity_factor=1.0), paddle.randn([T, H])
    expected = results(layer, x, all_of(layer))

    seen = []

    @paddle.jit.not_to_static
    def look():
        if not paddle.in_dynamic_mode():
            seen.append(products_in_graphs_are(paddle.bfloat16))

    def step(x):
        with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
            look()
            out = layer(x)
            aux_loss, z_loss = 0.5 * layer.aux_loss, 0.25 * layer.z_loss
        return out, aux_loss, z_loss

    traced = paddle.jit.to_static(step, full_graph=full_graph)
    with plain_errors():
        got = results(layer, x, traced)
    assert_close(got, expected)
    if full_graph:
        assert seen == [True]  # it is on


def test_loss_scaling_trains_as_without():
    layer, x = MoELayer(H, I, E, K), paddle.randn([T, H])
    twin = copy.deepcopy(layer)
    with paddle.amp.auto_cast(dtype="float16"):
        pass  # after float32 Paddle turns loss scaling off
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
    optimizers = [paddle.optimizer.SGD(0.1, parameters=each.parameters()) for each in (layer, twin)]
    for _ in range(3):
        for each, scale in ((layer, scaler.scale), (twin, lambda loss: loss)):
            out, aux_loss, z_loss = all_of(each)(x)
            scale((out**2).mean() + aux_loss + z_loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.clear_grad()
    for name, parameter in layer.named_parameters():
        np.testing.assert_allclose(parameter.numpy(), twin.state_dict()[name].numpy(), rtol=1e-5, err_msg=name)


# ---- copies


def train(layer, optimizer, batches):
    for x in batches:
        out, aux_loss, z_loss = all_of(layer)(x)
        ((out**2).mean() + aux_loss + z_loss).backward()
        optimizer.step()
        optimizer.clear_grad()
        layer.router.update_correction_bias(layer.tokens_per_expert, 1e-2)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_trained_layer_still_equals_the_dense_formulation(scoring):
    layer = MoELayer(H, I, E, K, scoring=scoring, num_groups=2, topk_groups=1, scaling_factor=1.5)
    train(layer, paddle.optimizer.Adam(1e-2, parameters=layer.parameters()), [paddle.randn([T, H]) for _ in range(10)])
    options, x = Options(K, scoring=scoring, num_groups=2, topk_groups=1, scaling_factor=1.5), paddle.randn([T, H])
    assert_equals_dense(layer, x, options)
    traced = paddle.jit.to_static(copy.deepcopy(layer), full_graph=True)
    assert_close(results(traced, x, traced), results(layer, x, layer))


def test_training_goes_on_from_a_copy_and_from_a_checkpoint(tmp_path):
    layer, batches = MoELayer(H, I, E, K, capacity_factor=1.0), [paddle.randn([T, H]) for _ in range(6)]
    train(layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters()), batches[:3])
    paddle.save(layer.state_dict(), str(tmp_path / "layer.pdparams"))
    loaded = MoELayer(H, I, E, K, capacity_factor=1.0)
    loaded.set_state_dict(paddle.load(str(tmp_path / "layer.pdparams")))
    layers = layer, copy.deepcopy(layer), loaded
    for each in layers:
        train(each, paddle.optimizer.SGD(0.1, parameters=each.parameters()), batches[3:])
    assert layer.router.correction_bias.abs().max() > 0
    for each in layers[1:]:
        for name, value in each.state_dict().items():
            assert_same(value.numpy(), layer.state_dict()[name].numpy())


def test_training_does_not_warn():
    layer = MoELayer(H, I, E, K, capacity_factor=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters()), [paddle.randn([T, H])])
