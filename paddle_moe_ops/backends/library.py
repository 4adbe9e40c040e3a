# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Where the compiled library is, for calls of its C functions."""

from __future__ import annotations

import ctypes

from .. import _build_check

__all__ = ["LIBRARY", "loaded_library"]

LIBRARY = _build_check.library()


def loaded_library() -> ctypes.CDLL | None:
    """The library, or None where it is missing, was built for another Paddle or does not load."""
    if not LIBRARY.exists() or _build_check.mismatch() is not None:
        return None
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
