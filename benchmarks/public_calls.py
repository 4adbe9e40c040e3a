#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Public calls in dygraph under Paddle: whole calls of the sizes of models, and the host's part of small ones.

    python3 -m benchmarks.public_calls --device gpu:0 --out benchmarks/results/h200-public-calls.jsonl --commit COMMIT

A line per operation and model has the microseconds of a call, with all that it allocates: calls follow each other, and
their total time is divided by their number. A line per operation with "host" has the microseconds until a call returns,
without a gradient, of one that keeps what a gradient needs, and of the backward pass. Each has the median, the least
and the most of all samples. Inputs are small there, so that the device is never far behind.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from benchmarks.spread import time_fields
from paddle_moe_ops import moe_mlp, moe_permute, moe_unpermute, permute, route, unpermute
from paddle_moe_ops.bench import MODELS
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.nn import MoELayer

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 256, 256, 128, 16, 4
_CALLS, _WARM = 200, 20
_BATCH = 10  # calls between two waits for the device
MODEL_TOKENS = {"ernie-300b": 16384, "ernie-21b": 16384, "dsv3": 4096}
_ROUNDS, _CALLS_OF_A_ROUND = 7, 20


class Operation(NamedTuple):
    name: str
    call: Callable[..., Tensor]
    inputs: list[Tensor]


def operations() -> list[Operation]:
    paddle.seed(0)
    dtype = "float32" if paddle.get_device() == "cpu" else "bfloat16"  # Paddle's matmul on a CPU takes no narrow types
    x = paddle.randn([TOKENS, HIDDEN]).astype(dtype)
    ids = paddle.topk(paddle.rand([TOKENS, EXPERTS]), TOPK)[1]
    probs = F.softmax(paddle.randn([TOKENS, TOPK]))
    gate_up = paddle.randn([EXPERTS, HIDDEN, 2 * INNER]).astype(dtype)
    down = paddle.randn([EXPERTS, INNER, HIDDEN]).astype(dtype)
    plan = route(ids, num_experts=EXPERTS)
    rows = permute(x, plan)[0]
    square = paddle.randn([HIDDEN, HIDDEN]).astype(dtype)
    return [
        Operation("paddle.matmul", paddle.matmul, [x, square]),
        Operation("permute", lambda x: permute(x, plan)[0], [x]),
        Operation("unpermute", lambda rows, probs: unpermute(rows, plan, probs), [rows, probs]),
        Operation(
            "grouped_gemm", lambda x, w: grouped_gemm(x, w, plan=plan, permute_x=True, transpose=False), [x, gate_up]
        ),
        Operation("moe_mlp", lambda x, probs, *w: moe_mlp(x, plan, probs, *w), [x, probs, gate_up, down]),
        Operation(
            "moe_mlp, float8",
            lambda x, probs, *w: moe_mlp(x, plan, probs, *w, compute="fp8_1x128"),
            [x, probs, gate_up, down],
        ),
        Operation("MoELayer", MoELayer(HIDDEN, INNER, EXPERTS, TOPK).to(dtype=dtype), [x]),
    ]


def host_us(prepare: Callable[[], Any], call: Callable[[Any], Any]) -> dict[str, float]:
    """Microseconds of a call, whose argument is built before and whose result is freed after it."""
    samples = []
    for index in range(_WARM + _CALLS):
        state = prepare()
        if index % _BATCH == 0:
            _wait()
        start = time.perf_counter()
        made = call(state)
        samples.append(1e6 * (time.perf_counter() - start))
        del made
    kept = samples[_WARM:]
    return {"median": round(statistics.median(kept), 1), "least": round(min(kept), 1), "most": round(max(kept), 1)}


def model_operations(model: str, tokens: int) -> list[Operation]:
    """Moving the rows of a layer, in bfloat16, with buffers of their size, so that nothing waits for the host."""
    paddle.seed(0)
    _, hidden, experts, topk, _ = MODELS[model]
    x = paddle.randn([tokens, hidden]).astype("bfloat16")
    ids = paddle.topk(paddle.rand([tokens, experts]), topk)[1].astype("int32")
    probs = F.softmax(paddle.randn([tokens, topk]))
    rows = tokens * topk

    def move(x: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        return moe_permute(x, None, ids, probs, experts, [], 1, override_buffer_size=rows)

    moved, rowmap, row_probs, _ = move(x, probs)
    plan = route(ids, probs, num_experts=experts, buffer_size=rows)

    def there_and_back(x: Tensor, probs: Tensor) -> Tensor:
        return unpermute(permute(x, plan)[0], plan, probs)

    return [
        Operation("moe_permute", lambda x, probs: move(x, probs)[0], [x, probs]),
        Operation(
            "moe_unpermute",
            lambda moved, probs: moe_unpermute(moved, rowmap, ids, probs, tokens, experts, using_weighted_combine=True)[
                0
            ],
            [moved, row_probs],
        ),
        Operation("permute", lambda x: permute(x, plan)[0], [x]),
        Operation("unpermute", lambda moved, probs: unpermute(moved, plan, probs), [moved, probs]),
        Operation("permute, unpermute and gradients", _with_gradients(there_and_back, x), [x, probs]),
    ]


def _with_gradients(call: Callable[..., Tensor], d_out: Tensor) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> list[Tensor]:
        leaves = [each.detach() for each in inputs]
        for leaf in leaves:
            leaf.stop_gradient = False
        return paddle.grad([call(*leaves)], leaves, [d_out])

    return run


def whole_us(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of one call among many, as fields of a line."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        _wait()
        start = time.perf_counter()
        for _ in range(_CALLS_OF_A_ROUND):
            call()
        _wait()
        rounds.append(1e6 * (time.perf_counter() - start) / _CALLS_OF_A_ROUND)
    return time_fields(rounds[1:], digits=1)


def _wait() -> None:
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()


def model_lines(model: str, tokens: int) -> Iterator[dict[str, Any]]:
    for name, call, inputs in model_operations(model, tokens):
        times = whole_us(lambda call=call, inputs=inputs: call(*inputs))
        yield {"operation": name, "shape": model, "tokens": tokens, **times}


def line(operation: Operation) -> dict[str, Any]:
    name, call, inputs = operation
    found: dict[str, Any] = {"operation": name, "host": True}
    with paddle.no_grad():
        found["without_gradient"] = host_us(lambda: None, lambda _: call(*inputs))
    leaves = [each.detach() for each in inputs]
    for leaf in leaves:
        leaf.stop_gradient = False
    d_out = paddle.ones_like(call(*inputs))
    found["forward"] = host_us(lambda: None, lambda _: call(*leaves))
    found["backward"] = host_us(lambda: call(*leaves), lambda out: paddle.grad([out], leaves, [d_out]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=paddle.get_device(), help="as paddle.set_device takes it")
    parser.add_argument("--tokens", type=int, help="of every model, instead of its own")
    parser.add_argument("--gpu", default="", help="what the machine line calls the device")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    paddle.set_device(arguments.device)
    tokens_of = {model: arguments.tokens or tokens for model, tokens in MODEL_TOKENS.items()}
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"gpu": arguments.gpu, "commit": arguments.commit, "date": date, "paddle": paddle.__version__}
    facts |= {"cpu": platform.processor() or platform.machine(), "device": arguments.device}
    with arguments.out.open("w", encoding="utf-8") as file:
        whole = itertools.chain.from_iterable(itertools.starmap(model_lines, tokens_of.items()))
        for each in itertools.chain([{"machine": True, **facts}], whole, map(line, operations())):
            print(json.dumps(each), flush=True)
            file.write(json.dumps(each) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
