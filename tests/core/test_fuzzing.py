# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of fuzz tests: they repeat, reach the limits, and a failure names its command."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from ..fuzzing import FEW_EXPERTS, MANY_EXPERTS, MAX_ROWS, ROWS_AT_LIMITS, draw_layer, draw_rows, run_cases

HIDDEN, INNER = (8, 24, 136), (8, 40)


def layers(count: int, **options) -> list:
    return [draw_layer(np.random.default_rng([1, number]), HIDDEN, INNER, **options) for number in range(count)]


@pytest.fixture(scope="module")
def drawn() -> list:
    return layers(600)


def test_layers_depend_on_the_seed_alone():
    for first, again in zip(layers(20), layers(20), strict=True):
        assert first[:-1] == again[:-1]
        np.testing.assert_array_equal(first.ids, again.ids)


def test_layers_have_every_number_of_experts_around_limits(drawn):
    assert set(MANY_EXPERTS) <= {layer.experts for layer in drawn}
    assert {layer.experts for layer in drawn if layer.experts <= FEW_EXPERTS} == set(range(1, FEW_EXPERTS + 1))


def test_layers_have_experts_with_every_number_of_rows_around_limits(drawn):
    found = set()
    for layer in drawn:
        found.update(Counter(layer.ids[layer.ids >= 0].tolist()).values())
    assert set(ROWS_AT_LIMITS) - {0} <= found
    assert any(not layer.tokens for layer in drawn)
    assert any(layer.tokens and (layer.ids < 0).all() for layer in drawn)


def test_layers_are_small_and_a_token_has_an_expert_once(drawn):
    for layer in drawn:
        assert layer.ids.shape == (layer.tokens, layer.topk)
        assert layer.ids.size <= MAX_ROWS
        assert layer.ids.max(initial=-1) < layer.experts
        for slots in layer.ids[:50]:
            kept = slots[slots >= 0]
            assert len(set(kept.tolist())) == kept.size


def test_some_layers_are_skewed_padded_or_have_a_static_buffer(drawn):
    shares = [
        np.bincount(layer.ids[layer.ids >= 0]).max() / layer.ids.size for layer in drawn if (layer.ids >= 0).any()
    ]
    assert sum(share > 0.3 for share in shares) > len(drawn) // 10
    assert {layer.alignment for layer in drawn} == {1, 8, 16}
    assert any(0 <= layer.buffer < layer.ids.size for layer in drawn)
    assert any(layer.buffer > layer.ids.size for layer in drawn)


def test_rows_of_experts_reach_the_limits():
    drawn = [draw_rows(np.random.default_rng(number), 1 + number % 50) for number in range(400)]
    assert set(ROWS_AT_LIMITS) <= {number for rows in drawn for number in rows}
    assert max(map(sum, drawn)) <= MAX_ROWS


@pytest.fixture
def request_of_cases():
    """Returns requests of a test with options of the command line."""

    def request(seed: int, first: int, cases: int) -> SimpleNamespace:
        options = {"--fuzz-seed": seed, "--fuzz-first": first, "--fuzz-cases": cases, "--core-device": "cuda"}
        node = SimpleNamespace(nodeid="tests/a.py::test_a[b c]", user_properties=[])
        return SimpleNamespace(config=SimpleNamespace(getoption=options.__getitem__), node=node)

    return request


def test_cases_differ_by_seed_and_number_and_count(request_of_cases):
    drawn = []
    request = request_of_cases(7, 3, 50)
    assert run_cases(request, lambda rng: drawn.append(rng.integers(1 << 40))) == 50
    assert run_cases(request_of_cases(8, 0, 50), lambda rng: drawn.append(rng.integers(1 << 40)), max_cases=5) == 5
    assert len(set(drawn)) == 55
    assert request.node.user_properties == [("fuzz_cases", 50)]


def test_a_failing_case_prints_the_command_that_repeats_it(request_of_cases, monkeypatch, capsys):
    monkeypatch.setenv("PMO_CORE_LIBRARY", "/a folder/libpmo_core.so")
    drawn = []

    def check(rng: np.random.Generator) -> None:
        drawn.append(int(rng.integers(1 << 40)))
        assert drawn[-1] % 10

    request = request_of_cases(7, 0, 1000)
    with pytest.raises(AssertionError):
        run_cases(request, check)
    number = len(drawn) - 1
    command = (
        "env 'PMO_CORE_LIBRARY=/a folder/libpmo_core.so' python3 -m pytest 'tests/a.py::test_a[b c]' "
        f"--core-device=cuda --fuzz-seed=7 --fuzz-first={number} --fuzz-cases=1"
    )
    assert request.node.user_properties == [("repeat", command)]
    assert command in capsys.readouterr().out
    with pytest.raises(AssertionError):
        run_cases(request_of_cases(7, number, 1), check)
    assert drawn[-1] == drawn[-2]
