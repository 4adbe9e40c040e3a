# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Unusable params structs: a status and a text that names the field, and nothing is written."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from paddle_moe_ops import _env

from . import structs
from .binding import OPERATORS, Core, CoreError
from .guards import guarded_outputs, is_poison
from .structs import DTYPES, Params, RouteFindings, RowmapFindings, Status
from .valid_params import VALID

HEADERS = Path(__file__).resolve().parents[2] / "paddle_moe_ops" / "csrc" / "include" / "pmo"
TOO_MANY = 1 << 31
TOO_MANY_EXPERTS = (1 << 16) + 1
TOO_WIDE = (1 << 28) + 1

BAD_FIELDS: dict[str, list[tuple[str, float]]] = {
    "route_count": [
        ("num_tokens", -1),
        ("num_tokens", TOO_MANY),
        ("topk", -1),
        ("topk", TOO_MANY),
        ("topk", TOO_MANY // 5 + 1),  # 5 tokens: T * K reaches 2^31
        ("num_experts", 0),
        ("num_experts", -4),
        ("num_experts", TOO_MANY_EXPERTS),
        ("padding_alignment", 0),
        ("padding_alignment", -2),
        ("padding_alignment", TOO_MANY),
        ("routing_kind", -1),
        ("routing_kind", 3),
        ("duplicates", -1),
        ("duplicates", 2),
        ("workspace_bytes", 0),
        ("workspace_bytes", -1),
    ],
    "route_count_mask": [("topk", 5)],
    "route": [
        ("num_tokens", -1),
        ("topk", -1),
        ("num_experts", 0),
        ("padding_alignment", 0),
        ("num_rows", -1),
        ("num_rows", TOO_MANY),
        ("routing_kind", 3),
        ("duplicates", 2),
        ("workspace_bytes", 8),
    ],
    "clean_rowmap": [
        ("num_tokens", -1),
        ("num_tokens", TOO_MANY),
        ("topk", -1),
        ("topk", TOO_MANY // 5 + 1),
        ("num_experts", 0),
        ("num_experts", TOO_MANY_EXPERTS),
        ("num_rows", -1),
        ("num_rows", TOO_MANY),
        ("ids_kind", -1),
        ("ids_kind", 2),
        ("duplicates", -1),
        ("duplicates", 2),
    ],
    "gather_slots": [
        ("num_tokens", -1),
        ("topk", -1),
        ("topk", TOO_MANY),
        ("num_experts", -1),
        ("num_experts", TOO_MANY_EXPERTS),
        ("num_rows", -1),
        ("num_rows", TOO_MANY),
    ],
    "permute": [
        ("num_tokens", -1),
        ("num_tokens", TOO_MANY),
        ("topk", -1),
        ("topk", TOO_MANY // 5 + 1),
        ("num_rows", -1),
        ("num_rows", TOO_MANY),
        ("hidden", -1),
        ("hidden", TOO_WIDE),
        ("scale_cols", -1),
        ("scale_cols", TOO_WIDE),
        ("dtype", -1),
        ("dtype", 6),
        ("scale_dtype", -1),
        ("scale_dtype", 6),
    ],
    "unpermute": [
        ("num_tokens", -1),
        ("num_tokens", TOO_MANY),
        ("max_rows_per_token", -1),
        ("max_rows_per_token", TOO_MANY),
        ("num_rows", -1),
        ("num_rows", TOO_MANY),
        ("num_weights", -1),
        ("num_weights", TOO_MANY),
        ("hidden", -1),
        ("hidden", TOO_WIDE),
        ("dtype", -1),
        ("dtype", 3),  # float8 rows are moved, never summed
        ("dtype", 4),
        ("dtype", 5),
    ],
    "quantize": [
        ("num_tokens", -1),
        ("num_tokens", TOO_MANY),
        ("topk", -1),
        ("topk", TOO_MANY // 5 + 1),
        ("num_rows", -1),
        ("num_rows", TOO_MANY),
        ("hidden", -1),
        ("hidden", TOO_WIDE),
        ("dtype", -1),
        ("dtype", 3),  # there is nothing to quantise in float8
        ("dtype", 5),
        ("scale_layout", -1),
        ("scale_layout", 2),
        ("amax_min", 0.0),
        ("amax_min", -1.0),
        ("amax_min", 2.0**-101),
        ("amax_min", float("inf")),
        ("amax_min", float("nan")),
    ],
    "dequantize": [
        ("num_rows", -1),
        ("num_rows", TOO_MANY),
        ("hidden", -1),
        ("hidden", TOO_WIDE),
        ("dtype", -1),
        ("dtype", 3),
        ("scale_layout", -1),
        ("scale_layout", 2),
    ],
}
BAD_FIELDS["clean_rowmap_by_expert"] = [("num_experts", 0)]
BAD_FIELDS["make_row_id_map"] = [
    ("num_tokens", -1),
    ("num_tokens", TOO_MANY),
    ("topk", -1),
    ("topk", TOO_MANY // 5 + 1),
    ("num_experts", 0),
    ("num_experts", TOO_MANY_EXPERTS),
    ("num_rows", -1),
    ("num_rows", TOO_MANY),
]
BAD_FIELDS["read_row_id_map"] = [("num_tokens", -1), ("num_experts", 0), ("num_experts", TOO_MANY_EXPERTS)]
BAD_FIELDS["sort_chunks"] = [
    ("num_rows", -1),
    ("num_rows", TOO_MANY),
    ("num_chunks", -1),
    ("num_chunks", (1 << 20) + 1),
    ("hidden", -1),
    ("hidden", TOO_WIDE),
    ("dtype", -1),
    ("dtype", 6),
    ("split_sizes_kind", -1),
    ("split_sizes_kind", 2),
    ("order_kind", -1),
    ("order_kind", 2),
]
BAD_FIELDS["topk_backward"] = [
    ("num_tokens", -1),
    ("num_tokens", TOO_MANY),
    ("topk", -1),
    ("topk", TOO_MANY // 5 + 1),
    ("num_experts", 0),
    ("num_experts", TOO_MANY_EXPERTS),
    ("dtype", -1),
    ("dtype", 3),
    ("dtype", 5),
]
BAD_FIELDS["topk"] = [
    *BAD_FIELDS["topk_backward"],
    ("topk", 0),
    ("topk", 3),  # of 4 experts in 2 groups of which 1 is kept
    ("num_groups", 0),
    ("num_groups", -2),
    ("num_groups", 3),
    ("num_groups", 8),
    ("topk_groups", 0),
    ("topk_groups", 3),
    ("scores_per_group", 0),
    ("scores_per_group", -1),
]
BAD_FIELDS["scatter_slots"] = BAD_FIELDS["gather_slots"]
BAD_FIELDS["unpermute_backward"] = BAD_FIELDS["unpermute"]

REQUIRED_ARRAYS = {
    "route_count": ["routing", "workspace", "routed_per_expert"],
    "route_count_mask": ["routing"],
    "route": ["workspace", "routed_per_expert", "probs"],
    "clean_rowmap": ["rowmap", "ids", "row_values", "token_rows", "row_to_token"],
    "gather_slots": ["slot_to_row", "row_to_expert", "row_values", "slot_values"],
    "scatter_slots": ["slot_to_row", "row_to_expert", "row_values", "slot_values"],
    "permute": ["x", "scale", "slot_to_row", "row_to_token"],
    "unpermute": ["rows", "token_rows", "out"],
    "unpermute_backward": ["d_out", "rows", "token_rows", "row_to_token", "weights"],
    "make_row_id_map": ["token_rows", "row_to_expert", "row_id_map"],
    "read_row_id_map": ["row_id_map", "rowmap"],
    "sort_chunks": ["x", "split_sizes", "order", "probs"],
    "quantize": ["x", "slot_to_row", "row_to_token", "codes", "scales"],
    "dequantize": ["codes", "scales", "out"],
    "topk": ["gating", "weights", "ids"],
    "topk_backward": ["gating", "ids", "d_gating"],
}
# Row data and bytes may lie anywhere; whatever holds int32, int64 or float32 for the core itself may not.
ALIGNED_ARRAYS = {
    "route_count": ["routing", "workspace", "probs", "expected_per_expert", "routed_per_expert"],
    "route": [
        "workspace",
        "routed_per_expert",
        "probs",
        "slot_to_row",
        "token_rows",
        "row_to_token",
        "row_to_slot",
        "row_to_expert",
        "row_probs",
        "tokens_per_expert",
        "expert_offsets",
        "overflow",
        "rowmap",
    ],
    "clean_rowmap": ["rowmap", "ids", "row_values", "token_rows", "row_to_token", "slot_to_row", "slot_values"],
    "gather_slots": ["slot_to_row", "row_to_expert", "row_values", "slot_values"],
    "scatter_slots": ["slot_to_row", "row_to_expert", "row_values", "slot_values"],
    "permute": ["slot_to_row", "row_to_token"],
    "unpermute": ["token_rows", "weights", "weight_index"],
    "unpermute_backward": ["token_rows", "row_to_token", "weights", "weight_index", "d_weights"],
    "clean_rowmap_by_expert": ["slot_to_row", "row_to_slot", "row_to_expert"],
    "make_row_id_map": ["token_rows", "row_to_expert", "pad_offsets", "row_id_map"],
    "read_row_id_map": ["pad_offsets", "row_id_map", "rowmap"],
    "sort_chunks": ["split_sizes", "order", "probs", "probs_out", "source_to_dest"],
    "quantize": ["slot_to_row", "row_to_token", "scales", "workspace"],
    "dequantize": ["scales"],
    "topk": ["gating", "correction_bias", "weights", "ids", "scores"],
    "topk_backward": ["gating", "ids", "d_weights", "d_scores", "d_gating"],
}


def pairs(table: dict[str, list]) -> list:
    return [(made, entry) for made, entries in table.items() for entry in entries]


def outputs_of(params: Params) -> dict[str, np.ndarray]:
    """The arrays that are still poisoned when a call begins: the outputs."""
    return {name: array for name, array in params.arrays.items() if array.size and is_poison(array)}


def address(params: Params, field: str) -> int:
    return ctypes.cast(getattr(params, field), ctypes.c_void_p).value or 0


def set_address(params: Params, field: str, value: int) -> None:
    kind = dict(type(params)._fields_)[field]
    setattr(params, field, ctypes.cast(value, kind))


def refusal(core: Core, operator: str, params: Params) -> str:
    """The text of a call that must be refused before it writes anything."""
    outputs = outputs_of(params)
    with pytest.raises(CoreError) as caught:
        core.run(operator, params)
    assert caught.value.status == Status.INVALID_ARGUMENT
    for name, array in outputs.items():
        assert is_poison(array), f"{name} was written"
    return caught.value.text


@pytest.mark.parametrize("made", VALID)
def test_params_are_valid_before_they_are_spoilt(core: Core, made: str) -> None:
    operator, make = VALID[made]
    with guarded_outputs() as output:
        params = make(core, output)
        outputs = outputs_of(params)
        core.run(operator, params)
    assert not any(is_poison(array) for array in outputs.values()) or operator == "route_count"


@pytest.mark.parametrize(("made", "spoilt"), pairs(BAD_FIELDS), ids=str)
def test_bad_size_or_enum_is_named(core: Core, made: str, spoilt: tuple[str, float]) -> None:
    operator, make = VALID[made]
    field, value = spoilt
    with guarded_outputs() as output:
        params = make(core, output)
        setattr(params, field, value)
        text = refusal(core, operator, params)
    assert text.split(" must be ")[0] == field.removesuffix("_bytes")


@pytest.mark.parametrize("size", [0, -1, 8, 1000])
@pytest.mark.parametrize("made", VALID)
def test_wrong_struct_size_is_named(core: Core, made: str, size: int) -> None:
    operator, make = VALID[made]
    with guarded_outputs() as output:
        params = make(core, output)
        params.struct_size = size
        assert refusal(core, operator, params).startswith("struct_size must be ")


@pytest.mark.parametrize(("made", "field"), pairs(REQUIRED_ARRAYS))
def test_missing_array_is_named(core: Core, made: str, field: str) -> None:
    operator, make = VALID[made]
    with guarded_outputs() as output:
        params = make(core, output)
        set_address(params, field, 0)
        assert refusal(core, operator, params).startswith(f"{field} must be ")


@pytest.mark.parametrize(("made", "field"), pairs(ALIGNED_ARRAYS))
def test_misaligned_array_is_named(core: Core, made: str, field: str) -> None:
    operator, make = VALID[made]
    for step in (1, 2):
        with guarded_outputs() as output:
            params = make(core, output)
            set_address(params, field, address(params, field) + step)
            assert refusal(core, operator, params).startswith(f"{field} must be ")


def test_wide_ids_must_be_aligned_to_8_bytes(core: Core) -> None:
    operator, make = VALID["clean_rowmap"]
    with guarded_outputs() as output:
        params = make(core, output)
        set_address(params, "ids", address(params, "ids") + 4)
        assert refusal(core, operator, params).startswith("ids must be ")


def test_workspace_one_byte_too_small_is_refused(core: Core) -> None:
    for made in ("route_count", "route"):
        operator, make = VALID[made]
        with guarded_outputs() as output:
            params = make(core, output)
            params.workspace_bytes -= 1
            assert refusal(core, operator, params).startswith("workspace must be ")


def test_workspace_of_bad_sizes_is_empty(core: Core) -> None:
    _, make = VALID["route_count"]
    with guarded_outputs() as output:
        params = make(core, output)
    assert params.workspace_bytes > 0
    params.num_experts = 0
    assert core.library.pmo_route_cpu_workspace_bytes(ctypes.byref(params)) == 0
    assert core.library.pmo_route_cpu_workspace_bytes(None) == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_missing_params_are_refused(core: Core, operator: str) -> None:
    with pytest.raises(CoreError, match="params must be given") as caught:
        core.run(operator, None)
    assert caught.value.status == Status.INVALID_ARGUMENT


@pytest.mark.cpu_only
@pytest.mark.parametrize("made", VALID)
def test_stream_on_the_cpu_is_refused(core: Core, made: str) -> None:
    operator, make = VALID[made]
    with guarded_outputs() as output:
        params = make(core, output)
        with pytest.raises(CoreError, match="stream must be NULL on the CPU") as caught:
            core.run(operator, params, stream=64)
    assert caught.value.status == Status.INVALID_ARGUMENT


def test_error_text_belongs_to_its_thread(core: Core) -> None:
    with pytest.raises(CoreError):
        core.run("permute", None)
    texts = []

    def fail_elsewhere() -> None:
        texts.append(core.last_error())
        with pytest.raises(CoreError):
            core.run("permute", None, stream=64)
        params = structs.SlotsParams(struct_size=1)
        with pytest.raises(CoreError):
            core.run("gather_slots", params)
        texts.append(core.last_error())

    thread = threading.Thread(target=fail_elsewhere)
    thread.start()
    thread.join()
    assert texts[0] == ""
    assert texts[1].startswith("struct_size must be ")
    assert core.last_error() == "params must be given"


def header_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(HEADERS.glob("*.h")))


@pytest.mark.parametrize(
    "struct", [*Params.__subclasses__(), RouteFindings, RowmapFindings], ids=lambda struct: struct.__doc__
)
def test_ctypes_structs_mirror_the_headers(struct: type[ctypes.Structure]) -> None:
    body = re.search(rf"typedef struct {struct.__doc__} {{(.*?)}}", header_text(), re.DOTALL)
    assert body is not None
    declared = re.findall(r"^\s*(?:const )?(\w+)(\*?)\s*(?:const )?(\w+);", body[1], re.MULTILINE)
    kinds = {
        ("int32_t", ""): ctypes.c_int32,
        ("int64_t", ""): ctypes.c_int64,
        ("void", "*"): ctypes.c_void_p,
        ("int32_t", "*"): ctypes.POINTER(ctypes.c_int32),
        ("int64_t", "*"): ctypes.POINTER(ctypes.c_int64),
        ("float", "*"): ctypes.POINTER(ctypes.c_float),
        ("float", ""): ctypes.c_float,
    }
    assert [(name, kinds[kind, star]) for kind, star, name in declared] == struct._fields_


def test_enumerations_mirror_the_headers() -> None:
    values = {name: int(value) for name, value in re.findall(r"PMO_(\w+) = (\d+),", header_text())}
    mirrored = {
        "": structs.Status,
        "CHECK_": structs.Check,
        "FILL_": structs.Fill,
        "ROUTING_": structs.RoutingKind,
        "DUPLICATES_": structs.Duplicates,
        "SCALES_BY_": structs.ScaleLayout,
    }
    for prefix, members in mirrored.items():
        for name, member in members.__members__.items():
            if name not in ("NONE", "ALL"):
                assert values.pop(prefix + name) == member
    for code, name in enumerate(_env.CPU_ISAS):
        assert values.pop(f"CPU_{name.upper()}") == code
    assert values == {name.upper(): code for name, code in ((dtype.name, code) for dtype, code in DTYPES.items())}
