# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Where a layer's products gather the rows of tokens, and where these are moved before."""

from __future__ import annotations

from .hopper_product import FEW_ROWS

__all__ = ["gathers"]

# The largest n at which a product that gathers its rows beats one of rows that were moved. Moving reads and writes all
# rows, and reads all tokens once for each window; gathering slows the product, which grows with n, by about a tenth.
_LARGEST_GATHERED = 512  # with one window, whose rows serve two products in the backward pass
_LARGEST_GATHERED_BY_LIBRARY = 768  # the same for products that the library makes: it gathers faster than Triton
_LARGEST_GATHERED_PER_PASS = 640  # with several windows, for each pass over rows of d columns


def gathers(
    num_tokens: int, num_rows: int, experts: int, inner: int, windows: int, moves_twice: bool, by_library: bool
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
    """
    if by_library and num_rows <= FEW_ROWS * experts:
        return True
    if windows <= 1:
        return not moves_twice and inner <= (_LARGEST_GATHERED_BY_LIBRARY if by_library else _LARGEST_GATHERED)
    return inner <= (2 + windows * num_tokens / num_rows) * _LARGEST_GATHERED_PER_PASS
