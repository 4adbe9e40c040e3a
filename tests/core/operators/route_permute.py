# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`route_permute`: routing and the moving of rows in one call, with the structs of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..guards import guarded_outputs
from ..structs import Fill
from .permute import permute_params
from .route import ROUTE_OUTPUTS, guarded_route_params

if TYPE_CHECKING:
    from ..binding import Core
    from ..cases import Problem


def route_permute(
    core: Core,
    problem: Problem,
    x: NDArray | None = None,
    scale: NDArray | None = None,
    *,
    outputs: tuple[str, ...] = ROUTE_OUTPUTS,
    fill: int = Fill.ALL,
    odd_outputs: bool = False,
    **fields: Any,
) -> tuple[dict[str, NDArray], NDArray | None, NDArray | None]:
    """Counts and maps and, if there is an x, its moved rows and scales."""
    rows = scales = move = None
    with guarded_outputs() as output:
        params, maps = guarded_route_params(core, output, problem, outputs, **fields)
        if x is not None:
            num_rows = problem.plan.num_rows
            rows = output((num_rows, x.shape[1]), x.dtype, int(odd_outputs))
            scales = None if scale is None else output((num_rows, scale.shape[1]), scale.dtype)
            move = permute_params(x, maps["slot_to_row"], maps["row_to_token"], rows, scale, scales, fill=fill)
        core.run("route_permute", params, move)
    return maps, rows, scales
