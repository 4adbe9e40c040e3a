# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`explain`: the backend and the kernels of a call, to find out why it is slow or why its bits changed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.jit.marker import unified

from ._graphs import is_graph_value, untraced
from ._matrices import Matrices, listed
from .backends import OPERATORS, explain_operators, resolve
from .backends.autograd import wants_gradient
from .backends.deferred import FLEET
from .backends.quantized import QuantizedMatrices
from .backends.stacking import view_of
from .mlp import Prepared, moe_mlp, prepared

__all__ = ["explain"]

_LAYER = "moe_mlp"
_NAMES = (*OPERATORS, _LAYER)
_GROUP = 128  # rows and columns that share a scale
_OF_LAYER = (
    f"{_LAYER}: decided by the backend of grouped_gemm, and the arguments: "
    "explain('moe_mlp', x, plan, probs, gate_up, down)"
)


@unified
def explain(operator: str | None = None, *arguments: Any, **options: Any) -> str:
    """Say which backend runs each operator on this device, and why the others do not.

    For `moe_mlp` the choice depends on the arguments. With them, say which backend runs the layer and why, and list the
    tensors kept for the backward pass. On Triton, also list the kernels of both passes and their use of
    ``workspace_mb``. The call is a dry run that launches none of them.

    Arguments are converted to the GEMMs' operands, as in the call. In a graph that may add an unused reshape or cast;
    under mixed precision on a GPU it copies the matrices for the time of the call. Under
    `paddle.jit.to_static(full_graph=False)` it describes a call in dygraph.

    Args:
        operator: one of `OPERATORS`, "moe_mlp", or None for all of them.
        arguments: those of `moe_mlp`.
        options: its keyword arguments.

    Returns:
        one line per operator, or several on the layer, and one per backend; then the package whose functions
        paddle.nn.functional calls.

    Raises:
        TypeError: arguments that `moe_mlp` does not take.
        ValueError: there is no such operator, or arguments for another one than "moe_mlp"; what `moe_mlp` raises.

    Examples:
        >>> import paddle
        >>> from paddle_moe_ops import explain, route
        >>> x, gate_up, down = paddle.randn([16, 64]), paddle.randn([8, 64, 96]), paddle.randn([8, 48, 64])
        >>> plan = route(paddle.randint(0, 8, [16, 1]), num_experts=8)
        >>> print(explain("moe_mlp", x, plan, None, gate_up, down, keep="x"))
        moe_mlp: ...
        why: ...
        kept: nothing, since no gradient is wanted
        ...
    """
    return untraced(_explained, operator, arguments, options)


def _explained(operator: str | None, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    if operator is not None and operator not in _NAMES:
        raise ValueError(f"explain: operator must be one of {', '.join(_NAMES)}, but got {operator!r}")
    if operator != _LAYER:
        if arguments or options:
            raise ValueError(f"explain: operator must be {_LAYER!r} with further arguments, but got {operator!r}")
        text = explain_operators(operator)
        if operator is not None:
            return text
        before, chosen, after = text.partition("\nchosen by: ")
        return f"{before}\n{_OF_LAYER}{chosen}{after}"
    lines = _lines_of_layer(arguments, options) if arguments or options else [_OF_LAYER]
    return "\n".join([*lines, explain_operators("grouped_gemm")])


def _lines_of_layer(arguments: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
    """The lines that describe a call of `moe_mlp`."""
    try:
        bound = inspect.signature(moe_mlp).bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"explain: arguments must be those of {_LAYER}, but {error}") from None
    bound.apply_defaults()
    given = bound.arguments
    try:
        with paddle.no_grad():  # mixed precision casts operands here, as in the call
            call = prepared(**given)
        if given["float8_matrices"] is not None and given["float8_matrices"].is_empty:
            given["float8_matrices"].clear()  # removes the notes of this dry run
    except RuntimeError as error:
        return [f"{_LAYER}: none ({error})"]
    wanted: Any = tuple(_wants_gradient(given[name]) for name in ("x", "gate_up", "down", "probs"))
    matrices = [listed(given[name]) for name in ("gate_up", "down")]
    name, tokens = call.backend.name, call.operands[0]
    waits = _waits(call, given["defer_dw"], wanted)
    if call.why_composed is None:
        is_quantized = isinstance(call.operands[1], QuantizedMatrices)
        why = f"grouped_gemm of these tokens runs on {name}, and SwiGLU without biases is one layer there"
        spec = call.spec._replace(deferral=given["defer_dw"]) if waits else call.spec
        return [
            f"{_LAYER}: {name}, as one layer",
            f"why: {'SwiGLU of codes, without biases, is one layer there' if is_quantized else why}",
            _kept(call, matrices, any(wanted)),
            *waits,
            *call.backend.explain_moe_mlp(*call.operands[:4], spec, wanted),
        ]
    product = "grouped_gemm" if call.spec.compute is None else "quantised values multiplied in float32"
    what = f"{product}, {given['activation']}, {product} and unpermute"
    kept = "kept: what each of these calls keeps; keep and workspace_mb make no difference"
    runs = ", ".join(f"{each} on {_backend_of(each, tokens)}" for each in ("grouped_gemm", "unpermute"))
    return [f"{_LAYER}: {what}", f"why: {call.why_composed}", f"parts: {runs}", kept, *waits]


def _wants_gradient(given: Any) -> bool:
    given = listed(given)
    if isinstance(given, QuantizedMatrices):
        return False
    return wants_gradient(*(given if isinstance(given, Sequence) else (given,)))


def _backend_of(operator: str, like: Tensor) -> str:
    try:
        return resolve(operator, like).name
    except RuntimeError as error:
        return f"none ({error})"


def _waits(call: Prepared, defer_dw: bool | str, wanted: tuple[bool, ...]) -> list[str]:
    """The line on gradients of matrices that are computed after the backward pass, if there are some."""
    if not defer_dw or not any(wanted[1:3]):
        return []
    until = "pop() of WeightGradStore, if that is enabled" if defer_dw == FLEET else "flush_dw()"
    tokens, _, down, *_ = call.operands
    if call.why_composed is not None:
        return [f"dW: waits for {until}; each GEMM keeps its rows and their gradient until then"]
    if call.backend.name == "reference":
        return [f"dW: computed in the backward pass, added by {until}"]
    inner = down[0].shape[-1 if call.spec.transpose else -2]
    columns = 2 * inner * wanted[1] + inner * wanted[2]
    size = (2 * tokens.shape[0] * tokens.shape[1] + call.spec.plan.num_rows * columns) * tokens.element_size()
    return [f"dW: waits for {until}; {size} bytes are kept until then, and the maps"]


def _kept(call: Prepared, given: list[Matrices], wants_any: bool) -> str:
    """The line on the tensors that a layer keeps for its backward pass."""
    tokens, gate_up, down, *_ = call.operands
    spec, in_graph = call.spec, is_graph_value(tokens)
    if not wants_any and not in_graph:
        return "kept: nothing, since no gradient is wanted"
    rows, copied = spec.plan.num_rows, 0
    if isinstance(gate_up, QuantizedMatrices):
        columns = gate_up.num_outputs
    else:
        matrix = down[0] if isinstance(down, Sequence) else down
        columns = 2 * matrix.shape[-1 if spec.transpose else -2]
        copied = 0 if in_graph else sum(map(_bytes_of_copies, given, call.operands[1:3]))
    item = 4 if tokens.dtype == paddle.float32 else 2
    what, size = "the tokens", tokens.shape[0] * tokens.shape[1] * item
    if spec.keeps_hidden and spec.hidden_in_float8 and not in_graph:
        what, size = "the tokens and the first product in float8", size + rows * (columns + 4 * -(-columns // _GROUP))
    elif spec.keeps_hidden:
        what, size = "the tokens and the first product", size + rows * columns * item
    known = min(*tokens.shape, rows, columns) >= 0
    said = f"kept: {what}, {f'{size} bytes' if known else 'of sizes that the graph finds out'}, and the maps"
    if spec.compute is not None and spec.keeps_hidden and (in_graph or spec.quantized is None):
        sides = [tokens.shape[1], columns], [columns // 2, tokens.shape[1]]
        codes = spec.plan.num_experts * sum(_bytes_of_codes(*each) for each in sides)
        said += f"; and codes of matrices, {codes} bytes"
    return f"{said}; and copies of matrices, {copied} bytes" if copied else said


def _bytes_of_codes(rows: int, columns: int) -> int:
    """Bytes of a matrix in float8, in the form that one pass reads, with its scales."""
    return rows * columns + 4 * -(-rows // _GROUP) * -(-columns // _GROUP)


def _bytes_of_copies(given: Matrices, taken: Matrices) -> int:
    """Bytes of the copies that a layer makes of its matrices to stack them or to change their dtype."""
    own, each = (list(one) if isinstance(one, Sequence) else [one] for one in (given, taken))
    is_copied = own[0].dtype != each[0].dtype or (len(each) > 1 and view_of(each) is None)
    return sum(one.size * one.element_size() for one in each) if is_copied else 0
