# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layers of a mixture-of-experts block: the routing rule, the experts, the layer against a dense form."""

from __future__ import annotations

import re

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_moe_ops.demo.checks import dense_moe
from paddle_moe_ops.nn import MoELayer, SwiGLU, SwiGLUExperts, TopKRouter, load_balance_loss
from paddle_moe_ops.routing import route

pytestmark = pytest.mark.usefixtures("place")

T, H, E, K = 37, 12, 8, 3


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(7)


def stable_topk(values, k):
    return np.argsort(-values, axis=-1, kind="stable")[:, :k]


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize("norm", [True, False], ids=["normed", "raw"])
@pytest.mark.parametrize(("scoring", "activation"), [("softmax", softmax), ("sigmoid", sigmoid)])
def test_router_takes_the_best_scores_and_weights_experts_by_them(scoring, activation, norm):
    router = TopKRouter(H, E, K, scoring=scoring, norm_topk_prob=norm)
    x = paddle.randn([T, H])
    ids, probs, scores = router(x)
    assert (ids.dtype, probs.dtype, scores.dtype) == (paddle.int32, paddle.float32, paddle.float32)
    assert ids.stop_gradient

    expected_scores = activation(x.numpy() @ router.weight.numpy())
    expected_ids = stable_topk(expected_scores, K)
    expected = np.take_along_axis(expected_scores, expected_ids, axis=-1)
    if norm:
        expected = expected / expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(scores.numpy(), expected_scores, rtol=1e-5)
    np.testing.assert_array_equal(ids.numpy(), expected_ids)
    np.testing.assert_allclose(probs.numpy(), expected, rtol=1e-5)


def test_router_gives_equal_scores_to_the_lower_expert():
    router = TopKRouter(H, 64, 6)
    router.weight.set_value(paddle.zeros_like(router.weight))
    ids = router(paddle.randn([T, H])).ids.numpy()
    np.testing.assert_array_equal(ids, np.tile(np.arange(6), (T, 1)))


def test_router_keeps_the_order_of_equal_scores_among_different_ones():
    router = TopKRouter(1, 6, 4)
    router.weight.set_value(paddle.to_tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0]]))
    ids = router(paddle.ones([1, 1])).ids.numpy()
    np.testing.assert_array_equal(ids, [[1, 3, 5, 2]])


def test_correction_bias_changes_the_choice_and_not_the_weights():
    router = TopKRouter(1, 4, 2, norm_topk_prob=False)
    router.weight.set_value(paddle.to_tensor([[3.0, 2.0, 1.0, 0.0]]))
    x = paddle.ones([1, 1])
    before = router(x)
    router.correction_bias.set_value(paddle.to_tensor([0.0, 0.0, 0.0, 5.0]))
    after = router(x)
    np.testing.assert_array_equal(before.ids.numpy(), [[0, 1]])
    np.testing.assert_array_equal(after.ids.numpy(), [[3, 0]])
    np.testing.assert_array_equal(after.scores.numpy(), before.scores.numpy())
    np.testing.assert_array_equal(after.probs.numpy(), before.scores.numpy()[:, [3, 0]])


def test_router_of_deepseek_v3_takes_experts_of_the_best_groups_and_scales_their_weights():
    router = TopKRouter(1, 6, 2, scoring="sigmoid", num_groups=3, topk_groups=1, scaling_factor=2.5)
    router.weight.set_value(paddle.to_tensor([[9.0, -9.0, 1.0, 1.0, 0.0, 0.0]]))
    ids, probs, _ = router(paddle.ones([1, 1]))
    np.testing.assert_array_equal(ids.numpy(), [[2, 3]])
    np.testing.assert_allclose(probs.numpy(), [[1.25, 1.25]], rtol=1e-6)


def test_correction_bias_is_saved_and_gets_no_gradient():
    router = TopKRouter(H, E, K)
    (router(paddle.randn([T, H])).probs ** 2).sum().backward()
    assert "correction_bias" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert float(router.weight.grad.abs().sum()) > 0
    assert "correction_bias" not in TopKRouter(H, E, K, correction_bias=False).state_dict()


def test_router_computes_logits_in_float32_for_narrow_tokens():
    router = TopKRouter(H, E, K)
    x = paddle.randn([T, H]).astype("bfloat16")
    narrow, wide = router(x), router(x.astype("float32"))
    np.testing.assert_array_equal(narrow.scores.numpy(), wide.scores.numpy())


@pytest.mark.parametrize("given", [[10, 0, 5, 5], paddle.to_tensor([10, 0, 5, 5])], ids=["list", "tensor"])
def test_bias_update_steps_against_the_load(given):
    router = TopKRouter(H, 4, 2)
    router.update_correction_bias(given, rate=0.25)
    router.update_correction_bias(given, rate=0.25)
    np.testing.assert_array_equal(router.correction_bias.numpy(), [-0.5, 0.5, 0.0, 0.0])


def test_repeated_bias_updates_even_out_a_skewed_load():
    router = TopKRouter(H, E, K)
    x = paddle.randn([512, H]) + 1.0
    load = np.bincount(router(x).ids.numpy().ravel(), minlength=E)
    for _ in range(200):
        ids = router(x).ids.numpy()
        router.update_correction_bias(np.bincount(ids.ravel(), minlength=E).tolist(), rate=2e-3)
    evened = np.bincount(router(x).ids.numpy().ravel(), minlength=E)
    assert load.max() > 1.5 * load.mean()
    assert evened.max() < 1.15 * evened.mean()


def test_load_balance_loss_is_one_for_an_even_load_and_higher_for_a_skewed_one():
    even = load_balance_loss(paddle.full([4, 4], 0.25), paddle.to_tensor([[0, 1], [1, 2], [2, 3], [3, 0]]))
    scores = paddle.to_tensor([[0.7, 0.1, 0.1, 0.1]] * 4)
    skewed = load_balance_loss(scores, paddle.zeros([4, 1], dtype="int32"))
    assert float(even) == pytest.approx(1.0)
    assert float(skewed) == pytest.approx(4 * 0.7)


def test_load_balance_loss_pushes_down_the_scores_of_loaded_experts():
    scores = paddle.full([4, 2], 0.5)
    scores.stop_gradient = False
    load_balance_loss(scores, paddle.to_tensor([[0], [0], [0], [1]])).backward()
    np.testing.assert_allclose(scores.grad.numpy(), [[2 * 0.75 / 4, 2 * 0.25 / 4]] * 4)


def one_expert(experts, expert, rows):
    gate, up = np.split(rows @ experts.gate_up.numpy()[expert], 2, axis=-1)
    return (gate * sigmoid(gate) * up) @ experts.down.numpy()[expert]


@pytest.mark.parametrize("alignment", [1, 4])
def test_experts_apply_each_expert_to_its_segment(alignment):
    counts = [3, 0, 5, 1]
    padded = [-(-count // alignment) * alignment for count in counts]
    experts = SwiGLUExperts(4, H, 6)
    rows = np.zeros((sum(padded), H), dtype=np.float32)
    starts = np.cumsum([0, *padded])
    for start, count in zip(starts, counts, strict=False):
        rows[start : start + count] = np.random.default_rng(start).standard_normal((count, H))
    out = experts(paddle.to_tensor(rows), counts, padding_alignment=alignment).numpy()
    expected = np.concatenate([one_expert(experts, e, rows[starts[e] : starts[e + 1]]) for e in range(4)])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_shared_expert_is_an_expert_for_every_token():
    shared, experts = SwiGLU(H, 6), SwiGLUExperts(1, H, 6)
    experts.gate_up.set_value(shared.gate_up.unsqueeze(0))
    experts.down.set_value(shared.down.unsqueeze(0))
    x = paddle.randn([2, 5, H])
    expected = experts(x.reshape([10, H]), [10]).reshape([2, 5, H])
    np.testing.assert_allclose(shared(x).numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def outputs_and_gradients(layer, x, run):
    layer.clear_gradients()
    x = x.detach()
    x.stop_gradient = False
    out = run(x)
    # A loss with a different gradient for every element.
    (out * paddle.arange(1, out.size + 1, dtype="float32").reshape(out.shape) / out.size).sum().backward()
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in layer.named_parameters()}
    return {"out": out.detach().numpy(), "x": x.grad.numpy(), **gradients}


def assert_equals_dense(layer, x):
    ids = layer.router(x.reshape([-1, H])).ids
    ours = outputs_and_gradients(layer, x, layer)
    dense = outputs_and_gradients(layer, x, lambda x: dense_moe(layer, x, ids))
    assert ours.keys() == dense.keys()
    for name, expected in dense.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
    return ours


@pytest.mark.parametrize("shape", [[T, H], [3, 5, H], [1, H]], ids=["T-H", "B-S-H", "one_token"])
@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (4, 1), (4, 4), (8, 3)], ids=str)
def test_layer_equals_the_dense_formulation(experts, topk, shape):
    layer = MoELayer(H, 6, experts, topk)
    x = paddle.randn(shape)
    assert assert_equals_dense(layer, x)["out"].shape == tuple(shape)


@pytest.mark.parametrize(
    "options",
    [
        {"num_shared_experts": 0},
        {"num_shared_experts": 2},
        {"correction_bias": False},
        {"num_groups": 4, "topk_groups": 2, "scores_per_group": 1, "scaling_factor": 2.5},
    ],
    ids=str,
)
def test_layer_options_keep_the_dense_formulation(options):
    assert_equals_dense(MoELayer(H, 6, E, K, **options), paddle.randn([T, H]))


@pytest.fixture
def fused(monkeypatch):
    """Lets layers take the way that they take where Triton multiplies."""
    monkeypatch.setattr(MoELayer, "_by_counts", MoELayer._fused)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("tokens", [0, 1, T])
@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (4, 4), (8, 3)], ids=str)
def test_layer_by_a_plan_equals_the_dense_formulation(experts, topk, tokens):
    layer = MoELayer(H, 6, experts, topk)
    x = paddle.randn([tokens, H])
    if tokens:
        assert_equals_dense(layer, x)
    else:
        assert layer(x).shape == [0, H]
    assert isinstance(layer.tokens_per_expert, paddle.Tensor)
    counts = F.one_hot(layer.router(x).ids.astype("int64"), experts).sum(axis=[0, 1])
    np.testing.assert_array_equal(layer.tokens_per_expert.numpy(), counts.numpy())
    layer.router.update_correction_bias(layer.tokens_per_expert)
    assert not [name for name in layer.state_dict() if "tokens" in name]


def test_layer_goes_by_a_plan_only_where_triton_multiplies(monkeypatch):
    class Chosen:
        name = "triton"

    layer, x = MoELayer(H, 6, 4, 2), paddle.randn([3, H])
    ways = {}
    for way in ("_fused", "_by_counts"):
        monkeypatch.setattr(layer, way, lambda tokens, *_, way=way: ways.setdefault(way, tokens))
    layer(x)
    assert list(ways) == ["_by_counts"]
    monkeypatch.setattr("paddle_moe_ops.nn.resolve", lambda operator, like: Chosen)
    layer(x)
    assert list(ways) == ["_by_counts", "_fused"]


def test_experts_weight_the_rows_of_tokens():
    experts, x = SwiGLUExperts(4, H, 6), paddle.randn([5, H])
    ids, probs = paddle.to_tensor([[0, 3], [3, -1], [1, 0], [-1, -1], [3, 1]], dtype="int32"), paddle.rand([5, 2])
    plan = route(ids, probs, num_experts=4, padding_alignment=4)
    expected = np.zeros((plan.num_rows, H), np.float32)
    for row, (token, expert) in enumerate(zip(plan.row_to_token.tolist(), plan.row_to_expert.tolist(), strict=True)):
        if token >= 0:
            expected[row] = float(plan.row_probs[row]) * one_expert(experts, expert, x[token : token + 1].numpy())[0]
    for weights in (probs, plan.row_probs):
        rows = experts.weighted_rows(x, plan, weights).numpy()
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)


def test_layer_with_an_expert_that_gets_no_token():
    layer = MoELayer(H, 6, 4, 2)
    layer.router.correction_bias.set_value(paddle.to_tensor([0.0, -9.0, 0.0, 0.0]))
    results = assert_equals_dense(layer, paddle.randn([T, H]))
    assert layer.tokens_per_expert[1] == 0
    for name in ("experts.gate_up", "experts.down"):
        assert not results[name][1].any()
        assert results[name][[0, 2, 3]].any(axis=(1, 2)).all()


def test_layer_without_tokens():
    layer = MoELayer(H, 6, 4, 2)
    x = paddle.zeros([0, H])
    results = outputs_and_gradients(layer, x, layer)
    assert results["out"].shape == results["x"].shape == (0, H)
    assert not results["experts.down"].any()
    assert layer.tokens_per_expert == [0, 0, 0, 0]


def test_layer_counts_the_tokens_of_each_expert():
    layer = MoELayer(H, 6, E, K)
    x = paddle.randn([T, H])
    layer(x)
    counts = F.one_hot(layer.router(x).ids.astype("int64"), E).sum(axis=[0, 1])
    assert layer.tokens_per_expert == counts.astype("int64").tolist()
    assert sum(layer.tokens_per_expert) == T * K


def test_layer_repeats_itself_bit_for_bit():
    layer = MoELayer(H, 6, E, K)
    x = paddle.randn([T, H])
    first, second = (outputs_and_gradients(layer, x, layer) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


SEGMENTS = "SwiGLUExperts: tokens_per_expert must be 2 counts >= 0 whose segments have 3 rows in all"

BAD_VALUES = {
    "router_topk": (
        lambda: TopKRouter(H, 4, 5),
        "TopKRouter: topk must be at most num_experts=4, but got 5",
    ),
    "router_size": (
        lambda: TopKRouter(0, 4, 2),
        "TopKRouter: hidden_size must be from 1 to 2147483647, but got 0",
    ),
    "router_groups": (
        lambda: TopKRouter(H, 4, 2, num_groups=3),
        "TopKRouter: num_groups must be a divisor of num_experts=4, but got 3",
    ),
    "router_kept_groups": (
        lambda: MoELayer(H, 6, 4, 3, num_groups=2, topk_groups=1),
        "TopKRouter: topk must be at most 2, the experts to choose from, but got 3",
    ),
    "router_scoring": (
        lambda: TopKRouter(H, 4, 2, scoring="tanh"),
        "TopKRouter: scoring must be one of 'softmax', 'sigmoid', but got 'tanh'",
    ),
    "router_x": (
        lambda: TopKRouter(H, 4, 2)(paddle.zeros([2, 3, H])),
        "TopKRouter: x must be of shape [T, 12], but got [2, 3, 12]",
    ),
    "update_no_bias": (
        lambda: TopKRouter(H, 4, 2, correction_bias=False).update_correction_bias([1, 1, 1, 1]),
        "update_correction_bias: the router must be one with a correction bias, but got one without",
    ),
    "update_load": (
        lambda: TopKRouter(H, 4, 2).update_correction_bias([1, 2]),
        "update_correction_bias: tokens_per_expert must be of shape [4], but got [2]",
    ),
    "experts_size": (
        lambda: SwiGLUExperts(2, H, 0),
        "SwiGLUExperts: intermediate_size must be from 1 to 2147483647, but got 0",
    ),
    "experts_sum": (
        lambda: SwiGLUExperts(2, H, 4)(paddle.zeros([3, H]), [1, 1]),
        f"{SEGMENTS}, but got [1, 1]",
    ),
    "experts_negative": (
        lambda: SwiGLUExperts(2, H, 4)(paddle.zeros([3, H]), [3, -1], padding_alignment=3),
        f"{SEGMENTS}, but got [3, -1]",
    ),
    "experts_length": (
        lambda: SwiGLUExperts(2, H, 4)(paddle.zeros([3, H]), [3]),
        f"{SEGMENTS}, but got [3]",
    ),
    "experts_alignment": (
        lambda: SwiGLUExperts(2, H, 4)(paddle.zeros([3, H]), [1, 2], padding_alignment=0),
        "SwiGLUExperts: padding_alignment must be from 1 to 2147483647, but got 0",
    ),
    "layer_shared": (
        lambda: MoELayer(H, 6, 4, 2, num_shared_experts=-1),
        "MoELayer: num_shared_experts must be from 0 to 2147483647, but got -1",
    ),
    "layer_x": (
        lambda: MoELayer(H, 6, 4, 2)(paddle.zeros([3, H + 1])),
        "MoELayer: x must be of shape [T, 12] or [B, S, 12], but got [3, 13]",
    ),
}


@pytest.mark.parametrize(("bad_call", "text"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_bad_values_are_named(bad_call, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        bad_call()


BAD_TYPES = {
    "size": (lambda: SwiGLU(H, 1.5), "SwiGLU: intermediate_size must be an int, but got float"),
    "tokens": (
        lambda: TopKRouter(H, 4, 2)(paddle.zeros([2, H], dtype="int32")),
        "TopKRouter: x must be of dtype bfloat16, float16 or float32, but got int32",
    ),
}


@pytest.mark.parametrize(("bad_call", "text"), BAD_TYPES.values(), ids=BAD_TYPES.keys())
def test_bad_types_are_named(bad_call, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        bad_call()
