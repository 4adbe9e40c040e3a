# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""lmdeploy's layer of experts: the Triton kernels of its wheel, with its own routing and its own tiles."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.inputs import Inputs
from benchmarks.layer.library import Codes
from benchmarks.packages import register_without_init

from .plain import GROUP

__all__ = ["lmdeploy_layer", "lmdeploy_version"]

_KERNELS = "lmdeploy.pytorch.kernels.cuda"
_LEAST_AMAX = 1e-7  # of its own calls
_FILES = {"bf16": "fused_moe", "fp8_128x128": "blocked_fp8", "int8": "w8a8"}


def _load(folder: Path) -> None:
    """Register its packages; their ``__init__`` needs all that it depends on."""
    register_without_init(_KERNELS, folder)
    utils: Any = types.ModuleType("lmdeploy.utils")
    utils.get_logger = logging.getLogger
    sys.modules.setdefault("lmdeploy.utils", utils)


def lmdeploy_version(folder: Path) -> str:
    """The version of the wheel that was unpacked to the folder."""
    text = (folder / "lmdeploy/version.py").read_text(encoding="utf-8")
    return re.search(r"__version__ = '(.+)'", text)[1]  # type: ignore[index]


def lmdeploy_layer(
    folder: Path, inputs: Inputs, kind: str, matrices: list[torch.Tensor | Codes]
) -> Callable[[], torch.Tensor]:
    """A layer from ids and probabilities. With int8 it quantises tokens, too.

    Args:
        folder: of its unpacked wheel.
        inputs: the operands.
        kind: bf16, fp8_128x128 or int8.
        matrices: both, as `plain.stored` returns them.
    """
    _load(folder)
    moe = importlib.import_module(f"{_KERNELS}.moe.{_FILES[kind]}")
    x, topk = inputs.x, inputs.shape.topk
    routing = inputs.probs, inputs.ids, topk
    if kind == "bf16":
        return lambda: moe.fused_moe(x, *matrices, *routing)
    operands = [each for matrix in matrices for each in matrix]
    if kind == "int8":
        quantize = importlib.import_module(f"{_KERNELS}.w8a8_triton_kernels").per_token_quant_int8
        return lambda: moe.fused_moe_w8a8(*quantize(x, _LEAST_AMAX), *operands, *routing, out_dtype=x.dtype)
    quant_fp8 = importlib.import_module(f"{_KERNELS}.blocked_gemm_fp8").quant_fp8
    dtype = torch.float8_e4m3fn
    return lambda: moe.fused_moe_blocked_fp8(*quant_fp8(x, GROUP, dtype), *operands, *routing, out_dtype=x.dtype)
