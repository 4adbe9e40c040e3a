# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Layers in programs: traced both ways, saved and loaded, in paddle.Model and paddle.inference, for any batch."""

from __future__ import annotations

import copy
import gc

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_moe_ops import route
from paddle_moe_ops.nn import MoELayer, SwiGLU, SwiGLUExperts, TopKRouter
from tests.ops.dense import Options, assert_close, assert_same, dense_layer, parameters_and_bias, results
from tests.params import COPIES
from tests.static.modes import plain_errors, predictor_of

from ..pairwise import in_turn

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("place"),
    # Paddle says so of its own full_like, whenever it makes a gradient in a graph.
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
    pytest.mark.filterwarnings("ignore:no variable in your model"),
]

H, I, E, K = 12, 6, 8, 3  # noqa: E741
WAYS = {"full_graph": True, "bytecode": False}
BOTH_WAYS = pytest.mark.parametrize("full_graph", WAYS.values(), ids=WAYS)
LAYERS = {
    "plain": {},
    "everything": {
        "scoring": "sigmoid",
        "norm_topk_prob": False,
        "num_groups": 4,
        "topk_groups": 3,
        "scaling_factor": 2.5,
        "capacity_factor": 0.7,
        "num_shared_experts": 2,
    },
    "bare": {"num_shared_experts": 0, "correction_bias": False, "capacity_factor": 1.0},
}
OPTIONS = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
BATCHES = {
    "T-H": ([None, H], [[7, H], [0, H], [1, H], [12, H]]),
    "B-S-H": ([None, None, H], [[2, 5, H], [0, 5, H], [3, 0, H], [1, 1, H]]),
}
ANY_BATCH = pytest.mark.parametrize(("spec", "shapes"), BATCHES.values(), ids=BATCHES.keys())


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(5)


def traced_results(layer, x, run=None):
    with plain_errors():
        return results(layer, x, run or layer)


def traced_twin(layer, full_graph, spec=None):
    """A traced copy: tracing changes the layer itself."""
    input_spec = None if spec is None else [InputSpec(spec, "float32", "x")]
    return paddle.jit.to_static(copy.deepcopy(layer), full_graph=full_graph, input_spec=input_spec)


@BOTH_WAYS
@OPTIONS
def test_traced_layer_has_the_results_of_dygraph(options, full_graph):
    layer = MoELayer(H, I, E, K, **options)
    for spec, shapes in BATCHES.values():
        traced = traced_twin(layer, full_graph, spec if full_graph else None)
        for shape in shapes:
            x = paddle.randn(shape)
            assert_close(traced_results(traced, x), results(layer, x, layer))
        if full_graph:
            assert len(traced.forward.program_cache) == 1


@BOTH_WAYS
def test_traced_layer_takes_tokens_that_want_no_gradient(full_graph):
    layer = MoELayer(H, I, E, K)
    traced = traced_twin(layer, full_graph, [None, H] if full_graph else None)
    for tokens in (2, 0, 9):  # two tokens leave experts without any
        x = paddle.randn([tokens, H])
        gradients = []
        for each in (layer, traced):
            each.clear_gradients()
            with plain_errors():
                (each(x) ** 2).sum().backward()
            gradients.append({name: parameter.grad.numpy() for name, parameter in each.named_parameters()})
        assert_close(gradients[1], gradients[0])


@BOTH_WAYS
def test_traced_layer_takes_batches_of_either_rank_by_turns(full_graph):
    layer = MoELayer(H, I, E, K, 2)
    traced = traced_twin(layer, full_graph)
    for shape in ([2, 5, H], [3, 4, H], [7, H], [2, H], [4, 3, H]):
        x = paddle.randn(shape)
        assert_close(traced_results(traced, x), results(layer, x, layer))


@BOTH_WAYS
def test_layers_of_different_sizes_are_traced_by_turns(full_graph):
    """Paddle assumes that what differs between layers of one class may change from call to call."""
    for hidden, intermediate, experts, topk, shared in ((12, 6, 8, 3, 1), (20, 10, 4, 3, 1), (7, 3, 5, 1, 2)):
        layer = MoELayer(hidden, intermediate, experts, topk, shared, capacity_factor=1.0)
        traced = traced_twin(layer, full_graph)
        for tokens in (7, 3):
            x = paddle.randn([tokens, hidden])
            assert_close(traced_results(traced, x), results(layer, x, layer))


@in_turn({"scoring": ["softmax", "sigmoid"], "full_graph": WAYS})
def test_losses_and_counts_inside_of_a_traced_function(scoring, full_graph):
    layer = MoELayer(H, I, E, K, scoring=scoring, capacity_factor=0.75)
    options = {7: Options(K, scoring=scoring, capacity=2), 40: Options(K, scoring=scoring, capacity=12)}
    layer(paddle.randn([3, H]))  # what this pass leaves is not what a traced one reads

    def step(x):
        out = layer(x)
        return out, 0.5 * layer.aux_loss, 0.25 * layer.z_loss, layer.dropped_slots, layer.tokens_per_expert

    traced = paddle.jit.to_static(step, full_graph=full_graph)
    for tokens in (7, 40, 7):
        x = paddle.randn([tokens, H])

        def plain(x):
            found = dense_layer(parameters_and_bias(layer), x, options[x.shape[0]])
            return found.out, 0.5 * found.aux_loss, 0.25 * found.z_loss

        assert_close(traced_results(layer, x, lambda x: traced(x)[:3]), results(layer, x, plain))
        with plain_errors():
            *_, aux_loss, z_loss, dropped, load = traced(x)
        found = dense_layer(parameters_and_bias(layer), x, options[tokens])
        assert aux_loss.item() == pytest.approx(0.5 * found.aux_loss.item(), rel=1e-5)
        assert z_loss.item() == pytest.approx(0.25 * found.z_loss.item(), rel=1e-5)
        assert np.sum(dropped.numpy()) == found.dropped > 0
        assert np.array(load).tolist() == np.bincount(found.ids.ravel(), minlength=E).tolist()


@in_turn({"capacity_factor": [None, 0.75], "full_graph": WAYS})
def test_padding_tokens_of_a_traced_layer_are_left_out(capacity_factor, full_graph):
    layer = MoELayer(H, I, E, K, capacity_factor=capacity_factor)

    def step(x, mask):
        out = layer(x, mask=mask)
        return out, layer.aux_loss, layer.z_loss

    traced = paddle.jit.to_static(step, full_graph=full_graph)
    for tokens in (7, 40):
        x, mask = paddle.randn([tokens, H]), paddle.arange(tokens) % 3 != 1
        found = results(layer, x, lambda x, mask=mask: step(x, mask))
        assert_close(traced_results(layer, x, lambda x, mask=mask: traced(x, mask)), found)


def test_losses_in_a_program_for_any_number_of_tokens():
    layer = MoELayer(H, I, E, K, scoring="sigmoid", capacity_factor=0.75)

    def step(x):
        out = layer(x)
        return out, 0.5 * layer.aux_loss, 0.25 * layer.z_loss, layer.dropped_slots

    traced = paddle.jit.to_static(step, full_graph=True, input_spec=[InputSpec([None, H], "float32", "x")])
    for tokens in (7, 0, 40):
        x = paddle.randn([tokens, H])
        found = results(layer, x, lambda x: traced(x)[:3])
        assert_close(found, results(layer, x, lambda x: step(x)[:3]))
        *losses, dropped = traced(x)[1:]
        assert [*map(float, losses)] == pytest.approx([*map(float, step(x)[1:3])], rel=1e-5)
        assert dropped.item() == step(x)[3].item()


@BOTH_WAYS
def test_what_a_traced_pass_leaves(full_graph):
    layer = MoELayer(H, I, E, K, capacity_factor=0.75)
    x = paddle.randn([9, H])

    def run(x):
        return layer(x)

    with plain_errors():
        paddle.jit.to_static(run, full_graph=full_graph)(x)
    left = layer.tokens_per_expert, layer.dropped_slots, layer.aux_loss, layer.z_loss
    if full_graph:  # values of a program that is finished
        assert left == (None, None, None, None)
    else:
        layer(x)
        expected = layer.tokens_per_expert, layer.dropped_slots, layer.aux_loss, layer.z_loss
        for got, wanted in zip(left, expected, strict=True):
            np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-5)


@BOTH_WAYS
@pytest.mark.parametrize("make_copy", COPIES)
def test_a_copy_after_a_traced_pass_has_not_run(make_copy, full_graph):
    layer, x = MoELayer(H, I, E, K, capacity_factor=0.75), paddle.randn([9, H])

    def run(x):
        return layer(x)

    with plain_errors():
        paddle.jit.to_static(run, full_graph=full_graph)(x)
    copied = make_copy(layer)
    assert copied.aux_loss is None
    assert_same(copied(x).numpy(), layer(x).numpy())


@BOTH_WAYS
def test_what_a_traced_pass_left_is_not_read_by_another_program(full_graph):
    layer, x = MoELayer(H, I, E, K), paddle.randn([9, H])

    def run(x):
        return layer(x)

    def before_a_pass(x):
        return x * 2 if layer.aux_loss is None and layer.tokens_per_expert is None else x

    paddle.jit.to_static(run, full_graph=True)(x)
    gc.collect()
    with plain_errors():
        doubled = paddle.jit.to_static(before_a_pass, full_graph=full_graph)(x)
    np.testing.assert_array_equal(doubled.numpy(), 2 * x.numpy())
    assert layer(x).shape == [9, H]
    assert layer.aux_loss.item() > 0


@BOTH_WAYS
def test_traced_training_goes_as_in_dygraph(full_graph):
    """A model with a layer in it, whose loss takes those of the router."""

    class Model(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.moe, self.last = paddle.nn.Linear(5, H), MoELayer(H, I, 4, 2), paddle.nn.Linear(H, 1)

        def forward(self, x, y):
            x = self.first(x)
            task = ((self.last(x + self.moe(x)) - y) ** 2).mean()
            return task + 1e-2 * self.moe.aux_loss + 1e-3 * self.moe.z_loss

    model = Model()
    twin = copy.deepcopy(model)
    traced = paddle.jit.to_static(twin, full_graph=full_graph)
    x, y = paddle.randn([5, 3, 5]), paddle.randn([5, 3, 1])
    losses = []
    for each, run in ((model, model), (twin, traced)):
        optimizer = paddle.optimizer.SGD(0.1, parameters=each.parameters())
        for _ in range(5):
            with plain_errors():
                loss = run(x, y)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(loss.item())
    assert losses[4] < losses[0]
    np.testing.assert_allclose(losses[5:], losses[:5], rtol=1e-4)
    for name, parameter in twin.named_parameters():
        np.testing.assert_allclose(parameter.numpy(), model.state_dict()[name].numpy(), rtol=1e-3, atol=1e-5)


def router_run(router):
    """Differentiable results of a router, as `results` takes them."""

    def run(x):
        _, probs, scores, logits = router(x)
        return probs, scores.square().sum(), logits.square().sum()

    return run


@BOTH_WAYS
def test_traced_router_has_the_results_of_dygraph(full_graph):
    router = TopKRouter(H, E, K, scoring="sigmoid", num_groups=2, topk_groups=1)
    traced = traced_twin(router, full_graph, [None, H] if full_graph else None)
    for tokens in (7, 0, 3):
        x = paddle.randn([tokens, H])
        assert_close(traced_results(traced, x, router_run(traced)), results(router, x, router_run(router)))
        np.testing.assert_array_equal(traced(x)[0].numpy(), router(x)[0].numpy())


@BOTH_WAYS
def test_traced_shared_expert_has_the_results_of_dygraph(full_graph):
    layer = SwiGLU(H, I)
    traced = traced_twin(layer, full_graph, [None, None, H] if full_graph else None)
    for shape in ([2, 5, H], [0, 5, H], [3, 1, H]):
        x = paddle.randn(shape)
        assert_close(traced_results(traced, x), results(layer, x, layer))


@BOTH_WAYS
@pytest.mark.parametrize("form", ["list", "tensor"])
def test_traced_experts_have_the_results_of_dygraph(form, full_graph):
    layer = SwiGLUExperts(3, H, I)

    def run_of(each, counts):
        given = counts if form == "list" else paddle.to_tensor(counts, dtype="int32")
        return lambda rows: each(rows, given, padding_alignment=2)

    traced = paddle.jit.to_static(copy.deepcopy(layer), full_graph=full_graph)
    for counts in ([3, 0, 2], [1, 4, 0]):
        rows = paddle.randn([6, H])
        assert_close(traced_results(traced, rows, run_of(traced, counts)), results(layer, rows, run_of(layer, counts)))


def test_experts_in_a_graph_that_does_not_know_the_rows():
    layer = SwiGLUExperts(3, H, I)
    specs = [InputSpec([None, H], "float32", "rows"), InputSpec([3], "int64", "counts")]
    traced = paddle.jit.to_static(copy.deepcopy(layer), full_graph=True, input_spec=specs)
    for counts in ([3, 0, 2], [0, 0, 0], [1, 1, 1]):
        rows, given = paddle.randn([sum(counts), H]), paddle.to_tensor(counts)
        ours = traced_results(traced, rows, lambda rows, given=given: traced(rows, given))
        assert_close(ours, results(layer, rows, lambda rows, counts=counts: layer(rows, counts)))


# ---- saved programs


def predict(predictor, x):
    predictor.get_input_handle(predictor.get_input_names()[0]).share_external_data(x)
    predictor.run()
    return [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]


def save_by_jit(layer, path, spec):
    paddle.jit.save(layer, path, input_spec=[InputSpec(spec, "float32", "x")])


def save_by_model(layer, path, spec):
    paddle.Model(layer, inputs=[InputSpec(spec, "float32", "x")]).save(path, training=False)


@ANY_BATCH
@pytest.mark.parametrize(
    ("save", "options"),
    [*((save_by_jit, options) for options in LAYERS.values()), (save_by_model, LAYERS["everything"])],
    ids=[*LAYERS, "everything by paddle.Model"],
)
def test_saved_layer_has_the_results_of_dygraph(save, options, spec, shapes, tmp_path):
    layer, model = MoELayer(H, I, E, K, **options), str(tmp_path / "layer")
    layer(paddle.randn(shapes[0]))  # what a pass leaves is not saved
    layer.eval()
    save(copy.deepcopy(layer), model, spec)
    loaded = paddle.jit.load(model)
    # oneDNN, the default on a CPU, fails at operators of Paddle that get an empty tensor.
    predictors = [predictor_of(model, onednn=onednn) for onednn in (True, False)]
    for shape in shapes:
        x = paddle.randn(shape)
        expected = {"out": layer(x).numpy()}
        assert_close({"out": loaded(x).numpy()}, expected)
        for predictor in predictors[1:] if 0 in shape else predictors:
            assert_close({"out": predict(predictor, x)[0]}, expected)


def test_loaded_layer_trains_as_the_saved_one(tmp_path):
    layer, x = MoELayer(H, I, E, K), paddle.randn([9, H])
    save_by_jit(copy.deepcopy(layer), str(tmp_path / "layer"), [None, H])
    loaded = paddle.jit.load(str(tmp_path / "layer"))
    loaded.train()
    gradients = []
    for each in (layer, loaded):
        tokens = x.detach()
        tokens.stop_gradient = False
        (each(tokens) ** 2).sum().backward()
        found = [tokens.grad, *(parameter.grad for parameter in each.parameters())]  # none of the bias
        gradients.append({str(grad.shape): grad.numpy() for grad in found if grad is not None})
    assert len(gradients[0]) == 6
    assert_close(gradients[1], gradients[0])


def test_model_saves_and_loads_for_training(tmp_path):
    layer, x = MoELayer(H, I, E, K), paddle.randn([9, H])
    layer.router.update_correction_bias([9, 0, 0, 0, 0, 0, 0, 0], rate=0.1)
    spec = [InputSpec([None, H], "float32", "x")]
    paddle.Model(layer, inputs=spec).save(str(tmp_path / "layer"), training=True)
    other = MoELayer(H, I, E, K)
    paddle.Model(other, inputs=spec).load(str(tmp_path / "layer"))
    assert_same(other(x).numpy(), layer(x).numpy())


@pytest.mark.parametrize("kind", ["router", "shared", "experts"])
def test_saved_parts_have_the_results_of_dygraph(kind, tmp_path):
    part, specs = {
        "router": (TopKRouter(H, E, K), [InputSpec([None, H], "float32", "x")]),
        "shared": (SwiGLU(H, I), [InputSpec([None, H], "float32", "x")]),
        "experts": (SwiGLUExperts(2, H, I), [InputSpec([None, H], "float32", "x"), InputSpec([2], "int32", "n")]),
    }[kind]
    paddle.jit.save(copy.deepcopy(part), str(tmp_path / "part"), input_spec=specs)
    loaded = paddle.jit.load(str(tmp_path / "part"))
    for tokens in (5, 0, 1):
        x = paddle.randn([tokens, H])
        arguments = (x, paddle.to_tensor([tokens, 0], dtype="int32"))[: len(specs)]
        got, expected = loaded(*arguments), part(*arguments)
        got, expected = (each if isinstance(each, (list, tuple)) else [each] for each in (got, expected))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"activation": "geglu", "expert_bias": True}], ids=["swiglu", "geglu"])
def test_a_trained_layer_is_saved_in_eval_mode(tmp_path, options):
    layer = MoELayer(H, I, E, K, accumulate=True, **options)
    x = paddle.randn([7, H])
    for _ in range(2):
        layer(x).square().mean().backward()
    layer.eval()
    expected = layer(x)
    path = str(tmp_path / "layer")
    paddle.jit.save(layer, path, input_spec=[InputSpec([None, H], "float32", "x")])
    np.testing.assert_allclose(paddle.jit.load(path)(x).numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("combine", [False, True], ids=["rows", "sums"])
def test_a_layer_that_trains_is_not_traced(combine):
    experts = SwiGLUExperts(E, H, I, accumulate=True)
    plan = route(paddle.to_tensor(np.arange(14, dtype=np.int32).reshape(7, 2) % E), num_experts=E)

    @paddle.jit.to_static(full_graph=True)
    def traced(x):
        return experts(x, plan=plan, combine=combine)

    with pytest.raises(ValueError, match=r"accumulate must be False, or the layer in eval\(\) mode, in a static graph"):
        traced(paddle.randn([7, H]))
