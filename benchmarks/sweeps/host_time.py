#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Microseconds that a call takes on the host, in dygraph: public functions on the Triton and on the compiled backend.

    python3 benchmarks/sweeps/host_time.py --device gpu:0 [--tokens 32 4096] [--calls 300]

The calls of a turn follow each other without waiting for the GPU, and there are few enough of them that none waits for
room in the stream; a time is the fastest of several turns. At 32 tokens a routing is one Triton launch, at 4096 four.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import paddle

from paddle_moe_ops import permute, route, unpermute, use_backend

TURNS = 20
TOPK, EXPERTS, HIDDEN = 8, 128, 512  # short rows: the GPU shall not be what is waited for


def calls(tokens: int) -> dict[str, Callable[[], object]]:
    """The functions to time, on tensors that are there already."""
    ids = paddle.argsort(paddle.rand([tokens, EXPERTS]), axis=1)[:, :TOPK].astype("int32").contiguous()
    probs, x = paddle.rand([tokens, TOPK]), paddle.rand([tokens, HIDDEN])
    size = tokens * TOPK
    plan = route(ids, probs, num_experts=EXPERTS, buffer_size=size, validate=False)
    rows, _ = permute(x, plan)
    return {
        "route": lambda: route(ids, probs, num_experts=EXPERTS, buffer_size=size, validate=False),
        "permute": lambda: permute(x, plan),
        "unpermute": lambda: unpermute(rows, plan),
        "unpermute, weighted": lambda: unpermute(rows, plan, plan.row_probs),
    }


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
    parser.add_argument("--backends", nargs="+", default=["triton", "compiled"])
    arguments = parser.parse_args()
    paddle.set_device(arguments.device)
    print("| us on the host | tokens | " + " | ".join(arguments.backends) + " |")
    print("|---" * (2 + len(arguments.backends)) + "|")
    for tokens in arguments.tokens:
        for name, call in calls(tokens).items():
            cells = []
            for backend in arguments.backends:
                with use_backend(backend):
                    cells.append(f"{host_microseconds(call, arguments.calls, arguments.device):.1f}")
            print(f"| {name} | {tokens} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
