# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times the layer of the published peer LigerCute between GPUs of one machine, a process each, under PyTorch.

    python3 -m benchmarks.expert_parallel.liger_cute --ranks 2 --commit COMMIT \
        --out benchmarks/results/h200x2-expert-parallel-liger.jsonl

Shapes, routing, FLOPs and timing are those of `benchmarks.expert_parallel`: all calls are queued, and a line has the
times of the slowest rank. The package has two forms of its kernels on Hopper, "relocatable" and "whole-program"
(LIGER_MOE_SM90_NONRDC=1); each shape runs with both, in processes of their own. If one of them fails or hangs, its line
has "failed" with the reason. Before it is timed, outputs and gradients of a few tokens are compared with PyTorch's.

    layer_forward    forward pass, which keeps everything for the backward pass
    layer            forward and backward pass
    layer_backward   the difference; its minimum and maximum are bounds
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spread import difference_fields, time_fields

from .ranks import in_processes
from .shapes import MODELS, SHAPES, TOKENS, Shape, machine

__all__ = ["main"]

KINDS = ("relocatable", "whole-program")
PACKAGES = "liger-cute-kernels", "nvidia-nvshmem-cu12", "torch"

_WHOLE_PROGRAM = "LIGER_MOE_SM90_NONRDC"  # of the environment
_CALLS, _WARM_CALLS = 3, 3
_CHECKED_TOKENS = 8
_TOLERANCE = 0.03  # of the largest reference value; roundings to bfloat16 are 0.4 % each
_CYCLES_PER_US = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--kernels", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a rank")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=90, help="seconds for a shape with one form of the kernels")
    arguments = parser.parse_args()
    versions = {name: metadata.version(name) for name in PACKAGES}
    lines = [machine(arguments.commit, arguments.ranks, gpu=True) | {"versions": versions}]
    for name in arguments.shapes:
        shape = SHAPES[name]
        options = {"shape": shape, "tokens": arguments.tokens, "samples": arguments.samples}
        sizes = {"shape": name, "tokens": arguments.tokens, **shape._asdict(), "ranks": arguments.ranks}
        for kernels in arguments.kernels:
            for found in in_processes(measure, arguments.ranks, arguments.timeout, options | {"kernels": kernels}):
                lines.append({**sizes, "transport": "LigerCute", "kernels": kernels, **found})
                print(json.dumps(lines[-1]), flush=True)
            arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def expert_matrices(shape: Shape, expert: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down matrices of an expert, the same on each rank."""
    generator = torch.Generator(device).manual_seed(expert)

    def random(rows: int, columns: int) -> Tensor:
        made = torch.randn(rows, columns, generator=generator, device=device)
        return (made * columns**-0.5).bfloat16()

    return random(shape.inner, shape.hidden), random(shape.inner, shape.hidden), random(shape.hidden, shape.inner)


def reference(
    shape: Shape, x: Tensor, ids: Tensor, probs: Tensor, matrices: Callable[[int], tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """Outputs of a layer in float32."""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        gate, up, down = (each.float() for each in matrices(expert))
        prob = (probs.float() * (ids == expert)).sum(1, keepdim=True)
        y = y + prob * ((F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    return y


class _Rank:
    """The inputs and the timed calls of one rank."""

    def __init__(self, rank: int, ranks: int, shape: Shape, tokens: int, samples: int) -> None:
        from liger_cute_kernels import nvshmem, tvm_ffi

        self.kernels, self.shape, self.samples = tvm_ffi, shape, samples
        self.device = torch.device("cuda", rank)
        generator = torch.Generator(self.device).manual_seed(1 << 20 | rank)
        random = {"generator": generator, "device": self.device}
        self.x = torch.randn(tokens, shape.hidden, **random).bfloat16()
        self.d_out = torch.randn(tokens, shape.hidden, **random).bfloat16()
        self.ids = torch.rand(tokens, shape.experts, **random).topk(shape.topk, 1).indices.int().contiguous()
        self.probs = torch.full((tokens, shape.topk), 1 / shape.topk, dtype=torch.bfloat16, device=self.device)
        own = shape.experts // ranks
        sizes = (shape.inner, shape.hidden), (shape.inner, shape.hidden), (shape.hidden, shape.inner)
        self.matrices = [torch.empty(own, *size, dtype=torch.bfloat16, device=self.device) for size in sizes]
        for number in range(own):
            found = expert_matrices(shape, rank * own + number, self.device)
            for target, source in zip(self.matrices, found, strict=True):
                target[number].copy_(source)
        self.team = nvshmem.resolve_team(None)
        self.one = torch.ones(1, device=self.device)

    def forward(self) -> Tensor:
        """Output of the layer, whose intermediates are dropped then."""
        y: Tensor = self._forward()[0]
        self.kernels.moe_pop_fwd(self.team)
        return y

    def _forward(self) -> tuple[Any, ...]:
        sizes = self.shape.experts, self.shape.topk, self.team
        found: tuple[Any, ...] = self.kernels.moe_fused_fwd_bf16(self.x, self.ids, self.probs, *self.matrices, *sizes)
        return found

    def both(self) -> tuple[Tensor, Tensor]:
        """Output of the layer, and the gradient of its tokens."""
        y, x_sorted, y_buffer, offsets, slots, tile_experts, tile_rows = self._forward()
        gradients = self.kernels.moe_fused_bwd_bf16(
            *(self.d_out, y_buffer, x_sorted, slots, tile_experts, offsets, self.ids, self.probs),
            *(*self.matrices, self.shape.experts, self.shape.topk, self.team, tile_rows),
        )
        self.kernels.moe_pop_fwd(self.team)
        return y, gradients[0]

    def check(self) -> dict[str, float]:
        """Largest errors of a few tokens' outputs and gradients, relative to the largest reference value.

        Raises:
            ValueError: an error is larger than the tolerance.
        """
        few = slice(None, None, self.x.shape[0] // _CHECKED_TOKENS)
        x = self.x[few].float().requires_grad_()
        matrices = lambda expert: expert_matrices(self.shape, expert, self.device)  # noqa: E731
        expected = reference(self.shape, x, self.ids[few], self.probs[few], matrices)
        (d_x,) = torch.autograd.grad(expected, x, self.d_out[few].float())
        expected = expected.detach()
        y, found_d_x = self.both()
        pairs = {"error": (y, expected), "gradient_error": (found_d_x, d_x)}
        errors = {name: relative_error(found[few], wanted) for name, (found, wanted) in pairs.items()}
        errors["error"] = max(errors["error"], relative_error(self.forward()[few], expected))
        if not all(error <= _TOLERANCE for error in errors.values()):
            raise ValueError(f"outputs differ from PyTorch's: {errors}")
        return errors

    def timed(self, call: Callable[[], Any]) -> dict[str, float]:
        """Time calls that follow each other on the GPU, all of them queued."""
        for _ in range(_WARM_CALLS):
            call()
        found = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.samples):
            torch.cuda.synchronize()
            dist.all_reduce(self.one)
            torch.cuda.synchronize()
            before = time.perf_counter()
            for _ in range(_CALLS):
                call()
            queued = time.perf_counter() - before
            torch.cuda.synchronize()
            torch.cuda._sleep(int((1.5e6 * queued + 2000) * _CYCLES_PER_US))
            dist.all_reduce(self.one)
            begin.record()
            for _ in range(_CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1000 / _CALLS)
        return time_fields(found)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, over the largest expected value."""
    return float((found.float() - expected).abs().max() / expected.abs().max())


def measure(rank: int, ranks: int, address: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """On one rank: all that is timed of a shape."""
    shape, tokens = options["shape"], options["tokens"]
    os.environ.pop(_WHOLE_PROGRAM, None)
    if options["kernels"] == "whole-program":
        os.environ[_WHOLE_PROGRAM] = "1"
    from liger_cute_kernels import MoEConfig, configure

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks, device_id=device)
    topology = {"num_experts": shape.experts, "top_k": shape.topk, "num_hosts": 1, "gpus_per_host": ranks}
    configure(device=device, moe=MoEConfig(max_tokens=tokens, hidden_size=shape.hidden, **topology))
    layer = _Rank(rank, ranks, shape, tokens, options["samples"])
    errors = layer.check()
    forward, both = layer.timed(layer.forward), layer.timed(layer.both)
    backward, flops = difference_fields(both, forward), shape.flops(tokens)
    dist.barrier()
    torch.cuda.synchronize()
    return [
        {"what": "layer_forward", **forward, "tflops": flops / forward["us"] / 1e6, **errors},
        {"what": "layer", **both},
        {"what": "layer_backward", **backward, "tflops": 2 * flops / backward["us"] / 1e6},
    ]


if __name__ == "__main__":
    main()
