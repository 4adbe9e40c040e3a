# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The experts: by counts of rows, by a plan, and the shared one."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops.nn import SwiGLU, SwiGLUExperts
from paddle_moe_ops.routing import route
from paddle_moe_ops.testing.equality import assert_bits_equal

pytestmark = pytest.mark.usefixtures("place")

H, I = 12, 6  # noqa: E741


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(7)


def silu(values):
    return values / (1 + np.exp(-values))


def one_expert(experts, expert, rows):
    gate, up = np.split(rows @ experts.gate_up.numpy()[expert], 2, axis=-1)
    return (silu(gate) * up) @ experts.down.numpy()[expert]


def segments_of_rows(counts, alignment):
    """Rows in expert order with zeros in padding, and where each segment begins."""
    padded = [-(-count // alignment) * alignment for count in counts]
    rows, starts = np.zeros((sum(padded), H), dtype=np.float32), np.cumsum([0, *padded])
    for start, count in zip(starts[:-1], counts, strict=True):
        rows[start : start + count] = np.random.default_rng(start).standard_normal((count, H))
    return rows, starts


FORMS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "list of 0-D tensors": lambda counts: list(paddle.to_tensor(counts)),
    "int32 tensor": lambda counts: paddle.to_tensor(counts, dtype="int32"),
    "int64 tensor": paddle.to_tensor,
}


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_experts_apply_each_expert_to_its_segment(form, alignment):
    counts = [3, 0, 5, 1]
    experts = SwiGLUExperts(4, H, I)
    rows, starts = segments_of_rows(counts, alignment)
    out = experts(paddle.to_tensor(rows), FORMS[form](counts), padding_alignment=alignment).numpy()
    expected = np.concatenate([one_expert(experts, e, rows[starts[e] : starts[e + 1]]) for e in range(4)])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_experts_give_gradients_of_rows_and_weights():
    counts, experts = [3, 0, 5], SwiGLUExperts(3, H, I)
    rows = paddle.randn([8, H])
    rows.stop_gradient = False
    weights = paddle.randn([8, H])
    (experts(rows, counts) * weights).sum().backward()
    got = [np.array(each.grad.numpy()) for each in (rows, experts.gate_up, experts.down)]
    experts.clear_gradients()
    rows.clear_gradient()
    outputs = []
    for expert, part in zip((0, 2), paddle.split(rows, [3, 5]), strict=True):
        gate, up = paddle.chunk(part @ experts.gate_up[expert], 2, axis=-1)
        outputs.append((paddle.nn.functional.silu(gate) * up) @ experts.down[expert])
    (paddle.concat(outputs) * weights).sum().backward()
    for gradient, each in zip(got, (rows, experts.gate_up, experts.down), strict=True):
        np.testing.assert_allclose(gradient, each.grad.numpy(), rtol=1e-4, atol=1e-5)
    assert not got[1][1].any()


def by_list(experts, counts):
    return lambda rows: experts(rows, counts, padding_alignment=4)


def by_tensor(experts, counts):
    return by_list(experts, paddle.to_tensor(counts))


def in_a_graph(experts, counts):
    def run(rows, counts):
        return experts(rows, counts, padding_alignment=4)

    graph, given = paddle.jit.to_static(run, full_graph=True), paddle.to_tensor(counts, dtype="int32")
    return lambda rows: graph(rows, given)


def in_a_graph_with_counts_outside(experts, counts):
    counts = paddle.to_tensor(counts)

    def run(rows):
        return experts(rows, counts, padding_alignment=4)

    return paddle.jit.to_static(run, full_graph=True)


def results_with_padding_of(experts, run, value):
    counts = [3, 0, 5, 1]
    rows, starts = segments_of_rows(counts, 4)
    is_padding = np.ones(len(rows), np.bool_)
    for start, count in zip(starts[:-1], counts, strict=True):
        is_padding[start : start + count] = False
    rows[is_padding] = value
    given = paddle.to_tensor(rows, stop_gradient=False)
    experts.clear_gradients()
    out = run(experts, counts)(given)
    assert not out.numpy()[is_padding].any()
    d_out = np.where(is_padding[:, None], value, np.ones_like(rows)).astype(np.float32)
    paddle.autograd.backward([out], [paddle.to_tensor(d_out)])
    assert not given.grad.numpy()[is_padding].any()
    return [out, given.grad, *(each.grad for each in experts.parameters())]


@pytest.mark.parametrize("run", [by_list, by_tensor, in_a_graph, in_a_graph_with_counts_outside])
def test_no_gradient_reads_padding_rows(run):
    experts = SwiGLUExperts(4, H, I, bias=True)
    for bias in (experts.gate_up_bias, experts.down_bias):
        bias.set_value(paddle.randn(bias.shape))
    expected = [each.numpy() for each in results_with_padding_of(experts, run, 0)]
    assert np.abs(expected[2]).max() > 0
    for got, wanted in zip(results_with_padding_of(experts, run, np.nan), expected, strict=True):
        assert_bits_equal(got, wanted)


def test_counts_that_include_padding_make_it_rows():
    experts = SwiGLUExperts(4, H, I, bias=True)
    rows = segments_of_rows([3, 0, 5, 1], 4)[0]
    expected = experts(paddle.to_tensor(rows), [4, 0, 8, 4])
    assert_bits_equal(experts(paddle.to_tensor(rows), [4, 0, 8, 4], padding_alignment=4), expected)


def test_experts_without_rows():
    experts = SwiGLUExperts(3, H, I)
    out = experts(paddle.zeros([0, H]), [0, 0, 0])
    assert out.shape == [0, H]
    out.sum().backward()
    assert not experts.gate_up.grad.numpy().any()


IDS = [[0, 3], [3, -1], [1, 0], [-1, -1], [3, 1]]


@pytest.mark.parametrize("weighted", ["by slot", "by row", "not"])
@pytest.mark.parametrize("buffer_size", [-1, 21, 10])  # 10: as many rows as slots
def test_experts_by_a_plan_take_tokens_and_weight_rows(buffer_size, weighted):
    experts, x = SwiGLUExperts(4, H, I), paddle.randn([5, H])
    ids, probs = paddle.to_tensor(IDS, dtype="int32"), paddle.rand([5, 2])
    plan = route(ids, probs, num_experts=4, padding_alignment=4, buffer_size=buffer_size)
    expected = np.zeros((plan.num_rows, H), np.float32)
    for row, (token, expert) in enumerate(zip(plan.row_to_token.tolist(), plan.row_to_expert.tolist(), strict=True)):
        if token >= 0:
            factor = 1 if weighted == "not" else float(plan.row_probs[row])
            expected[row] = factor * one_expert(experts, expert, x[token : token + 1].numpy())[0]
    weights = {"by slot": probs, "by row": plan.row_probs, "not": None}[weighted]
    for rows in (experts(x, plan=plan, probs=weights), experts.weighted_rows(x, plan, weights)):
        np.testing.assert_allclose(rows.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [[2, 5, H], [5, H], [H], [2, 1, 3, H], [0, H], [3, 0, H]], ids=str)
def test_shared_expert_is_an_expert_for_every_token(shape):
    shared, experts = SwiGLU(H, I), SwiGLUExperts(1, H, I)
    experts.gate_up.set_value(shared.gate_up.unsqueeze(0))
    experts.down.set_value(shared.down.unsqueeze(0))
    x = paddle.randn(shape)
    expected = one_expert(experts, 0, x.numpy().reshape(-1, H)).reshape(shape)
    out = shared(x)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert shared.gate_up.grad is not None
    assert shared.down.grad is not None


@pytest.mark.parametrize(
    ("layer", "stds"),
    [
        (SwiGLU(400, 100), {"gate_up": 400**-0.5, "down": 100**-0.5}),
        (SwiGLUExperts(3, 300, 100), {"gate_up": 300**-0.5, "down": 100**-0.5}),
    ],
    ids=["SwiGLU", "SwiGLUExperts"],
)
def test_weights_begin_with_the_inverse_root_of_what_they_add_up(layer, stds):
    for name, parameter in layer.named_parameters():
        values = parameter.numpy()
        assert values.std() == pytest.approx(stds[name], rel=0.05), name
        assert abs(values.mean()) < 0.05 * stds[name]
