# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled library's layer of experts (csrc/layer), on PyTorch's memory."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paddle_moe_ops.reference import MATRIX_FORMATS
from tests.core.layer import Choices, Facts, Hidden, Kernels, LayerParams
from tests.core.operators.grouped_gemm import AMAX_MIN, GROUP, Accumulation
from tests.core.operators.matrices import QuantizeBlocksParams
from tests.core.structs import RoutingKind

from .inputs import Inputs

__all__ = ["Codes", "Library", "LibraryLayer", "address_of", "integer_codes"]

_BFLOAT16 = 2  # pmo_dtype


class Codes(NamedTuple):
    """Codes in float8, and their scales."""

    codes: torch.Tensor
    scales: torch.Tensor


def address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def current_stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class Library:
    """Functions of a libpmo_core.so with CUDA kernels; an error is a RuntimeError."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            raise SystemExit("this needs --core-library, a libpmo_core.so with kernels for Hopper")
        self.functions = ctypes.CDLL(str(path))
        self.functions.pmo_last_error.restype = ctypes.c_char_p

    def call(self, name: str, *structs: ctypes.Structure, on_stream: bool = True) -> None:
        stream = [current_stream()] if on_stream else []
        if getattr(self.functions, name)(*map(ctypes.byref, structs), *stream):
            raise RuntimeError(self.functions.pmo_last_error().decode())

    def quantized(self, matrix: torch.Tensor) -> tuple[Codes, Codes]:
        """Codes and scales of [E, A, B] matrices, and of their transposes."""
        experts, height, width = matrix.shape
        forms = []
        for rows, columns in ((height, width), (width, height)):
            codes = matrix.new_empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
            scales = matrix.new_empty(experts, -(-rows // GROUP), -(-columns // GROUP), dtype=torch.float32)
            forms.append(Codes(codes, scales))
        params = QuantizeBlocksParams(num_matrices=experts, num_rows=height, num_columns=width, dtype=_BFLOAT16)
        params.amax_min = AMAX_MIN
        names = "x", "codes", "scales", "turned_codes", "turned_scales"
        params.point_at(**dict(zip(names, map(address_of, (matrix, *forms[0], *forms[1])), strict=True)))
        self.call("pmo_quantize_blocks_cuda", params)
        return forms[0], forms[1]


def integer_codes(matrices: torch.Tensor, format: str) -> Codes:
    """Codes [E, N, K] and scales of matrices [E, K, N] in a format of pmo/matrices.h, transposed."""
    experts, depth, width = matrices.shape
    packed, limit, dtype = (depth, 127, torch.int8) if format == "int8" else (depth // 2, 7, torch.uint8)
    groups = depth // GROUP if format == "int4_1x128" else 1
    codes = matrices.new_empty(experts, width, packed, dtype=dtype)
    scales = matrices.new_empty(experts, width, groups, dtype=torch.float32)
    for expert in range(experts):
        values = matrices[expert].t().float().reshape(width, groups, -1)
        scales[expert] = (values.abs().amax(2) / limit).bfloat16().float()
        made = (values / scales[expert, :, :, None]).round().clamp(-limit, limit).to(torch.int8).reshape(width, depth)
        if format != "int8":
            halves = (made.view(dtype) & 15).reshape(width, -1, 2, 2, 8)
            made = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(2, 3).reshape(width, packed)
        codes[expert] = made
    return Codes(codes, scales if format == "int4_1x128" else scales[:, :, 0].contiguous())


class LibraryLayer:
    """Both passes by `pmo_layer_run`.

    Args:
        inputs: the operands; `Inputs.core_library` is given.
        keeps_hidden: whether the forward pass saves H.
        workspace_mb: MiB of the chunk buffer.
        float8: whether GEMMs have float8 operands.
        keeps_matrices: with float8, whether both passes find their matrices quantised.
        hidden_in_float8: with float8, whether H is saved as codes and scales.
        accumulates: whether gradients of matrices are added to float32 tensors.
        quantises_once: with float8, whether the forward pass quantises the matrices for both passes, as a call of
            moe_mlp does that finds none kept.
        float8_wgrads: with float8, whether wgrads have float8 operands, too.
        integers: format of the integer codes of the matrices, which forward passes with few rows read, or None.
        launched: receives the name of each launch, or None.
    """

    def __init__(
        self,
        inputs: Inputs,
        keeps_hidden: bool = True,
        workspace_mb: int = 1024,
        float8: bool = False,
        keeps_matrices: bool = False,
        hidden_in_float8: bool = False,
        accumulates: bool = False,
        float8_wgrads: bool = False,
        quantises_once: bool = False,
        integers: str | None = None,
        launched: list[str] | None = None,
    ) -> None:
        self._library = Library(inputs.core_library)
        self._inputs, self._workspace, self._float8 = inputs, workspace_mb << 20, float8
        self._float8_wgrads = float8_wgrads
        self._keeps = (Hidden.KEEPS_CODES if hidden_in_float8 else Hidden.KEEPS) if keeps_hidden else Hidden.RECOMPUTES
        self._kernels = Kernels.of(self._library.functions, "cuda", launched)
        self._gpu = ctypes.c_int32(), ctypes.c_int32()
        self._library.functions.pmo_gpu_facts_cuda(*map(ctypes.byref, self._gpu))
        self._codes: dict[str, Codes] = {}
        self._quantises_once = quantises_once
        if keeps_matrices:
            self._quantize()
        self._format = "int8"
        if integers is not None:
            self._format = integers
            for name, matrix in (("gate_up", inputs.gate_up), ("down", inputs.down)):
                self._codes[name] = integer_codes(matrix, integers)
        self._sums = [each.float().zero_() for each in (inputs.gate_up, inputs.down)] if accumulates else None

    def of(self, inputs: Any) -> LibraryLayer:
        """Return this layer with other operands; without kept matrices and accumulation."""
        layer = copy.copy(self)
        layer._inputs = inputs
        return layer

    def _quantize(self) -> None:
        for name, matrix in (("gate_up", self._inputs.gate_up), ("down", self._inputs.down)):
            self._codes[f"turned_{name}"], self._codes[name] = self._library.quantized(matrix)

    def forward(self) -> tuple[torch.Tensor, Any]:
        if self._quantises_once:
            self._quantize()
        i = self._inputs
        out, rows, columns = torch.empty_like(i.x), len(i.row_to_token), 2 * i.shape.inner
        kept: dict[str, torch.Tensor] = {}
        if self._keeps:
            dtype = torch.float8_e4m3fn if self._keeps == Hidden.KEEPS_CODES else i.x.dtype
            kept["hidden"] = i.x.new_empty(rows, columns, dtype=dtype)
        if self._keeps == Hidden.KEEPS_CODES:
            kept["hidden_scales"] = i.x.new_empty(rows, columns // GROUP, dtype=torch.float32)
        self._run(0, {}, **kept, out=out)
        return out, kept

    def backward(self, kept: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        i = self._inputs
        d_x, d_weights = torch.empty_like(i.x), torch.empty_like(i.row_probs)
        d_gate_up, d_down = self._sums or map(torch.empty_like, (i.gate_up, i.down))
        gradients = {"d_x": d_x, "d_gate_up": d_gate_up, "d_down": d_down, "d_weights": d_weights}
        adds = {}
        if self._sums:
            adds = dict.fromkeys(("gate_up_accumulation", "down_accumulation"), Accumulation.ADDS_FLOAT32)
        self._run(1, adds, **kept, d_out=i.d_out, **gradients)
        return d_x, d_weights, d_gate_up, d_down

    def _run(self, backward: int, numbers: dict[str, int], **arrays: torch.Tensor) -> None:
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
            keeps_hidden=self._keeps,
            needs_d_weights=backward,
            float8=int(self._float8),
            has_codes=int(bool(self._codes)),
            codes_format=MATRIX_FORMATS.index(self._format),
            float8_wgrads=int(self._float8_wgrads and backward),
        )
        choices = Choices()
        self._library.call("pmo_layer_plan_of", facts, choices, on_stream=False)
        workspace = torch.empty(choices.bytes, dtype=torch.uint8, device="cuda")
        params = LayerParams(
            slots_per_token=i.token_rows.shape[1],
            x_row_stride=hidden_size,
            d_out_row_stride=hidden_size,
            sizes_kind=RoutingKind.IDS32,
            offsets_kind=RoutingKind.IDS32,
            **numbers,
        )
        operands: dict[str, Any] = {"x": i.x, "gate_up": i.gate_up, "down": i.down, "weights": i.row_probs}
        maps = {"token_rows": i.token_rows, "row_to_token": i.row_to_token, "sizes": i.sizes, "offsets": i.offsets}
        given = {**operands, **maps, **arrays, "workspace": workspace}
        for name, (codes, scales) in self._codes.items():
            given |= {f"{name}_codes": codes, f"{name}_scales": scales}
        params.point_at(**{name: address_of(each) for name, each in given.items()})
        self._library.call("pmo_layer_run", facts, params, self._kernels)
