# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""New CPU outputs ask for huge pages, and small ones for all of their pages. Only the time changes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_permute, moe_unpermute, permute, reference, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.routing import uniform
from tests.ops.problems import tensor

# Memory of the host.
pytestmark = pytest.mark.cpu_only

# [T, H] is 36 MiB of float32.
T, H, E, K = 4608, 2048, 8, 2
SYSTEM_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised(tensor: paddle.Tensor) -> bool:
    """Return whether the middle of a tensor's memory is marked for huge pages."""
    middle = tensor.data_ptr() + tensor.size * 2
    flags = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:([^\n]*)$", re.MULTILINE | re.DOTALL)
    for begin, end, marks in flags.findall(Path("/proc/self/smaps").read_text(encoding="utf-8")):
        if int(begin, 16) <= middle < int(end, 16):
            return "hg" in marks.split()
    raise AssertionError(f"no mapping holds {middle:x}")


LIBC = ctypes.CDLL(None)
M_PERTURB = -6


@pytest.fixture(autouse=True)
def untouched_memory(poison) -> Iterator[None]:
    """The poison of other tests is a first use of every page."""
    LIBC.mallopt(M_PERTURB, 0)
    yield
    LIBC.mallopt(M_PERTURB, poison ^ 0xFF)


def give_back_freed_memory() -> None:
    """The C library may serve any block from memory that was used and freed; its pages go back first."""
    LIBC.malloc_trim(0)


@pytest.fixture
def ids(rng):
    return uniform(rng, T, K, E)


def test_new_large_outputs_ask_for_huge_pages_and_equal_the_oracle(rng, ids, place):
    x = rng.standard_normal((T, H)).astype(np.float32)
    plan = reference.route(ids, num_experts=E)
    map_of_slots = route(tensor(ids, place), num_experts=E)
    probs = tensor(np.full((T, K), 0.5, np.float32), place)
    tokens = tensor(x, place)
    give_back_freed_memory()
    rows, _ = permute(tokens, map_of_slots)
    sums = unpermute(rows, map_of_slots)
    unzipped, rowmap, row_probs, _ = moe_permute(tokens, None, tensor(ids, place), probs, E, None, 1)
    zipped, _ = moe_unpermute(unzipped, rowmap, tensor(ids, place), row_probs, T, E)
    # Without huge pages there is nothing to mark, and nothing must go wrong.
    known = SYSTEM_SWITCH.exists()
    assert [advised(output) for output in (rows, sums, unzipped, zipped)] == [known] * 4
    assert_bits_equal(rows, reference.permute(x, plan)[0], what="rows")
    assert_bits_equal(sums, reference.unpermute(reference.permute(x, plan)[0], plan), what="sums")


def test_gradients_ask_for_huge_pages(ids, place):
    rows = tensor(np.ones((T * K, H), np.float32), place, gradient=True)
    total = unpermute(rows, route(tensor(ids, place), num_experts=E)).sum()
    give_back_freed_memory()
    total.backward()
    assert advised(rows.grad) == SYSTEM_SWITCH.exists()
    assert (rows.grad == 1).all()


@pytest.mark.compiled_only
def test_the_gradient_of_stacked_matrices_asks_for_huge_pages(place):
    w = tensor(np.ones((E, 1024, 1024), np.float32), place, gradient=True)
    out = grouped_gemm(tensor(np.ones((E, 1024), np.float32), place), w, [1] * E)
    give_back_freed_memory()
    out.sum().backward()
    assert advised(w.grad) == SYSTEM_SWITCH.exists()
    assert (w.grad == 1).all()


# Sizes around the blocks that malloc keeps, a huge page and one thread's share; odd sizes end within a page.
@pytest.mark.parametrize("tokens", [15, 17, 129, 255, 257, 385, 511, 513])
def test_outputs_of_every_size_equal_the_oracle(rng, place, tokens):
    x = rng.standard_normal((tokens, H - 1)).astype(np.float32)
    ids = uniform(rng, tokens, 1, E)
    plan = reference.route(ids, num_experts=E)
    for _ in range(3):  # the memory of one call is that of the next, or new again
        rows, _ = permute(tensor(x, place), route(tensor(ids, place), num_experts=E))
        assert_bits_equal(rows, reference.permute(x, plan)[0], what="rows")
        del rows


def test_an_output_that_is_small_or_empty_is_left_alone(place):
    for tokens in (0, 3):
        plan = route(tensor(np.zeros((tokens, 1), np.int32), place), num_experts=1)
        rows, _ = permute(tensor(np.ones((tokens, 8), np.float32), place), plan)
        assert rows.shape == [tokens, 8]
