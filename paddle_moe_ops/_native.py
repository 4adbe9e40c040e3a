# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Facts about tensors for Python code, from the compiled library (csrc/paddle/tensor_facts.cc) or in Python.

Every call of a layer needs these functions, and in Python they take several times longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from paddle import Tensor

__all__ = ["Native", "native"]


def _no_plan(*_: Any) -> Any:
    raise RuntimeError("this needs the compiled operators")


def _no_facts(*_: Any) -> None:
    return None


def _carries_graph(*values: Any) -> bool | None:
    if any(isinstance(each, Tensor) and not each.stop_gradient for each in values):
        return True
    return None if any(isinstance(each, (tuple, list, dict)) for each in values) else False


def _watch(*tensors: Any) -> Any:
    return [(weakref.ref(tensor), tensor.inplace_version) for tensor in tensors]


def _was_changed(watched: Any) -> bool:
    tensors = ((reference(), version) for reference, version in watched)
    return any(tensor is not None and tensor.inplace_version != version for tensor, version in tensors)


class Native:
    """The functions: those in Python, or those of the library once it is loaded.

    Attributes:
        facts: of tensors or None; returns bytes that differ if dtypes, shapes, strides, alignments or places do, or
            None if one tensor is unusual.
        watch: of tensors; returns an argument for `was_changed` that does not keep them alive.
        was_changed: of a result of `watch`; True if one of the tensors still exists and was changed in place since.
        carries_graph: of values of any type; True if one is a tensor that requires a gradient, or None if one is a
            container, which would have to be searched.
        recordings: a `triton.native_recording.Functions`, or None.
        layer_takes: of tokens and sizes; returns whether the library has kernels for a layer.
        layer_plan: of sizes; returns the library's choices for a layer on the current GPU.
    """

    def __init__(self) -> None:
        self.facts: Callable[..., bytes | None] = _no_facts
        self.watch: Callable[..., Any] = _watch
        self.was_changed: Callable[[Any], bool] = _was_changed
        self.carries_graph: Callable[..., bool | None] = _carries_graph
        self.recordings: Any = None
        self.layer_takes: Callable[..., bool] = _no_plan
        self.layer_plan: Callable[..., tuple[int, ...]] = _no_plan

    def load(self, module: Any) -> None:
        """Use the functions of the library, a Python module; under Paddle 2 it has none."""
        if hasattr(module, "_facts"):
            self.facts, self.watch, self.was_changed = module._facts, module._watch, module._was_changed
            self.carries_graph = module._carries_graph
            self.recordings = _Recordings(module)
            self.layer_takes, self.layer_plan = module._layer_takes, module._layer_plan


class _Recordings:
    def __init__(self, module: Any) -> None:
        self.facts, self.new_recording, self.repeat = module._facts, module._new_recording, module._repeat


native = Native()
