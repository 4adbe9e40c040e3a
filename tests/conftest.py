# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The device under test, a stable seed per test, and how hypothesis runs.

Nothing here imports Paddle before a test asks for a device: the tests of the core run without it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
import zlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

from tests.pairwise import sampled, thinned

TESTS = Path(__file__).resolve().parent

# Nothing is judged by the clock: a machine may be slow, or busy with something else.
settings.register_profile("local", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
# The same examples on every run: what fails in CI fails everywhere, and what passes has been seen to pass.
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tensors are made, as paddle.set_device takes it")
    parser.addoption("--backend", help="the backend that all of tests/ops runs on (default: as each test says)")
    parser.addoption("--core-device", default="cpu", choices=["cpu", "cuda"], help="whose entry points tests/core call")
    parser.addoption("--gpus", type=int, default=1, help="GPUs of the machine, of which tests may use two")
    parser.addoption("--every-case", action="store_true", help="leave no case of a product or a sample to slow tests")
    parser.addoption("--fuzz-cases", type=int, default=500, help="cases of each fuzz test (tests/fuzzing.py)")
    parser.addoption("--fuzz-first", type=int, default=0, help="number of the first case of each fuzz test")
    parser.addoption("--fuzz-seed", type=int, default=1, help="seed of all cases of fuzz tests")


def pytest_configure(config: pytest.Config) -> None:
    # A developer's settings must not change what is tested; tests that need them set them.
    for name in ("PADDLE_MOE_OPS_BACKEND", "PADDLE_MOE_OPS_VALIDATE"):
        os.environ.pop(name, None)
    # Paddle's bfloat16 matmul dies of an illegal instruction where a virtual machine shows AMX but does not grant it.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    # Triton reads this once, when the first module of kernels is imported, which may be while tests are collected.
    if config.getoption("--core-device") == config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if (worker := getattr(config, "workerinput", None)) is not None and not sys.dont_write_bytecode:
        import_part(config.args, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def import_part(arguments: list[str], number: int, workers: int) -> None:
    """Import one of ``workers`` parts of the test modules: their bytecode is written once, and not by each worker."""
    roots = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    paths = sorted({path for root in roots for path in (root.rglob("test_*.py") if root.is_dir() else [root])})
    for path in paths[number::workers]:
        if not path.is_relative_to(TESTS / "integrations"):  # those need packages of an environment of their own
            with contextlib.suppress(Exception):  # the collection reports it
                importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has no meaning on the device under test; the marks in pyproject.toml say what that is."""
    device, core_device = config.getoption("--device"), config.getoption("--core-device")
    if device == core_device == "cpu" and not config.getoption("--every-case"):
        mark_slow_cases(items)
    out = {"cuda_only"} if core_device == "cpu" else {"cpu_only"}
    out.add("gpu_only" if device == "cpu" else "cpu_only")
    if device.startswith("cuda_rig"):
        out.add("paddle_kernels")
    if not device.startswith("gpu"):
        out.add("gpu_place")
    if config.getoption("--backend") is not None:
        out.add("compiled_only")
    if config.getoption("--gpus") < 2:
        out.add("two_gpus")
    left, left_out = [], []
    for item in items:
        (left if out.isdisjoint(mark.name for mark in item.iter_markers()) else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    # Files that take long come first: one that begins last has a worker to itself while the others wait.
    items[:] = sorted(left, key=lambda item: item.get_closest_marker("long") is None)


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark cases slow that `make test` leaves out, of a function that has the mark ``sampled`` or a product of cases.

    ``sampled(n, first)`` keeps one in n cases. A product of several ``parametrize`` keeps all values of two of them,
    or all pairs of more. A list of cases, which one ``parametrize`` has, stays as it is.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        axes = [_names(mark.args[0]) for mark in cases[0].iter_markers("parametrize")]
        kept: Collection[int] = range(len(cases))
        if (mark := cases[0].get_closest_marker("sampled")) is not None:
            kept = sampled([tuple(map(_hashable, case.callspec.params.values())) for case in cases], *mark.args)
        elif len(axes) > 1:
            kept = thinned([_values(case.callspec.params, axes) for case in cases])
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(pytest.mark.slow)


def _names(argnames: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else list(argnames)


def _values(parameters: Mapping[str, object], axes: list[list[str]]) -> tuple[Hashable, ...]:
    return tuple(tuple(_hashable(parameters[name]) for name in axis if name in parameters) for axis in axes)


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def pytest_collectstart() -> None:
    """Nothing that the collection creates is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Python's collector leaves out the collected tests and their modules: Paddle runs it when it traces bytecode."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # for libraries that count their objects when Python ends; pytest collects before


@pytest.fixture(scope="module", autouse=True)
def _heap_of_other_modules() -> None:
    """It is left out as well: programs stay in Paddle's caches."""
    gc.collect()
    gc.freeze()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a worker, send one report of a test that passed: each takes CPU time in the worker and in the controller."""
    get = item.config.getoption
    if not hasattr(item.config, "workerinput") or get("durations") is not None or get("xmlpath"):
        return None  # these options need reports of setup and teardown
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The name of the device under test."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def place(device: str) -> object:
    """The device under test as Paddle's place, made the current one."""
    import paddle

    return paddle.set_device(device)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's id alone, so that a test repeats itself whatever else runs."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
