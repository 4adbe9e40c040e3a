# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""No function changes a tensor that it is given, whatever part of a buffer that is, and none remembers its values.

Callers pass views: columns of a padded input buffer, transposed parameters, every second row. Each keeps its address,
its strides, its version and its content, and a call reads what the buffer holds at that time.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import Plan, reference, use_backend
from paddle_moe_ops.backends import compiled
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.every_call import CALLS, IDS, MAPS, E, maps_of
from tests.ops.fastdeploy_calls import COUNTING_CALLS, OTHER_CALLS
from tests.ops.further_calls import FURTHER_CALLS
from tests.ops.problems import ordinary, tensor
from tests.packaging.public_api import public_modules
from tests.params import FLOAT8_DTYPES, SUM_DTYPES
from tests.scenarios.test_every_function import OF_MEMORY, left_out, public_functions

pytestmark = [pytest.mark.long, pytest.mark.cpu_only]  # triton's kernels are interpreted

EVERY_CALL = [*CALLS, *FURTHER_CALLS, *OTHER_CALLS]
OTHER_MAPS = maps_of(np.where(IDS[::-1] >= 0, E - 1 - IDS[::-1], IDS[::-1]))
ANEW = {id(each): other for each, other in zip(MAPS, OTHER_MAPS, strict=True)}
# Methods of transports, which tests/distributed call with their own.
OF_TRANSPORTS = tuple(
    f"paddle_moe_ops.expert_parallel.{name}." for name in ("protocol", "deep_ep", "hybrid_ep", "exchanges")
)
# Their arguments are what they write to, or states that tests/distributed gather and compare.
WRITE_OR_MOVE = {
    *OF_MEMORY,
    *(f"paddle_moe_ops.compat.fastdeploy.selection.{call.function}" for call in COUNTING_CALLS),
    "paddle_moe_ops.compat.paddlefleet.tokens_zip_unique_add",
    "paddle_moe_ops.compat.paddlefleet.tokens_zip_unique_add_subbatch",
    "paddle_moe_ops.expert_parallel.training.ClipGradByGlobalNorm.get_l2_norm_pow",
    "paddle_moe_ops.expert_parallel.training.average_gradients",
}


def arrays_in(value: Any) -> Iterator[NDArray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)


def with_tensors(value: Any, tensors: Iterator[paddle.Tensor]) -> Any:
    """The value with tensors in place of arrays, and our plan in place of the oracle's."""
    if isinstance(value, np.ndarray):
        return next(tensors)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [with_tensors(item, tensors) for item in value]
        return Plan(*items) if isinstance(value, reference.Plan) else type(value)(items)
    return value


def anew(value: Any, rng: np.random.Generator) -> Any:
    """Other data for a call: other numbers, tokens and experts in reverse order, chunks and shards in another one."""
    if id(value) in ANEW:
        return ANEW[id(value)]
    if isinstance(value, dict):
        return {key: anew(item, rng) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(anew(item, rng) for item in value)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype in (*SUM_DTYPES, *FLOAT8_DTYPES):
        return ordinary(rng, value.shape).astype(value.dtype)
    return value[::-1] if value.ndim else value


Part = Callable[[paddle.Tensor], paddle.Tensor]


def columns(array: NDArray) -> tuple[NDArray, Part]:
    """The first columns of wider rows."""
    width = array.shape[-1]
    return np.concatenate([array, array[..., :1], array[..., :1]], axis=-1), lambda buffer: buffer[..., :width]


def transposed(array: NDArray) -> tuple[NDArray, Part]:
    axes = [*range(array.ndim - 2), array.ndim - 1, array.ndim - 2]
    return array.transpose(axes), lambda buffer: buffer.transpose(axes)


def every_second_row(array: NDArray) -> tuple[NDArray, Part]:
    return np.repeat(array, 2, axis=0), lambda buffer: buffer[::2]


def contiguous(array: NDArray) -> tuple[NDArray, Part]:
    return array, lambda buffer: buffer


LAYOUTS = [columns, transposed, every_second_row]


class Buffer:
    """A buffer, and the part of it that is an argument."""

    def __init__(self, array: NDArray, layout: Callable[[NDArray], tuple[NDArray, Part]], place: Any) -> None:
        if layout is not contiguous and array.ndim == 0:
            layout = lambda array: (np.stack([array] * 2), lambda buffer: buffer[1])  # noqa: E731
        elif layout is not contiguous and array.ndim == 1:
            layout = every_second_row
        self._layout, self._place = layout, place
        stored, part = layout(array)
        self.buffer = tensor(stored, place)
        self.part = part(self.buffer)
        assert layout is contiguous or array.ndim == 0 or not self.part.is_contiguous() or array.size < 2

    def write(self, array: NDArray) -> None:
        self.buffer.copy_(tensor(self._layout(array)[0], self._place), True)

    def state(self) -> tuple[Any, ...]:
        """Whatever a call must leave as it is."""
        both = self.part, self.buffer
        facts = [(each.data_ptr(), list(each.strides), list(each.shape), each.inplace_version) for each in both]
        return *facts, self.part.dtype, self.part.stop_gradient, *(to_numpy(each).tobytes() for each in both)


class Given:
    """The arguments of a call as parts of buffers."""

    def __init__(self, arguments: dict[str, Any], layout: Any, place: Any) -> None:
        self.buffers = [Buffer(array, layout, place) for array in arrays_in(arguments)]
        self.arguments = with_tensors(arguments, iter([each.part for each in self.buffers]))
        self._layout, self._place = layout, place

    def write(self, arguments: dict[str, Any]) -> None:
        for buffer, array in zip(self.buffers, arrays_in(arguments), strict=True):
            buffer.write(array)

    @contextlib.contextmanager
    def staying(self, *others: Buffer) -> Iterator[None]:
        buffers = [*self.buffers, *others]
        before = [each.state() for each in buffers]
        yield
        for each, state in zip(buffers, before, strict=True):
            assert each.state() == state

    def results(self, call: Any, *, trains: bool) -> list[paddle.Tensor]:
        """Outputs, and gradients of all floats from gradients of the outputs that are parts of buffers, too."""
        floats = [each.part for each in self.buffers if each.part.dtype in (paddle.float32, paddle.float16)]
        for each in floats:
            each.stop_gradient = not trains
        with self.staying():
            outputs = list(tensors_in(call.run(self._place, **self.arguments)))
        with_graph = [each for each in outputs if trains and not each.stop_gradient]
        if not with_graph:
            return outputs
        rng = np.random.default_rng(7)
        started = [
            Buffer(ordinary(rng, tuple(each.shape)).astype(to_numpy(each).dtype), self._layout, self._place)
            for each in with_graph
        ]
        with self.staying(*started):
            paddle.autograd.backward(with_graph, [each.part for each in started])
        gradients = [paddle.assign(each.grad) for each in floats if each.grad is not None]
        for each in floats:
            each.clear_gradient(False)
        return outputs + gradients


def tensors_in(value: Any) -> Iterator[paddle.Tensor]:
    if isinstance(value, paddle.Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


# Automatic: calls that fit take the quick form, where C++ looks at the arguments.
WAYS = [
    *(("automatic", layout) for layout in LAYOUTS),
    ("compiled", columns),
    ("reference", columns),
    ("triton", columns),
    ("triton", transposed),
]
# In CI each call has one layout, in turn. Named backends run one layout of every second function that others rename or
# put together. Interpreted kernels take long, so they run every fourth of these.
FRONTS = ("compat.", "expert_parallel", "nn.", "paddle.")
OF_BACKENDS = [name for name in map(str, EVERY_CALL) if not name.startswith(FRONTS)]
CHOSEN = {"compiled": OF_BACKENDS[::2], "reference": OF_BACKENDS[1::2], "triton": OF_BACKENDS[::4]}


def marks_of(number: int, call: Any, on: str, layout: Any) -> list[pytest.MarkDecorator]:
    if on == "automatic":
        is_slow = layout is not LAYOUTS[number % len(LAYOUTS)]
    else:
        is_slow = layout is transposed or str(call) not in CHOSEN[on]
    return [pytest.mark.slow] * is_slow


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of the test."""
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    with contextlib.nullcontext() if request.param == "automatic" else use_backend(request.param):
        yield request.param


def data_of(call: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two sets of good data of the same shapes."""
    return call.arguments, anew(call.arguments, np.random.default_rng(zlib.crc32(str(call).encode())))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of tensors that were copied."""
    found, clone = set(), paddle.Tensor.clone
    monkeypatch.setattr(paddle.Tensor, "clone", lambda each: found.add(each.data_ptr()) or clone(each))
    return found


@pytest.mark.parametrize(
    ("call", "on", "layout"),
    [
        pytest.param(call, on, layout, id=f"{on}-{layout.__name__}-{call}", marks=marks_of(number, call, on, layout))
        for on, layout in WAYS
        for number, call in enumerate(EVERY_CALL)
    ],
    indirect=["on"],
)
def test_arguments_stay_what_they_are_and_are_read_anew(call, layout, on, place, copied):
    first, other = data_of(call)
    given = Given(first, layout, place)
    for trains, arguments in ((True, first), (False, other)):
        given.write(arguments)
        results = given.results(call, trains=trains)
        copied.clear()
        alone = Given(arguments, contiguous, place)
        for got, expected in zip(results, alone.results(call, trains=trains), strict=True):
            assert_bits_equal(got, expected)
        # The oracle keeps copies of matrices, a process alone those of its messages.
        if on != "reference" and not str(call).startswith("expert_parallel"):
            assert not copied & {each.part.data_ptr() for each in alone.buffers}


def test_no_public_function_is_left_out(place, monkeypatch):
    for name in compiled.QUICK:  # which replace functions
        monkeypatch.setattr(compiled.backend, name, compiled._declines)
    with left_out(public_functions(public_modules())) as names:
        for call in EVERY_CALL:
            call.run(place)
    assert {name for name in names if not name.startswith(OF_TRANSPORTS)} == WRITE_OR_MOVE
