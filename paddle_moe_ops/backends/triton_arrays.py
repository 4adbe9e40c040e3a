# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle's tensors in the form that launchers of `paddle_moe_ops.triton` accept."""

from __future__ import annotations

from typing import Any

from paddle import Tensor

from .._graphs import dense, with_elements
from .._native import native
from ..triton.launch import paddle_device

__all__ = ["aligned", "dense_rows", "device_of"]

_ALIGNMENT = 16


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy unless the elements of each row are contiguous."""
    return tensor if tensor.is_contiguous() or tensor.strides[1] == 1 else dense(tensor)


def aligned(tensor: Tensor) -> Tensor:
    """A contiguous tensor at an aligned address: the bits of a dot product depend on the access width."""
    found = dense(tensor)
    return found if found.data_ptr() % _ALIGNMENT == 0 else found.clone()


def device_of(*tensors: Tensor | None) -> Any:
    """The device that contains tensors; the compiled library repeats its recorded calls."""
    return paddle_device.device_of(with_elements([each for each in tensors if each is not None]), native.recordings)
