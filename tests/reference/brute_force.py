# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The same semantics once more, as plain loops over Python numbers and exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray


class Format(NamedTuple):
    """A binary float format: significant bits, exponents of the smallest and the largest normal number."""

    precision: int
    min_exponent: int
    max_exponent: int


FORMATS = {
    np.dtype(np.float32): Format(24, -126, 127),
    np.dtype(np.float16): Format(11, -14, 15),
    np.dtype(ml_dtypes.bfloat16): Format(8, -126, 127),
}
FLOAT32 = FORMATS[np.dtype(np.float32)]


def round_fraction(value: Fraction, target: Format) -> float:
    """Round a number that is not 0 to the nearest number of the format, ties to even."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, target.min_exponent) - target.precision + 1)
    rounded = round(value / quantum) * quantum  # round() of a Fraction takes ties to even
    if abs(rounded) >= Fraction(2) ** (target.max_exponent + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


def round_number(value: float, target: Format) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round_fraction(Fraction(value), target)


def fma(a: float, b: float, c: float) -> float:
    """a * b + c for float32 numbers, rounded once to float32."""
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact != 0:
            return round_fraction(exact, FLOAT32)
    return a * b + c  # zeros, infinities and NaN: the product of two float32 is exact in Python's float


def numbers(array: ArrayLike) -> list:
    """Nested lists of Python floats that equal the elements of a float array."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return np.asarray(array).astype(np.float64).tolist()


class Routing(NamedTuple):
    """Results of the loops of :func:`route`, in lists named after the fields of Plan."""

    slot_to_row: list[list[int]]
    token_rows: list[list[int]]
    row_to_token: list[int]
    row_to_slot: list[int]
    row_to_expert: list[int]
    row_probs: list[float] | None
    tokens_per_expert: list[int]
    expert_offsets: list[int]
    routed_per_expert: list[int]
    overflow: int
    num_tokens: int
    topk: int
    num_experts: int
    padding_alignment: int
    num_rows: int


def mask_to_slots(mask: list[list[bool]], probs: list[list[float]] | None, topk: int) -> tuple[list, list | None]:
    """Turn a mask [T, E] into ids [T, K], and its probabilities with it."""
    all_ids, all_probs = [], []
    for token, line in enumerate(mask):
        experts = [expert for expert, is_set in enumerate(line) if is_set][:topk]
        gap = topk - len(experts)
        all_ids.append(experts + [-1] * gap)
        if probs is not None:
            all_probs.append([probs[token][expert] for expert in experts] + [0.0] * gap)
    return all_ids, None if probs is None else all_probs


def route(
    ids: list[list[int]],
    probs: list[list[float]] | None,
    num_experts: int,
    topk: int,
    padding_alignment: int,
    buffer_size: int,
    duplicates: str,
    capacity: int | None = None,
) -> Routing:
    """Fill the buffer expert by expert, token by token, slot by slot."""
    segments: list[list[tuple[int, int]]] = []
    for expert in range(num_experts):
        segment = []
        for token, line in enumerate(ids):
            slots = [k for k, chosen in enumerate(line) if chosen == expert]
            segment += [(token, k) for k in (slots[:1] if duplicates == "first" else slots)]
        segments.append(segment)

    places: list[tuple[int, int, int] | None] = []  # (token, slot, expert) of every row, None for padding
    offsets, too_many = [0], 0
    for expert, segment in enumerate(segments):
        room = len(segment) if capacity is None else capacity
        places += [(token, k, expert) for token, k in segment[:room]]
        too_many += len(segment[room:])
        while len(places) % padding_alignment:
            places.append(None)
        offsets.append(len(places))
    num_rows = len(places) if buffer_size < 0 else buffer_size
    dropped = [place for place in places[num_rows:] if place is not None]
    places = places[:num_rows] + [None] * (num_rows - len(places))

    slot_to_row = [[-1] * topk for _ in ids]
    kept = [0] * num_experts
    for row, place in enumerate(places):
        if place is not None:
            token, k, expert = place
            slot_to_row[token][k] = row
            kept[expert] += 1
    token_rows = []
    for line in slot_to_row:
        rows = sorted(row for row in line if row != -1)
        token_rows.append(rows + [-1] * (topk - len(rows)))
    return Routing(
        slot_to_row=slot_to_row,
        token_rows=token_rows,
        row_to_token=[-1 if place is None else place[0] for place in places],
        row_to_slot=[-1 if place is None else place[0] * topk + place[1] for place in places],
        row_to_expert=[-1 if place is None else place[2] for place in places],
        row_probs=None if probs is None else [0.0 if place is None else probs[place[0]][place[1]] for place in places],
        tokens_per_expert=kept,
        expert_offsets=[min(offset, num_rows) for offset in offsets],
        routed_per_expert=[len(segment) for segment in segments],
        overflow=len(dropped) + too_many,
        num_tokens=len(ids),
        topk=topk,
        num_experts=num_experts,
        padding_alignment=padding_alignment,
        num_rows=num_rows,
    )


def gather(values: NDArray, index: list[int]) -> NDArray:
    """Rows of values by index; zeros for -1."""
    out = np.zeros((len(index), *values.shape[1:]), values.dtype)
    for place, source in enumerate(index):
        if source >= 0:
            out[place] = values[source]
    return out


def sum_rows(y: NDArray, token_rows: list[list[int]], weights: list[float] | None, copy_single: bool) -> NDArray:
    """Sum the listed rows of each token; with copy_single, a token with one row gets its bits."""
    target = FORMATS[y.dtype]
    values = numbers(y)
    out = np.zeros((len(token_rows), y.shape[1]), y.dtype)
    for token, line in enumerate(token_rows):
        rows = [row for row in line if row >= 0]
        if len(rows) == 1 and copy_single:
            out[token] = y[rows[0]]
        elif rows:
            for column in range(y.shape[1]):
                total = -0.0
                for row in rows:
                    total = fma(values[row][column], 1.0 if weights is None else weights[row], total)
                out[token, column] = y.dtype.type(round_number(total, target))
    return out


def weighted_rows(d_out: NDArray, row_to_token: list[int], weights: list[float]) -> NDArray:
    """The gradient of a weighted sum's rows: weight times gradient, rounded to float32, then to the dtype."""
    target = FORMATS[d_out.dtype]
    values = numbers(d_out)
    out = np.zeros((len(row_to_token), d_out.shape[1]), d_out.dtype)
    for row, token in enumerate(row_to_token):
        if token >= 0:
            for column in range(d_out.shape[1]):
                product = fma(weights[row], values[token][column], -0.0)
                out[row, column] = d_out.dtype.type(round_number(product, target))
    return out


def dot_products(d_out: NDArray, y: NDArray, row_to_token: list[int]) -> list[float]:
    """The gradient of a weighted sum's weights (finite numbers only), exact but for the last rounding."""
    d_values, values = numbers(d_out), numbers(y)
    dots = []
    for row, token in enumerate(row_to_token):
        exact = Fraction(0)
        if token >= 0:
            exact = sum((Fraction(a) * Fraction(b) for a, b in zip(d_values[token], values[row], strict=True)), exact)
        dots.append(round_fraction(exact, FLOAT32) if exact else 0.0)
    return dots


def usable_rowmap(rowmap: list[list[int]], num_rows: int) -> list[list[int]]:
    """Put -1 for rows out of range and for every row seen before."""
    seen: set[int] = set()
    usable: list[list[int]] = []
    for line in rowmap:
        usable.append([])
        for row in line:
            good = 0 <= row < num_rows and row not in seen
            usable[-1].append(row if good else -1)
            if good:
                seen.add(row)
    return usable


def rows_read_by_slots(rowmap: list[list[int]], ids: list[list[int]], first_only: bool) -> list[list[int]]:
    """The row whose probability each slot brings back, -1 for none."""
    rows: list[list[int]] = []
    for line, token_ids in zip(rowmap, ids, strict=True):
        rows.append([])
        for k, expert in enumerate(token_ids):
            reads = 0 <= expert < len(line) and not (first_only and expert in token_ids[:k])
            rows[-1].append(line[expert] if reads else -1)
    return rows
