# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A small decoder of the ERNIE 4.5 type: RMSNorm, rotary grouped-query attention, dense then MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.jit import not_to_static

from paddle_moe_ops._options import ComputeFormat
from paddle_moe_ops.nn import MoELayer, SwiGLU

MoEForward = Callable[[MoELayer, Tensor], Tensor]

HEAD_DIM = 32


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder; hidden is a multiple of 2 * HEAD_DIM, because two heads share keys and values.

    ``compute`` is that of the experts, see `MoELayer`.
    """

    hidden: int
    layers: int
    experts: int
    topk: int
    context: int
    vocabulary: int = 256
    compute: ComputeFormat = None

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM

    @property
    def key_value_heads(self) -> int:
        return self.heads // 2

    @property
    def expert_intermediate(self) -> int:
        return self.hidden // 2


class RMSNorm(nn.Layer):
    """Scales each vector to a root mean square of 1, times a learned weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    @not_to_static
    def forward(self, x: Tensor) -> Tensor:
        return x * paddle.rsqrt((x * x).mean(axis=-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Layer):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.key_value_heads
        self.qkv = nn.Linear(config.hidden, (self.heads + 2 * self.groups) * HEAD_DIM, bias_attr=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias_attr=False)
        frequency = 10000.0 ** (-paddle.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = paddle.outer(paddle.arange(config.context, dtype="float32"), frequency).tile([1, 2])
        self.register_buffer("cos", paddle.cos(angle).unsqueeze(1), persistable=False)
        self.register_buffer("sin", paddle.sin(angle).unsqueeze(1), persistable=False)
        mask = paddle.triu(paddle.full([config.context, config.context], -1e30), 1)
        self.register_buffer("mask", mask, persistable=False)

    @not_to_static
    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape([batch, length, -1, HEAD_DIM])
        query_key, value = paddle.split(qkv, [self.heads + self.groups, self.groups], axis=2)
        low, high = paddle.chunk(query_key, 2, axis=-1)
        turned = paddle.concat([-high, low], axis=-1)
        query_key = query_key * self.cos[:length] + turned * self.sin[:length]
        query, key = paddle.split(query_key, [self.heads, self.groups], axis=2)

        # The heads of a group stand below one another, so that each group is one matrix product.
        shape = [batch, self.groups, self.heads // self.groups, length]
        query = query.reshape([batch, length, shape[1], shape[2], HEAD_DIM]).transpose([0, 2, 3, 1, 4])
        query = (query * HEAD_DIM**-0.5).reshape([batch, shape[1], shape[2] * length, HEAD_DIM])
        logits = paddle.matmul(query, key.transpose([0, 2, 3, 1])).reshape([*shape, length])
        weights = F.softmax(logits + self.mask[:length, :length], axis=-1)
        mixed = paddle.matmul(weights.reshape([batch, shape[1], -1, length]), value.transpose([0, 2, 1, 3]))
        mixed = mixed.reshape([*shape, HEAD_DIM]).transpose([0, 3, 1, 2, 4])
        return self.out(mixed.reshape([batch, length, hidden]))


class Block(nn.Layer):
    """Attention and an MLP (dense in the first layer, MoE in the others), each with a norm and a residual."""

    def __init__(self, config: ModelConfig, dense: bool, group: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden)
        self.mlp: SwiGLU | MoELayer
        if dense:
            self.mlp = SwiGLU(config.hidden, 2 * config.hidden)
        else:
            sizes = config.hidden, config.expert_intermediate, config.experts, config.topk
            self.mlp = MoELayer(*sizes, compute=config.compute, group=group)

    @not_to_static
    def forward(self, x: Tensor, moe_forward: MoEForward) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        return x + (moe_forward(self.mlp, normed) if isinstance(self.mlp, MoELayer) else self.mlp(normed))


class Decoder(nn.Layer):
    """The language model; input and output embeddings are the same weights.

    Its methods take the function that runs an MoE layer: the checks run the same model in another form. With a group of
    paddle.distributed its ranks share the experts.
    """

    def __init__(self, config: ModelConfig, group: Any = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = self.create_parameter(
            [config.vocabulary, config.hidden], default_initializer=nn.initializer.Normal(std=0.02)
        )
        self.blocks = nn.LayerList([Block(config, i == 0, group) for i in range(config.layers)])
        self.norm = RMSNorm(config.hidden)

    @property
    def moe_layers(self) -> list[MoELayer]:
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoELayer)]

    @not_to_static
    def forward(self, tokens: Tensor, moe_forward: MoEForward = MoELayer.__call__) -> Tensor:
        """Logits [B, S, vocabulary] of the next bytes, for int64 tokens [B, S]."""
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, moe_forward)
        return paddle.matmul(self.norm(x), self.embedding, transpose_y=True)

    def loss(self, tokens: Tensor, moe_forward: MoEForward = MoELayer.__call__) -> Tensor:
        """Mean cross-entropy in nats of predicting tokens[:, 1:] from tokens[:, :-1]."""
        logits = self(tokens[:, :-1], moe_forward)
        return F.cross_entropy(logits.reshape([-1, self.config.vocabulary]), tokens[:, 1:].reshape([-1]))
