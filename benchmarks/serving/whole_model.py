# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
r"""Decodes with a decoder of the ERNIE 4.5 type under Paddle on a GPU, eagerly and by a CUDA graph.

    python3 -m benchmarks.serving.whole_model --device gpu:0 --out benchmarks/results/h200-served-model.jsonl

The model is that of ``examples/serve_ernie45_moe.py`` in the size `SIZES`. All blocks but the dense one have copies
of the same weights. A line of the result is one format of the experts' matrices and one batch. It has the microseconds
of a step, which appends a token to each sequence, and says whether the graph wrote the bits of the eager steps. On the
rig of tools/gpu_rig the driver captures the graph.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from benchmarks.spread import time_fields
from examples.serve_ernie45_moe import FORMATS, Decoder, Server, Sizes, captured, new_model, seconds_per_step
from tests.captured import Graph

__all__ = ["BATCHES", "SIZES", "lines"]

SIZES = Sizes(
    hidden=2048,
    inner=1024,
    dense=8192,
    experts=64,
    topk=6,
    shared=2,
    blocks=8,
    heads=16,
    kv_heads=4,
    head=128,
    vocabulary=32768,
)
BATCHES = (1, 4, 16, 64)
PROMPT, LENGTH = 32, 161  # tokens of a sequence; the first one after the prompt belongs to it


def decoder(sizes: Sizes, format: str) -> Decoder:
    """A decoder whose blocks with experts are copies of one: drawing and quantising weights takes the host long."""
    model = new_model(sizes._replace(blocks=2), format)
    for _ in range(sizes.blocks - 2):
        model.blocks.append(copy.deepcopy(model.blocks[1]))
    model.sizes = sizes
    return model


def captured_by_driver(step: Callable[[], Any], like: paddle.Tensor) -> Callable[[], None]:
    """The replay of a CUDA graph of a step on a custom device."""
    from paddle_moe_ops.triton.launch.paddle_device import device_of

    return Graph(device_of(like).stream(), step).replay


def line_of(model: Decoder, batch: int, length: int) -> dict[str, Any]:
    """The times of a batch's steps, in both ways."""
    server = Server(model, batch, length)
    prompt = paddle.randint(0, model.sizes.vocabulary, [PROMPT, batch])
    seconds_per_step(server, prompt, server.step)  # compiles, and fills the allocator
    eager = seconds_per_step(server, prompt, server.step)
    state = server.state()
    found = {"batch": batch, "eager": time_fields([1e6 * each for each in eager], digits=1)}
    device = paddle.get_device()
    if device == "cpu":
        return found
    replay = captured(server.step) if device.startswith("gpu") else captured_by_driver(server.step, server.tokens)
    seconds_per_step(server, prompt, replay)
    graph = seconds_per_step(server, prompt, replay)
    found["graph"] = time_fields([1e6 * each for each in graph], digits=1)
    found["same_bits"] = all(np.array_equal(*pair) for pair in zip(server.state(), state, strict=True))
    return found


def lines(
    formats: list[str], batches: list[int], sizes: Sizes = SIZES, length: int = LENGTH
) -> Iterator[dict[str, Any]]:
    """Lines of the result."""
    for format in formats:
        model = decoder(sizes, format)
        for batch in batches:
            yield {"format": format, **line_of(model, batch, length)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=paddle.get_device(), help="as paddle.set_device takes it")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--gpu", default="", help="what the machine line calls the device")
    parser.add_argument("--dense", default="Paddle's kernels", help="what computes all but the experts")
    parser.add_argument("--commit", default="unknown", help="commit of the sources")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    paddle.set_device(arguments.device)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"gpu": arguments.gpu, "commit": arguments.commit, "date": date, "paddle": paddle.__version__}
    facts |= {"device": arguments.device, "dense": arguments.dense, "sizes": SIZES._asdict()}
    differs = False
    with arguments.out.open("w", encoding="utf-8") as file:
        for line in itertools.chain([{"machine": True, **facts}], lines(arguments.formats, arguments.batches)):
            differs |= not line.get("same_bits", True)
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 1 if differs else 0


if __name__ == "__main__":
    raise SystemExit(main())
