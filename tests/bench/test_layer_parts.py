# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The purpose of each launch of a layer's passes, and the FLOPs of its GEMM."""

from __future__ import annotations

from benchmarks.layer.parts import flops_of, parts_of
from benchmarks.layer.shapes import Shape

MOVE, PRODUCT, SUM = "permute", "gemm", "unpermute"
FORWARD = ["tables", MOVE, PRODUCT, MOVE, PRODUCT, PRODUCT, SUM, PRODUCT, SUM]
BACKWARD = [
    *("tables", MOVE, PRODUCT, MOVE, PRODUCT, "row_sums"),
    *(MOVE, "wgrad", MOVE, "wgrad", MOVE, "wgrad", MOVE, "wgrad", PRODUCT, SUM),
]
GATHERING = ["gemm_float8", "row_sums", "wgrad", "wgrad", "gemm_float8", SUM]


def test_products_of_a_pass_are_told_apart_by_the_sums_after_them():
    parts = parts_of("forward", FORWARD)
    assert [part for part, name in zip(parts, FORWARD, strict=True) if name == PRODUCT] == [
        *["X W1, SwiGLU"] * 2,
        *["A W2, weighted"] * 2,
    ]
    parts = parts_of("backward", BACKWARD)
    assert [part for part, name in zip(parts, BACKWARD, strict=True) if name == PRODUCT] == [
        *["dO W2^T"] * 2,
        "dH W1^T",
    ]


def test_gradients_of_the_second_matrices_come_first():
    parts = [part for part in parts_of("backward", BACKWARD) if part.startswith("dW")]
    assert parts == ["dW2", "dW2", "dW1", "dW1"]


def test_products_in_float8_and_a_pass_that_gathers():
    assert parts_of("backward", GATHERING) == ["dO W2^T", "gradients of weights", "dW2", "dW1", "dH W1^T", "sums"]


def test_operations_of_all_launches_are_those_of_the_pass():
    shape = Shape(tokens=24, hidden=16, inner=32, experts=4, topk=2)
    for which, launched in (("forward", FORWARD), ("backward", BACKWARD)):
        flops = flops_of(shape, which, parts_of(which, launched))
        assert sum(flops) == shape.flops(which == "backward")
        is_product = [name in (PRODUCT, "wgrad") for name in launched]
        assert [flop > 0 for flop in flops] == is_product
