# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's checks fail for every fault that they look for, however small, and set its exit status."""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import paddle
import pytest

from examples.demo import checks, data, plot, purpose, run, training
from paddle_moe_ops import moe_permute, moe_unpermute
from paddle_moe_ops.bench.decoder import Decoder, ModelConfig
from paddle_moe_ops.nn import MoELayer

CONFIG = ModelConfig(hidden=64, layers=2, experts=4, topk=2, context=16)
PARAMETERS = [name for name, _ in Decoder(CONFIG).named_parameters()]
TOO_MUCH, LITTLE_ENOUGH = 1.5, 0.5
ERRORS = pytest.mark.parametrize(
    ("parts", "passed"), [(LITTLE_ENOUGH, True), (TOO_MUCH, False), (-TOO_MUCH, False), (float("nan"), False)]
)


@pytest.fixture
def model():
    paddle.seed(3)
    return Decoder(CONFIG)


@pytest.fixture
def tokens():
    return paddle.to_tensor(np.random.default_rng(0).integers(0, 256, (2, 17)))


def change_first_gradient(parameter, change):
    """Changes the next gradient that a parameter gets, and no later one."""
    changes = iter([change])

    def hook(gradient):
        return next(changes, lambda same: same)(gradient)

    return parameter.register_hook(hook)


def further_from_zero(parts):
    """Return a change that moves a gradient's largest element by ``parts`` tolerances of the dense check."""

    def change(gradient):
        largest = gradient.abs() == gradient.abs().max()
        return gradient + gradient * largest.astype(gradient.dtype) * parts * checks.DENSE_TOLERANCE

    return change


def test_dense_check_passes_for_the_layer_and_covers_every_parameter(model, tokens):
    check = checks.dense_check(model, tokens)
    assert check.passed
    assert check.parameters == len(model.parameters())
    assert max(check.loss, check.relative) < 0.25 * checks.DENSE_TOLERANCE
    assert 0 < check.gradient < 1e-5
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert not model.moe_layers[0].router._forward_post_hooks


@pytest.mark.parametrize("name", PARAMETERS)
def test_dense_check_tells_a_gradient_beyond_its_tolerance(name, model, tokens):
    parameter = dict(model.named_parameters())[name]
    hook = change_first_gradient(parameter, further_from_zero(LITTLE_ENOUGH))
    assert checks.dense_check(model, tokens).passed
    hook.remove()
    largest = []
    change_first_gradient(parameter, lambda g: largest.append(float(g.abs().max())) or further_from_zero(TOO_MUCH)(g))
    check = checks.dense_check(model, tokens)
    assert not check.passed
    assert check.worst == name
    assert check.gradient > 0.7 * TOO_MUCH * checks.DENSE_TOLERANCE * largest[0]
    assert check.relative == pytest.approx(TOO_MUCH * checks.DENSE_TOLERANCE, rel=0.25)


@pytest.mark.parametrize("name", PARAMETERS)
def test_dense_check_fails_for_a_gradient_that_is_no_number(name, model, tokens):
    change_first_gradient(dict(model.named_parameters())[name], lambda gradient: gradient * float("nan"))
    check = checks.dense_check(model, tokens)
    assert not check.passed
    assert check.worst == name


@pytest.mark.parametrize("name", PARAMETERS)
def test_dense_check_fails_for_a_missing_gradient(name, model, tokens, monkeypatch):
    parameter, loss = dict(model.named_parameters())[name], model.loss
    missing = iter((True, False))

    def without_one(*arguments):
        parameter.stop_gradient = next(missing)
        return loss(*arguments)

    monkeypatch.setattr(model, "loss", without_one)
    check = checks.dense_check(model, tokens)
    assert not check.passed
    assert check.worst == name
    assert np.isnan(check.relative)


def test_dense_check_fails_for_a_parameter_that_no_step_reaches(model, tokens):
    model.unused = model.create_parameter([3])
    check = checks.dense_check(model, tokens)
    assert not check.passed
    assert (check.parameters, check.worst) == (len(PARAMETERS) + 1, "unused")


@ERRORS
def test_dense_check_tells_a_loss_beyond_its_tolerance(parts, passed, model, tokens, monkeypatch):
    loss = model.loss

    def off(*arguments):
        monkeypatch.setattr(model, "loss", loss)
        return loss(*arguments) + parts * checks.DENSE_TOLERANCE

    monkeypatch.setattr(model, "loss", off)
    check = checks.dense_check(model, tokens)
    assert check.passed == passed
    assert check.relative < checks.DENSE_TOLERANCE


WRONG_LAYERS = {
    "rows_of_another_token": lambda layer, x: layer(x.roll(1, axis=0)),
    "wrong_weights": lambda layer, x: layer(x) * 1.001,
    "no_gradient_to_tokens": lambda layer, x: layer(x.detach()),
    "nan": lambda layer, x: layer(x) * float("nan"),
}


@pytest.mark.parametrize("wrong", WRONG_LAYERS.values(), ids=WRONG_LAYERS.keys())
def test_dense_check_fails_for_a_wrong_layer(model, tokens, wrong):
    assert not checks.dense_check(model, tokens, wrong).passed


def test_the_dense_form_is_every_chosen_expert_weighted_by_its_score(rng):
    """One token at a time, with experts that the router did not choose, a factor, and no shared experts."""
    layer = MoELayer(8, 6, 5, 2, num_shared_experts=0, scaling_factor=2.5)
    x, ids = rng.standard_normal((1, 7, 8)).astype(np.float32), np.stack([rng.permutation(5)[:2] for _ in range(7)])
    router, gate_up, down = (each.numpy() for each in (layer.router.weight, layer.experts.gate_up, layer.experts.down))
    expected = np.zeros_like(x)
    for token in range(7):
        scores = np.exp(x[0, token] @ router)[ids[token]]
        for expert, weight in zip(ids[token], 2.5 * scores / scores.sum(), strict=True):
            gate, up = np.split(x[0, token] @ gate_up[expert], 2)
            expected[0, token] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    out = checks.dense_moe(layer, paddle.to_tensor(x), paddle.to_tensor(ids.astype(np.int32)))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-5)


SIZES = purpose.Sizes("a model", hidden=64, experts=4, topk=2)


@pytest.fixture
def few_turns(monkeypatch):
    monkeypatch.setattr(checks, "TURNS", 1)


@ERRORS
def test_the_check_of_rows_tells_outputs_beyond_its_tolerance(parts, passed, few_turns, monkeypatch):
    error, move = parts * checks.PLAIN_TOLERANCE, checks._move

    def off(*arguments):
        change = np.zeros([64, SIZES.hidden], np.float32)
        change[32, -1] = error
        return move(*arguments) + paddle.to_tensor(change)

    monkeypatch.setattr(checks, "_move", off)
    speed = checks.speed_of_moving(SIZES, 64)
    assert speed.passed == passed
    assert speed.difference == pytest.approx(abs(error), rel=0.25, nan_ok=True)


def change_element(outputs, which, change):
    """The first output of an operator, or another one, with another element in the middle."""
    array = outputs[which].numpy().copy()
    place = tuple(size // 2 for size in array.shape)
    array[place] = change(array[place])
    return (*outputs[:which], paddle.to_tensor(array, stop_gradient=False), *outputs[which + 1 :])


@pytest.mark.parametrize(
    ("operator", "which"),
    [("moe_permute", 0), ("moe_permute", 2), ("moe_unpermute", 0)],
    ids=["row", "weight", "sum"],
)
@pytest.mark.parametrize("change", [lambda x: x + 0.01, lambda _: np.nan], ids=["wrong", "nan"])
def test_the_check_of_rows_fails_for_wrong_ones(operator, which, change, few_turns, monkeypatch):
    right = {"moe_permute": moe_permute, "moe_unpermute": moe_unpermute}[operator]
    wrong = lambda *some, **named: change_element(right(*some, **named), which, change)  # noqa: E731
    monkeypatch.setattr(checks, operator, wrong)
    assert not checks.speed_of_moving(SIZES, 64).passed


def test_the_least_time_counts_after_a_turn_to_warm_up(monkeypatch):
    monkeypatch.setattr(checks, "TURNS", 3)
    started, times = [], {"_move": [300.0, 900.0, 400.0], "_plain_move": [4e3, 9e3, 5e3]}
    left = {name: iter([0.5, *each]) for name, each in times.items()}
    for name in times:
        right = getattr(checks, name)
        monkeypatch.setattr(checks, name, lambda *given, right=right, name=name: started.append(name) or right(*given))

    def milliseconds(run, leaves):
        run()
        return next(left[started[-1]])

    monkeypatch.setattr(checks, "_milliseconds", milliseconds)
    speed = checks.speed_of_moving(SIZES, 64)
    assert (speed.ours, speed.plain) == (300.0, 4000.0)
    assert [next(each, None) for each in left.values()] == [None] * 2


def test_both_ways_run_backward_to_tokens_and_probabilities(few_turns, monkeypatch):
    reached = []

    def milliseconds(run, leaves):
        run().sum().backward()
        reached.append([leaf.grad is not None and bool(leaf.grad.any()) for leaf in leaves])
        for leaf in leaves:
            leaf.clear_gradient()
        return 1.0

    monkeypatch.setattr(checks, "_milliseconds", milliseconds)
    checks.speed_of_moving(SIZES, 64)
    assert reached == [[True, True]] * 4


def test_a_timed_run_goes_forward_and_backward_and_leaves_no_gradient():
    leaf = paddle.ones([3])
    leaf.stop_gradient = False
    seen = []
    leaf.register_hook(lambda gradient: seen.append(gradient.tolist()))
    assert checks._milliseconds(lambda: leaf * 2, [leaf]) > 0
    assert seen == [[2.0] * 3]
    assert leaf.grad is None or not leaf.grad.any()


# The exit status: each check alone can make it 1.

TEXT = np.arange(1000).astype(np.uint8)


@pytest.fixture
def demo(monkeypatch, tmp_path):
    """Runs the demo without training: with these losses before and after, and these checks passed or not.

    Returns the arguments of the checks and the picture, and the exit status.
    """

    def go(
        before=5.5, after=5.0, dense=True, speed=True, pair="runs; gradients: tokens and router", steps=1, **constants
    ):
        for name, value in constants.items():
            monkeypatch.setattr(run, name, value)
        held_out = (
            training.HeldOut(loss, np.ones((1, 4))) for loss in itertools.chain([before], itertools.repeat(after))
        )
        monkeypatch.setattr(training, "evaluate", lambda model, data: next(held_out))
        monkeypatch.setattr(
            training, "train", lambda *_: iter([training.Progress(step + 1, 5.2, 1.0) for step in range(steps)])
        )
        monkeypatch.setattr(run, "SAMPLE_BYTES", 1)
        monkeypatch.setattr(run, "load_standard_library", lambda: data.StandardLibrary(TEXT, TEXT, 9, 1))
        monkeypatch.setattr(plot, "draw", lambda path, *drawn: given.update(path=path, drawn=drawn))
        found = checks.DenseCheck(17, 1e-9, 1e-8, 1e-7, "norm.weight", dense)
        timed = checks.Speed(4.0, 10.0, 1e-6, speed)
        monkeypatch.setattr(checks, "dense_check", lambda model, tokens: given.update(tokens=tokens) or found)
        monkeypatch.setattr(
            checks, "speed_of_moving", lambda sizes, tokens: given.update(sizes=sizes, timed=tokens) or timed
        )
        monkeypatch.setattr(purpose, "our_pair", lambda: pair)
        sizes = {"experts": 4, "topk": 2, "hidden": 64, "layers": 2, "tokens": 77}
        return given, run.run(argparse.Namespace(steps=steps, out=tmp_path, threads=None, seed=0, **sizes))

    given = {}
    return go


def test_a_run_whose_checks_pass_ends_with_status_zero_and_says_what_they_found(demo, capsys, tmp_path):
    given, status = demo()
    assert status == 0
    assert given["tokens"].shape == [training.BATCH, run.CONTEXT + 1]
    assert (given["sizes"], given["timed"]) == (purpose.REAL, 77)
    losses, marks, load, title = given["drawn"]
    assert (given["path"], losses, marks) == (tmp_path / "demo.png", [5.2], [(0, 5.5), (1, 5.0)])
    np.testing.assert_array_equal(load, np.ones((1, 4)))
    text = capsys.readouterr().out
    assert text.startswith("what the package is for\n")
    assert f"\n{title}\n" in text
    assert (text.count("PASSED"), text.count("FAILED")) == (4, 0)
    for part in (
        "before 5.500 nats (7.935 bits) per byte",
        "after  5.000 nats (7.213 bits) per byte: PASSED",
        "loss differs by 1.0e-09, tolerance 2e-05",
        "gradients of all 17 parameters differ by at most 1.0e-08, and by 1.0e-07 of",
        "a parameter's largest (norm.weight), tolerance 2e-05: PASSED",
        "77 tokens of 2560 columns, each to 6 of 64 experts and back, with gradients",
        "4.0 ms; plain argsort, gather and index_add 10.0 ms (2.5 times as long); the least of 7 turns",
        "outputs differ by at most 1.0e-06, tolerance 1e-05: PASSED",
    ):
        assert part in text


def test_experts_without_tokens_are_counted_too():
    assert checks._count(paddle.to_tensor([[0, 1], [1, 0]]), 4) == [2, 2, 0, 0]


def test_the_last_step_is_measured_whatever_their_number(demo):
    given, _ = demo(steps=5, HELD_OUT_MARKS=3)
    _, marks, *_ = given["drawn"]
    assert [step for step, _ in marks] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    "failing",
    [
        {"after": 5.5},
        {"after": float("nan")},
        {"before": float("nan")},
        {"before": float("inf")},
        {"dense": False},
        {"speed": False},
        {"pair": "runs; gradients: tokens"},
    ],
    ids=str,
)
def test_one_check_that_fails_ends_the_run_with_status_one(failing, demo, capsys):
    assert demo(**failing)[1] == 1
    text = capsys.readouterr().out
    assert (text.count("PASSED"), text.count("FAILED")) == (3, 1)


# The demo's first section.


def test_a_pair_is_said_to_run_by_the_gradients_that_arrive():
    assert purpose.our_pair() == "runs; gradients: tokens and router"

    def without_gradients(x, *rest, **named):
        return moe_permute(x.detach(), *rest, **named)

    assert purpose.what_happens(without_gradients, moe_unpermute) == "runs; gradients: router"


def test_a_pair_that_raises_is_shown_with_the_first_line_of_its_error():
    def broken(*_):
        raise RuntimeError("\nno kernel\nsecond line")

    assert purpose.what_happens(broken, moe_unpermute) == "RuntimeError: no kernel"
    assert "not registered" in purpose.paddles_pair()
