# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layers that are compared: each makes a forward and a backward pass of one problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.torch_device import TorchDevice
from paddle_moe_ops.triton.grouped_gemm import Groups, Tokens
from paddle_moe_ops.triton.moe_mlp import Layer, moe_mlp, moe_mlp_backward

from .inputs import Inputs

__all__ = ["IMPLEMENTATIONS", "Passes"]


class Passes(NamedTuple):
    """What is timed.

    Attributes:
        forward: gives the result and what is kept for the backward pass.
        backward: takes that and gives the gradients of the tokens, the probabilities [T, K] and both matrices.
    """

    forward: Callable[[], tuple[torch.Tensor, Any]]
    backward: Callable[[Any], tuple[torch.Tensor, ...]]


def _by_slot(inputs: Inputs, by_row: torch.Tensor) -> torch.Tensor:
    return by_row[inputs.rows_of_slots]


def ours(inputs: Inputs, keeps_hidden: bool = True, workspace_mb: int = 256) -> Passes:
    """The launchers of this package's Triton kernels, in which everything but tokens and matrices is prepared."""
    device, i = TorchDevice(), inputs
    groups, tokens = Groups(i.sizes, i.offsets), Tokens(i.row_to_token, i.token_rows)
    layer = Layer(i.gate_up, i.down, groups, tokens, i.row_probs, False, workspace_mb << 20)

    def backward(hidden: Any) -> tuple[torch.Tensor, ...]:
        made = moe_mlp_backward(device, i.d_out, i.x, hidden, layer, (True,) * 4)
        return made.x, made.weights, made.gate_up, made.down

    return Passes(lambda: moe_mlp(device, i.x, layer, keeps_hidden), backward)


def torch_grouped(inputs: Inputs) -> Passes:
    """Plain PyTorch around `torch._grouped_mm`, with its own gradients."""
    i = inputs
    leaves = [each.detach().requires_grad_() for each in (i.x, i.row_probs, i.gate_up, i.down)]
    owners, stops = i.row_to_token.long(), i.offsets[1:]

    def forward() -> tuple[torch.Tensor, Any]:
        x, row_probs, gate_up, down = leaves
        rows = x.index_select(0, owners)
        gate, up = torch._grouped_mm(rows, gate_up, offs=stops).chunk(2, -1)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=stops)
        weighted = rows * row_probs[:, None].to(rows.dtype)
        out = weighted[i.rows_of_slots.reshape(-1)].view(*i.rows_of_slots.shape, -1).sum(1)
        return out.detach(), out

    def backward(out: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, i.d_out, retain_graph=False)

    return Passes(forward, backward)


IMPLEMENTATIONS: dict[str, Callable[[Inputs], Passes]] = {
    "ours": ours,
    "ours, keep x": lambda inputs: ours(inputs, keeps_hidden=False),
    "ours, 1 GiB": lambda inputs: ours(inputs, workspace_mb=1024),
    "torch": torch_grouped,
}
