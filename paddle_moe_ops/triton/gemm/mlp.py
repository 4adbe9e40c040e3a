# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of SwiGLU experts: grouped GEMMs, SwiGLU, and the weighted sum of each token's rows, chunk by chunk.

T tokens of d columns, M rows, E experts of inner size n. Forward, with H = X W1 by rows:

    rows of X -> H [M, 2n] and A = swiglu(H) [M, n]     GEMM with SwiGLU epilogue, by row chunks
    A W2, weighted -> Y -> sums of each token's rows    GEMM and unpermute, by column chunks

Backward, with dA' the gradient of the weighted A, s A:

    rows of dO -> dA' = dO W2^T [M, n]                  dgrad, by row chunks
    H, dA' -> dH, s A and the gradients of s            in place, or in the epilogue of that dgrad
    dW2 = (s A)^T dO, dW1 = X^T dH                      wgrad, by column chunks of dO and X
    dH W1^T -> rows of dX -> sums                       dgrad and unpermute, by column chunks

Memory: an M x d matrix exists one chunk at a time, in one buffer of ``workspace`` bytes. If token rows would need many
chunks, or if permuting takes long compared with the GEMM, GEMMs gather them from the tokens instead
(`gather_heuristic`). Each element is the same sum either way, so the bits do not depend on the buffer's size. H and the
tile schedules are saved between the passes; without H, the backward pass recomputes it. Rows after the last expert's,
which a static buffer has, are neither written nor read.

This layer serves GPUs for which the compiled library has no kernels (csrc/layer).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..launch.device import ITEM_BYTES, Array, Device, address, cdiv, vector_elements
from ..ops.permute import permute_chunk
from ..ops.row_sums import RowSums, sums_of_rows
from ..ops.unpermute import unpermute_chunk
from .configs import GemmConfig, gated_config, gemm_config, wgrad_config
from .gather_heuristic import gathers
from .gpu_facts import gpu_at
from .grouped_gemm import launch_gemm
from .schedule import fill_schedules
from .swiglu import swiglu_gradient
from .types import Gpu, Gradients, Kept, Layer, Rows, Schedule, Target
from .wgrad import launch_wgrad

__all__ = ["Pass", "moe_mlp", "moe_mlp_backward", "moe_mlp_dgrads", "moe_mlp_wgrads"]

_COLUMN_STEP = 256  # column chunks are multiples of it, hence of tiles


class Pass:
    """One pass of a layer: sizes, configurations, tile schedules and the chunk buffer.

    Args:
        device: allocates and launches.
        layer: operands of both passes.
        x: [T, d]; its sizes and dtype are read.
        reuses_rows: whether two GEMMs read the same permuted rows.
        tables: tile schedules of the other pass, or None.
    """

    def __init__(
        self,
        device: Device,
        layer: Layer,
        x: Array,
        reuses_rows: bool,
        tables: Array | None = None,
    ) -> None:
        self.device, self.layer, self.dtype = device, layer, device.dtype_name(x)
        self.item = ITEM_BYTES[self.dtype]
        self.num_tokens, self.hidden = x.shape
        self.num_rows = layer.tokens.row_to_token.shape[0]
        self.inner = layer.down.shape[2 if layer.transpose else 1]
        self.gpu: Gpu = gpu_at(address(layer.down))
        experts = layer.down.shape[0]
        self.swiglu_config = gated_config(self.gpu, self.num_rows, experts, self.inner)
        self.down_config = gemm_config(self.gpu, self.num_rows, experts, self.inner, self.hidden)
        self.down_dgrad_config = gemm_config(self.gpu, self.num_rows, experts, self.hidden, self.inner)
        # The last tile of a chunk may extend beyond it.
        self.tile_rows = max(self.swiglu_config.block_m, self.down_dgrad_config.block_m)
        rows = layer.workspace // (self.hidden * self.item)
        if rows < self.num_rows:
            rows = max(rows - self.tile_rows, self.tile_rows)
        self.chunk_rows = max(min(rows, self.num_rows), 1)
        self.num_chunks = cdiv(self.num_rows, self.chunk_rows)
        self.gathers = gathers(self.num_tokens, self.num_rows, self.inner, self.num_chunks, reuses_rows)
        columns = layer.workspace // max(self.num_rows * self.item, 1) // _COLUMN_STEP * _COLUMN_STEP
        self.chunk_columns = min(max(columns, _COLUMN_STEP), self.hidden)
        self.gather_map = layer.tokens.row_to_token if self.gathers else None
        buffer_elements = 0 if self.gathers else (self.chunk_rows + self.tile_rows) * self.hidden
        buffer_elements = max(buffer_elements, self.num_rows * self.chunk_columns)
        self.buffer = device.empty([min(buffer_elements, self.num_rows * self.hidden)], self.dtype)
        self._buffer_key: tuple | None = None  # the chunk that the buffer contains
        self._deferred_sums: RowSums | None = None  # appended to the next launch that permutes
        self.kept_tables, self._schedules = self._schedules_in(tables)

    def _tile_heights(self) -> list[int]:
        """Tile rows of the GEMMs of both passes."""
        configs = self.swiglu_config, self.down_dgrad_config, self.down_config
        return sorted({config.block_m for config in configs})

    def _schedules_in(self, tables: Array | None) -> tuple[Array, dict[int, Schedule]]:
        """The array of tile schedules, and the schedules by tile rows; one launch unless ``tables`` fit."""
        heights = self._tile_heights()
        array = self._fill(heights) if tables is None or tables.shape[0] != self._length(heights) else tables
        return array, {height: self._within(array, number) for number, height in enumerate(heights)}

    def _length(self, heights: list[int]) -> int:
        return len(heights) * sum(Schedule.lengths(self.layer.down.shape[0], self._scheduled_chunks))

    def _fill(self, heights: list[int]) -> Any:
        array = self.device.empty([self._length(heights)], "int32")
        chunk_rows = self.chunk_rows if self._scheduled_chunks else 0
        fill_schedules(self.device, array, self.layer.groups, self.num_rows, heights, chunk_rows, covers_all=False)
        return array

    def _within(self, array: Array, number: int) -> Schedule:
        return Schedule.within(array, self.layer.down.shape[0], self._scheduled_chunks, number)

    @property
    def _scheduled_chunks(self) -> int:
        """Number of chunks in the schedules; 0 for a pass that gathers or has one chunk."""
        return 0 if self.gathers or self.num_chunks == 1 else self.num_chunks

    def schedule(self, tile_rows: int) -> Schedule:
        """Schedule for tiles of ``tile_rows`` rows, computed by a launch if no GEMM was expected to have them."""
        if tile_rows not in self._schedules:
            self._schedules[tile_rows] = self._within(self._fill([tile_rows]), 0)
        return self._schedules[tile_rows]

    def any_schedule(self) -> Schedule:
        """A schedule for kernels that read only the bounds of groups."""
        return next(iter(self._schedules.values()))

    @property
    def rows_end(self) -> int:
        """Address of the end of the last group."""
        return address(self.any_schedule().group_starts) + ITEM_BYTES["int32"] * self.layer.down.shape[0]

    def defer_row_sums(self, values: Any, row_to_token: Array | None) -> Any:
        """Row sums in the form of the layer's weights; computed by a later launch, at the latest `launch_deferred`."""
        slots = self.layer.slots
        self._deferred_sums = sums_of_rows(self.device, values, None if slots is not None else row_to_token, slots)
        return self._deferred_sums.out

    def launch_deferred(self) -> None:
        """Launch the row sums that no other launch has computed."""
        if self._deferred_sums is not None:
            self._deferred_sums.launch(self.device)

    def empty(self, columns: int) -> Any:
        return self.device.empty([self.num_rows, columns], self.dtype)

    def as_rows(self, array: Array, columns: int) -> Rows:
        """All rows of a packed matrix."""
        return Rows(array, self.num_rows, columns, columns)

    def _tokens(self, x: Array) -> Rows:
        """All tokens, for a GEMM that gathers."""
        return Rows(x, self.num_tokens, self.hidden, self.device.row_stride(x))

    def _chunk_key(self, x: Array, rows: tuple[int, int], columns: tuple[int, int]) -> tuple:
        """A key of a chunk of token rows [T, d]; views at one address may have different strides."""
        return address(x), self.device.row_stride(x), rows, columns

    def _permuted(self, x: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Rows:
        """A chunk of the rows of tokens, permuted into the buffer unless it contains them."""
        tokens, key = self.layer.tokens, self._chunk_key(x, rows, columns)
        if key != self._buffer_key:
            maps = tokens.token_rows, tokens.row_to_token
            permute_chunk(self.device, x, *maps, self.buffer, rows, columns, self.rows_end, self._deferred_sums)
            self._buffer_key, self._deferred_sums = key, None
        width = columns[1] - columns[0]
        return Rows(self.buffer, rows[1] - rows[0], width, width, first_row=rows[0])

    def row_chunks(self, x: Array) -> Iterator[tuple[int | None, Rows]]:
        """Row chunks of the permuted tokens, each with the rows that its last tile reads; or all tokens, to gather."""
        if self.gathers:
            yield None, self._tokens(x)
            return
        if self.num_chunks == 1:
            yield None, self._permuted(x, (0, self.num_rows), (0, self.hidden))
            return
        for chunk in range(self.num_chunks):
            first = chunk * self.chunk_rows
            end = min(first + self.chunk_rows + self.tile_rows, self.num_rows)
            yield chunk, self._permuted(x, (first, end), (0, self.hidden))

    def column_ranges(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.hidden, self.chunk_columns):
            yield first, min(first + self.chunk_columns, self.hidden)

    def column_chunks(self, x: Array) -> Iterator[tuple[int, Rows]]:
        """Column chunks of the permuted tokens, all rows."""
        for columns in self.column_ranges():
            yield columns[0], self._permuted(x, (0, self.num_rows), columns)

    def gemm(
        self,
        source: Rows,
        w: Array,
        config: GemmConfig,
        out: Target,
        transpose: bool,
        weights: Array | None = None,
        gather_map: Array | None = None,
        chunk: int | None = None,
    ) -> None:
        """A plain GEMM."""
        launch_gemm(
            *(self.device, source, w, self.schedule(config.block_m), config, self.num_rows, out),
            transpose=transpose,
            row_to_token=gather_map,
            weights=weights,
            chunk=chunk,
        )

    def activations(self, x: Array, hidden: Array | None) -> Any:
        """Compute A, and H into ``hidden``."""
        act = self.empty(self.inner)
        out = Target(act, 0, self.inner)
        layer, config = self.layer, self.swiglu_config
        tables = self.schedule(config.block_m)
        for chunk, rows in self.row_chunks(x):
            launch_gemm(
                *(self.device, rows, layer.gate_up, tables, config, self.num_rows, out),
                transpose=layer.transpose,
                swiglu=True,
                row_to_token=self.gather_map,
                hidden=hidden,
                chunk=chunk,
            )
        return act

    def hidden_gradients(self, x: Array, d_out: Array, kept: Array | None, need_weights: bool) -> tuple[Any, Any, Any]:
        """dH, which replaces the kept H, s A, and gradients of the weights or None."""
        hidden = kept
        if hidden is None:
            hidden = self.empty(2 * self.inner)
            scaled = self.activations(x, hidden)
        else:
            scaled = self.empty(self.inner)
        return hidden, scaled, self.activation_gradients(d_out, hidden, scaled, need_weights)

    def token_gradients(self, d_hidden: Array) -> Any:
        """dX."""
        rows = self.as_rows(d_hidden, 2 * self.inner)
        return self.gemm_unpermute(rows, self.layer.gate_up, not self.layer.transpose, None)

    def activation_gradients(self, d_out: Array, hidden: Array, scaled: Array, need_weights: bool) -> Any:
        """Gradients of the weights, or None. H is overwritten by its gradient, ``scaled`` by s A."""
        layer, device, out = self.layer, self.device, Target(scaled, 0, self.inner)
        for chunk, rows in self.row_chunks(d_out):
            arguments = rows, layer.down, self.down_dgrad_config, out, not layer.transpose
            self.gemm(*arguments, gather_map=self.gather_map, chunk=chunk)
        row_to_token = layer.tokens.row_to_token
        vector = vector_elements(self.item, self.inner * self.item, address(hidden), address(scaled))
        d_weights = swiglu_gradient(device, hidden, scaled, layer.weights, row_to_token, self.rows_end, vector)
        if d_weights is None or not need_weights:
            return None
        return d_weights if layer.slots is None else self.defer_row_sums(d_weights, None)

    def gemm_unpermute(self, source: Rows, w: Array, transpose: bool, weights: Array | None) -> Any:
        """Sums of each token's rows of a GEMM's output [M, d]."""
        out = self.device.empty([self.num_tokens, self.hidden], self.dtype)
        self._buffer_key = None
        for first, end in self.column_ranges():
            target = Target(self.buffer, first, end - first)
            self.gemm(source, w, self.down_config, target, transpose, weights=weights)
            token_rows = self.layer.tokens.token_rows
            unpermute_chunk(self.device, self.buffer, token_rows, self.num_rows, out, (first, end))
        return out

    def wgrads(
        self,
        x: Array,
        d_out: Array,
        d_hidden: Array | None,
        scaled: Array | None,
        wanted: tuple[bool, bool, bool, bool],
        into: tuple[tuple[Array, bool] | None, tuple[Array, bool] | None],
    ) -> tuple[Any, Any]:
        """dW1 and dW2, None if they are not wanted."""
        layer, d_gate_up, d_down = self.layer, None, None
        if wanted[2] and scaled is not None:
            rows = self.as_rows(scaled, self.inner)
            d_down = self._wgrad(layer.down, d_out, rows, layer.transpose, into[1])
        if wanted[1] and d_hidden is not None:
            rows = self.as_rows(d_hidden, 2 * self.inner)
            d_gate_up = self._wgrad(layer.gate_up, x, rows, not layer.transpose, into[0])
        return d_gate_up, d_down

    def _wgrad(
        self, matrix: Array, tokens: Array, rows: Rows, tokens_first: bool, into: tuple[Array, bool] | None
    ) -> Any:
        """wgrad of token rows and other rows; ``tokens_first``: token rows are p, otherwise q."""
        out, adds = into or (self.device.empty(matrix.shape, self.dtype), False)
        config = wgrad_config(self.gpu, *matrix.shape[1:])
        tables = self.any_schedule()
        for first, permuted in self.column_chunks(tokens):
            p, q = (permuted, rows) if tokens_first else (rows, permuted)
            origin = (first, 0) if tokens_first else (0, first)
            launch_wgrad(self.device, p, q, tables, config, self.num_rows, out, origin=origin, accumulate=adds)
        return out


def moe_mlp(device: Device, x: Array, layer: Layer, keeps_hidden: bool) -> tuple[Any, Kept]:
    """Return the sums [T, d], and the tensors that the backward pass needs.

    Args:
        device: allocates and launches.
        x: [T, d] float16 or bfloat16.
        layer: operands of both passes.
        keeps_hidden: whether to save H.
    """
    run = Pass(device, layer, x, reuses_rows=False)
    hidden = run.empty(2 * run.inner) if keeps_hidden else None
    act = run.activations(x, hidden)
    out = run.gemm_unpermute(run.as_rows(act, run.inner), layer.down, layer.transpose, layer.weights)
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
    """Return the gradients of x, of both matrices and of the weights.

    Args:
        device: allocates and launches.
        d_out: [T, d].
        x: as in `moe_mlp`.
        kept: tensors of the forward pass; the call overwrites H.
        layer: as in `moe_mlp`.
        wanted: which gradients to compute.
        into: for each matrix, the array for its gradient, float32 or the dtype of ``x``, and whether to accumulate;
            None: a new array.
    """
    run = Pass(device, layer, x, reuses_rows=True, tables=kept.tables)
    need_x, *_, need_weights = wanted
    hidden, scaled, d_weights = run.hidden_gradients(x, d_out, kept.hidden, need_weights)
    matrices = run.wgrads(x, d_out, hidden, scaled, wanted, into)
    d_x = run.token_gradients(hidden) if need_x else None
    run.launch_deferred()
    return Gradients(d_x, *matrices, d_weights)


def moe_mlp_dgrads(
    device: Device, d_out: Array, x: Array, kept: Kept, layer: Layer, wanted: tuple[bool, bool]
) -> tuple[Gradients, Any, Any]:
    """Return the gradients of x and of the weights; and dH and s A, from which `moe_mlp_wgrads` computes the others.

    Args:
        device: allocates and launches.
        d_out: [T, d].
        x: as in `moe_mlp`.
        kept: tensors of the forward pass; the call overwrites H by dH.
        layer: as in `moe_mlp`.
        wanted: which of both gradients to compute.
    """
    run = Pass(device, layer, x, reuses_rows=True, tables=kept.tables)
    hidden, scaled, d_weights = run.hidden_gradients(x, d_out, kept.hidden, wanted[1])
    d_x = run.token_gradients(hidden) if wanted[0] else None
    run.launch_deferred()
    return Gradients(d_x, None, None, d_weights), hidden, scaled


def moe_mlp_wgrads(
    device: Device,
    d_out: Array,
    x: Array,
    d_hidden: Array | None,
    scaled: Array | None,
    layer: Layer,
    tables: Array | None,
    into: tuple[tuple[Array, bool] | None, tuple[Array, bool] | None],
) -> tuple[Any, Any]:
    """Return the gradients of both matrices; None without ``d_hidden``, or ``scaled``.

    Args:
        device: allocates and launches.
        d_out: [T, d].
        x: as in `moe_mlp`.
        d_hidden: dH [M, 2n], or None.
        scaled: s A [M, n], or None.
        layer: as in `moe_mlp`; the values of its matrices are not read.
        tables: tile schedules of the other pass, or None.
        into: as in `moe_mlp_backward`.
    """
    run = Pass(device, layer, x, reuses_rows=True, tables=tables)
    return run.wgrads(x, d_out, d_hidden, scaled, (False, True, True, False), into)
