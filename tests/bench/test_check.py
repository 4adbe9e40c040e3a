# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The check of results notices a single wrong bit in any output; on the GPU machine, where PyTorch is."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kernels.device import BITS, FLOAT32_SUMS
from benchmarks.kernels.operators import OPERATIONS, difference, variant_of
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import Case, Shape
from paddle_moe_ops import reference

from .fake_device import places

pytestmark = pytest.mark.cuda_only

CASES = [
    Case(Shape("check", 300, 4, 9, 264), routing, alignment, fill)
    for routing in ("uniform", "half_unassigned")
    for alignment, fill in ((1, True), (8, True), (8, False))
]


# Outputs whose padding rows may contain anything if they are not filled.
UNFILLED = ("rows", "row_scales", "codes", "scales")


def right_outputs(operation, inputs):
    """The oracle's outputs for an operation, as tensors."""
    problem, variant = inputs.problem, operation.variant
    plan = problem.plan
    weights = None if variant == "plain" else plan.row_probs

    def moved():
        fp8 = variant == "fp8"
        x = inputs.to_numpy(inputs.x_fp8 if fp8 else inputs.x)
        rows, scales = reference.permute(x, plan, inputs.to_numpy(inputs.scale) if fp8 else None)
        return {"rows": rows} if scales is None else {"rows": rows, "row_scales": scales}

    def quantized():
        ways = {"ue8m0": variant == "ue8m0", "scale_layout": "col" if variant == "col" else "row"}
        codes, scales = reference.permute_quantized(inputs.to_numpy(inputs.x), plan, **ways)
        return {"codes": codes, "scales": scales}

    def maps():
        names = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "expert_offsets")
        return {**{name: getattr(plan, name) for name in names}, "rowmap": problem.rowmap}

    def summed():
        return {"out": reference.unpermute(inputs.to_numpy(inputs.rows), plan, weights)}

    def slot_probs():
        return {"slot_probs": np.where(plan.slot_to_row >= 0, problem.probs, np.float32(0))}

    def gradients():
        arrays = inputs.to_numpy(inputs.d_out), plan, inputs.to_numpy(inputs.rows), weights
        made = dict(zip(("d_rows", "d_weights"), reference.unpermute_backward(*arrays), strict=True))
        return {name: made[name] for name in variant_of(operation).due}

    def chunks():
        rows = inputs.to_numpy(inputs.rows)
        sorted_rows, _, source_to_dest = reference.sort_chunks(rows, problem.chunk_sizes, problem.chunk_order)
        if variant == "backward":
            return {"sorted_rows": reference.sort_chunks_backward(rows, source_to_dest)}
        return {"sorted_rows": sorted_rows, "source_to_dest": source_to_dest}

    made = {
        "route": maps,
        "route_permute": lambda: {**maps(), **moved()},
        "permute": moved,
        "moe_permute": lambda: {**maps(), **moved()},
        "permute_quantized": quantized,
        "unpermute": summed,
        "moe_unpermute": lambda: {**summed(), **slot_probs()},
        "unpermute_backward": gradients,
        "sort_chunks": chunks,
        "topk": lambda: dict(zip(("router_weights", "router_ids"), problem.chosen, strict=True)),
    }[operation.op]()
    return {name: inputs.from_numpy(array).clone() for name, array in made.items()}  # tests change them


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.key)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_right_results_pass_and_one_wrong_element_does_not(case, operation):
    import torch

    from benchmarks.kernels.tensor_check import TensorCheck
    from benchmarks.kernels.tensors import TensorInputs

    inputs = TensorInputs(make_problem(case), "cuda")
    outputs = right_outputs(operation, inputs)
    assert difference(operation, TensorCheck(inputs, BITS), outputs) is None
    assert difference(operation, TensorCheck(inputs, FLOAT32_SUMS), outputs) is None
    plan = inputs.problem.plan
    for name, tensor in outputs.items():
        for where, place in places(tuple(tensor.shape), plan).items():
            row = place[1] if operation.variant == "col" and name == "scales" else place[0]
            is_padding = row >= plan.num_rows or plan.row_to_token[row] < 0
            if name in UNFILLED and is_padding and not case.fill:
                continue
            original = tensor[place].clone()
            line = tensor[place[:-1]].view(torch.uint8).reshape((*tensor[place[:-1]].shape, -1))
            line[place[-1], -1] ^= 0x11  # the sign, and a bit of the exponent or of a high byte
            found = difference(operation, TensorCheck(inputs, BITS), outputs)
            assert found is not None, f"a wrong element of {name} passes: {where}"
            assert found.startswith((name, f"{name} after the last row"))
            if tensor.dtype.is_floating_point:
                line[place[-1]] = 0xFF
                for exactness in (BITS, FLOAT32_SUMS):
                    found = difference(operation, TensorCheck(inputs, exactness), outputs)
                    assert found is not None, f"NaN in {name} passes: {where}"
                    assert found.startswith((name, f"{name} after the last row"))
            tensor[place] = original
    assert difference(operation, TensorCheck(inputs, BITS), outputs) is None


def test_poisoned_outputs_do_not_pass():
    from benchmarks.kernels.tensor_check import TensorCheck, poison
    from benchmarks.kernels.tensors import TensorInputs

    inputs = TensorInputs(make_problem(CASES[0]), "cuda")
    check = TensorCheck(inputs, BITS)
    for operation in OPERATIONS:
        outputs = right_outputs(operation, inputs)
        for name, tensor in outputs.items():
            poisoned = tensor.clone()
            poison({name: poisoned})
            found = difference(operation, check, {**outputs, name: poisoned})
            assert found is not None, f"{operation.key} {name}"
            assert found.startswith(name)
    assert difference(OPERATIONS[0], check, {}) is not None
