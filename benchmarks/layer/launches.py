# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Both passes of one layer, once, with the part of each launch; `benchmarks/ncu.py` reads counters meanwhile.

    python3 -m benchmarks.layer.launches --shape dsv3-4k --core-library libpmo_core.so --out launches.jsonl

A line for each launch, in their order: the pass, the part of it, and the
operations of its GEMM.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.kernels.torch_device import gpu_facts

from .inputs import Inputs
from .library import LibraryLayer
from .parts import flops_of, parts_of
from .shapes import SHAPES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=list(SHAPES))
    parser.add_argument("--core-library", type=Path, required=True)
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    launched: list[str] = []
    passes = LibraryLayer(Inputs(shape, "even", arguments.core_library), float8=arguments.float8, launched=launched)
    _, kept = passes.forward()
    count = len(launched)
    passes.backward(kept)
    torch.cuda.synchronize()
    with arguments.out.open("w", encoding="utf-8") as file:
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        print(json.dumps({"machine": True, **gpu_facts(), "date": date}), file=file)
        for which, names in (("forward", launched[:count]), ("backward", launched[count:])):
            parts = parts_of(which, names)
            for part, flop in zip(parts, flops_of(shape, which, parts), strict=True):
                print(json.dumps({"pass": which, "part": part, "flop": flop}), file=file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
