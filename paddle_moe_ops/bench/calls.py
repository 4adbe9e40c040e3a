# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The timed calls: our functions, Paddle's own, and the fastest plain operators that were found for the same jobs.

T tokens, K slots of each, E experts, N = T * K rows, H columns. Every slot has an expert; there is no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

import paddle_moe_ops as ops
from paddle_moe_ops.testing.routing import random_probs, uniform

from .models import Model

OURS, OWN, PLAIN = "paddle_moe_ops", "paddle.nn.functional", "plain operators"
FUSED = "paddle.incubate.nn.functional.fused_moe"
# Part of the sum of the terms' absolute values by which a result may be off: it is rounded to bfloat16 once, results of
# others for every term, and GEMMs on a GPU may run in TF32. A row in the wrong place is off by much more.
TOLERANCES = {OURS: 2.0**-7, OWN: 2.0**-5, PLAIN: 2.0**-5, FUSED: 2.0**-5}

LINES = 9  # of `operations`

Outputs = dict[str, Tensor]
Form = Callable[..., Outputs]


class Call(NamedTuple):
    """`run` is timed, with a new result of `prepare` for each call; `outputs` names its result for checks."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    outputs: Callable[[Any], Outputs] = lambda result: result


class Operation(NamedTuple):
    """One line of the table: our call, and others that do the same, of which the first that can run counts.

    Attributes:
        moved: bytes of rows that must be read and written; None for a layer, whose speed is in tokens per second.
        expected: returns the right results, of float32 inputs, and for each the sum of its terms' absolute values.
        may_differ: the part of the elements that may differ, since another expert of nearly the same score was chosen.
    """

    name: str
    moved: int | None
    ours: Call
    others: list[Call]
    expected: Callable[[], tuple[Outputs, Outputs]]
    may_differ: float = 0.0

    def problem(self, call: Call) -> str:
        """The difference between a call's results and the expected ones; empty if there is none."""
        outputs = call.outputs(call.run(call.prepare()))
        right, terms = self.expected()
        for name, due in right.items():
            if name not in outputs:  # functions need not return all of their maps
                continue
            got = outputs[name].astype(due.dtype)
            if got.shape != due.shape:
                return f"{name} has shape {list(got.shape)} and must have {list(due.shape)}"
            if due.dtype == paddle.float32:
                wrong = ~((got - due).abs() <= TOLERANCES[call.name] * terms[name])
            else:
                wrong = got != due
            count = int(wrong.astype("int64").sum())
            if count > self.may_differ * got.size:
                return f"{name} is wrong in {count} of {got.size} elements"
        return ""


class Problem:
    """The inputs of a model with a given number of tokens on the current device: the same numbers in each run.

    Attributes:
        x: bfloat16 [T, H], tokens or the gradient of sums.
        rows: bfloat16 [N, H], rows or their gradient.
        ids: int32 [T, K].
        probs: float32 [T, K].
        row_to_token: [N].
        slot_to_row: [T, K].
        row_probs: float32 [N].
    """

    def __init__(self, model: Model, num_tokens: int) -> None:
        rng = np.random.default_rng(0)
        paddle.seed(0)
        self.num_experts = model.experts
        ids = uniform(rng, num_tokens, model.topk, model.experts)
        self.ids, self.probs = paddle.to_tensor(ids), paddle.to_tensor(random_probs(rng, ids))
        self.x = paddle.randn([num_tokens, model.hidden]).astype("bfloat16")
        self.rows = paddle.randn([num_tokens * model.topk, model.hidden]).astype("bfloat16")
        maps = self.plain_route(self.probs)
        self.row_to_token, self.slot_to_row, self.row_probs = list(maps.values())[:3]
        self.counts = maps["tokens_per_expert"].tolist()
        self.plan = ops.route(self.ids, self.probs, num_experts=model.experts)

    # ---- the plain forms

    def plain_route(self, probs: Tensor) -> Outputs:
        flat = self.ids.flatten()
        order = paddle.argsort(flat, stable=True)
        slot_to_row = paddle.scatter(paddle.empty_like(order), order, paddle.arange(order.shape[0], dtype=order.dtype))
        return {
            "row_to_token": order // self.ids.shape[1],
            "slot_to_row": slot_to_row.reshape(self.ids.shape),
            "row_probs": paddle.gather(probs.flatten(), order),
            "tokens_per_expert": paddle.bincount(flat, minlength=self.num_experts),
        }

    def plain_permute(self, x: Tensor) -> Outputs:
        return {"rows": paddle.gather(x, self.row_to_token)}

    def plain_permute_gradient(self, d_rows: Tensor) -> Outputs:
        of_slots = (paddle.gather(d_rows, rows) for rows in paddle.unbind(self.slot_to_row, axis=1))
        return {"d_x": paddle.add_n(list(of_slots))}

    def plain_moe_permute(self, x: Tensor, probs: Tensor) -> Outputs:
        maps = self.plain_route(probs)
        return {**maps, "rows": paddle.gather(x, maps["row_to_token"])}

    def plain_moe_permute_gradient(self, d_rows: Tensor, d_row_probs: Tensor) -> Outputs:
        d_probs = paddle.gather(d_row_probs, self.slot_to_row.flatten()).reshape(self.ids.shape)
        return {**self.plain_permute_gradient(d_rows), "d_probs": d_probs}

    def plain_unpermute(self, rows: Tensor, row_probs: Tensor) -> Outputs:
        (num_tokens, topk), slots = self.ids.shape, self.slot_to_row.flatten()
        weights = paddle.gather(row_probs, slots).reshape([num_tokens, 1, topk])
        of_slots = paddle.gather(rows, slots).astype("float32").reshape([num_tokens, topk, -1])
        return {"out": paddle.bmm(weights, of_slots).squeeze(1).astype(rows.dtype)}

    def plain_unpermute_gradient(self, d_out: Tensor, rows: Tensor, row_probs: Tensor) -> Outputs:
        of_rows = paddle.gather(d_out.astype("float32"), self.row_to_token)
        d_rows = (of_rows * row_probs.unsqueeze(1)).astype(rows.dtype)
        d_row_probs = paddle.bmm(of_rows.unsqueeze(1), rows.astype("float32").unsqueeze(2)).flatten()
        return {"d_rows": d_rows, "d_row_probs": d_row_probs}

    # ---- our functions, and Paddle's of the same signature

    def route(self, probs: Tensor) -> Outputs:
        return ops.route(self.ids, probs, num_experts=self.num_experts)._asdict()

    def moe_permute(self, module: Any, x: Tensor, probs: Tensor) -> Outputs:
        counts = self.counts if module is F else None
        outputs = module.moe_permute(x, None, self.ids, probs, self.num_experts, counts, 1)
        return dict(zip(("rows", "rowmap", "row_probs"), outputs, strict=False))

    def moe_unpermute(self, module: Any, rowmap: Tensor, rows: Tensor, row_probs: Tensor) -> Outputs:
        arguments = rows, rowmap, self.ids, row_probs, self.ids.shape[0], self.num_experts
        return {"out": module.moe_unpermute(*arguments, using_weighted_combine=True)[0]}


def operations(problem: Problem) -> Iterator[Operation]:
    """Every function, followed by its gradient if it has one."""
    p = problem
    rowmap = p.moe_permute(ops, p.x, p.probs)["rowmap"]
    tokens, rows = {"d_x": p.x}, {"d_rows": p.rows, "d_row_probs": p.row_probs}
    moved = 2 * (p.x.size + p.rows.size)  # bytes of bfloat16
    of_sums = {"out": p.x}, p.plain_unpermute_gradient, (p.x, p.rows, p.row_probs), moved + 2 * p.rows.size
    yield from _with_gradient(
        "moe_permute",
        {**tokens, "d_probs": p.probs},
        {OURS: partial(p.moe_permute, ops), OWN: partial(p.moe_permute, F), PLAIN: p.plain_moe_permute},
        moved,
        ({"rows": p.rows, "row_probs": p.row_probs}, p.plain_moe_permute_gradient, (p.rows, p.row_probs), moved),
    )
    yield from _with_gradient(
        "moe_unpermute",
        rows,
        {
            OURS: partial(p.moe_unpermute, ops, rowmap),
            OWN: partial(p.moe_unpermute, F, rowmap),
            PLAIN: p.plain_unpermute,
        },
        moved,
        of_sums,
    )
    yield from _with_gradient("route", {"d_probs": p.probs}, {OURS: p.route, PLAIN: p.plain_route}, 0)
    yield from _with_gradient(
        "permute",
        tokens,
        {OURS: lambda x: {"rows": ops.permute(x, p.plan)[0]}, PLAIN: p.plain_permute},
        moved,
        ({"rows": p.rows}, p.plain_permute_gradient, (p.rows,), moved),
    )
    yield from _with_gradient(
        "unpermute",
        rows,
        {OURS: lambda rows, row_probs: {"out": ops.unpermute(rows, p.plan, row_probs)}, PLAIN: p.plain_unpermute},
        moved,
        of_sums,
    )


def _with_gradient(
    name: str,
    leaves: dict[str, Tensor],
    forms: dict[str, Form],
    moved: int,
    gradient: tuple[dict[str, Tensor], Form, tuple[Tensor, ...], int] | None = None,
) -> Iterator[Operation]:
    """A function of leaves, which are named for their gradients, and the gradients alone.

    The gradient is described by the outputs' gradients, the plain form of the leaves' gradients, its inputs, and the
    bytes that it moves.
    """
    inputs = [leaf.detach() for leaf in leaves.values()]
    calls = [_forward(side, form, inputs) for side, form in forms.items()]
    yield Operation(name, moved, calls[0], calls[1:], partial(_in_float32, forms[PLAIN], inputs))
    if gradient is None:
        return
    arriving, plain, plain_inputs, moved = gradient
    wanted = [leaf.detach() for leaf in leaves.values()]
    for leaf in wanted:
        leaf.stop_gradient = False

    def our_graph() -> Tensor:
        outputs = forms[OURS](*wanted)
        return Node.apply(lambda: tuple(arriving.values()), *(outputs[output] for output in arriving))

    def plain_graph() -> Tensor:
        return Node.apply(lambda: tuple(plain(*plain_inputs).values()), *wanted)

    def run(end: Tensor) -> Outputs:
        return dict(zip(leaves, paddle.grad(end, wanted), strict=True))

    ours, others = Call(OURS, run, our_graph), [Call(PLAIN, run, plain_graph)]
    yield Operation(f"{name} gradient", moved, ours, others, partial(_in_float32, plain, plain_inputs))


def _in_float32(form: Form, inputs: Sequence[Tensor]) -> tuple[Outputs, Outputs]:
    """The results of a plain form, and those of the inputs' absolute values."""
    wide = [each.detach().astype("float32") for each in inputs]
    return form(*wide), form(*(each.abs() for each in wide))


def _forward(side: str, form: Form, inputs: list[Tensor]) -> Call:
    return Call(side, lambda _: form(*inputs))


class Node(paddle.autograd.PyLayer):
    """An autograd node whose gradients come from a function, since Paddle copies gradients that a caller passes."""

    @staticmethod
    def forward(ctx: Any, gradients: Callable[[], tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return paddle.zeros([1])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return ctx.gradients()
