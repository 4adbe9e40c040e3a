# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Single calls of the functions with gradients, and the names of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from paddle_moe_ops import (
    dequantize_1x128,
    dispatch,
    indexed,
    masked,
    moe_permute,
    moe_unpermute,
    permute,
    quantized_experts,
    reference,
    route,
    sort_chunks,
    unpermute,
)
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.mlp import moe_mlp
from paddle_moe_ops.routing import calculate_topk
from tests.ops.problems import plan_tensors, tensor

T, H, E, K = 7, 6, 4, 2
PLAN_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_to_slot", "tokens_per_expert", "expert_offsets")

Inputs = dict[str, Any]


def make_inputs(
    place: Any, *, graphs: bool = False, tokens: int = T, routed: bool = True
) -> tuple[Inputs, dict[str, Tensor]]:
    """All inputs of the operations, and the leaves that get gradients.

    Numbers have few bits: sums of their products, in Paddle's own matmul too, are exact in any order.

    Args:
        place: where to make the tensors.
        graphs: whether integers and bools carry a graph as well.
        tokens: number of tokens.
        routed: whether every slot has an expert; otherwise none has.
    """
    rng = np.random.default_rng(3)
    ids = np.array([rng.permutation(E)[:K] for _ in range(tokens)], np.int32).reshape(tokens, K)
    probs = exact(rng, (tokens, K), 1)
    gates = np.zeros((tokens, E), np.float32)
    if routed:
        np.put_along_axis(gates, ids, probs, 1)
    else:
        ids = np.full_like(ids, -1)
    plan = reference.route(ids, probs, num_experts=E)
    arrays = {
        "x": exact(rng, (tokens, H)),
        "rows": exact(rng, (plan.num_rows, H)),
        "slots": exact(rng, (tokens * K, H)),
        "probs": probs,
        "row_probs": plan.row_probs,
        "token_probs": exact(rng, tokens, 1),
        "gates": gates,
        "weights": exact(rng, (E, H, H)),
    }
    leaves = {name: tensor(array, place, gradient=True) for name, array in arrays.items()}
    tensors: Inputs = {name: leaf * 1.0 for name, leaf in leaves.items()}
    sizes = tensor(np.array([2, 0, 4]) if tokens else np.zeros(3, np.int64), place)
    order = tensor(np.array([2, 0, 1]), place)
    constants = {
        **{name: getattr(plan_tensors(plan, place), name) for name in PLAN_MAPS},
        "ids": tensor(ids, place),
        "mask": tensor(gates > 0, place),
        "rowmap": tensor(reference.plan_to_rowmap(plan), place),
        "row_id_map": masked.make_row_id_map(tensor(gates > 0, place))[0],
        "gather": indexed.get_routing_indices(tensor(ids, place), E)[1],
        "sizes": sizes,
        "order": order,
        "chunk_map": masked.make_chunk_sort_map(sizes, order, tokens),
    }
    if graphs:
        zero = leaves["x"].sum() * 0
        constants = {name: (each.astype("float32") + zero).astype(each.dtype) for name, each in constants.items()}
    tensors.update(constants)
    maps = {name: constants[name] for name in PLAN_MAPS}
    tensors["plan"] = plan_tensors(plan, place)._replace(row_probs=None, **maps)
    return tensors, leaves


def exact(rng: np.random.Generator, shape: int | tuple[int, ...], low: int = -16) -> NDArray:
    """Eighths up to 2, from ``low`` eighths on."""
    return (rng.integers(low, 17, shape) / 8).astype(np.float32)


def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
    """A scalar in which elements of every output count differently, by few bits."""
    loss = 0.0
    for output in outputs:
        weights = (np.arange(np.prod(output.shape, dtype=np.int64)) * 7 % 31 - 15.5) / 8
        loss = loss + (output * paddle.to_tensor(weights.reshape(output.shape).astype(np.float32))).sum()
    return loss


class Operation(NamedTuple):
    """A function that returns tensors with gradients, and the names of the inputs it reads."""

    name: str
    call: Callable[[Inputs], tuple[Tensor, ...]]
    floats: tuple[str, ...]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _moe_permute(i: Inputs) -> tuple[Tensor, ...]:
    return moe_permute(i["x"], None, i["ids"], i["probs"], E, None, 1)[0:3:2]


def _moe_unpermute(i: Inputs, weighted: bool = False) -> tuple[Tensor, ...]:
    arguments = i["rows"], i["rowmap"], i["ids"], i["row_probs"], i["x"].shape[0], E
    return moe_unpermute(*arguments, using_weighted_combine=weighted)


def _float8_experts(i: Inputs) -> tuple[Tensor, ...]:
    def expert_fn(codes, scales, row_probs):
        return dequantize_1x128(codes, scales, dtype=paddle.float32) * row_probs.unsqueeze(-1)

    def expert_vjp(d_out, codes, scales, row_probs):
        rows = dequantize_1x128(codes, scales, dtype=paddle.float32)
        return d_out * row_probs.unsqueeze(-1), (d_out * rows).sum(1)

    return (quantized_experts(i["x"], i["plan"], expert_fn, expert_vjp, i["row_probs"]),)


MAPS = ("token_rows", "row_to_token")


def _products_of_slots(i: Inputs) -> Tensor:
    weights = {"topk_weights": i["probs"].reshape([-1]), "weights_by": "slot"}
    return grouped_gemm(i["rows"], i["weights"], plan=i["plan"], permute_y=True, **weights)


OPERATIONS = (
    Operation("moe_permute", _moe_permute, ("x", "probs"), ("ids",)),
    Operation("moe_unpermute", _moe_unpermute, ("rows", "row_probs"), ("rowmap", "ids")),
    Operation("moe_unpermute_weighted", lambda i: _moe_unpermute(i, True), ("rows", "row_probs"), ("rowmap", "ids")),
    Operation("route", lambda i: (route(i["ids"], i["probs"], num_experts=E).row_probs,), ("probs",), ("ids",)),
    Operation("route_mask", lambda i: (route(i["mask"], i["gates"]).row_probs,), ("gates",), ("mask",)),
    Operation("permute", lambda i: (permute(i["x"], i["plan"])[0],), ("x",), ("slot_to_row", *MAPS)),
    Operation("unpermute", lambda i: (unpermute(i["rows"], i["plan"]),), ("rows",), MAPS),
    Operation(
        "unpermute_by_row",
        lambda i: (unpermute(i["rows"], i["plan"], i["row_probs"]),),
        ("rows", "row_probs"),
        (*MAPS, "row_to_slot"),
    ),
    Operation(
        "unpermute_by_slot",
        lambda i: (unpermute(i["rows"], i["plan"], i["probs"]),),
        ("rows", "probs"),
        ("slot_to_row", *MAPS, "row_to_slot"),
    ),
    Operation(
        "sort_chunks",
        lambda i: sort_chunks(i["x"], i["sizes"], i["order"], i["token_probs"])[:2],
        ("x", "token_probs"),
        ("sizes", "order"),
    ),
    Operation(
        "permute_with_mask_map",
        lambda i: masked.permute_with_mask_map(i["x"], i["row_id_map"], i["rows"].shape[0], i["gates"])[:2],
        ("x", "gates"),
        ("row_id_map",),
    ),
    Operation(
        "unpermute_with_mask_map",
        lambda i: masked.unpermute_with_mask_map(i["rows"], i["row_id_map"], i["gates"], permuted_probs=i["row_probs"]),
        ("rows", "gates", "row_probs"),
        ("row_id_map",),
    ),
    Operation(
        "sort_chunks_by_map",
        lambda i: masked.sort_chunks_by_map(i["x"], i["chunk_map"], i["token_probs"]),
        ("x", "token_probs"),
        ("chunk_map",),
    ),
    Operation(
        "masked.moe_permute_with_probs",
        lambda i: masked.moe_permute_with_probs(
            i["x"], i["gates"], i["mask"], i["rows"].shape[0], zero_prob_as_padding=True
        )[:2],
        ("x", "gates"),
        ("mask",),
    ),
    Operation(
        "token_dispatch",
        lambda i: dispatch.token_dispatch(i["x"], i["mask"], i["rows"].shape[0], i["gates"], 3)[:2],
        ("x", "gates"),
        ("mask",),
    ),
    Operation(
        "token_combine",
        lambda i: (dispatch.token_combine(i["rows"], i["row_id_map"], i["row_probs"]),),
        ("rows", "row_probs"),
        ("row_id_map",),
    ),
    Operation(
        "token_combine_of_batches",
        lambda i: (dispatch.token_combine(i["rows"], i["row_id_map"], i["gates"].unsqueeze(0)),),
        ("rows", "gates"),
        ("row_id_map",),
    ),
    Operation("indexed.permute", lambda i: (indexed.permute(i["x"], i["gather"], K),), ("x",), ("gather",)),
    Operation("indexed.unpermute", lambda i: (indexed.unpermute(i["slots"], i["gather"]),), ("slots",), ("gather",)),
    Operation(
        "grouped_gemm",
        lambda i: (grouped_gemm(i["rows"], i["weights"], i["tokens_per_expert"], topk_weights=i["row_probs"]),),
        ("rows", "weights", "row_probs"),
        ("tokens_per_expert",),
    ),
    Operation(
        "grouped_gemm_of_tokens",
        lambda i: (grouped_gemm(i["x"], i["weights"], plan=i["plan"], permute_x=True),),
        ("x", "weights"),
        ("tokens_per_expert", "expert_offsets", *MAPS),
    ),
    Operation(
        "grouped_gemm_by_slot",
        lambda i: (grouped_gemm(i["rows"], i["weights"], plan=i["plan"], topk_weights=i["probs"]),),
        ("rows", "weights", "probs"),
        ("slot_to_row", "row_to_slot"),
    ),
    Operation(
        "grouped_gemm_with_a_bias",
        lambda i: (
            grouped_gemm(i["rows"], i["weights"], plan=i["plan"], topk_weights=i["probs"], bias=i["weights"][:, 0]),
        ),
        ("rows", "weights", "probs"),
        ("slot_to_row", "row_to_slot"),
    ),
    Operation(
        "grouped_gemm_to_slots",
        lambda i: (_products_of_slots(i),),
        ("rows", "weights", "probs"),
        ("slot_to_row", "row_to_slot"),
    ),
    Operation(
        "moe_mlp",
        lambda i: (moe_mlp(i["x"], i["plan"], i["probs"], paddle.concat([i["weights"]] * 2, axis=2), i["weights"]),),
        ("x", "probs", "weights"),
        ("tokens_per_expert", "expert_offsets", *MAPS),
    ),
    Operation("calculate_topk", lambda i: calculate_topk(i["x"], K, False, True)[:1], ("x",)),
)
# A node of its own on every backend, whose gradients the caller writes.
FLOAT8_EXPERTS = Operation("quantized_experts", _float8_experts, ("x", "row_probs"), MAPS)
