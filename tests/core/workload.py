# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every operator once, on arrays large enough that several threads share the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from numpy.typing import NDArray

from . import operators
from .binding import Core
from .inputs import LARGE

Results = tuple[NDArray, ...]

# They take the core and a number of threads.
OPERATORS: dict[str, Callable[[Core, int], Results]] = {
    key: partial(operator.work, LARGE) for key, operator in operators.OPERATORS.items() if operator.work is not None
}


def bits(results: Results) -> list[bytes]:
    return [array.tobytes() for array in results]
