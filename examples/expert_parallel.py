# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's language model in several processes that share the experts.

On a CPU, where Paddle connects the processes with gloo:

    PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2 examples/expert_parallel.py

Each process has a part of the experts, and texts of its own. At the end the experts are gathered into one checkpoint,
which a model of one process loads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import paddle
from paddle.incubate.distributed.models.moe import ClipGradForMOEByGlobalNorm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.demo.data import even_windows, load_standard_library, random_windows
from examples.demo.model import Decoder, ModelConfig
from paddle_moe_ops.expert_parallel import average_gradients, gather_state_dict, is_expert_parameter

CONFIG = ModelConfig(hidden=64, layers=2, experts=8, topk=2, context=64)
WINDOWS = 4  # of each process and step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps

    paddle.set_device("cpu")
    paddle.distributed.init_parallel_env()
    rank, group = paddle.distributed.get_rank(), paddle.distributed.get_group(0)
    paddle.seed(0)  # what is no expert starts the same in all processes
    model = Decoder(CONFIG, group)
    library = load_standard_library()
    held_out = paddle.to_tensor(even_windows(library.held_out, 8, CONFIG.context + 1))

    # The norm is that of the gradients of all experts, wherever they are.
    clip = ClipGradForMOEByGlobalNorm(1.0, is_expert_parameter, group)
    optimizer = paddle.optimizer.AdamW(3e-3, weight_decay=0.1, parameters=model.parameters(), grad_clip=clip)
    before = loss_of(model, held_out)
    for step in range(steps):
        texts = random_windows(library.train, WINDOWS, CONFIG.context + 1, np.random.default_rng([step, rank]))
        model.loss(paddle.to_tensor(texts)).backward()
        average_gradients(model.parameters(), group)
        optimizer.step()
        optimizer.clear_grad()
        for layer in model.moe_layers:
            load = paddle.to_tensor(layer.tokens_per_expert, dtype="int32")
            paddle.distributed.all_reduce(load, group=group)
            layer.router.update_correction_bias(load, 5e-3)
    after = loss_of(model, held_out)

    whole = gather_state_dict(model, group)
    if rank != 0:
        return 0
    experts = model.moe_layers[0].experts.num_experts
    print(f"{group.nranks} processes with {experts} of {CONFIG.experts} experts each, {steps} steps")
    print(f"held-out loss {before:.3f} -> {after:.3f} nats per byte")
    with tempfile.TemporaryDirectory() as folder:
        paddle.save(whole, f"{folder}/model.pdparams")
        alone = Decoder(CONFIG)
        alone.set_state_dict(paddle.load(f"{folder}/model.pdparams"))
    of_one = loss_of(alone, held_out)
    good = after < before and abs(of_one - after) < 1e-4
    print(f"one process with the same weights: {of_one:.3f}. {'PASSED' if good else 'FAILED'}")
    return 0 if good else 1


@paddle.no_grad()
def loss_of(model: Decoder, texts: paddle.Tensor) -> float:
    """The mean loss. All processes see the same texts, and all must call it."""
    return float(model.loss(texts))


if __name__ == "__main__":
    sys.exit(main())
