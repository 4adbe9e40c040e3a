# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops bench``: the public functions next to the calls that a program would make without them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from .models import FORMAT, MODELS, Model

PICTURES = (".pdf", ".png", ".svg")
NAMES = f"{', '.join(MODELS)}, or sizes as hidden,experts,topk or hidden,experts,topk,inner"
# Models and tokens of a run that names none: of functions, of layers, and of layers on a CPU.
ROWS, LAYERS, LAYERS_ON_CPU = ("ernie-21b", [512, 4096]), ("ernie-21b", [1, 8, 64, 4096]), ("small", [1, 8, 64, 1024])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, without importing Paddle."""
    parser.description = (
        "Time the public functions on bfloat16 tensors beside paddle.nn.functional.moe_permute and moe_unpermute where "
        "these run, and beside plain operators of Paddle elsewhere. Results are checked before anything is timed. A "
        "run that is stopped has written its rows to --out."
    )
    text = "time grouped_gemm, moe_mlp and MoELayer beside a matmul for each expert, and the steps of a small model"
    parser.add_argument("--layer", action="store_true", help=text)
    parser.add_argument(
        "--model", type=_model, nargs="+", help=f"{NAMES} (default: {ROWS[0]}; layers on a CPU: {LAYERS_ON_CPU[0]})"
    )
    parser.add_argument(
        "--tokens",
        type=_tokens,
        nargs="+",
        help=f"how many (default: {_listed(ROWS)}; layers: {_listed(LAYERS)}, on a CPU {_listed(LAYERS_ON_CPU)})",
    )
    parser.add_argument(
        "--device", help="what paddle.set_device takes, such as cpu or gpu:1 (default: Paddle's choice)"
    )
    parser.add_argument("--seconds", type=_seconds, default=1.0, help="how long each call is timed (default: 1)")
    parser.add_argument("--out", type=_file, metavar="FILE", help="write the results to a file, as JSON")
    parser.add_argument("--compare", type=_earlier, metavar="FILE", help="show what has changed since another --out")
    parser.add_argument("--picture", type=_picture, metavar="FILE", help="draw the times; needs matplotlib")


def main(options: argparse.Namespace) -> int:
    """Measure and return the exit status: 1 if a result is wrong or matplotlib is missing, 2 for a bad device."""
    import paddle

    try:
        paddle.set_device(options.device or paddle.get_device())
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        given = f"{options.device!r} ({reason})"
        print(f"bench: --device must be something that paddle.set_device takes, but got {given}", file=sys.stderr)
        return 2
    if options.picture is not None:
        try:
            importlib.import_module("matplotlib")
        except ImportError as error:
            print(f"bench: --picture needs matplotlib ({error}): `pip install matplotlib`", file=sys.stderr)
            return 1
    from .run import run

    return run(with_defaults(options, paddle.get_device() == "cpu"))


def with_defaults(options: argparse.Namespace, on_cpu: bool) -> argparse.Namespace:
    """The options of a run, in which models and tokens are named."""
    name, tokens = ROWS if not options.layer else LAYERS_ON_CPU if on_cpu else LAYERS
    named = {"model": options.model or [MODELS[name]], "tokens": options.tokens or tokens}
    return argparse.Namespace(**{**vars(options), **named})


def _listed(defaults: tuple[str, list[int]]) -> str:
    return " ".join(map(str, defaults[1]))


def _bad(expected: str, given: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {expected}, but got {given}")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= 1


def _model(text: str) -> Model:
    if text in MODELS:
        return MODELS[text]
    sizes = [int(size) for size in text.split(",") if _is_count(size)]
    if text.count(",") not in (2, 3) or len(sizes) != text.count(",") + 1:
        raise _bad(NAMES, repr(text))
    hidden, experts, topk, inner = *sizes[:3], sizes[-1] if len(sizes) == 4 else sizes[0]
    model = Model(text, hidden, experts, topk, inner)
    if not model.topk <= model.experts <= 65536:
        raise _bad("hidden,experts,topk with topk <= experts <= 65536", repr(text))
    return model


def _tokens(text: str) -> int:
    if not _is_count(text):
        raise _bad("positive integers", repr(text))
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise _bad("a number from 0 to 3600", repr(text))
    return seconds


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise _bad("a file in a folder that exists", repr(text))
    return path


def _picture(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise _bad(f"a file that ends with {' or '.join(PICTURES)}", repr(text))
    return _file(text)


def _earlier(text: str) -> dict[str, Any]:
    expected = "a file that bench --out has written"
    try:
        run = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _bad(expected, f"{text!r} ({error})") from None
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise _bad(expected, f"{text!r} (its format is not {FORMAT!r})")
    return run
