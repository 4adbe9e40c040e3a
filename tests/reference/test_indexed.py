# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of the family with gather indices against loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paddle_moe_ops.reference import (
    get_routing_indices,
    permute_indexed,
    permute_indexed_backward,
    unpermute_indexed,
)

from .cases import EXAMPLES, ordinary_floats

IDS = hnp.arrays(np.int64, st.tuples(st.integers(0, 6), st.integers(1, 4)), elements=st.integers(-2, 5))


@EXAMPLES
@given(IDS)
def test_slots_are_appended_expert_by_expert(ids):
    counts, gather, scatter = get_routing_indices(ids, 4)
    flat = ids.reshape(-1).tolist()
    by_expert = [[slot for slot, expert in enumerate(flat) if expert == wanted] for wanted in range(4)]
    of_none = [slot for slot, expert in enumerate(flat) if expert not in range(4)]
    assert (counts.dtype, gather.dtype, scatter.dtype) == (ids.dtype, np.int32, np.int32)
    assert get_routing_indices(ids.astype(np.int32), 4)[0].dtype == np.int32
    assert counts.tolist() == [len(slots) for slots in by_expert]
    assert gather.tolist() == [slot for slots in [*by_expert, of_none] for slot in slots]
    assert [gather.tolist().index(slot) for slot in range(len(flat))] == scatter.tolist()


@EXAMPLES
@given(IDS)
def test_rows_are_tokens_and_come_back_to_slots(ids):
    num_tokens, topk = ids.shape
    _, gather, _ = get_routing_indices(ids, 4)
    x = ordinary_floats((num_tokens, 3), np.float32, 1)
    rows = permute_indexed(x, gather, topk)
    assert rows.tolist() == [x[slot // topk].tolist() for slot in gather]
    np.testing.assert_array_equal(unpermute_indexed(rows, gather), np.repeat(x, topk, axis=0))


@EXAMPLES
@given(IDS)
def test_gradient_is_the_sum_over_a_tokens_rows(ids):
    num_tokens, topk = ids.shape
    _, gather, _ = get_routing_indices(ids, 4)
    d_rows = ordinary_floats((ids.size, 3), np.float64, 2)
    expected = np.zeros((num_tokens, 3))
    for row, slot in enumerate(gather):
        expected[slot // topk] += d_rows[row]
    np.testing.assert_allclose(permute_indexed_backward(d_rows, gather, topk), expected, rtol=1e-12, atol=1e-12)
