# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts as one call: grouped GEMMs, biases, the activation, and the weighted sum of each token's rows.

T tokens of d columns, K slots each, N rows, E experts of inner size n.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import paddle
from paddle import Tensor, nn

from . import _checks
from ._activations import ACTIVATIONS, activate
from ._float8_layer import float8_rows, why_not_float8
from ._graphs import is_graph_value, is_on_gpu, known_sizes, public, to_dtype
from ._matrices import (
    EVEN_COLUMNS,
    Matrices,
    check_compute,
    check_deferrable,
    check_destinations,
    check_memory_options,
    check_quantized_options,
    each_of,
    in_dtype,
    listed,
    matrices,
    named,
    quantized_pair,
)
from ._native import native
from ._options import Activation, ComputeFormat, Keep, WeightsBy
from ._quick import quick_moe_mlp
from .backends import (
    Float8Matrices,
    GemmSpec,
    MlpSpec,
    accumulated,
    accumulated_each,
    chosen,
    resolve,
)
from .backends.base import maps_of_layer
from .backends.deferred import deferral_of, detached, discard_dw, flush_dw
from .backends.experts import holds_others, is_default
from .backends.layers import dequantized, quantized_layer
from .backends.quantized import FLOAT8_FORMAT, QuantizedMatrices
from .gemm import multiplied
from .routing import Plan, as_plan, check_weights, row_probs, tokens_of

__all__ = ["Float8Matrices", "discard_dw", "flush_dw", "moe_mlp"]

_NAME = "moe_mlp"
IN_GRAPH = "in a static graph, which quantises the matrices in each call"

# Signatures of calls whose arguments passed the checks. The checks take longer than all launches of a call.
_passed = _checks.Passed()


@public("x", "probs", "gate_up", "down", "gate_up_bias", "down_bias", quick=quick_moe_mlp)
def moe_mlp(
    x: Tensor,
    plan: Plan,
    probs: Tensor | None,
    gate_up: Tensor | Sequence[Tensor] | nn.ParameterList | QuantizedMatrices,
    down: Tensor | Sequence[Tensor] | nn.ParameterList | QuantizedMatrices,
    *,
    activation: Activation = "swiglu",
    transpose: bool = False,
    weights_by: WeightsBy = None,
    keep: Keep = "h",
    workspace_mb: int = 1024,
    accumulate: bool = False,
    gate_up_bias: Tensor | Sequence[Tensor] | nn.ParameterList | None = None,
    down_bias: Tensor | Sequence[Tensor] | nn.ParameterList | None = None,
    compute: ComputeFormat = None,
    float8_matrices: Float8Matrices | None = None,
    defer_dw: bool | Literal["fleet"] = False,
) -> Tensor:
    """Run each token through its experts, and return the weighted sum of their outputs.

    ``out[t] = sum over the slots k of token t of probs[t, k] * (silu(x[t] G) * (x[t] U)) D`` with the matrices G, U
    (the two halves of ``gate_up``) and D of the expert that slot k is assigned to. These calls return the same, except
    for the rounding of rows::

        rows = swiglu(grouped_gemm(x, gate_up, plan=plan, permute_x=True, transpose=False))
        out = unpermute(grouped_gemm(rows, down, plan=plan, transpose=False), plan, probs)

    With another ``activation`` or with biases::

        rows = act(grouped_gemm(x, gate_up, plan=plan, permute_x=True, transpose=False, bias=gate_up_bias))
        out = unpermute(grouped_gemm(rows, down, plan=plan, transpose=False, bias=down_bias), plan, probs)

    Differentiable in ``x``, ``probs``, the matrices and the biases. Deterministic, and the bits do not depend on
    ``workspace_mb``. No host synchronisation on a GPU with Triton, nor in a graph on one of compute capability 9.0; a
    plan with a static buffer makes all shapes static, and CUDA graphs can capture both passes.

    On an NVIDIA GPU, bfloat16 and float16 layers of SwiGLU without biases keep ``x``, the first GEMM's output H and the
    maps for the backward pass: 2 T d + 4 N n bytes. Rows of d columns are not kept: each pass computes them in chunks,
    in a buffer of ``workspace_mb``. A second backward pass through the same graph of dygraph raises. Lists
    of matrices are treated as in `grouped_gemm`.

    On a GPU of compute capability 9.0, if d and n are multiples of 8, the compiled library runs this layer, in dygraph
    and in graphs: a token has the same bits in every batch, gradients of x included. There is no host synchronisation.
    On other GPUs Triton runs it in dygraph.

    In a graph, and in dygraph where Triton does not run, the same operator runs on all devices, so a program that was
    saved on one runs on another. Without kernels its GEMMs are Paddle's matmul, expert by expert, with a host
    synchronisation on a GPU; it then ignores ``workspace_mb``, and a second backward pass is supported. A gradient of a
    gradient is not.

    All other layers run as the composed calls above. They ignore ``keep`` and ``workspace_mb``, and keep more tensors
    for the backward pass. With ``compute``, ``keep`` applies everywhere.

    Quantised matrices (`quantize_experts`) are constants without gradients. Integer codes: the result is that of the
    matrices' values, rounded to the dtype of ``x``. Float8 codes: that of ``compute="fp8_1x128"``, whether it is given
    or not. The compiled library runs layers of SwiGLU without biases, in dygraph and in graphs; on a CPU it dequantises
    the matrices of experts that have rows.

    Args:
        x: [T, d] bfloat16, float16 or float32 tokens. More dimensions, [..., d], count as T tokens in all.
        plan: the rows of the tokens, from `route`.
        probs: the factor of each row, float32: [T, K] or flat [T*K] by slot of ``plan``, [N] by row, or None
            for the plain sum. The gradient has this shape; it is 0 at slots without a row.
        gate_up: [E, d, 2 * n], dtype of ``x``: the gate's columns first, as Paddle's ``swiglu`` has them.
            With ``transpose`` [E, 2 * n, d]. Or a list or a `paddle.nn.ParameterList` of E matrices, as in
            `grouped_gemm`.
        down: [E, n, d], dtype of ``x``; with ``transpose`` [E, d, n]. Or a list of E matrices. Both matrices may be a
            `QuantizedMatrices`, of one format and layout, which has a ``transpose`` of its own.
        activation: the function of the gate's columns g and the others u, in float32. "swiglu": ``silu(g) * u``.
            "geglu": ``gelu(g) * u``; "geglu_tanh" with GELU's approximation by a hyperbolic tangent. "swiglu_oai", of
            gpt_oss: ``(u + 1) * g * sigmoid(1.702 * g)`` with g clamped to at most 7 and u to [-7, 7]; clamped values
            have no gradient.
        transpose: whether the matrices are stored transposed, as the weight of a torch Linear is.
        weights_by: the order of flat ``probs``, "row" or "slot"; required for flat ``probs``, such as
            ``plan.row_probs``.
        keep: "h", or "x" to keep only the tokens and the maps, and recompute H in the backward pass; with ``compute``
            also "h_fp8" to keep H as float8 codes, with a scale for each 128 columns. In a graph "h_fp8" means "h".
        workspace_mb: MiB of the buffer on a GPU, 1 or more; it always has room for a few columns of all rows. A larger
            buffer speeds up layers of many small experts.
        accumulate: whether to add the gradients of the matrices to existing ones as they are computed, instead of
            returning them to Paddle, which would read and write all matrices once more. They are added to the attribute
            ``main_grad``, a tensor of float32 or of the matrix's dtype, which is allocated (float32) if it is None;
            without that attribute to ``grad``, if there is one. Use ``backward()``: hooks on the gradient of the
            matrix, and `paddle.grad`, then receive None. A second backward pass through the same graph raises.
            paddle.DataParallel does not reduce ``main_grad``: do that before the optimizer's step. Fleet's
            `MixPrecisionOptimizer` reads ``main_grad``; `paddle.optimizer.AdamW` alone ignores it. Biases are treated
            in the same way.
        gate_up_bias: [E, 2 * n], dtype of ``x``, added to the first GEMM's output: the gate's first, as in ``gate_up``.
            Or a list of E vectors.
        down_bias: [E, d], dtype of ``x``, added to the second GEMM's output before it is weighted. Or a list of E
            vectors.
        compute: "fp8_1x128" to multiply float8 operands (docs/float8_layers.md): tokens, gradients and rows between the
            GEMMs are quantised with a scale for each 128 columns, matrices with a scale for each 128 x 128 elements,
            once in a call: the codes for the backward pass, 1 byte for each element, are kept until it has run. With
            ``keep="x"`` each pass quantises the matrices that it reads. The wgrad GEMMs have operands in the dtype of
            ``x``. "fp8_1x128_wgrad": those are float8, too, with scales for 128 rows of an expert: activations have one
            for each column, gradients one for each 128 columns; for SwiGLU without biases. GPUs of compute capability
            9.0 have kernels for such layers in bfloat16 with d a multiple of 16 and n a multiple of 128. Otherwise
            quantised values are multiplied in float32, which takes longer than ``None``. Biases and other activations
            are for dygraph, with ``keep="h"`` or "x", which then makes no difference, and without ``defer_dw``. It
            needs the compiled library.
        float8_matrices: with ``compute`` in dygraph, the store that keeps quantised matrices from one call to the next,
            see `Float8Matrices`; None: each call quantises its matrices.
        defer_dw: True: the backward pass computes the gradients of ``x``, ``probs`` and the biases, and leaves those of
            the matrices (dW) to `flush_dw`, or to ``pop`` of Fleet's ``WeightGradStore`` if that is enabled in the
            backward pass. "fleet": to ``pop`` alone; where the store is not enabled the backward pass computes dW. All
            bits are those of False. Until then it keeps the tokens, the gradient of the result, and N rows of 3 n
            columns: 2 T d + 3 N n elements (composed layers: N rows of 2 d + 3 n columns, biases or not). The values of
            the matrices are not kept and may change. The matrices must be leaves, such as parameters. Use
            ``backward()``: ``create_graph=True`` and `paddle.grad` of the matrices raise, and hooks on their gradients
            receive None, then the gradient at the flush. A second backward pass through the same graph raises. On the
            backend "reference" the backward pass computes dW, and only adding it waits. True is refused in wrappers
            that reduce gradients in the backward pass: paddle.DataParallel, except in its ``no_sync()``, and Paddle's
            sharding of stages 2 and 3.

    Returns:
        a tensor with the shape and dtype of ``x``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape; ``accumulate`` in a static graph, or with a matrix or a
            bias that is not a leaf or whose ``main_grad`` does not fit; ``compute`` with biases or another activation
            in a static graph, or with these and ``defer_dw`` or ``keep="h_fp8"``; ``keep="h_fp8"`` or
            ``float8_matrices`` without ``compute``, or the latter in a static graph or made of other matrices;
            ``compute`` where the compiled library has no operators; ``accumulate``, ``keep="h_fp8"`` or
            ``float8_matrices`` with quantised matrices; ``defer_dw`` in a static graph, with quantised matrices, with a
            matrix that is not a leaf, or in a wrapper that reduces gradients too early.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import moe_mlp, route
        >>> x, gate_up, down = paddle.randn([16, 64]), paddle.randn([8, 64, 96]), paddle.randn([8, 48, 64])
        >>> probs, ids = paddle.topk(paddle.nn.functional.softmax(paddle.randn([16, 8])), k=2)
        >>> moe_mlp(x, route(ids, num_experts=8), probs, gate_up, down).shape
        [16, 64]
    """
    options = activation, transpose, weights_by, keep, workspace_mb, accumulate
    others = gate_up_bias, down_bias, compute, float8_matrices, defer_dw
    call = prepared(x, plan, probs, gate_up, down, *options, *others)
    out = outputs_of(call)
    return out if len(x.shape) == 2 else out.reshape(known_sizes(x))


def outputs_of(call: Prepared) -> Tensor:
    """The weighted sums of a call, [T, d]."""
    tokens, gate_up, down, weights, gate_up_bias, down_bias = call.operands
    spec, plan = call.spec, call.spec.plan
    if call.why_composed is None:
        return call.backend.moe_mlp(tokens, gate_up, down, weights, spec)
    deferral, as_list = spec.deferral, call.backend.takes_lists
    if spec.accumulates:
        split = _accumulated_matrices if deferral is None else _split_matrices
        gate_up, down = (split(each, as_list) for each in (gate_up, down))
        gate_up_bias, down_bias = _accumulated_biases(gate_up_bias, down_bias)
    if spec.compute is not None:
        factors = row_probs(weights, plan) if weights is not None and spec.weights_by_slot else weights
        rows = float8_rows(tokens, (gate_up, down), factors, (gate_up_bias, down_bias), call.activation, spec)
        return _checks.of_its_shape(_NAME, resolve("unpermute", rows).unpermute(rows, None, plan))
    groups = GemmSpec(plan.tokens_per_expert, plan.expert_offsets, spec.transpose, None, spec.validation)
    of_gate_up, of_down = (None, None) if deferral is None else (deferral.of(0), deferral.of(1))
    hidden = multiplied(tokens, gate_up, None, gate_up_bias, groups._replace(plan=plan, deferral=of_gate_up))
    rows = multiplied(activate(hidden, call.activation), down, None, down_bias, groups._replace(deferral=of_down))
    return _checks.of_its_shape(_NAME, resolve("unpermute", rows).unpermute(rows, weights, plan))


Operands: TypeAlias = tuple[Tensor, Matrices, Matrices, Tensor | None, Matrices | None, Matrices | None]


class Prepared(NamedTuple):
    """A call of `moe_mlp` whose arguments are checked.

    Attributes:
        backend: the `Backend` of the GEMMs, or the layer of quantised matrices.
        operands: tokens [T, d], gate_up, down, weights as the spec says, and the biases. Under mixed precision on a GPU
            tokens and matrices have its dtype.
        spec: all that has no gradient.
        activation: the activation.
        why_composed: the reason why the backend does not run the layer as one, or None if it does.
    """

    backend: Any
    operands: Operands
    spec: MlpSpec
    activation: str
    why_composed: str | None


def prepared(
    x: Tensor,
    plan: Plan,
    probs: Tensor | None,
    gate_up: Any,
    down: Any,
    activation: str,
    transpose: bool,
    weights_by: str | None,
    keep: str,
    workspace_mb: int,
    accumulate: bool,
    gate_up_bias: Any,
    down_bias: Any,
    compute: str | None,
    float8_matrices: Float8Matrices | None,
    defer_dw: bool | str,
) -> Prepared:
    """Check the arguments of `moe_mlp`, and choose the backend and the form of the layer."""
    gate_up, down, gate_up_bias, down_bias = map(listed, (gate_up, down, gate_up_bias, down_bias))
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    options = activation, transpose, weights_by, keep, workspace_mb, accumulate, compute, defer_dw
    casts = paddle.amp.is_autocast_enabled()
    signature = _signature(x, plan, probs, gate_up, down, biases, (*options, casts))
    if signature not in _passed:  # None never is
        plan = _check(x, plan, probs, gate_up, down, biases, options)
        _passed.keep(signature)
    is_quantized = isinstance(gate_up, QuantizedMatrices)
    if is_quantized:
        check_quantized_options(_NAME, gate_up.format, keep, accumulate, compute, float8_matrices, defer_dw)
        transpose, compute = gate_up.transpose, None
    elif float8_matrices is not None:
        float8_matrices = _checked_float8_matrices(float8_matrices, x, gate_up, down, transpose, compute)
    tokens = x
    if len(x.shape) != 2:
        tokens = _checks.lines(_NAME, "x", x, _checks.SUM_DTYPES, "d")
    weights, by_slot = probs, probs is not None and (len(probs.shape) == 2 or weights_by == "slot")
    if probs is not None and by_slot and len(probs.shape) == 1:
        weights = probs.reshape([-1, plan.topk])
    if accumulate:
        given = {"gate_up": gate_up, "down": down, **biases}
        check_destinations(_NAME, **{name: each for name, each in given.items() if each is not None})
    if defer_dw:
        check_deferrable(_NAME, x, defer_dw, gate_up=gate_up, down=down)
    operands = tokens, gate_up, down, weights, gate_up_bias, down_bias
    layer = LayerOptions(activation, transpose, keep, workspace_mb, accumulate, compute, defer_dw)
    if is_quantized:
        return prepared_quantized_layer(plan, operands, by_slot, layer)
    return prepared_layer(plan, operands, by_slot, layer, float8_matrices)


class LayerOptions(NamedTuple):
    """The options of `moe_mlp` by which layers differ; `moe_mlp` describes them."""

    activation: str
    transpose: bool
    keep: str
    workspace_mb: int
    accumulate: bool
    compute: str | None
    defer_dw: bool | str = False


def prepared_layer(
    plan: Plan, operands: Operands, by_slot: bool, options: LayerOptions, float8_matrices: Float8Matrices | None = None
) -> Prepared:
    """Choose the backend and the form of a layer whose arguments are checked.

    Args:
        plan: the plan of the tokens.
        operands: see `Prepared`.
        by_slot: whether the weights are [T, K] by slot, not [N] by row.
        options: the options.
        float8_matrices: see `moe_mlp`.
    """
    tokens, gate_up, down, weights, gate_up_bias, down_bias = operands
    activation, transpose, keep, workspace_mb, accumulate, compute, defer_dw = options
    deferral = deferral_of(defer_dw, accumulate, gate_up, down)
    if deferral is not None:
        gate_up, down = map(detached, (gate_up, down))
    if paddle.amp.is_autocast_enabled() and is_on_gpu(tokens):
        dtype = getattr(paddle, paddle.amp.get_autocast_dtype())
        tokens = to_dtype(tokens, dtype)
        backend = resolve("grouped_gemm", tokens)
        accumulates = accumulate and deferral is None
        gate_up, down = (in_dtype(_NAME, each, dtype, backend, accumulates=accumulates) for each in (gate_up, down))
        deferral = deferral and deferral._replace(fuses=False)
        if accumulate:
            gate_up_bias, down_bias = _accumulated_biases(gate_up_bias, down_bias)
            accumulate = False
    else:
        backend = resolve("grouped_gemm", tokens)
    validation = _checks.validation(_NAME, None, tokens)
    how = validation, compute, float8_matrices, keep == "h_fp8", deferral
    spec = MlpSpec(plan, by_slot, transpose, keep != "x", int(workspace_mb) << 20, accumulate, *how)
    if activation != "swiglu" or gate_up_bias is not None or down_bias is not None:
        why_composed: str | None = "only SwiGLU without biases is one layer"
        why_refused = None if compute is None else why_not_float8(tokens, backend.name)
    else:
        why_composed = why_refused = backend.why_composed(tokens, gate_up, down, spec)
    if compute is not None and why_refused is not None:
        _checks.bad_value(_NAME, "compute", f"None, since {why_refused}", repr(compute))
    operands = tokens, gate_up, down, weights, gate_up_bias, down_bias
    return Prepared(backend, operands, spec, activation, why_composed)


def prepared_quantized_layer(plan: Plan, operands: Any, by_slot: bool, options: LayerOptions) -> Prepared:
    """`prepared_layer` with matrices that are codes. Layers that the operator does not run read their values."""
    tokens, gate_up, down, weights, gate_up_bias, down_bias = operands
    if paddle.amp.is_autocast_enabled() and is_on_gpu(tokens):
        tokens = to_dtype(tokens, getattr(paddle, paddle.amp.get_autocast_dtype()))
    is_layer = options.activation == "swiglu" and gate_up_bias is None and down_bias is None
    is_float8 = gate_up.format == FLOAT8_FORMAT
    why_not_here = quantized_layer.cannot_run_on(tokens)
    if why_not_here is not None:
        _checks.bad_value(_NAME, "gate_up", f"no QuantizedMatrices, since {why_not_here}", gate_up)
    if is_layer and (is_float8 or chosen() in (None, quantized_layer.name)):
        how = options.keep != "x", int(options.workspace_mb) << 20, False, _checks.validation(_NAME, None, tokens)
        spec = MlpSpec(plan, by_slot, gate_up.transpose, *how)
        return Prepared(quantized_layer, (tokens, gate_up, down, weights, None, None), spec, "swiglu", None)
    if is_float8:
        given = options.activation if options.activation != "swiglu" else "biases"
        _checks.bad_value(_NAME, "gate_up", "of integer codes with biases or another activation than swiglu", given)
    inner = gate_up.num_outputs // 2
    values = dequantized(gate_up, tokens.shape[1], tokens.dtype), dequantized(down, inner, tokens.dtype)
    return prepared_layer(plan, (tokens, *values, weights, gate_up_bias, down_bias), by_slot, options)


def _signature(x: Any, plan: Any, probs: Any, gate_up: Any, down: Any, biases: Any, options: tuple) -> Hashable:
    """All that `_check` reads, or None for unusual calls, which are checked each time."""
    if type(plan) is not Plan or biases["gate_up_bias"] is not None or biases["down_bias"] is not None:
        return None
    counts: list[int | None] = []
    tensors: list[Any] = [x, probs, *maps_of_layer(plan), plan.row_to_slot]
    for each in (gate_up, down):
        if isinstance(each, QuantizedMatrices):
            return None
        is_list = isinstance(each, (list, tuple))
        counts.append(len(each) if is_list else None)
        tensors += each if is_list else [each]
    facts = native.facts(*tensors)
    if facts is None:
        return None
    sizes = plan.num_tokens, plan.topk, plan.num_experts, plan.num_rows
    signature = facts, *counts, *sizes, *options, *map(type, options)  # otherwise True would equal 1
    try:
        hash(signature)
    except TypeError:
        return None
    return signature


def _check(
    x: Tensor,
    plan: Plan,
    probs: Tensor | None,
    gate_up: Matrices,
    down: Matrices,
    biases: dict[str, Matrices | None],
    options: tuple,
) -> Plan:
    """Check all arguments, and return the plan."""
    activation, transpose, weights_by, keep, workspace_mb, accumulate, compute, defer_dw = options
    _checks.choice(_NAME, "activation", activation, ACTIVATIONS)
    _checks.choice(_NAME, "weights_by", weights_by, get_args(WeightsBy))
    _checks.flag(_NAME, "transpose", transpose)
    check_memory_options(_NAME, keep, workspace_mb, accumulate, compute, defer_dw)
    has_biases = any(each is not None for each in biases.values())
    check_compute(_NAME, compute, activation, has_biases, keep, defer_dw)
    plan = as_plan(_NAME, plan)
    tokens = _checks.lines(_NAME, "x", x, _checks.SUM_DTYPES, "d")
    _checks.rows(_NAME, "x", tokens, _checks.SUM_DTYPES, *tokens_of(plan), getattr(x, "shape", []))
    _check_matrices(tokens, plan, gate_up, down, biases, transpose)
    by_slot = probs is not None and check_weights(_NAME, "probs", probs, plan, weights_by)
    if by_slot and weights_by == "row":
        _checks.bad_value(_NAME, "weights_by", "'slot' or None with [T, K] probs", repr(weights_by))
    given = {"gate_up": gate_up, "down": down, **{name: each for name, each in biases.items() if each is not None}}
    named_tensors = {key: each for name, value in given.items() for key, each in named(name, value).items()}
    _checks.same_place(_NAME, x=tokens, **named_tensors, probs=probs)
    return plan


def _accumulated_matrices(given: Matrices, as_list: bool) -> Matrices:
    return accumulated_each(given) if as_list and isinstance(given, Tensor) else each_of(accumulated, given)


def _split_matrices(given: Matrices, as_list: bool) -> Matrices:
    return list(paddle.unbind(given)) if as_list and isinstance(given, Tensor) else given


def _accumulated_biases(*biases: Matrices | None) -> list[Matrices | None]:
    return [None if bias is None else each_of(accumulated, bias) for bias in biases]


def _checked_float8_matrices(
    given: Float8Matrices, x: Tensor, gate_up: Matrices, down: Matrices, transpose: bool, compute: str | None
) -> Float8Matrices | None:
    """The store of a call's quantised matrices; None if the call itself quantises, as all calls in a graph do."""
    _checks.instance(_NAME, "float8_matrices", given, Float8Matrices, "a Float8Matrices or None")
    if compute is None:
        _checks.bad_value(_NAME, "float8_matrices", "None without compute", given)
    if is_graph_value(x):
        if not is_default(given):  # otherwise this call did not request it
            _checks.bad_value(_NAME, "float8_matrices", f"None {IN_GRAPH}", given)
        return None
    if holds_others(given, gate_up, down, transpose):
        _checks.bad_value(
            _NAME, "float8_matrices", "empty or made of these matrices, in the same memory", "one of others"
        )
    return given


def _check_matrices(
    x: Tensor, plan: Plan, gate_up: Matrices, down: Matrices, biases: dict[str, Matrices | None], transpose: bool
) -> None:
    hidden, experts = x.shape[1], plan.num_experts
    dtypes = _checks.SUM_DTYPES if paddle.amp.is_autocast_enabled() else (x.dtype,)
    if isinstance(gate_up, QuantizedMatrices) or isinstance(down, QuantizedMatrices):
        columns = quantized_pair(_NAME, gate_up, down, experts, hidden, transpose)
    else:
        columns = _check_pair(gate_up, down, experts, hidden, transpose, dtypes)
    for (name, bias), width in zip(biases.items(), (columns, hidden), strict=True):
        if bias is not None:
            matrices(_NAME, name, bias, dtypes, [experts, width])


def _check_pair(
    gate_up: Matrices, down: Matrices, experts: int, hidden: int, transpose: bool, dtypes: Sequence[Any]
) -> int:
    """Check both matrices; the columns of the first, -1 if a graph does not know them."""
    shape: list[int | str] = [experts, "2 * n", hidden] if transpose else [experts, hidden, "2 * n"]
    matrices(_NAME, "gate_up", gate_up, dtypes, shape, or_codes=True)
    first_name, first = next(iter(named("gate_up", gate_up).items()))
    columns = first.shape[-2 if transpose else -1]
    if (columns % 2 and columns > 0) or columns == 0:
        _checks.bad_value(_NAME, first_name, EVEN_COLUMNS, columns)
    inner = columns // 2 if columns > 0 else "n"
    shape = [experts, hidden, inner] if transpose else [experts, inner, hidden]
    matrices(_NAME, "down", down, dtypes, shape, or_codes=True)
    return columns
