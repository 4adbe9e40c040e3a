# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's model, its text, and how it is trained, measured and sampled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from examples.demo import data, training
from paddle_moe_ops.bench.decoder import Decoder, ModelConfig

CONFIG = ModelConfig(hidden=64, layers=3, experts=4, topk=2, context=16)
TEXT = np.random.default_rng(1).integers(0, 256, 500).astype(np.uint8)


@pytest.fixture
def model():
    paddle.seed(3)
    return Decoder(CONFIG)


@pytest.fixture
def tokens():
    return paddle.to_tensor(np.random.default_rng(0).integers(0, 256, (2, 17)))


def test_model_predicts_from_earlier_bytes_only(model, tokens):
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens[:, :16]).numpy(), model(changed[:, :16]).numpy()
    np.testing.assert_allclose(after[:, :9], before[:, :9], rtol=1e-4, atol=1e-5)
    assert (np.abs(after[:, 9:] - before[:, 9:]).max(axis=-1) > 1e-3).all()


def test_training_repeats_itself_for_a_seed():
    text = data.load_standard_library().train

    def losses(seed):
        paddle.seed(seed)
        rng = np.random.default_rng(seed)
        model = Decoder(ModelConfig(hidden=64, layers=2, experts=4, topk=2, context=16))
        return [state.loss for state in training.train(model, text, 3, rng)]

    # Paddle's own products may differ in the last bits from one run to the next.
    first, second, other = losses(5), losses(5), losses(6)
    assert first == pytest.approx(second, rel=1e-4)
    assert first != pytest.approx(other, rel=1e-3)


def test_a_sample_repeats_itself_for_a_seed(model):
    first, second, other = (training.sample(model, "def ", 8, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert first == second
    assert first != other


def test_text_is_split_by_file():
    text = data.load_standard_library()
    assert text.train_files > 8 * text.held_out_files > 0
    assert len(text.train) > len(text.held_out) > 10_000
    windows = data.even_windows(text.held_out, 5, 33)
    np.testing.assert_array_equal(windows[0], text.held_out[:33])
    np.testing.assert_array_equal(windows[-1], text.held_out[-33:])


def test_held_out_loss_is_the_mean_over_all_windows_and_the_load_counts_their_slots(model, monkeypatch):
    monkeypatch.setattr(training, "HELD_OUT_WINDOWS", 8)
    windows = data.even_windows(TEXT, 8, CONFIG.context + 1)
    chosen = {layer: [] for layer in model.moe_layers}
    for layer, ids in chosen.items():
        layer.router.register_forward_post_hook(lambda _layer, _inputs, output, ids=ids: ids.append(output.ids))
    graphs, loss = [], model.loss
    monkeypatch.setattr(model, "loss", lambda batch: graphs.append(loss(batch)) or graphs[-1])
    held_out = training.evaluate(model, TEXT)
    assert [each.stop_gradient for each in graphs] == [True] * (8 // training.BATCH)
    expected = [np.bincount(np.concatenate(ids).ravel(), minlength=CONFIG.experts) for ids in chosen.values()]
    np.testing.assert_array_equal(held_out.load, expected)
    assert held_out.load.sum(axis=1).tolist() == [8 * CONFIG.context * CONFIG.topk] * 2
    assert held_out.loss == pytest.approx(float(loss(paddle.to_tensor(windows))), rel=1e-5)


def test_every_step_learns_from_its_own_gradient_alone(model, monkeypatch, rng):
    rates, AdamW = [], paddle.optimizer.AdamW

    class Watched(AdamW):
        def set_lr(self, value):
            rates.append(value)
            super().set_lr(value)

    monkeypatch.setattr(paddle.optimizer, "AdamW", Watched)
    before = {name: each.numpy().copy() for name, each in model.named_parameters()}
    states = []
    for state in training.train(model, TEXT, 3, rng):
        states.append(state)
        assert all(each.grad is None or not each.grad.any() for each in model.parameters())
        load = model.moe_layers[-1].tokens_per_expert
        bias = model.moe_layers[-1].router.correction_bias.numpy()
        if len(states) == 1:
            np.testing.assert_allclose(bias, training.BIAS_RATE * np.sign(np.mean(load) - load), rtol=1e-5)
    assert [state.step for state in states] == [1, 2, 3]
    assert all(state.tokens_per_second > 0 for state in states)
    assert states[0].loss == pytest.approx(np.log(256), rel=0.05)
    assert all((each.numpy() != before[name]).any() for name, each in model.named_parameters())
    np.testing.assert_allclose(rates, 3e-3 * 2**0.5 * np.array([1.0, 1.0, 0.525]))


def test_learning_rate_rises_in_a_tenth_of_the_steps_and_falls_to_a_twentieth():
    def schedule(steps):
        return [training._schedule(step, steps) for step in range(steps)]

    assert schedule(1) == [1.0]
    np.testing.assert_allclose(schedule(10)[:3], [0.5, 1.0, 1.0])
    assert schedule(10)[6] == pytest.approx(0.525)
    rates = schedule(1000)
    np.testing.assert_allclose(rates[:30], np.arange(1, 31) / 30)
    assert rates[30] == 1.0
    assert (np.diff(rates[30:]) < 0).all()
    assert rates[-1] == pytest.approx(0.05, abs=1e-4)


class Fixed:
    """A model that gives byte b + 1 after b, and keeps the windows that it was shown."""

    def __init__(self, logits=None):
        self.config = SimpleNamespace(context=4)
        self.logits = logits
        self.windows = []

    def __call__(self, window):
        self.windows.append(window.tolist()[0])
        logits = np.zeros(256, np.float32) if self.logits is None else self.logits
        if self.logits is None:
            logits[(self.windows[-1][-1] + 1) % 256] = 100
        return paddle.to_tensor(np.broadcast_to(logits, (1, len(self.windows[-1]), 256)))


def test_a_sample_continues_the_prompt_from_the_last_bytes_of_the_context(rng):
    model = Fixed()
    assert training.sample(model, "abc", 5, rng) == "abcdefgh"
    assert model.windows == [list(each.encode()) for each in ("abc", "abcd", "bcde", "cdef", "defg")]


def test_a_sample_shows_no_control_characters(rng):
    assert training.sample(Fixed(), "\x07", 4, rng) == "\ufffd\ufffd\ufffd\n\ufffd"


def test_a_sample_is_drawn_at_its_temperature(rng):
    logits = np.full(256, -1e9, np.float32)
    logits[[97, 98]] = 1000, 1000 + training.TEMPERATURE * np.log(9)  # whose exponentials are infinite
    text = training.sample(Fixed(logits), "a", 600, rng)[1:]
    assert set(text) == {"a", "b"}
    assert 0.86 < text.count("b") / 600 < 0.94


@pytest.mark.parametrize(("asked", "cores", "threads"), [(None, 3, 3), (2, 3, 2), (None, 64, 4), (9, 3, 9)])
def test_matrix_products_use_several_cores_and_not_too_many(asked, cores, threads, monkeypatch):
    given = []
    monkeypatch.setattr(training, "usable_cores", lambda: cores)
    monkeypatch.setattr(paddle.base.core, "set_num_threads", given.append)
    training.use_threads(asked)
    assert given == [threads]


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 5),
        ("max 100000", 5),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("900000 100000", 5),
    ],
)
def test_usable_cores_are_those_of_the_process_within_its_quota(quota, cores, monkeypatch, tmp_path):
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(training, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(training.os, "sched_getaffinity", lambda process: {0, 2, 3, 5, 7})
    assert training.usable_cores() == cores
