# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The table of the core's operators. Each has a module; tests of all operators iterate over the table.

A module has, for one operator or for two that share a struct: the struct, a function `*_params` that makes it from
arrays, a call that returns guarded outputs, and what `base.Operator` says. `route_permute` is not in the table: its two
structs are those of other operators.
"""

from __future__ import annotations

from importlib import import_module

from .base import Operator

__all__ = ["NAMES", "OPERATORS"]

_MODULES = (
    *("route", "clean_rowmap", "slots", "row_id_map", "permute", "unpermute", "unpermute_backward", "sort_chunks"),
    *("quantize", "dequantize", "topk", "ranks", "few_tokens", "exchange", "grouped_rows", "matrices", "paddle_float8"),
    *("index_add", "samples", "float8_wgrad"),
)
OPERATORS: dict[str, Operator] = {
    operator.key: operator for name in _MODULES for operator in import_module(f".{name}", __name__).OPERATORS
}
NAMES = tuple(dict.fromkeys(operator.name for operator in OPERATORS.values()))
