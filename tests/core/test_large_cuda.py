# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""More than 2^31 and 2^32 elements in GPU memory: a few tokens whose rows lie far apart."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from .binding import Core
from .operators.permute import PermuteParams
from .operators.quantize import QuantizeParams
from .operators.sort_chunks import SortChunksParams
from .operators.unpermute import UnpermuteParams
from .operators.unpermute_backward import UnpermuteBackwardParams
from .structs import Params

pytestmark = pytest.mark.cuda_only

H = 1 << 20
N = 4500  # 4.7e9 elements
FAR_ROWS = (0, 2047, 2048, 4095, 4096, 4499)  # on both sides of 2^31 and of 2^32 elements, and the last
T = len(FAR_ROWS)


def run(core: Core, operator: str, params: Params, **tensors: object) -> None:
    params.point_at(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
    assert core.entry(operator)(ctypes.byref(params), None) == 0, core.last_error()


def count_nonzero(tensor: Any) -> int:
    """In parts: at once it takes 8 bytes of memory for each element."""
    return sum(int(part.count_nonzero().item()) for part in tensor.split(256))


def test_rows_beyond_2_to_the_32_elements_are_moved_and_summed(core: Core) -> None:
    import torch

    slots = torch.tensor(FAR_ROWS, dtype=torch.int32, device="cuda").reshape(T, 1)
    row_to_token = torch.full((N,), -1, dtype=torch.int32, device="cuda")
    row_to_token[slots.flatten().long()] = torch.arange(T, dtype=torch.int32, device="cuda")
    x = torch.randn(T, H, device="cuda").to(torch.bfloat16)
    rows = torch.full((N, H), 7, dtype=torch.bfloat16, device="cuda")
    sizes = {"num_tokens": T, "num_rows": N, "hidden": H, "dtype": 2}
    run(
        core,
        "permute",
        PermuteParams(topk=1, x_row_stride=H, fill=3, **sizes),
        x=x,
        slot_to_row=slots,
        row_to_token=row_to_token,
        rows=rows,
    )
    far = slots.flatten().long()
    assert torch.equal(rows[far], x)
    assert count_nonzero(rows) == count_nonzero(x)

    codes = torch.full((N, H), 7, dtype=torch.uint8, device="cuda")
    scales = torch.full((H // 128, N), 7.0, device="cuda")
    workspace = torch.empty(T, H // 128, device="cuda")
    run(
        core,
        "quantize",
        QuantizeParams(
            topk=1,
            x_row_stride=H,
            fill=3,
            scale_layout=1,
            amax_min=1e-4,
            workspace_bytes=workspace.nbytes,
            **sizes,
        ),
        x=x,
        slot_to_row=slots,
        row_to_token=row_to_token,
        codes=codes,
        scales=scales,
        workspace=workspace,
    )
    amax = x.float().abs().reshape(T, H // 128, 128).amax(dim=2)
    assert torch.equal(scales[:, far].T, amax / torch.full_like(amax, 448))  # by a number it multiplies
    assert count_nonzero(scales) == T * H // 128
    assert count_nonzero(codes[far].amax(dim=1)) == T
    codes[far] = 0
    assert count_nonzero(codes) == 0
    del codes, scales

    out = torch.empty_like(x)
    weights = torch.full((N,), 2.0, device="cuda")
    common = {"num_weights": N, "max_rows_per_token": 1, "rows_row_stride": H, **sizes}
    params = UnpermuteParams(**common, out_row_stride=H)
    run(core, "unpermute", params, rows=rows, token_rows=slots, weights=weights, out=out)
    assert torch.equal(out, x * 2)

    d_rows = torch.full((N, H), 7, dtype=torch.bfloat16, device="cuda")
    d_weights = torch.empty(N, device="cuda")
    run(
        core,
        "unpermute_backward",
        UnpermuteBackwardParams(d_out_row_stride=H, **common),
        d_out=x,
        rows=rows,
        token_rows=slots,
        row_to_token=row_to_token,
        weights=weights,
        d_rows=d_rows,
        d_weights=d_weights,
    )
    assert torch.equal(d_rows[far], x * 2)
    assert count_nonzero(d_rows) == count_nonzero(x)
    exact = (x.double() ** 2).sum(dim=1)
    assert torch.allclose(d_weights[far].double(), exact, rtol=1e-4)
    assert count_nonzero(d_weights) == T


def test_chunks_beyond_2_to_the_32_elements_change_places(core: Core) -> None:
    import torch

    x = torch.zeros((N, H), dtype=torch.uint8, device="cuda")
    x[:, :8] = torch.arange(N, device="cuda")[:, None] % 251
    sizes = torch.tensor([2047, 2100, 350], dtype=torch.int32, device="cuda")
    order = torch.tensor([2, 0, 1], dtype=torch.int32, device="cuda")
    dest_to_source = torch.cat([torch.arange(4147, 4497), torch.arange(4147), torch.arange(4497, N)]).cuda()
    sort = {"num_rows": N, "num_chunks": 3, "hidden": H, "x_row_stride": H, "dtype": 3}
    out, back = torch.full_like(x, 7), torch.full_like(x, 7)
    arrays = {"split_sizes": sizes, "order": order}
    run(core, "sort_chunks", SortChunksParams(**sort), x=x, out=out, **arrays)
    assert torch.equal(out[:, :8], x[dest_to_source, :8])
    assert count_nonzero(out[:, 8:]) == 0
    run(core, "sort_chunks", SortChunksParams(inverse=1, **sort), x=out, out=back, **arrays)
    assert torch.equal(back, x)
