# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that train experts whose wgrads have float8 operands, too, as people write them."""

from __future__ import annotations

import copy
import re

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import flush_dw, moe_mlp, reference, route, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_float8

H, INNER, E, K, T = 160, 128, 5, 2, 330  # more than two row blocks for some experts
FLOAT8, WGRADS = "fp8_1x128", "fp8_1x128_wgrad"
MATRICES = "experts.gate_up", "experts.down"


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(17)


def layer_and_tokens(compute=WGRADS, **options):
    return MoELayer(H, INNER, E, K, compute=compute, **options), paddle.randn([T, H])


def gradients_of(layer, x, how=None):
    """Gradients of the parameters and of the tokens, by name, of a loss that weighs outputs unevenly."""
    for each in layer.parameters():
        each.clear_gradient(False)
    tokens = x.detach()
    tokens.stop_gradient = False
    out = layer(tokens) if how is None else how(layer, tokens)
    (out * paddle.linspace(-1e-3, 1e-3, H)).sum().backward()
    made = {name: each.grad.clone() for name, each in layer.named_parameters() if each.grad is not None}
    return {**made, "x": tokens.grad}


def twin_of(layer, **options):
    twin = MoELayer(H, INNER, E, K, **options)
    twin.set_state_dict(layer.state_dict())
    return twin


def assert_same(made, due):
    assert made.keys() == due.keys()
    for name, each in made.items():
        assert_bits_equal(each, due[name].numpy(), what=name)


class Problem:
    """A call of moe_mlp with a buffer that has padding, and its oracle."""

    def __init__(self, rng, place, experts=E, skewed=False):
        share = np.full(experts, 1 / experts)
        if skewed:
            share = np.r_[0.9, np.zeros(experts - 2), 0.1]
        ids = np.stack([rng.choice(experts, 1, p=share) for _ in range(T)]).astype(np.int32)
        ids[::9] = -1
        self.plan = reference.route(ids, num_experts=experts, padding_alignment=16)
        self.arrays = {
            "x": rng.standard_normal((T, H)),
            "gate_up": rng.standard_normal((experts, H, 2 * INNER)) * H**-0.5,
            "down": rng.standard_normal((experts, INNER, H)) * INNER**-0.5,
        }
        self.arrays = {name: each.astype(np.float32) for name, each in self.arrays.items()}
        self.d_out = (rng.standard_normal((T, H)) * 1e-4).astype(np.float32)
        self.ids, self.experts, self.place = ids, experts, place

    def run(self, **options):
        leaves = {name: paddle.to_tensor(each, place=self.place) for name, each in self.arrays.items()}
        for leaf in leaves.values():
            leaf.stop_gradient = False
        ids = paddle.to_tensor(self.ids, place=self.place)
        plan = route(ids, num_experts=self.experts, padding_alignment=16)
        x, gate_up, down = leaves.values()
        out = moe_mlp(x, plan, None, gate_up, down, **{"compute": WGRADS, **options})
        paddle.autograd.backward([out], [paddle.to_tensor(self.d_out, place=self.place)])
        return {name: leaf.grad for name, leaf in leaves.items()}

    def due(self):
        x, gate_up, down = self.arrays.values()
        options = {"float8_wgrads": True}
        return reference.moe_mlp_float8_backward(self.d_out, x, self.plan, gate_up, down, **options)


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("experts", [3, 33])
def test_gradients_are_those_of_the_oracle(experts, skewed, rng, place):
    problem = Problem(rng, place, experts, skewed)
    made, due = problem.run(), problem.due()
    for name, got in made.items():
        assert_close_float8(to_numpy(got), getattr(due, name), name)
    with use_backend("reference"):
        for name, got in problem.run().items():
            assert_close_float8(to_numpy(got), to_numpy(made[name]), name)
    exact = problem.run(compute=FLOAT8)
    for name in ("gate_up", "down"):
        a, b = (to_numpy(each[name]).astype(np.float64).ravel() for each in (made, exact))
        assert 0.9975 < a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 0.99999, name


CALLS = {
    "lists, weights by slot": ("float16", (37, 19), [128, 129, 0], {"lists": True, "weights_by": "slot"}),
    "transposed, weights by row": ("bfloat16", (144, 130), [257, 1], {"transpose": True, "weights_by": "row"}),
    "a buffer that drops rows": ("float32", (136, 72), [140, 150, 9], {"buffer_size": 200, "transpose": True}),
    "one expert": ("float32", (1, 1), [129], {}),
}


@pytest.mark.parametrize(("dtype", "sizes", "counts", "form"), CALLS.values(), ids=CALLS)
def test_calls_of_every_form(dtype, sizes, counts, form, rng, place):
    """Sizes that are no multiples of 8, and experts that end with a row block, one row after it, and within one."""
    form, (hidden, inner), experts = dict(form), sizes, len(counts)
    lists, buffer_size = form.pop("lists", False), form.pop("buffer_size", -1)
    transpose = form.get("transpose", False)
    ids = rng.permutation(np.repeat(np.arange(experts, dtype=np.int32), counts))[:, None]
    of_oracle = reference.route(ids, num_experts=experts, buffer_size=buffer_size)
    plan = route(paddle.to_tensor(ids, place=place), num_experts=experts, buffer_size=buffer_size)

    def made(*shape, scale=1.0):
        return paddle.to_tensor(rng.standard_normal(shape).astype(np.float32) * scale, place=place).astype(dtype)

    x, d_out = made(len(ids), hidden), made(len(ids), hidden, scale=0.01)
    shapes = [(hidden, 2 * inner), (inner, hidden)]
    pair = [made(experts, *(reversed(shape) if transpose else shape), scale=shape[0] ** -0.5) for shape in shapes]
    probs = weights = None
    if "weights_by" in form:
        values = rng.random((len(ids), 1)).astype(np.float32)
        weights = values[of_oracle.row_to_token, 0]
        probs = paddle.to_tensor(values if form["weights_by"] == "slot" else weights, place=place)
    given = [paddle.unbind(each) if lists else [each] for each in pair]
    for each in (x, *given[0], *given[1]):
        each.stop_gradient = False
    out = moe_mlp(x, plan, probs, *(each if lists else each[0] for each in given), compute=WGRADS, **form)
    paddle.autograd.backward([out], [d_out])
    arrays = to_numpy(d_out), to_numpy(x), of_oracle, *map(to_numpy, pair), weights
    due = reference.moe_mlp_float8_backward(*arrays, transpose=transpose, float8_wgrads=True)
    assert_close_float8(to_numpy(x.grad), due.x, "x")
    for name, each in zip(("gate_up", "down"), given, strict=True):
        gradient = np.stack([to_numpy(matrix.grad) for matrix in each]) if lists else to_numpy(each[0].grad)
        assert_close_float8(gradient, getattr(due, name), name)


def test_only_gradients_of_matrices_change():
    layer, x = layer_and_tokens()
    made = gradients_of(layer, x)
    exact = gradients_of(twin_of(layer, compute=FLOAT8), x)
    for name, each in made.items():
        assert (to_numpy(each) != to_numpy(exact[name])).any() == (name in MATRICES), name


def test_training_follows_that_in_the_tokens_dtype():
    layer, x = layer_and_tokens()
    exact = twin_of(layer)
    target = paddle.tanh(x @ paddle.randn([H, H]) / H**0.5)

    def losses_of(model):
        optimizer, losses = paddle.optimizer.AdamW(3e-3, parameters=model.parameters()), []
        for _ in range(10):
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
        return losses

    made, due = losses_of(layer), losses_of(exact)
    assert made[-1] < 0.8 * made[0]
    np.testing.assert_allclose(made, due, rtol=0, atol=0.01 * due[0])


@pytest.mark.parametrize("options", [{"keep": "x"}, {"workspace_mb": 1}], ids=str)
def test_memory_options_change_no_bit(options):
    layer, x = layer_and_tokens()
    assert_same(gradients_of(twin_of(layer, compute=WGRADS, **options), x), gradients_of(layer, x))


def test_h_may_be_kept_in_float8():
    layer, x = layer_and_tokens(keep="h_fp8")
    made, due = gradients_of(layer, x), gradients_of(twin_of(layer, compute=FLOAT8, keep="h_fp8"), x)
    assert_same({"x": made["x"]}, {"x": due["x"]})
    for name in MATRICES:
        assert_close_float8(to_numpy(made[name]), to_numpy(due[name]), name)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recompute(reentrant):
    layer, x = layer_and_tokens()
    made = gradients_of(layer, x, lambda model, tokens: recompute(model, tokens, use_reentrant=reentrant))
    assert_same(made, gradients_of(layer, x))


@pytest.mark.parametrize("frozen", MATRICES)
def test_a_frozen_matrix(frozen):
    layer, x = layer_and_tokens()
    due = gradients_of(layer, x)
    dict(layer.named_parameters())[frozen].stop_gradient = True
    due.pop(frozen)
    assert_same(gradients_of(layer, x), due)


def test_two_forward_passes_before_one_backward_pass():
    layer, x = layer_and_tokens()
    first, second = paddle.randn([T, H]), x
    made = gradients_of(layer, first, lambda model, tokens: model(tokens) + model(second))
    for name in MATRICES:
        parts = [gradients_of(layer, each)[name] for each in (first, second)]
        np.testing.assert_allclose(made[name].numpy(), (parts[0] + parts[1]).numpy(), rtol=1e-5, atol=1e-7)


def test_gradients_that_are_accumulated_or_deferred():
    layer, x = layer_and_tokens()
    due = gradients_of(layer, x)
    for options in ({"accumulate": True}, {"defer_dw": True}):
        twin = twin_of(layer, compute=WGRADS, **options)
        made = gradients_of(twin, x)
        if "defer_dw" in options:
            assert not made.keys() & set(MATRICES)
            flush_dw()
        for name, each in twin.named_parameters():
            if name in MATRICES:
                assert_bits_equal(each.grad, due[name].numpy(), what=name)


def test_auto_cast_in_bfloat16():
    layer, x = layer_and_tokens()

    def cast(model, tokens):
        with paddle.amp.auto_cast(dtype="bfloat16"):
            return model(tokens).astype("float32")

    made, due = gradients_of(layer, x, cast), gradients_of(layer, x)
    for name in MATRICES:
        assert made[name].dtype == paddle.float32
        assert_close_float8(to_numpy(made[name]), to_numpy(due[name]), name)


def test_a_static_function_has_the_bits_of_dygraph():
    layer, x = layer_and_tokens(num_shared_experts=0)
    due = gradients_of(layer, x)
    static = paddle.jit.to_static(copy.deepcopy(layer), full_graph=True)
    assert_same(gradients_of(static, x), due)


def test_a_loss_scaler_finds_an_overflow():
    """An infinity in the gradient of one output is there in the gradient of the matrix that multiplied it."""
    layer, x = layer_and_tokens(num_shared_experts=0)
    factors = paddle.ones([T, H]) * 1e-3
    factors[7, 5] = float("inf")
    (layer(x) * factors).sum().backward()
    bad = paddle.isfinite(layer.experts.down.grad).logical_not().any(axis=[1, 2])
    assert int(bad.sum()) == K


def test_experts_without_tokens_and_calls_without_any():
    layer, x = layer_and_tokens()
    layer.router.weight.set_value(paddle.full_like(layer.router.weight, 0.01))  # equal logits: the first experts win
    made = gradients_of(layer, x)
    used = [bool((each != 0).any()) for each in made["experts.gate_up"]]
    assert sum(used) == K
    empty = gradients_of(layer, paddle.zeros([0, H]))
    assert not any(bool((empty[name] != 0).any()) for name in MATRICES if name in empty)


def test_layers_that_have_no_such_wgrads_say_so():
    expected = "compute must be None or 'fp8_1x128' with the activation 'geglu', but got 'fp8_1x128_wgrad'"
    with pytest.raises(ValueError, match=re.escape(expected)):
        MoELayer(H, INNER, E, K, compute=WGRADS, activation="geglu")
    expected = "compute must be None or 'fp8_1x128' with biases, but got 'fp8_1x128_wgrad'"
    x, gate_up, down = paddle.randn([T, H]), paddle.randn([E, H, 2 * INNER]), paddle.randn([E, INNER, H])
    plan = route(paddle.zeros([T, 1], "int32"), num_experts=E)
    with pytest.raises(ValueError, match=re.escape(expected)):
        moe_mlp(x, plan, None, gate_up, down, gate_up_bias=paddle.zeros([E, 2 * INNER]), compute=WGRADS)


def test_a_name_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=re.escape("compute must be one of None, 'fp8_1x128', 'fp8_1x128_wgrad', but")):
        MoELayer(H, INNER, E, K, compute="fp8")
