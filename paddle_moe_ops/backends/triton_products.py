# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs and whole layers on Triton, for `triton.TritonKernels`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from .._graphs import dense
from ..triton.native_recording import repeated
from .base import GemmSpec, Matrices, MlpSpec, Tensors, Validation
from .groups import check_plan_groups, host_segments
from .triton_arrays import dense_rows, device_of

__all__ = ["ProductKernels"]


class ProductKernels:
    """The verbs of `base.Kernels` whose kernels are GEMMs."""

    overwrites_hidden = True
    defers_wgrads = True

    def grouped_gemm(self, x: Tensor, w: Tensor, weights: Tensor | None, bias: Tensor | None, spec: GemmSpec) -> Tensor:
        from ..triton.gemm.grouped_gemm import grouped_gemm
        from ..triton.recording import facts_of, recorded

        on_host = isinstance(spec.m_sizes, list) and not isinstance(spec.expert_offsets, Tensor)
        if on_host or spec.validation != Validation.OFF:
            num_rows = x.shape[0] if spec.plan is None else spec.plan.num_rows
            host_segments(num_rows, spec.m_sizes, spec.expert_offsets)
        device, maps = device_of(x, w), _gemm_maps(spec, weights)
        operands = dense_rows(x), dense(w), _gemm_groups(spec, x)
        bias = None if bias is None else dense(bias)

        def call(device: Any) -> tuple[Any]:
            return (grouped_gemm(device, *operands, spec.transpose, **maps, bias=bias),)

        inputs = _operands(operands, maps, bias)
        return recorded(device, ("grouped_gemm", spec.transpose, *facts_of(device, *inputs)), inputs, call)[0]

    def grouped_gemm_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        w: Tensor,
        weights: Tensor | None,
        bias: Tensor | None,
        spec: GemmSpec,
        wanted: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        from ..triton.gemm.bias_gradient import bias_gradient
        from ..triton.gemm.grouped_gemm import grouped_gemm_backward
        from ..triton.ops.unpermute import unpermute
        from ..triton.recording import facts_of, recorded

        device, maps = device_of(x, w), _gemm_maps(spec, weights)
        d_out, operands = dense_rows(d_out), (dense_rows(x), dense(w), _gemm_groups(spec, x))
        bias = None if bias is None else dense(bias)

        def call(device: Any) -> tuple[Any, ...]:
            d_bias = None
            d_rows, d_w, d_weights = grouped_gemm_backward(
                device, d_out, *operands, spec.transpose, **maps, wanted=wanted[:3]
            )
            if bias is not None and any(wanted[2:]):
                d_bias, d_weights = bias_gradient(device, d_out, bias, operands[2], maps["weights"], d_weights)
            if maps["tokens"] is not None and d_rows is not None:
                d_rows = unpermute(device, d_rows, maps["tokens"].token_rows)
            return d_rows, d_w, d_weights, d_bias

        inputs = d_out, *_operands(operands, maps, bias)
        key = "grouped_gemm_backward", wanted, spec.transpose, *facts_of(device, *inputs)
        d_x, d_w, d_weights, d_bias = recorded(device, key, inputs, call)
        return d_x, d_w, d_weights, d_bias

    def grouped_wgrad(self, d_out: Tensor, x: Tensor, shape: Sequence[int], spec: GemmSpec) -> Tensor:
        from ..triton.gemm.grouped_gemm import wgrad
        from ..triton.recording import facts_of, recorded

        device, maps = device_of(x), _gemm_maps(spec, None)
        d_out, x, groups = dense_rows(d_out), dense_rows(x), _gemm_groups(spec, x)
        matrices = _without_memory(x, shape)

        def call(device: Any) -> tuple[Any]:
            return (wgrad(device, d_out, x, matrices, groups, spec.transpose, maps["tokens"]),)

        inputs = d_out, x, *groups, *(maps["tokens"] or ())
        key = "grouped_wgrad", spec.transpose, tuple(shape), *facts_of(device, *inputs)
        return recorded(device, key, inputs, call)[0]

    def explain_moe_mlp(
        self,
        x: Tensor,
        gate_up: Matrices,
        down: Matrices,
        weights: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
    ) -> list[str]:
        from ..triton.launch.dry_run import DryRun

        device, sources = DryRun(device_of(x)), (_stacked(gate_up), _stacked(down))
        options = "moe_mlp", any(wanted), any(wanted) and spec.keeps_hidden, *_options(spec)
        out, hidden, by_row, tables = _recorded_mlp(
            device, options, _operands_of_layer(x, *sources, weights, spec), spec
        )
        lines = [_chunks_text(DryRun(device), x, *sources, spec), f"forward: {_counted(device.launches)}"]
        if any(wanted):
            device.launches.clear()
            into: Any = [None, None]
            if spec.accumulates:  # a first call, which has no gradients to accumulate to, differs
                into = [(device.empty(each.shape, "float32"), True) for each in sources]
            others = hidden, tables, *(each and each[0] for each in into)
            operands = _operands_of_layer(x, *sources, weights if by_row is None else by_row, spec)
            _recorded_mlp_backward(device, options, out, others, operands, spec, wanted, tuple(into))
            lines.append(f"backward: {_counted(device.launches)}")
        return lines

    def moe_mlp(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec, keeps: bool
    ) -> tuple[Tensor, Tensors, Tensor | None, Tensor | None]:
        plan, device = spec.plan, device_of(x, gate_up)
        if spec.validation != Validation.OFF:
            check_plan_groups(plan)
        options = "moe_mlp", keeps, keeps and spec.keeps_hidden, *_options(spec)
        operands = _operands_of_layer(x, gate_up, down, weights, spec)
        made = repeated(device, options, operands)
        if made is None:
            made = _recorded_mlp(device, options, _dense(operands), spec)
        out, hidden, by_row, tables = made
        return out, () if hidden is None else (hidden,), weights if by_row is None else by_row, tables

    def moe_mlp_backward(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool, bool, bool],
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, ...]:
        into_gate_up, into_down = destinations
        adds = into_gate_up and into_gate_up[1], into_down and into_down[1]
        others = (*hidden, None)[0], tables, into_gate_up and into_gate_up[0], into_down and into_down[0]
        device = device_of(x, gate_up)
        options = "moe_mlp_backward", wanted, adds, *_options(spec)
        operands = _operands_of_layer(x, gate_up, down, weights, spec)
        made = repeated(device, options, (d_out, *others, *operands))
        if made is None:
            given = dense_rows(d_out), others, _dense(operands), spec
            made = _recorded_mlp_backward(device, options, *given, wanted, destinations)
        return tuple(made)

    def moe_mlp_dgrads(
        self,
        d_out: Tensor,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor | None,
        hidden: Tensors,
        tables: Tensor | None,
        spec: MlpSpec,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor]]:
        from ..triton.gemm.mlp import moe_mlp_dgrads
        from ..triton.gemm.types import Kept
        from ..triton.recording import facts_of, recorded

        device, operands = device_of(x, gate_up), _dense(_operands_of_layer(x, gate_up, down, weights, spec))
        layer, d_out, given = (
            _layer(operands, spec)._replace(slots=operands.slots),
            dense_rows(d_out),
            (*hidden, None)[0],
        )

        def call(device: Any) -> tuple[Any, ...]:
            made, d_hidden, scaled = moe_mlp_dgrads(device, d_out, operands.x, Kept(given, tables), layer, wanted)
            return made.x, made.weights, d_hidden if given is None else None, scaled

        inputs = d_out, given, tables, *operands
        key = "moe_mlp_dgrads", wanted, *_options(spec), *facts_of(device, *inputs)
        d_x, d_weights, d_hidden, scaled = recorded(device, key, inputs, call)
        return d_x, d_weights, (given if d_hidden is None else d_hidden, scaled)

    def moe_mlp_wgrads(
        self,
        kept: tuple[Tensor | None, Tensor | None],
        d_out: Tensor,
        x: Tensor,
        inner: int,
        tables: Tensor | None,
        spec: MlpSpec,
        destinations: tuple[Any, Any],
    ) -> tuple[Tensor | None, Tensor | None]:
        from ..triton.gemm.mlp import moe_mlp_wgrads
        from ..triton.recording import facts_of, recorded

        device, hidden, experts = device_of(x), x.shape[1], spec.plan.tokens_per_expert.shape[0]
        shapes = (hidden, 2 * inner), (inner, hidden)
        gate_up, down = (_without_memory(x, (experts, *(shape[::-1] if spec.transpose else shape))) for shape in shapes)
        d_out, x, maps = dense_rows(d_out), dense_rows(x), _operands_of_layer(x, x, x, None, spec)[3:7]
        maps = tuple(map(dense, maps))
        layer = _layer(_Operands(x, gate_up, down, *maps, None, None), spec)
        into = tuple(each and each[0] for each in destinations)
        adds = tuple(each and each[1] for each in destinations)

        def call(device: Any) -> tuple[Any, Any]:
            made = moe_mlp_wgrads(device, d_out, x, *kept, layer, tables, destinations)
            first, second = (each if to is None else None for each, to in zip(made, destinations, strict=True))
            return first, second

        inputs = d_out, x, *kept, *maps, tables, *into
        key = "moe_mlp_wgrads", inner, adds, *_options(spec), *facts_of(device, *inputs)
        d_gate_up, d_down = recorded(device, key, inputs, call)
        return d_gate_up, d_down


def _without_memory(like: Tensor, shape: Sequence[int]) -> Any:
    """An array of a shape, on the GPU of a tensor and of its dtype, that no launch reads."""
    from ..triton.launch.dry_run import FakeArray

    return FakeArray(shape, device_of(like).dtype_name(like), like.data_ptr())


def _stacked(given: Matrices) -> Any:
    """Stacked matrices as an array without memory, at the address of the first one, so on the same GPU."""
    first, shape = (given, given.shape) if isinstance(given, Tensor) else (given[0], [len(given), *given[0].shape])
    return _without_memory(first, shape)


def _chunks_text(device: Any, x: Tensor, gate_up: Any, down: Any, spec: MlpSpec) -> str:
    """Text on the chunks of a layer's rows of d columns."""
    from ..triton.gemm.mlp import Pass
    from ..triton.launch.device import cdiv

    layer = _layer(_operands_of_layer(x, gate_up, down, None, spec), spec)
    run = Pass(device, layer, x, reuses_rows=False)
    rows = "none, products gather them" if run.gathers else run.num_chunks
    columns, size = cdiv(run.hidden, run.chunk_columns), run.buffer.shape[0] * run.item / 2**20
    return f"workspace: {size:.1f} MiB; windows of rows in the forward pass: {rows}; windows of columns: {columns}"


def _counted(launches: list[str]) -> str:
    """Each kernel once with its number of launches, in the order of first launches."""
    return ", ".join(name if times == 1 else f"{name} x {times}" for name, times in Counter(launches).items())


def _options(spec: MlpSpec) -> tuple[Any, ...]:
    """Options that launches depend on besides arrays."""
    return spec.transpose, spec.workspace


class _Operands(NamedTuple):
    """Arrays that a layer's launches read; ``slots`` is slot_to_row of weights by slot."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    sizes: Tensor
    offsets: Tensor
    row_to_token: Tensor
    token_rows: Tensor
    weights: Tensor | None
    slots: Tensor | None


def _operands_of_layer(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor | None, spec: MlpSpec) -> _Operands:
    plan = spec.plan
    maps = plan.tokens_per_expert, plan.expert_offsets, plan.row_to_token, plan.token_rows
    return _Operands(x, gate_up, down, *maps, weights, plan.slot_to_row if spec.weights_by_slot else None)


def _dense(operands: _Operands) -> _Operands:
    x, *others = operands
    return _Operands(dense_rows(x), *(None if each is None else dense(each) for each in others))


def _recorded_mlp(device: Any, options: tuple[Any, ...], operands: _Operands, spec: MlpSpec) -> Any:
    """`ProductKernels.moe_mlp` if the call's launches may not be recorded yet."""
    from ..triton.gemm.mlp import moe_mlp
    from ..triton.ops.rowmap import slots_to_rows
    from ..triton.recording import facts_of, recorded

    x, slots, layer = operands.x, operands.slots, _layer(operands, spec)

    def call(device: Any) -> tuple[Any, ...]:
        by_row = layer.weights
        if slots is not None:
            by_row = slots_to_rows(device, by_row, slots, layer.tokens.row_to_token)
        out, kept = moe_mlp(device, x, layer._replace(weights=by_row), keeps_hidden=options[2])
        return out, kept.hidden, None if slots is None else by_row, kept.tables if options[1] else None

    return recorded(device, (*options, *facts_of(device, *operands)), operands, call)


def _recorded_mlp_backward(
    device: Any,
    options: tuple[Any, ...],
    d_out: Tensor,
    others: tuple[Any, ...],
    operands: _Operands,
    spec: MlpSpec,
    wanted: tuple[bool, bool, bool, bool],
    destinations: tuple[Any, Any],
) -> Any:
    """`ProductKernels.moe_mlp_backward` if the call's launches may not be recorded yet."""
    from ..triton.gemm.mlp import moe_mlp_backward
    from ..triton.gemm.types import Kept
    from ..triton.recording import facts_of, recorded

    layer = _layer(operands, spec)._replace(slots=operands.slots)

    def call(device: Any) -> tuple[Any, ...]:
        hidden, tables, *_ = others
        made = moe_mlp_backward(device, d_out, operands.x, Kept(hidden, tables), layer, wanted, destinations)
        matrices = (each if to is None else None for each, to in zip(made[1:3], destinations, strict=True))
        return made.x, *matrices, made.weights

    inputs = d_out, *others, *operands
    return recorded(device, (*options, *facts_of(device, *inputs)), inputs, call)


def _layer(operands: _Operands, spec: MlpSpec) -> Any:
    from ..triton.gemm.types import Groups, Layer, Tokens

    groups, tokens = Groups(operands.sizes, operands.offsets), Tokens(operands.row_to_token, operands.token_rows)
    matrices = operands.gate_up, operands.down
    return Layer(*matrices, groups, tokens, operands.weights, spec.transpose, spec.workspace)


def _operands(operands: tuple, maps: dict[str, Any], bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Arrays that the launches of a grouped GEMM read."""
    x, w, groups = operands
    return x, w, *groups, *(maps["tokens"] or ()), maps["weights"], bias


def _gemm_groups(spec: GemmSpec, x: Tensor) -> Any:
    """Sizes and offsets as tensors at the operands' place."""
    from ..triton.gemm.types import Groups

    def on_device(numbers: list[int] | Tensor) -> Tensor:
        if isinstance(numbers, Tensor):
            return dense(numbers)
        return paddle.to_tensor(numbers, dtype="int32", place=x.place)

    offsets = None if spec.expert_offsets is None else on_device(spec.expert_offsets)
    return Groups(on_device(spec.m_sizes), offsets)


def _gemm_maps(spec: GemmSpec, weights: Tensor | None) -> dict[str, Any]:
    from ..triton.gemm.types import Tokens

    plan = spec.plan
    return {
        "tokens": None if plan is None else Tokens(dense(plan.row_to_token), dense(plan.token_rows)),
        "weights": None if weights is None else dense(weights),
    }
