# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices that all layers of a model keep from one micro-batch to the next."""

from __future__ import annotations

from paddle import nn

from .. import _checks
from ..backends import Float8Matrices
from ..backends.experts import make_default


def set_is_first_microbatch(model: nn.Layer) -> int:
    """Quantise the experts' matrices of a model's layers in their next call, and keep them until this is called again.

    It affects layers whose ``compute`` is ``"fp8_1x128"``, and blocks of PaddleFormers after ``apply(model,
    compute="fp8_1x128")``, which have no argument for it. Call it at the start of each step of the optimizer, and after
    anything else that changes parameters: calls in between use the layers' kept matrices, whatever the values of the
    parameters, so call it before an evaluation as well. Megatron-LM has a function of this name for the layers of
    TransformerEngine::

        for batch in batches:
            set_is_first_microbatch(model)
            for micro_batch in batch:
                loss_of(model(micro_batch)).backward()
            optimizer.step()
            optimizer.clear_grad()

    Calls with ``is_first_microbatch`` do what it says. Programs quantise matrices in each pass. A copy of a model keeps
    nothing until this is called for it. No host synchronisation.

    Args:
        model: any layer.

    Returns:
        the number of layers that keep matrices.

    Raises:
        TypeError: not a `paddle.nn.Layer`.
    """
    _checks.instance("set_is_first_microbatch", "model", model, nn.Layer, "a paddle.nn.Layer")
    attributes = [each for layer in model.sublayers(include_self=True) for each in vars(layer).values()]
    keeping = [each for each in attributes if isinstance(each, Float8Matrices)]
    for each in keeping:
        make_default(each)
    return len(keeping)
