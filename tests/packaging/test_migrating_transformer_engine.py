# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Functions that docs/migrating_transformer_engine.md calls the same as in TransformerEngine are the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.compat import transformer_engine, transformer_engine_jax
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.masked_model import model_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating_transformer_engine.md").read_text(encoding="utf-8")


# Every row of the tables is a call by position, in the order that the row names

MODULES = {
    "transformer_engine.pytorch": transformer_engine,
    "transformer_engine.jax.permutation": transformer_engine_jax,
}


class Row(NamedTuple):
    package: str
    function: str
    arguments: list[str]
    differences: str

    def __str__(self) -> str:
        return f"{self.package}.{self.function}"


def rows_of_tables() -> list[Row]:
    rows = []
    for package in MODULES:
        section = PAGE.partition(f"## From `{package}`")[2].partition("\n## ")[0]
        for first, differences in re.findall(r"^\| (`.*?`) \| (.*?) \|", section, re.MULTILINE):
            function, arguments = re.fullmatch(r"`(\w+)\((.*)\)`", first).groups()
            rows.append(Row(package, function, arguments.split(", "), differences))
    return rows


ROWS = rows_of_tables()
T, E, H, A = 5, 3, 4, 4
MASK = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 0, 1], [1, 1, 1]], np.int32)
MODEL, PADDED = model_of(MASK > 0), model_of(MASK > 0, A)
N, P = int(MASK.sum()), int(PADDED.starts[-1])  # rows, and rows with padding
ROOM = (N + E * (A - 1)) // A * A
X = np.arange(1, T * H + 1, dtype=np.float32).reshape(T, H)
Y = np.linspace(-2, 2, N * H, dtype=np.float32).reshape(N, H)
PROBS = np.where(np.arange(T * E) % 4 == 2, 0, np.linspace(0.1, 0.9, T * E)).reshape(T, E).astype(np.float32)
IDS = np.array([[0, 2], [1, 0], [2, 2], [0, 1], [1, 2]], np.int32)
SIZES, ORDER = np.array([2, 0, 2], np.int32), np.array([2, 0, 1], np.int32)
CHUNKS = reference.sort_chunks(X, SIZES, ORDER, X[:, 0])
RANKS = np.array([[1, 0, 2, 1], [0, 3, 1, 1]], np.int32)  # rank 1 receives 2, 1, 1 and 1 rows
RECEIVED = np.array([0, 1, 3, 2, 4])  # by expert


def blanked(model: Any, rows: int) -> NDArray:
    return np.where(model.permuted_pairs(PROBS, rows)[:, None] == 0, np.float32(0), model.permuted(X, rows))


def by_hand() -> tuple[NDArray, NDArray]:
    """The gradients of the weighted sum, whose gradient is X."""
    weights = MODEL.permuted_pairs(PROBS, N)[:, None]
    products = (MODEL.permuted(X, N).astype(np.float64) * Y).sum(axis=1)
    return weights * MODEL.permuted(X, N), MODEL.pairs(products.astype(np.float32))


def state() -> dict[str, Any]:
    names = ("x_recv", "all_shards_tokens_per_expert", "shard_id", "num_expert_shards")
    calls = CALLS["transformer_engine.jax.permutation.local_permute_after_a2a"][0]
    return transformer_engine_jax.local_permute_after_a2a(*(made_of(calls[name]) for name in names))[2]


def made_of(value: Any) -> Any:
    if callable(value):
        return value()
    return to_tensor(value, "cpu") if isinstance(value, np.ndarray) else value


TORCH, JAX = MODULES
SIZES_OF_MAP = {"num_tokens": T, "num_experts": E, "hidden_size": H}
EXCHANGE = {"all_shards_tokens_per_expert": RANKS, "shard_id": np.array(1, np.int32), "num_expert_shards": 2}
SENDS = np.array([[1, 3], [3, 2]], np.int32)
# The arguments by name, and the results that TransformerEngine documents, None if it returns None.
CALLS: dict[str, tuple[dict[str, Any], Callable[[], list[Any]]]] = {
    f"{TORCH}.moe_permute": (
        {"inp": X, "routing_map": MASK, "num_out_tokens": N, "max_token_num": -1, "map_type": "mask"},
        lambda: [MODEL.permuted(X, N), MODEL.row_id_map()],
    ),
    f"{TORCH}.moe_permute_with_probs": (
        {"inp": X, "probs": PROBS, "routing_map": MASK, "num_out_tokens": N},
        lambda: [blanked(MODEL, N), MODEL.permuted_pairs(PROBS, N), MODEL.row_id_map()],
    ),
    f"{TORCH}.moe_permute_and_pad_with_probs": (
        {"inp": X, "probs": PROBS, "routing_map": MASK, "tokens_per_expert": MODEL.counts, "align_size": A},
        lambda: [
            blanked(PADDED, P),
            PADDED.permuted_pairs(PROBS, P),
            MODEL.row_id_map(),
            PADDED.pad_offsets,
            np.diff(PADDED.starts).astype(np.int64),
        ],
    ),
    f"{TORCH}.moe_unpermute": (
        {
            "inp": Y,
            "row_id_map": MODEL.row_id_map(),
            "merging_probs": PROBS,
            "restore_shape": [T, H],
            "map_type": "mask",
            "probs": None,
            "pad_offsets": None,
        },
        lambda: [MODEL.combined(Y, PROBS)],
    ),
    f"{TORCH}.moe_sort_chunks_by_index": (
        {"inp": X, "split_sizes": SIZES, "sorted_index": ORDER},
        lambda: [CHUNKS[0]],
    ),
    f"{TORCH}.moe_sort_chunks_by_index_with_probs": (
        {"inp": X, "probs": X[:, 0].copy(), "split_sizes": SIZES, "sorted_index": ORDER},
        lambda: [CHUNKS[0], CHUNKS[1]],
    ),
    f"{TORCH}.make_row_id_map": (
        {"routing_map": MASK, "num_tokens": T, "num_experts": E, "num_out_tokens": N - 2},
        lambda: [model_of(MASK > 0, 1, N - 2).row_id_map()],
    ),
    f"{TORCH}.permute_with_mask_map": (
        {
            "inp": X,
            "row_id_map": MODEL.row_id_map(),
            "probs": PROBS,
            "scale": X[:, :2].copy(),
            "pad_offsets": PADDED.pad_offsets,
            "num_out_tokens": P,
            "scale_hidden_dim": 2,
            **SIZES_OF_MAP,
        },
        lambda: [
            blanked(PADDED, P),
            PADDED.permuted(X[:, :2], P),
            PADDED.permuted_pairs(PROBS, P),
        ],
    ),
    f"{TORCH}.unpermute_with_mask_map": (
        {
            "inp": Y,
            "row_id_map": MODEL.row_id_map(),
            "merging_probs": PROBS,
            "permuted_probs": Y[:, 0].copy(),
            "pad_offsets": None,
            **SIZES_OF_MAP,
        },
        lambda: [MODEL.combined(Y, PROBS), MODEL.pairs(Y[:, 0])],
    ),
    f"{TORCH}.unpermute_with_mask_map_bwd_with_merging_probs": (
        {
            "fwd_output_grad": X,
            "row_id_map": MODEL.row_id_map(),
            "fwd_input": Y,
            "merging_probs": PROBS,
            "pad_offsets": None,
            "num_out_tokens": N,
            **SIZES_OF_MAP,
        },
        lambda: [*by_hand()],
    ),
    f"{TORCH}.make_chunk_sort_map": (
        {"split_sizes": SIZES, "sorted_indices": ORDER, "num_tokens": T, "num_splits": 3},
        lambda: [CHUNKS[2]],
    ),
    f"{TORCH}.sort_chunks_by_map": (
        {
            "inp": X,
            "row_id_map": CHUNKS[2],
            "probs": X[:, 0].copy(),
            "num_tokens": T,
            "hidden_size": H,
            "is_forward": True,
        },
        lambda: [CHUNKS[0], CHUNKS[1]],
    ),
    f"{JAX}.token_dispatch": (
        {"inp": X, "routing_map": MASK, "num_out_tokens": N, "probs": PROBS, "align_size": A},
        lambda: [
            blanked(PADDED, ROOM),
            PADDED.permuted_pairs(PROBS, ROOM),
            MODEL.row_id_map(),
            PADDED.pad_offsets,
            np.diff(PADDED.starts).astype(np.int32),
        ],
    ),
    f"{JAX}.token_combine": (
        {"inp": Y, "row_id_map": MODEL.row_id_map(), "merging_probs": PROBS.reshape(1, T, E), "pad_offsets": None},
        lambda: [MODEL.combined(Y, PROBS)],
    ),
    f"{JAX}.sort_chunks_by_index": (
        {"inp": X, "split_sizes": SIZES, "sorted_indices": ORDER},
        lambda: [CHUNKS[0], CHUNKS[2]],
    ),
    f"{JAX}.routing_map_to_selected_experts": (
        {"sparse_probs": PROBS[[0, 2]], "routing_map": MASK[[0, 2]], "topk": 2},
        lambda: [np.array([[0, 2], [0, 1]]), PROBS[[[0], [2]], [[0, 2], [0, 1]]]],
    ),
    f"{JAX}.compute_ragged_all_to_all_params": (
        EXCHANGE,
        lambda: [np.array([0, 3], np.int32), SENDS[1], SENDS[0], SENDS[:, 1]],
    ),
    f"{JAX}.compute_reverse_ragged_all_to_all_params": (
        EXCHANGE,
        lambda: [np.array([0, 3], np.int32), SENDS[:, 1], SENDS[:, 0], SENDS[1]],
    ),
    f"{JAX}.local_permute_after_a2a": (
        {"x_recv": X, **EXCHANGE},
        lambda: [X[RECEIVED], np.array([3, 2], np.int32)],
    ),
    f"{JAX}.local_unpermute_before_a2a": ({"expert_outputs": X[RECEIVED], "state": state}, lambda: [X]),
}


def test_the_tables_name_every_function_and_its_arguments():
    for package, module in MODULES.items():
        rows = [row for row in ROWS if row.package == package]
        assert sorted(row.function for row in rows) == sorted(module.__all__)
        for row in rows:
            parameters = inspect.signature(getattr(module, row.function)).parameters.values()
            positional = [each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
            assert positional == row.arguments, row


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_is_the_same_is_the_same(row):
    assert row.differences.startswith("the same")
    arguments, expected = CALLS[str(row)]
    results = getattr(MODULES[row.package], row.function)(*(made_of(arguments[name]) for name in row.arguments))
    results = results if isinstance(results, tuple) else (results,)
    results = [result for result in results if not isinstance(result, dict)]  # a state is not for callers to read
    for got, wanted in zip(results, expected(), strict=True):
        if row.function.endswith("_bwd_with_merging_probs"):  # sums of products, in any order
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5)
        else:
            assert_bits_equal(got, wanted)
