# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The least number of bytes an operation must move: each input read once, each output written once.

T tokens, K slots, E experts, H columns, N routed rows, M rows of the buffer (the N and the padding), b bytes per
element, S scales per row (float32). M counts only where padding rows are written, N otherwise.

    operation                    read                       written
    route                        4TK (ids) + 4TK (probs)    maps: 8TK + 12M, probabilities 4M, counts and offsets 8E
    permute                      T(Hb + 4S) + 4TK (map)     M(Hb + 4S)
    route_permute                T(Hb + 4S) + 8TK           M(Hb + 4S) + maps 8TK + 4M, probabilities 4M, 8E
    moe_permute                  T(Hb + 4S) + 8TK           as route_permute, and the row map 4TE
    permute_quantized            THb + 4TK                 M(H + 4S), with packed ue8m0 scales M(H + S)
    unpermute plain              NHb + 4TK (map)            THb
    unpermute weighted           NHb + 4TK + 4N             THb
    moe_unpermute                NHb + 4TE (row map) + 4TK + 4N   THb + 4TK
    unpermute_backward plain     THb + 4TK (map)            MHb
    unpermute_backward dx        THb + 4TK + 4N             MHb
    unpermute_backward dprob     THb + NHb + 4TK            4M
    unpermute_backward weighted  THb + NHb + 4TK + 4N       MHb + 4M
    sort_chunks                  MHb + 8E (sizes, order)    MHb; forward also the map 4M
    topk                         4TE (logits)               12TK (ids, weights)
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .problem import Problem
from .shapes import Operation

__all__ = ["Bytes", "Kind", "Work", "minimum_bytes", "probe_work"]

_WORD = 4  # int32, float32
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


class Bytes(NamedTuple):
    """Bytes that must be read and bytes that must be written."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


class Kind(IntEnum):
    """The kernels of ceilings.cu, which move rows as operations do but follow no map."""

    EMPTY = 0
    WRITE = 1
    READ = 2
    FANOUT = 3
    REDUCE = 4
    EXCHANGE = 5


class Work(NamedTuple):
    """What a probe moves.

    Attributes:
        kind: The kernel.
        shared: Bytes of the side that is touched once: read by FANOUT and EXCHANGE, written by REDUCE; all there is
            of READ and WRITE.
        streamed: Bytes of the other side: written by FANOUT, read by REDUCE, read and written by EXCHANGE.
    """

    kind: Kind
    shared: int
    streamed: int

    @property
    def name(self) -> str:
        return self.kind.name.lower()

    @property
    def total(self) -> int:
        """Bytes read and bytes written."""
        return self.shared + (2 if self.kind == Kind.EXCHANGE else 1) * self.streamed


def row_bytes(operation: Operation, problem: Problem) -> int:
    """Bytes of one row, with the scales that travel with it."""
    itemsize = _ITEMSIZE[operation.dtype]
    scales = problem.scale_cols if operation.variant == "fp8" else 0
    return problem.case.shape.hidden * itemsize + scales * _WORD


def quantized_row_bytes(operation: Operation, problem: Problem) -> int:
    """Bytes of one row of codes with its scales, which ue8m0 packs four to a word."""
    words = -(-problem.scale_cols // 4) if operation.variant == "ue8m0" else problem.scale_cols
    return problem.case.shape.hidden + words * _WORD


def minimum_bytes(operation: Operation, problem: Problem) -> Bytes:
    """The table above, for one operation and problem."""
    shape, op, variant = problem.case.shape, operation.op, operation.variant
    tokens, experts = shape.num_tokens, shape.num_experts
    slot_words = _WORD * tokens * shape.topk
    row = row_bytes(operation, problem)
    routed, buffer = problem.routed_rows, problem.plan.num_rows
    filled = buffer if problem.case.fill else routed
    if op == "route":
        return Bytes(2 * slot_words, 2 * slot_words + 4 * _WORD * buffer + 2 * _WORD * experts)
    if op == "permute":
        return Bytes(tokens * row + slot_words, filled * row)
    if op == "permute_quantized":
        return Bytes(tokens * row + slot_words, filled * quantized_row_bytes(operation, problem))
    if op in ("route_permute", "moe_permute"):
        maps = 2 * slot_words + 2 * _WORD * buffer + 2 * _WORD * experts
        rowmap = _WORD * tokens * experts if op == "moe_permute" else 0
        return Bytes(tokens * row + 2 * slot_words, filled * row + maps + rowmap)
    weights = _WORD * routed if variant in ("weighted", "dx") else 0
    if op == "unpermute":
        return Bytes(routed * row + slot_words + weights, tokens * row)
    if op == "moe_unpermute":
        rowmap = _WORD * tokens * experts
        return Bytes(routed * row + rowmap + slot_words + _WORD * routed, tokens * row + slot_words)
    if op == "sort_chunks":
        return Bytes(buffer * row + 2 * _WORD * experts, buffer * row + (_WORD * buffer if variant == "forward" else 0))
    if op == "topk":
        return Bytes(_WORD * tokens * experts, 3 * _WORD * tokens * problem.chosen_per_token)
    if op != "unpermute_backward":
        raise ValueError(f"operation must be one of shapes.OPERATIONS, but got {operation.key}")
    dots = variant in ("weighted", "dprob")
    return Bytes(
        tokens * row + (routed * row if dots else 0) + slot_words + weights,
        (0 if variant == "dprob" else buffer * row) + (_WORD * buffer if dots else 0),
    )


def probe_work(operation: Operation, problem: Problem) -> Work:
    """The probe that moves the rows of an operation: the tokens' on one side, the buffer's on the other."""
    row = row_bytes(operation, problem)
    tokens, routed = problem.case.shape.num_tokens * row, problem.routed_rows * row
    if operation.op in ("route", "topk"):
        return Work(Kind.EMPTY, 0, 0)
    if operation.op in ("unpermute", "moe_unpermute"):
        return Work(Kind.REDUCE, tokens, routed)
    if operation.op == "sort_chunks":
        return Work(Kind.FANOUT, problem.plan.num_rows * row, problem.plan.num_rows * row)
    if operation.key == "unpermute_backward:dprob":
        return Work(Kind.READ, tokens + routed, 0)
    if operation.key == "unpermute_backward:weighted":
        return Work(Kind.EXCHANGE, tokens, routed)
    filled = problem.case.fill or operation.op == "unpermute_backward"
    written = quantized_row_bytes(operation, problem) if operation.op == "permute_quantized" else row
    return Work(Kind.FANOUT, tokens, (problem.plan.num_rows if filled else problem.routed_rows) * written)
