# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
r"""Times training steps of whole language models with and without the library's layer, on a GPU with PyTorch.

    python3 -m benchmarks.loss_curves.speed --core-library libpmo_core.so --commit COMMIT \
        --out benchmarks/results/h200-training-speed.jsonl

The models are those of the loss curves, and a larger one; all implementations begin with the same weights and train on
the same random tokens. A step is a forward and a backward pass and an AdamW update. A line of the result is one model
and implementation: microseconds of a step, tokens of it, and the peak of allocated memory. The first loss of each
implementation is compared with that of PyTorch's experts, one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.spread import time_fields

from .__main__ import MODELS, facts
from .experts import GroupedExperts, KernelExperts, PlainExperts
from .model import Decoder, Sizes

__all__ = ["IMPLEMENTATIONS", "LARGER", "lines", "main"]

LARGER = {"ernie-1b": Sizes(2048, 1024, 4, 64, 6, 1024, 16, head=128, vocabulary=32768)}
IMPLEMENTATIONS: dict[str, Callable[[Path | None], Any]] = {
    "ours": lambda library: _kernels(library, False),
    "ours, float8": lambda library: _kernels(library, True),
    "torch": lambda _: GroupedExperts(),
    "torch, by expert": lambda _: PlainExperts(float8=False),
}
_MOST_ERROR = 2e-2  # of the first loss, relative
_ROUNDS, _STEPS, _WARM = 5, 5, 3


def _kernels(library: Path | None, float8: bool) -> KernelExperts:
    if library is None:
        raise SystemExit("this needs --core-library, a libpmo_core.so with kernels for Hopper")
    return KernelExperts(library, float8)


def line_of(name: str, sizes: Sizes, impl: str, library: Path | None, device: str) -> dict[str, Any]:
    """Train one model by one implementation."""
    torch.manual_seed(0)
    model = Decoder(sizes, IMPLEMENTATIONS[impl](library)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1), device=device)
    check_first_loss(model, tokens, impl)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss, balance = model(tokens)
        optimizer.zero_grad(set_to_none=True)
        (loss + balance).backward()
        optimizer.step()

    for _ in range(_WARM):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rounds = [_seconds(step, device) for _ in range(_ROUNDS)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    where = {"model": name, "impl": impl, "tokens": sizes.batch * sizes.context, "peak_bytes": peak}
    return {**where, **time_fields([1e6 * each for each in rounds], digits=1)}


def _seconds(step: Callable[[], None], device: str) -> float:
    """Mean time of a step."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / _STEPS


def check_first_loss(model: Decoder, tokens: torch.Tensor, impl: str) -> None:
    """Raise if the loss is not that of `PlainExperts`."""
    given, found = model.experts, []
    for experts in (PlainExperts(float8=False), given):
        model.experts = experts
        with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
            found.append(model(tokens)[0].item())
    due, loss = found
    if not abs(loss - due) <= _MOST_ERROR * due:
        raise SystemExit(f"{impl}: the first loss is {loss}, by PyTorch {due}")


def lines(models: dict[str, Sizes], impls: list[str], library: Path | None, device: str) -> Iterator[dict[str, Any]]:
    """Lines of the result."""
    for name, sizes in models.items():
        for impl in impls:
            yield line_of(name, sizes, impl, library, device)
            if device == "cuda":
                torch.cuda.empty_cache()


def main(given: list[str] | None = None, models: dict[str, Sizes] | None = None) -> int:
    """Run; ``models`` replaces those of the loss curves and `LARGER`."""
    models = {**MODELS, **LARGER} if models is None else models
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(models), choices=list(models))
    parser.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--core-library", type=Path, help="libpmo_core.so, for its kernels on Hopper")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    arguments = parser.parse_args(given)
    chosen = {name: models[name] for name in arguments.models}
    with arguments.out.open("w", encoding="utf-8") as file:
        found = lines(chosen, arguments.impl, arguments.core_library, arguments.device)
        for line in itertools.chain([facts(arguments.device, arguments)], found):
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
