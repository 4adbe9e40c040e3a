# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times dispatch, combine and whole layers between GPUs of one machine, a process each, under Paddle.

    python3 -m benchmarks.expert_parallel --out benchmarks/results/h200x2-expert-parallel.jsonl --commit COMMIT

It runs under a CPU build of Paddle with the plug-in of tools/gpu_rig, too. A line of the result is one rank's, the
slowest one's: median, minimum and maximum microseconds of a call on the GPU, with all calls queued; the same of calls
launched from the host ("eager_" fields), which under the plug-in allocates slowly; and the bytes that must cross from
the rank to others.

    p2p_copy         the driver copies that many bytes to the next rank's memory, all ranks at once
    dispatch         `ExpertParallel.dispatch` in no_grad, all of it, routing too
    dispatch_without_copy  with ``copy=False``
    dispatch_float8  with ``payload="fp8_1x128"``; tokens arrive in bfloat16 again
    combine          `ExpertParallel.combine` in no_grad
    rows_alltoall    the hand-written way: permute, alltoall_single of all rows, sort_chunks
    alltoall_single  the same bytes as dispatch, through paddle.distributed
    layer_forward    dispatch, `moe_mlp` and combine, with gradients to come
    layer            the same with the backward pass
    layer_backward   the difference; its minimum and maximum are bounds
    ..._float8       the same three with ``compute="fp8_1x128"`` and matrices quantised once
    ..._float8_payload  with ``payload="fp8_1x128"``, too

With ``--fetched`` the copy, dispatch and combine alone are timed, with several shares of rows that are fetched.

With ``--few`` layers without gradients are timed for few tokens of a rank, by exchanges of one launch each way and by
those of several launches.

With ``--overlap`` layers are timed, whose exchanges are in flight while other work runs, beside the same layers
without; each line has the steps of the call of median time.

With ``--timeline`` one layer call is recorded instead: for each rank when each step of routing, dispatch, products and
combine begins and ends, forward and backward, in microseconds from a common start. The recorded call is the one of
median time among several. A timeline of processes on a CPU:

    python3 -m benchmarks.expert_parallel --timeline --backend gloo --shapes trial --tokens 64 --out FILE --commit -
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tests.distributed import processes

from .measure import FEW_TOKENS, measure, measure_few, measure_shares
from .overlap import TRANSPORTS, overlaps
from .shapes import MODELS, SHAPES, TOKENS, machine
from .timeline import timelines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="cuda_rig", choices=processes.BACKENDS)
    parser.add_argument("--shapes", nargs="+", default=list(MODELS), choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a rank")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a shape")
    parser.add_argument("--no-layers", action="store_true")
    parser.add_argument("--fetched", type=int, nargs="+", choices=range(9), help="of every 8 rows")
    parser.add_argument("--few", type=int, nargs="*", help="numbers of tokens of a rank")
    parser.add_argument("--timeline", action="store_true", help="record the steps of a layer instead")
    parser.add_argument("--overlap", action="store_true", help="time layers with exchanges in flight instead")
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS, help="with --overlap")
    arguments = parser.parse_args()
    if arguments.backend == "gloo" and not arguments.timeline and arguments.transports != ["peer"]:
        parser.error("--backend gloo needs --timeline, or --overlap --transports peer; other times are those of GPUs")
    processes.TIMEOUT_S = arguments.timeout
    os.environ["MALLOC_PERTURB_"] = "0"  # which takes time
    lines = [machine(arguments.commit, arguments.ranks, gpu=arguments.backend != "gloo")]
    for name in arguments.shapes:
        for tokens in [arguments.tokens] if arguments.few is None else arguments.few or FEW_TOKENS:
            arguments.tokens = tokens
            recorded = overlaps_of if arguments.overlap else timeline_of if arguments.timeline else times_of
            of_shape = recorded(name, arguments)
            shape = {"shape": name, "tokens": tokens, **SHAPES[name]._asdict(), "ranks": arguments.ranks}
            lines += [{**shape, **each} for each in of_shape]
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def times_of(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All that is timed of a shape, each by the slowest rank."""
    options = {"name": name, "tokens": arguments.tokens, "samples": arguments.samples}
    if arguments.few is not None:
        call = measure_few
    elif arguments.fetched:
        call, options["fetched"] = measure_shares, arguments.fetched
    else:
        call, options["layers"] = measure, not arguments.no_layers
    of_ranks = processes.run(call, arguments.ranks, arguments.backend, **options)
    slowest = [max(each, key=lambda found: found["us"]) for each in zip(*of_ranks, strict=True)]
    for line in slowest:
        print(json.dumps({"shape": name, **line}), flush=True)
    return slowest


def timeline_of(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each rank, with the steps of one call of a layer."""
    options = {"name": name, "tokens": arguments.tokens, "samples": arguments.samples}
    of_ranks = processes.run(timelines, arguments.ranks, arguments.backend, **options)
    calls = sorted(zip(*of_ranks, strict=True), key=lambda call: max(steps[-1]["end_us"] for steps in call))
    call = calls[len(calls) // 2]
    for number, steps in enumerate(call):
        print(f"{name}, rank {number}: {len(steps)} steps in {steps[-1]['end_us']:.0f} us", flush=True)
    return [{"what": "timeline", "rank": number, "steps": steps} for number, steps in enumerate(call)]


def overlaps_of(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each case and transport, without and with exchanges in flight, each by the slowest rank."""
    options = {"name": name, "tokens": arguments.tokens, "samples": arguments.samples}
    of_ranks = processes.run(overlaps, arguments.ranks, arguments.backend, transports=arguments.transports, **options)
    slowest = [max(each, key=lambda found: found["us"]) for each in zip(*of_ranks, strict=True)]
    for line in slowest:
        how = "in flight" if line["in_flight"] else "in turn"
        print(f"{name}, {line['case']}, {line['transport']}, {how}: {line['us']:.0f} us", flush=True)
    return slowest


if __name__ == "__main__":
    main()
