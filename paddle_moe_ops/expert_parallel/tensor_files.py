# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Files of Paddle's distributed checkpoints: tensors in safetensors files, and an index of their blocks.

Format of a safetensors file: a little-endian 64-bit size, a JSON header of that size, the tensors' bytes. So a reader
maps the file into memory and touches the blocks that it needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

from .. import _checks
from .blocks import Block, Piece, blocks_of, whole_box

__all__ = [
    "DTYPES",
    "ENDING",
    "INDEX",
    "StoredBlock",
    "StoredTensor",
    "index_of",
    "open_tensors",
    "read_index",
    "write_tensors",
]

INDEX = "0.metadata"  # Paddle's name
ENDING = ".safetensors"
# Name in the header, and type of a NumPy array with the same bytes, by Paddle's name of the dtype.
DTYPES = {
    "float64": ("F64", np.float64),
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", np.uint16),
    "int64": ("I64", np.int64),
    "int32": ("I32", np.int32),
    "int16": ("I16", np.int16),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
    "bool": ("BOOL", np.bool_),
}
_ALIGNMENT = 8


class StoredBlock(NamedTuple):
    """A block in a file.

    Attributes:
        file: name of the file.
        block: of the array in the file.
    """

    file: str
    block: Block


class StoredTensor(NamedTuple):
    """A global tensor of a checkpoint.

    Attributes:
        dtype: Paddle's name.
        shape: of the global tensor.
        blocks: in the files.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: list[StoredBlock]


def write_tensors(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], Callable[[], NDArray[Any]]]]) -> None:
    """Write a file; it appears under its name when it is complete.

    Args:
        path: of the file.
        tensors: key, Paddle's name of the dtype, shape, and a function that returns the values. The function is called
            when they are written, so one tensor is in host memory at a time.
    """
    listed, header, position = list(tensors), {}, 0
    for key, dtype, shape, _ in listed:
        name, kind = DTYPES[dtype]
        end = position + int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, _, values in listed:
            file.write(np.ascontiguousarray(values()).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def open_tensors(path: Path) -> Mapping[str, NDArray[Any]]:
    """Return the arrays in a file: views of a safetensors file, or the contents of one that `paddle.save` wrote."""
    if path.suffix != ENDING:
        loaded: dict[str, NDArray[Any]] = paddle.load(str(path), return_numpy=True)
        return loaded
    with path.open("rb") as file:
        count = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(count))
    header.pop("__metadata__", None)
    kinds = dict(DTYPES.values())
    if not any(each["data_offsets"][1] for each in header.values()):  # an empty file cannot be mapped
        return {key: np.zeros(each["shape"], kinds[each["dtype"]]) for key, each in header.items()}
    data = np.memmap(path, np.uint8, "r", 8 + count)
    return {
        key: data[slice(*each["data_offsets"])].view(kinds[each["dtype"]]).reshape(each["shape"])
        for key, each in header.items()
    }


def index_of(tensors: Mapping[str, StoredTensor]) -> Metadata:
    """Return Paddle's index of a checkpoint whose arrays are one block each."""
    storage, of_keys = {}, {}
    for key, (dtype, shape, blocks) in tensors.items():
        of_keys[key] = [LocalTensorMetadata(*block.box, dtype, shape) for _, block in blocks]
        for file, block in blocks:
            storage[LocalTensorIndex(key, block.box.start, local_shape=block.box.shape)] = file
    return Metadata(of_keys, storage, {key: (key,) for key in tensors})


def read_index(function: str, folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint.

    Raises:
        ValueError: the folder is not a checkpoint, or a file of it is missing.
    """
    found = sorted(folder.glob("*.metadata"))
    if len(found) != 1:
        given = "a file" if folder.is_file() else f"{[each.name for each in found]}" if found else "none"
        _checks.bad_value(function, "path", f"a folder with one file *.metadata, {str(folder)!r}", given)
    index: Metadata = paddle.load(str(found[0]))
    missing = sorted({file for file in index.storage_metadata.values() if not (folder / file).is_file()})
    if missing:
        _checks.bad_value(function, "path", f"a complete checkpoint, {str(folder)!r}", f"one without {missing}")
    described = {key: _by_place(each) for key, each in index.state_dict_metadata.items()}
    tensors: dict[str, StoredTensor] = {}
    for at, file in index.storage_metadata.items():
        if at.replica_id not in (None, 0):
            continue
        own = described[at.tensor_key][_place_of(at)]
        local, shape = tuple(own.local_shape), own.global_shape
        if shape is None:
            ends = [np.add(each.global_offset, each.local_shape) for each in described[at.tensor_key].values()]
            shape = np.max(ends, 0).tolist()
        tensor = tensors.setdefault(at.tensor_key, StoredTensor(str(own.dtype), tuple(shape), []))
        elements = tuple(own.flattened_range) if own.is_flattened else None
        piece = Piece(whole_box(local), tuple(own.global_offset))
        tensor.blocks.extend(StoredBlock(file, each) for each in blocks_of([piece], local, elements))
    return tensors


def _by_place(parts: Iterable[Any]) -> dict[Any, Any]:
    """Metadata of a tensor's parts, by their places; an index of older Paddle has no shapes."""
    return {place: each for each in parts for place in (_place_of(each), (*_place_of(each)[:2], None))}


def _place_of(part: Any) -> tuple[Any, Any, Any]:
    shape = None if part.local_shape is None else tuple(part.local_shape)
    return tuple(part.global_offset), part.flattened_range, shape
