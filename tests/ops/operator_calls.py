# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Good calls of the compiled operators, one of each; `bad_operator_calls` spoils them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle

from paddle_moe_ops import reference
from tests.ops.bad_arguments import array, zeros

T, H, E, K, A, S = 5, 7, 3, 2, 2, 4
IDS = np.array([[0, 1], [1, -1], [2, 0], [-1, -1], [1, 2]], np.int32)
PROBS = np.linspace(0.5, 1, T * K, dtype=np.float32).reshape(T, K)
PLAN = reference.route(IDS, PROBS, num_experts=E, padding_alignment=A)
ROWMAP = reference.plan_to_rowmap(PLAN)
N = PLAN.num_rows

FLOAT32 = paddle.float32.value

MAPS = {"slot_to_row": array(PLAN.slot_to_row), "token_rows": array(PLAN.token_rows)}
ROW_TO_TOKEN, ROW_TO_SLOT = {"row_to_token": array(PLAN.row_to_token)}, {"row_to_slot": array(PLAN.row_to_slot)}
DESCRIBED = {"hidden": H, "hidden_dtype": FLOAT32}
COUNTING = {"counts_source": 0, "tokens_per_expert_list": []}
NO_SCALE = {"has_scale": False, "scale_cols": -1, "scale_dtype": FLOAT32}
NEEDED = {"need_rows_grad": True, "need_probs_grad": True}
CHUNKS = {"split_sizes": array([1, 3]), "order": array([1, 0])}
MOE_ROWS = {
    "hidden_states_unzipped": zeros(N, H),
    "zipped_expertwise_rowmap": array(ROWMAP),
    "expert_routemap_topk": array(IDS),
    "token_prob_unzipped": zeros(N),
    "compat_paddle": False,
    "checks": 0,
    **DESCRIBED,
    "need_rows_grad": True,
    "need_prob_grad": True,
}
ROUTE = {
    "counts": None,
    "num_experts": E,
    "topk": -1,
    "padding_alignment": A,
    **COUNTING,
    "buffer_size": -1,
    "duplicates": 0,
    "checks": 0,
}
WEIGHTED = {
    "rows": zeros(N, H),
    "probs": zeros(N),
    "token_rows": MAPS["token_rows"],
    **ROW_TO_TOKEN,
    **ROW_TO_SLOT,
}


# A layer of experts.
EXPERTS = {
    "x": zeros(T, H),
    "gate_up": zeros(E, H, 2 * S),
    "down": zeros(E, S, H),
    "weights": zeros(N),
    "token_rows": MAPS["token_rows"],
    **ROW_TO_TOKEN,
    "sizes": array(PLAN.tokens_per_expert),
    "offsets": array(PLAN.expert_offsets),
    "slot_to_row": MAPS["slot_to_row"],
    "transpose": False,
    "keep_hidden": True,
    "need_x_grad": True,
    "need_gate_up_grad": True,
    "need_down_grad": True,
    "need_weights_grad": True,
    "in_place": False,
    "workspace": 1 << 30,
    "by_slot": False,
    "float8_wgrads": False,
}
# The same with matrices that are int8 codes.
CODES = {
    "x": EXPERTS["x"],
    "gate_up": zeros(E, H, 2 * S, dtype=np.int8),
    "gate_up_scales": zeros(E, 2 * S),
    "down": zeros(E, S, H, dtype=np.int8),
    "down_scales": zeros(E, H),
    **{name: EXPERTS[name] for name in ("weights", "token_rows", "row_to_token", "sizes", "offsets", "slot_to_row")},
    **{name: EXPERTS[name] for name in ("transpose", "keep_hidden", "need_x_grad", "need_weights_grad")},
    **{name: EXPERTS[name] for name in ("in_place", "workspace", "by_slot")},
    "format": 0,
}
# operator -> arguments that it takes, in their order
GOOD_CALLS: dict[str, dict[str, Any]] = {
    "route": {"routing": array(IDS), **ROUTE},
    "route_with_probs": {"routing": array(IDS), "probs": array(PROBS), **ROUTE},
    "permute": {"x": zeros(T, H), "scale": None, **MAPS, **ROW_TO_TOKEN, "fill": 3, **NO_SCALE, **DESCRIBED},
    "unpermute": {"rows": zeros(N, H), "token_rows": MAPS["token_rows"], **ROW_TO_TOKEN, **DESCRIBED},
    "unpermute_weighted": {**WEIGHTED, **NEEDED},
    "unpermute_weighted_backward": {**WEIGHTED, "d_out": zeros(T, H), **NEEDED},
    "moe_permute": {
        "hidden_states": zeros(T, H),
        "scale": None,
        "expert_routemap_topk": array(IDS),
        "expert_prob_topk": array(PROBS),
        "counts": None,
        "num_experts": E,
        **COUNTING,
        "padding_alignment": A,
        "do_gather": True,
        "return_expert_indices": False,
        "override_buffer_size": -1,
        "fill": 3,
        "checks": 0,
        **DESCRIBED,
        "need_hidden_grad": True,
        "need_prob_grad": True,
        **NO_SCALE,
    },
    "moe_unpermute": MOE_ROWS,
    "moe_unpermute_weighted": MOE_ROWS,
    "sort_chunks": {"x": zeros(T, H), **CHUNKS, "checks": 0, **DESCRIBED},
    "sort_chunks_with_probs": {
        "x": zeros(T, H),
        "probs": zeros(T),
        **CHUNKS,
        "checks": 0,
        **DESCRIBED,
        "need_x_grad": True,
        "need_probs_grad": True,
    },
    "chunk_sort_map": {**CHUNKS, "buffer_size": -1, "checks": 0},
    "make_row_id_map": {
        "token_rows": MAPS["token_rows"],
        "row_to_expert": array(PLAN.row_to_expert),
        "pad_offsets": None,
        "num_experts": E,
    },
    "read_rowmap": {
        "map": array(ROWMAP),
        "pad_offsets": None,
        "num_rows": None,
        "is_row_id_map": False,
        "buffer_size": N,
        "checks": 0,
    },
    "slots_to_rows": {"slot_values": array(PROBS), "slot_to_row": MAPS["slot_to_row"], **ROW_TO_SLOT},
    "rows_to_slots": {"row_values": zeros(N), "slot_to_row": MAPS["slot_to_row"], **ROW_TO_SLOT},
    "calculate_topk": {
        "gating": zeros(T, E),
        "correction_bias": None,
        "top_k": K,
        "use_sigmoid": False,
        "renormalize": True,
        "pre_act": True,
        "num_groups": 1,
        "topk_groups": 1,
        "scores_per_group": 2,
        "scaling_factor": 1.0,
        "return_scores": False,
    },
    "grouped_product": {
        "x": zeros(T, H),
        "matrices": zeros(E, S, H),
        "sizes": array([2, 0, 1]),
        "offsets": array([0, 2, 3, 4]),
        "transpose": True,
        "follow": False,
        "wide": False,
        "need_x_grad": True,
        "need_w_grad": True,
    },
    **dict.fromkeys(("moe_mlp", "moe_mlp_float8"), EXPERTS),
    "moe_mlp_quantized": CODES,
    "dequantize_matrices": {
        "codes": CODES["down"],
        "scales": CODES["down_scales"],
        "inner": S,
        "outer": H,
        "transpose": False,
        "format": 0,
        "dtype": FLOAT32,
    },
    "quantize_1x128": {"x": zeros(T, H), "ue8m0": False, "by_column": False, "amax_min": 1e-4},
    "permute_quantized": {
        "x": zeros(T, H),
        "slot_to_row": MAPS["slot_to_row"],
        **ROW_TO_TOKEN,
        "fill": 3,
        "ue8m0": False,
        "by_column": False,
        "amax_min": 1e-4,
    },
    "dequantize_1x128": {
        "codes": zeros(T, H, dtype=ml_dtypes.float8_e4m3fn),
        "scales": zeros(T, 1),
        "by_column": False,
        "dtype": FLOAT32,
    },
}


def by_position(operator: str, arguments: dict[str, Any]) -> list[Any]:
    """Positional arguments of an operator; moe_permute has its numbers as one list, then the counts of a list."""
    if operator != "moe_permute":
        return list(arguments.values())
    arguments = dict(arguments)
    counts = arguments.pop("tokens_per_expert_list")
    values, tensors = list(arguments.values()), list(arguments).index("num_experts")
    return [*values[:tensors], [*map(int, values[tensors:]), *counts]]
