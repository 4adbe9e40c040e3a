# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts block written with the operators: your own router, your own experts, and a plan.

    python examples/moe_block.py [--steps 60]

Every token goes to two of eight experts. They are small networks of different widths, which no single
call could run. The block learns a function that differs by region, and its output and gradients are compared with
those of the dense formulation, in which every expert works on every token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paddle_moe_ops import permute, route, unpermute
from paddle_moe_ops.nn import load_balance_loss

HIDDEN, EXPERTS, TOPK, TOKENS = 32, 8, 2, 256
TOLERANCE = 1e-4


class Block(nn.Layer):
    """Router, permute, experts, weighted unpermute, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias_attr=False)
        widths = [HIDDEN * (1 + number % 3) for number in range(EXPERTS)]
        self.experts = nn.LayerList(
            [nn.Sequential(nn.Linear(HIDDEN, width), nn.GELU(), nn.Linear(width, HIDDEN)) for width in widths]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output [T, HIDDEN], and the loss that keeps the experts' load even."""
        scores = F.softmax(self.router(x))
        probs, ids = paddle.topk(scores, TOPK)
        plan = route(ids, num_experts=EXPERTS)  # once; any number of tensors may follow it
        rows, _ = permute(x, plan)  # each expert's rows lie next to each other
        counts = plan.tokens_per_expert.tolist()
        parts = [expert(part) for expert, part in zip(self.experts, rows.split(counts), strict=True) if len(part)]
        out = unpermute(paddle.concat(parts), plan, probs)  # the weighted sum of each token's rows
        return x + out, load_balance_loss(scores, ids)

    def dense(self, x: Tensor) -> Tensor:
        """The same output from every expert on every token: slow, and with nothing to move."""
        scores = F.softmax(self.router(x))
        probs, ids = paddle.topk(scores, TOPK)
        weights = (F.one_hot(ids, EXPERTS) * probs.unsqueeze(-1)).sum(axis=1)  # [T, E]
        outputs = paddle.stack([expert(x) for expert in self.experts], axis=1)  # [T, E, HIDDEN]
        return x + (outputs * weights.unsqueeze(-1)).sum(axis=1)


def train(block: Block, x: Tensor, target: Tensor, steps: int) -> list[float]:
    """Train the block, its router included; returns the loss of each step."""
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=block.parameters())
    losses = []
    for _ in range(steps):
        out, balance = block(x)
        loss = F.mse_loss(out, target)
        (loss + 0.01 * balance).backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def largest_difference(block: Block, x: Tensor) -> float:
    """Between the block and its dense form: of the output and of all gradients."""
    results = []
    for forward in (lambda: block(x)[0], lambda: block.dense(x)):
        out = forward()
        out.square().mean().backward()
        gradients = [each.grad.clone() for each in block.parameters()]  # every one has a gradient
        block.clear_gradients()
        results.append([out.detach(), *gradients])
    return max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    steps = parser.parse_args().steps

    paddle.seed(0)
    block, x = Block(), paddle.randn([TOKENS, HIDDEN])
    target = paddle.where(x[:, :1] > 0, x.roll(1, axis=1), -x)  # two regions, a function for each
    before = block.router.weight.clone()
    losses = train(block, x, target, steps)
    moved = float((block.router.weight - before).abs().max())
    difference = largest_difference(block, x)
    print(f"{steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, router's weights moved by up to {moved:.2f}")
    print(f"output and gradients differ from the dense formulation by at most {difference:.0e}")
    passed = losses[-1] < losses[0] and moved > 0 and difference < TOLERANCE
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
