# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Records the experts of tokens in the demo's language model after training; needs Paddle.

python -m benchmarks.scaling.record --out benchmarks/results/scaling/demo-traces.jsonl --commit COMMIT
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from examples.demo.data import even_windows, load_standard_library
from examples.demo.training import train, use_threads
from paddle_moe_ops.bench.decoder import Decoder, ModelConfig

from .traces import Trace, write

__all__ = ["main", "record"]

_CONTEXT = 128
_RECORDED = ((8, 2), (64, 6), (64, 8), (128, 8), (256, 8))  # E and K of the models that are predicted


def record(
    experts: int, topk: int, *, hidden: int, layers: int, steps: int, windows: int, seed: int = 0
) -> list[Trace]:
    """Train the demo's model, and take down the experts of held-out text.

    Args:
        experts: E.
        topk: K.
        hidden: width of the model.
        layers: layers, the first of which is dense.
        steps: training steps.
        windows: pieces of text, 128 tokens each.
        seed: for weights and data.

    Returns:
        a trace of one source for the first and for the last layer that has experts.
    """
    use_threads(None)
    paddle.seed(seed)
    library = load_standard_library()
    model = Decoder(ModelConfig(hidden, layers, experts, topk, _CONTEXT))
    for _ in train(model, library.train, steps, np.random.default_rng(seed)):
        pass
    found: dict[int, list[np.ndarray]] = {}
    hooks = [
        layer.router.register_forward_post_hook(_keeping(found.setdefault(number, [])))
        for number, layer in enumerate(model.moe_layers)
    ]
    with paddle.no_grad():
        for window in even_windows(library.held_out, windows, _CONTEXT):
            model(paddle.to_tensor(window[None]))
    for each in hooks:
        each.remove()
    kept = sorted({0, len(found) - 1})
    return [
        Trace(f"demo {experts} x {topk}, MoE layer {number + 1}", experts, np.concatenate(found[number])[None])
        for number in kept
    ]


def _keeping(into: list[np.ndarray]) -> Callable[[Any, Any, Any], None]:
    def keep(layer: Any, inputs: Any, output: Any) -> None:
        into.append(output.ids.numpy())

    return keep


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args(argv)
    settings = {"hidden": 128, "layers": 4, "steps": arguments.steps, "windows": 32}
    traces = [trace for experts, topk in _RECORDED for trace in record(experts, topk, **settings)]
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.out, {**settings, "commit": arguments.commit, "date": date}, traces)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
