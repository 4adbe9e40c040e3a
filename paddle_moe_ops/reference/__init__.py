# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle in NumPy: the results of every kernel on every backend, bit for bit.

Scores of routers and GEMMs are the exceptions, see their modules.

It checks data if that is part of the semantics (``validate``). The public functions check arguments.
"""

from __future__ import annotations

from .activations import ACTIVATIONS, activate, activation_factors, swiglu
from .arithmetic import add32, fma32, round_to, to_float32
from .chunks import chunk_sort_map, sort_chunks, sort_chunks_backward
from .float8_mlp import FLOAT8_AMAX_MIN, moe_mlp_float8, moe_mlp_float8_backward
from .gemm import grouped_gemm, grouped_gemm_backward
from .indexed import get_routing_indices, permute_indexed, permute_indexed_backward, unpermute_indexed
from .matrices import MATRIX_FORMATS, dequantize_matrices, pack_int4, quantize_matrices, unpack_int4
from .mlp import MlpGradients, moe_mlp, moe_mlp_backward
from .paddle_api import (
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
    plan_to_rowmap,
    rowmap_to_token_rows,
)
from .permutation import permute, permute_backward, sum_rows, unpermute, unpermute_backward
from .quantization import (
    dequantize_1x128,
    dequantize_128x128,
    permute_quantized,
    quantize_1x128,
    quantize_128x128,
)
from .routing import Plan, route, route_backward
from .row_id_map import (
    RowMaps,
    make_row_id_map,
    read_rowmap,
    row_id_map_to_rowmap,
    rows_to_slots,
    slots_to_rows,
)
from .topk import calculate_topk, calculate_topk_backward, select_experts

__all__ = [
    "ACTIVATIONS",
    "FLOAT8_AMAX_MIN",
    "MATRIX_FORMATS",
    "MlpGradients",
    "Plan",
    "RowMaps",
    "activate",
    "activation_factors",
    "add32",
    "calculate_topk",
    "calculate_topk_backward",
    "chunk_sort_map",
    "dequantize_1x128",
    "dequantize_128x128",
    "dequantize_matrices",
    "fma32",
    "get_routing_indices",
    "grouped_gemm",
    "grouped_gemm_backward",
    "make_row_id_map",
    "moe_mlp",
    "moe_mlp_backward",
    "moe_mlp_float8",
    "moe_mlp_float8_backward",
    "moe_permute",
    "moe_permute_backward",
    "moe_unpermute",
    "moe_unpermute_backward",
    "pack_int4",
    "permute",
    "permute_backward",
    "permute_indexed",
    "permute_indexed_backward",
    "permute_quantized",
    "plan_to_rowmap",
    "quantize_1x128",
    "quantize_128x128",
    "quantize_matrices",
    "read_rowmap",
    "round_to",
    "route",
    "route_backward",
    "row_id_map_to_rowmap",
    "rowmap_to_token_rows",
    "rows_to_slots",
    "select_experts",
    "slots_to_rows",
    "sort_chunks",
    "sort_chunks_backward",
    "sum_rows",
    "swiglu",
    "to_float32",
    "unpack_int4",
    "unpermute",
    "unpermute_backward",
    "unpermute_indexed",
]


def __dir__() -> list[str]:
    return __all__
