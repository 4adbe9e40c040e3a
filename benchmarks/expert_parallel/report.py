# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Writes expert_parallel_performance.md to build/pages from ``benchmarks/results/*-expert-parallel.jsonl``.

Layers of ``*-expert-parallel-liger.jsonl`` stand beside those of the same GPUs.
``*-expert-parallel-few.jsonl`` and ``*-expert-parallel-overlap.jsonl`` become sections each. If there are
``*-expert-parallel-timeline.jsonl``, the newest of them becomes a section and a picture.

python3 -m benchmarks.expert_parallel.report
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.table import markdown
from benchmarks.pages import BUILT, made_by
from benchmarks.series import differences
from benchmarks.spread import deviation, with_deviation

from .overlap_report import overlap_section
from .timeline_report import PICTURE, Recorded, picture, section

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results", BUILT / "expert_parallel_performance.md"

INTRODUCTION = """# Experts on several GPUs: measured

The benchmark runs under Paddle with a process for each GPU. Tokens are bfloat16, their experts drawn uniformly. All
times are the slowest rank's, on the GPU, with all calls queued; the router's matrix product is not included. ± is the
larger distance of the fastest and the slowest sample from the median, in results that have both.

* *copy* is the driver's own copy, by all ranks at once, of the bytes that must cross from a rank to others: a token
  once to each rank that has one of its experts.
* *dispatch* and *combine* are those of `ExpertParallel(..., combine="reduced", transport="peer")`, all of it: routing,
  and a copy of what arrived, which is left out *in place* (`copy=False`). *float8* is dispatch with
  `payload="fp8_1x128"`: tokens are quantised on the way, and are bfloat16 again where they arrive.
* *rows* is what users write by hand, with NCCL: `permute`, `paddle.distributed.alltoall_single` of a row for each slot,
  `sort_chunks`. *all-to-all* is that collective alone, on the bytes of dispatch.
* The layer is dispatch, `moe_mlp` and combine, forward and backward, in TFLOP/s of the matrix products for each GPU, or
  "-" where it was not measured. *float8* is with `compute="fp8_1x128"`, and matrices are quantised before, as once in a
  step of the optimizer; *sent as well* is with `payload="fp8_1x128"`, too.
* *LigerCute here* is the same of the peer's package on the same GPUs, by `python3 -m
  benchmarks.expert_parallel.liger_cute`, with the faster one of its two forms of kernels.
* Published: LigerCute (LiG) and DeepEP (DeE) between as many GPUs, read off LigerCute's figures, +-3 TFLOP/s.
"""
EXCHANGES = ["layer", "tokens a rank", "MB that cross", "copy", "dispatch", "in place", "float8", "combine"]
EXCHANGES += ["all-to-all", "rows", "rows / dispatch"]
LAYERS = ["layer", "bfloat16", "float8", "float8, sent as well", "LigerCute here", "published"]
# TFLOP/s a GPU, forward and backward, at 8192 tokens a rank, by the number of ranks.
PUBLISHED = {
    2: {"qwen3-30b": "LiG 307 / 215, DeE 124 / 152", "mixtral": "LiG 534 / 384, DeE 500 / 442"},
    4: {"qwen3-30b": "LiG 274 / 207", "mixtral": "LiG 548 / 398"},
    8: {"qwen3-30b": "LiG 238 / 211", "mixtral": "LiG 533 / 400"},
}


def _layer(found: dict[str, dict[str, Any]], kind: str = "") -> str:
    """TFLOP/s of a layer's passes."""
    passes = [found.get(f"layer_{which}{kind}") for which in ("forward", "backward")]
    return " / ".join("-" if each is None else with_deviation(each["tflops"], deviation(each)) for each in passes)


class Peer:
    """A result file of LigerCute's layers.

    Attributes:
        machine: its first line.
    """

    def __init__(self, path: Path) -> None:
        self.machine, *self._lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())

    @property
    def packages(self) -> str:
        """Versions and date."""
        versions = ", ".join(f"{name} {version}" for name, version in self.machine["versions"].items())
        return f"{versions}, {self.machine['date']}"

    def layer(self, shape: str, tokens: int) -> str:
        """TFLOP/s of the faster form of its kernels, or "failed" if none of them ran."""
        forms: dict[str, dict[str, dict[str, Any]]] = {}
        for line in self._lines:
            if (line["shape"], line["tokens"]) == (shape, tokens):
                forms.setdefault(line["kernels"], {})[line.get("what", "failed")] = line
        ran = [form for form in forms.values() if "layer" in form]
        if not ran:
            return "failed" if forms else "-"
        return _layer(min(ran, key=lambda form: form["layer"]["us"]))


def _exchanges(shape: str, found: dict[str, dict[str, Any]]) -> list[str]:
    """A row of the table of exchanges."""

    def us(what: str) -> str:
        return with_deviation(found[what]["us"], deviation(found[what]))

    def share(what: str) -> str:
        return f"{us(what)} ({found['p2p_copy']['us'] / found[what]['us']:.2f})"

    cells = [shape, str(found["p2p_copy"]["tokens"]), f"{found['p2p_copy']['bytes'] / 1e6:.0f}", us("p2p_copy")]
    cells += [share("dispatch"), share("dispatch_without_copy"), us("dispatch_float8")]
    cells += [share("combine"), us("alltoall_single")]
    faster = found["rows_alltoall"]["us"] / found["dispatch"]["us"]
    return [*cells, us("rows_alltoall"), f"{faster:.1f}"]


def _layers(shape: str, found: dict[str, dict[str, Any]], peer: Peer | None) -> list[str]:
    """A row of the table of layers."""
    published = PUBLISHED.get(found["p2p_copy"]["ranks"], {})
    here = peer.layer(shape, found["p2p_copy"]["tokens"]) if peer else "-"
    ours = [_layer(found, kind) for kind in ("", "_float8", "_float8_payload")]
    return [shape, *ours, here, published.get(shape, "-")]


def page(paths: list[Path], peers: Sequence[Path] = ()) -> str:
    """The text of the page.

    Args:
        paths: of our results.
        peers: results of LigerCute, for tables of the same GPUs.
    """
    text = INTRODUCTION
    peer_of = {tuple(each.machine["gpus"]): each for each in map(Peer, peers)}
    for path in paths:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        machine, rest = lines[0], lines[1:]
        shapes = list(dict.fromkeys(line["shape"] for line in rest))
        text += f"\n## {len(machine['gpus'])} x {machine['gpus'][0]}\n\nCommit {machine['commit']}, {machine['date']}, "
        text += f"driver {machine['driver']}. Microseconds; in parentheses the share of the copy's speed.\n"
        peer = peer_of.get(tuple(machine["gpus"]))
        text += f"LigerCute here: {peer.packages}.\n\n" if peer else "\n"
        of_shapes = {shape: {line["what"]: line for line in rest if line["shape"] == shape} for shape in shapes}
        text += markdown(EXCHANGES, [_exchanges(shape, found) for shape, found in of_shapes.items()])
        text += "\nTFLOP/s of layers, forward / backward.\n\n"
        text += markdown(LAYERS, [_layers(shape, found, peer) for shape, found in of_shapes.items()])
    return text


FEW = """
## Few tokens

Layers without gradients, as decoding has them, with up to 256 tokens a rank in bfloat16. Exchanges of *one* launch each
way, those of `tokens_per_rank` up to 256, beside those of *several*. The layer is dispatch, `moe_mlp` and combine.
*Host* is the time of a layer whose calls are not queued in advance: under the plug-in each allocation takes several
times as long as in a GPU build of Paddle.
"""


def few(paths: list[Path]) -> str:
    """The section of layers with few tokens."""
    text = FEW if paths else ""
    for path in paths:
        machine, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        text += f"\n{len(machine['gpus'])} x {machine['gpus'][0]}, commit {machine['commit']}, {machine['date']}. "
        text += "Microseconds: one / several.\n\n"
        rows = []
        for shape, tokens in dict.fromkeys((line["shape"], line["tokens"]) for line in lines):
            found = {
                (line["what"], line["launches"]): line
                for line in lines
                if (line["shape"], line["tokens"]) == (shape, tokens)
            }

            def both(what: str, field: str = "us", found: dict[Any, Any] = found) -> str:
                ways = (found[what, launches] for launches in ("one", "several"))
                return " / ".join(
                    f"{way[field]:.0f}" if field != "us" else with_deviation(way["us"], deviation(way)) for way in ways
                )

            timed = [both(what) for what in ("dispatch", "combine", "layer_forward")]
            rows.append([shape, str(tokens), *timed, both("layer_forward", "eager_us")])
        text += markdown(["layer", "tokens a rank", "dispatch", "combine", "layer", "host"], rows)
    return text


def main(results: Path = RESULTS, target: Path = PAGE) -> None:
    """Write the page, and the picture if a timeline was recorded."""
    target.parent.mkdir(parents=True, exist_ok=True)
    peers = sorted(results.glob("*-expert-parallel-liger.jsonl"))
    text = page(sorted(results.glob("*-expert-parallel.jsonl")), peers)
    text += few(sorted(results.glob("*-expert-parallel-few.jsonl")))
    recorded = [Recorded.of(path) for path in sorted(results.glob("*-expert-parallel-timeline.jsonl"))]
    if recorded:
        newest = max(recorded, key=lambda each: each.machine["date"])
        text += section(newest)
        target.with_name(PICTURE).write_text(picture(newest), encoding="utf-8")
    text += "".join(overlap_section(path) for path in sorted(results.glob("*-expert-parallel-overlap.jsonl")))
    kinds = ("", "-few", "-timeline", "-overlap")
    apart = differences.section(results, tuple(f"expert-parallel{kind}" for kind in kinds))
    text += apart and f"\n{apart}"
    text += made_by("Generated by `make docs` from the results of `python3 -m benchmarks.expert_parallel`.")
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
