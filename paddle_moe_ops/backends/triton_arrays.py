# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle's tensors in the form that launchers of `paddle_moe_ops.triton` accept."""

from __future__ import annotations

from typing import Any

from paddle import Tensor

from .._build_check import loaded_library
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


def _library() -> Any:
    """Kernels and functions of the compiled library for a device, as far as they exist."""
    from ..triton.hopper_float8 import float8_kernels_of
    from ..triton.hopper_outer import grouped_outer_of
    from ..triton.hopper_product import grouped_product_of

    library = loaded_library()
    if library is None:
        return paddle_device.Library(functions=native.recordings)
    kernels = grouped_product_of(library), grouped_outer_of(library), float8_kernels_of(library)
    return paddle_device.Library(*kernels, native.recordings)


def device_of(*tensors: Tensor | None) -> Any:
    """The device that contains tensors, with the compiled library's kernels for it."""
    return paddle_device.device_of(with_elements([each for each in tensors if each is not None]), _library)
