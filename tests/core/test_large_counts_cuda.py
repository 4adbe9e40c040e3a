# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Almost 2^31 tokens, rows or slots in GPU memory, and more blocks than a grid has; needs 40 GiB of it."""

from __future__ import annotations

import ctypes

import pytest

from .binding import Core
from .operators.permute import PermuteParams
from .operators.route import RouteParams
from .operators.unpermute_backward import UnpermuteBackwardParams
from .test_large_cuda import run

# Slow for a sanitizer; a GPU takes seconds.
pytestmark = [pytest.mark.cuda_only, pytest.mark.slow]

INT32_MAX = 2**31 - 1
MANY_TOKENS = 2**30


def route(core: Core, params: RouteParams, **tensors: object) -> None:
    """All maps in one call."""
    import torch

    params.point_at(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
    size = core.workspace_bytes("route", params)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    params.workspace, params.workspace_bytes = workspace.data_ptr(), size
    assert core.entry("route_permute", 2)(ctypes.byref(params), None, None) == 0, core.last_error()
    torch.cuda.synchronize()


def test_almost_2_to_the_31_tokens_are_routed(core: Core) -> None:
    import torch

    num_tokens, num_rows = INT32_MAX - 1, 7
    routed = torch.tensor([0, 1 << 30, num_tokens - 33, num_tokens - 2, num_tokens - 1], device="cuda")
    ids = torch.full((num_tokens,), -1, dtype=torch.int32, device="cuda")
    ids[routed] = 0
    slot_to_row = torch.full_like(ids, 77)
    row_to_token = torch.full((num_rows,), 77, dtype=torch.int32, device="cuda")
    counts = torch.full((1,), 77, dtype=torch.int32, device="cuda")
    params = RouteParams(num_tokens=num_tokens, topk=1, num_experts=1, padding_alignment=1, num_rows=num_rows)
    route(core, params, routing=ids, slot_to_row=slot_to_row, row_to_token=row_to_token, routed_per_expert=counts)
    assert row_to_token.tolist() == [*routed.tolist(), -1, -1]
    assert slot_to_row[routed].tolist() == [0, 1, 2, 3, 4]
    slot_to_row[routed] = -1
    assert bool((slot_to_row == -1).all())
    assert counts.tolist() == [5]


def test_few_slots_are_routed_into_almost_2_to_the_31_rows(core: Core) -> None:
    import torch

    ids = torch.tensor([[6, 2], [0, 6], [2, -1]], dtype=torch.int32, device="cuda")
    row_to_token = torch.full((INT32_MAX,), 77, dtype=torch.int32, device="cuda")
    counts = torch.full((7,), 77, dtype=torch.int32, device="cuda")
    params = RouteParams(num_tokens=3, topk=2, num_experts=7, padding_alignment=1, num_rows=INT32_MAX)
    route(core, params, routing=ids, row_to_token=row_to_token, routed_per_expert=counts)
    assert row_to_token[:5].tolist() == [1, 0, 2, 0, 1]
    assert bool((row_to_token[5:] == -1).all())
    assert counts.tolist() == [1, 0, 2, 0, 0, 0, 2]


def test_a_token_of_many_slots_and_pieces_goes_to_all_of_its_rows(core: Core) -> None:
    import torch

    topk, num_rows, hidden = 2**30, 8, 2**24
    x = torch.randn(1, hidden, device="cuda").to(torch.bfloat16)
    slot_to_row = torch.full((1, topk), -1, dtype=torch.int32, device="cuda")
    for row, slot in enumerate((0, 31, topk // 2, topk - 33, topk - 2, topk - 1)):
        slot_to_row[0, slot] = row
    row_to_token = torch.tensor([0] * 6 + [-1] * 2, dtype=torch.int32, device="cuda")
    rows = torch.full((num_rows, hidden), 7, dtype=torch.bfloat16, device="cuda")
    sizes = {"num_tokens": 1, "topk": topk, "num_rows": num_rows, "hidden": hidden, "x_row_stride": hidden}
    params = PermuteParams(dtype=2, fill=1, **sizes)
    run(core, "permute", params, x=x, slot_to_row=slot_to_row, row_to_token=row_to_token, rows=rows)
    assert torch.equal(rows[:6], x.expand(6, hidden))
    assert int(torch.count_nonzero(rows[6:]).item()) == 0


def only_the_last_token() -> tuple[object, object]:
    """Maps of a token at the very end and a row of padding; all other tokens have no row."""
    import torch

    slot_to_row = torch.full((MANY_TOKENS, 1), -1, dtype=torch.int32, device="cuda")
    slot_to_row[-1, 0] = 0
    return slot_to_row, torch.tensor([MANY_TOKENS - 1, -1], dtype=torch.int32, device="cuda")


def test_more_tokens_than_a_grid_has_blocks_are_permuted(core: Core) -> None:
    import torch

    hidden = 1153  # ten warps to a token, of single bytes
    slot_to_row, row_to_token = only_the_last_token()
    x = torch.randint(1, 100, (hidden,), dtype=torch.uint8, device="cuda")
    rows = torch.full((2, hidden), 7, dtype=torch.uint8, device="cuda")
    sizes = {"num_tokens": MANY_TOKENS, "topk": 1, "num_rows": 2, "hidden": hidden, "x_row_stride": 0}
    params = PermuteParams(dtype=3, fill=1, **sizes)
    run(core, "permute", params, x=x, slot_to_row=slot_to_row, row_to_token=row_to_token, rows=rows)
    assert torch.equal(rows[0], x)
    assert int(torch.count_nonzero(rows[1]).item()) == 0


def test_more_tokens_than_a_grid_has_blocks_pass_their_gradient_on(core: Core) -> None:
    import torch

    hidden = 513  # 17 warps to a token, of single numbers
    token_rows, row_to_token = only_the_last_token()
    d_out = torch.randn(hidden, device="cuda")
    d_rows = torch.full((2, hidden), 7.0, device="cuda")
    sizes = {"num_tokens": MANY_TOKENS, "max_rows_per_token": 1, "num_rows": 2, "hidden": hidden}
    params = UnpermuteBackwardParams(dtype=0, d_out_row_stride=0, **sizes)
    run(
        core,
        "unpermute_backward",
        params,
        d_out=d_out,
        token_rows=token_rows,
        row_to_token=row_to_token,
        d_rows=d_rows,
    )
    assert torch.equal(d_rows[0], d_out)
    assert int(torch.count_nonzero(d_rows[1]).item()) == 0
