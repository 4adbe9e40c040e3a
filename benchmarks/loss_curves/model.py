# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A decoder of the ERNIE 4.5 type in PyTorch: RMSNorm, rotary grouped-query attention, dense then MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .experts import counts_of

__all__ = ["Decoder", "Sizes"]

_BALANCE = 0.01  # factor of the load balancing loss
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    """Sizes of the decoder. Two heads share keys and values.

    Attributes:
        hidden: d, a multiple of twice the columns of a head.
        inner: n, of each expert and of the shared one.
        layers: number of layers, the first of which is dense.
        experts: E.
        topk: K.
        context: tokens of a window.
        batch: windows of a step.
        head: columns of a head.
    """

    hidden: int
    inner: int
    layers: int
    experts: int
    topk: int
    context: int
    batch: int
    head: int = 64
    vocabulary: int = 256


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head, self.heads = sizes.head, sizes.hidden // sizes.head
        self.qkv = nn.Linear(sizes.hidden, 2 * self.heads * sizes.head, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, sizes.head, 2) / sizes.head)
        angle = torch.outer(torch.arange(sizes.context), frequency).tile(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, -1, self.head).transpose(1, 2)
        query, key, value = qkv.split([self.heads, self.heads // 2, self.heads // 2], 1)
        query, key = self._rotated(query), self._rotated(key)
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value.to(query.dtype), is_causal=True)
        made: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return made

    def _rotated(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        length = x.shape[2]
        return (x * self.cos[:length] + torch.cat([-high, low], -1) * self.sin[:length]).to(x.dtype)


class _SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        made: Tensor = self.down(F.silu(gate) * up)
        return made


class _MoE(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.topk, self.experts = sizes.topk, sizes.experts
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.shared = _SwiGLU(sizes.hidden, sizes.inner)
        self.gate_up = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, 2 * sizes.inner))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.inner, sizes.hidden))
        self.balance_loss: Tensor | float = 0.0

    def forward(self, x: Tensor, experts: Experts) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(tokens.float(), self.router.weight).softmax(-1)
            probs, ids = scores.topk(self.topk)
            probs = probs / probs.sum(-1, keepdim=True)
            load = counts_of(ids, self.experts) / ids.numel()
            self.balance_loss = _BALANCE * self.experts * (load * scores.mean(0)).sum()
            routed = experts(tokens, ids, probs, self.gate_up, self.down)
        return routed.view_as(x) + self.shared(x)


class _Block(nn.Module):
    def __init__(self, sizes: Sizes, is_dense: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention = _Attention(sizes)
        self.mlp: _SwiGLU | _MoE = _SwiGLU(sizes.hidden, 4 * sizes.inner) if is_dense else _MoE(sizes)

    def forward(self, x: Tensor, experts: Experts) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + (self.mlp(normed, experts) if isinstance(self.mlp, _MoE) else self.mlp(normed))


class Decoder(nn.Module):
    """The language model; input and output embeddings are the same weights.

    Args:
        sizes: the sizes.
        experts: the function of (tokens, ids, probs, gate_up, down) that runs the experts of all layers.
    """

    def __init__(self, sizes: Sizes, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList([_Block(sizes, number == 0) for number in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.hidden)
        for each in self.parameters():
            if each.ndim > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of each token after the first, in nats, and the load balancing loss."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.experts)
        logits = F.linear(self.norm(x), self.embedding.weight).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        balance = sum(
            (block.mlp.balance_loss for block in self.blocks if isinstance(block.mlp, _MoE)), loss.new_zeros(())
        )
        return loss, balance
