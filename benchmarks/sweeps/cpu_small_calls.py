#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Breakdown of the time of a small `permute` on the CPU, compared with `paddle.gather` of the same rows.

    python3 -m benchmarks.sweeps.cpu_small_calls --out small-calls.jsonl

* "output": whole calls. Each line says how many pages the system made in a call: an output of a few MiB is new to the
  process at every call unless the heap has a hole of its size.
* "dispatch": calls that move next to nothing, one after the other and after 4 MiB were written, as a call's own output
  does.
* "verbs": the public functions on one token of 8 columns, without a gradient and with one.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from benchmarks.spread import time_fields
from paddle_moe_ops import _report, moe_permute, moe_unpermute, permute, route
from paddle_moe_ops.backends import compiled

TURNS, CALLS = 30, 8
TOPK, EXPERTS, HIDDEN = 8, 128, 7168
NO_SCALE = (False, -1, paddle.float32.value)
FILL_ALL = 3


def calls(tokens: int, hidden: int) -> dict[str, Callable[[], object]]:
    """The public function, its operator alone, both directly and through Paddle, and plain Paddle, on bfloat16 rows."""
    rng = np.random.default_rng(0)
    ids = paddle.to_tensor(rng.random((tokens, EXPERTS)).argsort(axis=1)[:, :TOPK].astype(np.int32))
    x = paddle.to_tensor(rng.random((tokens, hidden), np.float32)).astype("bfloat16")
    plan = route(ids, num_experts=EXPERTS)
    maps = plan.slot_to_row, plan.token_rows, plan.row_to_token
    permute(x, plan)  # loads the library
    run, attributes = paddle._C_ops._run_custom_op, (FILL_ALL, *NO_SCALE, hidden, x.dtype.value)
    return {
        "public function": lambda: permute(x, plan),
        "operator": lambda: compiled._direct["permute"](x, None, *maps, *attributes),
        "operator through Paddle": lambda: run("pmo_permute", x, None, *maps, *attributes),
        "paddle.gather": lambda: paddle.gather(x, plan.row_to_token),
    }


def verbs(tokens: int, hidden: int) -> dict[str, Callable[[], object]]:
    """The verbs as users call them, without a gradient and with one."""
    rng = np.random.default_rng(0)
    ids = paddle.to_tensor(rng.random((tokens, EXPERTS)).argsort(axis=1)[:, :TOPK].astype(np.int32))
    functions: dict[str, Callable[[], object]] = {}
    for suffix, wanted in (("", False), (", gradient", True)):
        x = paddle.to_tensor(rng.random((tokens, hidden), np.float32)).astype("bfloat16").detach()
        probs = paddle.to_tensor(rng.random(ids.shape, np.float32))
        plan = route(ids, probs, num_experts=EXPERTS)
        rows, rowmap, row_probs, _ = (each.detach() for each in moe_permute(x, None, ids, probs, EXPERTS, None, 1))
        for leaf in (x, probs, rows, row_probs):
            leaf.stop_gradient = not wanted
        functions |= {
            f"permute{suffix}": functools.partial(permute, x, plan),
            f"moe_permute{suffix}": functools.partial(moe_permute, x, None, ids, probs, EXPERTS, None, 1),
            f"moe_unpermute{suffix}": functools.partial(moe_unpermute, rows, rowmap, ids, row_probs, tokens, EXPERTS),
        }
    return functions


def measure(functions: dict[str, Callable[[], object]], before: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """Microseconds and new pages of each call, interleaved; ``before`` is not timed."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    pages = dict.fromkeys(functions, 0)
    for _ in range(TURNS):
        for name, function in functions.items():
            function()
            for _ in range(CALLS):
                before()
                had = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                start = time.perf_counter()
                result = function()
                times[name].append((time.perf_counter() - start) * 1e6)
                pages[name] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - had
                del result
    made = {}
    for name, samples in times.items():
        p5, p95 = np.quantile(samples, (0.05, 0.95)).round(1).tolist()
        times = time_fields(samples, digits=1)
        made[name] = {**times, "p5": p5, "p95": p95, "new_pages": round(pages[name] / len(samples))}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--out", type=Path, required=True, help="result file; it is replaced")
    arguments = parser.parse_args()
    paddle.set_device("cpu")
    evicting = np.ones(1 << 20, np.float32)
    records: list[dict[str, Any]] = [{"machine": True, "cpu": _report.cpu_model(), "paddle": paddle.__version__}]
    for tokens in arguments.tokens:
        for name, result in measure(calls(tokens, HIDDEN), lambda: None).items():
            records.append({"what": "output", "tokens": tokens, "call": name, **result})
    for caches, before in (("warm", lambda: None), ("written over", lambda: evicting.fill(1))):
        for name, result in measure(calls(1, 8), before).items():
            records.append({"what": "dispatch", "caches": caches, "call": name, **result})
    for name, result in measure(verbs(1, 8), lambda: None).items():
        records.append({"what": "verbs", "call": name, **result})
    for record in records:
        print(record)
    arguments.out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
