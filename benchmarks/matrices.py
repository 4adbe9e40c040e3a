# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times forms in which experts' matrices can be given on a CPU, and writes the table of a page.

    python -m benchmarks.matrices --out benchmarks/results/integrations/cpu-2core-matrices.jsonl --page docs/training.md

A layer of SwiGLU experts, forward and backward in float32, minima of interleaved samples. Each form runs twice: with
the C library's default allocation, and with large pages (``GLIBC_TUNABLES``), in a process of its own. The loop over
experts stands for a model without this package that has separate matrices. With ``--no-run`` the page is rewritten from
an existing result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .pages import facts, load, with_part

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 512, 512, 256, 64, 8
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
BEGIN = "<!-- benchmarks.matrices -->"
FORMS = {
    "loop": "a loop over experts, `paddle.matmul` and `swiglu`",
    "list": "`moe_mlp`, lists of matrices",
    "stacked": "`moe_mlp`, stacked matrices",
    "main_grad": "`moe_mlp`, stacked matrices, `accumulate=True`",
}


def forms() -> tuple[dict[str, Callable[[], Any]], list[Any], Any]:
    """The forward call of each form, the tensors with gradients, and the gradient of the result."""
    import paddle

    from paddle_moe_ops import moe_mlp, permute, route, unpermute
    from paddle_moe_ops._activations import swiglu

    rng = np.random.default_rng(0)

    def leaf(*shape: int) -> Any:
        return paddle.to_tensor(0.02 * rng.standard_normal(shape), "float32", stop_gradient=False)

    x, probs = leaf(TOKENS, HIDDEN), leaf(TOKENS, TOPK)
    ids = rng.permuted(np.tile(np.arange(EXPERTS), (TOKENS, 1)), axis=1)[:, :TOPK]
    plan = route(paddle.to_tensor(ids), num_experts=EXPERTS)
    stacked = leaf(EXPERTS, HIDDEN, 2 * INNER), leaf(EXPERTS, INNER, HIDDEN)
    added = tuple(each.clone().detach() for each in stacked)
    for each in added:
        each.stop_gradient, each.main_grad = False, paddle.zeros_like(each)
    listed = tuple([matrix.clone().detach() for matrix in each] for each in stacked)
    matrices = [matrix for each in listed for matrix in each]
    for matrix in matrices:
        matrix.stop_gradient = False

    def loop() -> Any:
        rows, _ = permute(x, plan)
        parts = paddle.split(rows, plan.tokens_per_expert.tolist())
        made = [swiglu(part @ up) @ down for part, up, down in zip(parts, *listed, strict=True)]
        return unpermute(paddle.concat(made), plan, probs)

    calls = {
        "loop": loop,
        "list": lambda: moe_mlp(x, plan, probs, *listed),
        "stacked": lambda: moe_mlp(x, plan, probs, *stacked),
        "main_grad": lambda: moe_mlp(x, plan, probs, *added, accumulate=True),
    }
    return calls, [x, probs, *stacked, *matrices], leaf(TOKENS, HIDDEN)


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each form, forward and backward: minimum, median and maximum."""
    import paddle

    calls, leaves, d_out = forms()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for each in leaves:
                each.clear_gradient(set_to_zero=False)
            start = time.perf_counter()
            out = call()
            middle = time.perf_counter()
            paddle.autograd.backward([out], [d_out])
            samples[name].append((middle - start, time.perf_counter() - middle))
    return {name: _passes(found) for name, found in samples.items()}


def _passes(samples: list[tuple[float, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for which, seconds in zip(("forward", "backward"), zip(*samples, strict=True), strict=True):
        times = [1e3 * each for each in seconds]
        found |= {f"{which}_ms": min(times), f"{which}_median_ms": statistics.median(times)}
        found[f"{which}_max_ms"] = max(times)
    return found


def run(out: Path, rounds: int) -> None:
    """Measure in two processes, and write the result."""
    lines: list[dict[str, Any]] = [
        {
            **facts(),
            "rounds": rounds,
            "tokens": TOKENS,
            "hidden": HIDDEN,
            "inner": INNER,
            "experts": EXPERTS,
            "topk": TOPK,
        }
    ]
    for pages, environment in (("default", {}), ("large", LARGE_PAGES)):
        command = [sys.executable, "-m", "benchmarks.matrices", "--samples", str(rounds)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        lines += [{"form": name, "pages": pages, **times} for name, times in found.items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def table(lines: list[dict[str, Any]]) -> str:
    """The part of a page that describes the measurement."""
    facts, *rows = lines
    text = [
        f"T {facts['tokens']}, H {facts['hidden']}, I {facts['inner']}, E {facts['experts']}, K {facts['topk']}, "
        f"float32, {facts['cores']} cores ({facts['cpu']}), Paddle {facts['paddle']}, commit {facts['commit']}, "
        f"{facts['date']}. Forward + backward in milliseconds, minima of {facts['rounds']} samples that take turns"
        f"{' (median, maximum)' if 'forward_max_ms' in rows[0] else ''}.",
        "",
        "| form | as it is | with `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` |",
        "|---|---|---|",
    ]
    for name, words in FORMS.items():
        found = {row["pages"]: row for row in rows if row["form"] == name}
        cells = [
            " + ".join(_milliseconds(found[pages], which) for which in ("forward", "backward"))
            for pages in ("default", "large")
        ]
        text.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(text)


def _milliseconds(row: dict[str, Any], which: str) -> str:
    """The minimum; in results that have them, the median and the maximum too."""
    others = [f"{row[name]:.0f}" for each in ("median", "max") if (name := f"{which}_{each}_ms") in row]
    return f"{row[f'{which}_ms']:.0f}" + (f" ({', '.join(others)})" if others else "")


def with_table(page: str, lines: list[dict[str, Any]]) -> str:
    """The page with the table between its marks."""
    return with_part(page, BEGIN, table(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the result, JSON lines")
    parser.add_argument("--page", type=Path, help="a page whose table is written")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each form")
    parser.add_argument("--samples", type=int, help="only measure in this process, and print what was found")
    parser.add_argument("--no-run", action="store_true", help="only write the page, from a result that is there")
    options = parser.parse_args()
    if options.samples is not None:
        print(json.dumps(measure(options.samples)))
        return
    if options.out is None:
        parser.error("--out is required")
    if not options.no_run:
        run(options.out, options.rounds)
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_table(page, load(options.out)), encoding="utf-8")


if __name__ == "__main__":
    main()
