# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Operators of ERNIE and PaddleFleet, and layers, with one tensor on another device than the others."""

from __future__ import annotations

import functools
from typing import Any

import paddle
import pytest

from paddle_moe_ops import route, use_backend
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import (
    gshard,
    incubate_auto,
    incubate_backward,
    incubate_dispatch,
    incubate_gemm,
    incubate_quant,
    incubate_routing,
    paddlefleet,
)
from paddle_moe_ops.nn import SwiGLUExperts
from tests.ops.fastdeploy_calls import FASTDEPLOY_CALLS
from tests.ops.further_calls import OF_PADDLEFLEET

from .processes import run

pytestmark = pytest.mark.cpu_only

T, H, E, K = 5, 4, 3, 2


def arguments() -> dict[Any, dict[str, Any]]:
    """Arguments of each function, on the host."""
    ones, ids = paddle.ones, paddle.zeros([T, K], "int32")
    gate = {"x": ones([T, H]), "gate_logits": ones([T, E]), "corr_bias": ones([E]), "k": K, "capacity": 4}
    partial = {"x": ones([T, H]), "combine_weights": ones([T, K]), "expert_id": ids, "k": K, "capacity": 4}
    partial |= {"num_experts": E, "use_pad": True, "expert_start_index": 0, "expert_end_index": E}
    combine = {"x": ones([T * K, H]), "combine_weights": ones([T, K]), "scatter_index": ids}
    loss = {"gate_prob": ones([T, E]), "dispatch_mask": ones([E], "int64"), "tokens_mask": ones([T])}
    loss |= {"dispatch_tokens_mask": ones([T], "bool"), "num_experts": E, "use_group": False, "moe_k": K}
    rowmap = paddle.to_tensor([[token, -1, -1] for token in range(T)], "int32")
    gather = {"x": ones([T, H]), "x_scale": ones([T, 1]), "zipped_expertwise_rowmap": rowmap}
    part = {"x": ones([T, H]), "zipped_expertwise_rowmap": rowmap, "num_experts": E, "total_unzipped_rows": T}
    zipped = {"x_zipped": ones([T, H]), "x_unzipped": ones([T, H]), "idx_unzipped": ids[:, 0], "zipped_rows": T}
    probs = {"unzipped_prob": [ones([T]), ones([0]), ones([0])], "zipped_expertwise_rowmap": rowmap}
    slots = {"combine_weights": ones([T, K]), "scatter_index": ids.transpose([1, 0]), "expert_id": ids}
    slots |= {"combine_weights_grad": ones([T, K]), "k": K, "capacity": 4}
    kept = {"combine_weights_out": ones([T, K]), "scatter_index": slots["scatter_index"], "y_grad": ones([E * 4, H])}
    kept |= {"combine_weights_out_grad": ones([T, K]), "k": K, "capacity": 4, "use_pad": True}
    kept |= dict.fromkeys(("scatter_index_rev", "expert_offset", "expert_nums_local"))
    counts = paddle.full([1], T, "int64")
    product = {"lhs": ones([T, H]), "rhs": ones([T, 3]), "batch_sizes": [2, 3], "trans_lhs": True}
    layer = functools.partial(SwiGLUExperts(E, H, 2), plan=route(ids[:, :1], num_experts=E), combine=True)
    return {
        functools.update_wrapper(layer, SwiGLUExperts): {"rows": ones([T, H])},
        incubate_dispatch.moe_gate_dispatch: {**gate, "use_pad": True},
        incubate_dispatch.moe_gate_dispatch_permute: {**gate, "world_size": 1},
        incubate_dispatch.moe_gate_dispatch_partial_nosoftmaxtopk: {**partial, "reverse_token_drop": False},
        incubate_dispatch.moe_combine: combine,
        incubate_dispatch.moe_combine_grad: {**combine, "grad_y": ones([T, H])},
        incubate_routing.cal_aux_loss: {**loss, "clip_min": 1.0},
        incubate_gemm.batched_gemm: product,
        paddlefleet.tokens_unzip_gather: {
            **gather,
            "expert_id": 0,
            "tokens_per_expert": [T, 0, 0],
            "padding_multiplex": 1,
        },
        paddlefleet.tokens_unzip_slice: {**part, "start_idx": 0, "end_idx": T},
        paddlefleet.tokens_zip_unique_add: zipped,
        paddlefleet.tokens_zip_prob: {**probs, "dispatched_indices": ids},
        incubate_quant.moe_gate_dispatch_and_quant: {
            **gate,
            "x": ones([T, 128]).astype("bfloat16"),
            "use_pad": True,
            "use_pow2_scale": True,
        },
        incubate_backward.moe_gate_dispatch_grad: {**slots, "y_grad": ones([E * 4, H]), "use_pad": True},
        incubate_backward.moe_gate_dispatch_permute_grad: {**slots, "y_grad": ones([E, 1, 4, H]), "world_size": 1},
        incubate_backward.moe_gate_dispatch_partial_nosoftmaxtopk_grad: {
            **kept,
            "expert_start_index": 0,
            "expert_end_index": E,
        },
        incubate_backward.moe_combine_no_weight_grad: {
            "x": ones([T * K, H]),
            "combine_weight": ones([T, K]),
            "scatter_index": ids,
            "y_grad": ones([T, H]),
        },
        incubate_auto.moe_gate_dispatch_auto: {**gate, "use_pad": True},
        incubate_auto.moe_gate_dispatch_auto_grad: {**slots, "y_grad": ones([E, 4, H]), "use_pad": True},
        incubate_auto.moe_combine_auto: combine,
        incubate_auto.moe_combine_auto_grad: {**combine, "y_grad": ones([T, H])},
        gshard.limit_by_capacity: {"expert_count": counts, "capacity": counts * 2, "n_worker": 1},
        gshard.prune_gate_by_capacity: {"gate_idx": ids, "expert_count": counts, "n_expert": 1, "n_worker": 1},
        gshard.random_routing: {"prob": ones([T]), "topk_value": ones([T, 2]), "topk_idx": ids},
    }


def on_another_device() -> list[str]:
    """The names of operators of FastDeploy and PaddleFleet whose results have another place, or other bits."""
    device, wrong = paddle.get_device(), []
    place = paddle.set_device(device)
    paddle.set_device("cpu")
    with use_backend("reference"):
        for call in (*FASTDEPLOY_CALLS, *OF_PADDLEFLEET):
            pairs = zip(results(call.run(place)), results(call.run(paddle.CPUPlace())), strict=True)
            if not all(
                got.place == place and to_numpy(got).tobytes() == to_numpy(on_cpu).tobytes() for got, on_cpu in pairs
            ):
                wrong.append(call.name)
    paddle.set_device(device)
    return wrong


def errors_without_operators() -> list[str]:
    """The errors of FastDeploy's operators on a device for which the library has none."""
    place, found = paddle.set_device(paddle.get_device()), []
    for call in FASTDEPLOY_CALLS:
        try:
            call.run(place)
        except ValueError as error:
            found.append(f"{call.function} says {error}")
    return found


def results(value: Any) -> list[paddle.Tensor]:
    value = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in value if isinstance(each, paddle.Tensor)]


def of_two_devices() -> tuple[str, str, list[tuple[str, str, str]]]:
    """The devices, and the error for each function with each of its tensors on the device."""
    device, found = paddle.get_device(), []
    paddle.set_device("cpu")
    for function, given in arguments().items():
        function(**given)
        for name, value in given.items():
            if isinstance(value, paddle.Tensor):
                try:
                    function(**{**given, name: value.to(device)})
                    error = "nothing was raised"
                except ValueError as raised:
                    error = str(raised)
                found.append((function.__name__, name, error))
    places = [str(paddle.ones([1]).place), str(paddle.ones([1]).to(device).place)]
    paddle.set_device(device)
    return *places, found


def test_tensors_on_several_devices_are_named():
    ((host, device, errors),) = run(of_two_devices, 1, "stub")
    first: dict[str, str] = {}
    for function, argument, error in errors:
        if function not in first:  # the next one is compared with it
            first[function] = argument
            assert error.startswith(f"{function}: ")
            assert error.endswith(f" must be on the device of {argument}, {device}, but got {host}")
        else:
            expected = f"on the device of {first[function]}, {host}, but got {device}"
            assert error == f"{function}: {argument} must be {expected}"


def test_operators_stay_on_the_device_of_their_arguments():
    assert run(on_another_device, 1, "stub") == [[]]


def test_fastdeploys_operators_name_themselves_where_the_library_has_none():
    ((*errors,),) = run(errors_without_operators, 1, "stub")
    text = "every tensor must be in CPU memory (this build has no GPU operators)"
    names = [error.partition(" ")[0] for error in errors]
    assert errors == [f"{name} says {name}: {text}" for name in names]
    assert {"moe_expert_dispatch", "noaux_tc", "moe_expert_reduce"} <= set(names)
