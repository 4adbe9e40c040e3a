# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The example that Paddle documents for moe_permute and moe_unpermute: its inputs, its calls, its expectation.

Three tokens, eight slots, three experts, alignment 2. Tokens 1 and 2 go to expert 1, token 0 to experts 0 and 2.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_permute, moe_unpermute, patched_paddle, reference
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.testing.equality import assert_all_bits_equal, assert_bits_equal
from tests.ops.problems import every_kind, tensor

ROUTEMAP = np.array(
    [[-1, 0, -1, -1, 2, -1, -1, -1], [1, -1, -1, -1, -1, -1, -1, -1], [-1, -1, -1, -1, -1, -1, 1, -1]], np.int32
)
PROBS = np.array(
    [[0.0, 0.6, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0], [1.0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1.0, 0]], np.float32
)
NUM_EXPERTS, TOKENS_PER_EXPERT, ALIGNMENT = 3, [1, 2, 1], 2
NAMES = ("hidden_states_unzipped", "zipped_expertwise_rowmap", "token_prob_unzipped", "scale_unzipped")


class Example:
    """The example's permuted tensors."""

    def __init__(self, rng, place):
        self.x = rng.standard_normal((3, 128)).astype(ml_dtypes.bfloat16)
        self.hidden_states = tensor(self.x, place)
        self.ids, self.probs = tensor(ROUTEMAP, place), tensor(PROBS, place)
        self.permuted = moe_permute(
            self.hidden_states, None, self.ids, self.probs, NUM_EXPERTS, TOKENS_PER_EXPERT, ALIGNMENT
        )


@pytest.fixture
def example(rng, place, backend) -> Example:
    return Example(rng, place)


def assert_within_one_ulp(actual, expected):
    """Same sign, and bit patterns of bfloat16 that are neighbours at most."""
    got, wanted = (to_numpy(value).view(np.int16).astype(np.int32) for value in (actual, expected))
    assert np.abs(got - wanted).max() <= 1


def test_shapes_dtypes_and_maps(example):
    shapes = [(output.shape, output.dtype) for output in example.permuted]
    assert shapes == [
        ([6, 128], paddle.bfloat16),
        ([3, 3], paddle.int32),
        ([6], paddle.float32),
        ([0], paddle.float32),
    ]
    np.testing.assert_array_equal(example.permuted[1].numpy(), [[0, -1, 4], [-1, 2, -1], [-1, 3, -1]])
    np.testing.assert_array_equal(example.permuted[2].numpy(), np.float32([0.6, 0, 1, 1, 0.4, 0]))


def test_rows_are_the_tokens_and_padding_is_zero(example):
    rows = to_numpy(example.permuted[0])
    for row, token in enumerate([0, None, 1, 2, 0, None]):
        assert_bits_equal(rows[row], np.zeros(128, rows.dtype) if token is None else example.x[token])


def test_permute_equals_the_oracle(example):
    expected = reference.moe_permute(example.x, None, ROUTEMAP, PROBS, NUM_EXPERTS, TOKENS_PER_EXPERT, ALIGNMENT)
    assert_all_bits_equal(example.permuted, expected, NAMES)


def test_the_documented_round_trip(example):
    """As documented: weight the rows by their probabilities, unpermute, find the tokens again."""
    unzipped, rowmap, token_prob, _ = example.permuted
    weighted = (unzipped.astype("float32") * token_prob.astype("float32").unsqueeze(-1)).astype("bfloat16")
    zipped_tokens, zipped_probs = moe_unpermute(weighted, rowmap, example.ids, token_prob, 3, 3)
    assert zipped_tokens.shape == [3, 128]
    assert_bits_equal(zipped_tokens[1:], example.x[1:])
    # Two rows are each rounded to bfloat16 before they are added: 0.6 x + 0.4 x is x or its neighbour.
    assert_within_one_ulp(zipped_tokens[0], example.hidden_states[0])
    expected = reference.moe_unpermute(to_numpy(weighted), rowmap.numpy(), ROUTEMAP, token_prob.numpy(), 3, NUM_EXPERTS)
    assert_all_bits_equal([zipped_tokens, zipped_probs], expected, ["tokens", "probabilities"])
    assert_bits_equal(zipped_probs, PROBS)


def test_the_weighted_combine_gives_the_tokens_back(example):
    """The same in one call: the sum is rounded once, so 0.6 x + 0.4 x is within one unit in the last place of x."""
    unzipped, rowmap, token_prob, _ = example.permuted
    arguments = (unzipped, rowmap, example.ids, token_prob, 3, NUM_EXPERTS)
    for compat in (None, "paddle"):
        tokens, _ = moe_unpermute(*arguments, using_weighted_combine=True, compat=compat)
        assert_bits_equal(tokens[1:], example.x[1:])
        assert_within_one_ulp(tokens[0], example.hidden_states[0])


def test_the_plain_sum_counts_the_experts(example):
    unzipped, rowmap, token_prob, _ = example.permuted
    tokens, _ = moe_unpermute(unzipped, rowmap, example.ids, token_prob, 3, NUM_EXPERTS)
    assert_bits_equal(tokens[1:], example.x[1:])
    assert_bits_equal(tokens[0], (2 * example.x[0].astype(np.float32)).astype(ml_dtypes.bfloat16))


def test_counts_as_paddles_own_test_passes_them(example, place):
    counts = list(tensor(np.array(TOKENS_PER_EXPERT, np.int32), place))
    outputs = moe_permute(example.hidden_states, None, example.ids, example.probs, 3, counts, 2)
    assert_all_bits_equal(outputs, example.permuted, NAMES)


def test_a_top_1_routing_gives_every_bit_back(rng, place, backend):
    x = every_kind(rng, (64, 48), ml_dtypes.bfloat16)
    ids = rng.integers(0, 5, (64, 1), dtype=np.int32)
    probs = tensor(rng.random((64, 1), np.float32), place)
    unzipped, rowmap, token_prob, _ = moe_permute(tensor(x, place), None, tensor(ids, place), probs, 5, None, 16)
    tokens, zipped_probs = moe_unpermute(unzipped, rowmap, tensor(ids, place), token_prob, 64, 5)
    np.testing.assert_array_equal(to_numpy(tokens).view(np.uint16), x.view(np.uint16))
    np.testing.assert_array_equal(zipped_probs.numpy(), probs.numpy())


@pytest.mark.parametrize("function", [paddle.nn.functional.moe_permute, paddle.nn.functional.moe_unpermute])
def test_the_example_in_paddles_docstring_runs_patched_but_for_its_last_line(function, place):
    lines = re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", function.__doc__, re.MULTILINE)
    assert lines[-1].startswith("np.testing.assert_allclose(zipped_tokens")
    names: dict = {}
    with patched_paddle():
        exec("\n".join(lines[:-1]), names)
    assert_within_one_ulp(names["zipped_tokens"], names["hidden_states"])
    assert_bits_equal(names["zipped_tokens"][1:], names["hidden_states"][1:])
    assert_bits_equal(names["zipped_probs"], names["expert_prob_topk"])
