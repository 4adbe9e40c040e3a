# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layers that are compared: each makes a forward and a backward pass of one problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.torch_device import TorchDevice
from paddle_moe_ops.triton.float8_mlp import moe_mlp_float8, moe_mlp_float8_backward, quantize_experts
from paddle_moe_ops.triton.gemm.mlp import moe_mlp, moe_mlp_backward
from paddle_moe_ops.triton.gemm.types import Groups, Layer, Tokens

from .inputs import Inputs
from .library import LibraryLayer
from .peers import UNSLOTH_CONFIGS, ProductByExpert, unsloth_grouped_gemm
from .sonic import sonic_layer

__all__ = ["FLOAT8", "IMPLEMENTATIONS", "WORKSPACE_MB", "Passes"]

FLOAT8 = "ours, float8"
WORKSPACE_MB = 1024  # as moe_mlp has by default


class Passes(NamedTuple):
    """The timed passes of an implementation.

    Attributes:
        forward: returns the result and the saved state for the backward pass.
        backward: returns, from that state, the gradients of the tokens, the probabilities [T, K] and both matrices.
    """

    forward: Callable[[], tuple[torch.Tensor, Any]]
    backward: Callable[[Any], tuple[torch.Tensor, ...]]


def _by_slot(inputs: Inputs, by_row: torch.Tensor) -> torch.Tensor:
    return by_row[inputs.rows_of_slots]


def ours(
    inputs: Inputs,
    keeps_hidden: bool = True,
    workspace_mb: int = WORKSPACE_MB,
    device: TorchDevice | None = None,
    triton_alone: bool = False,
    library_gradients: bool = True,
    float8: bool = False,
    keeps_matrices: bool = False,
    hidden_in_float8: bool = False,
) -> Passes:
    """The launchers of this package's kernels on a GPU, in which everything but tokens and matrices is prepared."""
    device, i = device or TorchDevice(None if triton_alone else inputs.core_library), inputs
    if not library_gradients:
        device.grouped_outer = None
    groups, tokens = Groups(i.sizes, i.offsets), Tokens(i.row_to_token, i.token_rows)
    layer = Layer(i.gate_up, i.down, groups, tokens, i.row_probs, False, workspace_mb << 20)
    there, back = (moe_mlp_float8, moe_mlp_float8_backward) if float8 else (moe_mlp, moe_mlp_backward)
    matrices = {"quantized": quantize_experts(device, i.gate_up, i.down, False)} if keeps_matrices else {}

    def backward(kept: Any) -> tuple[torch.Tensor, ...]:
        made = back(device, i.d_out, i.x, kept, layer, (True,) * 4, **matrices)
        return made.x, made.weights, made.gate_up, made.down

    options = {**matrices, "hidden_in_float8": True} if hidden_in_float8 else matrices
    return Passes(lambda: there(device, i.x, layer, keeps_hidden, **options), backward)


def library_layer(inputs: Inputs, keeps_hidden: bool = True, workspace_mb: int = WORKSPACE_MB) -> Passes:
    """The compiled library's layer, which the operator moe_mlp runs."""
    layer = LibraryLayer(inputs, keeps_hidden, workspace_mb)
    return Passes(layer.forward, layer.backward)


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def composed(inputs: Inputs, product: Product) -> Passes:
    """A grouped GEMM of rows and their experts' matrices, plain PyTorch around it, and PyTorch's own gradients."""
    i = inputs
    leaves = [each.detach().requires_grad_() for each in (i.x, i.row_probs, i.gate_up, i.down)]
    owners = i.row_to_token.long()

    def forward() -> tuple[torch.Tensor, Any]:
        x, row_probs, gate_up, down = leaves
        gate, up = product(x.index_select(0, owners), gate_up).chunk(2, -1)
        rows = product(torch.nn.functional.silu(gate) * up, down)
        weighted = rows * row_probs[:, None].to(rows.dtype)
        out = weighted[i.rows_of_slots.reshape(-1)].view(*i.rows_of_slots.shape, -1).sum(1)
        return out.detach(), out

    return Passes(forward, _gradients(leaves, i.d_out))


def _gradients(leaves: list[torch.Tensor], d_out: torch.Tensor) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    return lambda out: torch.autograd.grad(out, leaves, d_out, retain_graph=False)


def torch_grouped(inputs: Inputs) -> Passes:
    stops = inputs.offsets[1:]
    return composed(inputs, lambda rows, matrices: torch._grouped_mm(rows, matrices, offs=stops))


def cublas(inputs: Inputs) -> Passes:
    sizes = inputs.sizes.tolist()
    return composed(inputs, lambda rows, matrices: ProductByExpert.apply(rows, matrices, sizes))


def unsloth(inputs: Inputs, which: int) -> Passes:
    """Unsloth's block: the first GEMM gathers rows, and the second scatters them back."""
    grouped_gemm, configs = unsloth_grouped_gemm()
    i, topk = inputs, inputs.shape.topk
    matrices = [each.transpose(1, 2).contiguous() for each in (i.gate_up, i.down)]
    leaves = [each.detach().requires_grad_() for each in (i.x, i.probs, *matrices)]
    common = {"m_sizes": i.sizes, "topk": topk, "gather_indices": i.rows_of_slots.reshape(-1).argsort().int()}

    def forward() -> tuple[torch.Tensor, Any]:
        x, probs, gate_up, down = leaves
        gate, up = grouped_gemm(x, gate_up, permute_x=True, **common, **configs[which]).chunk(2, -1)
        rows = torch.nn.functional.silu(gate) * up
        rows = grouped_gemm(rows, down, permute_y=True, is_first_gemm=False, **common, **configs[which])
        out = (rows.view(len(x), topk, -1) * probs[:, :, None].to(rows.dtype)).sum(1)
        return out.detach(), out

    return Passes(forward, _gradients(leaves, i.d_out))


def sonic(inputs: Inputs, tuned: bool = True) -> Passes:
    """SonicMoE's projections: matrices are brought into its layout before, and their gradients stay in it."""
    layer, leaves = sonic_layer(inputs, tuned)

    def forward() -> tuple[torch.Tensor, Any]:
        out = layer()
        return out.detach(), out

    return Passes(forward, _gradients(leaves, inputs.d_out))


IMPLEMENTATIONS: dict[str, Callable[[Inputs], Passes]] = {
    "ours": ours,
    "ours, library": library_layer,
    "ours, library, keep x": functools.partial(library_layer, keeps_hidden=False),
    "ours, library, 256 MiB": functools.partial(library_layer, workspace_mb=256),
    "ours, Triton alone": lambda inputs: ours(inputs, triton_alone=True),
    "ours, gradients of matrices by Triton": lambda inputs: ours(inputs, library_gradients=False),
    FLOAT8: lambda inputs: ours(inputs, float8=True),
    "ours, float8, matrices kept": lambda inputs: ours(inputs, float8=True, keeps_matrices=True),
    "ours, float8, first product in float8": lambda inputs: ours(inputs, float8=True, hidden_in_float8=True),
    "ours, keep x": lambda inputs: ours(inputs, keeps_hidden=False),
    "ours, 256 MiB": lambda inputs: ours(inputs, workspace_mb=256),
    "torch": torch_grouped,
    "cuBLAS by expert": cublas,
    **{f"Unsloth {which}": functools.partial(unsloth, which=which) for which in range(len(UNSLOTH_CONFIGS))},
    "SonicMoE, here": sonic,
    "SonicMoE, here, untuned": functools.partial(sonic, tuned=False),
}
