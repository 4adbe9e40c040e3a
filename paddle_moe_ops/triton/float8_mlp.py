# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A whole layer of SwiGLU experts whose products take float8 operands, on the compiled library's kernels for Hopper.

As `moe_mlp`, in whose letters this is written, with these differences. Q is quantising: rows with a scale for each 128
columns, matrices with one for each 128 x 128 elements.

    Q of tokens, Q of W1 and W2         once in each call
    rows of Q(X) -> H, Q(A)             H in the tokens' dtype or in float8, if it is kept
    Q(A) Q(W2), weighted -> Y -> sums

    rows of Q(dO) -> dA' = Q(dO) Q(W2)^T
    H, dA' -> dH, Q(dH), s A and the gradients of s     in the same launch; H, or Q(H), is overwritten
    dW2 = (s A)^T dO, dW1 = X^T dH                      of numbers in the tokens' dtype
    Q(dH) Q(W1)^T -> rows of dX -> sums

Codes and scales of token rows exist one window at a time; codes and scales of A, dH and the matrices exist whole. Each
pass needs its own form of each matrix, with K contiguous. `quantize_experts` computes both forms, or those of the
forward pass, once for many calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .gemm.mlp import Pass
from .gemm.types import Gradients, Kept, Layer, Target
from .hopper_float8 import AMAX_MIN, GROUP, Codes, float8_product, quantize_blocks, quantize_both_forms
from .hopper_product import GATED, GRADIENT, PLAIN, TILE_ROWS
from .launch.device import Array, Device, cdiv
from .ops.permute import permute_chunk
from .ops.quantize import quantize
from .ops.unpermute import unpermute_chunk

__all__ = ["QuantizedExperts", "moe_mlp_float8", "moe_mlp_float8_backward", "quantize_experts"]


class QuantizedExperts(NamedTuple):
    """Q of the matrices, each with the contraction's numbers side by side: those of the forward pass come first."""

    gate_up: Codes
    down: Codes
    turned_gate_up: Codes | None = None
    turned_down: Codes | None = None


def quantize_experts(
    device: Device, gate_up: Array, down: Array, transpose: bool, both: bool = True
) -> QuantizedExperts:
    """Quantize both matrices by one launch each, for both passes or for the forward pass alone."""
    if not both:
        return QuantizedExperts(*(quantize_blocks(device, each, turned=not transpose) for each in (gate_up, down)))
    pairs = [quantize_both_forms(device, each)[:: 1 if transpose else -1] for each in (gate_up, down)]
    (gate_up_codes, turned_gate_up), (down_codes, turned_down) = pairs
    return QuantizedExperts(gate_up_codes, down_codes, turned_gate_up, turned_down)


class _Window(NamedTuple):
    """Rows of quantised tokens: their number, the first one, how many there are, and memory that begins with them."""

    number: int | None
    rows: tuple[int, int]
    source: Codes


class _Float8Run(Pass):
    """One pass."""

    def __init__(
        self, device: Device, layer: Layer, x: Array, quantized: QuantizedExperts | None, tables: Array | None = None
    ) -> None:
        self.quantized = quantized
        super().__init__(device, layer, x, reuses_rows=False, may_gather=False, tables=tables)
        held = min(self.chunk_rows + TILE_ROWS, self.num_rows)
        codes = device.empty([held, self.hidden], "float8_e4m3fn")
        self.moved = Codes(codes, device.empty([held, cdiv(self.hidden, GROUP)], "float32"))
        self.float8_tables = self.schedule(TILE_ROWS)

    def _tile_heights(self) -> list[int]:
        return [TILE_ROWS]

    def _chunk_columns(self, most: int) -> int:
        return most  # a multiple of the matrices' blocks, of which each has a scale

    def matrix(self, name: str, w: Array) -> Codes:
        """A field of `QuantizedExperts`, made of w if it is not given."""
        if self.quantized is not None:
            return getattr(self.quantized, name)
        return quantize_blocks(self.device, w, turned=name.startswith("turned_") == self.layer.transpose)

    def new_codes(self, columns: int) -> Codes:
        device, groups = self.device, cdiv(columns, GROUP)
        codes = device.empty([self.num_rows, columns], "float8_e4m3fn")
        return Codes(codes, device.empty([self.num_rows, groups], "float32"))

    def windows_of(self, x: Array) -> Iterator[_Window]:
        """The rows of tokens in float8, window by window."""
        codes = quantize(self.device, x, ue8m0=False, scale_layout="row", amax_min=AMAX_MIN)
        for number in range(self.num_chunks):
            first = number * self.chunk_rows
            end = min(first + self.chunk_rows + TILE_ROWS, self.num_rows)
            for tokens, rows in zip(codes, self.moved, strict=True):
                columns = 0, tokens.shape[1]
                maps = self.layer.tokens.token_rows, self.layer.tokens.row_to_token
                permute_chunk(self.device, tokens, *maps, rows, (first, end), columns, self.rows_end)
            yield _Window(number if self.num_chunks > 1 else None, (first, end - first), self.moved)

    def activations_in_float8(
        self, x: Array, hidden: Array | Codes | None, made: Codes | None, act: Any = None
    ) -> None:
        """Q(A) in ``made``, H or Q(H) in ``hidden`` and A in ``act``, where they are given."""
        matrix = self.matrix("gate_up", self.layer.gate_up)
        wide, codes = _by_kind(hidden)
        for window in self.windows_of(x):
            operands = window.source, window.rows, matrix, self.float8_tables, self.num_rows
            out = Target(act, 0, self.inner)
            float8_product(
                *(self.device, *operands, out, GATED),
                hidden=wide,
                hidden_codes=codes,
                made=made,
                window=window.number,
            )

    def gradients_in_float8(
        self, d_out: Array, hidden: Array, kept: Codes | None, scaled: Array, need_weights: bool
    ) -> tuple[Codes, Any]:
        """Q(dH) and the gradients of the weights, or None.

        ``hidden`` becomes dH; it holds H, unless ``kept`` is Q(H), which becomes Q(dH). ``scaled`` becomes s A.
        """
        layer, device, made, tiles = self.layer, self.device, kept or self.new_codes(2 * self.inner), None
        if need_weights and layer.weights is not None:
            tiles = device.empty([self.num_rows, self.inner // GROUP], "float32")
        matrix, out = self.matrix("turned_down", layer.down), Target(scaled, 0, self.inner)
        for window in self.windows_of(d_out):
            operands = window.source, window.rows, matrix, self.float8_tables, self.num_rows
            float8_product(
                *(device, *operands, out, GRADIENT),
                weights=layer.weights,
                hidden=hidden,
                hidden_codes=kept,
                made=made,
                row_to_token=layer.tokens.row_to_token,
                window=window.number,
                d_weights=tiles,
            )
        if tiles is None:
            return made, None
        return made, self.defer_row_sums(tiles, layer.tokens.row_to_token)

    def sums_in_float8(self, rows: Codes, matrix: Codes, weights: Array | None) -> Any:
        """The sums of each token's rows of a product [M, d]."""
        out = self.device.empty([self.num_tokens, self.hidden], self.dtype)
        self._buffer_key = None
        for first, end in self.column_ranges():
            target = Target(self.buffer, first, end - first)
            operands = rows, (0, self.num_rows), matrix, self.float8_tables, self.num_rows
            float8_product(self.device, *operands, target, PLAIN, weights=weights)
            token_rows = self.layer.tokens.token_rows
            unpermute_chunk(self.device, self.buffer, token_rows, self.num_rows, out, (first, end))
        return out


def _by_kind(hidden: Array | Codes | None) -> tuple[Array | None, Codes | None]:
    """H in the tokens' dtype, or in float8."""
    return (None, hidden) if isinstance(hidden, Codes) else (hidden, None)


def moe_mlp_float8(
    device: Device,
    x: Array,
    layer: Layer,
    keeps_hidden: bool,
    quantized: QuantizedExperts | None = None,
    hidden_in_float8: bool = False,
) -> tuple[Any, Kept]:
    """As `moe_mlp`, where `suits_float8`; matrices are quantised here if they are not given so.

    With ``hidden_in_float8`` what is kept of H are `Codes`.
    """
    run = _Float8Run(device, layer, x, quantized)
    hidden: Any = None
    if keeps_hidden:
        hidden = run.new_codes(2 * run.inner) if hidden_in_float8 else run.empty(2 * run.inner)
    act = run.new_codes(run.inner)
    run.activations_in_float8(x, hidden, act)
    out = run.sums_in_float8(act, run.matrix("down", layer.down), layer.weights)
    return out, Kept(hidden, run.kept_tables)


def moe_mlp_float8_backward(
    device: Device,
    d_out: Array,
    x: Array,
    kept: Kept,
    layer: Layer,
    wanted: tuple[bool, bool, bool, bool],
    into: tuple[tuple[Array, bool] | None, tuple[Array, bool] | None] = (None, None),
    quantized: QuantizedExperts | None = None,
) -> Gradients:
    """Return the gradients as `moe_mlp_backward` does, for layers that `suits_float8` accepts."""
    run = _Float8Run(device, layer, x, quantized, kept.tables)
    need_x, *_, need_weights = wanted
    hidden, hidden_codes = _by_kind(kept.hidden)
    scaled = run.empty(run.inner)
    if hidden is None:
        hidden = run.empty(2 * run.inner)
        if hidden_codes is None:
            run.activations_in_float8(x, hidden, None, scaled)
    codes, d_weights = run.gradients_in_float8(d_out, hidden, hidden_codes, scaled, need_weights)
    matrices = run.wgrads(x, d_out, hidden, scaled, wanted, into)
    d_x = None
    if need_x:
        d_x = run.sums_in_float8(codes, run.matrix("turned_gate_up", layer.gate_up), None)
    run.launch_deferred()
    return Gradients(d_x, *matrices, d_weights)
