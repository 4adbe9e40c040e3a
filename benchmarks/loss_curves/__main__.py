# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
r"""Trains language models with experts on float8 operands and in bfloat16, on a GPU with PyTorch; no Paddle.

    python3 -m benchmarks.loss_curves --core-library libpmo_core.so --commit COMMIT \
        --out benchmarks/results/h200-loss-curves.jsonl

Each seed draws weights and the order of the text once for both forms. The text is the source of Python's standard
library. A line of the result is one model, form and seed after some steps: the mean training loss since the line
before, and the loss on text that was held out, in nats per byte. Without --core-library PyTorch runs the experts, on
any device, one after the other. The first step of a form with kernels is compared with PyTorch's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from examples.demo.data import even_windows, load_standard_library, random_windows

from .experts import KernelExperts, PlainExperts
from .model import Decoder, Sizes

FORMS = ("bfloat16", "float8")
MODELS = {
    "demo": Sizes(256, 128, 4, 16, 2, 128, 32, head=32),
    "ernie-100m": Sizes(640, 384, 8, 16, 4, 512, 16),
}
_HELD_OUT_WINDOWS = 64
_PEAK_RATES = {"demo": 2e-3, "ernie-100m": 6e-4}
_WARM_UP = 0.05  # of the steps
_MOST_ERROR = 2e-2  # of the first loss, relative


def experts_of(form: str, library: Path | None) -> Any:
    float8 = form == "float8"
    return PlainExperts(float8) if library is None else KernelExperts(library, float8)


def curve(
    name: str, sizes: Sizes, form: str, seed: int, steps: int, every: int, experts: Any, device: str
) -> Iterator[dict[str, Any]]:
    """Train a model; a line of the result for each ``every`` steps."""
    text, rng = load_standard_library(), np.random.default_rng(seed)
    held_out = torch.from_numpy(even_windows(text.held_out, _HELD_OUT_WINDOWS, sizes.context + 1)).to(device)
    torch.manual_seed(seed)
    model = Decoder(sizes, experts).to(device)
    peak = _PEAK_RATES.get(name, 1e-3)
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": device == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), peak, **options)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(1, steps + 1):
        tokens = torch.from_numpy(random_windows(text.train, sizes.batch, sizes.context + 1, rng)).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss, balance = model(tokens)
        if step == 1 and isinstance(experts, KernelExperts):
            check_first_loss(model, tokens, form, loss.item())
        optimizer.zero_grad(set_to_none=True)
        (loss + balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        losses.append(loss.detach())
        if step % every == 0:
            train, on_held_out = torch.stack(losses).mean().item(), evaluated(model, held_out, sizes.batch, device)
            seconds, losses = round(time.perf_counter() - start, 1), []
            where = {"model": name, "form": form, "seed": seed, "step": step}
            yield {**where, "train": round(train, 5), "held_out": round(on_held_out, 5), "seconds": seconds}


def schedule(step: int, steps: int) -> float:
    """The learning rate after ``step`` steps, of the peak: a linear warm-up, then a cosine down to a tenth."""
    warm_up = max(int(_WARM_UP * steps), 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1))


def check_first_loss(model: Decoder, tokens: Tensor, form: str, loss: float) -> None:
    """Raise if the loss by kernels isn't that of `PlainExperts`."""
    by_kernels, model.experts = model.experts, PlainExperts(form == "float8")
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
        due = model(tokens)[0].item()
    model.experts = by_kernels
    if not abs(loss - due) <= _MOST_ERROR * due:
        raise SystemExit(f"{form}: the first loss by kernels is {loss}, by PyTorch {due}")


def evaluated(model: Decoder, windows: Tensor, batch: int, device: str) -> float:
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        losses = [model(each)[0] * len(each) for each in windows.split(batch)]
    return torch.stack(losses).sum().item() / len(windows)


def facts(device: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.kernels.torch_device import gpu_facts

    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    machine = gpu_facts() if device == "cuda" else {"gpu": "CPU", "torch": torch.__version__}
    by = "PyTorch" if arguments.core_library is None else "kernels"
    return {"machine": True, **machine, "commit": arguments.commit, "date": date, "experts_by": by}


def main(given: list[str] | None = None, models: dict[str, Sizes] | None = None) -> int:
    """Run; ``models`` replaces `MODELS`."""
    models = MODELS if models is None else models
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(models), choices=list(models))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps of a line")
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--core-library", type=Path, help="libpmo_core.so, for its kernels on Hopper")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    arguments = parser.parse_args(given)
    with arguments.out.open("w", encoding="utf-8") as file:

        def report(line: dict[str, Any]) -> None:
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()

        report(facts(arguments.device, arguments))
        for seed in range(arguments.seeds):
            for name in arguments.models:
                for form in FORMS:
                    experts = experts_of(form, arguments.core_library)
                    length = arguments.steps, arguments.every
                    for line in curve(name, models[name], form, seed, *length, experts, arguments.device):
                        report(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
