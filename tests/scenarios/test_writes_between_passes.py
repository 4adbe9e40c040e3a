# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that are written in place between the passes: an error, or the gradients of a program without the write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import Tensor

from paddle_moe_ops import (
    Float8Matrices,
    discard_dw,
    flush_dw,
    moe_mlp,
    moe_permute,
    moe_unpermute,
    permute,
    quantize_experts,
    route,
    sort_chunks,
    unpermute,
)
from paddle_moe_ops.gemm import grouped_gemm
from paddle_moe_ops.routing import Plan, calculate_topk
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.test_autograd import FROM_BACKWARD

pytestmark = pytest.mark.usefixtures("place", "backend")

T, H, I, E, K = 7, 16, 8, 4, 2  # noqa: E741
FLOAT8 = {"compute": "fp8_1x128"}
MAPS_OF_LAYER = {"slot_to_row", "token_rows", "row_to_token", "tokens_per_expert", "expert_offsets"}
MAPS = ["slot_to_row", "token_rows", "row_to_token", "row_to_slot", "row_to_expert", "tokens_per_expert"]
MAPS += ["expert_offsets", "routed_per_expert", "overflow"]


def leaf(*shape: int) -> Tensor:
    made = paddle.randn(shape) / 4
    made.stop_gradient = False
    return made


def plan_of(tensors: dict[str, Any], probs: Tensor | None = None) -> Plan:
    """The plan of ids; writers find its maps among the tensors."""
    plan = route(tensors["ids"], probs, num_experts=E)
    tensors.update({name: getattr(plan, name) for name in MAPS})
    return plan


def layer(
    lists: bool = False,
    format: str | None = None,
    weights: str = "slot",
    keeps: bool = False,
    has_bias: bool = False,
    **options: Any,
) -> Callable:
    def call(tensors: dict[str, Any]) -> Tensor:
        plan, matrices = plan_of(tensors, tensors["probs"]), [tensors["gate_up"], tensors["down"]]
        if has_bias:
            options["gate_up_bias"] = tensors["bias"] = leaf(E, 2 * I)
        if keeps:
            options["float8_matrices"] = Float8Matrices()
        if format is not None:
            matrices = list(quantize_experts(*matrices, format=format))
            tensors.update({"codes": matrices[0].codes, "scales": matrices[1].scales})
        elif lists:
            matrices = [[leaf(*each.shape[1:]) for _ in range(E)] for each in matrices]
            tensors["matrix"] = matrices[1][E - 1]
        if weights == "row":
            tensors["row_probs"] = plan.row_probs
            return moe_mlp(tensors["x"], plan, plan.row_probs, *matrices, weights_by="row", **options)
        probs = tensors["probs"] if weights == "slot" else None
        return moe_mlp(tensors["x"], plan, probs, *matrices, **options)

    return call


def gemms(tensors: dict[str, Any]) -> Tensor:
    plan = plan_of(tensors)
    rows = grouped_gemm(tensors["x"], tensors["gate_up"], plan=plan, permute_x=True, transpose=False)
    tensors["rows"] = rows = rows[:, :I] * 1.0
    return grouped_gemm(rows, tensors["down"], plan=plan, transpose=False, topk_weights=tensors["probs"])


def moved(tensors: dict[str, Any]) -> Tensor:
    plan = plan_of(tensors, tensors["probs"])
    tensors["rows"] = permute(tensors["x"], plan)[0] * 1.0
    return unpermute(tensors["rows"], plan, tensors["probs"]) + plan.row_probs.sum()


def moved_like_paddle(tensors: dict[str, Any]) -> Tensor:
    arguments = tensors["x"], None, tensors["ids"], tensors["probs"], E, None, 1
    rows, tensors["rowmap"], tensors["row_probs"], _ = moe_permute(*arguments)
    tensors["rows"] = rows * 1.0
    others = tensors["rowmap"], tensors["ids"], tensors["row_probs"], T, E
    out, of_slots = moe_unpermute(tensors["rows"], *others, using_weighted_combine=True)
    return out + of_slots.sum()


def sorted_chunks(tensors: dict[str, Any]) -> Tensor:
    tensors["sizes"], tensors["order"] = paddle.to_tensor([3, 0, 4]), paddle.to_tensor([2, 0, 1])
    out, probs, tensors["source_to_dest"] = sort_chunks(
        tensors["x"], tensors["sizes"], tensors["order"], tensors["probs"][:, 0]
    )
    return out + probs.unsqueeze(-1)


def chosen(tensors: dict[str, Any]) -> Tensor:
    tensors["gating"] = tensors["x"] * 1.0
    tensors["weights"], tensors["experts"] = calculate_topk(tensors["gating"], 2, use_sigmoid=True, renormalize=True)
    return tensors["weights"] * 1.0


CALLS: dict[str, Callable] = {
    "layer": layer(),
    "by row": layer(weights="row"),
    "plain sum": layer(weights="none"),
    "recomputes H": layer(keep="x"),
    "lists": layer(lists=True),
    "accumulates": layer(accumulate=True),
    "defers": layer(defer_dw=True),
    "defers, recomputes H": layer(defer_dw=True, keep="x"),
    "defers lists": layer(lists=True, defer_dw=True),
    "defers, accumulates": layer(defer_dw=True, accumulate=True),
    "float8": layer(**FLOAT8),
    "float8 by row": layer(weights="row", **FLOAT8),
    "float8, plain sum": layer(weights="none", **FLOAT8),
    "float8, recomputes H": layer(keep="x", **FLOAT8),
    "float8, codes of H": layer(keep="h_fp8", **FLOAT8),
    "float8, lists": layer(lists=True, **FLOAT8),
    "float8, accumulates": layer(accumulate=True, **FLOAT8),
    "float8, defers": layer(defer_dw=True, **FLOAT8),
    "float8, kept matrices": layer(keeps=True, **FLOAT8),
    "float8 wgrads": layer(compute="fp8_1x128_wgrad"),
    "float8 wgrads, defers": layer(compute="fp8_1x128_wgrad", defer_dw=True),
    "activation": layer(activation="geglu"),
    "activation, defers": layer(activation="geglu", defer_dw=True),
    "activation, float8": layer(activation="geglu", **FLOAT8),
    "bias": layer(has_bias=True),
    "int8": layer(format="int8"),
    "float8 codes": layer(format="fp8_128x128"),
    "int4, activation": layer(format="int4_1x128", activation="geglu"),
    "grouped GEMMs": gemms,
    "rows": moved,
    "rows of Paddle": moved_like_paddle,
    "chunks": sorted_chunks,
    "router": chosen,
}
# On a CPU other operators run these layers one after the other.
COMPOSED = {"lists", "accumulates", "defers lists", "defers, accumulates", "bias", "int4, activation"}
COMPOSED |= {name for name in CALLS if name.startswith("activation")}
LAYERS = [name for name, call in CALLS.items() if call.__qualname__.startswith("layer")]


class Program:
    def __init__(self, call: Callable) -> None:
        paddle.seed(11)
        self.leaves = {"x": leaf(T, H), "probs": leaf(T, K), "gate_up": leaf(E, H, 2 * I), "down": leaf(E, I, H)}
        for name in ("gate_up", "down"):
            self.leaves[name].main_grad = None
        ids = paddle.to_tensor([[t % E, -1 if t == 2 else (t * 2 + 1) % E] for t in range(T)])
        self.tensors = {**self.leaves, "ids": paddle.where(ids == ids[:, :1], ids * 0 - 1, ids)}
        self.tensors["x"], self.tensors["probs"] = (self.leaves[name] * 1.0 for name in ("x", "probs"))
        self.tensors["ids"][:, 0] = paddle.arange(T) % E
        self.out = call(self.tensors)

    def backward(self, written: str = "") -> list[Tensor | None]:
        """Gradients of the leaves, of which some calls have none; a tensor is written before the deferred ones."""
        self.out.backward(paddle.linspace(-1, 1, self.out.size).reshape(self.out.shape))
        if written:
            self.write(written)
        flush_dw()
        return [
            each.grad if getattr(each, "main_grad", None) is None else each.main_grad for each in self.leaves.values()
        ]

    def write(self, name: str) -> None:
        with paddle.no_grad():
            self.tensors[name].detach().zero_()  # an alias, since leaves refuse it


@pytest.fixture(autouse=True)
def _clean():
    yield
    discard_dw()


@pytest.mark.parametrize("name", CALLS)
def test_a_write_raises_or_changes_no_gradient(name):
    program = Program(CALLS[name])
    due, raised = program.backward(), set()
    assert due[0] is not None
    for written in program.tensors:
        program = Program(CALLS[name])
        program.write(written)
        try:
            made = program.backward()
        except FROM_BACKWARD as error:
            if "in place" not in str(error) and "inplace" not in str(error):
                raise
            raised.add(written)
            discard_dw()
            continue
        for number, pair in enumerate(zip(made, due, strict=True)):
            assert (pair[0] is None) == (pair[1] is None)
            if pair[0] is not None:
                assert_bits_equal(*pair, what=f"gradient {number} after a write to {written}")
    if name in LAYERS and name not in COMPOSED:
        assert raised >= MAPS_OF_LAYER


@pytest.mark.parametrize("written", sorted(MAPS_OF_LAYER))
@pytest.mark.parametrize("options", [{}, FLOAT8], ids=["operator", "float8"])
def test_deferred_gradients_after_a_write_to_the_plan_raise(options, written, backend):
    call = layer(defer_dw=True, **options)
    if backend == "reference" and paddle.get_device() != "cpu":  # it has copies on the host
        for made, due in zip(Program(call).backward(written), Program(call).backward(), strict=True):
            assert_bits_equal(made, due)
        return
    with pytest.raises(RuntimeError, match="changed in place before flush_dw"):
        Program(call).backward(written)
