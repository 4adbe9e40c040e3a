# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs whose layers add gradients of matrices to existing ones or multiply float8 operands, in sizes for kernels.

Such a layer is a node that calls the library's passes; the same layer without these options is the library's operator.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import Float8Matrices, flush_dw, moe_mlp, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.layers import has_layer_kernels
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.equality import assert_bits_equal

pytestmark = [pytest.mark.usefixtures("place", "backend"), pytest.mark.compiled_only]

H, INNER, E, K, T = 144, 128, 5, 2, 70
FLOAT8 = "fp8_1x128"
MATRICES = ("gate_up", "down")
FORMS = pytest.mark.parametrize("compute", [None, FLOAT8], ids=["bfloat16", "float8"])


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(31)


def leaf(*shape: int) -> paddle.Tensor:
    made = (paddle.randn(shape) / shape[-2] ** 0.5).astype("bfloat16")
    made.stop_gradient = False
    return made


class Layer:
    """Tokens, matrices and a plan; expert 1 has no tokens."""

    def __init__(self, tokens: int = T) -> None:
        ids = np.arange(tokens * K).reshape(tokens, K) * 7 % E
        self.plan = route(paddle.to_tensor(np.where(ids == 1, -1, ids).astype(np.int32)), num_experts=E)
        self.probs = paddle.rand([T, K])[:tokens]
        self.x, self.d_out = paddle.randn([tokens, H]).astype("bfloat16"), paddle.randn([tokens, H]).astype("bfloat16")
        self.gate_up, self.down = leaf(E, H, 2 * INNER), leaf(E, INNER, H)

    def matrices(self) -> dict[str, paddle.Tensor]:
        """New leaves of the same values."""
        found = {name: getattr(self, name).detach().clone() for name in MATRICES}
        for each in found.values():
            each.stop_gradient = False
        return found

    def call(self, matrices: dict, **options) -> paddle.Tensor:
        return moe_mlp(self.x, self.plan, self.probs, *matrices.values(), **options)

    def gradients(self, **options) -> dict[str, paddle.Tensor]:
        """Gradients of the matrices that Paddle gets."""
        matrices = self.matrices()
        paddle.autograd.backward([self.call(matrices, **options)], [self.d_out])
        return {name: each.grad for name, each in matrices.items()}

    def sums(self, **options) -> dict[str, paddle.Tensor]:
        """The same in float32, not rounded."""
        matrices = with_sums(self.matrices())
        paddle.autograd.backward([self.call(matrices, accumulate=True, **options)], [self.d_out])
        return {name: each.main_grad for name, each in matrices.items()}


def with_sums(matrices: dict) -> dict:
    for each in matrices.values():
        each.main_grad = None
    return matrices


def assert_sums(matrices: dict, expected: dict) -> None:
    for name, each in matrices.items():
        assert each.grad is None
        assert_bits_equal(each.main_grad, expected[name], what=name)


def on_kernels(layer: Layer, compute: str | None) -> bool:
    spec = SimpleNamespace(plan=layer.plan, transpose=False, compute=compute)
    return has_layer_kernels(layer.x, layer.down, spec)


def assert_rounds_to(made: paddle.Tensor, due: paddle.Tensor, what: str, exact: bool) -> None:
    """The same bits in the dtype of ``due``; if they are rounded in other places, near them."""
    if exact:
        assert_bits_equal(made.astype(due.dtype), due, what=what)
        return
    given, expected = (to_numpy(each).astype(np.float32) for each in (made, due))
    np.testing.assert_allclose(given, expected, rtol=0, atol=2e-2 * np.abs(expected).max())


@pytest.mark.sampled(2)
@FORMS
def test_a_sum_rounds_to_the_gradient(compute):
    layer = Layer()
    sums, gradients = layer.sums(compute=compute), layer.gradients(compute=compute)
    for name in MATRICES:
        assert sums[name].dtype == paddle.float32
        assert_rounds_to(sums[name], gradients[name], name, on_kernels(layer, compute) or compute == FLOAT8)
        assert not to_numpy(gradients[name])[1].astype(np.float32).any()
        assert to_numpy(gradients[name]).astype(np.float32).any()


@pytest.mark.sampled(2)
@FORMS
def test_two_forward_passes_before_two_backward_passes_in_turned_order(compute):
    first, second = Layer(), Layer(33)
    second.gate_up, second.down = first.gate_up, first.down
    a, b = first.sums(compute=compute), second.sums(compute=compute)
    matrices = with_sums(first.matrices())
    outs = [each.call(matrices, accumulate=True, compute=compute) for each in (first, second)]
    paddle.autograd.backward([outs[1]], [second.d_out])
    paddle.autograd.backward([outs[0]], [first.d_out])
    assert_sums(matrices, {name: b[name] + a[name] for name in MATRICES})


@pytest.mark.sampled(2, 1)
@FORMS
def test_sums_in_a_flat_buffer_leave_what_lies_around_them(compute):
    layer = Layer()
    expected, matrices = layer.sums(compute=compute), layer.matrices()
    sizes = [matrices[name].size for name in MATRICES]
    flat = paddle.full([64 + sum(sizes) + 64], 3.0, "float32")
    starts = {"gate_up": 64, "down": 64 + sizes[0]}
    for name, each in matrices.items():
        each.main_grad = flat._slice(starts[name], starts[name] + each.size).reshape(each.shape)
    paddle.autograd.backward([layer.call(matrices, accumulate=True, compute=compute)], [layer.d_out])
    assert_sums(matrices, {name: expected[name] + 3.0 for name in MATRICES})
    assert (flat[:64] == 3).all()
    assert (flat[-64:] == 3).all()


@FORMS
def test_sums_in_the_dtype_of_the_matrices_are_rounded_once(compute):
    layer = Layer()
    sums, matrices = layer.sums(compute=compute), layer.matrices()
    before = {name: paddle.randn(each.shape).astype("bfloat16") for name, each in matrices.items()}
    for name, each in matrices.items():
        each.main_grad = before[name].clone()
    paddle.autograd.backward([layer.call(matrices, accumulate=True, compute=compute)], [layer.d_out])
    for name, each in matrices.items():
        due = (before[name].astype("float32") + sums[name]).astype("bfloat16")
        assert_rounds_to(each.main_grad, due, name, on_kernels(layer, compute))


@FORMS
def test_what_is_accumulated_of_an_expert_without_tokens_stays(compute):
    layer = Layer()
    expected, matrices = layer.sums(compute=compute), with_sums(layer.matrices())
    for each in matrices.values():
        each.main_grad = paddle.zeros(each.shape, "float32")
        each.main_grad[1] = float("nan")
    paddle.autograd.backward([layer.call(matrices, accumulate=True, compute=compute)], [layer.d_out])
    for name, each in matrices.items():
        others = [0, *range(2, E)]
        assert paddle.isnan(each.main_grad[1]).all()
        for expert in others:
            assert_bits_equal(each.main_grad[expert], expected[name][expert], what=f"{name} {expert}")


@FORMS
@pytest.mark.parametrize("frozen", MATRICES)
def test_a_frozen_matrix(frozen, compute):
    layer = Layer()
    expected, matrices = layer.sums(compute=compute), with_sums(layer.matrices())
    matrices[frozen].stop_gradient = True
    paddle.autograd.backward([layer.call(matrices, accumulate=True, compute=compute)], [layer.d_out])
    assert matrices[frozen].main_grad is None
    (other,) = set(MATRICES) - {frozen}
    assert_bits_equal(matrices[other].main_grad, expected[other], what=other)


@FORMS
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(reentrant, compute):
    layer = Layer()
    expected, matrices = layer.sums(compute=compute), with_sums(layer.matrices())
    layer.x.stop_gradient = False

    def run(x):
        return moe_mlp(x, layer.plan, layer.probs, *matrices.values(), accumulate=True, compute=compute)

    out = recompute(run, layer.x, use_reentrant=reentrant)
    paddle.autograd.backward([out], [layer.d_out])
    assert_sums(matrices, expected)
    assert to_numpy(layer.x.grad).astype(np.float32).any()


@FORMS
def test_no_tokens_add_nothing(compute):
    layer = Layer(0)
    matrices = with_sums(layer.matrices())
    for each in matrices.values():
        each.main_grad = paddle.full(each.shape, 2.0, "float32")
    layer.x.stop_gradient = False
    out = layer.call(matrices, accumulate=True, compute=compute)
    assert out.shape == [0, H]
    paddle.autograd.backward([out], [layer.d_out])
    for each in matrices.values():
        assert (each.main_grad == 2).all()


@pytest.mark.sampled(2, 1)
@FORMS
def test_lists_of_matrices_accumulate_each(compute):
    layer = Layer()
    expected = layer.sums(compute=compute)
    lists = {name: [each.clone().detach() for each in getattr(layer, name)] for name in MATRICES}
    for each in (*lists["gate_up"], *lists["down"]):
        each.stop_gradient, each.main_grad = False, None
    out = moe_mlp(layer.x, layer.plan, layer.probs, *lists.values(), accumulate=True, compute=compute)
    paddle.autograd.backward([out], [layer.d_out])
    for name, each in lists.items():
        for expert, matrix in enumerate(each):
            assert matrix.grad is None
            made = paddle.zeros_like(expected[name][0]) if matrix.main_grad is None else matrix.main_grad
            np.testing.assert_allclose(made, expected[name][expert], rtol=1e-2, atol=1e-2)


@FORMS
@pytest.mark.parametrize("defers", [False, True], ids=["at-once", "deferred"])
def test_a_matrix_of_several_experts_gets_the_gradients_of_all(compute, defers):
    layer = Layer()
    shared = {name: [each.clone().detach() for each in getattr(layer, name)[:2]] for name in MATRICES}
    lists = {name: [pair[expert % 2] for expert in range(E)] for name, pair in shared.items()}
    for name, pair in shared.items():
        getattr(layer, name).set_value(paddle.stack(lists[name]))
        for each in pair:
            each.stop_gradient, each.main_grad = False, None
    expected = layer.sums(compute=compute)
    for _ in range(2):  # the sums are new, then old
        options = {"accumulate": True, "defer_dw": defers, "compute": compute}
        out = moe_mlp(layer.x, layer.plan, layer.probs, *lists.values(), **options)
        paddle.autograd.backward([out], [layer.d_out])
    flush_dw()
    for name, pair in shared.items():
        for first, matrix in enumerate(pair):
            due = 2 * expected[name][first::2].sum(axis=0)
            np.testing.assert_allclose(matrix.main_grad, due, rtol=1e-2, atol=1e-2 * float(due.abs().max()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", ["h", "x", "h_fp8"])
def test_micro_batches_share_kept_matrices_and_add_their_gradients(keep):
    batches = [Layer(tokens) for tokens in (70, 1, 41)]
    for each in batches[1:]:
        each.gate_up, each.down = batches[0].gate_up, batches[0].down
    options = {"compute": FLOAT8, "keep": keep}
    expected = [each.sums(**options) for each in batches]
    kept, matrices = Float8Matrices(), with_sums(batches[0].matrices())
    for each in batches:
        out = each.call(matrices, accumulate=True, float8_matrices=kept, **options)
        paddle.autograd.backward([out], [each.d_out])
    due = {name: (expected[0][name] + expected[1][name]) + expected[2][name] for name in MATRICES}
    assert_sums(matrices, due)


@FORMS
@pytest.mark.parametrize("keep", ["h", "x"])
def test_a_second_backward_pass_does_not_add_again(keep, compute):
    layer = Layer()
    layer.x.stop_gradient = False
    out = layer.call(with_sums(layer.matrices()), accumulate=True, compute=compute, keep=keep)
    paddle.autograd.backward([out], [layer.d_out], retain_graph=True)
    with pytest.raises((RuntimeError, OSError, ValueError), match="nothing can use it again") as caught:
        paddle.autograd.backward([out], [layer.d_out])
    assert "'compiled' it can" not in str(caught.value) or "'reference'" in str(caught.value)


def test_a_trained_layer_is_the_same_with_sums_as_without():
    """MoELayer in bfloat16 whose optimizer gets float32 sums."""
    layers = [MoELayer(H, INNER, E, K, accumulate=adds).to(dtype="bfloat16") for adds in (False, True)]
    layers[1].set_state_dict(layers[0].state_dict())
    x, due = paddle.randn([T, H]).astype("bfloat16"), paddle.randn([T, H]).astype("bfloat16")
    for layer in layers:
        with_sums({name: getattr(layer.experts, name) for name in MATRICES} if layer is layers[1] else {})
        (layer(x).astype("float32") - due.astype("float32")).square().mean().backward()
    plain, adds = (layer.experts for layer in layers)
    for name in MATRICES:
        exact = on_kernels(Layer(), None)
        assert_rounds_to(getattr(adds, name).main_grad, getattr(plain, name).grad, name, exact)
    assert_rounds_to(layers[1].router.weight.grad, layers[0].router.weight.grad, "router", exact)
