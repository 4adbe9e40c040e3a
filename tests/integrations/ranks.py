# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Programs for each of two processes: models of PaddleFormers whose experts are spread over them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import nn

from tests.distributed.fleets import start_fleet

from . import stubs

stubs.install()

import paddle_moe_ops.integrations.paddleformers as pf  # noqa: E402

from . import deep_ep, kernels  # noqa: E402
from .models import batch, build, loss_of, type_of  # noqa: E402

LENGTHS = 17, 6  # of the sequence that a rank trains on


def prepare() -> None:
    """Create Fleet's expert-parallel group, and install DeepEP's stand-in for PaddleFormers."""
    start_fleet(sharding_degree=2, moe_sharding_degree=1, ep_degree=2)
    deep_ep.install()  # without DeepEP PaddleFormers builds no model


def built(case: str, state: dict[str, NDArray], **changes: Any) -> Any:
    """The model of this rank, with its part of a whole state."""
    prepare()
    model = build(case, **changes)
    missing, _ = model.set_state_dict({name: paddle.to_tensor(value) for name, value in state.items()})
    assert missing == []
    return model


def part(rank: int) -> tuple[paddle.Tensor, float]:
    """A rank's sequence, and the share of its predictions in all."""
    lengths = np.array(LENGTHS) - 1
    return batch(rank, (1, LENGTHS[rank])), lengths[rank] / lengths.sum()


def block_name(case: str, **changes: Any) -> tuple[str, list[bool]]:
    """The class of a block, and which experts it has."""
    prepare()
    block = build(case, **changes).model.layers[1].mlp
    there = [each is not None for each in block.experts] if isinstance(block.experts, nn.LayerList) else []
    return type(block).__name__, there


class Trained(NamedTuple):
    """The results of a rank for its sequence.

    Attributes:
        steps: the loss and the gradients of each step.
        patched: what was patched.
        usage: the counts of the experts of the first block that keeps them.
    """

    steps: list[tuple[float, dict[str, NDArray]]]
    patched: tuple[str, ...]
    usage: NDArray | None


def trained(
    case: str,
    state: dict[str, NDArray],
    patch: str = "class",
    steps: int = 1,
    hooks: bool = False,
    evaluates: bool = False,
    **changes: Any,
) -> Trained:
    """Train a model by plain gradient descent.

    Args:
        case: of `models.CASES`.
        state: of a model in one process.
        patch: "class", "model" or "nothing".
        steps: how many.
        hooks: whether an expert of each block has a hook, so that experts are called.
        evaluates: whether the model is in evaluation mode, with gradients.
        **changes: settings.
    """
    model = built(case, state, **changes)
    if evaluates:
        model.eval()
    if hooks:
        for layer in model.model.layers[1:]:
            own = [each for each in layer.mlp.experts if each is not None]
            own[0].register_forward_post_hook(lambda *_: None)
    tokens, share = part(paddle.distributed.get_rank())
    found: list[tuple[float, dict[str, NDArray]]] = []
    what = {"class": type_of(case), "model": model}
    patched: Any = pf.applied(what[patch]) if patch in what else contextlib.nullcontext()
    with patched as report:
        for step in range(steps):
            if step:
                descend(model)
            loss = loss_of(model, tokens) * share
            loss.backward()
            gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
            found.append((float(loss), gradients))
    counted = [
        layer.moe_statics.expert_usage[0].numpy() for layer in model.sublayers() if hasattr(layer, "moe_statics")
    ]
    return Trained(found, report.patched if report else (), counted[0] if counted else None)


def descend(model: Any) -> None:
    """A step of gradient descent. With ranks by the gradients for all tokens, which are what those of experts are."""
    with paddle.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                if paddle.distributed.is_initialized() and not getattr(parameter, "expert", False):
                    paddle.distributed.all_reduce(parameter.grad)
                parameter.set_value(parameter - 0.5 * parameter.grad)
    model.clear_gradients(set_to_zero=False)


def logits(case: str, state: dict[str, NDArray], **changes: Any) -> NDArray:
    """Logits of a model in evaluation mode for this rank's sequence."""
    model = built(case, state, **changes)
    model.eval()
    with pf.applied(model), paddle.no_grad():
        return model(input_ids=part(paddle.distributed.get_rank())[0], return_dict=True).logits.numpy()


def answer_to(case: str, setting: str, value: Any, **changes: Any) -> str:
    """The message of the error that a model gives, one of whose blocks has a setting; "" if it gives none."""
    prepare()
    model = build(case, **changes)
    block = model.model.layers[2].mlp
    if hasattr(block, "config"):
        block.config = copy.deepcopy(block.config)
    for holder in (block, block.gate, getattr(block, "config", block)):
        if hasattr(holder, setting):
            setattr(holder, setting, value)
    try:
        pf.apply(model)
    except ValueError as error:
        assert not {"forward", "_forward_with_ep_parallel"} & set(vars(model.model.layers[1].mlp))
        return str(error)
    return ""


def block_of_ernie(state: dict[str, NDArray], tokens: list[NDArray], **changes: Any) -> tuple[Any, Any, Any]:
    """A block's results and gradients; the router's loss and its gradient by PaddleFormers' method; the counts."""
    block = built("ernie4_5_moe", state, moe_group="world", **changes).model.layers[1].mlp
    x = paddle.to_tensor(tokens[paddle.distributed.get_rank()], stop_gradient=False)
    with pf.applied(block):
        out, weights, loss, logits = block(x)
    loss.sum().backward(retain_graph=True)
    own_loss = loss.detach().numpy(), block.gate.weight.grad.numpy()
    block.clear_gradients(set_to_zero=False)
    x.clear_gradient()
    (out * out).sum().backward()
    found = {name: p.grad.numpy() for name, p in block.named_parameters() if p.grad is not None}
    found |= {"out": out.detach().numpy(), "weights": weights.numpy(), "x": x.grad.numpy()}
    # PaddleFormers' dispatch would give its method the numbers of all tokens.
    scores = block.gate.act(logits.detach())
    bias = block.moe_statics.e_score_correction_bias[0] if block.use_correction_bias else 0.0
    counts = paddle.bincount((scores + bias).topk(block.k)[1].flatten(), minlength=len(block.experts))
    paddle.distributed.all_reduce(counts)
    block.clear_gradients(set_to_zero=False)
    with pytest.MonkeyPatch.context() as patch:
        kernels.install(patch)
        all_reduce = paddle.distributed.stream.all_reduce  # which gloo has on no stream
        patch.setattr(paddle.distributed.stream, "all_reduce", lambda each, **_: all_reduce(each))
        again = block.gate(x.detach().reshape([-1, x.shape[-1]]))[0]
        theirs = block.calc_router_loss_and_logging(
            paddle.zeros([1]), again, block.gate.act(again), None, None, None, counts, None, None
        )
        theirs.sum().backward()
    usage = block.moe_statics.expert_usage[0].numpy() if block.use_correction_bias else None
    return found, (own_loss, (theirs.detach().numpy(), block.gate.weight.grad.numpy())), (usage, counts.numpy())
