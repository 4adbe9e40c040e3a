# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
r"""Checks and times layers of experts on an NVIDIA GPU with PyTorch; Paddle is not needed.

    python3 -m benchmarks.layer --core-library libpmo_core.so --commit COMMIT \
        --out benchmarks/results/h200-layer.jsonl [--shapes ernie-21b ...] [--extend]

A line of the result is one implementation of one shape and routing, in one mode ("eager" calls, or replays of a CUDA
"graph"): medians, minima and maxima of forward and backward passes with a cold L2 in microseconds, TFLOP/s of the
median (6 T K d n and 12 T K d n operations), launches if known, bytes that are kept between the passes, and
the most that either pass needs besides its operands and results. The router is not included. An implementation whose
result or whose gradient of the probabilities is wrong gets a line with "error" and is not timed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.kernels.cuda_timer import count_launches
from benchmarks.kernels.results import text_of
from benchmarks.kernels.torch_device import gpu_facts, version_of
from benchmarks.spread import time_fields

from .implementations import FLOAT8, IMPLEMENTATIONS, WORKSPACE_MB, Passes
from .inputs import Inputs
from .result_file import open_results
from .shapes import ROUTINGS, SHAPES, Shape

_FLUSH_BYTES = 512 << 20  # several times the L2 of any GPU of today
_CHECKED_TOKENS = 3
_PACKAGES = {
    "SonicMoE": ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl"),
    "Liger": ("liger-kernel",),
    "Unsloth": ("unsloth",),
}
# Largest error with bfloat16 operands and results, relative to the norm: H, A, rows and sums are rounded.
_MOST_ERROR = 2e-2
_MOST_ERROR_OF_FLOAT8 = 2e-1  # of a few tokens; tests compare with the oracle


def wrong(inputs: Inputs, passes: Passes, most_error: float) -> str | None:
    """The error of a forward and a backward pass as a text, or None."""
    out, kept = passes.forward()
    d_probs = passes.backward(kept)[1]
    if d_probs.ndim == 1:
        d_probs = d_probs[inputs.rows_of_slots]
    due, due_probs = inputs.due(_CHECKED_TOKENS)
    for name, made, expected in (("out", out, due), ("d_probs", d_probs, due_probs)):
        error = ((made[:_CHECKED_TOKENS].float() - expected).norm() / expected.norm()).item()
        if not error < most_error:
            return f"{name} is {error:.3g} of its norm off"
    return None


def memory(passes: Passes, result_bytes: int) -> dict[str, int]:
    """Bytes kept between the passes, the tokens included, and the peaks of both passes beyond operands and results."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, kept = passes.forward()
    peak = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated() - before - result_bytes
    torch.cuda.reset_peak_memory_stats()
    gradients = passes.backward(kept)
    made = sum(each.numel() * each.element_size() for each in gradients)
    backward_peak = torch.cuda.max_memory_allocated() - before - result_bytes - made
    del out, kept, gradients
    return {"kept": held + result_bytes, "forward_peak": peak - result_bytes, "backward_peak": backward_peak}


class Calls(NamedTuple):
    """Both passes as they are timed, and how many launches they have."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    launches: tuple[int, int] | None


def eager(passes: Passes) -> Calls:
    kept: list[Any] = []

    def forward() -> None:
        kept[:] = [passes.forward()[1]]

    def backward() -> None:
        passes.backward(kept.pop())

    return Calls(forward, backward, None)


def captured(passes: Passes) -> Calls:
    """Each pass as a CUDA graph; the second reads tensors that the first keeps."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        passes.backward(passes.forward()[1])
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in range(2)]
    with torch.cuda.graph(graphs[0]):
        _, kept = passes.forward()
    with torch.cuda.graph(graphs[1], pool=graphs[0].pool()):
        passes.backward(kept)
    for graph in graphs:
        graph.instantiate()
    first, second = (count_launches(graph.raw_cuda_graph()) for graph in graphs)
    return Calls(graphs[0].replay, graphs[1].replay, (first, second))


def times(all_calls: list[Calls], samples: int) -> list[dict[str, float]]:
    """Fields of a line with the microseconds of both passes of all calls, which alternate.

    The GPU reads 512 MB before each pass, and the host is ahead of it.
    """
    scratch = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    events = []
    for sample in range(samples + 1):
        for i, calls in enumerate(all_calls):
            for which, call in (("forward", calls.forward), ("backward", calls.backward)):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.sum(scratch)
                start.record()
                call()
                end.record()
                if sample > 0:
                    events.append((i, which, start, end))
    torch.cuda.synchronize()
    found: list[dict[str, list[float]]] = [{"forward": [], "backward": []} for _ in all_calls]
    for i, which, start, end in events:
        found[i][which].append(1000 * start.elapsed_time(end))
    fields = ([time_fields(each, f"{which}_", digits=1) for which, each in one.items()] for one in found)
    return [forward | backward for forward, backward in fields]


def lines(
    name: str, routing: str, groups: list[list[str]], modes: list[str], samples: int, core_library: Path | None
) -> Iterator[dict[str, Any]]:
    """The lines of a shape; the implementations of a group alternate, as far as there is memory for all."""
    shape = SHAPES[name]
    inputs = Inputs(shape, routing, core_library)
    for group in groups:
        right: list[tuple[dict[str, Any], Passes]] = []
        for implementation in group:
            line: dict[str, Any] = {"shape": name, "routing": routing, "impl": implementation}
            most_error = _MOST_ERROR_OF_FLOAT8 if implementation.startswith(FLOAT8) else _MOST_ERROR
            try:
                passes = IMPLEMENTATIONS[implementation](inputs)
                error = wrong(inputs, passes, most_error)
                if error is None:
                    line |= memory(passes, shape.row_bytes() // shape.topk)
            except Exception as failure:  # a peer's requirements differ between versions, and so does its memory
                error = text_of(failure)
            if error is not None:
                yield {**line, "error": error}
            else:
                right.append((line, passes))
        for mode in modes:
            yield from timed_lines(shape, right, mode, samples)
            gc.collect()
            torch.cuda.empty_cache()


def timed_lines(
    shape: Shape, right: list[tuple[dict[str, Any], Passes]], mode: str, samples: int
) -> Iterator[dict[str, Any]]:
    ready: list[tuple[dict[str, Any], Calls]] = []
    later: list[tuple[dict[str, Any], Passes]] = []  # those for which memory is left after the others
    for line, passes in right:
        try:
            ready.append((line, (captured if mode == "graph" else eager)(passes)))
        except Exception as failure:
            if ready and isinstance(failure, torch.cuda.OutOfMemoryError):
                later.append((line, passes))
                continue
            yield {**line, "mode": mode, "error": text_of(failure)}
    try:
        all_found = times([calls for _, calls in ready], samples)
    except Exception as failure:
        yield from ({**line, "mode": mode, "error": text_of(failure)} for line, _ in ready)
        return
    for (line, calls), found in zip(ready, all_found, strict=True):
        timed: dict[str, Any] = {"mode": mode, "launches": calls.launches, **found}
        for which in ("forward", "backward"):
            timed[f"{which}_tflops"] = round(shape.flops(which == "backward") / found[f"{which}_us"] / 1e6, 1)
        yield {**line, **timed}
    if later:
        ready.clear()
        calls = None
        gc.collect()
        torch.cuda.empty_cache()
        yield from timed_lines(shape, later, mode, samples)


def peer_versions(implementations: list[str]) -> dict[str, str | None]:
    """Versions of the packages that implementations run, by their names in the machine line."""
    used = [start for start in _PACKAGES if any(each.startswith(start) for each in implementations)]
    names = [name for start in used for name in _PACKAGES[start]]
    return {name.removeprefix("nvidia-").replace("-", "_"): version_of(name) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--routings", nargs="+", default=["even"], choices=ROUTINGS)
    parser.add_argument("--impl", nargs="+", default=["ours", "torch"], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--modes", nargs="+", default=["eager", "graph"], choices=["eager", "graph"])
    parser.add_argument("--samples", type=int, default=9, help="calls of each pass")
    parser.add_argument(
        "--in-turns",
        action="store_true",
        help="implementations are called in turns, so that the GPU's clock is the same for all; needs memory for all",
    )
    parser.add_argument(
        "--extend", action="store_true", help="adds the shapes to an existing file of the same machine and versions"
    )
    parser.add_argument("--core-library", type=Path, help="libpmo_core.so, for its kernels on Hopper")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    arguments = parser.parse_args()
    failed = False
    groups = [arguments.impl] if arguments.in_turns else [[each] for each in arguments.impl]
    options = groups, arguments.modes, arguments.samples, arguments.core_library
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {**gpu_facts(), "commit": arguments.commit, "date": date, "workspace_mb": WORKSPACE_MB}
    machine = {"machine": True, **facts, **peer_versions(arguments.impl)}
    with open_results(arguments.out, machine, arguments.shapes if arguments.extend else None) as file:
        print(json.dumps(machine), flush=True)
        for shape in arguments.shapes:
            for routing in arguments.routings:
                for line in lines(shape, routing, *options):
                    failed |= "error" in line
                    print(json.dumps(line), flush=True)
                    file.write(json.dumps(line) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
