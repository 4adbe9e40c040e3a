# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: with a static buffer the operators are captured once and replayed for any routing."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.testing.routing import all_to_one, uniform

from ..reference.cases import assert_same_bits, ordinary_floats
from .binding import Core
from .operators.permute import PermuteParams
from .operators.route import RouteParams
from .operators.unpermute import UnpermuteParams
from .structs import Params

pytestmark = pytest.mark.cuda_only

T, K, E, H, A = 130, 4, 9, 72, 8
N = 700  # fewer rows than an unlucky routing needs: some are dropped
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def fill(params: Params, **tensors: object) -> Params:
    """Point a struct at device tensors."""
    params.point_at(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
    return params


def test_replay_follows_the_routing_of_the_moment(core: Core) -> None:
    import torch

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype, device="cuda")

    rng = np.random.default_rng(1)
    ids, probs = empty(T, K), empty(T, K, dtype=torch.float32)
    x, rows, out = (empty(size, H, dtype=torch.bfloat16) for size in (T, N, T))
    maps = {name: empty(T, K) for name in ("slot_to_row", "token_rows")}
    row_maps = {name: empty(N) for name in ("row_to_token", "row_to_slot", "row_to_expert")}
    row_probs, overflow = empty(N, dtype=torch.float32), empty()
    route_params = fill(
        RouteParams(num_tokens=T, topk=K, num_experts=E, padding_alignment=A, num_rows=N),
        routing=ids,
        probs=probs,
        row_probs=row_probs,
        overflow=overflow,
        routed_per_expert=empty(E),
        **maps,
        **row_maps,
    )
    size = core.workspace_bytes("route", route_params)
    workspace = empty(size, dtype=torch.uint8)
    fill(route_params, workspace=workspace)
    route_params.workspace_bytes = size
    permute_params = fill(
        PermuteParams(num_tokens=T, topk=K, num_rows=N, hidden=H, x_row_stride=H, dtype=2, fill=3),
        x=x,
        slot_to_row=maps["slot_to_row"],
        row_to_token=row_maps["row_to_token"],
        rows=rows,
    )
    unpermute_params = fill(
        UnpermuteParams(
            num_tokens=T,
            max_rows_per_token=K,
            num_rows=N,
            num_weights=N,
            hidden=H,
            rows_row_stride=H,
            out_row_stride=H,
            dtype=2,
        ),
        rows=rows,
        token_rows=maps["token_rows"],
        weights=row_probs,
        out=out,
    )

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for operator, params in (
            ("route_count", route_params),
            ("route", route_params),
            ("permute", permute_params),
            ("unpermute", unpermute_params),
        ):
            assert core.entry(operator)(ctypes.byref(params), stream) == 0, core.last_error()

    def host(tensor: torch.Tensor) -> NDArray:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).cpu().numpy().view(BFLOAT16)
        return tensor.cpu().numpy()

    ids.fill_(-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    dropped = []
    for routing in (uniform(rng, T, K, E), all_to_one(rng, T, K, E), np.full((T, K), -1), uniform(rng, T, K, E)):
        host_ids = routing.astype(np.int32)
        host_x = ordinary_floats((T, H), BFLOAT16, seed=len(dropped))
        host_probs = rng.random((T, K), np.float32)
        ids.copy_(torch.from_numpy(host_ids))
        probs.copy_(torch.from_numpy(host_probs))
        x.view(torch.int16).copy_(torch.from_numpy(host_x.view(np.int16)))
        graph.replay()
        torch.cuda.synchronize()
        plan = reference.route(host_ids, host_probs, num_experts=E, padding_alignment=A, buffer_size=N, validate=False)
        for name in (
            "slot_to_row",
            "token_rows",
            "row_to_token",
            "row_to_slot",
            "row_to_expert",
            "row_probs",
            "overflow",
        ):
            tensor = {**maps, **row_maps, "row_probs": row_probs, "overflow": overflow}[name]
            assert_same_bits(host(tensor), getattr(plan, name))
        expected_rows, _ = reference.permute(host_x, plan)
        assert_same_bits(host(rows), expected_rows)
        assert_same_bits(host(out), reference.unpermute(expected_rows, plan, plan.row_probs))
        dropped.append(int(plan.overflow))
    assert dropped[0] == 0
