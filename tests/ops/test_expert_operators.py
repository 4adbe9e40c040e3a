# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled operators of experts on every device: on kernels where the GPU has them, elsewhere on Paddle's matmul.

Sizes that are multiples of 8 are for the kernels, others never are.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import reference
from paddle_moe_ops.backends import compiled, register_operators
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_sums, dtype_tols
from tests.ops.problems import ordinary, plan_tensors, tensor
from tests.ops.test_gradient_shapes import SHAPES, go_back
from tests.ops.test_moe_mlp import BUFFER_SIZES, BY_DTYPE, LAYOUTS, Layer, assert_close
from tests.pairwise import pairwise
from tests.params import EMPTY, MANY_EXPERTS, ODD, ONE_TOKEN, PADDED, SUM_DTYPES, Shape

pytestmark = pytest.mark.compiled_only

MANY_ROWS = Shape(700, 72, 4, 2, 16, "hundreds of rows for each expert, and padding between them")
SIZES = [(7, 3), (64, 136), (8, 8), (24, 1032)]
KEEPS = {"kept": True, "made again": False}


@pytest.fixture(autouse=True)
def operators(place):
    register_operators()


def operands_of(layer: Layer, place, leaves: dict[str, Any]) -> tuple[list[Any], Any]:
    """Arguments of the operators: the operands, weights of one if the layer has none, and the plan."""
    plan = plan_tensors(layer.plan, place)
    weights = leaves.get("probs", paddle.ones_like(plan.row_to_token, dtype="float32"))
    return [leaves["x"], leaves["gate_up"], leaves["down"], weights], plan


def of_operator(
    layer: Layer, place, *, keeps=True, wanted=("x", "gate_up", "down", "probs"), passes=1, float8=False
) -> dict:
    """The result of the operator, and the gradient of each leaf that wants one."""
    leaves = layer.leaves(place)
    for name, leaf in leaves.items():
        leaf.stop_gradient = name not in wanted
    operands, plan = operands_of(layer, place, leaves)
    out = compiled.moe_mlp(*operands, plan, transpose=layer.transpose, keeps_hidden=keeps, float8=float8)
    for left in range(passes - 1, -1, -1):
        paddle.autograd.backward([out], [tensor(layer.d_out, place)], retain_graph=left > 0)
    return {"out": out, **{name: leaves[name].grad for name in leaves if name in wanted}}


@pytest.mark.sampled(2)
@pairwise({"sizes": SIZES, "transpose": LAYOUTS, "dtype": SUM_DTYPES, "keeps": KEEPS}, others_are_slow=True)
def test_a_layer_is_that_of_the_oracle(sizes, transpose, dtype, keeps, rng, place):
    layer = Layer(rng, PADDED, dtype, transpose=transpose, form="by row", sizes=sizes)
    assert_close(of_operator(layer, place, keeps=keeps), layer.due(), dtype)


@pairwise(
    {
        "shape": [EMPTY, ONE_TOKEN, ODD, MANY_EXPERTS, MANY_ROWS],
        "buffer_size": BUFFER_SIZES,
        "dtype": [np.float32, ml_dtypes.bfloat16],
        "keeps": KEEPS,
    },
    empty={"shape": [EMPTY]},
    others_are_slow=True,
)
def test_a_layer_of_any_routing(shape, buffer_size, dtype, keeps, rng, place):
    layer = Layer(rng, shape, dtype, form="by row", sizes=(40, 16), buffer_size=buffer_size)
    made = of_operator(layer, place, keeps=keeps)
    if shape is ONE_TOKEN:  # whose one dot product may be small beside its terms
        del made["probs"]
    assert_close(made, layer.due(), dtype)


def assert_same_bits_in_each_pass(layer, place, **options):
    """Assert equal bits from a second call, and doubled gradients from two backward passes."""
    once, again, twice = (of_operator(layer, place, passes=passes, **options) for passes in (1, 1, 2))
    for name, made in once.items():
        assert_bits_equal(again[name], made, what=name)
        if name != "out":
            assert_bits_equal(twice[name], to_numpy(made) * to_numpy(made).dtype.type(2), what=name)


def assert_same_bits_alone(layer, place, wanted, **options):
    """Assert that a gradient computed alone has the bits of one computed with the others."""
    alone, together = of_operator(layer, place, wanted=(wanted,), **options), of_operator(layer, place, **options)
    assert alone.keys() == {"out", wanted}
    for name, made in alone.items():
        assert_bits_equal(made, together[name], what=name)


@BY_DTYPE
def test_a_second_backward_pass_and_a_second_call_give_the_same_bits(dtype, rng, place):
    assert_same_bits_in_each_pass(Layer(rng, ODD, dtype, form="by row", sizes=(64, 136)), place)


@BY_DTYPE
@pytest.mark.parametrize("wanted", ["x", "gate_up", "down", "probs"])
def test_a_gradient_alone_has_the_bits_that_it_has_beside_others(wanted, dtype, rng, place):
    assert_same_bits_alone(Layer(rng, ODD, dtype, form="by row", sizes=(16, 24)), place, wanted)


@BY_DTYPE
def test_tokens_that_no_expert_gets_change_nothing(dtype, rng, place):
    layer = Layer(rng, PADDED, dtype, form="by row", sizes=(16, 24), buffer_size=4000)
    unused = (layer.plan.slot_to_row < 0).all(axis=1)
    assert unused.any()
    layer.arrays["x"][unused] = np.nan
    layer.d_out[unused] = np.nan
    made = of_operator(layer, place)
    layer.arrays["x"][unused] = 0
    assert_close(made, layer.due(), dtype)
    assert not to_numpy(made["out"])[unused].astype(np.float32).any()


def test_operands_at_odd_addresses_and_of_other_strides(rng, place):
    layer = Layer(rng, ODD, ml_dtypes.bfloat16, form="by row", sizes=(64, 136))
    expected = of_operator(layer, place)
    plan, leaves = plan_tensors(layer.plan, place), layer.leaves(place)
    x = tensor(np.pad(layer.arrays["x"], ((0, 0), (1, 2))), place)[:, 1:-2]
    gate_up = tensor(np.pad(layer.arrays["gate_up"], ((0, 1), (0, 0), (0, 0))), place)[:-1]
    down = tensor(np.ascontiguousarray(layer.arrays["down"].swapaxes(1, 2)), place).transpose([0, 2, 1])
    options = {"transpose": False, "keeps_hidden": True}
    out = compiled.moe_mlp(x, gate_up, down, leaves["probs"], plan, **options)
    assert_bits_equal(out, expected["out"])


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("through", ["backward", "PyLayer"])
def test_a_gradient_of_another_shape_is_refused(change, through, rng, place):
    layer = Layer(rng, ODD, form="none")
    leaves, plan = layer.leaves(place), plan_tensors(layer.plan, place)
    ones = paddle.ones_like(plan.row_to_token, dtype="float32")
    operands = leaves["x"], leaves["gate_up"], leaves["down"], ones
    out = compiled.moe_mlp(*operands, plan, transpose=False, keeps_hidden=True)
    with pytest.raises(ValueError, match=r"moe_mlp: the gradient of the result must be of shape .*, but got "):
        go_back(out, paddle.ones(change(out.shape)), through)


def test_a_gradient_of_a_gradient_is_refused(rng, place):
    layer = Layer(rng, ODD, form="none")
    leaves, plan = layer.leaves(place), plan_tensors(layer.plan, place)
    ones = paddle.ones_like(plan.row_to_token, dtype="float32")
    operands = leaves["x"], leaves["gate_up"], leaves["down"], ones
    out = compiled.moe_mlp(*operands, plan, transpose=False, keeps_hidden=True)
    (d_x,) = paddle.grad([out.square().sum()], [leaves["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match="moe_mlp: second-order gradients are not supported"):
        d_x.sum().backward()


# Rows of no group in between and at both ends, and a group without rows.
GROUPS = [3, 0, 260, 40], [2, 7, 7, 300, 345]
M = 351


@pairwise(
    {
        "wide": {"narrow": False, "wide": True},
        "ids": {"int32": np.int32, "int64": np.int64},
        "follows": {"offsets": False, "following": True},
        "sizes": [(7, 3), (8, 16), (136, 264)],
        "transpose": LAYOUTS,
        "dtype": SUM_DTYPES,
    },
    others_are_slow=True,
)
def test_a_grouped_product_is_that_of_the_oracle(dtype, transpose, sizes, follows, ids, wide, rng, place):
    inner, outer = sizes
    matrices = ordinary(rng, (4, outer, inner) if transpose else (4, inner, outer), dtype)
    arrays = {"x": ordinary(rng, (M, inner), dtype), "w": matrices}
    d_out = ordinary(rng, (M, outer), dtype)
    leaves = {name: tensor(array, place, gradient=True) for name, array in arrays.items()}
    counts, offsets = (tensor(np.array(each, ids), place) for each in GROUPS)
    offsets = None if follows else offsets
    out = compiled.grouped_product(leaves["x"], leaves["w"], counts, offsets, transpose, wide=wide)
    assert out.dtype == (paddle.float32 if wide else leaves["x"].dtype)
    paddle.autograd.backward([out], [tensor(d_out, place).astype(out.dtype)])

    where = {"m_sizes": GROUPS[0], "transpose": transpose, "expert_offsets": None if follows else GROUPS[1]}
    chain = inner + outer + max(GROUPS[0])

    def products(of):
        operands, gradient = [of(each.astype(np.float64)) for each in arrays.values()], of(d_out.astype(np.float64))
        d_x, d_w, *_ = reference.grouped_gemm_backward(gradient, *operands, **where)
        return reference.grouped_gemm(*operands, **where), d_x, d_w

    made = out, leaves["x"].grad, leaves["w"].grad
    for got, due, terms, what in zip(made, products(np.asarray), products(np.abs), ("out", "x", "w"), strict=True):
        tolerance = dtype_tols(dtype, chain)
        assert_close_sums(got, due.astype(to_numpy(got).dtype), terms, tolerance, what=what)


@BY_DTYPE
def test_groups_that_overlap_or_end_after_the_last_row_are_cut(dtype, rng, place):
    x, w = (tensor(ordinary(rng, shape, dtype), place) for shape in ((20, 8), (4, 8, 16)))

    def product(sizes, offsets):
        return compiled.grouped_product(x, w, *(tensor(np.array(each), place) for each in (sizes, offsets)), False)

    made = product([9, 9, -4, 99], [0, 5, 2, 16])
    assert_bits_equal(made, product([9, 5, 0, 4], [0, 9, 14, 16]))
    assert not to_numpy(made)[14:16].astype(np.float32).any()


def test_rows_that_lie_over_each_other_in_memory(rng, place):
    """In the result of an unfold, and in the gradient of a sum over columns."""
    dtype = ml_dtypes.bfloat16
    rows = paddle.as_strided(tensor(ordinary(rng, (64,), dtype), place), [7, 16], [8, 1])
    d_out = paddle.as_strided(tensor(ordinary(rng, (7,), dtype), place), [7, 8], [1, 0])
    w, sizes = tensor(ordinary(rng, (2, 16, 8), dtype), place, gradient=True), tensor(np.int32([3, 4]), place)

    def run(rows, d_out):
        leaf = w.detach()
        leaf.stop_gradient = False
        out = compiled.grouped_product(rows, leaf, sizes, None, False)
        paddle.autograd.backward([out], [d_out])
        return out, leaf.grad

    for made, due in zip(run(rows, d_out), run(rows.clone(), d_out.clone()), strict=True):
        assert_bits_equal(made, due)


def test_matrices_without_columns_give_rows_without_columns(place):
    sizes = tensor(np.int32([1, 1]), place)
    made = compiled.grouped_product(paddle.ones([2, 8]), paddle.ones([2, 8, 0]), sizes, None, False)
    assert made.shape == [2, 0]


def test_matrices_without_rows_give_zeros(place):
    """The product of rows without columns, and the gradient of rows by matrices without columns."""
    sizes, x = tensor(np.int32([1, 1]), place), tensor(np.ones((2, 8), np.float32), place, gradient=True)
    made = compiled.grouped_product(paddle.ones([2, 0]), paddle.ones([2, 0, 8]), sizes, None, False)
    assert made.tolist() == [[0.0] * 8] * 2
    none = compiled.grouped_product(x, paddle.ones([2, 8, 0]), sizes, None, False)
    paddle.autograd.backward([none], [paddle.ones([2, 0])])
    assert x.grad.tolist() == [[0.0] * 8] * 2


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("float8", [False, True], ids=["in its dtype", "in float8"])
def test_sizes_and_offsets_may_be_strided(float8, dtype, rng, place):
    layer = Layer(rng, PADDED, form="by row", sizes=(16, 24))
    operands, plan = operands_of(layer, place, layer.leaves(place))
    dense = {name: getattr(layer.plan, name).astype(dtype) for name in ("tokens_per_expert", "expert_offsets")}
    strided = {name: tensor(np.repeat(each, 2), place)[::2] for name, each in dense.items()}
    assert not any(each.is_contiguous() for each in strided.values())
    options = {"transpose": False, "keeps_hidden": True, "float8": float8}
    with paddle.no_grad():  # Paddle copies strided tensors for operators with gradients
        expected = compiled.moe_mlp(*operands, plan, **options)
        assert_bits_equal(compiled.moe_mlp(*operands, plan._replace(**strided), **options), to_numpy(expected))


def test_what_is_kept_of_rows_of_no_expert_is_zero(rng, place):
    """Paddle may look at every value that an operator gives, such as for NaN."""
    layer = Layer(rng, PADDED, ml_dtypes.bfloat16, form="by row", sizes=(64, 136), buffer_size=4000)
    leaves, plan = layer.leaves(place), plan_tensors(layer.plan, place)
    operands = leaves["x"], leaves["gate_up"], leaves["down"], leaves["probs"]
    maps = plan.token_rows, plan.row_to_token, plan.tokens_per_expert, plan.expert_offsets, plan.slot_to_row
    with paddle.no_grad():
        _, hidden = compiled.direct("moe_mlp", *operands, *maps, False, True, *[False] * 5, 1 << 30, False, False)
    unused = np.flatnonzero(layer.plan.row_to_token < 0)
    assert len(unused) > 1000
    assert not to_numpy(hidden)[unused].astype(np.float32).any()
