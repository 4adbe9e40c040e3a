# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A result file that one run writes, or several runs of the same machine, sources and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.pages import parsed

__all__ = ["open_results"]

_STATE = ("sm_clock", "memory_clock", "temperature", "power", "date")  # differ between runs


def open_results(path: Path, machine: Mapping[str, Any], extended_by: Sequence[str] | None = None) -> TextIO:
    """A line-buffered file whose first line is the machine line, so that a run that is stopped leaves its lines.

    Args:
        path: of the file.
        machine: facts of the machine line.
        extended_by: shapes that an existing file is extended by. Its earlier lines of these shapes are dropped. If it
            is None, the file is written anew.

    Raises:
        ValueError: the existing file has no machine line, or one with other facts.
    """
    first, kept = dict(machine), []
    if extended_by is not None and path.exists():
        first, *lines = parsed(path.read_text(encoding="utf-8")) or [{}]
        _check_same(path, first, machine)
        kept = [line for line in lines if line["shape"] not in extended_by]
    file = path.open("w", encoding="utf-8", buffering=1)
    for line in (first, *kept):
        file.write(json.dumps(line) + "\n")
    return file


def _check_same(path: Path, first: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    for key in {**first, **machine}:
        if key not in _STATE and first.get(key) != machine.get(key):
            raise ValueError(f"{path.name}: {key} must be {first.get(key)} as in the file, got {machine.get(key)}")
