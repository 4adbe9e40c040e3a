# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs whose layers compute the gradients of their matrices after the backward pass, with the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

from paddle_moe_ops import Float8Matrices, discard_dw, flush_dw, moe_mlp, permute, route, use_backend
from paddle_moe_ops.backends.layers import LayerKernels
from paddle_moe_ops.backends.reference import ReferenceKernels
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.test_autograd import FROM_BACKWARD

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, I, E, K = 33, 24, 12, 5, 2  # noqa: E741
FLOAT8 = "fp8_1x128"
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"transpose": True},
    "recomputes H": {"keep": "x"},
    "float8": {"compute": FLOAT8},
    "float8 keeps codes of H": {"compute": FLOAT8, "keep": "h_fp8"},
    "float8 keeps matrices": {"compute": FLOAT8, "float8_matrices": True},
    "other activation": {"activation": "geglu"},
    "biases": {"biases": True, "activation": "swiglu_oai"},
    "accumulates to grad": {"accumulate": True},
}
IN_LISTS = {f"{name}, lists": {"lists": True, **each} for name, each in ALONE.items() if "float8_matrices" not in each}
OPTIONS = {**ALONE, **IN_LISTS}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    paddle.seed(17)
    yield
    assert discard_dw() == 0


def leaf(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    made = (paddle.randn(shape) / 4).astype(dtype)
    made.stop_gradient = False
    return made


def plan_of(tokens: int = T):
    ids = np.arange(tokens * K, dtype=np.int32).reshape(tokens, K) * 7 % E
    return route(paddle.to_tensor(np.where(ids == 1, -1, ids)), num_experts=E)  # expert 1 has no tokens


class Program:
    """A call of `moe_mlp` on new leaves of the same values each time.

    Attributes:
        leaves: tensors whose gradients are compared, by name.
        matrices: those of the matrices.
    """

    def __init__(self, *, lists=False, main_grad=False, dtype="float32", tokens=T, biases=False, **options) -> None:
        paddle.seed(5)
        self.plan, self.x, self.probs = plan_of(tokens), leaf(tokens, H, dtype=dtype), paddle.rand([tokens, K])
        self.probs.stop_gradient = False
        self.d_out = paddle.randn([tokens, H]).astype(dtype)
        shapes = {"gate_up": (H, 2 * I), "down": (I, H)}
        if options.get("transpose"):
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        make = (
            (lambda shape: [leaf(*shape, dtype=dtype) for _ in range(E)])
            if lists
            else lambda s: leaf(E, *s, dtype=dtype)
        )
        self.given = {name: make(shape) for name, shape in shapes.items()}
        self.matrices = [leaf for each in self.given.values() for leaf in (each if lists else [each])]
        if main_grad:
            for each in self.matrices:
                each.main_grad = None
        if biases:
            options |= {"gate_up_bias": leaf(E, 2 * I, dtype=dtype), "down_bias": leaf(E, H, dtype=dtype)}
        if options.get("float8_matrices"):
            options["float8_matrices"] = Float8Matrices()
        self.options = options
        self.leaves = [self.x, self.probs, *self.matrices, *(v for k, v in options.items() if k.endswith("bias"))]

    def call(self, **options) -> paddle.Tensor:
        return moe_mlp(self.x, self.plan, self.probs, **self.given, **self.options, **options)

    def backward(self, **options) -> Program:
        paddle.autograd.backward([self.call(**options)], [self.d_out])
        return self

    def gradients(self) -> list[paddle.Tensor | None]:
        return [each.grad if getattr(each, "main_grad", None) is None else each.main_grad for each in self.leaves]


def assert_same(made: Program, due: Program) -> None:
    for number, pair in enumerate(zip(made.gradients(), due.gradients(), strict=True)):
        assert_bits_equal(*pair, what=f"gradient {number}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_have_the_bits_of_a_backward_pass(options, dtype):
    due, made = (Program(dtype=dtype, **options).backward(defer_dw=defer) for defer in (False, True))
    assert [each.grad for each in made.matrices] == [None] * len(made.matrices)
    assert_bits_equal(made.x.grad, due.x.grad, what="x")  # in the backward pass
    assert_bits_equal(made.probs.grad, due.probs.grad, what="probs")
    assert flush_dw() > 0
    assert_same(made, due)
    before = [each.numpy() for each in made.gradients()]
    assert flush_dw() == 0
    assert all((each.numpy() == other).all() for each, other in zip(made.gradients(), before, strict=True))


# On the device of the rig, Paddle leaves results of no elements on the CPU.
@pytest.mark.parametrize("tokens", [pytest.param(0, marks=pytest.mark.cpu_only), 1, 63])
@pytest.mark.parametrize(
    "options", [{}, {"compute": FLOAT8}, {"activation": "geglu"}], ids=["one", "float8", "composed"]
)
def test_odd_numbers_of_tokens(options, tokens):
    due = Program(tokens=tokens, **options).backward()
    made = Program(tokens=tokens, **options).backward(defer_dw=True)
    flush_dw()
    assert_same(made, due)


@pytest.mark.parametrize("lists", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("options", [{}, {"compute": FLOAT8}, {"biases": True}], ids=["one", "float8", "composed"])
def test_micro_batches_add_up_in_main_grad(options, lists):
    options = {"lists": lists, "main_grad": True, "accumulate": True, **options}
    due, made = Program(**options), Program(**options)
    for _ in range(3):
        due.backward()
        made.backward(defer_dw=True)
    assert all(each.main_grad is None for each in made.matrices)
    flush_dw()
    assert all(each.grad is None and each.main_grad.dtype == paddle.float32 for each in made.matrices)
    assert_same(made, due)


@pytest.mark.parametrize("flushes", [(0, 0, 1), (1, 1, 1), (0, 1, 1)], ids=str)
def test_micro_batches_in_flight_are_added_in_the_order_of_their_backward_passes(flushes):
    due, made = Program(), Program()
    for flush in flushes:
        for each in (due, made):
            each.d_out = each.d_out * 1.7
        due.backward()
        made.backward(defer_dw=True)
        if flush:
            flush_dw()
    assert_same(made, due)


def test_two_forward_passes_before_one_backward_pass_and_before_two_in_turned_order():
    due, made = Program(), Program()
    for program, defer in ((due, False), (made, True)):
        outs = [program.call(defer_dw=defer), program.call(defer_dw=defer) * 3]
        paddle.autograd.backward(outs, [program.d_out, program.d_out])
        first, second = program.call(defer_dw=defer) * 5, program.call(defer_dw=defer)
        flush_dw()
        for out in (second, first):
            paddle.autograd.backward([out], [program.d_out])
            flush_dw()
    assert_same(made, due)


def trained(make, steps: int = 3, **options) -> list[np.ndarray]:
    """Parameters of a layer after a few steps of micro-batches."""
    paddle.seed(7)
    layer = make(**options)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters())
    for _ in range(steps):
        for _ in range(2):
            layer(paddle.randn([T, H])).square().mean().backward()
        flush_dw()
        optimizer.step()
        optimizer.clear_grad()
    return [each.numpy() for each in layer.parameters()]


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"expert_bias": True, "activation": "geglu"},
    "float8": {"compute": FLOAT8},
    "recomputes H": {"keep": "x"},
    "accumulates": {"accumulate": True},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_block_trains_to_the_same_parameters(options):
    due = trained(lambda **more: MoELayer(H, I, E, K, **more), **options)
    made = trained(lambda **more: MoELayer(H, I, E, K, **more), defer_dw=True, **options)
    assert all((each == other).all() for each, other in zip(made, due, strict=True))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["rows", "plan", "weighted"])
def test_experts_on_rows(form, bias, accumulate):
    def gradients(defer: bool) -> list[paddle.Tensor]:
        paddle.seed(3)
        experts = SwiGLUExperts(E, H, I, bias=bias, accumulate=accumulate, defer_dw=defer)
        if accumulate:
            for each in experts.parameters():
                each.main_grad = None
        x, plan, probs = leaf(T, H), plan_of(), paddle.rand([T, K])
        if form == "rows":
            out = experts(permute(x, plan)[0], plan.tokens_per_expert)
        else:
            out = experts(x, plan=plan) if form == "plan" else experts.weighted_rows(x, plan, probs)
        out.square().sum().backward()
        assert bool(flush_dw()) == defer
        names = ["main_grad" if accumulate else "grad"] * len(experts.parameters())
        return [x.grad, *map(getattr, experts.parameters(), names)]

    for each, due in zip(gradients(True), gradients(False), strict=True):
        assert_bits_equal(each, due)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, {"activation": "geglu"}], ids=["one", "composed"])
def test_recomputed_layers(options, reentrant):
    due, made = Program(**options), Program(**options)
    for program, defer in ((due, False), (made, True)):
        out = recompute(lambda _, each=program, how=defer: each.call(defer_dw=how), program.x, use_reentrant=reentrant)
        paddle.autograd.backward([out], [program.d_out])
    assert flush_dw() > 0
    for each, other in zip(made.matrices, due.matrices, strict=True):
        assert_bits_equal(each.grad, other.grad)


@pytest.mark.parametrize(
    "options", [{}, {"compute": FLOAT8}, {"activation": "geglu"}], ids=["one", "float8", "composed"]
)
@pytest.mark.parametrize("frozen", ["gate_up", "down", "x", "both"])
def test_frozen_matrices_and_tokens(options, frozen):
    def program(defer: bool) -> Program:
        made = Program(**options)
        for name in ("gate_up", "down") if frozen == "both" else (frozen,):
            (made.x if name == "x" else made.given[name]).stop_gradient = True
        return made.backward(defer_dw=defer)

    due, made = program(False), program(True)
    assert bool(flush_dw()) == (frozen != "both")
    for each, other in zip(made.gradients(), due.gradients(), strict=True):
        assert (each is None) == (other is None)
        if each is not None:
            assert_bits_equal(each, other)


@pytest.mark.parametrize("options", [{}, {"activation": "geglu"}], ids=["one", "composed"])
def test_without_gradients_nothing_is_kept(options):
    program = Program(**options)
    with paddle.no_grad():
        assert program.call(defer_dw=True).stop_gradient
    assert flush_dw() == 0


@pytest.mark.parametrize("how", ["set_value", "add_", "optimizer"])
@pytest.mark.parametrize("options", [{}, {"keep": "x"}, {"compute": FLOAT8}, {"lists": True}], ids=str)
def test_values_of_matrices_may_change_before_the_flush(options, how):
    due, made = Program(**options).backward(), Program(**options).backward(defer_dw=True)
    for each in made.matrices:
        with paddle.no_grad():
            if how == "set_value":
                each.set_value(paddle.zeros(each.shape))
            elif how == "add_":
                each.add_(paddle.ones(each.shape))
            else:
                paddle._C_ops.scale_(each, 0.0, 1.0, True)
    flush_dw()
    assert_same(made, due)


@pytest.mark.parametrize("options", [{}, {"compute": FLOAT8}, {"activation": "geglu"}, {"lists": True}], ids=str)
def test_tokens_that_change_before_the_flush_raise_or_change_nothing(options, backend, device):
    due, made = Program(**options).backward(), Program(**options)
    made.x = made.x * 1
    made.backward(defer_dw=True)
    with paddle.no_grad():
        made.x.add_(paddle.ones([T, H]))
    gathers = backend == "compiled" or device != "cpu"  # not so Triton's interpreter and the reference
    keeps_tokens = options in ({}, {"compute": FLOAT8}) if gathers else "activation" in options
    if not keeps_tokens:  # but their rows, or the oracle's gradients
        flush_dw()
        for each, other in zip(made.matrices, due.matrices, strict=True):
            assert_bits_equal(each.grad, other.grad)
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match="changed in place before flush_dw; with defer_dw=True tokens and plans"):
            flush_dw()
    assert made.given["gate_up"].grad is None
    assert discard_dw() > 0


def test_matrices_that_change_between_the_passes_raise():
    program = Program()
    out = program.call(defer_dw=True)
    with paddle.no_grad():
        program.given["down"].add_(paddle.ones([E, I, H]))
    with pytest.raises(FROM_BACKWARD, match="was changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("options", [{"create_graph": True}, {}, {"allow_unused": True}], ids=str)
def test_gradients_that_paddle_asks_for_itself_raise(options):
    program = Program()
    expected = "create_graph=True is not" if "create_graph" in options else "paddle.grad of matrices is not"
    with pytest.raises(FROM_BACKWARD, match=f"moe_mlp: {expected} supported with defer_dw=True"):
        paddle.grad([program.call(defer_dw=True).sum()], [program.x, program.given["down"]], **options)


def test_a_partial_gradient_defers_nothing():
    due, made = Program(), Program()
    found = []
    for program in (due, made):
        program.probs.stop_gradient = True
        program.given["down"].stop_gradient = program is due
        program.given["gate_up"].stop_gradient = program is due
        out = program.call(defer_dw=program is made)
        found += paddle.grad([out], [program.x], [program.d_out])
    assert_bits_equal(*found)
    assert flush_dw() == 0


class Same(PyLayer):
    """A sum whose gradient is one tensor for both terms, to which Paddle's engine then adds for the second."""

    @staticmethod
    def forward(ctx: Any, first: paddle.Tensor, second: paddle.Tensor) -> paddle.Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        return gradient, gradient


@pytest.mark.parametrize("options", [{}, {"activation": "geglu"}, {"lists": True}], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_the_engine_may_add_to_the_gradient_of_the_result(options, turned):
    due, made = Program(**options), Program(**options)
    for program in (due, made):
        x = program.x * 1
        out = moe_mlp(x, program.plan, program.probs, **program.given, **program.options, defer_dw=program is made)
        total = Same.apply(x, out) if turned else Same.apply(out, x)
        ((total * total) + (x * 3).sum()).sum().backward()
    flush_dw()
    assert_same(made, due)


def test_hooks_receive_the_gradient_at_the_flush():
    due, made, seen = Program(), Program(), []
    for program in (due, made):
        program.given["down"].register_hook(lambda gradient: seen.append(gradient))
    due.backward()
    made.backward(defer_dw=True)
    flush_dw()
    first, at_backward, at_flush = seen
    assert at_backward is None
    assert_bits_equal(at_flush, first)


def test_mixed_precision_layers_of_fleet_collect_main_grad():
    def model(defer: bool) -> Any:
        paddle.seed(9)
        made = MixPrecisionLayer(MoELayer(H, I, E, K, defer_dw=defer), dtype="bfloat16")
        optimizer = MixPrecisionOptimizer(paddle.optimizer.AdamW(1e-2, parameters=made.parameters()))
        for _ in range(2):
            for _ in range(2):
                made(paddle.randn([T, H])).square().mean().backward()
            assert bool(flush_dw()) == defer
            optimizer.step()
            optimizer.clear_grad()
        return [each.numpy() for each in made.parameters()]

    assert all((each == other).all() for each, other in zip(model(True), model(False), strict=True))


@pytest.mark.parametrize("options", [{}, {"activation": "geglu"}], ids=["one", "composed"])
def test_memory_is_free_after_the_flush(options):
    program = Program(**options)
    tokens = program.x * 1
    program.x = tokens
    program.backward(defer_dw=True)
    kept = weakref.ref(tokens)
    program.x = tokens = None
    flush_dw()
    gc.collect()
    assert kept() is None


def test_a_second_backward_pass_raises():
    loss = Program().call(defer_dw=True).sum()
    loss.backward(retain_graph=True)
    assert discard_dw() == 1
    with pytest.raises(FROM_BACKWARD, match="nothing can use it again"):
        loss.backward()


def test_a_backward_pass_that_fails_leaves_nothing_once_it_is_discarded():
    due, made = Program().backward(), Program()
    x = made.x * 1

    def fail(_: paddle.Tensor) -> None:
        raise ValueError("from a hook")

    x.register_hook(fail)
    out = moe_mlp(x, made.plan, made.probs, **made.given, defer_dw=True)
    with pytest.raises(FROM_BACKWARD, match="from a hook"):
        paddle.autograd.backward([out], [made.d_out])
    assert [each.grad for each in made.matrices] == [None, None]
    assert discard_dw() == 1
    made.backward(defer_dw=True)
    flush_dw()
    assert_bits_equal(made.given["down"].grad, due.given["down"].grad)


def test_a_failure_in_the_node_defers_nothing(monkeypatch):
    program = Program()
    out = program.call(defer_dw=True)

    def fail(*_: Any) -> None:
        raise ValueError("from the kernels")

    for kernels in (LayerKernels, ReferenceKernels):
        monkeypatch.setattr(kernels, "moe_mlp_dgrads", fail)
    with pytest.raises((*FROM_BACKWARD, ValueError), match="from the kernels"):
        paddle.autograd.backward([out], [program.d_out])
    assert flush_dw() == 0


@pytest.mark.cpu_only
def test_kernels_in_the_interpreter_of_triton(interpreted):
    for options in ({}, {"keep": "x"}, {"transpose": True}, {"accumulate": True, "main_grad": True}, {"biases": True}):
        with use_backend("triton"):
            due = Program(dtype="bfloat16", tokens=5, **options).backward()
            made = Program(dtype="bfloat16", tokens=5, **options).backward(defer_dw=True)
            interpreted.launches.clear()
            flush_dw()
        assert_same(made, due)
        assert "wgrad_kernel" in interpreted.launches
        makes_schedules = "schedule_kernel" in interpreted.launches
        assert makes_schedules == ("biases" in options), "a layer that is one has those of its forward pass"
