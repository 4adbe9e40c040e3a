# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""What a Paddle user calls on the CPU: our public functions, and plain Paddle operators that do the same job.

Both allocate their outputs in the call, as all of Paddle does. The plain forms are the fastest that were found among
gather, index_select, index_add, add_n, sum and bmm; on the CPU most of these refuse bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor
from paddle.utils.dlpack import from_dlpack

import paddle_moe_ops
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.routing import calculate_topk

from .cpu_arrays import BFLOAT16, FLOAT8, ArrayInputs
from .device import BFLOAT16_SUMS, FLOAT32_SUMS, Body, Implementation, Outputs, Unsupported
from .shapes import Operation
from .targets import PUBLIC

__all__ = ["paddle_implementations"]

_ROUTER_OUTPUTS = ("router_weights", "router_ids")
_VIEWS = {BFLOAT16: (np.int16, "bfloat16"), FLOAT8: (np.int8, "float8_e4m3fn")}
# Rows that no gather of Paddle's takes as they are.
_CARRIERS = {paddle.float8_e4m3fn: paddle.int8}


def as_tensor(array: NDArray) -> Tensor:
    """A tensor over the array's memory."""
    carrier, dtype = _VIEWS.get(array.dtype, (array.dtype, None))
    tensor = from_dlpack(array.view(carrier))
    return tensor if dtype is None else tensor.view(dtype)


def as_arrays(outputs: Outputs) -> Outputs:
    return {name: to_numpy(tensor) for name, tensor in outputs.items()}


class PaddleInputs:
    """The inputs of a problem as Paddle tensors."""

    def __init__(self, inputs: ArrayInputs) -> None:
        self.arrays = inputs
        self.problem = inputs.problem
        self.ids = as_tensor(inputs.problem.ids)
        self.probs = as_tensor(inputs.problem.probs)
        self.row_probs = as_tensor(inputs.row_probs)

    @cached_property
    def plan(self) -> Any:
        return self.route()

    @cached_property
    def has_gaps(self) -> bool:
        """Whether there are unassigned slots."""
        return bool((self.problem.ids < 0).any())

    @cached_property
    def row_to_token(self) -> Tensor:
        return as_tensor(self.problem.plan.row_to_token)

    def route(self) -> Any:
        plan = self.problem.plan
        return paddle_moe_ops.route(
            self.ids, self.probs, num_experts=plan.num_experts, padding_alignment=plan.padding_alignment
        )

    def moved(self, operation: Operation) -> tuple[Tensor, Tensor | None]:
        """What travels: rows, and their scales."""
        if operation.variant == "fp8":
            return as_tensor(self.arrays.x_fp8), as_tensor(self.arrays.scale)
        return as_tensor(self.arrays.x), None

    def leaf(self, name: str, gradient: bool = True) -> Tensor:
        """An input that gradients are asked of."""
        tensor = as_tensor(getattr(self.arrays, name)).detach()
        tensor.stop_gradient = not gradient
        return tensor


class _Arrives(paddle.autograd.PyLayer):
    """Brings a gradient as an operator behind does; of one that is given to `paddle.grad` Paddle makes a copy first."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, d_out: Tensor) -> Tensor:
        ctx.d_out = d_out
        return paddle.zeros([1])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.d_out, None


def _gradients(out: Tensor, d_out: Tensor, leaves: dict[str, Tensor]) -> Body:
    """The gradient alone: the forward call has been made, and its graph is kept."""
    end = _Arrives.apply(out, d_out)

    def run() -> Outputs:
        return dict(zip(leaves, paddle.grad(end, list(leaves.values()), retain_graph=True), strict=True))

    return Body(run)


def paddle_implementations() -> list[Implementation]:
    return [
        _implementation(PUBLIC, _PUBLIC_BODIES),
        _implementation("paddle ops", _PLAIN_BODIES),
    ]


def _implementation(name: str, bodies: dict[str, Callable[[Operation, PaddleInputs], Body]]) -> Implementation:
    def prepare(operation: Operation, inputs: ArrayInputs) -> Body:
        if inputs.problem.case.capacity:
            raise Unsupported("a buffer larger than the rows")
        body = bodies[operation.op](operation, PaddleInputs(inputs))
        return body._replace(results=lambda outputs: as_arrays(body.results(outputs)))

    return Implementation(name, tuple(f"{op}:*" for op in bodies), prepare)


def _rows_and_scales(rows: Tensor, scales: Tensor | None) -> Outputs:
    return {"rows": rows} if scales is None else {"rows": rows, "row_scales": scales}


# ---- our public functions

_MAPS = ("slot_to_row", "token_rows", "row_to_token", "row_to_slot", "row_to_expert", "row_probs")


def _fill(inputs: PaddleInputs) -> str:
    return "all" if inputs.problem.case.fill else "none"


def _public_route(_: Operation, inputs: PaddleInputs) -> Body:
    def run() -> Outputs:
        plan = inputs.route()
        return {name: getattr(plan, name) for name in (*_MAPS, "tokens_per_expert", "expert_offsets")}

    return Body(run)


def _public_route_permute(operation: Operation, inputs: PaddleInputs) -> Body:
    x, scale = inputs.moved(operation)

    def run() -> Outputs:
        plan = inputs.route()
        moved = _rows_and_scales(*paddle_moe_ops.permute(x, plan, scale, fill_padding=_fill(inputs)))
        return {**moved, "token_rows": plan.token_rows, "row_probs": plan.row_probs}

    return Body(run)


def _public_permute(operation: Operation, inputs: PaddleInputs) -> Body:
    x, scale = inputs.moved(operation)
    plan = inputs.plan
    return Body(lambda: _rows_and_scales(*paddle_moe_ops.permute(x, plan, scale, fill_padding=_fill(inputs))))


def _public_permute_quantized(operation: Operation, inputs: PaddleInputs) -> Body:
    x, plan = as_tensor(inputs.arrays.x), inputs.plan
    quantize = "fp8_1x128_ue8m0" if operation.variant == "ue8m0" else "fp8_1x128"
    layout = "col" if operation.variant == "col" else "row"

    def run() -> Outputs:
        codes, scales = paddle_moe_ops.permute(
            x, plan, quantize=quantize, scale_layout=layout, fill_padding=_fill(inputs)
        )
        return {"codes": codes, "scales": scales}

    return Body(run)


def _public_moe_permute(operation: Operation, inputs: PaddleInputs) -> Body:
    x, scale = inputs.moved(operation)
    plan = inputs.problem.plan
    sizes = (plan.num_experts, None, plan.padding_alignment)

    def run() -> Outputs:
        rows, rowmap, row_probs, scales = paddle_moe_ops.moe_permute(
            x, scale, inputs.ids, inputs.probs, *sizes, fill_padding=_fill(inputs)
        )
        return {**_rows_and_scales(rows, None if scale is None else scales), "rowmap": rowmap, "row_probs": row_probs}

    return Body(run)


def _public_unpermute(operation: Operation, inputs: PaddleInputs) -> Body:
    rows, plan = as_tensor(inputs.arrays.rows), inputs.plan
    weights = inputs.row_probs if operation.variant == "weighted" else None
    return Body(lambda: {"out": paddle_moe_ops.unpermute(rows, plan, weights)})


def _public_moe_unpermute(operation: Operation, inputs: PaddleInputs) -> Body:
    rows, rowmap = as_tensor(inputs.arrays.rows), as_tensor(inputs.problem.rowmap)
    plan, weighted = inputs.problem.plan, operation.variant == "weighted"

    def run() -> Outputs:
        out, slot_probs = paddle_moe_ops.moe_unpermute(
            *(rows, rowmap, inputs.ids, inputs.row_probs, plan.num_tokens, plan.num_experts),
            using_weighted_combine=weighted,
        )
        return {"out": out, "slot_probs": slot_probs}

    return Body(run)


def _public_unpermute_backward(operation: Operation, inputs: PaddleInputs) -> Body:
    variant = operation.variant
    rows = inputs.leaf("rows", variant != "dprob")
    weights = inputs.leaf("row_probs", variant in ("weighted", "dprob"))
    out = paddle_moe_ops.unpermute(rows, inputs.plan, None if variant == "plain" else weights)
    wanted = {name: leaf for name, leaf in (("d_rows", rows), ("d_weights", weights)) if not leaf.stop_gradient}
    return _gradients(out, as_tensor(inputs.arrays.d_out), wanted)


def _public_sort_chunks(operation: Operation, inputs: PaddleInputs) -> Body:
    problem, forward = inputs.problem, operation.variant == "forward"
    sizes, order = as_tensor(problem.chunk_sizes), as_tensor(problem.chunk_order)
    rows = inputs.leaf("rows", gradient=not forward)
    if forward:

        def run() -> Outputs:
            out, _, source_to_dest = paddle_moe_ops.sort_chunks(rows, sizes, order)
            return {"sorted_rows": out, "source_to_dest": source_to_dest}

        return Body(run)
    return _gradients(paddle_moe_ops.sort_chunks(rows, sizes, order)[0], rows.detach(), {"sorted_rows": rows})


def _public_topk(_: Operation, inputs: PaddleInputs) -> Body:
    gating, topk = as_tensor(inputs.problem.gating), inputs.problem.chosen_per_token

    def run() -> Outputs:
        return dict(zip(_ROUTER_OUTPUTS, calculate_topk(gating, topk, False, True), strict=True))

    return Body(run)


_PUBLIC_BODIES: dict[str, Callable[[Operation, PaddleInputs], Body]] = {
    "route": _public_route,
    "route_permute": _public_route_permute,
    "permute": _public_permute,
    "moe_permute": _public_moe_permute,
    "permute_quantized": _public_permute_quantized,
    "unpermute": _public_unpermute,
    "moe_unpermute": _public_moe_unpermute,
    "unpermute_backward": _public_unpermute_backward,
    "sort_chunks": _public_sort_chunks,
    "topk": _public_topk,
}

# ---- plain operators of Paddle


def _without_padding(inputs: PaddleInputs) -> None:
    if inputs.problem.plan.num_rows != inputs.problem.routed_rows:
        raise Unsupported("gathering leaves no padding rows")


def _without_gaps(inputs: PaddleInputs) -> None:
    _without_padding(inputs)
    if inputs.has_gaps:
        raise Unsupported("gathering all slots needs every slot assigned")


def _gathered(sources: list[tuple[str, Tensor]], index: Tensor) -> Outputs:
    return {name: paddle.gather(source, index) for name, source in sources}


def _plain_sources(operation: Operation, inputs: PaddleInputs) -> list[tuple[str, Tensor]]:
    x, scale = inputs.moved(operation)
    rows = x.view(_CARRIERS[x.dtype]) if x.dtype in _CARRIERS else x
    return [("rows", rows)] if scale is None else [("rows", rows), ("row_scales", scale)]


def _as_float8(outputs: Outputs) -> Outputs:
    rows = outputs["rows"]
    return {**outputs, "rows": rows.view("float8_e4m3fn")} if rows.dtype == paddle.int8 else outputs


def _sorted_slots(inputs: PaddleInputs) -> tuple[Tensor, Outputs]:
    """The tokens of the rows, and what a caller needs beside the rows: the way back, their probabilities and counts.

    Unassigned slots sort behind the last expert and are cut off.
    """
    plan = inputs.problem.plan
    ids = inputs.ids.flatten()
    experts = paddle.where(ids < 0, paddle.full_like(ids, plan.num_experts), ids) if inputs.has_gaps else ids
    order = paddle.argsort(experts, stable=True)[: plan.num_rows]
    nowhere = paddle.full([plan.num_tokens * plan.topk], -1, order.dtype)
    slots = paddle.scatter(nowhere, order, paddle.arange(plan.num_rows, dtype=order.dtype))
    return order // plan.topk, {
        "row_to_slot": order.astype("int32"),
        "slot_to_row": slots.astype("int32").reshape(inputs.ids.shape),
        "row_probs": paddle.gather(inputs.probs.flatten(), order),
        "tokens_per_expert": paddle.bincount(experts, minlength=plan.num_experts)[: plan.num_experts].astype("int32"),
    }


def _plain_route(_: Operation, inputs: PaddleInputs) -> Body:
    _without_padding(inputs)

    def run() -> Outputs:
        tokens, maps = _sorted_slots(inputs)
        row_to_expert = paddle.gather(inputs.ids.flatten(), maps["row_to_slot"])
        return {**maps, "row_to_token": tokens.astype("int32"), "row_to_expert": row_to_expert}

    return Body(run, note="no ascending list of a token's rows, no check of ids")


def _plain_route_permute(operation: Operation, inputs: PaddleInputs) -> Body:
    _without_padding(inputs)
    sources = _plain_sources(operation, inputs)

    def run() -> Outputs:
        tokens, maps = _sorted_slots(inputs)
        return {**_gathered(sources, tokens), **maps}

    return Body(run, results=_as_float8, note="argsort, scatter, bincount and gather; no check of ids")


def _plain_permute(operation: Operation, inputs: PaddleInputs) -> Body:
    _without_padding(inputs)
    sources = _plain_sources(operation, inputs)
    return Body(lambda: _gathered(sources, inputs.row_to_token), results=_as_float8, note="gather by a given map")


def _plain_unpermute(operation: Operation, inputs: PaddleInputs) -> Body:
    _without_gaps(inputs)
    rows, plan = as_tensor(inputs.arrays.rows), inputs.problem.plan
    by_rank = [as_tensor(np.ascontiguousarray(plan.slot_to_row[:, rank])) for rank in range(plan.topk)]
    index, weights = as_tensor(plan.slot_to_row.reshape(-1)), inputs.probs.unsqueeze(1)

    def run_plain() -> Outputs:
        return {"out": paddle.add_n([paddle.gather(rows, places) for places in by_rank])}

    def run_weighted() -> Outputs:
        gathered = paddle.gather(rows, index).astype("float32").reshape([plan.num_tokens, plan.topk, -1])
        return {"out": paddle.bmm(weights, gathered).squeeze(1).astype("bfloat16")}

    if operation.variant == "weighted":
        return Body(run_weighted, FLOAT32_SUMS, note="gather, cast, bmm, cast")
    return Body(run_plain, BFLOAT16_SUMS, note="add_n of gathers")


class _PlainGradient(paddle.autograd.PyLayer):
    """Plain operators as the gradient of a function that is never computed, so that they are called as ours are."""

    @staticmethod
    def forward(ctx: Any, gradient: Callable[[Tensor], Any], like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.gradient = gradient
        return paddle.empty_like(like)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return None, *ctx.gradient(d_out)


def _plain_unpermute_backward(operation: Operation, inputs: PaddleInputs) -> Body:
    variant, rows = operation.variant, as_tensor(inputs.arrays.rows)
    d_out, weights = as_tensor(inputs.arrays.d_out), inputs.row_probs.unsqueeze(1)
    _without_padding(inputs)
    wanted = [name for name, left_out in (("d_rows", "dprob"), ("d_weights", "dx")) if variant != left_out]
    if variant == "plain":
        wanted = ["d_rows"]

    def gradient(d_out: Tensor) -> tuple[Tensor, ...]:
        gathered = paddle.gather(d_out, inputs.row_to_token)
        if variant == "plain":
            return (gathered,)
        wide = gathered.astype("float32")
        outputs = []
        if "d_rows" in wanted:
            outputs.append((wide * weights).astype("bfloat16"))
        if "d_weights" in wanted:
            outputs.append(paddle.bmm(wide.unsqueeze(1), rows.astype("float32").unsqueeze(2)).flatten())
        return tuple(outputs)

    leaves = {name: inputs.leaf("rows" if name == "d_rows" else "row_probs") for name in wanted}
    return _gradients(_PlainGradient.apply(gradient, d_out, *leaves.values()), d_out, leaves)


def _plain_sort_chunks(operation: Operation, inputs: PaddleInputs) -> Body:
    rows, problem = as_tensor(inputs.arrays.rows), inputs.problem
    index = as_tensor(problem.dest_to_source if operation.variant == "forward" else problem.source_to_dest)
    return Body(lambda: {"sorted_rows": paddle.gather(rows, index)}, note="gather by a given map")


def _plain_topk(_: Operation, inputs: PaddleInputs) -> Body:
    gating, topk = as_tensor(inputs.problem.gating), inputs.problem.chosen_per_token

    def run() -> Outputs:
        weights, ids = paddle.topk(paddle.nn.functional.softmax(gating), topk)
        return dict(zip(_ROUTER_OUTPUTS, (weights / weights.sum(axis=-1, keepdim=True), ids), strict=True))

    return Body(run)


_PLAIN_BODIES: dict[str, Callable[[Operation, PaddleInputs], Body]] = {
    "route": _plain_route,
    "route_permute": _plain_route_permute,
    "permute": _plain_permute,
    "unpermute": _plain_unpermute,
    "unpermute_backward": _plain_unpermute_backward,
    "sort_chunks": _plain_sort_chunks,
    "topk": _plain_topk,
}
