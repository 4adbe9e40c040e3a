# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The part of a layer's passes to which each launch belongs."""

from __future__ import annotations

from collections.abc import Sequence

from .shapes import Shape

__all__ = ["flops_of", "parts_of"]

# Functions of pmo_layer_kernels.
_SIMPLE = {
    "tables": "tiles of experts",
    "permute": "rows moved",
    "unpermute": "sums",
    "row_sums": "gradients of weights",
    "clear": "rows of no expert",
    "quantize": "tokens in float8",
    "quantize_blocks": "matrices in float8",
}
_PRODUCTS, _OUTER_PRODUCT = ("gemm", "gemm_float8"), "wgrad"
# The GEMMs of a pass: the last of each chunk, whose rows are summed, and the others. Each has its share of the
# operations, in T K d n.
_FIRST = {"forward": ("X W1, SwiGLU", 4), "backward": ("dO W2^T", 2)}
_LAST = {"forward": ("A W2, weighted", 2), "backward": ("dH W1^T", 4)}
_MATRICES = ("dW2", 2), ("dW1", 4)


def parts_of(which: str, launched: Sequence[str]) -> list[str]:
    """The part of a pass to which each launch belongs."""
    gradients = [index for index, name in enumerate(launched) if name == _OUTER_PRODUCT]
    parts = []
    for index, name in enumerate(launched):
        if name in _PRODUCTS:
            is_summed = launched[index + 1 : index + 2] == ["unpermute"]
            parts.append((_LAST if is_summed else _FIRST)[which][0])
        elif name == _OUTER_PRODUCT:  # of the second matrices first, in as many windows as those of the first
            parts.append(_MATRICES[2 * gradients.index(index) >= len(gradients)][0])
        else:
            parts.append(_SIMPLE[name])
    return parts


def flops_of(shape: Shape, which: str, parts: Sequence[str]) -> list[int]:
    """The operations of each launch, those of a part in equal shares."""
    weights = dict([_FIRST[which], _LAST[which], *_MATRICES])
    unit = shape.flops(False) // 6
    return [weights.get(part, 0) * unit // parts.count(part) for part in parts]
