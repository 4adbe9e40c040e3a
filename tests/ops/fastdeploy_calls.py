# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A good call of every operator of `paddle_moe_ops.compat.fastdeploy`, or more."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_moe_ops.reference import fastdeploy as oracle
from tests.ops.every_call import IDS, PROBS, Call, E, H, K, T, ones
from tests.params import FLOAT8_DTYPES, SUM_DTYPES

I, M, LARGE = 4, 5, 128  # noqa: E741
E4M3 = FLOAT8_DTYPES[0]
LOCAL_IDS = IDS.astype(np.int64)
COUNTS = oracle.tokens_per_expert(LOCAL_IDS, E)
NUM_ROWS = int(COUNTS[0].sum())
DISPATCHED = oracle.moe_expert_dispatch(ones(T, H), PROBS @ ones(K, E), None, None, K, False, "", True)
RECEIVED = oracle.ep_moe_expert_dispatch(ones(T, H), LOCAL_IDS, PROBS, None, COUNTS[0].tolist(), NUM_ROWS, "")
PLACES = oracle.prefill_permute_to_masked_gemm(ones(T, H), ones(T, 2), LOCAL_IDS, E, M)


def fastdeploy(name: str, *free: tuple[str, int], **arguments: Any) -> Call:
    return Call(f"compat.fastdeploy.{name}", arguments, free)


_GROUPS = {"n_group": 1, "topk_group": 1, "topk": K, "renormalize": True, "routed_scaling_factor": 2.5}
_TABLES = {
    "expert_id_to_ep_rank_array": np.arange(2 * E, dtype=np.int32).reshape(E, 2),
    "expert_in_rank_num_list": np.full(E, 2, np.int32),
    "tokens_per_expert_stats_list": np.zeros(E, np.int32),
}
_SOFTMAX = {"moe_topk": K, "apply_norm_weight": True, "enable_softmax_top_k_fused": False}
_DISPATCH = {"group_moe": False, "moe_quant_type": "w4a8", "topk_only_mode": False}
_UNREAD = {"down_proj_in_scale": None, "expert_idx_per_token": None, "max_tokens_per_expert": None}


def _ffn(rows: Any, tokens: Any, up_gate: Any, down: Any, scales: Any, method: str, low_latency: bool) -> Call:
    return fastdeploy(
        "moe_expert_ffn",
        ("permute_input", 1 if low_latency else 0),
        permute_input=rows,
        tokens_expert_prefix_sum=tokens,
        up_gate_proj_weight=up_gate,
        down_proj_weight=down,
        up_proj_in_scale=None,
        up_gate_proj_bias=ones(E, 2 * down.shape[1]) if scales is None else None,
        up_gate_proj_scale=None if scales is None else scales[0],
        down_proj_scale=None if scales is None else scales[1],
        **_UNREAD,
        quant_method=method,
        used_in_ep_low_latency=low_latency,
        estimate_total_token_nums=-1,
        hadamard_block_size=128,
        activation="swiglu",
    )


# A static graph cannot hold them: they make float8 codes, lists, or write to an argument.
DYGRAPH_NAMES = (
    *("moe_redundant_topk_select", "noaux_tc_redundant", "get_expert_token_num", "per_token_quant"),
    *("per_token_quant_padding", "masked_per_token_quant", "fused_mask_swiglu_fp8_quant"),
)

# Calls of operators that add to an argument.
COUNTING_CALLS = [
    fastdeploy(
        "moe_redundant_topk_select",
        ("gating_logits", 0),
        gating_logits=ones(T, E),
        **_TABLES,
        bias=ones(E),
        **_SOFTMAX,
        redundant_ep_rank_num_plus_one=2,
    ),
    fastdeploy(
        "noaux_tc_redundant",
        scores=ones(T, E),
        scores_with_bias=ones(T, E),
        **_TABLES,
        **_GROUPS,
        redundant_ep_rank_num_plus_one=2,
    ),
]
OTHER_CALLS = [
    fastdeploy("moe_topk_select", ("gating_logits", 0), gating_logits=ones(T, E), bias=ones(E), **_SOFTMAX),
    fastdeploy("noaux_tc", scores=ones(T, E), scores_with_bias=ones(T, E), **_GROUPS),
    fastdeploy(
        "grouped_topk", ("gating_output", 0), gating_output=ones(T, E), e_score_correction_bias=ones(E), **_GROUPS
    ),
    fastdeploy(
        "count_tokens_per_expert_func",
        ("topk_ids", 0),
        ("topk_ids", 1),
        topk_ids=LOCAL_IDS,
        num_experts=E,
        compute_padded_cumsum=True,
    ),
    fastdeploy("get_expert_token_num", ("topk_ids", 0), ("topk_ids", 1), topk_ids=LOCAL_IDS, num_experts=E),
    fastdeploy(
        "moe_expert_dispatch",
        ("input", 1),
        input=ones(T, H),
        gating_output=ones(T, E),
        gating_correction_bias=ones(E),
        w4a8_in_scale=ones(E),
        moe_topk=K,
        **_DISPATCH,
    ),
    fastdeploy(
        "moe_expert_reduce",
        ("ffn_out", 0),
        ("down_proj_bias", 0),
        ffn_out=ones(T * K, H),
        top_k_weight=PROBS,
        permute_indices_per_token=DISPATCHED.permute_indices_per_token,
        top_k_indices=DISPATCHED.topk_idx,
        down_proj_bias=ones(E, H),
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    _ffn(ones(T, H), np.full(E, T), ones(E, H, 2 * I), ones(E, I, H), None, "w16a16", False),
    _ffn(ones(E, M, H), np.array([M, 0, 2]), ones(E, H, 2 * I), ones(E, I, H), None, "none", True),
    _ffn(
        ones(T, LARGE).astype(SUM_DTYPES[2]),
        np.full(E, T),
        np.ones((E, 2 * LARGE, LARGE), np.int8),
        np.ones((E, LARGE, LARGE), np.int8),
        (ones(E, 2 * LARGE), ones(E, 2, LARGE)),
        "weight_only_int8",
        False,
    ),
    fastdeploy(
        "ep_moe_expert_dispatch",
        ("input", 1),
        input=ones(T, H),
        topk_ids=LOCAL_IDS,
        topk_weights=PROBS,
        up_gate_proj_in_scale=ones(E),
        token_nums_per_expert=COUNTS[0].tolist(),
        token_nums_this_rank=NUM_ROWS,
        moe_quant_type="w4a8",
    ),
    fastdeploy(
        "ep_moe_expert_dispatch_fp8",
        ("input", 1),
        ("scale", 1),
        input=ones(T, H).astype(E4M3),
        scale=ones(T, 2),
        topk_ids=LOCAL_IDS,
        topk_weights=PROBS,
        num_experts_per_rank_tensor=COUNTS[0],
        num_experts_per_rank_padded_tensor=np.full(E, 8, np.int32),
        use_in_ep=True,
        token_nums_this_rank_padded=8 * E,
    ),
    fastdeploy(
        "ep_moe_expert_combine",
        ffn_out=ones(NUM_ROWS, H),
        expert_scales_float=ones(NUM_ROWS),
        permute_indices_per_token=RECEIVED.permute_indices_per_token,
        top_k_indices=RECEIVED.dst_indices,
        down_proj_bias=ones(E, H),
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    fastdeploy(
        "prefill_permute_to_masked_gemm",
        ("x", 1),
        ("scale", 1),
        ("topk_ids", 1),
        x=ones(T, H).astype(SUM_DTYPES[2]),
        scale=ones(T, 2),
        topk_ids=LOCAL_IDS,
        num_local_experts=E,
        max_token_num=M,
    ),
    fastdeploy(
        "depermute_prefill_combine",
        ("x", 0),
        ("x", 1),
        ("x", 2),
        x=ones(E, M, H),
        indice_map=PLACES.permuted_indice_map,
        topk_weights=PROBS,
        num_worst_tokens=T,
    ),
    fastdeploy("per_token_quant", ("input", 0), ("input", 1), input=ones(T, 200), block_size=128, use_ue8m0=True),
    fastdeploy("per_token_quant_padding", ("input", 0), input=ones(T, 256), block_size=128, use_ue8m0=True),
    fastdeploy(
        "masked_per_token_quant",
        ("input", 1),
        ("input", 2),
        input=ones(E, M, 200),
        recv_expert_count=np.array([1, 0, M], np.int32),
        block_size=128,
        use_ue8m0=True,
    ),
    fastdeploy(
        "fused_mask_swiglu_fp8_quant",
        ("input", 1),
        input=ones(E, M, 200),
        token_nums_per_expert=np.array([1, 0, M], np.int32),
        block_size=32,
        use_ue8m0=False,
    ),
    fastdeploy("from_weight_quantize", ("packed", 0), packed=np.ones((E, 4, 64), np.int8), algo="weight_only_int8"),
    fastdeploy("to_weight_quantize", ("codes", 0), codes=np.ones((E, 64, 4), np.int8), algo="weight_only_int4"),
]
FASTDEPLOY_CALLS = [*COUNTING_CALLS, *OTHER_CALLS]
