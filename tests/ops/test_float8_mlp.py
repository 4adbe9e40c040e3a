# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_mlp on float8 operands: outputs and gradients on every backend, and its errors."""

from __future__ import annotations

import contextlib
import re

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import Float8Matrices, moe_mlp, reference, route, use_backend
from paddle_moe_ops.backends import experts as expert_calls
from paddle_moe_ops.backends import layers
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.layers import quantized_matrices
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_float8
from tests.ops.interpreting import SHAPE
from tests.ops.problems import ordinary, plan_tensors, tensor
from tests.ops.test_autograd import FROM_BACKWARD
from tests.ops.test_moe_mlp import AXES, BUFFER_SIZES, BY_DTYPE, BY_LAYOUT, Layer
from tests.pairwise import pairwise
from tests.params import EMPTY, MANY_EXPERTS, ODD, ONE_TOKEN, PADDED

pytestmark = pytest.mark.long

FLOAT8 = "fp8_1x128"
BF16 = ml_dtypes.bfloat16


class Float8Layer(Layer):
    """Rows and matrices of more than a group of 128, and a gradient so small that a common limit would make it 0."""

    def __init__(self, rng, shape, dtype=np.float32, *, sizes=(136, 130), **options):
        super().__init__(rng, shape, dtype, sizes=sizes, **options)
        d, n = sizes
        small = 1e-3 if np.dtype(dtype) == np.float16 else 1e-6
        scales = {"gate_up": d**-0.5, "down": n**-0.5}
        self.arrays |= {name: self._scaled(self.arrays[name], scale) for name, scale in scales.items()}
        self.d_out = self._scaled(self.d_out, small)

    @staticmethod
    def _scaled(array, factor):
        return (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)

    def call(self, leaves, place, **options):
        return super().call(leaves, place, **{"compute": FLOAT8, **options})

    def due(self, hidden_in_float8=False):
        arrays = self.arrays
        weights = None if self.form == "none" else self.plan.row_probs
        arguments = arrays["x"], self.plan, arrays["gate_up"], arrays["down"], weights
        out, _ = reference.moe_mlp_float8(*arguments, transpose=self.transpose)
        options = {"transpose": self.transpose, "hidden_in_float8": hidden_in_float8}
        made = reference.moe_mlp_float8_backward(self.d_out, *arguments, **options)
        due = {"out": out, "x": made.x, "gate_up": made.gate_up, "down": made.down, "probs": made.weights}
        if "slot" in self.form:
            rows = self.plan.slot_to_row
            due["probs"] = np.where(rows >= 0, np.append(made.weights, 0)[rows], 0).reshape(arrays["probs"].shape)
        return due


def assert_near(made, due):
    for name, got in made.items():
        assert_close_float8(to_numpy(got), due[name], name)


@pytest.mark.sampled(2)
@pairwise(AXES, others_are_slow=True)
def test_result_and_gradients(form, transpose, dtype, name, rng, place):
    layer = Float8Layer(rng, PADDED, dtype, transpose=transpose, form=form)
    with use_backend(name) if name else contextlib.nullcontext():
        made = layer.run(place)
    assert_near(made, layer.due())
    assert np.abs(to_numpy(made["x"]).astype(np.float64)).max() > 0


@pairwise(
    {"sizes": [(1, 1), (7, 3), (72, 16)], "shape": [EMPTY, ONE_TOKEN, ODD], "buffer_size": BUFFER_SIZES},
    others_are_slow=True,
)
def test_any_routing_and_sizes(sizes, shape, buffer_size, rng, place):
    layer = Float8Layer(rng, shape, sizes=sizes, buffer_size=buffer_size)
    assert_near(layer.run(place), layer.due())


def test_many_experts(rng, place):
    layer = Float8Layer(rng, MANY_EXPERTS, sizes=(7, 3), buffer_size=40)
    assert_near(layer.run(place), layer.due())


def test_results_are_near_those_of_float32_and_differ_from_them(rng, place):
    layer = Float8Layer(rng, PADDED)
    exact = layer.run(place, compute=None)
    for name, got in layer.run(place).items():
        a, b = (to_numpy(each).astype(np.float64).ravel() for each in (got, exact[name]))
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert 0.997 < cosine < 0.99999, name


@pytest.mark.compiled_only
@BY_DTYPE
@BY_LAYOUT
def test_codes_of_matrices_are_those_of_the_oracle(transpose, dtype, rng, place):
    w = ordinary(rng, (3, 200, 130))
    w[0, :3, 0] = np.nan, np.inf, -np.inf
    w[1] = 0
    w[2] *= 1e-20
    w = w.astype(dtype)
    given = tensor(w, place)
    if transpose:  # a view
        w, given = w.swapaxes(1, 2), given.transpose([0, 2, 1])
    for made, due in zip(quantized_matrices(given), reference.quantize_128x128(w, amax_min=2.0**-100), strict=True):
        assert_bits_equal(made, due, what="codes and scales")


@pytest.mark.parametrize("options", [{"keep": "x"}, {"workspace_mb": 1}], ids=str)
def test_what_is_kept_and_how_much_memory_there_is_change_no_bit(options, rng, place):
    layer = Float8Layer(rng, ODD)
    before, made = layer.run(place), layer.run(place, **options)
    for each, expected in before.items():
        assert_bits_equal(made[each], expected, what=each)


@pytest.mark.parametrize("wanted", ["x", "gate_up", "down", "probs"])
def test_one_gradient_alone(wanted, rng, place):
    layer = Float8Layer(rng, ODD)
    expected, leaves = layer.run(place), layer.leaves(place)
    for each, leaf in leaves.items():
        leaf.stop_gradient = each != wanted
    paddle.autograd.backward([layer.call(leaves, place)], [tensor(layer.d_out, place)])
    assert_bits_equal(leaves[wanted].grad, expected[wanted], what=wanted)


def test_lists_of_matrices(rng, place):
    layer = Float8Layer(rng, ODD)
    expected, leaves = layer.run(place), layer.leaves(place)
    lists = {name: [tensor(each, place, gradient=True) for each in layer.arrays[name]] for name in ("gate_up", "down")}
    out = layer.call({**leaves, **lists}, place)
    paddle.autograd.backward([out], [tensor(layer.d_out, place)])
    assert_bits_equal(out, expected["out"], what="out")
    for name, each in lists.items():
        assert_bits_equal(paddle.stack([matrix.grad for matrix in each]), expected[name], what=name)


@pytest.mark.parametrize("keep", ["h", "h_fp8"])
def test_gradients_of_matrices_are_added_to_main_grad(keep, rng, place):
    layer = Float8Layer(rng, ODD)
    expected, leaves = layer.run(place, keep=keep), layer.leaves(place)
    for matrix in ("gate_up", "down"):
        leaves[matrix].main_grad = None
    for _ in range(2):
        out = layer.call(leaves, place, accumulate=True, keep=keep)
        paddle.autograd.backward([out], [tensor(layer.d_out, place)])
    for matrix in ("gate_up", "down"):
        assert leaves[matrix].grad is None
        due = 2 * to_numpy(expected[matrix])
        np.testing.assert_allclose(to_numpy(leaves[matrix].main_grad), due, rtol=1e-6, atol=1e-6 * np.abs(due).max())


def test_nan_of_a_token_stays_with_it(rng, place):
    layer = Float8Layer(rng, ODD)
    expected = layer.run(place)
    routed = np.flatnonzero((layer.plan.slot_to_row >= 0).any(axis=1))
    layer.arrays["x"][routed[0], 3] = np.nan
    made = layer.run(place)
    others = np.arange(ODD.T) != routed[0]
    for name in ("out", "x"):
        assert np.isnan(to_numpy(made[name])[routed[0]]).all()
        assert_bits_equal(made[name].numpy()[others], expected[name].numpy()[others], what=name)


BAD = {
    "another word": ({"compute": "fp8"}, "one of None, 'fp8_1x128', 'fp8_1x128_wgrad', but got 'fp8'"),
    "a number": ({"compute": 8}, "one of None, 'fp8_1x128', 'fp8_1x128_wgrad', but got 8"),
}


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(changes, text, rng):
    layer = Float8Layer(rng, ODD, sizes=(10, 6))
    with pytest.raises(ValueError, match=f"^moe_mlp: compute must be {re.escape(text)}$"):
        layer.call(layer.leaves("cpu"), "cpu", **changes)


def test_kept_matrices_change_no_bit_and_are_quantised_once(rng, place, monkeypatch):
    layer, kept, made = Float8Layer(rng, ODD), Float8Matrices(), []
    expected = layer.run(place)
    fill = expert_calls.made_by
    monkeypatch.setattr(
        expert_calls, "made_by", lambda kept, name, make: fill(kept, name, lambda: made.append(name) or make())
    )
    leaves = layer.leaves(place)
    for number in range(3):
        for leaf in leaves.values():
            leaf.clear_gradient(False)
        out = layer.call(leaves, place, float8_matrices=kept)
        paddle.autograd.backward([out], [tensor(layer.d_out, place)])
        assert len(made) == 1
        assert_bits_equal(out, expected["out"], what=f"out {number}")
        for name, leaf in leaves.items():
            assert_bits_equal(leaf.grad, expected[name], what=f"{name} {number}")
    kept.clear()
    layer.call(leaves, place, float8_matrices=kept)
    assert len(made) == 2


@BY_LAYOUT
def test_matrices_that_are_kept_to_serve_take_half_of_the_memory_and_then_train(transpose, rng, place):
    layer, kept = Float8Layer(rng, SHAPE, BF16, transpose=transpose, form="by slot", sizes=(144, 128)), Float8Matrices()
    leaves, elements = layer.leaves(place), 3 * 144 * 128 * SHAPE.E

    def codes_are(count):
        codes = [each.size for each in kept._made[1] if each.dtype == paddle.float8_e4m3fn]
        return not codes or sum(codes) == count  # the oracle keeps no codes

    expected = layer.run(place)
    with paddle.no_grad():
        for _ in range(2):
            assert_bits_equal(layer.call(leaves, place, float8_matrices=kept), expected["out"], what="served")
    assert codes_are(elements)
    out = layer.call(leaves, place, float8_matrices=kept)
    forms = 1 if kept._made[0] == "matmul" else 2  # without kernels, both passes dequantise the same codes
    assert codes_are(forms * elements)
    paddle.autograd.backward([out], [tensor(layer.d_out, place)])
    with paddle.no_grad():
        assert_bits_equal(layer.call(leaves, place, float8_matrices=kept), expected["out"], what="served again")
    assert_bits_equal(out, expected["out"], what="out")
    for name, leaf in leaves.items():
        assert_bits_equal(leaf.grad, expected[name], what=name)


def test_a_backward_pass_keeps_the_forms_that_its_kernels_read():
    forms, none = tuple("abcdefgh"), (None, None)  # of both matrices for the forward pass, then for the backward pass
    assert layers.LayerKernels(True).for_backward(forms, True) == (*none, *none, *forms[4:])
    assert layers.LayerKernels(True).for_backward(forms, False) == (*forms[:2], *none, *forms[4:])
    assert layers.LayerKernels(False).for_backward(forms[:4], False) == forms[:4]


@pytest.mark.compiled_only
@pytest.mark.parametrize("matrix", ["gate_up", "down"])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
def test_unnoticed_writes_to_kept_matrices_give_nan_and_then_an_error(dtype, matrix, rng, place, monkeypatch):
    """The device compares the matrices: on Hopper bfloat16 is for its kernels."""
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    layer, kept = Float8Layer(rng, SHAPE, dtype, form="by slot", sizes=(144, 128)), Float8Matrices()
    leaves = layer.leaves(place)
    routed = (layer.plan.slot_to_row >= 0).any(axis=1)
    with paddle.no_grad():
        due = layer.call(leaves, place)
        for _ in range(2):
            assert_bits_equal(layer.call(leaves, place, float8_matrices=kept), due, what="out")
        parts = leaves[matrix][1:].clone(), leaves[matrix][:1].clone()
        paddle.concat(parts, out=leaves[matrix])
        made = to_numpy(layer.call(leaves, place, float8_matrices=kept)).astype(np.float32)
        assert np.isnan(made[routed]).all()
        assert not made[~routed].any()
        with pytest.raises(ValueError, match=r"^moe_mlp: matrices with kept codes must be changed by calls that"):
            layer.call(leaves, place, float8_matrices=kept)
        kept.clear()
        due = layer.call(leaves, place)
        assert_bits_equal(layer.call(leaves, place, float8_matrices=kept), due, what="out after clear")


def test_with_kept_matrices_tokens_that_were_changed_in_place_raise(rng, place, backend):
    layer = Float8Layer(rng, ODD)
    leaves = layer.leaves(place)
    x = leaves["x"] * 1.0
    out = layer.call({**leaves, "x": x}, place, float8_matrices=Float8Matrices())
    x.detach().add_(paddle.ones_like(x))  # an alias of it
    with pytest.raises(FROM_BACKWARD, match="was changed in place after the forward"):
        out.sum().backward()


@pytest.mark.parametrize("backends", [("reference", None), (None, "reference")], ids=str)
def test_a_backend_quantises_matrices_that_another_one_has_kept(backends, rng, place):
    layer, kept = Float8Layer(rng, SHAPE, BF16, form="by slot", sizes=(16, 128)), Float8Matrices()
    leaves = layer.leaves(place)
    for name in backends:
        with use_backend(name) if name else contextlib.nullcontext(), paddle.no_grad():
            expected = layer.call(leaves, place)
            assert_bits_equal(layer.call(leaves, place, float8_matrices=kept), expected, what=name)


@pytest.mark.compiled_only
@pytest.mark.parametrize("other", ["gate_up", "down", "transpose"])
def test_kept_matrices_of_others_are_refused(other, rng):
    layer, kept = Float8Layer(rng, ODD, sizes=(128, 64)), Float8Matrices()
    leaves = layer.leaves("cpu")
    layer.call(leaves, "cpu", float8_matrices=kept)
    options = {}
    if other == "transpose":
        options["transpose"] = True
        shapes = [ODD.E, 128, 128], [ODD.E, 128, 64]
        zeros = [tensor(np.zeros(shape, np.float32), "cpu") for shape in shapes]
        leaves |= dict(zip(("gate_up", "down"), zeros, strict=True))
    else:
        leaves[other] = leaves[other].clone()
    text = "moe_mlp: float8_matrices must be empty or made of these matrices, in the same memory, but got one of others"
    with pytest.raises(ValueError, match=f"^{text}$"):
        layer.call(leaves, "cpu", float8_matrices=kept, **options)
    kept.clear()
    layer.call(leaves, "cpu", float8_matrices=kept, **options)


def test_kept_matrices_are_bad_arguments_elsewhere(rng):
    layer = Float8Layer(rng, ODD, sizes=(10, 6))
    with pytest.raises(ValueError, match=r"^moe_mlp: float8_matrices must be None without compute, but got "):
        layer.call(layer.leaves("cpu"), "cpu", compute=None, float8_matrices=Float8Matrices())
    with pytest.raises(TypeError, match=r"^moe_mlp: float8_matrices must be a Float8Matrices or None, but got "):
        layer.call(layer.leaves("cpu"), "cpu", float8_matrices=True)
    experts = SwiGLUExperts(2, 8, 8, compute=FLOAT8)
    empty = route(paddle.zeros([0, 1], "int32"), num_experts=2)
    for given, text in ((1, "1 of type int"), (np.bool_(True), "np.True_ of type numpy.bool")):
        with pytest.raises(TypeError, match=f"^SwiGLUExperts: is_first_microbatch must be a bool, but got {text}$"):
            experts(paddle.zeros([0, 8]), plan=empty, combine=True, is_first_microbatch=given)


@pytest.mark.compiled_only
def test_kept_matrices_of_a_list_in_another_order_are_refused(rng):
    layer, kept = Float8Layer(rng, ODD), Float8Matrices()
    leaves = layer.leaves("cpu")
    lists = {name: [tensor(each, "cpu") for each in layer.arrays[name]] for name in ("gate_up", "down")}
    layer.call({**leaves, **lists}, "cpu", float8_matrices=kept)
    swapped = {name: [each[0], each[2], each[1], *each[3:]] for name, each in lists.items()}
    with pytest.raises(ValueError, match=r"^moe_mlp: float8_matrices must be empty or made of these matrices"):
        layer.call({**leaves, **swapped}, "cpu", float8_matrices=kept)


@pytest.mark.compiled_only
def test_kept_matrices_of_a_transposed_view_are_refused(rng):
    layer, kept = Float8Layer(rng, ODD, sizes=(128, 128)), Float8Matrices()
    leaves = layer.leaves("cpu")
    layer.call(leaves, "cpu", float8_matrices=kept)
    with pytest.raises(ValueError, match="must be empty or made of these matrices"):
        layer.call({**leaves, "down": leaves["down"].transpose([0, 2, 1])}, "cpu", float8_matrices=kept)


@pytest.mark.compiled_only
def test_kept_matrices_are_quantised_outside_of_mixed_precision(rng, monkeypatch):
    """O2 would round what scales are computed from."""
    seen, quantise = [], layers.LayerKernels.quantize_experts
    layer, tracer = Float8Layer(rng, ODD), paddle.base.framework._dygraph_tracer()
    expected, before = layer.run("cpu"), tracer._amp_level

    def watched(*arguments):
        seen.append(paddle.amp.is_autocast_enabled())
        return quantise(*arguments)

    monkeypatch.setattr(layers.LayerKernels, "quantize_experts", watched)
    for kept, keep in ((None, "x"), (None, "h"), (Float8Matrices(), "h")):
        tracer._amp_level = paddle.base.core.AmpLevel.O2  # auto_cast does nothing on a CPU
        try:
            assert paddle.amp.is_autocast_enabled()
            out = layer.call(layer.leaves("cpu"), "cpu", float8_matrices=kept, keep=keep)
        finally:
            tracer._amp_level = before
        assert_bits_equal(out, expected["out"], what="out")
    assert seen == [False, False]


def test_kept_matrices_belong_to_the_dtype_of_mixed_precision(monkeypatch):
    kept, gate_up, down = Float8Matrices(), paddle.zeros([2, 4, 6]), paddle.zeros([2, 3, 4])
    monkeypatch.setattr(paddle.amp, "is_autocast_enabled", lambda: True)  # auto_cast does nothing on a CPU
    found = []
    for dtype in ("bfloat16", "bfloat16", "float16"):
        monkeypatch.setattr(paddle.amp, "get_autocast_dtype", lambda dtype=dtype: dtype)
        found.append(expert_calls.holds_others(kept, gate_up, down, False))
        expert_calls.made_by(kept, "compiled", tuple)
    assert found == [False, False, True]


def test_a_plan_with_groups_that_overlap_is_named(rng):
    layer = Float8Layer(rng, ODD)
    plan = plan_tensors(layer.plan, "cpu")
    offsets = plan.expert_offsets.clone()
    offsets[1] = 10**6
    leaves = layer.leaves("cpu")
    wrong = plan._replace(expert_offsets=offsets)
    for compute in (FLOAT8, None):
        with (
            use_backend("reference"),
            pytest.raises(ValueError, match=r"^moe_mlp: plan\.expert_offsets\[2\] must be at"),
        ):
            moe_mlp(leaves["x"], wrong, None, leaves["gate_up"], leaves["down"], compute=compute)
    with pytest.raises(ValueError, match=r"^moe_mlp: plan\.expert_offsets\[2\] must be at least"):
        moe_mlp(leaves["x"], wrong, None, leaves["gate_up"], leaves["down"], compute=FLOAT8)


@pytest.mark.compiled_only
def test_kept_matrices_hold_the_memory_of_what_they_were_made_of(rng):
    """Else the next tensors could get it, and pass for the same ones."""
    layer, kept = Float8Layer(rng, ODD), Float8Matrices()
    leaves = layer.leaves("cpu")
    for number in range(20):
        casts = {name: leaves[name].clone() for name in ("gate_up", "down")}
        if number == 0:
            layer.call({**leaves, **casts}, "cpu", float8_matrices=kept)
        else:
            with pytest.raises(ValueError, match="must be empty or made of these matrices"):
                layer.call({**leaves, **casts}, "cpu", float8_matrices=kept)


@pytest.mark.compiled_only
def test_kept_matrices_hold_the_memory_that_a_parameter_has_left(rng):
    layer, kept = Float8Layer(rng, ODD), Float8Matrices()
    leaves = layer.leaves("cpu")
    with paddle.no_grad():
        layer.call(leaves, "cpu", float8_matrices=kept)
    copy = leaves["gate_up"].clone()
    before = paddle.base.core.host_memory_stat_current_value("Allocated", 0)
    copy._share_buffer_to(leaves["gate_up"])
    assert paddle.base.core.host_memory_stat_current_value("Allocated", 0) == before
    with pytest.raises(ValueError, match="must be empty or made of these matrices"):
        layer.call(leaves, "cpu", float8_matrices=kept)


def test_a_cache_that_another_thread_has_cleared_stays_empty():
    kept = Float8Matrices()
    forward, both = ("codes", "scales"), ("codes", "scales", "transposed codes", "transposed scales")
    assert expert_calls.made_by(kept, "compiled", lambda: forward) is forward
    kept.clear()
    assert expert_calls.replaced_by(kept, forward, both) is both
    assert kept.is_empty


def test_layers_pass_the_option_on(rng, place):
    paddle.seed(3)
    layer = MoELayer(72, 24, 5, 2, compute=FLOAT8)
    assert "compute=fp8_1x128" in repr(layer)
    assert "compute" not in repr(MoELayer(72, 24, 5, 2))
    x = tensor(ordinary(rng, (20, 72)), place, gradient=True)
    out = layer(x)
    out.sum().backward()
    assert float(layer.router.weight.grad.abs().max()) > 0
    experts, ids = layer.experts, layer.router(x.detach())[0]
    probs = layer.router(x.detach())[1]
    plan = route(ids, num_experts=5)
    with paddle.no_grad():
        due = moe_mlp(x, plan, probs, experts.gate_up, experts.down, compute=FLOAT8) + layer.shared(x)
        exact = moe_mlp(x, plan, probs, experts.gate_up, experts.down) + layer.shared(x)
    np.testing.assert_allclose(to_numpy(out), to_numpy(due), rtol=1e-5, atol=1e-5)
    assert np.abs(to_numpy(out) - to_numpy(exact)).max() > 1e-3 * np.abs(to_numpy(exact)).max()


def test_bad_arguments_of_layers_are_named(rng):
    with pytest.raises(
        ValueError, match=r"^SwiGLUExperts: compute must be one of None, 'fp8_1x128', 'fp8_1x128_wgrad', but got 'fp8'$"
    ):
        SwiGLUExperts(4, 8, 8, compute="fp8")
    experts = SwiGLUExperts(2, 8, 8, compute=FLOAT8)
    with pytest.raises(ValueError, match=r"^SwiGLUExperts: combine must be True with compute='fp8_1x128'"):
        experts(paddle.zeros([3, 8]), [1, 2])
