#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""How long the host takes for a call in dygraph, until it returns: what a GPU waits for where its own work is short.

    python3 -m benchmarks.host_time --device gpu:0 --out benchmarks/results/h200-host.jsonl --commit COMMIT

A line per operation: microseconds of a call without a gradient, of one that keeps what a gradient needs, and of the
backward pass; medians, and the least of all samples. Inputs are small, so that the device is never far behind.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_moe_ops import moe_mlp, permute, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 256, 256, 128, 16, 4
_CALLS, _WARM = 200, 20
_BATCH = 10  # calls between two waits for the device


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
    ]


def host_us(prepare: Callable[[], Any], call: Callable[[Any], Any]) -> dict[str, float]:
    """Of a call, whose argument is made before and whose result is let go after it."""
    samples = []
    for index in range(_WARM + _CALLS):
        state = prepare()
        if index % _BATCH == 0 and paddle.get_device() != "cpu":
            paddle.device.synchronize()
        start = time.perf_counter()
        made = call(state)
        samples.append(1e6 * (time.perf_counter() - start))
        del made
    kept = samples[_WARM:]
    return {"median": round(statistics.median(kept), 1), "least": round(min(kept), 1)}


def line(operation: Operation) -> dict[str, Any]:
    name, call, inputs = operation
    found: dict[str, Any] = {"operation": name}
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
    parser.add_argument("--gpu", default="", help="what the machine line calls the device")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    paddle.set_device(arguments.device)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"gpu": arguments.gpu, "commit": arguments.commit, "date": date, "paddle": paddle.__version__}
    facts |= {"cpu": platform.processor() or platform.machine(), "device": arguments.device}
    with arguments.out.open("w", encoding="utf-8") as file:
        for each in [{"machine": True, **facts}, *map(line, operations())]:
            print(json.dumps(each), flush=True)
            file.write(json.dumps(each) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
