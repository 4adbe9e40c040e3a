# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""An MoE block of ERNIE 4.5, written on paddle.incubate as its users write it, with patch_paddle on any device.

Outputs, gradients and training equal those of a dense formulation, in which every expert sees every token.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import _C_ops, nn
from paddle.autograd import PyLayer
from paddle.incubate.nn.functional import (
    cal_aux_loss,
    expand_modality_expert_id,
    int_bincount,
    moe_combine,
    moe_combine_no_weight,
    moe_gate_dispatch,
    moe_gate_dispatch_partial_nosoftmaxtopk,
    moe_gate_dispatch_permute,
)

from paddle_moe_ops import patched_paddle
from tests.ops.problems import tensor

T, H, INNER, E, K = 45, 12, 10, 6, 2
AUX_WEIGHT = 0.1


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle(("incubate",)):
        yield


class GateCombine(PyLayer):
    """The combine with a backward pass by hand, which Paddle's own operator needs."""

    @staticmethod
    def forward(ctx, x, combine_weights, scatter_index):
        ctx.arguments = x, combine_weights, scatter_index
        return moe_combine(x, combine_weights, scatter_index)

    @staticmethod
    def backward(ctx, grad_y):
        grad_x, products = _C_ops.moe_combine_grad(*ctx.arguments, grad_y)
        return grad_x, products.sum(-1).reshape(ctx.arguments[1].shape), None


class Block(nn.Layer):
    """A router and SwiGLU experts; what subclasses add is how tokens come to the experts and back."""

    def __init__(self, capacity: int, has_bias: bool) -> None:
        super().__init__()
        self.gate = self.create_parameter([H, E])
        self.up_gate = nn.LayerList(nn.Linear(H, 2 * INNER, bias_attr=False) for _ in range(E))
        self.down = nn.LayerList(nn.Linear(INNER, H, bias_attr=False) for _ in range(E))
        self.capacity = capacity
        bias = paddle.arange(E, dtype="float32") / 8 if has_bias else None
        self.register_buffer("bias", bias)

    def expert(self, number, rows):
        gate, up = self.up_gate[number](rows).chunk(2, axis=-1)
        return self.down[number](F.silu(gate) * up)

    def probabilities(self, x):
        return F.softmax(paddle.matmul(x, self.gate), axis=-1)

    def aux_loss(self, probs, counts):
        loss, _, _ = cal_aux_loss(probs, counts, None, None, E, False, K, clip_min=1e-6)
        return loss

    def normalised(self, weights):
        return weights / paddle.clip(weights.sum(-1, keepdim=True), min=1e-12)


class Padded(Block):
    """All experts have the same number of rows, as for an all-to-all."""

    def forward(self, x):
        probs = self.probabilities(x)
        rows, weights, index, ends, _ = moe_gate_dispatch(
            x, probs, self.bias, k=K, capacity=self.capacity, use_pad=True
        )
        rows.stop_gradient = False
        counts = paddle.diff(F.pad(ends, (1, 0)))
        chunks = rows.reshape([E, -1, H]).unbind(0)
        out = paddle.concat([self.expert(number, chunk) for number, chunk in enumerate(chunks)])
        mixed = GateCombine.apply(out, self.normalised(weights), index.transpose([1, 0]))
        return mixed, self.aux_loss(probs, counts)


class InChunksOfRanks(Block):
    """The padded rows by local expert and rank, weighted by the experts before they are sent back."""

    RANKS = 2

    def forward(self, x):
        probs = self.probabilities(x)
        rows, weights, index, ends, _ = moe_gate_dispatch_permute(
            x, probs, self.bias, k=K, capacity=self.capacity, world_size=self.RANKS
        )
        local = E // self.RANKS
        out = paddle.stack(
            [
                self.expert(rank * local + number, rows[number, rank])
                for rank in range(self.RANKS)
                for number in range(local)
            ]
        ).reshape([-1, H])
        normalised, index = self.normalised(weights), index.transpose([1, 0])
        # Each row gets the weight of its slot; rows of no slot are not read.
        of_rows = paddle.scatter_nd_add(paddle.zeros([out.shape[0]]), index.reshape([-1, 1]), normalised.flatten())
        mixed = moe_combine_no_weight(out * of_rows.unsqueeze(-1), normalised, index)
        return mixed, self.aux_loss(probs, paddle.diff(F.pad(ends, (1, 0))))


class Unpadded(Block):
    """Experts have as many rows as they have tokens; two ranks have half of them each."""

    RANKS = 2
    REVERSE = False

    def forward(self, x):
        probs = self.probabilities(x)
        chosen_by = probs if self.bias is None else probs + self.bias
        _, ids = chosen_by.topk(k=K, axis=-1)
        weights = paddle.take_along_axis(probs, ids, axis=-1)
        ids = expand_modality_expert_id(ids, 0, E, 0, is_group_expert=False).cast("int32")
        counts = int_bincount(ids.reshape([-1]), 0, E, paddle.int64)
        parts = [self.rank(rank, x, weights, ids) for rank in range(self.RANKS)]
        kept = paddle.add_n([part[1] for part in parts])
        starts = np.cumsum([0] + [part[0].shape[0] for part in parts])
        index = paddle.add_n(
            [(part[2] + int(start)) * (part[1] > 0).astype("int32") for part, start in zip(parts, starts, strict=False)]
        )
        mixed = GateCombine.apply(paddle.concat([part[0] for part in parts]), self.normalised(kept), index)
        return mixed, self.aux_loss(probs, counts)

    def rank(self, rank, x, weights, ids):
        """The rows of one rank's experts after them, and weights and rows by slot."""
        local = E // self.RANKS
        rows, kept, index, tokens, _, counts = moe_gate_dispatch_partial_nosoftmaxtopk(
            x,
            weights,
            ids,
            K,
            self.capacity,
            E,
            False,
            expert_start_index=rank * local,
            expert_end_index=(rank + 1) * local,
            reverse_token_drop=self.REVERSE,
        )
        assert tokens.ndim == 1
        counts = counts.tolist()[rank * local : (rank + 1) * local]
        chunks = iter(rows.split([count for count in counts if count]))
        out = [self.expert(rank * local + number, next(chunks)) for number, count in enumerate(counts) if count]
        return paddle.concat(out), kept, index.transpose([1, 0])


class LastTokensKept(Unpadded):
    """An expert without room drops its first tokens instead of its last."""

    REVERSE = True


def kept_slots(ids, capacity, reverse):
    """bool [T, K]: the slots that find room in their expert, in NumPy."""
    kept = np.zeros(ids.shape, np.bool_)
    for expert in range(E):
        slot, token = np.nonzero(expert == ids.T)
        chosen = slice(max(len(slot) - capacity, 0), None) if reverse else slice(capacity)
        kept[token[chosen], slot[chosen]] = True
    return kept


def dense(block, x):
    """The same layer without moving a row."""
    probs = block.probabilities(x)
    biased = (probs if block.bias is None else probs + block.bias).numpy()
    ids = np.argsort(-biased, axis=1, kind="stable")[:, :K]
    kept = tensor(kept_slots(ids, block.capacity, getattr(block, "REVERSE", False)).astype(np.float32), x.place)
    chosen = tensor(np.eye(E, dtype=np.float32)[ids], x.place)  # [T, K, E]
    weights = block.normalised((chosen * probs.unsqueeze(1)).sum(-1) * kept)
    every = paddle.stack([block.expert(number, x) for number in range(E)], axis=1)
    out = ((weights.unsqueeze(-1) * chosen).sum(1).unsqueeze(-1) * every).sum(1)
    share = chosen.sum(axis=[0, 1]) / T
    return out, (share * probs.mean(axis=0)).sum() * E


def losses(block, forward, steps, x, target):
    """The losses of some steps of training."""
    optimizer = paddle.optimizer.SGD(1.0, parameters=block.parameters())  # an expert without tokens stays as it is
    found = []
    for _ in range(steps):
        out, aux = forward(x)
        loss = F.mse_loss(out, target) + AUX_WEIGHT * aux
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        found.append(float(loss))
    return found


BLOCKS = [Padded, InChunksOfRanks, Unpadded, LastTokensKept]
CAPACITIES = {T: "no slot is dropped", 11: "slots are dropped"}


def problem(rng, place):
    """Tokens, and target outputs of the layer."""
    x = rng.standard_normal((T, H)).astype(np.float32)
    return tensor(x, place), tensor(np.tanh(x[:, ::-1]).copy(), place)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("capacity", CAPACITIES, ids=CAPACITIES.values())
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda each: each.__name__)
def test_gradients_are_those_of_the_dense_formulation(kind, capacity, has_bias, rng, place, backend):
    paddle.seed(7)
    block, (x, target) = kind(capacity, has_bias), problem(rng, place)
    results = []
    for forward in (block, lambda x: dense(block, x)):
        x.stop_gradient = False
        out, aux = forward(x)
        (F.mse_loss(out, target, reduction="sum") + AUX_WEIGHT * aux).backward()
        # An expert without tokens has no gradient where it is not called.
        gradients = [np.zeros(each.shape) if each.grad is None else each.grad.numpy() for each in block.parameters()]
        results.append([out.numpy(), aux.numpy(), x.grad.numpy(), *gradients])
        block.clear_gradients()
        x.clear_gradient()
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda each: each.__name__)
def test_training_goes_as_that_of_the_dense_formulation(kind, rng, place):
    x, target = problem(rng, place)
    found = []
    for is_dense in (False, True):
        paddle.seed(3)
        block = kind(12, True)  # of 15 slots per expert on average
        found.append(losses(block, (lambda x, block=block: dense(block, x)) if is_dense else block, 20, x, target))
    # A choice that is nearly tied may go the other way in the end.
    np.testing.assert_allclose(found[0][:8], found[1][:8], rtol=1e-4)
    assert found[0][-1] < 0.8 * found[0][0]
