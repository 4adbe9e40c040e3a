# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts for PaddlePaddle, from moving tokens to their experts up to the whole layer.

Importing the package registers the compiled operators with Paddle, so that programs saved with them load; it compiles
nothing and imports no Triton. If Paddle or the library is missing or too old, the import still works: the first call of
a function, and `explain()`, report the problem. Submodules are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import _build_check
from ._version import __version__

_SUBMODULES = (
    *("compat", "dispatch", "expert_parallel", "functional", "gemm", "indexed", "integrations", "masked", "nn"),
    *("quantization", "reference", "routing", "testing"),
)


def __getattr__(name: str) -> Any:
    problem = _build_check.paddle_problem()
    if name in _SUBMODULES and (problem is None or name == "reference"):
        return importlib.import_module(f".{name}", __name__)
    if problem is None or name not in (*__all__, *_SUBMODULES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(problem)


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})


if _build_check.paddle_problem() is None:
    from .backends import register_operators, use_backend
    from .compat.paddle import patch_paddle, patched_paddle, unpatch_paddle
    from .explaining import explain
    from .functional import moe_permute, moe_unpermute, permute, sort_chunks, unpermute
    from .mlp import Float8Matrices, discard_dw, flush_dw, moe_mlp
    from .quantization import QuantizedMatrices, dequantize_1x128, quantize_1x128, quantize_experts, quantized_experts
    from .routing import Plan, route

    register_operators()

__all__ = [
    "Float8Matrices",
    "Plan",
    "QuantizedMatrices",
    "__version__",
    "dequantize_1x128",
    "discard_dw",
    "explain",
    "flush_dw",
    "moe_mlp",
    "moe_permute",
    "moe_unpermute",
    "patch_paddle",
    "patched_paddle",
    "permute",
    "quantize_1x128",
    "quantize_experts",
    "quantized_experts",
    "route",
    "sort_chunks",
    "unpatch_paddle",
    "unpermute",
    "use_backend",
]
