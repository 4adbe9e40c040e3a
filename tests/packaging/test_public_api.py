# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The public API changes only on purpose: it is compared with a committed text."""

from __future__ import annotations

import difflib

import paddle_moe_ops
from paddle_moe_ops import _build_check
from tests.packaging import public_api


def test_names_and_signatures_are_those_of_the_snapshot():
    committed = public_api.SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(committed, public_api.text().splitlines(), "committed", "now", "", "", 0, ""))
    listing = "\n".join(changes)
    assert not changes, f"the public API changed; if that is meant, run `{public_api.COMMAND}`:\n{listing}"


def test_every_announced_submodule_has_a_part_in_the_snapshot():
    names = [module.__name__ for module in public_api.public_modules()]
    assert len(set(names)) == len(names)
    for submodule in paddle_moe_ops._SUBMODULES:
        assert any(f"{name}.".startswith(f"paddle_moe_ops.{submodule}.") for name in names), submodule


def test_a_changed_default_a_new_name_and_a_lost_method_show(monkeypatch):
    before = public_api.text()

    def route(routing, probs=None, *, num_experts=7):
        raise NotImplementedError

    monkeypatch.setattr(paddle_moe_ops, "route", route)
    assert "route(routing, probs=None, *, num_experts=7)" in public_api.text().splitlines()
    monkeypatch.undo()

    monkeypatch.setattr(paddle_moe_ops, "__all__", [*paddle_moe_ops.__all__, "_build_check"])
    monkeypatch.setattr(paddle_moe_ops, "_build_check", _build_check.library)
    assert "_build_check() -> 'Path'" in public_api.text().splitlines()
    monkeypatch.undo()

    monkeypatch.delattr(paddle_moe_ops.nn.TopKRouter, "capacity")
    assert set(before.splitlines()) - set(public_api.text().splitlines()) == {
        "    capacity(self, num_tokens: 'int | Tensor') -> 'int | Tensor | None'"
    }
