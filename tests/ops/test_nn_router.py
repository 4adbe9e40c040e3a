# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The router: the routing rule, the correction bias, the capacity, and the auxiliary losses."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import paddle
import pytest

from paddle_moe_ops.nn import MoELayer, TopKRouter, load_balance_loss, router_z_loss
from paddle_moe_ops.routing import route
from tests.ops.dense import stable_topk
from tests.params import COPIES

pytestmark = pytest.mark.usefixtures("place")

T, H, E, K = 37, 12, 8, 3


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(7)


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize("norm", [True, False], ids=["normed", "raw"])
@pytest.mark.parametrize(("scoring", "activation"), [("softmax", softmax), ("sigmoid", sigmoid)])
def test_router_takes_the_best_scores_and_weights_experts_by_them(scoring, activation, norm):
    router = TopKRouter(H, E, K, scoring=scoring, norm_topk_prob=norm, scaling_factor=1.5)
    x = paddle.randn([T, H])
    ids, probs, scores, logits = router(x)
    assert (ids.dtype, probs.dtype, scores.dtype) == (paddle.int32, paddle.float32, paddle.float32)
    assert ids.stop_gradient

    expected_logits = x.numpy() @ router.weight.numpy()
    expected_scores = activation(expected_logits)
    expected_ids = stable_topk(expected_scores, K)
    expected = np.take_along_axis(expected_scores, expected_ids, axis=-1)
    if norm:
        expected = expected / expected.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(logits.numpy(), expected_logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores.numpy(), expected_scores, rtol=1e-5)
    np.testing.assert_array_equal(ids.numpy(), expected_ids)
    np.testing.assert_allclose(probs.numpy(), 1.5 * expected, rtol=1e-5)


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


def test_router_of_deepseek_v3_takes_experts_of_the_best_groups_and_scales_their_weights():
    router = TopKRouter(1, 6, 2, scoring="sigmoid", num_groups=3, topk_groups=1, scaling_factor=2.5)
    router.weight.set_value(paddle.to_tensor([[9.0, -9.0, 1.0, 1.0, 0.0, 0.0]]))
    ids, probs, *_ = router(paddle.ones([1, 1]))
    np.testing.assert_array_equal(ids.numpy(), [[2, 3]])
    np.testing.assert_allclose(probs.numpy(), [[1.25, 1.25]], rtol=1e-6)


def test_groups_may_be_ranked_by_their_best_expert_alone():
    router = TopKRouter(1, 6, 2, scoring="sigmoid", num_groups=3, topk_groups=1, scores_per_group=1)
    router.weight.set_value(paddle.to_tensor([[9.0, -9.0, 1.0, 1.0, 0.0, 0.0]]))
    np.testing.assert_array_equal(router(paddle.ones([1, 1])).ids.numpy(), [[0, 1]])


def test_router_computes_logits_in_float32_for_narrow_tokens():
    router = TopKRouter(H, E, K)
    x = paddle.randn([T, H]).astype("bfloat16")
    narrow, wide = router(x), router(x.astype("float32"))
    np.testing.assert_allclose(narrow.scores.numpy(), wide.scores.numpy(), rtol=1e-5)  # bfloat16 logits: 1e-2


@pytest.mark.parametrize("field", ["probs", "scores", "logits"])
def test_router_is_differentiable_in_tokens_and_weight(field):
    router, x = TopKRouter(H, E, K), paddle.randn([T, H])
    x.stop_gradient = False
    (getattr(router(x), field) ** 2).sum().backward()
    assert x.grad.abs().sum(axis=-1).min() > 0
    assert router.weight.grad.abs().sum(axis=0).min() > 0


@pytest.mark.parametrize("wants_gradient", [True, False])
def test_router_without_tokens(wants_gradient):
    router, x = TopKRouter(H, E, K), paddle.zeros([0, H])
    x.stop_gradient = not wants_gradient
    ids, probs, scores, logits = router(x)
    assert [each.shape for each in (ids, probs, scores, logits)] == [[0, K], [0, K], [0, E], [0, E]]
    (probs.sum() + scores.sum() + logits.sum()).backward()
    assert not router.weight.grad.numpy().any()


def test_a_mask_leaves_tokens_without_experts():
    router, x = TopKRouter(H, E, K), paddle.randn([T, H])
    mask = paddle.arange(T) % 3 != 1
    masked, all_of_them = router(x, mask), router(x)
    kept = mask.numpy()
    np.testing.assert_array_equal(masked.ids.numpy()[kept], all_of_them.ids.numpy()[kept])
    np.testing.assert_array_equal(masked.probs.numpy()[kept], all_of_them.probs.numpy()[kept])
    assert (masked.ids.numpy()[~kept] == -1).all()
    assert not masked.probs.numpy()[~kept].any()
    np.testing.assert_array_equal(masked.scores.numpy(), all_of_them.scores.numpy())


def test_a_router_whose_weight_is_always_one_warns_once():
    with pytest.warns(UserWarning, match="topk=1 and norm_topk_prob=True"):
        router = TopKRouter(H, E, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router(paddle.randn([T, H])).probs.sum().backward()
        assert not router.weight.grad.numpy().any()
        TopKRouter(H, E, 1, norm_topk_prob=False)
        TopKRouter(H, E, 2)
        with paddle.no_grad():
            TopKRouter(H, E, 1)


@pytest.mark.parametrize(
    "construct", [lambda: TopKRouter(H, E, 1), lambda: MoELayer(H, 8, E, 1)], ids=["router", "layer"]
)
def test_the_warning_names_the_line_that_makes_the_layer(construct):
    with pytest.warns(UserWarning, match="topk=1 and norm_topk_prob=True") as warned:
        construct()
    assert [each.filename for each in warned] == [__file__]


CASTS = {
    "to": lambda layer, dtype: layer.to(dtype=dtype),
    "to, as part of a model": lambda layer, dtype: paddle.nn.Sequential(layer).to(dtype=dtype),
    # These cast nothing in some releases of Paddle or on some CPUs.
    "named": lambda layer, dtype: getattr(layer, dtype)(),
    "named, as part of a model": lambda layer, dtype: getattr(paddle.nn.Sequential(layer), dtype)(),
    "astype": lambda layer, dtype: layer.astype(dtype),
}


class TestCorrectionBias:
    def test_changes_the_choice_and_not_the_weights(self):
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

    def test_is_saved_and_gets_no_gradient(self):
        router = TopKRouter(H, E, K)
        (router(paddle.randn([T, H])).probs ** 2).sum().backward()
        assert "correction_bias" in router.state_dict()
        assert [name for name, _ in router.named_parameters()] == ["weight"]
        assert "correction_bias" not in TopKRouter(H, E, K, correction_bias=False).state_dict()

    @pytest.mark.parametrize("given", [[10, 0, 5, 5], (10, 0, 5, 5), np.array([10, 0, 5, 5])], ids=type)
    def test_steps_against_the_load(self, given):
        router = TopKRouter(H, 4, 2)
        router.update_correction_bias(given, rate=0.25)
        router.update_correction_bias(paddle.to_tensor(given), rate=0.25)
        np.testing.assert_array_equal(router.correction_bias.numpy(), [-0.5, 0.5, 0.0, 0.0])

    def test_steps_by_a_thousandth_unless_told_otherwise(self):
        router = TopKRouter(H, 2, 1)
        router.update_correction_bias([3, 1])
        np.testing.assert_allclose(router.correction_bias.numpy(), [-1e-3, 1e-3], rtol=1e-6)

    @pytest.mark.parametrize("given", ["list", "tensor"])
    def test_counts_beyond_float32_are_compared_exactly(self, given):
        router, load = TopKRouter(H, 3, 2), [2**24 + 1, 2**24, 2**24 - 1]
        router.update_correction_bias(load if given == "list" else paddle.to_tensor(load), rate=0.5)
        np.testing.assert_array_equal(router.correction_bias.numpy(), [-0.5, 0, 0.5])

    def test_an_update_leaves_no_graph(self):
        router = TopKRouter(H, 4, 2)
        load = paddle.to_tensor([10.0, 0.0, 5.0, 5.0])
        load.stop_gradient = False
        router.update_correction_bias(load * 2)
        assert router.correction_bias.stop_gradient
        assert router.correction_bias.is_leaf
        assert paddle.is_grad_enabled()

    def test_repeated_updates_even_out_a_skewed_load(self):
        router = TopKRouter(H, E, K)
        x = paddle.randn([512, H]) + 1.0
        load = np.bincount(router(x).ids.numpy().ravel(), minlength=E)
        for _ in range(200):
            ids = router(x).ids.numpy()
            router.update_correction_bias(np.bincount(ids.ravel(), minlength=E).tolist(), rate=2e-3)
        evened = np.bincount(router(x).ids.numpy().ravel(), minlength=E)
        assert load.max() > 1.5 * load.mean()
        assert evened.max() < 1.15 * evened.mean()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("cast", CASTS)
    @pytest.mark.filterwarnings("ignore:Paddle compiled by the user does not support")
    def test_stays_float32_when_the_layer_is_cast(self, cast, dtype):
        router = TopKRouter(H, 2, 1)
        bias = router.correction_bias
        router.update_correction_bias([3, 1], rate=0.7001)
        CASTS[cast](router, dtype)
        if cast.startswith("to"):
            assert router.weight.dtype == getattr(paddle, dtype)
        assert router.correction_bias is bias
        np.testing.assert_array_equal(bias.numpy(), np.array([-0.7001, 0.7001], np.float32))
        for _ in range(10):
            router.update_correction_bias([3, 1])
        np.testing.assert_allclose(bias.numpy(), [-0.7101, 0.7101], rtol=1e-6)

    @pytest.mark.parametrize("form", ["tensor", "array"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_loads_from_a_checkpoint_of_a_narrow_bias(self, dtype, form, tmp_path):
        """Earlier versions saved the bias of a cast router in the narrow dtype."""
        model = paddle.nn.Sequential(TopKRouter(H, 4, 2)).to(dtype=dtype)
        old = {"0.weight": model[0].weight + 0, "0.correction_bias": paddle.to_tensor([0.5, -2, 0, 1]).astype(dtype)}
        paddle.save(old, str(tmp_path / "old"))
        loaded = paddle.load(str(tmp_path / "old"), return_numpy=form == "array")
        assert model.set_state_dict(loaded) == ([], [])
        assert model[0].correction_bias.dtype == paddle.float32
        np.testing.assert_array_equal(model[0].correction_bias.numpy(), [0.5, -2, 0, 1])

    @pytest.mark.parametrize("make_copy", COPIES)
    def test_a_copy_has_a_bias_of_its_own(self, make_copy):
        router = TopKRouter(H, 2, 1)
        router.update_correction_bias([3, 1], rate=0.5)
        copied = make_copy(router)
        np.testing.assert_array_equal(copied.correction_bias.numpy(), [-0.5, 0.5])
        copied.set_state_dict({**copied.state_dict(), "correction_bias": paddle.to_tensor([1, 2], dtype="bfloat16")})
        np.testing.assert_array_equal(copied.correction_bias.numpy(), [1, 2])
        np.testing.assert_array_equal(router.correction_bias.numpy(), [-0.5, 0.5])

    def test_a_checkpoint_of_another_shape_is_refused(self):
        router = TopKRouter(H, 4, 2)
        with pytest.raises(AssertionError, match="Shape not match"):
            router.correction_bias.set_value(np.zeros(3, np.float32))


class TestCapacity:
    @pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.1, 1.25, 2, 1e9])
    @pytest.mark.parametrize("tokens", [0, 1, 7, 40, 1003])
    def test_is_a_part_of_an_even_load_rounded_up_for_ints_and_tensors(self, tokens, factor):
        router = TopKRouter(H, E, K, capacity_factor=factor)
        expected = max(math.ceil(tokens * K * factor / E), 1)
        assert router.capacity(tokens) == expected
        for dtype in ("int32", "int64"):
            capacity = router.capacity(paddle.to_tensor(tokens, dtype=dtype))
            assert (capacity.shape, capacity.dtype, capacity.item()) == ([], paddle.int64, expected)

    def test_of_ten_rows_for_eight_experts_is_two(self):
        assert TopKRouter(H, 8, 2, capacity_factor=1.0).capacity(5) == 2
        assert TopKRouter(H, 8, 2, capacity_factor=1.6).capacity(5) == 2
        assert TopKRouter(H, 8, 2, capacity_factor=1.7).capacity(5) == 3

    def test_is_none_without_a_factor(self):
        assert TopKRouter(H, E, K).capacity(10) is None

    def test_limits_the_rows_of_route(self):
        router = TopKRouter(H, E, K, capacity_factor=1.0)
        ids = router(paddle.randn([T, H])).ids
        plan = route(ids, num_experts=E, capacity=router.capacity(T))
        assert plan.tokens_per_expert.max().item() == math.ceil(T * K / E) < plan.routed_per_expert.max().item()


class TestLoadBalanceLoss:
    def test_is_one_for_an_even_load_and_higher_for_a_skewed_one(self):
        even = load_balance_loss(paddle.full([4, 4], 0.25), paddle.to_tensor([[0, 1], [1, 2], [2, 3], [3, 0]]))
        scores = paddle.to_tensor([[0.7, 0.1, 0.1, 0.1]] * 4)
        skewed = load_balance_loss(scores, paddle.zeros([4, 1], dtype="int32"))
        assert (even.shape, even.dtype) == ([], paddle.float32)
        assert float(even) == pytest.approx(1.0)
        assert float(skewed) == pytest.approx(4 * 0.7)

    def test_pushes_down_the_scores_of_loaded_experts(self):
        scores = paddle.full([4, 2], 0.5)
        scores.stop_gradient = False
        load_balance_loss(scores, paddle.to_tensor([[0], [0], [0], [1]])).backward()
        np.testing.assert_allclose(scores.grad.numpy(), [[2 * 0.75 / 4, 2 * 0.25 / 4]] * 4)

    def test_gets_its_gradient_whatever_graph_the_ids_carry(self):
        logits = paddle.to_tensor([[1.0, 0.0, 0.5], [2.0, 0.0, 1.0]])
        logits.stop_gradient = False
        hidden = logits * 2
        scores = paddle.nn.functional.softmax(hidden, axis=-1)
        _, ids = paddle.topk(scores, 2)
        ids.stop_gradient = False
        load_balance_loss(scores, ids).backward()
        expected = paddle.to_tensor(logits.numpy())
        expected.stop_gradient = False
        load_balance_loss(
            paddle.nn.functional.softmax(expected * 2, axis=-1), paddle.to_tensor([[0, 2]] * 2)
        ).backward()
        assert expected.grad.abs().max() > 0
        np.testing.assert_allclose(logits.grad.numpy(), expected.grad.numpy(), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_of_narrow_scores_is_computed_in_float32(self, dtype):
        scores = paddle.nn.functional.softmax(paddle.randn([T, E]), axis=-1).astype(dtype)
        ids = paddle.topk(scores.astype("float32"), K)[1]
        got, expected = load_balance_loss(scores, ids), load_balance_loss(scores.astype("float32"), ids)
        assert got.dtype == paddle.float32
        assert got.item() == expected.item()

    def test_counts_neither_empty_slots_nor_tokens_without_another_slot(self):
        scores = paddle.nn.functional.softmax(paddle.randn([3, 4]), axis=-1)
        with_empty = load_balance_loss(scores, paddle.to_tensor([[0, -1], [-1, -1], [2, 1]]))
        load = paddle.to_tensor([1.0, 1.0, 1.0, 0.0]) / 3
        assert with_empty.item() == pytest.approx((4 * load * scores[::2].mean(axis=0)).sum().item(), rel=1e-6)

    def test_of_a_mask_is_that_of_the_tokens_that_count(self):
        scores = paddle.nn.functional.softmax(paddle.randn([9, 4]), axis=-1)
        scores.stop_gradient = False
        ids, mask = paddle.randint(0, 4, [9, 2]), paddle.to_tensor([True, False, True] * 3)
        loss = load_balance_loss(scores, ids, mask=mask)
        loss.backward()
        kept = scores.detach()[mask]
        kept.stop_gradient = False
        alone = load_balance_loss(kept, ids[mask])
        alone.backward()
        assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
        np.testing.assert_allclose(scores.grad.numpy()[mask.numpy()], kept.grad.numpy(), rtol=1e-6)
        assert not scores.grad.numpy()[~mask.numpy()].any()
        assert load_balance_loss(scores, ids, mask=paddle.zeros([9], "bool")).item() == 0

    def test_of_counts_takes_those_of_a_larger_batch(self):
        scores, ids = paddle.nn.functional.softmax(paddle.randn([6, 4]), axis=-1), paddle.randint(0, 4, [30, 2])
        here = np.bincount(ids.numpy()[:6].ravel(), minlength=4)
        assert load_balance_loss(scores, load=paddle.to_tensor(here)).item() == pytest.approx(
            load_balance_loss(scores, ids[:6]).item(), rel=1e-6
        )
        everywhere = np.bincount(ids.numpy().ravel(), minlength=4)
        expected = 4 * (everywhere / 60 * scores.numpy().mean(axis=0)).sum()
        for dtype in ("int32", "int64", "float32"):
            load = paddle.to_tensor(everywhere, dtype=dtype)
            assert load_balance_loss(scores, load=load).item() == pytest.approx(expected, rel=1e-6)

    def test_of_sequences_is_the_mean_of_the_losses_of_each(self):
        scores, ids = paddle.nn.functional.softmax(paddle.randn([3, 5, 4]), axis=-1), paddle.randint(0, 4, [3, 5, 2])
        mask = paddle.to_tensor([[True] * 5, [True, False, True, True, False], [False, True] * 2 + [True]])
        each = [load_balance_loss(scores[i], ids[i], mask=mask[i]).item() for i in range(3)]
        assert load_balance_loss(scores, ids, mask=mask).item() == pytest.approx(np.mean(each), rel=1e-6)
        load = paddle.nn.functional.one_hot(ids, 4).sum(axis=[1, 2])
        each = [load_balance_loss(scores[i], load=load[i]).item() for i in range(3)]
        assert load_balance_loss(scores, load=load).item() == pytest.approx(np.mean(each), rel=1e-6)

    def test_is_zero_without_tokens(self):
        scores = paddle.zeros([0, 4])
        scores.stop_gradient = False
        loss = load_balance_loss(scores, paddle.zeros([0, 2], dtype="int32"))
        loss.backward()
        assert (loss.item(), scores.grad.shape) == (0.0, [0, 4])


class TestZLoss:
    def test_is_the_mean_square_of_the_logarithm_of_the_partition_function(self):
        logits = np.random.default_rng(0).standard_normal((T, E)).astype(np.float32)
        expected = np.mean(np.log(np.exp(logits.astype(np.float64)).sum(axis=-1)) ** 2)
        loss = router_z_loss(paddle.to_tensor(logits))
        assert (loss.shape, loss.dtype) == ([], paddle.float32)
        assert loss.item() == pytest.approx(expected, rel=1e-5)

    def test_gradient_is_that_of_the_formula(self):
        logits = paddle.to_tensor([[3.0, 1.0, -2.0], [0.5, 0.5, 0.5]])
        logits.stop_gradient = False
        router_z_loss(logits).backward()
        weights, logs = softmax(logits.numpy()), np.log(np.exp(logits.numpy()).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(logits.grad.numpy(), 2 * logs * weights / 2, rtol=1e-5)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_of_narrow_logits_is_computed_in_float32(self, dtype):
        logits = paddle.randn([T, E]).astype(dtype)
        got = router_z_loss(logits)
        assert got.dtype == paddle.float32
        assert got.item() == router_z_loss(logits.astype("float32")).item()

    def test_large_logits_do_not_overflow(self):
        assert router_z_loss(paddle.full([2, 4], 1000.0)).item() == pytest.approx((1000 + math.log(4)) ** 2)

    def test_is_zero_without_tokens(self):
        logits = paddle.zeros([0, 4])
        logits.stop_gradient = False
        loss = router_z_loss(logits)
        loss.backward()
        assert (loss.item(), logits.grad.shape) == (0.0, [0, 4])


BAD_CALLS = {
    "scores": (
        lambda: load_balance_loss(paddle.zeros([4]), paddle.zeros([4, 1], "int32")),
        ValueError,
        "load_balance_loss: scores must be of shape [T, E] or [B, S, E], but got [4]",
    ),
    "a mask of other tokens": (
        lambda: load_balance_loss(paddle.zeros([4, 2]), paddle.zeros([4, 1], "int32"), mask=paddle.ones([3], "bool")),
        ValueError,
        "load_balance_loss: mask must be of shape [4], but got [3]",
    ),
    "ids and load": (
        lambda: load_balance_loss(paddle.zeros([4, 2])),
        TypeError,
        "load_balance_loss: exactly one of ids and load must be given, but got neither",
    ),
    "load of other experts": (
        lambda: load_balance_loss(paddle.zeros([4, 2]), load=paddle.zeros([3], "int32")),
        ValueError,
        "load_balance_loss: load must be of shape [2], but got [3]",
    ),
    "a mask of floats": (
        lambda: router_z_loss(paddle.zeros([4, 2]), paddle.ones([4])),
        TypeError,
        "router_z_loss: mask must be of dtype bool, but got float32",
    ),
    "a mask of the router": (
        lambda: TopKRouter(H, 4, 2)(paddle.zeros([4, H]), paddle.ones([4, 1], "bool")),
        ValueError,
        "TopKRouter: mask must be of shape [4], but got [4, 1]",
    ),
    "ids of other tokens": (
        lambda: load_balance_loss(paddle.zeros([4, 2]), paddle.zeros([3, 1], "int32")),
        ValueError,
        "load_balance_loss: ids must be of shape [4, K], but got [3, 1]",
    ),
    "ids of floats": (
        lambda: load_balance_loss(paddle.zeros([4, 2]), paddle.zeros([4, 1])),
        TypeError,
        "load_balance_loss: ids must be of dtype int32 or int64, but got float32",
    ),
    "logits": (
        lambda: router_z_loss(paddle.zeros([4, 2, 3])),
        ValueError,
        "router_z_loss: logits must be of shape [T, E], but got [4, 2, 3]",
    ),
}


@pytest.mark.parametrize(("bad_call", "error", "text"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_arguments_of_losses_are_named(bad_call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        bad_call()
