# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled library's layer of experts (csrc/layer), on PyTorch's memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tests.core.layer import Choices, Facts, Kernels, LayerParams
from tests.core.structs import RoutingKind

from .inputs import Inputs

__all__ = ["LibraryLayer"]

_BFLOAT16 = 2  # pmo_dtype


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class LibraryLayer:
    """Both passes by `pmo_layer_run`.

    Args:
        inputs: the operands; `Inputs.core_library` is given.
        keeps_hidden: whether the forward pass saves H.
        workspace_mb: MiB of the chunk buffer.
    """

    def __init__(self, inputs: Inputs, keeps_hidden: bool, workspace_mb: int) -> None:
        self._library = ctypes.CDLL(str(inputs.core_library))
        self._library.pmo_last_error.restype = ctypes.c_char_p
        self._inputs, self._keeps_hidden, self._workspace = inputs, keeps_hidden, workspace_mb << 20
        self._kernels = Kernels.of(self._library, "cuda")
        self._gpu = ctypes.c_int32(), ctypes.c_int32()
        self._library.pmo_gpu_facts_cuda(*map(ctypes.byref, self._gpu))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        i = self._inputs
        out = torch.empty_like(i.x)
        hidden = i.x.new_empty(len(i.row_to_token), 2 * i.shape.inner) if self._keeps_hidden else None
        self._run(backward=0, hidden=hidden, out=out)
        return out, hidden

    def backward(self, hidden: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        i = self._inputs
        d_x, d_gate_up, d_down, d_weights = map(torch.empty_like, (i.x, i.gate_up, i.down, i.row_probs))
        gradients = {"d_x": d_x, "d_gate_up": d_gate_up, "d_down": d_down, "d_weights": d_weights}
        self._run(backward=1, hidden=hidden, d_out=i.d_out, **gradients)
        return d_x, d_weights, d_gate_up, d_down

    def _run(self, backward: int, **arrays: torch.Tensor | None) -> None:
        i, hidden_size = self._inputs, self._inputs.shape.hidden
        facts = Facts(
            num_tokens=len(i.x),
            num_rows=len(i.row_to_token),
            num_experts=len(i.down),
            hidden=hidden_size,
            inner=i.shape.inner,
            workspace=self._workspace,
            dtype=_BFLOAT16,
            num_sms=self._gpu[0].value,
            memory_gbps=self._gpu[1].value,
            backward=backward,
            keeps_hidden=int(arrays["hidden"] is not None),
            needs_d_weights=backward,
        )
        choices = Choices()
        self._check(self._library.pmo_layer_plan_of(ctypes.byref(facts), ctypes.byref(choices)))
        workspace = torch.empty(choices.bytes, dtype=torch.uint8, device="cuda")
        params = LayerParams(
            slots_per_token=i.token_rows.shape[1],
            x_row_stride=hidden_size,
            d_out_row_stride=hidden_size,
            sizes_kind=RoutingKind.IDS32,
            offsets_kind=RoutingKind.IDS32,
        )
        operands: dict[str, Any] = {"x": i.x, "gate_up": i.gate_up, "down": i.down, "weights": i.row_probs}
        maps = {"token_rows": i.token_rows, "row_to_token": i.row_to_token, "sizes": i.sizes, "offsets": i.offsets}
        given = {**operands, **maps, **arrays, "workspace": workspace}
        params.point_at(**{name: _address(each) for name, each in given.items()})
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = map(ctypes.byref, (facts, params, self._kernels))
        self._check(self._library.pmo_layer_run(*pointers, stream))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._library.pmo_last_error().decode())
