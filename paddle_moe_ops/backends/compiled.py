# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The backend of compiled C++ operators. They have their own gradients, in dygraph and in static graphs."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from typing import Any, ClassVar

import paddle
from paddle import Tensor

from .. import _build_check, _env
from .._graphs import FLOAT8, GraphValue, constant_if_float8, filled
from .._native import native
from ..triton.launch.paddle_device import RIG
from .base import (
    OPERATORS,
    MoePermuteSpec,
    MoeUnpermuteSpec,
    QuantizeSpec,
    RouteSpec,
    RowMaps,
    RowmapSpec,
    Tensors,
    TopkSpec,
    Validation,
    maps_of_layer,
)

LIBRARY = _build_check.library()

WORKSPACE_BYTES = 1 << 30  # of a layer, by default

# Values of the enums of csrc/include/pmo.
_DUPLICATES = {"first": 0, "each": 1}
_FILL = {"all": 3, "meta": 2, "none": 0}
_CHECKS = {Validation.OFF: 0, Validation.DATA: 1 | 2 | 4, Validation.ALL: 1 | 2 | 4 | 8}
_COUNTED, _COUNTS_IN_LIST, _COUNTS_IN_TENSOR = range(3)

# Fast paths check the arguments and run the operator in one call; checks in Python take several times as long as the
# operator on a few tokens. They return None, for the slow path, if an argument is no dense tensor or does not fit, or
# PADDLE_MOE_OPS_BACKEND or PADDLE_MOE_OPS_VALIDATE is set. If a tensor requires a gradient, they return None, or True:
# the arguments fit, so the operator needs no checks. Callers check `use_backend` first.
QUICK = (
    "quick_permute",
    "quick_unpermute",
    "quick_unpermute_weighted",
    "quick_moe_permute",
    "quick_moe_unpermute",
    "quick_moe_unpermute_weighted",
    "quick_moe_mlp",
)

_direct: dict[str, Callable[..., tuple[Tensor, ...]]] = {}  # operators without support for gradients and graphs


@functools.cache
def _library_problem() -> str | None:
    """Load the library; return the reason why that fails, or None."""
    if not LIBRARY.exists():
        return f"the compiled library {LIBRARY.name} is missing; build it: {_build_check.INSTALL}"
    problem = _build_check.mismatch()
    if problem is not None:
        return problem
    from paddle.utils.cpp_extension.extension_utils import load_op_meta_info_and_register_op

    try:
        load_op_meta_info_and_register_op(str(LIBRARY))
        _load_direct()
    except (ImportError, OSError, RuntimeError) as error:
        return f"{LIBRARY.name} does not load: {str(error).rstrip('. ')}"
    try:
        num_threads, max_isa = _env.num_threads(), _env.max_cpu_isa()
    except ValueError as error:
        return str(error)
    library = ctypes.CDLL(str(LIBRARY))
    library.pmo_set_num_threads(num_threads or 0)
    library.pmo_set_max_cpu_isa(max_isa)
    return None


@functools.cache
def gpus_without_kernels() -> dict[int, str]:
    """The GPUs of this machine without kernels in the library: the reason for each, by number."""
    info = _build_check.build_info()
    if info is None or not paddle.is_compiled_with_cuda():
        return {}
    gpus = paddle.device.cuda
    all_reasons = [_build_check.gpu_problem(info, gpus.get_device_capability(i)) for i in range(gpus.device_count())]
    return {gpu: reason for gpu, reason in enumerate(all_reasons) if reason is not None}


def _load_direct() -> None:
    """Load the library as a Python module and register the operators of csrc/paddle/direct.h."""
    loader = ExtensionFileLoader("_C_pd_", str(LIBRARY))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    if spec is None:
        raise ImportError(f"{LIBRARY.name} is no Python module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    _direct.update((name, function) for name, function in vars(module).items() if not name.startswith(("_", "quick_")))
    missing = [name for name in QUICK if not hasattr(module, name)]
    if missing:
        raise ImportError(f"it lacks {', '.join(missing)}, so it was built from other sources: {_build_check.INSTALL}")
    for name in QUICK:
        setattr(backend, name, getattr(module, name))
    native.load(module)


def direct(operator: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Call a compiled operator that belongs to no backend and has no gradient.

    Raises:
        RuntimeError: the compiled library cannot be used.
    """
    if not _direct and (problem := _library_problem()) is not None:
        raise RuntimeError(f"this needs the compiled operators, but {problem}")
    return _direct[operator](*arguments)


def grouped_product(
    x: Tensor, matrices: Tensor, sizes: Tensor, offsets: Tensor | None, transpose: bool, *, wide: bool = False
) -> Tensor:
    """Grouped GEMM: each group's rows times its matrix, zeros in rows of no group; differentiable.

    Groups that overlap or end after the last row are truncated.

    Args:
        x: float32, float16 or bfloat16 [M, D].
        matrices: [E, N, D], or [E, D, N] without ``transpose``; dtype of ``x``.
        sizes: int32 or int64 [E], the rows of each group.
        offsets: int32 or int64 [E] or longer, the first row of each; None: the groups are adjacent.
        transpose: whether the matrices are stored transposed.
        wide: whether the result is float32, for callers that process it further. On a CPU it is then not rounded.
    """
    wanted = not x.stop_gradient, not matrices.stop_gradient
    given = (sizes, True) if offsets is None else (offsets, False)
    return _run("grouped_product", x, matrices, sizes, given[0], transpose, given[1], wide, *wanted)[0]


def has_operators(x: Tensor) -> bool:
    """True if the compiled library has operators on a tensor's device; for a value of a graph, on the current one."""
    if backend.unavailable() is not None:
        return False
    if isinstance(x, GraphValue):
        kind, _, number = paddle.device.get_device().partition(":")
        return kind == "cpu" or (kind == "gpu" and int(number) not in gpus_without_kernels()) or kind == RIG
    is_on_rig = x.place.is_custom_place() and x.place.custom_device_type() == RIG
    if x.place.is_cpu_place() or is_on_rig:
        return True
    return x.place.is_gpu_place() and backend.cannot_run_on(x) is None


def moe_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    plan: Any,
    *,
    transpose: bool,
    keeps_hidden: bool,
    workspace: int = WORKSPACE_BYTES,
    in_place: bool = False,
    by_slot: bool = False,
    float8: bool = False,
    float8_wgrads: bool = False,
) -> Tensor:
    """Return each token's weighted sum of the outputs of its SwiGLU experts; differentiable once.

    Args:
        x: float32, float16 or bfloat16 [T, d].
        gate_up: [E, d, 2n], or [E, 2n, d] with ``transpose``; dtype of ``x``.
        down: [E, n, d], or [E, d, n].
        weights: float32 [N], per row, or [T, K] with ``by_slot``.
        plan: the map of tokens to rows.
        transpose: whether the matrices are stored transposed.
        keeps_hidden: whether the first GEMM's output is saved for the backward pass; otherwise it is recomputed.
        workspace: bytes of the buffer for rows of d columns, on a GPU with kernels.
        in_place: whether the backward pass may overwrite the saved output; a second one through the graph then raises.
        by_slot: whether the weights are per slot.
        float8: whether GEMMs have float8 operands. Without hardware support they multiply quantised values in float32.
        float8_wgrads: with ``float8``, whether wgrads have float8 operands, too.
    """
    operands = x, gate_up, down, weights
    wanted = [not each.stop_gradient for each in operands]
    keeps = keeps_hidden and any(wanted) and paddle.is_grad_enabled()
    attributes = transpose, keeps, *wanted, in_place, workspace, by_slot, float8_wgrads
    out, *kept = _run("moe_mlp_float8" if float8 else "moe_mlp", *operands, *maps_of_layer(plan), *attributes)
    _stop_gradients(*kept)
    return out


def moe_mlp_quantized(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    weights: Tensor,
    plan: Any,
    *,
    transpose: bool,
    keeps_hidden: bool,
    workspace: int,
    in_place: bool,
    by_slot: bool,
    matrix_format: int,
) -> Tensor:
    """`moe_mlp` with matrices that are codes, of a pmo_matrix_format; differentiable once, in x and the weights."""
    wanted = not x.stop_gradient, not weights.stop_gradient
    keeps = keeps_hidden and any(wanted) and paddle.is_grad_enabled()
    operands = x, gate_up, gate_up_scales, down, down_scales, weights
    attributes = transpose, keeps, *wanted, in_place, workspace, by_slot, matrix_format
    out, hidden = _run("moe_mlp_quantized", *operands, *maps_of_layer(plan), *attributes)
    _stop_gradients(hidden)
    return out


def dequantize_matrices(
    codes: Tensor, scales: Tensor, inner: int, outer: int, transpose: bool, matrix_format: int, dtype: Any
) -> Tensor:
    """The values of matrices that are codes, rounded to ``dtype``."""
    return _run("dequantize_matrices", codes, scales, inner, outer, transpose, matrix_format, dtype.value)[0]


def _declines(*_: Any) -> Any:
    return None


def _run(operator: str, *arguments: Any) -> Sequence[Tensor]:
    """Call an operator: through Paddle for values of a graph or if a gradient is required, otherwise directly."""
    grad_enabled = paddle.is_grad_enabled()
    for argument in arguments:
        if isinstance(argument, Tensor):
            if grad_enabled and not argument.stop_gradient:
                break
        elif isinstance(argument, GraphValue):
            break
    else:
        return _direct[operator](*arguments)
    if not grad_enabled:  # custom operators ignore this mode
        arguments = tuple(argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments)
    return paddle._C_ops._run_custom_op(f"pmo_{operator}", *arguments)


def _stop_gradients(*tensors: Tensor) -> None:
    """Mark outputs as constants: Paddle marks all outputs differentiable if one of them is."""
    for tensor in tensors:
        tensor.stop_gradient = True


def _counts_source(spec: RouteSpec, counts: Tensor | None) -> int:
    if counts is not None:
        return _COUNTS_IN_TENSOR
    return _COUNTED if spec.counts is None else _COUNTS_IN_LIST


def _scale_attributes(scale: Tensor | None) -> tuple[bool, int, int]:
    """Presence, columns and dtype of a scale: Paddle drops a scale without elements from the inputs."""
    if scale is None:
        return False, -1, paddle.float32.value
    return True, scale.shape[1], scale.dtype.value


def _quantize_attributes(spec: QuantizeSpec) -> tuple[bool, bool, float]:
    return spec.ue8m0, spec.scale_layout == "col", spec.amax_min


class CompiledBackend:
    """The backend that calls the operators of the compiled library."""

    name = "compiled"
    gathers_rows = False
    takes_lists = False
    operators = frozenset(OPERATORS) - {"grouped_gemm"}
    dtypes: ClassVar[dict[str, Any]] = {}
    unavailable = staticmethod(_library_problem)

    def __init__(self) -> None:
        # Placeholders until the library is loaded; see csrc/paddle/direct.h.
        self.quick_permute = self.quick_unpermute = self.quick_unpermute_weighted = _declines
        self.quick_moe_permute = self.quick_moe_unpermute = self.quick_moe_unpermute_weighted = _declines
        self.quick_moe_mlp = _declines

    def cannot_run_on(self, tensor: Tensor) -> str | None:
        without = gpus_without_kernels()
        if not without or not isinstance(tensor, Tensor) or not tensor.place.is_gpu_place():
            return None  # the operators themselves check other places
        return without.get(tensor.place.gpu_device_id())

    def calculate_topk(self, gating: Tensor, correction_bias: Tensor | None, spec: TopkSpec) -> Tensors:
        weights, ids, scores = _run("calculate_topk", gating, correction_bias, *spec)
        _stop_gradients(ids, *([] if spec.return_scores else [scores]))
        return weights, ids, scores

    def route(self, routing: Tensor, probs: Tensor | None, counts: Tensor | None, spec: RouteSpec) -> Tensors:
        outputs = _run(
            *(("route", routing) if probs is None else ("route_with_probs", routing, probs)),
            counts,
            spec.num_experts,
            spec.topk,
            spec.padding_alignment,
            _counts_source(spec, counts),
            list(spec.counts or ()),
            spec.buffer_size,
            _DUPLICATES[spec.duplicates],
            _CHECKS[spec.validation],
        )
        if not outputs[0].stop_gradient:
            _stop_gradients(*outputs[:5], *outputs[6:])
        return tuple(outputs)

    def permute(self, x: Tensor, scale: Tensor | None, plan: Any, fill_padding: str) -> Tensors:
        x, maps = constant_if_float8(x), (plan.slot_to_row, plan.token_rows, plan.row_to_token)
        rows, scales = self._permute(x, scale, maps, fill_padding)
        if not rows.stop_gradient:
            _stop_gradients(scales, *([rows] if x.dtype in FLOAT8 else []))
        return rows, scales

    def _permute(self, x: Tensor, scale: Tensor | None, maps: Tensors, fill_padding: str) -> Tensors:
        attributes = _FILL[fill_padding], *_scale_attributes(scale), x.shape[1], x.dtype.value
        return tuple(_run("permute", x, scale, *maps, *attributes))

    def unpermute(self, rows: Tensor, probs: Tensor | None, plan: Any) -> Tensor:
        if probs is None:
            return _run("unpermute", rows, plan.token_rows, plan.row_to_token, rows.shape[1], rows.dtype.value)[0]
        return _run(
            "unpermute_weighted",
            rows,
            probs,
            plan.token_rows,
            plan.row_to_token,
            plan.row_to_slot,
            not rows.stop_gradient,
            not probs.stop_gradient,
        )[0]

    def unpermute_backward(
        self, d_out: Tensor, rows: Tensor | None, probs: Tensor | None, plan: Any, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        maps = plan.token_rows, plan.row_to_token, plan.row_to_slot
        d_rows, d_probs = _run("unpermute_weighted_backward", rows, probs, *maps, d_out, *wanted)
        _stop_gradients(d_rows, d_probs)
        return d_rows, d_probs

    def quantize_1x128(self, x: Tensor, spec: QuantizeSpec) -> Tensors:
        codes, scales = _run("quantize_1x128", x, *_quantize_attributes(spec))
        _stop_gradients(codes, scales)
        return codes, scales

    def permute_quantized(self, x: Tensor, plan: Any, fill_padding: str, spec: QuantizeSpec) -> Tensors:
        codes, scales = _run(
            "permute_quantized",
            x,
            plan.slot_to_row,
            plan.row_to_token,
            _FILL[fill_padding],
            *_quantize_attributes(spec),
        )
        _stop_gradients(codes, scales)
        return codes, scales

    def dequantize_1x128(self, codes: Tensor, scales: Tensor, scale_layout: str, dtype: Any) -> Tensor:
        (rows,) = _run("dequantize_1x128", codes, scales, scale_layout == "col", dtype.value)
        _stop_gradients(rows)
        return rows

    def moe_permute(
        self,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> Tensors:
        hidden_states = constant_if_float8(hidden_states)
        if hidden_states.dtype in FLOAT8 and not isinstance(hidden_states, Tensor) and not probs.stop_gradient:
            return self._moe_permute_float8_graph(hidden_states, scale, routemap, probs, counts, spec)
        route = spec.route
        numbers = [
            route.num_experts,
            _counts_source(route, counts),
            route.padding_alignment,
            int(spec.do_gather),
            int(spec.return_expert_indices),
            route.buffer_size,
            _FILL[spec.fill_padding],
            _CHECKS[route.validation],
            hidden_states.shape[1],
            hidden_states.dtype.value,
            int(not hidden_states.stop_gradient),
            int(not probs.stop_gradient),
            *map(int, _scale_attributes(scale)),
            *(route.counts or ()),
        ]
        outputs = _run("moe_permute", hidden_states, scale, routemap, probs, counts, numbers)
        _stop_gradients(outputs[1], *outputs[3:])
        if hidden_states.dtype in FLOAT8:
            _stop_gradients(outputs[0])
        return tuple(outputs[:8])  # the last one serves only the gradient

    def _moe_permute_float8_graph(
        self,
        hidden_states: Tensor,
        scale: Tensor | None,
        routemap: Tensor,
        probs: Tensor,
        counts: Tensor | None,
        spec: MoePermuteSpec,
    ) -> Tensors:
        """moe_permute by operators of which none has both a float8 and a differentiable result.

        A graph's backward pass creates zeros for every result without a gradient, and Paddle has no float8 zeros.
        """
        stand_in = routemap[:, :1].astype("float32")  # rows that are not permuted
        outputs = list(self.moe_permute(stand_in, None, routemap, probs, counts, spec._replace(do_gather=False)))
        if spec.do_gather:
            maps = self.route(routemap, None, counts, spec.route)[:3]
            outputs[0], outputs[3] = self._permute(hidden_states, scale, maps, spec.fill_padding)
            _stop_gradients(outputs[0], outputs[3])
        else:
            outputs[0] = filled([0, hidden_states.shape[1]], 0, hidden_states.dtype, like=routemap)
            outputs[3] = filled([0], 0, paddle.float32 if scale is None else scale.dtype, like=routemap)
        return tuple(outputs)

    def moe_unpermute(
        self, rows: Tensor, rowmap: Tensor, routemap: Tensor, probs: Tensor, spec: MoeUnpermuteSpec
    ) -> Tensors:
        return tuple(
            _run(
                "moe_unpermute_weighted" if spec.weighted else "moe_unpermute",
                rows,
                rowmap,
                routemap,
                probs,
                spec.compat_paddle,
                _CHECKS[spec.validation],
                rows.shape[1],
                rows.dtype.value,
                not rows.stop_gradient,
                not probs.stop_gradient,
            )
        )

    def sort_chunks(
        self, x: Tensor, probs: Tensor | None, split_sizes: Tensor, order: Tensor, validation: Validation
    ) -> Tensors:
        checks, x = _CHECKS[validation], constant_if_float8(x)
        if probs is None:
            out, source_to_dest = _run("sort_chunks", x, split_sizes, order, checks, x.shape[1], x.dtype.value)
            if not out.stop_gradient:
                _stop_gradients(source_to_dest, *([out] if x.dtype in FLOAT8 else []))
            return out, paddle.empty([0], "float32"), source_to_dest
        if x.dtype in FLOAT8 and not probs.stop_gradient:
            # no operator has both a float8 result and a differentiable one: see _moe_permute_float8_graph
            out, _, source_to_dest = self.sort_chunks(x, None, split_sizes, order, validation)
            probs_out, _, _ = self.sort_chunks(probs.unsqueeze(-1), None, split_sizes, order, Validation.OFF)
            return out, probs_out.squeeze(-1), source_to_dest
        out, probs_out, source_to_dest = _run(
            "sort_chunks_with_probs",
            x,
            probs,
            split_sizes,
            order,
            checks,
            x.shape[1],
            x.dtype.value,
            not x.stop_gradient,
            not probs.stop_gradient,
        )
        _stop_gradients(source_to_dest, *([out] if x.dtype in FLOAT8 else []))
        return out, probs_out, source_to_dest

    def chunk_sort_map(self, split_sizes: Tensor, order: Tensor, num_rows: int, validation: Validation) -> Tensor:
        (source_to_dest,) = _run("chunk_sort_map", split_sizes, order, num_rows, _CHECKS[validation])
        _stop_gradients(source_to_dest)
        return source_to_dest

    def make_row_id_map(
        self, token_rows: Tensor, row_to_expert: Tensor, pad_offsets: Tensor | None, num_experts: int
    ) -> Tensor:
        return _run("make_row_id_map", token_rows, row_to_expert, pad_offsets, num_experts)[0]

    def read_rowmap(
        self, rowmap: Tensor, pad_offsets: Tensor | None, num_rows: Tensor | None, spec: RowmapSpec
    ) -> RowMaps:
        checks = 1 * spec.check_range | 2 * spec.check_repeats
        maps = _run("read_rowmap", rowmap, pad_offsets, num_rows, spec.is_row_id_map, spec.num_rows, checks)
        _stop_gradients(*maps)
        return RowMaps(*maps)

    def slots_to_rows(self, slot_values: Tensor, maps: Any) -> Tensor:
        return _run("slots_to_rows", slot_values, maps.slot_to_row, maps.row_to_slot)[0]

    def rows_to_slots(self, row_values: Tensor, maps: Any) -> Tensor:
        return _run("rows_to_slots", row_values, maps.slot_to_row, maps.row_to_slot)[0]


backend = CompiledBackend()
