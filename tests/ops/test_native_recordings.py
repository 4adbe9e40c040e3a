# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that the compiled library repeats: on a driver of ours, whose launches run the kernels in the interpreter."""

from __future__ import annotations

import array
import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_moe_ops import use_backend
from paddle_moe_ops._native import native
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.triton.native_recording import Driver, Repeater, native_recording
from paddle_moe_ops.triton.recording import recorded
from tests.ops.problems import tensor
from tests.ops.test_moe_mlp import Layer, assert_close
from tests.params import PADDED

pytestmark = [pytest.mark.long, pytest.mark.cpu_only, pytest.mark.compiled_only]

SHAPE = PADDED._replace(T=5, E=5, A=8)
CONTEXT, STREAM, SHARED, SCRATCH = 1234, 0x7F00_0000_0010, 4096, 384
CUDA_ERROR = b"too many resources requested for launch"

_ContextFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_LaunchFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
_ErrorFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))


class Launcher:
    """One of Triton's, as far as it is looked at."""

    global_scratch_size, global_scratch_align = SCRATCH, 128
    profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = gsan_enabled = False


class OlderLauncher:
    """One of Triton 3.3's."""

    global_scratch_size = global_scratch_align = 0
    launch_cooperative_grid = False


Launcher.__module__ = OlderLauncher.__module__ = "triton.backends.nvidia.driver"


class Compiled(tuple):
    """A kernel as `NumpyDevice` has it, which looks like one that Triton compiled."""

    run: Launcher
    function: int
    packed_metadata: tuple[int, ...]


class Recordings:
    """The library's functions for recordings, which note the size of each recording's scratch."""

    def __init__(self) -> None:
        self.facts = native.recordings.facts
        self._scratch_bytes, self._repeated = {}, threading.local()

    def new_recording(self, words):
        made = native.recordings.new_recording(words)
        self._scratch_bytes[made] = scratch_bytes(array.array("q", words))
        return made

    def repeat(self, recording, stream, *inputs):
        self._repeated.scratch_bytes = self._scratch_bytes[recording]
        return native.recordings.repeat(recording, stream, *inputs)

    def scratch_bytes(self):
        """Bytes of the scratch of the recording that this thread repeats."""
        return self._repeated.scratch_bytes


def scratch_bytes(words):
    """Bytes from the last array's start to the workspace's end, from the words of a recording."""
    index = 5
    for _ in range(words[4]):  # results
        index += 1 if words[index] < 0 else 2 + words[index + 1]
    workspace, arrays = words[index : index + 2]
    return workspace - words[index + 1 + arrays]


class Card:
    """A GPU whose driver runs each launch at once in the interpreter.

    Attributes:
        seen: of each launch that the library made: kernel, grid, block, bytes of shared memory, stream, arguments.
        in_python: of each that Python made: kernel, grid, arguments.
        context: of the calling thread.
        status: what launches return.
    """

    def __init__(self, device) -> None:
        self.device, self.kernels, self.launcher = device, {}, Launcher()
        self.seen, self.in_python, self.problems = [], [], []
        self.context, self.status, self.sizes = CONTEXT, 0, None
        self._interpreter = threading.Lock()
        self._functions = [_ContextFunction(self._current), _LaunchFunction(self._launch), _ErrorFunction(self._text)]
        addresses = (ctypes.cast(each, ctypes.c_void_p).value for each in self._functions)
        self.driver = Driver(*addresses, CONTEXT, lambda kernel: self.sizes or self._sizes(kernel))
        run = device.run

        def run_in_python(compiled, stream, programs, arguments):
            types = compiled[1]
            self.in_python.append((name_of(compiled[0]), programs, tuple(arguments[: len(types)])))
            run(compiled, stream, programs, arguments)

        device.run, device.compiled, device.stream = run_in_python, self.compiled, lambda: STREAM
        self.recordings = Recordings()
        device.native = Repeater(self.recordings, self.driver)

    def compiled(self, kernel, types, constants, warps):
        found = Compiled((kernel, types, constants, warps))
        found.run, found.packed_metadata = self.launcher, (warps, 1, SHARED)
        found.function = 1000 + len(self.kernels)
        self.kernels[found.function] = found
        return found

    def _sizes(self, kernel):
        return [4 if kind == "i32" else 8 for kind in self.kernels[kernel][1]] + [8, 8]

    def _current(self, context):
        context[0] = self.context
        return 0

    def _text(self, status, text):
        text[0] = CUDA_ERROR
        return 0

    def _launch(self, function, *others):
        grid, block, shared, stream, parameters, _ = others[:3], others[3:6], *others[6:]
        if self.status:
            return self.status
        try:
            kernel, types, constants, warps = self.kernels[function]
            read = [(ctypes.c_int32 if kind == "i32" else ctypes.c_int64) for kind in types]
            values = [kind.from_address(parameters[index]).value for index, kind in enumerate(read)]
            scratch, profile = (ctypes.c_uint64.from_address(parameters[len(types) + each]).value for each in (0, 1))
            assert profile == 0
            assert scratch % 128 == 0
            assert self.recordings.scratch_bytes() >= SCRATCH * grid[0]
            ctypes.memset(scratch, 0xEE, SCRATCH * grid[0])  # a kernel may use all of it
            self.seen.append((name_of(kernel), grid, block, shared, stream, tuple(values)))
            with self._interpreter:
                self.device.launch(kernel, grid[0], types, values, constants, warps)
        except Exception as problem:
            self.problems.append(problem)
        return 0


def name_of(kernel):
    return kernel.fn.__name__


@pytest.fixture
def card(interpreted):
    """The device of the backend, with a driver that the library can launch on."""
    card = Card(interpreted)
    yield card
    assert card.problems == []


def run(layer, **options):
    with use_backend("triton"):
        return layer.run("cpu", **options)


def assert_same(made, expected):
    for name, each in expected.items():
        assert_bits_equal(made[name], each)


@pytest.mark.parametrize(
    ("form", "keep", "transpose"),
    [
        ("by slot", "h", False),
        ("by row", "x", True),
        pytest.param("flat by slot", "h", True, marks=pytest.mark.slow),
        pytest.param("none", "x", False, marks=pytest.mark.slow),
    ],
)
def test_repeated_layers_have_the_bits_of_the_first_call_and_of_pythons_repeat(card, rng, form, keep, transpose):
    layer = Layer(rng, SHAPE, np.float16, transpose=transpose, form=form, sizes=(40, 24))
    first = run(layer, keep=keep, workspace_mb=1)
    assert card.seen == card.in_python == []  # the first call is written down
    assert_close(first, layer.due(), np.float16)
    assert_same(run(layer, keep=keep, workspace_mb=1), first)
    assert len(card.seen) >= 8
    assert card.in_python == []
    card.context = 0  # launches of this thread would go elsewhere
    assert_same(run(layer, keep=keep, workspace_mb=1), first)
    assert [(name, grid[0]) for name, grid, *_ in card.seen] == [each[:2] for each in card.in_python]
    assert {each[1:5] for each in card.seen} <= {
        ((programs, 1, 1), (32 * warps, 1, 1), SHARED, STREAM)
        for _, programs, _ in card.in_python
        for warps in (1, 2, 4, 8)
    }


def test_other_operands_of_the_same_sizes_give_their_own_results(card, rng):
    run(Layer(rng, SHAPE, np.float16, sizes=(40, 24)))
    for _ in range(2):
        layer = Layer(rng, SHAPE, np.float16, sizes=(40, 24))
        assert_close(run(layer), layer.due(), np.float16)
    assert card.in_python == []


def test_kernels_get_the_arguments_that_tritons_launchers_get(card, rng):
    run(Layer(rng, SHAPE, np.float16, sizes=(40, 24)))
    for recording in card.device.recordings.values():
        sizes = max(number for launch in recording.launches for _, number, _ in launch.places) + 1
        count = sizes - len(recording.results) - len(recording.offsets)
        inputs = [paddle.zeros([1 << 16], "uint8") for _ in range(count)]
        compare(card, recording, inputs)


def compare(card, recording, inputs):
    """The arguments of both ways: the same numbers, and addresses in the same places."""
    card.seen.clear()
    card.in_python.clear()
    launch, card.device.launch = card.device.launch, lambda *_: None
    made = recording.repeat(card.device, inputs)
    expected = recording._replace(native=None).repeat(card.device, inputs)
    card.device.launch = launch
    shifts = {a.data_ptr() - b.data_ptr() for a, b in zip(made, expected, strict=True) if a is not None}
    of_workspace = set()
    assert len(card.seen) == len(card.in_python) == len(recording.launches)
    for native_launch, python_launch, noted in zip(card.seen, card.in_python, recording.launches, strict=True):
        assert native_launch[0] == python_launch[0]
        addressed = {position for position, _, _ in noted.places}
        for position, (got, due) in enumerate(zip(native_launch[-1], python_launch[-1], strict=True)):
            if position not in addressed:
                assert got == due
            elif got != due and got - due not in shifts:
                of_workspace.add(got - due)
    assert len(of_workspace) <= 1
    for a, b in zip(made, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape, a.dtype, a.place, a.stop_gradient) == (b.shape, b.dtype, b.place, b.stop_gradient)


def test_rows_that_lie_apart_are_taken_as_they_are_and_other_strides_are_copied(card, rng):
    layer = Layer(rng, SHAPE, np.float16, sizes=(40, 24))
    expected = run(layer)
    wide = np.concatenate([layer.arrays["x"], layer.arrays["x"]], axis=1)
    turned = np.ascontiguousarray(layer.arrays["x"].T)
    with use_backend("triton"):
        for make in (lambda: tensor(wide, "cpu")[:, :40], lambda: tensor(turned, "cpu").transpose([1, 0])):
            for _ in range(3):
                leaves = {**layer.leaves("cpu"), "x": make()}
                assert not leaves["x"].is_contiguous()
                assert_bits_equal(layer.call(leaves, "cpu"), expected["out"])
    assert card.in_python == []


def test_an_error_of_the_driver_is_raised_as_triton_does(card, rng):
    layer = Layer(rng, SHAPE, np.float16)
    run(layer)
    card.status = 701
    with pytest.raises(RuntimeError, match=f"^Triton Error \\[CUDA\\]: {CUDA_ERROR.decode()}$"):
        run(layer)


PECULIARITIES = {
    "another launcher": lambda card: setattr(card, "launcher", type("Other", (Launcher,), {"__module__": "mine"})()),
    "no scratch": lambda card: setattr(card, "launcher", type("Bare", (), {"__module__": Launcher.__module__})()),
    "scratch for a profiler": lambda card: setattr(card.launcher, "profile_scratch_size", 8),
    "a cooperative grid": lambda card: setattr(card.launcher, "launch_cooperative_grid", True),
    "dependent launches": lambda card: setattr(card.launcher, "launch_pdl", True),
    "a sanitizer": lambda card: setattr(card.launcher, "gsan_enabled", True),
    "a large alignment": lambda card: setattr(card.launcher, "global_scratch_align", 512),
    "other parameters": lambda card: setattr(card, "sizes", [8]),
    "a driver that does not tell parameters": lambda card: setattr(card, "_sizes", lambda _: None),
}


def in_the_library(card, metadata=(4, 1, SHARED)):
    """Return whether the library repeats a launch."""
    compiled = card.compiled("kernel", ("i32",), (), 4)
    compiled.packed_metadata = metadata
    launch = SimpleNamespace(compiled=compiled, types=("i32",), programs=1, arguments=[1], places=[])
    return native_recording(card.device.native, [launch], [], 0, [], 0) is not None


@pytest.mark.parametrize("peculiarity", PECULIARITIES)
def test_kernels_that_are_launched_in_another_way_are_left_to_triton(card, peculiarity):
    assert in_the_library(card)
    PECULIARITIES[peculiarity](card)
    assert not in_the_library(card)


def test_so_are_those_of_clusters_and_of_more_shared_memory_than_is_usual(card):
    assert in_the_library(card, (4, 1, 227 << 10))
    assert in_the_library(card, (4, 1, SHARED, 1, 1, 1))
    assert not in_the_library(card, (4, 1, 228 << 10))
    assert not in_the_library(card, (4, 2, SHARED))


@pytest.mark.parametrize(("sizes", "repeats"), [([4, 8], True), ([4, 8, 8], False)])
def test_kernels_of_older_versions_get_no_scratch_for_profilers(card, sizes, repeats):
    card.launcher, card.sizes = OlderLauncher(), sizes
    assert in_the_library(card) == repeats


def test_a_layer_of_such_kernels_is_repeated_by_python(card, rng):
    card.sizes = [8]
    layer = Layer(rng, SHAPE, np.float16)
    expected = run(layer)
    assert_same(run(layer), expected)
    assert card.seen == []
    assert len(card.in_python) >= 8


def test_results_have_the_dtypes_and_shapes_that_were_written_down(card):
    x = paddle.zeros([3])
    made = [("float32", [2]), ("float16", [2, 3]), ("bfloat16", [0, 3]), ("int32", []), ("int64", [1]), ("bool", [4])]
    made += [("float8_e4m3fn", [4]), ("float8_e5m2", [1, 1])]

    def call(on):
        return *(on.empty(shape, dtype) for dtype, shape in made), None

    for _ in range(2):
        *results, nothing = recorded(card.device, "key", (x,), call)
        assert nothing is None
        found = [(str(each.dtype).removeprefix("paddle."), each.shape) for each in results]
        assert found == made
    assert card.device.recordings["key"].native is not None


def test_calls_of_several_threads_do_not_disturb_one_another(card, rng):
    layers = [Layer(rng, SHAPE, np.float16, sizes=(40, 24)) for _ in range(2)]
    expected = [run(layer) for layer in layers]
    made = {}
    threads = [threading.Thread(target=lambda i=i: made.update({i: run(layers[i])})) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for index, due in enumerate(expected):
        assert_same(made[index], due)
    assert card.in_python == []


@pytest.mark.parametrize(
    "arguments",
    [(), (1,), (1, 2), (None, 0), (b"", 0), ("recording", 0), ("recording", "stream"), ("recording", 0, 1.0)],
    ids=str,
)
def test_what_is_no_recording_and_no_tensor_is_refused(card, arguments):
    x = paddle.zeros([3])
    recorded(card.device, "key", (x,), lambda on: (on.empty([2], "float32"),))
    recording = card.device.recordings["key"].native
    given = [recording if each == "recording" else each for each in arguments]
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        native.recordings.repeat(*given)


def test_inputs_that_are_missing_are_noticed(card, rng):
    run(Layer(rng, SHAPE, np.float16))
    for recording in card.device.recordings.values():
        with pytest.raises(RuntimeError):
            native.recordings.repeat(recording.native, STREAM, paddle.zeros([1]))
    assert card.seen == []


@pytest.mark.parametrize("words", [b"", b"\1" * 8, "no bytes", bytes(40)], ids=["empty", "one", "text", "zeros"])
def test_what_is_no_list_of_launches_is_refused(words):
    with pytest.raises((TypeError, RuntimeError)):
        native.recordings.new_recording(words)


def words_of(*, dtype=0, offset=0, position=0, place=0):
    """A recording with one result, an array in 256 bytes of workspace, and a launch with a parameter of 8 bytes."""
    launch = [0, 1, 32, 0, 1, 0, 1, position, 1, place, 0, 0]
    return array.array("q", [0, 0, 0, 0, 1, dtype, 1, 4, 256, 1, offset, 1, *launch]).tobytes()


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": 8}, {"offset": 257}, {"offset": -1}, {"position": 8}, {"position": -1}, {"place": 1}, {"place": -1}],
    ids=str,
)
def test_a_recording_that_points_outside_of_its_memory_is_refused(wrong):
    assert native.recordings.new_recording(words_of()) is not None
    with pytest.raises(ValueError, match="an argument is not what the function takes"):
        native.recordings.new_recording(words_of(**wrong))
