# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Experts whose matrices are codes: buffers of a layer in place of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor, nn

from .. import _checks
from .._graphs import filled
from .._options import MatrixFormat
from ..backends.layers import dequantized
from ..backends.quantized import FLOAT8_FORMAT, FORMATS, QuantizedMatrices
from ..expert_parallel.placement import no_experts
from ..quantization import quantize_experts

__all__ = ["StateOfOneFormat", "codes_of", "matrices_of", "refuse_sharded_state", "replace_matrices", "values_of"]

_MATRICES = ("gate_up", "down")


class StateOfOneFormat(nn.Layer):
    """A layer whose `set_state_dict` refuses codes of another format than those of its experts.

    Paddle skips entries of other shapes with a warning and loads the rest: codes of one format with scales of another.
    """

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load a state, see `paddle.nn.Layer.set_state_dict`; ValueError if its codes have another format."""
        if use_structured_name:
            for name, each in self.named_sublayers(include_self=True):
                if getattr(each, "matrix_format", None) is not None:
                    _check_format(each, state_dict, f"{name}." if name else "")
        return super().set_state_dict(state_dict, use_structured_name)

    set_dict = load_dict = set_state_dict


def _check_format(experts: Any, state: Mapping[str, Any], prefix: str) -> None:
    for matrix, inputs in zip(_MATRICES, (experts.hidden_size, experts.intermediate_size), strict=True):
        key = f"{prefix}{matrix}"
        codes, scales = state.get(f"{key}_codes"), state.get(f"{key}_scales")
        if codes is None or scales is None:
            continue
        given = _format_of(str(codes.dtype), codes.shape[-1], len(scales.shape), inputs)
        if given != experts.matrix_format:
            _checks.bad_value("set_state_dict", key, f"of the layer's format, {experts.matrix_format}", given)


def _format_of(dtype: str, columns: int, dimensions: int, inputs: int) -> str:
    """The format of transposed codes, by their dtype and columns and by the dimensions of their scales."""
    is_unsigned = dtype.endswith("uint8")
    if not is_unsigned and columns != inputs:
        return f"{dtype.removeprefix('paddle.')} codes of int4 in the order of inputs; quantise the matrices again"
    is_packed = is_unsigned and (columns != inputs or inputs == 16)  # two codes to a byte
    if dimensions == 2:
        return "int4" if is_packed else "int8"
    return "int4_1x128" if is_packed else FLOAT8_FORMAT


def replace_matrices(experts: Any, name: str, matrix_format: MatrixFormat) -> None:
    """Replace the parameters ``gate_up`` and ``down`` of a layer by buffers of codes and scales.

    The buffers are transposed, [E, 2 * I, H] and [E, H, I], as float8 kernels read them. Float8 codes are int8 bytes:
    `paddle.load` would return a float8 buffer as int8, which the layer then refuses.
    """
    if not paddle.in_dynamic_mode():
        raise RuntimeError(f"{name}: quantising needs dygraph, but Paddle is in static mode (paddle.disable_static())")
    _checks.choice(name, "format", matrix_format, FORMATS)
    if experts.matrix_format is not None:
        _checks.bad_value(name, "format", "given once: the matrices are codes already", repr(matrix_format))
    if matrix_format == FLOAT8_FORMAT and experts.gate_up_bias is not None:
        _checks.bad_value(name, "format", "one of integer codes with biases", repr(matrix_format))
    if matrix_format == FLOAT8_FORMAT and experts.activation != "swiglu":
        expected = f"one of integer codes with the activation {experts.activation!r}"
        _checks.bad_value(name, "format", expected, repr(matrix_format))
    transposed = [getattr(experts, each).detach().transpose([0, 2, 1]) for each in _MATRICES]
    has_experts = transposed[0].shape[0] > 0
    if not has_experts:  # on a rank of a group: the buffers have the shapes of one expert's, but for that number
        transposed = [filled([1, *each.shape[1:]], 0, each.dtype, like=each) for each in transposed]
    made = quantize_experts(*transposed, format=matrix_format, transpose=True)
    for matrix, codes in zip(_MATRICES, made, strict=True):
        delattr(experts, matrix)  # paddle.summary fails at a parameter that is None
        setattr(experts, matrix, None)
        stored = codes.codes.view("int8") if matrix_format == FLOAT8_FORMAT else codes.codes
        for kind, each in (("codes", stored), ("scales", codes.scales)):
            experts.register_buffer(f"{matrix}_{kind}", each if has_experts else no_experts(each))
    experts.matrix_format = matrix_format


def codes_of(experts: Any) -> tuple[Tensor, ...]:
    """Codes and scales of both matrices of a layer that `replace_matrices` changed."""
    return experts.gate_up_codes, experts.gate_up_scales, experts.down_codes, experts.down_scales


def matrices_of(codes: tuple[Tensor, ...], matrix_format: MatrixFormat) -> tuple[QuantizedMatrices, QuantizedMatrices]:
    """The result of `codes_of` as matrices."""
    gate_up, gate_up_scales, down, down_scales = codes
    first = QuantizedMatrices(gate_up, gate_up_scales, matrix_format, True)
    return first, QuantizedMatrices(down, down_scales, matrix_format, True)


def values_of(experts: Any, name: str, argument: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values of both matrices, [E, H, 2 * I] and [E, I, H], rounded to the dtype of rows that are not combined."""
    if experts.matrix_format == FLOAT8_FORMAT:
        _checks.bad_value(name, "combine", f"True with codes of {FLOAT8_FORMAT}", False)
    dtype = _checks.operand(name, argument, rows, experts.stored, getattr(rows, "shape", [])).dtype
    gate_up, down = matrices_of(codes_of(experts), experts.matrix_format)
    values = dequantized(gate_up, experts.hidden_size, dtype), dequantized(down, experts.intermediate_size, dtype)
    return values[0].transpose([0, 2, 1]), values[1].transpose([0, 2, 1])


def refuse_sharded_state(experts: nn.Layer) -> None:
    """Raise if ranks share a layer of codes: Paddle takes buffers for copies of one another."""
    if getattr(experts, "matrix_format", None) is not None and paddle.distributed.get_world_size() > 1:
        expected = "of a layer with its parameters; save state_dict() of each rank after quantize"
        _checks.bad_value("sharded_state_dict", "the experts", expected, "codes")
