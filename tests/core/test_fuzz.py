# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Random params structs: whatever a caller passes, a call returns a status and stays inside the arrays it was given.

Arrays always hold what the sizes of the struct say, as only the caller can know that. All else is random: sizes beyond
the limits, enums, missing and misaligned arrays, short workspaces, maps full of rows and ids that do not exist. Under
the sanitizers a read out of bounds fails as well. ``--fuzz-cases`` says how many structs each operator gets, and
``--fuzz-seed`` which ones.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ..fuzzing import run_cases
from .binding import Core, CoreError
from .guards import guarded_outputs
from .inputs import Draw
from .operators import OPERATORS
from .structs import Params, Status

MIN_CASES_FOR_SHARES = 50
INVALID_SIZES = (-1, -(2**31), -(2**63), 2**31, 2**40, 2**62, 2**63 - 1)


def spoil(rng: np.random.Generator, params: Params, name: str, kind: type) -> None:
    """Change a field in a way that allows no stray access."""
    value = getattr(params, name)
    if kind is ctypes.c_int64:
        smaller = int(rng.integers(0, max(value, 0) + 1))
        # a longer stride or workspace than there is would lead out of the array, and nothing could tell
        only_smaller = name.endswith("_stride") or name == "workspace_bytes" or rng.random() < 0.5
        setattr(params, name, smaller if only_smaller else int(rng.choice(INVALID_SIZES)))
    elif kind is ctypes.c_int32:
        # a wider dtype than the four bytes at hand does not exist
        setattr(params, name, int(rng.choice([*Draw.ODD_INTS, -1, 0, 1, 2, 3, 64])))
    elif kind is ctypes.c_float:
        setattr(params, name, float(rng.choice([np.nan, np.inf, -1.0, 0.0, 1e-40, 1.0])))
    elif kind is ctypes.c_void_p or rng.random() < 0.5 or name not in params.arrays:
        setattr(params, name, None)
    else:
        setattr(params, name, ctypes.cast(params.arrays[name].ctypes.data + 1, kind))


def outcome(core: Core, operator: str, params: Params) -> tuple[Status, str]:
    try:
        core.run(operator, params)
    except CoreError as error:
        return error.status, error.text
    return Status.OK, ""


@pytest.mark.parametrize("target", [key for key, operator in OPERATORS.items() if operator.fuzzed is not None])
def test_no_params_lead_out_of_their_arrays(target: str, core: Core, request: pytest.FixtureRequest) -> None:
    operator = OPERATORS[target]
    names = [name for name in (operator.fuzzed_before, operator.name) if name is not None]
    outcomes = dict.fromkeys(Status, 0)

    def check(rng: np.random.Generator) -> None:
        with guarded_outputs() as output:
            params = operator.fuzzed(core, output, Draw(rng))
            fields = params._fields_
            for index in rng.choice(len(fields), rng.choice([0, 1, 1, 2, 3]), replace=False):
                spoil(rng, params, *fields[index])
            for name in names:
                status, text = outcome(core, name, params)
                outcomes[status] += 1
                assert (status == Status.OK) == (text == "")
                assert status != Status.INTERNAL, text
                if status != Status.OK:
                    break

    if run_cases(request, check) >= MIN_CASES_FOR_SHARES:  # the cases reach the kernels and the checks alike
        assert outcomes[Status.OK] > sum(outcomes.values()) // 10
        assert outcomes[Status.INVALID_ARGUMENT] > sum(outcomes.values()) // 10
    print(target, {status.name: count for status, count in outcomes.items()})
