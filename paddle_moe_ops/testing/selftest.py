# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops selftest``: the compiled operators against the NumPy reference, in seconds.

A handful of shapes and dtypes, forward and backward. Everything must agree bit for bit, but for the gradients
of probabilities that weight a sum: those are dot products, whose order of summation differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle
from numpy.typing import NDArray

import paddle_moe_ops as ops
from paddle_moe_ops import reference
from paddle_moe_ops.backends.arrays import to_numpy, to_tensor


class Case(NamedTuple):
    """One routing problem in the usual letters; K slots per token, of which some are empty."""

    T: int
    H: int
    E: int
    K: int
    A: int = 1

    def __str__(self) -> str:
        return f"T{self.T}-H{self.H}-E{self.E}-K{self.K}-A{self.A}"


class Outcome(NamedTuple):
    """What one check found: nothing where `difference` is None."""

    check: str
    difference: str | None


CASES = (Case(T=63, H=72, E=7, K=2), Case(T=257, H=200, E=32, K=8, A=16), Case(T=5, H=1, E=3, K=3, A=4))
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# For dot products of at most 256 float32 terms of size 1, added in another order.
RTOL, ATOL = 1e-5, 1e-4


def main() -> int:
    """Runs every check, prints a line for each and a verdict, and returns the exit status."""
    start = time.perf_counter()
    with ops.use_backend("compiled"):
        outcomes = []
        for outcome in run_checks():
            outcomes.append(outcome)
            verdict = "ok    " if outcome.difference is None else "FAILED"
            print(f"{verdict} {outcome.check}" + (f": {outcome.difference}" if outcome.difference else ""))
    seconds = time.perf_counter() - start
    failed = sum(outcome.difference is not None for outcome in outcomes)
    if failed:
        print(f"selftest FAILED: {failed} of {len(outcomes)} checks, {seconds:.1f} s")
        return 1
    print(f"selftest passed: {len(outcomes)} checks, {seconds:.1f} s")
    return 0


def run_checks() -> Iterator[Outcome]:
    """Every check, one after the other, on the backend that is chosen."""
    for case in CASES:
        for dtype in DTYPES:
            yield from _check_verbs(case, dtype)
            yield from _check_paddle_functions(case, dtype)
    yield from _check_verbs(Case(T=0, H=72, E=7, K=2, A=4), np.dtype(np.float32))
    yield _check_float8()
    yield _check_small_buffer()
    yield _check_duplicates()


class _Problem:
    """Random inputs of a case, the same on every machine."""

    def __init__(self, case: Case, dtype: np.dtype) -> None:
        self.rng = np.random.default_rng(list(case))
        self.ids = np.argsort(self.rng.random((case.T, case.E)), axis=1)[:, : case.K].astype(np.int32)
        self.ids[self.rng.random(self.ids.shape) < 0.2] = -1
        self.probs = self.rng.random((case.T, case.K), dtype=np.float32)
        self.dtype = dtype
        self.x = self.normal(case.T, case.H)

    def normal(self, *shape: int) -> NDArray:
        return self.rng.standard_normal(shape).astype(self.dtype)


def _check_verbs(case: Case, dtype: np.dtype) -> Iterator[Outcome]:
    problem = _Problem(case, dtype)
    label = f"{case} {dtype}"
    arguments: dict[str, Any] = {"num_experts": case.E, "padding_alignment": case.A}
    plan = ops.route(_tensor(problem.ids), _tensor(problem.probs), **arguments)
    expected_plan = reference.route(problem.ids, problem.probs, **arguments)
    yield _compare(f"route {label}", _pairs(plan, expected_plan))

    x = _tensor(problem.x, gradient=True)
    rows, _ = ops.permute(x, plan)
    d_rows = problem.normal(*rows.shape)
    _backward([rows], [d_rows])
    expected_rows, _ = reference.permute(problem.x, expected_plan)
    pairs = _pairs((rows, x.grad), (expected_rows, reference.permute_backward(d_rows, expected_plan)))
    yield _compare(f"permute {label}", pairs)

    d_out = problem.normal(case.T, case.H)
    y = _tensor(expected_rows, gradient=True)
    out = ops.unpermute(y, plan)
    _backward([out], [d_out])
    d_y, _ = reference.unpermute_backward(d_out, expected_plan)
    pairs = _pairs((out, y.grad), (reference.unpermute(expected_rows, expected_plan), d_y))
    yield _compare(f"unpermute {label}", pairs)

    y, probs = _tensor(expected_rows, gradient=True), _tensor(problem.probs, gradient=True)
    out = ops.unpermute(y, plan, probs)
    _backward([out], [d_out])
    d_y, d_probs = reference.unpermute_backward(d_out, expected_plan, expected_rows, problem.probs)
    expected = reference.unpermute(expected_rows, expected_plan, problem.probs)
    pairs = _pairs((out, y.grad), (expected, d_y))
    yield _compare(f"unpermute weighted {label}", pairs, close=_pairs([probs.grad], [d_probs]))


def _check_paddle_functions(case: Case, dtype: np.dtype) -> Iterator[Outcome]:
    problem = _Problem(case, dtype)
    label = f"{case} {dtype}"
    ids, sizes = _tensor(problem.ids), (case.E, None, case.A)
    hidden, probs = _tensor(problem.x, gradient=True), _tensor(problem.probs, gradient=True)
    outputs = ops.moe_permute(hidden, None, ids, probs, *sizes, return_expert_indices=True)
    expected = reference.moe_permute(problem.x, None, problem.ids, problem.probs, *sizes, return_expert_indices=True)
    d_rows, d_row_probs = problem.normal(*outputs[0].shape), _float32(problem.normal(outputs[2].shape[0]))
    _backward([outputs[0], outputs[2]], [d_rows, d_row_probs])
    plan = reference.route(problem.ids, problem.probs, num_experts=case.E, padding_alignment=case.A)
    gradients = reference.moe_permute_backward(d_rows, d_row_probs, plan)
    pairs = _pairs((*outputs, hidden.grad, probs.grad), (*expected, *gradients))
    yield _compare(f"moe_permute {label}", pairs)
    for weighted in (False, True):
        yield _check_moe_unpermute(case, problem, expected, weighted)


def _check_moe_unpermute(case: Case, problem: _Problem, permuted: Any, weighted: bool) -> Outcome:
    rows, rowmap, row_probs, *_ = permuted
    y, w = _tensor(rows, gradient=True), _tensor(row_probs, gradient=True)
    options: dict[str, Any] = {"using_weighted_combine": weighted}
    outputs = ops.moe_unpermute(y, _tensor(rowmap), _tensor(problem.ids), w, case.T, case.E, **options)
    d_out, d_slots = problem.normal(case.T, case.H), _float32(problem.normal(case.T, case.K))
    _backward(outputs, [d_out, d_slots])
    wanted = reference.moe_unpermute(rows, rowmap, problem.ids, row_probs, case.T, case.E, **options)
    d_y, d_w = reference.moe_unpermute_backward(d_out, d_slots, rows, rowmap, problem.ids, row_probs, **options)
    name = f"moe_unpermute{' weighted' if weighted else ''} {case} {problem.dtype}"
    return _compare(name, _pairs((*outputs, y.grad), (*wanted, d_y)), close=_pairs([w.grad], [d_w]))


def _check_float8() -> Outcome:
    case = Case(T=64, H=256, E=8, K=4, A=8)
    problem = _Problem(case, np.dtype(ml_dtypes.float8_e4m3fn))
    scale = problem.rng.random((case.T, 2), dtype=np.float32)
    sizes = (case.E, None, case.A)
    outputs = ops.moe_permute(_tensor(problem.x), _tensor(scale), _tensor(problem.ids), _tensor(problem.probs), *sizes)
    expected = reference.moe_permute(problem.x, scale, problem.ids, problem.probs, *sizes)
    return _compare(f"moe_permute with scales {case} {problem.dtype}", _pairs(outputs, expected))


def _check_small_buffer() -> Outcome:
    case = Case(T=64, H=16, E=8, K=2, A=4)
    problem = _Problem(case, np.dtype(np.float32))
    arguments: dict[str, Any] = {"num_experts": case.E, "padding_alignment": case.A, "buffer_size": case.T}
    plan = ops.route(_tensor(problem.ids), _tensor(problem.probs), validate=False, **arguments)
    expected = reference.route(problem.ids, problem.probs, validate=False, **arguments)
    rows, _ = ops.permute(_tensor(problem.x), plan)
    expected_rows, _ = reference.permute(problem.x, expected)
    return _compare(f"static buffer that overflows {case}", _pairs((*plan, rows), (*expected, expected_rows)))


def _check_duplicates() -> Outcome:
    case = Case(T=64, H=16, E=4, K=6)
    problem = _Problem(case, np.dtype(np.float32))
    ids = problem.rng.integers(-1, case.E, (case.T, case.K), dtype=np.int32)
    pairs = []
    for duplicates in ("first", "each"):
        arguments: dict[str, Any] = {"num_experts": case.E, "duplicates": duplicates, "validate": False}
        plan = ops.route(_tensor(ids), _tensor(problem.probs), **arguments)
        pairs += _pairs(plan, reference.route(ids, problem.probs, **arguments))
    return _compare(f"experts named twice by a token {case}", pairs)


def _tensor(array: NDArray, *, gradient: bool = False) -> paddle.Tensor:
    tensor = to_tensor(array, paddle.CPUPlace())
    tensor.stop_gradient = not gradient
    return tensor


def _float32(array: NDArray) -> NDArray:
    return array.astype(np.float32)


def _backward(outputs: Any, gradients: list[NDArray]) -> None:
    paddle.autograd.backward(list(outputs), [_tensor(gradient) for gradient in gradients])


def _pairs(got: Any, wanted: Any) -> list[tuple[Any, Any]]:
    """Results beside what they should be, tensors as arrays."""
    arrays = [to_numpy(value) if isinstance(value, paddle.Tensor) else value for value in got]
    return list(zip(arrays, wanted, strict=True))


def _compare(check: str, exact: list[tuple[Any, Any]], close: list[tuple[Any, Any]] | None = None) -> Outcome:
    for got, wanted in [*exact, *(close or [])]:
        if np.shape(got) != np.shape(wanted):
            return Outcome(check, f"shape {np.shape(got)} instead of {np.shape(wanted)}")
    for got, wanted in exact:
        different = np.count_nonzero(_bits(got) != _bits(wanted))
        if different:
            return Outcome(check, f"{different} of {np.size(wanted)} values differ")
    for got, wanted in close or []:
        if not np.allclose(got, wanted, rtol=RTOL, atol=ATOL):
            return Outcome(check, f"values differ by up to {np.max(np.abs(got - wanted)):.3g}")
    return Outcome(check, None)


def _bits(value: Any) -> NDArray:
    array = np.ascontiguousarray(value)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind in "fV" else array
