# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The purpose of each launch of a layer's passes, and the FLOPs of its GEMM."""

from __future__ import annotations

from benchmarks.layer.parts import flops_of, parts_of
from benchmarks.layer.shapes import Shape

SCHEDULE, MOVE, PRODUCT, SUM = "schedule_kernel", "permute_kernel", "grouped_gemm_kernel", "unpermute_kernel"
FORWARD = [SCHEDULE, MOVE, PRODUCT, MOVE, PRODUCT, PRODUCT, SUM, PRODUCT, SUM]
BACKWARD = [
    *(MOVE, PRODUCT, MOVE, PRODUCT, "swiglu_gradient_kernel"),
    *("permute_and_sum_kernel", "wgrad_kernel", MOVE, "wgrad_kernel"),
    *(MOVE, "wgrad_kernel", MOVE, "wgrad_kernel", PRODUCT, SUM),
]
GATHERING = ["grouped_product", "grouped_outer", "grouped_outer", "grouped_product", SUM, "row_sums_kernel"]


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


def test_products_of_the_library_are_told_apart_in_the_same_way():
    names = {PRODUCT: "grouped_product", "wgrad_kernel": "grouped_outer"}
    for which, launched in (("forward", FORWARD), ("backward", BACKWARD)):
        assert parts_of(which, [names.get(each, each) for each in launched]) == parts_of(which, launched)


def test_a_pass_that_gathers_adds_up_gradients_of_weights_last():
    assert parts_of("backward", GATHERING) == ["dO W2^T", "dW2", "dW1", "dH W1^T", "sums", "gradients of weights"]


def test_operations_of_all_launches_are_those_of_the_pass():
    shape = Shape(tokens=24, hidden=16, inner=32, experts=4, topk=2)
    for which, launched in (("forward", FORWARD), ("backward", BACKWARD)):
        flops = flops_of(shape, which, parts_of(which, launched))
        assert sum(flops) == shape.flops(which == "backward")
        is_product = [name in (PRODUCT, "wgrad_kernel") for name in launched]
        assert [flop > 0 for flop in flops] == is_product
