# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Routings as they occur in models, and the extreme ones, as pure functions of a NumPy generator.

Each takes ``(rng, num_tokens, topk, num_experts)`` and returns int32 [T, K] expert ids with -1 for an unassigned
slot. No token names an expert twice; with topk > num_experts the slots that are left over are -1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "GENERATORS",
    "all_to_one",
    "all_unassigned",
    "expert_parallel_sparse",
    "first_experts",
    "half_unassigned",
    "random_probs",
    "uniform",
    "zipf",
]

Generator = Callable[[np.random.Generator, int, int, int], NDArray[np.int32]]


def uniform(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray[np.int32]:
    """Every choice of experts is equally likely: a well balanced router.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import uniform
        >>> ids = uniform(np.random.default_rng(0), num_tokens=5, topk=2, num_experts=8)
        >>> ids.shape, ids.dtype, bool((ids[:, 0] != ids[:, 1]).all())
        ((5, 2), dtype('int32'), True)
    """
    return _draw_distinct(rng, num_tokens, topk, np.ones(num_experts))


def zipf(
    rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int, exponent: float = 1.0
) -> NDArray[np.int32]:
    """The n-th most popular expert is drawn n**-exponent as often as the first: an unbalanced router.

    The popular experts are drawn as well, so hot segments lie anywhere in the buffer.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import zipf
        >>> ids = zipf(np.random.default_rng(0), num_tokens=1024, topk=2, num_experts=8)
        >>> load = np.bincount(ids.ravel(), minlength=8)
        >>> bool(load.max() > 3 * load.min())
        True
    """
    popularity = np.arange(1, num_experts + 1) ** -exponent
    return _draw_distinct(rng, num_tokens, topk, rng.permutation(popularity))


def all_to_one(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray[np.int32]:
    """Every token goes to the same expert, in its first slot: the worst possible hot spot.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import all_to_one
        >>> ids = all_to_one(np.random.default_rng(0), num_tokens=5, topk=2, num_experts=8)
        >>> len(set(ids[:, 0].tolist())), ids[:, 1].tolist()
        (1, [-1, -1, -1, -1, -1])
    """
    ids = _unassigned(num_tokens, topk)
    ids[:, 0] = rng.integers(num_experts)
    return ids


def first_experts(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray[np.int32]:
    """Every token goes to experts 0 to K-1 in a random order of slots; all other segments are empty.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import first_experts
        >>> ids = first_experts(np.random.default_rng(0), num_tokens=5, topk=2, num_experts=8)
        >>> np.sort(ids, axis=1).tolist()
        [[0, 1], [0, 1], [0, 1], [0, 1], [0, 1]]
    """
    ids = _unassigned(num_tokens, topk)
    ids[:, :num_experts] = np.arange(min(topk, num_experts))
    return rng.permuted(ids, axis=1)


def half_unassigned(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray[np.int32]:
    """As `uniform`, with half of the slots unassigned at random; some tokens keep no slot.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import half_unassigned
        >>> ids = half_unassigned(np.random.default_rng(0), num_tokens=5, topk=2, num_experts=8)
        >>> ids.shape, bool((ids >= -1).all())
        ((5, 2), True)
    """
    ids = uniform(rng, num_tokens, topk, num_experts)
    return np.where(rng.random(ids.shape) < 0.5, np.int32(-1), ids)


def all_unassigned(rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int) -> NDArray[np.int32]:
    """No token goes anywhere.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import all_unassigned
        >>> ids = all_unassigned(np.random.default_rng(0), num_tokens=5, topk=2, num_experts=8)
        >>> ids.tolist()
        [[-1, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]
    """
    return _unassigned(num_tokens, topk)


def expert_parallel_sparse(
    rng: np.random.Generator, num_tokens: int, topk: int, num_experts: int, mean_valid: float = 1.4
) -> NDArray[np.int32]:
    """Routing that a rank receives under expert parallelism: few slots of each token name an expert of this rank.

    Every token has one such slot at least (otherwise it would not have been sent to this rank), ``mean_valid`` on
    average as long as topk and num_experts leave room, at random places among its slots.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import expert_parallel_sparse
        >>> ids = expert_parallel_sparse(np.random.default_rng(0), num_tokens=5, topk=2, num_experts=8)
        >>> bool(((ids >= 0).sum(axis=1) >= 1).all())
        True
    """
    ids = uniform(rng, num_tokens, topk, num_experts)
    others = max(min(topk, num_experts) - 1, 0)
    share = min((mean_valid - 1) / others, 1.0) if others else 0.0
    valid = 1 + rng.binomial(others, share, num_tokens)
    return rng.permuted(np.where(np.arange(topk) < valid[:, None], ids, np.int32(-1)), axis=1)


GENERATORS: dict[str, Generator] = {
    function.__name__: function
    for function in (
        uniform,
        zipf,
        all_to_one,
        first_experts,
        half_unassigned,
        all_unassigned,
        expert_parallel_sparse,
    )
}


def random_probs(rng: np.random.Generator, ids: NDArray) -> NDArray[np.float32]:
    """float32 [T, K] in (0, 1]: each token's probabilities sum to 1 over its assigned slots, the others are 0.

    Examples:
        >>> import numpy as np
        >>> from paddle_moe_ops.testing.routing import random_probs, uniform
        >>> rng = np.random.default_rng(0)
        >>> probs = random_probs(rng, uniform(rng, num_tokens=5, topk=2, num_experts=8))
        >>> np.allclose(probs.sum(axis=1), 1)
        True
    """
    weights = np.where(ids >= 0, 1.0 - rng.random(ids.shape), 0.0)
    totals = weights.sum(axis=1, keepdims=True)
    return (weights / np.where(totals == 0, 1.0, totals)).astype(np.float32)


def _unassigned(num_tokens: int, topk: int) -> NDArray[np.int32]:
    return np.full((num_tokens, topk), -1, np.int32)


def _draw_distinct(rng: np.random.Generator, num_tokens: int, topk: int, popularity: NDArray) -> NDArray[np.int32]:
    """Draw topk different experts per token, the more popular ones more often and in earlier slots."""
    num_experts = len(popularity)
    # The first topk of exponential waiting times are a draw without replacement (Efraimidis and Spirakis, 2006).
    waiting_times = rng.standard_exponential((num_tokens, num_experts)) / popularity
    ids = _unassigned(num_tokens, topk)
    ids[:, :num_experts] = np.argsort(waiting_times, axis=1)[:, :topk]
    return ids
