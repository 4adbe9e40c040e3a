# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for a GPU, which the interpreter cannot tell, and its code is what the arithmetic asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.bare_package import ROOT

KERNELS = {
    *("route", "mask_to_ids", "count", "prefix", "offsets", "maps", "permute", "unpermute", "unpermute_backward"),
    *("fill", "claim", "compact", "gather_slots", "scatter_mask", "scatter_slots", "chunks", "chunk_map"),
    *("topk", "topk_backward"),
    *("schedule", "product", "weight_gradient", "row_sums"),
}


@pytest.fixture(scope="module")
def by_capability():
    """For each GPU generation and kernel the PTX instructions of its variants."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton.compiling"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[int, dict[str, set[str]]] = {80: {}, 90: {}}
    for line in map(json.loads, done.stdout.splitlines()):
        kernels = found[line["capability"]]
        kernels.setdefault(line["kernel"].removesuffix("_kernel"), set()).update(line["instructions"])
    return found


@pytest.fixture(scope="module")
def compiled(by_capability):
    return by_capability[80]


def test_every_kernel_compiles(compiled):
    assert set(compiled) == KERNELS


@pytest.mark.parametrize("kernel", ["permute", "unpermute", "unpermute_backward"])
def test_rows_move_16_bytes_at_a_time(compiled, kernel):
    instructions = " ".join(compiled[kernel])
    assert "ld.global.v4.b32" in instructions
    assert "st.global.v4.b32" in instructions


@pytest.mark.parametrize("kernel", ["product", "weight_gradient"])
def test_products_run_on_tensor_cores_while_operands_are_on_their_way(compiled, kernel):
    instructions = " ".join(compiled[kernel])
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in instructions
    assert "cp.async.cg.shared.global" in instructions


@pytest.mark.parametrize("kernel", ["product", "weight_gradient"])
def test_on_hopper_operands_come_through_descriptors_to_asynchronous_products(by_capability, kernel):
    instructions = " ".join(by_capability[90][kernel])
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in instructions
    assert "cp.async.bulk.tensor" in instructions
    assert ("cp.async.bulk.tensor.3d.global.shared::cta" in instructions) == (kernel == "weight_gradient")
    assert "cp.async.cg.shared.global" not in instructions


def test_subnormal_numbers_are_kept_and_sums_rounded_to_nearest(by_capability, compiled):
    for kernel, instructions in [*compiled.items(), *by_capability[90].items()]:
        assert not [each for each in instructions if ".ftz" in each], kernel
    assert "fma.rn.f32" in " ".join(compiled["unpermute"])
