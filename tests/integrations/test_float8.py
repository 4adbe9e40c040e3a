# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose experts multiply float8 operands: as without, but for rounding."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

import paddle_moe_ops.integrations.paddleformers as pf
from paddle_moe_ops.nn import set_is_first_microbatch

from .models import CASES, assert_close, assert_same_bits, batch, build, loss_of
from .test_blocks import block_of, outputs

FLOAT8 = "fp8_1x128"
APART = "deepseek_v3"  # its gates are layers of their own
EACH = pytest.mark.parametrize("case", [case for case in CASES if case not in (APART, "gpt_oss")])


def run(block: Any, seed: int = 3, **options: Any) -> dict[str, Any]:
    return outputs(block, np.random.default_rng(seed), (2, 19), **options)


@EACH
def test_outputs_and_gradients_are_near_those_of_exact_products(case):
    block = block_of(case)
    with pf.applied(block):
        expected = run(block)
    with pf.applied(block, compute=FLOAT8):
        made = run(block)
    experts = [name for name in expected if name.startswith("experts.")]
    assert experts
    for name, due in expected.items():
        assert (made[name] is None) == (due is None), name
        if due is not None and np.abs(due).max() > 0:
            a, b = made[name].ravel().astype(np.float64), due.ravel().astype(np.float64)
            assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, name
    assert any(np.abs(made[name] - expected[name]).max() > 0 for name in experts if expected[name] is not None)


@EACH
def test_a_recomputed_block_has_the_bits_of_one_that_is_not(case):
    block = block_of(case)
    pf.apply(block, compute=FLOAT8)
    expected = run(block)
    assert_close(run(block, call=lambda block, x: recompute(block, x, use_reentrant=False)), expected, tolerance=1e-6)


def test_wgrads_of_ernie_with_float8_operands_change_only_gradients_of_matrices():
    block = block_of("ernie4_5_moe")
    with pf.applied(block, compute=FLOAT8):
        due = run(block)
    pf.apply(block, compute="fp8_1x128_wgrad")
    for name, made in run(block).items():
        is_of_matrix = name.startswith("experts.") and due[name] is not None and np.abs(due[name]).max() > 0
        if not is_of_matrix:
            assert_same_bits({name: made}, {name: due[name]})
            continue
        a, b = made.ravel().astype(np.float64), due[name].ravel().astype(np.float64)
        assert 0.99 < a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 0.999999, name


def test_a_model_of_ernie_learns_as_it_does_without():
    losses = []
    for compute in (None, FLOAT8):
        model = build("ernie4_5_moe")
        pf.apply(model, compute=compute)
        optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
        losses.append([])
        for _ in range(8):
            loss = loss_of(model, batch())
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses[-1].append(float(loss))
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)
    assert losses[0] != losses[1]


def test_the_option_of_a_model_is_changed_and_undone():
    block = block_of("ernie4_5_moe")
    pf.apply(block)
    exact = run(block)
    with pf.applied(block, compute=FLOAT8):
        float8 = run(block)
        with pf.applied(block):
            assert_same_bits(run(block), exact)
        assert_same_bits(run(block), float8)
        assert_same_bits(run(copy.deepcopy(block)), float8)
    assert_same_bits(run(block), exact)
    pf.apply(block, compute=FLOAT8)
    pf.remove(block)
    pf.apply(block)
    assert_same_bits(run(block), exact)


@EACH
def test_blocks_keep_quantised_matrices_until_these_change(case):
    model = build(case)
    report = pf.apply(model, compute=FLOAT8)
    block = model.model.layers[1].mlp
    due = run(block)
    assert set_is_first_microbatch(model) == len(report.patched)
    for _ in range(2):
        assert_same_bits(run(block), due)
    matrix = next(p for name, p in block.named_parameters() if name.startswith("experts.") and "down_proj" in name)
    matrix.set_value(2 * matrix)
    assert np.abs(run(block)["output"] - due["output"]).max() > 0
    pf.remove(model)
    assert set_is_first_microbatch(model) == 0


def test_another_model_does_not_change():
    one, other = block_of("qwen3_moe"), block_of("qwen3_moe")
    pf.apply(other)
    exact = run(other)
    pf.apply(one, compute=FLOAT8)
    assert_same_bits(run(other), exact)


@pytest.mark.parametrize(
    ("case", "reason"),
    [(APART, "the gate of its experts is a layer of its own"), ("gpt_oss", "its experts have biases")],
)
def test_experts_that_cannot_are_refused_and_nothing_is_changed(case, reason):
    model = build(case)
    with pytest.raises(ValueError, match=f"^apply: .*: {reason}, so compute must be None, but got 'fp8_1x128'$"):
        pf.apply(model, compute=FLOAT8)
    assert not any("paddle_moe_ops" in name for layer in model.sublayers() for name in vars(layer))


def test_experts_that_are_changed_later_are_refused():
    block = block_of("qwen3_moe")
    pf.apply(block, compute=FLOAT8)
    block.experts[1].down_proj.register_forward_post_hook(lambda layer, given, out: out)
    text = r"^apply: compute='fp8_1x128' was given, but now its experts are not SwiGLU of plain linear layers; remove"
    with pytest.raises(RuntimeError, match=text):
        run(block)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"^apply: compute must be None with a name, but got 'fp8_1x128'$"):
        pf.apply("qwen3_moe", compute=FLOAT8)
    with pytest.raises(
        ValueError, match=r"^apply: compute must be one of None, 'fp8_1x128', 'fp8_1x128_wgrad', but got 'fp8'$"
    ):
        pf.apply(block_of("qwen3_moe"), compute="fp8")
