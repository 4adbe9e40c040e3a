# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's layer of experts: the Triton kernels of its wheel, with tiles chosen here and plain kernels around them."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.layer.inputs import Inputs
from benchmarks.layer.library import Codes

from .plain import GROUP, Timed, quantize, sum_rows, swiglu, swiglu_codes

__all__ = ["SGLang"]

_HEIGHTS = (16, 32, 64, 128)  # tile rows that are tried

# Modules that the file imports, with the names that it takes from them. The kernels call none of these.
_ABSENT: dict[str, tuple[str, ...]] = {
    "sglang.kernels.jit.utils": ("is_arch_support_pdl",),
    "sglang.kernels.ops.quantization.fp8_kernel": (
        *("per_token_group_quant_fp8", "scaled_fp8_quant", "sglang_per_token_group_quant_fp8"),
    ),
    "sglang.kernels.ops.quantization.int8_kernel": (
        *("per_token_group_quant_int8", "per_token_quant_int8", "sglang_per_token_group_quant_int8"),
    ),
    "sglang.srt.batch_invariant_ops": ("is_batch_invariant_mode_enabled",),
    "sglang.srt.environ": ("envs",),
    "sglang.srt.layers.moe.utils": ("get_moe_padding_size",),
    "sglang.srt.utils": (
        *("cpu_has_amx_support", "is_cpu", "is_hip", "is_sm90_supported", "direct_register_custom_op"),
        *("get_bool_env_var", "is_cuda"),
    ),
}


class _Settings:
    """Environment variables of SGLang, all off."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: False)


def _module_of(file: Path) -> Any:
    """The file's module, with stand-ins for the modules of SGLang that it imports."""
    for name, attributes in _ABSENT.items():
        parents = name.split(".")
        for count in range(1, len(parents)):
            parent = sys.modules.setdefault(".".join(parents[:count]), types.ModuleType(".".join(parents[:count])))
            parent.__path__ = []
        module = sys.modules[name] = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, lambda *_, attribute=attribute, **__: attribute == "is_cuda")
    sys.modules["sglang.srt.environ"].envs = _Settings()  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("sglang_kernels", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SGLang:
    """A layer of SGLang's kernels; its maps are made once.

    Args:
        file: SGLang's file of kernels.
        inputs: the operands.
        kind: of the matrices. With float8, two plain kernels quantise rows, the second one after SwiGLU.
        matrices: both, as `plain.stored` returns them.
        samples_of: times calls.
    """

    def __init__(
        self, file: Path, inputs: Inputs, kind: str, matrices: Sequence[torch.Tensor | Codes], samples_of: Timed
    ) -> None:
        self._module, self._kind, self._samples_of = _module_of(file), kind, samples_of
        tokens, hidden, inner, experts, topk = inputs.shape
        slots, new = tokens * topk, inputs.x.new_empty
        self._shape, self._x = inputs.shape, inputs.x
        self._weights = inputs.probs.reshape(-1).contiguous()
        self._matrices = matrices
        self._hidden, self._act = new(slots, 2 * inner), new(slots, inner)
        self._rows, self._out = new(slots, hidden), new(tokens, hidden)
        self._codes = [_empty_codes(each) for each in (self._x, self._act)] if kind == "fp8_128x128" else []
        self._maps = {height: _aligned(inputs.ids, height, experts) for height in _HEIGHTS}

    def tuned(self) -> Callable[[], torch.Tensor]:
        """The layer with the fastest tiles of each GEMM."""
        topk, tiles = self._shape.topk, list(self._tiles())

        def quantize_tokens() -> None:
            if self._codes:
                quantize(self._x, self._codes[0])

        def activate() -> None:
            if self._codes:
                swiglu_codes(self._hidden, self._codes[1])
            else:
                swiglu(self._hidden, self._act)

        quantize_tokens()
        first = self._fastest([self._launch(0, self._hidden, False, topk, each) for each in tiles])
        activate()
        second = self._fastest([self._launch(1, self._rows, True, 1, each) for each in tiles])

        def forward() -> torch.Tensor:
            quantize_tokens()
            first()
            activate()
            second()
            sum_rows(self._rows, self._out, topk)
            return self._out

        return forward

    def _tiles(self) -> Iterator[dict[str, int]]:
        tokens, _, _, experts, topk = self._shape
        rows = tokens * topk / experts
        heights = _HEIGHTS[:1] if rows <= 16 else _HEIGHTS[:3] if rows <= 64 else _HEIGHTS[2:]
        depths = (128,) if self._kind == "fp8_128x128" else (64, 128)
        for height, width, depth, warps, stages in itertools.product(heights, (64, 128), depths, (4, 8), (3, 4)):
            if (height, warps) == (16, 8) or (height >= 64 and (width, warps) == (128, 4)):
                continue
            names = "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"
            yield dict(zip(names, (height, width, depth, 8 if height >= 64 else 1, warps, stages), strict=True))

    def _fastest(self, calls: list[Callable[[], None]]) -> Callable[[], None]:
        found = []
        for call in calls:
            try:
                call()
                found.append((min(self._samples_of([call])[0]), call))
            except Exception:  # tiles that do not fit the GPU
                continue
        return min(found, key=lambda each: each[0])[1]

    def _launch(
        self, which: int, out: torch.Tensor, is_weighted: bool, topk: int, tiles: dict[str, int]
    ) -> Callable[[], None]:
        matrix, (places, experts, total) = self._matrices[which], self._maps[tiles["BLOCK_SIZE_M"]]
        rows, row_scales = self._codes[which] if self._codes else ((self._x, self._act)[which], None)
        codes, scales = (matrix.codes, matrix.scales) if isinstance(matrix, Codes) else (matrix, None)
        width, depth = codes.shape[1], rows.shape[1]
        grid = (triton.cdiv(len(places), tiles["BLOCK_SIZE_M"]) * triton.cdiv(width, tiles["BLOCK_SIZE_N"]),)
        strides = *rows.stride(), codes.stride(0), codes.stride(2), codes.stride(1)
        of_scales = () if scales is None else (scales.stride(0), *reversed(scales.stride()[1:]))
        options: dict[str, Any] = {**tiles, "MUL_ROUTED_WEIGHT": is_weighted, "top_k": topk}
        options |= {"compute_type": tl.bfloat16, "even_Ks": depth % tiles["BLOCK_SIZE_K"] == 0}
        maps = self._weights, places, experts, total
        operands = (rows, None, codes, None, None, out, row_scales, scales, *maps, None)
        of_rows = (0, 0) if row_scales is None else row_scales.stride()
        of_matrix = (of_scales[0], 0, of_scales[1]) if len(of_scales) == 2 else of_scales or (0, 0, 0)
        groups = (GROUP, GROUP) if self._codes else (0, 0)
        lengths = width, depth, len(places), len(self._rows)
        sizes = (*lengths, *strides, 0, 0, *out.stride(), *of_rows, *of_matrix, *groups)
        names = ("use_int8_w8a8", "per_channel_quant", "c_sorted", "FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT")
        options |= dict.fromkeys((*names, "FUSE_SUM_ALL_REDUCE"), False)
        options |= {"use_fp8_w8a8": bool(self._codes), "use_int8_w8a16": self._kind == "int8"}
        is_narrow = tiles["BLOCK_SIZE_M"] < 64 <= tiles["BLOCK_SIZE_N"]
        options |= {"swap_ab": bool(self._codes) and is_narrow, "ROUTER_TOPK": self._shape.topk}
        return lambda: self._module.fused_moe_kernel[grid](*operands, *sizes, **options)


def _empty_codes(rows: torch.Tensor) -> Codes:
    """Memory for the codes of rows, and for their scales."""
    scales = rows.new_empty(len(rows), rows.shape[1] // GROUP, dtype=torch.float32)
    return Codes(rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn), scales)


def _aligned(ids: torch.Tensor, height: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SGLang's maps: slots by expert, each expert's padded to tiles; the expert of each tile; the number of places."""
    flat = ids.reshape(-1)
    order, sizes = flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts)
    padded = (sizes + height - 1) // height * height
    starts, firsts = padded.cumsum(0) - padded, sizes.cumsum(0) - sizes
    places = torch.full((int(padded.sum()),), len(flat), dtype=torch.int32, device="cuda")
    sorted_ids = flat[order]
    places[starts[sorted_ids] + torch.arange(len(flat), device="cuda") - firsts[sorted_ids]] = order.int()
    experts = torch.repeat_interleave(torch.arange(num_experts, device="cuda"), padded // height).int()
    return places, experts, torch.tensor([len(places)], dtype=torch.int32, device="cuda")
