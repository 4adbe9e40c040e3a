# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Both passes of one layer, once, with the part of each launch; `benchmarks/ncu.py` reads counters meanwhile.

    python3 -m benchmarks.layer.launches --shape dsv3-4k --core-library libpmo_core.so --out launches.jsonl

Without a library, Triton runs all GEMMs. A line for each launch, in their order: the pass, the part of it, and the
operations of its GEMM.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.kernels.torch_device import TorchDevice, gpu_facts

from .implementations import ours
from .inputs import Inputs
from .parts import flops_of, parts_of
from .shapes import SHAPES

__all__ = ["Recorder"]


class Recorder(TorchDevice):
    """A device that writes down which kernels are launched."""

    def __init__(self, core_library: Path | None) -> None:
        super().__init__(core_library)
        self.launched: list[str] = []

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        self.launched.append(kernel.__name__)
        super().launch(kernel, programs, types, arguments, constants, warps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=list(SHAPES))
    parser.add_argument("--core-library", type=Path)
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    shape, device = SHAPES[arguments.shape], Recorder(arguments.core_library)
    passes = ours(Inputs(shape, "even"), device=device, float8=arguments.float8)
    _, kept = passes.forward()
    count = len(device.launched)
    passes.backward(kept)
    torch.cuda.synchronize()
    with arguments.out.open("w", encoding="utf-8") as file:
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        print(json.dumps({"machine": True, **gpu_facts(), "date": date}), file=file)
        for which, launched in (("forward", device.launched[:count]), ("backward", device.launched[count:])):
            parts = parts_of(which, launched)
            for part, flop in zip(parts, flops_of(shape, which, parts), strict=True):
                print(json.dumps({"pass": which, "part": part, "flop": flop}), file=file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
