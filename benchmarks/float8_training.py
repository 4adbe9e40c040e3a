# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's language model with experts on float8 operands and without, and writes the table of a page.

    python -m benchmarks.float8_training --out benchmarks/results/float8-training.jsonl --page docs/float8_layers.md

Each seed draws weights and the order of the text once for both. The loss that counts is on text that was held out. With
``--no-run`` the page is written anew from a result that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from .pages import facts, load, with_part

BEGIN = "<!-- benchmarks.float8_training -->"
FORMS = {"float32": None, "float8": "fp8_1x128"}
SIZES = {"hidden": 128, "layers": 4, "experts": 16, "topk": 2, "context": 128}


def held_out_loss(compute: str | None, seed: int, steps: int) -> float:
    """The loss after training."""
    import numpy as np
    import paddle

    from examples.demo import data, training
    from paddle_moe_ops.bench.decoder import Decoder, ModelConfig

    training.use_threads(None)
    paddle.seed(seed)
    library = data.load_standard_library()
    model = Decoder(ModelConfig(**SIZES, compute=compute))
    for _ in training.train(model, library.train, steps, np.random.default_rng(seed)):
        pass
    return training.evaluate(model, library.held_out).loss


def table(lines: list[dict[str, Any]]) -> str:
    """The part of a page that describes the measurement."""
    first, *rows = lines
    found = {(row["form"], row["seed"]): row["loss"] for row in rows}
    seeds = sorted({seed for _, seed in found})
    text = [
        f"{first['steps']} steps of the demo's model, {first['cores']} cores ({first['cpu']}), Paddle "
        f"{first['paddle']}, commit {first['commit']}, {first['date']}. Loss on held-out text, nats per byte.",
        "",
        f"| experts compute in | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |",
        f"|{'---|' * (2 + len(seeds))}",
    ]
    for form in FORMS:
        losses = [found[form, seed] for seed in seeds]
        text.append(f"| {form} | {' | '.join(f'{each:.4f}' for each in losses)} | {statistics.mean(losses):.4f} |")
    differences = [found["float8", seed] - found["float32", seed] for seed in seeds]
    spread = statistics.stdev(found["float32", seed] for seed in seeds)
    cells = [*(f"{each:+.4f}" for each in differences), f"{statistics.mean(differences):+.4f}"]
    text.append(f"| difference | {' | '.join(cells)} |")
    text += ["", f"The standard deviation between the seeds in float32 is {spread:.4f}."]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON lines")
    parser.add_argument("--page", type=Path, help="a page whose table is written")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=4, help="how many")
    parser.add_argument("--no-run", action="store_true", help="only write the page, from a result that is there")
    options = parser.parse_args()
    if not options.no_run:
        lines: list[dict[str, Any]] = [{**facts(), **SIZES, "steps": options.steps}]
        for seed in range(options.seeds):
            for form, compute in FORMS.items():
                lines.append({"form": form, "seed": seed, "loss": held_out_loss(compute, seed, options.steps)})
                print(lines[-1], flush=True)
        options.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_part(page, BEGIN, table(load(options.out))), encoding="utf-8")


if __name__ == "__main__":
    main()
