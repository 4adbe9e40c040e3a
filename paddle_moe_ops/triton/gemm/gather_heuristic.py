# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Heuristic: gather token rows inside the GEMMs, or permute them first?"""

from __future__ import annotations

from .types import MEMORY_BOUND_ROWS_PER_EXPERT

__all__ = ["gathers", "gathers_in_wgrad"]

# Largest n at which a gathering GEMM beats permute + GEMM. Permuting reads and writes all rows, and reads all tokens
# once per chunk. Gathering slows the GEMM, whose time grows with n, by about a tenth.
_MAX_GATHERED_N = 512  # one chunk, Triton, forward pass: rows of the backward pass serve two GEMMs
_MAX_GATHERED_N_PER_PASS = 640  # several chunks, for each pass over rows of d columns
# Both limits for the library's GEMMs. In the backward pass, three GEMMs read permuted rows faster, two of them wgrads.
# The cost of permuting depends on memory bandwidth, too.
_BY_LIBRARY_FORWARD, _BY_LIBRARY_BACKWARD, _BY_LIBRARY_BACKWARD_WITH_FAST_MEMORY = (1536, 680), (1024, 500), (768, 500)
# Gathering slows wgrad by about a seventh, and its time grows with the columns of the other operand.
_MAX_COLUMNS_OF_GATHERING_WGRAD = 1536


def gathers(
    num_tokens: int,
    num_rows: int,
    experts: int,
    inner: int,
    chunks: int,
    reuses_rows: bool,
    by_library: bool,
    is_memory_fast: bool,
) -> bool:
    """True if the GEMMs of a pass gather token rows instead of reading rows that were permuted chunk by chunk.

    Args:
        num_tokens: T.
        num_rows: M.
        experts: E.
        inner: n.
        chunks: number of row chunks if rows are permuted.
        reuses_rows: whether two GEMMs read the same permuted rows.
        by_library: whether the library's gathering kernel computes the GEMM.
        is_memory_fast: `hopper_product.has_fast_memory`.
    """
    if by_library and num_rows <= MEMORY_BOUND_ROWS_PER_EXPERT * experts:
        return True
    with_one_chunk, per_pass = -1 if reuses_rows else _MAX_GATHERED_N, _MAX_GATHERED_N_PER_PASS
    if by_library and not reuses_rows:
        with_one_chunk, per_pass = _BY_LIBRARY_FORWARD
    elif by_library:
        with_one_chunk, per_pass = _BY_LIBRARY_BACKWARD_WITH_FAST_MEMORY if is_memory_fast else _BY_LIBRARY_BACKWARD
    return inner <= (with_one_chunk if chunks <= 1 else (2 + chunks * num_tokens / num_rows) * per_pass)


def gathers_in_wgrad(columns: int, is_permuted: bool) -> bool:
    """True if the library's wgrad gathers token rows in a pass that permutes rows otherwise.

    Args:
        columns: columns of the other operand.
        is_permuted: whether the buffer contains the permuted token rows already.
    """
    return not is_permuted and columns <= _MAX_COLUMNS_OF_GATHERING_WGRAD
