# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
r"""Times layers of experts of 1 to 1024 tokens on an NVIDIA GPU with PyTorch; Paddle is not needed.

    python3 -m benchmarks.serving --core-library libpmo_core.so --commit COMMIT \
        --out benchmarks/results/h200-serving.jsonl [--sglang FILE] [--lmdeploy FOLDER] [--peers DeepGEMM humming]

Forward passes, replays of CUDA graphs with a cold L2. A line of the result is one model, kind of matrices and number of
tokens: the floor (the bytes of the matrices of experts that have rows, at the fastest read of the process), ours from
ids, which includes routing, ours with maps that are given, and peers for the kinds that they have. Code of peers is
loaded and run: ``--sglang`` names fused_moe_triton_kernels.py of its wheel, whose tiles are tuned here; ``--lmdeploy``
the folder of its unpacked wheel; the packages of the others must be on the path.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.kernels.core_cuda import CudaCore, array_at
from benchmarks.kernels.results import text_of
from benchmarks.kernels.torch_device import gpu_facts
from benchmarks.layer.inputs import Inputs
from benchmarks.layer.library import LibraryLayer
from benchmarks.layer.shapes import Shape
from benchmarks.spread import time_fields
from tests.core.operators.route import route_params

from .deep_gemm import deep_gemm_layer
from .humming import humming_layer
from .lmdeploy import lmdeploy_layer, lmdeploy_version
from .models import KINDS, MODELS, TOKENS
from .plain import stored
from .sglang import SGLang

_FLUSH_BYTES = 512 << 20  # several times the L2 of any GPU of today
_READ_BYTES = 8 << 30
PACKAGES = {"DeepGEMM": "deep_gemm", "humming": "humming"}
_MAPS = ("token_rows", "row_to_token", "row_probs", "tokens_per_expert", "expert_offsets")


class Code(NamedTuple):
    """Code that is measured.

    Attributes:
        core_library: ours.
        sglang: a file of SGLang's wheel, or None.
        lmdeploy: the folder of lmdeploy's wheel, or None.
        packages: names of the other peers.
    """

    core_library: Path
    sglang: Path | None
    lmdeploy: Path | None
    packages: list[str]


class Timer:
    """Replays of CUDA graphs with a cold L2, in turns."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._scratch = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def samples_of(self, calls: list[Callable[[], Any]]) -> list[list[float]]:
        """Microseconds of each call."""
        events: list[list[tuple[Any, Any]]] = [[] for _ in calls]
        for _ in range(self._samples + 1):
            for made, call in zip(events, calls, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.sum(self._scratch)
                start.record()
                call()
                end.record()
                made.append((start, end))
        torch.cuda.synchronize()
        return [[1000 * start.elapsed_time(end) for start, end in each[1:]] for each in events]

    def bytes_per_us(self) -> float:
        """The speed of the fastest large read."""
        big = torch.zeros(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
        return _READ_BYTES / min(self.samples_of([lambda: torch.sum(big)])[0])


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A replay of the call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def routing_of(inputs: Inputs, core: CudaCore) -> Callable[[], None]:
    """A call that makes the maps of the inputs from ids and probabilities; replaces them by its own."""
    tokens, topk, experts = len(inputs.x), inputs.shape.topk, inputs.shape.experts
    maps = {name: torch.empty(size, dtype=torch.int32, device="cuda") for name, size in (
        ("token_rows", (tokens, topk)), ("row_to_token", tokens * topk), ("tokens_per_expert", experts),
        ("expert_offsets", experts + 1), ("routed_per_expert", experts),
    )}  # fmt: skip
    maps["row_probs"] = torch.empty(tokens * topk, device="cuda")
    given = {name: array_at(each) for name, each in maps.items()}
    sizes = {"num_experts": experts, "topk": topk, "padding_alignment": 1, "num_rows": tokens * topk}
    params = route_params(array_at(inputs.ids.int()), array_at(inputs.probs), **sizes, **given)
    memory = torch.empty(max(core.workspace_bytes("route", params), 1), dtype=torch.uint8, device="cuda")
    params.arrays["workspace"] = array_at(memory)
    params.workspace, params.workspace_bytes = memory.data_ptr(), memory.numel()
    inputs.token_rows, inputs.row_to_token, inputs.row_probs = (maps[name] for name in _MAPS[:3])
    inputs.sizes, inputs.offsets = maps["tokens_per_expert"], maps["expert_offsets"]

    def run() -> None:
        core.run("route_permute", params, None)

    run()
    return run


def layer_of(inputs: Inputs, kind: str) -> LibraryLayer:
    """The layer as a server has it: matrices are quantised, and no H is kept."""
    if kind == "bf16":
        return LibraryLayer(inputs, keeps_hidden=False)
    if kind == "fp8_128x128":
        return LibraryLayer(inputs, keeps_hidden=False, float8=True, keeps_matrices=True)
    return LibraryLayer(inputs, keeps_hidden=False, integers=kind)


def peers_of(code: Code, inputs: Inputs, kind: str, timer: Timer) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The peers that have a kind of matrices, as functions that make a layer."""
    made: dict[str, Callable[[], Callable[[], Any]]] = {}

    @functools.cache
    def matrices() -> list[Any]:
        return [stored(each, kind) for each in (inputs.gate_up, inputs.down)]

    if (file := code.sglang) is not None and kind in ("bf16", "fp8_128x128", "int8"):
        made["SGLang, maps given"] = lambda: SGLang(file, inputs, kind, matrices(), timer.samples_of).tuned()
    if (folder := code.lmdeploy) is not None and kind in ("bf16", "fp8_128x128", "int8"):
        made["lmdeploy"] = lambda: lmdeploy_layer(folder, inputs, kind, matrices())
    if "DeepGEMM" in code.packages and kind == "fp8_128x128":
        made["DeepGEMM, maps given"] = lambda: deep_gemm_layer(inputs, matrices())
    if "humming" in code.packages and kind.startswith("int"):
        made["humming, maps given"] = lambda: humming_layer(inputs, kind)
    return made


def versions_of(code: Code, sglang_version: str) -> dict[str, str]:
    """The versions of the peers."""
    found = {} if code.sglang is None else {"SGLang": sglang_version}
    if code.lmdeploy is not None:
        found["lmdeploy"] = lmdeploy_version(code.lmdeploy)
    for name in code.packages:
        found[name] = importlib.import_module(PACKAGES[name]).__version__
    return found


def line_of(
    model: str, kind: str, tokens: int, timer: Timer, speed: float, core: CudaCore, code: Code
) -> dict[str, Any]:
    """The result of a model, a kind of matrices and a number of tokens."""
    hidden, inner, experts, topk = MODELS[model]
    inputs = Inputs(Shape(tokens, hidden, inner, experts, topk), "even", code.core_library)
    touched = int((inputs.sizes > 0).sum())
    line: dict[str, Any] = {"model": model, "kind": kind, "tokens": tokens, "experts": touched}
    line["floor_us"] = round(KINDS[kind].bits / 8 * 3 * touched * hidden * inner / speed, 1)
    due = inputs.due(1)[0]
    route = routing_of(inputs, core)
    layer = layer_of(inputs, kind)

    def whole() -> torch.Tensor:
        route()
        return layer.forward()[0]

    found: list[tuple[str, Callable[[], None]]] = []
    alive = []  # graphs read tensors of the calls that they were captured from
    ways: dict[str, Callable[[], Callable[[], Any]]] = {
        "ours": lambda: whole,
        "ours, maps given": lambda: lambda: layer.forward()[0],
        **peers_of(code, inputs, kind, timer),
    }
    for name, make in ways.items():
        try:
            call = make()
            alive.append(call)
            error = ((call()[:1].float() - due).norm() / due.norm()).item()
            if error < KINDS[kind].error:
                found.append((name, captured(call)))
            else:
                line[name] = {"error": f"out is {error:.3g} of its norm off"}
        except Exception as failure:  # a peer's requirements differ between versions
            line[name] = {"error": text_of(failure)}
    for (name, _), samples in zip(found, timer.samples_of([call for _, call in found]), strict=True):
        line[name] = time_fields(samples, digits=1)
    return line


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    timer, core = Timer(arguments.samples), CudaCore(arguments.core_library)
    code = Code(arguments.core_library, arguments.sglang, arguments.lmdeploy, arguments.peers)
    speed = timer.bytes_per_us()
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {**gpu_facts(), "commit": arguments.commit, "date": date, "read_tbs": round(speed / 1e6, 3)}
    yield {"machine": True, **facts, "peers": versions_of(code, arguments.sglang_version)}
    for model, kind, tokens in itertools.product(arguments.models, arguments.kinds, arguments.tokens):
        _, _, experts, topk = MODELS[model]
        if tokens * topk > KINDS[kind].rows * experts:
            continue
        yield line_of(model, kind, tokens, timer, speed, core, code)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--core-library", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--sglang", type=Path, help="SGLang's fused_moe_triton_kernels.py")
    parser.add_argument("--sglang-version", default="unknown")
    parser.add_argument("--lmdeploy", type=Path, help="folder of lmdeploy's unpacked wheel")
    parser.add_argument("--peers", nargs="+", default=[], choices=list(PACKAGES), help="on the path of Python")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    failed = False
    arguments = parser.parse_args()
    with arguments.out.open("w", encoding="utf-8") as file:
        for line in lines(arguments):
            failed |= any(isinstance(each, dict) and "error" in each for each in line.values())
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
