# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
r"""Checks and times the float8 GEMMs of layers, with DeepGEMM's as a peer, on a GPU of compute capability 9.0.

    python3 -m benchmarks.layer.float8_products --core-library libpmo_core.so --commit COMMIT \
        --out benchmarks/results/h100-deepgemm.jsonl [--shapes ernie-21b ...]

DeepGEMM is the package deep_gemm, which has to be on the path; without it the figures are ours alone, and the exit
status is 1. All implementations multiply the same codes and scales:

    first    [M, d] times [E, 2n, d], the rows of tokens in expert order
    second   [M, n] times [E, d, n]

    ours               products alone: rows in expert order, results in bfloat16
    ours, in a layer   the first with SwiGLU, whose result goes into float8, and the first product in bfloat16; the
                       second with each row's weight
    ours, with gather  the first again, after the launches that bring the rows of tokens into expert order
    DeepGEMM           m_grouped_fp8_gemm_nt_contiguous: as ours, but each expert's rows are padded as it asks for,
                       and the rows' scales are transposed beforehand

A line of the result is one implementation of one shape: for each product the median, minimum and maximum of replays of
a CUDA graph with a cold L2 in microseconds, and TFLOP/s (4 T K d n and 2 T K d n operations; those of padding don't
count).
Implementations alternate. One whose results are wrong gets a line with "error" and is not timed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.kernels.cuda_timer import CudaTimer
from benchmarks.kernels.device import Body, Captured
from benchmarks.kernels.results import text_of
from benchmarks.kernels.torch_device import TorchDevice, gpu_facts
from benchmarks.spread import time_fields
from paddle_moe_ops.triton.gemm.schedule import schedule
from paddle_moe_ops.triton.gemm.types import Groups, Target
from paddle_moe_ops.triton.launch.device import ITEM_BYTES, address
from paddle_moe_ops.triton.ops.permute import permute_chunk
from paddle_moe_ops.triton.ops.quantize import quantize
from tests.core.operators.grouped_gemm import AMAX_MIN, GROUP, PING_PONG, Float8Params, Result

from .inputs import Inputs
from .library import Codes, Library, address_of
from .peers import PaddedRows, deep_gemm
from .shapes import SHAPES, Shape

PRODUCTS = {"first": 4, "second": 2}  # and their operations, in T K d n
_DEFAULT = ["ernie-300b-16k", "ernie-300b-4k", "ernie-21b", "dsv3-4k", "qwen3-30b"]
_CHECKED_ROWS = 24
_LEAST_COSINE = 0.99
_ROUNDS = 3


class Operands:
    """The operands of both GEMMs of a layer in float8.

    Attributes:
        device: device of our Triton kernels.
        sizes: int32 [E], rows of each expert.
        weights: float32 [M], of the rows.
        rows: codes and scales of the rows of each GEMM, in expert order.
        matrices: those of its matrices, [E, N, D].
    """

    def __init__(self, shape: Shape, core_library: Path | None) -> None:
        i, self.shape, self.device, self._library = Inputs(shape, "even"), shape, TorchDevice(), Library(core_library)
        self.sizes, self.weights = i.sizes, i.row_probs
        self._maps = i.token_rows, i.row_to_token
        self.tables = schedule(self.device, Groups(i.sizes, i.offsets), self.num_rows, PING_PONG)
        self._tokens = self._quantized(i.x)
        act = torch.randn(self.num_rows, shape.inner, device="cuda").bfloat16()
        moved = Codes(*(each.new_empty(self.num_rows, each.shape[1]) for each in self._tokens))
        self.rows = {"first": moved, "second": self._quantized(act)}
        self.gather()
        self._counters = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.matrices = {"first": self._library.quantized(i.gate_up)[1], "second": self._library.quantized(i.down)[1]}

    @property
    def num_rows(self) -> int:
        return len(self.weights)

    def _quantized(self, x: torch.Tensor) -> Codes:
        return Codes(*quantize(self.device, x, ue8m0=False, scale_layout="row", amax_min=AMAX_MIN))

    def gather(self) -> None:
        """Bring codes and scales of the tokens into expert order, as a layer does."""
        end = address(self.tables.group_starts) + ITEM_BYTES["int32"] * self.shape.experts
        for tokens, rows in zip(self._tokens, self.rows["first"], strict=True):
            options = (0, self.num_rows), (0, tokens.shape[1]), end
            permute_chunk(self.device, tokens, *self._maps, rows, *options)

    def new(self, columns: int) -> torch.Tensor:
        return self.device.empty([self.num_rows, columns], "bfloat16")

    def multiply(
        self,
        which: str,
        out: Target,
        result: Result,
        *,
        weights: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        made: Codes | None = None,
    ) -> None:
        """Launch our GEMM; a gated result is ``hidden`` and ``made``."""
        rows, matrix, tables = self.rows[which], self.matrices[which], self.tables
        experts, outer, inner = matrix.codes.shape
        params = Float8Params(
            **dict.fromkeys(("num_rows", "num_sources", "window_rows"), self.num_rows),
            num_experts=experts,
            inner=inner,
            outer=outer,
            first_column=out.first_column,
            width=out.width,
            amax_min=AMAX_MIN,
            result=result,
        )
        arrays = {"x": rows.codes, "x_scales": rows.scales, "matrix": matrix.codes, "matrix_scales": matrix.scales}
        arrays |= {"weights": weights, "out": out.array, "hidden": hidden, "counters": self._counters}
        arrays |= {"first": tables.group_starts, "stop": tables.group_ends, "tiles": tables.tile_starts}
        if made is not None:
            arrays |= {"codes": made.codes, "scales": made.scales}
        window = address(tables.chunk_tiles) + ITEM_BYTES["int32"] * (tables.num_chunks + 1)
        params.point_at(window=window, **{name: address_of(each) for name, each in arrays.items()})
        self._library.call("pmo_grouped_float8_cuda", params)

    def due(self, which: str, chosen: torch.Tensor) -> torch.Tensor:
        """The chosen rows of a GEMM's result, in float32 from the codes."""
        rows, matrices, stops = self.rows[which], self.matrices[which], self.sizes.cumsum(0)
        made = []
        for row in chosen.tolist():
            expert = int((stops <= row).sum())
            matrix = values(matrices.codes[expert], matrices.scales[expert].repeat_interleave(GROUP, 0))
            made.append(matrix @ values(rows.codes[row], rows.scales[row]))
        return torch.stack(made)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers in float32, with a scale for each 128 columns of each row; scales after the last row are left out."""
    scales = scales.repeat_interleave(GROUP, -1)
    return codes.float() * scales[tuple(slice(length) for length in codes.shape)]


class Way(NamedTuple):
    """A GEMM that can be timed.

    Attributes:
        run: enqueues it.
        out: [M or more, N], which it writes.
        places: int64 [M], where the rows are in there; None: in their order.
        weights: float32 [M], which rows are multiplied with, or None.
    """

    run: Callable[[], None]
    out: torch.Tensor
    places: torch.Tensor | None = None
    weights: torch.Tensor | None = None


def ours(operands: Operands, which: str) -> Way:
    width = operands.matrices[which].codes.shape[1]
    out = operands.new(width)
    return Way(functools.partial(operands.multiply, which, Target(out, 0, width), Result.PLAIN), out)


def in_a_layer(operands: Operands, which: str, gathers: bool = False) -> Way | None:
    inner, hidden = operands.shape.inner, operands.shape.hidden
    if which == "second":
        if gathers:
            return None
        out, weights = operands.new(hidden), operands.weights
        run = functools.partial(operands.multiply, which, Target(out, 0, hidden), Result.PLAIN, weights=weights)
        return Way(run, out, weights=weights)
    out, device, num_rows = operands.new(2 * inner), operands.device, operands.num_rows
    codes = device.empty([num_rows, inner], "float8_e4m3fn")
    made = Codes(codes, device.empty([num_rows, inner // GROUP], "float32"))

    def first() -> None:
        if gathers:
            operands.gather()
        operands.multiply(which, Target(None, 0, inner), Result.GATED, hidden=out, made=made)

    return Way(first, out)


def deep_gemm_grouped(operands: Operands, which: str) -> Way:
    package = deep_gemm()
    rows, matrix = operands.rows[which], operands.matrices[which]
    padded = PaddedRows(operands.sizes, package.get_mk_alignment_for_contiguous_layout())
    codes = padded.put(rows.codes.view(torch.uint8)).view(rows.codes.dtype)
    scales = padded.put(rows.scales).T.contiguous().T  # its kernel's layout, so no transpose is launched
    out = torch.empty(len(codes), matrix.codes.shape[1], dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        package.m_grouped_fp8_gemm_nt_contiguous((codes, scales), tuple(matrix), out, padded.experts)

    return Way(run, out, padded.places)


IMPLEMENTATIONS: dict[str, Callable[[Operands, str], Way | None]] = {
    "ours": ours,
    "ours, in a layer": in_a_layer,
    "ours, with gather": functools.partial(in_a_layer, gathers=True),
    "DeepGEMM": deep_gemm_grouped,
}


def wrong(operands: Operands, which: str, way: Way) -> str | None:
    """The error of some rows of a GEMM as a text, or None."""
    way.out.fill_(torch.nan)
    way.run()
    chosen = torch.linspace(0, operands.num_rows - 1, _CHECKED_ROWS, device="cuda").long()
    made = way.out[chosen if way.places is None else way.places[chosen]].float()
    due = operands.due(which, chosen)
    if way.weights is not None:
        due *= way.weights[chosen, None]
    cosine = torch.nn.functional.cosine_similarity(made, due, dim=1).min().item()
    return None if cosine > _LEAST_COSINE else f"the cosine of a row of the {which} product is {cosine:.3g}"


def lines(name: str, chosen: list[str], samples: int, core_library: Path | None) -> Iterator[dict[str, Any]]:
    operands, timer = Operands(SHAPES[name], core_library), CudaTimer()
    unit = operands.shape.flops(False) / 6
    found = {each: {"shape": name, "routing": "even", "impl": each, "mode": "graph"} for each in chosen}
    for which, operations in PRODUCTS.items():
        ready: dict[str, tuple[Way, Captured, list[float]]] = {}  # ways are kept: graphs don't hold their operands
        for implementation, line in found.items():
            if "error" in line:
                continue
            try:
                way = IMPLEMENTATIONS[implementation](operands, which)
                if way is None:
                    continue
                error = wrong(operands, which, way)
                if error is None:
                    ready[implementation] = way, captured(timer, way), []
            except Exception as failure:  # a peer's requirements differ between versions, and so does its memory
                error = text_of(failure)
            if error is not None:
                line["error"] = error
        for _ in range(_ROUNDS):
            for _, call, times in ready.values():
                times += timer.sample(call.launch, samples, cold=True)
        for implementation, (_, call, times) in ready.items():
            figures: dict[str, Any] = time_fields(times, digits=1)
            figures["tflops"] = round(operations * unit / statistics.median(times) / 1e6, 1)
            figures["launches"] = call.launches
            found[implementation] |= {f"{which}_{key}": value for key, value in figures.items()}
    yield from found.values()


def captured(timer: CudaTimer, way: Way) -> Captured:
    def run() -> dict[str, torch.Tensor]:
        way.run()
        return {"out": way.out}

    return timer.capture(Body(run), "graph")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=_DEFAULT, choices=list(SHAPES))
    parser.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--samples", type=int, default=9, help="calls of each product in each of three rounds")
    parser.add_argument("--core-library", type=Path, required=True, help="libpmo_core.so with kernels for Hopper")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    arguments = parser.parse_args()
    version = None
    if "DeepGEMM" in arguments.impl:
        try:
            version = deep_gemm().__version__
        except ImportError as failure:
            print(f"{failure}; the figures are ours alone", file=sys.stderr)
    failed = False
    with arguments.out.open("w", encoding="utf-8") as file:

        def report(line: dict[str, Any]) -> None:
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()

        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        report({"machine": True, **gpu_facts(), "commit": arguments.commit, "date": date, "deep_gemm": version})
        for shape in arguments.shapes:
            for line in lines(shape, arguments.impl, arguments.samples, arguments.core_library):
                failed |= "error" in line
                report(line)
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
