# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients are averaged between ranks that fit together, and others get errors, none a wrong sum or an end."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from paddle_moe_ops.expert_parallel import ClipGradByGlobalNorm, average_gradients, mark_expert_parameters, training
from paddle_moe_ops.expert_parallel.parameters import gradient_of
from paddle_moe_ops.expert_parallel.transports import Rendezvous

from .processes import run
from .test_expert_parallel_errors import caught, end_rank_1

pytestmark = pytest.mark.long


def parameter(shape: list[int], dtype: str = "float32", gradient: float | None = 1.0, main: bool = False) -> Any:
    start = paddle.nn.initializer.Constant(0.0)
    made = paddle.create_parameter(shape, dtype, default_initializer=start)
    if main:
        made.main_grad = None if gradient is None else paddle.full(shape, gradient)
    elif gradient is not None:
        made.grad = paddle.full(shape, gradient, dtype)
    return made


def frozen(shape: list[int]) -> Any:
    made = parameter(shape, gradient=None)
    made.stop_gradient = True
    return made


def of_experts(shape: list[int], **options: Any) -> Any:
    layer = paddle.nn.Layer()
    layer.weight = parameter(shape, **options)
    mark_expert_parameters(layer)
    return layer.weight


def named_twice() -> list[list[float]]:
    """Averaged gradients of a replicated parameter and of an expert, each listed twice."""
    given = [parameter([1], gradient=1.0 + 2 * paddle.distributed.get_rank()), of_experts([1], gradient=4.0)]
    average_gradients([*given, *given])
    return [each.grad.tolist() for each in given]


def test_what_is_named_twice_counts_once():
    assert run(named_twice, 2) == [[[2.0], [2.0]]] * 2


def unlike_parameters() -> list[str]:
    """Errors on this rank, and the result of a good call after them."""
    rank = paddle.distributed.get_rank()
    first, unlike = parameter([2]), [
        [parameter([3])] * (1 - rank),
        [parameter([2, 3 + rank])],
        [parameter([3], ("float32", "bfloat16")[rank])],
        [frozen([3]) if rank else parameter([3])],
        [of_experts([3]) if rank else parameter([3])],
        [parameter([3], main=rank == 1)],
    ]  # fmt: skip
    texts = [caught(lambda others=others: average_gradients([first, *others])) for others in unlike]
    texts.append(caught(lambda: average_gradients([first] if rank else [])))
    texts.append(caught(lambda: average_gradients([first, 3] if rank else [first])))
    texts.append(caught(lambda: average_gradients(first if rank else [first])))
    assert first.grad.tolist() == [1.0, 1.0]  # an error leaves gradients alone
    return [*texts, caught(lambda: average_gradients([first])), str(first.grad.tolist())]


def test_ranks_with_other_parameters_get_an_error_that_names_the_first():
    same = "must be the same on all ranks of the group, but got"
    expected = [
        f"ValueError: average_gradients: parameters[1] {same} 'float32 [3]' on rank 0, None on rank 1",
        f"ValueError: average_gradients: parameters[1] {same} 'float32 [2, 3]' on rank 0, 'float32 [2, 4]' on rank 1",
        f"ValueError: average_gradients: parameters[1] {same} 'float32 [3]' on rank 0, 'bfloat16 [3]' on rank 1",
        f"ValueError: average_gradients: parameters[1] {same} 'float32 [3]' on rank 0, 'not trained' on rank 1",
        f"ValueError: average_gradients: parameters[1] {same} 'float32 [3]' on rank 0, "
        "'float32 [3] of experts' on rank 1",
        "ValueError: average_gradients: the gradient of parameters[1] must be one that all ranks keep in the same "
        "attribute and dtype, but got 'grad float32' on rank 0, 'main_grad float32' on rank 1",
        f"ValueError: average_gradients: parameters[0] {same} None on rank 0, 'float32 [2]' on rank 1",
    ]
    raised = [
        "TypeError: average_gradients: parameters[1] must be a paddle.Tensor, but got int",
        "TypeError: average_gradients: parameters must be tensors, as layer.parameters() gives them, but got "
        "EagerParamBase",
    ]
    told = ["RuntimeError: average_gradients: ranks [1] of [0, 1] raised an error in this call, which says more"] * 2
    good = ["nothing was raised", "[1.0, 1.0]"]
    assert run(unlike_parameters, 2) == [[*expected, *told, *good], [*expected, *raised, *good]]


def gradients_that_one_rank_lacks() -> list[Any]:
    """A dense parameter, one with `main_grad`, one of experts, one without a gradient, one with `main_grad` None."""
    rank = paddle.distributed.get_rank()
    value = None if rank else 4.0
    parameters = [
        parameter([2], gradient=value),
        parameter([2], "bfloat16", gradient=value, main=True),
        of_experts([2], gradient=value),
        parameter([2], gradient=None),
        parameter([1], gradient=2.0 + 4 * rank),
        parameter([2], gradient=value),
    ]
    parameters[-1].main_grad = None
    average_gradients(each for each in parameters)
    plain = [None if each.grad is None else each.grad.tolist() for each in parameters]
    return [plain, parameters[1].main_grad.tolist(), str(parameters[1].main_grad.dtype)]


def test_a_rank_that_lacks_gradients_has_zeros():
    of_main = [[2.0, 2.0], "paddle.float32"]
    first, second = run(gradients_that_one_rank_lacks, 2)
    assert first == [[[2.0, 2.0], None, [2.0, 2.0], None, [4.0], [2.0, 2.0]], *of_main]
    assert second == [[[2.0, 2.0], None, [0.0, 0.0], None, [4.0], [2.0, 2.0]], *of_main]


def experts_in_other_attributes() -> list[float]:
    """Averaged gradients of experts, in `main_grad` on rank 0 and in `grad` on rank 1, and of a dense parameter."""
    given = [of_experts([1], gradient=4.0, main=paddle.distributed.get_rank() == 0), parameter([1], gradient=2.0)]
    average_gradients(given)
    return [gradient_of(each).item() for each in given]


def test_ranks_may_keep_the_gradients_of_their_experts_in_different_attributes():
    assert run(experts_in_other_attributes, 2) == [[2.0, 2.0]] * 2


def between_copies_of_all_experts() -> list[list[float]]:
    """Averaged gradients of two ranks that each have all experts; each rank lacks one of the first two gradients."""
    rank = paddle.distributed.get_rank()
    alone = [paddle.distributed.new_group([each]) for each in range(2)][rank]
    given = [parameter([1], gradient=None if rank else 8.0), parameter([1], gradient=4.0 if rank else None)]
    given.append(of_experts([1], gradient=1.0 + 4 * rank))
    average_gradients(given, alone, copies=paddle.distributed.get_group(0))
    return [each.grad.tolist() for each in given]


def test_a_group_that_lacks_gradients_of_its_copies_has_zeros():
    assert run(between_copies_of_all_experts, 2) == [[[4.0], [2.0], [3.0]]] * 2


def unlike_copies() -> list[str]:
    """Errors between groups of one rank each, whose parameters differ, or one of which has a bad one."""
    rank, copies = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    alone = [paddle.distributed.new_group([each]) for each in range(2)][rank]
    given = [[parameter([3 + rank])], [None if rank else parameter([2])], [parameter([2])]]
    return [caught(lambda each=each: average_gradients(each, alone, copies=copies)) for each in given]


def test_copies_with_other_parameters_and_errors_of_copies_are_told_to_all():
    same = "must be the same on all ranks of the group, but got"
    unlike = f"ValueError: average_gradients: parameters[0] {same} 'float32 [3]' on rank 0, 'float32 [4]' on rank 1"
    told = "RuntimeError: average_gradients: ranks of another group raised an error in this call, which says more"
    raised = "TypeError: average_gradients: parameters[0] must be a paddle.Tensor, but got NoneType"
    good = "nothing was raised"
    assert run(unlike_copies, 2) == [[unlike, told, good], [unlike, raised, good]]


def between_two_of_three() -> list[float]:
    rank = paddle.distributed.get_rank()
    groups = [paddle.distributed.new_group(ranks) for ranks in ([0, 2], [1])]
    given = parameter([2], gradient=3.0 + rank)
    average_gradients([given], groups[rank % 2])
    return given.grad.tolist()


def test_of_three_ranks_those_of_another_group_do_not_count():
    assert run(between_two_of_three, 3) == [[4.0, 4.0]] * 3


@contextlib.contextmanager
def reductions_told(tell: Callable[[paddle.Tensor], None]) -> Iterator[pytest.MonkeyPatch]:
    """Call a function with each tensor that is all-reduced inside, before it is."""
    all_reduce = paddle.distributed.all_reduce

    def told(tensor: paddle.Tensor, *args: Any, **options: Any) -> Any:
        tell(tensor)
        return all_reduce(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.distributed, "all_reduce", told)
        yield patch


def collectives_of_a_call() -> list[str]:
    """Calls of `paddle.distributed` by one `average_gradients` whose ranks agree."""
    asked: list[str] = []
    with reductions_told(lambda tensor: asked.append(f"all_reduce of {tensor.size}")) as patch:
        patch.setattr(paddle.distributed, "all_gather_object", lambda *_, **__: asked.append("all_gather_object"))
        average_gradients([parameter([70]), of_experts([80]), frozen([90])])
    return asked


def test_ranks_that_fit_together_exchange_five_numbers_more_than_gradients():
    assert run(collectives_of_a_call, 2) == [["all_reduce of 5", "all_reduce of 70"]] * 2


BUCKETED = {
    "float32": ((3,), (2, 5), (), (0, 4), (41, 3), (1,)),
    "float64": ((7,), (5, 1)),
    "bfloat16": ((3, 1), (41,), (2,)),  # in float32, the second has more than 100 bytes
}


def integers(rank: int, number: int, shape: tuple[int, ...]) -> NDArray:
    return np.random.default_rng([rank, number]).integers(-50, 50, shape).astype(np.float32)


def in_buckets(bucket_bytes: int) -> tuple[list[NDArray], list[str]]:
    """Averaged gradients of odd sizes, in the caller's tensors, and the collectives."""
    rank, parameters, asked = paddle.distributed.get_rank(), [], []
    for dtype, shapes in BUCKETED.items():
        for number, shape in enumerate(shapes):
            parameters.append(parameter(list(shape), dtype, gradient=None))
            parameters[-1].grad = paddle.to_tensor(integers(rank, number, shape)).astype(dtype)
    parameters.append(parameter([5, 2], "bfloat16", gradient=None))
    # with the strides of a transposed matrix
    parameters[-1].main_grad = paddle.to_tensor(integers(rank, 10, (5, 2)).T).t()
    kept = [gradient_of(each) for each in parameters]
    dtypes = [each.dtype for each in kept]

    def tell(tensor: paddle.Tensor) -> None:
        asked.append(f"{tensor.size} of {str(tensor.dtype).removeprefix('paddle.')}")

    with reductions_told(tell) as patch:
        patch.setattr(training, "BUCKET_BYTES", bucket_bytes)
        average_gradients(parameters)
    assert [each.dtype for each in kept] == dtypes
    return [each.astype("float32").numpy() for each in kept], asked


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"),
    [
        (100, [14, 123, 11, 12, 3, 25, 16, 2]),
        (1 << 20, [148, 12, 46]),
    ],
    ids=["many", "one of each dtype"],
)
def test_gradients_are_added_up_in_buckets_in_float32_at_least(bucket_bytes, sizes):
    shapes = [(number, shape) for shapes in BUCKETED.values() for number, shape in enumerate(shapes)]
    shapes.append((10, (5, 2)))
    for found, asked in run(in_buckets, 2, bucket_bytes=bucket_bytes):
        means = [(integers(0, *each) + integers(1, *each)) / 2 for each in shapes]
        for got, mean in zip(found, means, strict=True):
            np.testing.assert_array_equal(got, mean, strict=True)
        dtypes = ["float64" if size == 12 else "float32" for size in sizes]
        assert asked == ["5 of int64", *(f"{size} of {dtype}" for size, dtype in zip(sizes, dtypes, strict=True))]


def in_a_buffer_of_the_caller() -> list[list[float]]:
    buffer = paddle.arange(9, dtype="float32").reshape([3, 3]) * (1 + 2 * paddle.distributed.get_rank())
    parameters = [parameter([3], gradient=None), parameter([2], gradient=None)]
    parameters[0].main_grad, parameters[1].main_grad = buffer[0], buffer[2][1:]
    average_gradients(parameters)
    return buffer.tolist()


@pytest.mark.cpu_only  # a custom device may lack the operator that writes to a view
def test_gradients_stay_in_a_buffer_of_the_caller():
    for rank, rows in enumerate(run(in_a_buffer_of_the_caller, 2)):
        other = 1 + 2 * rank
        assert rows == [[0.0, 2.0, 4.0], [3.0 * other, 4.0 * other, 5.0 * other], [6.0 * other, 14.0, 16.0]]


def with_sparse_gradients() -> list[str]:
    """Errors for sparse gradients of an embedding, on both ranks and on one."""
    rank, dense = paddle.distributed.get_rank(), parameter([1])
    texts = []
    for is_sparse in (True, rank == 1):
        rows = paddle.nn.Embedding(5, 3, sparse=is_sparse)
        rows(paddle.to_tensor([1, 2 + rank])).sum().backward()
        texts.append(caught(lambda rows=rows: average_gradients([dense, *rows.parameters()])))
    assert dense.grad.tolist() == [1.0]
    return texts


def test_sparse_gradients_are_refused_on_every_rank():
    expected = (
        "ValueError: average_gradients: the gradient of parameters[1] must be dense on several ranks, as that of "
        "Embedding(sparse=False) is, but got SelectedRows"
    )
    told = "RuntimeError: average_gradients: ranks [1] of [0, 1] raised an error in this call, which says more"
    assert run(with_sparse_gradients, 2) == [[expected, told], [expected, expected]]


def without_parameters() -> int:
    average_gradients([])
    average_gradients([frozen([3])])
    return 1


def test_there_may_be_nothing_to_average():
    assert run(without_parameters, 2) == [1, 1]


def large_integers(rank: int) -> np.ndarray:
    """Integers of one rank, which float16 and bfloat16 round."""
    return np.random.default_rng(rank).integers(-60000, 60000, [101]).astype(np.float32)


def narrow_gradients(dtype: str) -> tuple[list[np.ndarray], list[Any]]:
    """Averaged gradients of a dense parameter and of experts, and their dtypes."""
    given = [parameter([101], dtype, gradient=None), of_experts([101], dtype=dtype, gradient=None)]
    for each in given:
        each.grad = paddle.to_tensor(large_integers(paddle.distributed.get_rank())).astype(dtype)
    kept = [each.grad for each in given]
    average_gradients(given)
    return [each.astype("float32").numpy() for each in kept], [str(each.grad.dtype) for each in given]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_three_ranks_average_gradients_of_sixteen_bits_in_float32_and_round_once(dtype):
    def rounded(values: np.ndarray) -> np.ndarray:
        return paddle.to_tensor(values).astype(dtype).astype("float32").numpy()

    given = [rounded(large_integers(rank)) for rank in range(3)]
    third, total = np.float32(1 / 3), np.sum(given, 0)
    assert np.abs(total).max() > np.finfo(np.float16).max
    for own, ((dense, experts), dtypes) in zip(given, run(narrow_gradients, 3, dtype=dtype), strict=True):
        np.testing.assert_array_equal(dense, rounded(total * third))
        np.testing.assert_array_equal(experts, rounded(own * third))
        assert dtypes == [f"paddle.{dtype}"] * 2


def clipped(dtype: str) -> list[tuple[str, float]]:
    """Dtype and value of the gradients of a dense parameter and of experts, clipped together and without the first."""
    layer = paddle.nn.Layer()
    layer.weight = parameter([7], dtype, gradient=(300.0, 600.0)[paddle.distributed.get_rank()])
    mark_expert_parameters(layer, group=paddle.distributed.get_group(0))
    both = [parameter([5], dtype, gradient=30.0), layer.weight]
    clip, given = ClipGradByGlobalNorm(8.0), [(each, each.grad) for each in both]
    results = clip(given) + clip([(both[0], None), given[1]])
    return [(str(each.dtype), float(each.astype("float32").max())) for _, each in results]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_sixteen_bits_are_clipped_by_the_norm_in_float32(dtype):
    squares = 7 * 300.0**2 + 7 * 600.0**2
    both, alone = 8 / np.sqrt(5 * 30.0**2 + squares), 8 / np.sqrt(squares)
    for own, found in zip((300.0, 600.0), run(clipped, 2, dtype=dtype), strict=True):
        values = 30.0 * both, own * both, own * alone
        expected = [paddle.to_tensor(each, "float32").astype(dtype) for each in values]
        assert found == [(str(each.dtype), float(each.astype("float32"))) for each in expected]


@pytest.mark.cpu_only
def test_a_sparse_gradient_of_sixteen_bits_that_is_not_clipped_stays_as_it_is():
    rows, dense = paddle.nn.Embedding(5, 3, sparse=True), parameter([4], gradient=3.0)
    rows.to(dtype="bfloat16")
    rows(paddle.to_tensor([1])).sum().backward()
    rows.weight.need_clip = False
    (_, sparse), (_, clipped) = ClipGradByGlobalNorm(2.0)([(rows.weight, rows.weight.grad), (dense, dense.grad)])
    assert sparse.is_selected_rows()
    assert clipped.tolist() == [1.0] * 4


def test_alone_a_process_checks_what_it_is_given():
    assert caught(lambda: average_gradients([None])).startswith("TypeError: average_gradients: parameters[0] must be ")
    expected = "TypeError: average_gradients: parameters must be tensors, as layer.parameters() gives them, but got "
    assert caught(lambda: average_gradients(3)) == f"{expected}int"
    assert caught(lambda: average_gradients(paddle.ones([2]))) == f"{expected}Tensor"
    single = parameter([2], gradient=3.0)
    average_gradients([single])
    assert single.grad.tolist() == [3.0, 3.0]
    expected = "TypeError: average_gradients: copies must be a group of paddle.distributed, or None, but got int"
    assert caught(lambda: average_gradients([single], copies=3)) == expected


def with_experts_of_each_rank() -> list[Any]:
    """Experts that are all on each rank, so ranks have copies of them, before experts that the ranks share."""
    rank = paddle.distributed.get_rank()
    alone = [paddle.distributed.new_group([each]) for each in range(2)][rank]
    layers = [paddle.nn.Layer() for _ in range(2)]
    for layer, group in zip(layers, (alone, None), strict=True):
        layer.weight = parameter([2], gradient=1.0 + 2 * rank)
        mark_expert_parameters(layer, group=group)
    given = [layers[0].weight, parameter([2], gradient=2.0 + 2 * rank), layers[1].weight]
    average_gradients(given)
    found = [each.grad.tolist() for each in given]
    with pytest.MonkeyPatch.context() as patch:  # the copies are connected
        patch.setattr(paddle.distributed, "all_gather_object", None)
        patch.setattr(paddle.distributed, "new_group", None)
        average_gradients(given)
    mark_expert_parameters(layers[0], group=paddle.distributed.get_group(0) if rank else None)
    return [found, caught(lambda: average_gradients(given, paddle.distributed.get_group(0) if rank else None))]


def test_experts_that_each_rank_has_are_averaged():
    for rank, (found, text) in enumerate(run(with_experts_of_each_rank, 2)):
        assert found == [[2.0, 2.0], [3.0, 3.0], [0.5 + rank, 0.5 + rank]]
        assert text == (
            "ValueError: average_gradients: parameters[0] must be the same on all ranks of the group, but got "
            "'float32 [2] of experts on 1 ranks' on rank 0, 'float32 [2] of experts' on rank 1"
        )


def with_groups_that_overlap() -> list[str]:
    """Errors without a group, and with the group of ranks 0 and 1 though ranks 1 and 2 share the experts of rank 1."""
    pairs = []
    for ranks in ((0, 1), (1, 2)):
        pairs.append(paddle.distributed.new_group(list(ranks)))
        paddle.distributed.barrier()
    layer = paddle.nn.Layer()
    layer.weight = parameter([2])
    rank = paddle.distributed.get_rank()
    mark_expert_parameters(layer, group=pairs[min(rank, 1)])
    texts = [caught(lambda: average_gradients(layer.parameters()))]
    return texts if rank == 2 else [*texts, caught(lambda: average_gradients(layer.parameters(), pairs[0]))]


def test_groups_of_experts_that_overlap_are_refused_on_all_three_ranks():
    expected = "shared by groups that have each rank once, but got groups of ranks [[0, 1], [1, 2]]"
    ranks = run(with_groups_that_overlap, 3)
    assert [texts[0] for texts in ranks] == [f"ValueError: average_gradients: parameters[0] must be {expected}"] * 3
    # the group has as many ranks as the one that shares the experts
    told = "RuntimeError: average_gradients: ranks [1] of [0, 1] raised an error in this call, which says more"
    expected = "the group that shares the experts of parameters[0], ranks [1, 2], but got ranks [0, 1]"
    assert [texts[1:] for texts in ranks] == [[told], [f"ValueError: average_gradients: group must be {expected}"], []]


def end_in_the_middle(collective: int) -> None:
    """Rank 1 ends when it comes to one of the collectives: the first compares ranks, the second adds up gradients.

    Before the second one it announces that it waited in the first one.
    """
    average_gradients([parameter([2])])
    if paddle.distributed.get_rank() == 0:
        end_rank_1()
        raise AssertionError(caught(lambda: average_gradients([parameter([2]), parameter([3])])))
    all_reduce, calls = paddle.distributed.all_reduce, itertools.count()

    def ending(*given: Any, **options: Any) -> Any:
        return end_rank_1() if next(calls) == collective else all_reduce(*given, **options)

    compared = training._compared

    def announcing(*given: Any) -> Any:
        found = compared(*given)
        Rendezvous(paddle.distributed.get_group(0), 1.0)._waits.announce()
        return found

    paddle.distributed.all_reduce, training._compared = ending, announcing
    average_gradients([parameter([2]), parameter([3])])


@pytest.mark.cpu_only
@pytest.mark.parametrize("collective", [0, 1], ids=["comparing", "adding up"])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("stub", marks=pytest.mark.slow)])
def test_a_rank_that_ends_is_named(backend, collective):
    with pytest.raises(RuntimeError) as failed:
        run(end_in_the_middle, 2, backend, collective=collective)
    expected = "RuntimeError: average_gradients: rank 0 could not exchange data with ranks [1] of [0, 1], which ended"
    assert f"AssertionError: {expected}" in str(failed.value)
