# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Training, measuring and sampling of the demo's language model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle

from paddle_moe_ops.bench.decoder import Decoder

from .data import even_windows, random_windows

BATCH = 4
HELD_OUT_WINDOWS = 64
TEMPERATURE = 0.8
BIAS_RATE = 5e-3
# Matrices as small as the demo's gain nothing from more.
MAX_THREADS = 4
QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Progress(NamedTuple):
    """State after one training step (step counts from 1)."""

    step: int
    loss: float
    tokens_per_second: float


class HeldOut(NamedTuple):
    """Loss on held-out text in nats per byte, and the load of the experts: slots, [MoE layers, E]."""

    loss: float
    load: np.ndarray


def use_threads(threads: int | None) -> None:
    """Set the number of threads of Paddle's GEMMs; importing Paddle leaves them at one.

    Args:
        threads: The number; None for the cores that this process may use, MAX_THREADS at most.
    """
    paddle.base.core.set_num_threads(threads or min(usable_cores(), MAX_THREADS))


def usable_cores() -> int:
    """The cores that this process may run on, or fewer where its container has a lower quota of processor time."""
    cores = len(os.sched_getaffinity(0))
    if not QUOTA.is_file():
        return cores
    # "200000 100000": 200000 us of processor time in each 100000 us; "max 100000": no limit.
    quota, period = QUOTA.read_text(encoding="ascii").split()
    return cores if quota == "max" else min(cores, max(1, math.ceil(int(quota) / int(period))))


def train(model: Decoder, data: np.ndarray, steps: int, rng: np.random.Generator) -> Iterator[Progress]:
    """Train the model on random windows of the data and report after each step."""
    context = model.config.context
    peak = 3e-3 * math.sqrt(128 / model.config.hidden)
    optimizer = paddle.optimizer.AdamW(
        peak,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        parameters=model.parameters(),
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    for step in range(steps):
        start = time.perf_counter()
        tokens = paddle.to_tensor(random_windows(data, BATCH, context + 1, rng))
        optimizer.set_lr(peak * _schedule(step, steps))
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        for layer in model.moe_layers:
            layer.router.update_correction_bias(layer.tokens_per_expert, BIAS_RATE)
        value = float(loss)
        yield Progress(step + 1, value, BATCH * context / (time.perf_counter() - start))


def _schedule(step: int, steps: int) -> float:
    """Part of the peak learning rate: up in a tenth of the steps (30 at most), then down a cosine to 5 %."""
    warm_up = min(30, steps // 10 + 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


@paddle.no_grad()
def evaluate(model: Decoder, data: np.ndarray) -> HeldOut:
    """Measure the model on fixed windows, spread evenly over the data."""
    windows = even_windows(data, HELD_OUT_WINDOWS, model.config.context + 1)
    losses, load = [], np.zeros((len(model.moe_layers), model.config.experts), dtype=np.int64)
    for batch in np.split(windows, HELD_OUT_WINDOWS // BATCH):
        losses.append(float(model.loss(paddle.to_tensor(batch))))
        load += np.array([layer.tokens_per_expert for layer in model.moe_layers])
    return HeldOut(float(np.mean(losses)), load)


@paddle.no_grad()
def sample(model: Decoder, prompt: str, length: int, rng: np.random.Generator) -> str:
    """Continue the prompt by ``length`` bytes, drawn at TEMPERATURE."""
    text = list(prompt.encode())
    for _ in range(length):
        window = paddle.to_tensor([text[-model.config.context :]])
        logits = model(window)[0, -1].numpy().astype(np.float64) / TEMPERATURE
        weights = np.exp(logits - logits.max())
        text.append(int(rng.choice(len(weights), p=weights / weights.sum())))
    # A control character of a model that has hardly learnt would upset the terminal.
    decoded = bytes(text).decode(errors="replace")
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in decoded)
