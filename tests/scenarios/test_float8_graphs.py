# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models with float8 experts that are traced, trained as programs, saved, served and loaded again, as people do it."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.static import InputSpec

from paddle_moe_ops import Float8Matrices, moe_mlp, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.experts import make_default
from paddle_moe_ops.nn import MoELayer, set_is_first_microbatch
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_float8
from tests.ops.problems import tensor
from tests.static.modes import plain_errors, predictor_of

FLOAT8 = "fp8_1x128"
H, INNER, E, K = 64, 128, 6, 2  # sizes that the kernels for Hopper take
pytestmark = [
    pytest.mark.compiled_only,
    pytest.mark.usefixtures("place"),
    # Paddle's remark about its own full_like.
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
]


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(11)


def layer_of(dtype="float32", **options):
    layer = MoELayer(H, INNER, E, K, compute=FLOAT8, **options)
    if dtype != "float32":
        layer.to(dtype=dtype)
    return layer


def twin_of(layer, **options):
    """Another one of the same parameters, which stays in dygraph."""
    twin = layer_of(str(layer.experts.down.dtype).removeprefix("paddle."), **options)
    twin.set_state_dict(layer.state_dict())
    return twin


def traced(layer, dtype="float32", **options):
    spec = [InputSpec([None, H], dtype, "x")]
    return paddle.jit.to_static(layer, input_spec=spec, full_graph=True, **options)


def assert_near(got, expected, what=""):
    arrays = [to_numpy(each) if isinstance(each, paddle.Tensor) else each for each in (got, expected)]
    assert_close_float8(*arrays, what)


def run(layer, x):
    """The result, and the gradients of the tokens and of all parameters, by name, in NumPy."""
    x = x.detach()
    x.stop_gradient = False
    out = layer(x)
    (out * paddle.linspace(-1, 1, H).astype(out.dtype)).sum().backward()
    made = {"out": out, "x": x.grad}
    made |= {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    made = {name: to_numpy(each).copy() for name, each in made.items()}
    layer.clear_gradients()
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("capacity", [None, 0.75], ids=["all slots", "slots without an expert"])
def test_a_traced_layer_is_that_of_dygraph(capacity, dtype):
    layer = layer_of(dtype, capacity_factor=capacity)
    twin, program = twin_of(layer, capacity_factor=capacity), traced(layer, dtype)
    for tokens in (1, 63, 1025):
        x = paddle.randn([tokens, H]).astype(dtype)
        made, due = run(program, x), run(twin, x)
        assert made.keys() >= due.keys()
        for name, expected in due.items():
            assert_near(made[name], expected, name)
    with paddle.no_grad():
        assert program(paddle.zeros([0, H], dtype)).shape == [0, H]


def test_a_program_keeps_the_first_product_as_it_is():
    lean = layer_of("bfloat16", keep="h_fp8")
    usual, x = twin_of(lean), paddle.randn([63, H]).astype("bfloat16")
    made, due = run(traced(lean, "bfloat16"), x), run(traced(usual, "bfloat16"), x)
    for name, expected in due.items():
        assert_bits_equal(made[name], expected, what=name)


@pytest.mark.parametrize("keep", ["h", "x"])
def test_a_backward_pass_of_a_program_reads_codes_of_its_forward_pass(keep):
    """With keep="x" each pass quantises the matrices, which others may have changed in between."""
    layer, x = layer_of(num_shared_experts=0, keep=keep), paddle.randn([33, H])
    program = traced(layer)
    due = run(program, x)
    x.stop_gradient = False
    out = program(x)
    with paddle.no_grad():
        for each in layer.experts.parameters():
            each.set_value(each * 2.0)
    (out * paddle.linspace(-1, 1, H)).sum().backward()
    made = {"x": x.grad, "down": layer.experts.down.grad}
    equal = [np.array_equal(to_numpy(each), due[name.replace("down", "experts.down")]) for name, each in made.items()]
    assert equal == [keep == "h"] * 2


def test_tokens_of_three_dimensions_and_no_tokens():
    layer = layer_of()
    twin = twin_of(layer)
    program = paddle.jit.to_static(layer, input_spec=[InputSpec([None, None, H], "float32")], full_graph=True)
    for shape in ([2, 9, H], [1, 1, H], [3, 0, H]):
        x = paddle.randn(shape)
        assert_near(program(x), twin(x))


class Model(paddle.nn.Layer):
    """A router from paddle.topk and experts around a residual connection."""

    def __init__(self, dtype):
        super().__init__()
        normal = paddle.nn.initializer.Normal(0.0, H**-0.5)
        self.router = self.create_parameter([H, E], default_initializer=normal)
        self.gate_up = self.create_parameter([E, H, 2 * INNER], default_initializer=normal)
        self.down = self.create_parameter([E, INNER, H], default_initializer=normal)
        self.dtype = dtype

    def forward(self, x):
        probs, ids = paddle.topk(F.softmax(paddle.matmul(x, self.router)), K)
        plan = route(ids, probs, num_experts=E)
        matrices = (each.astype(self.dtype) for each in (self.gate_up, self.down))
        return x + moe_mlp(x.astype(self.dtype), plan, probs, *matrices, compute=FLOAT8).astype("float32")


def trained(model, optimizer, rng, place, steps, teacher):
    losses = []
    for step in range(steps):
        x = rng.standard_normal((64 if step % 2 else 17, H)).astype(np.float32)
        loss = ((model(tensor(x, place)) - tensor(x + np.tanh(x @ teacher), place)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_trained_saved_served_and_fine_tuned(dtype, rng, place, tmp_path):
    model, plain = Model(dtype), Model(dtype)
    plain.set_state_dict(model.state_dict())
    program = traced(model)
    x = tensor(rng.standard_normal((33, H)).astype(np.float32), place)
    made, due = run(program, x), run(plain, x)
    for name, expected in due.items():
        assert_near(made[name], expected, name)
    assert np.abs(due["router"]).max() > 0

    teacher = rng.standard_normal((H, H)).astype(np.float32) / 8
    optimizer = paddle.optimizer.Adam(5e-3, parameters=model.parameters())
    losses = trained(program, optimizer, rng, place, 40, teacher)
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:8])

    model.eval()
    path = str(tmp_path / "model")
    paddle.jit.save(program, path)
    plain.set_state_dict(model.state_dict())
    loaded, predictor = paddle.jit.load(path), predictor_of(path)
    for tokens in (1, 5, 200):
        given = rng.standard_normal((tokens, H)).astype(np.float32)
        expected = plain(tensor(given, place))
        assert_near(loaded(tensor(given, place)), expected)
        predictor.get_input_handle("x").copy_from_cpu(given)
        predictor.run()
        assert_near(predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu(), expected)

    loaded.train()
    before = [each.numpy() for each in loaded.parameters()]
    optimizer = paddle.optimizer.Adam(5e-3, parameters=loaded.parameters())
    more = trained(loaded, optimizer, rng, place, 40, teacher)
    assert np.mean(more[-8:]) < np.mean(losses[-8:])
    assert all((each.numpy() != old).any() for each, old in zip(loaded.parameters(), before, strict=True))


def test_a_traced_model_trains_as_in_dygraph():
    layer = layer_of()
    twin, program = twin_of(layer), traced(layer)
    x = paddle.randn([48, H])
    target = paddle.tanh(x @ paddle.randn([H, H]) / H**0.5)
    curves = []
    for model, parameters in ((program, layer.parameters()), (twin, twin.parameters())):
        optimizer, losses = paddle.optimizer.AdamW(3e-3, parameters=parameters), []
        for _ in range(12):
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
        curves.append(losses)
    assert curves[0][-1] < 0.7 * curves[0][0]
    np.testing.assert_allclose(*curves, rtol=0.01)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mixed_precision_in_a_traced_layer(level):
    layer = layer_of()
    twin, x = twin_of(layer), paddle.randn([33, H])

    def call(x):
        with paddle.amp.auto_cast(dtype="bfloat16", level=level):
            return layer(x)

    program = paddle.jit.to_static(call, input_spec=[InputSpec([None, H], "float32")], full_graph=True)
    made = program(x)
    with paddle.amp.auto_cast(dtype="bfloat16", level=level):
        assert_near(made, twin(x))


@pytest.mark.filterwarnings("ignore:.*")
def test_a_layer_traced_by_bytecode():
    layer = layer_of()
    twin, x = twin_of(layer), paddle.randn([33, H])
    with plain_errors():
        made = run(paddle.jit.to_static(layer, full_graph=False), x)
    due = run(twin, x)
    for name, expected in due.items():
        assert_near(made[name], expected, name)


@pytest.mark.parametrize("first", [True, False])
def test_matrices_cannot_be_kept_in_a_program(first):
    layer = layer_of()

    def call(x):
        return layer(x, is_first_microbatch=first)

    program = paddle.jit.to_static(call, full_graph=True)
    text = "is_first_microbatch must be None in a static graph, which quantises the matrices in each call, but got "
    with pytest.raises(ValueError, match=f"MoELayer: {text}{first}"):
        program(paddle.randn([5, H]))
    assert layer.experts.float8_matrices.is_empty


def test_without_float8_the_argument_changes_nothing_in_a_program():
    layer = MoELayer(H, INNER, E, K)
    x = paddle.randn([5, H])
    due = layer(x).numpy()

    def call(x):
        return layer(x, is_first_microbatch=True)

    program = paddle.jit.to_static(call, full_graph=True)
    np.testing.assert_allclose(program(x).numpy(), due, rtol=1e-5, atol=1e-6)


def test_kept_matrices_serve_dygraph_and_not_programs():
    """After set_is_first_microbatch a layer keeps matrices until they change; a program never does."""
    layer, x = layer_of(num_shared_experts=0), paddle.randn([33, H])

    def call(x):
        return layer(x)

    program = paddle.jit.to_static(call, full_graph=True)
    with paddle.no_grad():
        set_is_first_microbatch(layer)
        assert_near(program(x), twin_of(layer, num_shared_experts=0)(x))
        assert layer.experts.float8_matrices.is_empty
        before = layer(x)
        assert not layer.experts.float8_matrices.is_empty
        layer.experts.down.scale_(2.0)
        assert_near(program(x), 2 * before)
        assert_near(layer(x), 2 * before)


def test_matrices_that_a_whole_model_keeps_are_no_matter_for_a_program():
    """The caller passes them on as an argument, as blocks of PaddleFormers do."""
    kept, model = Float8Matrices(), Model("float32")
    make_default(kept)

    def call(x, float8_matrices):
        probs, ids = paddle.topk(F.softmax(paddle.matmul(x, model.router)), K)
        options = {"compute": FLOAT8, "float8_matrices": float8_matrices}
        return moe_mlp(x, route(ids, num_experts=E), probs, model.gate_up, model.down, **options)

    x = paddle.randn([9, H])

    def call_of_block(x):
        return call(x, kept)

    program = paddle.jit.to_static(call_of_block, full_graph=True)
    assert_near(program(x), call(x, None))
    assert kept.is_empty
