# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of scaling.md, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.kernels.table import markdown

from .check import Comparison
from .machines import Machine
from .traffic import Layout, Step, steps
from .ways import (
    BY_DOMAIN,
    BY_HAND,
    DOMAINS,
    EXACT,
    FEW_TOKENS,
    GPUS,
    MACHINE,
    MODELS,
    MOST_EXPERTS,
    PEER,
    PLACES,
    ROUTINGS,
    TOKENS,
    WAYS,
    Predictor,
    Way,
    groups,
)

__all__ = [
    "assumed",
    "bytes_and_messages",
    "checked",
    "decision",
    "few_tokens",
    "foretold",
    "label",
    "of_model",
    "other_machines",
    "percent",
    "repeated",
    "routings",
    "sizes",
    "spread",
]

_ARGUMENTS = {
    ("alltoall", "exact"): '`combine="exact"`',
    ("alltoall", "reduced"): '`combine="reduced"`',
    ("peer", "reduced"): '`transport="peer", combine="reduced"`',
}


def percent(ratio: float) -> str:
    """More or less time: 0.1 is "+10 %"."""
    rounded = round(100 * ratio)
    return f"{rounded:+d} %" if rounded else "0 %"


def label(group: Layout) -> str:
    """Return the number of ranks of a group and their domains, as text."""
    if group.ranks <= MACHINE:
        return f"{group.ranks}, one machine"
    if group.domains == 1:
        return f"{group.ranks}, one domain of 72"
    return f"{group.ranks}, domains of {8 if group.domain == 8 else 72}"


def decision(predictor: Predictor, tokens: int = TOKENS) -> str:
    """Table of the best choice for each group of ranks, and the cost of others."""
    columns = ("ranks of a group", "choose", "exchanges", "`exact` instead", "float8 tokens instead", "by hand instead")
    rows = []
    for group in groups(MOST_EXPERTS):
        way, narrow = predictor.choice(group, tokens)
        shares = sorted(round(100 * predictor.share(each, group, way, tokens)) for each in predictor.models(group))
        between = f"{shares[0]} %" if len(shares) == 1 else f"{shares[0]} to {shares[-1]} %"
        exact, float8, by_hand = (
            "-" if each == way else percent(predictor.slower(group, each, way, tokens))
            for each in (EXACT, narrow, BY_HAND)
        )
        float8 += f", {narrow.name.partition(',')[0]}"
        rows.append((label(group), f"**{_ARGUMENTS[way.transport, way.combine]}**", between, exact, float8, by_hand))
    return markdown(columns, rows)


def of_model(predictor: Predictor, model: str) -> str:
    """Milliseconds of a layer for each group and way."""
    rows = []
    for group in groups(predictor.shape(model).experts):
        ways, best = predictor.ways(group), predictor.fastest(model, group)
        cells = [_time_and_share(predictor, model, group, way, way == best) if way in ways else "-" for way in WAYS]
        reduced = [each for each in predictor.in_package(group) if each.combine == "reduced"]
        way = min(reduced, key=lambda each: predictor.us(model, group, each))
        chunks, made = predictor.overlap(model, group, way)
        cells.append(f"{made.us / 1e3:.1f} ({chunks})")
        rows.append([label(group), *cells, f"{predictor.layer(model, group, best).tflops:.0f}"])
    names = [each.name + ("" if each.in_package else " †") for each in WAYS]
    return markdown(["ranks of a group", *names, "in chunks †", "TFLOP/s"], rows)


def _time_and_share(predictor: Predictor, model: str, group: Layout, way: Way, bold: bool) -> str:
    text = f"{predictor.us(model, group, way) / 1e3:.1f} ({100 * predictor.share(model, group, way):.0f} %)"
    # Nobody can choose `peer` between machines yet.
    text += " †" if way == PEER and way not in predictor.in_package(group) else ""
    return f"**{text}**" if bold else text


def spread(predictor: Predictor, model: str) -> list[Layout]:
    """The smallest and the largest group of a model's tables, in domains of 8."""
    found = groups(min(predictor.shape(model).experts, 64), DOMAINS[:1])
    return list(dict.fromkeys([found[0], found[-1]]))


def routings(predictor: Predictor) -> str:
    """Table of the cost of uneven routing."""
    rows = []
    for model in MODELS:
        for group in spread(predictor, model):
            way = predictor.choice(group).way
            made = [predictor.layer(model, group, way, TOKENS, each) for each in ROUTINGS]
            most = [predictor.traffic(model, group, TOKENS, each).tokens.max() for each in ROUTINGS]
            cells = [f"{each.imbalance:.2f}" for each in made] + [f"{each.tflops:.0f}" for each in made]
            rows.append([model, label(group), way.name, *cells, *(f"{each:.0f}" for each in most)])
    names = [f"{what}, {routing}" for what in ("imbalance", "TFLOP/s", "most tokens") for routing in ROUTINGS]
    return markdown(["model", "ranks of a group", "exchange", *names], rows)


def _sent(predictor: Predictor, model: str, group: Layout, way: Way) -> list[Step]:
    hidden = predictor.shape(model).hidden
    how = {"combine": way.combine, "payload": way.payload}
    return steps(predictor.traffic(model, group), hidden, **how, dedup=way.transport != "rows")


def bytes_and_messages(predictor: Predictor) -> str:
    """Table of bytes that the busiest rank sends or receives for a layer, both passes."""
    rows = []
    ways = [each for each in WAYS if each.transport in ("rows", "alltoall")]
    for model in MODELS:
        for group in groups(predictor.shape(model).experts, DOMAINS[:1]):
            sent = [f"{predictor.layer(model, group, each).sent_bytes / 1e6:.0f}" for each in ways]
            far = ["-", "-", "-"]
            if group.domains > 1:
                flat, rails = (predictor.layer(model, group, each) for each in (ways[-1], BY_DOMAIN))
                dispatch = _sent(predictor, model, group, ways[-1])[0]
                numbers = flat.far_bytes / 1e6, rails.far_bytes / 1e6, dispatch.messages(~group.near())
                far = [f"{each:.0f}" for each in numbers]
            rows.append([model, label(group), *sent, *far])
    names = [f"{each.name}, MB" for each in ways]
    far_names = [f"{ways[-1].name}, MB over the network", "by domain, float8 †, MB over the network", "messages"]
    return markdown(["model", "ranks of a group", *names, *far_names], rows)


def repeated(predictor: Predictor) -> str:
    """TFLOP/s of GPUs in groups that repeat."""
    rows = []
    for model in MODELS:
        experts = predictor.shape(model).experts
        for gpus in GPUS:
            seen: list[Layout] = []
            cells = []
            for group in (each.group(experts, gpus) for each in PLACES):
                way = predictor.fastest(model, group)
                text = f"{predictor.tflops(model, group, way, gpus):.0f} ({group.ranks})"
                cells.append("-" if group in seen else text)
                seen.append(group)
            gradients = predictor.gradient_us(model, seen[0], gpus) / 1e3
            rows.append([model, str(gpus), *cells, f"{gradients:.1f}"])
    return markdown(["model", "GPUs", *(each.name for each in PLACES), "gradients, ms"], rows)


def sizes(predictor: Predictor) -> str:
    """Table of the memory of one layer's experts on each GPU."""
    rows = []
    for model in MODELS:
        shape = predictor.shape(model)
        ranks = [each for each in (1, 8, 16, 64, 256) if each <= shape.experts]
        cells = [f"{6 * shape.hidden * shape.inner * shape.experts / each / 1e9:.2f}" for each in ranks]
        rows.append([model, str(shape.experts), str(shape.topk), *cells, *["-"] * (5 - len(cells))])
    columns = ["model", "experts", "for each token", "1 rank", "8 ranks", "16 ranks", "64 ranks", "256 ranks"]
    return markdown(columns, rows)


def few_tokens(predictor: Predictor) -> str:
    """Microseconds of the exchanges of a forward pass with few tokens."""
    rows = []
    for model in MODELS:
        for group in groups(min(64, predictor.shape(model).experts)):
            cells, experts_us = [], 0.0
            ways, best = predictor.ways(group), predictor.fastest(model, group, FEW_TOKENS)
            for way in WAYS:
                if way not in ways:
                    cells.append("-")
                    continue
                forward = predictor.layer(model, group, way, FEW_TOKENS).forward
                experts_us = forward.products_us
                text = f"{forward.dispatch_us + forward.combine_us:.0f}"
                text += " †" if way == PEER and way not in predictor.in_package(group) else ""
                cells.append(f"**{text}**" if way == best else text)
            rows.append([model, label(group), *cells, f"{experts_us:.0f}"])
    names = [each.name + ("" if each.in_package else " †") for each in WAYS]
    return markdown(["model", "ranks of a group", *names, "experts"], rows)


def checked(found: Sequence[Comparison]) -> str:
    """Table of the largest errors, by kind of measurement."""
    rows = []
    for what in dict.fromkeys(each.what for each in found):
        lines = [each for each in found if each.what == what]
        worst = max((each.error for each in lines), key=abs)
        held_out = max((each.held_out_error or 0.0 for each in lines), key=abs)
        between = f"{min(each.measured_us for each in lines):.0f} to {max(each.measured_us for each in lines):.0f}"
        rows.append([f"`{what}`", str(len(lines)), between, f"{100 * worst:+.1f} %", f"{100 * held_out:+.1f} %"])
    return markdown(["what", "layers", "measured, us", "largest error", "largest error, layer left out"], rows)


def foretold(found: Sequence[Comparison], again: Sequence[Comparison]) -> str:
    """Each line with its prediction, and the error of another one."""
    rows = []
    for each, other in zip(found, again, strict=True):
        times = [f"{us:.0f}" for us in (each.measured_us, each.predicted_us)]
        errors = [f"{100 * error:+.1f} %" for error in (each.error, other.error)]
        rows.append([each.shape, f"`{each.what}`", *times, *errors])
    return markdown(["layer", "what", "measured, us", "predicted, us", "error", "corrected"], rows)


def assumed(machine: Machine) -> str:
    """Table of the machine's numbers."""
    local, peer, nccl, network = machine.local, machine.peer, machine.nccl, machine.network
    measured = "measured"
    rows = [
        ["rows moved within a GPU, read and written", f"{local.gbps:.0f} GB/s", measured],
        ["`peer`: rows written to another GPU", f"{peer.gbps:.0f} GB/s each way", measured],
        ["`peer`: rows written to several", f"{peer.several * peer.gbps:.0f} GB/s each way", measured],
        ["`peer`: fixed time of dispatch, combine", f"{peer.dispatch_us:.0f}, {peer.combine_us:.0f} us", measured],
        ["`alltoall_single` over NVLink, two ranks", f"{nccl.gbps:.0f} GB/s each way", measured],
        ["`alltoall_single` over NVLink, more ranks", f"{nccl.several * nccl.gbps:.0f} GB/s each way", measured],
        ["one call of `alltoall_single`", f"{nccl.us:.0f} us", measured],
    ]
    for name, products in (("forward", machine.forward), ("backward", machine.backward)):
        text = f"{products.slowdown:.2f} times the products alone, and {products.fixed_us:.0f} us"
        rows.append([f"experts between GPUs, {name}", text, measured])
    rows += [
        [f"network: {network.name}, one for each GPU", f"{network.gbps:.0f} GB/s each way", "published"],
        ["a step that crosses the network", f"{network.us:.0f} us", "assumed"],
        ["each rank of another domain that it goes to", f"{network.message_us:.0f} us", "assumed"],
        ["the host's wait for numbers of tokens", f"{network.host_us:.0f} us", "assumed"],
    ]
    return markdown(["what", "value", ""], rows)


def other_machines(predictor: Predictor, model: str) -> str:
    """Table of choices and speeds with other values of the numbers that were not measured."""
    machine = predictor.machine
    network, peer, nccl = machine.network, machine.peer, machine.nccl
    slow = replace(network, us=5 * network.us, message_us=5 * network.message_us, host_us=5 * network.host_us)
    variants = {
        "as assumed": machine,
        "half the network": replace(machine, network=replace(network, gbps=network.gbps / 2)),
        "twice the network": replace(machine, network=replace(network, gbps=2 * network.gbps)),
        "five times the latencies": replace(machine, network=slow),
        "NVLink twice as fast": replace(
            machine, peer=replace(peer, gbps=2 * peer.gbps), nccl=replace(nccl, gbps=2 * nccl.gbps)
        ),
    }
    layouts = [Layout.of(16, 8), Layout.of(64, 8), Layout.of(64, 72), Layout.of(256, 72)]
    rows = []
    for name, each in variants.items():
        other = predictor.on(each)
        cells = []
        for group in layouts:
            way = other.choice(group).way
            cells.append(f"{other.layer(model, group, way).tflops:.0f}, {way.name}")
        rows.append([name, *cells])
    return markdown(["", *map(label, layouts)], rows)
