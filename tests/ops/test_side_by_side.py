# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that are layers of their own and lie side by side: one tensor for the kernels, without a copy."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import moe_mlp, route, use_backend
from paddle_moe_ops.backends.stacking import parts_of, shared_memory, view_of
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import lay_side_by_side
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import ordinary, tensor

E, D, N, T = 3, 16, 8, 6
SIZES = [2, 0, 4]


class Experts(nn.Layer):
    """A router, and experts that are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias_attr=False)
        self.up = nn.LayerList([nn.Linear(D, 2 * N, bias_attr=False) for _ in range(E)])
        self.down = nn.LayerList([nn.Linear(N, D, bias_attr=False) for _ in range(E)])

    def lists(self) -> tuple[list[Any], list[Any]]:
        return [each.weight for each in self.up], [each.weight for each in self.down]

    def lie_together(self) -> bool:
        return all(view_of(each) is not None for each in self.lists())

    def forward(self, x: Any, **options: Any) -> Any:
        return self.layer(x, *self.lists(), **options)

    def layer(self, x: Any, gate_up: Any, down: Any, **options: Any) -> Any:
        probs, ids = paddle.topk(nn.functional.softmax(self.router(x.astype("float32"))), 2)
        return moe_mlp(x, route(ids, num_experts=E), probs, gate_up, down, **options)

    def cast(self, dtype: str) -> Experts:
        """All but the router."""
        for each in (self.up, self.down):
            each.to(dtype=dtype)
        return self


def laid_out(dtype: str = "float32", lay: bool = True) -> Experts:
    paddle.seed(5)
    model = Experts().cast(dtype)
    if lay:
        for each in model.lists():
            lay_side_by_side(each)
    return model


def tokens(rng: Any, place: Any, dtype: str = "float32") -> Any:
    return tensor(ordinary(rng, (T, D)), place).astype(dtype)


@pytest.fixture
def no_copies(monkeypatch):
    """Fails where matrices are put together."""

    def refused(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("the matrices were put together")

    def forbid() -> None:
        for name in ("stack", "concat"):
            monkeypatch.setattr(paddle, name, refused)

    return forbid


def test_laying_changes_the_memory_and_nothing_else(place):
    model = laid_out(lay=False)
    up, down = model.lists()
    before = {name: (id(each), each.numpy().copy()) for name, each in model.named_parameters()}
    assert not model.lie_together()
    lay_side_by_side(up)
    lay_side_by_side(nn.ParameterList(down))
    assert model.lie_together()
    assert {name: id(each) for name, each in model.named_parameters()} == {key: each[0] for key, each in before.items()}
    for name, each in model.named_parameters():
        assert_bits_equal(each, before[name][1], what=name)
        assert not each.stop_gradient
        assert each.is_leaf
    first = up[0].data_ptr()
    lay_side_by_side(up)
    assert up[0].data_ptr() == first  # a second call has nothing to do


@pytest.mark.cpu_only
@pytest.mark.parametrize("laid", [True, False], ids=["side by side", "apart"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_product_gives_the_bits_of_one_tensor(interpreted, rng, no_copies, laid, bias):
    arrays = [ordinary(rng, shape, np.float16) for shape in ((T, D), (E, N, D), (E, N))]
    x, w, b = (tensor(each, "cpu", gradient=True) for each in arrays)
    x_too = tensor(arrays[0], "cpu", gradient=True)
    listed, biases = ([tensor(part, "cpu", gradient=True) for part in each] for each in arrays[1:])
    if laid:
        lay_side_by_side(listed)
        lay_side_by_side(biases)
    d_out = tensor(ordinary(rng, (T, N), np.float16), "cpu")
    with use_backend("triton"):
        out = grouped_gemm(x, w, SIZES, bias=b if bias else None)
        paddle.autograd.backward([out], [d_out])
        launches = interpreted.launches.copy()
        if laid:
            no_copies()
        got = grouped_gemm(x_too, listed, SIZES, bias=biases if bias else None)
        paddle.autograd.backward([got], [d_out])
    assert interpreted.launches == 2 * launches
    assert_bits_equal(got, out)
    assert_bits_equal(x_too.grad, x.grad)
    pairs = [(listed, w), (biases, b)] if bias else [(listed, w)]
    for mine, one in pairs:
        for expert, each in enumerate(mine):
            assert_bits_equal(each.grad, one.grad[expert], what=f"expert {expert}")
        assert view_of([each.grad for each in mine]) is not None  # parts of one gradient, not copies


def stacked_call(model: Experts, x: Any) -> tuple[Any, list[Any]]:
    """The same layer from one tensor of all matrices."""
    stacked = [paddle.stack([each.detach() for each in matrices]) for matrices in model.lists()]
    for each in stacked:
        each.stop_gradient = False
    return model.layer(x, *stacked), stacked


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_a_layer_gives_the_bits_of_one_tensor_without_a_copy(interpreted, rng, no_copies, name):
    model, x = laid_out("float16"), tokens(rng, "cpu", "float16")
    with use_backend(name):
        expected, stacked = stacked_call(model, x)
        expected.sum().backward()
        no_copies()
        out = model(x)
        out.sum().backward()
    assert_bits_equal(out, expected)
    for matrices, one in zip(model.lists(), stacked, strict=True):
        for expert, each in enumerate(matrices):
            assert_bits_equal(each.grad, one.grad[expert], what=f"expert {expert}")
        assert view_of([each.grad for each in matrices]) is not None


@pytest.mark.cpu_only
def test_without_gradients_nothing_is_copied_either(interpreted, rng, no_copies):
    model, x = laid_out("float16"), tokens(rng, "cpu", "float16")
    with use_backend("triton"), paddle.no_grad():
        expected, _ = stacked_call(model, x)
        no_copies()
        assert_bits_equal(model(x), expected)


@pytest.mark.cpu_only
@pytest.mark.parametrize("kept", ["none yet", "side by side", "apart"])
def test_gradients_are_accumulated_where_they_belong(interpreted, rng, kept, monkeypatch):
    model, x = laid_out("float16"), tokens(rng, "cpu", "float16")
    with use_backend("triton"):
        model(x).sum().backward()
        plain = [each.grad.astype("float32") for matrices in model.lists() for each in matrices]
        model.clear_gradients(set_to_zero=False)
        for matrices in model.lists():
            held = [paddle.ones(each.shape) for each in matrices]
            if kept == "side by side":
                held = parts_of(paddle.ones([E, *matrices[0].shape]))
            for each, part in zip(matrices, held, strict=True):
                each.main_grad = None if kept == "none yet" else part
        if kept != "apart":
            monkeypatch.setattr("paddle_moe_ops.backends.stacking.put", None)  # the kernel itself adds
        model(x, accumulate=True).sum().backward()
    begun = 0 if kept == "none yet" else 1
    parameters = [each for matrices in model.lists() for each in matrices]
    for parameter, gradient in zip(parameters, plain, strict=True):
        assert parameter.grad is None
        assert parameter.main_grad.dtype == paddle.float32
        np.testing.assert_allclose(parameter.main_grad.numpy(), begun + gradient.numpy(), rtol=2e-3, atol=2e-3)
    if kept != "apart":
        assert all(view_of([each.main_grad for each in matrices]) is not None for matrices in model.lists())


def steps(model: Experts, rng: Any, place: Any, number: int = 3) -> Any:
    """Train; the optimizer."""
    dtype = str(model.up[0].weight.dtype).rpartition(".")[2]
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), multi_precision=True)
    for _ in range(number):
        x = tokens(rng, place, dtype)
        model(x).astype("float32").square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return optimizer


@pytest.mark.paddle_kernels  # optimizers that write to the memory of parameters; the rig's run on the CPU
def test_parameters_stay_side_by_side_in_training_and_end_with_the_same_numbers(place):
    """On a GPU in float16 with master weights, which a CPU has no optimizers for."""
    on_cpu = tensor(ordinary(np.random.default_rng(0), (1,)), place).place.is_cpu_place()
    dtype, name = ("float32", "reference") if on_cpu else ("float16", "triton")
    apart, together = laid_out(dtype, lay=False), laid_out(dtype)
    with use_backend(name):
        states = [steps(each, np.random.default_rng(1), place).state_dict() for each in (apart, together)]
    assert together.lie_together()
    assert not apart.lie_together()
    for expected, got in zip(apart.parameters(), together.parameters(), strict=True):
        assert_bits_equal(got, expected)
    assert len(states[0]) == len(states[1])


def test_checkpoints_go_both_ways(tmp_path):
    apart, together = laid_out(lay=False), laid_out()
    with paddle.no_grad():
        for each in apart.parameters():
            each.set_value(each.numpy() + 1)
    paddle.save(apart.state_dict(), str(tmp_path / "apart"))
    paddle.save(together.state_dict(), str(tmp_path / "together"))
    size = (tmp_path / "together").stat().st_size
    assert abs(size - (tmp_path / "apart").stat().st_size) < 100  # a part is not saved with the whole allocation
    other = laid_out(lay=False)
    other.set_state_dict(paddle.load(str(tmp_path / "together")))
    for got, expected in zip(other.parameters(), together.parameters(), strict=True):
        assert_bits_equal(got, expected)
    together.set_state_dict(paddle.load(str(tmp_path / "apart")))
    for got, expected in zip(together.parameters(), apart.parameters(), strict=True):
        assert_bits_equal(got, expected)
    assert together.lie_together()


@pytest.mark.cpu_only
def test_copies_and_casts_have_memory_of_their_own_and_give_the_same_results(interpreted, rng):
    model, x = laid_out("float16"), tokens(rng, "cpu", "float16")
    with use_backend("triton"):
        expected = model(x)
        twin = copy.deepcopy(model)
        assert_bits_equal(twin(x), expected)
        with paddle.no_grad():
            twin.up[0].weight.set_value(paddle.zeros_like(twin.up[0].weight))
        assert_bits_equal(model(x), expected)
        model.cast("float32").cast("float16")
        assert_bits_equal(model(x), expected)
        for each in (*model.lists(), *twin.lists()):
            lay_side_by_side(each)
        assert model.lie_together()
        assert twin.lie_together()
        assert_bits_equal(model(x), expected)


def test_a_list_shared_by_two_calls_gets_the_sum_of_both_gradients(rng, place):
    model, x = laid_out(), tokens(rng, place)
    with use_backend("reference"):
        model(x).sum().backward()
        once = [each.grad.clone() for matrices in model.lists() for each in matrices]
        model.clear_gradients(set_to_zero=False)
        (model(x) + model(x)).sum().backward()
    for parameter, gradient in zip((each for matrices in model.lists() for each in matrices), once, strict=True):
        assert_bits_equal(parameter.grad, gradient * 2)


@pytest.mark.cpu_only
def test_a_frozen_matrix_gets_no_gradient_and_hooks_see_the_others(interpreted, rng):
    model, x, seen = laid_out("float16"), tokens(rng, "cpu", "float16"), []
    model.up[1].weight.stop_gradient = True
    model.up[2].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    with use_backend("triton"):
        model(x).sum().backward()
    assert [each.weight.grad is None for each in model.up] == [False, True, False]
    assert seen == [[D, 2 * N]]


@pytest.mark.cpu_only
def test_recomputation_and_a_second_backward_pass(interpreted, rng):
    model, x = laid_out("float16"), tokens(rng, "cpu", "float16")
    x.stop_gradient = False
    with use_backend("triton"):
        model(x).sum().backward()
        plain = [each.grad.clone() for each in model.parameters()]
        model.clear_gradients(set_to_zero=False)
        recompute(model, x).sum().backward()
        for parameter, gradient in zip(model.parameters(), plain, strict=True):
            assert_bits_equal(parameter.grad, gradient)
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with pytest.raises((RuntimeError, OSError), match="nothing can use it again"):
            loss.backward()


def test_a_matrix_that_changes_before_the_backward_pass_is_noticed(rng, place):
    model, x = laid_out(), tokens(rng, place)
    with use_backend("reference"):
        loss = model(x).sum()
        with paddle.no_grad():
            model.up[1].weight.add_(paddle.ones_like(model.up[1].weight))
        with pytest.raises((RuntimeError, OSError), match="moe_mlp: a tensor that the backward pass needs was changed"):
            loss.backward()


@pytest.mark.cpu_only
@pytest.mark.parametrize("accumulate", [False, True])
def test_mixed_precision_casts_all_matrices_at_once(interpreted, rng, monkeypatch, accumulate, no_copies):
    model, x = laid_out(), tokens(rng, "cpu")
    narrow = laid_out("float16")
    for matrices in model.lists():
        for each in matrices:
            each.main_grad = None
    casts: list[Any] = []
    for module in ("paddle_moe_ops._matrices", "paddle_moe_ops.mlp"):
        cast = __import__(module, fromlist=["to_dtype"]).to_dtype
        monkeypatch.setattr(f"{module}.to_dtype", lambda given, dtype: casts.append(given.shape) or cast(given, dtype))  # noqa: B023
    monkeypatch.setattr("paddle_moe_ops.mlp.is_on_gpu", lambda _: True)
    monkeypatch.setattr(paddle.amp, "is_autocast_enabled", lambda: True)
    monkeypatch.setattr(paddle.amp, "get_autocast_dtype", lambda: "float16")
    with use_backend("triton"):
        no_copies()
        out = model(x, accumulate=accumulate)
        assert casts == [[T, D], [E, D, 2 * N], [E, N, D]]
        out.astype("float32").sum().backward()
        monkeypatch.undo()
    assert out.dtype == paddle.float16
    for matrices in model.lists():
        for each in matrices:
            assert (each.main_grad is not None) == accumulate
            assert (each.grad is None) == accumulate
    assert [each.shape for each in narrow.lists()[0]] == [[D, 2 * N]] * E


def part_of_another() -> list[Any]:
    whole = paddle.ones([8, 2])
    return [paddle.ones([4, 2]), whole._slice(4, 8)]


BAD = [
    (lambda: 3, TypeError, "parameters must be a list or a paddle.nn.ParameterList of tensors, but got int"),
    (list, ValueError, "parameters must be a list of one tensor for each expert, but got 0 of them"),
    (lambda: [np.ones(2)], TypeError, "parameters[0] must be a paddle.Tensor, but got ndarray"),
    (
        lambda: [paddle.ones([2, 3]), paddle.ones([3, 2])],
        ValueError,
        "parameters[1] must be of shape [2, 3], but got [3, 2]",
    ),
    (
        lambda: [paddle.ones([2, 3]), paddle.ones([2, 3], "float16")],
        TypeError,
        'parameters[1] must be of dtype float32, but got float16; convert it with .astype("float32")',
    ),
    (
        lambda: [paddle.ones([2])] * 2,
        ValueError,
        "parameters[1] must be a tensor that is not in the list before, but got one that is",
    ),
    (
        part_of_another,
        ValueError,
        "parameters[1] must be a tensor with memory of its own, but got a part of 64 bytes",
    ),
]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("make", "error", "text"), BAD)
def test_what_cannot_be_laid_side_by_side_is_named(make, error, text):
    with pytest.raises(error, match=f"^lay_side_by_side: {re.escape(text)}$"):
        lay_side_by_side(make())


@pytest.mark.cpu_only
def test_parameters_of_a_buffer_are_not_taken_for_those_that_were_laid_at_its_address():
    """Buffers of sharding optimizers may get the memory that parameters have left."""
    parameters = [paddle.create_parameter([2100, 2100], "float32") for _ in range(2)]
    lay_side_by_side(parameters)
    for each in parameters:
        each.clone()._share_buffer_to(each)
    buffers = [paddle.empty([2 * 2100 * 2100 + 64]) for _ in range(3)]
    for buffer in buffers:  # large enough to get the addresses that the parameters had
        buffer._slice(0, 2100 * 2100)._share_buffer_to(parameters[0])
        assert shared_memory(parameters[0]) == f"a part of {buffer._holder_size()} bytes"


@pytest.mark.cpu_only
def test_neighbours_in_allocations_of_their_own_are_no_view():
    """Addresses alone do not tell: what one tensor may read ends where its allocation does."""
    whole = paddle.arange(24, dtype="float32").reshape([2, 3, 4])
    first, second = parts_of(whole)
    assert_bits_equal(view_of([first, second]), whole)
    assert view_of([second, first]) is None
    assert view_of([first, first]) is None
    assert view_of([second]) is not None
    alone = paddle.ones([3, 4])
    assert view_of([alone]) is not None
    assert view_of([alone, second]) is None


def test_parts_are_views_where_unbind_copies(monkeypatch):
    unbind = paddle.unbind
    monkeypatch.setattr(paddle, "unbind", lambda whole: [each.clone() for each in unbind(whole)])
    whole = paddle.arange(24, dtype="float32").reshape([2, 3, 4])
    parts = parts_of(whole)
    assert [each.data_ptr() - whole.data_ptr() for each in parts] == [0, 48]
    assert_bits_equal(paddle.stack(parts), whole)
