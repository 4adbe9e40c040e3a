# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices that all layers of a model keep from one micro-batch to the next."""

from __future__ import annotations

from paddle import Tensor, nn

from .. import _checks
from .._graphs import is_on_gpu
from ..backends import Float8Matrices
from ..backends.experts import make_default
from ._common import warn_user

_FEW_ROWS = 1024  # for each expert


def set_is_first_microbatch(model: nn.Layer) -> int:
    """Quantise the experts' matrices of a model's layers in their next call, and keep them until this is called again.

    It is `keep_float8_matrices`, for programs that call it at the start of each step of the optimizer, and after
    changes of parameters that are not noticed. Megatron-LM has a function of this name for the layers of
    TransformerEngine.

    Calls with ``is_first_microbatch`` do what it says. Programs quantise matrices in each call. A copy of a model keeps
    nothing until this is called for it. No host synchronisation.

    Args:
        model: any layer.

    Returns:
        the number of layers that keep matrices.

    Raises:
        TypeError: not a `paddle.nn.Layer`.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import MoELayer, set_is_first_microbatch
        >>> model = MoELayer(64, 32, num_experts=8, topk=2, compute="fp8_1x128")
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> set_is_first_microbatch(model)  # at the start of each step
        1
        >>> for micro_batch in paddle.randn([4, 16, 64]):
        ...     model(micro_batch).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.clear_grad()
    """
    return _keep("set_is_first_microbatch", model)


def keep_float8_matrices(model: nn.Layer) -> int:
    """Quantise the experts' matrices of a model's layers once after each change, and keep them in between.

    One call serves any optimizer; `expert_parallel.distributed_optimizer` includes it. Affected are layers with
    ``compute``, and blocks of PaddleFormers after ``apply(model, compute=...)``. They then need no
    ``is_first_microbatch``: micro-batches share the codes, 2 bytes for each element, or 1 if no gradient is required.
    Bits are those of a model that quantises in each call.

    These changes are noticed: a step of any optimizer of Paddle or Fleet, ``set_state_dict``, ``set_value``, ``copy_``,
    `paddle.assign`, initializers, operators in place, a move to other memory, as by ``to`` or a gather of sharded
    parameters, collectives on parameters or on a buffer that contains them, and ``Tensor.get_tensor().set``. To count
    them, the first layer that keeps codes wraps for the process ``_apply_optimize`` of ``paddle.optimizer.Optimizer``,
    methods of ``paddle.Tensor``, of Paddle's ``DenseTensor`` and ``ProcessGroup``, and ``full_`` and ``assign_value_``
    of ``paddle._C_ops``.

    **Not noticed** are writes by functions whose ``out`` is a parameter, through DLPack, by operators in place on a
    flat buffer of parameters, and by operators of your own that do not declare them: call this again afterwards. If
    you forget, there is an error in place of stale results. On a CPU, and everywhere with
    ``PADDLE_MOE_OPS_VALIDATE=1``, a call compares 1024 elements of each matrix with those that were quantised, and
    raises ValueError if they differ. On a GPU without it, a kernel compares 16384 elements of each: if they differ,
    results of the call are NaN, and the next call after the kernel has run raises, until this is called again. A
    write that changes few elements of a matrix may escape both.

    A copy of a model keeps nothing until this is called for it. No host synchronisation, but under validation. A CUDA
    graph that captures a call with kept codes replays these codes: after a change its results are NaN. Capture after
    a call that has filled the cache.

    Args:
        model: any layer.

    Returns:
        the number of layers that keep matrices.

    Raises:
        TypeError: not a `paddle.nn.Layer`.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops.nn import MoELayer, keep_float8_matrices
        >>> model = MoELayer(64, 32, num_experts=8, topk=2, compute="fp8_1x128")
        >>> keep_float8_matrices(model)
        1
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> for micro_batch in paddle.randn([4, 16, 64]):
        ...     model(micro_batch).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.clear_grad()
    """
    return _keep("keep_float8_matrices", model)


def warn_of_codes_for_few_rows(layer: str, rows: Tensor, num_rows: int, num_experts: int) -> None:
    """Warn if a call on a GPU quantises all matrices for few rows, which takes longer than float8 GEMMs save.

    Measured on an H200 (``benchmarks/results/h200-layer.jsonl``): with up to 512 rows for each expert such layers are
    slower than in bfloat16, and with kept matrices faster.

    Args:
        layer: the name that begins the warning.
        rows: any tensor of the pass.
        num_rows: rows of all experts.
        num_experts: E.
    """
    if 0 < num_rows < _FEW_ROWS * num_experts and is_on_gpu(rows):
        warn_user(
            f"{layer}: for {num_rows} rows of {num_experts} experts, quantising the matrices in each call takes longer "
            "than float8 saves; call paddle_moe_ops.nn.keep_float8_matrices(model) once, which quantises them after "
            "each change"
        )


def _keep(function: str, model: nn.Layer) -> int:
    _checks.instance(function, "model", model, nn.Layer, "a paddle.nn.Layer")
    attributes = [each for layer in model.sublayers(include_self=True) for each in vars(layer).values()]
    keeping = [each for each in attributes if isinstance(each, Float8Matrices)]
    for each in keeping:
        make_default(each)
    return len(keeping)
