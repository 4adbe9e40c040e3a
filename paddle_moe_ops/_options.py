# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The values of options that are strings: a type checker finds a misspelt one, and the checks at run time read them."""

from __future__ import annotations

from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["swiglu", "geglu", "geglu_tanh", "swiglu_oai"]
BackendName: TypeAlias = Literal["compiled", "triton", "paddle", "reference"]
Combine: TypeAlias = Literal["exact", "reduced"]
ComputeFormat: TypeAlias = Literal[None, "fp8_1x128", "fp8_1x128_wgrad"]
Duplicates: TypeAlias = Literal["first", "each"]
FillPadding: TypeAlias = Literal["all", "meta", "none"]
Keep: TypeAlias = Literal["h", "x", "h_fp8"]
MapType: TypeAlias = Literal["mask", "index"]
MatrixFormat: TypeAlias = Literal["int8", "int4", "int4_1x128", "fp8_128x128"]  # in the order of pmo_matrix_format
QuantizeFormat: TypeAlias = Literal[None, "fp8_1x128", "fp8_1x128_ue8m0"]
RowFormat: TypeAlias = Literal["fp8_1x128", "fp8_1x128_ue8m0"]
ScaleLayout: TypeAlias = Literal["row", "col"]
Scoring: TypeAlias = Literal["softmax", "sigmoid"]
TransportName: TypeAlias = Literal["auto", "alltoall", "gloo", "peer", "deepep"]
WeightsBy: TypeAlias = Literal[None, "row", "slot"]
