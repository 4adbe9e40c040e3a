# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Unusable params structs: a status and a text that names the field, and nothing is written."""

from __future__ import annotations

import ctypes
import enum
import itertools
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from paddle_moe_ops import _env

from . import structs
from .binding import Core, CoreError
from .guards import guarded_outputs, is_poison
from .inputs import SMALL
from .layer import Choices, Hidden, Kernels, Part
from .operators import NAMES, OPERATORS
from .operators.base import TOO_MANY, TOO_MANY_EXPERTS, TOO_WIDE
from .operators.grouped_gemm import Accumulation, Gathered, Result
from .operators.matrices import MatrixFormat
from .operators.slots import SlotsParams
from .structs import DTYPES, Findings, Params, Size, Status

HEADERS = Path(__file__).resolve().parents[2] / "paddle_moe_ops" / "csrc" / "include" / "pmo"

FLT_MAX = float(np.finfo(np.float32).max)


def public_name(field: str) -> str:
    """Name of a field that may be one of a struct inside the params."""
    return re.sub("^(plan|barrier)_", "", field)


def outputs_of(params: Params) -> dict[str, np.ndarray]:
    """The arrays that are still poisoned when a call begins: the outputs."""
    return {name: array for name, array in params.arrays.items() if array.size and is_poison(array)}


def refusal(core: Core, operator: str, params: Params) -> str:
    """The text of a call that must be refused before it writes anything."""
    outputs = outputs_of(params)
    with pytest.raises(CoreError) as caught:
        core.run(operator, params)
    assert caught.value.status == Status.INVALID_ARGUMENT
    for name, array in outputs.items():
        assert is_poison(array), f"{name} was written"
    return caught.value.text


@pytest.mark.parametrize("made", OPERATORS)
def test_params_are_valid_before_they_are_spoilt(core: Core, made: str) -> None:
    operator = OPERATORS[made]
    with guarded_outputs() as output:
        params = operator.valid(core, output, SMALL)
        outputs = outputs_of(params)
        core.run(operator.name, params)
    assert not any(is_poison(array) for array in outputs.values()) or operator.name == "route_count"


@pytest.mark.parametrize("made", OPERATORS)
def test_bad_size_or_enum_is_named(core: Core, made: str) -> None:
    operator = OPERATORS[made]
    for field, values in operator.bad_fields.items():
        for value in values:
            with guarded_outputs() as output:
                params = operator.valid(core, output, SMALL)
                setattr(params, field, value)
                text = refusal(core, operator.name, params)
            assert text.split(" must be ")[0] == public_name(field).removesuffix("_bytes"), value


EMPTY = {"num_tokens": 0, "num_rows": 0}
LIMITS = [
    ("route_count", {"padding_alignment": 2**31 - 1}),
    ("gather_slots", {**EMPTY, "num_experts": TOO_MANY_EXPERTS - 1}),
    ("topk", {"num_tokens": 0, "num_experts": TOO_MANY_EXPERTS - 1, "num_groups": 1, "topk_groups": 1}),
    ("permute", {**EMPTY, "hidden": TOO_WIDE - 1}),
    ("permute", {**EMPTY, "topk": TOO_MANY - 1}),
    ("quantize_blocks", {"num_matrices": 0, "num_rows": 2**30 - 1, "num_columns": 2**30 - 1}),
    ("dequantize_matrices", {"num_matrices": TOO_MANY_EXPERTS - 1, "inner": 0}),
    ("grouped_clear", {"num_rows": 0, "row_size": 2**30}),
    *((made, {"amax_min": value}) for made in ("quantize", "quantize_blocks") for value in (2.0**-100, FLT_MAX)),
]


@pytest.mark.parametrize(("made", "changes"), LIMITS, ids=str)
def test_values_at_the_limits_are_taken(core: Core, made: str, changes: dict[str, float]) -> None:
    operator = OPERATORS[made]
    with guarded_outputs() as output:
        params = operator.valid(core, output, SMALL)
        for field, value in changes.items():
            setattr(params, field, value)
        core.run(operator.name, params)


@pytest.mark.parametrize("size", [0, -1, 8, 1000])
@pytest.mark.parametrize("made", OPERATORS)
def test_wrong_struct_size_is_named(core: Core, made: str, size: int) -> None:
    operator = OPERATORS[made]
    with guarded_outputs() as output:
        params = operator.valid(core, output, SMALL)
        params.struct_size = size
        assert refusal(core, operator.name, params).startswith("struct_size must be ")


@pytest.mark.parametrize("made", [made for made, operator in OPERATORS.items() if operator.required])
def test_missing_array_is_named(core: Core, made: str) -> None:
    operator = OPERATORS[made]
    for field in operator.required:
        with guarded_outputs() as output:
            params = operator.valid(core, output, SMALL)
            params.point_at(**{field: 0})
            assert refusal(core, operator.name, params).startswith(f"{public_name(field)} must be ")


@pytest.mark.parametrize("made", [made for made, operator in OPERATORS.items() if operator.aligned])
def test_misaligned_array_is_named(core: Core, made: str) -> None:
    operator = OPERATORS[made]
    for field, step in itertools.product(operator.aligned, (1, 2)):
        with guarded_outputs() as output:
            params = operator.valid(core, output, SMALL)
            params.point_at(**{field: params.address(field) + step})
            assert refusal(core, operator.name, params).startswith(f"{public_name(field)} must be ")


def test_wide_ids_must_be_aligned_to_8_bytes(core: Core) -> None:
    operator = OPERATORS["clean_rowmap"]
    with guarded_outputs() as output:
        params = operator.valid(core, output, SMALL)
        params.point_at(ids=params.address("ids") + 4)
        assert refusal(core, operator.name, params).startswith("ids must be ")


def test_workspace_one_byte_too_small_is_refused(core: Core) -> None:
    for made in ("route_count", "route"):
        operator = OPERATORS[made]
        with guarded_outputs() as output:
            params = operator.valid(core, output, SMALL)
            params.workspace_bytes -= 1
            assert refusal(core, operator.name, params).startswith("workspace must be ")


def test_workspace_of_bad_sizes_is_empty(core: Core) -> None:
    operator = OPERATORS["route_count"]
    with guarded_outputs() as output:
        params = operator.valid(core, output, SMALL)
    assert params.workspace_bytes > 0
    params.num_experts = 0
    workspace_bytes = core.function("pmo_route_cpu_workspace_bytes", Size, ctypes.c_void_p)
    assert workspace_bytes(ctypes.byref(params)) == 0
    assert workspace_bytes(None) == 0


@pytest.mark.parametrize("operator", NAMES)
def test_missing_params_are_refused(core: Core, operator: str) -> None:
    with pytest.raises(CoreError, match="params must be given") as caught:
        core.run(operator, None)
    assert caught.value.status == Status.INVALID_ARGUMENT


@pytest.mark.cpu_only
@pytest.mark.parametrize("made", OPERATORS)
def test_stream_on_the_cpu_is_refused(core: Core, made: str) -> None:
    operator = OPERATORS[made]
    with guarded_outputs() as output:
        params = operator.valid(core, output, SMALL)
        with pytest.raises(CoreError, match="stream must be NULL on the CPU") as caught:
            core.run(operator.name, params, stream=64)
    assert caught.value.status == Status.INVALID_ARGUMENT


def test_error_text_belongs_to_its_thread(core: Core) -> None:
    with pytest.raises(CoreError):
        core.run("permute", None)
    texts = []

    def fail_elsewhere() -> None:
        texts.append(core.last_error())
        with pytest.raises(CoreError):
            core.run("permute", None, stream=64)
        params = SlotsParams(struct_size=1)
        with pytest.raises(CoreError):
            core.run("gather_slots", params)
        texts.append(core.last_error())

    thread = threading.Thread(target=fail_elsewhere)
    thread.start()
    thread.join()
    assert texts[0] == ""
    assert texts[1].startswith("struct_size must be ")
    assert core.last_error() == "params must be given"


def test_the_functions_of_a_layer_mirror_the_header() -> None:
    body = re.search(r"typedef struct pmo_layer_kernels {(.*?)} pmo_layer_kernels", header_text(), re.DOTALL)
    assert re.findall(r"int \(\*(\w+)\)", body[1]) == [name for name, _ in Kernels._fields_]


def header_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(HEADERS.glob("*.h")))


def flat(body: str) -> str:
    """The body of a struct with the fields of structs inside it."""
    for inner, name in re.findall(r"^ *(pmo_\w+_params) (\w+);.*$", body, re.MULTILINE):
        found = re.search(rf"typedef struct {inner} {{(.*?)}}", header_text(), re.DOTALL)
        assert found is not None
        renamed = re.sub(r"(\w+);", rf"{name}_\1;", found[1])
        body = re.sub(rf"^ *{inner} {name};.*$", renamed, body, flags=re.MULTILINE)
    line = re.search(r"^ *pmo_layer_codes (.*);$", body, re.MULTILINE)
    if line is None:
        return body
    names = [name.removesuffix("_codes") for name in line[1].split(", ")]
    fields = "".join(f"  const void* {name}_codes;\n  const float* {name}_scales;\n" for name in names)
    return body.replace(f"{line[0]}\n", fields)


@pytest.mark.parametrize(
    "struct", [*Params.__subclasses__(), *Findings.__subclasses__(), Choices], ids=lambda struct: struct.__doc__
)
def test_ctypes_structs_mirror_the_headers(struct: type[ctypes.Structure]) -> None:
    body = re.search(rf"typedef struct {struct.__doc__} {{(.*?)}}", header_text(), re.DOTALL)
    assert body is not None
    declared = re.findall(r"^\s*(?:const )?(\w+)(\*?)\s*(?:const )?(\w+);", flat(body[1]), re.MULTILINE)
    kinds = {
        ("int32_t", ""): ctypes.c_int32,
        ("int64_t", ""): ctypes.c_int64,
        ("void", "*"): ctypes.c_void_p,
        ("int32_t", "*"): ctypes.POINTER(ctypes.c_int32),
        ("int64_t", "*"): ctypes.POINTER(ctypes.c_int64),
        ("float", "*"): ctypes.POINTER(ctypes.c_float),
        ("float", ""): ctypes.c_float,
    }
    assert [(name, kinds[kind, star]) for kind, star, name in declared] == list(struct._fields_)


def test_enumerations_mirror_the_headers() -> None:
    values = {name: int(value) for name, value in re.findall(r"PMO_(\w+) = (\d+),", header_text())}
    mirrored = [
        ("", structs.Status),
        ("CHECK_", structs.Check),
        ("FILL_", structs.Fill),
        ("ROUTING_", structs.RoutingKind),
        ("DUPLICATES_", structs.Duplicates),
        ("SCALES_BY_", structs.ScaleLayout),
        ("GROUPED_", Result),
        ("GROUPED_GATHERS_", Gathered),
        ("GROUPED_", Accumulation),
        ("LAYER_", Hidden),
        ("LAYER_", Part),
        ("MATRIX_", MatrixFormat),
    ]
    for prefix, members in mirrored:
        for name, member in members.__members__.items():
            if not (issubclass(members, enum.IntFlag) and name in ("NONE", "ALL")):
                assert values.pop(prefix + name) == member
    for code, name in enumerate(_env.CPU_ISAS):
        assert values.pop(f"CPU_{name.upper()}") == code
    assert values == {name.upper(): code for name, code in ((dtype.name, code) for dtype, code in DTYPES.items())}
