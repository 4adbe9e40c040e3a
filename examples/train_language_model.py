# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model with MoELayer in one process, saves it, and goes on from what was saved.

    python examples/train_language_model.py --steps 40 --checkpoint lm.pdparams
    python examples/train_language_model.py --steps 80 --checkpoint lm.pdparams
    python examples/train_language_model.py --steps 120 --checkpoint lm.pdparams --float8

The second call does steps 41 to 80, with the losses that one call of 80 steps would have had, to the last bit. The
checkpoint holds the model, the optimizer with its schedule, and the number of steps. The router's correction bias is a
buffer of the model and is saved with it. With --float8 the experts multiply float8 operands, and the checkpoint is the
same. examples/expert_parallel.py does this with several processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.demo.data import even_windows, load_standard_library, random_windows
from paddle_moe_ops.bench.decoder import Decoder, ModelConfig

CONFIG = ModelConfig(hidden=64, layers=2, experts=8, topk=2, context=64)
WINDOWS = 4  # of each step
BALANCE, LOGITS, BIAS_RATE = 1e-2, 1e-3, 5e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="in all, those before the checkpoint included")
    parser.add_argument("--checkpoint", type=Path, help="where to begin, if it exists, and to save")
    parser.add_argument("--float8", action="store_true", help="have the experts multiply float8 operands")
    arguments = parser.parse_args()

    paddle.seed(0)
    config = dataclasses.replace(CONFIG, compute="fp8_1x128") if arguments.float8 else CONFIG
    model, library = Decoder(config), load_standard_library()
    held_out = paddle.to_tensor(even_windows(library.held_out, 8, CONFIG.context + 1))
    schedule = paddle.optimizer.lr.LinearWarmup(3e-3, warmup_steps=10, start_lr=3e-4, end_lr=3e-3)
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(schedule, weight_decay=0.1, parameters=model.parameters(), grad_clip=clip)
    done = 0
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        done = load(arguments.checkpoint, model, optimizer)
    before = loss_of(model, held_out)
    for step in range(done, arguments.steps):
        train_step(
            model, optimizer, random_windows(library.train, WINDOWS, CONFIG.context + 1, np.random.default_rng(step))
        )
        schedule.step()
    after = loss_of(model, held_out)
    if arguments.checkpoint is not None:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": arguments.steps}
        paddle.save(saved, str(arguments.checkpoint))

    print(f"held-out loss, nats per byte: {before!r} after {done} steps, {after!r} after {arguments.steps}")
    passed = after < before
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


def train_step(model: Decoder, optimizer: Any, tokens: np.ndarray) -> None:
    """One step, with the losses and the bias that keep the experts' load even."""
    loss = model.loss(paddle.to_tensor(tokens))
    for layer in model.moe_layers:
        loss = loss + BALANCE * layer.aux_loss + LOGITS * layer.z_loss
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    for layer in model.moe_layers:
        layer.router.update_correction_bias(layer.tokens_per_expert, BIAS_RATE)


def load(path: Path, model: Decoder, optimizer: Any) -> int:
    """Load a checkpoint; returns the number of steps that were done."""
    saved = paddle.load(str(path))
    model.set_state_dict(saved["model"])
    optimizer.set_state_dict(saved["optimizer"])
    return saved["steps"]


@paddle.no_grad()
def loss_of(model: Decoder, tokens: paddle.Tensor) -> float:
    return float(model.loss(tokens))


if __name__ == "__main__":
    sys.exit(main())
