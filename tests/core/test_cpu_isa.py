# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The instruction set of the CPU operators can be limited, and changes no bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_moe_ops import _env

from . import cpu_isas, workload
from .binding import Core
from .conftest import LIBRARY

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def unlimited(core: Core) -> Iterator[Core]:
    """The core without a limit; the limit is process-wide, so the environment's one is restored."""
    core.set_max_cpu_isa(_env.CPU_ISAS[-1])
    yield core
    core.set_max_cpu_isa(_env.CPU_ISAS[_env.max_cpu_isa()])


def best_up_to(limit: str) -> str:
    allowed = _env.CPU_ISAS[: _env.CPU_ISAS.index(limit) + 1]
    return max(set(allowed) & set(cpu_isas.available()), key=_env.CPU_ISAS.index)


@pytest.mark.parametrize("limit", _env.CPU_ISAS)
def test_best_one_within_the_limit_is_used(unlimited: Core, limit: str) -> None:
    unlimited.set_max_cpu_isa(limit)
    assert unlimited.used_cpu_isa() == best_up_to(limit)


def test_without_a_limit_the_best_one_is_used(unlimited: Core) -> None:
    assert unlimited.used_cpu_isa() == cpu_isas.available()[-1]


def test_limits_beyond_both_ends_are_those_ends(unlimited: Core) -> None:
    unlimited.library.pmo_set_max_cpu_isa(-1)
    assert unlimited.used_cpu_isa() == "generic"
    unlimited.library.pmo_set_max_cpu_isa(1000)
    assert unlimited.used_cpu_isa() == cpu_isas.available()[-1]


@pytest.mark.parametrize("operator", workload.OPERATORS)
def test_results_have_the_same_bits_on_every_instruction_set(unlimited: Core, operator: str) -> None:
    expected = workload.bits(workload.OPERATORS[operator](unlimited, 2))
    for isa in cpu_isas.available()[:-1]:
        unlimited.set_max_cpu_isa(isa)
        assert workload.bits(workload.OPERATORS[operator](unlimited, 2)) == expected, isa


@pytest.mark.parametrize(("value", "limit"), [("generic", "generic"), ("avx2", "avx2"), ("auto", "avx512")])
def test_core_takes_the_limit_from_the_environment(
    unlimited: Core, monkeypatch: pytest.MonkeyPatch, value: str, limit: str
) -> None:
    with monkeypatch.context() as context:
        context.setenv("PADDLE_MOE_OPS_MAX_CPU_ISA", value)
        assert Core(LIBRARY).used_cpu_isa() == best_up_to(limit)
