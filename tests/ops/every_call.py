# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""One good call of every public function, with every argument given: what tests of all arguments change, one by one."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops import Plan, reference
from tests.ops.problems import plan_tensors, tensor
from tests.params import FLOAT8_DTYPES

T, H, E, K, A, S = 5, 6, 3, 2, 4, 2
IDS = np.array([[0, 1], [2, -1], [1, 0], [-1, -1], [2, 0]], np.int32)
PROBS = np.linspace(0.1, 0.9, T * K, dtype=np.float32).reshape(T, K)


class Maps(NamedTuple):
    """Ids and the maps computed from them; equally many ids have maps of the same shapes."""

    ids: NDArray
    plan: reference.Plan
    row_probs: NDArray
    tokens_per_expert: NDArray
    expert_offsets: NDArray
    rowmap: NDArray
    mask: NDArray
    counts: NDArray
    row_id_map: NDArray
    slot_rows: NDArray
    slot_weights: NDArray


def maps_of(ids: NDArray) -> Maps:
    plan = reference.route(ids, PROBS, num_experts=E, padding_alignment=A)
    rowmap = reference.plan_to_rowmap(plan).astype(np.int32)
    return Maps(
        ids,
        plan,
        plan.row_probs,
        plan.tokens_per_expert,
        plan.expert_offsets,
        rowmap,
        rowmap >= 0,
        (rowmap >= 0).sum(axis=0).astype(np.int32),
        reference.make_row_id_map(plan.token_rows, plan.row_to_expert, E).astype(np.int32),
        np.maximum(plan.slot_to_row, 0),
        np.where(ids >= 0, PROBS, np.float32(0)),
    )


MAPS = maps_of(IDS)
PLAN, ROWMAP, MASK, COUNTS, ROW_ID_MAP = MAPS.plan, MAPS.rowmap, MAPS.mask, MAPS.counts, MAPS.row_id_map
N, ROUTED = PLAN.num_rows, int(MASK.sum())
SIZES, ORDER = np.array([1, 0, 3], np.int32), np.array([2, 0, 1], np.int32)
SHARDS = np.array([[1, 0, 2, 1], [0, 3, 1, 1]], np.int32)
CODES = np.ones((N, 200), np.float32).astype(FLOAT8_DTYPES[0])


def ones(*shape: int) -> NDArray:
    return np.ones(shape, np.float32)


class Call(NamedTuple):
    """A good call.

    Attributes:
        name: the family and the function.
        arguments: in the order of the signature; arrays stand for tensors, the oracle's plan for ours.
        free: axes of arguments that may have another size.
    """

    name: str
    arguments: dict[str, Any]
    free: tuple[tuple[str, int], ...] = ()

    @property
    def function(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def tensors(self) -> list[str]:
        return [name for name, value in self.arguments.items() if isinstance(value, np.ndarray)]

    def __str__(self) -> str:
        return self.name

    def run(self, place: object, **changes: Any) -> Any:
        module = importlib.import_module(f"paddle_moe_ops.{self.name.rpartition('.')[0]}")
        made = {name: made_of(value, place) for name, value in {**self.arguments, **changes}.items()}
        function = getattr(module, self.function)
        if "*tensors" not in made:
            return function(**made)
        names = list(made)
        before = [made.pop(name) for name in names[: names.index("*tensors")]]
        return function(*before, *made.pop("*tensors"), **made)


def made_of(value: Any, place: object) -> Any:
    if isinstance(value, np.ndarray):
        return tensor(value, place)
    if isinstance(value, reference.Plan):
        return plan_tensors(value, place)
    if isinstance(value, tuple) and not isinstance(value, Plan):
        return tuple(made_of(item, place) for item in value)
    if isinstance(value, list):
        return [made_of(item, place) for item in value]
    if isinstance(value, dict):
        return {key: made_of(item, place) for key, item in value.items()}
    return value


CALLS = [
    Call(
        "functional.moe_permute",
        {
            "hidden_states": ones(T, H),
            "scale": ones(T, S),
            "expert_routemap_topk": IDS,
            "expert_prob_topk": PROBS,
            "num_experts": E,
            "tokens_per_expert": COUNTS,
            "padding_alignment": A,
            "do_gather": True,
            "using_ue8m0_scale": False,
            "return_expert_indices": False,
            "override_buffer_size": -1,
            "name": None,
            "fill_padding": "all",
            "return_overflow": False,
            "validate": None,
        },
        free=(("hidden_states", 1), ("scale", 1)),
    ),
    Call(
        "functional.moe_unpermute",
        {
            "hidden_states_unzipped": ones(N, H),
            "zipped_expertwise_rowmap": ROWMAP,
            "expert_routemap_topk": IDS,
            "token_prob_unzipped": PLAN.row_probs,
            "total_zipped_tokens": T,
            "num_experts": E,
            "using_mix_precision": True,
            "using_weighted_combine": False,
            "name": None,
            "compat": "paddle",
            "validate": None,
        },
        free=(("hidden_states_unzipped", 1), ("expert_routemap_topk", 1)),
    ),
    Call(
        "functional.permute",
        {
            "x": ones(T, H),
            "plan": PLAN,
            "scale": ones(T, S),
            "quantize": None,
            "scale_layout": "row",
            "amax_min": 1e-4,
            "fill_padding": "all",
        },
        free=(("x", 1), ("scale", 1)),
    ),
    Call("functional.unpermute", {"y": ones(N, H), "plan": PLAN, "probs": PROBS}, free=(("y", 1),)),
    Call(
        "functional.sort_chunks",
        {"x": ones(T, H), "split_sizes": SIZES, "order": ORDER, "probs": ones(T), "validate": None},
        free=(("x", 1),),
    ),
    Call(
        "routing.route",
        {
            "routing": IDS,
            "probs": PROBS,
            "num_experts": E,
            "padding_alignment": A,
            "tokens_per_expert": COUNTS,
            "buffer_size": -1,
            "topk": K,
            "duplicates": "first",
            "capacity": np.array(2, np.int32),
            "validate": None,
        },
    ),
    Call(
        "routing.calculate_topk",
        {
            "gating": ones(T, 6),
            "top_k": 2,
            "use_sigmoid": True,
            "renormalize": False,
            "pre_act": True,
            "post_act": False,
            "correction_bias": ones(6),
            "num_groups": 3,
            "topk_groups": 2,
            "scores_per_group": 1,
            "scaling_factor": 2.0,
            "return_scores": False,
            "score_dtype": "float32",
        },
        free=(("gating", 0),),
    ),
    Call(
        "quantization.quantize_1x128",
        {"x": ones(T, H), "ue8m0": False, "scale_layout": "row", "amax_min": 1e-4},
        free=(("x", 0), ("x", 1)),
    ),
    Call(
        "quantization.dequantize_1x128",
        {"codes": CODES, "scales": ones(N, 2), "scale_layout": "row", "dtype": "float32"},
        free=(("codes", 1),),
    ),
    Call(
        "quantization.quantize_experts",
        {"gate_up": ones(E, H, 8), "down": ones(E, 4, H), "format": "int8", "transpose": False},
    ),
    Call(
        "quantization.quantized_experts",
        {
            "x": ones(T, H),
            "plan": PLAN,
            "expert_fn": lambda codes, scales, factor: codes.astype("float32") * factor,
            "expert_vjp": lambda d_out, codes, scales, factor: (
                d_out * factor,
                (d_out * codes.astype("float32")).sum().reshape([1]),
            ),
            "*tensors": (ones(1),),
            "quantize": "fp8_1x128",
            "scale_layout": "row",
            "amax_min": 1e-4,
        },
        free=(("x", 1),),
    ),
    Call(
        "gemm.grouped_gemm",
        {
            "X": ones(N, 4),
            "W": ones(E, 5, 4),
            "m_sizes": PLAN.tokens_per_expert,
            "transpose": True,
            "expert_offsets": PLAN.expert_offsets,
            "permute_x": False,
            "topk_weights": PLAN.row_probs,
            "weights_by": "row",
            "permute_y": False,
            "bias": ones(E, 5),
        },
    ),
    Call(
        "mlp.moe_mlp",
        {
            "x": ones(T, H),
            "plan": PLAN,
            "probs": PROBS,
            "gate_up": ones(E, H, 6),
            "down": ones(E, 3, H),
            "activation": "swiglu",
            "transpose": False,
            "weights_by": None,
            "keep": "h",
            "workspace_mb": 256,
            "accumulate": False,
            "gate_up_bias": ones(E, 6),
            "down_bias": ones(E, H),
            "compute": None,
            "float8_matrices": None,
            "defer_dw": False,
        },
    ),
    Call(
        "masked.make_row_id_map",
        {"routing_map": MASK, "num_out_tokens": 0, "num_topK": K, "fp8_padding": A, "validate": None},
        free=(("routing_map", 0),),
    ),
    Call(
        "masked.permute_with_mask_map",
        {
            "inp": ones(T, H),
            "row_id_map": ROW_ID_MAP,
            "num_out_tokens": N,
            "probs": ones(T, E),
            "scale": ones(T, S),
            "pad_offsets": np.zeros(E, np.int32),
            "zero_prob_as_padding": False,
            "validate": None,
        },
        free=(("inp", 1), ("scale", 1)),
    ),
    Call(
        "masked.unpermute_with_mask_map",
        {
            "inp": ones(N, H),
            "row_id_map": ROW_ID_MAP,
            "probs": ones(T, E),
            "pad_offsets": np.zeros(E, np.int32),
            "permuted_probs": ones(N),
            "validate": None,
        },
        free=(("inp", 1),),
    ),
    Call(
        "masked.unpermute_with_mask_map_bwd_with_merging_probs",
        {
            "fwd_output_grad": ones(T, H),
            "row_id_map": ROW_ID_MAP,
            "fwd_input": ones(N, H),
            "merging_probs": ones(T, E),
            "pad_offsets": np.zeros(E, np.int32),
            "validate": None,
        },
        free=(("fwd_input", 0),),
    ),
    Call(
        "masked.make_chunk_sort_map",
        {"split_sizes": SIZES, "sorted_indices": ORDER, "num_tokens": T, "validate": None},
    ),
    Call(
        "masked.sort_chunks_by_map",
        {
            "inp": ones(T, H),
            "chunk_map": np.array([4, 0, 1, 3, 2], np.int32),
            "probs": ones(T),
            "is_forward": True,
            "validate": None,
        },
        free=(("inp", 1),),
    ),
    Call(
        "masked.moe_permute",
        {
            "inp": ones(T, H),
            "routing_map": MASK,
            "num_out_tokens": ROUTED,
            "max_token_num": -1,
            "map_type": "mask",
            "scale": ones(T, S),
            "num_experts": None,
            "validate": None,
        },
        free=(("inp", 1), ("scale", 1), ("routing_map", 1)),
    ),
    Call(
        "masked.moe_permute_with_probs",
        {
            "inp": ones(T, H),
            "probs": ones(T, E),
            "routing_map": MASK,
            "num_out_tokens": ROUTED,
            "scale": ones(T, S),
            "zero_prob_as_padding": False,
            "validate": None,
        },
        free=(("inp", 1), ("scale", 1)),
    ),
    Call(
        "masked.moe_permute_and_pad_with_probs",
        {
            "inp": ones(T, H),
            "probs": ones(T, E),
            "routing_map": MASK,
            "tokens_per_expert": COUNTS,
            "align_size": A,
            "scale": ones(T, S),
            "zero_prob_as_padding": False,
            "validate": None,
        },
        free=(("inp", 1), ("scale", 1)),
    ),
    Call(
        "masked.moe_unpermute",
        {
            "inp": ones(N, H),
            "row_id_map": ROW_ID_MAP,
            "merging_probs": ones(T, E),
            "restore_shape": None,
            "map_type": "mask",
            "pad_offsets": np.zeros(E, np.int32),
            "validate": None,
        },
        free=(("inp", 0), ("inp", 1)),
    ),
    Call(
        "masked.moe_sort_chunks_by_index",
        {"inp": ones(T, H), "split_sizes": SIZES, "sorted_index": ORDER, "validate": None},
        free=(("inp", 0), ("inp", 1)),
    ),
    Call(
        "masked.moe_sort_chunks_by_index_with_probs",
        {"inp": ones(T, H), "probs": ones(T), "split_sizes": SIZES, "sorted_index": ORDER, "validate": None},
        free=(("inp", 1),),
    ),
    Call(
        "dispatch.token_dispatch",
        {
            "inp": ones(T, H),
            "routing_map": MASK,
            "num_out_tokens": ROUTED,
            "probs": ones(T, E),
            "align_size": A,
            "zero_prob_as_padding": False,
            "validate": None,
        },
        free=(("inp", 1),),
    ),
    Call(
        "dispatch.token_combine",
        {
            "inp": ones(N, H),
            "row_id_map": ROW_ID_MAP,
            "merging_probs": ones(N),
            "pad_offsets": np.zeros(E, np.int32),
            "validate": None,
        },
        free=(("inp", 1),),
    ),
    Call(
        "dispatch.sort_chunks_by_index",
        {"inp": ones(T, H), "split_sizes": SIZES, "sorted_indices": ORDER, "validate": None},
        free=(("inp", 0), ("inp", 1)),
    ),
    Call(
        "dispatch.routing_map_to_selected_experts",
        {"sparse_probs": ones(T, E), "routing_map": MASK, "topk": K},
    ),
    *(
        Call(
            f"dispatch.{name}",
            {
                "all_shards_tokens_per_expert": SHARDS,
                "shard_id": np.array(1, np.int32),
                "num_expert_shards": 2,
            },
        )
        for name in ("compute_ragged_all_to_all_params", "compute_reverse_ragged_all_to_all_params")
    ),
    Call(
        "dispatch.local_permute_after_a2a",
        {
            "x_recv": ones(9, H),
            "all_shards_tokens_per_expert": SHARDS,
            "shard_id": np.array(1, np.int32),
            "num_expert_shards": 2,
        },
        free=(("x_recv", 0), ("x_recv", 1)),
    ),
    Call(
        "dispatch.local_unpermute_before_a2a",
        {
            "expert_outputs": ones(9, H),
            "state": {"sorted_split_sizes": SIZES, "inverse_chunk_indices": ORDER},
        },
        free=(("expert_outputs", 0), ("expert_outputs", 1)),
    ),
    Call(
        "indexed.get_routing_indices",
        {
            "selected_experts": IDS,
            "num_experts": E,
            "return_scatter_indices": False,
            "index_dtype": "int32",
            "validate": None,
        },
        free=(("selected_experts", 0), ("selected_experts", 1)),
    ),
    Call(
        "indexed.permute",
        {"X": ones(2, H), "gather_indices": np.array([3, 0, 2, 1]), "topk": 2, "validate": None},
        free=(("X", 1),),
    ),
    Call(
        "indexed.unpermute",
        {"X": ones(4, H), "gather_indices": np.array([3, 0, 2, 1]), "validate": None},
        free=(("X", 1),),
    ),
]
