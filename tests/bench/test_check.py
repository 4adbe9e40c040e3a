# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The check of results notices a single wrong bit in any output; on the GPU machine, where PyTorch is."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kernels.device import BITS, FLOAT32_SUMS
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.shapes import OPERATIONS, Case, Shape
from paddle_moe_ops import reference

from .fake_device import places

pytestmark = pytest.mark.cuda_only

CASES = [
    Case(Shape("check", 300, 4, 9, 264), routing, alignment, fill)
    for routing in ("uniform", "half_unassigned")
    for alignment, fill in ((1, True), (8, True), (8, False))
]


# What padding rows of these hold is free where they are not filled.
UNFILLED = ("rows", "row_scales", "codes", "scales")


def to_tensor(array):
    """A tensor of an array of the oracle, whose narrow types NumPy and PyTorch do not share."""
    import torch

    narrow = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    array = np.array(array, order="C")  # a copy: tests change it
    if array.dtype.name in narrow:
        return torch.from_numpy(array.view(np.uint8)).view(narrow[array.dtype.name])
    return torch.from_numpy(array)


def right_outputs(operation, inputs):
    """What the oracle gives for an operation, as tensors."""
    from benchmarks.kernels.tensors import to_numpy

    problem = inputs.problem
    plan = problem.plan
    weights = None if operation.variant == "plain" else plan.row_probs
    if operation.op in ("route", "moe_permute", "route_permute"):
        names = ("slot_to_row", "token_rows", "row_to_token", "row_probs", "expert_offsets")
        outputs = {name: getattr(plan, name) for name in names}
        outputs["rowmap"] = problem.rowmap
    else:
        outputs = {}
    if "permute:" in operation.key and not operation.op.startswith("unpermute"):
        fp8 = operation.variant == "fp8"
        x = to_numpy(inputs.x_fp8 if fp8 else inputs.x)
        rows, scales = reference.permute(x, plan, to_numpy(inputs.scale) if fp8 else None)
        outputs |= {"rows": rows} if scales is None else {"rows": rows, "row_scales": scales}
    elif operation.op in ("unpermute", "moe_unpermute"):
        outputs["slot_probs"] = np.where(plan.slot_to_row >= 0, problem.probs, np.float32(0))
        outputs["out"] = reference.unpermute(to_numpy(inputs.rows), plan, weights)
    elif operation.op == "unpermute_backward":
        gradients = reference.unpermute_backward(to_numpy(inputs.d_out), plan, to_numpy(inputs.rows), weights)
        chosen = {"plain": (0,), "weighted": (0, 1), "dx": (0,), "dprob": (1,)}[operation.variant]
        outputs = {("d_rows", "d_weights")[index]: gradients[index] for index in chosen}
    elif operation.op == "topk":
        outputs = dict(zip(("router_weights", "router_ids"), problem.chosen, strict=True))
    elif operation.op == "sort_chunks":
        arrays = to_numpy(inputs.rows), problem.chunk_sizes, problem.chunk_order
        sorted_rows, _, source_to_dest = reference.sort_chunks(*arrays)
        outputs = {"sorted_rows": sorted_rows, "source_to_dest": source_to_dest}
        if operation.variant == "backward":
            outputs = {"sorted_rows": reference.sort_chunks_backward(arrays[0], source_to_dest)}
    return {name: to_tensor(array).to(inputs.device) for name, array in outputs.items()}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.key)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_right_results_pass_and_one_wrong_element_does_not(case, operation):
    import torch

    from benchmarks.kernels.check import difference
    from benchmarks.kernels.tensors import TensorInputs

    inputs = TensorInputs(make_problem(case), "cuda")
    outputs = right_outputs(operation, inputs)
    assert difference(operation, inputs, outputs, BITS) is None
    assert difference(operation, inputs, outputs, FLOAT32_SUMS) is None
    plan = inputs.problem.plan
    for name, tensor in outputs.items():
        for where, place in places(tuple(tensor.shape), plan).items():
            if where == "padding" and not case.fill and name in UNFILLED:
                continue
            original = tensor[place].clone()
            line = tensor[place[:-1]].view(torch.uint8).reshape((*tensor[place[:-1]].shape, -1))
            line[place[-1], -1] ^= 0x11  # the sign, and a bit of the exponent or of a high byte
            found = difference(operation, inputs, outputs, BITS)
            assert found is not None, f"a wrong element of {name} passes: {where}"
            assert found.startswith((name, f"{name} behind the last row"))
            if tensor.dtype.is_floating_point:
                line[place[-1]] = 0xFF
                for exactness in (BITS, FLOAT32_SUMS):
                    found = difference(operation, inputs, outputs, exactness)
                    assert found is not None, f"NaN in {name} passes: {where}"
                    assert found.startswith((name, f"{name} behind the last row"))
            tensor[place] = original
    assert difference(operation, inputs, outputs, BITS) is None


def test_poisoned_outputs_do_not_pass():
    from benchmarks.kernels.check import difference, poison
    from benchmarks.kernels.tensors import TensorInputs

    inputs = TensorInputs(make_problem(CASES[0]), "cuda")
    for operation in OPERATIONS:
        outputs = right_outputs(operation, inputs)
        poison(outputs)
        for name, tensor in outputs.items():
            assert difference(operation, inputs, {name: tensor}, BITS) is not None, f"{operation.key} {name}"
    assert difference(OPERATIONS[0], inputs, {}, BITS) is not None
