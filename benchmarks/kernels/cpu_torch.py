# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch on the CPU, as it is measured on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from .cpu_arrays import ArrayInputs
from .device import Body, Implementation, Outputs
from .operators import Library, implementations
from .shapes import Operation
from .tensors import from_numpy, to_numpy

__all__ = ["torch_implementations"]


class _Tensors:
    """Inputs as tensors over the arrays' memory."""

    def __init__(self, inputs: ArrayInputs) -> None:
        self.problem = inputs.problem
        self._arrays = inputs

    def __getattr__(self, name: str) -> torch.Tensor:
        return from_numpy(getattr(self._arrays, name))


def torch_implementations(threads: int) -> list[Implementation]:
    """PyTorch's ways, on as many threads as ours."""
    torch.set_num_threads(threads)  # importing Paddle makes it 1
    return [_on_arrays(implementation) for implementation in implementations(Library.TORCH, torch)]


def _on_arrays(implementation: Implementation) -> Implementation:
    def prepare(operation: Operation, inputs: Any) -> Body:
        body = implementation.prepare(operation, _Tensors(inputs))

        def results(outputs: Outputs) -> Outputs:
            return {name: to_numpy(tensor) for name, tensor in body.results(outputs).items()}

        return body._replace(results=results)

    return Implementation(implementation.name, implementation.operations, prepare)
