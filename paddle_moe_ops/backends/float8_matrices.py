# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices of experts in float8 that are kept from one call to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import Tensor

from .base import Matrices
from .joining import alias_of

__all__ = ["Float8Matrices", "holds_others", "is_default", "made_by", "make_default", "replaced_by"]


class Float8Matrices:
    """What `moe_mlp` keeps of a layer's matrices in float8, so that calls with the same matrices quantise them once.

    The first call with an empty one quantises both matrices and keeps them, in the forms that its passes take: 2 bytes
    for each element, 1 where no gradient is wanted, or 4 where they are multiplied in float32. If a later call wants a
    gradient, the codes of the forward pass are turned for it. Later calls, and their backward passes, take what is
    kept, whatever the matrices hold by then. So call `clear` after each step of the optimizer, and after anything else
    that changes the matrices::

        kept = Float8Matrices()
        for step in range(steps):
            for x, target in micro_batches:
                out = moe_mlp(x, plan_of(x), probs_of(x), gate_up, down, compute="fp8_1x128", float8_matrices=kept)
                loss(out, target).backward()
            optimizer.step()
            optimizer.clear_grad()
            kept.clear()

    Each layer needs one of its own, and matrices that stay in the same memory: parameters, not tensors that are cast or
    stacked for each call. Other matrices are refused until `clear`. A backward pass takes the matrices of its forward
    pass, also if they have changed or this was cleared in between. Results have the bits of calls that quantise anew. A
    copy of one, and one that was pickled, is empty.

    Attributes:
        is_empty: whether the next call quantises its matrices.
    """

    def __init__(self) -> None:
        self._of: Any = None  # aliases of what was given, so that nothing else gets its memory, and facts about it
        self._made: Any = None
        self._is_default = False

    @property
    def is_empty(self) -> bool:
        return self._made is None

    def clear(self) -> None:
        """Forget what is kept; its memory is free when no backward pass needs it."""
        self._of = self._made = None

    def __repr__(self) -> str:
        return f"Float8Matrices({'empty' if self.is_empty else f'of {len(self._of[0])} tensors'})"

    def __reduce__(self) -> tuple[type, tuple]:
        return Float8Matrices, ()


def make_default(kept: Float8Matrices) -> None:
    """Have the layer that has it use it from the next call on, which quantises; see `nn.set_is_first_microbatch`."""
    kept.clear()
    kept._is_default = True


def is_default(kept: Float8Matrices | None) -> bool:
    """Whether calls that do not say otherwise use what is kept."""
    return kept is not None and kept._is_default


def holds_others(kept: Float8Matrices, gate_up: Matrices, down: Matrices, transpose: bool) -> bool:
    """Whether what is kept was made of other matrices; if nothing is kept, these are noted for `made_by`."""
    casts_to = paddle.amp.get_autocast_dtype() if paddle.amp.is_autocast_enabled() else None
    facts = transpose, casts_to, _facts_of(gate_up), _facts_of(down)
    if kept._made is None:
        # A parameter may be moved to other memory, so to keep the parameter itself would not do.
        kept._of = [alias_of(matrix) for matrix in (*_listed(gate_up), *_listed(down))], facts
    return facts != kept._of[1]


def made_by(kept: Float8Matrices, name: str, make: Callable[[], Any]) -> Any:
    """What is kept, which ``make`` makes if there is nothing, or nothing of the backend of this name."""
    if kept._made is None or kept._made[0] != name:
        kept._made = name, make()
    return kept._made[1]


def replaced_by(kept: Float8Matrices, before: Any, made: Any) -> Any:
    """Keep this instead of what `made_by` gave before, unless another thread has cleared that meanwhile."""
    found = kept._made
    if made is not before and found is not None and found[1] is before:
        kept._made = found[0], made
    return made


def _facts_of(matrices: Matrices) -> list[tuple]:
    """What tells matrices from others, short of their values."""
    return [(matrix.data_ptr(), matrix.dtype, *matrix.shape, *matrix.strides) for matrix in _listed(matrices)]


def _listed(matrices: Matrices) -> Sequence[Tensor]:
    return [matrices] if isinstance(matrices, Tensor) else matrices
