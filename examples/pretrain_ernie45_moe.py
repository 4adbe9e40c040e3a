# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a small ERNIE-4.5-MoE of PaddleFormers on the source code of Python's standard library, on a CPU.

    pip install -r tests/integrations/requirements.txt
    pip install --no-deps paddleformers==1.2.0
    python examples/pretrain_ernie45_moe.py
    python examples/pretrain_ernie45_moe.py --no-patch  # as it is, PaddleFormers' model needs a GPU
    PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2 examples/pretrain_ernie45_moe.py

The last of these trains in two processes, each with half of the experts and half of the texts.

The model, its optimizer and its checkpoint are PaddleFormers' own; one call makes its Mixture-of-Experts blocks run on
this package. After each step the correction bias follows the experts' use, as Paddle's trainer does for other models.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import paddle_moe_ops.integrations.paddleformers as pf
from examples.demo.data import even_windows, load_standard_library, random_windows
from paddle_moe_ops.expert_parallel import average_gradients

INSTALL = "pip install -r tests/integrations/requirements.txt && pip install --no-deps paddleformers==1.2.0"
CONTEXT, WINDOWS = 64, 8
EXPERTS, TOPK = 16, 4
BIAS_RATE = 5e-3


def make_model(group: str = "dummy") -> Any:
    """A decoder over bytes with four layers, three of them with experts, which the processes of the group share."""
    from paddleformers.transformers.ernie4_5_moe.configuration import Ernie4_5_MoeConfig
    from paddleformers.transformers.ernie4_5_moe.modeling import Ernie4_5_MoeForCausalLM
    from paddleformers.utils.log import logger

    logger.set_level("WARNING")
    config = Ernie4_5_MoeConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        moe_group=group,
        moe_num_experts=EXPERTS,
        moe_k=TOPK,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_use_aux_free=True,
        num_nextn_predict_layers=0,
        tie_word_embeddings=True,
        fuse_rms_norm=False,  # the fused one has no CPU kernel
        use_cache=False,
        _attn_implementation="eager",
    )
    return Ernie4_5_MoeForCausalLM(config)


def statistics_of(model: Any) -> list[Any]:
    """The blocks' statistics of their experts: the correction bias and the use, a line for each kind of expert."""
    return [layer.moe_statics for layer in model.sublayers() if hasattr(layer, "moe_statics")]


def update_bias(statistics: list[Any]) -> np.ndarray:
    """Favour the experts with few tokens; the load of each block's busiest expert, 1 if all are used alike."""
    loads = []
    with paddle.no_grad():
        for each in statistics:
            if dist.get_world_size() > 1:  # each has counted for its own experts
                dist.all_reduce(each.expert_usage)
            usage = each.expert_usage.astype("float32")
            mean = usage.mean(axis=-1, keepdim=True)
            each.e_score_correction_bias.add_(BIAS_RATE * paddle.sign(mean - usage))
            loads.append(float(usage.max() / mean.max()))
            each.expert_usage.zero_()
    return np.array(loads)


@paddle.no_grad()
def loss_of(model: Any, texts: paddle.Tensor) -> float:
    model.eval()
    loss = model(input_ids=texts[:, :-1], labels=texts[:, 1:])[0]
    model.train()
    return float(loss)


def whole_state(model: Any) -> dict[str, np.ndarray]:
    """The state of a model in one process: the experts of each process have names of their own."""
    states: list[dict[str, np.ndarray]] = []
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    if dist.get_world_size() > 1:
        dist.all_gather_object(states, state)
    return {name: value for each in [*states, state] for name, value in each.items()}


def train(steps: int) -> bool:
    """Train, save and load again; whether all went well. All processes do the same on their parts of each batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    paddle.seed(0)
    model = first = make_model()
    if ranks > 1:
        model = make_model("world")
        model.set_state_dict(first.state_dict())
    statistics = statistics_of(model)
    library = load_standard_library()
    held_out = paddle.to_tensor(even_windows(library.held_out, 8, CONTEXT + 1))
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=[each for each in model.parameters() if not each.stop_gradient])
    before, begin, loads = loss_of(model, held_out), time.perf_counter(), np.ones(len(statistics))
    for each in statistics:
        each.expert_usage.zero_()
    for step in range(steps):
        texts = random_windows(library.train, WINDOWS, CONTEXT + 1, np.random.default_rng(step))
        texts = paddle.to_tensor(np.ascontiguousarray(texts[rank::ranks]))
        loss = model(input_ids=texts[:, :-1], labels=texts[:, 1:])[0]
        loss.backward()
        if ranks > 1:
            average_gradients(model.parameters())
        optimizer.step()
        optimizer.clear_grad()
        loads = update_bias(statistics)
        if rank == 0 and (step % max(1, steps // 6) == 0 or step == steps - 1):
            busiest = " ".join(f"{load:.2f}" for load in loads)
            print(f"step {step:4d}  loss {float(loss):.3f}  busiest expert of each block {busiest} times the mean")
    seconds = time.perf_counter() - begin
    after, state = loss_of(model, held_out), whole_state(model)
    with tempfile.TemporaryDirectory() as folder:
        paddle.save(state, f"{folder}/model.pdparams")
        again = make_model()
        again.set_state_dict(paddle.load(f"{folder}/model.pdparams"))
    of_loaded = loss_of(again, held_out)
    if rank == 0:
        own = sum(each is not None for each in model.model.layers[-1].mlp.experts)
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        print(f"{processes} with {own} of {EXPERTS} experts each, {1000 * seconds / steps:.0f} ms a step")
        print(f"held-out loss {before:.3f} -> {after:.3f} nats per byte")
        print(f"the same weights, loaded by one process: {of_loaded:.3f}")
    return after < before and abs(of_loaded - after) < 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-patch", action="store_true", help="run PaddleFormers' own blocks")
    arguments = parser.parse_args()
    try:
        importlib.import_module("paddleformers.transformers.ernie4_5_moe.modeling")
    except ImportError as error:
        raise SystemExit(f"this example needs PaddleFormers ({error}): {INSTALL}") from None
    paddle.set_device("cpu")
    dist.init_parallel_env()
    if not arguments.no_patch:
        report = pf.apply("ernie4_5_moe")
        if dist.get_rank() == 0:
            print(report)
    try:
        good = train(arguments.steps)
    except (AttributeError, NameError, RuntimeError) as error:
        if not arguments.no_patch:
            raise
        text = str(error)
        kernel = re.search(r"The kernel `(\w+)` is not registered", text)
        reason = f"this build of Paddle has no kernel {kernel[1]}" if kernel else text.strip().splitlines()[-1]
        print(f"PaddleFormers' own blocks do not run here: {reason}")
        return 1
    if dist.get_rank() == 0:
        print("PASSED" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
