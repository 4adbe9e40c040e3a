# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA entries of the C core, by ctypes."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from .binding import OPERATORS, Core

__all__ = ["CudaEntries"]


class CudaEntries(Core):
    """The core's library with its CUDA entries: they take device addresses and a stream."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        for operator in OPERATORS:
            self._declare(f"pmo_{operator}_cuda", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._declare("pmo_route_permute_cuda", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        for operator in ("route", "clean_rowmap", "sort_chunks", "quantize", "topk"):
            self._declare(f"pmo_{operator}_cuda_workspace_bytes", ctypes.c_int64, ctypes.c_void_p)

    def entry(self, operator: str) -> Any:
        return getattr(self.library, f"pmo_{operator}_cuda")
