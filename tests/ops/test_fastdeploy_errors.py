# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Bad calls of FastDeploy's operators, and the exact errors that name the argument."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops.compat import fastdeploy as ops
from tests.distributed.test_waits_for_the_host import Reads
from tests.ops.every_call import IDS, E, H, K, T, ones
from tests.ops.fastdeploy_calls import COUNTS, DYGRAPH_NAMES, FASTDEPLOY_CALLS, LARGE, LOCAL_IDS, NUM_ROWS, M
from tests.params import SUM_DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")

CALLS = {call.function: call for call in reversed(FASTDEPLOY_CALLS)}
PACKED = next(call for call in FASTDEPLOY_CALLS if call.arguments.get("quant_method") == "weight_only_int8")
PACKED_ROWS = next(call for call in FASTDEPLOY_CALLS if call.arguments.get("used_in_ep_low_latency") is True)


def of_ids(*entries: tuple[int, int, int]) -> Any:
    ids = LOCAL_IDS.copy()
    for token, slot, expert in entries:
        ids[token, slot] = expert
    return ids


BAD_VALUES = [
    ("moe_topk_select", {"moe_topk": E + 1}, "moe_topk must be at most 3, the experts to choose from, but got 4"),
    ("moe_topk_select", {"bias": ones(2, E)}, "bias must be of shape [3] or [1, 3], but got [2, 3]"),
    ("noaux_tc", {"n_group": 2}, "n_group must be a divisor of num_experts=3, but got 2"),
    ("noaux_tc", {"topk_group": 2}, "topk_group must be at most 1, the number of groups, but got 2"),
    ("noaux_tc", {"topk": 4}, "topk must be at most 3, the experts to choose from, but got 4"),
    (
        "noaux_tc",
        {"scores": ones(T, 0), "scores_with_bias": ones(T, 0)},
        "scores must be of shape [num_tokens, num_experts] with num_experts >= 1, but got [5, 0]",
    ),
    ("count_tokens_per_expert_func", {"num_experts": 0}, "num_experts must be from 1 to 65536, but got 0"),
    (
        "moe_expert_dispatch",
        {"moe_topk": 4},
        "moe_topk must be at most 3, the experts of gating_output, but got 4",
    ),
    (
        "moe_expert_dispatch",
        {"group_moe": True},
        "moe_topk must be a divisor of the 3 experts with group_moe, but got 2",
    ),
    (
        "moe_expert_dispatch",
        {"gating_output": ones(T + 1, E)},
        "gating_output must be of shape [5, num_experts], but got [6, 3]",
    ),
    (
        "moe_expert_reduce",
        {"permute_indices_per_token": np.int32([[0, 1, 2, 3, 4], [5, 6, 7, 8, 10]])},
        "permute_indices_per_token must hold rows in [-1, 10), but token 4, slot 1 holds 10",
    ),
    (
        "moe_expert_reduce",
        {"permute_indices_per_token": np.int32([[0, 1, 2, 3, 4], [5, 6, 7, 8, 0]])},
        "permute_indices_per_token must name a row at most once, "
        "but row 0 is at token 0, slot 0 and at token 4, slot 1",
    ),
    (
        "moe_expert_reduce",
        {"top_k_indices": np.full((T, K), E), "down_proj_bias": ones(E, H)},
        "top_k_indices must hold expert ids in [-1, 3), but token 0, slot 0 holds 3",
    ),
    (
        "moe_expert_ffn",
        {"quant_method": "w4a8"},
        "quant_method must be one of 'none', 'w16a16', 'weight_only_int8', 'weight_only_int4', but got 'w4a8'",
    ),
    ("moe_expert_ffn", {"activation": "gelu"}, "activation must be one of 'swiglu', 'swigluoai', but got 'gelu'"),
    (
        "moe_expert_ffn",
        {"tokens_expert_prefix_sum": np.array([2, 1, T])},
        "tokens_expert_prefix_sum must be ascending, from 0 to the 5 rows of permute_input, but got [2, 1, 5]",
    ),
    (
        "moe_expert_ffn",
        {"tokens_expert_prefix_sum": np.array([1, 2, T + 1])},
        "tokens_expert_prefix_sum must be ascending, from 0 to the 5 rows of permute_input, but got [1, 2, 6]",
    ),
    (
        "moe_expert_ffn",
        {"up_gate_proj_weight": ones(E, H, 7)},
        "up_gate_proj_weight must be matrices of 3 experts for 6 columns of permute_input and 2 * I of its own, "
        "but got [3, 6, 7]",
    ),
    (
        "moe_expert_ffn",
        {"down_proj_weight": ones(E, 3, H)},
        "down_proj_weight must be matrices of 3 experts from 4 to 6 columns, but got [3, 3, 6]",
    ),
    (
        "ep_moe_expert_dispatch",
        {"topk_ids": of_ids((1, 0, E))},
        "topk_ids must hold expert ids in [-1, 3), but token 1, slot 0 holds 3",
    ),
    (
        "ep_moe_expert_dispatch",
        {"token_nums_per_expert": [3, 1, 2]},
        "token_nums_per_expert must be at least [3, 2, 2], the slots of each expert, but got [3, 1, 2]",
    ),
    (
        "ep_moe_expert_dispatch",
        {"token_nums_per_expert": []},
        "token_nums_per_expert must be a list of one int for each expert, but got []",
    ),
    (
        "ep_moe_expert_dispatch",
        {"token_nums_this_rank": 3},
        "token_nums_this_rank must be at least 7, the rows up to the last slot, but got 3",
    ),
    (
        "ep_moe_expert_dispatch_fp8",
        {"num_experts_per_rank_padded_tensor": np.int32([3, 1, 2])},
        "num_experts_per_rank_padded_tensor must be at least [3, 2, 2], the slots of each expert, but got [3, 1, 2]",
    ),
    (
        "ep_moe_expert_dispatch_fp8",
        {"token_nums_this_rank_padded": 3},
        "token_nums_this_rank_padded must be at least 18, the rows up to the last slot, but got 3",
    ),
    (
        "ep_moe_expert_dispatch_fp8",
        {"scale": ones(T + 1, 2)},
        "scale must be of shape [5, num_scales] or [8, num_scales], but got [6, 2]",
    ),
    (
        "ep_moe_expert_dispatch_fp8",
        {"token_nums_this_rank_padded": -1},
        "token_nums_this_rank_padded must be at least 0 with use_in_ep, but got -1",
    ),
    (
        "ep_moe_expert_combine",
        {"permute_indices_per_token": np.full((E, T), NUM_ROWS, np.int32)},
        "permute_indices_per_token must hold rows in [-1, 7), but token 0, slot 0 holds 7",
    ),
    (
        "prefill_permute_to_masked_gemm",
        {"topk_ids": of_ids((0, 1, -2))},
        "topk_ids must hold expert ids in [-1, 3), but token 0, slot 1 holds -2",
    ),
    (
        "depermute_prefill_combine",
        {"indice_map": np.full((T, K), E * M, np.int32)},
        "indice_map must hold rows in [-1, 15), but token 0, slot 0 holds 15",
    ),
    (
        "per_token_quant_padding",
        {"input": ones(T, 200)},
        "input must be of shape [num_tokens, hidden], hidden a multiple of 128, but got [5, 200]",
    ),
    ("per_token_quant_padding", {"block_size": 64}, "block_size must be 128, but got 64"),
    ("per_token_quant", {"block_size": 0}, "block_size must be from 1 to 2147483647, but got 0"),
    (
        "fused_mask_swiglu_fp8_quant",
        {"input": ones(E, M, 7)},
        "input must be of shape [num_experts, capacity, 2 * I], but got [3, 5, 7]",
    ),
    (
        "from_weight_quantize",
        {"packed": np.ones((E, 3, 64), np.int8)},
        "packed must be of shape [num_experts, rows, in], rows a multiple of 2 and in of 64, but got [3, 3, 64]",
    ),
    (
        "to_weight_quantize",
        {"codes": np.ones((E, 32, 4), np.int8)},
        "codes must be of shape [num_experts, in, out], in a multiple of 64 and out of 4, but got [3, 32, 4]",
    ),
    (
        "to_weight_quantize",
        {"codes": np.full((1, 64, 4), 8, np.int8)},
        "codes must be from -8 to 7 for weight_only_int4, but got 8",
    ),
    (
        "from_weight_quantize",
        {"algo": "w4a8"},
        "algo must be one of 'weight_only_int8', 'weight_only_int4', but got 'w4a8'",
    ),
]


def raises(error, function, message):
    return pytest.raises(error, match=f"^{re.escape(f'{function}: {message}')}$")


@pytest.mark.parametrize(("function", "changes", "message"), BAD_VALUES)
def test_bad_values(function, changes, message, place, monkeypatch):
    if not place.is_cpu_place():  # a GPU, whose data are not checked without the variable
        monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    with raises(ValueError, function, message):
        CALLS[function].run(place, **changes)


BAD_TYPES = [
    ("moe_expert_dispatch", {"moe_quant_type": None}, "moe_quant_type must be a str, but got NoneType"),
    (
        "moe_expert_dispatch",
        {"gating_output": ones(T, E).astype(SUM_DTYPES[2])},
        'gating_output must be of dtype float32, but got bfloat16; convert it with .astype("float32")',
    ),
    (
        "moe_expert_dispatch",
        {"input": np.ones((T, H), np.int32)},
        "input must be of dtype bfloat16, float16 or float32, but got int32",
    ),
    (
        "ep_moe_expert_dispatch",
        {"token_nums_per_expert": 3},
        "token_nums_per_expert must be a list of ints or a 1-D int array, but got int",
    ),
    (
        "moe_expert_ffn",
        {"down_proj_weight": ones(E, 4, H).astype(SUM_DTYPES[1])},
        'down_proj_weight must be of dtype float32, but got float16; convert it with .astype("float32")',
    ),
    ("moe_expert_ffn", {"used_in_ep_low_latency": 1}, "used_in_ep_low_latency must be a bool, but got 1 of type int"),
]


@pytest.mark.parametrize(("function", "changes", "message"), BAD_TYPES)
def test_bad_types(function, changes, message, place):
    with raises(TypeError, function, message):
        CALLS[function].run(place, **changes)


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (TypeError, {"up_gate_proj_scale": None}, "up_gate_proj_scale must be a paddle.Tensor, but got NoneType"),
        (
            ValueError,
            {"up_gate_proj_scale": ones(E, LARGE)},
            "up_gate_proj_scale must be of shape [3, 256] or [3, groups, 256], but got [3, 128]",
        ),
        (
            ValueError,
            {"down_proj_scale": ones(E, 3, LARGE)},
            "down_proj_scale must be of shape [3, 128] or [3, groups, 128], groups a divisor of the 128 rows of a "
            "matrix, but got [3, 3, 128]",
        ),
        (
            ValueError,
            {"up_gate_proj_scale": ones(E, 0, 2 * LARGE)},
            "up_gate_proj_scale must be of shape [3, 256] or [3, groups, 256], groups a divisor of the 128 rows of a "
            "matrix, but got [3, 0, 256]",
        ),
        (
            ValueError,
            {"down_proj_weight": np.ones((E, LARGE, 96), np.int8)},
            "down_proj_weight must be of shape [num_experts, rows, in], rows a multiple of 2 and in of 64, "
            "but got [3, 128, 96]",
        ),
    ],
)
def test_bad_packed_matrices(error, changes, message, place):
    with raises(error, "moe_expert_ffn", message):
        PACKED.run(place, **changes)


def test_counts_that_no_expert_has(place, monkeypatch):
    if not place.is_cpu_place():
        monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "1")
    for counts in ([M + 1, 0, 0], [1, -1, 2]):
        message = f"tokens_expert_prefix_sum must be from 0 to the 5 rows of an expert, but got {counts}"
        with raises(ValueError, "moe_expert_ffn", message):
            PACKED_ROWS.run(place, tokens_expert_prefix_sum=np.array(counts))


@pytest.mark.parametrize("call", ["ep_moe_expert_dispatch", "ep_moe_expert_dispatch_fp8"])
def test_bad_ids_have_no_row_where_data_is_not_checked(call, place, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    good = CALLS[call].run(place, topk_ids=of_ids((1, 0, -1), (0, 1, -1)))
    got = CALLS[call].run(place, topk_ids=of_ids((1, 0, E), (0, 1, -7)))
    for result, expected in zip(got, good, strict=True):
        if result.dtype != paddle.float8_e4m3fn:
            np.testing.assert_array_equal(result.numpy(), expected.numpy())


# Paddle's matmul, which multiplies on a CPU, reads the sizes of its groups.
@pytest.mark.parametrize("call", [call for call in FASTDEPLOY_CALLS if call.function != "moe_expert_ffn"], ids=str)
def test_nothing_waits_for_the_host(call, place, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    reads = Reads()
    with reads.counted():
        call.run(place)
    assert reads.count == (call.function == "get_expert_token_num")


@pytest.fixture
def program():
    paddle.enable_static()
    with paddle.static.program_guard(paddle.static.Program()):
        yield
    paddle.disable_static()


@pytest.mark.parametrize("name", DYGRAPH_NAMES)
def test_a_static_graph_cannot_hold_some_functions(name, program):
    call, by_kind = CALLS[name], {np.dtype(np.float32): "float32", np.dtype(np.int32): "int32"}
    text = r"must be a tensor of dygraph, or of to_static with full_graph=False, but got a value of a static graph$"
    values = {
        key: paddle.static.data(key, list(value.shape), by_kind.get(value.dtype, "int64"))
        if isinstance(value, np.ndarray)
        else value
        for key, value in call.arguments.items()
    }
    with pytest.raises(TypeError, match=rf"^{name}: \w+ {text}"):
        getattr(ops, name)(**values)


def test_float8_rows_of_a_dispatch_are_refused_in_a_static_graph(program):
    counts = COUNTS[0].tolist()
    x, weights = (paddle.static.data(name, [T, width], "float32") for name, width in (("x", H), ("weights", K)))
    ids, gate = paddle.static.data("ids", list(IDS.shape), "int64"), paddle.static.data("gate", [T, E], "float32")
    with pytest.raises(TypeError, match=r"^moe_expert_dispatch: input must be a tensor of dygraph, "):
        ops.moe_expert_dispatch(x, gate, None, None, K, False, "w4afp8", topk_only_mode=False)
    with pytest.raises(TypeError, match=r"^ep_moe_expert_dispatch: input must be a tensor of dygraph, "):
        ops.ep_moe_expert_dispatch(x, ids, weights, None, counts, sum(counts), "w4afp8")
