# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layers that are compared: each makes a forward and a backward pass of one problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.kernels.torch_device import TorchDevice
from paddle_moe_ops.triton.gemm.mlp import moe_mlp, moe_mlp_backward
from paddle_moe_ops.triton.gemm.types import Groups, Layer, Tokens

from .inputs import Inputs
from .library import LibraryLayer
from .peers import UNSLOTH_CONFIGS, ProductByExpert, liger_moe, unsloth_grouped_gemm
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


def triton_layer(inputs: Inputs, keeps_hidden: bool = True, workspace_mb: int = WORKSPACE_MB) -> Passes:
    """The launchers of the Triton kernels, in which everything but tokens and matrices is prepared."""
    device, i = TorchDevice(), inputs
    groups, tokens = Groups(i.sizes, i.offsets), Tokens(i.row_to_token, i.token_rows)
    layer = Layer(i.gate_up, i.down, groups, tokens, i.row_probs, False, workspace_mb << 20)

    def backward(kept: Any) -> tuple[torch.Tensor, ...]:
        made = moe_mlp_backward(device, i.d_out, i.x, kept, layer, (True,) * 4)
        return made.x, made.weights, made.gate_up, made.down

    return Passes(lambda: moe_mlp(device, i.x, layer, keeps_hidden), backward)


def ours(inputs: Inputs, **options: Any) -> Passes:
    """The compiled library's layer, which moe_mlp runs; without a library the one on Triton."""
    if inputs.core_library is None:
        return triton_layer(inputs, **options)
    layer = LibraryLayer(inputs, **options)
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


def liger(inputs: Inputs) -> Passes:
    """Liger's fused layer, whose routing is prepared: its own waits for the host."""
    (module, prepare), i = liger_moe(), inputs
    ids = i.ids.int()
    routing = prepare(ids, i.shape.experts)
    matrices = [each.transpose(1, 2).contiguous() for each in (i.gate_up, i.down)]
    leaves = [each.detach().requires_grad_() for each in (i.x, i.probs, *matrices)]

    def forward() -> tuple[torch.Tensor, Any]:
        x, probs, gate_up, down = leaves
        module.compute_routing_metadata = lambda *_: routing
        out = module.LigerFusedMoEFunction.apply(x, gate_up, down, ids, probs)
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
    "ours, Triton alone": triton_layer,
    FLOAT8: functools.partial(ours, float8=True),
    "ours, float8, matrices kept": functools.partial(ours, float8=True, keeps_matrices=True),
    "ours, float8, first micro-batch": functools.partial(ours, float8=True, quantises_once=True),
    "ours, float8, wgrads too, matrices kept": functools.partial(
        ours, float8=True, float8_wgrads=True, keeps_matrices=True
    ),
    "ours, float8, wgrads too, first micro-batch": functools.partial(
        ours, float8=True, float8_wgrads=True, quantises_once=True
    ),
    "ours, float8, first product in float8": functools.partial(ours, float8=True, hidden_in_float8=True),
    "ours, accumulates": functools.partial(ours, accumulates=True),
    "ours, keep x": functools.partial(ours, keeps_hidden=False),
    "ours, 256 MiB": functools.partial(ours, workspace_mb=256),
    "torch": torch_grouped,
    "cuBLAS by expert": cublas,
    **{f"Unsloth {which}": functools.partial(unsloth, which=which) for which in range(len(UNSLOTH_CONFIGS))},
    "Liger": liger,
    "SonicMoE, here": sonic,
    "SonicMoE, here, untuned": functools.partial(sonic, tuned=False),
}
