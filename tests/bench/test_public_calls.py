# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Times of public functions."""

from __future__ import annotations

import pytest

from benchmarks import public_calls


def test_every_function_of_a_model_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_calls, "_ROUNDS", 2)
    monkeypatch.setattr(public_calls, "_CALLS_OF_A_ROUND", 1)
    lines = list(public_calls.model_lines("small", 9))
    assert [each["operation"] for each in lines][:2] == ["moe_permute", "moe_unpermute"]
    assert all((each["shape"], each["tokens"]) == ("small", 9) and each["us"] > 0 for each in lines)
