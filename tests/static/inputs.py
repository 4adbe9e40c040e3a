# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of the calls of `cases`: functions of a generator and a number of tokens that return inputs."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.routing import half_unassigned, random_probs

H, E, K, A = 20, 5, 3, 4
INNER = 6
SCALES = 2
BUFFER = 260  # more rows than 60 tokens need
SMALL_BUFFER = 19  # fewer rows than 30 tokens need
Inputs = dict[str, NDArray]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUTED, GROUPS = 12, {"num_groups": 4, "topk_groups": 2}


def token_inputs(
    dtype: DTypeLike = np.float32, leave_out: str = "", **extra: Callable[..., NDArray]
) -> Callable[..., Inputs]:
    """x, ids and probs except those in `leave_out`, and what `extra` makes of the generator and the ids."""

    def make(rng: np.random.Generator, tokens: int) -> Inputs:
        ids = half_unassigned(rng, tokens, K, E)
        x = rng.standard_normal((tokens, H)).astype(dtype)
        inputs = {"x": x, "ids": ids, "probs": random_probs(rng, ids)}
        inputs = {name: array for name, array in inputs.items() if name not in leave_out.split()}
        return {**inputs, **{name: make_input(rng, ids) for name, make_input in extra.items()}}

    return make


def row_inputs(dtype: DTypeLike = np.float32, ids_dtype: DTypeLike = np.int32) -> Callable[..., Inputs]:
    """Inputs of `moe_unpermute`, with rows that are not copies of tokens."""

    def make(rng: np.random.Generator, tokens: int) -> Inputs:
        ids = half_unassigned(rng, tokens, K, E)
        probs = random_probs(rng, ids)
        _, rowmap, row_probs, _ = reference.moe_permute(np.zeros((tokens, 1), np.float32), None, ids, probs, E, None, A)
        rows = rng.standard_normal((len(row_probs), H)).astype(dtype)
        return {"rows": rows, "rowmap": rowmap, "ids": ids.astype(ids_dtype), "row_probs": row_probs}

    return make


def plan_inputs(dtype: DTypeLike = np.float32, with_probs: bool = True) -> Callable[..., Inputs]:
    """Routing, and rows for `unpermute` that are not copies of tokens."""

    def make(rng: np.random.Generator, tokens: int) -> Inputs:
        inputs = row_inputs(dtype)(rng, tokens)
        probs = {"probs": random_probs(rng, inputs["ids"])} if with_probs else {}
        return {"rows": inputs["rows"], "ids": inputs["ids"], **probs}

    return make


def mask_inputs(rng: np.random.Generator, tokens: int) -> Inputs:
    mask = rng.random((tokens, E)) < 0.5
    mask[:, :2] = False  # at most topk = 3 are left
    return {
        "x": rng.standard_normal((tokens, H)).astype(np.float32),
        "mask": mask,
        "probs": rng.random(mask.shape, np.float32),
    }


def mask_inputs_without_probs(rng: np.random.Generator, tokens: int) -> Inputs:
    inputs = mask_inputs(rng, tokens)
    return {"x": inputs["x"], "mask": inputs["mask"]}


def row_scales(rng: np.random.Generator, ids: NDArray) -> NDArray:
    return rng.random((len(ids), SCALES), np.float32)


def packed_scales(rng: np.random.Generator, ids: NDArray) -> NDArray:
    return rng.integers(0, 2**31, (len(ids), SCALES), dtype=np.int32)


def true_counts(dtype: DTypeLike) -> Callable[..., NDArray]:
    return lambda rng, ids: np.bincount(ids[ids >= 0], minlength=E).astype(dtype)


def chunk_inputs(dtype: DTypeLike = np.float32, with_probs: bool = True) -> Callable[..., Inputs]:
    """Rows in seven chunks, some of them empty, and rows after the last."""

    def make(rng: np.random.Generator, tokens: int) -> Inputs:
        probs = {"probs": rng.random(tokens, np.float32)} if with_probs else {}
        return {
            "x": rng.standard_normal((tokens, H)).astype(dtype),
            "sizes": rng.multinomial(tokens - tokens // 5, rng.dirichlet(np.full(7, 0.5))),
            "order": rng.permutation(7).astype(np.int32),
            **probs,
        }

    return make


def gating_inputs(dtype: DTypeLike = np.float32, with_bias: bool = True) -> Callable[..., Inputs]:
    """Logits of twelve experts, with ties, and a correction bias."""

    def make(rng: np.random.Generator, tokens: int) -> Inputs:
        gating = rng.integers(-8, 8, (tokens, ROUTED)) / 4
        bias = {"bias": rng.standard_normal(ROUTED).astype(np.float32)} if with_bias else {}
        return {"gating": gating.astype(dtype), **bias}

    return make


def stacked(dtype: DTypeLike, height: int, width: int) -> Callable[..., NDArray]:
    """A matrix for each expert."""
    return lambda rng, ids: rng.standard_normal((E, height, width)).astype(dtype)


def expert_weights(rng: np.random.Generator, ids: NDArray) -> NDArray:
    return rng.standard_normal((E, 6, H)).astype(np.float32)
