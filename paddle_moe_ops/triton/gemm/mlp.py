# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A whole layer of SwiGLU experts: what each token's experts make of it, weighted and added up.

T tokens of d columns, M rows, E experts of inner size n. Forward, with H = X W1 by rows:

    rows of X -> H [M, 2n] and A = swiglu(H) [M, n]     by windows of rows
    A W2, weighted -> Y -> sums of each token's rows    by windows of columns

Backward, with dA' the gradient of the weighted A, s A:

    rows of dO -> dA' = dO W2^T [M, n]                  by windows of rows
    H, dA' -> dH, s A and the gradients of s            in place, or in the same launch
    dW2 = (s A)^T dO, dW1 = X^T dH                      by windows of columns of dO and X
    dH W1^T -> rows of dX -> sums                       by windows of columns

Whatever has M x d elements exists one window at a time, in one buffer of ``workspace`` bytes. Where the rows of tokens
would take many windows, or moving them takes long beside a product, products gather them from the tokens instead. Each
element is the same sum either way, so the bits don't depend on the size of the buffer. On Hopper the compiled library
makes products where it is faster (`hopper_product`). H and the tables of tiles are kept between the passes; without H
the backward pass makes it again. Rows after the last expert's, which a static buffer has, are neither written nor read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..hopper_outer import hopper_outer, takes_outer
from ..hopper_product import (
    GATED,
    GRADIENT,
    PLAIN,
    TILE_ROWS,
    TURNED_ROWS,
    chosen_rows,
    fitting_columns,
    has_fast_memory,
    hopper_product,
    library_rows,
    most_library_rows,
)
from ..launch.device import ITEM_BYTES, Array, Device, address, blocks, sum_vector
from ..ops.permute import permute_window
from ..ops.row_sums import RowSums, sums_of_rows
from ..ops.unpermute import unpermute_window
from .configs import GemmConfig, gated_config, product_config, weight_gradient_config
from .gather_heuristic import gathers, gathers_for_matrix
from .gpu_facts import gpu_at
from .grouped_gemm import product
from .schedule import fill_schedules
from .swiglu import swiglu_gradient
from .types import Gpu, Gradients, Kept, Layer, Rows, Schedule, Target
from .wgrad import weight_gradient

__all__ = ["Run", "moe_mlp", "moe_mlp_backward"]

_COLUMN_STEP = 256  # windows of columns are multiples of it, and so of tiles, unless tiles of 192 columns fit better


class Run:
    """One pass: sizes, configurations, tables and the buffer.

    Args:
        device: where to.
        layer: the layer.
        x: [T, d], whose sizes and dtype count.
        moves_twice: whether two products take the same rows of tokens.
        may_gather: whether rows may be gathered.
        gradients_move: whether gradients of the matrices are made of moved rows in any case.
        tables: what the other pass kept.
    """

    def __init__(
        self,
        device: Device,
        layer: Layer,
        x: Array,
        moves_twice: bool,
        may_gather: bool = True,
        gradients_move: bool = False,
        tables: Array | None = None,
    ) -> None:
        self.device, self.layer, self.dtype = device, layer, device.dtype_name(x)
        self.item = ITEM_BYTES[self.dtype]
        self.num_tokens, self.hidden = x.shape
        self.num_rows = layer.tokens.row_to_token.shape[0]
        self.inner = layer.down.shape[2 if layer.transpose else 1]
        self.gpu: Gpu = gpu_at(address(layer.down))
        experts = layer.down.shape[0]
        self.gated = gated_config(self.gpu, self.num_rows, experts, self.inner)
        self.wide = product_config(self.gpu, self.num_rows, experts, self.inner, self.hidden)
        self.narrow = product_config(self.gpu, self.num_rows, experts, self.hidden, self.inner)
        # A window's last tile may end after it.
        self.tile_rows = max(self.gated.rows, self.narrow.rows, most_library_rows(device, self.gpu))
        rows = layer.workspace // (self.hidden * self.item)
        if rows < self.num_rows:
            rows = max(rows - self.tile_rows, self.tile_rows)
        self.window_rows = max(min(rows, self.num_rows), 1)
        self.num_windows = blocks(self.num_rows, self.window_rows)
        self.gathers = may_gather and self._gathers(moves_twice, gradients_move)
        columns = layer.workspace // max(self.num_rows * self.item, 1) // _COLUMN_STEP * _COLUMN_STEP
        self.window_columns = self._window_columns(min(max(columns, _COLUMN_STEP), self.hidden))
        self.owners = layer.tokens.row_to_token if self.gathers else None
        held = 0 if self.gathers else (self.window_rows + self.tile_rows) * self.hidden
        held = max(held, self.num_rows * self.window_columns)
        self.buffer = device.empty([min(held, self.num_rows * self.hidden)], self.dtype)
        self._in_buffer: tuple | None = None  # which window of which rows the buffer holds
        self._pending: RowSums | None = None  # what the next launch that moves rows makes as well
        self.kept_tables, self._schedules = self._schedule(tables)

    def _chosen(self, result: int, inner: int, columns: int) -> int:
        """Rows of the tiles of the library's kernel for a product, if it has one; 0: the Triton kernel makes it."""
        if not most_library_rows(self.device, self.gpu) or not self.num_rows:
            return 0
        return chosen_rows(self.gpu, result, self.num_rows // self.layer.down.shape[0], inner, columns)

    def _window_columns(self, most: int) -> int:
        """Columns of a window of the rows that are summed, so many at most: as many as the library's tiles fit."""
        fitting = fitting_columns(self.inner, most)
        if most == self.hidden or not fitting or self._chosen(PLAIN, self.inner, fitting) != TILE_ROWS:
            return most
        return fitting

    def _gathers(self, moves_twice: bool, gradients_move: bool = False) -> bool:
        """Whether a pass gathers the rows of tokens."""
        by_library = self._chosen(GRADIENT if moves_twice else GATED, self.hidden, self.inner) == TURNED_ROWS
        by_library = by_library and self.num_tokens > 0 and not gradients_move
        sizes = self.num_tokens, self.num_rows, self.layer.down.shape[0], self.inner, self.num_windows
        return gathers(*sizes, moves_twice, by_library, has_fast_memory(self.gpu))

    def _heights(self) -> list[int]:
        """Rows of the tiles of the products of both passes."""
        up, back = (self._chosen(result, self.hidden, self.inner) for result in (GATED, GRADIENT))
        sums = (self._chosen(PLAIN, inner, self.window_columns) for inner in (self.inner, 2 * self.inner))
        return sorted({up or self.gated.rows, back or self.narrow.rows, *(rows or self.wide.rows for rows in sums)})

    def _schedule(self, tables: Array | None) -> tuple[Array, dict[int, Schedule]]:
        """Schedules by the height of tiles, and the array that they are in; one launch unless they are given."""
        heights = self._heights()
        array = self._fill(heights) if tables is None or tables.shape[0] != self._length(heights) else tables
        return array, {height: self._within(array, number) for number, height in enumerate(heights)}

    def _length(self, heights: list[int]) -> int:
        return len(heights) * sum(Schedule.lengths(self.layer.down.shape[0], self._scheduled_windows))

    def _fill(self, heights: list[int]) -> Any:
        array = self.device.empty([self._length(heights)], "int32")
        window_rows = self.window_rows if self._scheduled_windows else 0
        fill_schedules(self.device, array, self.layer.groups, self.num_rows, heights, window_rows, covers_all=False)
        return array

    def _within(self, array: Array, number: int) -> Schedule:
        return Schedule.within(array, self.layer.down.shape[0], self._scheduled_windows, number)

    @property
    def _scheduled_windows(self) -> int:
        """How many windows have tables of their own; a pass that gathers has none."""
        return 0 if self.gathers or self.num_windows == 1 else self.num_windows

    def tables(self, tile_rows: int) -> Schedule:
        """The schedule for tiles of so many rows; a launch for rows that were not expected, as of unaligned arrays."""
        if tile_rows not in self._schedules:
            self._schedules[tile_rows] = self._within(self._fill([tile_rows]), 0)
        return self._schedules[tile_rows]

    def any_tables(self) -> Schedule:
        """A schedule for a kernel that looks only at where the groups begin and end."""
        return next(iter(self._schedules.values()))

    @property
    def rows_end(self) -> int:
        """The address of the end of the last group."""
        return address(self.any_tables().first) + ITEM_BYTES["int32"] * self.layer.down.shape[0]

    def add_up_later(self, values: Any, row_to_token: Array | None) -> Any:
        """The sums of rows by what the layer's weights are by, once `finish` is called."""
        slots = self.layer.slots
        self._pending = sums_of_rows(self.device, values, None if slots is not None else row_to_token, slots)
        return self._pending.out

    def finish(self) -> None:
        """Make what no launch has made."""
        if self._pending is not None:
            self._pending.launch(self.device)

    def new(self, columns: int) -> Any:
        return self.device.empty([self.num_rows, columns], self.dtype)

    def packed(self, array: Array, columns: int) -> Rows:
        """All rows of a matrix of its own."""
        return Rows(array, self.num_rows, columns, columns)

    def _tokens(self, x: Array) -> Rows:
        """All tokens, to gather."""
        return Rows(x, self.num_tokens, self.hidden, self.device.row_stride(x))

    def _window_of(self, x: Array, rows: tuple[int, int], columns: tuple[int, int]) -> tuple:
        """A key of a window of the rows of tokens [T, d]; views of one address may have other strides."""
        return address(x), self.device.row_stride(x), rows, columns

    def _moved(self, x: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Rows:
        """A window of the rows of tokens, in the buffer."""
        tokens, moved = self.layer.tokens, self._window_of(x, rows, columns)
        if moved != self._in_buffer:
            maps = tokens.token_rows, tokens.row_to_token
            permute_window(self.device, x, *maps, self.buffer, rows, columns, self.rows_end, self._pending)
            self._in_buffer, self._pending = moved, None
        width = columns[1] - columns[0]
        return Rows(self.buffer, rows[1] - rows[0], width, width, first_row=rows[0])

    def by_rows(self, x: Array) -> Iterator[tuple[int | None, Rows]]:
        """Windows of the rows of tokens, with those after each that its last tile reads; or all tokens, to gather."""
        if self.gathers:
            yield None, self._tokens(x)
            return
        if self.num_windows == 1:
            yield None, self._moved(x, (0, self.num_rows), (0, self.hidden))
            return
        for window in range(self.num_windows):
            first = window * self.window_rows
            end = min(first + self.window_rows + self.tile_rows, self.num_rows)
            yield window, self._moved(x, (first, end), (0, self.hidden))

    def columns(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.hidden, self.window_columns):
            yield first, min(first + self.window_columns, self.hidden)

    def by_columns(self, x: Array) -> Iterator[tuple[int, Rows]]:
        """Windows of the columns of tokens, all rows."""
        for columns in self.columns():
            yield columns[0], self._moved(x, (0, self.num_rows), columns)

    def library_rows(self, result: int, w: Array, inner: int, outer: int, *arrays: Any, columns: int = 0) -> int:
        """Rows of the tiles of the library's kernel that makes a product; 0: the Triton kernel does."""
        there = [each for each in arrays if each is not None]
        sizes = self.num_rows, w, inner, outer
        return library_rows(self.device, self.gpu, result, *sizes, (self.buffer, *there), columns)

    def _library_can_gather(self, x: Array) -> bool:
        """Whether there are tokens, in rows that don't overlap and whose bytes can be taken 16 at a time."""
        stride = self.device.row_stride(x)
        is_aligned = sum_vector(self.item, stride * self.item, address(x)) > 1
        return self.num_tokens > 0 and stride >= self.hidden and is_aligned

    def library_rows_of_tokens(self, result: int, w: Array, outer: int, x: Array, *arrays: Any) -> int:
        """The same of a product of the rows of tokens, which may be gathered."""
        if self.gathers and not self._library_can_gather(x):
            return 0
        return self.library_rows(result, w, self.hidden, outer, *arrays)

    def plain(
        self,
        source: Rows,
        w: Array,
        config: GemmConfig,
        tile_rows: int,
        out: Target,
        transpose: bool,
        weights: Array | None = None,
        owners: Array | None = None,
        window: int | None = None,
    ) -> None:
        """A product, by the library in tiles of so many rows, or with 0 by the Triton kernel, which can gather."""
        arguments = self.device, source, w, self.tables(tile_rows or config.rows)
        if tile_rows:
            hopper_product(
                *arguments,
                self.num_rows,
                out,
                PLAIN,
                transpose=transpose,
                tile_rows=tile_rows,
                weights=weights,
                window=window,
            )
            return
        product(
            *arguments,
            config,
            self.num_rows,
            out,
            transpose=transpose,
            row_to_token=owners,
            weights=weights,
            window=window,
        )

    def activations(self, x: Array, hidden: Array | None) -> Any:
        """A, and H in ``hidden``."""
        act = self.new(self.inner)
        out = Target(act, 0, self.inner)
        layer, config = self.layer, self.gated
        tile_rows = self.library_rows_of_tokens(GATED, layer.gate_up, self.inner, x, act, hidden)
        tables = self.tables(tile_rows or config.rows)
        for window, rows in self.by_rows(x):
            if tile_rows:
                hopper_product(
                    *(self.device, rows, layer.gate_up, tables, self.num_rows, out, GATED),
                    transpose=layer.transpose,
                    tile_rows=tile_rows,
                    hidden=hidden,
                    row_to_token=self.owners,
                    gathers=self.gathers,
                    window=window,
                )
                continue
            product(
                self.device,
                rows,
                layer.gate_up,
                tables,
                config,
                self.num_rows,
                out,
                transpose=layer.transpose,
                gated=True,
                row_to_token=self.owners,
                hidden=hidden,
                window=window,
            )
        return act

    def activation_gradients(self, d_out: Array, hidden: Array, scaled: Array, need_weights: bool) -> Any:
        """The gradients of the weights, or None; H becomes the gradient of itself, and ``scaled`` s A."""
        layer, device, out = self.layer, self.device, Target(scaled, 0, self.inner)
        owners, operands = layer.tokens.row_to_token, (layer.down, self.hidden, self.inner, scaled)
        tile_rows = self.library_rows_of_tokens(GRADIENT, layer.down, self.inner, d_out, scaled, hidden)
        if tile_rows:
            tables, tiles = self.tables(tile_rows), None
            for window, rows in self.by_rows(d_out):
                tiles = hopper_product(
                    *(device, rows, layer.down, tables, self.num_rows, out, GRADIENT),
                    transpose=not layer.transpose,
                    tile_rows=tile_rows,
                    weights=layer.weights,
                    hidden=hidden,
                    row_to_token=owners,
                    gathers=self.gathers,
                    window=window,
                    d_weights=tiles,
                )
            return None if tiles is None or not need_weights else self.add_up_later(tiles, owners)
        tile_rows = 0 if self.gathers else self.library_rows(PLAIN, *operands)
        for window, rows in self.by_rows(d_out):
            arguments = rows, layer.down, self.narrow, tile_rows, out, not layer.transpose
            self.plain(*arguments, owners=self.owners, window=window)
        vector = sum_vector(self.item, self.inner * self.item, address(hidden), address(scaled))
        d_weights = swiglu_gradient(device, hidden, scaled, layer.weights, owners, self.rows_end, vector)
        if d_weights is None or not need_weights:
            return None
        return d_weights if layer.slots is None else self.add_up_later(d_weights, None)

    def sums(self, source: Rows, w: Array, transpose: bool, weights: Array | None) -> Any:
        """The sums of each token's rows of a product [M, d]."""
        out = self.device.empty([self.num_tokens, self.hidden], self.dtype)
        self._in_buffer = None
        tile_rows = self.library_rows(PLAIN, w, source.width, self.hidden, source.array, columns=self.window_columns)
        for first, end in self.columns():
            target = Target(self.buffer, first, end - first)
            self.plain(source, w, self.wide, tile_rows, target, transpose, weights=weights)
            token_rows = self.layer.tokens.token_rows
            unpermute_window(self.device, self.buffer, token_rows, self.num_rows, out, (first, end))
        return out

    def matrix_gradients(
        self,
        x: Array,
        d_out: Array,
        d_hidden: Array,
        scaled: Array,
        wanted: tuple[bool, bool, bool, bool],
        into: tuple[tuple[Array, bool] | None, tuple[Array, bool] | None],
    ) -> tuple[Any, Any]:
        """dW1 and dW2, None where they are not wanted."""
        layer, d_gate_up, d_down = self.layer, None, None
        if wanted[2]:
            rows = self.packed(scaled, self.inner)
            d_down = self._matrix_gradient(layer.down, d_out, rows, layer.transpose, into[1])
        if wanted[1]:
            rows = self.packed(d_hidden, 2 * self.inner)
            d_gate_up = self._matrix_gradient(layer.gate_up, x, rows, not layer.transpose, into[0])
        return d_gate_up, d_down

    def _matrix_gradient(
        self, matrix: Array, tokens: Array, rows: Rows, tokens_first: bool, into: tuple[Array, bool] | None
    ) -> Any:
        """The sum of each expert's outer products of the rows of tokens and other rows, the former first or last."""
        out, adds = into or (self.device.empty(matrix.shape, self.dtype), False)
        is_moved = self._in_buffer == self._window_of(tokens, (0, self.num_rows), (0, self.hidden))
        if (self.gathers or gathers_for_matrix(rows.width, is_moved)) and self._library_can_gather(tokens):
            source = self._tokens(tokens)
            p, q = (source, rows) if tokens_first else (rows, source)
            if takes_outer(self.device, self.gpu, self.num_rows, p, q, out, adds):
                gathered = self.layer.tokens.row_to_token, not tokens_first
                hopper_outer(self.device, p, q, self.any_tables(), self.num_rows, out, gathered=gathered)
                return out
        config = weight_gradient_config(self.gpu, *matrix.shape[1:])
        tables = self.any_tables()
        for first, moved in self.by_columns(tokens):
            p, q = (moved, rows) if tokens_first else (rows, moved)
            window = (first, 0) if tokens_first else (0, first)
            if takes_outer(self.device, self.gpu, self.num_rows, p, q, out, adds):
                hopper_outer(self.device, p, q, tables, self.num_rows, out, window=window)
                continue
            weight_gradient(self.device, p, q, tables, config, self.num_rows, out, window=window, adds=adds)
        return out


def moe_mlp(device: Device, x: Array, layer: Layer, keeps_hidden: bool) -> tuple[Any, Kept]:
    """The sums [T, d], and what the backward pass needs.

    Args:
        device: where to.
        x: [T, d] float16 or bfloat16.
        layer: the rest.
        keeps_hidden: whether to keep H.
    """
    run = Run(device, layer, x, moves_twice=False)
    hidden = run.new(2 * run.inner) if keeps_hidden else None
    act = run.activations(x, hidden)
    out = run.sums(run.packed(act, run.inner), layer.down, layer.transpose, layer.weights)
    return out, Kept(hidden, run.kept_tables)


def moe_mlp_backward(
    device: Device,
    d_out: Array,
    x: Array,
    kept: Kept,
    layer: Layer,
    wanted: tuple[bool, bool, bool, bool],
    into: tuple[tuple[Array, bool] | None, tuple[Array, bool] | None] = (None, None),
) -> Gradients:
    """The gradients of x, of both matrices and of the weights.

    Args:
        device: where to.
        d_out: [T, d].
        x: as in `moe_mlp`.
        kept: what the forward pass left; the call overwrites H.
        layer: as in `moe_mlp`.
        wanted: which gradients are made.
        into: for the matrices, where their gradients go, float32 or the dtype of ``x``, and whether they are added to
            what is there; None: to new arrays.
    """
    run = Run(device, layer, x, moves_twice=True, gradients_move=any(into), tables=kept.tables)
    need_x, *_, need_weights = wanted
    hidden = kept.hidden
    if hidden is None:
        hidden = run.new(2 * run.inner)
        scaled = run.activations(x, hidden)
    else:
        scaled = run.new(run.inner)
    d_weights = run.activation_gradients(d_out, hidden, scaled, need_weights)
    matrices = run.matrix_gradients(x, d_out, hidden, scaled, wanted, into)
    d_x = None
    if need_x:
        d_x = run.sums(run.packed(hidden, 2 * run.inner), layer.gate_up, not layer.transpose, None)
    run.finish()
    return Gradients(d_x, *matrices, d_weights)
