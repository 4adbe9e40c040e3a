# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of whole models in grids of pipeline stages and groups of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.kernels.table import markdown
from benchmarks.layer.shapes import Shape

from .tables import label
from .traffic import Layout
from .ways import TOKENS, Predictor

__all__ = ["BATCH", "GPUS", "GRIDS", "LARGEST_GB", "Grid", "Memory", "Model", "choice", "grids_table", "memory_of"]

GPUS = 256
STAGES = (1, 2, 4, 8, 16)
BATCH = 15360 * 4096  # tokens of a step, those of DeepSeek-V3 (arXiv:2412.19437, section 4.2)
LARGEST_GB = 125  # of the 141 GB of an H200, for what is counted here
_WEIGHT, _GRADIENT, _STATES = 2, 4, 12  # bytes of a parameter: bfloat16; main_grad; float32 weights and two moments


class Model(NamedTuple):
    """Sizes of a model; those of a layer's experts are a `Shape`.

    Attributes:
        layers: all of them.
        dense_layers: those with one MLP in place of experts.
        attention: parameters of a layer's attention.
        shared: inner size of the shared experts.
        vocabulary: rows of an embedding.
        embeddings: one if the output layer shares it, else two.
        dense_inner: inner size of a dense layer's MLP.
        source: of these numbers.
    """

    layers: int
    dense_layers: int
    attention: int
    shared: int
    vocabulary: int
    embeddings: int
    dense_inner: int
    source: str

    def parameters(self, shape: Shape) -> int:
        """Parameters without norms and biases."""
        of_layer = 3 * shape.hidden * (shape.experts * shape.inner + self.shared) + shape.hidden * shape.experts
        sparse = (self.layers - self.dense_layers) * of_layer
        dense = self.dense_layers * 3 * shape.hidden * self.dense_inner
        embeddings = self.embeddings * self.vocabulary * shape.hidden
        return sparse + dense + self.layers * self.attention + embeddings


def _latent_attention(hidden: int, heads: int, *, queries: int, keys: int, rotary: int, width: int) -> int:
    """Parameters of DeepSeek's attention: low-rank queries, and keys and values that share a low-rank input."""
    of_queries = hidden * queries + queries * heads * (width + rotary)
    return of_queries + hidden * (keys + rotary) + keys * heads * 2 * width + heads * width * hidden


def _grouped_attention(hidden: int, heads: int, key_heads: int, width: int) -> int:
    return hidden * width * (2 * heads + 2 * key_heads)


GRIDS = {
    "ERNIE-300B": Model(
        54, 3, _grouped_attention(8192, 64, 8, 128), 0, 103424, 1, 28672, "the configuration of ERNIE-4.5-300B-A47B"
    ),
    "DeepSeek-V3": Model(
        61,
        3,
        _latent_attention(7168, 128, queries=1536, keys=512, rotary=64, width=128),
        2048,
        129280,
        2,
        18432,
        "[DeepSeek-V3's report](https://arxiv.org/abs/2412.19437), section 4.2",
    ),
}


class Grid(NamedTuple):
    """Pipeline stages of groups that share experts; groups with copies of the same experts repeat.

    Attributes:
        stages: of the pipeline.
        group: ranks that share the experts.
    """

    stages: int
    group: Layout

    @property
    def copies(self) -> int:
        return GPUS // (self.stages * self.group.ranks)

    @property
    def bubble(self) -> float:
        """The share of a step that a rank waits for its first and after its last micro-batch, by 1F1B."""
        micro_batches = BATCH * self.stages / (GPUS * TOKENS)
        return (self.stages - 1) / (micro_batches + self.stages - 1)


class Memory(NamedTuple):
    """Bytes of the rank that needs most, one of the first stage.

    Attributes:
        parameters: weights and gradients.
        states: of the optimizer, divided between ranks with the same parameters.
        kept: for backward passes, of all micro-batches in flight: inputs of layers and first products of experts.
        kept_x: the same with ``keep="x"``, which computes the first products again.
    """

    parameters: float
    states: float
    kept: float
    kept_x: float

    def gigabytes(self, keep: str) -> float:
        return (self.parameters + self.states + (self.kept if keep == "h" else self.kept_x)) / 1e9


def memory_of(model: Model, shape: Shape, grid: Grid) -> Memory:
    """Memory of a stage with as many layers of experts as layers; attention and norms are computed again."""
    layers = math.ceil(model.layers / grid.stages)
    experts = min(layers, model.layers - model.dense_layers) * 3 * shape.hidden * shape.inner * shape.experts
    dense = layers * (model.attention + 3 * shape.hidden * model.shared + shape.hidden * shape.experts)
    dense += model.vocabulary * shape.hidden
    if grid.stages == 1:
        dense += (model.embeddings - 1) * model.vocabulary * shape.hidden
    own = experts / grid.group.ranks
    states = _STATES * (own / grid.copies + dense * grid.stages / GPUS)
    inputs = 2 * shape.tokens * shape.hidden  # of attention
    in_flight = layers * grid.stages
    kept_x = in_flight * (inputs + shape.kept_bytes() - 4 * shape.tokens * shape.topk * shape.inner)
    return Memory(
        (_WEIGHT + _GRADIENT) * (own + dense), states, in_flight * (inputs + shape.kept_bytes()), float(kept_x)
    )


def _grids(experts: int) -> Iterator[Grid]:
    for stages in STAGES:
        for group in (Layout.of(8, 8), Layout.of(64, 8), Layout.of(64, 72)):
            if group.ranks <= min(experts, GPUS // stages):
                yield Grid(stages, group)


def _fitting(memory: Memory) -> str | None:
    """The value of ``keep`` that fits; "h" if both do."""
    return next((each for each in ("h", "x") if memory.gigabytes(each) <= LARGEST_GB), None)


def _tflops(predictor: Predictor, name: str, grid: Grid, keep: str) -> float:
    """TFLOP/s of the layers of experts on each GPU, which wait for the pipeline and may repeat the first product."""
    made = predictor.layer(name, grid.group, predictor.fastest(name, grid.group))
    again = 2 / 3 * made.forward.products_us if keep == "x" else 0.0
    return made.tflops * made.us / (made.us + again) * (1 - grid.bubble)


def choice(predictor: Predictor, name: str, domain: int) -> tuple[Grid, str]:
    """The fastest grid that fits, in NVLink domains of one size, and ``keep``."""
    model, shape = GRIDS[name], predictor.shape(name)
    fitting = []
    for grid in _grids(shape.experts):
        keep = _fitting(memory_of(model, shape, grid))
        if keep is not None and grid.group.domain <= domain:
            fitting.append((_tflops(predictor, name, grid, keep), grid, keep))
    if not fitting:
        raise ValueError(f"choice: a grid of {name} must fit {LARGEST_GB} GB, but none does")
    _, grid, keep = max(fitting, key=lambda each: each[0])
    return grid, keep


def grids_table(predictor: Predictor, name: str) -> str:
    """Table of a model's grids."""
    model, shape = GRIDS[name], predictor.shape(name)
    rows = []
    for grid in _grids(shape.experts):
        memory, way = memory_of(model, shape, grid), predictor.fastest(name, grid.group)
        cells = [f"{grid.stages}", label(grid.group), f"{grid.copies}", f"{memory.parameters / 1e9:.0f}"]
        cells.append(f"{memory.states / 1e9:.0f}")
        for keep in ("h", "x"):
            total = memory.gigabytes(keep)
            cells.append(f"**{total:.0f}**" if total <= LARGEST_GB else f"{total:.0f}")
        made = predictor.layer(name, grid.group, way)
        cells += [f"{made.sent_bytes / 1e6:.0f}", f"{100 * (1 - predictor.share(name, grid.group, way)):.0f} %"]
        kept = _fitting(memory)
        speed = "-" if kept is None else f"{_tflops(predictor, name, grid, kept):.0f}"
        rows.append([*cells, f"{100 * grid.bubble:.0f} %", speed])
    columns = (
        "stages",
        "ranks of a group",
        "copies",
        "parameters, GB",
        "states, GB",
        '`keep="h"`, GB',
        '`keep="x"`, GB',
    )
    return markdown((*columns, "sent per layer, MB", "GEMMs", "bubble", "TFLOP/s"), rows)
