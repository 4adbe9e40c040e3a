# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for operators that Paddle has for GPUs only: with them ERNIE-4.5-MoE runs on a CPU as PaddleFormers has it.

They are what patched models are compared with, in the plainest form; nothing outside the tests uses them.
"""

from __future__ import annotations

import importlib
from typing import Any

import paddle
from paddle import Tensor, _C_ops


def moe_gate_dispatch_partial_nosoftmaxtopk(
    x: Tensor,
    combine_weights: Tensor,
    expert_id: Tensor,
    k: int,
    capacity: int,
    num_experts: int,
    use_pad: bool,
    expert_start_index: int,
    expert_end_index: int,
    reverse_token_drop: bool,
) -> tuple[Tensor, ...]:
    """The rows of each expert in the order of tokens, padded to the capacity or not; no token may be dropped."""
    tokens = x.shape[0]
    flat = expert_id.reshape([-1]).astype("int64")
    counts = paddle.bincount(flat, minlength=num_experts)
    if int(counts.max()) > capacity:
        raise ValueError("the stand-in drops no tokens")
    order = flat.argsort(stable=True)  # slots, expert by expert
    ends = counts.cumsum()
    starts = ends - counts
    place = paddle.arange(tokens * k) - starts[flat[order]]
    destination = (flat[order] * capacity if use_pad else starts[flat[order]]) + place
    rows = x[order // k]
    if use_pad:
        buffer = paddle.zeros([num_experts * capacity, x.shape[1]], x.dtype)
        rows = paddle.scatter_nd_add(buffer, destination.unsqueeze(-1), rows)
    scatter_index = paddle.zeros([tokens * k], "int64")
    scatter_index[order] = destination
    scatter_index_rev = paddle.full([rows.shape[0]], -1, "int64")
    scatter_index_rev[destination] = order // k
    return (
        rows,
        combine_weights * 1.0,
        scatter_index.reshape([tokens, k]).transpose([1, 0]).astype("int32"),
        scatter_index_rev.astype("int32"),
        counts,
        counts.clone(),
    )


def moe_combine(x: Tensor, combine_weights: Tensor, scatter_index: Tensor) -> Tensor:
    """The weighted sum of each token's rows."""
    return (x[scatter_index.astype("int64")] * combine_weights.unsqueeze(-1)).sum(axis=1)


def moe_combine_grad(x: Tensor, combine_weights: Tensor, scatter_index: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the rows, and the products whose sums are the gradients of the weights."""
    index = scatter_index.astype("int64")
    by_slot = grad.unsqueeze(1) * combine_weights.unsqueeze(-1)
    rows = paddle.scatter_nd_add(paddle.zeros_like(x), index.reshape([-1, 1]), by_slot.reshape([-1, x.shape[1]]))
    return rows, (x[index] * grad.unsqueeze(1)).reshape([-1, x.shape[1]])


def cal_aux_loss(
    gate_prob: Tensor,
    dispatch_mask: Tensor,
    tokens_mask: Tensor,
    dispatch_tokens_mask: Tensor,
    num_experts: int,
    use_group: bool,
    moe_k: int,
    clip_min: float,
) -> tuple[Tensor, ...]:
    """Paddle's own formula for devices without the operator."""
    formulas = importlib.import_module("paddle.incubate.nn.functional.cal_aux_loss")
    return formulas.math_cal_aux_loss(
        gate_prob, dispatch_mask, tokens_mask, dispatch_tokens_mask, num_experts, use_group, moe_k, clip_min
    )


def int_bincount(x: Tensor, low: int, high: int, dtype: Any) -> Tensor:
    return paddle.bincount(x, minlength=high).astype(dtype)


def expand_modality_expert_id(
    expert_id: Tensor, num_expert_per_modality: int, group_size: int, modality_offset: int, is_group_expert: bool
) -> Tensor:
    """The ids of a modality after those of the ones before, without groups; without the graph of `paddle.topk`."""
    return expert_id.detach() + num_expert_per_modality * modality_offset


def build_src_rank_and_local_expert_id(
    expert_num_global: Tensor, expert_num_global_list: list[int], num_local_experts: int
) -> tuple[Tensor, Tensor]:
    """Source ranks and local expert ids of the rows, in a group of one process."""
    rows = sum(expert_num_global_list)
    experts = paddle.arange(num_local_experts).repeat_interleave(paddle.to_tensor(expert_num_global_list))
    return paddle.zeros([rows], "int32"), experts.astype("int32")


_VL = "paddleformers.transformers.ernie4_5_moe_vl.model"


def install(monkeypatch: Any) -> None:
    """Put the stand-ins where the files of ERNIE-4.5-MoE look for the operators."""
    _install(
        monkeypatch,
        "paddleformers.nn.moe.moe_allgather_layer",
        "paddleformers.nn.moe.topk_gate",
        "paddleformers.nn.moe.moe_alltoall_layer",
    )


def install_for_images(monkeypatch: Any) -> None:
    """Put the stand-ins where the files of ERNIE-4.5-VL look for the operators."""
    _install(monkeypatch, f"{_VL}.moe.moe_all_gather_layer", f"{_VL}.moe.topk_gate", f"{_VL}.moe.moe_layer")
    decoder = importlib.import_module(f"{_VL}.modeling_moe")
    monkeypatch.setattr(decoder, "get_async_loader", lambda: None)
    monkeypatch.setattr(decoder, "async_offload", lambda tensor, loader: (tensor, None))


def _install(monkeypatch: Any, layer_module: str, gate_module: str, combine_module: str) -> None:
    layer = importlib.import_module(layer_module)
    for function in (
        moe_gate_dispatch_partial_nosoftmaxtopk,
        expand_modality_expert_id,
        build_src_rank_and_local_expert_id,
    ):
        monkeypatch.setattr(layer, function.__name__, function)
    monkeypatch.setattr(layer, "get_async_loader", lambda: None)
    monkeypatch.setattr(layer, "async_offload", lambda tensor, loader: (tensor, None))
    gate = importlib.import_module(gate_module)
    monkeypatch.setattr(gate, "cal_aux_loss", cal_aux_loss)
    monkeypatch.setattr(gate, "int_bincount", int_bincount)
    combine = importlib.import_module(combine_module)
    monkeypatch.setattr(combine, "moe_combine", moe_combine)
    monkeypatch.setattr(_C_ops, "moe_combine_grad", moe_combine_grad)
