# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels next to one that stays on the GPU, as a collective's does until its peers arrive."""

from __future__ import annotations

import ctypes
import time

import pytest
import triton
import triton.language as tl

from .binding import Core
from .operators.route import RouteParams

pytestmark = pytest.mark.cuda_only

E, K = 256, 8
RESIDENT_CTAS = 24  # NCCL has up to 32
POLLS = 1 << 27  # of memory on the host: ends the kernel in any case, minutes later
HANG_S = 20  # ends a hang and judges nothing


@triton.jit
def stay(flag, polls):  # type: ignore[no-untyped-def]
    """Occupy the GPU until the flag is set."""
    count = 0
    ended = tl.load(flag, volatile=True)
    while (ended == 0) & (count < polls):
        ended = tl.load(flag, volatile=True)
        count += 1


@pytest.mark.parametrize("tokens", [1025, 1 << 14, 1 << 17], ids=lambda tokens: f"{tokens * K} slots")
def test_routing_ends_while_another_kernel_stays(core: Core, tokens: int) -> None:
    import torch

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype, device="cuda")

    ids = torch.rand(tokens, E, device="cuda").topk(K, dim=1).indices.to(torch.int32).contiguous()
    arrays = {name: empty(tokens * K) for name in ("row_to_token", "row_to_slot", "row_to_expert")}
    arrays |= {"routing": ids, "slot_to_row": empty(tokens, K), "token_rows": empty(tokens, K)}
    arrays |= {"routed_per_expert": empty(E), "overflow": empty()}
    params = RouteParams(num_tokens=tokens, topk=K, num_experts=E, padding_alignment=1, num_rows=tokens * K)
    params.point_at(**{name: each.data_ptr() for name, each in arrays.items()})
    params.workspace_bytes = core.workspace_bytes("route", params)
    workspace = empty(params.workspace_bytes, dtype=torch.uint8)
    params.point_at(workspace=workspace.data_ptr())

    flag = torch.ones(1, dtype=torch.int32).pin_memory()
    other, own = torch.cuda.Stream(), torch.cuda.Stream()
    stayed, routed = torch.cuda.Event(), torch.cuda.Event()

    def occupy() -> None:
        with torch.cuda.stream(other):
            stay[(RESIDENT_CTAS,)](flag, POLLS, num_warps=32)
            stayed.record(other)

    def route() -> None:
        assert core.entry("route_permute", 2)(ctypes.byref(params), None, own.cuda_stream) == 0, core.last_error()
        routed.record(own)

    torch.cuda.synchronize()  # the arrays are filled on another stream
    occupy()  # both are loaded before one of them stays
    route()
    torch.cuda.synchronize()
    flag[0] = 0
    try:
        occupy()
        time.sleep(0.01)  # until the kernel is resident, as a rule
        route()
        end = time.monotonic() + HANG_S
        while not routed.query() and time.monotonic() < end:
            time.sleep(0.001)
        ended_meanwhile = routed.query() and not stayed.query()
    finally:
        flag[0] = 1
        torch.cuda.synchronize()
    assert ended_meanwhile
    counts = torch.bincount(ids.flatten(), minlength=E)
    assert torch.equal(torch.bincount(arrays["row_to_expert"], minlength=E), counts)
