# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Good calls of what `every_call` leaves out: other packages' names, layers, one process alone, and other forms."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray

from paddle_moe_ops import Float8Matrices, QuantizedMatrices, explain, moe_mlp, patched_paddle
from paddle_moe_ops.expert_parallel import ExpertParallel, is_expert_parameter, shard_state_dict
from paddle_moe_ops.nn import (
    MoELayer,
    SwiGLU,
    SwiGLUExperts,
    TopKRouter,
    attach_loss,
    load_balance_loss,
    router_z_loss,
)
from tests.ops.every_call import (
    CALLS,
    CODES,
    COUNTS,
    IDS,
    MAPS,
    MASK,
    ORDER,
    PLAN,
    PROBS,
    ROUTED,
    ROW_ID_MAP,
    ROWMAP,
    SIZES,
    A,
    Call,
    E,
    H,
    K,
    N,
    S,
    T,
    made_of,
    ones,
)

I = 3  # noqa: E741
BY_NAME = {call.name: call for call in CALLS}


def like(name: str, **changes: Any) -> Call:
    """The call of `every_call` with other arguments."""
    call = BY_NAME[name]
    return call._replace(arguments={**call.arguments, **changes})


def in_float16(call: Call, *names: str) -> Call:
    """Triton's products take half precision only."""
    return call._replace(
        arguments={**call.arguments, **{name: call.arguments[name].astype(np.float16) for name in names}}
    )


def in_bfloat16(*shape: int) -> NDArray:
    return ones(*shape).astype(ml_dtypes.bfloat16)


NO_BIASES = {"gate_up_bias": None, "down_bias": None}
MLP = like("mlp.moe_mlp", **NO_BIASES)
OTHER_FORMS = [
    like("functional.moe_permute", hidden_states=CODES[:T], override_buffer_size=N, tokens_per_expert=[]),
    like("functional.moe_unpermute", using_weighted_combine=True, compat=None),
    like("functional.permute", scale=None, quantize="fp8_1x128"),
    like("functional.unpermute", probs=PLAN.row_probs),
    like("functional.unpermute", probs=None),
    like("routing.route", routing=MASK, probs=ones(T, E), num_experts=None, topk=None, capacity=None),
    in_float16(BY_NAME["gemm.grouped_gemm"], "X", "W", "bias"),
    like("gemm.grouped_gemm", W=tuple(ones(E, 5, 4)), bias=tuple(ones(E, 5))),
    in_float16(BY_NAME["mlp.moe_mlp"], "x", "gate_up", "down", "gate_up_bias", "down_bias"),
    in_float16(MLP, "x", "gate_up", "down"),
    in_float16(MLP._replace(arguments={**MLP.arguments, "keep": "x"}), "x", "gate_up", "down"),
    MLP._replace(arguments={**MLP.arguments, "compute": "fp8_1x128"}),
    MLP._replace(arguments={**MLP.arguments, "gate_up": tuple(ones(E, H, 6)), "down": tuple(ones(E, 3, H))}),
]

_COMBINED = {"x": ones(N, H), "combine_weights": MAPS.slot_weights, "scatter_index": MAPS.slot_rows}
C = T  # all slots of a token may choose the same expert
_DISPATCHED = {
    "combine_weights": ones(T, K) / 2,
    "scatter_index": np.arange(T * K, dtype=np.int32).reshape(K, T) % (E * C),
    "expert_id": np.zeros((T, K), np.int32),
    "combine_weights_grad": ones(T, K),
    "k": K,
}
OF_INCUBATE = [
    Call(
        "compat.incubate_dispatch.moe_gate_dispatch",
        {"x": ones(T, H), "gate_logits": ones(T, E), "corr_bias": ones(E), "k": K, "capacity": 2, "use_pad": True},
    ),
    Call(
        "compat.incubate_dispatch.moe_gate_dispatch_permute",
        {"x": ones(T, H), "gate_logits": ones(T, E), "corr_bias": ones(E), "k": K, "capacity": 2, "world_size": 1},
    ),
    Call(
        "compat.incubate_dispatch.moe_gate_dispatch_partial_nosoftmaxtopk",
        {
            "x": ones(T, H),
            "combine_weights": PROBS,
            "expert_id": IDS,
            "k": K,
            "capacity": 2,
            "num_experts": E,
            "use_pad": True,
            "expert_start_index": 0,
            "expert_end_index": E,
            "reverse_token_drop": False,
        },
    ),
    *(
        Call(
            f"compat.incubate_dispatch.{name}",
            {"x": ones(N, H), weights: MAPS.slot_weights, "scatter_index": MAPS.slot_rows, **further},
        )
        for name, weights, further in (
            ("moe_combine", "combine_weights", {}),
            ("moe_combine_no_weight", "combine_weight", {"epsilon": 1e-15}),
        )
    ),
    Call("compat.incubate_dispatch.moe_combine_grad", {**_COMBINED, "grad_y": ones(T, H)}),
    Call("compat.incubate_auto.moe_combine_auto", _COMBINED),
    Call("compat.incubate_auto.moe_combine_auto_grad", {**_COMBINED, "y_grad": ones(T, H)}),
    Call(
        "compat.incubate_backward.moe_combine_no_weight_grad",
        {
            "x": ones(N, H),
            "combine_weight": MAPS.slot_weights,
            "scatter_index": MAPS.slot_rows,
            "y_grad": ones(T, H),
            "epsilon": 1e-15,
        },
    ),
    Call(
        "compat.incubate_auto.moe_gate_dispatch_auto",
        {"x": ones(T, H), "gate_logits": ones(T, E), "corr_bias": ones(E), "k": K, "capacity": 2, "use_pad": True},
    ),
    *(
        Call(f"compat.{name}", {**_DISPATCHED, "y_grad": ones(*shape), "capacity": C, last: value})
        for name, shape, last, value in (
            ("incubate_backward.moe_gate_dispatch_grad", (E * C, H), "use_pad", True),
            ("incubate_backward.moe_gate_dispatch_permute_grad", (E, 1, C, H), "world_size", 1),
            ("incubate_auto.moe_gate_dispatch_auto_grad", (E, C, H), "use_pad", True),
        )
    ),
    Call(
        "compat.incubate_backward.moe_gate_dispatch_partial_nosoftmaxtopk_grad",
        {
            "combine_weights_out": _DISPATCHED["combine_weights"],
            "scatter_index": _DISPATCHED["scatter_index"],
            "scatter_index_rev": np.zeros(N, np.int32),
            "expert_offset": np.zeros(E, np.int64),
            "expert_nums_local": np.zeros(E, np.int64),
            "y_grad": ones(E * C, H),
            "combine_weights_out_grad": ones(T, K),
            "k": K,
            "capacity": C,
            "use_pad": True,
            "expert_start_index": 0,
            "expert_end_index": E,
        },
    ),
    Call(
        "compat.incubate_quant.moe_gate_dispatch_and_quant",
        {
            "x": ones(T, 128).astype(ml_dtypes.bfloat16),
            "gate_logits": ones(T, E),
            "corr_bias": ones(E),
            "k": K,
            "capacity": 2,
            "use_pad": True,
            "use_pow2_scale": True,
        },
    ),
    Call("compat.incubate_gemm.batched_gemm", {"lhs": ones(T, H), "rhs": ones(E, H, 2), "batch_sizes": [2, 0, 3]}),
    Call(
        "compat.incubate_gemm.batched_gemm",
        {"lhs": ones(T, H), "rhs": ones(T, 2), "batch_sizes": [2, 0, 3], "trans_lhs": True},
    ),
    Call(
        "compat.incubate_routing.cal_aux_loss",
        {
            "gate_prob": ones(T, E),
            "dispatch_mask": COUNTS,
            "tokens_mask": ones(T),
            "dispatch_tokens_mask": np.ones(2 * T, np.bool_),
            "num_experts": E,
            "use_group": True,
            "moe_k": K,
            "clip_min": 1e-6,
        },
    ),
    Call(
        "compat.incubate_routing.cal_aux_loss_grad",
        {
            "gate_prob": ones(T, E),
            "seqlen_float": ones(1),
            "ce": ones(E),
            "l_aux_loss_grad": ones(1),
            "num_experts": E,
            "use_group": True,
            "moe_k": K,
        },
    ),
    Call("compat.incubate_routing.int_bincount", {"x": IDS, "low": 0, "high": E, "dtype": None}),
    Call(
        "compat.incubate_routing.expand_modality_expert_id",
        {
            "expert_id": IDS,
            "num_expert_per_modality": 2,
            "group_size": 2,
            "modality_offset": 1,
            "is_group_expert": True,
        },
    ),
    Call(
        "compat.incubate_routing.build_src_rank_and_local_expert_id",
        {"expert_num_global_tensor": SIZES, "expert_num_global": [1, 0, 3], "num_local_experts": 1},
    ),
]

_OF_ROWMAP = {"zipped_expertwise_rowmap": ROWMAP, "num_experts": E, "total_unzipped_rows": N}
OF_PADDLEFLEET = [
    Call(
        "compat.paddlefleet.tokens_unzip_gather",
        {
            "x": ones(T, H),
            "x_scale": ones(T, S),
            "zipped_expertwise_rowmap": ROWMAP,
            "expert_id": 1,
            "tokens_per_expert": COUNTS,
            "padding_multiplex": A,
        },
    ),
    Call("compat.paddlefleet.tokens_unzip_slice", {"x": ones(T, H), **_OF_ROWMAP, "start_idx": 1, "end_idx": N}),
    Call("compat.paddlefleet.merge_subbatch_cast", {"x": (ones(T, H), ones(1, H)), "dtype": "bfloat16"}),
    Call(
        "compat.paddlefleet.tokens_zip_prob",
        {"unzipped_prob": (ones(A), ones(A), ones(A)), "zipped_expertwise_rowmap": ROWMAP, "dispatched_indices": IDS},
    ),
    Call(
        "compat.paddlefleet.tokens_zip_prob_seq_subbatch",
        {
            "unzipped_prob": (ones(7), ones(N - 7)),
            "zipped_expertwise_rowmap": ROWMAP,
            "dispatched_indices": IDS,
            "subbatch_rows": 7,
        },
    ),
]

OF_GSHARD = [
    Call("compat.gshard.number_count", {"numbers": IDS, "upper_range": E}),
    Call(
        "compat.gshard.assign_pos",
        {"x": np.zeros(T, np.int64), "cum_count": np.full(1, T), "eff_num_len": np.full(1, T)},
    ),
    Call(
        "compat.gshard.limit_by_capacity",
        {"expert_count": np.arange(2 * E), "capacity": np.full(E, 3), "n_worker": 2},
    ),
    Call(
        "compat.gshard.prune_gate_by_capacity",
        {"gate_idx": IDS, "expert_count": np.ones(E, np.int64), "n_expert": E, "n_worker": 1},
    ),
    Call(
        "compat.gshard.random_routing",
        {"prob": ones(T), "topk_value": ones(T, 2) / 4, "topk_idx": np.zeros((T, 2), np.int64)},
    ),
]

OF_FLOAT8 = [
    Call("compat.fp8.fp8_quant_blockwise", {"x": in_bfloat16(T, 132), "using_ue8m0_scale": True}),
    Call("compat.fp8.fp8_quant_blockwise", {"x": in_bfloat16(128, 128), "input_transpose": True}),
    Call("compat.fp8.fused_stack_transpose_quant", {"x": [in_bfloat16(128, 128)] * 2}),
    Call("compat.fp8.fused_stack_quant", {"x": [in_bfloat16(128, 128)] * 2}),
    Call(
        "compat.fp8.fused_transpose_split_quant",
        {"x": CODES[:1].repeat(128, axis=0), "input_scales": ones(128, S), "tokens_per_expert": [128]},
    ),
    Call(
        "compat.fp8.fused_transpose_wlch_split_quant",
        {"x": in_bfloat16(2, 1, 64, H), "tokens_per_expert": [128]},
    ),
    Call("compat.fp8.fused_act_dequant", {"x": CODES, "x_scale": ones(len(CODES), S)}),
    Call("compat.fp8.fused_act_dequant", {"x": CODES, "x_scale": np.full((len(CODES), 1), 127, np.int32)}),
    Call("compat.fp8.fused_weighted_swiglu_act_quant", {"x": in_bfloat16(T, 2 * I), "prob": ones(T)}),
    Call(
        "compat.fp8.fused_swiglu_weighted_bwd",
        {"o1": in_bfloat16(T, 2 * I), "do2_s": in_bfloat16(T, I), "unzipped_probs": ones(T, 1)},
    ),
    *(
        Call(
            "compat.fp8.fp8_gemm_blockwise",
            {
                "a": CODES,
                "a_decode_scale": ones(S, len(CODES)),
                "b": CODES,
                "b_decode_scale": ones(*((S, len(CODES)) if is_1d else (1, S))),
                "out_dtype": "float32",
                "is_b_1d_scaled": is_1d,
            },
        )
        for is_1d in (True, False)
    ),
]

_COUNTED = {"num_tokens": T, "num_experts": E}
_TE = {
    "make_row_id_map": {"routing_map": MASK, **_COUNTED, "num_out_tokens": ROUTED},
    "permute_with_mask_map": {
        "inp": ones(T, H),
        "row_id_map": ROW_ID_MAP,
        "probs": ones(T, E),
        "scale": ones(T, S),
        "pad_offsets": np.zeros(E, np.int32),
        **_COUNTED,
        "num_out_tokens": N,
        "hidden_size": H,
        "scale_hidden_dim": S,
    },
    "unpermute_with_mask_map": {
        "inp": ones(N, H),
        "row_id_map": ROW_ID_MAP,
        "merging_probs": ones(T, E),
        "permuted_probs": ones(N),
        "pad_offsets": np.zeros(E, np.int32),
        **_COUNTED,
        "hidden_size": H,
    },
    "unpermute_with_mask_map_bwd_with_merging_probs": {
        "fwd_output_grad": ones(T, H),
        "row_id_map": ROW_ID_MAP,
        "fwd_input": ones(N, H),
        "merging_probs": ones(T, E),
        "pad_offsets": np.zeros(E, np.int32),
        **_COUNTED,
        "num_out_tokens": N,
        "hidden_size": H,
    },
    "make_chunk_sort_map": {"split_sizes": SIZES, "sorted_indices": ORDER, "num_tokens": T, "num_splits": len(SIZES)},
    "sort_chunks_by_map": {
        "inp": ones(T, H),
        "row_id_map": np.array([4, 0, 1, 3, 2], np.int32),
        "probs": ones(T),
        "num_tokens": T,
        "hidden_size": H,
        "is_forward": True,
    },
    **{
        name: {
            argument: value
            for argument, value in BY_NAME[f"masked.{name}"].arguments.items()
            if argument not in ("zero_prob_as_padding", "validate")
        }
        for name in ("moe_permute_with_probs", "moe_permute_and_pad_with_probs")
    },
}
OF_TRANSFORMER_ENGINE = [
    *(Call(f"compat.transformer_engine.{name}", arguments) for name, arguments in _TE.items()),
    Call(
        "compat.transformer_engine_jax.token_dispatch",
        {
            "inp": ones(T, H),
            "routing_map": MASK,
            "num_out_tokens": ROUTED,
            "probs": ones(T, E),
            "align_size": A,
        },
    ),
]


class Program(NamedTuple):
    """A call of a function's result, with the tensors of an `every_call.Call`."""

    name: str
    made: Callable[[], Callable[..., Any]]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    def run(self, place: object, **changes: Any) -> Any:
        made = {name: made_of(value, place) for name, value in {**self.arguments, **changes}.items()}
        paddle.seed(7)
        return self.made()(**made)


def there_and_back(**options: Any) -> Callable[[], Callable[..., Any]]:
    def made() -> Callable[..., Any]:
        parallel = ExpertParallel(E, **options)

        def run(x: Any, ids: Any, probs: Any, out: Any) -> Any:
            received = parallel.dispatch(x, ids, probs)
            arrived = received.rows if received.rows is not None else received.tokens
            return arrived, parallel.combine(out, received)

        return run

    return made


def updated_bias(tokens_per_expert: Any) -> Any:
    router = TopKRouter(H, E, K)
    router.update_correction_bias(tokens_per_expert, 0.5)
    return router.correction_bias + 0.0


def tokens(*shape: int) -> NDArray:
    return ones(*(shape or (T, H)))


EXPERTS = {"x": tokens(), "plan": PLAN, "probs": PROBS}


def of_paddle(name: str) -> Program:
    """Paddle's own function, patched."""

    def run(**given: Any) -> Any:
        with patched_paddle():
            return getattr(F, name)(**given)

    taken = inspect.signature(getattr(F, name)).parameters
    arguments = BY_NAME[f"functional.{name}"].arguments.items()
    return Program(f"paddle.nn.functional.{name}", lambda: run, {key: each for key, each in arguments if key in taken})


ARRIVED = int((IDS >= 0).any(axis=1).sum())
TRIP = {"x": tokens(), "ids": IDS, "probs": PROBS}
PROGRAMS = [
    *map(of_paddle, ("moe_permute", "moe_unpermute")),
    Program("nn.SwiGLU", lambda: SwiGLU(H, I), {"x": tokens()}),
    Program("nn.MoELayer", lambda: MoELayer(H, I, E, K, 1), {"x": tokens()}),
    Program("nn.MoELayer of batches", lambda: MoELayer(H, I, E, K), {"x": tokens(2, T, H)}),
    Program("nn.MoELayer in float8", lambda: MoELayer(H, I, E, K, compute="fp8_1x128"), {"x": tokens()}),
    Program("nn.MoELayer of a group", lambda: MoELayer(H, I, E, K, combine="reduced"), {"x": tokens()}),
    Program(
        "nn.SwiGLUExperts by counts",
        lambda: SwiGLUExperts(E, H, I),
        {"rows": tokens(N, H), "tokens_per_expert": PLAN.tokens_per_expert, "padding_alignment": A},
    ),
    Program(
        "nn.SwiGLUExperts by a plan",
        lambda: SwiGLUExperts(E, H, I),
        {"rows": tokens(), "plan": PLAN, "probs": PROBS, "combine": True},
    ),
    Program("nn.SwiGLUExperts.weighted_rows", lambda: SwiGLUExperts(E, H, I).weighted_rows, EXPERTS),
    Program("nn.TopKRouter", lambda: TopKRouter(H, E, K), {"x": tokens()}),
    Program(
        "nn.TopKRouter.capacity",
        lambda: TopKRouter(H, E, K, capacity_factor=1.25).capacity,
        {"num_tokens": np.array(T, np.int32)},
    ),
    Program("nn.TopKRouter.update_correction_bias", lambda: updated_bias, {"tokens_per_expert": COUNTS}),
    Program("nn.load_balance_loss", lambda: load_balance_loss, {"scores": tokens(T, E), "ids": IDS}),
    Program("nn.router_z_loss", lambda: router_z_loss, {"logits": tokens(T, E)}),
    Program("nn.attach_loss", lambda: attach_loss, {"x": tokens(), "loss": ones()}),
    Program("expert_parallel, exact", there_and_back(), {**TRIP, "out": tokens(ROUTED, H)}),
    Program("expert_parallel, reduced", there_and_back(combine="reduced"), {**TRIP, "out": tokens(ARRIVED, H)}),
    Program("expert_parallel in float8", there_and_back(payload="fp8_1x128"), {**TRIP, "out": tokens(ROUTED, H)}),
    Program(
        "expert_parallel.shard_state_dict",
        lambda: functools.partial(shard_state_dict, layer=SwiGLUExperts(E, H, I)),
        {"state": {"gate_up": ones(E, H, 2 * I), "down": ones(E, I, H)}},
    ),
    Program("expert_parallel.is_expert_parameter", lambda: is_expert_parameter, {"parameter": ones(E, H)}),
    Program(
        "mlp.moe_mlp of kept float8 matrices",
        lambda: functools.partial(moe_mlp, compute="fp8_1x128", float8_matrices=Float8Matrices()),
        {**EXPERTS, "gate_up": ones(E, H, 2 * I), "down": ones(E, I, H)},
    ),
    Program(
        "mlp.moe_mlp of codes",
        lambda: (
            lambda gate_up, gate_up_scales, down, down_scales, **given: moe_mlp(
                **given,
                gate_up=QuantizedMatrices(gate_up, gate_up_scales, "int8"),
                down=QuantizedMatrices(down, down_scales, "int8"),
            )
        ),
        {
            **EXPERTS,
            "gate_up": ones(E, H, 2 * I).astype(np.int8),
            "gate_up_scales": ones(E, 2 * I),
            "down": ones(E, I, H).astype(np.int8),
            "down_scales": ones(E, H),
        },
    ),
    Program(
        "mlp.moe_mlp of matrices side by side",
        lambda: (
            lambda gate_up, down, **given: moe_mlp(
                **given, gate_up=list(paddle.unbind(gate_up)), down=list(paddle.unbind(down))
            )
        ),
        {**EXPERTS, "gate_up": ones(E, H, 2 * I), "down": ones(E, I, H)},
    ),
    Program(
        "explain",
        lambda: functools.partial(explain, "moe_mlp"),
        {**EXPERTS, "gate_up": ones(E, H, 2 * I), "down": ones(E, I, H)},
    ),
]
FURTHER_CALLS = [
    *(*OTHER_FORMS, *OF_INCUBATE, *OF_FLOAT8, *OF_GSHARD, *OF_PADDLEFLEET),
    *(*OF_TRANSFORMER_ENGINE, *PROGRAMS),
]
