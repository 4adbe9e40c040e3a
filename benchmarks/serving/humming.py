# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer on humming's grouped GEMMs of integer codes, which NVRTC compiles when they are first called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.layer.inputs import Inputs

from .plain import swiglu, weighted_rows

__all__ = ["humming_layer"]

_WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "int4_1x128": {"dtype": "int4", "group_size": 128},
}
_COMPUTE = {"gemm_type": "grouped_contiguous"}
_EXPERTS = 16  # whose matrices are quantised at a time


def _gemm_of(values: torch.Tensor, kind: str) -> Any:
    """Its module for matrices [E, K, N], with codes of its own rounding."""
    layers = importlib.import_module("humming.layer")
    experts, depth, width = values.shape

    def new(count: int) -> Any:
        options = {"weight_config": dict(_WEIGHTS[kind]), "torch_dtype": torch.bfloat16}
        return layers.HummingLayer(shape_n=width, shape_k=depth, num_experts=count, **options).cuda()

    parts: dict[str, list[torch.Tensor]] = {}
    for chunk in values.split(_EXPERTS):
        part = new(len(chunk))
        part.load_from_unquantized(chunk.transpose(1, 2).contiguous())
        for name, tensor in part.named_parameters():
            parts.setdefault(name, []).append(tensor.data)
    whole = new(experts)
    for name, tensors in parts.items():
        setattr(whole, name, torch.nn.Parameter(torch.cat(tensors), requires_grad=False))
    whole.transform()
    return whole


def humming_layer(inputs: Inputs, kind: str) -> Callable[[], torch.Tensor]:
    """A layer whose maps are made once.

    Args:
        inputs: the operands.
        kind: int8, int4 or int4_1x128.
    """
    first, second = (_gemm_of(each, kind) for each in (inputs.gate_up, inputs.down))
    tokens, hidden, inner, *_ = inputs.shape
    count = len(inputs.row_to_token)
    new = inputs.x.new_empty
    gated, act, rows, out = new(count, 2 * inner), new(count, inner), new(count, hidden), new(tokens, hidden)
    owners, options = inputs.row_to_token.long(), {"expert_layout": inputs.offsets, "compute_config": _COMPUTE}

    def forward() -> torch.Tensor:
        first(inputs.x.index_select(0, owners), outputs=gated, **options)
        swiglu(gated, act)
        second(act, outputs=rows, **options)
        weighted_rows(rows, inputs.rows_of_slots, inputs.probs, out)
        return out

    return forward
