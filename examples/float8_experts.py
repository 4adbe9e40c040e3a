# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Trains SwiGLU experts on float8 rows, with a router, and compares the run with the same one in float32.

    python examples/float8_experts.py

Tokens become float8 on their way to the experts. Between the passes the codes and their scales are kept, about a
quarter of the bytes of float32 rows. The products run in float32 here, since a CPU has none of float8: `expert_fn` is
where a float8 kernel would be called.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

import paddle
import paddle.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paddle_moe_ops import dequantize_1x128, permute, quantized_experts, route, unpermute
from paddle_moe_ops.gemm import grouped_gemm

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 512, 128, 64, 8, 2
QUANTIZE = "fp8_1x128"
LOSS_TOLERANCE = 0.05  # of the float32 run's last loss
LEAST_COSINE = 0.98  # of a parameter's gradients in the first step


class Layer(paddle.nn.Layer):
    """A router and SwiGLU experts on rows of float8 or of float32.

    Args:
        float8: whether the experts see float8 rows.
    """

    def __init__(self, float8: bool) -> None:
        super().__init__()
        self.float8 = float8
        normal = paddle.nn.initializer.Normal(std=HIDDEN**-0.5)
        self.router = self.create_parameter([HIDDEN, EXPERTS], default_initializer=normal)
        self.gate_up = self.create_parameter([EXPERTS, HIDDEN, 2 * INNER], default_initializer=normal)
        self.down = self.create_parameter([EXPERTS, INNER, HIDDEN], default_initializer=normal)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        probs, ids = paddle.topk(F.softmax(x @ self.router), TOPK)
        plan = route(ids, num_experts=EXPERTS)

        def expert_fn(codes, scales, gate_up, down):
            rows = dequantize_1x128(codes, scales, dtype="float32")
            return experts(rows, gate_up, down, plan)

        def expert_vjp(d_out, codes, scales, gate_up, down):
            """Recompute the first GEMM: its output is larger than the kept operands."""
            rows = dequantize_1x128(codes, scales, dtype="float32")
            gate, up = product(rows, gate_up, plan).chunk(2, axis=-1)
            sigmoid = F.sigmoid(gate)
            silu = gate * sigmoid
            d_inner = product(d_out, down, plan, transpose=True)
            d_gate = d_inner * up * (sigmoid + silu * (1 - sigmoid))
            d_product = paddle.concat([d_gate, d_inner * silu], axis=-1)
            d_rows = product(d_product, gate_up, plan, transpose=True)
            return d_rows, of_matrices(rows, d_product, plan), of_matrices(silu * up, d_out, plan)

        if self.float8:
            rows = quantized_experts(x, plan, expert_fn, expert_vjp, self.gate_up, self.down, quantize=QUANTIZE)
        else:
            rows = experts(permute(x, plan)[0], self.gate_up, self.down, plan)
        return unpermute(rows, plan, probs)


def product(rows: paddle.Tensor, matrices: paddle.Tensor, plan, transpose: bool = False) -> paddle.Tensor:
    """Each expert's rows times its matrix, or its transposed matrix."""
    return grouped_gemm(rows, matrices, transpose=transpose, plan=plan)


def experts(rows: paddle.Tensor, gate_up: paddle.Tensor, down: paddle.Tensor, plan) -> paddle.Tensor:
    gate, up = product(rows, gate_up, plan).chunk(2, axis=-1)
    return product(F.silu(gate) * up, down, plan)


def of_matrices(rows: paddle.Tensor, d_out: paddle.Tensor, plan) -> paddle.Tensor:
    """The gradients of the matrices, [E, D, N]."""
    offsets = plan.expert_offsets.tolist()
    parts = [rows[low:high].T @ d_out[low:high] for low, high in pairwise(offsets)]
    return paddle.stack(parts)


def train(float8: bool, steps: int) -> tuple[list[float], dict[str, paddle.Tensor]]:
    """The losses, and the gradients of the first step; data and first weights are the same in every run."""
    paddle.seed(0)
    teacher = paddle.randn([4, HIDDEN, HIDDEN]) / HIDDEN**0.5
    kinds = paddle.randn([HIDDEN, 4])
    layer = Layer(float8)
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=layer.parameters())
    losses, first = [], {}
    for _ in range(steps):
        x = paddle.randn([TOKENS, HIDDEN])
        of_kind = F.one_hot((x @ kinds).argmax(axis=-1), 4)
        target = paddle.einsum("th,chd,tc->td", x, teacher, of_kind)  # each kind of token has a matrix of its own
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        if not first:
            first = {name: value.grad.clone() for name, value in layer.named_parameters()}
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    paddle.set_device("cpu")
    runs = {}
    for name in ("float32", "float8"):
        begin = time.perf_counter()
        runs[name] = train(name == "float8", steps)
        losses = runs[name][0]
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps, {time.perf_counter() - begin:.1f} s")
    (plain, plain_gradients), (losses, gradients) = runs["float32"], runs["float8"]
    difference = abs(losses[-1] / plain[-1] - 1)
    print(f"last losses differ by {100 * difference:.2f} %, tolerance {100 * LOSS_TOLERANCE:.0f} %")
    cosines = {
        name: float(F.cosine_similarity(gradients[name].flatten(), plain_gradients[name].flatten(), axis=0))
        for name in gradients
    }
    told = ", ".join(f"{name} {cosine:.4f}" for name, cosine in cosines.items())
    print(f"cosines of the first gradients: {told}, at least {LEAST_COSINE}")
    fell = all(run[-1] < 0.9 * run[0] for run in (plain, losses))
    good = fell and difference < LOSS_TOLERANCE and min(cosines.values()) >= LEAST_COSINE
    print("PASSED" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
