# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's language model in several processes that share the experts.

On a CPU, where Paddle connects the processes with gloo:

    PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2 examples/expert_parallel.py

Each process has a part of the experts, and texts of its own. At the end model and optimizer are gathered into one
checkpoint, and a model of one process loads it. With ``--checkpoint FILE`` it stays, and a run that finds it goes on
from there up to ``--steps``, in any number of processes that divides the number of experts. Without ``launch`` that is
one process with all experts.
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
from paddle_moe_ops.bench.decoder import Decoder, ModelConfig
from paddle_moe_ops.expert_parallel import (
    average_gradients,
    gather_optimizer_state_dict,
    gather_state_dict,
    is_expert_parameter,
    shard_optimizer_state_dict,
    shard_state_dict,
)
from paddle_moe_ops.nn import ExpertLoad

CONFIG = ModelConfig(hidden=64, layers=2, experts=8, topk=2, context=64)
WINDOWS = 4  # of each process and step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="in all, so a run that goes on needs more of them")
    parser.add_argument("--checkpoint", type=Path, help="where to begin, if it exists, and to save")
    arguments = parser.parse_args()

    paddle.set_device("cpu")
    paddle.distributed.init_parallel_env()
    rank, processes = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    group = paddle.distributed.get_group(0) if processes > 1 else None
    paddle.seed(0)  # what is no expert starts the same in all processes
    model = Decoder(CONFIG, group)
    library = load_standard_library()
    held_out = paddle.to_tensor(even_windows(library.held_out, 8, CONFIG.context + 1))

    # The norm is that of the gradients of all experts, wherever they are.
    clip = ClipGradForMOEByGlobalNorm(1.0, is_expert_parameter, group)
    optimizer = paddle.optimizer.AdamW(3e-3, weight_decay=0.1, parameters=model.parameters(), grad_clip=clip)
    done = 0
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        saved = paddle.load(str(arguments.checkpoint))  # every process reads all, and takes its part
        model.set_state_dict(shard_state_dict(saved["model"], model, group))
        optimizer.set_state_dict(shard_optimizer_state_dict(saved["optimizer"], model, group))
        done = saved["steps"]
    if done >= arguments.steps:
        parser.error(f"the checkpoint has {done} steps, so --steps must be more, but is {arguments.steps}")
    load = ExpertLoad(model, group)
    before = loss_of(model, held_out)
    for step in range(done, arguments.steps):
        texts = random_windows(library.train, WINDOWS, CONFIG.context + 1, np.random.default_rng([step, rank]))
        model.loss(paddle.to_tensor(texts)).backward()
        average_gradients(model.parameters(), group)
        optimizer.step()
        optimizer.clear_grad()
        load.update_correction_biases(5e-3)
    after = loss_of(model, held_out)

    whole = {  # all processes take part
        "model": gather_state_dict(model, group),
        "optimizer": gather_optimizer_state_dict(optimizer, model, group),
        "steps": arguments.steps,
    }
    if rank != 0:
        return 0
    experts = model.moe_layers[0].experts.num_experts
    print(f"processes: {processes}, with {experts} of {CONFIG.experts} experts each, {arguments.steps} steps")
    print(f"held-out loss {before:.6f} after {done} steps, {after:.6f} after {arguments.steps}, nats per byte")
    with tempfile.TemporaryDirectory() as folder:
        file = str(arguments.checkpoint or f"{folder}/whole.pdparams")
        paddle.save(whole, file)
        alone = Decoder(CONFIG)
        alone.set_state_dict(paddle.load(file)["model"])
    of_one = loss_of(alone, held_out)
    good = after < before and abs(of_one - after) < 1e-4
    print(f"one process with the same weights: {of_one:.6f}. {'PASSED' if good else 'FAILED'}")
    return 0 if good else 1


@paddle.no_grad()
def loss_of(model: Decoder, texts: paddle.Tensor) -> float:
    """The mean loss. All processes see the same texts, and all must call it."""
    return float(model.loss(texts))


if __name__ == "__main__":
    sys.exit(main())
