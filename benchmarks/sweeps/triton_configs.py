#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times the Triton kernels with every configuration at the benchmark's shapes; source of triton/ops/configs.py.

    python3 -m benchmarks.sweeps.triton_configs --out triton-configs.jsonl [--shapes dsv3 ...]

Needs an NVIDIA GPU and PyTorch, not Paddle. A time is the median over replays of a CUDA graph of one call with a cold
L2, as in `python -m benchmarks.kernels`. Every configuration must give the bits of the default one (dot products
aside), else its line says so and has no time. The table that is printed has the fastest configurations per operation
and shape, and the default one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import benchmarks.without_paddle  # noqa: F401  before the imports that need it
from benchmarks.kernels.cuda_timer import CudaTimer
from benchmarks.kernels.device import Body, Outputs
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import SETS, SHAPES, Case
from benchmarks.kernels.tensors import TensorInputs
from benchmarks.kernels.torch_device import TorchDevice
from benchmarks.spread import time_fields
from paddle_moe_ops.triton.ops.configs import Config
from paddle_moe_ops.triton.ops.permute import permute
from paddle_moe_ops.triton.ops.unpermute import unpermute
from paddle_moe_ops.triton.ops.unpermute_backward import unpermute_backward

DEFAULT = [case.shape.name for case in SETS["targets"]]
Call = Callable[[Config | None], Outputs]


def calls(device: TorchDevice, inputs: TensorInputs) -> dict[str, tuple[Call, list[Config]]]:
    """Each operation as a function of its configuration, and the configurations to try."""
    maps = inputs.token_rows, inputs.row_to_token

    def permuted(source: Any, scale: Any) -> Call:
        def call(config: Config | None) -> Outputs:
            rows, scales = permute(device, source, scale, *maps, "all", config=config)
            return {"rows": rows} if scales is None else {"rows": rows, "row_scales": scales}

        return call

    def summed(weights: Any) -> Call:
        return lambda config: {"out": unpermute(device, inputs.rows, inputs.token_rows, weights, config=config)}

    def gradients(config: Config | None) -> Outputs:
        arrays = inputs.d_out, inputs.token_rows, inputs.row_to_token, inputs.rows, inputs.row_probs
        return {"d_rows": unpermute_backward(device, *arrays, config=config)[0]}

    copies = [Config(size, warps) for size, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8))]
    sums = [Config(size, warps) for size, warps in itertools.product((256, 512, 1024, 2048, 4096), (1, 2, 4, 8))]
    backward = [Config(size, warps) for size, warps in itertools.product((1024, 2048, 4096, 8192), (1, 2, 4, 8))]
    return {
        "permute:bf16": (permuted(inputs.x, None), copies),
        "permute:fp8": (permuted(inputs.x_fp8, inputs.scale), copies),
        "unpermute:plain": (summed(None), sums),
        "unpermute:weighted": (summed(inputs.row_probs), sums),
        "unpermute_backward:weighted": (gradients, backward),
    }


def same(actual: Outputs, expected: Outputs) -> bool:
    return all(torch.equal(actual[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


def measure(timer: CudaTimer, call: Call, config: Config | None, expected: Outputs, samples: int) -> dict[str, Any]:
    captured = timer.capture(Body(lambda: call(config)), "graph")
    captured.launch()
    torch.cuda.synchronize()
    if not same(captured.outputs(), expected):
        return {"error": "other bits than with the default configuration"}
    times = timer.sample(captured.launch, samples, cold=True)
    return time_fields(times, digits=2)


def lines(shapes: list[str], operations: list[str], samples: int) -> Iterator[dict[str, Any]]:
    """One line per shape, operation and configuration; configuration null is the default."""
    timer, device = CudaTimer(), TorchDevice()
    for name in shapes:
        shape = SHAPES[name]
        inputs = TensorInputs(make_problem(Case(shape, shape.routing)), "cuda")
        for operation, (call, configs) in calls(device, inputs).items():
            if operations and operation not in operations:
                continue
            expected = {key: value.clone() for key, value in call(None).items()}
            for config in [None, *configs]:
                found = measure(timer, call, config, expected, samples)
                yield {"op": operation, "shape": name, "config": config and config._asdict(), **found}
            del expected
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=DEFAULT, choices=sorted(SHAPES))
    parser.add_argument("--ops", nargs="+", default=[])
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    failed = False
    best: dict[tuple[str, str], list[tuple[float, str]]] = {}
    with arguments.out.open("w", encoding="utf-8") as file:
        command = " ".join(each.rpartition("/")[2] for each in sys.argv)
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": command}
        file.write(json.dumps(facts) + "\n")
        for line in lines(arguments.shapes, arguments.ops, arguments.samples):
            file.write(json.dumps(line) + "\n")
            file.flush()
            config = "default" if line["config"] is None else "/".join(map(str, line["config"].values()))
            if "us" in line:
                best.setdefault((line["op"], line["shape"]), []).append((line["us"], config))
            else:
                failed = True
                print(f"{line['op']} {line['shape']} {config}: {line['error']}")
    for (operation, shape), times in best.items():
        default = next((us for us, config in times if config == "default"), float("nan"))
        fastest = ", ".join(f"{config} {us:.1f}" for us, config in sorted(times)[:5])
        print(f"{operation:28} {shape:18} default {default:7.1f} | {fastest}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
