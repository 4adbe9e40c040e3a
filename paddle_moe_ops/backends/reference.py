# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The NumPy oracle as a backend: every operator on every device, slowly. Gradients are autograd nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from .. import reference
from .._graphs import to_dtype
from ..reference.routing import take_or_zero
from .accumulation import put
from .arrays import numpy_dtype, to_numpy, to_tensor
from .base import (
    FLOAT8_ROWS,
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
from .groups import check_plan_groups, host_segments
from .host_checks import host_route

_NO_PROBS = np.zeros(0, np.float32)


def _optional(tensor: Tensor | None) -> NDArray | None:
    return None if tensor is None else to_numpy(tensor)


def _tensors(like: Tensor, *arrays: NDArray) -> Tensors:
    return tuple(to_tensor(array, like.place) for array in arrays)


def _router_arguments(spec: TopkSpec) -> tuple[Any, ...]:
    """top_k, use_sigmoid, renormalize, pre_act and post_act."""
    return spec.top_k, spec.use_sigmoid, spec.renormalize, spec.pre_act, not spec.pre_act


def _plan(plan: Any) -> reference.Plan:
    """Convert a plan of tensors to the oracle's plan; fields that it lacks are None."""
    fields: dict[str, Any] = dict.fromkeys(reference.Plan._fields)
    for name, field in zip(plan._fields, plan, strict=True):
        if name in fields:
            fields[name] = to_numpy(field) if isinstance(field, Tensor) else field
    return reference.Plan(**fields)


class ReferenceKernels:
    """Kernels that call the oracle on copies in host memory. Every verb synchronises with the device."""

    name = "reference"
    overwrites_hidden = False
    defers_wgrads = False
    operators = None
    dtypes: ClassVar[dict[str, Any]] = {}

    def unavailable(self) -> str | None:
        return None

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        return None if isinstance(tensor, Tensor) else "it needs values, which a static graph has only when it runs"

    def calculate_topk(self, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
        weights, ids, scores = reference.calculate_topk(
            to_numpy(gating),
            *_router_arguments(spec),
            scaling_factor=spec.scaling_factor,
            correction_bias=_optional(correction_bias),
            num_groups=spec.num_groups,
            topk_groups=spec.topk_groups,
            scores_per_group=spec.scores_per_group,
        )
        return _tensors(gating, weights, ids, scores if spec.return_scores else scores[:0, 0])

    def calculate_topk_backward(
        self, d_weights: Tensor, d_scores: Tensor | None, gating: Tensor, ids: Tensor, spec: TopkSpec
    ) -> Tensor:
        d_gating = reference.calculate_topk_backward(
            to_numpy(d_weights),
            to_numpy(gating),
            to_numpy(ids),
            *_router_arguments(spec)[1:],
            scaling_factor=spec.scaling_factor,
            d_scores=_optional(d_scores),
        )
        return to_tensor(d_gating.astype(np.float32).astype(numpy_dtype(gating.dtype)), gating.place)

    def route(self, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
        plan = host_route("route", routing, probs, counts, spec)
        fields = plan if plan.row_probs is not None else plan._replace(row_probs=_NO_PROBS)
        return _tensors(routing, *(field for field in fields if isinstance(field, np.ndarray)))

    def route_backward(
        self,
        d_row_probs: Tensor,
        slot_to_row: Tensor,
        row_to_token: Tensor,
        row_to_expert: Tensor,
        mask_experts: int,
    ) -> Tensor:
        d_rows = to_numpy(d_row_probs)
        if mask_experts < 0:
            return _tensors(d_row_probs, take_or_zero(d_rows, to_numpy(slot_to_row)))[0]
        tokens, experts = to_numpy(row_to_token), to_numpy(row_to_expert)
        rows = np.flatnonzero(tokens >= 0)
        d_probs = np.zeros((slot_to_row.shape[0], mask_experts), np.float32)
        d_probs[tokens[rows], experts[rows]] = d_rows[rows]
        return to_tensor(d_probs, d_row_probs.place)

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        rows, scales = reference.permute(to_numpy(x), _plan(plan), _optional(scale), fill_padding=fill_padding)
        return _tensors(x, rows, _NO_PROBS if scales is None else scales)

    def permute_backward(self, d_rows: Tensor, token_rows: Tensor) -> Tensor:
        return to_tensor(reference.sum_rows(to_numpy(d_rows), to_numpy(token_rows)), d_rows.place)

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        return to_tensor(reference.unpermute(to_numpy(rows), _plan(plan), _optional(probs)), rows.place)

    def unpermute_backward(
        self, d_out: Tensor, rows: Tensor | None, probs: Tensor | None, plan: Any, wanted: tuple[bool, ...]
    ) -> tuple[Tensor, Tensor | None]:
        d_rows, d_probs = reference.unpermute_backward(to_numpy(d_out), _plan(plan), _optional(rows), _optional(probs))
        return to_tensor(d_rows, d_out.place), None if d_probs is None else to_tensor(d_probs, d_out.place)

    def quantize_1x128(self, x: Tensor, spec: QuantizeSpec) -> Tensors:
        return _tensors(x, *reference.quantize_1x128(to_numpy(x), **spec._asdict()))

    def permute_quantized(self, x: Tensor, plan: Any, fill_padding: str, spec: QuantizeSpec) -> Tensors:
        return _tensors(x, *reference.permute_quantized(to_numpy(x), _plan(plan), **spec._asdict()))

    def dequantize_1x128(self, codes: Tensor, scales: Tensor, scale_layout: str, dtype: Any) -> Tensor:
        rows = reference.dequantize_1x128(
            to_numpy(codes), to_numpy(scales), scale_layout=scale_layout, dtype=numpy_dtype(dtype)
        )
        return to_tensor(rows, codes.place)

    def moe_permute(
        self,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> Tensors:
        plan = host_route("moe_permute", routemap, probs, counts, spec.route)
        hidden = to_numpy(hidden_states)
        rows, scales = hidden[:0], None
        if spec.do_gather:
            rows, scales = reference.permute(hidden, plan, _optional(scale), fill_padding=spec.fill_padding)
        if scales is None:
            scales = _NO_PROBS if scale is None else to_numpy(scale)[:0, 0]
        return _tensors(
            routemap,
            rows,
            reference.plan_to_rowmap(plan),
            plan.row_probs if plan.row_probs is not None else _NO_PROBS,
            scales,
            plan.row_to_expert if spec.return_expert_indices else plan.row_to_expert[:0],
            plan.overflow,
            plan.slot_to_row,
            plan.token_rows,
        )

    def gather_slots(self, row_values: Tensor, slot_to_row: Tensor) -> Tensor:
        return to_tensor(take_or_zero(to_numpy(row_values), to_numpy(slot_to_row)), row_values.place)

    def moe_unpermute(
        self, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> Tensors:
        hidden, prob_topk = reference.moe_unpermute(
            to_numpy(rows),
            to_numpy(rowmap),
            to_numpy(routemap),
            to_numpy(probs),
            rowmap.shape[0],
            spec.num_experts,
            using_weighted_combine=spec.weighted,
            compat="paddle" if spec.compat_paddle else None,
            validate=spec.validation.as_argument(),
        )
        return _tensors(rows, hidden, prob_topk)

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
    ) -> Tensors:
        d_rows, d_probs = reference.moe_unpermute_backward(
            to_numpy(d_hidden),
            to_numpy(d_prob_topk),
            np.empty((probs.shape[0], 0)) if rows is None else to_numpy(rows),  # only their number counts then
            to_numpy(rowmap),
            to_numpy(routemap),
            to_numpy(probs),
            using_weighted_combine=spec.weighted,
            compat="paddle" if spec.compat_paddle else None,
        )
        return _tensors(d_hidden, d_rows, d_probs)

    def sort_chunks(
        self, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
    ) -> Tensors:
        out, probs_out, source_to_dest = reference.sort_chunks(
            to_numpy(x), to_numpy(split_sizes), to_numpy(order), _optional(probs), validate=validation.as_argument()
        )
        return _tensors(x, out, _NO_PROBS if probs_out is None else probs_out, source_to_dest)

    def sort_chunks_backward(self, d_out: Tensor, source_to_dest: Tensor) -> Tensor:
        """The gradient of the rows, or of the probabilities."""
        return to_tensor(reference.sort_chunks_backward(to_numpy(d_out), to_numpy(source_to_dest)), d_out.place)

    def chunk_sort_map(self, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation) -> Tensor:
        sizes = to_numpy(split_sizes)
        source_to_dest = reference.chunk_sort_map(
            sizes,
            to_numpy(order),
            int(sizes.sum()) if num_rows < 0 else num_rows,
            validate=validation.as_argument(),
            function="chunk_sort_map",
        )
        return to_tensor(source_to_dest, split_sizes.place)

    def make_row_id_map(
        self, token_rows: Tensor, row_to_expert: Tensor, pad_offsets: Tensor | None, num_experts: int
    ) -> Tensor:
        rows, experts = to_numpy(token_rows), to_numpy(row_to_expert)
        row_id_map = reference.make_row_id_map(rows, experts, num_experts, _optional(pad_offsets))
        return to_tensor(row_id_map, token_rows.place)

    def read_rowmap(
        self, rowmap: Tensor, pad_offsets: Tensor | None, num_rows: Tensor | None, spec: RowmapSpec
    ) -> RowMaps:
        rows = to_numpy(rowmap)
        if spec.is_row_id_map:
            rows = reference.row_id_map_to_rowmap(rows, _optional(pad_offsets))
        maps = reference.read_rowmap(
            rows,
            spec.num_rows if num_rows is None else int(num_rows.item()),
            check_range=spec.check_range,
            check_repeats=spec.check_repeats,
        )
        return RowMaps(*_tensors(rowmap, *maps))

    def slots_to_rows(self, slot_values: Tensor, maps: Any) -> Tensor:
        values, slot_to_row = to_numpy(slot_values), to_numpy(maps.slot_to_row)
        return to_tensor(reference.slots_to_rows(values, slot_to_row, maps.row_to_slot.shape[0]), slot_values.place)

    def rows_to_slots(self, row_values: Tensor, maps: Any) -> Tensor:
        return self.gather_slots(row_values, maps.slot_to_row)

    def grouped_gemm(self, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec) -> Tensor:
        product = reference.grouped_gemm(to_numpy(x), to_numpy(w), **_gemm_options(spec, x, weights, bias))
        return to_tensor(product, x.place)

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
        arrays = to_numpy(d_out), to_numpy(x), to_numpy(w)
        d_rows, *gradients = reference.grouped_gemm_backward(*arrays, **_gemm_options(spec, x, weights, bias))
        if spec.plan is not None:
            d_rows = reference.sum_rows(d_rows, to_numpy(spec.plan.token_rows))
        d_x, d_w, *others = _tensors(x, d_rows, *gradients)
        d_weights = None if weights is None else others.pop(0)
        return d_x, d_w, d_weights, others[0] if others else None

    def grouped_wgrad(self, d_out: Tensor, x: Tensor, shape: Sequence[int], spec: GemmSpec) -> Tensor:
        unread = np.zeros(shape, numpy_dtype(x.dtype))
        options = _gemm_options(spec, x, None, None)
        made = reference.grouped_gemm_backward(to_numpy(d_out), to_numpy(x), unread, **options)
        return to_tensor(made[1], x.place)

    def explain_moe_mlp(self, *call: Any) -> list[str]:
        return []

    def quantize_experts(self, gate_up: Tensor, down: Tensor, transpose: bool, both: bool) -> tuple[Tensor, Tensor]:
        return gate_up.clone(), down.clone()  # the oracle quantises in each call

    def for_both_passes(self, quantized: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return quantized

    def new_samples(self, like: Tensor) -> None:
        return None

    def for_backward(self, quantized: tuple[Tensor, Tensor], keeps_hidden: bool) -> tuple[Tensor, Tensor]:
        return quantized

    def moe_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec, keeps: bool
    ) -> tuple[Tensor, Tensors, Tensor | None, None]:
        if spec.weights_by_slot:
            weights = self.slots_to_rows(weights, spec.plan)
        forward = reference.moe_mlp if spec.compute is None else reference.moe_mlp_float8
        out, hidden = forward(*_layer(x, gate_up, down, weights, spec), transpose=spec.transpose)
        kept: tuple[Any, ...] = ()
        if keeps and spec.keeps_hidden:
            kept = (hidden,)
            if spec.hidden_in_float8:
                kept = reference.quantize_1x128(hidden, amax_min=reference.FLOAT8_AMAX_MIN)
        return to_tensor(out, x.place), tuple(to_tensor(each, x.place) for each in kept), weights, None

    def moe_mlp_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, ...]:
        layer = _layer(x, gate_up, down, weights, spec)
        options: dict[str, Any] = {"transpose": spec.transpose}
        if spec.compute is None:
            made = reference.moe_mlp_backward(to_numpy(d_out), *layer, **options)
        else:
            options |= {"hidden_in_float8": spec.hidden_in_float8, "float8_wgrads": spec.float8_wgrads}
            made = reference.moe_mlp_float8_backward(to_numpy(d_out), *layer, **options)
        gradients = [None if each is None else to_tensor(each, x.place) for each in made[:4]]  # biases have none here
        for index, destination in enumerate(destinations, 1):
            if destination is not None:
                put(destination, gradients[index])
                gradients[index] = None
        if spec.weights_by_slot:
            gradients[3] = self.rows_to_slots(gradients[3], spec.plan)
        return tuple(gradients)

    def moe_mlp_dgrads(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, tuple[Any, Any]]:
        operands = d_out, x, gate_up, down, weights, hidden, tables, spec, (True,) * 4
        d_x, d_gate_up, d_down, d_weights = self.moe_mlp_backward(*operands, (None, None))
        return d_x, d_weights, (d_gate_up, d_down)

    def moe_mlp_wgrads(
        self,
        kept: tuple[Tensor | None, Tensor | None],
        d_out: Tensor,
        x: Tensor,
        inner: int,
        tables: Tensor | None,
        spec: MlpSpec,
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, Tensor | None]:
        gradients = list(kept)
        for index, destination in enumerate(destinations):
            if destination is not None:
                put(destination, kept[index])
                gradients[index] = None
        return gradients[0], gradients[1]


def _layer(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec
) -> tuple[NDArray, reference.Plan, NDArray, NDArray, NDArray | None]:
    if spec.validation != Validation.OFF:
        check_plan_groups(spec.plan)
    gate_up, down = spec.quantized or (gate_up, down)
    return to_numpy(x), _plan(spec.plan), to_numpy(gate_up), to_numpy(down), _optional(weights)


def _gemm_options(spec: GemmSpec, x: Tensor, weights: Tensor | None, bias: Tensor | None) -> dict[str, Any]:
    """The oracle's arguments besides the operands, with checked sizes and offsets."""
    num_rows = x.shape[0] if spec.plan is None else spec.plan.num_rows
    segments = host_segments(num_rows, spec.m_sizes, spec.expert_offsets)
    return {
        "m_sizes": segments[1::2],
        "expert_offsets": np.cumsum(segments)[::2],
        "transpose": spec.transpose,
        "row_to_token": None if spec.plan is None else to_numpy(spec.plan.row_to_token),
        "weights": _optional(weights),
        "bias": _optional(bias),
    }


class _Float8:
    """`Float8Parts` of the oracle."""

    name = "oracle"

    def __init__(self, kernels: ReferenceKernels) -> None:
        self._kernels = kernels

    def new_samples(self, like: Tensor) -> None:
        return None

    def codes_of(self, matrix: Tensor) -> Tensors:
        codes = reference.quantize_128x128(to_numpy(matrix), amax_min=reference.FLOAT8_AMAX_MIN)
        return tuple(to_tensor(each, matrix.place) for each in codes)

    def values(self, codes: Tensors, num_inputs: int, transpose: bool) -> Tensor:
        arrays = [to_numpy(each) for each in codes]
        return to_tensor(reference.dequantize_128x128(*arrays, dtype="float32"), codes[0].place)

    def rows(self, rows: Tensor) -> Tensor:
        codes, scales = self._kernels.quantize_1x128(rows, FLOAT8_ROWS)
        return self._kernels.dequantize_1x128(codes, scales, "row", paddle.float32)

    def gemm(self, rows: Tensor, matrices: Tensor, transpose: bool, spec: GemmSpec) -> Tensor:
        return self._kernels.grouped_gemm(rows, matrices, None, None, spec._replace(transpose=transpose))

    def wgrad(self, rows: Tensor, d_out: Tensor, shape: list[int], spec: GemmSpec) -> Tensor:
        return self._kernels.grouped_wgrad(to_dtype(d_out, rows.dtype), rows, shape, spec)


backend = WithGradients(ReferenceKernels())
float8_parts = _Float8(ReferenceKernels())
