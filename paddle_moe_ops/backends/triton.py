# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels as a backend, on NVIDIA GPUs and in dygraph. Their gradients come through PyLayers.

Data are checked by the oracle on the host where a call asks for it, so that a call with validation waits for the GPU.
"""

from __future__ import annotations

from typing import Any, ClassVar

import paddle
from paddle import Tensor

from ..reference import read_rowmap, row_id_map_to_rowmap, rowmap_to_token_rows
from ..reference.routing import check_ids
from ..triton import _runtime
from .arrays import numpy_dtype, to_numpy
from .base import (
    GemmSpec,
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
from .host_checks import check_chunks, host_chunk_rows, host_route, host_segments
from .library import loaded_library

_ALIGNMENT = 16


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy unless the elements of each row are neighbours."""
    return tensor if tensor.is_contiguous() or tensor.strides[1] == 1 else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and at an address that all widths of access like: the bits of a dot product depend on the width."""
    dense = _dense(tensor)
    return dense if dense.data_ptr() % _ALIGNMENT == 0 else dense.clone()


def _ascending(slot_to_row: Tensor) -> Tensor:
    """Each token's rows in ascending order, then -1."""
    none, last = paddle.full_like(slot_to_row, -1), paddle.full_like(slot_to_row, 2**31 - 1)
    rows = paddle.sort(paddle.where(slot_to_row < 0, last, slot_to_row), axis=1)
    return paddle.where(rows == last, none, rows)


def _grouped_product() -> Any:
    """That of the compiled library, if it is there and has one."""
    from ..triton.hopper_product import grouped_product_of

    library = loaded_library()
    return None if library is None else grouped_product_of(library)


def _device(tensor: Tensor) -> Any:
    return _runtime.device_of(tensor, _grouped_product)


class TritonKernels:
    """Calls the launchers of `paddle_moe_ops.triton`, which are imported when they are first needed."""

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
        return _runtime.unavailable()

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        return _runtime.cannot_run_on(tensor)

    def calculate_topk(self, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
        from ..triton.topk import topk

        bias = None if correction_bias is None else _dense(correction_bias)
        return topk(_device(gating), _dense_rows(gating), bias, **spec._asdict())

    def calculate_topk_backward(
        self, d_weights: Tensor, d_scores: Tensor | None, gating: Tensor, ids: Tensor, spec: TopkSpec
    ) -> Tensor:
        from ..triton.topk import topk_backward

        return topk_backward(
            _device(gating),
            _dense_rows(gating),
            _dense(ids),
            _dense(d_weights),
            None if d_scores is None else _dense(d_scores),
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
        from ..triton.route import Routing, route

        if spec.validation != Validation.OFF:
            host_route(function, routing, probs, counts, spec)
        routing, probs = _dense(routing), None if probs is None else _dense(probs)
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
            return route(_device(routing), problem, num_rows, with_rowmap=with_rowmap)
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
        from ..triton.rowmap import scatter_mask

        if mask_experts < 0:
            return self.gather_slots(d_row_probs, slot_to_row)
        values, num_tokens = _dense(d_row_probs), slot_to_row.shape[0]
        return scatter_mask(_device(values), values, row_to_token, row_to_expert, num_tokens, mask_experts)

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        leaves_out = isinstance(plan, RowMaps) and plan.leaves_out
        token_rows = _ascending(plan.slot_to_row) if leaves_out else plan.token_rows
        return self._permute(x, scale, token_rows, plan.row_to_token, fill_padding)

    def _permute(
        self, x: Tensor, scale: Tensor | None, token_rows: Tensor, row_to_token: Tensor, fill_padding: str
    ) -> Tensors:
        from ..triton.permute import permute

        device = _device(token_rows)
        scale = None if scale is None else _dense_rows(scale)
        maps = _dense(token_rows), _dense(row_to_token)
        rows, scales = permute(device, _dense_rows(x), scale, *maps, fill_padding)
        return rows, device.empty([0], "float32") if scales is None else scales

    def permute_backward(self, d_rows: Tensor, token_rows: Tensor) -> Tensor:
        from ..triton.unpermute import unpermute

        return unpermute(_device(token_rows), _dense_rows(d_rows), _dense(token_rows))

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        from ..triton.unpermute import unpermute

        by_slot = probs is not None and len(probs.shape) == 2
        weights, index = None if probs is None else _dense(probs), _dense(plan.row_to_slot) if by_slot else None
        return unpermute(_device(plan.token_rows), _dense_rows(rows), _dense(plan.token_rows), weights, index)

    def unpermute_backward(
        self, d_out: Tensor, rows: Tensor | None, probs: Tensor | None, plan: Any, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        from ..triton.unpermute_backward import unpermute_backward

        by_slot = probs is not None and len(probs.shape) == 2
        need_probs = probs is not None and wanted[1]
        return unpermute_backward(
            _device(plan.token_rows),
            _aligned(d_out),
            _dense(plan.slot_to_row if by_slot else plan.token_rows),
            _dense(plan.row_to_token),
            _aligned(rows) if rows is not None and need_probs else None,
            None if probs is None else _dense(probs),
            weights_by_slot=by_slot,
            need_rows=wanted[0],
        )

    def quantize_1x128(self, x: Tensor, spec: QuantizeSpec) -> Tensors:
        from ..triton.quantize import quantize

        return quantize(_device(x), _dense_rows(x), **spec._asdict())

    def permute_quantized(self, x: Tensor, plan: Any, fill_padding: str, spec: QuantizeSpec) -> Tensors:
        from ..triton.quantize import quantize

        maps = _dense(plan.token_rows), _dense(plan.row_to_token)
        return quantize(_device(x), _dense_rows(x), *maps, fill_padding=fill_padding, **spec._asdict())

    def dequantize_1x128(self, codes: Tensor, scales: Tensor, scale_layout: str, dtype: Any) -> Tensor:
        from ..triton.quantize import dequantize

        return dequantize(_device(codes), _dense_rows(codes), _dense(scales), scale_layout, numpy_dtype(dtype).name)

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
        device = _device(maps.slot_to_row)
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
        from ..triton.rowmap import gather_slots

        return gather_slots(_device(slot_to_row), _dense(row_values), _dense(slot_to_row))

    def _clean(self, rowmap: Tensor, routemap: Tensor, num_rows: int, spec: MoeUnpermuteSpec) -> Tensors:
        """token_rows [T, E], row_to_token [N] and slot_to_row [T, K] of a user's row map."""
        from ..triton.rowmap import clean_rowmap

        arrays = _dense(rowmap), _dense(routemap)
        return clean_rowmap(_device(rowmap), *arrays, num_rows, first_duplicate_only=not spec.compat_paddle)

    def moe_unpermute(
        self, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> Tensors:
        from ..triton.unpermute import unpermute

        num_rows = rows.shape[0]
        if spec.validation != Validation.OFF:
            check_ids(to_numpy(routemap), spec.num_experts, "moe_unpermute", "expert_routemap_topk")
            rowmap_to_token_rows(to_numpy(rowmap), num_rows)
        token_rows, _, slot_to_row = self._clean(rowmap, routemap, num_rows, spec)
        device, probs = _device(token_rows), _dense(probs)
        weights = probs if spec.weighted else None
        hidden = unpermute(device, _dense_rows(rows), token_rows, weights, copy_single_row=spec.compat_paddle)
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
        from ..triton.rowmap import fill, scatter_slots
        from ..triton.unpermute_backward import unpermute_backward

        need_rows, need_probs = wanted
        num_rows = probs.shape[0]
        token_rows, row_to_token, slot_to_row = self._clean(rowmap, routemap, num_rows, spec)
        device, weighted = _device(token_rows), spec.weighted
        d_rows, d_probs = unpermute_backward(
            device,
            _aligned(d_hidden),
            token_rows,
            row_to_token,
            _aligned(rows) if rows is not None and need_probs else None,
            _dense(probs) if weighted else None,
            need_rows=need_rows,
            copy_single_row=spec.compat_paddle,
        )
        if not need_probs:
            return d_rows, None
        if d_probs is None:
            d_probs = fill(device, device.empty(probs.shape, "float32"), num_rows, 0)
        scatter_slots(device, _dense(d_prob_topk), slot_to_row, d_probs, add=weighted)
        return d_rows, d_probs

    def sort_chunks(
        self, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
    ) -> Tensors:
        from ..triton.sort_chunks import sort_chunks

        device = _device(x)
        source_to_dest = self._chunk_map("sort_chunks", split_sizes, order, x.shape[0], validation)
        out, probs_out = sort_chunks(device, _dense_rows(x), None if probs is None else _dense(probs), source_to_dest)
        return out, device.empty([0], "float32") if probs_out is None else probs_out, source_to_dest

    def _chunk_map(
        self, function: str, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation
    ) -> Tensor:
        from ..triton.sort_chunks import chunk_map

        if validation != Validation.OFF:
            check_chunks(function, split_sizes, order, num_rows)
        return chunk_map(_device(split_sizes), _dense(split_sizes), _dense(order), num_rows)

    def sort_chunks_backward(self, d_out: Tensor, source_to_dest: Tensor) -> Tensor:
        """The gradient of the rows, or of the probabilities."""
        from ..triton.sort_chunks import sort_chunks_backward

        gradient = _dense(d_out) if len(d_out.shape) == 1 else _dense_rows(d_out)
        return sort_chunks_backward(_device(d_out), gradient, source_to_dest)

    def chunk_sort_map(self, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation) -> Tensor:
        name = "chunk_sort_map"
        rows = host_chunk_rows(name, split_sizes) if num_rows < 0 else num_rows
        return self._chunk_map(name, split_sizes, order, rows, validation)

    def make_row_id_map(
        self, token_rows: Tensor, row_to_expert: Tensor, pad_offsets: Tensor | None, num_experts: int
    ) -> Tensor:
        from ..triton.row_id_map import make_row_id_map

        offsets = None if pad_offsets is None else _dense(pad_offsets)
        return make_row_id_map(_device(token_rows), _dense(token_rows), _dense(row_to_expert), offsets, num_experts)

    def read_rowmap(
        self, rowmap: Tensor, pad_offsets: Tensor | None, num_rows: Tensor | None, spec: RowmapSpec
    ) -> RowMaps:
        from ..triton.row_id_map import read_row_id_map
        from ..triton.rowmap import clean_rowmap_by_expert

        rows = spec.num_rows if num_rows is None else int(num_rows.item())
        offsets = None if pad_offsets is None else _dense(pad_offsets)
        if spec.check_range or spec.check_repeats:
            _check_rowmap(rowmap, offsets, rows, spec)
        device, dense = _device(rowmap), _dense(rowmap)
        by_pair = read_row_id_map(device, dense, offsets) if spec.is_row_id_map else dense
        return RowMaps(*clean_rowmap_by_expert(device, by_pair, rows))

    def slots_to_rows(self, slot_values: Tensor, maps: Any) -> Tensor:
        from ..triton.rowmap import slots_to_rows

        return slots_to_rows(_device(slot_values), *map(_dense, (slot_values, maps.slot_to_row, maps.row_to_token)))

    def rows_to_slots(self, row_values: Tensor, maps: Any) -> Tensor:
        return self.gather_slots(row_values, maps.slot_to_row)

    def grouped_gemm(self, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec) -> Tensor:
        from ..triton.grouped_gemm import grouped_gemm
        from ..triton.recording import facts_of, recorded

        on_host = isinstance(spec.m_sizes, list) and not isinstance(spec.expert_offsets, Tensor)
        if on_host or spec.validation != Validation.OFF:
            num_rows = x.shape[0] if spec.plan is None else spec.plan.num_rows
            host_segments(num_rows, spec.m_sizes, spec.expert_offsets)
        device, maps = _device(x), _gemm_maps(spec, weights)
        operands = _dense_rows(x), _dense(w), _gemm_groups(spec, x)
        bias = None if bias is None else _dense(bias)

        def call(device: Any) -> tuple[Any]:
            return (grouped_gemm(device, *operands, spec.transpose, **maps, bias=bias),)

        inputs = _operands(operands, maps, bias)
        return recorded(device, ("grouped_gemm", spec.transpose, *facts_of(device, *inputs)), inputs, call)[0]

    def grouped_gemm_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        w: Tensor,
        weights: Tensor | None,
        bias: Tensor | None,
        spec: GemmSpec,
        wanted: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        from ..triton.bias_gradient import bias_gradient
        from ..triton.grouped_gemm import grouped_gemm_backward
        from ..triton.recording import facts_of, recorded
        from ..triton.unpermute import unpermute

        device, maps = _device(x), _gemm_maps(spec, weights)
        d_out, operands = _dense_rows(d_out), (_dense_rows(x), _dense(w), _gemm_groups(spec, x))
        bias = None if bias is None else _dense(bias)

        def call(device: Any) -> tuple[Any, ...]:
            d_bias = None
            d_rows, d_w, d_weights = grouped_gemm_backward(
                device, d_out, *operands, spec.transpose, **maps, wanted=wanted[:3]
            )
            if bias is not None and any(wanted[2:]):
                d_bias, d_weights = bias_gradient(device, d_out, bias, operands[2], maps["weights"], d_weights)
            if maps["tokens"] is not None and d_rows is not None:
                d_rows = unpermute(device, d_rows, maps["tokens"].token_rows)
            return d_rows, d_w, d_weights, d_bias

        inputs = d_out, *_operands(operands, maps, bias)
        key = "grouped_gemm_backward", wanted, spec.transpose, *facts_of(device, *inputs)
        d_x, d_w, d_weights, d_bias = recorded(device, key, inputs, call)
        return d_x, d_w, d_weights, d_bias

    def moe_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec, keeps_hidden: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        from ..triton.moe_mlp import moe_mlp
        from ..triton.recording import facts_of, recorded
        from ..triton.rowmap import slots_to_rows

        plan = spec.plan
        if spec.validation != Validation.OFF:
            host_segments(plan.num_rows, plan.tokens_per_expert, plan.expert_offsets)
        device, x = _device(x), _dense_rows(x)
        maps = _dense(plan.slot_to_row) if spec.weights_by_slot else None
        layer = _layer(gate_up, down, weights, spec)

        def call(device: Any) -> tuple[Any, Any, Any]:
            by_row = layer.weights
            if maps is not None:
                by_row = slots_to_rows(device, by_row, maps, layer.tokens.row_to_token)
            out, hidden = moe_mlp(device, x, layer._replace(weights=by_row), keeps_hidden)
            return out, hidden, by_row if maps is not None else None

        inputs = _arrays(x, layer, maps)
        key = "moe_mlp", keeps_hidden, spec.transpose, spec.workspace, *facts_of(device, *inputs)
        out, hidden, by_row = recorded(device, key, inputs, call)
        return out, hidden, weights if by_row is None else by_row

    def moe_mlp_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, ...]:
        from ..triton.moe_mlp import moe_mlp_backward
        from ..triton.recording import facts_of, recorded

        device, d_out, x = _device(x), _dense_rows(d_out), _dense_rows(x)
        maps = _dense(spec.plan.slot_to_row) if spec.weights_by_slot else None
        layer = _layer(gate_up, down, weights, spec)

        def call(device: Any) -> tuple[Any, ...]:
            made = moe_mlp_backward(device, d_out, x, hidden, layer._replace(slots=maps), wanted, destinations)
            matrices = (each if to is None else None for each, to in zip(made[1:3], destinations, strict=True))
            return made.x, *matrices, made.weights

        inputs = d_out, hidden, *(each and each[0] for each in destinations), *_arrays(x, layer, maps)
        adds = tuple(each and each[1] for each in destinations)
        key = "moe_mlp_backward", wanted, adds, spec.transpose, spec.workspace, *facts_of(device, *inputs)
        return tuple(recorded(device, key, inputs, call))


def _layer(gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec) -> Any:
    from ..triton.grouped_gemm import Groups, Tokens
    from ..triton.moe_mlp import Layer

    plan = spec.plan
    groups = Groups(_dense(plan.tokens_per_expert), _dense(plan.expert_offsets))
    tokens = Tokens(_dense(plan.row_to_token), _dense(plan.token_rows))
    weights = None if weights is None else _dense(weights)
    return Layer(_dense(gate_up), _dense(down), groups, tokens, weights, spec.transpose, spec.workspace)


def _operands(operands: tuple, maps: dict[str, Any], bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """All that the launches of a grouped product read."""
    x, w, groups = operands
    return x, w, *groups, *(maps["tokens"] or ()), maps["weights"], bias


def _arrays(x: Tensor, layer: Any, maps: Tensor | None) -> tuple[Tensor | None, ...]:
    """All that a layer's launches read."""
    return x, layer.gate_up, layer.down, *layer.groups, *layer.tokens, layer.weights, maps


def _check_rowmap(rowmap: Tensor, pad_offsets: Tensor | None, num_rows: int, spec: RowmapSpec) -> None:
    """Raise for bad entries, as far as it is asked for."""
    rows = to_numpy(rowmap)
    if spec.is_row_id_map:
        rows = row_id_map_to_rowmap(rows, None if pad_offsets is None else to_numpy(pad_offsets))
    read_rowmap(rows, num_rows, check_range=spec.check_range, check_repeats=spec.check_repeats)


def _gemm_groups(spec: GemmSpec, x: Tensor) -> Any:
    """Sizes and offsets as tensors where the operands are."""
    from ..triton.grouped_gemm import Groups

    def on_device(numbers: list[int] | Tensor) -> Tensor:
        if isinstance(numbers, Tensor):
            return _dense(numbers)
        return paddle.to_tensor(numbers, dtype="int32", place=x.place)

    offsets = None if spec.expert_offsets is None else on_device(spec.expert_offsets)
    return Groups(on_device(spec.m_sizes), offsets)


def _gemm_maps(spec: GemmSpec, weights: Tensor | None) -> dict[str, Any]:
    from ..triton.grouped_gemm import Tokens

    plan = spec.plan
    return {
        "tokens": None if plan is None else Tokens(_dense(plan.row_to_token), _dense(plan.token_rows)),
        "weights": None if weights is None else _dense(weights),
    }


backend = WithGradients(TritonKernels())
