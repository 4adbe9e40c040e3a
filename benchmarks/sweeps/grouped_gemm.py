#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checks and times Triton's and PyTorch's grouped GEMM at models' sizes; source of triton/gemm/configs.py.

    python3 -m benchmarks.sweeps.grouped_gemm --out benchmarks/results/h200-grouped-gemm.jsonl --commit COMMIT \
        [--shapes dsv3 ...] [--ops forward ...] [--all-configs]

Needs an NVIDIA GPU and PyTorch with torch._grouped_mm, not Paddle. Tokens, routed evenly at random, meet the first
matrices of SwiGLU experts (H -> 2 I, stored [E, 2 I, H]) and their second ones (I -> H, [E, H, I]), in bfloat16:

    forward              rows times the first matrices              dx, dw        its gradients
    gathered             the same from tokens, as a call with permute_x does it
    gathered_in_load     the same, rows gathered while they are loaded, whatever the GPU
    dw_gathered[_in_load] the gradient of the first matrices from tokens, in the same two ways
    second               rows times the second matrices
    weighted             the same, each row of the result times its weight
    weighted_backward    the gradients of rows, matrices and weights; configurations are those of the rows
    dx_n, forward_n      with matrices stored the other way round

Every result is compared with a float32 GEMM of some experts, and with itself run again, before it is timed; a line
with "error" has no time. A time is the median of calls with a cold L2, next to its minimum and maximum; "of_torch" is
PyTorch's time over it.
Configurations are compiled by other processes first, which share Triton's cache on disk.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.kernels.cuda_timer import CudaTimer
from benchmarks.kernels.results import text_of
from benchmarks.kernels.torch_device import TorchDevice, gpu_facts
from benchmarks.spread import time_fields
from paddle_moe_ops.triton.gemm.configs import GemmConfig
from paddle_moe_ops.triton.gemm.grouped_gemm import grouped_gemm, grouped_gemm_backward
from paddle_moe_ops.triton.gemm.types import Groups, Tokens


class Model(NamedTuple):
    """T tokens of K slots, E experts, H hidden and I intermediate size."""

    tokens: int
    topk: int
    experts: int
    hidden: int
    inter: int


MODELS = {
    "ernie-300b": Model(16384, 8, 64, 8192, 3584),
    "ernie-300b-4096": Model(4096, 8, 64, 8192, 3584),
    "ernie-21b": Model(16384, 6, 64, 2560, 1536),
    "dsv3": Model(4096, 8, 256, 7168, 2048),
}
DEFAULT = ["ernie-300b-4096", "ernie-21b", "dsv3"]
_FIRST = [
    GemmConfig(128, 256, 64, 8, 3, 8, 1, tma=True),
    GemmConfig(128, 256, 64, 8, 4, 8, 1, tma=True),
    GemmConfig(128, 256, 64, 8, 3, 8, 1, tma=False),
    GemmConfig(128, 128, 64, 8, 3, 4, 2, tma=True),
]
# For wgrad, whose stored tile needs shared memory of its own.
_FOR_WEIGHTS = [
    GemmConfig(128, 256, 64, 8, 3, 8, 1, tma=True),
    GemmConfig(128, 256, 64, 8, 3, 8, 1, tma=False),
    GemmConfig(128, 128, 64, 8, 3, 4, 2, tma=True),
    GemmConfig(128, 128, 32, 8, 4, 4, 2, tma=True),
]
_MORE = [
    GemmConfig(128, 256, 64, 16, 3, 8, 1, tma=True),
    GemmConfig(128, 256, 64, 4, 3, 8, 1, tma=True),
    GemmConfig(128, 256, 64, 8, 3, 8, 0, tma=True),
    GemmConfig(128, 256, 64, 8, 3, 8, 0, tma=False),
    GemmConfig(256, 128, 64, 8, 3, 8, 1, tma=True),
    GemmConfig(128, 128, 64, 8, 3, 4, 2, tma=False),
    GemmConfig(128, 128, 64, 8, 5, 4, 1, tma=True),
    GemmConfig(128, 128, 128, 8, 3, 8, 1, tma=True),
    GemmConfig(64, 256, 64, 8, 4, 4, 1, tma=True),
    GemmConfig(64, 128, 64, 8, 4, 4, 2, tma=True),
]
_POINTERS = GemmConfig(128, 256, 64, 8, 3, 8, 1, tma=False)
_IN_LOAD = "_in_load"
# The others run the same kernels.
_COMPILED_APART = (
    *("forward", "gathered_in_load", "forward_n", "dw", "dw_gathered_in_load", "weighted", "weighted_backward"),
)
_ROUNDS = 3


def configs_of(operation: str, everything: bool) -> list[GemmConfig | None]:
    """The measured configurations of an operation; None is the default."""
    if operation.endswith(_IN_LOAD):
        return [_POINTERS]
    if operation == "dw_gathered":  # dw, with the launch of gathered before it
        return [None]
    return [None, *(_FOR_WEIGHTS if operation == "dw" else _FIRST), *(_MORE if everything else [])]


Outputs = dict[str, torch.Tensor]


class Inputs:
    """The operands of one model and their groups; ``small`` if kernels are only to be compiled."""

    def __init__(self, model: Model, *, small: bool = False) -> None:
        tokens, topk, self.experts, hidden, inter = model
        if small:  # the sizes of tiles divide these as well, and the number of experts is the same
            tokens, hidden, inter = 256, 512, 512
        generator = torch.Generator("cuda").manual_seed(20260913)
        ids = torch.rand(tokens, self.experts, device="cuda", generator=generator).argsort(1)[:, :topk].reshape(-1)
        order = ids.argsort(stable=True)
        self.sizes = torch.bincount(ids, minlength=self.experts).int()
        self.stops = self.sizes.cumsum(0).int()
        self.offsets = torch.cat([self.stops.new_zeros(1), self.stops])
        self.row_to_token = (order // topk).int()
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device="cuda")
        self.token_rows = slots.view(tokens, topk).sort(1).values.int()
        self.rows = len(order)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            return made.normal_(std=scale, generator=generator)

        self.x = random(tokens, hidden)
        self.x_rows = self.x[self.row_to_token.long()]
        self.first = random(self.experts, 2 * inter, hidden, scale=hidden**-0.5)
        self.first_n = self.first.transpose(1, 2).contiguous()
        self.d_first = random(self.rows, 2 * inter)
        self.hidden_rows = random(self.rows, inter)
        self.second = random(self.experts, hidden, inter, scale=inter**-0.5)
        self.d_second = random(self.rows, hidden)
        self.weights = torch.rand(self.rows, device="cuda", generator=generator)
        self.groups = Groups(self.sizes, self.offsets)
        self.maps = Tokens(self.row_to_token, self.token_rows)


class Operation(NamedTuple):
    """One GEMM: ours with a configuration, PyTorch's, its operations, and the expected rows of an expert."""

    ours: Callable[[GemmConfig | None], Outputs]
    torchs: Callable[[], Any]
    flops: int
    due: Callable[[slice, int], dict[str, tuple[torch.Tensor, torch.Tensor]]]


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.float() for each in tensors]


def with_terms(a: torch.Tensor, b: torch.Tensor, factor: Any = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """factor * a @ b in float32, and of the absolute values."""
    a, b = wide(a, b)
    return factor * (a @ b), factor * (a.abs() @ b.abs())


def operations(device: TorchDevice, i: Inputs) -> dict[str, Operation]:
    grouped_mm = torch._grouped_mm
    flops = 2 * i.rows * i.first.shape[1] * i.first.shape[2]
    flops_second = 2 * i.rows * i.second.shape[1] * i.second.shape[2]

    def forward(config: GemmConfig | None) -> Outputs:
        return {"rows": grouped_gemm(device, i.x_rows, i.first, i.groups, config=config)}

    def gathered(config: GemmConfig | None) -> Outputs:
        return {"rows": grouped_gemm(device, i.x, i.first, i.groups, tokens=i.maps, config=config)}

    def gradient(which: int, x: Any = None, **options: Any) -> Callable[[GemmConfig | None], Outputs]:
        wanted = tuple(index == which for index in range(3))

        def call(config: GemmConfig | None) -> Outputs:
            operands = device, i.d_first, i.x_rows if x is None else x, i.first, i.groups
            made = grouped_gemm_backward(*operands, wanted=wanted, config=config, weight_config=config, **options)
            return {"w" if which else "rows": made[which]}

        return call

    def plain(x: Any, w: Any, transpose: bool) -> Callable[[GemmConfig | None], Outputs]:
        return lambda config: {"rows": grouped_gemm(device, x, w, i.groups, transpose, config=config)}

    def weighted(config: GemmConfig | None) -> Outputs:
        made = grouped_gemm(device, i.hidden_rows, i.second, i.groups, weights=i.weights, config=config)
        return {"rows": made}

    def weighted_backward(config: GemmConfig | None) -> Outputs:
        operands = device, i.d_second, i.hidden_rows, i.second, i.groups
        made = grouped_gemm_backward(*operands, weights=i.weights, config=config)
        return dict(zip(("rows", "w", "weights"), made, strict=True))

    def due_forward(rows: slice, expert: int) -> Any:
        return {"rows": with_terms(i.x_rows[rows], i.first[expert].T)}

    def due_dx(rows: slice, expert: int) -> Any:
        return {"rows": with_terms(i.d_first[rows], i.first[expert])}

    def due_dw(rows: slice, expert: int) -> Any:
        return {"w": with_terms(i.d_first[rows].T, i.x_rows[rows])}

    def due_second(rows: slice, expert: int, factor: Any = 1) -> Any:
        return {"rows": with_terms(i.hidden_rows[rows], i.second[expert].T, factor)}

    def due_weighted(rows: slice, expert: int) -> Any:
        return due_second(rows, expert, i.weights[rows, None])

    def due_weighted_backward(rows: slice, expert: int) -> Any:
        factor = i.weights[rows, None]
        product, terms = with_terms(i.hidden_rows[rows], i.second[expert].T)
        gradient = i.d_second[rows].float()
        scaled = (factor * i.hidden_rows[rows].float()).bfloat16()
        return {
            "rows": with_terms(i.d_second[rows], i.second[expert], factor),
            "w": with_terms(i.d_second[rows].T, scaled),
            "weights": ((product * gradient).sum(1), (terms * gradient.abs()).sum(1)),
        }

    def torch_weighted_backward() -> Any:
        scaled = (i.d_second * i.weights[:, None]).bfloat16()
        product = grouped_mm(i.hidden_rows, i.second.transpose(1, 2), offs=i.stops)
        d_weights = (product.float() * i.d_second).sum(1)
        return torch_dx(scaled, i.second), grouped_mm(scaled.T, i.hidden_rows, offs=i.stops), d_weights

    def torch_dx(d_out: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return grouped_mm(d_out, w, offs=i.stops)

    def torch_forward(rows: torch.Tensor) -> torch.Tensor:
        return grouped_mm(rows, i.first.transpose(1, 2), offs=i.stops)

    def torch_second() -> torch.Tensor:
        return grouped_mm(i.hidden_rows, i.second.transpose(1, 2), offs=i.stops)

    def torch_dw() -> torch.Tensor:
        return grouped_mm(i.d_first.T, i.x_rows, offs=i.stops)

    def torch_dw_permuted() -> torch.Tensor:
        return grouped_mm(i.d_first.T, i.x.index_select(0, i.row_to_token), offs=i.stops)

    def torch_permuted() -> torch.Tensor:
        return torch_forward(i.x.index_select(0, i.row_to_token))

    return {
        "forward": Operation(forward, lambda: torch_forward(i.x_rows), flops, due_forward),
        "gathered": Operation(gathered, torch_permuted, flops, due_forward),
        "gathered_in_load": Operation(gathered, torch_permuted, flops, due_forward),
        "forward_n": Operation(
            plain(i.x_rows, i.first_n, False),
            lambda: grouped_mm(i.x_rows, i.first_n, offs=i.stops),
            flops,
            due_forward,
        ),
        "dx": Operation(gradient(0), lambda: torch_dx(i.d_first, i.first), flops, due_dx),
        "dx_n": Operation(
            plain(i.d_first, i.first_n, True), lambda: torch_dx(i.d_first, i.first_n.transpose(1, 2)), flops, due_dx
        ),
        "dw": Operation(gradient(1), torch_dw, flops, due_dw),
        "dw_gathered": Operation(gradient(1, i.x, tokens=i.maps), torch_dw_permuted, flops, due_dw),
        "dw_gathered_in_load": Operation(gradient(1, i.x, tokens=i.maps), torch_dw_permuted, flops, due_dw),
        "second": Operation(plain(i.hidden_rows, i.second, True), torch_second, flops_second, due_second),
        "weighted": Operation(
            weighted, lambda: (torch_second() * i.weights[:, None]).bfloat16(), flops_second, due_weighted
        ),
        "weighted_backward": Operation(
            weighted_backward, torch_weighted_backward, 2 * flops_second, due_weighted_backward
        ),
    }


def difference(i: Inputs, operation: Operation, made: Outputs) -> str | None:
    """The error of a result for some of the experts as a text, or None."""
    offsets = i.offsets.tolist()
    busiest = int(i.sizes.argmax())
    for expert in {0, busiest, i.experts - 1}:
        rows = slice(offsets[expert], offsets[expert + 1])
        longest = max(sum(i.first.shape[1:]), rows.stop - rows.start)  # chain of additions, on either side
        for name, (due, terms) in operation.due(rows, expert).items():
            got = made[name][expert] if name == "w" else made[name][rows]
            rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-24
            allowed = rounding * due.abs() + 2 * longest * 2.0**-24 * terms + 1e-30
            excess = ((got.float() - due).abs() / allowed).nan_to_num(nan=torch.inf)
            if excess.numel() and excess.max() > 1:
                return f"{name} of expert {expert} are {excess.max():.3g} times the allowed error off"
    return None


def wrong_result(inputs: Inputs, operation: Operation, config: GemmConfig | None) -> str | None:
    """Runs it twice; the error as a text, or None."""
    try:
        made, again = operation.ours(config), operation.ours(config)
        wrong = difference(inputs, operation, made)
        if wrong is None and not all(torch.equal(made[each], again[each]) for each in made):
            wrong = "another run gives other bits"
    except Exception as error:  # a configuration that exceeds the GPU's resources
        wrong = text_of(error)
    return wrong


def lines(shape: str, names: list[str], everything: bool, samples: int) -> Iterator[dict[str, Any]]:
    """One line per operation and configuration; configuration null is the default."""
    timer, device = CudaTimer(), TorchDevice()
    inputs = Inputs(MODELS[shape])
    for name, operation in operations(device, inputs).items():
        if names and name not in names:
            continue
        line = {"op": name, "shape": shape, "impl": "torch"}
        measured: list[tuple[dict[str, Any], Callable[[], Any]]] = []
        try:
            operation.torchs()
            measured.append((line, operation.torchs))
        except Exception as error:  # its requirements on strides differ between versions
            yield {**line, "error": text_of(error)}
        for config in configs_of(name, everything):
            line = {"op": name, "shape": shape, "impl": "triton", "config": config and list(config)}
            wrong = wrong_result(inputs, operation, config)
            if wrong is None:
                measured.append((line, functools.partial(operation.ours, config)))
            else:
                yield {**line, "error": wrong}
        times: list[list[float]] = [[] for _ in measured]
        for _ in range(_ROUNDS):
            for (_, call), found in zip(measured, times, strict=True):
                found += timer.sample(call, samples, cold=True)
        torchs = float("nan")
        for (line, _), found in zip(measured, times, strict=True):
            rate = time_fields(found, digits=1)
            us = rate["us"]
            rate["tflops"] = round(operation.flops / us / 1e6, 1)
            if line["impl"] == "torch":
                torchs = us
                yield {**line, **rate}
            else:
                yield {**line, **rate, "of_torch": round(torchs / us, 3)}


def call_once(shape: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """One call of each operation, with its default configuration, for a profiler; the least bytes it must move."""
    device, inputs = TorchDevice(), Inputs(MODELS[shape])
    found = operations(device, inputs)
    for name in names:
        made = found[name].ours(configs_of(name, False)[0])
        operands = (inputs.x if "gathered" in name else inputs.x_rows, inputs.first, inputs.d_first)
        if name.startswith(("second", "weighted")):
            operands = inputs.hidden_rows, inputs.second, inputs.d_second
        yield {"op": name, "shape": shape, "min_bytes": sum(2 * each.numel() for each in operands)}
        del made
    torch.cuda.synchronize()


def compile_one(job: tuple[Model, str, GemmConfig]) -> None:
    """One launch of an operation."""
    model, chosen, config = job
    device, inputs = TorchDevice(), Inputs(model, small=True)
    for name, operation in operations(device, inputs).items():
        if name == chosen:
            try:
                operation.ours(config)
            except Exception as error:
                print(f"{name} {config}: {error}"[:300], file=sys.stderr)
    torch.cuda.synchronize()


def compile_all(names: list[str], everything: bool) -> None:
    """The same kernels for all models."""
    model = MODELS["ernie-21b"]
    jobs = [
        (model, name, config)
        for name in names or _COMPILED_APART
        for config in configs_of(name, everything)
        if config is not None
    ]
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 1, 15))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_one, jobs, chunksize=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=DEFAULT, choices=sorted(MODELS))
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--samples", type=int, default=3, help="calls a round")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    parser.add_argument("--once", action="store_true", help="only call each of --ops once, for a profiler")
    parser.add_argument("--all-configs", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    if not arguments.once:
        compile_all(arguments.ops, arguments.all_configs)
    compiled = time.monotonic() - start
    failed = False
    times: dict[tuple[str, str], list[tuple[float, str]]] = {}
    with arguments.out.open("w", encoding="utf-8") as file:

        def report(line: dict[str, Any]) -> None:
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()

        command = " ".join(each.rpartition("/")[2] for each in sys.argv)
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        facts = {**gpu_facts(), "commit": arguments.commit, "date": date, "command": command}
        report({"machine": True, **facts, "compile_s": round(compiled, 1), "config": GemmConfig._fields})
        for shape in arguments.shapes:
            if arguments.once:
                for line in call_once(shape, arguments.ops):
                    report(line)
                continue
            for line in lines(shape, arguments.ops, arguments.all_configs, arguments.samples):
                failed |= "error" in line
                report(line)
                if "us" in line:
                    label = line["impl"] if "config" not in line else json.dumps(line["config"])
                    times.setdefault((shape, line["op"]), []).append((line["us"], label))
            torch.cuda.empty_cache()
        report({"total_s": round(time.monotonic() - start, 1)})
    for (shape, name), measured in times.items():
        fastest = ", ".join(f"{label} {us:.0f}" for us, label in sorted(measured)[:4])
        known = {label: us for us, label in measured}
        print(
            f"{shape:16} {name:18} torch {known.get('torch', 0):8.0f} default {known.get('null', 0):8.0f} | {fastest}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
