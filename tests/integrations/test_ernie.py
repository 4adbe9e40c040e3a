# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of the ERNIE-4.5-MoE block alone: a correction bias, counts of its experts' use, losses of the router."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import paddle
import pytest

import paddle_moe_ops.integrations.paddleformers as pf
from paddle_moe_ops.integrations.paddleformers import ernie
from paddle_moe_ops.integrations.paddleformers.experts import run_modules

from .models import assert_close, batch, build, count_calls, gradients, loss_of, train

CASE = "ernie4_5_moe"
TYPE = "ernie4_5_moe"
HIDDEN = 48


def block_of(rng: np.random.Generator, **changes: Any) -> Any:
    """A block whose correction bias, if it has one, decides which experts are chosen."""
    block = build(CASE, **changes).model.layers[1].mlp
    if block.use_correction_bias:
        bias = block.moe_statics.e_score_correction_bias
        bias.set_value(paddle.to_tensor(rng.uniform(-0.1, 0.1, bias.shape), "float32"))
    return block


def run(block: Any, rng: np.random.Generator, shape: tuple[int, int] = (2, 33)) -> dict[str, Any]:
    """The four results, the gradients of a sum of all, and the counts."""
    x = paddle.to_tensor(rng.standard_normal((*shape, HIDDEN)), "float32", stop_gradient=False)
    results = block(x)
    assert [list(each.shape) for each in results[:1]] == [list(x.shape)]
    total = sum((each * paddle.to_tensor(rng.standard_normal(each.shape), "float32")).sum() for each in results)
    total.backward()
    found: dict[str, Any] = {name: None if p.grad is None else p.grad.numpy() for name, p in block.named_parameters()}
    block.clear_gradients(set_to_zero=False)
    found |= dict(zip(("out", "weights", "loss", "logits"), (each.detach().numpy() for each in results), strict=True))
    return {**found, "x": x.grad.numpy()}


def usage(model: Any) -> list[list[int]]:
    """The counts of each layer."""
    layers = model.sublayers(include_self=True)
    return [layer.moe_statics.expert_usage[0].tolist() for layer in layers if hasattr(layer, "moe_statics")]


SETTINGS = [
    {"scoring_func": score, "moe_norm_gate_logits": norm, "moe_use_aux_free": bias}
    for score, norm, bias in itertools.product(("softmax", "sigmoid"), (True, False), (True, False))
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: "-".join(map(str, each.values())))
@pytest.mark.parametrize("shape", [(2, 33), (1, 1)], ids=["many", "one-token"])
def test_all_results_gradients_and_counts_are_the_same(settings, shape, rng):
    block = block_of(rng, **settings)
    state = rng.bit_generator.state
    expected = run(block, rng, shape)
    counted = usage(block) if block.use_correction_bias else None
    rng.bit_generator.state = state
    with pf.applied(block):
        assert_close(run(block, rng, shape), expected)
    if counted is not None:
        assert sum(counted[0]) == shape[0] * shape[1] * 3
        assert usage(block) == [[2 * count for count in counted[0]]]


@pytest.mark.parametrize(
    "settings",
    [
        {"router_aux_loss_coef": 0.0},
        {"router_z_loss_coef": 0.0},
        {"moe_orthogonal_loss_lambda": 0.0},
        {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.25, "moe_orthogonal_loss_lambda": 0.125},
        {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0, "moe_orthogonal_loss_lambda": 0.0},
        {"moe_num_shared_experts": 0},
    ],
    ids=lambda each: "-".join(f"{key}={value}" for key, value in each.items()),
)
def test_each_loss_of_the_router_is_the_same(settings, rng):
    block = block_of(rng, **settings)
    state = rng.bit_generator.state
    expected = run(block, rng)
    rng.bit_generator.state = state
    with pf.applied(block):
        assert_close(run(block, rng), expected)


def test_training_counts_the_use_of_experts_as_before():
    plain = build(CASE)
    train(plain, 3)
    with pf.applied(TYPE):
        patched = build(CASE)
        train(patched, 3)
    assert usage(patched) == usage(plain)
    assert usage(plain)[0] != usage(plain)[1]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize("recompute", [FULL, SELECTIVE], ids=["full", "selective"])
@pytest.mark.parametrize("hook", [False, True], ids=["as-lists", "called"])
def test_recomputation_counts_once_and_gives_the_same_gradients(recompute, hook, monkeypatch):
    runs: list[None] = []

    def counted(*arguments, **keywords):
        runs.append(None)
        return run_modules(*arguments, **keywords)

    monkeypatch.setattr(ernie, "run_modules", counted)
    with pf.applied(TYPE):
        once, repeated = build(CASE), build(CASE, **recompute)
        calls = count_calls(repeated.model.layers[1].mlp.experts[0]) if hook else [2]
        if hook:
            count_calls(once.model.layers[1].mlp.experts[0])
        expected = gradients(once)
        assert len(runs) == 2  # one for each of the two layers with experts
        assert_close(gradients(repeated), expected, tolerance=1e-6)
        assert len(runs) == 2 + 4
    assert calls == [2]
    assert usage(repeated) == usage(once)


def test_recomputation_through_hooks_counts_once(rng):
    block = block_of(rng)
    pf.apply(block)
    x = paddle.to_tensor(rng.standard_normal((1, 9, HIDDEN)), "float32", stop_gradient=False)
    out = paddle.distributed.fleet.utils.recompute(block, x, use_reentrant=False)[0]
    out.sum().backward()
    assert sum(usage(block)[0]) == 27


def test_evaluation_without_gradients_counts_as_before(rng):
    plain, patched = block_of(rng), block_of(rng)
    patched.set_state_dict(plain.state_dict())
    pf.apply(patched)
    x = paddle.to_tensor(rng.standard_normal((1, 9, HIDDEN)), "float32")
    for block in (plain, patched):
        block.eval()
    with paddle.no_grad():
        np.testing.assert_allclose(patched(x)[0].numpy(), plain(x)[0].numpy(), rtol=0, atol=1e-6)
    assert usage(patched) == usage(plain) != [[0] * 10]


def test_the_patched_model_needs_no_kernel_that_a_cpu_lacks(monkeypatch):
    model = build(CASE)
    monkeypatch.undo()  # the stand-ins
    with pytest.raises((RuntimeError, NameError)):
        loss_of(model, batch())
    with pf.applied(model):
        assert float(loss_of(model, batch())) < 10


def refused(model: Any, reason: str) -> None:
    block = model.model.layers[2].mlp
    with pytest.raises(ValueError, match=rf"layers\.2\.mlp \(Ernie4_5_MoeSparseMoeBlock\.forward\): {reason}"):
        pf.apply(model)
    assert not any("forward" in vars(layer) for layer in model.sublayers())
    with pf.applied(TYPE), pytest.raises(RuntimeError, match=rf"Ernie4_5_MoeSparseMoeBlock: {reason}"):
        block(paddle.zeros([1, 4, HIDDEN]))


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"multimodal_experts": True}, "it has experts of several modalities"),
        ({"gate.use_multimodel_experts": True}, "it has experts of several modalities"),
        ({"group_experts": True}, "moe_group_experts is set"),
        ({"all_to_all_dropout": 0.25}, r"moe_all_to_all_dropout is 0\.25"),
        ({"gate.use_token_type_bias": True}, "moe_use_token_type_bias is set"),
        ({"gate.cap": [64, 64, 9]}, r"moe_capacity \[64, 64, 9\] lets 10 experts drop tokens"),
        ({"output_postprocess": lambda x: x}, "it has an output_postprocess"),
        ({"config.tensor_model_parallel_size": 2}, "tensor_model_parallel_size is 2"),
        ({"config.sequence_parallel": True}, "sequence_parallel is set"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_block_that_cannot_be_run_is_refused(attributes, reason):
    model = build(CASE)
    block = model.model.layers[2].mlp
    if any(path.startswith("config.") for path in attributes):
        block.config = type(block.config)(**block.config.to_dict())  # else the layers share it
    for path, value in attributes.items():
        *owners, name = path.split(".")
        owner = block
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    refused(model, reason)


def test_the_ids_of_token_types_are_refused(rng):
    block = block_of(rng)
    pf.apply(block)
    with pytest.raises(RuntimeError, match="token_type_ids were given"):
        block(paddle.zeros([1, 4, HIDDEN]), paddle.zeros([1, 5], "int64"))
