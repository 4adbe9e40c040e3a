# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Counts calls of the package's Python functions, which are most of the host time of a call on few tokens."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import paddle_moe_ops

_PACKAGE = str(Path(paddle_moe_ops.__file__).parent)


def python_calls(function: Callable[[], Any]) -> collections.Counter[str]:
    """Call a function, and count the calls in each file of the package; generators count once for each value."""
    files: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_PACKAGE):
            files[file.removeprefix(_PACKAGE + "/")] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files
