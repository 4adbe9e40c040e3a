# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""quantize where there are no slots: all rows are padding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from .binding import Core
from .operators.quantize import quantize
from .structs import ScaleLayout

ROWS, HIDDEN = 13, 640


@pytest.mark.parametrize("layout", list(ScaleLayout))
@pytest.mark.parametrize("ue8m0", [False, True], ids=["float32", "ue8m0"])
@pytest.mark.parametrize(
    ("tokens", "topk"), [(0, None), (0, 2), (5, 0)], ids=["no tokens", "no tokens, a map", "no slots"]
)
def test_without_slots_all_rows_are_padding(
    core: Core, tokens: int, topk: int | None, ue8m0: bool, layout: ScaleLayout
) -> None:
    """With a workspace, too, by way of which CUDA may write column-major scales."""
    x = np.ones((tokens, HIDDEN), ml_dtypes.bfloat16)
    slot_to_row = None if topk is None else np.empty((tokens, topk), np.int32)
    row_to_token = np.full(ROWS, -1, np.int32)
    workspace = np.zeros((8, HIDDEN // 128), np.float32)
    codes, scales = quantize(core, x, slot_to_row, row_to_token, layout=layout, ue8m0=ue8m0, workspace=workspace)
    assert not codes.view(np.uint8).any()
    assert not scales.any()
