# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A model with experts is trained under paddle.jit.to_static, saved, and served in batches of another size."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_moe_ops import moe_mlp, route
from tests.ops.problems import tensor
from tests.static.modes import predictor_of

pytestmark = [
    pytest.mark.usefixtures("place"),
    # Paddle's remark about its own full_like.
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface"),
]

D, INNER, E, K = 32, 24, 6, 2  # sizes that the kernels for Hopper take


class Model(paddle.nn.Layer):
    """A router and experts with a residual connection; the experts may be narrower than inputs and outputs."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        normal = paddle.nn.initializer.Normal(0.0, D**-0.5)
        self.router = self.create_parameter([D, E], default_initializer=normal)
        self.gate_up = self.create_parameter([E, D, 2 * INNER], default_initializer=normal)
        self.down = self.create_parameter([E, INNER, D], default_initializer=normal)
        self.dtype = dtype

    def forward(self, x):
        probs, ids = paddle.topk(paddle.nn.functional.softmax(paddle.matmul(x, self.router)), K)
        plan = route(ids, probs, num_experts=E)
        matrices = (each.astype(self.dtype) for each in (self.gate_up, self.down))
        return x + moe_mlp(x.astype(self.dtype), plan, probs, *matrices).astype("float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_trained_as_a_program_serves_batches_of_other_sizes(dtype, rng, place, tmp_path):
    paddle.seed(3)
    model = Model(dtype)
    traced = paddle.jit.to_static(model, input_spec=[InputSpec([None, D], "float32", "x")], full_graph=True)
    optimizer = paddle.optimizer.Adam(1e-2, parameters=model.parameters())
    teacher = rng.standard_normal((D, D)).astype(np.float32) / 8
    first = {each.name: each.numpy() for each in model.parameters()}
    losses = []
    for step in range(40):
        x = rng.standard_normal((64 if step % 2 else 17, D)).astype(np.float32)
        loss = ((traced(tensor(x, place)) - tensor(x + np.tanh(x @ teacher), place)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:8])
    assert all((each.numpy() != first[each.name]).any() for each in model.parameters())

    model.eval()
    paddle.jit.save(traced, str(tmp_path / "model"))
    loaded, predictor = paddle.jit.load(str(tmp_path / "model")), predictor_of(str(tmp_path / "model"))
    own = Model(dtype)
    own.set_state_dict(model.state_dict())
    limit = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    for tokens in (1, 5, 200):
        x = rng.standard_normal((tokens, D)).astype(np.float32)
        expected = own(tensor(x, place)).numpy()
        assert np.linalg.norm(loaded(tensor(x, place)).numpy() - expected) <= limit * np.linalg.norm(expected)
        predictor.get_input_handle("x").copy_from_cpu(x)
        predictor.run()
        served = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
        assert np.linalg.norm(served - expected) <= limit * np.linalg.norm(expected)
