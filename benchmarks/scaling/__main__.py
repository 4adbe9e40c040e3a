# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts layers of experts on many GPUs. Neither a GPU nor Paddle is needed, but for `record`.

    python -m benchmarks.scaling check benchmarks/results/h200x2-expert-parallel.jsonl
    python -m benchmarks.scaling check benchmarks/results/h200x4-expert-parallel.jsonl \
        --calibrated-by benchmarks/results/h200x2-expert-parallel.jsonl --corrected
    python -m benchmarks.scaling predict dsv3-4k --ranks 8 64 --tokens 8192
    python -m benchmarks.scaling record --out benchmarks/results/scaling/demo-traces.jsonl --commit COMMIT

`check` compares the model with what was measured, and fails where they are more than 10 % apart. `predict` prints a
line for each number of ranks, size of NVLink domains and transport. `record` trains the demo's model and takes down
where it sends its tokens. `python -m benchmarks.scaling.report` writes scaling.md.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from benchmarks.kernels.table import print_table
from benchmarks.layer.shapes import SHAPES

from .calibration import calibrated, corrected
from .check import MOST_ERROR, compared, foretold
from .layers import predict
from .traces import KINDS, drawn, load, write
from .traffic import COMBINES, PAYLOADS, Layout, count

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
EXCHANGES = RESULTS / "h200x2-expert-parallel.jsonl"
_RECORDED = ((8, 2), (64, 6), (64, 8), (128, 8), (256, 8))  # E and K of the models that are predicted
_SOURCES = 8  # ranks whose tokens are drawn; with more ranks they repeat


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def check(arguments: argparse.Namespace) -> int:
    """Predicted beside measured; 1 if they differ too much."""
    if arguments.calibrated_by is None:
        _, found = compared(arguments.results, arguments.exchanges)
    else:
        machine = calibrated(arguments.results, arguments.calibrated_by)
        machine = corrected(machine, arguments.exchanges) if arguments.corrected else machine
        found = foretold(machine, arguments.exchanges)
    columns = ("layer", "what", "measured us", "predicted us", "error", "without this layer", "bytes", "")
    rows = []
    for each in found:
        cells = [each.shape, each.what, f"{each.measured_us:.0f}", f"{each.predicted_us:.0f}", _percent(each.error)]
        cells += [
            _percent(each.held_out_error),
            "equal" if each.bytes_match else "differ",
            "" if each.passed else "FAIL",
        ]
        rows.append(cells)
    print_table(columns, rows)
    failed = sum(not each.passed for each in found)
    print(f"{len(found) - failed} of {len(found)} lines are within {MOST_ERROR:.0%}, with the bytes of the model")
    return 1 if failed else 0


def predictions(arguments: argparse.Namespace) -> int:
    """A line for each number of ranks, domain and transport."""
    machine = calibrated(arguments.results, arguments.exchanges)
    shape = SHAPES[arguments.shape]._replace(tokens=arguments.tokens)
    if arguments.trace is None:
        trace = drawn(arguments.routing, shape.experts, shape.topk, _SOURCES, arguments.tokens)
    else:
        fits = [each for each in load(arguments.trace) if (each.experts, each.topk) == (shape.experts, shape.topk)]
        if not fits:
            print(f"{arguments.trace} has no trace of {shape.topk} of {shape.experts} experts", file=sys.stderr)
            return 1
        trace = fits[-1].split(_SOURCES)
    rows = []
    for ranks in arguments.ranks:
        for domain in arguments.domains:
            traffic = count(trace, Layout.of(ranks, domain)).scaled(arguments.tokens)
            transports = ["peer" if ranks <= domain else "by_domain"] if arguments.combine == "reduced" else []
            for transport in [*transports, "alltoall", "rows"]:
                payload = "bf16" if transport == "peer" else arguments.payload
                how = {"transport": transport, "combine": arguments.combine, "payload": payload}
                made = predict(machine, shape, traffic, **how)
                cells = [str(ranks), str(domain), transport, payload, f"{made.imbalance:.2f}"]
                for each in (made.forward, made.backward):
                    parts = (each.dispatch_us, each.products_us, each.combine_us)
                    cells += [" + ".join(f"{us:.0f}" for us in parts), f"{each.tflops:.0f}"]
                rows.append([*cells, f"{made.sent_bytes / 1e6:.0f}", f"{made.far_bytes / 1e6:.0f}"])
    print("us: dispatch + experts + combine; MB of the busiest rank, those over the network once more")
    columns = [
        "ranks",
        "domain",
        "transport",
        "payload",
        "imbalance",
        "forward us",
        "TFLOP/s",
        "backward us",
        "TFLOP/s",
    ]
    print_table([*columns, "MB", "over the network"], rows)
    return 0


def record(arguments: argparse.Namespace) -> int:
    """Train and take down."""
    from .record import record as recorded

    settings = {"hidden": 128, "layers": 4, "steps": arguments.steps, "windows": 32}
    traces = [trace for experts, topk in _RECORDED for trace in recorded(experts, topk, **settings)]
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.out, {**settings, "commit": arguments.commit, "date": date}, traces)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: object) -> argparse.ArgumentParser:
        made = commands.add_parser(name)
        made.set_defaults(run=run)
        return made

    checking = command("check", check)
    checking.add_argument("exchanges", type=Path)
    checking.add_argument("--calibrated-by", type=Path, help="another file, of fewer ranks; without: the same")
    checking.add_argument("--corrected", action="store_true", help="with the speed to several ranks that the file has")
    predicting = command("predict", predictions)
    predicting.add_argument("shape", choices=SHAPES)
    predicting.add_argument("--ranks", nargs="+", type=int, default=[2, 8, 16, 64])
    predicting.add_argument("--domains", nargs="+", type=int, default=[8, 72])
    predicting.add_argument("--tokens", type=int, default=8192, help="of a rank")
    predicting.add_argument("--routing", choices=KINDS, default="uniform")
    predicting.add_argument("--trace", type=Path, help="recorded traces, instead of --routing")
    predicting.add_argument("--combine", choices=COMBINES, default="reduced")
    predicting.add_argument("--payload", choices=PAYLOADS, default="bf16")
    predicting.add_argument("--exchanges", type=Path, default=EXCHANGES)
    for each in (checking, predicting):
        each.add_argument("--results", type=Path, default=RESULTS, help="what was measured on one GPU")
    recording = command("record", record)
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--steps", type=int, default=300)
    recording.add_argument("--commit", default="unknown")
    arguments = parser.parse_args(argv)
    if getattr(arguments, "corrected", False) and arguments.calibrated_by is None:
        parser.error("--corrected needs --calibrated-by")
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        print(f"benchmarks.scaling: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
