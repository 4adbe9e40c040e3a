# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The choices of csrc/layer are those of the layer on Triton, where both run the library's kernels."""

from __future__ import annotations

import itertools

import pytest

from paddle_moe_ops.triton.gemm import mlp
from paddle_moe_ops.triton.gemm.gather_heuristic import gathers_in_wgrad
from paddle_moe_ops.triton.gemm.types import Gpu, Groups, Layer, Tokens
from paddle_moe_ops.triton.launch.dry_run import FakeArray
from tests.core.binding import Core
from tests.core.conftest import LIBRARY
from tests.core.layer import H100, H200, choices

SWAP_AB, BFLOAT16 = 160, 2  # tile rows; pmo_dtype
# E and rows per expert on both sides of the limits of choices; the library's kernels run 128 rows or more on Triton.
ROWS = [(1, 161), (1, 641), (3, 128), (3, 160), (3, 161), (2, 511), (2, 512), (2, 1023), (2, 1024), (1, 5001)]
# d, and n on both sides of its limits
COLUMNS = [768, 776, 1536, 4096]
INNER = [8, 248, 496, 504, 512, 680, 688, 768, 776, 1024, 1032, 1536, 1544, 2048, 2056, 3072, 3080]


class Device:
    """A device on which nothing runs, with the library's kernels."""

    grouped_product = grouped_outer = object()

    def dtype_name(self, array):
        return array.dtype

    def row_stride(self, array):
        return array.shape[1]

    def empty(self, shape, dtype):
        return FakeArray(shape, dtype, 4096)

    def launch(self, *_):
        pass


def array(*shape, dtype="bfloat16"):
    return FakeArray(list(shape), dtype, 4096)


@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("gpu", [H100, H200], ids=["H100", "H200"])
def test_choices_on_both_sides_of_each_limit(gpu, backward, topk, monkeypatch):
    core = Core(LIBRARY)
    num_sms, memory_gbps = gpu
    monkeypatch.setattr(mlp, "gpu_at", lambda _: Gpu(90, num_sms, memory_gbps))
    for (experts, of_expert), d, n, workspace in itertools.product(ROWS, COLUMNS, INNER, (1, 3 << 20, 1 << 30)):
        rows = experts * of_expert
        tokens = -(-rows // topk)
        maps = Tokens(array(rows, dtype="int32"), array(tokens, topk, dtype="int32"))
        matrices = array(experts, d, 2 * n), array(experts, n, d)
        layer = Layer(*matrices, Groups(array(experts, dtype="int32")), maps, None, False, workspace)
        run = mlp.Pass(Device(), layer, array(tokens, d), reuses_rows=backward)
        made = choices(
            core,
            num_tokens=tokens,
            num_rows=rows,
            num_experts=experts,
            hidden=d,
            inner=n,
            workspace=workspace,
            dtype=BFLOAT16,
            num_sms=num_sms,
            memory_gbps=memory_gbps,
            backward=int(backward),
            keeps_hidden=1,
            needs_d_weights=int(backward),
        )
        chunks = 0 if run.gathers else run.num_chunks
        tile_rows = run._chosen(mlp.PLAIN, 2 * n if backward else n, run.chunk_columns) or SWAP_AB
        in_wgrad = (run.gathers or gathers_in_wgrad(2 * n, False), run.gathers or gathers_in_wgrad(n, chunks == 1))
        expected = (chunks, run.chunk_rows, run.chunk_columns, 2 * run.buffer.shape[0], tile_rows, *in_wgrad)
        found = (made.num_chunks, made.chunk_rows, made.chunk_columns, made.buffer_bytes, made.sum_tile_rows)
        assert (*found, made.gathers_x, made.gathers_d_out) == expected, (experts, of_expert, d, n, workspace)
        tables = (1 if tile_rows == SWAP_AB else 2) * (3 * experts + (chunks if chunks > 1 else 0) + 6)
        assert made.tables_size == tables
