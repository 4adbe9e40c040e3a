# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of a layer, its routing in the form of each implementation, and the expected results."""

from __future__ import annotations

from pathlib import Path

import torch

from .shapes import Shape

__all__ = ["Inputs"]

_SEED = 20261123


def _routed(shape: Shape, routing: str, generator: torch.Generator) -> torch.Tensor:
    """The experts of each token, [T, K]: all alike, or expert e with a weight of 1 / (e + 1), without repeats."""
    noise = torch.empty(shape.tokens, shape.experts, device="cuda").exponential_(generator=generator)
    if routing == "zipf":
        noise *= torch.arange(1, shape.experts + 1, device="cuda")
    return noise.argsort(1)[:, : shape.topk]


class Inputs:
    """Random tokens, weights and matrices in bfloat16.

    Attributes:
        x: [T, d].
        gate_up: [E, d, 2n], the gate's columns first.
        down: [E, n, d].
        d_out: [T, d].
        probs: float32 [T, K], which sum to 1.
        ids: [T, K].
        sizes: int32 [E].
        offsets: int32 [E + 1].
        row_to_token: int32 [M].
        row_probs: float32 [M].
        token_rows: int32 [T, K], ascending.
        core_library: a libpmo_core.so with CUDA operators, or None.
    """

    def __init__(self, shape: Shape, routing: str, core_library: Path | None = None) -> None:
        self.core_library = core_library
        generator = torch.Generator("cuda").manual_seed(_SEED)
        self.shape = shape
        tokens, hidden, inner, experts, topk = shape

        def random(*size: int, scale: float = 1.0) -> torch.Tensor:
            made = torch.empty(size, dtype=torch.bfloat16, device="cuda")
            return made.normal_(std=scale, generator=generator)

        self.x, self.d_out = random(tokens, hidden), random(tokens, hidden)
        self.gate_up = random(experts, hidden, 2 * inner, scale=hidden**-0.5)
        self.down = random(experts, inner, hidden, scale=inner**-0.5)
        self.ids = _routed(shape, routing, generator)
        self.probs = torch.rand(tokens, topk, device="cuda", generator=generator).softmax(1)
        flat = self.ids.reshape(-1)
        order = flat.argsort(stable=True)
        self.sizes = torch.bincount(flat, minlength=experts).int()
        self.offsets = torch.cat([self.sizes.new_zeros(1), self.sizes.cumsum(0).int()])
        self.row_to_token = (order // topk).int()
        self.row_probs = self.probs.reshape(-1)[order].contiguous()
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device="cuda")
        self.rows_of_slots = rows.view(tokens, topk)
        self.token_rows = self.rows_of_slots.sort(1).values.int()

    def due(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Expected results and probability gradients of the first tokens, in float32 from rounded operands."""
        out = torch.zeros(tokens, self.shape.hidden, device="cuda")
        d_probs = torch.zeros(tokens, self.shape.topk, device="cuda")
        for token in range(tokens):
            for slot, expert in enumerate(self.ids[token].tolist()):
                gate, up = (self.x[token].float() @ self.gate_up[expert].float()).chunk(2)
                row = (torch.nn.functional.silu(gate) * up) @ self.down[expert].float()
                out[token] += self.probs[token, slot] * row
                d_probs[token, slot] = row @ self.d_out[token].float()
        return out, d_probs
