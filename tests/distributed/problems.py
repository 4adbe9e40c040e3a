# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Batches spread over ranks, and their results on one rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed.communication.group import Group

from paddle_moe_ops import dequantize_1x128, permute, quantize_1x128, route, unpermute, use_backend
from paddle_moe_ops.backends.arrays import to_tensor
from paddle_moe_ops.expert_parallel.agreement import Kind, LayerCall, LayerNumber, Step
from paddle_moe_ops.testing.equality import assert_bits_equal


class Problem(NamedTuple):
    """A batch of several ranks.

    Attributes:
        tokens: of each rank.
        experts: E.
        topk: K.
        hidden: d.
        routing: "uniform", "one expert", "half none" or "none".
        dtype: of tokens.
        float8: what tokens travel as.
        tokens_per_rank: tokens that a rank sends to each, or None.
        transport: what moves tokens.
        integers: whether all sums and products are integers that every dtype has.
    """

    tokens: tuple[int, ...]
    experts: int
    topk: int
    hidden: int
    routing: str = "uniform"
    dtype: str = "float32"
    float8: str | None = None
    tokens_per_rank: int | None = None
    transport: str = "auto"
    integers: bool = False

    def arrays(self) -> dict[str, NDArray]:
        """x, ids, probs and the gradient of the result, of all ranks."""
        rng = np.random.default_rng([*self.tokens, self.experts, self.topk, self.hidden])
        count, ids = sum(self.tokens), np.zeros([sum(self.tokens), self.topk], np.int64)
        for token in range(count):
            ids[token] = rng.permutation(self.experts)[: self.topk]
        if self.routing == "one expert":
            ids[:] = -1
            ids[:, 0] = self.experts - 1
        ids[rng.random(ids.shape) < {"half none": 0.5, "none": 1.0}.get(self.routing, 0.0)] = -1
        rows, slots = [count, self.hidden], ids.shape
        if self.integers:
            x, d_out = (4 * rng.integers(-1, 2, rows) for _ in range(2))
            probs = rng.integers(1, 3, slots)
        else:
            x, d_out = (rng.standard_normal(rows) for _ in range(2))
            probs = rng.random(slots)
        floats = {"x": x, "probs": probs, "d_out": d_out}
        return {"ids": ids, **{name: each.astype(np.float32) for name, each in floats.items()}}

    def of_rank(self, rank: int) -> slice:
        """The slice of the arrays with a rank's tokens."""
        first = sum(self.tokens[:rank])
        return slice(first, first + self.tokens[rank])

    def tensors(self, part: slice) -> dict[str, Any]:
        """Tensors of a part of the batch; x and probs want gradients."""
        arrays = {name: np.ascontiguousarray(each[part]) for name, each in self.arrays().items()}
        for name in ("x", "d_out"):
            arrays[name] = arrays[name].astype(self.dtype)
        made = {name: to_tensor(each) for name, each in arrays.items()}
        made["x"].stop_gradient = made["probs"].stop_gradient = False
        return made


def on_this_device() -> AbstractContextManager:
    """The backend that runs everything on the current device: the stub has no operators of its own."""
    return use_backend("reference") if paddle.get_device().startswith("stub") else nullcontext()


def step_of(group: Group) -> Step:
    """A pass that is the same on all ranks, for exchanges without a layer."""
    form = {"width": 1, "topk": 1, "dtype": 0, "copies": True}
    call = LayerCall(group.ranks, LayerNumber(0, [0], [1]), 0, **form, modes={}, unread=None)
    return Step(call, Kind.COMBINE)


def bits(tensor: paddle.Tensor) -> NDArray:
    """A tensor as an array, which can be pickled and compared bit for bit."""
    return tensor.numpy()


def scaled(rows: paddle.Tensor, experts: paddle.Tensor) -> paddle.Tensor:
    """Expert outputs in these tests: expert e multiplies by e / 4 + 1, which is exact or rounded once."""
    if rows.shape[0] == 0:
        return rows
    factors = (experts.astype("float32") / 4 + 1).unsqueeze(-1)
    return (rows.astype("float32") * factors).astype(rows.dtype)  # a CPU does not multiply float16


def results(out: paddle.Tensor, tensors: dict[str, Any]) -> dict[str, NDArray]:
    """The result and the gradients, after a backward pass."""
    paddle.autograd.backward([out], [tensors["d_out"]])
    return {"out": bits(out), "d_x": bits(tensors["x"].grad), "d_probs": bits(tensors["probs"].grad)}


def kept_ids(problem: Problem) -> NDArray:
    """The ids without those that have no room."""
    ids, ranks = problem.arrays()["ids"].copy(), len(problem.tokens)
    if problem.tokens_per_rank is None:
        return ids
    for source in range(ranks):
        of_source = ids[problem.of_rank(source)]  # a view
        for rank in range(ranks):
            goes_there = (of_source >= 0) & (of_source // (problem.experts // ranks) == rank)
            is_late = np.cumsum(goes_there.any(1)) > problem.tokens_per_rank
            of_source[goes_there & is_late[:, None]] = -1
    return ids


def rounded_to_float8(tokens: paddle.Tensor, payload: str) -> paddle.Tensor:
    """Tokens with the values that arrive if they travel as float8; their gradient is that of the given ones."""
    codes, scales = quantize_1x128(tokens, ue8m0=payload.endswith("ue8m0"))
    rounded = dequantize_1x128(codes, scales, dtype=tokens.dtype).astype("float32")
    made = (tokens.astype("float32") + (rounded - tokens.astype("float32")).detach()).astype(tokens.dtype)
    assert_bits_equal(made.numpy(), rounded.astype(tokens.dtype).numpy())
    return made


def alone(problem: Problem) -> dict[str, NDArray]:
    """Results of one process with all tokens and experts."""
    t = problem.tensors(slice(None))
    plan, tokens = route(to_tensor(kept_ids(problem)), num_experts=problem.experts), t["x"]
    if problem.float8 is not None:
        tokens = rounded_to_float8(tokens, problem.float8)
    rows = scaled(permute(tokens, plan)[0], plan.row_to_expert)
    return results(unpermute(rows, plan, t["probs"]), t)


def assert_like_one_process(problems: list[Problem], ranks: list[list[dict[str, NDArray]]]) -> None:
    """Assert that the results of all ranks, one for each problem, have the bits of one process."""
    for number, problem in enumerate(problems):
        for name, expected in alone(problem).items():
            got = np.concatenate([results[number][name] for results in ranks])
            assert_bits_equal(got, expected, what=f"{name} of {problem}")


# Problems of two ranks for transports of bfloat16 alone.
IN_BFLOAT16 = [
    Problem((5, 16), 4, 2, 8, dtype="bfloat16"),
    Problem((9, 4), 6, 4, 32, "one expert", "bfloat16"),
    Problem((0, 7), 4, 2, 72, dtype="bfloat16"),
    Problem((12, 13), 8, 8, 16, "half none", "bfloat16"),
    Problem((3, 2), 2, 1, 8, "none", "bfloat16"),
]
