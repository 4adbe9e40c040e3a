# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of `unpermute`: of the rows, of their weights, or both."""

from __future__ import annotations

from typing import Any

import numpy as np

import paddle_moe_ops
from paddle_moe_ops.testing.tolerances import dot_chain, dtype_tols
from tests.core.operators.unpermute_backward import unpermute_backward_params

from ..check import Check
from ..core import CoreCalls
from ..device import Body, Outputs
from ..inputs import Inputs
from ..model import WORD, Bytes, Kind, Work
from ..problem import Problem
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from .base import NUMPY, PLAIN, TORCH, TRANSFORMER_ENGINE, Library, Operator, Variant, Way
from .moving import row_bytes, slot_bytes, without_padding

_VARIANTS = {
    "plain": Variant("bfloat16", ("d_rows",)),
    "weighted": Variant("bfloat16", ("d_rows", "d_weights"), picture="Gradient of the weighted unpermute"),
    "dx": Variant("bfloat16", ("d_rows",)),
    "dprob": Variant("bfloat16", ("d_weights",), mostly_read=True),
}


def _least_bytes(operation: Operation, problem: Problem) -> Bytes:
    """plain     read THb + 4TK (map), written MHb
    dx           read THb + 4TK + 4N, written MHb
    dprob        read THb + NHb + 4TK, written 4M
    weighted     read THb + NHb + 4TK + 4N, written MHb + 4M
    """
    row, routed, buffer = row_bytes(operation, problem), problem.routed_rows, problem.plan.num_rows
    weights = WORD * routed if operation.variant in ("weighted", "dx") else 0
    due = _VARIANTS[operation.variant].due
    dots = "d_weights" in due
    return Bytes(
        problem.case.shape.num_tokens * row + (routed * row if dots else 0) + slot_bytes(problem) + weights,
        (buffer * row if "d_rows" in due else 0) + (WORD * buffer if dots else 0),
    )


def _probe(operation: Operation, problem: Problem) -> Work:
    row = row_bytes(operation, problem)
    tokens, routed = problem.case.shape.num_tokens * row, problem.routed_rows * row
    if operation.variant == "dprob":
        return Work(Kind.READ, tokens + routed, 0)
    if operation.variant == "weighted":
        return Work(Kind.EXCHANGE, tokens, routed)
    return Work(Kind.FANOUT, tokens, problem.plan.num_rows * row)


def _unlike_rows(check: Check, operation: Operation, name: str, actual: Any) -> str | None:
    inputs = check.inputs
    if operation.variant == "plain":
        return check.gathered(name, actual, inputs.d_out)
    wrong = check.unlike(name, actual, inputs.d_out.dtype, inputs.rows.shape)
    if wrong:
        return wrong
    num_rows, hidden = actual.shape
    for rows in check.chunks(num_rows, 2 * hidden):
        found = check.unequal(name, actual[rows], check.scaled(rows), rows.start)
        if found:
            return found
    return check.unlike_sampled_rows(actual)


def _unlike_dots(check: Check, _: Operation, name: str, actual: Any) -> str | None:
    """Compare with dot products in float64; their order is free."""
    inputs = check.inputs
    num_rows, hidden = inputs.rows.shape
    wrong = check.unlike(name, actual, inputs.row_probs.dtype, (num_rows,))
    if wrong:
        return wrong
    tolerance = dtype_tols(np.float32, dot_chain(hidden))
    for rows in check.chunks(num_rows, 4 * hidden):
        tokens = inputs.row_to_token[rows]
        terms = check.wide(inputs.d_out[check.places(tokens)]) * check.wide(inputs.rows[rows])
        terms[tokens < 0] = 0
        found = check.too_far(name, actual[rows], terms.sum(1), abs(terms).sum(1), tolerance, rows.start)
        if found:
            return found
    return None


def _core(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    like = {"d_rows": inputs.rows, "d_weights": inputs.row_probs}
    due = _VARIANTS[operation.variant].due
    outputs = {name: inputs.empty(*like[name].shape, dtype=like[name].dtype) for name in due}
    params = core.params(
        unpermute_backward_params,
        inputs.d_out,
        inputs.token_rows,
        inputs.row_to_token,
        outputs.get("d_rows"),
        inputs.rows if "d_weights" in outputs else None,
        None if operation.variant == "plain" else inputs.row_probs,
        d_weights=outputs.get("d_weights"),
    )
    return core.body(lambda: core.run("unpermute_backward", params), outputs)


def _triton(device: Any, operation: Operation, inputs: Any) -> Body:
    from paddle_moe_ops.triton.ops.unpermute_backward import unpermute_backward

    due = _VARIANTS[operation.variant].due
    arrays = (
        *(inputs.d_out, inputs.token_rows, inputs.row_to_token),
        inputs.rows if "d_weights" in due else None,
        None if operation.variant == "plain" else inputs.row_probs,
    )

    def run() -> Outputs:
        d_rows, d_weights = unpermute_backward(device, *arrays, need_rows="d_rows" in due)
        return {name: each for name, each in (("d_rows", d_rows), ("d_weights", d_weights)) if each is not None}

    return Body(run)


def _torch(torch: Any, operation: Operation, inputs: Any) -> Body:
    without_padding(inputs, "indexing")
    variant, index = operation.variant, inputs.row_to_token.long()
    weights = inputs.row_probs[:, None]

    def run() -> Outputs:
        gathered = inputs.d_out.index_select(0, index)
        if variant == "plain":
            return {"d_rows": gathered}
        outputs: Outputs = {}
        if variant != "dprob":
            outputs["d_rows"] = (gathered * weights).to(torch.bfloat16)
        if variant != "dx":
            outputs["d_weights"] = (gathered.float() * inputs.rows).sum(1)
        return outputs

    return Body(run)


def _transformer_engine(engine: Any, operation: Operation, inputs: Any) -> Body:
    maps = engine.maps(inputs)
    row_id_map = maps.map()
    if operation.variant == "plain":
        return Body(lambda: {"d_rows": maps.permute(row_id_map, None, inputs.d_out)["rows"]})

    def run() -> Outputs:
        d_rows, d_probs = engine.functions.unpermute_with_mask_map_bwd_with_merging_probs(
            *(inputs.d_out, row_id_map, inputs.rows, maps.probs, maps.pad_offsets),
            *(maps.tokens, maps.experts, maps.rows, maps.hidden),
        )
        return {"d_rows": d_rows, "d_probs": d_probs}

    def results(outputs: Outputs) -> Outputs:
        tokens, experts = inputs.row_to_token.long(), inputs.row_to_expert.long()
        by_row = outputs["d_probs"][tokens.clamp(min=0), experts.clamp(min=0)]
        return {"d_rows": outputs["d_rows"], "d_weights": engine.torch.where(tokens < 0, 0.0, by_row)}

    return Body(run, results=results)


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    from ..cpu_paddle import gradients

    due = _VARIANTS[operation.variant].due
    rows, weights = inputs.leaf("rows", "d_rows" in due), inputs.leaf("row_probs", "d_weights" in due)
    out = paddle_moe_ops.unpermute(rows, inputs.plan, None if operation.variant == "plain" else weights)
    wanted = {name: leaf for name, leaf in (("d_rows", rows), ("d_weights", weights)) if name in due}
    return gradients(out, inputs.d_out, wanted)


def _plain(paddle: Any, operation: Operation, inputs: Any) -> Body:
    from ..cpu_paddle import PlainGradient, gradients

    without_padding(inputs, "gathering")
    due, rows, d_out = _VARIANTS[operation.variant].due, inputs.rows, inputs.d_out
    weights = inputs.row_probs.unsqueeze(1)

    def gradient(d_out: Any) -> tuple[Any, ...]:
        gathered = paddle.gather(d_out, inputs.row_to_token)
        if operation.variant == "plain":
            return (gathered,)
        wide = gathered.astype("float32")
        outputs = []
        if "d_rows" in due:
            outputs.append((wide * weights).astype("bfloat16"))
        if "d_weights" in due:
            outputs.append(paddle.bmm(wide.unsqueeze(1), rows.astype("float32").unsqueeze(2)).flatten())
        return tuple(outputs)

    leaves = {name: inputs.leaf("rows" if name == "d_rows" else "row_probs") for name in due}
    return gradients(PlainGradient.apply(gradient, d_out, *leaves.values()), d_out, leaves)


def _numpy(numpy: Any, _: Operation, inputs: Inputs) -> Body:
    without_padding(inputs, "taking")
    d_out, index = inputs.d_out, inputs.row_to_token
    return Body(lambda: {"d_rows": numpy.take(d_out, index, axis=0)})


OPERATOR = Operator(
    "unpermute_backward",
    _VARIANTS,
    least_bytes=_least_bytes,
    probe=_probe,
    checks={"d_rows": _unlike_rows, "d_weights": _unlike_dots},
    ways=(
        Way(OURS, Library.CORE, _core),
        Way(TRITON, Library.TRITON, _triton),
        Way(TORCH, Library.TORCH, _torch),
        Way(TRANSFORMER_ENGINE, Library.TRANSFORMER_ENGINE, _transformer_engine, ("plain", "weighted")),
        Way(PUBLIC, Library.PADDLE, _public),
        Way(PLAIN, Library.PADDLE, _plain),
        Way(NUMPY, Library.NUMPY, _numpy, ("plain",)),
    ),
)
