# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Maps of other packages, made from a plan, and the maps for moving rows, made from those.

Maps that are read have one slot per expert: slot e of a token is its expert e.
"""

from __future__ import annotations

from .compat.row_maps import (
    check_row_id_map,
    num_rows_of,
    padding_offsets,
    plan_to_row_id_map,
    read_chunk_map,
    read_index_map,
    read_row_id_map,
)
from .functional import move_rows
from .routing import row_probs, slot_probs

__all__ = [
    "check_row_id_map",
    "move_rows",
    "num_rows_of",
    "padding_offsets",
    "plan_to_row_id_map",
    "read_chunk_map",
    "read_index_map",
    "read_row_id_map",
    "row_probs",
    "slot_probs",
]
