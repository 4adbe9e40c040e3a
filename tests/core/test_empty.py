# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of zero: arrays without elements may be NULL; outputs with elements are defined."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from .binding import Core
from .guards import guarded_outputs
from .operators.clean_rowmap import CleanRowmapParams, clean_rowmap_params
from .operators.dequantize import DequantizeParams
from .operators.permute import PermuteParams
from .operators.quantize import QuantizeParams
from .operators.route import RouteParams
from .operators.slots import SlotsParams
from .operators.sort_chunks import SortChunksParams
from .operators.unpermute import UnpermuteParams
from .operators.unpermute_backward import UnpermuteBackwardParams

EXPERTS = 3


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["ids32", "ids64", "mask"])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_route_without_tokens(core: Core, kind: int, num_rows: int) -> None:
    with guarded_outputs() as output:
        params = RouteParams(
            topk=2,
            num_experts=EXPERTS,
            padding_alignment=4,
            num_rows=num_rows,
            routing_kind=kind,
            checks=31,
            routed_per_expert=output(EXPERTS, np.int32),
            row_to_token=output(num_rows, np.int32),
            row_to_slot=output(num_rows, np.int32),
            row_to_expert=output(num_rows, np.int32),
            row_probs=output(num_rows, np.float32),
            tokens_per_expert=output(EXPERTS, np.int32),
            expert_offsets=output(EXPERTS + 1, np.int32),
            overflow=output(1, np.int32),
        )
        core.add_workspace("route", params)
        core.run("route_count", params)
        core.run("route", params)
    maps = params.arrays
    for name in ("routed_per_expert", "tokens_per_expert", "expert_offsets", "overflow"):
        assert not maps[name].any(), name
    for name in ("row_to_token", "row_to_slot", "row_to_expert"):
        assert maps[name].tolist() == [-1] * num_rows, name
    assert maps["row_probs"].tolist() == [0] * num_rows


def test_clean_rowmap_without_tokens(core: Core) -> None:
    with guarded_outputs() as output:
        row_to_token = output(4, np.int32)
        params = CleanRowmapParams(topk=2, num_experts=EXPERTS, num_rows=4, checks=31, row_to_token=row_to_token)
        core.run("clean_rowmap", params)
    assert row_to_token.tolist() == [-1] * 4


def test_clean_rowmap_without_rows(core: Core) -> None:
    rowmap = np.full((2, EXPERTS), -1, np.int32)
    ids = np.zeros((2, 2), np.int32)
    with guarded_outputs() as output:
        token_rows, slot_to_row = output(rowmap.shape, np.int32), output(ids.shape, np.int32)
        params = clean_rowmap_params(rowmap, ids, num_rows=0, checks=31, token_rows=token_rows, slot_to_row=slot_to_row)
        core.run("clean_rowmap", params)
    assert token_rows[:, 0].tolist() == [-1, -1]
    assert (slot_to_row == -1).all()


def test_slots_without_rows_or_tokens(core: Core) -> None:
    slot_to_row = np.zeros((2, 2), np.int32)
    with guarded_outputs() as output:
        slot_values = output((2, 2), np.float32)
        params = SlotsParams(num_tokens=2, topk=2, slot_to_row=slot_to_row, slot_values=slot_values)
        core.run("gather_slots", params)
        core.run("scatter_slots", params)
        row_values = output(3, np.float32)
        core.run("scatter_slots", SlotsParams(topk=2, num_rows=3, row_values=row_values))
        core.run("gather_slots", SlotsParams(topk=2, num_rows=3, row_values=row_values))
    assert not slot_values.any()
    assert row_values.tolist() == [0, 0, 0]


def test_permute_without_tokens_writes_padding(core: Core) -> None:
    with guarded_outputs() as output:
        rows, row_scales = output((3, 5), np.float16), output((3, 2), np.int32)
        params = PermuteParams(
            topk=2,
            num_rows=3,
            hidden=5,
            scale_cols=2,
            row_to_token=np.full(3, -1, np.int32),
            rows=rows,
            row_scales=row_scales,
            dtype=1,
            scale_dtype=5,
            fill=3,
        )
        core.run("permute", params)
    assert not rows.view(np.uint16).any()
    assert not row_scales.any()


@pytest.mark.parametrize("layout", [0, 1], ids=["row", "col"])
def test_quantize_without_tokens_writes_padding(core: Core, layout: int) -> None:
    with guarded_outputs() as output:
        codes, scales = output((3, 200), np.uint8), output((2, 4) if layout else (3, 2), np.float32)
        params = QuantizeParams(
            topk=2,
            num_rows=3,
            hidden=200,
            row_to_token=np.full(3, -1, np.int32),
            codes=codes,
            scales=scales,
            scale_layout=layout,
            fill=3,
            amax_min=1.0,
        )
        core.run("quantize", params)
    assert not codes.any()
    assert not scales.any()


def given(**arrays: NDArray) -> dict[str, NDArray | None]:
    """NULL for every array without elements."""
    return {name: array if array.size else None for name, array in arrays.items()}


@pytest.mark.parametrize("rows_per_token", [0, 2])
@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_moves_of_any_zero_size_need_no_arrays(
    core: Core, num_tokens: int, num_rows: int, hidden: int, gap: int, rows_per_token: int
) -> None:
    """The maps list rows that may not exist; rows without elements have a stride all the same."""
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "hidden": hidden, "num_threads": 2}
    stride = hidden + gap
    token_rows = np.arange(num_tokens * rows_per_token, dtype=np.int32).reshape(num_tokens, rows_per_token)
    row_to_token = np.full(num_rows, -1, np.int32)
    row_to_token[: token_rows.size] = 0
    by_token = np.ones((num_tokens, stride), np.float32)[:, :hidden]
    by_row = np.ones((num_rows, stride), np.float32)[:, :hidden]
    with guarded_outputs() as output:
        rows, d_rows = output((num_rows, hidden), np.float32), output((num_rows, hidden), np.float32)
        out, d_weights = output((num_tokens, hidden), np.float32), output(num_rows, np.float32)
        permute = PermuteParams(
            **sizes,
            topk=rows_per_token,
            x_row_stride=stride,
            fill=3,
            **given(x=by_token, rows=rows, slot_to_row=token_rows, row_to_token=row_to_token),
        )
        core.run("permute", permute)
        quantized = output((num_rows, hidden), np.uint8), output((num_rows, min(hidden, 1)), np.float32)
        quantize = QuantizeParams(
            **sizes,
            topk=rows_per_token,
            x_row_stride=stride,
            fill=3,
            amax_min=1.0,
            **given(
                x=by_token,
                codes=quantized[0],
                scales=quantized[1],
                slot_to_row=token_rows,
                row_to_token=row_to_token,
            ),
        )
        core.run("quantize", quantize)
        back = output((num_rows, hidden), np.float32)
        dequantize = DequantizeParams(
            num_rows=num_rows,
            hidden=hidden,
            codes_row_stride=hidden,
            **given(codes=quantized[0], scales=quantized[1], out=back),
        )
        core.run("dequantize", dequantize)
        sums = {**sizes, "max_rows_per_token": rows_per_token, "num_weights": num_rows, "rows_row_stride": stride}
        arrays = given(rows=by_row, token_rows=token_rows, weights=np.ones(num_rows, np.float32))
        core.run("unpermute", UnpermuteParams(**sums, out_row_stride=hidden, **arrays, **given(out=out)))
        outputs = given(d_out=by_token, row_to_token=row_to_token, d_rows=d_rows, d_weights=d_weights)
        backward = UnpermuteBackwardParams(**sums, d_out_row_stride=stride, **arrays, **outputs)
        core.run("unpermute_backward", backward)
    used = np.arange(num_rows) < token_rows.size
    assert (rows == used[:, None]).all()
    assert (quantized[0] == used[:, None] * 0x7E).all()
    assert (back == used[:, None]).all()
    assert (quantized[1] == used[:, None] / np.float32(448)).all()
    assert (d_rows == used[:, None]).all()
    assert (d_weights == used * hidden).all()
    assert (out == np.count_nonzero(token_rows < num_rows, axis=1)[:, None]).all()


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_backward_of_empty_rows_with_all_arrays_given(core: Core, num_tokens: int) -> None:
    """H = 0: outputs without bytes next to inputs that are NULL."""
    token_rows = np.arange(num_tokens, dtype=np.int32)[:, None]
    with guarded_outputs() as output:
        d_rows, d_weights = output(8, np.float32), output(4, np.float32)
        params = UnpermuteBackwardParams(
            num_tokens=num_tokens,
            max_rows_per_token=1,
            num_rows=4,
            num_weights=4,
            hidden=0,
            d_out_row_stride=3,
            rows_row_stride=3,
            token_rows=token_rows,
            row_to_token=np.zeros(4, np.int32),
            weights=np.ones(4, np.float32),
            d_rows=d_rows,
            d_weights=d_weights,
            copy_single_row=1,
        )
        core.run("unpermute_backward", params)
    assert np.isnan(d_rows).all()  # no row has a byte
    assert d_weights.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize("num_chunks", [0, 2])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_chunks_of_any_zero_size_need_no_arrays(
    core: Core, num_rows: int, num_chunks: int, hidden: int, inverse: int
) -> None:
    x = np.arange(num_rows * hidden, dtype=np.float32).reshape(num_rows, hidden)
    order = np.arange(num_chunks, dtype=np.int32)[::-1].copy()
    with guarded_outputs() as output:
        out, source_to_dest = output(x.shape, np.float32), output(num_rows, np.int32)
        params = SortChunksParams(
            num_rows=num_rows,
            num_chunks=num_chunks,
            hidden=hidden,
            x_row_stride=hidden,
            inverse=inverse,
            checks=3,
            **given(
                x=x,
                split_sizes=np.zeros(num_chunks, np.int32),
                order=order,
                out=out,
                source_to_dest=source_to_dest,
            ),
        )
        core.run("sort_chunks", params)
    assert out.tolist() == x.tolist()
    assert source_to_dest.tolist() == list(range(num_rows))
