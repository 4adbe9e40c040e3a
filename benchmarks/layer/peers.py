# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Products of experts as other packages make them, on tensors of PyTorch; implementations.py makes layers of them."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.packages import register_without_init

__all__ = ["UNSLOTH_CONFIGS", "PaddedRows", "ProductByExpert", "deep_gemm", "liger_moe", "unsloth_grouped_gemm"]

_STREAMS = 4  # as in TransformerEngine's GroupedLinear, which runs its GEMMs in this way on Hopper

# Rows, columns and depth of a tile, warps and stages: of forward, of the gradient of rows, of that of the matrices. The
# first is Unsloth's own choice without tuning on a Hopper GPU. Its tuning tries about a hundred for each GEMM.
UNSLOTH_CONFIGS = (
    ((64, 128, 128, 8, 3), (64, 64, 256, 8, 3), (64, 64, 256, 8, 3)),
    ((128, 128, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 4)),
    ((128, 256, 64, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 3)),
)


class _Streams:
    """Side streams that start after the current stream's work, and for which it waits."""

    def __init__(self) -> None:
        self.side = [torch.cuda.Stream() for _ in range(_STREAMS)]

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        current = torch.cuda.current_stream()
        for stream in self.side:
            stream.wait_stream(current)
        for index, call in enumerate(calls):
            with torch.cuda.stream(self.side[index % _STREAMS]):
                call()
        for stream in self.side:
            current.wait_stream(stream)


class ProductByExpert(torch.autograd.Function):
    """A cuBLAS GEMM for each expert; the host knows the number of rows of each."""

    streams: _Streams | None = None

    @classmethod
    def _run(cls, calls: Sequence[Callable[[], Any]]) -> None:
        if cls.streams is None:
            cls.streams = _Streams()
        cls.streams.run(calls)

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.sizes = sizes
        out = rows.new_empty(len(rows), matrices.shape[2])
        parts = zip(rows.split(sizes), matrices, out.split(sizes), strict=True)
        ProductByExpert._run([lambda a=a, b=b, c=c: torch.mm(a, b, out=c) for a, b, c in parts])
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, matrices = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_rows, d_matrices = torch.empty_like(rows), torch.empty_like(matrices)
        calls = []
        groups = (each.split(ctx.sizes) for each in (rows, d_rows, d_out))
        for x, d_x, d_y, w, d_w in zip(*groups, matrices, d_matrices, strict=True):
            calls.append(lambda d_x=d_x, d_y=d_y, w=w: torch.mm(d_y, w.t(), out=d_x))
            calls.append(lambda x=x, d_y=d_y, d_w=d_w: torch.mm(x.t(), d_y, out=d_w))
        ProductByExpert._run(calls)
        return d_rows, d_matrices, None


def deep_gemm() -> Any:
    """DeepGEMM's package, which compiles its kernels with nvcc when they are first called.

    Raises:
        ImportError: it is not on the path, or was built for another PyTorch.
    """
    try:
        return importlib.import_module("deep_gemm")
    except Exception as failure:  # of many kinds, where its library does not fit PyTorch's or CUDA's
        raise ImportError(f"deep_gemm cannot be imported: {type(failure).__name__}: {failure}") from failure


class PaddedRows:
    """Places of rows in expert order if each expert's rows are padded to a multiple of ``alignment``.

    Args:
        sizes: int32 [E], rows of each expert.
        alignment: of the first row of each expert.

    Attributes:
        places: int64 [M], the place of each row.
        experts: int32 [places in all], whose place it is, -1 where no row is.
    """

    def __init__(self, sizes: torch.Tensor, alignment: int) -> None:
        sizes = sizes.long()
        held = (sizes + alignment - 1) // alignment * alignment
        owners = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        moved = (held.cumsum(0) - held) - (sizes.cumsum(0) - sizes)  # how far an expert's rows move
        self.places = torch.arange(len(owners), device=sizes.device) + moved[owners]
        self.experts = torch.full([int(held.sum())], -1, dtype=torch.int32, device=sizes.device)
        self.experts[self.places] = owners.int()

    def put(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows in their places, and zeros in all others."""
        held = rows.new_zeros(len(self.experts), *rows.shape[1:])
        held[self.places] = rows
        return held


@functools.cache
def liger_moe() -> tuple[Any, Callable[..., Any]]:
    """The module of Liger's fused layer of experts in Triton, and its function that prepares a routing.

    Raises:
        ImportError: it is not on the path.
    """
    found = [Path(entry) for entry in sys.path if (Path(entry) / "liger_kernel/ops/fused_moe.py").is_file()]
    if not found:
        raise ImportError("liger_kernel is not installed")
    register_without_init("liger_kernel.ops", found[0])
    module = importlib.import_module("liger_kernel.ops.fused_moe")
    return module, module.compute_routing_metadata


def unsloth_grouped_gemm() -> tuple[Callable[..., torch.Tensor], list[dict[str, Any]]]:
    """Unsloth's function, and its arguments for each of `UNSLOTH_CONFIGS`.

    Only the files of its grouped GEMM are loaded; these do not need the package's other imports.

    Raises:
        ImportError: it is not on the path.
    """
    found = [Path(entry) / "unsloth" for entry in sys.path if (Path(entry) / "unsloth/kernels/moe").is_dir()]
    if not found:
        raise ImportError("unsloth is not installed")
    for name, facts in {
        "unsloth": {"DEVICE_TYPE": "cuda"},
        "unsloth.device_type": {"cuda_visible_capabilities": lambda: [torch.cuda.get_device_capability()]},
        "unsloth.kernels": {},
        "unsloth.kernels.utils": {"torch_gpu_device": torch.cuda.device},
        "pandas": {"DataFrame": object},  # for tables of its tuning
    }.items():
        if name == "pandas" and importlib.util.find_spec(name) is not None:
            continue
        module = types.ModuleType(name)
        module.__path__ = [str(found[0].joinpath(*name.split(".")[1:]))]
        for key, value in facts.items():
            setattr(module, key, value)
        sys.modules[name] = module
    grouped_gemm = importlib.import_module("unsloth.kernels.moe.grouped_gemm.interface").grouped_gemm
    tuning = importlib.import_module("unsloth.kernels.moe.grouped_gemm.kernels.tuning")
    kinds = {
        "kernel_config_fwd": tuning.KernelConfigForward,
        "kernel_config_bwd_dX": tuning.KernelConfigBackward_dX,
        "kernel_config_bwd_dW": tuning.KernelConfigBackward_dW,
    }
    names = "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages"
    arguments = []
    for index, tiles in enumerate(UNSLOTH_CONFIGS):
        arguments.append({})
        for (argument, kind), tile in zip(kinds.items(), tiles, strict=True):
            options: dict[str, Any] = dict(zip(names, tile, strict=True))
            if index and "use_tma_load_w" in kind.__dataclass_fields__:
                options["use_tma_load_w"] = True  # its own choice has no descriptors
            arguments[-1][argument] = kind(**options)
    return grouped_gemm, arguments
