# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""One run of the demo: its steps in their order, and its output."""

from __future__ import annotations

import argparse
import math
import platform
import time
from typing import NamedTuple

import numpy as np
import paddle
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from paddle_moe_ops.bench.decoder import Decoder, ModelConfig

from . import checks, plot, purpose, training
from .data import StandardLibrary, load_standard_library, random_windows

CONTEXT = 128
HELD_OUT_MARKS = 6
PROMPT = "def "
SAMPLE_BYTES = 300
PICTURE = "demo.png"


class History(NamedTuple):
    """Loss of each step, pairs of a step and the held-out loss after it, and the last load of the experts."""

    losses: list[float]
    marks: list[tuple[int, float]]
    load: np.ndarray


def run(options: argparse.Namespace) -> int:
    """Trains, samples, checks and draws; returns the exit status."""
    start = time.perf_counter()
    # Lines stay whole where the output goes to a file.
    console = Console(highlight=False, soft_wrap=True)
    training.use_threads(options.threads)
    worth_it = _show_purpose(console, options.tokens)
    paddle.seed(options.seed)
    rng = np.random.default_rng(options.seed)
    library = load_standard_library()
    model = Decoder(ModelConfig(options.hidden, options.layers, options.experts, options.topk, CONTEXT))
    title = _title(model)
    console.print(f"\n[bold]{title}[/]")
    console.print(
        f"text: standard library of Python {platform.python_version()}, "
        f"{library.train_files} files ({len(library.train) / 1e6:.1f} MB) to learn from, "
        f"{library.held_out_files} files ({len(library.held_out) / 1e6:.1f} MB) held out"
    )

    history = _train(console, model, library, options.steps, rng)
    console.print("\n[bold]sample[/]")
    console.print(Text(training.sample(model, PROMPT, SAMPLE_BYTES, rng)))
    console.print("\n[bold]checks[/]")
    tokens = random_windows(library.train, training.BATCH, CONTEXT + 1, rng)
    passed = [
        worth_it,
        _report_held_out(console, history.marks[0][1], history.marks[-1][1]),
        _report_dense(console, checks.dense_check(model, paddle.to_tensor(tokens))),
    ]
    picture = options.out / PICTURE
    plot.draw(picture, history.losses, history.marks, history.load, title)
    _report(console, "picture", escape(str(picture)))
    _report(console, "time", f"{time.perf_counter() - start:.0f} s")
    return 0 if all(passed) else 1


def _show_purpose(console: Console, tokens: int) -> bool:
    """Paddle's own pair beside this package's, and the rows of a real model's layer beside plain operators."""
    console.print("[bold]what the package is for[/]")
    _report(console, "Paddle's pair", escape(f"{purpose.PADDLES} on {paddle.get_device()}: {purpose.paddles_pair()}"))
    ours = purpose.our_pair()
    gradients = ours == "runs; gradients: tokens and router"
    _report(console, "our pair", f"{escape(f'paddle_moe_ops.moe_permute: {ours}')}: {_verdict(gradients)}")
    return _report_speed(console, checks.speed_of_moving(purpose.REAL, tokens), tokens) and gradients


def _train(console: Console, model: Decoder, library: StandardLibrary, steps: int, rng: np.random.Generator) -> History:
    """Train under a progress bar and measure the model before, on the way and after."""
    held_out = training.evaluate(model, library.held_out)
    losses: list[float] = []
    marks = [(0, held_out.loss)]
    console.print(f"step {0:>5}  held out {_loss(held_out.loss)}")
    every = math.ceil(steps / HELD_OUT_MARKS)
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("", total=steps, loss=held_out.loss, speed=0.0)
        for state in training.train(model, library.train, steps, rng):
            losses.append(state.loss)
            bar.update(task, advance=1, loss=state.loss, speed=state.tokens_per_second)
            if state.step % every == 0 or state.step == steps:
                held_out = training.evaluate(model, library.held_out)
                marks.append((state.step, held_out.loss))
                console.print(
                    f"step {state.step:>5}  held out {_loss(held_out.loss)}  "
                    f"train {np.mean(losses[-every:]):.3f}  {state.tokens_per_second:,.0f} tokens/s"
                )
    return History(losses, marks, held_out.load)


def _report_held_out(console: Console, before: float, after: float) -> bool:
    passed = after < before < math.inf
    _report(console, "held-out loss", f"before {_loss(before)}", f"after  {_loss(after)}: {_verdict(passed)}")
    return passed


def _report_dense(console: Console, check: checks.DenseCheck) -> bool:
    _report(
        console,
        "dense check",
        "one training step, against every expert on every token with the same weights",
        f"loss differs by {check.loss:.1e}, tolerance {checks.DENSE_TOLERANCE:.0e}",
        f"gradients of all {check.parameters} parameters differ by at most {check.gradient:.1e}, and by "
        f"{check.relative:.1e} of",
        f"a parameter's largest ({check.worst}), tolerance {checks.DENSE_TOLERANCE:.0e}: {_verdict(check.passed)}",
    )
    return check.passed


def _report_speed(console: Console, speed: checks.Speed, tokens: int) -> bool:
    sizes = purpose.REAL
    _report(
        console,
        "real sizes",
        f"{sizes.model}: {tokens} tokens of {sizes.hidden} columns, each to {sizes.topk} of {sizes.experts} experts "
        "and back, with gradients",
        f"{speed.ours:.1f} ms; plain argsort, gather and index_add {speed.plain:.1f} ms "
        f"({speed.plain / speed.ours:.1f} times as long); the least of {checks.TURNS} turns",
        f"outputs differ by at most {speed.difference:.1e}, tolerance {checks.PLAIN_TOLERANCE:.0e}: "
        f"{_verdict(speed.passed)}",
    )
    return speed.passed


def _report(console: Console, name: str, *lines: str) -> None:
    for index, line in enumerate(lines):
        console.print(f"{name if index == 0 else '':<15}{line}")


def _title(model: Decoder) -> str:
    config = model.config
    size = sum(parameter.size for parameter in model.parameters())
    return (
        f"ERNIE-type MoE language model: {config.layers} layers, hidden {config.hidden}, "
        f"{config.experts} experts, {config.topk} per token, {size / 1e6:.1f} M parameters"
    )


def _loss(nats: float) -> str:
    return f"{nats:.3f} nats ({nats / math.log(2):.3f} bits) per byte"


def _verdict(passed: bool) -> str:
    return "[bold green]PASSED[/]" if passed else "[bold red]FAILED[/]"
