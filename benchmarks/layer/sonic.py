# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layer of SonicMoE (sonic-moe 0.1.2.post1, quack-kernels 0.3.11 or 0.6.5) on PyTorch's tensors, with our routing.

Its package has one autograd function for each projection, which take the routing as index maps; its router only makes
those. Called in this way a layer is its two GEMMs with SwiGLU and the sum of each token's rows, like ours, without
a router and its sort.

QuACK tunes each of the six GEMMs when a shape is first called, and SonicMoE tunes its two sums: all configurations
that they have for Hopper, by their own rules, unless ``tuned`` is False, which uses QuACK's default configuration for
every GEMM.

Environment variables: QUACK_CACHE_DIR is the cache of compiled kernels (for all shapes) and of tuning times (for each).
QUACK_COMPILE_WORKERS above 1 makes QuACK start that many processes in sequence for each of its GEMMs without compiled
kernels, which takes longer than it saves; to compile in parallel, start processes before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .inputs import Inputs

__all__ = ["sonic_layer"]

_TUNED = "gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned"  # QuACK's tuning functions that a layer calls
_found: dict[str, list[Any]] = {}  # their configurations


def _choose(tuned: bool) -> None:
    """Has QuACK's functions tune, or take the configuration that they have for one that is not tuned."""
    quack = importlib.import_module("quack.gemm_interface")
    default = importlib.import_module("quack.autotuner").AutotuneConfig(config=None)
    for name in _TUNED:
        function = getattr(quack, name, None)
        if function is None:  # since 0.6 the gated GEMMs are tuned elsewhere
            continue
        all_of_them = _found.setdefault(name, function.configs)
        function.configs = all_of_them if tuned else [default]


def matrices_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies in the package's layout: [2n, d, E], rows of gate and up in turn, and [d, n, E], d or n contiguous."""
    experts, hidden, twice = inputs.gate_up.shape
    gate_up = inputs.gate_up.view(experts, hidden, 2, twice // 2).permute(0, 3, 2, 1).contiguous()
    down = inputs.down.transpose(1, 2).contiguous()
    return gate_up.view(experts, twice, hidden).permute(1, 2, 0), down.permute(1, 2, 0)


def sonic_layer(inputs: Inputs, tuned: bool) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """The layer and its differentiable operands: tokens, probabilities and both matrices in the package's layout.

    Raises:
        ImportError: the package is not installed.
    """
    functional = importlib.import_module("sonicmoe.functional")
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    _choose(tuned)
    i, (tokens, _, _, _, topk) = inputs, inputs.shape
    leaves = [each.detach().requires_grad_() for each in (i.x, i.probs, *matrices_of(i))]
    rows = i.rows_of_slots.reshape(-1)
    # The token of each row, the slot of each row, the row of each slot; None: every token has K experts.
    maps = i.row_to_token, rows.argsort().int(), rows.int(), None, False

    def forward() -> torch.Tensor:
        x, probs, gate_up, down = leaves
        hidden = functional._UpProjection.apply(
            x, gate_up, None, i.offsets, tokens * topk, topk, *maps, swiglu, False, False
        )
        return functional._DownProjection.apply(*hidden, down, None, probs, i.offsets, tokens, topk, *maps, swiglu)

    return forward, leaves
