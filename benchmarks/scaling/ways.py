# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models, groups of ranks and ways to exchange tokens that scaling.md compares, and their predictions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.layer.shapes import SHAPES, Shape

from .layers import Prediction, best_overlap, gradient_us, overlapped, predict
from .machines import Machine
from .traces import Trace, drawn
from .traffic import Layout, Traffic, count

__all__ = [
    "BY_DOMAIN",
    "BY_HAND",
    "DOMAINS",
    "EXACT",
    "EXACT8",
    "EXACT_MAY_COST",
    "FEW_TOKENS",
    "GPUS",
    "MACHINE",
    "MICRO_BATCHES",
    "MODELS",
    "MOST_EXPERTS",
    "PEER",
    "PLACES",
    "REDUCED",
    "REDUCED8",
    "ROUTINGS",
    "TOKENS",
    "WAYS",
    "Choice",
    "Place",
    "Predictor",
    "Way",
    "groups",
    "mean",
]

MODELS = {
    "Mixtral 8x7B": "mixtral",
    "Qwen3-30B": "qwen3-30b",
    "ERNIE-300B": "ernie-300b-4k",
    "DeepSeek-V3": "dsv3-4k",
}
MOST_EXPERTS = max(SHAPES[each].experts for each in MODELS.values())
TOKENS, FEW_TOKENS = 8192, 128  # of a rank: training, and decoding
MACHINE = 8  # GPUs that can reach each other's memory with transport="peer"
DOMAINS = (8, 72)
GPUS = (8, 16, 64, 256, 512, 2048)
MICRO_BATCHES = 8  # passes of a layer for each step of the optimiser
EXACT_MAY_COST = 0.05  # a difference within the model's error
ROUTINGS = ("even", "zipf", "demo")
_SOURCES = 8  # ranks whose tokens are drawn, if they have many; with more ranks they repeat


class Way(NamedTuple):
    """A way to exchange tokens.

    Attributes:
        name: for readers.
        transport: argument of `predict`, as are ``combine`` and ``payload``.
        in_package: True if `ExpertParallel` has it.
    """

    name: str
    transport: str
    combine: str = "reduced"
    payload: str = "bf16"
    in_package: bool = True


BY_HAND = Way("by hand", "rows", in_package=False)
EXACT = Way("`exact`", "alltoall", "exact")
EXACT8 = Way("`exact`, float8", "alltoall", "exact", "fp8")
REDUCED = Way("`reduced`", "alltoall")
REDUCED8 = Way("`reduced`, float8", "alltoall", payload="fp8")
PEER = Way("`peer`", "peer")
BY_DOMAIN = Way("by domain, float8", "by_domain", payload="fp8", in_package=False)
WAYS = (BY_HAND, EXACT, EXACT8, REDUCED, REDUCED8, PEER, BY_DOMAIN)


class Choice(NamedTuple):
    """Choice for a group.

    Attributes:
        way: the fastest of the package with bfloat16 tokens, or "exact" if that is about as fast.
        narrow: the fastest of the package with float8 tokens.
    """

    way: Way
    narrow: Way


class Place(NamedTuple):
    """Placement of the groups of many GPUs.

    Attributes:
        name: for readers.
        domain: GPUs of an NVLink domain.
        most: ranks of a group.
    """

    name: str
    domain: int
    most: int

    def group(self, experts: int, gpus: int) -> Layout:
        """Return the largest group with an expert for each rank."""
        return Layout.of(min(self.most, experts, gpus), self.domain)


PLACES = (
    Place("groups in one machine", 8, MACHINE),
    Place("groups in one domain of 72", 72, 64),
    Place("widest groups, domains of 8", 8, max(GPUS)),
    Place("widest groups, domains of 72", 72, max(GPUS)),
)


def groups(experts: int, domains: Sequence[int] = DOMAINS) -> list[Layout]:
    """The groups that the tables have for a model: up to as many ranks as experts; one machine counts once."""
    sizes = dict.fromkeys(min(each, experts) for each in GPUS)
    made = [Layout.of(ranks, domain) for domain in domains for ranks in sizes]
    return list(dict.fromkeys(made))


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


class Predictor:
    """Predictions, each made once.

    Args:
        machine: numbers of GPUs and links.
        recorded: traces of the demo's model.
    """

    def __init__(self, machine: Machine, recorded: Sequence[Trace]) -> None:
        self.machine = machine
        self.recorded = recorded
        self.traffic = functools.cache(self._traffic)
        self.layer = functools.cache(self._layer)
        self._trace = functools.cache(self._make_trace)

    def on(self, machine: Machine) -> Predictor:
        """The same on another machine; the traffic does not depend on it."""
        other = Predictor(machine, self.recorded)
        other.traffic = self.traffic
        return other

    def shape(self, model: str, tokens: int = TOKENS) -> Shape:
        """The shape of a layer, with a rank's tokens."""
        return SHAPES[MODELS[model]]._replace(tokens=tokens)

    def models(self, group: Layout) -> Iterator[str]:
        """The models that have an expert for each rank."""
        return (each for each in MODELS if self.shape(each).experts >= group.ranks)

    def ways(self, group: Layout) -> list[Way]:
        """The ways that there are in a group."""
        without = "by_domain" if group.domains == 1 else "peer"
        return [each for each in WAYS if each.transport != without]

    def in_package(self, group: Layout) -> list[Way]:
        """The ways in a group that a user can choose."""
        kept = [each for each in self.ways(group) if each.in_package]
        return [each for each in kept if each.transport != "peer" or group.ranks <= MACHINE]

    def us(self, model: str, group: Layout, way: Way, tokens: int = TOKENS) -> float:
        """Both passes, or with few tokens, for which nobody trains, the forward pass."""
        made = self.layer(model, group, way, tokens)
        return made.us if tokens == TOKENS else made.forward.us

    def share(self, model: str, group: Layout, way: Way, tokens: int = TOKENS) -> float:
        """The part of that time that is not the experts'."""
        made = self.layer(model, group, way, tokens)
        products = made.forward.products_us + (made.backward.products_us if tokens == TOKENS else 0)
        return 1 - products / self.us(model, group, way, tokens)

    def slower(self, group: Layout, way: Way, than: Way, tokens: int = TOKENS) -> float:
        """Relative slowdown of a way against another one, mean of the models: 0.1 for 10 %."""
        us = self.us
        return mean([us(each, group, way, tokens) / us(each, group, than, tokens) for each in self.models(group)]) - 1

    def fastest(self, model: str, group: Layout, tokens: int = TOKENS) -> Way:
        """The package's fastest way for one model, with bfloat16 or float8 tokens."""
        return min(self.in_package(group), key=lambda way: self.us(model, group, way, tokens))

    def choice(self, group: Layout, tokens: int = TOKENS) -> Choice:
        """For all models: by the geometric mean of their times."""
        ours = self.in_package(group)
        wide, narrow = ([way for way in ours if (way.payload == "fp8") == is_fp8] for is_fp8 in (False, True))

        def total(way: Way) -> float:
            return mean([self.us(model, group, way, tokens) for model in self.models(group)])

        best = min(wide, key=total)
        if total(EXACT) <= (1 + EXACT_MAY_COST) * total(best):
            best = EXACT
        return Choice(best, min(narrow, key=total))

    def overlap(self, model: str, group: Layout, way: Way) -> tuple[int, Prediction]:
        """The best number of chunks; only for combine="reduced"."""
        shape, traffic = self.shape(model), self.traffic(model, group)
        how = {"transport": way.transport, "payload": way.payload}
        return best_overlap(lambda chunks: overlapped(self.machine, shape, traffic, chunks, **how))

    def gradient_us(self, model: str, group: Layout, gpus: int) -> float:
        """Microseconds that averaging the experts' gradients over groups adds to a pass over tokens."""
        return gradient_us(self.machine, self.shape(model), group.ranks, gpus) / MICRO_BATCHES

    def tflops(self, model: str, group: Layout, way: Way, gpus: int) -> float:
        """TFLOP/s of each of ``gpus`` GPUs, in groups that repeat."""
        made = self.layer(model, group, way)
        flops = made.forward.flops + made.backward.flops
        return flops / (made.us + self.gradient_us(model, group, gpus)) / 1e6

    def _layer(self, model: str, group: Layout, way: Way, tokens: int = TOKENS, routing: str = "even") -> Prediction:
        shape, traffic = self.shape(model, tokens), self.traffic(model, group, tokens, routing)
        how = {"transport": way.transport, "combine": way.combine, "payload": way.payload}
        return predict(self.machine, shape, traffic, capacity=None, **how)

    def _traffic(self, model: str, group: Layout, tokens: int = TOKENS, routing: str = "even") -> Traffic:
        sources = _SOURCES if tokens == TOKENS else group.ranks
        return count(self._trace(model, sources, tokens, routing), group).scaled(tokens)

    def _make_trace(self, model: str, sources: int, tokens: int, routing: str) -> Trace:
        shape = self.shape(model)
        if routing == "demo":
            fitting = [each for each in self.recorded if (each.experts, each.topk) == (shape.experts, shape.topk)]
            if not fitting:
                wanted = f"a recorded trace of {shape.topk} of {shape.experts} experts"
                raise ValueError(f"Predictor: {model} must have {wanted}, but has none")
            return fitting[-1].split(sources)
        return drawn({"even": "uniform"}.get(routing, routing), shape.experts, shape.topk, sources, tokens)
