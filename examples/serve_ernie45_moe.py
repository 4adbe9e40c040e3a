# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Serves a small decoder of the ERNIE 4.5 type token by token, on a GPU also by a CUDA graph.

    python examples/serve_ernie45_moe.py
    python examples/serve_ernie45_moe.py --format int8
    python examples/serve_ernie45_moe.py --device gpu:0 --format fp8_128x128 --batch 16

The decoder has RMSNorm, rotary grouped-query attention and `MoELayer` with a shared expert; its first block is dense.
Its weights are random. Keys, values, tokens and the position are tensors that stay where they are, so that one CUDA
graph of a step decodes every token. The program checks that the graph writes the bits of the eager steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paddle_moe_ops.nn import MoELayer, SwiGLU

FORMATS = ("none", "fp8_128x128", "int8", "int4", "int4_1x128")
EPSILON, ROTARY_BASE = 1e-5, 500000.0


class Sizes(NamedTuple):
    """Sizes of a decoder: hidden size, inner sizes of an expert and of the dense block, and so on."""

    hidden: int = 128
    inner: int = 128
    dense: int = 512
    experts: int = 16
    topk: int = 4
    shared: int = 2
    blocks: int = 3
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    vocabulary: int = 512


class Cache(NamedTuple):
    """Keys and values of a block, each [batch * kv_heads * length, head]."""

    keys: Tensor
    values: Tensor


class Positions(NamedTuple):
    """Values that depend on the positions [S] of the tokens alone, the same for all blocks.

    Attributes:
        cos: [S, 1, head / 2], as is `sin`.
        mask: [S, 1, length], 0 for the positions that a token attends to, otherwise -inf.
        rows: the rows of a `Cache` that belong to the tokens, [batch * kv_heads * S].
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor
    rows: Tensor


class RMSNorm(nn.Layer):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([hidden], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.astype("float32")
        scale = paddle.rsqrt(paddle.mean(wide * wide, -1, keepdim=True) + EPSILON)
        return (wide * scale).astype(x.dtype) * self.weight


class Attention(nn.Layer):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = sizes.heads, sizes.kv_heads, sizes.head
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.head, bias_attr=False)
        self.out = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias_attr=False)

    def forward(self, x: Tensor, cache: Cache, positions: Positions) -> Tensor:
        """Attention of x [B, S, hidden] to the cache, to which its keys and values are written first."""
        batch, count, _ = x.shape
        qkv = self.qkv(x).reshape([batch, count, -1, self.head])
        rotated, value = paddle.split(qkv, [self.heads + self.kv_heads, self.kv_heads], 2)
        query, key = paddle.split(_rotated(rotated, positions), [self.heads, self.kv_heads], 2)
        for kept, new in zip(cache, (key, value), strict=True):
            kept.scatter_(positions.rows, new.transpose([0, 2, 1, 3]).reshape([-1, self.head]))
        keys, values = (kept.reshape([batch, self.kv_heads, -1, self.head]) for kept in cache)
        grouped = query.reshape([batch, count, self.kv_heads, -1, self.head]).transpose([0, 2, 1, 3, 4])
        scores = paddle.matmul(grouped.reshape([batch, self.kv_heads, -1, self.head]), keys, transpose_y=True)
        scores = scores.astype("float32").reshape([*grouped.shape[:-1], -1]) * self.head**-0.5
        weights = F.softmax(scores + positions.mask).astype(x.dtype)
        mixed = paddle.matmul(weights.reshape([batch, self.kv_heads, -1, weights.shape[-1]]), values)
        return self.out(mixed.reshape(grouped.shape).transpose([0, 2, 1, 3, 4]).reshape([batch, count, -1]))


def _rotated(x: Tensor, positions: Positions) -> Tensor:
    """Heads [B, S, heads, head] with the rotary embedding of their positions."""
    low, high = paddle.split(x.astype("float32"), 2, -1)
    cos, sin = positions.cos, positions.sin
    return paddle.concat([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


class Block(nn.Layer):
    def __init__(self, sizes: Sizes, is_dense: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(sizes.hidden), RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        if is_dense:
            self.mlp: nn.Layer = SwiGLU(sizes.hidden, sizes.dense)
        else:
            self.mlp = MoELayer(sizes.hidden, sizes.inner, sizes.experts, sizes.topk, num_shared_experts=sizes.shared)

    def forward(self, x: Tensor, cache: Cache, positions: Positions) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache, positions)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Layer):
    """The language model; input and output embeddings are the same weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.LayerList([Block(sizes, is_dense=number == 0) for number in range(sizes.blocks)])
        self.norm = RMSNorm(sizes.hidden)

    def forward(self, tokens: Tensor, caches: list[Cache], positions: Positions) -> Tensor:
        """Logits [B, S, vocabulary] of tokens [B, S]."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, positions)
        return paddle.matmul(self.norm(x), self.embedding.weight, transpose_y=True)

    def quantize_experts(self, format: str) -> None:
        """Replace the experts' weights by codes and scales."""
        for block in self.blocks:
            if isinstance(block.mlp, MoELayer):
                block.mlp.quantize_experts(format)


class Server:
    """A batch of sequences with the state of their decoding, in tensors that stay where they are.

    Args:
        model: the decoder.
        batch: number of sequences.
        length: most tokens of a sequence.

    Attributes:
        tokens: int64 [length, batch].
        position: int64 [1], of the last tokens.
        caches: of the blocks.
    """

    def __init__(self, model: Decoder, batch: int, length: int) -> None:
        sizes = model.sizes
        self.model, heads = model, batch * sizes.kv_heads
        self.tokens, self.position = paddle.zeros([length, batch], "int64"), paddle.zeros([1], "int64")
        self._one = paddle.ones([1], "int64")
        shape, dtype = [heads * length, sizes.head], model.embedding.weight.dtype
        self.caches = [Cache(paddle.zeros(shape, dtype), paddle.zeros(shape, dtype)) for _ in range(sizes.blocks)]
        self._starts = paddle.arange(heads).unsqueeze(-1) * length
        frequency = ROTARY_BASE ** (-np.arange(0, sizes.head, 2, np.float32) / sizes.head)
        angle = np.outer(np.arange(length, dtype=np.float32), frequency)
        self._cos, self._sin = paddle.to_tensor(np.cos(angle)), paddle.to_tensor(np.sin(angle))
        self._mask = paddle.to_tensor(np.triu(np.full([length, length], -np.inf, np.float32), 1))

    def _positions(self, numbers: Tensor) -> Positions:
        tables = (paddle.gather(table, numbers).unsqueeze(1) for table in (self._cos, self._sin, self._mask))
        return Positions(*tables, rows=(self._starts + numbers).flatten())

    @paddle.no_grad()
    def start(self, prompt: Tensor) -> Tensor:
        """Run a prompt [S, B] and append the first tokens; returns the logits [B, S, vocabulary]."""
        numbers = paddle.arange(len(prompt))
        self.tokens.scatter_(numbers, prompt)
        logits = self.model(prompt.transpose([1, 0]), self.caches, self._positions(numbers))
        self.position.fill_(len(prompt) - 1)
        self._append(logits[:, -1])
        return logits

    @paddle.no_grad()
    def step(self) -> Tensor:
        """Append a token to each sequence; returns the logits [B, vocabulary]. A CUDA graph can capture it."""
        last = paddle.gather(self.tokens, self.position).transpose([1, 0])
        logits = self.model(last, self.caches, self._positions(self.position)).squeeze(1)
        self._append(logits)
        return logits

    def _append(self, logits: Tensor) -> None:
        self.position.add_(self._one)
        self.tokens.scatter_(self.position, paddle.argmax(logits, -1).unsqueeze(0))

    def state(self) -> list[np.ndarray]:
        """The tokens and the caches as arrays; bfloat16 as its bits."""
        return [each.numpy() for each in (self.tokens, *(tensor for cache in self.caches for tensor in cache))]


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of a step, which must have run before."""
    from paddle.device.cuda.graphs import CUDAGraph

    graph = CUDAGraph()
    graph.capture_begin()
    step()
    graph.capture_end()
    return graph.replay


def seconds_per_step(server: Server, prompt: Tensor, step: Callable[[], Any], rounds: int = 8) -> list[float]:
    """Start with the prompt and decode until the sequences are full; returns the mean of each round of steps."""
    server.start(prompt)
    bounds, found = np.linspace(0, len(server.tokens) - len(prompt) - 1, rounds + 1).astype(int), []
    for count in np.diff(bounds).tolist():
        _wait()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        _wait()
        found.append((time.perf_counter() - begin) / count)
    return found


def _wait() -> None:
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()


def new_model(sizes: Sizes, format: str) -> Decoder:
    """A decoder with random weights, in bfloat16 on a GPU."""
    paddle.seed(0)
    model = Decoder(sizes)
    model.eval()
    if paddle.get_device() != "cpu":  # Paddle's matmul on a CPU takes no narrow types
        model.to(dtype="bfloat16")
    if format != "none":
        model.quantize_experts(format)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=paddle.get_device(), help="as paddle.set_device takes it")
    parser.add_argument("--format", default="none", choices=FORMATS, help="of the experts' matrices")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--tokens", type=int, default=48, help="of a sequence, 16 of them in the prompt")
    arguments = parser.parse_args()

    paddle.set_device(arguments.device)
    server = Server(new_model(Sizes(), arguments.format), arguments.batch, arguments.tokens)
    prompt = paddle.randint(0, Sizes().vocabulary, [16, arguments.batch])
    ways = {"eager": lambda: server.step}
    if arguments.device.startswith("gpu"):
        ways["CUDA graph"] = lambda: captured(server.step)
    states = []
    for name, way in ways.items():
        seconds = seconds_per_step(server, prompt, way())
        states.append(server.state())
        print(f"{name}: {arguments.batch / statistics.median(seconds):.0f} tokens/s")
    print("first sequence:", *states[0][0][:, 0].tolist())
    passed = all(np.array_equal(*pair) for state in states for pair in zip(state, states[0], strict=True))
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
