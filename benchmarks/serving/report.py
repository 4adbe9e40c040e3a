# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Writes serving_performance.md to build/pages from ``*-serving.jsonl`` and ``*-served-model.jsonl`` of the results.

python3 -m benchmarks.serving.report
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import BUILT, load
from benchmarks.spread import deviation, with_deviation

from .models import MODELS

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results", BUILT / "serving_performance.md"
_GIVEN = ", maps given"

INTRODUCTION = """# Layers with few tokens: measured

Forward passes of a layer of experts, as decode and small batches have them: replays of CUDA graphs with a cold L2, in
microseconds, medians with the larger distance of the fastest and the slowest sample. Experts are drawn
uniformly. The router's matrix product and its top-k are not included.

* *floor* is the bytes of the matrices of experts that have rows, at the speed of the fastest large read of the same
  process. A layer can be faster: its reads are in a better order than those of that sum.
* *from ids* includes routing; *maps given* does not.
* *kind* is the form of the matrices. Tokens are bfloat16; with float8 both quantise rows in the measured time.
* *ratio* is the time of the fastest peer over ours, both with maps or both from ids.

Peers, whose code is run as it is:

* *SGLang*: the Triton kernel of its wheel between plain kernels for SwiGLU and the sum over slots, with its maps given.
  The benchmark tunes its tiles for each row.
* *lmdeploy*: the Triton kernels of its wheel, from ids. With int8 it quantises tokens, too.
* *DeepGEMM*: its masked grouped GEMMs (`sgl-deep-gemm`) between plain kernels that quantise rows, with maps given.
* *humming*: its grouped GEMMs of integer codes between plain kernels, with maps given.

FlashInfer is missing: its wheel has 101 MB, and nvcc compiles its layers for this GPU, CUTLASS templates, for minutes.

"""
MODEL_INTRODUCTION = """## A whole decoder

The decoder of `examples/serve_ernie45_moe.py` under Paddle: a step appends a token to each sequence of the batch. Times
are microseconds of a step, medians of rounds of 16 steps with the larger distance of the fastest and the slowest round.

* *eager* is limited by the host, which launches each operator. *graph* replays one CUDA graph for every step.
* *tokens/s* are those of the graph. In every row it wrote the bits of the eager steps: tokens, keys and values.
* *experts* is the format of the experts' matrices; `none` is bfloat16.

"""


def _time(line: dict[str, Any], name: str) -> str:
    """A cell: the median and its spread, or why there is none."""
    found = line.get(name)
    if found is None:
        return "-"
    if "error" in found:
        return "wrong" if found["error"].startswith("out is") else "failed"
    return with_deviation(found["us"], deviation(found), 1)


def _peers(lines: list[dict[str, Any]]) -> list[str]:
    """Names of the peers, in the order of the lines."""
    found = (name for line in lines for name, value in line.items() if isinstance(value, dict))
    return [name for name in dict.fromkeys(found) if not name.startswith("ours")]


def _ratio(line: dict[str, Any], peers: list[str]) -> str:
    """The time of the fastest peer over ours from the same start."""
    ratios = []
    for name in peers:
        ours = line["ours" + (_GIVEN if name.endswith(_GIVEN) else "")]
        if "us" in line.get(name, {}) and "us" in ours:
            ratios.append(line[name]["us"] / ours["us"])
    return f"{min(ratios):.2f}" if ratios else "-"


def _table(lines: list[dict[str, Any]]) -> str:
    peers = _peers(lines)
    head = ["model", "kind", "tokens", "experts with rows", "floor", "from ids", "maps given"]
    head += [*(name.removesuffix(_GIVEN) for name in peers), "ratio"]
    text = f"| {' | '.join(head)} |\n{'|---' * len(head)}|\n"
    for line in lines:
        cells = [line["model"], line.get("kind", "bf16"), line["tokens"], line["experts"], f"{line['floor_us']:.1f}"]
        cells += [_time(line, name) for name in ("ours", f"ours{_GIVEN}", *peers)]
        text += f"| {' | '.join(map(str, [*cells, _ratio(line, peers)]))} |\n"
    return text


def _refuse_wrong(path: Path, lines: list[dict[str, Any]]) -> None:
    """A page shows no results of this package that are wrong."""
    wrong = [
        (each["model"], each.get("kind"), each["tokens"])
        for each in lines
        if any(name.startswith("ours") and "error" in found for name, found in each.items())
    ]
    if wrong:
        raise SystemExit(f"{path}: wrong results at {wrong}; measure again")


def _of_model(path: Path) -> str:
    """The part of the page about a decoder."""
    machine, *lines = load(path)
    if differ := [(each["format"], each["batch"]) for each in lines if not each.get("same_bits", False)]:
        raise SystemExit(f"{path}: the graph's bits differ at {differ}; measure again")
    sizes = ", ".join(f"{name} {size}" for name, size in machine["sizes"].items())
    text = f"### {machine['gpu']}\n\nCommit {machine['commit']}, {machine['date']}, Paddle {machine['paddle']}. "
    text += f"Other operators than the package's: {machine['dense']}. Sizes: {sizes}.\n\n"
    text += "| experts | batch | eager | graph | eager / graph | tokens/s |\n|---|---|---|---|---|---|\n"
    for line in lines:
        eager, graph = line["eager"], line["graph"]
        cells = [line["format"], line["batch"], _time(line, "eager"), _time(line, "graph")]
        cells += [f"{eager['us'] / graph['us']:.2f}", f"{1e6 * line['batch'] / graph['us']:,.0f}"]
        text += f"| {' | '.join(map(str, cells))} |\n"
    return f"{text}\n"


def page(paths: list[Path], of_models: Sequence[Path] = ()) -> str:
    """The text of the page from results of layers and of whole decoders."""
    text = INTRODUCTION
    for path in paths:
        machine, *lines = load(path)
        _refuse_wrong(path, lines)
        versions = machine.get("peers") or ({"SGLang": machine["sglang"]} if "sglang" in machine else {})
        peer = "".join(f", {name} {version}" for name, version in versions.items())
        beside = f", beside {', '.join(machine['peers'])}" if "peers" in machine else ""
        text += f"## {machine['gpu']}{beside}\n\nCommit {machine['commit']}, {machine['date']}, "
        text += f"PyTorch {machine['torch']}{peer}; fastest read {machine['read_tbs']:.2f} TB/s.\n\n{_table(lines)}\n"
    sizes = (f"{name} {hidden}, {inner}, {experts}, {topk}" for name, (hidden, inner, experts, topk) in MODELS.items())
    text += f"Hidden size, inner size, experts and experts of a token: {'; '.join(sizes)}.\n"
    return text + (f"\n{MODEL_INTRODUCTION}{''.join(map(_of_model, of_models))}" if of_models else "")


def main(target: Path = PAGE) -> int:
    """Write the page."""
    target.parent.mkdir(parents=True, exist_ok=True)
    layers, models = (sorted(RESULTS.glob(f"*-{kind}.jsonl")) for kind in ("serving*", "served-model"))
    target.write_text(page(layers, models), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
