# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The description of an operator for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from ..guards import MakeOutput
from ..structs import Params

# For annotations alone: the benchmark imports operators where there is no hypothesis.
if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Large, Small

    Valid = Callable[[Core, MakeOutput, Small], Params]
    Fuzzed = Callable[[Core, MakeOutput, Draw], Params]
    Work = Callable[[Large, Core, int], tuple[NDArray, ...]]

__all__ = ["TOO_MANY", "TOO_MANY_EXPERTS", "TOO_WIDE", "Operator"]

TOO_MANY = 1 << 31
TOO_MANY_EXPERTS = (1 << 16) + 1
TOO_WIDE = (1 << 28) + 1


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator, or one of several forms of its params.

    Attributes:
        name: As in `pmo_NAME_cpu`.
        form: The form of the operator, unless it is the usual one.
        valid: Makes usable params, in which every field has something to point to.
        bad_fields: Values, for the valid params, that must be refused.
        required: Names of arrays that must be given.
        aligned: Names of arrays that must be aligned: they hold int32, int64 or float32 for the core itself. Row data
            and bytes may lie anywhere.
        fuzzed: Makes random params; None if those of another operator serve.
        fuzzed_before: An operator that is called with random params first.
        work: Calls it, with a number of threads, on arrays so large that several threads share the work.
    """

    name: str
    form: str = ""
    valid: Valid
    bad_fields: Mapping[str, tuple[float, ...]]
    required: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()
    fuzzed: Fuzzed | None = None
    fuzzed_before: str | None = None
    work: Work | None = None

    @property
    def key(self) -> str:
        """The name of the operator in tests."""
        return f"{self.name}_{self.form}" if self.form else self.name
