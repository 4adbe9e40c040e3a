# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times blocks of PaddleFormers on a CPU, as they are and on these operators, and writes the table of a page.

    .venv-integrations/bin/python -m benchmarks.integrations --out benchmarks/results/integrations/cpu-2core.jsonl \
        --page docs/integrations.md

A line of the result is one block, forward and backward in float32: milliseconds (medians and minima of samples that
take turns), the most MiB that a pass allocates beyond what was there, and the largest differences of the output, and
of a gradient, each relative to the largest magnitude. ERNIE-4.5-MoE before is PaddleFormers' code on the stand-ins of
tests/integrations/kernels.py, since Paddle has no CPU kernels for it. With ``--no-run`` the page is written anew
from a result that is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 512, 512, 256, 64, 8
SIZES = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "intermediate_size": INNER,  # of the experts of gpt_oss; of others, that of layers that are not measured
    "num_hidden_layers": 2,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "moe_k": TOPK,
}
BEGIN, END = "<!-- benchmarks.integrations -->", "<!-- end -->"


def step(block: Any, x: Any, weights: Any) -> Any:
    """One forward and backward pass; the output, while the gradients are at the parameters."""
    clear(block, x)
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    (out * weights).sum().backward()
    return out


def clear(block: Any, x: Any) -> None:
    """Give up the gradients of the last pass."""
    x.clear_gradient(set_to_zero=False)
    block.clear_gradients(set_to_zero=False)


def results(block: Any, x: Any, weights: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The output and the gradients of a pass."""
    out = step(block, x, weights).numpy()
    parameters = {"tokens": x, **dict(block.named_parameters())}
    return {"output": out}, {name: each.grad.numpy() for name, each in parameters.items() if each.grad is not None}


def peak_mib(block: Any, x: Any, weights: Any) -> float:
    """What a pass allocates at most, its gradients included."""
    import paddle

    clear(block, x)
    core = paddle.base.core
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    before = core.host_memory_stat_current_value("Allocated", 0)
    step(block, x, weights)
    return (core.host_memory_stat_peak_value("Allocated", 0) - before) / 2**20


def difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference of two sets of arrays, relative to the largest magnitude of each."""
    return max(float(np.abs(found[name] - each).max() / np.abs(each).max()) for name, each in expected.items())


def measure(case: str, rounds: int) -> dict[str, Any]:
    """One line of the result."""
    import paddle

    import paddle_moe_ops.integrations.paddleformers as pf
    from tests.integrations.models import build

    rng = np.random.default_rng(0)
    block = build(case, **SIZES).model.layers[1].mlp
    x = paddle.to_tensor(rng.standard_normal((1, TOKENS, HIDDEN)), "float32", stop_gradient=False)
    weights = paddle.to_tensor(rng.standard_normal((1, TOKENS, HIDDEN)), "float32")
    expected = results(block, x, weights)
    with pf.applied(block):
        found = results(block, x, weights)
    row: dict[str, Any] = {
        "block": case,
        "class": type(block).__name__,
        "output_difference": difference(found[0], expected[0]),
        "gradient_difference": difference(found[1], expected[1]),
        "samples": rounds,
    }
    del found, expected
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(rounds):
        for variant, samples in seconds.items():
            if variant == "after":
                pf.apply(block)
            start = time.perf_counter()
            step(block, x, weights)
            samples.append(time.perf_counter() - start)
            pf.remove(block)
    for variant, samples in seconds.items():
        row |= {f"{variant}_ms": 1e3 * statistics.median(samples), f"{variant}_min_ms": 1e3 * min(samples)}
    row["before_mib"] = peak_mib(block, x, weights)
    with pf.applied(block):
        row["after_mib"] = peak_mib(block, x, weights)
    return row


def machine() -> dict[str, Any]:
    """Where and when it ran."""
    import paddle

    import paddle_moe_ops.integrations.paddleformers as pf

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return {
        "machine": True,
        "cpu": names[0].partition(": ")[2] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "paddle": paddle.__version__,
        "paddleformers": pf.supported()["qwen3_moe"].versions[-1],
        "commit": commit.strip(),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "inner": INNER,
        "experts": EXPERTS,
        "topk": TOPK,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """The part of a page that says what was measured."""
    facts, *rows = lines
    text = [
        f"T {facts['tokens']}, H {facts['hidden']}, I {facts['inner']}, E {facts['experts']}, K {facts['topk']}, "
        f"float32, forward and backward, {facts['cores']} cores ({facts['cpu']}), Paddle {facts['paddle']}, commit "
        f"{facts['commit']}, {facts['date']}. Times are medians of {rows[0]['samples']} samples that take turns "
        "(in brackets the minimum).",
        "",
        "| block | before, ms | after, ms | before, MiB | after, MiB | output differs by | gradients differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[f'{each}_ms']:.0f} ({row[f'{each}_min_ms']:.0f})" for each in ("before", "after")]
        memory = [f"{row[f'{each}_mib']:.0f}" for each in ("before", "after")]
        differences = [f"{row[f'{each}_difference']:.0e}" for each in ("output", "gradient")]
        cells = [f"`{row['block']}`", *times, *memory, *differences]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def with_table(page: str, lines: list[dict[str, Any]]) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(lines)}\n{END}{rest.partition(END)[2]}"


def load(path: Path) -> list[dict[str, Any]]:
    """The lines of a result."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(out: Path, cases: list[str] | None, rounds: int) -> None:
    """Measure, and write the result."""
    import pytest

    from tests.integrations import kernels, stubs

    stubs.install()
    kernels.install(pytest.MonkeyPatch())
    from tests.integrations.models import CASES

    lines = [machine()]
    for case in cases or [case for case in CASES if case != "qwen3_moe-unnormalised"]:
        lines.append(measure(case, rounds))
        print(json.dumps(lines[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON lines")
    parser.add_argument("--page", type=Path, help="a page whose table is written")
    parser.add_argument("--cases", nargs="+", help="blocks by their names in tests/integrations/models.py")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each block, before and after")
    parser.add_argument("--no-run", action="store_true", help="only write the page, from a result that is there")
    options = parser.parse_args()
    if not options.no_run:
        run(options.out, options.cases, options.rounds)
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_table(page, load(options.out)), encoding="utf-8")


if __name__ == "__main__":
    main()
