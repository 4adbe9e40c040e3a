# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels as a backend, on NVIDIA GPUs and in dygraph. Gradients are autograd nodes of `gradients`.

If a call asks for validation, the oracle checks its data on the host, so the call waits for the GPU.
"""

from __future__ import annotations

from typing import Any, ClassVar

import paddle
from paddle import Tensor

from .._graphs import dense
from ..reference import read_rowmap, row_id_map_to_rowmap, rowmap_to_token_rows
from ..reference.routing import check_ids
from ..triton.launch import paddle_device
from .arrays import numpy_dtype, to_numpy
from .base import (
    Matrices,
    MlpSpec,
    MoePermuteSpec,
    MoeUnpermuteSpec,
    QuantizeSpec,
    RouteSpec,
    RowMaps,
    RowmapSpec,
    Tensors,
    TopkSpec,
    Validation,
)
from .gradients import WithGradients
from .host_checks import check_chunks, host_chunk_rows, host_route
from .layers import has_layer_kernels, layer_operators
from .triton_arrays import aligned, dense_rows, device_of
from .triton_products import ProductKernels


def _ascending(slot_to_row: Tensor) -> Tensor:
    """Return each token's rows in ascending order, then -1."""
    none, last = paddle.full_like(slot_to_row, -1), paddle.full_like(slot_to_row, 2**31 - 1)
    rows = paddle.sort(paddle.where(slot_to_row < 0, last, slot_to_row), axis=1)
    return paddle.where(rows == last, none, rows)


class TritonKernels(ProductKernels):
    """Kernels that call the launchers of `paddle_moe_ops.triton`; their modules are imported on first use."""

    name = "triton"
    operators = frozenset(
        {
            "route",
            "permute",
            "unpermute",
            "sort_chunks",
            "moe_permute",
            "moe_unpermute",
            "quantize_1x128",
            "permute_quantized",
            "dequantize_1x128",
            "quantized_experts",
            "calculate_topk",
            "grouped_gemm",
            "row_id_map",
        }
    )
    dtypes: ClassVar[dict[str, Any]] = {"grouped_gemm": (paddle.bfloat16, paddle.float16)}

    def unavailable(self) -> str | None:
        return paddle_device.unavailable()

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        return paddle_device.cannot_run_on(tensor)

    def calculate_topk(self, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
        from ..triton.ops.topk import topk

        bias = None if correction_bias is None else dense(correction_bias)
        return topk(device_of(gating), dense_rows(gating), bias, **spec._asdict())

    def calculate_topk_backward(
        self, d_weights: Tensor, d_scores: Tensor | None, gating: Tensor, ids: Tensor, spec: TopkSpec
    ) -> Tensor:
        from ..triton.ops.topk import topk_backward

        return topk_backward(
            device_of(gating),
            dense_rows(gating),
            dense(ids),
            dense(d_weights),
            None if d_scores is None else dense(d_scores),
            use_sigmoid=spec.use_sigmoid,
            renormalize=spec.renormalize,
            pre_act=spec.pre_act,
            scaling_factor=spec.scaling_factor,
        )

    def _maps(
        self,
        function: str,
        routing: Tensor,
        probs: Tensor | None,
        counts: Tensor | None,
        spec: RouteSpec,
        *,
        with_rowmap: bool = False,
    ) -> Any:
        from ..triton.ops.route import Routing, route

        if spec.validation != Validation.OFF:
            host_route(function, routing, probs, counts, spec)
        routing, probs = dense(routing), None if probs is None else dense(probs)
        is_mask = spec.topk >= 0
        problem = Routing(
            routing,
            probs,
            routing.shape[0],
            spec.topk if is_mask else routing.shape[1],
            spec.num_experts,
            spec.padding_alignment,
            is_mask,
            spec.duplicates == "first",
        )
        num_rows = None
        if spec.buffer_size >= 0:
            num_rows = spec.buffer_size
        elif spec.counts is not None:
            alignment = spec.padding_alignment
            num_rows = sum(-(-count // alignment) * alignment for count in spec.counts)
        try:
            return route(device_of(routing), problem, num_rows, with_rowmap=with_rowmap)
        except ValueError as error:
            raise ValueError(f"{function}: {error}") from None

    def route(self, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
        return tuple(self._maps("route", routing, probs, counts, spec)[:10])

    def route_backward(
        self,
        d_row_probs: Tensor,
        slot_to_row: Tensor,
        row_to_token: Tensor,
        row_to_expert: Tensor,
        mask_experts: int,
    ) -> Tensor:
        from ..triton.ops.rowmap import scatter_mask

        if mask_experts < 0:
            return self.gather_slots(d_row_probs, slot_to_row)
        values, num_tokens = dense(d_row_probs), slot_to_row.shape[0]
        return scatter_mask(
            device_of(values, slot_to_row), values, row_to_token, row_to_expert, num_tokens, mask_experts
        )

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        leaves_out = isinstance(plan, RowMaps) and plan.leaves_out
        token_rows = _ascending(plan.slot_to_row) if leaves_out else plan.token_rows
        return self._permute(x, scale, token_rows, plan.row_to_token, fill_padding)

    def _permute(
        self, x: Tensor, scale: Tensor | None, token_rows: Tensor, row_to_token: Tensor, fill_padding: str
    ) -> Tensors:
        from ..triton.ops.permute import permute

        device = device_of(token_rows, row_to_token)
        scale = None if scale is None else dense_rows(scale)
        maps = dense(token_rows), dense(row_to_token)
        rows, scales = permute(device, dense_rows(x), scale, *maps, fill_padding)
        return rows, device.empty([0], "float32") if scales is None else scales

    def permute_backward(self, d_rows: Tensor, token_rows: Tensor) -> Tensor:
        from ..triton.ops.unpermute import unpermute

        return unpermute(device_of(token_rows, d_rows), dense_rows(d_rows), dense(token_rows))

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        from ..triton.ops.unpermute import unpermute

        by_slot = probs is not None and len(probs.shape) == 2
        weights, index = None if probs is None else dense(probs), dense(plan.row_to_slot) if by_slot else None
        return unpermute(device_of(plan.token_rows, rows), dense_rows(rows), dense(plan.token_rows), weights, index)

    def unpermute_backward(
        self, d_out: Tensor, rows: Tensor | None, probs: Tensor | None, plan: Any, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        from ..triton.ops.unpermute_backward import unpermute_backward

        by_slot = probs is not None and len(probs.shape) == 2
        need_probs = probs is not None and wanted[1]
        return unpermute_backward(
            device_of(plan.token_rows, plan.row_to_token),
            aligned(d_out),
            dense(plan.slot_to_row if by_slot else plan.token_rows),
            dense(plan.row_to_token),
            aligned(rows) if rows is not None and need_probs else None,
            None if probs is None else dense(probs),
            weights_by_slot=by_slot,
            need_rows=wanted[0],
        )

    def quantize_1x128(self, x: Tensor, spec: QuantizeSpec) -> Tensors:
        from ..triton.ops.quantize import quantize

        return quantize(device_of(x), dense_rows(x), **spec._asdict())

    def permute_quantized(self, x: Tensor, plan: Any, fill_padding: str, spec: QuantizeSpec) -> Tensors:
        from ..triton.ops.quantize import quantize

        maps = dense(plan.token_rows), dense(plan.row_to_token)
        return quantize(
            device_of(x, plan.row_to_token), dense_rows(x), *maps, fill_padding=fill_padding, **spec._asdict()
        )

    def dequantize_1x128(self, codes: Tensor, scales: Tensor, scale_layout: str, dtype: Any) -> Tensor:
        from ..triton.ops.quantize import dequantize

        return dequantize(device_of(codes), dense_rows(codes), dense(scales), scale_layout, numpy_dtype(dtype).name)

    def moe_permute(
        self,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> Tensors:
        maps = self._maps("moe_permute", routemap, probs, counts, spec.route, with_rowmap=True)
        device = device_of(maps.slot_to_row, maps.row_to_token)
        if spec.do_gather:
            moved = self._permute(hidden_states, scale, maps.token_rows, maps.row_to_token, spec.fill_padding)
        else:
            scale_dtype = "float32" if scale is None else device.dtype_name(scale)
            moved = (
                device.empty([0, hidden_states.shape[1]], device.dtype_name(hidden_states)),
                device.empty([0], scale_dtype),
            )
        rows, scales = moved
        experts = maps.row_to_expert if spec.return_expert_indices else device.empty([0], "int32")
        by_slot = maps.overflow, maps.slot_to_row, maps.token_rows
        return rows, maps.rowmap, maps.row_probs, scales, experts, *by_slot

    def gather_slots(self, row_values: Tensor, slot_to_row: Tensor) -> Tensor:
        from ..triton.ops.rowmap import gather_slots

        return gather_slots(device_of(slot_to_row, row_values), dense(row_values), dense(slot_to_row))

    def _clean(self, device: Any, rowmap: Tensor, routemap: Tensor, num_rows: int, spec: MoeUnpermuteSpec) -> Tensors:
        """Return token_rows [T, E], row_to_token [N] and slot_to_row [T, K] of a user's row map."""
        from ..triton.ops.rowmap import clean_rowmap

        arrays = dense(rowmap), dense(routemap)
        return clean_rowmap(device, *arrays, num_rows, first_duplicate_only=not spec.compat_paddle)

    def moe_unpermute(
        self, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> Tensors:
        from ..triton.ops.unpermute import unpermute

        num_rows = rows.shape[0]
        if spec.validation != Validation.OFF:
            check_ids(to_numpy(routemap), spec.num_experts, "moe_unpermute", "expert_routemap_topk")
            rowmap_to_token_rows(to_numpy(rowmap), num_rows)
        device, probs = device_of(rowmap, rows), dense(probs)
        token_rows, _, slot_to_row = self._clean(device, rowmap, routemap, num_rows, spec)
        weights = probs if spec.weighted else None
        hidden = unpermute(device, dense_rows(rows), token_rows, weights, copy_single_row=spec.compat_paddle)
        return hidden, self.gather_slots(probs, slot_to_row)

    def moe_unpermute_backward(
        self,
        d_hidden: Tensor,
        d_prob_topk: Tensor,
        rows: Tensor | None,
        rowmap: Tensor,
        routemap: Tensor,
        probs: Tensor,
        spec: MoeUnpermuteSpec,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor | None, Tensor | None]:
        from ..triton.ops.rowmap import scatter_slots, slots_to_rows
        from ..triton.ops.unpermute_backward import unpermute_backward

        need_rows, need_probs = wanted
        num_rows = probs.shape[0]
        device, weighted = device_of(rowmap, probs), spec.weighted
        token_rows, row_to_token, slot_to_row = self._clean(device, rowmap, routemap, num_rows, spec)
        d_rows, d_probs = unpermute_backward(
            device,
            aligned(d_hidden),
            token_rows,
            row_to_token,
            aligned(rows) if rows is not None and need_probs else None,
            dense(probs) if weighted else None,
            need_rows=need_rows,
            copy_single_row=spec.compat_paddle,
        )
        if not need_probs:
            return d_rows, None
        if d_probs is None:
            made = slots_to_rows(device, dense(d_prob_topk), slot_to_row, row_to_token)
            return d_rows, made.reshape(probs.shape)  # [N] or [N, 1]
        scatter_slots(device, dense(d_prob_topk), slot_to_row, d_probs)
        return d_rows, d_probs

    def sort_chunks(
        self, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
    ) -> Tensors:
        from ..triton.ops.sort_chunks import sort_chunks

        device = device_of(x, split_sizes)
        source_to_dest = self._chunk_map("sort_chunks", split_sizes, order, x.shape[0], validation)
        out, probs_out = sort_chunks(device, dense_rows(x), None if probs is None else dense(probs), source_to_dest)
        return out, device.empty([0], "float32") if probs_out is None else probs_out, source_to_dest

    def _chunk_map(
        self, function: str, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation
    ) -> Tensor:
        from ..triton.ops.sort_chunks import chunk_map

        if validation != Validation.OFF:
            check_chunks(function, split_sizes, order, num_rows)
        return chunk_map(device_of(split_sizes), dense(split_sizes), dense(order), num_rows)

    def sort_chunks_backward(self, d_out: Tensor, source_to_dest: Tensor) -> Tensor:
        """Return the gradient of the rows, or of the probabilities."""
        from ..triton.ops.sort_chunks import sort_chunks_backward

        gradient = dense(d_out) if len(d_out.shape) == 1 else dense_rows(d_out)
        return sort_chunks_backward(device_of(d_out), gradient, source_to_dest)

    def chunk_sort_map(self, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation) -> Tensor:
        name = "chunk_sort_map"
        rows = host_chunk_rows(name, split_sizes) if num_rows < 0 else num_rows
        return self._chunk_map(name, split_sizes, order, rows, validation)

    def make_row_id_map(
        self, token_rows: Tensor, row_to_expert: Tensor, pad_offsets: Tensor | None, num_experts: int
    ) -> Tensor:
        from ..triton.ops.row_id_map import make_row_id_map

        offsets = None if pad_offsets is None else dense(pad_offsets)
        return make_row_id_map(
            device_of(token_rows, row_to_expert), dense(token_rows), dense(row_to_expert), offsets, num_experts
        )

    def read_rowmap(
        self, rowmap: Tensor, pad_offsets: Tensor | None, num_rows: Tensor | None, spec: RowmapSpec
    ) -> RowMaps:
        from ..triton.ops.row_id_map import read_row_id_map
        from ..triton.ops.rowmap import clean_rowmap_by_expert

        rows = spec.num_rows if num_rows is None else int(num_rows.item())
        offsets = None if pad_offsets is None else dense(pad_offsets)
        if spec.check_range or spec.check_repeats:
            _check_rowmap(rowmap, offsets, rows, spec)
        device, entries = device_of(rowmap), dense(rowmap)
        by_pair = read_row_id_map(device, entries, offsets) if spec.is_row_id_map else entries
        return RowMaps(*clean_rowmap_by_expert(device, by_pair, rows))

    def slots_to_rows(self, slot_values: Tensor, maps: Any) -> Tensor:
        from ..triton.ops.rowmap import slots_to_rows

        device = device_of(slot_values, maps.row_to_token)
        return slots_to_rows(device, *map(dense, (slot_values, maps.slot_to_row, maps.row_to_token)))

    def rows_to_slots(self, row_values: Tensor, maps: Any) -> Tensor:
        return self.gather_slots(row_values, maps.slot_to_row)


def _check_rowmap(rowmap: Tensor, pad_offsets: Tensor | None, num_rows: int, spec: RowmapSpec) -> None:
    """Raise for bad entries that ``spec`` asks to check."""
    rows = to_numpy(rowmap)
    if spec.is_row_id_map:
        rows = row_id_map_to_rowmap(rows, None if pad_offsets is None else to_numpy(pad_offsets))
    read_rowmap(rows, num_rows, check_range=spec.check_range, check_repeats=spec.check_repeats)


class TritonBackend(WithGradients):
    """The kernels with gradients; the compiled library runs layers for which it has kernels, and all float8 ones."""

    def why_composed(self, x: Tensor, gate_up: Matrices, down: Matrices, spec: MlpSpec) -> str | None:
        return None if spec.compute is None else layer_operators.why_composed(x, gate_up, down, spec)

    def moe_mlp(self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec) -> Tensor:
        if spec.compute is not None or has_layer_kernels(x, down, spec):
            return layer_operators.moe_mlp(x, gate_up, down, weights, spec)
        return super().moe_mlp(x, gate_up, down, weights, spec)

    def explain_moe_mlp(
        self, x: Tensor, gate_up: Matrices, down: Matrices, weights: Tensor | None, spec: MlpSpec, wanted: Any
    ) -> list[str]:
        if spec.compute is not None or has_layer_kernels(x, down, spec):
            return layer_operators.explain_moe_mlp(x, gate_up, down, weights, spec, wanted)
        return super().explain_moe_mlp(x, gate_up, down, weights, spec, wanted)


backend = TritonBackend(TritonKernels())
