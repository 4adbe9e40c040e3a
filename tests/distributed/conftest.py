# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Between which processes collectives run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed import processes


def pytest_configure(config: pytest.Config) -> None:
    """On GPUs, programs run there that name no backend."""
    processes.default_backend = "gloo" if config.getoption("--device") == "cpu" else "cuda_rig"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``num_processes`` runs between 2, slow tests 4, and on GPUs as many as there are."""
    if "num_processes" in metafunc.fixturenames:
        gpus = metafunc.config.getoption("--gpus")
        on_gpus = metafunc.config.getoption("--device") != "cpu"
        sizes = [gpus] if on_gpus else [2, 4]
        marks = [] if on_gpus else [pytest.mark.slow]
        parameters = [pytest.param(size, id=processes.WORDS[size], marks=marks * (size > 2)) for size in sizes]
        metafunc.parametrize("num_processes", parameters, scope="module")


@pytest.fixture(scope="session")
def custom_backend(request: pytest.FixtureRequest) -> str:
    """The backend of `processes.run` that has all collectives."""
    return "stub" if request.config.getoption("--device") == "cpu" else "cuda_rig"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """Calls a function between processes of a module's tests, since Fleet stays in them. Sort tests by their number."""
    with processes.kept(processes.default_backend) as call:
        yield call
