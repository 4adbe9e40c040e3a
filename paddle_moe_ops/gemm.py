# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM of experts: each multiplies its own rows with its own matrix.

M rows in all, D the inner and N the outer size of a matrix, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import paddle
from paddle import Tensor, nn

from . import _checks
from ._graphs import is_graph_value, is_on_gpu, public, to_dtype
from ._matrices import Matrices, in_dtype, listed, matrices, named, stacked
from ._options import WeightsBy
from .backends import GemmSpec, resolve
from .functional import move_rows
from .routing import Plan, as_plan, check_weights, row_probs, rows_of, tokens_of

__all__ = ["grouped_gemm"]

_COUNTS = "a list of ints or a 1-D int array or tensor"


@public("X", "W", "topk_weights", "bias")
def grouped_gemm(
    X: Tensor,
    W: Tensor | Sequence[Tensor] | nn.ParameterList,
    m_sizes: Sequence[int] | Tensor | None = None,
    transpose: bool = True,
    *,
    expert_offsets: Sequence[int] | Tensor | None = None,
    plan: Plan | None = None,
    permute_x: bool = False,
    topk_weights: Tensor | None = None,
    weights_by: WeightsBy = None,
    permute_y: bool = False,
    bias: Tensor | Sequence[Tensor] | nn.ParameterList | None = None,
) -> Tensor:
    """Multiply each group of rows with the matrix of its expert: ``Y_g = X_g W_g^T + b_g``, or ``X_g W_g + b_g``.

    Rows that belong to no group (padding, and rows after the last group) are not read, and their result is 0, even with
    a bias. With a plan, the first GEMM of an expert can include the permutation, and the second the weights; the sum of
    its rows is the weighted sum of `unpermute`, except that rows are rounded after they are weighted. With
    ``permute_y`` rows are returned in slot order, to be summed in another way.

    Differentiable in ``X``, ``W``, ``topk_weights`` and ``bias``: rows of no group and experts without rows get a
    gradient of 0. Sums accumulate in float32. Deterministic; the order of additions depends on the backend (`explain`
    says which runs). The bias is added in float32 and multiplied by the weight before the row is rounded. Its gradient
    is the float32 sum of the rows of the gradient, each times its weight.

    On an NVIDIA GPU, bfloat16 and float16 run on Triton if it is installed, in one launch and a small one. On GPUs
    with TMA, another launch permutes the rows of ``permute_x``; they are not kept for the backward pass. Sizes and
    offsets that are tensors are not read: as in a graph, groups that do not fit are cut, unless PADDLE_MOE_OPS_VALIDATE
    asks for checks. The gradient of ``W`` uses rows that were weighted and then rounded.

    On Triton, matrices in a list need no copy if they are adjacent in memory, see
    `paddle_moe_ops.nn.lay_side_by_side`. Others are copied to one tensor in each call. Their gradients are parts of one
    tensor.

    Graphs, and dygraph without Triton, run an operator of the compiled library, the same one on every device. On an
    NVIDIA GPU of compute capability 9.0 its kernels multiply bfloat16 and float16 if D and N are multiples of 8,
    without host synchronisation and without compilation at the first call. In all other cases it calls Paddle's matmul,
    group by group, with a host synchronisation on a GPU. On a CPU, bfloat16 and float16 operands are widened to
    float32, and the result is rounded once. On a GPU it is rounded twice: after matmul, and after bias and weights,
    which are applied group by group, with a host synchronisation. Matrices in a list are multiplied one by one by
    Paddle's matmul, in the same way. Under mixed precision on a GPU all operands but the weights take its dtype, as in
    any matmul.

    Args:
        X: [M, D] bfloat16, float16 or float32, rows in expert order; with ``permute_x`` [T, D] tokens. More dimensions,
            [..., D], count as M or T rows in all.
        W: [E, N, D], or [E, D, N] without ``transpose``; dtype of ``X``. Or a list or a
            `paddle.nn.ParameterList` of E matrices, for experts that are separate layers: each that requires a gradient
            receives its own, zeros without rows.
        m_sizes: rows of each group, E ints >= 0 in a list or an array, or an int tensor [E]. A list is part of a static
            graph's program; with a tensor one program serves all sizes. None with ``plan``.
        transpose: whether the matrices are stored transposed, as the weight of a torch Linear is.
        expert_offsets: first row of each group and the end of the last, ascending, in the forms of ``m_sizes`` with
            E + 1 entries, as `Plan.expert_offsets`. None: the groups follow each other from row 0; None with ``plan``.
        plan: defines the groups, in place of ``m_sizes`` and ``expert_offsets``.
        permute_x: whether ``X`` are tokens, whose rows are those of ``plan``. Not together with ``topk_weights``.
        topk_weights: float32 factors of the result's rows, applied before these are rounded: [M] by row
            (``plan.row_probs``), or [T, K] or flat [T*K] by slot of ``plan``. The gradient has this shape; it is 0 at
            rows of no group and at slots without a row.
        weights_by: the order of flat weights, "row" or "slot"; required for flat weights with ``plan``.
        permute_y: whether the rows are permuted back to the order of slots of ``plan``: slot k of token t in row t * K
            + k, zeros for a slot without a row. They are permuted after the GEMM, by bit-exact copies. Not together
            with ``permute_x``.
        bias: [E, N], dtype of ``X``, added to the rows of each expert before they are weighted. Or a list of E
            vectors [N]. Slots without a row stay 0.

    Returns:
        [M, N], dtype of ``X``, in expert order; with ``permute_y`` [T*K, N] in slot order.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; groups that overlap or end after row M.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import route, unpermute
        >>> from paddle_moe_ops.gemm import grouped_gemm
        >>> x, gate_up, down = paddle.randn([16, 64]), paddle.randn([8, 96, 64]), paddle.randn([8, 64, 48])
        >>> plan = route(paddle.topk(paddle.rand([16, 8]), k=2)[1], paddle.rand([16, 2]), num_experts=8)
        >>> rows = paddle.nn.functional.swiglu(grouped_gemm(x, gate_up, plan=plan, permute_x=True))
        >>> y = grouped_gemm(rows, down, plan=plan, topk_weights=plan.row_probs, weights_by="row")
        >>> unpermute(y, plan).shape
        [16, 64]
        >>> grouped_gemm(rows, down, m_sizes=plan.tokens_per_expert.tolist()).shape
        [32, 64]
    """
    name = "grouped_gemm"
    _checks.flag(name, "transpose", transpose)
    _checks.flag(name, "permute_x", permute_x)
    _checks.flag(name, "permute_y", permute_y)
    _checks.choice(name, "weights_by", weights_by, get_args(WeightsBy))
    W, bias = listed(W), listed(bias)
    if plan is not None:
        plan = as_plan(name, plan)
        for argument, value in (("m_sizes", m_sizes), ("expert_offsets", expert_offsets)):
            if value is not None:
                _checks.bad_value(name, argument, "None where plan is given", type(value).__name__)
        m_sizes, expert_offsets = plan.tokens_per_expert, plan.expert_offsets
    elif isinstance(m_sizes, Plan):
        _checks.bad_type(name, "m_sizes", _COUNTS, "a Plan, which must be passed by keyword, as plan")
    elif permute_x or permute_y:
        _checks.bad_value(name, "plan", f"a paddle_moe_ops.Plan with permute_{'x' if permute_x else 'y'}", "None")
    elif m_sizes is None:
        _checks.bad_value(name, "m_sizes or plan", "given", "neither")
    if permute_x and topk_weights is not None:
        _checks.bad_value(name, "topk_weights", "None with permute_x", type(topk_weights).__name__)
    if permute_x and permute_y:
        _checks.bad_value(name, "permute_y", "False with permute_x", True)
    given_shape = getattr(X, "shape", None)
    X = _checks.lines(name, "X", X, _checks.SUM_DTYPES, "D")
    if plan is not None:
        expected = (tokens_of if permute_x else rows_of)(plan)
        _checks.rows(name, "X", X, _checks.SUM_DTYPES, *expected, given_shape)
    # Mixed precision casts both operands to one dtype.
    dtypes = _checks.SUM_DTYPES if paddle.amp.is_autocast_enabled() else (X.dtype,)
    inner = X.shape[1]
    shape_of_all = ["E", "N", inner] if transpose else ["E", inner, "N"]
    matrices(name, "W", W, dtypes, shape_of_all, f" with transpose={transpose}")
    first_name, first = next(iter(named("W", W).items()))
    is_listed = isinstance(W, Sequence)
    if 0 in first.shape:
        shape = "N, D" if transpose else "D, N"
        shape = f"[{shape}] with D" if is_listed else f"[E, {shape}] with E, D"
        _checks.bad_value(name, first_name, f"of shape {shape} and N >= 1", list(first.shape))
    num_experts = len(W) if isinstance(W, Sequence) else first.shape[0]
    if plan is not None and num_experts >= 0 and num_experts != plan.num_experts:
        given = f"{num_experts} of them" if is_listed else list(first.shape)
        _checks.bad_value(name, "W", f"matrices of the {plan.num_experts} experts of plan", given)
    if bias is not None:
        matrices(name, "bias", bias, dtypes, [num_experts, first.shape[-2 if transpose else -1]])
    if num_experts < 0 and (plan is not None or isinstance(m_sizes, (list, tuple))):  # values of a graph
        num_experts = len(m_sizes) if plan is None else plan.num_experts
        W = first.reshape([num_experts, 0, 0])
        bias = bias if bias is None or isinstance(bias, Sequence) else bias.reshape([num_experts, 0])
    sizes = _row_counts(name, "m_sizes", m_sizes, num_experts)
    offsets = expert_offsets
    if offsets is not None:
        offsets = _row_counts(name, "expert_offsets", offsets, num_experts + 1 if num_experts >= 0 else -1)
    weights = weights_of_rows(name, topk_weights, weights_by, plan, X)
    biases = {} if bias is None else named("bias", bias)
    _checks.same_place(name, X=X, **named("W", W), topk_weights=topk_weights, **biases)
    spec = GemmSpec(sizes, offsets, transpose, plan if permute_x else None, _checks.validation(name, None, X))
    rows = multiplied(X, W, weights, bias, spec)
    if plan is None or not permute_y:
        return rows
    return move_rows(rows, plan.row_to_slot.unsqueeze(-1), plan.slot_to_row.reshape([-1]))


def multiplied(X: Tensor, W: Matrices, weights: Tensor | None, bias: Matrices | None, spec: GemmSpec) -> Tensor:
    """`grouped_gemm` of checked arguments.

    Args:
        X: rows [M, D], or tokens if the spec has a plan.
        W: the matrices.
        weights: float32 [M], or None.
        bias: [E, N], a list of vectors, or None.
        spec: the groups and the options.
    """
    name, dtype = "grouped_gemm", None
    if paddle.amp.is_autocast_enabled() and isinstance(X, Tensor) and is_on_gpu(X):
        dtype = getattr(paddle, paddle.amp.get_autocast_dtype())
        X = to_dtype(X, dtype)
    backend = resolve(name, X)
    addend = bias if bias is None or not backend.takes_lists else stacked(bias)
    if dtype is not None:
        W = in_dtype(name, W, dtype, backend)
        addend = None if addend is None else in_dtype(name, addend, dtype, backend)
    if spec.plan is not None and not backend.gathers_rows:
        X, _ = resolve("permute", X).permute(X, None, spec.plan, "all")
        spec = spec._replace(plan=None)
    return backend.grouped_gemm(X, W, weights, addend, spec)


def weights_of_rows(
    function: str, topk_weights: Tensor | None, weights_by: str | None, plan: Plan | None, X: Tensor
) -> Tensor | None:
    """float32 [M], or None."""
    if topk_weights is None:
        return None
    if plan is None:
        if weights_by == "slot":
            _checks.bad_value(function, "weights_by", "'row' or None without plan", repr(weights_by))
        text = f"[{X.shape[0]}] without plan"
        return _checks.tensor(function, "topk_weights", topk_weights, (paddle.float32,), [X.shape[0]], text)
    if not check_weights(function, "topk_weights", topk_weights, plan, weights_by):
        return topk_weights
    if weights_by == "row":
        _checks.bad_value(function, "weights_by", "'slot' or None with [T, K] weights", repr(weights_by))
    return row_probs(topk_weights.reshape([-1, plan.topk]), plan)


def _row_counts(function: str, argument: str, value: Any, length: int) -> list[int] | Tensor:
    """A list of ints >= 0, or a tensor."""
    if isinstance(value, Tensor) or is_graph_value(value):
        return _checks.tensor(function, argument, value, _checks.ID_DTYPES, [length])
    value = _checks.listed(function, argument, value, _COUNTS)
    if len(value) != length:
        _checks.bad_value(function, argument, f"of length {length}", f"length {len(value)}")
    return [_checks.integer(function, f"{argument}[{i}]", item, 0) for i, item in enumerate(value)]


def __dir__() -> list[str]:
    return __all__
