# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models of dense layers and layers of experts, whole or as the layers of a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import make_replicated_sharded_weight, shard_weight

from paddle_moe_ops.nn import MoELayer

from .test_expert_parallel_layer import HIDDEN, SIZES

ROWS = 5  # of a micro-batch


class Block(nn.Layer):
    """A dense layer and a layer of experts, whose output is that of the stage."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.dense, self.moe = nn.Linear(HIDDEN, HIDDEN), MoELayer(*SIZES, group=group)

    def forward(self, x: Any) -> paddle.Tensor:
        return self.moe(x + self.dense(x))


class Residual(Block):
    """A block for deep models."""

    def forward(self, x: Any) -> paddle.Tensor:
        x = x[0] if isinstance(x, list) else x  # as DualPipeV passes it
        x = x + self.dense(x)
        return x + self.moe(nn.functional.layer_norm(x, HIDDEN))


class Deferred(Residual):
    """A block whose gradients of matrices Fleet's zero-bubble schedules compute later."""

    def __init__(self, group: Any = None) -> None:
        super().__init__(group)
        self.moe = MoELayer(*SIZES, group=group, defer_dw="fleet")


class Narrow(Block):
    """A block with experts in bfloat16."""

    def __init__(self, group: Any = None) -> None:
        super().__init__(group)
        self.moe.to(dtype="bfloat16")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dense(x)
        return x + self.moe(x.astype("bfloat16")).astype("float32")


class Recomputed(Block):
    """A block whose experts run again in the backward pass."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dense(x)
        return x + recompute(self.moe, x)


class Balanced(Block):
    """A block that adds its loss of balance to those of the blocks before it."""

    def forward(self, x: Any) -> Any:
        x, losses = x if isinstance(x, tuple) else (x, None)
        out = super().forward(x)
        loss = self.moe.aux_loss.reshape([1])
        return out, loss if losses is None else losses + loss


class Copied(PyLayer):
    """The identity, whose gradient is the sum of those of the model parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d_out: paddle.Tensor) -> paddle.Tensor:
        total = d_out.clone()
        paddle.distributed.all_reduce(total, group=ctx.group)
        return total


class Summed(PyLayer):
    """The sum over the model parallel ranks, whose gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        total = x.clone()
        paddle.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, d_out: paddle.Tensor) -> paddle.Tensor:
        return d_out.clone()


class Joined(PyLayer):
    """The columns of all model parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group, columns = group, []
        paddle.distributed.all_gather(columns, x, group=group)
        return paddle.concat(columns, -1)

    @staticmethod
    def backward(ctx: Any, d_out: paddle.Tensor) -> paddle.Tensor:
        return d_out.chunk(ctx.group.nranks, -1)[ctx.group.rank].clone()


class Columns(nn.Layer):
    """A dense layer whose columns are divided between the ranks of a group, as those of tensor parallelism."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        ranks, rank = (group.nranks, group.rank) if group is not None else (1, 0)
        weight = np.random.default_rng(5).standard_normal([HIDDEN, HIDDEN]).astype(np.float32) / 3
        part = np.ascontiguousarray(np.split(weight, ranks, 1)[rank])
        self.columns = self.create_parameter(list(part.shape), default_initializer=nn.initializer.Assign(part))
        self.columns.is_distributed, self.group = ranks > 1, group

    def sharded_state_dict(self, structured_name_prefix: str = "") -> dict[str, Any]:
        name = f"{structured_name_prefix}columns"
        if self.group is None:
            return {name: make_replicated_sharded_weight(name, self.columns)}
        return {name: shard_weight(name, self.columns, 1, self.group)}

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.group is None:
            return x @ self.columns
        return Joined.apply(Copied.apply(x, self.group) @ self.columns, self.group)


class Split(Block):
    """A block whose ranks have a part of each expert: that of some of its inner columns."""

    def __init__(self, group: Any = None, model: Any = None) -> None:
        super().__init__()
        hidden, inner, experts, topk = SIZES
        self.model = model
        inner //= 1 if model is None else model.nranks
        self.moe = MoELayer(hidden, inner, experts, topk, num_shared_experts=0, group=group)
        for each in self.moe.experts.parameters() if model is not None else ():
            each.is_distributed = True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dense(x)
        if self.model is None:
            return self.moe(x)
        return Summed.apply(self.moe(Copied.apply(x, self.model)), self.model)


class OfFirst(nn.Layer):
    """A layer that leaves the losses of balance as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.dense(x[0]), x[1]


def turned(layer: nn.Linear, x: paddle.Tensor) -> paddle.Tensor:
    return x @ layer.weight.T


KINDS = {
    "residual": Residual,
    "deferred": Deferred,
    "narrow": Narrow,
    "recomputed": Recomputed,
    "balanced": Balanced,
    "split": Split,
}


class Nested(nn.Sequential):
    """A dense layer whose names have two numbers, as those of chunks of a pipeline."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, HIDDEN))


def parts(group: Any, kind: str = "plain", blocks: int = 2, model: Any = None) -> list[Any]:
    """The layers of a model, as those of a pipeline.

    Args:
        group: shares the experts.
        kind: of `KINDS`, "plain", "late" with experts in the last stage alone, "tied" with one matrix in two stages, or
            "columns" with a dense layer whose columns are divided.
        blocks: layers of experts.
        model: the ranks that divide columns.
    """
    made = [LayerDesc(KINDS.get(kind, Block), group, *[model] * (kind == "split")) for _ in range(blocks)]
    if kind in ("residual", "deferred"):
        return made
    first, last = LayerDesc(Nested), LayerDesc(nn.Linear, HIDDEN, HIDDEN)
    if kind == "balanced":
        last = LayerDesc(OfFirst)
    if kind == "late":
        made[0] = LayerDesc(nn.Linear, HIDDEN, HIDDEN)
    if kind == "columns":
        first = LayerDesc(Columns, model)
    if kind == "tied":
        first, last = (
            SharedLayerDesc("tied", nn.Linear, each, "weight", HIDDEN, HIDDEN, bias_attr=False)
            for each in (None, turned)
        )
    return [first, *made, last]


class Whole(nn.Layer):
    """The layers of a pipeline in one process, under the names that they have there."""

    def __init__(self, made: list[Any]) -> None:
        super().__init__()
        self.shared_layers, self.calls = nn.LayerDict(), []
        for number, each in enumerate(made):
            if not isinstance(each, SharedLayerDesc):
                self.calls.append(self.add_sublayer(str(number), each.build_layer()))
                continue
            if each.layer_name not in self.shared_layers:
                self.shared_layers[each.layer_name] = each.build_layer()
            layer = self.shared_layers[each.layer_name]
            self.calls.append(functools.partial(each.forward_func, layer) if each.forward_func else layer)

    def forward(self, x: Any) -> Any:
        for each in self.calls:
            x = each(x)
        return x


def mean_square(out: Any, y: paddle.Tensor) -> paddle.Tensor:
    """This rank's part of the mean over a micro-batch, with the losses of balance if there are any."""
    out, losses = out if isinstance(out, tuple) else (out, None)
    out = out[0] if isinstance(out, list) else out
    loss = (out - y).square().sum() / (ROWS * HIDDEN)
    return loss if losses is None else loss + 0.1 * losses.sum()
