# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Heuristic: gather token rows inside the GEMMs, or permute them first?"""

from __future__ import annotations

__all__ = ["gathers"]

# Largest n at which a gathering GEMM beats permute + GEMM. Permuting reads and writes all rows, and reads all tokens
# once per chunk. Gathering slows the GEMM, whose time grows with n, by about a tenth.
_MAX_GATHERED_N = 512  # one chunk, forward pass: rows of the backward pass serve two GEMMs
_MAX_GATHERED_N_PER_PASS = 640  # several chunks, for each pass over rows of d columns


def gathers(num_tokens: int, num_rows: int, inner: int, chunks: int, reuses_rows: bool) -> bool:
    """True if the GEMMs of a pass gather token rows instead of reading rows that were permuted chunk by chunk.

    Args:
        num_tokens: T.
        num_rows: M.
        inner: n.
        chunks: number of row chunks if rows are permuted.
        reuses_rows: whether two GEMMs read the same permuted rows.
    """
    if chunks <= 1:
        return not reuses_rows and inner <= _MAX_GATHERED_N
    return inner <= (2 + chunks * num_tokens / num_rows) * _MAX_GATHERED_N_PER_PASS
