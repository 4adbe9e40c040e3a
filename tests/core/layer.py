# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of experts of the core: on a CPU with the GEMMs of `gemms_in_numpy`, on a GPU with its kernels."""

from __future__ import annotations

import ctypes
import enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paddle_moe_ops.reference import MATRIX_FORMATS, Plan, quantize_128x128, quantize_matrices

from .binding import Core
from .gemms_in_numpy import FUNCTION, callbacks
from .guards import guarded_outputs
from .operators.grouped_gemm import AMAX_MIN, GROUP, Accumulation
from .structs import DTYPES, Bytes, Floats, Int, Int32s, Params, RoutingKind, Size, fields

FORWARD, BACKWARD = 0, 1
H100, H200 = (132, 3352), (132, 4916)  # SMs, GB/s


class Hidden(enum.IntEnum):
    """pmo_layer_hidden"""

    RECOMPUTES = 0
    KEEPS = 1
    KEEPS_CODES = 2


class Part(enum.IntEnum):
    """pmo_layer_part"""

    WHOLE = 0
    DGRADS = 1
    WGRADS = 2


class Facts(Params):
    """pmo_layer_facts"""

    _fields_ = fields(
        (Size, "struct_size num_tokens num_rows num_experts hidden inner workspace"),
        (Int, "dtype num_sms memory_gbps backward keeps_hidden needs_d_weights float8 has_codes codes_format part"),
        (Int, "float8_wgrads"),
    )


class Choices(ctypes.Structure):
    """pmo_layer_plan"""

    _fields_ = fields(
        (Size, "chunk_rows num_chunks chunk_columns buffer_bytes wgrad_columns tables_size bytes"),
        (Int, "gathers gathers_x gathers_d_out sum_tile_rows"),
    )


class LayerParams(Params):
    """pmo_layer_params"""

    # Each pmo_layer_codes is two fields here, its codes and its scales.
    _fields_ = fields(
        (Size, "struct_size slots_per_token"),
        (Bytes, "x"),
        (Size, "x_row_stride"),
        (Bytes, "gate_up down"),
        (Floats, "weights"),
        (Int32s, "token_rows row_to_token"),
        (Bytes, "sizes offsets hidden"),
        (Floats, "hidden_scales"),
        (Bytes, "workspace out d_out"),
        (Size, "d_out_row_stride"),
        (Bytes, "d_x d_gate_up d_down"),
        (Floats, "d_weights"),
        (Bytes, "scaled d_hidden"),
        (Bytes, "gate_up_codes"),
        (Floats, "gate_up_scales"),
        (Bytes, "down_codes"),
        (Floats, "down_scales"),
        (Bytes, "turned_gate_up_codes"),
        (Floats, "turned_gate_up_scales"),
        (Bytes, "turned_down_codes"),
        (Floats, "turned_down_scales"),
        (Int32s, "slot_to_row"),
        (Size, "topk"),
        (Int, "sizes_kind offsets_kind transpose clears_hidden gate_up_accumulation down_accumulation"),
    )


_OPERATORS = {
    "tables": "grouped_tables",
    "permute": "permute",
    "gemm": "grouped_product",
    "wgrad": "grouped_outer",
    "row_sums": "row_sums",
    "unpermute": "unpermute",
    "clear": "grouped_clear",
    "quantize": "quantize",
    "quantize_blocks": "quantize_blocks",
    "gemm_float8": "grouped_float8",
    "quantize_columns": "quantize_columns",
    "wgrad_float8": "grouped_outer_float8",
}


class Kernels(ctypes.Structure):
    """pmo_layer_kernels"""

    _fields_ = tuple((name, FUNCTION) for name in _OPERATORS)

    @staticmethod
    def of(library: Any, device: str, launched: list[str] | None = None) -> Kernels:
        """The functions of a library; those that CPUs lack are the oracles. Each call adds its name to ``launched``."""
        oracles = callbacks() if device == "cpu" else {}

        def function(name: str, operator: str) -> Any:
            found = oracles.get(operator) or ctypes.cast(getattr(library, f"pmo_{operator}_{device}"), FUNCTION)
            return found if launched is None else _noting(name, found, launched)

        return Kernels(**{name: function(name, operator) for name, operator in _OPERATORS.items()})


def _noting(name: str, function: Any, launched: list[str]) -> Any:
    def call(params: int, stream: int | None) -> int:
        launched.append(name)
        return function(params, stream)

    return FUNCTION(call)


def plan_of(core: Core, facts: Facts) -> Choices:
    made = Choices()
    core.check(core.library.pmo_layer_plan_of(ctypes.byref(facts), ctypes.byref(made)))
    return made


def choices(core: Core, **facts: int) -> Choices:
    return plan_of(core, Facts(**facts))


class Layer(NamedTuple):
    """Operands and options of a layer.

    Attributes:
        float8: whether GEMMs have float8 operands.
        float8_wgrads: whether those of wgrads are float8, too.
        has_codes: whether the passes receive the codes of the matrices.
        codes_format: of codes without float8 operands, which only the kernel for few rows reads.
        keeps: H between the passes.
        clears_hidden: whether rows of no expert become zeros in H.
        accumulations: of the gradients of both matrices.
    """

    plan: Plan
    gate_up: NDArray
    down: NDArray
    weights: NDArray | None
    transpose: bool = False
    workspace: int = 1 << 30
    gpu: tuple[int, int] = H100
    float8: bool = False
    has_codes: bool = False
    codes_format: str = "int8"
    keeps: Hidden = Hidden.KEEPS
    float8_wgrads: bool = False
    accumulations: tuple[Accumulation, Accumulation] = (Accumulation.OVERWRITES, Accumulation.OVERWRITES)
    clears_hidden: bool = True

    @property
    def inner(self) -> int:
        return self.down.shape[2 if self.transpose else 1]

    def facts(self, x: NDArray, backward: int, needs_d_weights: bool = False) -> Facts:
        num_sms, memory_gbps = self.gpu
        return Facts(
            num_tokens=len(x),
            num_rows=len(self.plan.row_to_token),
            num_experts=len(self.down),
            hidden=x.shape[1],
            inner=self.inner,
            workspace=self.workspace,
            dtype=DTYPES[x.dtype],
            num_sms=num_sms,
            memory_gbps=memory_gbps,
            backward=backward,
            keeps_hidden=self.keeps,
            needs_d_weights=int(needs_d_weights),
            float8=int(self.float8),
            has_codes=int(self.has_codes),
            codes_format=MATRIX_FORMATS.index(self.codes_format),
            float8_wgrads=int(self.float8_wgrads and backward == BACKWARD),
        )


class Results(NamedTuple):
    """Results of both passes; None for those that were not wanted. ``hidden_scales`` are those of codes of H."""

    out: NDArray
    hidden: NDArray | None
    hidden_scales: NDArray | None
    d_x: NDArray | None
    d_gate_up: NDArray | None
    d_down: NDArray | None
    d_weights: NDArray | None


def _codes(layer: Layer, backward: int) -> dict[str, NDArray]:
    """Codes and scales of the matrices that a pass reads, with contiguous K."""
    if not layer.has_codes:
        return {}
    forward = {"gate_up": layer.gate_up, "down": layer.down}
    made = {}
    for name, matrices in forward.items():
        for prefix, turns in (("", not layer.transpose), ("turned_", layer.transpose)):
            is_read = backward if prefix else not backward or (name == "gate_up" and layer.keeps == Hidden.RECOMPUTES)
            if is_read:
                stored = np.ascontiguousarray(matrices.swapaxes(1, 2)) if turns else matrices
                if layer.float8:
                    codes, scales = quantize_128x128(stored, amax_min=AMAX_MIN)
                else:
                    made_codes = quantize_matrices(stored, format=layer.codes_format, transpose=True)
                    codes, scales = (np.array(each, order="C", copy=True) for each in made_codes)
                made[f"{prefix}{name}_codes"], made[f"{prefix}{name}_scales"] = codes, scales
    return made


def _params(layer: Layer, x: NDArray, backward: int, **arrays: NDArray | None) -> LayerParams:
    plan = layer.plan
    return LayerParams(
        slots_per_token=plan.token_rows.shape[1],
        x=x,
        gate_up=layer.gate_up,
        down=layer.down,
        weights=layer.weights,
        token_rows=plan.token_rows,
        row_to_token=plan.row_to_token,
        sizes=plan.tokens_per_expert,
        offsets=plan.expert_offsets,
        sizes_kind=RoutingKind.IDS32,
        offsets_kind=RoutingKind.IDS32,
        transpose=int(layer.transpose),
        clears_hidden=int(layer.clears_hidden),
        gate_up_accumulation=layer.accumulations[0],
        down_accumulation=layer.accumulations[1],
        **_codes(layer, backward),
        **arrays,
    )


def run(core: Core, facts: Facts, params: LayerParams) -> None:
    """Run one pass with a poisoned workspace of the size that the plan says."""
    size = plan_of(core, facts).bytes
    kernels = Kernels.of(core.library, core.device)
    with guarded_outputs() as output:
        offset = -output(1, np.uint8).ctypes.data % 16
        workspace = output(size + 16, np.uint8, offset)
        workspace = workspace[-workspace.ctypes.data % 16 :][:size]
        workspace[:] = 0xFF  # NaN
        params.arrays["workspace"] = workspace
        params.workspace = workspace.ctypes.data
        structs = ctypes.byref(facts), ctypes.byref(params), ctypes.byref(kernels)
        with core.on_device(params) as stream:
            core.check(core.entry_of("pmo_layer_run", len(structs))(*structs, stream))


def forward(core: Core, layer: Layer, x: NDArray) -> NDArray:
    """The result of a forward pass that keeps no H, poisoned before."""
    assert layer.keeps == Hidden.RECOMPUTES
    with guarded_outputs() as output:
        out = output(x.shape, x.dtype)
        run(core, layer.facts(x, FORWARD), _params(layer, x, FORWARD, out=out))
    return out


ALL = (True, True, True, True)


def _run_parts(
    core: Core, layer: Layer, x: NDArray, d_out: NDArray, output: Any, arrays: dict, gradients: dict
) -> None:
    """The backward pass in two parts; the second one gets neither matrices, weights nor codes."""
    rows = len(layer.plan.row_to_token)
    scaled, d_hidden = output((rows, layer.inner), x.dtype), output((rows, 2 * layer.inner), x.dtype)
    has_values = layer.keeps == Hidden.KEEPS
    of_others = {name: gradients[name] for name in ("d_x", "d_weights")}
    left = {"scaled": scaled, "d_hidden": None if has_values else d_hidden}
    facts = layer.facts(x, BACKWARD, gradients["d_weights"] is not None)
    facts.part = Part.DGRADS
    run(core, facts, _params(layer, x, BACKWARD, d_out=d_out, **arrays, **of_others, **left))
    if has_values:
        d_hidden[...] = arrays["hidden"]
    plain = layer._replace(float8=False, has_codes=False, keeps=Hidden.RECOMPUTES, weights=None)
    facts = plain.facts(x, BACKWARD)
    facts.part = Part.WGRADS
    of_matrices = {name: gradients[name] for name in ("d_gate_up", "d_down")}
    params = _params(
        *(plain, x, BACKWARD),
        d_out=d_out,
        scaled=None if of_matrices["d_down"] is None else scaled,
        d_hidden=None if of_matrices["d_gate_up"] is None else d_hidden,
        **of_matrices,
    )
    params.gate_up = params.down = None
    run(core, facts, params)


def passes(
    core: Core,
    layer: Layer,
    x: NDArray,
    d_out: NDArray,
    *,
    wanted: tuple[bool, bool, bool, bool] = ALL,
    before: tuple[NDArray, NDArray] | None = None,
    defers: bool = False,
) -> Results:
    """Both passes, with poisoned results.

    Args:
        core: the core.
        layer: the layer.
        x: tokens.
        d_out: gradient of the result.
        wanted: whether gradients of x, both matrices and the weights are wanted.
        before: values of the gradients of the matrices, which a layer with accumulation adds to.
        defers: whether a call of its own computes the gradients of the matrices.
    """
    rows, columns = len(layer.plan.row_to_token), 2 * layer.inner
    hidden = hidden_scales = kept = kept_scales = None
    with guarded_outputs() as output:
        if layer.keeps == Hidden.KEEPS:
            hidden = output((rows, columns), x.dtype)
        elif layer.keeps == Hidden.KEEPS_CODES:
            hidden = output((rows, columns), ml_dtypes.float8_e4m3fn)
            hidden_scales = output((rows, columns // GROUP), np.float32)
        out = output(x.shape, x.dtype)
        shapes = {"d_x": x.shape, "d_gate_up": layer.gate_up.shape, "d_down": layer.down.shape, "d_weights": (rows,)}
        dtypes = [x.dtype, x.dtype, x.dtype, np.dtype(np.float32)]
        for place, accumulation in enumerate(layer.accumulations):
            if accumulation == Accumulation.ADDS_FLOAT32:
                dtypes[1 + place] = np.dtype(np.float32)
        gradients = {
            name: output(shape, dtype) if is_wanted else None
            for (name, shape), dtype, is_wanted in zip(shapes.items(), dtypes, wanted, strict=True)
        }
        if before is not None:
            for name, values in zip(("d_gate_up", "d_down"), before, strict=True):
                gradients[name][...] = values
        arrays = {"hidden": hidden, "hidden_scales": hidden_scales}
        run(core, layer.facts(x, FORWARD), _params(layer, x, FORWARD, out=out, **arrays))
        if hidden is not None:
            kept = hidden.copy()
        if hidden_scales is not None:
            kept_scales = hidden_scales.copy()
        if not defers:
            params = _params(layer, x, BACKWARD, d_out=d_out, **arrays, **gradients)
            run(core, layer.facts(x, BACKWARD, wanted[3]), params)
        else:
            _run_parts(core, layer, x, d_out, output, arrays, gradients)
    return Results(out, kept, kept_scales, *gradients.values())
