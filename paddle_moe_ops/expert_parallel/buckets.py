# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients in flat buckets, so that one collective adds up many of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import paddle
from paddle import Tensor

from .._graphs import context_manager

__all__ = ["reduce_in_buckets", "rounded_once", "widened"]

BUCKET_BYTES = 25 * 2**20
_SUM_BYTES = 4  # of float32, in which 16 bits are added up


def widened(gradient: Tensor) -> Tensor:
    """Return a float32 copy of a dense gradient of 16 bits, or any other gradient itself."""
    return gradient.astype("float32") if _is_narrow(gradient) else gradient


@context_manager
def rounded_once(gradient: Tensor) -> Iterator[Tensor]:
    """Yield the tensor to reduce and scale in place; afterwards the gradient has its values, in its own dtype."""
    total = widened(gradient)
    yield total
    if total is not gradient:
        paddle.assign(total.astype(gradient.dtype), gradient)


def reduce_in_buckets(gradients: Sequence[Tensor], reduce: Callable[[Tensor], None]) -> None:
    """Reduce gradients in place, in buckets of at most `BUCKET_BYTES`; copies need the memory of one bucket.

    The buckets depend on the sizes and dtypes alone, so they are the same on all ranks. A large gradient has no copy,
    or if it has 16 bits a copy of one bucket at a time.

    Args:
        gradients: dense, of one dtype and on one device.
        reduce: function that changes a tensor in place, elementwise. It gets float32 for gradients of 16 bits.
    """
    for bucket in _buckets(gradients):
        first = bucket[0]
        if len(bucket) > 1 or not first.is_contiguous():
            _reduce_packed(bucket, reduce)
        elif _is_narrow(first):
            _reduce_slices(first, reduce)
        else:
            reduce(first)


def _is_narrow(gradient: Tensor) -> bool:
    return gradient.dtype in (paddle.float16, paddle.bfloat16) and gradient.is_dense()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours whose sums fit into a bucket; a larger gradient is alone."""
    bucket: list[Tensor] = []
    room = BUCKET_BYTES
    for each in gradients:
        size = math.prod(each.shape) * max(each.element_size(), _SUM_BYTES)  # Tensor.size is slow
        if bucket and size > room:
            yield bucket
            bucket, room = [], BUCKET_BYTES
        bucket.append(each)
        room -= size
    if bucket:
        yield bucket


def _reduce_packed(bucket: Sequence[Tensor], reduce: Callable[[Tensor], None]) -> None:
    packed = paddle.concat([each.reshape([-1]) for each in bucket])
    with rounded_once(packed) as total:
        reduce(total)
    start = 0
    for each in bucket:
        end = start + math.prod(each.shape)
        paddle.assign(packed[start:end].reshape(each.shape), each)
        start = end


def _reduce_slices(gradient: Tensor, reduce: Callable[[Tensor], None]) -> None:
    flat, step = gradient.view([-1]), BUCKET_BYTES // _SUM_BYTES
    for start in range(0, flat.size, step):
        total = widened(flat[start : start + step])
        reduce(total)
        flat[start : start + step] = total.astype(gradient.dtype)
