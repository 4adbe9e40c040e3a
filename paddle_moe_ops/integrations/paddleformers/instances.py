# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Giving the blocks of one model other methods, and removing them again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from paddle import nn

from ...backends import Float8Matrices
from .blocks import compute_problem
from .classes import process_problem, unknown_code
from .experts import COMPUTE, KEPT, compute_of
from .fleet_layers import BY_LAYER, GROUPED, fleet_target
from .targets import MODELS, Target

Bound = tuple[nn.Layer, Target]


def _loaded_targets() -> dict[Target, type]:
    """The methods whose modules are imported: a model cannot have blocks of others."""
    targets = dict.fromkeys(target for model in MODELS.values() for target in model.targets)
    return {target: target.load() for target in targets if target.module in sys.modules}


def bind(
    model: nn.Layer, compute: str | None = None
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], Callable[[], None]]:
    """Replace the methods of all blocks of a model, or of none.

    Args:
        model: that model.
        compute: of the experts of all its blocks, see `moe_mlp`.

    Returns:
        the blocks that are patched now; the unchanged blocks, each with the reason; a function that undoes this call.

    Raises:
        ValueError: there are no blocks that are known, or one cannot be run.
        RuntimeError: the code of a block is unknown, or the process has a tensor parallel group.
    """
    reason = process_problem()
    if reason is not None:
        raise RuntimeError(f"apply: {reason}")
    targets = _loaded_targets()
    found: dict[str, Bound] = {}
    left: list[tuple[str, str]] = []
    for path, layer in model.named_sublayers(include_self=True):
        place = path or "the model itself"
        matching = [target for target, cls in targets.items() if isinstance(layer, cls)]
        of_fleet = fleet_target(layer)
        if of_fleet is not None:
            matching.append(of_fleet)
        if not matching and getattr(layer, "experts", None) is not None:
            left.append((f"{place} ({type(layer).__name__})", "no replacement for this class"))
        for target in matching:
            where = f"{place} ({type(layer).__name__}.{target.method})"
            reason = unknown_code(target, type(layer))
            if target.method in vars(layer) and not _is_bound(layer, target):
                reason = "the method of this layer was replaced by something else"
            if reason is not None:
                raise RuntimeError(f"apply: {where}: {reason}")
            reason = target.replacement.problem(layer)  # type: ignore[attr-defined]
            if reason is not None:
                raise ValueError(f"apply: {where}: {reason}, which is not supported")
            reason = None if compute is None else compute_problem(layer)
            if reason is not None:
                raise ValueError(f"apply: {where}: {reason}, so compute must be None, but got {compute!r}")
            found[where] = layer, target
    if not found:
        reasons = "".join(f"; {name}: {reason}" for name, reason in left)
        raise ValueError(f"apply: the model must have blocks that supported() lists, but has none{reasons}")
    added = [each for each in found.values() if not _is_bound(*each)]
    for layer, target in added:
        setattr(layer, target.method, MethodType(target.replacement, layer))
    before = [(layer, compute_of(layer).compute) for layer, _ in found.values()]
    for layer, _ in before:
        _set_compute(layer, compute)

    def undo() -> None:
        for layer, earlier in before:
            _set_compute(layer, earlier)
        unbind(added)

    return tuple(found), tuple(left), undo


def bound(model: nn.Layer) -> list[Bound]:
    """The blocks of a model that have other methods."""
    layers = model.sublayers(include_self=True)
    targets = *_loaded_targets(), BY_LAYER, GROUPED
    return [(layer, target) for target in targets for layer in layers if _is_bound(layer, target)]


def unbind(blocks: list[Bound]) -> None:
    """Give blocks the methods of their classes."""
    for layer, target in blocks:
        if _is_bound(layer, target):
            delattr(layer, target.method)
            _set_compute(layer, None)


def _set_compute(layer: nn.Layer, compute: str | None) -> None:
    if compute is not None:
        setattr(layer, COMPUTE, compute)
        setattr(layer, KEPT, Float8Matrices())
    elif COMPUTE in vars(layer):
        delattr(layer, COMPUTE)
        delattr(layer, KEPT)


def _is_bound(layer: Any, target: Target) -> bool:
    return getattr(vars(layer).get(target.method), "__func__", None) is target.replacement
