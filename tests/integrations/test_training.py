# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A patched model trains as the one that it was: losses, gradients, parameters, checkpoints."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_moe_ops.integrations.paddleformers as pf

from .models import CASES, assert_close, assert_same_bits, batch, build, count_calls, gradients, loss_of, train, type_of

EACH = pytest.mark.parametrize("case", CASES)


def numbers(model) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


@EACH
def test_the_losses_of_twenty_steps_are_the_same(case):
    expected = train(build(case), 20)
    with pf.applied(type_of(case)):
        found = train(build(case), 20)
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.05  # it learns, so that a wrong gradient would show


@EACH
def test_every_gradient_is_the_same(case):
    expected = gradients(build(case))
    with pf.applied(type_of(case)):
        assert_close(gradients(build(case)), expected)


@EACH
def test_one_token(case):
    one = batch(3, (1, 2))  # predicts one token
    expected = gradients(build(case), one)
    with pf.applied(type_of(case)):
        assert_close(gradients(build(case), one), expected, tolerance=1e-5)


@EACH
def test_a_patched_model_has_the_parameters_it_had(case):
    plain = build(case)
    with pf.applied(type_of(case)):
        patched = build(case)
    assert_same_bits(numbers(patched), numbers(plain))
    assert [p.name for p in patched.parameters()] == [p.name for p in plain.parameters()]


@EACH
def test_checkpoints_go_both_ways(case, tmp_path):
    plain = build(case)
    expected = float(loss_of(plain, batch()))
    paddle.save(plain.state_dict(), str(tmp_path / "plain.pdparams"))
    other = build(case, seed=2)
    with pf.applied(other):
        assert float(loss_of(other, batch())) != pytest.approx(expected, abs=1e-4)
        assert other.set_state_dict(paddle.load(str(tmp_path / "plain.pdparams"))) == ([], [])
        assert float(loss_of(other, batch())) == pytest.approx(expected, abs=1e-5)
        paddle.save(other.state_dict(), str(tmp_path / "patched.pdparams"))
    third = build(case, seed=3)
    assert third.set_state_dict(paddle.load(str(tmp_path / "patched.pdparams"))) == ([], [])
    assert float(loss_of(third, batch())) == expected


@EACH
def test_a_patched_instance_gives_the_bits_of_a_patched_class(case):
    with pf.applied(type_of(case)):
        by_class = build(case)
        expected = {"loss": loss_of(by_class, batch()).numpy(), **gradients(by_class)}
    by_instance = build(case)
    pf.apply(by_instance)
    assert_same_bits({"loss": loss_of(by_instance, batch()).numpy(), **gradients(by_instance)}, expected)


def logits(model) -> np.ndarray:
    with paddle.no_grad():
        return model(input_ids=batch(), return_dict=True).logits.numpy()


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt_oss"])
def test_inference_gives_the_same_logits(case):
    model = build(case)
    model.eval()
    expected = logits(model)
    with pf.applied(model):
        np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5)


def test_inference_of_gpt_oss_gives_the_logits_of_training():
    model = build("gpt_oss")
    expected = logits(model)
    model.eval()
    # Here PaddleFormers reshapes weights [T, E] to [E, T] without transposing them.
    assert np.abs(logits(model) - expected).max() > 0.1
    with pf.applied(model):
        np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5)


@EACH
def test_recomputed_layers_give_the_same_gradients(case):
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with pf.applied(type_of(case)):
        expected = gradients(build(case))
        model = build(case, **recompute)
        calls = count_calls(model.model.layers[1].mlp)
        found = gradients(model)
    assert calls == [2]
    assert_close(found, expected, tolerance=1e-6)
