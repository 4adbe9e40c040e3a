# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of GShard's gates, which ``paddle.incubate.distributed.models.moe.MoELayer`` is built on.

Arguments are those of Paddle's operators, in Paddle's order: ``number_count``, ``assign_pos``, ``limit_by_capacity``
and ``prune_gate_by_capacity`` of ``paddle._C_ops``, and ``random_routing`` of ``paddle._legacy_C_ops``.

Results are those of taking entries one by one, in the order of memory, on every device: of the entries that do not fit,
always the last are dropped. Paddle's kernels add atomically, so the choice may differ from run to run there. No
function has a gradient or changes an argument. All are deterministic, and raise TypeError or ValueError for arguments
of the wrong type, dtype, value or shape. Experts outside of the valid range raise ValueError under validation, and
count as -1 otherwise.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import constant, is_graph_value, public, to_dtype, without_autocast
from ..backends import Validation
from ..routing import Plan, route

__all__ = ["assign_pos", "limit_by_capacity", "number_count", "prune_gate_by_capacity", "random_routing"]

_SCORES = (*_checks.SUM_DTYPES, paddle.float64)


@public()
def number_count(numbers: Tensor, upper_range: int) -> Tensor:
    """Count how often each of the numbers in [0, upper_range) occurs; others are not counted.

    No host synchronisation.

    Args:
        numbers: int32 or int64, any shape.
        upper_range: numbers to count, at most 65536.

    Returns:
        [upper_range], dtype of ``numbers``.
    """
    name = "number_count"
    ids = _flat(name, "numbers", numbers)
    upper_range = _checks.integer(name, "upper_range", upper_range, 1, _checks.MAX_EXPERTS)
    return to_dtype(_plan(ids, upper_range).routed_per_expert, numbers.dtype)


@public()
def assign_pos(x: Tensor, cum_count: Tensor, eff_num_len: Tensor) -> Tensor:
    """Return the entries of each expert, one expert after the other, from its last entry to its first.

    Paddle's operator counts ``cum_count`` down to the starts of the experts; this one leaves it as it is. Host
    synchronisation: on a GPU one, to read ``eff_num_len``. Graphs are refused.

    Args:
        x: int32 or int64 experts of the entries, any shape; entries of a negative expert are left out.
        cum_count: int32 or int64 [E], how many entries the experts up to each one have, as `paddle.cumsum` of
            `number_count` computes it.
        eff_num_len: one integer, the last element of ``cum_count``.

    Returns:
        [eff_num_len], the numbers of the entries in ``x``, which is read flat; dtype of ``cum_count``.
    """
    name = "assign_pos"
    if is_graph_value(eff_num_len):
        _checks.bad_type(name, "eff_num_len", "a tensor, outside of graphs", "a value of a static graph")
    ids = _flat(name, "x", x)
    _checks.tensor(name, "cum_count", cum_count, _checks.ID_DTYPES, ["num_experts"])
    _checks.tensor(name, "eff_num_len", eff_num_len, _checks.ID_DTYPES, [1] * getattr(eff_num_len, "ndim", 0))
    _checks.same_place(name, x=x, cum_count=cum_count)
    num_experts = cum_count.shape[0]
    _check_range(name, "x", ids, num_experts)
    # A plan lists the entries of an expert in ascending order, so those of the reverse come in descending order.
    plan = _plan(ids.flip(0), max(num_experts, 1))
    if _checks.validation(name, None, x) > Validation.OFF and num_experts:
        counts = to_dtype(paddle.cumsum(plan.routed_per_expert), cum_count.dtype)
        if not bool((counts == cum_count).all()):
            _checks.bad_value(name, "cum_count", f"{counts.tolist()}, the cumulated counts of x", cum_count.tolist())
    length = _checks.integer(name, "eff_num_len", eff_num_len.item(), 0)
    if length > ids.shape[0]:
        _checks.bad_value(name, "eff_num_len", f"at most {ids.shape[0]}, the entries of x", length)
    entries = plan.row_to_token[:length]
    return paddle.where(entries < 0, entries, ids.shape[0] - 1 - entries).astype(cum_count.dtype)


@public()
def limit_by_capacity(expert_count: Tensor, capacity: Tensor, n_worker: int) -> Tensor:
    """Limit the entries that workers send to each expert to its capacity; earlier workers come first.

    No host synchronisation.

    Args:
        expert_count: int32 or int64 [n_worker * E], what each worker sends to every expert.
        capacity: int32 or int64 [E], the entries that each expert takes in all.
        n_worker: workers.

    Returns:
        [n_worker * E], what each worker may send; dtype of ``expert_count``.
    """
    name = "limit_by_capacity"
    workers = _checks.integer(name, "n_worker", n_worker, 1)
    _checks.tensor(name, "capacity", capacity, _checks.ID_DTYPES, ["num_experts"])
    num_experts = capacity.shape[0]
    shape = [workers * num_experts if num_experts >= 0 else -1]
    _checks.tensor(name, "expert_count", expert_count, _checks.ID_DTYPES, shape)
    _checks.same_place(name, expert_count=expert_count, capacity=capacity)
    counts = expert_count.astype("int64").reshape([workers, num_experts])
    left = capacity.astype("int64") - (counts.cumsum(0) - counts)
    return paddle.minimum(counts, left).clip(min=0).reshape([workers * num_experts]).astype(expert_count.dtype)


@public()
def prune_gate_by_capacity(gate_idx: Tensor, expert_count: Tensor, n_expert: int, n_worker: int) -> Tensor:
    """Keep the first entries of each expert, up to its count; the others become -1.

    No host synchronisation.

    Args:
        gate_idx: int32 or int64 experts of the entries, any shape; -1 stays.
        expert_count: int32 or int64 [n_expert * n_worker], the entries that each expert takes.
        n_expert: experts of a worker.
        n_worker: workers.

    Returns:
        shape and dtype of ``gate_idx``.
    """
    name = "prune_gate_by_capacity"
    ids = _flat(name, "gate_idx", gate_idx)
    num_experts = _checks.integer(name, "n_expert", n_expert, 1) * _checks.integer(name, "n_worker", n_worker, 1)
    if num_experts > _checks.MAX_EXPERTS:
        _checks.bad_value(name, "n_expert", f"such that all workers have at most {_checks.MAX_EXPERTS}", n_expert)
    _checks.tensor(name, "expert_count", expert_count, _checks.ID_DTYPES, [num_experts])
    _checks.same_place(name, gate_idx=gate_idx, expert_count=expert_count)
    _check_range(name, "gate_idx", ids, num_experts)
    plan = _plan(ids, num_experts)
    rows = plan.slot_to_row.flatten()
    has_row = rows >= 0
    experts = paddle.where(has_row, ids, paddle.zeros_like(ids))
    places = rows - paddle.gather(plan.expert_offsets, experts)
    is_kept = has_row & (places.astype("int64") < paddle.gather(expert_count, experts).astype("int64"))
    return paddle.where(is_kept, ids, paddle.full_like(ids, -1)).reshape(gate_idx.shape)


@public()
def random_routing(prob: Tensor, topk_value: Tensor, topk_idx: Tensor) -> Tensor:
    """Drop the second expert of tokens whose second score is low: -1 where 2 * topk_value[t, 1] < prob[t].

    No host synchronisation.

    Args:
        prob: [T] bfloat16, float16, float32 or float64, random numbers of the tokens.
        topk_value: [T, 2], any of these dtypes, the scores of the experts.
        topk_idx: int32 or int64 [T, 2], the experts.

    Returns:
        [T, 2], dtype of ``topk_idx``, which stays as it is.
    """
    name = "random_routing"
    _checks.tensor(name, "topk_idx", topk_idx, _checks.ID_DTYPES, ["num_tokens", 2])
    _checks.tensor(name, "topk_value", topk_value, _SCORES, topk_idx.shape)
    _checks.tensor(name, "prob", prob, _SCORES, [topk_idx.shape[0]])
    _checks.same_place(name, prob=prob, topk_value=topk_value, topk_idx=topk_idx)
    with without_autocast():
        drops = 2 * topk_value[:, 1].astype("float64") < prob.astype("float64")
        second = paddle.where(drops, paddle.full_like(topk_idx[:, 1], -1), topk_idx[:, 1])
        return paddle.stack([topk_idx[:, 0], second], axis=1)


def _flat(name: str, argument: str, ids: Any) -> Tensor:
    """Check experts of any shape; all of them in one dimension."""
    _checks.tensor(name, argument, ids, _checks.ID_DTYPES, [f"dim{i}" for i in range(getattr(ids, "ndim", 1))])
    return constant(ids).flatten()


def _plan(ids: Tensor, num_experts: int) -> Plan:
    """The plan of entries of one expert each; ids of no expert have no row."""
    return route(ids.unsqueeze(-1), num_experts=num_experts, buffer_size=max(ids.shape[0], -1), validate=False)


def _check_range(name: str, argument: str, ids: Tensor, num_experts: int) -> None:
    """Under validation, check that no id is beyond the experts."""
    if is_graph_value(ids) or ids.size == 0 or _checks.validation(name, None, ids) == Validation.OFF:
        return
    highest = int(ids.max())
    if highest >= num_experts:
        _checks.bad_value(name, argument, f"below {num_experts}, the number of experts", highest)
