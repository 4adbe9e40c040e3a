# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Replacing methods of classes, and putting the functions back."""

from __future__ import annotations

import importlib
from typing import Any

from paddle.distributed import fleet

from .targets import MODELS, VERSIONS, Target, digest

_ABSENT = object()  # the class inherits the method
_applied: set[str] = set()
_replaced: dict[Target, tuple[type, Any]] = {}  # the class, and its own attribute of the method's name


def applied_names() -> frozenset[str]:
    """The types of models whose classes are patched."""
    return frozenset(_applied)


def process_problem() -> str | None:
    """Why no model of this process can be patched, or None."""
    get_size = getattr(getattr(fleet.fleet, "_hcg", None), "get_model_parallel_world_size", None)
    size = 1 if get_size is None else get_size()
    return f"tensor parallelism of size {size} is not supported" if size > 1 else None


def unknown_code(target: Target, cls: type) -> str | None:
    """Say which code of a class is not the code that the replacement was written for, or None."""
    for name, expected in target.digests.items():
        module, _, qualified = name.rpartition(":")
        owner, method = cls, name
        if module:
            class_name, _, method = qualified.partition(".")
            owner = getattr(importlib.import_module(module), class_name)
        if digest(_own(owner, method)) != expected:
            versions = " or ".join(VERSIONS)
            return (
                f"{owner.__module__}.{owner.__qualname__}.{method} is not the code of PaddleFormers {versions}, "
                "which is what this integration was made for"
            )
    return None


def _own(cls: type, method: str) -> object:
    """A method of a class, as it is without `apply`."""
    for parent in cls.__mro__:
        value = vars(parent).get(method, _ABSENT)
        for target, (patched, replaced) in _replaced.items():
            if patched is parent and target.method == method:
                value = replaced
        if value is not _ABSENT:
            return value
    return None


def _reason(error: Exception) -> str:
    """The text of an import error, and the way to a missing package."""
    text, missing = str(error), (getattr(error, "name", None) or "").partition(".")[0]
    if missing in ("paddlefleet", "paddlefleet_ops") or "install paddlefleet" in text:
        # PaddleFormers advises a package of this name, which PyPI does not have: anybody could register it.
        text = text.partition(". Please install")[0]
        return f"{text}; it is part of PaddleFleet, which is not on PyPI: https://github.com/PaddlePaddle/PaddleFleet"
    return f"{text}; `pip install --no-deps paddleformers==1.2.0`" if missing == "paddleformers" else text


def apply(names: list[str], *, skip_missing: bool) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], list[str]]:
    """Replace the methods of these types of models: of all, or of none.

    Args:
        names: the types.
        skip_missing: whether types that cannot be imported are left, instead of an error.

    Returns:
        the methods that are replaced now; what was left, each with the reason; the names that were not applied before.

    Raises:
        RuntimeError: as `apply` of the package says.
    """
    reason = process_problem()
    if reason is not None:
        raise RuntimeError(f"apply: {reason}")
    loaded: dict[Target, type] = {}
    left: list[tuple[str, str]] = []
    found: list[str] = []
    for name in names:
        try:
            classes = {target: target.load() for target in MODELS[name].targets}
        except (ImportError, AttributeError) as error:
            reason = _reason(error)
            if not skip_missing:
                raise RuntimeError(f"apply: {name} cannot be imported from PaddleFormers: {reason}") from error
            left.append((name, f"cannot be imported: {reason}"))
            continue
        for target, cls in classes.items():
            reason = unknown_code(target, cls)
            if reason is not None:
                raise RuntimeError(f"apply: {reason}")
        found.append(name)
        loaded |= classes
        left += MODELS[name].left
    if not found:
        raise RuntimeError(f"apply: no type of model can be imported from PaddleFormers: {left[0][1]}")
    for target, cls in loaded.items():
        if target not in _replaced:
            _replaced[target] = cls, vars(cls).get(target.method, _ABSENT)
            setattr(cls, target.method, target.replacement)
    added = [name for name in found if name not in _applied]
    _applied.update(added)
    return tuple(target.path for target in loaded), tuple(left), added


def remove(names: list[str]) -> None:
    """Put the functions back that no other type needs replaced.

    Raises:
        RuntimeError: one was replaced by something else since; nothing is changed.
    """
    kept = {target for name in _applied.difference(names) for target in MODELS[name].targets}
    freed = [target for target in _replaced if target not in kept]
    for target in freed:
        if vars(_replaced[target][0]).get(target.method) is not target.replacement:
            raise RuntimeError(f"remove: {target.path} was replaced by something else since; undo that first")
    for target in freed:
        cls, value = _replaced.pop(target)
        if value is _ABSENT:
            delattr(cls, target.method)
        else:
            setattr(cls, target.method, value)
    _applied.difference_update(names)
