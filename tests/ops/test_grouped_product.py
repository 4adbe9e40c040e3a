# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operator that multiplies groups of rows in host memory: its gradients again and again, and bad ones."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import ordinary, tensor
from tests.ops.test_gradient_shapes import SHAPES, SHAPES_OF_MATRICES, go_back
from tests.ops.test_second_order import Case, assert_as_dense, leaves_of, one_hot

pytestmark = [pytest.mark.cpu_only, pytest.mark.compiled_only]

# Rows of no group in between and at both ends, and a group without rows.
T, D, N = 11, 7, 2
GROUPS = {"m_sizes": [3, 0, 4], "expert_offsets": [1, 5, 5, 9]}
EXPERT_OF_ROW = np.array([-1, 0, 0, 0, -1, 2, 2, 2, 2, -1, -1])
CHANGES = SHAPES | SHAPES_OF_MATRICES
BY_CHANGE = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@pytest.fixture(params=[False, True], ids=["plain", "transposed"])
def case(request, rng) -> Case:
    transpose = request.param
    x, w = ordinary(rng, (T, D)), ordinary(rng, (3, N, D) if transpose else (3, D, N))
    of_expert = one_hot(EXPERT_OF_ROW, 3).T.unsqueeze(-1)
    return Case(
        (x, w),
        lambda x, w: (grouped_gemm(x, w, transpose=transpose, **GROUPS),),
        lambda x, w: (paddle.matmul(of_expert * x, w, transpose_y=transpose).sum(0),),
    )


@pytest.mark.parametrize("penalised", [slice(None), slice(0, 1), slice(1, 2)], ids=["both", "rows", "matrices"])
def test_gradients_have_the_gradients_of_a_dense_formulation(case, penalised):
    assert_as_dense(case, "cpu", penalise=penalised)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["rows only", "matrices only"])
def test_one_operand_alone_may_want_gradients(case, wanted):
    assert_as_dense(case, "cpu", wanted)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("names", [("m_sizes",), ("m_sizes", "expert_offsets")], ids=str)
def test_sizes_and_offsets_may_be_strided(names, dtype, rng):
    x, w = (tensor(ordinary(rng, shape), "cpu") for shape in ((T, D), (3, N, D)))
    strided = {name: tensor(np.repeat(np.array(GROUPS[name], dtype), 2), "cpu")[::2] for name in names}
    assert not any(each.is_contiguous() for each in strided.values())
    expected = grouped_gemm(x, w, **{name: GROUPS[name] for name in names})
    assert_bits_equal(grouped_gemm(x, w, **strided), expected)


def test_a_graph_is_used_as_often_as_it_is_kept(case):
    leaves = leaves_of(case, "cpu")
    loss = case.call(*leaves)[0].square().sum()
    loss.backward(retain_graph=True)
    once = [each.grad.clone() for each in leaves]
    loss.backward()
    for each, gradient in zip(leaves, once, strict=True):
        assert_bits_equal(each.grad, gradient * 2)


@BY_CHANGE
@pytest.mark.parametrize("through", ["backward", "PyLayer"])
def test_a_gradient_of_another_shape_is_refused(case, change, through):
    (out,) = case.call(*leaves_of(case, "cpu"))
    wrong = change(out.shape)
    text = rf"grouped_gemm: the gradient of the product must be of shape \[{T}, {N}\], but got "
    with pytest.raises(ValueError, match=text):
        go_back(out, paddle.ones(wrong), through)


@BY_CHANGE
def test_a_gradient_of_a_gradient_of_another_shape_is_refused(case, change):
    leaves = leaves_of(case, "cpu")
    (out,) = case.call(*leaves)
    start = tensor(np.ones((T, N), np.float32), "cpu", gradient=True)
    for gradient in paddle.grad([out], leaves, [start], create_graph=True):
        text = r"grouped_gemm: the gradient of the gradient of \w+( \w+)* must be of shape .*, but got "
        with pytest.raises(ValueError, match=text):
            paddle.autograd.backward([gradient], [paddle.ones(change(gradient.shape))], retain_graph=True)
