# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`explain` of a layer: what it says runs, is kept and is launched is what the call itself does."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import Float8Matrices, explain, moe_mlp, route, use_backend
from paddle_moe_ops.backends import OPERATORS, experts, layers, register_operators
from tests.ops.interpreting import SHAPE
from tests.ops.problems import plan_tensors, tensor
from tests.ops.test_float8_mlp import FLOAT8
from tests.ops.test_moe_mlp import BACKENDS, BY_FORM, BY_LAYOUT, Layer
from tests.params import ODD, PADDED, Shape

pytestmark = [pytest.mark.compiled_only, pytest.mark.cpu_only]

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def interpreted(interpreted, monkeypatch):
    """The device of `interpreted` whose launches are listed and compute nothing: here only their names count."""

    def listed(device, kernel, *_):
        device.launches.append(getattr(kernel, "fn", kernel).__name__)

    monkeypatch.setattr(type(interpreted), "launch", listed)
    return interpreted


def arguments_of(layer, leaves, place="cpu"):
    """Arguments of `moe_mlp`, and its options."""
    operands = leaves["x"], plan_tensors(layer.plan, place), leaves.get("probs"), leaves["gate_up"], leaves["down"]
    order = {"by row": "row", "flat by slot": "slot"}.get(layer.form)
    return operands, {"transpose": layer.transpose, "weights_by": order}


def said_of(operands, **options):
    """The lines on the layer, by the text before the colon."""
    lines = explain("moe_mlp", *operands, **options).split("\ngrouped_gemm: ")[0].splitlines()
    return dict(line.split(": ", 1) for line in lines)


def launches_in(line):
    """Number of launches of each kernel."""
    names = (name.partition(" x ") for name in line.split(", "))
    return {name: int(times or 1) for name, _, times in names}


def assert_launches_are_said(device, layer, **options):
    """Assert the launches of both passes of a second call, after the first one filled the caches."""
    leaves = layer.leaves("cpu")
    operands, own = arguments_of(layer, leaves)
    options |= own
    with use_backend("triton"):
        moe_mlp(*operands, **options).sum().backward()
        device.launches.clear()
        said = said_of(operands, **options)
        assert device.launches == []
        out = moe_mlp(*operands, **options)
        assert launches_in(said["forward"]) == Counter(device.launches)
        device.launches.clear()
        out.backward(tensor(layer.d_out, "cpu"))
        assert launches_in(said["backward"]) == Counter(device.launches)
    assert said["moe_mlp"] == "triton, as one layer"
    return said


@BY_LAYOUT
@BY_FORM
@pytest.mark.parametrize("keep", ["h", "x"])
def test_on_triton_it_names_the_kernels_that_a_call_launches(keep, form, transpose, interpreted, rng):
    layer = Layer(rng, SHAPE, np.float16, transpose=transpose, form=form)
    assert_launches_are_said(interpreted, layer, keep=keep)


def with_main_grad(leaves):
    for name in ("gate_up", "down"):
        leaves[name].main_grad = None
    return leaves


@pytest.mark.parametrize("form", ["lists", "lists side by side"])
def test_lists_of_matrices_are_joined_in_the_call_alone(form, interpreted, rng):
    layer = Layer(rng, SHAPE, np.float16)
    leaves = layer.leaves("cpu")
    for name in ("gate_up", "down"):
        each = paddle.unbind(leaves[name].detach()) if form == "lists side by side" else layer.arrays[name]
        leaves[name] = [part if isinstance(part, paddle.Tensor) else tensor(part, "cpu") for part in each]
    operands, options = arguments_of(layer, leaves)
    with use_backend("triton"):
        said = said_of(operands, **options)
        moe_mlp(*operands, **options)
    assert launches_in(said["forward"]) == Counter(interpreted.launches)


def test_nothing_is_made_or_changed(interpreted, rng):
    leaves = with_main_grad(Layer(rng, SHAPE, BF16).leaves("cpu"))
    operands, options = arguments_of(Layer(rng, SHAPE, BF16), leaves)
    with use_backend("triton"):
        said_of(operands, accumulate=True, **options)
    assert interpreted.launches == []
    assert leaves["gate_up"].main_grad is None
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize(
    ("workspace_mb", "rows", "columns"), [(1, "none, products gather them", 4), (16, "1", 1)], ids=["1 MiB", "16 MiB"]
)
def test_it_says_how_the_workspace_is_used(workspace_mb, rows, columns, interpreted, rng):
    layer = Layer(rng, Shape(4096, 1024, 2, 2, 1, "4 to 8 MiB of rows"), BF16, sizes=(1024, 2048))
    operands, options = arguments_of(layer, layer.leaves("cpu"))
    with use_backend("triton"):
        said = said_of(operands, workspace_mb=workspace_mb, **options)
    assert said["workspace"].endswith(f"; windows of rows in the forward pass: {rows}; windows of columns: {columns}")
    size = float(said["workspace"].split()[0])
    assert size <= 2 if workspace_mb == 1 else 4 < size <= 16


@BACKENDS
@pytest.mark.parametrize("keep", ["h", "x", "h_fp8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_what_is_kept_takes_as_many_bytes_as_it_says(dtype, keep, name, rng, monkeypatch):
    kept, codes, run = [], [], experts.MoeMlp.run

    def record(call):
        made = run(call)
        x, *others = call.saved
        others = others[2 + call.has_weights :]
        num_rows = len(others) - sum(call.forms)
        kept.extend([x, *others[:num_rows]])
        codes.extend(others[num_rows:])
        return made

    monkeypatch.setattr(experts.MoeMlp, "run", record)
    layer = Layer(rng, PADDED, dtype, transpose=True, form="by row", sizes=(72, 66))
    operands, options = arguments_of(layer, layer.leaves("cpu"))
    with use_backend(name) if name else contextlib.nullcontext():
        said = said_of(operands, keep=keep, compute=FLOAT8, **options)
        moe_mlp(*operands, keep=keep, compute=FLOAT8, **options)
    due = [sum(each.size * each.element_size() for each in saved) for saved in (kept, codes) if saved]
    if name == "reference" and codes:  # it saves the values
        due[1] = sum(layer.plan.num_experts * size for size in (72 * 132 + 4 * 2, 66 * 72 + 4))
    assert list(map(int, re.findall(r"(\d+) bytes", said["kept"]))) == due


def test_without_a_gradient_nothing_is_kept(interpreted, rng):
    layer = Layer(rng, SHAPE, np.float16)
    operands, options = arguments_of(layer, layer.leaves("cpu"))
    with use_backend("triton"), paddle.no_grad():
        said = said_of(operands, **options)
        moe_mlp(*operands, **options)
    assert said["kept"] == "nothing, since no gradient is wanted"
    assert "backward" not in said
    assert launches_in(said["forward"]) == Counter(interpreted.launches)


CALLS = {
    "accumulated": ({"accumulate": True}, "without kernels, the library's operator does not accumulate"),
    "another activation": ({"activation": "geglu"}, "only SwiGLU without biases is one layer"),
    "a bias": ({"down_bias": paddle.zeros([ODD.E, 72])}, "only SwiGLU without biases is one layer"),
}


@pytest.mark.parametrize(("changes", "why"), CALLS.values(), ids=CALLS)
def test_a_layer_that_is_made_of_calls_says_why_and_what_runs_them(changes, why, rng):
    operands, options = arguments_of(layer := Layer(rng, ODD, sizes=(72, 16)), layer.leaves("cpu"))
    said = said_of(operands, **options, **changes)
    assert said == {
        "moe_mlp": f"grouped_gemm, {changes.get('activation', 'swiglu')}, grouped_gemm and unpermute",
        "why": why,
        "parts": "grouped_gemm on paddle, unpermute on compiled",
        "kept": "what each of these calls keeps; keep and workspace_mb make no difference",
    }


def test_a_layer_on_float8_operands_without_kernels_is_one_layer_too(rng):
    operands, options = arguments_of(layer := Layer(rng, ODD, BF16, sizes=(72, 16)), layer.leaves("cpu"))
    said = said_of(operands, compute=FLOAT8, **options)
    assert said["moe_mlp"] == "paddle, as one layer"
    assert said["GEMMs"] == "the library's kernels or Paddle's matmul, by the table in docs/backends.md"


def test_in_a_graph_it_is_the_operator(rng):
    layer = Layer(rng, ODD, form="none", sizes=(72, 16))
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            leaves = {name: paddle.static.data(name, array.shape) for name, array in layer.arrays.items()}
            ids = paddle.static.data("ids", [ODD.T, ODD.K], "int32")
            plan = route(ids, num_experts=ODD.E)
            said = said_of((leaves["x"], plan, None, leaves["gate_up"], leaves["down"]))
    finally:
        paddle.disable_static()
    assert said["moe_mlp"] == "paddle, as one layer"
    assert said["kept"] == "the tokens and the first product, of sizes that the graph finds out, and the maps"
    assert said["GEMMs"] == "the library's kernels or Paddle's matmul, by the table in docs/backends.md"


@pytest.mark.parametrize("full_graph", [True, False])
def test_to_static_calls_it_while_it_traces(rng, full_graph):
    layer, said = Layer(rng, ODD, form="none", sizes=(72, 16)), []
    leaves = layer.leaves("cpu")

    def called(x, ids):
        operands = x, route(ids, num_experts=ODD.E), None, leaves["gate_up"], leaves["down"]
        said.append(explain("moe_mlp", *operands))
        return moe_mlp(*operands)

    ids = paddle.arange(ODD.K, dtype="int32").expand([ODD.T, ODD.K])
    out = paddle.jit.to_static(called, full_graph=full_graph)(leaves["x"], ids)
    assert out.shape == [ODD.T, 72]
    assert len(said) == 1
    assert said[0].startswith("moe_mlp: paddle, as one layer")


def test_copies_that_bring_lists_together_are_counted(rng):
    layer = Layer(rng, ODD, BF16, sizes=(72, 16))
    operands, options = arguments_of(layer, layer.leaves("cpu"))
    x, plan, probs, gate_up, down = operands
    apart = [[each.clone() for each in matrices] for matrices in (gate_up, down)]
    size = sum(each.size * each.element_size() for each in (gate_up, down))
    together = said_of(operands, compute=FLOAT8, **options)["kept"]
    assert said_of((x, plan, probs, *apart), compute=FLOAT8, **options)["kept"] == (
        f"{together}; and copies of matrices, {size} bytes"
    )


def test_copies_of_a_pair_of_matrices_are_counted():
    plan = route(paddle.to_tensor([[0], [1], [1]]), num_experts=2)
    x, gate_up, down = paddle.ones([3, 8]), [paddle.ones([8, 12])] * 2, [paddle.ones([6, 8])] * 2
    x.stop_gradient = False
    pairs = [[each.clone() for each in matrices] for matrices in (gate_up, down)]
    size = sum(each.size * each.element_size() for matrices in pairs for each in matrices)
    assert said_of((x, plan, None, *pairs), compute=FLOAT8)["kept"].endswith(f"and copies of matrices, {size} bytes")


def test_float8_matrices_that_hold_nothing_still_hold_nothing_afterwards(rng):
    layer, kept = Layer(rng, ODD, BF16, sizes=(72, 16)), Float8Matrices()
    operands, options = arguments_of(layer, layer.leaves("cpu"))
    said_of(operands, compute=FLOAT8, float8_matrices=kept, **options)
    assert kept.is_empty
    assert kept._of is None


def test_a_backend_that_cannot_run_is_no_error(rng):
    operands, options = arguments_of(layer := Layer(rng, ODD, np.float16), layer.leaves("cpu"))
    with use_backend("triton"):
        said = said_of(operands, **options)
    assert said.keys() == {"moe_mlp"}
    assert said["moe_mlp"].startswith(
        "none (grouped_gemm: the backend 'triton' chosen by use_backend cannot run here: "
    )


def test_without_arguments_it_says_what_decides():
    lines = explain("moe_mlp").splitlines()
    assert lines[0].startswith("moe_mlp: decided by the backend of grouped_gemm, and the arguments: ")
    assert lines[1:] == explain("grouped_gemm").splitlines()


@pytest.mark.parametrize("operator", [None, *OPERATORS])
def test_arguments_of_other_operators_are_refused(operator):
    text = f"^explain: operator must be 'moe_mlp' with further arguments, but got {operator!r}$"
    with pytest.raises(ValueError, match=text):
        explain(operator, 1)
    with pytest.raises(ValueError, match=text):
        explain(operator, keep="x")


def test_arguments_that_the_layer_does_not_take_are_refused(rng):
    operands, options = arguments_of(layer := Layer(rng, ODD), layer.leaves("cpu"))
    text = "^explain: arguments must be those of moe_mlp, but "
    with pytest.raises(TypeError, match=f"{text}missing a required argument: 'down'$"):
        explain("moe_mlp", *operands[:-1])
    with pytest.raises(TypeError, match=f"{text}got an unexpected keyword argument 'kept'$"):
        explain("moe_mlp", *operands, kept="x")
    with pytest.raises(ValueError, match=r"^moe_mlp: keep must be one of 'h', 'x', 'h_fp8', but got 'y'$"):
        explain("moe_mlp", *operands, keep="y", **options)


@pytest.mark.parametrize("transpose", [False, True])
def test_a_layer_on_kernels_says_its_chunks_and_kernels(transpose):
    register_operators()
    x, down = paddle.zeros([700, 24]), paddle.zeros([1, 24, 16] if transpose else [1, 16, 24])
    spec = spec_of(700, transpose=transpose)
    first, forward, backward = layers.explain_library(x, down, spec, (True,) * 4)
    assert first == "runs as: the operator moe_mlp of the compiled library"
    gathered = "chunks of rows: none, GEMMs gather token rows; chunks of columns: 1; the GEMM of summed rows: ping-pong"
    assert re.fullmatch(rf"forward: workspace 0\.1 MiB; {gathered}", forward)
    assert re.fullmatch(rf"backward: workspace 0\.1 MiB; {gathered}", backward)
    assert layers.explain_library(x, down, spec, (False,) * 4) == [first, forward]
    assert layers.explain_library(x, down, spec, (True, False, False, False)) == [first, forward, backward]
    spec.accumulates = True
    assert layers.explain_library(x, down, spec, (True,) * 4)[0] == NODE


@pytest.mark.parametrize("hidden_in_float8", [False, True])
def test_a_float8_layer_on_kernels_says_its_chunks_and_kernels(hidden_in_float8):
    register_operators()
    x, down = paddle.zeros([1000, 1024], "bfloat16"), paddle.zeros([2, 1024, 1024], "bfloat16")
    spec = spec_of(2000, compute=FLOAT8, hidden_in_float8=hidden_in_float8)
    with_wgrads = spec_of(2000, compute=FLOAT8, hidden_in_float8=hidden_in_float8, float8_wgrads=True)
    first, forward, backward = layers.explain_library(x, down, spec, (True,) * 4)
    assert first == NODE
    rest = "chunks of rows: 1; chunks of columns: 1; the GEMM of summed rows: float8"
    assert forward.endswith(rest)
    assert backward.endswith(rest)
    wgrads = layers.explain_library(x, down, with_wgrads, (True,) * 4)
    assert wgrads[1] == forward
    assert float(wgrads[2].split()[2]) > float(backward.split()[2])  # codes of 17 row blocks in place of 2000 rows
    spec.quantized = ()
    kept = [float(line.split()[2]) for line in layers.explain_library(x, down, spec, (True,) * 4)[1:]]
    for line, without in zip((forward, backward), kept, strict=True):
        assert float(line.split()[2]) - without == pytest.approx(4.0, abs=0.2)  # E d 2n bytes of codes


NODE = "runs as: both passes of the compiled library, called by a node"


def spec_of(num_rows, transpose=False, compute=None, hidden_in_float8=False, float8_wgrads=False):
    return SimpleNamespace(
        transpose=transpose,
        plan=SimpleNamespace(num_rows=num_rows),
        keeps_hidden=True,
        workspace=1 << 30,
        compute=compute,
        quantized=None,
        hidden_in_float8=hidden_in_float8,
        float8_wgrads=float8_wgrads,
        accumulates=False,
        deferral=None,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"defer_dw": True}, "dW: waits for flush_dw(); 3024 bytes are kept until then, and the maps"),
        ({"defer_dw": "fleet"}, "dW: waits for pop() of WeightGradStore, if that is enabled; 3024 bytes are kept"),
        ({"defer_dw": True, "activation": "geglu"}, "dW: waits for flush_dw(); each GEMM keeps its rows"),
    ],
    ids=str,
)
def test_gradients_of_matrices_that_wait(place, options, expected):
    x, plan = paddle.randn([9, 12]), route(paddle.arange(18).reshape([9, 2]) % 4, num_experts=4)
    x.stop_gradient = False
    gate_up, down = (paddle.create_parameter(shape, "float32") for shape in ([4, 12, 20], [4, 10, 12]))
    text = explain("moe_mlp", x, plan, None, gate_up, down, **options)
    assert expected in text
    assert "dW:" not in explain("moe_mlp", x, plan, None, gate_up.detach(), down.detach(), **options)
    assert "dW:" not in explain("moe_mlp", x, plan, None, gate_up, down)


@pytest.mark.parametrize(("frozen", "due"), [((), 3024), ((0,), 1584), ((1,), 2304)], ids=str)
def test_only_matrices_with_a_gradient_wait_and_may_be_transposed(frozen, due, place):
    x, plan = paddle.randn([9, 12]), route(paddle.arange(18).reshape([9, 2]) % 4, num_experts=4)
    matrices = [paddle.create_parameter(shape, "float32") for shape in ([4, 20, 12], [4, 12, 10])]
    for each in frozen:
        matrices[each].stop_gradient = True
    text = explain("moe_mlp", x, plan, None, *matrices, transpose=True, defer_dw=True)
    assert f"{due} bytes are kept until then" in text
