# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The layer of SonicMoE (sonic-moe 0.1.2.post1, quack-kernels 0.3.11 or 0.6.5) on PyTorch's tensors, with our routing.

Its package has one autograd function for each projection, which take the routing as index maps; its router only makes
those. Called in this way a layer is its two GEMMs with SwiGLU and the sum of each token's rows, like ours, without
a router and its sort.

QuACK tunes each of the six GEMMs when a shape is first called, and SonicMoE tunes its two sums: all configurations
that they have for Hopper, by their own rules, unless ``tuned`` is False, which uses QuACK's default configuration for
every GEMM. QuACK 0.6 times a configuration by 200 calls, which takes minutes for a shape; here it does by
`_TIMED_CALLS`.

The packages must be in a folder named ``site-packages``: QuACK 0.6 hashes all functions that an epilogue calls, but for
those of such a folder, and fails at those of CUTLASS that it can't hash.

Environment variables: QUACK_CACHE_DIR is the cache of compiled kernels (for all shapes) and of tuning times (for each).
QUACK_COMPILE_WORKERS is the number of processes that compile. QuACK 0.6 keeps them. Version 0.3 starts them for each
GEMM without compiled kernels, so 1 is faster there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from .inputs import Inputs

__all__ = ["sonic_layer"]

_TIMED_CALLS = 20
_GEMMS = "gemm", "gemm_gated", "gemm_dgated"  # QuACK's functions that a layer calls


def _choose(tuned: bool) -> None:
    """Let SonicMoE call QuACK's GEMMs with tuning, or with their default configurations."""
    interface = importlib.import_module("quack.gemm_interface")
    for module in (importlib.import_module(f"sonicmoe.functional.{name}") for name in ("forward", "backward")):
        for name in _GEMMS:
            if hasattr(module, name):
                setattr(module, name, functools.partial(getattr(interface, name), tuned=tuned))


@functools.cache
def _shorten_tuning() -> None:
    """Reduce the timed calls of QuACK's tuner, if its version times them in a CUDA graph."""
    tuner = importlib.import_module("quack.autotuner")
    measure = getattr(tuner, "_bench_cuda_graph_l2_rotate", None)
    if measure is not None:
        tuner._bench_cuda_graph_l2_rotate = functools.partial(  # type: ignore[attr-defined]
            measure, warmup_target_ms=0, n_timed_calls=_TIMED_CALLS
        )


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
    _shorten_tuning()
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
