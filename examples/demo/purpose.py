# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The package's purpose: Paddle's own pair of functions on this device, this package's pair, and sizes of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F

from paddle_moe_ops import moe_permute, moe_unpermute

TOKENS, HIDDEN, EXPERTS, TOPK = 64, 128, 4, 2
PADDLES = "paddle.nn.functional.moe_permute"


class Sizes(NamedTuple):
    """The sizes of an MoE layer and of its router's choice."""

    model: str
    hidden: int
    experts: int
    topk: int


REAL = Sizes("ERNIE-4.5-21B", hidden=2560, experts=64, topk=6)


def what_happens(permute: Callable[..., Any], unpermute: Callable[..., Any]) -> str:
    """Send tokens to experts and back through a pair of functions with Paddle's signatures, and report the outcome.

    Args:
        permute: `moe_permute`, Paddle's or this package's.
        unpermute: `moe_unpermute`.

    Returns:
        The first line of an error, or which gradients arrive.
    """
    router = paddle.nn.Linear(HIDDEN, EXPERTS)
    x = paddle.randn([TOKENS, HIDDEN]).astype("bfloat16")
    x.stop_gradient = False
    probs, ids = paddle.topk(F.softmax(router(x.detach().astype("float32"))), TOPK)
    ids = ids.astype("int32")
    counts = paddle.bincount(ids.flatten(), minlength=EXPERTS).tolist()
    try:
        rows, rowmap, row_probs, _ = permute(x, None, ids, probs, EXPERTS, counts, 1)
        out, _ = unpermute(rows, rowmap, ids, row_probs, TOKENS, EXPERTS, using_weighted_combine=True)
        out.astype("float32").square().sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    arrive = [name for name, tensor in (("tokens", x), ("router", router.weight)) if _has_gradient(tensor)]
    return f"runs; gradients: {' and '.join(arrive) or 'none'}"


def paddles_pair() -> str:
    """The outcome with Paddle's own functions on this device."""
    return what_happens(F.moe_permute, F.moe_unpermute)


def our_pair() -> str:
    """The outcome with this package's functions."""
    return what_happens(moe_permute, moe_unpermute)


def _has_gradient(tensor: paddle.Tensor) -> bool:
    return tensor.grad is not None and bool(tensor.grad.astype("float32").abs().max() > 0)
