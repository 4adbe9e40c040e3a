# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that balance the experts of a whole model, and layers that bring a loss of their own."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops.nn import ExpertLoad, MoELayer, attach_loss, load_balance_loss

H, E, K = 8, 5, 2
FLOATS = "of dtype bfloat16, float16, float32 or float64"


class Model(nn.Layer):
    """Two blocks with other numbers of experts, each run plainly or under a kind of recompute."""

    def __init__(self, reentrant: bool | None = None, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.LayerList([MoELayer(H, 4, E, K, **options), nn.Linear(H, H), MoELayer(H, 4, E + 2, 1)])
        self.reentrant = reentrant

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            is_moe = isinstance(block, MoELayer)
            again = self.reentrant is not None and is_moe
            x = x + (recompute(block, x, use_reentrant=self.reentrant) if again else block(x))
        return x


def model_of(reentrant: bool | None = None, **options: Any) -> Model:
    paddle.seed(3)
    with pytest.warns(UserWarning, match="topk=1"):
        return Model(reentrant, **options)


def batch(num_tokens: int, seed: int = 0) -> paddle.Tensor:
    x = paddle.to_tensor(np.random.default_rng(seed).standard_normal((num_tokens, H)).astype(np.float32))
    x.stop_gradient = False
    return x


def loads_of(model: Model) -> list[np.ndarray]:
    """Loads of the last pass."""
    return [
        np.array(paddle.to_tensor(each.tokens_per_expert).tolist())
        for each in model.blocks
        if isinstance(each, MoELayer)
    ]


def counted(load: ExpertLoad) -> list[list[int]]:
    return [each.tolist() for each in load.total()]


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["stored", "recomputed", "recomputed by hooks"])
def test_micro_batches_count_once_each_until_the_update(reentrant):
    model = model_of(reentrant)
    load, expected = ExpertLoad(model), [np.zeros(E, int), np.zeros(E + 2, int)]
    for size in (7, 0, 63):
        out = model(batch(size, size))
        expected = [total + each for total, each in zip(expected, loads_of(model), strict=True)]
        out.square().mean().backward()
    assert counted(load) == [each.tolist() for each in expected]
    reference = copy.deepcopy(model)
    load.update_correction_biases(0.25)
    for layer, each in zip((reference.blocks[0], reference.blocks[2]), expected, strict=True):
        layer.router.update_correction_bias(each, 0.25)
    for name, value in reference.state_dict().items():
        np.testing.assert_array_equal(model.state_dict()[name], value, err_msg=name)
    assert counted(load) == [[0] * E, [0] * (E + 2)]


def test_passes_of_evaluation_and_without_gradients_do_not_count():
    model = model_of()
    load = ExpertLoad(model)
    with paddle.no_grad():
        model(batch(9))
    model.eval()
    model(batch(9)).sum().backward()
    assert sum(map(sum, counted(load))) == 0


@pytest.mark.compiled_only  # another backend's routes refuse a second backward pass
def test_two_forward_passes_before_one_backward_pass_count_and_two_backward_passes_count_once():
    model = model_of()
    load = ExpertLoad(model)
    loss = model(batch(9, 1)).sum() + model(batch(4, 2)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [sum(each) for each in counted(load)] == [13 * K, 13]


def test_a_pass_whose_loss_is_dropped_does_not_count():
    model = model_of()
    load = ExpertLoad(model)
    model(batch(9))
    model(batch(5)).sum().backward()
    assert [sum(each) for each in counted(load)] == [5 * K, 5]


def test_a_frozen_router_counts_where_tokens_need_a_gradient():
    model = model_of()
    for block in (model.blocks[0], model.blocks[2]):
        block.router.weight.stop_gradient = True
    load = ExpertLoad(model)
    model(batch(6)).sum().backward()
    assert [sum(each) for each in counted(load)] == [6 * K, 6]


def test_routers_without_a_bias_are_left_out_of_the_update():
    model = model_of(correction_bias=False)
    load = ExpertLoad(model)
    model(batch(6)).sum().backward()
    load.update_correction_biases(0.5)
    assert model.blocks[0].router.correction_bias is None
    assert np.abs(model.blocks[2].router.correction_bias.numpy()).max() == 0.5
    with pytest.raises(ValueError, match="the routers must be one with a correction bias at least, but got none"):
        ExpertLoad(model.blocks[0]).update_correction_biases()


def test_a_copy_of_a_model_is_not_counted_and_a_later_count_ends_the_first():
    model = model_of()
    first = ExpertLoad(model)
    copied = copy.deepcopy(model)
    copied(batch(6)).sum().backward()
    assert sum(map(sum, counted(first))) == 0
    ExpertLoad(model.blocks[2])
    with pytest.raises(RuntimeError, match="ExpertLoad: a later ExpertLoad counts the load of these layers"):
        first.total()


def test_a_model_whose_load_is_counted_can_be_freed():
    model = model_of()
    load = ExpertLoad(model)
    model(batch(6)).sum().backward()
    model(batch(6))
    remains = weakref.ref(model.blocks[0])
    del model, load
    gc.collect()
    assert remains() is None


def test_graphs_are_refused():
    model = model_of()
    ExpertLoad(model)
    program = paddle.jit.to_static(model, full_graph=True)
    expected = "x must be a tensor in dygraph, or the layer in eval() mode, since an ExpertLoad counts its load"
    with pytest.raises(TypeError, match=re.escape(f"MoELayer: {expected}")):
        program(batch(3))


def test_a_counted_model_is_saved_in_eval_mode(tmp_path):
    model = model_of()
    load = ExpertLoad(model)
    model(batch(6)).sum().backward()
    model.eval()
    expected, file = model(batch(4)).numpy(), str(tmp_path / "model")
    paddle.jit.save(model, file, input_spec=[paddle.static.InputSpec([None, H], "float32")])
    np.testing.assert_allclose(paddle.jit.load(file)(batch(4)), expected, rtol=1e-4, atol=1e-5)
    assert [sum(each) for each in counted(load)] == [6 * K, 6]


def test_a_deep_copy_of_the_object_says_that_it_counts_nothing():
    model = model_of()
    _, load = copy.deepcopy((model, ExpertLoad(model)))
    with pytest.raises(RuntimeError, match="no ExpertLoad counts the load of copied layers until one is constructed"):
        load.total()


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Linear(2, 2), ValueError, "model must be one with a MoELayer, but got Linear"),
        (3, TypeError, "model must be a paddle.nn.Layer, but got int"),
    ],
    ids=["no such layer", "no layer"],
)
def test_bad_models(model, error, message):
    with pytest.raises(error, match=f"^ExpertLoad: {message}"):
        ExpertLoad(model)


def test_losses_of_one_process_are_those_of_the_layers():
    model = model_of(scoring="sigmoid")
    load = ExpertLoad(model)
    x = batch(63)
    model(x)
    losses = load.aux_losses()
    expected = [model.blocks[0].aux_loss, model.blocks[2].aux_loss]
    np.testing.assert_array_equal(losses, np.stack([each.numpy() for each in expected]))
    (3.0 * losses.sum()).backward()
    got = model.blocks[0].router.weight.grad.numpy()
    model.clear_gradients()
    model(x)
    (3.0 * (model.blocks[0].aux_loss + model.blocks[2].aux_loss)).backward()
    np.testing.assert_array_equal(got, model.blocks[0].router.weight.grad)


def test_the_flag_of_losses_is_a_bool():
    model = model_of()
    load = ExpertLoad(model)
    model(batch(3))
    with pytest.raises(TypeError, match=r"ExpertLoad\.aux_losses: of_step must be a bool, but got 2 of type int"):
        load.aux_losses(of_step=2)


def test_losses_of_a_step_balance_the_load_of_its_micro_batches():
    model = model_of()
    load, (first, second) = ExpertLoad(model), (batch(7, 1), batch(5, 2))
    model(first).sum().backward()
    before = [np.array(each) for each in loads_of(model)]
    model(second)
    for losses, earlier in ((load.aux_losses(of_step=True), before), (load.aux_losses(), [0, 0])):
        for loss, old, block in zip(losses, earlier, (model.blocks[0], model.blocks[2]), strict=True):
            total = paddle.to_tensor(old + np.array(block.tokens_per_expert))
            assert float(loss) == float(load_balance_loss(block._last[2], load=total))


def test_losses_before_a_pass_are_refused():
    with pytest.raises(RuntimeError, match="call it after a forward pass of every MoELayer"):
        ExpertLoad(model_of()).aux_losses()


class WithLoss(nn.Layer):
    """A block that attaches its auxiliary loss, or returns it."""

    def __init__(self, attaches: bool, scaler: Any = None) -> None:
        super().__init__()
        paddle.seed(1)
        self.moe, self.attaches, self.scaler = MoELayer(H, 4, E, K), attaches, scaler

    def forward(self, x: paddle.Tensor) -> Any:
        out = x + self.moe(x)
        loss = 0.5 * self.moe.aux_loss
        return attach_loss(out, loss, self.scaler) if self.attaches else (out, loss)


def gradients(block: WithLoss) -> dict[str, Any]:
    return {name: each.grad.numpy().copy() for name, each in block.named_parameters()}


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["stored", "recomputed", "recomputed by hooks"])
def test_an_attached_loss_has_the_gradients_of_an_added_one(reentrant):
    attached, added = WithLoss(True), WithLoss(False)
    for seed in range(2):  # accumulated
        x = batch(33, seed)
        out = attached(x) if reentrant is None else recompute(attached, x, use_reentrant=reentrant)
        expected, loss = added(batch(33, seed))
        np.testing.assert_array_equal(out, expected)
        out.square().mean().backward()
        (expected.square().mean() + loss).backward()
    for name, each in gradients(attached).items():
        np.testing.assert_allclose(each, gradients(added)[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_an_attached_loss_has_the_scale_of_the_scaler_at_the_backward_pass():
    class Scaler(paddle.amp.GradScaler):  # Paddle's does nothing on a CPU
        def is_enable(self) -> bool:
            return True

    scaler = Scaler(init_loss_scaling=4.0)
    scaler._scale = paddle.full([1], 4.0)
    scaled, plain = WithLoss(True, scaler), WithLoss(True)
    out = scaled(batch(33))
    scaler._scale = paddle.full([1], 8.0)
    (8.0 * out.sum()).backward()
    plain(batch(33)).sum().backward()
    for name, each in gradients(plain).items():
        np.testing.assert_array_equal(8.0 * each, gradients(scaled)[name], err_msg=name)
    loss = paddle.to_tensor(3.0, "float64", stop_gradient=False)
    attach_loss(paddle.ones([3]), loss, scaler).sum().backward()
    assert (loss.grad.dtype, float(loss.grad)) == (paddle.float64, 8.0)


def test_the_output_is_in_the_memory_of_the_input_and_without_gradients_nothing_happens():
    x, loss = paddle.ones([3]), paddle.ones([])
    assert attach_loss(x, loss).stop_gradient
    loss.stop_gradient = False
    assert attach_loss(x, loss).data_ptr() == x.data_ptr()
    with paddle.no_grad():
        assert attach_loss(batch(2), loss).stop_gradient


def test_a_loss_is_attached_to_a_tensor_without_a_gradient():
    loss = paddle.to_tensor(3.0, stop_gradient=False)
    (attach_loss(paddle.ones([3]), 2.0 * loss).sum() * 0.0).backward()
    assert float(loss.grad) == 2.0


def test_a_loss_is_attached_to_a_batch_without_tokens():
    loss = paddle.to_tensor(3.0, stop_gradient=False)
    x = batch(0)
    out = attach_loss(2.0 * x, 2.0 * loss)
    assert out.shape == [0, H]
    out.sum().backward()
    assert float(loss.grad) == 2.0
    assert x.grad.shape == [0, H]


def test_a_traced_block_attaches_its_loss_between_two_programs():
    traced, plain = paddle.jit.to_static(WithLoss(True), full_graph=False), WithLoss(True)
    for num_tokens in (5, 5, 9):
        for block in (traced, plain):
            block(batch(num_tokens)).square().mean().backward()
        for name, each in gradients(plain).items():
            np.testing.assert_allclose(each, gradients(traced)[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_second_backward_pass_through_an_attached_loss_is_refused():
    loss = paddle.zeros([])
    loss.stop_gradient = False
    out = attach_loss(batch(2), loss)
    out.sum().backward(retain_graph=True)
    with pytest.raises(OSError, match=r"attach_loss: backward\(\) has used this graph"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0, paddle.zeros([])), TypeError, "x must be a paddle.Tensor, but got float"),
        ((paddle.zeros([2], "int32"), paddle.zeros([])), TypeError, f"x must be {FLOATS}, but got int32"),
        ((paddle.zeros([2]), paddle.zeros([], "int64")), TypeError, f"loss must be {FLOATS}, but got int64"),
        ((paddle.zeros([2]), 1.0), TypeError, "loss must be a paddle.Tensor, but got float"),
        ((paddle.zeros([2]), paddle.zeros([2])), ValueError, "loss must be a scalar, but got one of shape [2]"),
        ((paddle.zeros([2]), paddle.zeros([]), 2.0), TypeError, "scaler must be a GradScaler or None, but got float"),
    ],
    ids=["x", "ints", "loss of ints", "loss", "vector", "scaler"],
)
def test_bad_arguments_of_attached_losses(arguments, error, message):
    with pytest.raises(error, match=re.escape(f"attach_loss: {message}")):
        attach_loss(*arguments)
