# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Token permutation operators of Mixture-of-Experts models for PaddlePaddle.

Importing the package compiles nothing, loads no compiled library and imports no Triton; the first call does.
"""

from __future__ import annotations

from ._version import __version__

try:
    import paddle  # noqa: F401
except ImportError as error:
    raise ImportError(
        "paddle_moe_ops needs PaddlePaddle: pip install paddlepaddle (CPU) or paddlepaddle-gpu (NVIDIA GPUs)"
    ) from error

from .backends import explain, use_backend
from .functional import moe_permute, moe_unpermute, permute, unpermute
from .routing import Plan, route

__all__ = [
    "Plan",
    "__version__",
    "explain",
    "moe_permute",
    "moe_unpermute",
    "permute",
    "route",
    "unpermute",
    "use_backend",
]
