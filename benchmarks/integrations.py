# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Measures models of PaddleFormers on a CPU, as they are and on these operators, and writes the tables of a page.

    for part in blocks losses example; do
      .venv-integrations/bin/python -m benchmarks.integrations $part --page docs/integrations_measured.md
    done

Each part has a result of its own in benchmarks/results/integrations. A line of ``blocks`` is one block, forward and
backward in float32: milliseconds (medians, minima and maxima of interleaved samples), the most MiB that a pass
allocates in addition, and the largest differences of the output, and of a gradient, each relative to the largest
magnitude. A line of ``losses`` is the training of a tiny model. ERNIE-4.5-MoE before is PaddleFormers' code on the
stand-ins of tests/integrations/kernels.py, since Paddle has no CPU kernels for it. ``example`` is the output of
examples/pretrain_ernie45_moe.py. With ``--no-run`` the page is rewritten from an existing result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import pages
from .spread import time_fields

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
ROUNDS = 7  # samples of each block, before and after
TRAINED_STEPS = 20
RESULTS = Path(__file__).resolve().parent / "results" / "integrations"
EXAMPLE = "examples/pretrain_ernie45_moe.py"


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
    """The peak allocation of a pass in MiB, its gradients included."""
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
        row |= time_fields([1e3 * each for each in samples], f"{variant}_", unit="ms")
    row["before_mib"] = peak_mib(block, x, weights)
    with pf.applied(block):
        row["after_mib"] = peak_mib(block, x, weights)
    return row


def train_both(case: str) -> dict[str, Any]:
    """One line of the losses of a tiny model, trained as it is and patched."""
    import paddle_moe_ops.integrations.paddleformers as pf
    from tests.integrations.models import build, train, type_of

    before = train(build(case), TRAINED_STEPS)
    with pf.applied(type_of(case)):
        after = train(build(case), TRAINED_STEPS)
    return {"model": case, "before": before, "after": after}


def run_example() -> Iterator[dict[str, Any]]:
    """The example's own output without patches, in one process and in two."""
    launch = "PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2"
    own = "step ", "1 process ", "2 processes ", "held-out ", "the same ", "PASSED", "PaddleFormers' own "
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in (f"python {EXAMPLE} --no-patch", f"python {EXAMPLE}", f"{launch} {EXAMPLE}"):
        with tempfile.TemporaryDirectory() as folder:
            environment["PADDLE_LOG_DIR"] = folder
            done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
        yield {"command": command, "lines": [line for line in done.stdout.splitlines() if line.startswith(own)]}


def machine() -> dict[str, Any]:
    """The machine and the date of a run."""
    import paddle_moe_ops.integrations.paddleformers as pf

    return {
        "machine": True,
        **pages.facts(),
        "paddleformers": pf.supported()["qwen3_moe"].versions[-1],
        "tokens": TOKENS,  # of blocks; so are the next
        "hidden": HIDDEN,
        "inner": INNER,
        "experts": EXPERTS,
        "topk": TOPK,
    }


def where(facts: dict[str, Any]) -> str:
    """The conditions, as a page says them."""
    return (
        f"{facts['cores']} cores ({facts['cpu']}), Paddle {facts['paddle']}, commit {facts['commit']}, {facts['date']}"
    )


def table_of_blocks(lines: list[dict[str, Any]]) -> str:
    """The table of blocks."""
    facts, *rows = lines
    text = [
        f"T {facts['tokens']}, H {facts['hidden']}, I {facts['inner']}, E {facts['experts']}, K {facts['topk']}, "
        f"float32, forward and backward, {where(facts)}. Times are medians of {rows[0]['samples']} samples "
        f"that take turns (in brackets the minimum{' and the maximum' if 'before_max_ms' in rows[0] else ''}).",
        "",
        "| block | before, ms | after, ms | before, MiB | after, MiB | output differs by | gradients differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[f'{each}_ms']:.0f} ({_bounds(row, each)})" for each in ("before", "after")]
        memory = [f"{row[f'{each}_mib']:.0f}" for each in ("before", "after")]
        differences = [f"{row[f'{each}_difference']:.0e}" for each in ("output", "gradient")]
        cells = [f"`{row['block']}`", *times, *memory, *differences]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _bounds(row: dict[str, Any], variant: str) -> str:
    """Minimum and maximum; older results have no maximum."""
    return " - ".join(f"{row[name]:.0f}" for each in ("min", "max") if (name := f"{variant}_{each}_ms") in row)


def table_of_losses(lines: list[dict[str, Any]]) -> str:
    """The table of losses."""
    facts, *rows = lines
    steps = len(rows[0]["before"])
    text = [
        f"Models of the tests, AdamW, one batch, float32, {where(facts)}.",
        "",
        f"| model | loss 1 | loss {steps}, before | loss {steps}, after | largest difference of a loss |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = np.array(row["before"]), np.array(row["after"])
        cells = [f"`{row['model']}`", f"{before[0]:.5f}", f"{before[-1]:.5f}", f"{after[-1]:.5f}"]
        text.append(f"| {' | '.join([*cells, f'{np.abs(before - after).max():.0e}'])} |")
    return "\n".join(text)


def text_of_example(lines: list[dict[str, Any]]) -> str:
    """The section with the example's output."""
    facts, *runs = lines
    blocks = ["\n".join(["```text", f"$ {run['command']}", *run["lines"], "```"]) for run in runs]
    return "\n\n".join([f"{where(facts)}:", *blocks])


def with_part(page: str, part: str, lines: list[dict[str, Any]]) -> str:
    """The page with the text of a part between its marks."""
    begin = f"<!-- benchmarks.integrations {part} -->"
    return pages.with_part(page, begin, PARTS[part][1](lines))


def load(part: str) -> list[dict[str, Any]]:
    """The lines of the result of a part."""
    return pages.load(result_of(part))


def result_of(part: str) -> Path:
    """The file of a part."""
    return RESULTS / f"cpu-2core-{part}.jsonl"


def run_blocks() -> Iterator[dict[str, Any]]:
    """A line for each block."""
    return (measure(case, ROUNDS) for case in cases() if case != "qwen3_moe-unnormalised")


def run_losses() -> Iterator[dict[str, Any]]:
    """A line for each model."""
    return map(train_both, cases())


def cases() -> list[str]:
    """The names of the models in tests/integrations/models.py that run on a CPU."""
    import pytest

    from tests.integrations import kernels, stubs

    stubs.install()
    kernels.install(pytest.MonkeyPatch())
    from tests.integrations.models import CASES

    return list(CASES)


PARTS: dict[str, tuple[Callable[[], Iterator[dict[str, Any]]], Callable[[list[dict[str, Any]]], str]]] = {
    "blocks": (run_blocks, table_of_blocks),
    "losses": (run_losses, table_of_losses),
    "example": (run_example, text_of_example),
}


def run(part: str) -> None:
    """Measure, and write the result."""
    lines = [machine()]
    for line in PARTS[part][0]():
        lines.append(line)
        print(json.dumps(line), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    result_of(part).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, help="what is measured")
    parser.add_argument("--page", type=Path, help="a page that shows it")
    parser.add_argument("--no-run", action="store_true", help="only write the page, from a result that is there")
    options = parser.parse_args()
    if not options.no_run:
        run(options.part)
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_part(page, options.part, load(options.part)), encoding="utf-8")


if __name__ == "__main__":
    main()
