# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel that the launchers launch, without a GPU; prints facts about each as JSON lines.

A separate program: in the process of the tests the kernels belong to the interpreter. Prints the instructions of each
kernel, or with --ptx its PTX without names and source lines, in the order of launches. GEMMs take each layout and each
option; with --every each layout takes each option. A change that must not alter machine code is checked by comparing
this output before and after it:

    export TRITON_DISABLE_LINE_INFO=1
    python -m tests.triton.compiling --every --ptx > after.jsonl && diff before.jsonl after.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.bare_package import without_paddle

without_paddle(always=True)

from paddle_moe_ops.triton.gemm import mlp  # noqa: E402
from paddle_moe_ops.triton.gemm.bias_gradient import bias_gradient  # noqa: E402
from paddle_moe_ops.triton.gemm.configs import gemm_config, wgrad_config  # noqa: E402
from paddle_moe_ops.triton.gemm.grouped_gemm import grouped_gemm, grouped_gemm_backward  # noqa: E402
from paddle_moe_ops.triton.gemm.types import (  # noqa: E402
    Gpu,
    Groups,
    Tokens,
)
from paddle_moe_ops.triton.ops.permute import permute  # noqa: E402
from paddle_moe_ops.triton.ops.quantize import dequantize, quantize  # noqa: E402
from paddle_moe_ops.triton.ops.route import Routing, route  # noqa: E402
from paddle_moe_ops.triton.ops.row_id_map import make_row_id_map, read_row_id_map  # noqa: E402
from paddle_moe_ops.triton.ops.rowmap import (  # noqa: E402
    clean_rowmap,
    clean_rowmap_by_expert,
    gather_slots,
    scatter_mask,
    scatter_slots,
    slots_to_rows,
)
from paddle_moe_ops.triton.ops.sort_chunks import chunk_map  # noqa: E402
from paddle_moe_ops.triton.ops.topk import topk as choose_experts  # noqa: E402
from paddle_moe_ops.triton.ops.topk import topk_backward  # noqa: E402
from paddle_moe_ops.triton.ops.unpermute import unpermute  # noqa: E402
from paddle_moe_ops.triton.ops.unpermute_backward import unpermute_backward  # noqa: E402

from .interpreter import NumpyArray, NumpyDevice  # noqa: E402

# The oldest generation that is promised, and the first one with tensor descriptors.
OLDEST, HOPPER = 80, 90
EVERY = "--every" in sys.argv


class CompilingDevice(NumpyDevice):
    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability = capability

    def launch(
        self, kernel: Any, programs: int, types: tuple[str, ...], arguments: Sequence[int], constants: tuple, warps: int
    ) -> None:
        names = kernel.arg_names
        signature = {name: kind.partition(":")[0] for name, kind in zip(names, types, strict=False)}
        values = dict(zip(names[len(types) :], constants, strict=True))
        signature.update(dict.fromkeys(values, "constexpr"))
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.endswith(":16")}
        source = ASTSource(kernel, signature, values, aligned)
        target = GPUTarget("cuda", self.capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
        name, ptx = kernel.fn.__name__, compiled.asm["ptx"]
        instructions = sorted(set(re.findall(r"^\s+(?:@\S+ )?([a-z]\S+)", ptx, re.MULTILINE)))
        line = {"capability": self.capability, "types": types, "shared_bytes": compiled.metadata.shared}
        line |= {"ptx": code_of(ptx, name)} if "--ptx" in sys.argv else {"kernel": name, "instructions": instructions}
        print(json.dumps(line))


def code_of(ptx: str, name: str) -> list[str]:
    """Lines of PTX without comments, source lines and the kernel's name."""
    lines = (re.sub(r"//.*", "", line).strip().replace(name, "kernel") for line in ptx.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file", ".section"))]


def main() -> None:
    gpu = CompilingDevice(OLDEST)
    tokens, topk, experts, hidden = 300, 6, 64, 1024
    rows = tokens * topk
    ids, by_slot = gpu.empty([tokens, topk], "int32"), gpu.empty([tokens, topk], "float32")
    by_row, owners = gpu.empty([rows], "float32"), gpu.empty([rows], "int32")
    few = NumpyArray(ids.values[:4])
    route(gpu, Routing(few, None, 4, topk, experts, 4, False, True), 4 * topk)
    route(gpu, Routing(ids, by_slot, tokens, topk, experts, 4, False, True), rows, with_rowmap=True)
    route(gpu, Routing(gpu.empty([4, experts], "bool"), None, 4, topk, experts, 1, True, True), 4 * topk)
    x, y = (gpu.array(np.zeros((count, hidden), np.float16)) for count in (tokens, rows))
    permute(gpu, x, gpu.empty([tokens, 8], "float32"), ids, owners, "all")
    unpermute(gpu, y, ids)
    unpermute(gpu, y, ids, by_slot, owners)
    unpermute_backward(gpu, x, ids, owners, y, by_row)
    clean_rowmap(gpu, gpu.empty([tokens, experts], "int32"), ids, rows, first_duplicate_only=True)
    offsets = gpu.empty([experts], "int32")
    make_row_id_map(gpu, ids, owners, None, experts)
    row_id_map = make_row_id_map(gpu, ids, owners, offsets, experts)
    clean_rowmap_by_expert(gpu, read_row_id_map(gpu, row_id_map, offsets), rows)
    read_row_id_map(gpu, row_id_map, None)
    gather_slots(gpu, by_row, ids)
    scatter_mask(gpu, by_row, owners, owners, tokens, experts)
    scatter_slots(gpu, by_slot, ids, by_row)
    slots_to_rows(gpu, by_slot, ids, owners)
    groups = Groups(gpu.empty([experts], "int32"), gpu.empty([experts + 1], "int64"))
    matrices = gpu.array(np.zeros((experts, 256, hidden), np.float16))
    products(gpu, x, y, matrices, groups, Tokens(owners, ids), by_row)
    for ue8m0, layout in ((False, "row"), (True, "col")):
        options = {"ue8m0": ue8m0, "scale_layout": layout, "amax_min": 1e-4}
        quantize(gpu, x, ids, owners, **options)
        dequantize(gpu, *quantize(gpu, x, **options), layout, "float32")
    chunk_map(gpu, gpu.empty([5], "int32"), gpu.empty([5], "int64"), rows)
    route_by_logits(gpu, tokens, topk, experts)
    products_by_descriptors(CompilingDevice(HOPPER), y, matrices, groups)
    layers(gpu, Tokens(owners, ids), groups, 192)
    mlp.gpu_at = lambda _: Gpu(HOPPER, 132)
    layers(CompilingDevice(HOPPER), Tokens(owners, ids), groups, 1024)


def products(
    gpu: CompilingDevice,
    x: NumpyArray,
    y: NumpyArray,
    matrices: NumpyArray,
    groups: Groups,
    tokens: Tokens,
    by_row: NumpyArray,
) -> None:
    experts, outer, inner = matrices.shape
    product, bias = gpu.empty([y.shape[0], outer], "float16"), gpu.empty([experts, outer], "float16")
    for transpose, matrix in ((True, matrices), (False, gpu.reshape(matrices, (experts, inner, outer)))):
        layer = matrix, groups, transpose
        if transpose or EVERY:
            grouped_gemm(gpu, x, *layer, tokens=tokens)
            grouped_gemm_backward(gpu, product, y, *layer, weights=by_row)
            grouped_gemm(gpu, y, *layer, weights=by_row, bias=bias)
        if not transpose or EVERY:
            grouped_gemm_backward(gpu, product, x, *layer, tokens=tokens)
            grouped_gemm(gpu, x, *layer, tokens=tokens, bias=bias)
    bias_gradient(gpu, product, bias, groups, by_row, by_row)
    bias_gradient(gpu, product, bias, groups, None, None)


def layers(gpu: CompilingDevice, tokens: Tokens, groups: Groups, inner: int) -> None:
    num_rows, num_tokens, experts = tokens.row_to_token.shape[0], tokens.token_rows.shape[0], groups.sizes.shape[0]
    hidden = 256
    x = gpu.empty([num_tokens, hidden], "float16")
    gate_up, down = gpu.empty([experts, hidden, 2 * inner], "float16"), gpu.empty([experts, inner, hidden], "float16")
    weights, slots = gpu.empty([num_rows], "float32"), gpu.empty([num_tokens, num_rows // num_tokens], "int32")
    layer = mlp.Layer(gate_up, down, groups, tokens, weights, False, 1 << 28, slots)
    out, kept = mlp.moe_mlp(gpu, x, layer, True)
    into = ((gpu.empty(gate_up.shape, "float32"), True), None)
    mlp.moe_mlp_backward(gpu, out, x, kept, layer, (True,) * 4, into)


def products_by_descriptors(gpu: CompilingDevice, x: NumpyArray, matrices: NumpyArray, groups: Groups) -> None:
    hopper = Gpu(HOPPER, 132)
    experts, outer, inner = matrices.shape
    rows, weights = (
        gemm_config(hopper, 256 * experts, experts, inner, outer),
        wgrad_config(hopper, outer, inner),
    )
    for transpose, matrix in ((True, matrices), (False, gpu.reshape(matrices, (experts, inner, outer)))):
        product, layer = gpu.empty([x.shape[0], outer], "float16"), (matrix, groups, transpose)
        if transpose or EVERY:
            grouped_gemm(gpu, x, *layer, config=rows)
            grouped_gemm_backward(gpu, product, x, *layer, config=rows, weight_config=weights)
        if not transpose or EVERY:
            grouped_gemm(gpu, x, *layer, bias=gpu.empty([experts, outer], "float16"), config=rows)


def route_by_logits(gpu: CompilingDevice, tokens: int, top_k: int, experts: int) -> None:
    bias = gpu.empty([experts], "float32")
    for dtype in ("float32", "bfloat16"):
        for pre_act in (True, False):
            flags = {"use_sigmoid": not pre_act, "renormalize": True, "pre_act": pre_act, "scaling_factor": 2.5}
            groups = {"num_groups": 8, "topk_groups": 4 if pre_act else 8, "scores_per_group": 2}
            gating, d_weights = gpu.empty([tokens, experts], dtype), gpu.empty([tokens, top_k], dtype)
            choose_experts(gpu, gating, bias, top_k=top_k, return_scores=pre_act, **flags, **groups)
            topk_backward(gpu, gating, gpu.empty([tokens, top_k], "int64"), d_weights, gating, **flags)


if __name__ == "__main__":
    main()
