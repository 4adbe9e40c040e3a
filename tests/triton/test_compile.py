# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for a GPU, which the interpreter cannot show, and its code has the arithmetic it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paddle_moe_ops.triton.gemm.configs import gemm_config, wgrad_config
from paddle_moe_ops.triton.gemm.types import Gpu
from tests.bare_package import ROOT

pytestmark = pytest.mark.long

KERNELS = {
    *("route", "mask_to_ids", "count", "prefix", "offsets", "maps", "unpermute", "unpermute_backward"),
    *("permute", "permute_and_sum", "quantize", "dequantize"),
    *("fill", "claim", "compact", "gather_slots", "scatter_mask", "scatter_slots", "slots_to_rows"),
    *("chunks", "chunk_map"),
    *("topk", "topk_backward"),
    *("make_row_id_map", "read_row_id_map"),
    *("schedule", "grouped_gemm", "wgrad", "row_sums", "bias_gradient", "swiglu_gradient"),
}


def compile_kernels(*options):
    """Compilation results of each kernel for each GPU generation and each kind of arguments."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton.compiling", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def variants():
    return compile_kernels()


@pytest.fixture(scope="module")
def by_capability(variants):
    """For each GPU generation and kernel the PTX instructions of its variants."""
    found: dict[int, dict[str, set[str]]] = {80: {}, 90: {}}
    for line in variants:
        kernels = found[line["capability"]]
        kernels.setdefault(line["kernel"].removesuffix("_kernel"), set()).update(line["instructions"])
    return found


@pytest.fixture(scope="module")
def compiled(by_capability):
    return by_capability[80]


def test_every_kernel_compiles(compiled):
    assert set(compiled) == KERNELS


@pytest.mark.slow
def test_each_layout_compiles_with_each_option(variants):
    assert len(compile_kernels("--every")) > len(variants)


def test_blocks_fit_the_least_shared_memory_of_a_gpu(variants):
    """The minimum is 99 KB, on compute capability 8.6, 8.9 and 12.0; these GPUs use the configurations of 8.0."""
    assert max(each["shared_bytes"] for each in variants if each["capability"] == 80) <= 99 << 10
    for other in (86, 89, 120, 121):
        gpus = [Gpu(capability, 84) for capability in (80, other)]
        assert len({gemm_config(gpu, 4096, 8, 4096, 4096) for gpu in gpus}) == 1
        assert len({wgrad_config(gpu, 4096, 4096) for gpu in gpus}) == 1


def test_blocks_fit_the_shared_memory_of_hopper(variants):
    assert max(each["shared_bytes"] for each in variants if each["capability"] == 90) <= 227 << 10


@pytest.mark.parametrize("kernel", ["permute", "unpermute", "unpermute_backward"])
def test_rows_move_16_bytes_at_a_time(compiled, kernel):
    instructions = " ".join(compiled[kernel])
    assert "ld.global.v4.b32" in instructions
    assert "st.global.v4.b32" in instructions


@pytest.mark.parametrize("kernel", ["grouped_gemm", "wgrad"])
def test_products_run_on_tensor_cores_while_operands_are_on_their_way(compiled, kernel):
    instructions = " ".join(compiled[kernel])
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in instructions
    assert "cp.async.cg.shared.global" in instructions


@pytest.mark.parametrize("kernel", ["grouped_gemm", "wgrad"])
def test_on_hopper_operands_come_through_descriptors_to_asynchronous_products(by_capability, kernel):
    instructions = " ".join(by_capability[90][kernel])
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in instructions
    assert "cp.async.bulk.tensor" in instructions
    assert ("cp.async.bulk.tensor.3d.global.shared::cta" in instructions) == (kernel == "wgrad")
    assert "cp.async.cg.shared.global" not in instructions


def test_subnormal_numbers_are_kept_and_sums_rounded_to_nearest(by_capability, compiled):
    for kernel, instructions in [*compiled.items(), *by_capability[90].items()]:
        assert not [each for each in instructions if ".ftz" in each], kernel
    assert "fma.rn.f32" in " ".join(compiled["unpermute"])
