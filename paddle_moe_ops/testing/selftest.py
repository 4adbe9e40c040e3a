# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops selftest``: the compiled operators against the NumPy reference, in seconds.

A handful of shapes and dtypes, forward and backward. Everything must agree bit for bit, except for the gradients of
probabilities that weight a sum: those are dot products, whose order of summation differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import paddle
from numpy.typing import NDArray

import paddle_moe_ops as ops
from paddle_moe_ops import masked, reference
from paddle_moe_ops.backends import resolve
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.routing import half_unassigned, random_probs
from paddle_moe_ops.testing.tolerances import assert_close_sums, dot_chain, dtype_tols


class Case(NamedTuple):
    """One routing problem in the usual letters."""

    T: int
    H: int
    E: int
    K: int
    A: int = 1

    def __str__(self) -> str:
        return f"T{self.T}-H{self.H}-E{self.E}-K{self.K}-A{self.A}"


Check = tuple[str, Callable[[], None]]  # the check; raises AssertionError if results differ

CASES = (Case(T=63, H=72, E=7, K=2), Case(T=257, H=200, E=32, K=8, A=16), Case(T=5, H=1, E=3, K=3, A=4))
EMPTY = Case(T=0, H=72, E=7, K=2, A=4)
FLOAT32 = np.dtype(np.float32)
DTYPES = (FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def main() -> int:
    """Run every check, print a line for each and a verdict, and return the exit status."""
    start = time.perf_counter()
    failed = 0
    checks = list(all_checks())
    with ops.use_backend("compiled"):
        try:
            resolve("route")
        except RuntimeError as error:
            print(f"selftest FAILED: {error}")
            return 1
        for name, check in checks:
            try:
                check()
            except AssertionError as difference:
                failed += 1
                print(f"FAILED {name}: {difference}")
            else:
                print(f"ok     {name}")
    seconds = time.perf_counter() - start
    if failed:
        print(f"selftest FAILED: {failed} of {len(checks)} checks, {seconds:.1f} s")
        return 1
    print(f"selftest passed: {len(checks)} checks, {seconds:.1f} s")
    return 0


def all_checks() -> Iterator[Check]:
    """Every check; they run on the backend that is chosen when they are called."""
    for case, dtype in [*((case, dtype) for case in CASES for dtype in DTYPES), (EMPTY, FLOAT32)]:
        problem = _Problem(case, dtype)
        yield f"route {problem}", problem.check_route
        yield f"permute {problem}", problem.check_permute
        yield f"quantize {problem}", problem.check_quantize
        yield f"unpermute {problem}", problem.check_unpermute
        yield f"unpermute weighted {problem}", problem.check_weighted_unpermute
        yield f"moe_permute {problem}", problem.check_moe_permute
        yield f"moe_unpermute {problem}", problem.check_moe_unpermute
        yield f"moe_unpermute weighted {problem}", problem.check_weighted_moe_unpermute
        yield f"sort_chunks {problem}", problem.check_sort_chunks
    yield "moe_permute float8_e4m3fn with scales", _check_float8
    yield "route and permute into a buffer that is too small", _check_small_buffer
    yield "route with experts named twice by a token", _check_duplicates
    yield "masked: row_id_map, rows and sums", _check_mask


class _Problem:
    """A case with random inputs, the same on every machine, and the reference's results for them."""

    def __init__(self, case: Case, dtype: np.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.rng = np.random.default_rng(list(case))
        self.ids = half_unassigned(self.rng, case.T, case.K, case.E)
        self.probs = random_probs(self.rng, self.ids)
        self.x = self.normal(case.T, case.H)
        self.arguments: dict[str, Any] = {"num_experts": case.E, "padding_alignment": case.A}
        self.plan = reference.route(self.ids, self.probs, **self.arguments)
        self.rows, _ = reference.permute(self.x, self.plan)

    def __str__(self) -> str:
        return f"{self.case} {self.dtype}"

    def normal(self, *shape: int, dtype: np.dtype | None = None) -> NDArray:
        return self.rng.standard_normal(shape).astype(dtype or self.dtype)

    def compiled_plan(self) -> ops.Plan:
        return ops.route(_tensor(self.ids), _tensor(self.probs), **self.arguments)

    def check_route(self) -> None:
        _check_equal(self.compiled_plan(), self.plan, reference.Plan._fields)

    def check_permute(self) -> None:
        x = _tensor(self.x, gradient=True)
        rows, _ = ops.permute(x, self.compiled_plan())
        d_rows = self.normal(*rows.shape)
        _backward([rows], [d_rows])
        wanted = (self.rows, reference.permute_backward(d_rows, self.plan))
        _check_equal((rows, x.grad), wanted, ("rows", "gradient of x"))

    def check_quantize(self) -> None:
        codes, scales = reference.quantize_1x128(self.x)
        _check_equal(ops.quantize_1x128(_tensor(self.x)), (codes, scales), ("codes", "scales"))
        back = ops.dequantize_1x128(_tensor(codes), _tensor(scales), dtype=paddle.float32)
        _check_equal([back], [reference.dequantize_1x128(codes, scales, dtype=FLOAT32)], ["dequantised rows"])
        got = ops.permute(_tensor(self.x), self.compiled_plan(), quantize="fp8_1x128_ue8m0", scale_layout="col")
        wanted = reference.permute_quantized(self.x, self.plan, ue8m0=True, scale_layout="col")
        _check_equal(got, wanted, ("permuted codes", "permuted scales"))

    def check_unpermute(self) -> None:
        y = _tensor(self.rows, gradient=True)
        out = ops.unpermute(y, self.compiled_plan())
        d_out = self.normal(self.case.T, self.case.H)
        _backward([out], [d_out])
        d_y, _ = reference.unpermute_backward(d_out, self.plan)
        _check_equal((out, y.grad), (reference.unpermute(self.rows, self.plan), d_y), ("sums", "gradient of y"))

    def check_weighted_unpermute(self) -> None:
        y, probs = _tensor(self.rows, gradient=True), _tensor(self.probs, gradient=True)
        out = ops.unpermute(y, self.compiled_plan(), probs)
        d_out = self.normal(self.case.T, self.case.H)
        _backward([out], [d_out])
        d_y, d_probs = reference.unpermute_backward(d_out, self.plan, self.rows, self.probs)
        _, magnitude = reference.unpermute_backward(np.abs(d_out), self.plan, np.abs(self.rows), self.probs)
        wanted = (reference.unpermute(self.rows, self.plan, self.probs), d_y)
        _check_equal((out, y.grad), wanted, ("sums", "gradient of y"))
        self._check_dot_products(probs.grad, d_probs, magnitude)

    def check_moe_permute(self) -> None:
        hidden, probs = _tensor(self.x, gradient=True), _tensor(self.probs, gradient=True)
        sizes = (self.case.E, None, self.case.A)
        outputs = ops.moe_permute(hidden, None, _tensor(self.ids), probs, *sizes, return_expert_indices=True)
        wanted = reference.moe_permute(self.x, None, self.ids, self.probs, *sizes, return_expert_indices=True)
        _check_equal(outputs, wanted, ("rows", "rowmap", "probabilities", "scales", "expert indices"))
        d_rows, d_row_probs = self.normal(*self.rows.shape), self.normal(len(self.rows), dtype=FLOAT32)
        _backward([outputs[0], outputs[2]], [d_rows, d_row_probs])
        gradients = reference.moe_permute_backward(d_rows, d_row_probs, self.plan)
        names = ("gradient of hidden_states", "gradient of the probabilities")
        _check_equal((hidden.grad, probs.grad), gradients, names)

    def check_moe_unpermute(self) -> None:
        self._check_moe_unpermute(weighted=False)

    def check_weighted_moe_unpermute(self) -> None:
        self._check_moe_unpermute(weighted=True)

    def check_sort_chunks(self) -> None:
        sizes, order = self.plan.tokens_per_expert, self.rng.permutation(self.case.E)
        y, probs = _tensor(self.rows, gradient=True), _tensor(np.asarray(self.plan.row_probs))
        outputs = ops.sort_chunks(y, _tensor(sizes), _tensor(order), probs)
        wanted = reference.sort_chunks(self.rows, sizes, order, self.plan.row_probs)
        _check_equal(outputs, wanted, ("rows", "probabilities", "source_to_dest"))
        d_out = self.normal(*self.rows.shape)
        _backward([outputs[0]], [d_out])
        _check_equal([y.grad], [reference.sort_chunks_backward(d_out, wanted[2])], ["gradient of the rows"])

    def _check_moe_unpermute(self, weighted: bool) -> None:
        T, H, E, K, _ = self.case
        options: dict[str, Any] = {"using_weighted_combine": weighted}
        rowmap, row_probs = reference.plan_to_rowmap(self.plan), np.asarray(self.plan.row_probs)
        y, w = _tensor(self.rows, gradient=True), _tensor(row_probs, gradient=True)
        outputs = ops.moe_unpermute(y, _tensor(rowmap), _tensor(self.ids), w, T, E, **options)
        wanted = reference.moe_unpermute(self.rows, rowmap, self.ids, row_probs, T, E, **options)
        _check_equal(outputs, wanted, ("sums", "probabilities"))

        d_out, d_slots = self.normal(T, H), self.normal(T, K, dtype=FLOAT32)
        _backward(outputs, [d_out, d_slots])
        maps = (rowmap, self.ids, row_probs)
        d_y, d_w = reference.moe_unpermute_backward(d_out, d_slots, self.rows, *maps, **options)
        _check_equal([y.grad], [d_y], ["gradient of the rows"])
        if weighted:
            absolute = (np.abs(d_out), np.abs(d_slots), np.abs(self.rows))
            _, magnitude = reference.moe_unpermute_backward(*absolute, *maps, **options)
            self._check_dot_products(w.grad, d_w, magnitude)
        else:
            _check_equal([w.grad], [d_w], ["gradient of the probabilities"])

    def _check_dot_products(self, got: paddle.Tensor, wanted: Any, magnitude: Any) -> None:
        # One rounding more than the dot product: the gradient of the probabilities' own output is added.
        tolerance = dtype_tols(FLOAT32, dot_chain(self.case.H) + 1)
        assert_close_sums(got, wanted, magnitude, tolerance, what="gradient of the probabilities")


def _check_float8() -> None:
    problem = _Problem(Case(T=64, H=256, E=8, K=4, A=8), np.dtype(ml_dtypes.float8_e4m3fn))
    scale = problem.normal(problem.case.T, 2, dtype=FLOAT32)
    sizes = (problem.case.E, None, problem.case.A)
    ids, probs = problem.ids, problem.probs
    outputs = ops.moe_permute(_tensor(problem.x), _tensor(scale), _tensor(ids), _tensor(probs), *sizes)
    wanted = reference.moe_permute(problem.x, scale, ids, probs, *sizes)
    _check_equal(outputs, wanted, ("rows", "rowmap", "probabilities", "scales"))


def _check_small_buffer() -> None:
    problem = _Problem(Case(T=64, H=16, E=8, K=4, A=4), FLOAT32)
    arguments: dict[str, Any] = {**problem.arguments, "buffer_size": problem.case.T, "validate": False}
    plan = ops.route(_tensor(problem.ids), _tensor(problem.probs), **arguments)
    wanted = reference.route(problem.ids, problem.probs, **arguments)
    rows, _ = ops.permute(_tensor(problem.x), plan)
    wanted_rows, _ = reference.permute(problem.x, wanted)
    _check_equal((*plan, rows), (*wanted, wanted_rows), (*reference.Plan._fields, "rows"))
    if not wanted.overflow.item():
        raise AssertionError("the buffer holds every row, so the check says nothing")


def _check_duplicates() -> None:
    problem = _Problem(Case(T=64, H=1, E=4, K=6), FLOAT32)
    ids = problem.rng.integers(-1, problem.case.E, problem.ids.shape, dtype=np.int32)
    for duplicates in ("first", "each"):
        arguments: dict[str, Any] = {"num_experts": problem.case.E, "duplicates": duplicates, "validate": False}
        plan = ops.route(_tensor(ids), _tensor(problem.probs), **arguments)
        _check_equal(plan, reference.route(ids, problem.probs, **arguments), reference.Plan._fields)


def _check_mask() -> None:
    problem = _Problem(Case(T=64, H=16, E=8, K=4, A=4), FLOAT32)
    mask = problem.rng.random((problem.case.T, problem.case.E)) < 0.3
    probs = problem.normal(*mask.shape)
    row_id_map, num_rows = masked.make_row_id_map(_tensor(mask), fp8_padding=problem.case.A)
    rows = masked.permute_with_mask_map(_tensor(problem.x), row_id_map, num_rows)
    sums = masked.unpermute_with_mask_map(rows, row_id_map, _tensor(probs))
    plan = reference.route(mask, probs, padding_alignment=problem.case.A)
    wanted_map = reference.make_row_id_map(plan.token_rows, plan.row_to_expert, plan.num_experts)
    wanted_rows, _ = reference.permute(problem.x, plan)
    wanted_sums = reference.unpermute(wanted_rows, plan, plan.row_probs)
    _check_equal((row_id_map, rows, sums), (wanted_map, wanted_rows, wanted_sums), ("row_id_map", "rows", "sums"))


def _tensor(array: NDArray, *, gradient: bool = False) -> paddle.Tensor:
    tensor = to_tensor(array, paddle.CPUPlace())
    tensor.stop_gradient = not gradient
    return tensor


def _backward(outputs: Iterable[paddle.Tensor], gradients: Iterable[NDArray]) -> None:
    paddle.autograd.backward(list(outputs), [_tensor(gradient) for gradient in gradients])


def _check_equal(got: Iterable[Any], wanted: Iterable[Any], names: Iterable[str]) -> None:
    for value, due, name in zip(got, wanted, names, strict=True):
        assert_bits_equal(value, due, what=name)
