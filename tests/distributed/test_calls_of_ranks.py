# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that are in different calls raise, or get NaN; ranks in different gradient modes get their values."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle.distributed.fleet.utils import recompute

from paddle_moe_ops.expert_parallel import ExpertParallel
from paddle_moe_ops.nn import MoELayer

from .problems import on_this_device
from .processes import run
from .test_expert_parallel_errors import caught

pytestmark = pytest.mark.long

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 9, 64, 20, 6, 2
PEER: dict[str, Any] = {"transport": "peer", "tokens_per_rank": TOKENS}
OPTIONS = [
    pytest.param({"combine": "exact"}, id="exact"),
    pytest.param({"combine": "reduced"}, id="reduced"),
    pytest.param({"combine": "reduced", "tokens_per_rank": TOKENS}, id="parts of one size"),
    pytest.param({"combine": "reduced", **PEER}, id="peer"),
    pytest.param({"combine": "exact", **PEER}, id="peer exact"),
]
IN_ORDER = "ExpertParallel: all ranks must make the same calls in the same order, but "


def layers(options: dict[str, Any], count: int = 2) -> list[MoELayer]:
    """Layers that are numbered from the returned ones' first on."""
    paddle.seed(5)
    group = paddle.distributed.get_group(0)
    return [MoELayer(HIDDEN, INNER, EXPERTS, TOPK, 0, group=group, **options) for _ in range(count)]


def tokens(seed: int = 0) -> paddle.Tensor:
    rank = paddle.distributed.get_rank()
    x = paddle.to_tensor(np.random.default_rng([rank, seed]).standard_normal([TOKENS, HIDDEN]).astype(np.float32))
    x.stop_gradient = False
    return x


def number(layer: MoELayer) -> int:
    return layer.parallel._layer.layer


def in_another_order(options: dict[str, Any]) -> dict[str, Any]:
    """Errors on ranks if the last rank changes the order of calls or backward passes, and the results afterwards."""
    swaps = paddle.distributed.get_rank() == paddle.distributed.get_world_size() - 1
    first, second = layers(options)
    x = tokens()
    expected = first(x).numpy()
    second(x)

    def ordered(calls: list[Callable[[], Any]]) -> str:
        return caught(lambda: [call() for call in (reversed(calls) if swaps else calls)])

    found = {"forward": ordered([lambda: first(x), lambda: second(x)])}
    losses = first(x).sum(), second(x).square().sum()
    found["backward"] = ordered([each.backward for each in losses])
    losses = first(x).sum(), first(2 * x).square().sum()
    found["backward of one layer"] = ordered([each.backward for each in losses])
    first_copy, second_copy = copy.deepcopy(second), copy.deepcopy(second)
    found["copies"] = ordered([lambda: first_copy(x), lambda: second_copy(x)])
    goes_on = np.array_equal(first(x).numpy(), expected)
    return {**found, "numbers": [number(first), number(second)], "goes on": goes_on}


@pytest.mark.sampled(2)
@pytest.mark.cpu_only  # on a GPU: test_a_device_makes_calls_in_another_order_nan_and_the_next_dispatch_raises
@pytest.mark.parametrize(
    ("size", "options"),
    [
        *(pytest.param(2, *each.values, id=f"2-{each.id}") for each in OPTIONS),
        *(
            pytest.param(3, *each.values, id=f"3-{each.id}", marks=[pytest.mark.slow] * (each.id != "peer"))
            for each in OPTIONS
        ),
    ],
)
def test_calls_in_another_order_are_told_to_all_ranks(size, options):
    for found in run(in_another_order, size, options=options):
        first, second = found["numbers"]
        assert second == first + 1

        def expected(usual: str, swapped: str) -> str:
            return ", ".join(
                [f"rank {rank} is in {usual}" for rank in range(size - 1)] + [f"rank {size - 1} is in {swapped}"]
            )

        forward = expected(f"dispatch of layer {first}, call 1", f"dispatch of layer {second}, call 1")
        assert found["forward"] == f"RuntimeError: {IN_ORDER}{forward}"
        passing = "the backward pass of combine of layer"
        backward = expected(f"{passing} {first}, call 1", f"{passing} {second}, call 1")
        assert f"{IN_ORDER}{backward}" in found["backward"]
        backward = expected(f"{passing} {first}, call 2", f"{passing} {first}, call 3")
        assert f"{IN_ORDER}{backward}" in found["backward of one layer"]
        copies = expected(f"dispatch of layer {second}, copy 1, call 0", f"dispatch of layer {second}, copy 2, call 0")
        assert found["copies"] == f"RuntimeError: {IN_ORDER}{copies}"
        assert found["goes on"]


def one_recomputes(options: dict[str, Any]) -> str:
    (layer,) = layers(options, 1)
    rank = paddle.distributed.get_rank()
    y = recompute(layer, tokens(), use_reentrant=False) if rank else layer(tokens())
    text = caught(y.sum().backward)
    paddle.set_grad_enabled(True)  # Paddle's recompute leaves it off after an error
    return text


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", OPTIONS[1::2])
def test_a_rank_that_recomputes_alone_is_told(options):
    for text in run(one_recomputes, 2, options=options):
        assert f"{IN_ORDER}rank 0 is in the backward pass of" in text
        assert "rank 1 is in dispatch of layer" in text


def legal_program(options: dict[str, Any]) -> list[NDArray]:
    """Gradients of a layer that runs twice, one that is recomputed in two ways, and one in eval, over two steps."""
    first, second, third = layers(options, 3)
    third.eval()
    found = []
    for step in range(2):
        x = tokens(step)
        y = first(first(x)) + recompute(second, x) + recompute(second, 2 * x, use_reentrant=False)
        with paddle.no_grad():
            found.append(third(x).numpy())
        (y + third(x)).square().sum().backward()
        found.append(x.grad.numpy())
    return [*found, *(each.grad.numpy() for layer in (first, second, third) for each in layer.experts.parameters())]


@functools.cache
def results_without_options(combine: str) -> list[list[NDArray]]:
    return run(legal_program, 2, options={"combine": combine})


@pytest.mark.parametrize("options", OPTIONS[2:])
def test_programs_with_several_calls_of_a_layer_are_in_order(options):
    expected = results_without_options(options["combine"])
    for ours, theirs in zip(run(legal_program, 2, options=options), expected, strict=True):
        for got, due in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, due, rtol=1e-3, atol=1e-4)


def forms_that_differ() -> list[str]:
    """Tokens of another width, K, dtype, and another copy=, on rank 1; the second time buffers are there."""
    rank = paddle.distributed.get_rank()
    ep = ExpertParallel(4, combine="reduced", **PEER)
    texts = []
    for _ in range(2):
        for changed in ({"width": 128}, {"topk": 1}, {"dtype": "bfloat16"}, {"copy": False}):
            given = {"width": 64, "topk": 2, "dtype": "float32", "copy": True} | (changed if rank else {})
            ids = paddle.to_tensor(np.tile(np.arange(given["topk"], dtype=np.int32), (3, 1)))
            x, probs = paddle.ones([3, given["width"]], given["dtype"]), paddle.ones([3, given["topk"]])
            texts.append(caught(lambda x=x, ids=ids, probs=probs, c=given["copy"]: ep.dispatch(x, ids, probs, copy=c)))
            with contextlib.suppress(RuntimeError):
                for form in ({"width": 128}, {"topk": 1}, {"dtype": "bfloat16"}):  # which makes the buffers
                    all_alike(ep, form)
    return texts


def all_alike(ep: ExpertParallel, form: dict[str, Any]) -> None:
    given = {"width": 64, "topk": 2, "dtype": "float32"} | form
    ids = paddle.to_tensor(np.tile(np.arange(given["topk"], dtype=np.int32), (3, 1)))
    ep.dispatch(paddle.ones([3, given["width"]], given["dtype"]), ids, paddle.ones([3, given["topk"]]))


@pytest.mark.cpu_only
def test_peers_are_told_of_tokens_in_another_form():
    differ = [
        "x must be as wide on all ranks, but got 64 on rank 0, 128 on rank 1",
        "ids must be of as many slots a token on all ranks, but got 2 on rank 0, 1 on rank 1",
        "x must be of one dtype, but got float32 on rank 0, bfloat16 on rank 1",
        "copy must be the same on all ranks, but got True on rank 0, False on rank 1",
    ]
    expected = [f"ValueError: ExpertParallel.dispatch: {each}" for each in differ]
    assert run(forms_that_differ, 2) == [expected * 2] * 2


@contextlib.contextmanager
def mode_of(kind: str) -> Iterator[None]:
    with paddle.no_grad() if kind == "no_grad" else contextlib.nullcontext():
        yield


def in_modes(options: dict[str, Any], modes: list[str]) -> list[Any]:
    """Outputs of layers in this rank's mode and of one where all ranks are in one mode; then gradients of all."""
    mode = modes[paddle.distributed.get_rank()]
    layer, twin = layers({"combine": options["combine"]}, 1)[0], layers(options, 1)[0]
    twin.set_state_dict(layer.state_dict())
    if mode == "frozen":
        for each in twin.parameters():
            each.stop_gradient = True
    right = []
    for step in range(3):
        x = tokens(step)
        x.stop_gradient = mode == "plain x" or mode == "frozen"
        with paddle.no_grad():
            expected = layer(x).numpy()
        with mode_of(mode):
            got = twin(x)
        right.append(np.abs(got.numpy() - expected).max() < 1e-5)
    text = "no graph" if got.stop_gradient else caught(got.sum().backward)
    for each in twin.parameters():
        each.stop_gradient = False
    gradients = [trained(each, tokens(7)) for each in (layer, twin)]
    return [right, text, all(np.allclose(*each, rtol=1e-4, atol=1e-5) for each in zip(*gradients, strict=True))]


def trained(layer: MoELayer, x: paddle.Tensor) -> list[NDArray]:
    """The gradients of a call that all ranks train."""
    for each in layer.parameters():
        each.clear_gradient()
    layer(x).square().sum().backward()
    return [x.grad.numpy(), *(each.grad.numpy() for each in layer.parameters() if each.grad is not None)]


MODES = {
    "no_grad on one": (["no_grad", "trains"], "the backward pass of combine", [1]),
    "no_grad on two": (["trains", "no_grad", "no_grad"], "the backward pass of combine", [0]),
    "frozen on one": (["frozen", "trains"], "the backward pass of combine", [1]),
    "tokens without gradient on one": (["trains", "plain x"], "the backward pass of dispatch", [0]),
}
# Each mode with both combines, and each transport; the others are slow tests.
MODES_IN_CI = {
    "no_grad on one": ("exact", "reduced", "peer"),
    "no_grad on two": ("exact", "peer"),
    "frozen on one": ("parts of one size", "peer exact"),
    "tokens without gradient on one": ("exact", "reduced", "peer exact"),
}


@pytest.mark.sampled(2)
@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("modes", "kind", "runs", "options"),
    [
        pytest.param(
            *MODES[name],
            *each.values,
            id=f"{name}-{each.id}",
            marks=[pytest.mark.slow] * (each.id not in MODES_IN_CI[name]),
        )
        for name in MODES
        for each in OPTIONS
    ],
)
def test_ranks_in_other_gradient_modes_get_their_values_and_backward_passes_name_them(modes, kind, runs, options):
    found = run(in_modes, len(modes), options=options, modes=modes)
    if "plain x" in modes and options["combine"] == "reduced":
        runs = []  # all ranks run all backward passes, since probabilities have gradients
    others = [rank for rank in range(len(modes)) if rank not in runs]
    for rank, (right, text, goes_on) in enumerate(found):
        assert right == [True] * 3
        if rank in runs:
            assert f"ExpertParallel: {kind} of layer" in text
            reason = f"needs all ranks, but only ranks {runs} of {list(range(len(modes)))} run it: the forward pass of"
            assert f"{reason} ranks {others} was under no_grad" in text
        else:
            assert text == ("nothing was raised" if kind.endswith("dispatch") else "no graph")
        assert goes_on


class Marked:
    """Two layers whose calls send equally many lines to each rank; a device checks their order."""

    def __init__(self, options: dict[str, Any], experts: tuple[int, int] = (4, 4)) -> None:
        rank = paddle.distributed.get_rank()
        self.swaps = rank == 1
        self.layers = [ExpertParallel(each, paddle.distributed.get_group(0), **options) for each in experts]
        ids = np.array([[0, 2], [1, 3], [3, 0]], np.int32) if rank == 0 else np.array([[2, 1]] * 2, np.int32)
        self.ids, self.probs = paddle.to_tensor(ids), paddle.ones(ids.shape)
        self.shape = [len(ids), HIDDEN]
        self.probs.stop_gradient = False

    def ordered(self, values: list[Any]) -> list[tuple[int, Any]]:
        """Values with their numbers, the last one first on the rank that swaps."""
        return list(enumerate(values))[:: -1 if self.swaps else 1]

    def dispatched(self, layer: int, x: paddle.Tensor) -> Any:
        return self.layers[layer].dispatch(x, self.ids, self.probs)

    def next_dispatches(self, x: paddle.Tensor) -> list[str]:
        return [caught(lambda layer=layer: self.dispatched(layer, x)) for layer in range(2)]

    def x(self) -> paddle.Tensor:
        made = paddle.ones(self.shape)
        made.stop_gradient = False
        return made


def rows_of(received: Any) -> paddle.Tensor:
    """Experts that return their rows, or the sums of the probabilities of a token's rows."""
    if received.rows is not None:
        return received.rows * 1
    return received.tokens * received.probs.sum(axis=1, keepdim=True)


def marks_of_a_device(options: dict[str, Any]) -> dict[str, Any]:
    """NaN checks for outputs of calls in another order, and the error of the next dispatch."""
    program = Marked(options)
    found: dict[str, Any] = {}
    with on_this_device():
        x = program.x()
        is_static = "tokens_per_rank" in options
        received = [program.dispatched(layer, x) for layer in range(2)]
        outs = [None, None]
        for layer, each in program.ordered(received):
            outs[layer] = program.layers[layer].combine(rows_of(each), each)
        found["combine"] = [bool(paddle.isnan(each).all()) for each in outs]
        copies = [] if is_static else [copy.deepcopy(each) for each in program.layers]
        found["copies"] = [caught(lambda ep=ep: ep.dispatch(x, program.ids, program.probs)) for ep in copies]
        found["after combine"] = [] if is_static else program.next_dispatches(x)
        received = [program.dispatched(layer, x) for layer in range(2)]
        outs = [program.layers[layer].combine(rows_of(each), each) for layer, each in enumerate(received)]
        found["right"] = [bool(paddle.isfinite(each).all()) for each in outs]
        for _, out in program.ordered(outs):
            out.sum().backward()
        found["gradient"] = bool(paddle.isnan(x.grad).all())
        found["after backward"] = [] if is_static else program.next_dispatches(x)
        if is_static:
            received = [None, None]
            for layer, _ in program.ordered(received):
                received[layer] = program.dispatched(layer, x)
            found["dispatch"] = [bool(paddle.isnan(each.tokens).all()) for each in received]
        found["again"] = bool(
            paddle.isfinite(program.layers[0].combine(rows_of(r := program.dispatched(0, x)), r)).all()
        )
    return found


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_a_device_makes_calls_in_another_order_nan_and_the_next_dispatch_raises(options, custom_backend):
    options = options | ({"tokens_per_rank": 3} if "tokens_per_rank" in options else {})
    for found in run(marks_of_a_device, 2, custom_backend, options=options):
        assert found["combine"] == [True, True]
        assert found["right"] == [True, True]
        assert found["gradient"]
        assert found["again"]
        if "tokens_per_rank" in options:
            assert found["dispatch"] == [True, True]
            continue
        assert found["copies"] == ["nothing was raised"] * 2
        for kind in ("combine", "backward"):
            for text in found[f"after {kind}"]:
                assert text.startswith(f"RuntimeError: {IN_ORDER}rank 0 is in "), text
                assert text.count(kind) >= 2


def swapped_dispatches() -> list[str]:
    """The errors of dispatches in another order, of layers with 40 experts and with more than any layer before."""
    program = Marked({}, (40, 120))
    with on_this_device():
        x = program.x()
        return [caught(lambda layer=layer: program.dispatched(layer, x)) for layer, _ in program.ordered([None] * 2)]


def test_dispatches_of_layers_with_other_numbers_of_experts_are_told_to_all_ranks(custom_backend):
    for texts in run(swapped_dispatches, 2, custom_backend):
        assert len(texts) == 2
        assert all(text.startswith(f"RuntimeError: {IN_ORDER}rank 0 is in dispatch of layer") for text in texts), texts


def dispatches_that_rank_1_misses() -> list[Any]:
    """Errors of a dispatch that rank 0 begins alone and of the next one, twice; then the counts of a good one."""
    rank, ep = paddle.distributed.get_rank(), ExpertParallel(4, combine="reduced", timeout=1, **PEER)
    x, ids, probs = paddle.ones([3, HIDDEN]), paddle.zeros([3, 1], "int32"), paddle.ones([3, 1])
    ep.dispatch(x, ids, probs)
    texts = []
    for _ in range(2):
        texts.append(caught(lambda: ep.dispatch(x, ids, probs)) if rank == 0 else "missed")
        paddle.distributed.barrier()
        texts.append(caught(lambda: ep.dispatch(x, ids, probs)))
    return [*texts, ep.dispatch(x, ids, probs).tokens_per_expert.tolist()]


@pytest.mark.cpu_only  # on a GPU the kernel that waits fails, which ends what the process can do
def test_ranks_go_on_together_after_one_missed_an_exchange():
    first, second = run(dispatches_that_rank_1_misses, 2)
    assert first[0] == first[2] == "RuntimeError: ExpertParallel: rank 1 of the group did not answer"
    assert first[1::2] == second[1::2]
    exchanges = [[int(each) for each in re.findall(r"exchange (\d+)", text)] for text in first[1:4:2]]
    begin = exchanges[0][1]
    assert exchanges == [[begin + 1, begin], [begin + 3, begin + 2]]
    layer = re.search(r"layer \d+", first[1])[0]
    for text, (ahead, behind) in zip(first[1:4:2], exchanges, strict=True):
        given = ", ".join(
            f"rank {rank} is in dispatch of {layer}, call 1, exchange {number}"
            for rank, number in ((0, ahead), (1, behind))
        )
        assert text == f"RuntimeError: {IN_ORDER}{given}"
    assert (first[4], second[4]) == ([6, 0], [0, 0])
