# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Constants and structs of the C core, as ``csrc/include/pmo/*.h`` declares them; the docstrings are their names."""

from __future__ import annotations

import ctypes
import enum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DTYPES",
    "NOWHERE",
    "Check",
    "CleanRowmapParams",
    "DequantizeParams",
    "Duplicates",
    "Fill",
    "Floats",
    "Int",
    "Int32s",
    "Params",
    "PermuteParams",
    "QuantizeParams",
    "RouteFindings",
    "RouteParams",
    "RoutingKind",
    "RowIdMapParams",
    "RowmapFindings",
    "ScaleLayout",
    "Size",
    "SlotsParams",
    "SortChunksParams",
    "Status",
    "TopkBackwardParams",
    "TopkParams",
    "UnpermuteBackwardParams",
    "UnpermuteParams",
    "row_stride",
]


class Status(enum.IntEnum):
    """pmo_status"""

    OK = 0
    INVALID_ARGUMENT = 1
    INVALID_DATA = 2
    INTERNAL = 3


class Check(enum.IntFlag):
    """pmo_check"""

    NONE = 0
    RANGE = 1
    DUPLICATES = 2
    NAN = 4
    OVERFLOW = 8
    COUNTS = 16
    ALL = 31


class Fill(enum.IntFlag):
    """pmo_fill"""

    NONE = 0
    ROWS = 1
    SCALES = 2
    ALL = 3


class RoutingKind(enum.IntEnum):
    """pmo_routing_kind"""

    IDS32 = 0
    IDS64 = 1
    MASK = 2


class Duplicates(enum.IntEnum):
    """pmo_duplicates"""

    FIRST = 0
    EACH = 1


class ScaleLayout(enum.IntEnum):
    """pmo_scale_layout"""

    ROW = 0
    COLUMN = 1


# pmo_dtype
DTYPES: dict[np.dtype, int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(ml_dtypes.float8_e4m3fn): 3,
    np.dtype(ml_dtypes.float8_e5m2): 4,
    np.dtype(np.int32): 5,
}

# PMO_NOWHERE
NOWHERE = (1 << 63) - 1

Int = ctypes.c_int32
Size = ctypes.c_int64
Float = ctypes.c_float
Bytes = ctypes.c_void_p
Int32s = ctypes.POINTER(ctypes.c_int32)
Int64s = ctypes.POINTER(ctypes.c_int64)
Floats = ctypes.POINTER(ctypes.c_float)
_ELEMENTS = {Int32s: np.dtype(np.int32), Int64s: np.dtype(np.int64), Floats: np.dtype(np.float32)}


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


def row_stride(matrix: NDArray) -> int:
    """Elements from one row to the next; inside a row they must be neighbours."""
    if matrix.size > len(matrix) and matrix.strides[1] != matrix.itemsize:
        raise ValueError(f"rows must be contiguous, but got strides {matrix.strides}")
    return matrix.strides[0] // matrix.itemsize


class Params(ctypes.Structure):
    """A params struct of the core. It keeps the arrays alive whose addresses it holds."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.arrays: dict[str, NDArray] = {}
        self.struct_size = ctypes.sizeof(self)
        types: dict[str, Any] = {name: kind for name, kind, *_ in type(self)._fields_}
        for name, value in fields.items():
            if name not in types:
                raise TypeError(f"{type(self).__name__} has no field {name}")
            if isinstance(value, np.ndarray):
                expected = _ELEMENTS.get(types[name], value.dtype)
                if value.dtype != expected:
                    raise TypeError(f"{name} must be {expected}, but got {value.dtype}")
                if not value.flags.c_contiguous and f"{name}_row_stride" not in types:
                    raise ValueError(f"{name} must be contiguous, but got strides {value.strides}")
                self.arrays[name] = value
                value = ctypes.cast(value.ctypes.data, types[name])
            setattr(self, name, value)


class RouteParams(Params):
    """pmo_route_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_experts padding_alignment num_rows"),
        *_fields(Bytes, "routing"),
        *_fields(Floats, "probs"),
        *_fields(Int32s, "expected_per_expert"),
        *_fields(Int, "routing_kind duplicates checks num_threads"),
        *_fields(Bytes, "workspace"),
        *_fields(Size, "workspace_bytes"),
        *_fields(Int32s, "routed_per_expert slot_to_row token_rows row_to_token row_to_slot row_to_expert"),
        *_fields(Floats, "row_probs"),
        *_fields(Int32s, "tokens_per_expert expert_offsets overflow rowmap"),
    ]


class RouteFindings(ctypes.Structure):
    """pmo_route_findings"""

    _fields_ = _fields(Size, "bad_place bad_value duplicate_place duplicate_expert duplicate_first nan_place")


class CleanRowmapParams(Params):
    """pmo_clean_rowmap_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_experts num_rows"),
        *_fields(Int32s, "rowmap"),
        *_fields(Bytes, "ids"),
        *_fields(Floats, "row_values"),
        *_fields(Int, "ids_kind duplicates checks num_threads"),
        *_fields(Int32s, "token_rows row_to_token slot_to_row"),
        *_fields(Floats, "slot_values"),
        *_fields(Int32s, "row_to_slot row_to_expert"),
        *_fields(Bytes, "workspace"),
        *_fields(Size, "workspace_bytes"),
    ]


class RowmapFindings(ctypes.Structure):
    """pmo_rowmap_findings"""

    _fields_ = _fields(Size, "bad_id_place bad_id bad_row_place bad_row repeat_place repeat_row repeat_first")


class RowIdMapParams(Params):
    """pmo_row_id_map_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_experts num_rows"),
        *_fields(Int32s, "token_rows row_to_expert pad_offsets row_id_map rowmap"),
        *_fields(Int, "num_threads"),
    ]


class SlotsParams(Params):
    """pmo_slots_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_experts num_rows"),
        *_fields(Int32s, "slot_to_row row_to_expert"),
        *_fields(Floats, "row_values slot_values"),
        *_fields(Int, "accumulate num_threads"),
    ]


class PermuteParams(Params):
    """pmo_permute_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_rows hidden scale_cols"),
        *_fields(Bytes, "x"),
        *_fields(Size, "x_row_stride"),
        *_fields(Bytes, "scale"),
        *_fields(Size, "scale_row_stride"),
        *_fields(Int32s, "slot_to_row row_to_token"),
        *_fields(Bytes, "rows row_scales"),
        *_fields(Int, "dtype scale_dtype fill num_threads"),
    ]


class UnpermuteParams(Params):
    """pmo_unpermute_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens max_rows_per_token num_rows num_weights hidden"),
        *_fields(Bytes, "rows"),
        *_fields(Size, "rows_row_stride"),
        *_fields(Int32s, "token_rows"),
        *_fields(Floats, "weights"),
        *_fields(Int32s, "weight_index"),
        *_fields(Bytes, "out"),
        *_fields(Int, "dtype copy_single_row num_threads"),
    ]


class UnpermuteBackwardParams(Params):
    """pmo_unpermute_backward_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens max_rows_per_token num_rows num_weights hidden"),
        *_fields(Bytes, "d_out"),
        *_fields(Size, "d_out_row_stride"),
        *_fields(Bytes, "rows"),
        *_fields(Size, "rows_row_stride"),
        *_fields(Int32s, "token_rows row_to_token"),
        *_fields(Floats, "weights"),
        *_fields(Int32s, "weight_index"),
        *_fields(Bytes, "d_rows"),
        *_fields(Floats, "d_weights"),
        *_fields(Int, "dtype copy_single_row num_threads"),
    ]


class SortChunksParams(Params):
    """pmo_sort_chunks_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_rows num_chunks hidden"),
        *_fields(Bytes, "x"),
        *_fields(Size, "x_row_stride"),
        *_fields(Bytes, "split_sizes order"),
        *_fields(Floats, "probs"),
        *_fields(Bytes, "out"),
        *_fields(Floats, "probs_out"),
        *_fields(Int32s, "source_to_dest"),
        *_fields(Bytes, "workspace"),
        *_fields(Size, "workspace_bytes"),
        *_fields(Int, "dtype split_sizes_kind order_kind inverse checks num_threads"),
    ]


class QuantizeParams(Params):
    """pmo_quantize_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_rows hidden"),
        *_fields(Bytes, "x"),
        *_fields(Size, "x_row_stride"),
        *_fields(Int32s, "slot_to_row row_to_token"),
        *_fields(Bytes, "codes scales"),
        *_fields(Int, "dtype ue8m0 scale_layout fill"),
        *_fields(Float, "amax_min"),
        *_fields(Int, "num_threads"),
        *_fields(Bytes, "workspace"),
        *_fields(Size, "workspace_bytes"),
    ]


class DequantizeParams(Params):
    """pmo_dequantize_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_rows hidden"),
        *_fields(Bytes, "codes"),
        *_fields(Size, "codes_row_stride"),
        *_fields(Bytes, "scales out"),
        *_fields(Int, "dtype ue8m0 scale_layout num_threads"),
    ]


class TopkParams(Params):
    """pmo_topk_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_experts num_groups topk_groups scores_per_group"),
        *_fields(Bytes, "gating"),
        *_fields(Size, "gating_row_stride"),
        *_fields(Floats, "correction_bias"),
        *_fields(Bytes, "weights"),
        *_fields(Int64s, "ids"),
        *_fields(Bytes, "scores"),
        *_fields(Int, "dtype use_sigmoid pre_act renormalize"),
        *_fields(Float, "scaling_factor"),
        *_fields(Int, "num_threads"),
        *_fields(Bytes, "workspace"),
        *_fields(Size, "workspace_bytes"),
    ]


class TopkBackwardParams(Params):
    """pmo_topk_backward_params"""

    _fields_ = [
        *_fields(Size, "struct_size num_tokens topk num_experts"),
        *_fields(Bytes, "gating"),
        *_fields(Size, "gating_row_stride"),
        *_fields(Int64s, "ids"),
        *_fields(Bytes, "d_weights d_scores d_gating"),
        *_fields(Int, "dtype use_sigmoid pre_act renormalize"),
        *_fields(Float, "scaling_factor"),
        *_fields(Int, "num_threads"),
    ]
