# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Launches that are written down once and made again: for which calls, and with which arrays."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from paddle_moe_ops.triton.launch.allocator import ALLOCATOR, scratch_memory
from paddle_moe_ops.triton.launch.device import MAX_CACHED_CALLS
from paddle_moe_ops.triton.ops.permute import permute
from paddle_moe_ops.triton.ops.unpermute import unpermute
from paddle_moe_ops.triton.recording import facts_of, recorded

from .interpreter import NumpyDevice

# These tests do not depend on the device: each launch is the interpreter's.
pytestmark = pytest.mark.cpu_only

TOKENS, COLUMNS = 3, 5
TOKEN_ROWS = np.array([[0, 2], [1, 3], [4, 5]], np.int32)
OWNERS = np.array([0, 1, 0, 1, 2, 2], np.int32)


class Recording(NumpyDevice):
    def __init__(self) -> None:
        super().__init__()
        self.recordings = {}


class Doubling:
    """A call of two launches with an array in between: each token twice, added up."""

    def __init__(self, device):
        self.device, self.calls = device, 0

    def __call__(self, values, maps=(TOKEN_ROWS, OWNERS)):
        device = self.device
        arrays = (each if hasattr(each, "data_ptr") else device.array(each) for each in (values, *maps))
        inputs = x, token_rows, owners = tuple(arrays)

        def call(on):
            self.calls += 1
            rows, _ = permute(on, x, None, token_rows, owners, "all")
            return unpermute(on, rows, token_rows), None

        made, nothing = recorded(device, ("doubling", *facts_of(device, *inputs)), inputs, call)
        assert nothing is None
        return device.numpy(made)


@pytest.fixture
def doubling():
    return Doubling(Recording())


def values(rng, shape=(TOKENS, COLUMNS)):
    return rng.integers(-9, 9, shape).astype(np.float32)


def test_a_call_of_the_same_sizes_is_repeated_with_its_own_arrays(doubling, rng):
    device = doubling.device
    for _ in range(3):
        x = values(rng)
        np.testing.assert_array_equal(doubling(x), 2 * x)
    assert doubling.calls == 1
    assert len(device.launches) == 3 * len(set(device.launches))


def test_a_call_that_another_one_interrupts_keeps_its_arguments(doubling, rng):
    device, x, other = doubling.device, values(rng), values(rng)
    doubling(x)
    run = device.run

    def run_after_another_call(*launch):
        device.run = run
        np.testing.assert_array_equal(doubling(other), 2 * other)
        run(*launch)

    device.run = run_after_another_call
    np.testing.assert_array_equal(doubling(x), 2 * x)
    assert device.run is run
    assert doubling.calls == 1


def test_arrays_after_a_missing_one_count():
    device = Recording()
    small, large = (device.array(np.zeros(count, np.float32)) for count in (2, 3))
    assert facts_of(device, None, small) != facts_of(device, None, large)


@pytest.mark.skipif(ALLOCATOR is None, reason="a Triton without descriptors")
def test_an_error_in_a_launch_restores_tritons_allocator():
    before = ALLOCATOR.get()
    with contextlib.suppress(ZeroDivisionError), scratch_memory(Recording()):
        during = ALLOCATOR.get()
        raise ZeroDivisionError
    assert during is not before
    assert ALLOCATOR.get() is before


def test_results_of_earlier_calls_stay_as_they_are(doubling, rng):
    x, y = values(rng), values(rng)
    doubling(x)
    second, third = doubling(x), doubling(y)
    np.testing.assert_array_equal(second, 2 * x)
    np.testing.assert_array_equal(third, 2 * y)


@pytest.mark.parametrize("other", ["columns", "alignment", "stride", "dtype"])
def test_calls_of_other_arrays_are_made_anew(other, doubling, rng):
    x, device = values(rng, (TOKENS, 8)), doubling.device
    doubling(device.array(x))
    changed = {
        "columns": lambda: device.array(x[:, :7]),
        "alignment": lambda: device.array(x, offset=4),
        "stride": lambda: device.columns(device.array(np.concatenate([x, x], axis=1)), 8),
        "dtype": lambda: device.array(x.astype(np.float16)),
    }[other]()
    np.testing.assert_array_equal(doubling(changed), 2 * device.numpy(changed))
    assert doubling.calls == 2


def test_an_argument_that_is_missing_is_told_from_one_that_is_there(doubling, rng):
    device = doubling.device
    x = device.array(values(rng))
    assert facts_of(device, x, None) != facts_of(device, None, x)


def test_arrays_that_share_memory_are_not_written_down(doubling, rng):
    device = doubling.device
    both = device.array(np.concatenate([OWNERS, TOKEN_ROWS.ravel()]))
    overlapping = type(both)(both.values[:6]), type(both)(both.values[3:])
    x = device.array(values(rng))

    def call(on):
        return (permute(on, x, None, device.array(TOKEN_ROWS), overlapping[0], "all")[0],)

    for _ in range(2):
        recorded(device, "key", (x, *overlapping), call)
    assert device.recordings == {"key": None}


def test_a_call_whose_array_is_not_listed_is_not_written_down(doubling, rng):
    device, x = doubling.device, doubling.device.array(values(rng))
    maps = device.array(TOKEN_ROWS), device.array(OWNERS)
    for _ in range(2):
        recorded(device, "key", (x, maps[0]), lambda on: (permute(on, x, None, *maps, "all")[0],))
    assert device.recordings == {"key": None}


def test_a_call_that_returns_what_it_was_given_is_not_written_down(doubling, rng):
    device, x = doubling.device, doubling.device.array(values(rng))
    assert recorded(device, "key", (x,), lambda on: (x,)) == (x,)
    assert device.recordings == {"key": None}


def test_a_call_that_looks_at_data_is_not_written_down(doubling):
    device = doubling.device
    sizes = device.array(np.array([2, 3], np.int32))

    def call(on):
        return (on.empty([on.read_int(sizes, 0)], "float32"),)

    assert recorded(device, "key", (sizes,), call)[0].shape == (2,)
    sizes.values[0] = 4
    assert recorded(device, "key", (sizes,), call)[0].shape == (4,)


def test_so_many_calls_are_kept_and_no_more(doubling, rng):
    device, x = doubling.device, values(rng)
    for number in range(MAX_CACHED_CALLS):
        device.recordings[number] = None
    doubling(x)
    assert len(device.recordings) == 1


def test_empty_arrays(doubling):
    none = np.zeros((0, COLUMNS), np.float32), (np.zeros((0, 2), np.int32), np.zeros(0, np.int32))
    for _ in range(2):
        assert doubling(*none).shape == (0, COLUMNS)


def test_a_device_without_recordings_makes_each_call():
    plain = Doubling(NumpyDevice())
    for _ in range(2):
        plain(np.ones((TOKENS, COLUMNS), np.float32))
    assert plain.calls == 2
