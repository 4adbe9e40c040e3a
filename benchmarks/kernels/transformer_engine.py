# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's Triton kernels, called as its PyTorch functions call them.

They allocate their outputs in the call; inside a CUDA graph that costs nothing. None of those measured here waits for
the GPU: the number of rows, which the public functions may read back, is given.
"""

from __future__ import annotations

import importlib
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

from .device import Outputs, Unsupported
from .tensors import TensorInputs

__all__ = ["MaskMaps", "TransformerEngine"]

_PACKAGES = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.triton",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.triton",
)


class TransformerEngine:
    """Its functions over the Triton kernels, and PyTorch.

    Only the two files with the Triton kernels are loaded, from the wheel; the package itself needs a compiled library.
    """

    def __init__(self, folder: Path) -> None:
        """Load the functions.

        Args:
            folder: Contains the wheel, packed or unpacked.

        Raises:
            ValueError: there is no wheel in the folder.
            ImportError: Triton or something else is missing.
        """
        self.torch: Any = torch
        self.functions = _load(folder)

    def maps(self, inputs: TensorInputs) -> MaskMaps:
        return MaskMaps(self.functions, inputs)


def _load(folder: Path) -> Any:
    """The module with the functions over the Triton kernels."""
    if not (folder / "transformer_engine").is_dir():
        wheels = sorted(folder.glob("transformer_engine-*.whl"))
        if not wheels:
            raise ValueError(f"{folder} holds neither a transformer_engine wheel nor what is in one")
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(folder / "unpacked")
        folder = folder / "unpacked"
    for name in _PACKAGES:
        # Empty parents, so that the packages' own __init__ does not run.
        package = types.ModuleType(name)
        package.__path__ = [str(folder / Path(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("transformer_engine.pytorch.triton.permutation")


class MaskMaps:
    """A problem in TransformerEngine's form: a mask and probabilities [T, E], offsets for padding."""

    def __init__(self, functions: Any, inputs: TensorInputs) -> None:
        plan = inputs.problem.plan
        if inputs.problem.case.capacity:
            raise Unsupported("a buffer larger than the rows")
        self.functions = functions
        self.tokens, self.experts, self.rows = plan.num_tokens, plan.num_experts, plan.num_rows
        self.hidden = inputs.problem.case.shape.hidden
        self.mask, self.probs = inputs.mask, inputs.probs_by_expert
        self.pad_offsets = None
        if plan.num_rows != inputs.problem.routed_rows:
            counts = torch.from_numpy(plan.tokens_per_expert).to(inputs.device)
            starts = torch.from_numpy(plan.expert_offsets[:-1]).to(inputs.device)
            self.pad_offsets = starts - (counts.cumsum(0) - counts)

    def map(self) -> torch.Tensor:
        return self.functions.make_row_id_map(self.mask, self.tokens, self.experts)

    def permute(self, row_id_map: torch.Tensor, probs: Any, source: torch.Tensor, scale: Any = None) -> Outputs:
        rows, scales, row_probs = self.functions.permute_with_mask_map(
            source,
            row_id_map,
            probs,
            scale,
            self.pad_offsets,
            self.tokens,
            self.experts,
            self.rows,
            self.hidden,
            0 if scale is None else scale.shape[1],
        )
        named = {"rows": rows, "row_scales": scales, "row_probs": row_probs}
        return {name: tensor for name, tensor in named.items() if tensor is not None}
