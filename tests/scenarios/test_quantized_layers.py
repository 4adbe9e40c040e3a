# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that serve layers whose matrices are codes, as people write them."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops import QuantizedMatrices, explain, moe_mlp, quantize_experts, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.layers import dequantized
from paddle_moe_ops.backends.quantized import FORMATS
from paddle_moe_ops.nn import MoELayer, SwiGLUExperts
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.packaging.subprocesses import run_forked

pytestmark = [pytest.mark.compiled_only, pytest.mark.cpu_only]

H, INNER, E, K = 160, 128, 6, 2
BY_FORMAT = pytest.mark.parametrize("format", FORMATS)
# Greatest error in the norm, of an untrained layer.
ERRORS = {"int8": 0.02, "int4": 0.25, "int4_1x128": 0.25, "fp8_128x128": 0.06}


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(3)


def new_layer(**options):
    layer = MoELayer(H, INNER, E, K, **options)
    layer.eval()
    return layer


def error_of(made, due):
    made, due = (to_numpy(each).astype(np.float64) for each in (made, due))
    return np.linalg.norm(made - due) / np.linalg.norm(due)


@BY_FORMAT
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 63])
def test_a_trained_layer_is_quantised_and_served(format, num_tokens):
    layer, x = new_layer(), paddle.randn([max(num_tokens, 1), H])[:num_tokens]
    with paddle.no_grad():
        exact = layer(x)
        made = layer.quantize_experts(format)(x)
    assert made.shape == [num_tokens, H]
    if num_tokens:
        assert 0 < error_of(made, exact) < ERRORS[format]
    assert not [name for name, _ in layer.experts.named_parameters()]


def test_a_float8_layer_serves_as_it_was_trained():
    """Paddle's matmul of transposed matrices has other orders of addition on a CPU."""
    layer, x = new_layer(compute="fp8_1x128"), paddle.randn([9, H])
    with paddle.no_grad():
        exact = layer(x)
        assert error_of(layer.quantize_experts("fp8_128x128")(x), exact) < 1e-5


@BY_FORMAT
def test_a_state_is_saved_and_loaded_by_a_layer_of_the_same_format(format, tmp_path):
    layer, x = new_layer().quantize_experts(format), paddle.randn([5, H])
    paddle.save(layer.state_dict(), str(tmp_path / "state.pdparams"))
    other = new_layer().quantize_experts(format)
    missing, unexpected = other.set_state_dict(paddle.load(str(tmp_path / "state.pdparams")))
    assert not missing
    assert not unexpected
    assert_bits_equal(other(x), layer(x), what="out")


def test_a_state_of_codes_is_not_taken_for_one_of_weights():
    state = new_layer().quantize_experts("int8").state_dict()
    missing, unexpected = new_layer().set_state_dict(state)
    assert {"experts.gate_up", "experts.down"} <= set(missing)
    assert {"experts.gate_up_codes", "experts.down_scales"} <= set(unexpected)


def test_saved_programs_hold_codes_and_run_in_a_fresh_process(tmp_path):
    spec = [paddle.static.InputSpec([None, H], "float32")]
    for format in FORMATS:
        layer = new_layer().quantize_experts(format)
        paddle.jit.save(paddle.jit.to_static(layer, full_graph=True, input_spec=spec), str(tmp_path / format))
        size = (tmp_path / f"{format}.pdiparams").stat().st_size
        elements = 3 * E * H * INNER
        others = 4 * sum(each.size for name, each in layer.named_parameters())
        assert size - others < elements * (0.5 if "int4" in format else 1) + 40 * E * (H + 2 * INNER)
        x = paddle.randn([7, H])
        np.savez(tmp_path / f"{format}.npz", x=to_numpy(x), due=to_numpy(layer(x)))
    program = f"""
import numpy as np, paddle, paddle_moe_ops
for format in {[*FORMATS]}:
    path = {str(tmp_path)!r} + "/" + format
    layer, arrays = paddle.jit.load(path), np.load(path + ".npz")
    assert (layer(paddle.to_tensor(arrays["x"])).numpy() == arrays["due"]).all(), format
"""
    done = run_forked(program)
    assert done.returncode == 0, done.stderr


@BY_FORMAT
@pytest.mark.parametrize("full_graph", [True, False], ids=["traced", "by bytecode"])
def test_traced_calls_have_the_bits_of_dygraph(format, full_graph):
    layer, x = new_layer().quantize_experts(format), paddle.randn([9, H])
    exact = layer(x)
    traced = paddle.jit.to_static(layer, full_graph=full_graph)
    assert_bits_equal(traced(x), exact, what="out")


@pytest.mark.parametrize("full_graph", [True, False], ids=["traced", "by bytecode"])
def test_a_traced_function_of_the_users_own(full_graph):
    gate_up, down = paddle.randn([E, H, 2 * INNER]) / 12, paddle.randn([E, INNER, H]) / 12
    x, ids = paddle.randn([9, H]), paddle.randint(0, E, [9, 1]).astype("int32")
    parts = [(each.codes, each.scales) for each in quantize_experts(gate_up, down, format="int8")]

    def serve(x, ids, first, first_scales, second, second_scales):
        matrices = QuantizedMatrices(first, first_scales, "int8"), QuantizedMatrices(second, second_scales, "int8")
        return moe_mlp(x, route(ids, num_experts=E), None, *matrices)

    exact = serve(x, ids, *parts[0], *parts[1])
    traced = paddle.jit.to_static(serve, full_graph=full_graph)
    assert_bits_equal(traced(x, ids, *parts[0], *parts[1]), exact, what="out")


def gradients_of(layer, x, way=None):
    x = x.detach()
    x.stop_gradient = False
    out = layer(x) if way is None else recompute(layer, x, use_reentrant=way == "reentrant")
    out.square().sum().backward()
    given = {"x": x, "router": layer.router.weight, "shared": layer.shared.down}
    made = {name: each.grad.clone() for name, each in given.items()}
    layer.clear_gradients()
    return made


@BY_FORMAT
@pytest.mark.parametrize("way", ["reentrant", "by hooks", "keep"])
def test_frozen_experts_train_what_is_around_them(format, way):
    """As with adapters: two passes before one backward pass, and recomputation of both kinds."""
    layer, x = new_layer(num_shared_experts=1).quantize_experts(format), paddle.randn([9, H])
    exact = gradients_of(layer, x)
    assert all(float(each.abs().sum()) > 0 for each in exact.values())
    if way == "keep":
        layer.experts.memory_options["keep"] = "x"
    made = gradients_of(layer, x, None if way == "keep" else way)
    for name, gradient in made.items():
        assert_bits_equal(gradient, exact[name], what=name)
    first, second = (paddle.to_tensor(x.numpy(), stop_gradient=False) for _ in range(2))
    (layer(first).square().sum() + layer(second).square().sum()).backward()
    for each in (first, second):
        assert_bits_equal(each.grad, exact["x"], what="x")


def test_codes_that_are_written_anew_count_in_the_next_call():
    layer, other, x = new_layer().quantize_experts("int8"), new_layer().quantize_experts("int8"), paddle.randn([9, H])
    layer(x)
    for name in ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales"):
        getattr(layer.experts, name).set_value(getattr(other.experts, name))
    other.router, other.shared = layer.router, layer.shared
    assert_bits_equal(layer(x), other(x), what="out")


@BY_FORMAT
def test_copies_serve_alike(format):
    layer, x = new_layer().quantize_experts(format), paddle.randn([9, H])
    assert_bits_equal(copy.deepcopy(layer)(x), layer(x), what="out")
    assert f"matrix_format={format}" in repr(layer.experts)


@BY_FORMAT
@pytest.mark.parametrize("cast", [lambda layer: layer.to(dtype="bfloat16"), lambda layer: layer.bfloat16()])
def test_a_quantised_layer_is_cast_around_its_codes(cast, format):
    layer, x = new_layer().quantize_experts(format), paddle.randn([9, H])
    codes = {name: each.clone() for name, each in layer.experts.named_buffers()}
    exact = layer(x)
    cast(layer)
    assert layer.router.weight.dtype == paddle.bfloat16
    for name, each in layer.experts.named_buffers():
        assert_bits_equal(each, codes[name], what=name)
    assert error_of(layer(x.astype("bfloat16")), exact) < 0.05


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, lambda layer, x: layer(x.astype("bfloat16")), "MoELayer: x must be of dtype float32, but got bfloat16"),
        (
            {"expert_bias": True, "num_shared_experts": 0},
            lambda layer, x: layer(x.astype("bfloat16")),
            "MoELayer: x must be of dtype float32, but got bfloat16",
        ),
        (
            {"expert_bias": True},
            lambda layer, x: layer.experts(x.astype("bfloat16"), [x.shape[0], 0, 0, 0, 0, 0]),
            "SwiGLUExperts: rows must be of dtype float32, but got bfloat16",
        ),
        (
            {},
            lambda layer, x: layer.experts(x.astype("float64"), [x.shape[0], 0, 0, 0, 0, 0]),
            "SwiGLUExperts: rows must be of dtype bfloat16, float16 or float32, but got float64",
        ),
        (
            {},
            lambda layer, x: layer.experts(None, [0] * E),
            "SwiGLUExperts: rows must be a paddle.Tensor, but got NoneType",
        ),
        (
            {},
            lambda layer, x: layer.experts.weighted_rows(
                x.numpy(), route(paddle.zeros([5, 1], "int32"), num_experts=E), None
            ),
            "SwiGLUExperts: x must be a paddle.Tensor, but got ndarray",
        ),
    ],
    ids=range(6),
)
def test_bad_tokens_of_a_quantised_layer_are_named(options, call, message):
    layer = new_layer(**options).quantize_experts("int8")
    with pytest.raises(TypeError, match=message):
        call(layer, paddle.randn([5, H]))


def test_rows_of_float8_codes_must_be_combined():
    experts = SwiGLUExperts(E, H, INNER).quantize("fp8_128x128")
    with pytest.raises(
        ValueError, match="SwiGLUExperts: combine must be True with codes of fp8_128x128, but got False"
    ):
        experts(paddle.randn([2, H]), [2, 0, 0, 0, 0, 0])


def test_rows_that_are_not_combined_are_those_of_the_values():
    experts = SwiGLUExperts(E, H, INNER).quantize("int4_1x128")
    exact = SwiGLUExperts(E, H, INNER)
    for name in ("gate_up", "down"):
        codes, scales = getattr(experts, f"{name}_codes"), getattr(experts, f"{name}_scales")
        matrices = QuantizedMatrices(codes, scales, "int4_1x128", True)
        inner = H if name == "gate_up" else INNER
        values = dequantized(matrices, inner, paddle.float32)
        getattr(exact, name).set_value(values.transpose([0, 2, 1]))
    rows, counts = paddle.randn([12, H]), [2, 0, 5, 1, 4, 0]
    assert_bits_equal(experts(rows, counts), exact(rows, counts), what="rows")
    x, probs = paddle.randn([9, H]), paddle.rand([9, K])
    ids = paddle.topk(paddle.randn([9, E]), K)[1]
    plan = route(ids, num_experts=E)
    made, due = (each(x, plan=plan, probs=probs) for each in (experts, exact))
    assert_bits_equal(made, due, what="rows by a plan")
    made, due = (each(x, plan=plan, probs=probs, combine=True) for each in (experts, exact))
    assert error_of(made, due) < 1e-6  # the order of additions in Paddle's matmul of transposed matrices


@pytest.mark.parametrize("options", [{"activation": "geglu"}, {"expert_bias": True}], ids=str)
def test_layers_with_other_activations_and_biases(options):
    layer, x = new_layer(**options), paddle.randn([9, H])
    exact = layer(x)
    with pytest.raises(ValueError, match="MoELayer: format must be one of integer codes with"):
        layer.quantize_experts("fp8_128x128")
    assert error_of(layer.quantize_experts("int8")(x), exact) < ERRORS["int8"]


def test_a_layer_is_quantised_once_and_the_formats_are_named():
    layer = new_layer()
    with pytest.raises(ValueError, match="MoELayer: format must be one of"):
        layer.quantize_experts("int3")
    layer.quantize_experts("int8")
    with pytest.raises(ValueError, match="MoELayer: format must be given once: the matrices are codes already"):
        layer.quantize_experts("int8")


@BY_FORMAT
@pytest.mark.parametrize("keep", ["h", "x"])
def test_explain_names_the_operator_and_what_it_keeps(keep, format):
    matrices = quantize_experts(paddle.ones([E, H, 2 * INNER]), paddle.ones([E, INNER, H]), format=format)
    plan, x = route(paddle.zeros([3, 1], "int32"), num_experts=E), paddle.ones([3, H])
    x.stop_gradient = False
    lines = explain("moe_mlp", x, plan, None, *matrices, keep=keep).splitlines()
    said = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert said["runs as"] == "the operator moe_mlp_quantized of the compiled library"
    assert said["why"] == "SwiGLU of codes, without biases, is one layer there"
    kept = "the tokens, 1920 bytes" if keep == "x" else "the tokens and the first product, 4992 bytes"
    assert said["kept"] == f"{kept}, and the maps"


def test_paddle_summary_lists_a_quantised_layer():
    layer = new_layer().quantize_experts("int8")
    said = paddle.summary(layer, (3, H))
    assert said["total_params"] == H * E + 3 * H * INNER  # of the router and the shared expert
    assert layer.experts.gate_up is None
    assert layer(paddle.randn([3, H])).shape == [3, H]


@pytest.mark.parametrize(("due", "given"), itertools.permutations(FORMATS, 2))
def test_a_state_of_another_format_is_refused(due, given):
    other, layer = (new_layer().quantize_experts(each) for each in (given, due))
    before = [to_numpy(each).tobytes() for each in layer.state_dict().values()]
    for loaded, key in ((layer, "experts.gate_up"), (layer.experts, "gate_up")):
        state = other.state_dict() if loaded is layer else other.experts.state_dict()
        text = f"^set_state_dict: {key} must be of the layer's format, {due}, but got {given}$"
        for load in (loaded.set_state_dict, loaded.set_dict, loaded.load_dict):
            with pytest.raises(ValueError, match=text):
                load(state)
    of_down = {name: each for name, each in other.state_dict().items() if "gate_up" not in name}
    with pytest.raises(ValueError, match=r"^set_state_dict: experts\.down must be of the layer's format"):
        layer.set_state_dict(of_down)
    assert before == [to_numpy(each).tobytes() for each in layer.state_dict().values()]


@pytest.mark.parametrize("given", ["int4", "int4_1x128"])
@pytest.mark.parametrize("due", FORMATS)
def test_int4_codes_in_the_order_of_inputs_are_refused(due, given):
    """States of earlier versions hold them, as int8 of half as many columns as there are inputs."""
    layer, state = new_layer().quantize_experts(due), new_layer().quantize_experts(given).state_dict()
    for name, inputs in (("gate_up", H), ("down", INNER)):
        key = f"experts.{name}_codes"
        state[key] = state[key].view("int8")[:, :, : -(-inputs // 2)]
    text = rf"experts\.gate_up must be of the layer's format, {due}, but got int8 codes of int4 in the order of inputs"
    with pytest.raises(ValueError, match=text):
        layer.set_state_dict(state)


def test_a_model_around_a_layer_refuses_codes_of_another_dtype():
    layer = new_layer().quantize_experts("int4")
    state = layer.state_dict()
    state["experts.gate_up_codes"] = state["experts.gate_up_codes"].view("int8")
    outer = paddle.nn.Sequential(layer)
    with pytest.raises(Exception, match="dtype"):
        outer.set_state_dict({f"0.{name}": each for name, each in state.items()})


def test_a_state_without_matrices_is_loaded_as_by_paddle():
    layer = new_layer().quantize_experts("int8")
    state = {name: each + 1 for name, each in layer.state_dict().items() if "experts" not in name}
    with pytest.warns(UserWarning, match="Skip loading for experts"):
        layer.set_state_dict(state)
    assert_bits_equal(layer.router.weight, state["router.weight"])
