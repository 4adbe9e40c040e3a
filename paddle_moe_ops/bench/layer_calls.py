# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The timed calls of experts' layers, and of a whole model: ours, and Paddle's own operators, expert by expert.

T tokens of H columns, K slots of each, E experts of inner size I, N = T * K rows in expert order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.jit import not_to_static

import paddle_moe_ops as ops
from paddle_moe_ops._activations import swiglu
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer
from paddle_moe_ops.testing.routing import random_probs, uniform

from .calls import FUSED, OURS, PLAIN, Call, Node, Operation, Outputs
from .decoder import Decoder, ModelConfig
from .models import Model

TRAINING = "training step"
DECODE = 64  # calls of at most so many tokens are those of generation, which has no backward pass
LINES_OF_LAYER = {False: 3, True: 5}  # of `layer_operations`, without gradients and with them
# Sizes of the whole model, and of its training step.
DECODER = ModelConfig(hidden=128, layers=4, experts=16, topk=2, context=64)
BATCH = 8
# Part of the outputs that may differ: logits of another GEMM round differently, and choose another expert.
NEARLY_EQUAL_SCORES = 0.02

Experts = tuple[Sequence[Tensor], Sequence[Tensor]]  # gate_up [H, 2 * I] and down [I, H] of each expert
Of = Callable[[Tensor], Tensor]


def widened(x: Tensor) -> Tensor:
    """A float32 copy."""
    return x.detach().astype("float32")


def magnitude(x: Tensor) -> Tensor:
    """The absolute values in float32."""
    return widened(x).abs()


def by_expert(rows: Tensor, counts: Sequence[int], matrices: Sequence[Tensor], of: Of = lambda x: x) -> Tensor:
    """Each expert's matrix times its rows, one matmul after the other."""
    parts = zip(paddle.split(rows, [count for count in counts if count]), _used(counts, matrices), strict=True)
    return paddle.concat([paddle.matmul(part, of(matrix)) for part, matrix in parts])


def experts_by_expert(x: Tensor, ids: Tensor, probs: Tensor, experts: Experts, of: Of = lambda x: x) -> Tensor:
    """Outputs of tokens [T, H]: their rows are sorted by expert, and each expert multiplies its own."""
    (num_tokens, topk), flat = ids.shape, ids.flatten()
    order = paddle.argsort(flat, stable=True)
    counts = paddle.bincount(flat, minlength=len(experts[0])).tolist()
    rows = paddle.gather(x, order // topk)
    hidden = swiglu(by_expert(rows, counts, experts[0], of))
    rows = by_expert(hidden, counts, experts[1], of)
    slot_to_row = paddle.argsort(order)
    of_slots = paddle.gather(rows, slot_to_row).astype("float32").reshape([num_tokens, topk, -1])
    return (of_slots * probs.unsqueeze(-1)).sum(1).astype(x.dtype)


def _used(counts: Sequence[int], matrices: Sequence[Tensor]) -> list[Tensor]:
    return [matrix for count, matrix in zip(counts, matrices, strict=True) if count]


class PlainBlock(nn.Layer):
    """The block of a `MoELayer` in Paddle's own operators; each expert has copies of its parameters."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.topk, self.shared = layer.config.topk, layer.shared
        self.router = _parameter(layer.router.weight)
        self.gate_up, self.down = (
            nn.ParameterList([_parameter(each) for each in paddle.unbind(matrices)])
            for matrices in (layer.experts.gate_up, layer.experts.down)
        )

    def routed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and normalised weights [T, K]."""
        scores = F.softmax(paddle.matmul(tokens.astype("float32"), self.router.astype("float32")))
        probs, ids = paddle.topk(scores, self.topk)
        return ids, probs / probs.sum(-1, keepdim=True)

    @not_to_static
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape([-1, x.shape[-1]])
        out = experts_by_expert(tokens, *self.routed(tokens), (list(self.gate_up), list(self.down)))
        return (out if self.shared is None else out + self.shared(tokens)).reshape(x.shape)


def _parameter(value: Tensor) -> Tensor:
    return paddle.create_parameter(value.shape, value.dtype, default_initializer=nn.initializer.Assign(value.detach()))


def as_plain(model: Decoder) -> Decoder:
    """Replace the blocks of a decoder by plain ones, in place."""
    for block in model.blocks:
        if isinstance(block.mlp, MoELayer):
            block.mlp = PlainBlock(block.mlp)
    return model


class LayerProblem:
    """A layer of a model, and tokens: the same numbers in each run, float32 on a CPU, bfloat16 elsewhere."""

    def __init__(self, model: Model, num_tokens: int, on_cpu: bool) -> None:
        rng = np.random.default_rng(0)
        paddle.seed(0)
        dtype = "float32" if on_cpu else "bfloat16"
        ids = uniform(rng, num_tokens, model.topk, model.experts)
        self.ids, self.probs = paddle.to_tensor(ids), paddle.to_tensor(random_probs(rng, ids))
        self.plan = ops.route(self.ids, self.probs, num_experts=model.experts)
        self.counts = self.plan.tokens_per_expert.tolist()
        self.layer = MoELayer(model.hidden, model.inner, model.experts, model.topk, num_shared_experts=0)
        self.layer.to(dtype=dtype)
        self.plain = PlainBlock(self.layer)
        self.stacked = [self.layer.experts.gate_up, self.layer.experts.down]
        self.lists: Experts = (list(self.plain.gate_up), list(self.plain.down))
        self.x, self.d_out = (paddle.randn([num_tokens, model.hidden]).astype(dtype) for _ in range(2))
        self.rows = ops.permute(self.x, self.plan)[0]
        self.has_gradient = num_tokens > DECODE
        self.x.stop_gradient = self.probs.stop_gradient = not self.has_gradient

    def fused_moe(self) -> Tensor:
        """Paddle's fused block for inference, which only builds for GPUs have."""
        matrices = self.layer.router.weight.astype("float32"), *self.stacked
        out = paddle.incubate.nn.functional.fused_moe(self.x.unsqueeze(0), *matrices, moe_topk=self.plain.topk)
        return out.squeeze(0)


def layer_operations(problem: LayerProblem) -> Iterator[Operation]:
    """`grouped_gemm`, `moe_mlp` and `MoELayer`; the layers are followed by their gradients where tokens are many."""
    p = problem
    gate_up, down = p.stacked
    experts = [*p.lists[0], *p.lists[1]]
    yield _forward(
        Form(OURS, lambda: grouped_gemm(p.rows, gate_up, p.plan.tokens_per_expert, transpose=False)),
        [Form(PLAIN, lambda: by_expert(p.rows, p.counts, p.lists[0]))],
        "grouped_gemm",
        lambda of: by_expert(of(p.rows), p.counts, p.lists[0], of),
    )
    ours = Form(OURS, lambda: ops.moe_mlp(p.x, p.plan, p.probs, gate_up, down), [p.x, p.probs, gate_up, down])
    plain = Form(PLAIN, lambda: experts_by_expert(p.x, p.ids, p.probs, p.lists), [p.x, p.probs, *experts])

    def right(of: Of) -> Tensor:
        return experts_by_expert(of(p.x), p.ids, p.probs, p.lists, of)

    yield _forward(ours, [plain], "moe_mlp", right)
    if p.has_gradient:
        yield _gradient(ours, plain, "moe_mlp", right, p)
    with paddle.no_grad():
        routed = p.plain.routed(p.x)
    ours = Form(OURS, lambda: p.layer(p.x), [p.x, *p.layer.parameters()])
    plain = Form(PLAIN, lambda: p.plain(p.x), [p.x, *p.plain.parameters()])

    def right_of_layer(of: Of) -> Tensor:
        return experts_by_expert(of(p.x), *routed, p.lists, of)

    yield _forward(ours, [Form(FUSED, p.fused_moe), plain], "MoELayer", right_of_layer, NEARLY_EQUAL_SCORES)
    if p.has_gradient:
        yield _gradient(ours, plain, "MoELayer", right_of_layer, p)


class Form(NamedTuple):
    """One way of an operation; `leaves` want a gradient, and the matrices ``down`` come last."""

    name: str
    run: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()


def _forward(
    ours: Form, others: Sequence[Form], name: str, right: Callable[[Of], Tensor], may_differ: float = 0.0
) -> Operation:
    """The forward pass alone; `right` computes the results of inputs to which its argument is applied."""

    def call(form: Form) -> Call:
        return Call(form.name, paddle.no_grad()(lambda _: form.run()), outputs=lambda out: {"out": out})

    @paddle.no_grad()
    def expected() -> tuple[Outputs, Outputs]:
        return {"out": right(widened)}, {"out": right(magnitude)}

    return Operation(name, None, call(ours), [call(each) for each in others], expected, may_differ)


def _gradient(ours: Form, plain: Form, name: str, right: Callable[[Of], Tensor], problem: LayerProblem) -> Operation:
    """The gradients of all leaves; those of ``down`` are compared."""

    def call(form: Form, count: int) -> Call:
        def graph() -> Tensor:
            return Node.apply(lambda: (problem.d_out,), form.run())

        def run(end: Tensor) -> list[Tensor]:
            return paddle.grad(end, form.leaves, allow_unused=True)

        return Call(form.name, run, graph, lambda found: {"d_down": _stacked(found[-count:], problem.lists[1])})

    def expected() -> tuple[Outputs, Outputs]:
        return gradient(widened), gradient(magnitude)

    def gradient(of: Of) -> Outputs:
        wide: dict[int, Tensor] = {}

        def leaf(x: Tensor) -> Tensor:
            made = wide[id(x)] = of(x)
            made.stop_gradient = False
            return made

        out = right(leaf)
        used = [wide[id(each)] for each in problem.lists[1] if id(each) in wide]
        found = iter(paddle.grad(out, used, of(problem.d_out)))
        of_each = [next(found) if id(each) in wide else None for each in problem.lists[1]]
        return {"d_down": _stacked(of_each, problem.lists[1])}

    return Operation(f"{name} gradient", None, call(ours, 1), [call(plain, len(problem.lists[1]))], expected)


def _stacked(gradients: Sequence[Tensor | None], of: Sequence[Tensor]) -> Tensor:
    """Gradients [E, I, H] of matrices; an expert without tokens may have none."""
    if len(gradients) == 1 and gradients[0] is not None and gradients[0].ndim == 3:
        return gradients[0]
    return paddle.stack([paddle.zeros_like(each) if d is None else d for d, each in zip(gradients, of, strict=True)])


def training_step() -> Operation:
    """A step of a small decoder: the forward pass, the backward pass and the optimizer."""
    ours, plain = (_decoder() for _ in range(2))
    as_plain(plain)
    tokens = paddle.randint(0, DECODER.vocabulary, [BATCH, DECODER.context + 1])
    with paddle.no_grad():
        before = plain.loss(tokens).reshape([1])

    def call(name: str, model: Decoder) -> Call:
        optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())

        def run(_: Any) -> Tensor:
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            return loss

        return Call(name, run, outputs=lambda loss: {"loss": loss.reshape([1])})

    return Operation(
        TRAINING, None, call(OURS, ours), [call(PLAIN, plain)], lambda: ({"loss": before}, {"loss": before})
    )


def _decoder() -> Decoder:
    paddle.seed(0)
    return Decoder(DECODER)
