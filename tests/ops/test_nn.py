# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The whole layer against a dense formulation, for each of its arguments, and the state after a forward pass."""

from __future__ import annotations

import gc
import re
import warnings
import weakref

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import use_backend
from paddle_moe_ops.backends import resolve
from paddle_moe_ops.nn import MoEConfig, MoELayer, load_balance_loss, router_z_loss
from tests.ops.dense import (
    Options,
    assert_close,
    assert_equals_dense,
    assert_same,
    dense_layer,
    parameters_and_bias,
    results,
    stable_topk,
)
from tests.params import COPIES

pytestmark = pytest.mark.usefixtures("place")

T, H, I, E, K = 37, 12, 6, 8, 3  # noqa: E741


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(7)


def dense(layer, x, options):
    return dense_layer(parameters_and_bias(layer), x, options)


def with_bias(layer):
    """A correction bias that changes the choice of many tokens."""
    layer.router.correction_bias.set_value(paddle.linspace(0.2, -0.2, layer.router.num_experts))
    return layer


@pytest.mark.parametrize("shape", [[T, H], [3, 5, H], [1, H]], ids=["T-H", "B-S-H", "one_token"])
@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (4, 1), (4, 4), (8, 3)], ids=str)
def test_layer_equals_the_dense_formulation(experts, topk, shape):
    layer = MoELayer(H, I, experts, topk)
    x = paddle.randn(shape)
    assert assert_equals_dense(layer, x, Options(topk))["out"].shape == tuple(shape)


# Options of a layer, and the same for the dense formulation.
ARGUMENTS = {
    "scoring": ({"scoring": "sigmoid"}, {"scoring": "sigmoid"}),
    "norm_topk_prob": ({"norm_topk_prob": False}, {"norm_topk_prob": False}),
    "groups": ({"num_groups": 4, "topk_groups": 2}, {"num_groups": 4, "topk_groups": 2}),
    "scores_per_group": (
        {"num_groups": 2, "topk_groups": 1, "scores_per_group": 3},
        {"num_groups": 2, "topk_groups": 1, "scores_per_group": 3},
    ),
    "scaling_factor": ({"scaling_factor": 2.5}, {"scaling_factor": 2.5}),
    "capacity_factor": ({"capacity_factor": 0.75}, {"capacity": 11}),  # ceil(0.75 * 37 * 3 / 8)
    "no shared experts": ({"num_shared_experts": 0}, {}),
    "two shared experts": ({"num_shared_experts": 2}, {}),
    "all of them": (
        {
            "num_shared_experts": 3,
            "scoring": "sigmoid",
            "norm_topk_prob": False,
            "num_groups": 4,
            "topk_groups": 3,
            "scores_per_group": 1,
            "scaling_factor": 0.5,
            "capacity_factor": 1.0,
        },
        {
            "scoring": "sigmoid",
            "norm_topk_prob": False,
            "num_groups": 4,
            "topk_groups": 3,
            "scores_per_group": 1,
            "scaling_factor": 0.5,
            "capacity": 14,
        },
    ),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_layer_passes_each_argument_on(argument):
    told, options = ARGUMENTS[argument]
    layer, x = with_bias(MoELayer(H, I, E, K, **told)), paddle.randn([T, H])
    options = Options(K, **options)
    plain = dense(layer, x, Options(K)).out.numpy()
    got = assert_equals_dense(layer, x, options)
    if options != Options(K):
        assert np.abs(got["out"] - plain).max() > 1e-2 * np.abs(plain).max(), "the argument changes nothing here"


def test_layer_without_a_correction_bias():
    layer, x = MoELayer(H, I, E, K, correction_bias=False), paddle.randn([T, H])
    assert layer.router.correction_bias is None
    assert_equals_dense(layer, x, Options(K))
    biased = with_bias(MoELayer(H, I, E, K))
    biased.set_state_dict({**biased.state_dict(), **layer.state_dict()})
    assert (dense(biased, x, Options(K)).ids != dense(layer, x, Options(K)).ids).any()


def test_shared_experts_are_one_of_their_joint_size():
    shapes = {count: MoELayer(H, I, E, K, count).shared for count in (0, 1, 2)}
    assert shapes[0] is None
    assert (shapes[1].gate_up.shape, shapes[1].down.shape) == ([H, 2 * I], [I, H])
    assert (shapes[2].gate_up.shape, shapes[2].down.shape) == ([H, 4 * I], [2 * I, H])


@pytest.mark.parametrize("keep", ["h", "x"])
@pytest.mark.parametrize("capacity", [None, 11])
@pytest.mark.parametrize("tokens", [0, 1, T])
def test_layer_whose_experts_are_one_call_equals_the_dense_formulation(tokens, capacity, keep, monkeypatch):
    """As where Triton multiplies; the oracle has that call, too."""
    made = []
    with use_backend("reference"):
        kernels = resolve("grouped_gemm", paddle.ones([1, 1])).kernels
        original = kernels.moe_mlp
        monkeypatch.setattr(kernels, "moe_mlp", lambda *given: made.append(given[-2].keeps_hidden) or original(*given))
        layer = MoELayer(H, I, E, K, capacity_factor=None if capacity is None else 0.75, keep=keep)
        x = paddle.randn([tokens, H])
        if tokens:
            assert_equals_dense(layer, x, Options(K, capacity=capacity))
        else:
            assert layer(x).shape == [0, H]
    assert made == [keep == "h"]


@pytest.mark.parametrize("name", ["compiled", "reference"])
def test_layer_is_close_to_the_dense_formulation_on_each_backend(name):
    with use_backend(name):
        assert_equals_dense(MoELayer(H, I, E, K, capacity_factor=0.75), paddle.randn([T, H]), Options(K, capacity=11))


def test_layer_with_an_expert_that_gets_no_token():
    layer = MoELayer(H, I, 4, 2)
    layer.router.correction_bias.set_value(paddle.to_tensor([0.0, -9.0, 0.0, 0.0]))
    found = assert_equals_dense(layer, paddle.randn([T, H]), Options(2))
    assert layer.tokens_per_expert[1] == 0
    for name in ("experts.gate_up", "experts.down"):
        assert not found[name][1].any()
        assert found[name][[0, 2, 3]].any(axis=(1, 2)).all()


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.parametrize("shape", [[0, H], [0, 5, H], [4, 0, H]], ids=str)
def test_layer_without_tokens(shape, capacity_factor):
    layer = MoELayer(H, I, 4, 2, capacity_factor=capacity_factor)
    found = results(layer, paddle.zeros(shape), lambda x: (layer(x), layer.aux_loss, layer.z_loss))
    assert found["out"].shape == found["x"].shape == tuple(shape)
    assert not any(found[name].any() for name in found)
    assert list(layer.tokens_per_expert) == [0, 0, 0, 0]
    assert (layer.aux_loss.item(), layer.z_loss.item()) == (0, 0)
    assert layer.dropped_slots == 0
    layer.clear_gradients()
    layer(paddle.zeros(shape)).sum().backward()  # of tokens that want no gradient
    assert all(parameter.grad is not None for parameter in layer.parameters())


class TestWhatAPassLeaves:
    def test_nothing_before_the_first(self):
        layer = MoELayer(H, I, 4, 2, capacity_factor=1.0)
        assert layer.tokens_per_expert == [0, 0, 0, 0]
        assert layer.dropped_slots == 0
        assert layer.aux_loss is None
        assert layer.z_loss is None

    @pytest.mark.parametrize("capacity_factor", [None, 0.75])
    def test_load_counts_dropped_slots_too(self, capacity_factor):
        layer, x = MoELayer(H, I, E, K, capacity_factor=capacity_factor), paddle.randn([T, H])
        layer(x)
        expected = np.bincount(layer.router(x).ids.numpy().ravel(), minlength=E).tolist()
        assert list(layer.tokens_per_expert) == expected  # on a GPU a tensor
        layer.router.update_correction_bias(layer.tokens_per_expert)
        bias = 1e-3 * np.sign(T * K / E - np.array(expected))
        np.testing.assert_allclose(layer.router.correction_bias.numpy(), bias, rtol=1e-6)

    def test_dropped_slots_are_counted(self):
        layer, x = MoELayer(H, I, E, K, capacity_factor=0.75), paddle.randn([T, H])
        layer(x)
        expected = dense(layer, x, Options(K, capacity=11)).dropped
        assert expected > 0
        assert (layer.dropped_slots.shape, layer.dropped_slots.dtype) == ([], paddle.int32)
        assert layer.dropped_slots.item() == expected
        unlimited = MoELayer(H, I, E, K)
        unlimited(x)
        assert unlimited.dropped_slots == 0

    def test_tokens_that_are_dropped_altogether_keep_the_shared_experts(self):
        layer, x = MoELayer(H, I, E, 1, capacity_factor=0.3), paddle.randn([T, H])
        out, shared = layer(x), layer.shared(x).numpy()
        ids = stable_topk(layer.router(x).scores.numpy(), 1)[:, 0]
        capacity = 2  # ceil(0.3 * 37 / 8)
        is_dropped = np.array([(ids[:token] == ids[token]).sum() >= capacity for token in range(T)])
        assert 0 < is_dropped.sum() < T
        assert_same(out.numpy()[is_dropped], shared[is_dropped])
        assert (np.abs(out.numpy() - shared)[~is_dropped] > 1e-4).any(axis=1).all()
        alone = MoELayer(H, I, E, 1, 0, capacity_factor=0.3)
        alone.set_state_dict({name: value for name, value in layer.state_dict().items() if "shared" not in name})
        assert not alone(x).numpy()[is_dropped].any()

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
    def test_losses_are_those_of_the_formulas_with_their_gradients(self, scoring):
        layer, x = with_bias(MoELayer(H, I, E, K, scoring=scoring, capacity_factor=1.0)), paddle.randn([3, 11, H])
        options = Options(K, scoring=scoring, capacity=13)

        def ours(x):
            return layer(x), 0.5 * layer.aux_loss, 0.25 * layer.z_loss

        def plain(x):
            found = dense(layer, x, options)
            return found.out, 0.5 * found.aux_loss, 0.25 * found.z_loss

        got, expected = results(layer, x, ours), results(layer, x, plain)
        assert_close(got, expected)
        without = results(layer, x, layer)
        assert np.abs(got["router.weight"] - without["router.weight"]).max() > 1e-3
        found = dense(layer, x, options)
        assert layer.aux_loss.item() == pytest.approx(found.aux_loss.item(), rel=1e-5)
        assert layer.z_loss.item() == pytest.approx(found.z_loss.item(), rel=1e-5)

    def test_losses_are_those_of_the_public_functions(self):
        layer, x = MoELayer(H, I, E, K), paddle.randn([T, H])
        layer(x)
        ids, _, scores, logits = layer.router(x)
        assert layer.aux_loss.item() == pytest.approx(load_balance_loss(scores, ids).item(), rel=1e-6)
        assert layer.z_loss.item() == pytest.approx(router_z_loss(logits).item(), rel=1e-6)

    def test_it_is_that_of_the_last_pass_alone(self):
        layer, x = MoELayer(H, I, E, K, capacity_factor=1.0), paddle.randn([T, H])
        kept = []
        hook = layer.router.register_forward_post_hook(lambda _layer, _inputs, output: kept.append(output.scores))
        layer(x)
        layer(x[:5])
        hook.remove()
        assert sum(layer.tokens_per_expert) == 5 * K
        first, second = (weakref.ref(scores) for scores in kept)
        kept.clear()
        gc.collect()
        assert first() is None
        assert second() is not None

    def test_no_part_of_it_is_saved(self):
        layer = MoELayer(H, I, E, K, capacity_factor=1.0)
        names = [*layer.state_dict()], [*dict(layer.named_buffers())]
        layer(paddle.randn([T, H]))
        assert (layer.aux_loss + layer.z_loss).shape == []
        assert ([*layer.state_dict()], [*dict(layer.named_buffers())]) == names

    def test_a_pass_without_gradients_leaves_losses_without(self):
        layer = MoELayer(H, I, E, K).eval()
        with paddle.no_grad():
            layer(paddle.randn([T, H]))
        assert layer.aux_loss.stop_gradient
        assert layer.z_loss.stop_gradient

    @pytest.mark.parametrize("name", ["aux_loss", "z_loss"])
    def test_losses_that_recompute_left_without_a_graph_warn_when_they_are_read(self, name):
        layer, x = MoELayer(H, I, E, K), paddle.randn([T, H])
        x.stop_gradient = False
        out = recompute(layer, x, use_reentrant=True)
        with pytest.warns(UserWarning, match=f"MoELayer: {name} has no gradient"):
            assert getattr(layer, name).stop_gradient
        out.sum().backward()
        recompute(layer, x, use_reentrant=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not getattr(layer, name).stop_gradient
            with paddle.no_grad():
                layer(x)
                assert getattr(layer, name).stop_gradient

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("capacity_factor", [None, 0.75])
    def test_tokens_that_a_mask_leaves_out_change_nothing_for_the_others(self, capacity_factor, scoring):
        layer = MoELayer(H, I, E, K, scoring=scoring, capacity_factor=capacity_factor)
        x, mask = paddle.randn([3, 13, H]), paddle.arange(39).reshape([3, 13]) % 4 != 2

        def of_all(x):
            return layer(x, mask=mask)[mask], layer.aux_loss, layer.z_loss

        def of_real(x):
            return layer(x[mask]), layer.aux_loss, layer.z_loss

        assert_close(results(layer, x, of_all), results(layer, x, of_real))
        counts = []
        for tokens, kept in ((x[mask], None), (x, mask)):
            out = layer(tokens, mask=kept)
            counts.append((list(layer.tokens_per_expert), np.sum(layer.dropped_slots)))
        assert counts[0] == counts[1]
        left_out = paddle.logical_not(mask)
        assert_same(out[left_out].numpy(), layer.shared(x[left_out]).numpy())

    def test_without_any_token_that_counts_losses_are_zero(self):
        layer = MoELayer(H, I, E, K, 0)
        out = layer(paddle.randn([T, H]), mask=paddle.zeros([T], "bool"))
        assert not out.numpy().any()
        assert (layer.aux_loss.item(), layer.z_loss.item(), sum(layer.tokens_per_expert)) == (0, 0, 0)

    @pytest.mark.parametrize("level", [-30.0, -60.0, -100.0])
    def test_tiny_sigmoids_are_balanced_as_any_others(self, level):
        layer = MoELayer(E, I, E, 2, 0, scoring="sigmoid")
        layer.router.weight.set_value(paddle.eye(E))
        raised = np.full((E, E), level, np.float32)
        for token in range(E):
            raised[token, [token, (token + 1) % E]] += 0.5
        layer(paddle.to_tensor(raised))
        assert layer.aux_loss.item() == pytest.approx(1, rel=1e-5)

    @pytest.mark.parametrize("make_copy", COPIES)
    def test_a_copy_has_parameters_of_its_own_and_has_not_run(self, make_copy):
        layer, x = MoELayer(H, I, E, K, capacity_factor=1.0), paddle.randn([T, H])
        out = layer(x).numpy()
        copied = make_copy(layer)
        assert copied.aux_loss is None
        assert copied.tokens_per_expert == [0] * E
        assert layer.aux_loss is not None
        assert_same(copied(x).numpy(), out)
        for name, value in copied.state_dict().items():
            value.set_value(paddle.zeros_like(value))
            assert name == "router.correction_bias" or layer.state_dict()[name].abs().sum() > 0
        assert_same(layer(x).numpy(), out)


# Names and shapes of a layer of two shared experts, as checkpoints hold them.
CHECKPOINT = {
    "router.weight": [H, E],
    "router.correction_bias": [E],
    "experts.gate_up": [E, H, 2 * I],
    "experts.down": [E, I, H],
    "shared.gate_up": [H, 4 * I],
    "shared.down": [2 * I, H],
}


def test_an_old_checkpoint_loads(tmp_path):
    rng = np.random.default_rng(3)
    checkpoint = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in CHECKPOINT.items()}
    layer, x = MoELayer(H, I, E, K, 2, capacity_factor=1.0), paddle.randn([T, H])
    assert {name: list(value.shape) for name, value in layer.state_dict().items()} == CHECKPOINT
    assert layer.set_state_dict({name: paddle.to_tensor(value) for name, value in checkpoint.items()}) == ([], [])
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), checkpoint[name])
    paddle.save(layer.state_dict(), str(tmp_path / "layer.pdparams"))
    other = MoELayer(H, I, E, K, 2, capacity_factor=1.0)
    assert other.set_state_dict(paddle.load(str(tmp_path / "layer.pdparams"))) == ([], [])
    assert_same(other(x).numpy(), layer(x).numpy())


def test_weights_begin_with_the_inverse_root_of_what_they_add_up():
    layer = MoELayer(256, 64, 16, 2, 2)
    stds = {name: float(value.std()) for name, value in layer.named_parameters()}
    expected = {
        "router.weight": 256**-0.5,
        "experts.gate_up": 256**-0.5,
        "experts.down": 64**-0.5,
        "shared.gate_up": 256**-0.5,
        "shared.down": 128**-0.5,
    }
    assert stds == pytest.approx(expected, rel=0.05)
    assert not layer.router.correction_bias.numpy().any()


def test_hooks_of_the_parts_are_called():
    layer, x = MoELayer(H, I, E, K), paddle.randn([2, 5, H])
    expected, seen = layer(x).numpy(), {}
    for name in ("router", "experts", "shared"):
        part = getattr(layer, name)
        part.register_forward_pre_hook(lambda _layer, inputs, name=name: seen.update({f"{name} in": inputs[0].shape}))
        part.register_forward_post_hook(
            lambda _layer, _inputs, output, name=name: seen.update({f"{name} out": output[0].shape[-1]})
        )
    assert_same(layer(x).numpy(), expected)
    assert seen == {
        **{f"{name} in": [10, H] for name in ("router", "experts", "shared")},
        "router out": K,
        "experts out": H,
        "shared out": H,
    }
    layer.shared.register_forward_post_hook(lambda _layer, _inputs, output: output * 0)
    layer.experts.register_forward_post_hook(lambda _layer, _inputs, output: output * 0)
    assert not layer(x).numpy().any()


def test_printing_a_layer_tells_its_sizes_and_its_dtype():
    layer = MoELayer(12, 6, 4, 2, capacity_factor=1.5, activation="geglu")
    layer.to(dtype="bfloat16")
    assert repr(layer).split("\n")[:-1] == [
        "MoELayer(hidden_size=12, intermediate_size=6, num_experts=4, topk=2, capacity_factor=1.5, activation=geglu",
        "  (router): TopKRouter(hidden_size=12, num_experts=4, topk=2, scoring=softmax, capacity_factor=1.5, "
        "dtype=bfloat16)",
        "  (experts): SwiGLUExperts(num_experts=4, hidden_size=12, intermediate_size=6, activation=geglu, bias=False, "
        "dtype=bfloat16)",
        "  (shared): SwiGLU(hidden_size=12, intermediate_size=6, dtype=bfloat16)",
    ]


def test_a_config_makes_the_layer_that_its_options_make(place):
    options = {"scoring": "sigmoid", "capacity_factor": 0.75, "activation": "geglu", "expert_bias": True}
    config = MoEConfig(H, I, E, K, **options)
    layers = []
    for arguments, keywords in (((config,), {}), ((H, I, E, K), options)):
        paddle.seed(3)
        layers.append(MoELayer(*arguments, **keywords))
    x = paddle.randn([T, H])
    assert layers[0].config == layers[1].config == config
    assert_same(layers[0](x).numpy(), layers[1](x).numpy())
    assert repr(config) == (
        f"MoEConfig(hidden_size={H}, intermediate_size={I}, num_experts={E}, topk={K}, scoring='sigmoid', "
        "capacity_factor=0.75, activation='geglu', expert_bias=True)"
    )


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((H, I, E), {}, "MoELayer: missing a required argument: 'topk'"),
        ((H, I, E, K), {"experts": 3}, "MoELayer: got an unexpected keyword argument 'experts'"),
        ((H, I, E, K, 1, "sigmoid"), {}, "MoELayer: too many positional arguments"),
        ((H, I, E), {"top_k": K}, "MoELayer: the argument is called topk, but got top_k"),
        (
            (MoEConfig(H, I, E, K),),
            {"topk": K},
            "MoELayer: a MoEConfig must be the only argument besides group, but got topk too",
        ),
    ],
)
def test_arguments_of_a_layer_that_its_signature_lacks(arguments, options, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        MoELayer(*arguments, **options)
