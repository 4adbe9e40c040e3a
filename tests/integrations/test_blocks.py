# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A patched block alone gives the outputs and gradients that it gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

import paddle_moe_ops.integrations.paddleformers as pf

from .models import CASES, assert_close, build, count_calls, type_of

EACH = pytest.mark.parametrize("case", CASES)


def block_of(case: str, **changes: Any) -> Any:
    return build(case, **changes).model.layers[1].mlp


def outputs(block: Any, rng: np.random.Generator, shape: tuple[int, int], call=lambda block, x: block(x)):
    """Outputs of a block for random tokens, and the gradients of the tokens and its parameters."""
    x = paddle.to_tensor(rng.standard_normal((*shape, 48)), "float32", stop_gradient=False)
    weights = paddle.to_tensor(rng.standard_normal((*shape, 48)), "float32")
    out = call(block, x)
    out = out[0] if isinstance(out, tuple) else out
    assert out.shape == x.shape
    (out * weights).sum().backward()
    found = {name: None if p.grad is None else p.grad.numpy() for name, p in block.named_parameters()}
    block.clear_gradients(set_to_zero=False)
    return {"output": out.detach().numpy(), "tokens": x.grad.numpy(), **found}


@EACH
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 37)], ids=["one-token", "idle-experts", "many"])
def test_outputs_and_gradients(case, shape, rng):
    block, state = block_of(case), rng.bit_generator.state
    expected = outputs(block, rng, shape)
    rng.bit_generator.state = state
    with pf.applied(block):
        assert_close(outputs(block, rng, shape), expected)


@EACH
def test_a_block_recomputed_through_hooks_gives_the_same_gradients(case, rng):
    block, state = block_of(case), rng.bit_generator.state
    pf.apply(block)
    expected = outputs(block, rng, (2, 19))
    rng.bit_generator.state = state
    found = outputs(block, rng, (2, 19), lambda block, x: recompute(block, x, use_reentrant=False))
    assert_close(found, expected, tolerance=1e-6)


@EACH
def test_evaluation_leaves_no_graph_and_runs_no_idle_expert(case, rng):
    block, x = block_of(case), paddle.to_tensor(rng.standard_normal((2, 5, 48)), "float32")
    block.eval()
    pf.apply(block)
    calls = [count_calls(expert) for expert in block.experts] if isinstance(block.experts, paddle.nn.LayerList) else []
    with paddle.no_grad():
        out = block(x[:, :1])
    out = out[0] if isinstance(out, tuple) else out
    assert out.stop_gradient
    assert sum(map(sum, calls)) <= 6  # two tokens of three experts each; those without tokens do not run


# The routers of the other types fail.
@pytest.mark.parametrize("case", [case for case in CASES if type_of(case) in ("glm4_moe", "qwen2_moe", "qwen3_moe")])
def test_no_tokens(case):
    block = block_of(case)
    pf.apply(block)
    block.eval()
    out = block(paddle.zeros([1, 0, 48]))
    assert (out[0] if isinstance(out, tuple) else out).shape == [1, 0, 48]


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("-stacked")])
def test_stacked_experts_in_bfloat16_are_as_exact_as_bfloat16_is(case, rng):
    experts = block_of(case).experts
    x = paddle.to_tensor(rng.standard_normal((29, 48)), "float32")
    ids = paddle.to_tensor(rng.permuted(np.tile(np.arange(experts.num_experts), (29, 1)), axis=1)[:, :3])
    weights = paddle.to_tensor(rng.random((29, 3)), "float32")
    expected = experts(x, ids, weights).numpy()
    experts.to(dtype="bfloat16")
    with pf.applied(experts):
        found = experts(x.astype("bfloat16"), ids, weights.astype("bfloat16"))
    assert found.dtype == paddle.bfloat16
    np.testing.assert_allclose(found.astype("float32").numpy(), expected, rtol=0, atol=0.03 * np.abs(expected).max())
