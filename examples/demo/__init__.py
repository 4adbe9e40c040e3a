# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.demo``: train a small MoE language model on real text and check what it did."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: Options; None for that of the process.

    Returns:
        int: 0 when the held-out loss fell and the checks passed, else 1. A bad argument exits with 2.
    """
    options = _parse(argv)
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 1
    from .run import run

    return run(options)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Show what the package is for, and train a small ERNIE-type MoE language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=_integer(1), default=500, help="training steps")
    parser.add_argument("--experts", type=_integer(1), default=16, help="experts of an MoE layer")
    parser.add_argument("--topk", type=_integer(1), default=2, help="experts per token")
    parser.add_argument("--hidden", type=_hidden, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=_integer(2), default=4, help="layers; the first one is dense")
    parser.add_argument("--tokens", type=_integer(1), default=1024, help="tokens whose rows are timed")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="directory for the picture")
    parser.add_argument("--threads", type=_integer(1), help="of matrix products; None: the usable cores, 4 at most")
    parser.add_argument("--seed", type=_integer(0), default=0, help="seed of weights, data order and sample")
    options = parser.parse_args(argv)
    if options.topk > options.experts:
        parser.error(f"argument --topk: must be at most {options.experts} experts, but got {options.topk}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        given = f"{str(options.out)!r} ({error.strerror})"
        parser.error(f"argument --out: must be a directory that can be made, but got {given}")
    return options


def _integer(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be an integer >= {low}, but got {text!r}")
        return int(text)

    return parse


def _hidden(text: str) -> int:
    # Two heads of 32 share keys and values.
    if not text.isascii() or not text.isdigit() or int(text) < 1 or int(text) % 64:
        raise argparse.ArgumentTypeError(f"must be a multiple of 64, but got {text!r}")
    return int(text)
