# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The compiled operator of float8 experts on every device: on kernels where the GPU has them, elsewhere by values.

Sizes whose d is a multiple of 16 and whose n is one of 128 are for the kernels, others never are.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import reference, use_backend
from paddle_moe_ops.backends import compiled, register_operators
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.triton.gemm import gpu_facts
from tests.ops import test_expert_operators as experts
from tests.ops.problems import tensor
from tests.ops.test_expert_operators import operands_of
from tests.ops.test_float8_mlp import Float8Layer, assert_near
from tests.ops.test_gradient_shapes import SHAPES, go_back
from tests.ops.test_moe_mlp import BUFFER_SIZES, BY_DTYPE, BY_LAYOUT, LAYOUTS
from tests.pairwise import pairwise
from tests.params import EMPTY, MANY_EXPERTS, ODD, ONE_TOKEN, PADDED, SUM_DTYPES, Shape

pytestmark = pytest.mark.compiled_only

BF16 = ml_dtypes.bfloat16
MANY_ROWS = Shape(700, 72, 4, 2, 16, "hundreds of rows for each expert, and padding between them")
SIZES = [(7, 3), (72, 16), (136, 130), (16, 128), (160, 256)]
KEEPS = {"kept": True, "made again": False}


@pytest.fixture(autouse=True)
def operators(place):
    register_operators()


def of_operator(layer: Float8Layer, place, **options: Any) -> dict:
    return experts.of_operator(layer, place, float8=True, **options)


@pytest.mark.sampled(3)
@pairwise({"sizes": SIZES, "transpose": LAYOUTS, "dtype": SUM_DTYPES, "keeps": KEEPS}, others_are_slow=True)
def test_a_layer_is_that_of_the_oracle(sizes, transpose, dtype, keeps, rng, place):
    layer = Float8Layer(rng, PADDED, dtype, transpose=transpose, form="by row", sizes=sizes)
    assert_near(of_operator(layer, place, keeps=keeps), layer.due())


@pytest.mark.sampled(3)
@pairwise(
    {
        "shape": [EMPTY, ONE_TOKEN, ODD, MANY_ROWS],
        "buffer_size": BUFFER_SIZES,
        "dtype": [np.float32, BF16],
        "keeps": KEEPS,
    },
    empty={"shape": [EMPTY]},
    others_are_slow=True,
)
def test_a_layer_of_any_routing(shape, buffer_size, dtype, keeps, rng, place):
    layer = Float8Layer(rng, shape, dtype, form="by row", sizes=(48, 128), buffer_size=buffer_size)
    made = of_operator(layer, place, keeps=keeps)
    if shape is ONE_TOKEN:  # whose one dot product may be small beside its terms
        del made["probs"]
    assert_near(made, layer.due())


@pytest.mark.slow
@pytest.mark.parametrize("keeps", KEEPS.values(), ids=KEEPS)
def test_a_layer_of_many_experts(keeps, rng, place):
    layer = Float8Layer(rng, MANY_EXPERTS, BF16, form="by row", sizes=(48, 128), buffer_size=40)
    assert_near(of_operator(layer, place, keeps=keeps), layer.due())


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda dtype: np.dtype(dtype).name)
def test_what_is_multiplied_has_the_bits_of_the_composition(dtype, rng, place):
    """One expert and few columns, whose sums are the same in any order: H differs if one quantised value does."""
    layer = Float8Layer(rng, Shape(9, 1, 1, 1, 1, "one expert"), dtype, form="none", sizes=(1, 130))
    made, due = of_operator(layer, place, wanted=()), layer.run(place)
    np.testing.assert_allclose(to_numpy(made["out"]), to_numpy(due["out"]), rtol=1e-6 if dtype == np.float32 else 2e-3)


@pytest.mark.cpu_only  # on a GPU of compute capability 9.0 the kernels add up in another order
def test_gradients_have_the_bits_of_the_composition(rng, place):
    """One expert, in bfloat16: the gradient of the first product is rounded before it is quantised."""
    layer = Float8Layer(rng, Shape(40, 1, 1, 1, 1, "one expert"), BF16, form="by row", sizes=(128, 128))
    made, due = of_operator(layer, place), layer.run(place)
    for name in ("out", "x", "gate_up", "down"):
        assert_bits_equal(made[name], due[name], what=name)


@pytest.mark.gpu_only
@pytest.mark.parametrize("keeps", KEEPS.values(), ids=KEEPS)
@BY_LAYOUT
def test_on_hopper_it_has_the_bits_of_the_launches_in_dygraph(transpose, keeps, rng, place):
    """Kernels and tables are the same; only the gradients of matrices and weights are summed in another order."""
    layer = Float8Layer(rng, MANY_ROWS, BF16, transpose=transpose, form="by row", sizes=(160, 256))
    with use_backend("triton"):
        due = layer.run(place, keep="h" if keeps else "x")
    made = of_operator(layer, place, keeps=keeps)
    assert_near(made, {name: to_numpy(each) for name, each in due.items()})
    if gpu_facts.gpu_at(tensor(np.zeros(1, np.float32), place).data_ptr()).capability == 90:
        for name in ("out", "x"):
            assert_bits_equal(made[name], due[name], what=name)


@BY_DTYPE
@pytest.mark.parametrize("sizes", [(48, 128), (24, 40)], ids=str)
def test_a_second_backward_pass_and_a_second_call_give_the_same_bits(sizes, dtype, rng, place):
    layer = Float8Layer(rng, ODD, dtype, form="by row", sizes=sizes)
    experts.assert_same_bits_in_each_pass(layer, place, float8=True)


@BY_DTYPE
@pytest.mark.parametrize("sizes", [(48, 128), (24, 40)], ids=str)
@pytest.mark.parametrize("wanted", ["x", "gate_up", "down", "probs"])
def test_a_gradient_alone_has_the_bits_that_it_has_beside_others(wanted, sizes, dtype, rng, place):
    layer = Float8Layer(rng, ODD, dtype, form="by row", sizes=sizes)
    experts.assert_same_bits_alone(layer, place, wanted, float8=True)


@BY_DTYPE
@pytest.mark.parametrize("sizes", [(48, 128), (24, 40)], ids=str)
def test_tokens_that_no_expert_gets_change_nothing(sizes, dtype, rng, place):
    shape = Shape(150, 72, 4, 2, 16, "enough tokens that some have no expert")
    layer = Float8Layer(rng, shape, dtype, form="by row", sizes=sizes, buffer_size=4000)
    unused = (layer.plan.slot_to_row < 0).all(axis=1)
    assert unused.any()
    layer.arrays["x"][unused] = np.nan
    layer.d_out[unused] = np.nan
    made = of_operator(layer, place)
    layer.arrays["x"][unused] = 0
    layer.d_out[unused] = 0
    assert_near(made, layer.due())
    assert not to_numpy(made["out"])[unused].astype(np.float32).any()


@BY_DTYPE
@pytest.mark.parametrize("sizes", [(48, 128), (24, 40)], ids=str)
def test_nan_of_a_token_stays_with_it(sizes, dtype, rng, place):
    layer = Float8Layer(rng, ODD, dtype, form="by row", sizes=sizes)
    expected = of_operator(layer, place)
    routed = np.flatnonzero((layer.plan.slot_to_row >= 0).any(axis=1))
    layer.arrays["x"][routed[0], 3] = np.nan
    made = of_operator(layer, place)
    others = np.arange(ODD.T) != routed[0]
    for name in ("out", "x"):
        assert np.isnan(to_numpy(made[name])[routed[0]].astype(np.float32)).all()
        assert_bits_equal(to_numpy(made[name])[others], to_numpy(expected[name])[others], what=name)


@pytest.mark.parametrize("sizes", [(48, 128), (72, 40)], ids=str)
def test_operands_at_odd_addresses_and_of_other_strides(sizes, rng, place):
    layer = Float8Layer(rng, ODD, BF16, form="by row", sizes=sizes)
    expected, leaves = of_operator(layer, place), layer.leaves(place)
    leaves["x"] = tensor(np.pad(layer.arrays["x"], ((0, 0), (1, 2))), place)[:, 1:-2]
    leaves["gate_up"] = tensor(np.pad(layer.arrays["gate_up"], ((0, 1), (0, 0), (0, 0))), place)[:-1]
    turned = np.ascontiguousarray(layer.arrays["down"].swapaxes(1, 2))
    leaves["down"] = tensor(turned, place).transpose([0, 2, 1])
    operands, plan = operands_of(layer, place, leaves)
    out = compiled.moe_mlp(*operands, plan, transpose=False, keeps_hidden=True, float8=True)
    assert_bits_equal(out, expected["out"])


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("through", ["backward", "PyLayer"])
def test_a_gradient_of_another_shape_is_refused(change, through, rng, place):
    layer = Float8Layer(rng, ODD, form="none")
    operands, plan = operands_of(layer, place, layer.leaves(place))
    out = compiled.moe_mlp(*operands, plan, transpose=False, keeps_hidden=True, float8=True)
    with pytest.raises(ValueError, match=r"moe_mlp: the gradient of the result must be of shape .*, but got "):
        go_back(out, paddle.ones(change(out.shape)), through)


def test_a_gradient_of_a_gradient_is_refused(rng, place):
    layer = Float8Layer(rng, ODD, form="none")
    operands, plan = operands_of(layer, place, layer.leaves(place))
    out = compiled.moe_mlp(*operands, plan, transpose=False, keeps_hidden=True, float8=True)
    (d_x,) = paddle.grad([out.square().sum()], [operands[0]], create_graph=True)
    with pytest.raises(RuntimeError, match="moe_mlp: second-order gradients are not supported"):
        d_x.sum().backward()


@pytest.mark.parametrize("sizes", [(48, 128), (72, 40)], ids=str)
def test_what_is_given_of_rows_of_no_expert_is_zero(sizes, rng, place):
    """Paddle may look at every value that an operator gives, such as for NaN."""
    layer = Float8Layer(rng, PADDED, BF16, form="by row", sizes=sizes, buffer_size=4000)
    leaves = layer.leaves(place)
    operands, plan = operands_of(layer, place, leaves)
    maps = plan.token_rows, plan.row_to_token, plan.tokens_per_expert, plan.expert_offsets, plan.slot_to_row
    with paddle.no_grad():
        _, hidden, _ = compiled.direct(
            "moe_mlp_float8", *operands, *maps, False, True, *[False] * 5, 1 << 30, False, False
        )
    unused = np.flatnonzero(layer.plan.row_to_token < 0)
    assert len(unused) > 1000
    assert not to_numpy(hidden)[unused].astype(np.float32).any()
    assert not to_numpy(of_operator(layer, place)["probs"])[unused].any()


@pytest.mark.cpu_only  # kernels keep the transposed form
@pytest.mark.parametrize("transpose", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("keeps", KEEPS.values(), ids=KEEPS)
def test_codes_and_scales_of_both_matrices_are_kept_with_the_first_product(keeps, transpose, rng, place):
    layer = Float8Layer(rng, ODD, BF16, transpose=transpose, form="by row")
    operands, plan = operands_of(layer, place, layer.leaves(place))
    maps = plan.token_rows, plan.row_to_token, plan.tokens_per_expert, plan.expert_offsets, plan.slot_to_row
    with paddle.no_grad():
        made = compiled.direct(
            "moe_mlp_float8", *operands, *maps, transpose, keeps, *[False] * 5, 1 << 30, False, False
        )
    kept = to_numpy(made[2]).tobytes()
    matrices = [layer.arrays[name] for name in ("gate_up", "down") if keeps]
    forms = [reference.quantize_128x128(each, amax_min=reference.FLOAT8_AMAX_MIN) for each in matrices]
    codes = [each.tobytes() for each, _ in forms]
    gaps = [b"\0" * (-len(each) % 256) for each in codes]
    assert not keeps or max(map(len, gaps)) > 0
    pairs = zip(codes, gaps, strict=True)
    assert kept == b"".join([*(each + gap for each, gap in pairs), *(scales.tobytes() for _, scales in forms)])
