# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model and of its optimizer on this rank, with their places in the tensors of one process."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from paddle.optimizer.lr import LRScheduler

from .. import _checks
from .blocks import Block, blocks_of, whole_box
from .fully_sharded import slice_of
from .optimizers import Entry, entries_of, is_power
from .parameters import pieces_of, sharded_state_in_pieces

__all__ = ["OptimizerStates", "Shard", "shards_of_model"]

_MASTER = re.compile(r"_fp32_master_\d+")
_COUNT = re.compile(r"_\d+$")
_OF_CHUNK = re.compile(r"(\d+)\.(\d+)\.(.+)")
_TIED = "shared_layers."  # where a pipeline has layers of several stages


class Shard(NamedTuple):
    """A tensor of this rank.

    Attributes:
        tensor: its values.
        shape: of the global tensor.
        blocks: the places of the values in the global tensor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    blocks: list[Block]


def shards_of_model(layer: nn.Layer) -> dict[str, Shard]:
    """Return the tensors of a model, by their names in one process."""
    return {name: _shard_of(each) for name, each in _weights_of(layer).items()}


def _shard_of(weight: ShardedWeight) -> Shard:
    part = slice_of(weight.local_tensor)
    if part is not None:
        blocks = blocks_of(pieces_of(weight), tuple(weight.local_shape), (part.first, part.end))
        return Shard(part.values, tuple(weight.global_shape), blocks)
    blocks = blocks_of(pieces_of(weight), weight.local_shape)
    return Shard(weight.local_tensor, tuple(weight.global_shape), blocks)


def _weights_of(layer: nn.Layer) -> dict[str, ShardedWeight]:
    """Return the weights of a model; layers in chunks of a `PipelineLayer` have the numbers of one chunk."""
    weights = sharded_state_in_pieces(layer)
    if not getattr(layer, "_model_chunks", None):
        return weights
    tied = {each.local_tensor.name for name, each in weights.items() if name.startswith(_TIED)}
    named = {}
    for name, each in weights.items():
        of_chunk = _OF_CHUNK.fullmatch(name)
        if of_chunk is None:
            named[name] = each
        elif each.local_tensor.name not in tied:
            start, number, rest = of_chunk.groups()
            named[f"{int(start) + int(number)}.{rest}"] = each
    return named


class OptimizerStates:
    """The states of an optimizer on this rank.

    Args:
        function: name that begins the messages.
        optimizer: one of `paddle.optimizer`, or a wrapper by Fleet, `distributed_optimizer` or
            `group_sharded_parallel`.
        layer: the model with the optimizer's parameters.

    Raises:
        TypeError: it is no optimizer.

    Attributes:
        scheduler: of the learning rate, or None.
    """

    def __init__(self, function: str, optimizer: Any, layer: nn.Layer) -> None:
        self._function, self._ranges = function, {}
        sharding: Any = None
        self._others: set[str] = set()  # names of parameters that another rank of stage 2 updates
        while isinstance(optimizer, GroupShardedOptimizerStage2) or "_inner_opt" in getattr(optimizer, "__dict__", {}):
            if isinstance(optimizer, GroupShardedOptimizerStage2):
                self._others = {name for name, rank in optimizer.param2rank.items() if rank != optimizer._rank}
                optimizer = optimizer._optim
                continue
            if isinstance(optimizer, DygraphShardingOptimizerV2):
                sharding = optimizer
            optimizer = optimizer._inner_opt
        _checks.instance(
            function, "optimizer", optimizer, paddle.optimizer.Optimizer, "an optimizer of Paddle or Fleet"
        )
        self._optimizer = optimizer
        rate = optimizer._learning_rate
        self.scheduler = rate if isinstance(rate, LRScheduler) else None
        self._weights = _weights_of(layer)
        self._keys: dict[str, str] = {}  # by .name; tied parameters have the states of the first key
        for key in sorted(self._weights):
            parameter = self._weights[key].local_tensor
            part = slice_of(parameter)
            self._keys.setdefault(parameter.name if part is None else part.name, key)
            if part is not None:
                self._ranges[part.name] = (part.first, part.end)
        for name, view in _views_of(sharding):
            first, count = view._param_begin - view._index, view._param_end - view._param_begin
            end = min(first + count, view._param._numel())
            self._ranges[name] = (int(first), int(max(first, end)))
            if count > 0:
                view.fill_slice_param(sharding._slice_params[name])

    def create(self, keys: Collection[str]) -> set[str]:
        """Create the states of parameters, which optimizers do in their first step.

        Args:
            keys: names of the model for parameters.

        Returns:
            the names of those that this rank updates.
        """
        parameters: list[Tensor] = []
        for each in self._optimizer._parameter_list or ():
            parameters += each["params"] if isinstance(each, dict) else [each]
        wanted = [each for each in parameters if not each.stop_gradient and self._keys.get(each.name) in keys]
        wanted = [each for each in wanted if not self._is_without_states(each.name)]
        self._optimizer._create_accumulators(paddle.static.default_main_program().global_block(), wanted)
        return {self._keys[each.name] for each in wanted}

    def _is_without_states(self, name: str) -> bool:
        """True if this rank has no element of a parameter, or sharding has other ranks update all of them."""
        if name in self._others:
            return True
        first, end = self._ranges.get(name, (0, self._weights[self._keys[name]].local_tensor.size))
        return first == end

    def shards(self) -> dict[str, dict[str, Shard]]:
        """Return the states of each parameter, by its name of the model and Paddle's name of the state.

        Raises:
            ValueError: a state has neither the shape of its parameter nor one element, or belongs to none.
        """
        state = self._optimizer.state_dict()
        names = {key: name for name, key in self._keys.items()}
        found: dict[str, dict[str, Shard]] = {}
        for entry in entries_of(self._function, "optimizer.state_dict()", state, names, names):
            for name, shard in self._shards_of(entry, names[entry.parameter]):
                found.setdefault(entry.parameter, {})[name] = shard
        return found

    def _shards_of(self, entry: Entry, name: str) -> Iterator[tuple[str, Shard]]:
        """The shard of an entry, or none for one without elements of its parameter."""
        weight, value = self._weights[entry.parameter], entry.value
        elements, local = self._ranges.get(name), tuple(weight.local_shape)
        ending = "_w_0" if entry.is_master else _MASTER.sub("", entry.ending)
        kind = _COUNT.sub("_0", ending.removeprefix("_"))  # Paddle counts the optimizers of a parameter
        if self._is_without_states(name):
            return
        if elements is not None and len(value.shape) == 1 and not is_power(entry):
            yield kind, Shard(value, tuple(weight.global_shape), blocks_of(pieces_of(weight), local, elements))
        elif tuple(value.shape) == local and not is_power(entry):
            yield kind, Shard(value, tuple(weight.global_shape), blocks_of(pieces_of(weight), local))
        elif value.size == 1:
            whole = whole_box(value.shape)
            yield kind, Shard(value, whole.shape, [Block(whole, whole)])
        else:
            expected = f"of shape {list(local)}, as its parameter {entry.parameter!r} is, or one number"
            _checks.bad_value(self._function, entry.label, expected, list(value.shape))


def _views_of(sharding: Any) -> Iterator[tuple[str, Any]]:
    """The views of Fleet's second sharding optimizer of parameters in its buffers, by ``.name``."""
    for buffer in sharding._comm_buffer_list if sharding is not None else ():
        yield from buffer._sharding_param_grad_view.items()
