# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A decoder that is served token by token, as examples/serve_ernie45_moe.py does it."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from examples.serve_ernie45_moe import FORMATS, Server, Sizes, new_model, seconds_per_step

pytestmark = pytest.mark.compiled_only

SIZES = Sizes(hidden=128, inner=160, experts=6, topk=2, heads=6, kv_heads=2, head=16, vocabulary=131)
LENGTH, PROMPT, BATCH = 11, 4, 3


def prompt_of(batch=BATCH):
    return paddle.to_tensor(np.random.default_rng(5).integers(0, SIZES.vocabulary, [PROMPT, batch]))


def served(format, batch=BATCH):
    """A server whose sequences are full, and the logits of its steps."""
    server = Server(new_model(SIZES, format), batch, LENGTH)
    server.start(prompt_of(batch))
    logits = [server.step().astype("float32").numpy() for _ in range(LENGTH - PROMPT - 1)]
    return server, np.stack(logits, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_token_by_token_has_the_logits_of_the_whole_sequences(format):
    server, logits = served(format)
    tokens = server.tokens.clone()
    assert np.array_equal(tokens[:PROMPT].numpy(), prompt_of().numpy())
    whole = Server(server.model, BATCH, LENGTH + 1).start(tokens).astype("float32").numpy()[:, PROMPT:-1]
    is_narrow = server.model.embedding.weight.dtype == paddle.bfloat16
    np.testing.assert_allclose(logits, whole, atol=0.1 if is_narrow else 1e-4)
    chosen = tokens[PROMPT + 1 :].numpy().T
    assert np.array_equal(chosen, logits.argmax(-1))


def test_a_server_starts_again_with_the_same_bits():
    server, _ = served("int8")
    state = server.state()
    assert len(seconds_per_step(server, prompt_of(), server.step, rounds=2)) == 2
    for again, before in zip(server.state(), state, strict=True):
        np.testing.assert_array_equal(again, before)
