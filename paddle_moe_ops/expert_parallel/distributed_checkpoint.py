# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that each rank writes a part of, and that any grid of ranks loads: Paddle's flex checkpoints."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn
from paddle.distributed.communication.group import Group

from .. import _checks
from .._graphs import without_gradients
from .agreement import group_of, raising_together
from .blocks import Block, Box, cover, part_of, whole_box
from .checkpoint import without_wrapper
from .shards import OptimizerStates, Shard, shards_of_model
from .tensor_files import (
    DTYPES,
    ENDING,
    INDEX,
    StoredBlock,
    StoredTensor,
    index_of,
    open_tensors,
    read_index,
    write_tensors,
)

__all__ = ["Saving", "load_checkpoint", "save_checkpoint"]

_SCHEDULER = "learning_rate.pdopt"
_SAVE, _LOAD = "save_checkpoint", "load_checkpoint"


class Saving:
    """A checkpoint that `save_checkpoint` writes, maybe while training continues.

    Examples:
        >>> import tempfile
        >>> from paddle_moe_ops.expert_parallel import save_checkpoint
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> saving = save_checkpoint(tempfile.mkdtemp(), model, async_save=True)
        >>> saving.wait()
    """

    def __init__(self, write: Callable[[], None], is_async: bool) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name=_SAVE) if is_async else None
        if self._thread is None:
            write()
        else:
            self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._error = error
            raise  # Python prints it, in case nobody waits

    def is_done(self) -> bool:
        """Return True if the files of this rank are complete, or writing them failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the files of this rank are complete.

        Raises:
            OSError: a file could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


class _Described(NamedTuple):
    """The blocks of a tensor on one rank: Paddle's name of its dtype, its global shape, and the boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[Box]


@without_gradients
def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Layer, optimizer: Any = None, *, async_save: bool = False
) -> Saving:
    """Write a model and its optimizer to a folder, from which any other grid of ranks continues. All ranks call it.

    Each tensor is written once, in parts by the ranks that have them. A rank has one block in host memory at a time,
    and with ``async_save`` a copy of the blocks that it writes. Not differentiable; the host waits for the other ranks.

    The format is Paddle's: ``paddle.distributed.load_state_dict(..., safetensors=True)`` reads it, too.

    Args:
        path: a folder that all ranks see, without a checkpoint; it is created.
        model: the model, or its wrapper by `paddle.DataParallel` or ``fleet.distributed_model``. Ranks may divide it by
            stages of a pipeline, by experts in any placement, by columns of experts (``is_distributed``), and by layers
            of Fleet's tensor parallelism.
        optimizer: of `paddle.optimizer`, `distributed_optimizer`, `group_sharded_parallel` or Fleet. Its states, master
            weights and the state of the learning rate's scheduler are written. None: the model alone.
        async_save: whether to return before the files are complete. The values are those of the call.

    Returns:
        the running save; its ``wait()`` returns when this rank's files are complete.

    Raises:
        TypeError: the model is not a layer, the optimizer not an optimizer, ``path`` not a path, or ``async_save`` not
            a bool; a tensor has another dtype than checkpoints support.
        ValueError: the folder has a checkpoint; ranks describe a tensor differently, or parts of it are on no rank; a
            state of the optimizer has another shape than its parameter.
        RuntimeError: another rank raised one of these.
        OSError: a file could not be written.

    Examples:
        >>> import paddle, tempfile
        >>> from paddle_moe_ops.expert_parallel import load_checkpoint, save_checkpoint
        >>> from paddle_moe_ops.nn import MoELayer
        >>> model = MoELayer(64, 32, num_experts=8, topk=2)  # with ranks: group=group
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> model(paddle.randn([16, 64])).square().mean().backward()
        >>> optimizer.step()
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, model, optimizer).wait()
        >>> load_checkpoint(folder, model, optimizer)  # later, on other ranks
    """
    everyone = group_of(_SAVE, None)
    with raising_together(_SAVE, everyone):
        folder = _folder_of(_SAVE, path)
        is_async = _checks.flag(_SAVE, "async_save", async_save)
        if folder.is_dir() and any(folder.glob("*.metadata")):
            _checks.bad_value(_SAVE, "path", "a folder without a checkpoint", repr(str(folder)))
        shards, states = _shards(_SAVE, model, optimizer)
        for name, each in shards.items():
            if _checks.dtype_name(each.tensor.dtype) not in DTYPES:
                _checks.bad_type(_SAVE, f"{name!r}", f"of dtype {', '.join(DTYPES)}", each.tensor.dtype)
    stored = _stored(shards, everyone)
    with raising_together(_SAVE, everyone):
        folder.mkdir(parents=True, exist_ok=True)
        write = _writer(folder, shards, states, stored, everyone, is_async)
        saving = Saving(write, is_async)
    return saving


def _folder_of(function: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        _checks.bad_type(function, "path", "a path of a folder", type(path).__name__)
    return Path(path)


def _shards(function: str, model: Any, optimizer: Any) -> tuple[dict[str, Shard], OptimizerStates | None]:
    """Return all tensors of this rank, and the optimizer's states."""
    with _checks.renaming(function, function, layer="model"):
        layer = without_wrapper(function, model)
    shards = shards_of_model(layer)
    if optimizer is None:
        return shards, None
    states = OptimizerStates(function, optimizer, layer)
    for parameter, found in states.shards().items():
        shards |= {f"{parameter}.{kind}": each for kind, each in found.items()}
    return shards, states


def _stored(shards: Mapping[str, Shard], everyone: Group) -> dict[str, StoredTensor]:
    """Return all tensors of the checkpoint, each block of them on the rank with the fewest bytes that has it."""
    own = {
        name: _Described(_checks.dtype_name(each.tensor.dtype), each.shape, [block.box for block in each.blocks])
        for name, each in shards.items()
    }
    of_ranks: list[dict[str, _Described]] = [own]
    if everyone.nranks > 1:
        of_ranks.clear()
        paddle.distributed.all_gather_object(of_ranks, own, group=everyone)
    holders: dict[str, dict[Box, list[int]]] = {}
    described: dict[str, tuple[int, _Described]] = {}
    for rank, each in enumerate(of_ranks):
        for name, (dtype, shape, boxes) in each.items():
            first, other = described.setdefault(name, (rank, each[name]))
            if other[:2] != (dtype, shape):
                given = f"{other.dtype} {list(other.shape)} on rank {everyone.ranks[first]}, "
                given += f"{dtype} {list(shape)} on rank {everyone.ranks[rank]}"
                _checks.bad_value(_SAVE, repr(name), "of one dtype and global shape on all ranks", given)
            for box in boxes:
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    written, found = [0] * len(of_ranks), {}
    for name, (_, (dtype, shape, _)) in sorted(described.items()):
        blocks, counts = [], [0] * len(of_ranks)
        parts, is_whole = cover(whole_box(shape), holders.get(name, {}))
        if not is_whole:
            given = f"{sum(box.size for _, box in parts)} of {whole_box(shape).size} elements"
            _checks.bad_value(_SAVE, repr(name), "on the ranks in full", given)
        for box, ranks in holders.get(name, {}).items():
            rank = min(ranks, key=written.__getitem__)
            written[rank] += box.size * np.dtype(DTYPES[dtype][1]).itemsize
            file = f"{rank + counts[rank] * len(of_ranks)}_0{ENDING}"  # has one block of a name, as Paddle expects
            counts[rank] += 1
            blocks.append(StoredBlock(file, Block(box, whole_box(box.shape))))
        found[name] = StoredTensor(dtype, shape, blocks)
    return found


def _writer(
    folder: Path,
    shards: Mapping[str, Shard],
    states: OptimizerStates | None,
    stored: Mapping[str, StoredTensor],
    everyone: Group,
    copies: bool,
) -> Callable[[], None]:
    """Return the function that writes this rank's files.

    Args:
        folder: of the checkpoint.
        shards: of this rank.
        states: of the optimizer, or None.
        stored: all tensors of the checkpoint.
        everyone: the ranks.
        copies: whether it writes copies of the present values.
    """
    files: dict[str, list[tuple[str, str, tuple[int, ...], Callable[[], NDArray[Any]]]]] = {}
    for name, shard in shards.items():
        places = {each.block.box: each.file for each in stored[name].blocks}
        for block in shard.blocks:
            file = places[block.box]
            if int(file.split("_")[0]) % everyone.nranks != everyone.rank:
                continue
            values = _values_of(shard, block)
            if copies:
                values = _constant(np.array(values()))
            files.setdefault(file, []).append((name, stored[name].dtype, block.box.shape, values))
    schedule = None if states is None or states.scheduler is None else states.scheduler.state_dict()
    is_first = everyone.rank == 0

    def write() -> None:
        for file, tensors in files.items():
            write_tensors(folder / file, tensors)
        if is_first and schedule is not None:
            paddle.save(schedule, str(folder / _SCHEDULER))
        if is_first:
            paddle.save(index_of(stored), str(folder / INDEX))

    return write


def _values_of(shard: Shard, block: Block) -> Callable[[], NDArray[Any]]:
    return lambda: part_of(shard.tensor.detach(), block).numpy()


def _constant(values: NDArray[Any]) -> Callable[[], NDArray[Any]]:
    return lambda: values


class _Read(NamedTuple):
    """A part of a tensor that a file has.

    Attributes:
        file: name of the file.
        name: of the tensor.
        source: the block in the file.
        target: the block in this rank's tensor.
        box: the global indices.
    """

    file: str
    name: str
    source: Block
    target: Block
    box: Box


@without_gradients
def load_checkpoint(path: str | os.PathLike[str], model: nn.Layer, optimizer: Any = None) -> None:
    """Load what `save_checkpoint` wrote on any grid of ranks, in place. All ranks call it; none sends tensors.

    A rank reads the blocks that it needs, so its part of the model passes through host memory, never the whole.
    Checkpoints of ``paddle.distributed.save_state_dict`` from ``sharded_state_dict()`` load as well; of these a rank
    reads whole files, one after the other.

    Args:
        path: the folder.
        model: as in `save_checkpoint`; names of its tensors are those of the model that was saved.
        optimizer: as in `save_checkpoint`; it need not have run a step. Its parameters have states in the checkpoint if
            they were trained. None: only the model is loaded.

    Raises:
        TypeError: see `save_checkpoint`.
        ValueError: the folder has no complete checkpoint; a tensor is not in it, or has another dtype or global shape;
            the optimizer that was saved had other states. No tensor has changed then.
        RuntimeError: another rank raised one of these.

    Examples:
        >>> import paddle, tempfile
        >>> from paddle_moe_ops.expert_parallel import load_checkpoint, save_checkpoint
        >>> from paddle_moe_ops.nn import MoELayer
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, MoELayer(64, 32, num_experts=8, topk=2)).wait()
        >>> load_checkpoint(folder, MoELayer(64, 32, num_experts=8, topk=2))  # with ranks: group=group
    """
    everyone = group_of(_LOAD, None)
    with raising_together(_LOAD, everyone):
        folder = _folder_of(_LOAD, path)
        with _checks.renaming(_LOAD, _LOAD, layer="model"):
            layer = without_wrapper(_LOAD, model)
        stored = read_index(_LOAD, folder)
        shards = shards_of_model(layer)
        states = None if optimizer is None else OptimizerStates(_LOAD, optimizer, layer)
        if states is not None:
            shards |= _created(states, shards, stored)
        reads = _reads(shards, stored)
    with raising_together(_LOAD, everyone):
        _read(folder, shards, reads)
        schedule = folder / _SCHEDULER
        if states is not None and states.scheduler is not None and schedule.is_file():
            states.scheduler.set_state_dict(paddle.load(str(schedule)))


def _created(
    states: OptimizerStates, parameters: Collection[str], stored: Mapping[str, StoredTensor]
) -> dict[str, Shard]:
    """Return the states of the parameters that have some in a checkpoint, created if the optimizer has none yet."""
    kinds: dict[str, set[str]] = {}
    for name in stored:
        parameter, _, kind = name.rpartition(".")
        if name not in parameters and parameter in parameters:
            kinds.setdefault(parameter, set()).add(kind)
    updated = states.create(kinds)
    of_optimizer = states.shards()
    shards: dict[str, Shard] = {}
    for parameter in sorted(updated | of_optimizer.keys()):
        found, wanted = of_optimizer.get(parameter, {}), kinds.get(parameter, set())
        if found.keys() != wanted:
            expected = f"one with the states of {parameter!r} that the checkpoint has, {sorted(wanted)}"
            _checks.bad_value(_LOAD, "optimizer", expected, f"one with {sorted(found)}")
        shards |= {f"{parameter}.{kind}": each for kind, each in found.items()}
    return shards


def _reads(shards: Mapping[str, Shard], stored: Mapping[str, StoredTensor]) -> list[_Read]:
    """Return the parts that this rank reads."""
    found = []
    for name, shard in shards.items():
        if not shard.blocks:
            continue
        dtype = _checks.dtype_name(shard.tensor.dtype)
        if name not in stored:
            _checks.bad_value(_LOAD, "path", f"a checkpoint with {name!r}", "one without it")
        source = stored[name]
        if (source.dtype, source.shape) != (dtype, shard.shape):
            given = f"{source.dtype} {list(source.shape)}"
            _checks.bad_value(_LOAD, f"{name!r} of the checkpoint", f"{dtype} {list(shard.shape)}", given)
        boxes = [each.block.box for each in source.blocks]
        for target in shard.blocks:
            parts, is_whole = cover(target.box, boxes)
            if not is_whole:
                given = f"without a part of indices {list(target.box.start)} and shape {list(target.box.shape)}"
                _checks.bad_value(_LOAD, f"{name!r} of the checkpoint", "complete", given)
            for number, box in parts:
                file, block = source.blocks[number]
                found.append(_Read(file, name, block, target, box))
    return found


def _read(folder: Path, shards: Mapping[str, Shard], reads: Sequence[_Read]) -> None:
    """Read all parts, and set each tensor when it is complete: one after the other, if their files can be mapped."""
    remaining = Counter(each.name for each in reads)
    buffers: dict[str, NDArray[Any]] = {}
    files: dict[str, Mapping[str, NDArray[Any]]] = {}
    for each in sorted(reads, key=lambda each: ("" if each.file.endswith(ENDING) else each.file, each.name)):
        if each.file not in files:
            if not each.file.endswith(ENDING):
                files.clear()  # whose tensors are in memory
            files[each.file] = open_tensors(folder / each.file)
        tensor = shards[each.name].tensor
        if each.name not in buffers:  # zeros, since Fleet pads parts of tensors
            buffers[each.name] = np.zeros(tensor.shape, DTYPES[_checks.dtype_name(tensor.dtype)][1])
        values = part_of(files[each.file][each.name], each.source)[each.box.within(each.source.box).slices()]
        part_of(buffers[each.name], each.target)[each.box.within(each.target.box).slices()] = values
        remaining[each.name] -= 1
        if not remaining[each.name]:
            paddle.assign(paddle.to_tensor(buffers.pop(each.name), place=tensor.place), tensor)
