# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Other libraries on the CPU: NumPy's take, and what peers.py does with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cpu_arrays import BFLOAT16, FLOAT8, ArrayInputs
from .device import Body, Implementation, Outputs, Unsupported
from .shapes import Operation

__all__ = ["numpy_implementation", "torch_implementation"]

_BITS = {BFLOAT16: np.int16, FLOAT8: np.int8}


def numpy_implementation() -> Implementation:
    """ "numpy take": rows by index into a new array."""
    return Implementation(
        "numpy take", ("permute:*", "route_permute:*", "unpermute_backward:plain", "sort_chunks:*"), _take
    )


def _take(operation: Operation, inputs: ArrayInputs) -> Body:
    plan = inputs.problem.plan
    if operation.op == "sort_chunks":
        problem = inputs.problem
        index = problem.dest_to_source if operation.variant == "forward" else problem.source_to_dest
        return Body(lambda: {"sorted_rows": np.take(inputs.rows, index, axis=0)}, note="take by a given map")
    if plan.num_rows != inputs.problem.routed_rows:
        raise Unsupported("taking leaves no padding rows")
    sources = {"rows": inputs.x}
    if operation.variant == "fp8":
        sources = {"rows": inputs.x_fp8, "row_scales": inputs.scale}
    if operation.op == "unpermute_backward":
        sources = {"d_rows": inputs.d_out}
    ids, probs = inputs.problem.ids.reshape(-1), inputs.problem.probs.reshape(-1)

    def run() -> Outputs:
        return {name: np.take(source, plan.row_to_token, axis=0) for name, source in sources.items()}

    def run_routed() -> Outputs:
        order = np.argsort(np.where(ids < 0, plan.num_experts, ids), kind="stable")[: plan.num_rows]
        moved = {name: np.take(source, order // plan.topk, axis=0) for name, source in sources.items()}
        return {**moved, "row_probs": np.take(probs, order)}

    if operation.op == "route_permute":
        return Body(run_routed, note="argsort and take; no map from slots to rows, no counts")
    return Body(run)


class _TorchInputs:
    """The attributes of `tensors.TensorInputs`, as PyTorch tensors over the arrays' memory."""

    device = "cpu"

    def __init__(self, inputs: ArrayInputs) -> None:
        self.problem = inputs.problem
        self._places = (inputs, inputs.problem, inputs.problem.plan)

    def __getattr__(self, name: str) -> Any:
        for place in self._places:
            if hasattr(place, name):
                return _as_torch(getattr(place, name))
        raise AttributeError(name)


def _as_torch(array: NDArray) -> Any:
    import torch

    tensor = torch.from_numpy(array.view(_BITS.get(array.dtype, array.dtype)))
    views = {BFLOAT16: torch.bfloat16, FLOAT8: torch.float8_e4m3fn}
    return tensor.view(views[array.dtype]) if array.dtype in views else tensor


def torch_implementation(threads: int) -> Implementation:
    """ "torch gather", as it runs on a GPU, on as many threads as ours.

    Raises:
        ImportError: PyTorch is not there.
    """
    import torch

    from .peers import torch_implementations
    from .tensors import to_numpy

    torch.set_num_threads(threads)  # importing Paddle makes it 1
    gather = torch_implementations()[0]

    def prepare(operation: Operation, inputs: ArrayInputs) -> Body:
        body = gather.prepare(operation, _TorchInputs(inputs))

        def results(outputs: Outputs) -> Outputs:
            return {name: to_numpy(tensor) for name, tensor in body.results(outputs).items()}

        return body._replace(results=results)

    return Implementation(gather.name, gather.operations, prepare)
