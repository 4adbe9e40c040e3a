# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a small mixture-of-experts model, saves it as a program, and runs that in a process without the model.

    python examples/export_inference.py [--steps 60] [--out FOLDER]

The other process knows no layer of the model. It imports paddle_moe_ops, which registers the operators that the program
calls, and runs the program twice: loaded by paddle.jit.load, and by paddle.inference.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.static import InputSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paddle_moe_ops.nn import MoELayer

ROOT = Path(__file__).resolve().parents[1]
FEATURES, CLASSES, HIDDEN = 16, 4, 32
BATCHES = (1, 63, 257)  # one program takes any number of rows

OTHER_PROCESS = """
import sys

import numpy as np
import paddle
from paddle import inference

import paddle_moe_ops

model, batches, results = sys.argv[1:]
loaded = paddle.jit.load(model)
loaded.eval()
config = inference.Config(model + ".json", model + ".pdiparams")
config.disable_glog_info()
predictor = inference.create_predictor(config)
outputs = {}
for name, rows in np.load(batches).items():
    predictor.get_input_handle(predictor.get_input_names()[0]).copy_from_cpu(rows)
    predictor.run()
    outputs["paddle.jit.load " + name] = loaded(paddle.to_tensor(rows)).numpy()
    outputs["paddle.inference " + name] = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
np.savez(results, **outputs)
"""


class Classifier(nn.Layer):
    """Classes of rows of numbers, by one layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, HIDDEN)
        self.experts = MoELayer(HIDDEN, HIDDEN, num_experts=8, topk=2)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        hidden = self.embed(rows)
        return self.head(hidden + self.experts(hidden))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="where to keep the program (default: nowhere)")
    options = parser.parse_args()

    paddle.set_device("cpu")
    paddle.seed(0)
    model = Classifier()
    before, after = train(model, options.steps)
    print(f"{options.steps} steps, loss {before:.3f} -> {after:.3f}")

    model.eval()
    rng = np.random.default_rng(1)
    batches = {str(rows): rng.standard_normal([rows, FEATURES]).astype("float32") for rows in BATCHES}
    with tempfile.TemporaryDirectory() as scratch, paddle.no_grad():
        folder = (options.out or Path(scratch)).resolve()
        # Before it is saved: paddle.jit.save leaves a traced forward in the model.
        expected = {name: model(paddle.to_tensor(rows)).numpy() for name, rows in batches.items()}
        paddle.jit.save(model, str(folder / "model"), input_spec=[InputSpec([None, FEATURES], "float32", "rows")])
        outputs = run_elsewhere(folder / "model", batches, Path(scratch))

    good = after < before
    for name, output in outputs.items():
        difference = float(np.abs(output - expected[name.split()[-1]]).max())
        # paddle.inference has kernels of its own for softmax and matrix products, which round in another order.
        good = good and difference < 1e-4
        print(f"{name} rows: {'the same bits' if difference == 0 else f'largest difference {difference:.1e}'}")
    print("PASSED" if good else "FAILED")
    return 0 if good else 1


def train(model: Classifier, steps: int) -> tuple[float, float]:
    """Teaches the model which quarter of the features is the largest; returns the first loss and the last."""
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        rows = rng.standard_normal([128, FEATURES]).astype("float32")
        classes = rows.reshape([128, CLASSES, -1]).sum(-1).argmax(-1)
        loss = F.cross_entropy(model(paddle.to_tensor(rows)), paddle.to_tensor(classes))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses[0], losses[-1]


def run_elsewhere(model: Path, batches: dict[str, np.ndarray], scratch: Path) -> dict[str, np.ndarray]:
    """The saved program's result for each batch, in a process without the model."""
    np.savez(scratch / "batches.npz", **batches)
    arguments = [str(model), str(scratch / "batches.npz"), str(scratch / "results.npz")]
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, *arguments], cwd=ROOT, check=True)
    return dict(np.load(scratch / "results.npz"))


if __name__ == "__main__":
    sys.exit(main())
