# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The operators of PaddleFleet's expert layers, against the oracle."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_permute
from paddle_moe_ops.backends.arrays import numpy_dtype
from paddle_moe_ops.compat import paddlefleet as ops
from paddle_moe_ops.reference import paddlefleet as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.paddle_table import recorded
from tests.ops.problems import every_kind, make_problem, ordinary, tensor
from tests.pairwise import pairwise_of
from tests.params import FLOAT8_DTYPES, SUM_DTYPES, Shape

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E, K = 5, 3
TOKENS = [0, 1, 63, 257]
PAIRS = [(np.dtype(np.float32), BFLOAT16), (BFLOAT16, BFLOAT16), (np.dtype(np.float32), np.dtype(np.float32))]
tokens = pytest.mark.parametrize("num_tokens", TOKENS)
alignments = pytest.mark.parametrize("alignment", [1, 4, 128])
pairs = pytest.mark.parametrize(("zipped_dtype", "dtype"), PAIRS, ids=["f32 from bf16", "bf16", "f32"])


class Routed:
    """Tokens, the row map of `moe_permute` without a gather, and the counts of the experts; the last has no rows."""

    def __init__(self, rng, num_tokens, alignment, place, dtype=np.float32, hidden=5):
        problem = make_problem(rng, Shape(num_tokens, hidden, E - 1, K, alignment, ""))
        self.ids, self.x = problem.ids.astype(np.int32), ordinary(rng, (num_tokens, hidden)).astype(dtype)
        self.counts = np.bincount(self.ids[self.ids >= 0], minlength=E).tolist()
        self.padded = [-(-count // alignment) * alignment for count in self.counts]
        given = tensor(self.x, place), None, tensor(self.ids, place), tensor(problem.probs, place)
        _, self.rowmap, _, _ = moe_permute(*given, E, self.counts, alignment, do_gather=False)


@pairwise_of(tokens, alignments, pytest.mark.parametrize("dtype", [*SUM_DTYPES, *FLOAT8_DTYPES], ids=str))
def test_gathered_rows_of_an_expert(num_tokens, alignment, dtype, rng, place, backend):
    routed = Routed(rng, num_tokens, alignment, place, dtype, hidden=130)
    scale = rng.standard_normal((num_tokens, 2)).astype(np.float32)
    if dtype == FLOAT8_DTYPES[1]:
        scale = scale.view(np.int32)  # four ue8m0 scales each
    for given in (None, scale):
        for expert in range(E):
            further = expert, routed.counts, alignment
            scales = None if given is None else tensor(given, place)
            got = ops.tokens_unzip_gather(tensor(routed.x, place), scales, routed.rowmap, *further)
            expected = oracle.tokens_unzip_gather(routed.x, given, routed.rowmap.numpy(), *further)
            for each, wanted in zip(got, expected, strict=True):
                assert_bits_equal(each, wanted)
                assert each.stop_gradient


@pytest.mark.parametrize("form", ["array", "tensor", "list of tensors", "with padding"])
def test_forms_of_counts(form, rng, place):
    routed = Routed(rng, 63, 4, place)
    counts = {
        "array": np.array(routed.counts),
        "tensor": paddle.to_tensor(routed.counts, place=place),
        "list of tensors": [paddle.to_tensor(count, place=place) for count in routed.counts],
        "with padding": routed.padded,
    }[form]
    for expert in range(E):
        rows, _, index = ops.tokens_unzip_gather(tensor(routed.x, place), None, routed.rowmap, expert, counts, 4)
        given = None, routed.rowmap.numpy(), expert
        expected = oracle.tokens_unzip_gather(routed.x, *given, routed.padded if "with" in form else routed.counts, 4)
        assert_bits_equal(rows, expected[0])
        assert_bits_equal(index, expected[2])


def test_rows_that_a_static_buffer_dropped_are_padding(rng, place):
    routed = Routed(rng, 63, 1, place)
    kept = sum(routed.counts) - 3
    rowmap = paddle.where(routed.rowmap < kept, routed.rowmap, paddle.full_like(routed.rowmap, -1))
    last = E - 2
    rows, _, index = ops.tokens_unzip_gather(tensor(routed.x, place), None, rowmap, last, routed.counts, 1)
    assert (index.numpy()[-3:] == -1).all()
    assert (index.numpy()[:-3] >= 0).all()
    assert not rows.numpy()[-3:].any()


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda counts: [counts[0] - 1, *counts[1:]], "must be the rows of each expert in zipped_expertwise_rowmap"),
        (lambda counts: [counts[0] + 1, *counts[1:]], "must be the rows of each expert in zipped_expertwise_rowmap"),
        (lambda counts: counts[:-1], "must be of length num_experts=5"),
        (lambda counts: None, "must be a list of ints"),
    ],
    ids=["too few", "too many", "too short", "none"],
)
def test_wrong_counts_raise(change, message, rng, place):
    routed = Routed(rng, 63, 1, place)
    arguments = routed.rowmap, 1, change(routed.counts), 1
    with pytest.raises((ValueError, TypeError), match=f"^tokens_unzip_gather: tokens_per_expert {message}"):
        ops.tokens_unzip_gather(tensor(routed.x, place), None, *arguments)


def test_wrong_maps_stay_in_their_memory(rng, place, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    routed = Routed(rng, 63, 1, place)
    wild = rng.choice(np.array([-(2**31), -7, -1, 0, 3, 2**31 - 1], np.int32), (63, E))
    x, rowmap = tensor(routed.x, place), tensor(wild, place)
    rows, _, index = ops.tokens_unzip_gather(x, None, rowmap, 1, routed.counts, 1)
    assert rows.shape == [routed.counts[1], 5]
    assert (index.numpy() < 63).all()
    found = ops.tokens_unzip_slice(x, rowmap, E, 4, 0, 4).numpy()
    assert (found < 63).all()
    ids = tensor(rng.choice(np.array([-9, -1, 0, E - 1, E, 2**31 - 1], np.int32), (63, K)), place)
    values = ops.tokens_zip_prob([paddle.full([1], 2.0)] * E, rowmap, ids).numpy()
    assert set(values.flatten()) <= {0.0, 2.0}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_of_tokens_that_do_not_exist_are_left_out(dtype, place, monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_VALIDATE", "0")
    largest = np.iinfo(dtype).max
    index = tensor(np.array([3, 4, largest, -largest, 0], dtype), place)
    rows = tensor(np.arange(1, 11, dtype=np.float32).reshape(5, 2), place)
    expected = np.array([[10, 11], [1, 1], [1, 1], [2, 3]], np.float32)
    assert_bits_equal(ops.tokens_zip_unique_add(paddle.ones([4, 2]), rows, index, 4), expected)
    parts = [paddle.ones([3, 2]), paddle.ones([1, 2])]
    assert_bits_equal(paddle.concat(ops.tokens_zip_unique_add_subbatch(parts, rows, index, 4, 3)), expected)


@pytest.mark.compiled_only
def test_sums_and_values_run_on_kernels():
    with recorded() as names:
        for name in ("tokens_zip_unique_add", "tokens_zip_unique_add_subbatch"):
            getattr(ops, name)(*_good()[name])
        assert names == {"index_add"}
        ops.tokens_zip_prob(*_good()["tokens_zip_prob"])
        assert names == {"index_add", "moe_unpermute"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_values_that_require_a_gradient_give_results_without_one(dtype, place):
    def leaf(shape):
        return tensor(np.ones(shape, numpy_dtype(getattr(paddle, dtype))), place, gradient=True)

    index, rowmap = tensor(np.array([1, 0]), place), tensor(np.array([[0, -1], [1, 2]], np.int32), place)
    parts = [leaf((1, 4)), leaf((1, 4))]
    results = [
        ops.tokens_zip_unique_add(leaf((0, 4)), leaf((2, 4)), index, 2),
        *ops.tokens_zip_unique_add_subbatch(parts, leaf((2, 4)), index, 2, 1),
        ops.tokens_zip_prob([leaf(2), leaf(1)], rowmap, tensor(np.array([[0], [1]]), place)),
    ]
    assert [each.stop_gradient for each in results] == [True] * 4
    assert [each.stop_gradient for each in parts] == [False] * 2


def test_values_of_repeated_ids_are_those_of_their_row(place):
    rowmap, ids = tensor(np.array([[1, 0]], np.int32), place), tensor(np.array([[1, 1, -1, 0]], np.int32), place)
    values = [tensor(np.array([2.0], np.float32), place), tensor(np.array([3.0], np.float32), place)]
    assert ops.tokens_zip_prob(values, rowmap, ids).tolist() == [[2.0, 2.0, 0.0, 3.0]]


@alignments
@tokens
def test_tokens_of_rows(num_tokens, alignment, rng, place, backend):
    routed = Routed(rng, num_tokens, alignment, place)
    total = sum(routed.padded)
    for start, end in [(0, total + 1), (0, 0), (total // 3, total // 2), (5, 3), (total, total + 9)]:
        got = ops.tokens_unzip_slice(tensor(routed.x, place), routed.rowmap, E, total, start, end)
        assert_bits_equal(got, oracle.tokens_unzip_slice(routed.rowmap.numpy(), total, start, end))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@alignments
@tokens
def test_values_of_slots(num_tokens, alignment, dtype, rng, place):
    routed = Routed(rng, num_tokens, alignment, place)
    values = every_kind(rng, (sum(routed.padded),), dtype)
    rowmap, ids = routed.rowmap, tensor(routed.ids, place)
    ends = np.cumsum(routed.padded)
    by_expert = np.split(values, ends[:-1])
    expected = oracle.tokens_zip_prob(by_expert, rowmap.numpy(), routed.ids)
    assert_bits_equal(ops.tokens_zip_prob([tensor(part, place) for part in by_expert], rowmap, ids), expected)
    columns = [tensor(part.reshape(-1, 1), place) for part in by_expert]
    assert_bits_equal(ops.tokens_zip_prob(columns, rowmap, ids.astype("int64")), expected)
    for size in (1, 7, 2**20):
        parts = [values[start : start + size] for start in range(0, max(len(values), 1), size)]
        got = ops.tokens_zip_prob_seq_subbatch([tensor(part, place) for part in parts], rowmap, ids, size)
        assert_bits_equal(got, expected)
        assert got.stop_gradient


def addends(rng, num_tokens, num_rows, hidden, zipped_dtype, dtype, repeats=False):
    """Sums, rows that are added, and their tokens, some without one, followed by a row of padding."""
    index = rng.permutation(num_tokens)[:num_rows]
    if repeats:
        index = rng.integers(0, max(num_tokens, 1), num_rows)
    index = np.where(rng.random(len(index)) < 0.2, -1, index).astype(np.int64)
    zipped = every_kind(rng, (num_tokens, hidden), zipped_dtype)
    return zipped, every_kind(rng, (len(index) + 1, hidden), dtype), index


@pairwise_of(
    tokens,
    pairs,
    pytest.mark.parametrize("hidden", [1, 4, 130]),
    pytest.mark.parametrize("repeats", [False, True], ids=["each token once", "some tokens again"]),
)
def test_rows_are_added_in_place(num_tokens, zipped_dtype, dtype, hidden, repeats, rng, place):
    zipped, rows, index = addends(rng, num_tokens, num_tokens, hidden, zipped_dtype, dtype, repeats)
    target = tensor(zipped, place)
    version = target.inplace_version
    arguments = tensor(rows, place), tensor(index, place), num_tokens
    got = ops.tokens_zip_unique_add(target, *arguments)
    assert got is target
    assert_bits_equal(got, oracle.tokens_zip_unique_add(zipped, rows, index), any_nan=True)
    if (index >= 0).any():
        assert target.inplace_version > version


@pytest.mark.parametrize("size", [1, 7, 100, 0, -(2**31)])
@pairs
@tokens
def test_rows_are_added_to_parts(num_tokens, zipped_dtype, dtype, size, rng, place):
    zipped, rows, index = addends(rng, num_tokens, num_tokens, 4, zipped_dtype, dtype)
    expected = oracle.tokens_zip_unique_add(zipped, rows, index)
    step = size if size > 0 else max(num_tokens, 1)
    parts = [tensor(zipped[start : start + step], place) for start in range(0, max(num_tokens, 1), step)]
    arguments = tensor(rows, place), tensor(index, place), num_tokens, size
    got = ops.tokens_zip_unique_add_subbatch(parts, *arguments)
    assert all(each is part for each, part in zip(got, parts, strict=True))
    assert_bits_equal(paddle.concat(got), expected, any_nan=True)


@pairs
@tokens
def test_sums_without_rows_begin_with_zeros(num_tokens, zipped_dtype, dtype, rng, place):
    _, rows, index = addends(rng, num_tokens, num_tokens, 4, zipped_dtype, dtype)
    nothing = np.zeros((0, 4), zipped_dtype)
    expected = oracle.tokens_zip_unique_add(np.zeros((num_tokens, 4), zipped_dtype), rows, index)
    arguments = tensor(rows, place), tensor(index, place), num_tokens
    got = ops.tokens_zip_unique_add(tensor(nothing, place), *arguments)
    assert_bits_equal(got, expected, any_nan=True)
    got = ops.tokens_zip_unique_add_subbatch([tensor(nothing, place)], *arguments, 10)
    sizes = [min(10, num_tokens - start) for start in range(0, num_tokens, 10)]
    assert [part.shape[0] for part in got] == (sizes or [0])
    assert_bits_equal(paddle.concat(got), expected, any_nan=True)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_a_view_of_a_buffer_is_written_through(dtype, rng, place):
    buffer = tensor(ordinary(rng, (9, 8), dtype), place)
    before = buffer.astype("float32").numpy()
    ops.tokens_zip_unique_add(buffer[:, :4], paddle.ones([2, 4]).astype(buffer.dtype), paddle.to_tensor([7, 2]), 9)
    change = buffer.astype("float32").numpy() != before
    assert change[[7, 2], :4].all()
    assert change.sum() == 8


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_rows_and_tokens_may_be_views(dtype, rng, place):
    zipped, rows = ordinary(rng, (8, 9), dtype), ordinary(rng, (6, 12), dtype)
    index = np.array([0, 2, 4], np.int64)
    expected = oracle.tokens_zip_unique_add(zipped.T, rows[::2, 2:10], index)
    buffer, view = tensor(zipped, place), tensor(rows, place)[::2, 2:10]
    strides = view.strides
    ops.tokens_zip_unique_add(buffer.T, view, tensor(np.repeat(index, 2), place)[::2], 9)
    assert_bits_equal(buffer, expected.T)
    assert view.strides == strides


def test_writing_is_seen_by_a_backward_pass(place):
    x = tensor(np.ones((4, 4), np.float32), place, gradient=True)
    y = x * 2
    out = y * y  # keeps y
    got = ops.tokens_zip_unique_add(y, paddle.ones([1, 4]), paddle.to_tensor([0]), 4)
    assert got.stop_gradient
    assert not y.stop_gradient
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [paddle.float32, "bfloat16"], ids=str)
@pytest.mark.parametrize("given", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("sizes", [[5], [5, 5, 2], [5, 0], [0, 0]], ids=str)
def test_parts_are_joined_and_cast(sizes, given, dtype, rng, place):
    parts = [every_kind(rng, (size, 3), given) for size in sizes]
    wanted = numpy_dtype(paddle.bfloat16 if dtype == "bfloat16" else dtype)
    got = ops.merge_subbatch_cast([tensor(part, place) for part in parts], dtype)
    assert_bits_equal(got, oracle.merge_subbatch_cast(parts, wanted), any_nan=True)
    one = ops.merge_subbatch_cast(tensor(parts[0], place), dtype)
    assert_bits_equal(one, oracle.merge_subbatch_cast(parts[:1], wanted), any_nan=True)


def test_one_tensor_is_cast_with_a_gradient(place):
    x = tensor(np.ones((4, 3), np.float32), place, gradient=True)
    assert ops.merge_subbatch_cast(x, "float32") is x
    ops.merge_subbatch_cast([x], paddle.bfloat16).sum().backward()
    assert x.grad.numpy().all()
    assert ops.merge_subbatch_cast([x, x], paddle.bfloat16).stop_gradient


def _good():
    rowmap = paddle.to_tensor([[0, -1], [1, 2]], dtype="int32")
    return {
        "tokens_unzip_gather": [paddle.ones([2, 4]), None, rowmap, 0, [2, 1], 1],
        "tokens_unzip_slice": [paddle.ones([2, 4]), rowmap, 2, 3, 0, 3],
        "tokens_zip_unique_add": [paddle.ones([2, 4]), paddle.ones([2, 4]), paddle.to_tensor([0, 1]), 2],
        "tokens_zip_unique_add_subbatch": [[paddle.ones([1, 4])] * 2, paddle.ones([2, 4]), paddle.to_tensor([0]), 2, 1],
        "merge_subbatch_cast": [[paddle.ones([2, 4]), paddle.ones([1, 4])], "bfloat16"],
        "tokens_zip_prob": [[paddle.ones([2]), paddle.ones([1])], rowmap, paddle.to_tensor([[0, 1], [-1, 0]])],
        "tokens_zip_prob_seq_subbatch": [[paddle.ones([2]), paddle.ones([1])], rowmap, paddle.to_tensor([[0], [1]]), 2],
    }


BAD = [
    ("tokens_unzip_gather", 0, paddle.int32, TypeError, "x must be of dtype"),
    ("tokens_unzip_gather", 1, [3, 1], ValueError, r"x_scale must be of shape \[2, num_scales\]"),
    ("tokens_unzip_gather", 1, paddle.ones([2, 1], "float16"), TypeError, "x_scale must be of dtype float32 or int32"),
    ("tokens_unzip_gather", 2, [2, 0], ValueError, "zipped_expertwise_rowmap must be of shape"),
    ("tokens_unzip_gather", 3, 2, ValueError, "expert_id must be from 0 to 1"),
    ("tokens_unzip_gather", 5, 0, ValueError, "padding_multiplex must be from 1"),
    ("tokens_unzip_slice", 2, 3, ValueError, r"zipped_expertwise_rowmap must be of shape \[2, 3\]"),
    ("tokens_unzip_slice", 3, 2, ValueError, "zipped_expertwise_rowmap must"),
    ("tokens_unzip_slice", 4, -1, ValueError, "start_idx must be from 0"),
    ("tokens_zip_unique_add", 0, paddle.float16, TypeError, "x_zipped must be of dtype"),
    ("tokens_zip_unique_add", 0, [3, 4], ValueError, "x_zipped must be of 2 rows, as zipped_rows says"),
    ("tokens_zip_unique_add", 1, [2, 5], ValueError, r"x_unzipped must be of shape \[num_rows, 4\]"),
    ("tokens_zip_unique_add", 1, [1, 4], ValueError, "idx_unzipped must be of at most 1 tokens"),
    ("tokens_zip_unique_add", 2, paddle.float32, TypeError, "idx_unzipped must be of dtype"),
    ("tokens_zip_unique_add", 3, 1, ValueError, "idx_unzipped must be of tokens below 1"),
    ("tokens_zip_unique_add_subbatch", 0, [], ValueError, "x_zipped must be a list with at least one tensor"),
    ("tokens_zip_unique_add_subbatch", 0, [1, 4], TypeError, "x_zipped must be a list of tensors"),
    ("tokens_zip_unique_add_subbatch", 4, 2, ValueError, "x_zipped must be a list of 1 tensors"),
    ("tokens_zip_unique_add_subbatch", 3, 3, ValueError, "x_zipped must be a list of 3 tensors"),
    ("merge_subbatch_cast", 1, "float16", TypeError, "dtype must be one of float32, bfloat16"),
    ("merge_subbatch_cast", 0, [], ValueError, "x must be a list with at least one tensor"),
    ("tokens_zip_prob", 0, [], ValueError, "unzipped_prob must be a list with at least one tensor"),
    ("tokens_zip_prob", 2, [3, 1], ValueError, r"dispatched_indices must be of"),
    ("tokens_zip_prob_seq_subbatch", 3, 1, ValueError, r"unzipped_prob\[0\] must be of 1 values"),
    ("tokens_zip_prob_seq_subbatch", 3, 3, ValueError, r"unzipped_prob\[0\] must be of 3 values"),
    ("tokens_zip_prob_seq_subbatch", 3, 0, ValueError, "subbatch_rows must be from 1"),
]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("name", "place_of", "value", "error", "message"), BAD)
def test_bad_arguments_are_named(name, place_of, value, error, message):
    arguments = _good()[name]
    getattr(ops, name)(*arguments)
    if isinstance(value, type(paddle.int32)):
        value = arguments[place_of].astype(value)
    elif isinstance(value, list) and value:
        dtype = arguments[place_of].dtype if isinstance(arguments[place_of], paddle.Tensor) else "float32"
        value = paddle.ones(value).astype(dtype)
    arguments[place_of] = value
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(ops, name)(*arguments)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([([], "float32"), ([2], "float32")], ValueError, r"x\[0\] must be of shape \[rows\]"),
        ([([2, 4], "int32")], TypeError, "x must be of dtype float32"),
        ([([2, 4], "float32"), ([2, 4], "bfloat16")], TypeError, r"x\[1\] must be of dtype float32"),
        (
            [([2, 4], "float32"), ([1, 4], "float32"), ([2, 4], "float32")],
            ValueError,
            r"x\[1\] must be of shape \[2, 4\]",
        ),
        ([([2, 4], "float32"), ([2, 5], "float32")], ValueError, r"x\[1\] must be of shape \[rows, 4\]"),
        ([([2, 4], "float32"), ([3, 4], "float32")], ValueError, r"x\[1\] must be of at most 2 rows, as x\[0\]"),
    ],
)
def test_parts_that_do_not_fit_the_first_are_named(parts, error, message):
    with pytest.raises(error, match=f"^merge_subbatch_cast: {message}"):
        ops.merge_subbatch_cast([paddle.ones(shape).astype(dtype) for shape, dtype in parts], "float32")


@pytest.mark.cpu_only
def test_ids_that_are_no_experts_raise():
    arguments = _good()["tokens_zip_prob"]
    with pytest.raises(ValueError, match=r"^tokens_zip_prob: dispatched_indices must .*, but token 1, slot 1 "):
        ops.tokens_zip_prob(*arguments[:2], paddle.to_tensor([[0, 1], [-1, 2]]))


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ops.__all__)
def test_values_of_a_static_graph_are_refused(name):
    arguments = _good()[name]
    place_of = 1 if name.startswith("tokens_zip_prob") else 0

    def traced(x):
        given = [x] * len(arguments[0]) if isinstance(arguments[0], list) and place_of == 0 else x
        return getattr(ops, name)(*arguments[:place_of], given, *arguments[place_of + 1 :])

    value = arguments[place_of][0] if isinstance(arguments[place_of], list) else arguments[place_of]
    with pytest.raises(TypeError, match=f"{name}: .* must be a tensor of dygraph, but got a value of a static graph"):
        paddle.jit.to_static(traced, full_graph=True)(value)


def _tensors_of_calls():
    for name, arguments in _good().items():
        for argument, value in zip(inspect.signature(getattr(ops, name)).parameters, arguments, strict=True):
            if isinstance(value, paddle.Tensor):
                yield name, argument, value
    yield "merge_subbatch_cast", "x", paddle.ones([3, 2])


@pytest.mark.cpu_only
@pytest.mark.parametrize(("name", "argument", "value"), list(_tensors_of_calls()))
def test_a_value_of_a_static_graph_is_refused_in_place_of(name, argument, value):
    function, arguments = getattr(ops, name), _good()[name]
    place_of = list(inspect.signature(function).parameters).index(argument)

    def traced(x):
        return function(*arguments[:place_of], x, *arguments[place_of + 1 :])

    with pytest.raises(TypeError, match=f"{name}: {argument} must be a tensor of dygraph, but got a value of a static"):
        paddle.jit.to_static(traced, full_graph=True)(value)
