# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a whole decoder, on a CPU with small sizes."""

from __future__ import annotations

import paddle
import pytest

from benchmarks.serving import whole_model
from examples.serve_ernie45_moe import Sizes

pytestmark = pytest.mark.skipif(paddle.get_device() != "cpu", reason="the driver captures graphs of the actual sizes")

SMALL = Sizes(hidden=64, inner=32, dense=64, experts=4, topk=2, blocks=4, vocabulary=64)


def test_blocks_with_experts_are_copies_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = whole_model.decoder(SMALL, "int4")
    dense, *others = model.blocks
    assert len(others) == SMALL.blocks - 1
    assert not hasattr(dense.mlp, "experts")
    addresses = {each.mlp.experts.gate_up_codes.data_ptr() for each in others}
    assert len(addresses) == len(others)


def test_each_format_and_batch_has_a_line_with_its_spread() -> None:
    length = whole_model.PROMPT + 9
    lines = list(whole_model.lines(["none", "int8"], [1, 2], SMALL, length))
    assert [(each["format"], each["batch"]) for each in lines] == [("none", 1), ("none", 2), ("int8", 1), ("int8", 2)]
    for line in lines:
        assert 0 < line["eager"]["min_us"] <= line["eager"]["us"] <= line["eager"]["max_us"]
        assert "graph" not in line
