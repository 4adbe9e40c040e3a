# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The table of the operators that are measured. Each has a module; all other code iterates over the table."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..check import Check
from ..device import Body, Implementation, Outputs
from ..model import Bytes, Kind, Work
from ..problem import Problem
from ..shapes import Operation
from .base import Library, Operator, Variant, Way

__all__ = [
    "OPERATIONS",
    "OPERATORS",
    "Library",
    "difference",
    "implementations",
    "minimum_bytes",
    "probe_work",
    "select_operations",
    "variant_of",
]

# Modules of this package, in the order of results and of the report.
_NAMES = (
    *("route", "route_permute", "permute", "moe_permute", "permute_quantized", "unpermute", "moe_unpermute"),
    *("unpermute_backward", "sort_chunks", "topk"),
)
OPERATORS: dict[str, Operator] = {name: import_module(f".{name}", __name__).OPERATOR for name in _NAMES}
OPERATIONS = tuple(
    Operation(operator.name, variant) for operator in OPERATORS.values() for variant in operator.variants
)


def _operator_of(operation: Operation) -> Operator:
    operator = OPERATORS.get(operation.op)
    if operator is None or operation.variant not in operator.variants:
        keys = ", ".join(each.key for each in OPERATIONS)
        raise ValueError(f"operation must be one of {keys}, but got {operation.key}")
    return operator


def variant_of(operation: Operation) -> Variant:
    return _operator_of(operation).variants[operation.variant]


def minimum_bytes(operation: Operation, problem: Problem) -> Bytes:
    """The least bytes of an operation: each input read once, each output written once."""
    return _operator_of(operation).least_bytes(operation, problem)


def probe_work(operation: Operation, problem: Problem) -> Work:
    """The probe that moves the rows of an operation, without its maps."""
    probe = _operator_of(operation).probe
    return Work(Kind.EMPTY, 0, 0) if probe is None else probe(operation, problem)


def difference(operation: Operation, check: Check, outputs: Outputs) -> str | None:
    """The first difference between outputs and the oracle's, as a text, or None."""
    if not outputs:
        return "there are no outputs to check"
    missing = [name for name in variant_of(operation).due if name not in outputs]
    if missing:
        return f"there is no {' and no '.join(missing)} to check"
    checks = _operator_of(operation).checks
    for name, array in outputs.items():
        found = checks.get(name, _unlike_map)(check, operation, name, array)
        if found:
            return found
    return None


def _unlike_map(check: Check, _: Operation, name: str, array: Any) -> str | None:
    return check.unlike_array(name, array, check.inputs.problem.array(name))


def implementations(library: Library, handle: Any, *, gpu: bool = False) -> list[Implementation]:
    """The implementations that call a library, by the operators' ways of the same name.

    Args:
        library: The library that they call.
        handle: Their handle of the library.
        gpu: True if they run on a GPU.
    """
    found: dict[str, dict[Operation, Way]] = {}
    for operator in OPERATORS.values():
        for way in operator.ways:
            if way.library is library and (gpu or not way.gpu_only):
                offered = {Operation(operator.name, variant): way for variant in way.variants or operator.variants}
                found.setdefault(way.name, {}).update(offered)
    return [_implementation(name, ways, handle) for name, ways in found.items()]


def _implementation(name: str, ways: dict[Operation, Way], handle: Any) -> Implementation:
    def prepare(operation: Operation, inputs: Any) -> Body:
        return ways[operation].prepare(handle, operation, inputs)

    return Implementation(name, tuple(operation.key for operation in ways), prepare)


def select_operations(patterns: Sequence[str] = ()) -> list[Operation]:
    """The operations whose key or operator matches one of the patterns; all of them without patterns.

    Raises:
        ValueError: A pattern that matches none.
    """
    if not patterns:
        return list(OPERATIONS)
    found: dict[Operation, None] = {}
    for pattern in patterns:
        matching = [
            operation
            for operation in OPERATIONS
            if fnmatch.fnmatchcase(operation.key, pattern) or fnmatch.fnmatchcase(operation.op, pattern)
        ]
        if not matching:
            keys = ", ".join(operation.key for operation in OPERATIONS)
            raise ValueError(f"--ops must match some of {keys}, but got {pattern!r}")
        found.update(dict.fromkeys(matching))
    return list(found)
