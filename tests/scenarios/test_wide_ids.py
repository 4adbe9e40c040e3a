# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs with int64 ids and rows that 32 bits do not hold: they name no expert and no row."""

from __future__ import annotations

import paddle
import pytest

from paddle_moe_ops import route
from paddle_moe_ops.compat.incubate_backward import moe_gate_dispatch_partial_nosoftmaxtopk_grad
from paddle_moe_ops.compat.incubate_dispatch import moe_combine, moe_gate_dispatch_partial_nosoftmaxtopk
from paddle_moe_ops.indexed import get_routing_indices

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, E, K = 2, 3, 4, 2
WIDE = [[2**32 + 1, 0], [2**33, 2]]  # the low halves are experts


def ids() -> paddle.Tensor:
    return paddle.to_tensor(WIDE, "int64")


def test_wide_ids_have_no_row():
    assert route(ids(), num_experts=E, validate=False).slot_to_row.tolist() == [[-1, 0], [-1, 1]]
    assert get_routing_indices(ids(), E, validate=False)[0].tolist() == [1, 0, 1, 0]
    _, weights, *_, counts, local = moe_gate_dispatch_partial_nosoftmaxtopk(
        paddle.ones([T, H]), paddle.ones([T, K]), ids(), K, T, E, False, 0, E, False
    )
    assert weights.tolist() == [[0, 1], [0, 1]]
    assert counts.tolist() == local.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("validate", ["0", "1"])
def test_wide_indices_are_no_rows(validate, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", validate)
    rows, weights = paddle.arange(E * H).astype("float32").reshape([E, H]), paddle.ones([T, K])
    unread = paddle.zeros([E], "int64")
    given = weights, ids().transpose([1, 0]), unread, unread, unread, rows, weights, K, T, False, 0, E
    assert moe_gate_dispatch_partial_nosoftmaxtopk_grad(*given)[0].tolist() == rows[0:4:2].tolist()
    if validate == "1":
        with pytest.raises(ValueError, match="scatter_index must hold rows in"):
            moe_combine(rows, weights, ids())
    else:
        assert moe_combine(rows, weights, ids()).tolist() == rows[0:4:2].tolist()
