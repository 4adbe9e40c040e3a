# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times dispatch, combine and whole layers between GPUs of one machine, a process each, under Paddle.

    python3 -m benchmarks.expert_parallel --out benchmarks/results/h200x2-expert-parallel.jsonl --commit COMMIT

It runs under a CPU build of Paddle with the plug-in of tools/gpu_rig, too. A line of the result is one rank's, the
slowest one's: median microseconds of a call on the GPU, with all calls queued; those of calls as the host makes them
("eager_us"), which under the plug-in allocates slowly; and the bytes that must cross from the rank to others.

    p2p_copy         the driver copies that many bytes to the next rank's memory, all ranks at once
    dispatch         `ExpertParallel.dispatch` in no_grad, all of it, routing too
    dispatch_without_copy  with ``copy=False``
    dispatch_float8  with ``payload="fp8_1x128"``; tokens arrive in bfloat16 again
    combine          `ExpertParallel.combine` in no_grad
    rows_alltoall    what users write by hand: permute, alltoall_single of all rows, sort_chunks
    alltoall_single  the same bytes as dispatch, through paddle.distributed
    layer_forward    dispatch, `moe_mlp` and combine, with gradients to come
    layer            the same with the backward pass
    layer_backward   the difference
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from pathlib import Path

from tests.distributed import processes

from .measure import SHAPES, TOKENS, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="cuda_rig", choices=processes.BACKENDS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a rank")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a shape")
    parser.add_argument("--no-layers", action="store_true")
    arguments = parser.parse_args()
    processes.TIMEOUT_S = arguments.timeout
    os.environ["MALLOC_PERTURB_"] = "0"  # which takes time
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    machine = {"machine": True, "gpus": [each.split(", ")[0] for each in gpus], "driver": gpus[0].split(", ")[1]}
    machine |= {"commit": arguments.commit, "date": datetime.date.today().isoformat(), "ranks": arguments.ranks}
    lines = [machine]
    for name in arguments.shapes:
        of_ranks = processes.run(
            measure,
            arguments.ranks,
            arguments.backend,
            name=name,
            tokens=arguments.tokens,
            samples=arguments.samples,
            layers=not arguments.no_layers,
        )
        shape = SHAPES[name]._asdict()
        for each in zip(*of_ranks, strict=True):
            slowest = max(each, key=lambda found: found["us"])
            line = {"shape": name, "tokens": arguments.tokens, **shape, "ranks": arguments.ranks, **slowest}
            lines.append(line)
            print(json.dumps(line), flush=True)
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
