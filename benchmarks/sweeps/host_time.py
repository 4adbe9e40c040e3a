#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Microseconds that a call takes on the host, in dygraph: public functions on the Triton and on the compiled backend.

    python3 benchmarks/sweeps/host_time.py --device gpu:0 --out benchmarks/results/host/h200.jsonl

`python -m paddle_moe_ops.bench.backend_report` reads what is written there.

The calls of a turn follow each other without waiting for the GPU, and there are few enough of them that none waits for
room in the stream; a time is the fastest of several turns. At 32 tokens a routing is one Triton launch, at 4096 four.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle

from paddle_moe_ops import moe_permute, moe_unpermute, permute, route, sort_chunks, unpermute, use_backend

TURNS = 20
BACKENDS = {"core": "compiled", "triton": "triton"}  # by what result files call them
TOPK, EXPERTS, HIDDEN = 8, 128, 512  # short rows: the GPU shall not be what is waited for


def calls(tokens: int) -> dict[str, Callable[[], object]]:
    """The functions to time, on tensors that are there already."""
    rng = np.random.default_rng(0)
    ids = paddle.to_tensor(rng.random((tokens, EXPERTS)).argsort(axis=1)[:, :TOPK].astype(np.int32))
    probs = paddle.to_tensor(rng.random((tokens, TOPK), np.float32))
    x = paddle.to_tensor(rng.random((tokens, HIDDEN), np.float32))
    order = paddle.to_tensor(rng.permutation(EXPERTS).astype(np.int32))
    size = tokens * TOPK
    plan = route(ids, probs, num_experts=EXPERTS, buffer_size=size, validate=False)
    rows, _ = permute(x, plan)
    moved = moe_permute(x, None, ids, probs, EXPERTS, None, 1, override_buffer_size=size)
    return {
        "route": lambda: route(ids, probs, num_experts=EXPERTS, buffer_size=size, validate=False),
        "permute": lambda: permute(x, plan),
        "permute_quantized": lambda: permute(x, plan, quantize="fp8_1x128"),
        "moe_permute": lambda: moe_permute(x, None, ids, probs, EXPERTS, None, 1, override_buffer_size=size),
        "unpermute": lambda: unpermute(rows, plan, plan.row_probs),
        "moe_unpermute": lambda: moe_unpermute(rows, moved[1], ids, moved[2], tokens, EXPERTS),
        "sort_chunks": lambda: sort_chunks(rows, plan.tokens_per_expert, order, validate=False),
    }


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def host_microseconds(call: Callable[[], object], count: int, device: str) -> float:
    """The fastest turn."""
    call()  # compiles
    turns = []
    for _ in range(TURNS):
        paddle.device.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        turns.append((time.perf_counter() - start) / count)
    return min(turns) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="gpu:0")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 4096])
    parser.add_argument("--calls", type=int, default=300, help="calls of a turn")
    parser.add_argument("--impl", nargs="+", default=[*BACKENDS], choices=BACKENDS)
    parser.add_argument("--out", type=Path, help="result file; it is replaced")
    arguments = parser.parse_args()
    paddle.set_device(arguments.device)
    lines: list[dict[str, object]] = []
    print("| us on the host | tokens | " + " | ".join(arguments.impl) + " |")
    print("|---" * (2 + len(arguments.impl)) + "|")
    for tokens in arguments.tokens:
        for name, call in calls(tokens).items():
            times = []
            for impl in arguments.impl:
                with use_backend(BACKENDS[impl]):
                    times.append(host_microseconds(call, arguments.calls, arguments.device))
                lines.append({"op": name, "impl": impl, "tokens": tokens, "us": times[-1]})
            print(f"| {name} | {tokens} | " + " | ".join(f"{each:.1f}" for each in times) + " |", flush=True)
    if arguments.out:
        machine = {"machine": True, "gpu": gpu_name(), "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in (machine, *lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
