# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Where a layer's products gather the rows of tokens, and where these are moved before."""

from __future__ import annotations

from .types import FEW_ROWS

__all__ = ["gathers", "gathers_for_matrix"]

# The largest n at which a product that gathers its rows beats one of rows that were moved. Moving reads and writes all
# rows, and reads all tokens once for each window; gathering slows the product, which grows with n, by about a tenth.
_LARGEST_GATHERED = 512  # with one window, by Triton, and not in the backward pass, whose rows serve two products
_LARGEST_GATHERED_PER_PASS = 640  # with several windows, for each pass over rows of d columns
# Both where the library makes the products. In the backward pass three products of the moved rows are faster, two of
# them gradients of the matrices. What moving costs depends on memory, too.
_BY_LIBRARY_FORWARD, _BY_LIBRARY_BACKWARD, _BY_LIBRARY_BACKWARD_WITH_FAST_MEMORY = (1536, 680), (1024, 500), (768, 500)
# In gradients of the matrices, gathering slows the product by about a seventh. The product grows with these columns.
_MOST_COLUMNS_BESIDE_GATHERED = 1536


def gathers(
    num_tokens: int,
    num_rows: int,
    experts: int,
    inner: int,
    windows: int,
    moves_twice: bool,
    by_library: bool,
    is_memory_fast: bool,
) -> bool:
    """Whether products gather the rows of tokens, instead of having them moved window by window.

    Args:
        num_tokens: T.
        num_rows: M.
        experts: E.
        inner: n.
        windows: how many windows the rows would be moved in.
        moves_twice: whether two products take the same rows of tokens.
        by_library: whether the library's kernel that can gather makes the product.
        is_memory_fast: `hopper_product.has_fast_memory`.
    """
    if by_library and num_rows <= FEW_ROWS * experts:
        return True
    with_one_window, per_pass = -1 if moves_twice else _LARGEST_GATHERED, _LARGEST_GATHERED_PER_PASS
    if by_library and not moves_twice:
        with_one_window, per_pass = _BY_LIBRARY_FORWARD
    elif by_library:
        with_one_window, per_pass = _BY_LIBRARY_BACKWARD_WITH_FAST_MEMORY if is_memory_fast else _BY_LIBRARY_BACKWARD
    return inner <= (with_one_window if windows <= 1 else (2 + windows * num_tokens / num_rows) * per_pass)


def gathers_for_matrix(columns: int, is_moved: bool) -> bool:
    """Whether the library's gradient of a matrix gathers the rows of tokens, in a pass that moves rows otherwise.

    Args:
        columns: of the other rows.
        is_moved: whether the rows of tokens are in the buffer.
    """
    return not is_moved and columns <= _MOST_COLUMNS_BESIDE_GATHERED
