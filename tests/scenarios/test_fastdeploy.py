# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The calls that FastDeploy makes with FD_USE_PHI_MOE_PERMUTE=1, under patch_paddle.

Tokens come from other ranks with the ids of the experts here, -1 for those elsewhere. The buffer has a size that is
known beforehand; a grouped product reads the expert of each row, and passes over rows of -1.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import patched_paddle, quantize_1x128
from paddle_moe_ops.backends.arrays import to_numpy
from tests.ops.problems import tensor

T, H, OUT, E, K, ALIGNMENT = 37, 200, 24, 5, 4, 128
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle():
        yield


class Received:
    """A rank's tokens after the dispatch: some have one expert here, one has none, one expert has no token."""

    def __init__(self, rng, place) -> None:
        ids = np.argsort(rng.random((T, E - 1)), axis=1)[:, :K].astype(np.int32)
        ids[rng.random((T, K)) < 0.5] = -1
        ids[3], ids[4] = -1, [-1, 2, -1, -1]
        self.ids, self.weights = ids, rng.random((T, K)).astype(np.float32)
        self.x = rng.standard_normal((T, H)).astype(np.float32).astype(BFLOAT16)
        self.experts = (rng.standard_normal((E, H, OUT)) / 8).astype(np.float32)
        self.place = place

    def num_padded(self):
        counts = np.bincount(self.ids[self.ids >= 0], minlength=E)
        return int((-(-counts // ALIGNMENT) * ALIGNMENT).sum())

    def permute(self, x, scale, buffer_size, using_ue8m0_scale=False):
        rows, rowmap, weights, scales, experts = paddle.nn.functional.moe_permute(
            hidden_states=x,
            scale=scale,
            expert_routemap_topk=tensor(self.ids.astype(np.int64), self.place).astype(paddle.int32),
            expert_prob_topk=tensor(self.weights, self.place),
            num_experts=E,
            tokens_per_expert=[],
            padding_alignment=ALIGNMENT,
            return_expert_indices=True,
            override_buffer_size=buffer_size,
            using_ue8m0_scale=using_ue8m0_scale,
        )
        assert rows.shape == [buffer_size, H]
        assert experts.shape == [buffer_size]
        return rows, rowmap, weights, scales, experts

    def unpermute(self, rows, rowmap, weights, weighted):
        out, slot_weights = paddle.nn.functional.moe_unpermute(
            hidden_states_unzipped=tensor(rows, self.place),
            zipped_expertwise_rowmap=rowmap,
            expert_routemap_topk=tensor(self.ids, self.place),
            token_prob_unzipped=weights,
            total_zipped_tokens=T,
            num_experts=E,
            using_weighted_combine=weighted,
        )
        np.testing.assert_array_equal(slot_weights.numpy(), np.where(self.ids >= 0, self.weights, 0))
        return to_numpy(out).astype(np.float32)

    def grouped_product(self, rows, experts):
        """Rows times the matrix of their expert, rounded; what is in the rows of -1 afterwards is anything."""
        out = np.full((len(rows), OUT), 7, np.float32)
        for expert in range(E):
            out[experts == expert] = rows[experts == expert] @ self.experts[expert]
        return out.astype(BFLOAT16)

    def dense(self, x, weighted):
        """The sums over all experts of a token. Paddle does not weight a token with exactly one row."""
        every = np.einsum("th,eho->teo", x, self.experts).astype(BFLOAT16).astype(np.float32)
        out = np.zeros((T, OUT), np.float32)
        for token, slots in enumerate(self.ids):
            here = np.flatnonzero(slots >= 0)
            for slot in here:
                weight = self.weights[token, slot] if weighted and len(here) > 1 else 1
                out[token] += weight * every[token, slots[slot]]
        return out


@pytest.fixture
def received(rng, place):
    return Received(rng, place)


def assert_close(got, expected):
    # Products of 200 terms of either order are rounded to bfloat16 before and after they are summed.
    np.testing.assert_allclose(got, expected, rtol=2.0**-7, atol=2.0**-6)


BUFFERS = {0: "a buffer of just the right size", 300: "a buffer with room left"}
buffers = pytest.mark.parametrize("room", BUFFERS, ids=BUFFERS.values())


@buffers
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "weighted in advance"])
def test_bfloat16_experts(weighted, room, received):
    size = received.num_padded() + room
    rows, rowmap, weights, scales, experts = received.permute(tensor(received.x, received.place), None, size)
    assert scales.numel() == 0
    experts = experts.numpy()
    assert (
        np.bincount(experts[experts >= 0], minlength=E) == np.bincount(received.ids[received.ids >= 0], minlength=E)
    ).all()
    assert not to_numpy(rows)[experts < 0].any()
    out = received.grouped_product(to_numpy(rows).astype(np.float32), experts)
    if weighted:
        expected = received.dense(received.x.astype(np.float32), True)
    else:  # the experts multiply each row by its weight
        out = (out.astype(np.float32) * weights.numpy().reshape(-1, 1)).astype(BFLOAT16)
        every = np.einsum("th,eho->teo", received.x.astype(np.float32), received.experts)
        chosen = np.eye(E + 1, dtype=np.float32)[received.ids][..., :E]
        expected = np.einsum("tk,tke,teo->to", received.weights, chosen, every)
    assert_close(received.unpermute(out, rowmap, weights, weighted), expected)


@buffers
@pytest.mark.parametrize("ue8m0", [False, True], ids=["float32 scales", "ue8m0 scales"])
def test_float8_experts(ue8m0, room, received):
    codes, scale = quantize_1x128(tensor(received.x, received.place), ue8m0=ue8m0)
    assert scale.dtype == (paddle.int32 if ue8m0 else paddle.float32)
    arguments = codes, scale, received.num_padded() + room, ue8m0
    rows, rowmap, weights, scales, experts = received.permute(*arguments)
    assert scales.dtype == scale.dtype
    values, experts = dequantized(rows, scales, ue8m0), experts.numpy()
    assert not values[experts < 0].any()
    out = received.grouped_product(values, experts)
    expected = received.dense(dequantized(codes, scale, ue8m0), True)
    assert_close(received.unpermute(out, rowmap, weights, True), expected)


def dequantized(codes, scales, ue8m0):
    """Codes times scales, which are one float32, or one byte of an int32, for 128 columns."""
    factors = scales.numpy()
    if ue8m0:
        exponents = np.ascontiguousarray(factors).view(np.uint8)
        factors = np.where(exponents > 0, np.exp2(exponents.astype(np.float32) - 127), 0)
    return to_numpy(codes).astype(np.float32) * np.repeat(factors, 128, axis=1)[:, :H]


def test_a_rank_without_any_token_of_its_own(received):
    received.ids[:] = -1
    rows, rowmap, weights, _, experts = received.permute(tensor(received.x, received.place), None, ALIGNMENT)
    assert not to_numpy(rows).any()
    assert (experts.numpy() == -1).all()
    out = received.unpermute(np.full((ALIGNMENT, OUT), 7, BFLOAT16), rowmap, weights, True)
    assert not out.any()
