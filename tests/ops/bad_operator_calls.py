# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Bad calls of the compiled operators: each a good one but for some arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle

from paddle_moe_ops import reference
from tests.ops.bad_arguments import array, zeros
from tests.ops.operator_calls import GOOD_CALLS, MAPS, PLAN, PROBS, E, H, K, N, S, T

BFLOAT16, INT32 = paddle.bfloat16.value, paddle.int32.value
LARGE = 2**31 - 1
ROW_ID_MAP = reference.make_row_id_map(PLAN.token_rows, PLAN.row_to_expert, E)


class BadCall(NamedTuple):
    """Arguments that turn a good call into a bad one, and the operator's message."""

    operator: str
    changes: dict[str, Any]
    message: str

    def __str__(self) -> str:
        return f"{self.operator}-{'+'.join(self.changes)}-{self.message}"[:120]


def int64(*shape: int) -> Callable[[Any], Any]:
    return zeros(*shape, dtype=np.int64)


def int8(*shape: int) -> Callable[[Any], Any]:
    return zeros(*shape, dtype=np.int8)


def int32(*shape: int) -> Callable[[Any], Any]:
    return zeros(*shape, dtype=np.int32)


def wrong_shape(name: str, expected: str, given: list[int]) -> str:
    return f"{name} must be of shape {expected}, but got {given}"


def wrong_dtype(name: str, expected: str, given: str) -> str:
    return f"{name} must be {expected}, but got {given}"


ANY_MATRIX, ANY_VECTOR, SLOTS = "[any, any]", "[any]", f"[{T}, {K}]"
INTEGERS = "int32 or int64"
COUNTED = {"counts_source": 2, "counts": array(PLAN.routed_per_expert)}
MASK = {"routing": zeros(T, E, dtype=np.bool_), "topk": K}
WITH_SCALE = {"has_scale": True, "scale_cols": S}
NOT_DESCRIBED = "the attributes hidden and hidden_dtype must describe the rows"
NO_LINES = "the map must have one line per token"
NO_TENSOR = "a required tensor is missing"
NOT_MOVED = "has a dtype that this operator does not move: float64"
ONE_LINE_PER_TOKEN = "expert_routemap_topk must have one line per token"
SHORT_OFFSETS = "offsets must have one entry for each expert at least"
SUMMED = "x must be float32, float16 or bfloat16"
FLOAT64 = np.float64


def bad(operator: str, message: str, **changes: Any) -> BadCall:
    return BadCall(operator, changes, message)


def bad_route(operator: str) -> list[BadCall]:
    """Bad counts come with checks of the data: otherwise a GPU does not read them."""
    buffer = "the static buffer must have -1 (none) or 0 to 2^31 - 1 rows"
    return [
        bad(operator, wrong_shape("the routing", ANY_MATRIX, [T]), routing=int32(T)),
        bad(operator, wrong_dtype("the routing", INTEGERS, "float32"), routing=zeros(T, K)),
        bad(operator, "topk must be given with a mask, and only there", topk=K),
        bad(operator, "topk must be given with a mask, and only there", routing=MASK["routing"]),
        bad(operator, "num_experts must be in [1, 2^16]", num_experts=0),
        bad(operator, "padding_alignment must be in [1, 2^31)", padding_alignment=0),
        bad(operator, buffer, buffer_size=-2),
        bad(operator, buffer, buffer_size=2**31),
        bad(operator, "tokens_per_expert is missing", counts_source=2, checks=1),
        bad(
            operator,
            "tokens_per_expert must have num_experts entries",
            counts_source=1,
            tokens_per_expert_list=[1],
            checks=1,
        ),
        bad(
            operator, "tokens_per_expert must have num_experts entries", counts_source=2, counts=int32(E + 1), checks=1
        ),
        bad(
            operator,
            wrong_shape("tokens_per_expert", ANY_VECTOR, [E, 1]),
            counts_source=2,
            counts=int32(E, 1),
            checks=1,
        ),
        bad(
            operator, wrong_dtype("tokens_per_expert", INTEGERS, "float32"), counts_source=2, counts=zeros(E), checks=1
        ),
        bad(
            operator,
            "tokens_per_expert must hold counts in [0, 2^31), but entry 1 is -3",
            counts_source=2,
            counts=array([1, -3, 2]),
            checks=1,
        ),
        bad(
            operator,
            "tokens_per_expert must hold counts in [0, 2^31), but entry 2 is 2147483648",
            counts_source=2,
            counts=array([0, 0, 2**31]),
            checks=1,
        ),
        bad(
            operator,
            "padding_alignment must give a buffer of fewer than 2^31 rows, but 2147483647 gives 6442450941",
            padding_alignment=LARGE,
        ),
    ]


def bad_scale(operator: str) -> list[BadCall]:
    missing = "scale is missing"
    return [
        bad(operator, "has_scale must be true with a scale", scale=zeros(T, S)),
        bad(operator, wrong_shape("scale", ANY_MATRIX, [T]), scale=zeros(T), **WITH_SCALE),
        bad(operator, "scale must have one line per token", scale=zeros(T - 1, S), **WITH_SCALE),
        bad(operator, "scale must have one line per token", scale=zeros(T + 1, S), **WITH_SCALE),
        bad(
            operator,
            "the attribute scale_dtype must describe the scale",
            scale=int32(T, S),
            **WITH_SCALE,
        ),
        bad(operator, missing, **WITH_SCALE),
        bad(operator, missing, has_scale=True),
        bad(operator, "scale must be float32 or int32", has_scale=True, scale_cols=0, scale_dtype=BFLOAT16),
    ]


def bad_sum(operator: str) -> list[BadCall]:
    """Bad calls of the plain sum, the weighted sum and its gradient alike."""
    return [
        bad(operator, wrong_shape("the rows", ANY_MATRIX, [N]), rows=zeros(N)),
        bad(operator, wrong_shape("row_to_token", f"[{N}]", [N - 1]), row_to_token=int32(N - 1)),
        bad(operator, wrong_shape("row_to_token", f"[{N}]", [N, 1]), row_to_token=int32(N, 1)),
        bad(operator, wrong_shape("row_to_token", f"[{N - 1}]", [N]), rows=zeros(N - 1, H)),
        bad(operator, wrong_dtype("row_to_token", "int32", "int64"), row_to_token=int64(N)),
        bad(operator, wrong_shape("token_rows", ANY_MATRIX, [T]), token_rows=int32(T)),
        bad(operator, wrong_dtype("token_rows", "int32", "int64"), token_rows=int64(T, K)),
    ]


def bad_weights(operator: str) -> list[BadCall]:
    by_slot = {"probs": array(PROBS)}
    return [
        *bad_sum(operator),
        bad(operator, wrong_dtype("the probabilities", "float32", "float64"), probs=zeros(N, dtype=FLOAT64)),
        bad(operator, "the probabilities must have one value per row", probs=zeros(N - 1)),
        bad(operator, wrong_shape("row_to_slot", f"[{N}]", [N + 1]), row_to_slot=int32(N + 1), **by_slot),
        bad(operator, wrong_dtype("row_to_slot", "int32", "int64"), row_to_slot=int64(N), **by_slot),
    ]


def bad_combine(operator: str) -> list[BadCall]:
    rows, rowmap, ids = "hidden_states_unzipped", "zipped_expertwise_rowmap", "expert_routemap_topk"
    one_each = "token_prob_unzipped must have one value per row"
    return [
        bad(operator, wrong_shape(rows, ANY_MATRIX, [N]), hidden_states_unzipped=zeros(N)),
        bad(operator, NOT_DESCRIBED, hidden_states_unzipped=zeros(N, H + 1)),
        bad(operator, NOT_DESCRIBED, hidden_dtype=BFLOAT16),
        bad(operator, one_each, hidden_states_unzipped=zeros(N + 1, H)),
        bad(operator, one_each, token_prob_unzipped=zeros(N - 1)),
        bad(operator, wrong_shape(rowmap, ANY_MATRIX, [T]), zipped_expertwise_rowmap=int32(T)),
        bad(operator, wrong_dtype(rowmap, "int32", "int64"), zipped_expertwise_rowmap=int64(T, E)),
        bad(operator, wrong_shape(ids, ANY_MATRIX, [T]), expert_routemap_topk=int32(T)),
        bad(operator, wrong_dtype(ids, INTEGERS, "float32"), expert_routemap_topk=zeros(T, K)),
        bad(operator, ONE_LINE_PER_TOKEN, expert_routemap_topk=int32(T - 1, K)),
        bad(operator, ONE_LINE_PER_TOKEN, zipped_expertwise_rowmap=int32(T - 1, E)),
        bad(
            operator,
            wrong_dtype("token_prob_unzipped", "float32", "float64"),
            token_prob_unzipped=zeros(N, dtype=FLOAT64),
        ),
        bad(operator, "dtype must be float32, float16 or bfloat16", **INTEGER_ROWS),
    ]


INTEGER_ROWS = {"hidden_states_unzipped": int32(N, H), "hidden_dtype": INT32}


def bad_chunks(operator: str) -> list[BadCall]:
    return [
        bad(operator, wrong_shape("split_sizes", ANY_VECTOR, [2, 1]), split_sizes=int64(2, 1)),
        bad(operator, wrong_shape("order", "[2]", [3]), order=int64(3)),
        bad(operator, wrong_dtype("split_sizes", INTEGERS, "float32"), split_sizes=zeros(2)),
        bad(operator, wrong_dtype("order", INTEGERS, "float32"), order=zeros(2)),
    ]


def bad_sort(operator: str) -> list[BadCall]:
    return [
        *bad_chunks(operator),
        bad(operator, wrong_shape("x", ANY_MATRIX, [T]), x=zeros(T)),
        bad(operator, NOT_DESCRIBED, hidden=H - 1),
        bad(operator, NOT_DESCRIBED, x=zeros(T, H, dtype=FLOAT64)),
    ]


def bad_maps(operator: str) -> list[BadCall]:
    """Bad calls of both operators that permute into expert order."""
    short = PLAN.slot_to_row[:-1]
    return [
        bad(operator, wrong_shape("x", ANY_MATRIX, [T]), x=zeros(T)),
        bad(
            operator, NO_LINES, **dict.fromkeys(sorted({"slot_to_row", *MAPS} & {*GOOD_CALLS[operator]}), array(short))
        ),
        bad(operator, wrong_dtype("slot_to_row", "int32", "int64"), slot_to_row=int64(T, K)),
        bad(operator, wrong_dtype("row_to_token", "int32", "int64"), row_to_token=int64(N)),
        bad(operator, wrong_shape("row_to_token", ANY_VECTOR, [N, 1]), row_to_token=int32(N, 1)),
    ]


BAD_CALLS = [
    *bad_route("route"),
    *bad_route("route_with_probs"),
    bad("route", "the mask must have num_experts columns", **{**MASK, "routing": zeros(T, E - 1, dtype=np.bool_)}),
    bad("route", "topk must be at most num_experts for a mask", **{**MASK, "topk": E + 1}),
    bad("route_with_probs", wrong_dtype("the probabilities", "float32", "float64"), probs=zeros(T, K, dtype=FLOAT64)),
    bad("route_with_probs", wrong_shape("the probabilities", SLOTS, [T - 1, K]), probs=zeros(T - 1, K)),
    bad("route_with_probs", wrong_shape("the probabilities", f"[{T}, {E}]", [T, K]), **MASK),
    *bad_maps("permute"),
    *bad_scale("permute"),
    bad("permute", NOT_DESCRIBED, hidden=H + 1),
    bad("permute", NOT_DESCRIBED, hidden_dtype=BFLOAT16),
    bad("permute", f"the rows {NOT_MOVED}", x=zeros(T, H, dtype=FLOAT64), hidden_dtype=paddle.float64.value),
    bad("permute", wrong_shape("token_rows", SLOTS, [T, K + 1]), token_rows=int32(T, K + 1)),
    bad("permute", wrong_shape("token_rows", SLOTS, [T - 1, K]), token_rows=int32(T - 1, K)),
    bad("permute", wrong_dtype("token_rows", "int32", "int64"), token_rows=int64(T, K)),
    bad("permute", wrong_shape("slot_to_row", ANY_MATRIX, [T]), slot_to_row=int32(T), token_rows=int32(T)),
    *bad_sum("unpermute"),
    bad("unpermute", NOT_DESCRIBED, hidden=H + 1),
    bad("unpermute", NOT_DESCRIBED, hidden_dtype=BFLOAT16),
    bad("unpermute", NOT_DESCRIBED, hidden=-1, hidden_dtype=BFLOAT16),
    *bad_weights("unpermute_weighted"),
    bad("unpermute_weighted", "dtype must be float32, float16 or bfloat16", rows=int32(N, H)),
    bad("unpermute_weighted", wrong_shape("row_to_slot", f"[{N}]", [N - 1]), row_to_slot=int32(N - 1)),
    *bad_weights("unpermute_weighted_backward"),
    bad("moe_permute", wrong_shape("hidden_states", ANY_MATRIX, [T]), hidden_states=zeros(T)),
    bad("moe_permute", NOT_DESCRIBED, hidden=H + 1),
    bad("moe_permute", ONE_LINE_PER_TOKEN, hidden_states=zeros(T + 1, H)),
    bad("moe_permute", ONE_LINE_PER_TOKEN, hidden_states=zeros(T - 1, H)),
    bad("moe_permute", ONE_LINE_PER_TOKEN, hidden_states=zeros(T + 1, H), do_gather=False),
    bad(
        "moe_permute",
        "expert_routemap_topk must hold expert ids",
        expert_routemap_topk=zeros(T, E, dtype=np.bool_),
        expert_prob_topk=zeros(T, E),
    ),
    bad("moe_permute", wrong_shape("the routing", ANY_MATRIX, [T]), expert_routemap_topk=int32(T)),
    bad("moe_permute", wrong_dtype("the routing", INTEGERS, "float32"), expert_routemap_topk=zeros(T, K)),
    bad("moe_permute", wrong_shape("the probabilities", SLOTS, [T, K + 1]), expert_prob_topk=zeros(T, K + 1)),
    bad(
        "moe_permute",
        wrong_dtype("the probabilities", "float32", "float64"),
        expert_prob_topk=zeros(T, K, dtype=FLOAT64),
    ),
    bad("moe_permute", "tokens_per_expert is missing", counts_source=2, checks=1),
    bad(
        "moe_permute", "tokens_per_expert must have num_experts entries", counts_source=2, counts=int32(E - 1), checks=1
    ),
    *bad_scale("moe_permute"),
    *bad_combine("moe_unpermute"),
    *bad_combine("moe_unpermute_weighted"),
    *bad_sort("sort_chunks"),
    *bad_sort("sort_chunks_with_probs"),
    bad("sort_chunks_with_probs", wrong_shape("probs", f"[{T}]", [T - 1]), probs=zeros(T - 1)),
    bad("sort_chunks_with_probs", wrong_shape("probs", f"[{T}]", [T, 1]), probs=zeros(T, 1)),
    bad(
        "sort_chunks_with_probs",
        wrong_dtype("the probabilities", "float32", "float64"),
        probs=zeros(T, dtype=FLOAT64),
    ),
    *bad_chunks("chunk_sort_map"),
    bad("chunk_sort_map", "split_sizes must add up to less than 2^31", split_sizes=array([1, -1])),
    bad("chunk_sort_map", "split_sizes must add up to less than 2^31", split_sizes=array([LARGE, 1])),
    bad("chunk_sort_map", "the number of rows must be -1 (the chunks') or below 2^31", buffer_size=-2),
    bad("chunk_sort_map", "the number of rows must be -1 (the chunks') or below 2^31", buffer_size=2**31),
    bad("make_row_id_map", wrong_shape("token_rows", ANY_MATRIX, [T]), token_rows=int32(T)),
    bad("make_row_id_map", wrong_dtype("token_rows", "int32", "int64"), token_rows=int64(T, K)),
    bad("make_row_id_map", wrong_shape("row_to_expert", ANY_VECTOR, [N, 1]), row_to_expert=int32(N, 1)),
    bad("make_row_id_map", wrong_dtype("row_to_expert", "int32", "float32"), row_to_expert=zeros(N)),
    bad("make_row_id_map", wrong_shape("pad_offsets", f"[{E}]", [E + 1]), pad_offsets=int32(E + 1)),
    bad("make_row_id_map", wrong_dtype("pad_offsets", "int32", "int64"), pad_offsets=int64(E)),
    bad("make_row_id_map", "num_experts must be in [1, 2^16]", num_experts=0),
    bad("make_row_id_map", "num_experts must be in [1, 2^16]", num_experts=2**16 + 1),
    bad("read_rowmap", wrong_shape("the map", ANY_MATRIX, [T]), map=int32(T)),
    bad("read_rowmap", wrong_dtype("the map", "int32", "int64"), map=int64(T, E)),
    bad("read_rowmap", "the map must have 2 * num_experts + 1 columns", is_row_id_map=True, map=int32(T, 2 * E)),
    bad("read_rowmap", "the map must have 2 * num_experts + 1 columns", is_row_id_map=True, map=int32(T, 1)),
    bad(
        "read_rowmap",
        wrong_shape("pad_offsets", f"[{E}]", [E - 1]),
        is_row_id_map=True,
        map=array(ROW_ID_MAP),
        pad_offsets=int32(E - 1),
    ),
    bad(
        "read_rowmap",
        wrong_dtype("pad_offsets", "int32", "int64"),
        is_row_id_map=True,
        map=array(ROW_ID_MAP),
        pad_offsets=int64(E),
    ),
    bad("read_rowmap", "the buffer must have 0 to 2^31 - 1 rows", buffer_size=-2),
    bad("read_rowmap", "the buffer must have 0 to 2^31 - 1 rows", buffer_size=2**31),
    bad("read_rowmap", "the number of rows is missing", buffer_size=-1),
    bad("read_rowmap", "the number of rows is missing", buffer_size=-1, num_rows=int32(2)),
    bad("read_rowmap", wrong_dtype("the number of rows", INTEGERS, "float32"), buffer_size=-1, num_rows=zeros(1)),
    bad("read_rowmap", "the buffer must have 0 to 2^31 - 1 rows", buffer_size=-1, num_rows=array(-1)),
    bad("read_rowmap", "the buffer must have 0 to 2^31 - 1 rows", buffer_size=-1, num_rows=array(2**31)),
    bad("grouped_product", wrong_shape("X", f"[any, {H}]", [T]), x=zeros(T)),
    bad("grouped_product", wrong_shape("X", f"[any, {H}]", [T, H + 1]), x=zeros(T, H + 1)),
    bad("grouped_product", "X must be float32, float16 or bfloat16", x=zeros(T, H, dtype=FLOAT64)),
    bad("grouped_product", wrong_shape("W", "[any, any, any]", [S, H]), matrices=zeros(S, H)),
    bad("grouped_product", wrong_dtype("W", "float32", "float64"), matrices=zeros(E, S, H, dtype=FLOAT64)),
    bad("grouped_product", wrong_shape("m_sizes", f"[{E}]", [E + 1]), sizes=int64(E + 1)),
    bad("grouped_product", wrong_dtype("m_sizes", INTEGERS, "float32"), sizes=zeros(E)),
    bad("grouped_product", wrong_shape("expert_offsets", ANY_VECTOR, [E, 1]), offsets=int64(E, 1)),
    bad("grouped_product", wrong_dtype("expert_offsets", INTEGERS, "float32"), offsets=zeros(E)),
    bad("grouped_product", f"expert_{SHORT_OFFSETS}", offsets=int64(E - 1)),
    bad("moe_mlp_quantized", "the format is unknown", format=-1),
    bad("moe_mlp_quantized", "the format is unknown", format=4),
    bad("moe_mlp_quantized", wrong_shape("gate_up", "[any, any, any]", [H, 2 * S]), gate_up=int8(H, 2 * S)),
    bad("moe_mlp_quantized", wrong_shape("gate_up", f"[{E}, any, any]", [E + 1, H, 2]), gate_up=int8(E + 1, H, 2)),
    bad("moe_mlp_quantized", wrong_shape("gate_up", f"[{E}, {H}, 2]", [E, H - 1, 2]), gate_up=int8(E, H - 1, 2)),
    bad("moe_mlp_quantized", wrong_shape("down", f"[{E}, {S}, {H}]", [E, S + 1, H]), down=int8(E, S + 1, H)),
    bad("moe_mlp_quantized", "down must be int8, but got float32", down=zeros(E, S, H)),
    bad("moe_mlp_quantized", wrong_shape("the scales", f"[{E}, {H}]", [E, S]), down_scales=zeros(E, S)),
    bad("moe_mlp_quantized", wrong_dtype("the scales", "float32", "int32"), down_scales=int32(E, H)),
    bad("dequantize_matrices", wrong_shape("codes", "[any, any, any]", [S, H]), codes=int8(S, H)),
    bad("dequantize_matrices", wrong_dtype("codes", "float8_e4m3fn", "float32"), codes=zeros(E, S, H), format=3),
    bad("dequantize_matrices", wrong_shape("codes", f"[{E}, {H}, {S}]", [E, S, H]), transpose=True),
    bad("dequantize_matrices", wrong_dtype("codes", "uint8", "int8"), format=1),
    bad(
        "dequantize_matrices",
        wrong_shape("codes", f"[{E}, 16, {H}]", [E, S, H]),
        codes=zeros(E, S, H, dtype=np.uint8),
        format=1,
    ),
    bad("dequantize_matrices", "values must be float32, float16 or bfloat16", dtype=paddle.float64.value),
    *(
        fault
        for operator in ("moe_mlp", "moe_mlp_float8")
        for fault in (
            bad(operator, SUMMED, x=zeros(T, H, dtype=FLOAT64)),
            bad(operator, wrong_shape("x", f"[{T}, any]", [T]), x=zeros(T)),
            bad(operator, wrong_shape("x", f"[{T}, any]", [T + 1, H]), x=zeros(T + 1, H)),
            bad(operator, wrong_dtype("gate_up", "float32", "float64"), gate_up=zeros(E, H, 2 * S, dtype=FLOAT64)),
            bad(operator, wrong_shape("gate_up", f"[{E}, {H}, {2 * S}]", [E, H, S]), gate_up=zeros(E, H, S)),
            bad(operator, wrong_dtype("down", "float32", "float64"), down=zeros(E, S, H, dtype=FLOAT64)),
            bad(operator, wrong_shape("down", "[any, any, any]", [S, H]), down=zeros(S, H)),
            bad(operator, wrong_shape("down", f"[{E}, {S}, {H}]", [E, S, H + 1]), down=zeros(E, S, H + 1)),
            bad(operator, wrong_shape("probs", f"[{N}]", [N + 1]), weights=zeros(N + 1)),
            bad(operator, wrong_dtype("probs", "float32", "float64"), weights=zeros(N, dtype=FLOAT64)),
            bad(operator, wrong_shape("probs", f"[{T}, {K}]", [N]), by_slot=True),
            bad(operator, wrong_shape("slot_to_row", f"[{T}, any]", [T]), by_slot=True, slot_to_row=int32(T)),
            bad(operator, wrong_dtype("slot_to_row", "int32", "int64"), by_slot=True, slot_to_row=int64(T, K)),
            bad(operator, wrong_shape("token_rows", ANY_MATRIX, [T]), token_rows=int32(T)),
            bad(operator, wrong_dtype("token_rows", "int32", "int64"), token_rows=int64(T, K)),
            bad(operator, wrong_dtype("row_to_token", "int32", "int64"), row_to_token=int64(N)),
            bad(operator, wrong_shape("row_to_token", ANY_VECTOR, [N, 1]), row_to_token=int32(N, 1)),
            bad(operator, wrong_shape("sizes", f"[{E}]", [E - 1]), sizes=int64(E - 1)),
            bad(operator, wrong_dtype("sizes", INTEGERS, "float32"), sizes=zeros(E)),
            bad(operator, wrong_shape("offsets", ANY_VECTOR, [E, 1]), offsets=int64(E, 1)),
            bad(operator, wrong_dtype("offsets", INTEGERS, "float32"), offsets=zeros(E)),
            bad(operator, SHORT_OFFSETS, offsets=int64(E - 1)),
        )
    ),
    bad("slots_to_rows", wrong_shape("the values of the slots", SLOTS, [T - 1, K]), slot_values=zeros(T - 1, K)),
    bad(
        "slots_to_rows",
        wrong_dtype("the values of the slots", "float32", "float64"),
        slot_values=zeros(T, K, dtype=FLOAT64),
    ),
    *(
        fault
        for operator in ("slots_to_rows", "rows_to_slots")
        for fault in (
            bad(operator, wrong_shape("slot_to_row", ANY_MATRIX, [T]), slot_to_row=int32(T)),
            bad(operator, wrong_dtype("slot_to_row", "int32", "int64"), slot_to_row=int64(T, K)),
            bad(operator, wrong_shape("row_to_slot", ANY_VECTOR, [N, 1]), row_to_slot=int32(N, 1)),
        )
    ),
    bad("rows_to_slots", wrong_shape("the values of the rows", f"[{N}]", [N - 1]), row_values=zeros(N - 1)),
    bad("rows_to_slots", wrong_shape("the values of the rows", f"[{N}]", [N, 1]), row_values=zeros(N, 1)),
    bad(
        "rows_to_slots",
        wrong_dtype("the values of the rows", "float32", "float64"),
        row_values=zeros(N, dtype=FLOAT64),
    ),
    bad("calculate_topk", wrong_shape("gating", ANY_MATRIX, [T]), gating=zeros(T)),
    bad("calculate_topk", f"gating {NOT_MOVED}", gating=zeros(T, E, dtype=FLOAT64)),
    bad("calculate_topk", "top_k must be at least 1 and at most the number of experts", top_k=0),
    bad("calculate_topk", "top_k must be at least 1 and at most the number of experts", top_k=E + 1),
    bad(
        "calculate_topk", wrong_dtype("correction_bias", "float32", "float64"), correction_bias=zeros(E, dtype=FLOAT64)
    ),
    bad("calculate_topk", wrong_shape("correction_bias", f"[{E}]", [E - 1]), correction_bias=zeros(E - 1)),
    bad("quantize_1x128", wrong_shape("x", ANY_MATRIX, [T]), x=zeros(T)),
    bad("quantize_1x128", f"x {NOT_MOVED}", x=zeros(T, H, dtype=FLOAT64)),
    *bad_maps("permute_quantized"),
    bad("permute_quantized", f"x {NOT_MOVED}", x=zeros(T, H, dtype=FLOAT64)),
    bad("permute_quantized", wrong_shape("slot_to_row", ANY_MATRIX, [T]), slot_to_row=int32(T)),
    bad("dequantize_1x128", wrong_shape("codes", ANY_MATRIX, [T]), codes=zeros(T, dtype=ml_dtypes.float8_e4m3fn)),
    bad("dequantize_1x128", wrong_dtype("codes", "float8_e4m3fn", "float32"), codes=zeros(T, H)),
    bad("dequantize_1x128", wrong_dtype("scales", "float32", "float64"), scales=zeros(T, 1, dtype=FLOAT64)),
    bad("dequantize_1x128", wrong_shape("scales", f"[{T}, 1]", [T - 1, 1]), scales=zeros(T - 1, 1)),
    bad("dequantize_1x128", wrong_shape("scales", "[1, 8]", [T, 1]), by_column=True),
    bad("dequantize_1x128", "dtype must be float32, float16 or bfloat16", dtype=INT32),
]
