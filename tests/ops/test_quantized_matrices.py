# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices of experts as codes: the numbers of `quantize_experts`, and layers of `moe_mlp` with them."""

from __future__ import annotations

import copy
import pickle
import re

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import QuantizedMatrices, moe_mlp, quantize_experts, reference, route, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.layers import dequantized
from paddle_moe_ops.backends.quantized import FORMATS
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import every_kind, ordinary, tensor
from tests.ops.test_float8_mlp import Float8Layer, assert_near
from tests.ops.test_moe_mlp import Layer
from tests.pairwise import pairwise, pairwise_of
from tests.params import EMPTY, MANY_EXPERTS, ODD, ONE_TOKEN, PADDED

pytestmark = pytest.mark.compiled_only

BF16 = ml_dtypes.bfloat16
BY_FORMAT = pytest.mark.parametrize("format", FORMATS)
BY_LAYOUT = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
BY_DTYPE = pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=lambda d: np.dtype(d).name)
OF_INTEGERS = pytest.mark.parametrize("format", [each for each in FORMATS if each != "fp8_128x128"])


def bytes_of(codes):
    return to_numpy(codes.view("uint8"))


@pairwise_of(
    pytest.mark.parametrize("sizes", [(1, 1), (7, 3), (128, 64), (300, 130)], ids=str),
    BY_DTYPE,
    BY_LAYOUT,
    BY_FORMAT,
)
def test_codes_are_those_of_the_oracle(sizes, dtype, transpose, format, rng, place):
    """Numbers of every kind: subnormals, infinities and NaN among them."""
    hidden, inner = sizes
    shapes = [(3, hidden, 2 * inner), (3, inner, hidden)]
    arrays = [every_kind(rng, shape[:1] + (shape[:0:-1] if transpose else shape[1:]), dtype) for shape in shapes]
    made = quantize_experts(*(tensor(each, place) for each in arrays), format=format, transpose=transpose)
    for each, array in zip(made, arrays, strict=True):
        codes, scales = reference.quantize_matrices(array, format=format, transpose=transpose)
        np.testing.assert_array_equal(bytes_of(each.codes), codes.view(np.uint8))
        np.testing.assert_array_equal(to_numpy(each.scales), scales)
        assert each.codes.stop_gradient
        assert (each.format, each.transpose) == (format, transpose)


@BY_FORMAT
def test_matrices_in_lists_have_the_codes_of_stacked_ones(format, rng, place):
    arrays = ordinary(rng, (3, 40, 32)), ordinary(rng, (3, 16, 40))
    stacked = quantize_experts(*(tensor(each, place) for each in arrays), format=format)
    listed = quantize_experts(*([tensor(part, place) for part in each] for each in arrays), format=format)
    for one, other in zip(stacked, listed, strict=True):
        np.testing.assert_array_equal(bytes_of(one.codes), bytes_of(other.codes))
        assert_bits_equal(one.scales, other.scales, what="scales")


@BY_FORMAT
def test_codes_and_scales_of_parameters_have_no_graph(format, place):
    parameters = [tensor(np.ones(shape, np.float32), place) for shape in ((2, 32, 64), (2, 32, 32))]
    for each in parameters:
        each.stop_gradient = False
    in_lists = [
        paddle.nn.ParameterList([paddle.create_parameter(each.shape[1:], "float32")] * 2) for each in parameters
    ]
    for made in (*quantize_experts(*parameters, format=format), *quantize_experts(*in_lists, format=format)):
        assert made.codes.stop_gradient
        assert made.scales.stop_gradient


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("format", "algorithm", "group"), [("int8", "int8", -1), ("int4", "int4", -1), ("int4_1x128", "int4", 128)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_are_those_of_weight_quantize(format, algorithm, group, dtype):
    paddle.seed(5)
    gate_up, down = paddle.randn([2, 256, 128]).astype(dtype), paddle.randn([2, 64, 256]).astype(dtype)
    made, _ = quantize_experts(gate_up, down, format=format)
    for expert in range(2):
        options = {"algo": f"weight_only_{algorithm}", "arch": 80, "group_size": group}
        _, scales = paddle.nn.quant.weight_quantize(gate_up[expert], **options)
        assert_bits_equal(made.scales[expert].astype(dtype), scales, what="scales")


def quantized(layer, leaves, format, place):
    """The leaves with codes in place of matrices."""
    pair = (leaves[name].detach() for name in ("gate_up", "down"))
    gate_up, down = quantize_experts(*pair, format=format, transpose=layer.transpose)
    return {**leaves, "gate_up": gate_up, "down": down}


def values_in(layer, format, dtype):
    """The matrices' values, by the oracle, as arrays of the layer."""
    values = {}
    for name in ("gate_up", "down"):
        codes, scales = reference.quantize_matrices(layer.arrays[name], format=format, transpose=layer.transpose)
        inner = layer.arrays[name].shape[2 if layer.transpose else 1]
        options = {"format": format, "inner": inner, "transpose": layer.transpose, "dtype": dtype}
        values[name] = np.ascontiguousarray(reference.dequantize_matrices(codes, scales, **options))
    return values


def run(layer, leaves, place, **options):
    out = layer.call(leaves, place, **options)
    paddle.autograd.backward([out], [tensor(layer.d_out, place)])
    return {"out": out, **{name: leaves[name].grad for name in ("x", "probs")}}


@pairwise(
    {
        "shape": [EMPTY, ONE_TOKEN, ODD, PADDED],
        "dtype": [np.float32, np.float16, BF16],
        "transpose": [False, True],
        "format": [each for each in FORMATS if each != "fp8_128x128"],
    }
)
def test_a_layer_of_integer_codes_has_the_bits_of_their_values(shape, dtype, transpose, format, rng, place):
    layer = Layer(rng, shape, dtype, sizes=(72, 16), transpose=transpose, form="by slot")
    leaves = layer.leaves(place)
    made = run(layer, quantized(layer, leaves, format, place), place)
    layer.arrays |= values_in(layer, format, dtype)
    due = run(layer, layer.leaves(place), place)
    for name, got in made.items():
        assert_bits_equal(got, due[name], what=name)


def test_many_experts_most_of_them_without_rows(rng, place):
    layer = Layer(rng, MANY_EXPERTS, sizes=(24, 8), form="by slot")
    leaves = layer.leaves(place)
    made = layer.call(quantized(layer, leaves, "int8", place), place)
    layer.arrays |= values_in(layer, "int8", np.float32)
    assert_bits_equal(made, layer.call(layer.leaves(place), place), what="out")


@pairwise({"shape": [EMPTY, ONE_TOKEN, ODD], "dtype": [np.float32, np.float16, BF16], "transpose": [False, True]})
def test_a_layer_of_float8_codes_has_the_bits_of_float8_compute(shape, dtype, transpose, rng, place):
    layer = Float8Layer(rng, shape, dtype, sizes=(144, 128), transpose=transpose, form="by slot")
    due = run(layer, layer.leaves(place), place)
    leaves = layer.leaves(place)
    for compute in ("fp8_1x128", None):
        made = run(layer, quantized(layer, leaves, "fp8_128x128", place), place, compute=compute)
        for name, got in made.items():
            assert_bits_equal(got, due[name], what=name)
        for leaf in leaves.values():
            leaf.clear_gradient()


def test_float8_codes_of_a_checkpoint_are_used_as_they_are(rng, place):
    """Scales that no rule of ours would have chosen, as exponents in bytes too."""
    layer = Float8Layer(rng, ODD, BF16, sizes=(144, 128), transpose=True, form="by slot")
    leaves, matrices = layer.leaves(place), {}
    for name in ("gate_up", "down"):
        codes, _ = reference.quantize_matrices(layer.arrays[name], format="fp8_128x128")
        blocks = (codes.shape[0], *(-(-size // 128) for size in codes.shape[1:]))
        exponents = rng.integers(110, 117, blocks).astype(np.uint8)
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        layer.arrays[name] = reference.dequantize_128x128(codes, scales, dtype=np.float32)
        stored = tensor(codes.view(np.uint8), place)
        matrices[name] = QuantizedMatrices(
            stored.view(paddle.float8_e4m3fn), tensor(exponents, place), "fp8_128x128", True
        )
        as_bytes = QuantizedMatrices(stored, tensor(scales, place), "fp8_128x128", True)
        values = dequantized(as_bytes, codes.shape[2], paddle.float32)
        np.testing.assert_array_equal(to_numpy(values), layer.arrays[name])
    made = run(layer, {**leaves, **matrices}, place)
    plan, arrays = layer.plan, layer.arrays
    rows = reference.dequantize_1x128(*reference.quantize_1x128(arrays["x"], amax_min=2.0**-100), dtype=np.float32)
    assert rows.shape == arrays["x"].shape
    groups = {"m_sizes": list(plan.tokens_per_expert), "expert_offsets": list(plan.expert_offsets), "transpose": True}
    hidden = reference.grouped_gemm(
        rows.astype(np.float64), arrays["gate_up"].astype(np.float64), row_to_token=plan.row_to_token, **groups
    )
    act = reference.activate(hidden.astype(np.float32).astype(BF16), "swiglu")
    act = reference.dequantize_1x128(*reference.quantize_1x128(act, amax_min=2.0**-100), dtype=np.float32)
    out = reference.grouped_gemm(
        act.astype(np.float64), arrays["down"].astype(np.float64), weights=plan.row_probs, **groups
    )
    assert_near({"out": made["out"]}, {"out": reference.sum_rows(out.astype(np.float32), plan.token_rows)})


@BY_FORMAT
@pytest.mark.parametrize("options", [{"keep": "x"}, {"workspace_mb": 1}], ids=str)
def test_what_is_kept_changes_no_bit(options, format, rng, place):
    layer = Float8Layer(rng, ODD, sizes=(40, 24), form="by slot")
    before = run(layer, quantized(layer, layer.leaves(place), format, place), place, compute=None)
    made = run(layer, quantized(layer, layer.leaves(place), format, place), place, compute=None, **options)
    for name, due in before.items():
        assert_bits_equal(made[name], due, what=name)


@OF_INTEGERS
@pytest.mark.parametrize("case", ["geglu", "biases", "reference"])
def test_other_layers_read_the_values(case, format, rng, place):
    layer = Layer(rng, ODD, sizes=(24, 16), form="by slot")
    leaves = layer.leaves(place)
    codes = quantized(layer, leaves, format, place)
    options = {"activation": "geglu"} if case == "geglu" else {}
    if case == "biases":
        options["gate_up_bias"] = tensor(ordinary(rng, (ODD.E, 32)), place)
        options["down_bias"] = tensor(ordinary(rng, (ODD.E, 24)), place)
    with use_backend("reference" if case == "reference" else "compiled"):
        made = layer.call(codes, place, **options)
        layer.arrays |= values_in(layer, format, np.float32)
        assert_bits_equal(made, layer.call(layer.leaves(place), place, **options), what="out")


def test_a_second_gradient_is_refused(rng, place):
    layer = Layer(rng, ODD, sizes=(24, 16), form="by slot")
    leaves = layer.leaves(place)
    out = layer.call(quantized(layer, leaves, "int8", place), place)
    (d_x,) = paddle.grad(out.sum(), [leaves["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match=r"second|gradient"):
        d_x.sum().backward()


def layer_arguments(place, format="int8"):
    x = paddle.ones([4, 32]).to(place) if place != "cpu" else paddle.ones([4, 32])
    ids = tensor(np.arange(8, dtype=np.int32).reshape(4, 2) % 3, place)
    plan = route(ids, num_experts=3)
    gate_up, down = quantize_experts(
        tensor(np.ones((3, 32, 16), np.float32), place), tensor(np.ones((3, 8, 32), np.float32), place), format=format
    )
    return {"x": x, "plan": plan, "probs": None, "gate_up": gate_up, "down": down}


@BY_FORMAT
@pytest.mark.parametrize(
    "copied",
    [
        # Paddle unpickles no tensor of a custom device.
        pytest.param(lambda each: pickle.loads(pickle.dumps(each)), marks=pytest.mark.cpu_only),
        copy.deepcopy,
        copy.copy,
    ],
    ids=["pickle", "deepcopy", "copy"],
)
def test_matrices_are_pickled_and_copied(copied, format, rng, place):
    given = quantize_experts(
        tensor(ordinary(rng, (2, 130, 8)), place), tensor(ordinary(rng, (2, 4, 130)), place), format=format
    )
    for made, due in zip(copied(given), given, strict=True):
        assert type(made) is QuantizedMatrices
        assert (made.format, made.transpose, made.codes.dtype) == (due.format, due.transpose, due.codes.dtype)
        assert np.array_equal(bytes_of(made.codes), bytes_of(due.codes))
        assert_bits_equal(made.scales, due.scales)


def changed(matrices, **fields):
    return QuantizedMatrices(
        **{**{name: getattr(matrices, name) for name in ("codes", "scales", "format", "transpose")}, **fields}
    )


MATRICES = "a paddle.Tensor, a list or a paddle.nn.ParameterList of them, or a QuantizedMatrices"
BAD_CALLS = {
    "no matrices": (
        lambda a: {"gate_up": 3.0, "down": a["down"].scales},
        TypeError,
        f"moe_mlp: gate_up must be {MATRICES}, but got float",
    ),
    "no second matrices": (
        lambda a: {"gate_up": paddle.ones([len(a["down"].codes), a["x"].shape[1], 2]), "down": 3.0},
        TypeError,
        f"moe_mlp: down must be {MATRICES}, but got float",
    ),
    "one of two": (
        lambda a: {"down": a["down"].codes},
        TypeError,
        "moe_mlp: down must be a QuantizedMatrices, as gate_up is, but got Tensor",
    ),
    "the other of two": (
        lambda a: {"gate_up": a["down"].codes},
        TypeError,
        "moe_mlp: gate_up must be a QuantizedMatrices, as down is, but got Tensor",
    ),
    "format": (
        lambda a: {"gate_up": changed(a["gate_up"], format="int3")},
        ValueError,
        "moe_mlp: gate_up.format must be one of ",
    ),
    "formats": (
        lambda a: {"down": changed(a["down"], format="int4")},
        ValueError,
        "moe_mlp: down.format must be 'int8', as that of gate_up, but got 'int4'",
    ),
    "layouts": (
        lambda a: {"down": changed(a["down"], transpose=True)},
        ValueError,
        "moe_mlp: down.transpose must be False, as that of gate_up, but got True",
    ),
    "layout": (
        lambda a: {"gate_up": changed(a["gate_up"], transpose=1)},
        TypeError,
        "moe_mlp: gate_up.transpose must be a bool, but got 1 of type int",
    ),
    "transpose": (
        lambda a: {"transpose": True},
        ValueError,
        "moe_mlp: transpose must be False with quantised matrices that are not transposed, but got True",
    ),
    "dtype": (
        lambda a: {"gate_up": changed(a["gate_up"], codes=a["gate_up"].codes.astype("int32"))},
        TypeError,
        "moe_mlp: gate_up.codes must be of dtype int8, but got int32",
    ),
    "shape": (
        lambda a: {"gate_up": changed(a["gate_up"], codes=a["gate_up"].codes[:, :31])},
        ValueError,
        "moe_mlp: gate_up.codes must be of shape [3, 32, 16], but got [3, 31, 16]",
    ),
    "experts": (
        lambda a: {"down": changed(a["down"], codes=a["down"].codes[:2])},
        ValueError,
        "moe_mlp: down.codes must be of shape [3, rows, columns], but got [2, 8, 32]",
    ),
    "columns": (
        lambda a: {"gate_up": changed(a["gate_up"], codes=a["gate_up"].codes[:, :, :15])},
        ValueError,
        "moe_mlp: gate_up.codes must be of 2 * n columns",
    ),
    "no columns": (
        lambda a: {
            "gate_up": changed(a["gate_up"], codes=a["gate_up"].codes[:, :, :0], scales=a["gate_up"].scales[:, :0])
        },
        ValueError,
        "moe_mlp: gate_up.codes must be of 2 * n columns, n of the gate and n that it gates, n >= 1, but got 0",
    ),
    "scales": (
        lambda a: {"down": changed(a["down"], scales=a["down"].scales[:, :5])},
        ValueError,
        "moe_mlp: down.scales must be of shape [3, 32], but got [3, 5]",
    ),
    "dtype of scales": (
        lambda a: {"down": changed(a["down"], scales=a["down"].scales.astype("float16"))},
        TypeError,
        "moe_mlp: down.scales must be of dtype float32, but got float16",
    ),
    "accumulate": (
        lambda a: {"accumulate": True},
        ValueError,
        "moe_mlp: accumulate must be False with quantised matrices, which have no gradient, but got True",
    ),
    "compute": (
        lambda a: {"compute": "fp8_1x128"},
        ValueError,
        "moe_mlp: compute must be None with quantised matrices of int8, but got 'fp8_1x128'",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise(case, place):
    change, error, message = BAD_CALLS[case]
    arguments = layer_arguments(place)
    with pytest.raises(error, match=re.escape(message)):
        moe_mlp(**{**arguments, **change(arguments)})


@pytest.mark.parametrize("options", [{"activation": "geglu"}, {"down_bias": True}], ids=str)
def test_float8_codes_are_for_swiglu_without_biases(options, place):
    arguments = layer_arguments(place, "fp8_128x128")
    if "down_bias" in options:
        options = {"down_bias": tensor(np.zeros((3, 32), np.float32), place)}
    with pytest.raises(ValueError, match="moe_mlp: gate_up must be of integer codes with biases or another activation"):
        moe_mlp(**arguments, **options)


def test_float8_codes_of_another_dtype_are_refused(place):
    arguments = layer_arguments(place, "fp8_128x128")
    arguments["gate_up"] = changed(arguments["gate_up"], codes=arguments["gate_up"].codes.view("uint8").astype("int32"))
    with pytest.raises(TypeError, match=r"gate_up.codes must be of dtype float8_e4m3fn, uint8 or int8, but got int32$"):
        moe_mlp(**arguments)


def test_codes_without_scales_are_refused_with_a_remedy(place):
    codes = paddle.ones([3, 32, 64]).astype("float8_e4m3fn")
    with pytest.raises(TypeError, match=r"must be of dtype float32, but got float8_e4m3fn; .*QuantizedMatrices"):
        moe_mlp(**{**layer_arguments(place), "gate_up": codes, "down": paddle.ones([3, 32, 32])})


def test_keeping_hidden_in_float8_is_refused(place):
    with pytest.raises(ValueError, match="moe_mlp: keep must be 'h' or 'x' with quantised matrices, but got 'h_fp8'"):
        moe_mlp(**layer_arguments(place, "fp8_128x128"), compute="fp8_1x128", keep="h_fp8")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": "int2"}, ValueError, "format must be one of "),
        ({"transpose": 1}, TypeError, "transpose must be a bool"),
        ({"gate_up": np.ones((2, 4, 6))}, TypeError, "gate_up must be a paddle.Tensor"),
        ({"gate_up": paddle.ones([2, 4, 5])}, ValueError, "gate_up must be of 2 * n columns"),
        ({"gate_up": paddle.ones([0, 4, 6])}, ValueError, "gate_up must be of sizes >= 1"),
        ({"gate_up": paddle.ones([2, 0, 6])}, ValueError, "gate_up must be of sizes >= 1"),
        ({"gate_up": [paddle.ones([0, 6])] * 2}, ValueError, "gate_up must be of sizes >= 1"),
        ({"gate_up": paddle.ones([2, 4, 0])}, ValueError, "gate_up must be of sizes >= 1"),
        ({"down": paddle.ones([2, 4, 4])}, ValueError, "down must be of shape [2, 3, 4], but got [2, 4, 4]"),
        (
            {"down": paddle.ones([2, 3, 4]).astype("float16")},
            TypeError,
            "down must be of dtype float32, but got float16",
        ),
    ],
    ids=str,
)
def test_bad_matrices_to_quantise_raise(arguments, error, message):
    given = {"gate_up": paddle.ones([2, 4, 6]), "down": paddle.ones([2, 3, 4]), "format": "int8", **arguments}
    with pytest.raises(error, match=re.escape(f"quantize_experts: {message}")):
        quantize_experts(**given)


def test_matrices_of_a_graph_are_not_quantised():
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            gate_up, down = paddle.static.data("gate_up", [2, 4, 6]), paddle.static.data("down", [2, 3, 4])
            with pytest.raises(
                TypeError, match=r"^quantize_experts: gate_up must be a tensor of dygraph.* a static graph$"
            ):
                quantize_experts(gate_up, down, format="int8")
    finally:
        paddle.disable_static()


def test_no_values_are_read_outside_of_codes_that_a_program_describes_wrongly(place):
    """A program from a file may pass any tensors to the operators."""
    arguments = layer_arguments(place)
    codes = arguments["gate_up"].codes, arguments["gate_up"].scales
    for wrong in ((33, 16, False, 0), (32, 17, False, 0), (32, 16, True, 0), (32, 16, False, 1), (32, 16, False, 4)):
        with pytest.raises(ValueError, match="moe_mlp: "):
            paddle._C_ops._run_custom_op("pmo_dequantize_matrices", *codes, *wrong, paddle.float32.value)
    for scales in (codes[1][:, :3], codes[1].astype("float16")):
        with pytest.raises(ValueError, match="the scales"):
            paddle._C_ops._run_custom_op(
                "pmo_dequantize_matrices", codes[0], scales, 32, 16, False, 0, paddle.float32.value
            )
