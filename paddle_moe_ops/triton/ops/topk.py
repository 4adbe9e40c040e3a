# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""The router's top-k and its backward: one program per token, all experts of the token in registers.

    topk       ids = K highest of logits (+ bias), grouped or not; weights = scores of these, normalised and scaled
    backward   d_gating from d_weights and d_scores

Layout: gating [T, E], any row stride; experts as a tile [GROUPS, MEMBERS], each side padded to a power of two. A value
becomes an order-preserving int32 and, with its expert in the low half, an int64 candidate; K max-reductions select.
Arithmetic is that of the C++ core except for the order of sums: exponentials have the same bits.

Bytes moved: T * E elements, T * K ids and weights, and T * E elements of scores; backward reads and writes T * E
elements.
"""

import struct
from typing import Any

import triton
import triton.language as tl

from ..launch.device import Array, Device, address, next_power_of_2
from .numerics import CARRIERS, rounded, widened

__all__ = ["topk", "topk_backward"]

_NAN_ORDER = tl.constexpr(2**31 - 1)
_NONE = tl.constexpr(-(2**63))
_LOG2_E = tl.constexpr(float.fromhex("0x1.715476p0"))
_LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e4p-1"))
_LN2_LOW = tl.constexpr(float.fromhex("0x1.7f7d1cp-20"))
_SHIFTER = tl.constexpr(float.fromhex("0x1.8p23"))
_SHIFTER_BITS = tl.constexpr(0x4B400000)
_DOWN = tl.constexpr(float.fromhex("0x1p-100"))


@triton.jit
def _exp_minus(x):
    """exp(-|x|), equal to csrc/common/scoring.h."""
    x = -tl.where(tl.abs(x) > 104.0, 104.0, tl.abs(x))
    shifted = x * _LOG2_E + _SHIFTER
    n = shifted - _SHIFTER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * (1.0 / 5040) + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - _SHIFTER_BITS + 227
    return p * (exponent << 23).to(tl.float32, bitcast=True) * _DOWN


@triton.jit
def _sigmoid(x):
    e = _exp_minus(x)
    return tl.div_rn(tl.where(x < 0, e, tl.where(x == x, 1.0, x)), 1.0 + e)


@triton.jit
def _slope(x):
    """sigmoid(x) * (1 - sigmoid(x))"""
    e = _exp_minus(x)
    return tl.div_rn(e, (1.0 + e) * (1.0 + e))


@triton.jit
def _highest_and_mass(logits, mask):
    """Softmax over all places of the mask: the highest logit and the sum of the exponentials."""
    places: tl.constexpr = logits.numel
    flat = tl.reshape(tl.where(mask, logits, -float("inf")), [places])
    highest = tl.max(flat, axis=0)
    exponentials = tl.where(mask, _exp_minus(highest - logits), 0.0)
    return highest, tl.sum(tl.reshape(exponentials, [places]), axis=0)


@triton.jit
def _score(logits, highest, mass, USE_SIGMOID: tl.constexpr):
    return _sigmoid(logits) if USE_SIGMOID else tl.div_rn(_exp_minus(highest - logits), mass + tl.zeros_like(logits))


@triton.jit
def _rounded_score(logits, highest, mass, USE_SIGMOID: tl.constexpr, DTYPE: tl.constexpr):
    return widened(rounded(_score(logits, highest, mass, USE_SIGMOID), DTYPE), DTYPE)


@triton.jit
def _divisor(total):
    """Divisor of weights with this sum. It can be subnormal, so use it in quotients only."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def _candidates(values, places, mask):
    """int64 in the order of choice: the value, NaN above all; then the place, the lower above."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN_ORDER)
    return tl.where(mask, (order.to(tl.int64) << 32) | (0x7FFFFFFF - places), _NONE)


@triton.jit
def _value_of(candidates):
    order = (candidates >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def topk_kernel(
    gating,
    bias,
    weights,
    ids,
    scores,
    row_stride,
    num_experts,
    num_groups,
    topk_groups,
    scores_per_group,
    topk,
    factor_bits,
    DTYPE: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    PRE_ACT: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program per token: group selection, expert selection, then the weights of the chosen experts."""
    token = tl.program_id(0).to(tl.int64)
    size = num_experts // num_groups
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, MEMBERS)[None, :]
    expert = group * size + member
    inside = (group < num_groups) & (member < size)
    logits = widened(tl.load(gating + token * row_stride + expert, mask=inside, other=0), DTYPE)
    highest, mass = 0.0, 1.0
    values = logits
    if PRE_ACT or WITH_SCORES:
        if not USE_SIGMOID:
            highest, mass = _highest_and_mass(logits, inside)
        all_scores = _rounded_score(logits, highest, mass, USE_SIGMOID, DTYPE)
        if WITH_SCORES:
            tl.store(scores + token * num_experts + expert, rounded(all_scores, DTYPE), mask=inside)
        if PRE_ACT:
            values = all_scores
    if HAS_BIAS:
        values = values + tl.load(bias + expert, mask=inside, other=0.0)
    left = _candidates(values, expert, inside)

    if GROUPS > 1:
        remaining = left
        sums = tl.zeros([GROUPS], tl.float32)
        for rank in range(scores_per_group):
            best = tl.max(remaining, axis=1)
            # The first value is copied: 0 + -0 would turn -0 into 0.
            sums = tl.where(rank == 0, _value_of(best), sums + _value_of(best))
            remaining = tl.where(remaining == best[:, None], _NONE, remaining)
        places = tl.arange(0, GROUPS)
        ranked = _candidates(sums, places, places < num_groups)
        others = ranked
        last = tl.max(others, axis=0)
        for _ in range(1, topk_groups):
            others = tl.where(others == last, _NONE, others)
            last = tl.max(others, axis=0)
        left = tl.where((ranked >= last)[:, None], left, _NONE)

    slots = tl.arange(0, SLOTS)
    used = slots < topk
    chosen = tl.zeros([SLOTS], tl.int32)
    left = tl.reshape(left, [GROUPS * MEMBERS])
    for slot in range(topk):
        best = tl.max(left, axis=0)
        left = tl.where(left == best, _NONE, left)
        chosen = tl.where(slots == slot, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), chosen)
    tl.store(ids + token * topk + slots, chosen.to(tl.int64), mask=used)
    chosen_logits = widened(tl.load(gating + token * row_stride + chosen, mask=used, other=0), DTYPE)
    if not PRE_ACT and not USE_SIGMOID:
        highest, mass = _highest_and_mass(chosen_logits, used)
    result = _rounded_score(chosen_logits, highest, mass, USE_SIGMOID, DTYPE)
    if RENORMALIZE:
        total = tl.sum(tl.where(used, result, 0.0), axis=0)
        result = tl.div_rn(result, _divisor(widened(rounded(total, DTYPE), DTYPE)) + tl.zeros_like(result))
    result = result * factor_bits.to(tl.float32, bitcast=True)
    tl.store(weights + token * topk + slots, rounded(result, DTYPE), mask=used)


@triton.jit
def topk_backward_kernel(
    gating,
    ids,
    d_weights,
    d_scores,
    d_gating,
    row_stride,
    num_experts,
    topk,
    factor_bits,
    DTYPE: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    PRE_ACT: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program per token: stores all experts, then the chosen ones again after a barrier."""
    token = tl.program_id(0).to(tl.int64)
    expert, slots = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    inside = expert < num_experts
    row, line, first_slot = token * row_stride, token * num_experts, token * topk
    logits = widened(tl.load(gating + row + expert, mask=inside, other=0), DTYPE)
    chosen = tl.load(ids + first_slot + slots, mask=slots < topk, other=-1)
    used = (chosen >= 0) & (chosen < num_experts)
    chosen_logits = widened(tl.load(gating + row + chosen, mask=used, other=0), DTYPE)
    d_all = tl.zeros([EXPERTS], tl.float32)
    d_chosen = tl.zeros([SLOTS], tl.float32)
    if WITH_SCORES:
        d_all = widened(tl.load(d_scores + line + expert, mask=inside, other=0), DTYPE)
        d_chosen = widened(tl.load(d_scores + line + chosen, mask=used, other=0), DTYPE)
    d_weight = widened(tl.load(d_weights + first_slot + slots, mask=used, other=0), DTYPE)
    d_weight = d_weight * factor_bits.to(tl.float32, bitcast=True)

    highest, mass = 0.0, 1.0
    if not USE_SIGMOID and (PRE_ACT or WITH_SCORES):
        highest, mass = _highest_and_mass(logits, inside)
    of_chosen, mass_of_chosen = highest, mass
    if not USE_SIGMOID and not PRE_ACT:
        of_chosen, mass_of_chosen = _highest_and_mass(chosen_logits, used)
    weight = tl.where(used, _score(chosen_logits, of_chosen, mass_of_chosen, USE_SIGMOID), 0.0)
    divisor = tl.full([SLOTS], 1.0, tl.float32)
    if RENORMALIZE:
        divisor = _divisor(tl.sum(weight, axis=0)) + tl.zeros_like(weight)
        # Subtract by quotients: a single weight, which is 1, then has a gradient of exactly 0.
        d_weight = d_weight - tl.sum(d_weight * tl.div_rn(weight, divisor), axis=0)

    if USE_SIGMOID:
        tl.store(d_gating + line + expert, rounded(d_all * _slope(logits), DTYPE), mask=inside)
        slope = _slope(chosen_logits)
        result = d_chosen * slope + d_weight * tl.div_rn(slope, divisor)
    else:
        own = tl.where(used, d_weight * tl.div_rn(weight, divisor), 0.0)
        of_weights = tl.sum(own, axis=0)
        dense = tl.zeros([EXPERTS], tl.float32)
        result = tl.zeros([SLOTS], tl.float32)
        if PRE_ACT or WITH_SCORES:
            score = tl.where(inside, _score(logits, highest, mass, USE_SIGMOID), 0.0)
            score_of_chosen = _score(chosen_logits, highest, mass, USE_SIGMOID)
            dot = tl.sum(d_all * score, axis=0)
            if PRE_ACT:
                dot += of_weights
            dense = score * (d_all - dot)
            result = score_of_chosen * (d_chosen - dot)
        result = result + (own if PRE_ACT else own - weight * of_weights)
        tl.store(d_gating + line + expert, rounded(dense, DTYPE), mask=inside)
    tl.debug_barrier()
    tl.store(d_gating + line + chosen, rounded(result, DTYPE), mask=used)


def _factor_bits(factor: float) -> int:
    """Bits of a float32: launches accept integers."""
    return struct.unpack("<i", struct.pack("<f", factor))[0]


def _warps(experts: int) -> int:
    return min(max(experts // 256, 1), 16)


def topk(
    device: Device,
    gating: Array,
    bias: Array | None,
    *,
    top_k: int,
    use_sigmoid: bool,
    renormalize: bool,
    pre_act: bool,
    num_groups: int,
    topk_groups: int,
    scores_per_group: int,
    scaling_factor: float,
    return_scores: bool,
) -> tuple[Any, Any, Any]:
    """weights [T, K], int64 ids [T, K] and scores [T, E], or [0] if they are not wanted.

    Args:
        device: allocates and launches.
        gating: [T, E] float32, float16 or bfloat16.
        bias: float32 [E], added for the choice only, or None.
        top_k: K.
        use_sigmoid: sigmoid, not softmax.
        renormalize: divide weights by their sum.
        pre_act: choose by scores, not by logits.
        num_groups: groups of E / num_groups experts.
        topk_groups: groups that are kept.
        scores_per_group: values that rank a group.
        scaling_factor: factor of the weights.
        return_scores: compute the scores.
    """
    num_tokens, num_experts = gating.shape
    dtype = device.dtype_name(gating)
    weights, ids = device.empty([num_tokens, top_k], dtype), device.empty([num_tokens, top_k], "int64")
    scores = device.empty([num_tokens, num_experts] if return_scores else [0], dtype)
    if not num_tokens:
        return weights, ids, scores
    groups = num_groups if topk_groups < num_groups else 1
    size = num_experts // groups
    shape = next_power_of_2(groups), next_power_of_2(size)
    carrier = CARRIERS[dtype]
    device.launch(
        topk_kernel,
        num_tokens,
        (carrier, "*fp32", carrier, "*i64", carrier, "i64", *["i32"] * 6),
        (
            *map(address, (gating, bias, weights, ids, scores)),
            *(device.row_stride(gating), num_experts, groups, topk_groups, min(scores_per_group, size), top_k),
            _factor_bits(scaling_factor),
        ),
        (
            *(dtype, use_sigmoid, pre_act, renormalize, bias is not None, return_scores),
            *(*shape, next_power_of_2(top_k)),
        ),
        _warps(shape[0] * shape[1]),
    )
    return weights, ids, scores


def topk_backward(
    device: Device,
    gating: Array,
    ids: Array,
    d_weights: Array,
    d_scores: Array | None,
    *,
    use_sigmoid: bool,
    renormalize: bool,
    pre_act: bool,
    scaling_factor: float,
) -> Any:
    """The gradient of the logits, [T, E] of the dtype of ``gating``.

    Args:
        device: allocates and launches.
        gating: the input of `topk`.
        ids: int64 [T, K], from `topk`.
        d_weights: [T, K] gradient of the weights.
        d_scores: [T, E] gradient of the scores, or None.
        use_sigmoid: as in `topk`, like the others.
        renormalize: the same.
        pre_act: the same.
        scaling_factor: the same.
    """
    num_tokens, num_experts = gating.shape
    top_k = ids.shape[1]
    dtype = device.dtype_name(gating)
    d_gating = device.empty([num_tokens, num_experts], dtype)
    if not num_tokens:
        return d_gating
    experts = next_power_of_2(num_experts)
    carrier = CARRIERS[dtype]
    device.launch(
        topk_backward_kernel,
        num_tokens,
        (carrier, "*i64", carrier, carrier, carrier, "i64", "i32", "i32", "i32"),
        (
            *map(address, (gating, ids, d_weights, d_scores, d_gating)),
            *(device.row_stride(gating), num_experts, top_k, _factor_bits(scaling_factor)),
        ),
        (dtype, use_sigmoid, pre_act, renormalize, d_scores is not None, experts, next_power_of_2(top_k)),
        _warps(experts),
    )
    return d_gating
