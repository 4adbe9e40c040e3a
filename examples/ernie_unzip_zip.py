# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The UnZipNode and ZipNode of ERNIE's pre-training code, unchanged, on a CPU.

Both nodes call paddle.nn.functional.moe_permute and moe_unpermute, which in Paddle run on a GPU only and have no
gradient; the nodes bring a hand-written backward pass. With `patched_paddle()` they run here. The script makes one
forward and one backward pass with bfloat16 rows through them and compares with a dense formulation, in which every
expert computes every token.

    pip install --no-deps paddleformers==1.2.0      (one file of it is loaded, none of its dependencies)
    python examples/ernie_unzip_zip.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_moe_ops import explain, patched_paddle

T, H, INNER, E, K = 300, 64, 96, 6, 2
FILE = "cli/train/ernie_pretrain/models/moe/token_dispatcher/moe_utils.py"
# bfloat16 keeps 8 bits: a result that is rounded a few times is off by some 2^-9 of its size.
TOLERANCE = 1e-2


def load_ernie_nodes() -> ModuleType:
    """moe_utils.py of the installed paddleformers, without its package."""
    package = importlib.util.find_spec("paddleformers")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("this example needs a file of paddleformers: pip install --no-deps paddleformers==1.2.0")
    path = Path(package.submodule_search_locations[0]) / FILE
    spec = importlib.util.spec_from_file_location("ernie_moe_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expert(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A SwiGLU expert."""
    gate, up = (x @ w1).chunk(2, axis=-1)
    return (F.silu(gate) * up) @ w2


def run_experts(rows: Tensor, row_probs: Tensor, w1: Tensor, w2: Tensor, counts: list[int]) -> Tensor:
    """Every expert on its segment of 128-aligned rows, times the router's probability, as ERNIE does in training."""
    sizes = [-(-count // 128) * 128 for count in counts]
    parts = [
        expert(part.astype("float32"), w1[e], w2[e])  # Paddle has no bfloat16 matmul on a CPU
        for e, part in enumerate(paddle.split(rows, sizes))
    ]
    return (paddle.concat(parts) * row_probs.unsqueeze(-1)).astype("bfloat16")


def through_the_nodes(
    nodes: ModuleType, x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and the gradients of x and probs, by ERNIE's own forward and backward methods."""
    counts = np.bincount(ids.numpy()[ids.numpy() >= 0], minlength=E).tolist()
    unzip, join = nodes.UnZipNode(None), nodes.ZipNode(None)
    rows, rowmap, row_probs = unzip.forward(x, ids, probs, K, E, counts)
    rows.stop_gradient = row_probs.stop_gradient = False
    expert_out = run_experts(rows, row_probs, w1, w2, counts)
    out = join.forward(expert_out.detach(), rowmap, ids, row_probs.detach(), x.shape[0], E)

    d_expert_out = join.backward(d_out, ids, probs, K, E, counts)
    d_rows, d_row_probs = paddle.grad(expert_out, [rows, row_probs], d_expert_out)
    d_x, d_probs = unzip.backward(d_rows, d_out, d_row_probs, ids, E)
    return out, d_x, d_probs


def dense(
    x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from every expert on every token, in float32 and by Paddle's own gradients."""
    x, probs = x.astype("float32").detach(), probs.detach()
    x.stop_gradient = probs.stop_gradient = False
    out = paddle.zeros([x.shape[0], H])
    for e in range(E):
        weight = (probs * (ids == e).astype("float32")).sum(axis=1, keepdim=True)
        out = out + weight * expert(x, w1[e], w2[e])
    return (out, *paddle.grad(out, [x, probs], d_out.astype("float32")))


def main() -> int:
    """Print the differences; 1 if one is too large."""
    nodes = load_ernie_nodes()
    rng = np.random.default_rng(0)
    x = paddle.to_tensor(rng.standard_normal((T, H), np.float32)).astype("bfloat16")
    chosen = rng.random((T, E)).argsort(axis=1)[:, :K].astype(np.int32)
    ids = paddle.to_tensor(np.where(rng.random((T, K)) < 0.2, np.int32(-1), chosen))
    probs = paddle.to_tensor(rng.random((T, K), np.float32))
    w1 = paddle.to_tensor(rng.standard_normal((E, H, 2 * INNER), np.float32) / 8)
    w2 = paddle.to_tensor(rng.standard_normal((E, INNER, H), np.float32) / 8)
    d_out = paddle.to_tensor(rng.standard_normal((T, H), np.float32)).astype("bfloat16")
    with patched_paddle():
        print(explain("moe_permute").splitlines()[-1])
        results = through_the_nodes(nodes, x, ids, probs, w1, w2, d_out)
    worst = 0.0
    for name, got, wanted in zip(
        ("output", "d_tokens", "d_probs"), results, dense(x, ids, probs, w1, w2, d_out), strict=True
    ):
        got, wanted = got.astype("float32").numpy(), wanted.numpy()
        difference = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        worst = max(worst, difference)
        print(f"{name:9} {list(got.shape)}: differs from dense by {difference:.1e} of its norm")
    print(f"tolerance {TOLERANCE}: {'PASSED' if worst <= TOLERANCE else 'FAILED'}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
