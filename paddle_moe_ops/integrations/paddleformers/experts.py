# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Implementations of a block's experts, and the choice between them.

T tokens of H columns, K slots each, N rows, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ..._activations import activate
from ...backends import Float8Matrices, lay_side_by_side, resolve, shared_memory, view_of
from ...backends.experts import is_default
from ...functional import permute, unpermute
from ...gemm import grouped_gemm
from ...mlp import moe_mlp
from ...routing import Plan

# The forward methods that `_linears_of` runs as grouped GEMMs. `targets` has the digests of their sources.
_KNOWN = {
    ("paddleformers.nn.mlp", "MLP.forward"),
    ("paddleformers.transformers.ernie4_5_moe.modeling", "Ernie4_5_MoeMLP.forward"),
}


# Attributes that `apply` sets on a block whose experts compute otherwise; copies of the block have them, too.
COMPUTE, KEPT = "compute_of_paddle_moe_ops", "float8_matrices"


class Compute(NamedTuple):
    """The options of `apply` for the experts of a block."""

    compute: str | None = None
    float8_matrices: Float8Matrices | None = None

    def options(self, matrices: Any) -> dict[str, Any]:
        """Arguments of `moe_mlp`, whose argument ``gate_up`` is given."""
        kept = self.float8_matrices
        return {"compute": self.compute, "float8_matrices": kept if is_default(kept, matrices) else None}


def compute_of(block: nn.Layer) -> Compute:
    """The options of `apply` for a block."""
    return Compute(vars(block).get(COMPUTE), vars(block).get(KEPT))


def run_stacked(
    x: Tensor,
    plan: Plan,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    compute: Compute,
    *,
    weights_by: str | None = None,
) -> Tensor:
    """Run each token [T, H] through its experts, whose matrices are stacked, and add up the expert outputs."""
    options: dict[str, Any] = {"weights_by": weights_by, **compute.options(gate_up)}
    return moe_mlp(x, plan, weights.astype("float32"), gate_up, down, **options).astype(x.dtype)


def run_interleaved(
    x: Tensor, plan: Plan, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor, down_bias: Tensor
) -> Tensor:
    """As `run_stacked`, for gpt_oss: the columns of ``gate_up`` are interleaved, gate and up in turn.

    The columns of the rows are reordered, not those of the matrices, which are larger in most calls.
    """
    rows = grouped_gemm(x, gate_up, plan=plan, permute_x=True, transpose=False, bias=gate_up_bias)
    rows = rows.reshape([rows.shape[0], rows.shape[1] // 2, 2]).transpose([0, 2, 1]).reshape(rows.shape)
    rows = grouped_gemm(activate(rows, "swiglu_oai"), down, plan=plan, transpose=False, bias=down_bias)
    return unpermute(rows, plan, weights.astype("float32")).astype(x.dtype)


_Linears = dict[str, list[nn.Linear]]  # those of all experts, by the name that they have there


def float8_problem(experts: Sequence[nn.Layer]) -> str | None:
    """Why experts that are layers cannot multiply float8 operands, or None."""
    linears = _linears_of(experts)
    if linears is None:
        return "its experts are not SwiGLU of plain linear layers"
    if "up_gate_proj" not in linears:
        return "the gate of its experts is a layer of its own"
    if any(layers[0].bias is not None for layers in linears.values()):
        return "its experts have biases"
    return None


def run_modules(
    experts: Sequence[nn.Layer],
    x: Tensor,
    plan: Plan,
    weights: Tensor,
    *,
    idle_gradients: bool,
    compute: Compute,
) -> Tensor:
    """Run each token through its experts, which are layers, and add up the expert outputs.

    If all are SwiGLU of plain linear layers, the operators run on lists of their weights. On a GPU no size is then
    read, unless experts without tokens must get no gradient. Otherwise (quantised layers, adapters, hooks, dropout) the
    layers are called, each once, on a segment of rows. Then the sizes of the segments are read, as PaddleFormers reads
    them.

    Args:
        experts: E layers.
        x: tokens [T, H].
        plan: their rows.
        weights: of each slot, [T, K].
        idle_gradients: whether the parameters of an expert without tokens get a gradient, which is 0, or none.
        compute: the options of `apply`.

    Returns:
        [T, H], dtype of ``x``.

    Raises:
        RuntimeError: the experts have been changed since `apply`, and cannot compute so any more.
    """
    if compute.compute is not None and (problem := float8_problem(experts)) is not None:
        raise RuntimeError(
            f"apply: compute={compute.compute!r} was given, but now {problem}; remove(...) undoes it, and apply(...) "
            "without compute runs these layers"
        )
    weights = weights.astype("float32")
    linears = _linears_of(experts)
    if linears is not None:
        without_gradients = not idle_gradients and paddle.is_grad_enabled()
        counts = plan.tokens_per_expert.tolist() if without_gradients else None
        return _run_linears(linears, counts, x, plan, weights, compute).astype(x.dtype)
    counts = plan.tokens_per_expert.tolist()
    rows, _ = permute(x, plan)
    if rows.shape[0] > 0:
        # One split, so that the backward pass joins the gradients of the segments in one copy.
        segments = paddle.split(rows, [count for count in counts if count > 0])
        busy = [expert for expert, count in zip(experts, counts, strict=True) if count > 0]
        outputs = [_output(expert(segment)) for expert, segment in zip(busy, segments, strict=True)]
    else:
        outputs = [rows]
    if idle_gradients and paddle.is_grad_enabled():
        nothing = paddle.zeros([1, x.shape[1]], x.dtype)
        for expert, count in zip(experts, counts, strict=True):
            if count == 0:
                outputs[0] = outputs[0] + _output(expert(nothing)) * 0.0
    return unpermute(paddle.concat(outputs), plan, weights).astype(x.dtype)


def _output(result: Any) -> Tensor:
    """The output of an expert; PaddleFleet's return a bias next to it."""
    return result[0] if isinstance(result, tuple) else result


def _run_linears(
    linears: _Linears, counts: list[int] | None, x: Tensor, plan: Plan, weights: Tensor, compute: Compute
) -> Tensor:
    """The expert outputs of tokens. Experts whose count is 0 get no gradient; without counts, a gradient of 0."""
    if not x.place.is_cpu_place() or not resolve("grouped_gemm", x).takes_lists:
        for layers in linears.values():
            _lay_side_by_side([each.weight for each in layers])
            if layers[0].bias is not None:
                _lay_side_by_side([each.bias for each in layers])

    def constant_if_idle(parameters: list[Tensor]) -> list[Tensor]:
        if counts is None:
            return parameters
        return [each if count else each.detach() for each, count in zip(parameters, counts, strict=True)]

    matrices = {name: constant_if_idle([each.weight for each in layers]) for name, layers in linears.items()}
    biases = {
        name: None if layers[0].bias is None else constant_if_idle([each.bias for each in layers])
        for name, layers in linears.items()
    }
    if "up_gate_proj" in linears:
        given = matrices["up_gate_proj"], matrices["down_proj"]
        options: dict[str, Any] = {
            "gate_up_bias": biases["up_gate_proj"],
            "down_bias": biases["down_proj"],
            **compute.options(given[0]),
        }
        return moe_mlp(x, plan, weights, *given, **options)

    def product(rows: Tensor, name: str) -> Tensor:
        return grouped_gemm(rows, matrices[name], plan=plan, transpose=False, bias=biases[name])

    rows, _ = permute(x, plan)
    hidden = F.silu(product(rows, "gate_proj")) * product(rows, "up_proj")
    return unpermute(product(hidden, "down_proj"), plan, weights)


def _lay_side_by_side(parameters: list[Tensor]) -> None:
    """Stack parameters of separate memory, so that calls need no copy; others stay as they are."""
    if view_of(parameters) is not None:  # as from the second call on
        return
    first = parameters[0]
    alike = all(each.shape == first.shape and each.dtype == first.dtype for each in parameters)
    if alike and len(set(map(id, parameters))) == len(parameters) and not any(map(shared_memory, parameters)):
        lay_side_by_side(parameters)


def _linears_of(experts: Sequence[nn.Layer]) -> _Linears | None:
    """The layers of experts that are SwiGLU of linear layers and nothing else; None if one of them is more."""
    fused = getattr(experts[0], "fuse_up_gate", None)
    names = ("up_gate_proj", "down_proj") if fused else ("gate_proj", "up_proj", "down_proj")
    if not all(_is_swiglu(expert) and expert.fuse_up_gate is fused for expert in experts):
        return None
    linears = {name: [getattr(expert, name) for expert in experts] for name in names}
    for layers in linears.values():
        if not all(type(each) is nn.Linear and is_plain(each) for each in layers):
            return None
        if len({each.bias is None for each in layers}) > 1:
            return None
    return linears


def _is_swiglu(expert: nn.Layer) -> bool:
    forward = type(expert).forward
    return (
        (forward.__module__, forward.__qualname__) in _KNOWN
        and is_plain(expert)
        and type(expert.act_fn) is nn.Silu
        and not getattr(expert, "moe_dropout_prob", 0)  # it drops in evaluation, too
    )


def is_plain(layer: nn.Layer) -> bool:
    """True if a call of a layer runs its class's forward, and nothing before or after it."""
    return "forward" not in vars(layer) and not layer._forward_pre_hooks and not layer._forward_post_hooks


def is_stacked_swiglu(experts: Any) -> bool:
    """True if experts are PaddleFleet's SwiGLU in two stacked matrices, and a call of them runs nothing else."""
    settings = getattr(experts, "config", None)
    return (
        type(experts).__name__ == "GroupedMLPExpert"
        and is_plain(experts)
        and getattr(settings, "gated_linear_unit", False)
        and getattr(settings, "hidden_act", None) is F.silu
    )
