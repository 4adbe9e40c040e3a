# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`permute`: rows to the places of given maps."""

from __future__ import annotations

from typing import Any

import paddle_moe_ops

from ..core import CoreCalls
from ..device import Body
from ..inputs import Inputs
from ..shapes import Operation
from ..targets import OURS, PUBLIC, TRITON
from . import moving
from .base import NUMPY, PLAIN, TORCH, TRANSFORMER_ENGINE, Library, Operator, Way


def _core(core: CoreCalls, operation: Operation, inputs: Inputs) -> Body:
    source = moving.sources(operation, inputs)
    params, outputs = moving.core_permute_params(core, inputs, source, inputs.slot_to_row, inputs.row_to_token)
    return core.body(lambda: core.run("permute", params), outputs)


def _triton(device: Any, operation: Operation, inputs: Any) -> Body:
    move = moving.triton_move(device, operation, inputs)
    maps = {"token_rows": inputs.token_rows, "row_to_token": inputs.row_to_token}
    return Body(lambda: move(maps))


def _torch(torch: Any, operation: Operation, inputs: Any) -> Body:
    moving.without_padding(inputs, "indexing")
    source, index = moving.byte_sources(operation, inputs, torch.uint8), inputs.row_to_token.long()
    return Body(
        lambda: {name: each.index_select(0, index) for name, each in source.items()},
        note="gather by a given map",
        results=moving.float8_again(torch),
    )


def _transformer_engine(engine: Any, operation: Operation, inputs: Any) -> Body:
    maps = engine.maps(inputs)
    row_id_map = maps.map()
    source = moving.byte_sources(operation, inputs, engine.torch.uint8)
    return Body(lambda: maps.permute(row_id_map, None, *source.values()), results=moving.float8_again(engine.torch))


def _public(_: Any, operation: Operation, inputs: Any) -> Body:
    source, plan, fill = moving.sources(operation, inputs), inputs.plan, inputs.problem.fill_padding
    x, scale = source["rows"], source.get("row_scales")
    return Body(lambda: dict(zip(source, paddle_moe_ops.permute(x, plan, scale, fill_padding=fill), strict=False)))


def _plain(paddle: Any, operation: Operation, inputs: Any) -> Body:
    moving.without_padding(inputs, "gathering")
    source, index = moving.byte_sources(operation, inputs, paddle.int8), inputs.row_to_token
    return Body(
        lambda: {name: paddle.gather(each, index) for name, each in source.items()},
        note="gather by a given map",
        results=moving.float8_again(paddle),
    )


def _numpy(numpy: Any, operation: Operation, inputs: Inputs) -> Body:
    moving.without_padding(inputs, "taking")
    source, index = moving.sources(operation, inputs), inputs.row_to_token
    return Body(lambda: {name: numpy.take(each, index, axis=0) for name, each in source.items()})


OPERATOR = Operator(
    "permute",
    {"bf16": moving.BF16, "fp8": moving.FP8},
    least_bytes=moving.permuted_bytes,
    probe=moving.fanout,
    checks=moving.MOVED,
    ways=(
        Way(OURS, Library.CORE, _core),
        Way(TRITON, Library.TRITON, _triton),
        Way(TORCH, Library.TORCH, _torch),
        Way(TRANSFORMER_ENGINE, Library.TRANSFORMER_ENGINE, _transformer_engine),
        Way(PUBLIC, Library.PADDLE, _public),
        Way(PLAIN, Library.PADDLE, _plain),
        Way(NUMPY, Library.NUMPY, _numpy),
    ),
)
