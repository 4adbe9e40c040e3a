# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models that quantise their experts' matrices once after each change: every way to change a parameter."""

from __future__ import annotations

import copy
import io
import warnings
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.amp import grad_scaler
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import recompute
from paddle.incubate.optimizer import LookAhead, ModelAverage
from paddle.jit.dy2static.convert_call_func import convert_call

from paddle_moe_ops import Float8Matrices
from paddle_moe_ops.backends import layers
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.expert_parallel import distributed_optimizer
from paddle_moe_ops.integrations.paddleformers.experts import Compute
from paddle_moe_ops.nn import MoELayer, keep_float8_matrices, microbatches, set_is_first_microbatch
from paddle_moe_ops.testing.equality import assert_bits_equal

pytestmark = [pytest.mark.compiled_only, pytest.mark.cpu_only]

H, INNER, E, K, T = 160, 128, 5, 2, 24


@pytest.fixture(autouse=True)
def seeded():
    paddle.seed(7)


@pytest.fixture
def quantised(monkeypatch):
    """The number of times that matrices were quantised, in a list."""
    calls = []
    quantize = layers.LayerKernels.quantize_experts

    def counted(self, *arguments):
        calls.append(1)
        return quantize(self, *arguments)

    monkeypatch.setattr(layers.LayerKernels, "quantize_experts", counted)
    return calls


def new_layer(**options):
    return MoELayer(H, INNER, E, K, num_shared_experts=0, compute="fp8_1x128", **options)


def exact(layer, x):
    """The output of a layer that quantises in each call."""
    other = new_layer(activation=layer.experts.activation)
    other.set_state_dict(layer.state_dict())
    with paddle.no_grad():
        return other(x)


def backward(layer, x):
    loss = layer(x).square().mean()
    loss.backward()
    return loss


def step_by(optimizer):
    def change(layer, x):
        made = optimizer(parameters=layer.parameters(), learning_rate=0.05)
        backward(layer, x)
        made.step()

    return change


def minimised(layer, x):
    optimizer = paddle.optimizer.SGD(0.05, parameters=layer.parameters())
    optimizer.minimize(backward(layer, x))


def grouped(layer, x):
    parameters = [{"params": layer.experts.parameters()}, {"params": layer.router.parameters()}]
    optimizer = paddle.optimizer.AdamW(0.05, parameters=parameters)
    backward(layer, x)
    optimizer.step()


def loaded(layer, _):
    layer.set_state_dict(new_layer().state_dict())


def one_of_them(write):
    def change(layer, _):
        with paddle.no_grad():
            write(layer.experts.down, paddle.randn(layer.experts.down.shape) * 0.1)

    return change


def scaled(layer, x):
    optimizer = paddle.optimizer.SGD(0.05, parameters=layer.parameters())
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    scaler.scale(layer(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def looked_ahead(layer, x):
    """A step after which parameters are a mean of slow and fast ones."""
    optimizer = LookAhead(paddle.optimizer.SGD(0.05, parameters=layer.parameters()), k=1)
    backward(layer, x)
    optimizer.step()


def averaged(layer, x):
    """Parameters that are replaced by their mean over two steps."""
    average = ModelAverage(0.5, parameters=layer.parameters(), min_average_window=1, max_average_window=9)
    optimizer = paddle.optimizer.SGD(0.5, parameters=layer.parameters())
    for _ in range(2):
        backward(layer, x)
        optimizer.step()
        average.step()
        layer.clear_gradients()
    layer(x)
    average.apply(need_restore=False)


def flat(write):
    """A write to a buffer that contains both parameters."""

    def change(layer, x):
        parameters = layer.experts.gate_up, layer.experts.down
        buffer, start = paddle.concat([each.detach().flatten() for each in parameters]), 0
        for each in parameters:
            part = buffer._slice(start, start + each.size)
            part.get_tensor()._set_dims(each.shape)
            part._share_buffer_to(each)
            start += each.size
        with paddle.set_grad_enabled(paddle.is_grad_enabled()):
            layer(x)
        write(buffer)

    return change


def step_of_buffer(buffer):
    buffer.stop_gradient = False
    (buffer * 0.3).sum().backward()
    paddle.optimizer.SGD(0.1, parameters=[buffer]).step()


def moved(layer, _):
    replaced = paddle.randn(layer.experts.gate_up.shape) * 0.1
    replaced._share_buffer_to(layer.experts.gate_up)


def closure_of(layer, x):
    optimizer = paddle.optimizer.LBFGS(0.05, max_iter=2, parameters=layer.parameters())

    def closure():
        optimizer.clear_grad()
        return backward(layer, x)

    optimizer.step(closure)


CHANGES = {
    **{
        each: step_by(getattr(paddle.optimizer, each))
        for each in ("SGD", "Momentum", "Adam", "AdamW", "Lamb", "RMSProp")
    },
    "LBFGS": closure_of,
    "minimize": minimised,
    "groups of parameters": grouped,
    "GradScaler": scaled,
    "LookAhead": looked_ahead,
    "ModelAverage": averaged,
    "a step on a flat buffer": flat(step_of_buffer),
    "a load of a flat buffer": flat(lambda buffer: buffer.set_value(buffer * 0.5)),
    "set_state_dict": loaded,
    "set_value": one_of_them(lambda to, value: to.set_value(value)),
    "set_value of an array": one_of_them(lambda to, value: to.set_value(to_numpy(value))),
    "set_tensor": one_of_them(lambda to, value: to.set_tensor(value)),
    "get_tensor().set": one_of_them(lambda to, value: to.get_tensor().set(to_numpy(value), paddle.CPUPlace())),
    "copy_": one_of_them(lambda to, value: to.copy_(value, True)),
    "assign": one_of_them(lambda to, value: paddle.assign(value, output=to)),
    "assign of an array": one_of_them(lambda to, value: paddle.assign(to_numpy(value), output=to)),
    "an initializer": one_of_them(lambda to, _: paddle.nn.initializer.Constant(0.1)(to)),
    "an initializer of values": one_of_them(lambda to, value: paddle.nn.initializer.Assign(to_numpy(value))(to)),
    "exponential_": one_of_them(lambda to, _: to.exponential_(20.0)),
    "an operator in place": one_of_them(lambda to, value: to.add_(value)),
    "an element": one_of_them(lambda to, value: to.__setitem__(0, value[0])),
    "a view": one_of_them(lambda to, value: to[1].copy_(value[1], True)),
    "other memory": moved,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "serving"])
def test_a_change_is_noticed(change, trains):
    layer, x = new_layer(), paddle.randn([T, H])
    assert keep_float8_matrices(layer) == 1
    with paddle.set_grad_enabled(trains):
        before = layer(x)
    change(layer, x)
    layer.clear_gradients()
    with paddle.set_grad_enabled(trains):
        made = layer(x)
    assert_bits_equal(made, exact(layer, x), what="out")
    assert np.abs(to_numpy(made) - to_numpy(before)).max() > 0


def test_each_call_quantises_once_for_both_passes_and_keeps_nothing(quantised):
    layer, x = new_layer(), paddle.randn([T, H])
    for number in range(2):
        backward(layer, x)
        assert len(quantised) == number + 1
    assert layer.experts.float8_matrices.is_empty


def enabled_scaler(monkeypatch, kind=paddle.amp.GradScaler):
    """A scaler, which Paddle turns off on a CPU, and everywhere in float32."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    monkeypatch.setattr(grad_scaler, "_dygraph_tracer", lambda: SimpleNamespace(_expected_place=place))
    monkeypatch.setattr(grad_scaler, "amp_global_state", lambda: SimpleNamespace(amp_dtype="float16"))
    return kind(init_loss_scaling=8.0, decr_every_n_nan_or_inf=2)


@pytest.mark.parametrize("optimizer", [paddle.optimizer.SGD, paddle.optimizer.AdamW])
def test_a_step_by_grad_scaler_is_noticed_once(optimizer, monkeypatch, quantised):
    """Paddle's scaler calls the optimizer even if it finds an infinity."""
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    optimizer, scaler = optimizer(0.05, parameters=layer.parameters()), enabled_scaler(monkeypatch)
    for _ in range(2):
        scaler.scale(layer(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    made = layer(x)
    assert scaler.is_enable()
    assert len(quantised) == 3
    assert_bits_equal(made, exact(layer, x), what="out")


def test_a_layer_that_is_used_twice_in_a_step_shares_its_codes(quantised):
    layer, x = new_layer(), paddle.randn([T, H])
    twin = copy.deepcopy(layer)
    keep_float8_matrices(layer)
    for each in (layer, twin):
        each(each(x)).square().mean().backward()
    assert len(quantised) == 3
    for one, another in zip(layer.parameters(), twin.parameters(), strict=True):
        assert_bits_equal(one.grad, another.grad, what=one.name)


def test_layers_that_share_parameters_both_notice_a_step(quantised):
    layer, x = new_layer(), paddle.randn([T, H])
    other = new_layer()
    other.experts.gate_up, other.experts.down = layer.experts.gate_up, layer.experts.down
    optimizer = paddle.optimizer.Momentum(0.05, parameters=layer.parameters())
    for each in (layer, other):
        keep_float8_matrices(each)
    for _ in range(2):
        (layer(x) + other(x)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    for each in (layer, other):
        assert_bits_equal(each(x), exact(each, x), what="out")
    assert len(quantised) == 6


def test_two_optimizers_of_one_layer_are_both_noticed():
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    optimizers = [
        paddle.optimizer.AdamW(0.05, parameters=[layer.experts.gate_up]),
        paddle.optimizer.SGD(0.05, parameters=[layer.experts.down]),
    ]
    for optimizer in optimizers:
        backward(layer, x)
        optimizer.step()
        optimizer.clear_grad()
        made = layer(x)
        assert_bits_equal(made, exact(layer, x), what="out")


@pytest.fixture
def fleet_started():
    fleet.init(is_collective=True)


@pytest.mark.parametrize("with_groups", [False, True], ids=["plain", "marked for a group"])
def test_a_distributed_optimizer_keeps_codes_from_step_to_step_without_a_word(with_groups, fleet_started, quantised):
    group = fleet.get_hybrid_communicate_group().get_data_parallel_group() if with_groups else None
    layer, x = new_layer(group=group, combine="reduced") if with_groups else new_layer(), paddle.randn([3, T, H])
    optimizer = distributed_optimizer(paddle.optimizer.AdamW(0.05, parameters=layer.parameters()))
    for step in range(2):
        for tokens in x:
            backward(layer, tokens)
        optimizer.step()
        optimizer.clear_grad()
        assert len(quantised) == step + 1
    assert_bits_equal(layer(x[0]), exact(layer, x[0]), what="out")


def test_experts_of_several_linear_layers_are_kept_by_a_distributed_optimizer(fleet_started):
    """Blocks of PaddleFormers have such experts."""
    linears = [paddle.nn.Linear(H, 2 * INNER, bias_attr=False) for _ in range(2)]
    distributed_optimizer(paddle.optimizer.SGD(parameters=[each.weight for each in linears]))
    kept = Float8Matrices()
    options = Compute("fp8_1x128", kept).options([each.weight for each in linears])
    assert options == {"compute": "fp8_1x128", "float8_matrices": kept}
    assert Compute("fp8_1x128", Float8Matrices()).options([paddle.zeros([2, 2])])["float8_matrices"] is None


def test_micro_batches_share_codes_and_have_the_bits_of_passes_that_quantise(quantised):
    layer, parts = new_layer(), paddle.randn([4, T, H])
    other = copy.deepcopy(layer)
    keep_float8_matrices(layer)
    optimizers = [paddle.optimizer.AdamW(1e-3, parameters=each.parameters()) for each in (layer, other)]
    counts = []
    for step in range(3):
        for each, optimizer in zip((layer, other), optimizers, strict=True):
            for x in parts:
                backward(each, x)
            optimizer.step()
            counts.append(len(quantised))
        for one, another in zip(layer.parameters(), other.parameters(), strict=True):
            assert_bits_equal(one.grad, another.grad, what=f"gradient in step {step}")
            assert_bits_equal(one, another, what=f"parameter after step {step}")
        for optimizer in optimizers:
            optimizer.clear_grad()
    assert counts == [1, 5, 6, 10, 11, 15]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "by hooks"])
def test_recomputation_reads_the_codes_of_the_first_pass(reentrant, quantised):
    layer, x = new_layer(), paddle.randn([T, H])
    x.stop_gradient = False
    keep_float8_matrices(layer)
    recompute(layer, x, use_reentrant=reentrant).square().mean().backward()
    assert len(quantised) == 1
    made = x.grad.clone()
    x.clear_gradient()
    backward(copy.deepcopy(layer), x)
    assert_bits_equal(made, x.grad, what="x")


def test_a_backward_pass_reads_the_matrices_of_its_forward_pass():
    """Two passes, with a step in between, before the first backward pass."""
    layer, x = new_layer(), paddle.randn([T, H])
    x.stop_gradient = False
    keep_float8_matrices(layer)
    backward(copy.deepcopy(layer), x)
    due = x.grad.clone()
    x.clear_gradient()
    first = layer(x).square().mean()
    with paddle.no_grad():
        for parameter in layer.experts.parameters():
            parameter.set_value(parameter * 1.5)
    second = layer(x)
    first.backward()
    assert_bits_equal(x.grad, due, what="gradient of the first")
    assert_bits_equal(second, exact(layer, x), what="second")


def test_training_evaluation_and_frozen_experts(quantised):
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    layer.eval()
    with paddle.no_grad():
        layer(x)
    layer.train()
    layer.experts.gate_up.stop_gradient = layer.experts.down.stop_gradient = True
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.router.parameters())
    backward(layer, x)
    optimizer.step()
    assert_bits_equal(layer(x), exact(layer, x), what="out")
    assert len(quantised) == 2  # a step of any optimizer counts


def test_copies_and_states_keep_nothing():
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    layer(x)
    twin = copy.deepcopy(layer)
    with paddle.no_grad():
        twin.experts.down.scale_(2.0)
    assert_bits_equal(twin(x), exact(twin, x), what="out")
    buffer = io.BytesIO()
    paddle.save(layer.state_dict(), buffer)
    assert not any("float8" in name for name in layer.state_dict())


@pytest.mark.parametrize("by_argument", [False, True], ids=["by model", "by argument"])
def test_micro_batches_by_hand_notice_changes_as_well(by_argument, quantised):
    layer, x = new_layer(), paddle.randn([T, H])
    with paddle.no_grad():
        if by_argument:
            layer(x, is_first_microbatch=True)
        else:
            set_is_first_microbatch(layer)
            layer(x)
        layer.experts.down.scale_(2.0)
        options = {"is_first_microbatch": False} if by_argument else {}
        assert_bits_equal(layer(x, **options), exact(layer, x), what="out")
    assert len(quantised) == 2


def test_an_explicit_argument_does_what_it_says(quantised):
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    layer(x, is_first_microbatch=True)
    layer(x, is_first_microbatch=False)
    layer(x)
    assert len(quantised) == 1


def test_programs_quantise_in_each_call():
    layer, x = new_layer(), paddle.randn([T, H])
    keep_float8_matrices(layer)
    layer.eval()
    due = layer(x)
    traced = paddle.jit.to_static(layer, full_graph=True)
    assert_bits_equal(traced(x), due, what="out")
    with paddle.no_grad():
        layer.experts.down.scale_(2.0)
    assert_bits_equal(traced(x), exact(layer, x), what="out")


@pytest.mark.parametrize("full_graph", [True, False], ids=["traced", "by bytecode"])
def test_traced_functions_still_call_what_is_counted(full_graph):
    keep_float8_matrices(new_layer())

    def function(x):
        y = paddle.zeros_like(x)
        paddle.assign(x * 2.0, output=y)
        return y + paddle.full([3], 1.0) + paddle.assign(np.ones([3], np.float32))

    x = paddle.randn([3])
    assert_bits_equal(paddle.jit.to_static(function, full_graph=full_graph)(x), x * 2.0 + 1.0 + 1.0, what="y")
    counted = paddle.Tensor.set_value, paddle.Tensor.copy_, paddle.optimizer.Optimizer._apply_optimize
    counted += paddle.Tensor.exponential_, paddle._C_ops.full_, paddle._C_ops.assign_value_, paddle.Tensor.set_tensor
    assert all(convert_call(each) is each for each in counted)


def test_only_layers_are_taken():
    with pytest.raises(TypeError, match=r"keep_float8_matrices: model must be a paddle\.nn\.Layer, but got list"):
        keep_float8_matrices([new_layer()])
    assert keep_float8_matrices(MoELayer(H, INNER, E, K)) == 0


@pytest.mark.parametrize(("num_tokens", "warns"), [(5 * 1024, False), (5 * 1024 - 1, True), (0, False)])
def test_a_layer_on_a_gpu_warns_if_it_quantises_in_each_call_for_few_rows(num_tokens, warns, monkeypatch):
    monkeypatch.setattr(microbatches, "is_on_gpu", lambda tensor: True)
    layer, x = MoELayer(8, 4, 5, 1, norm_topk_prob=False, compute="fp8_1x128"), paddle.zeros([num_tokens, 8])
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        layer(x)
    expected = (
        f"MoELayer: for {num_tokens} rows of 5 experts, quantising the matrices in each call takes longer than float8 "
        "saves; call paddle_moe_ops.nn.keep_float8_matrices(model) once, which quantises them after each change"
    )
    assert [str(each.message) for each in given] == [expected] * warns
    keep_float8_matrices(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
