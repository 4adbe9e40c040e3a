# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m paddle_moe_ops``: env, selftest, explain, bench. Each command imports only what it needs.

If Paddle is missing or too old, env says so first. A command with a missing dependency says so in one line and ends
with status 1, and so does explain if no backend runs an operator.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from paddle_moe_ops import _build_check, bench
from paddle_moe_ops._version import __version__

# Dependencies in the order of their checks: ml_dtypes itself needs NumPy.
DEPENDENCIES = ("numpy", "ml_dtypes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, or list them where none is named, and return the exit status."""
    parser = _parser()
    chosen = parser.parse_args(argv)
    if "run" not in chosen:
        parser.print_help()
        return 0
    return chosen.run(chosen)


def run() -> int:
    """Run `main` as a program: a reader that closes the pipe, such as ``head``, ends it without a traceback."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paddle_moe_ops", description="Tools of paddle_moe_ops.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="command", parser_class=_CommandParser)
    env = commands.add_parser("env", help="what is installed, what runs and what is missing")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=_env)
    selftest = commands.add_parser("selftest", help="compare the compiled operators with the reference")
    selftest.set_defaults(run=_selftest)
    explain = commands.add_parser("explain", help="which backend runs an operator, and why")
    explain.add_argument("op", nargs="?", help="an operator's name; all of them when left out")
    explain.set_defaults(run=_explain)
    benchmark = commands.add_parser("bench", help="time the public functions beside Paddle's own")
    bench.add_arguments(benchmark)
    benchmark.set_defaults(run=_bench)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """Names a bad argument in one line."""

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument ([^:]+): ", r"\1 ", message)
        self.exit(2, f"{self.prog.split()[-1]}: {text}\n")


def _version() -> str:
    info = _build_check.build_info()
    built = "not compiled" if info is None else f"compiled for Paddle {info['paddle_version']}"
    return f"paddle_moe_ops {__version__}, {built}{' with CUDA' if info and info['cuda'] else ''}"


def _paddle_is_missing() -> bool:
    """True if Paddle is missing or too old; prints the problem to stderr."""
    problem = _build_check.paddle_problem()
    if problem is not None:
        print(problem, file=sys.stderr)
    return problem is not None


def _a_dependency_is_missing() -> bool:
    """True if a dependency cannot be imported; prints its name."""
    for name in DEPENDENCIES:
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:
            install = f"`pip install {' '.join(DEPENDENCIES)}`"
            print(f"paddle_moe_ops needs {name}, which cannot be imported ({error}): {install}", file=sys.stderr)
            return True
    return False


def _env(arguments: argparse.Namespace) -> int:
    from paddle_moe_ops import _report

    report = _report.collect()
    print(json.dumps(report, indent=2) if arguments.json else _report.as_text(report))
    return 0


def _selftest(_: argparse.Namespace) -> int:
    if _paddle_is_missing() or _a_dependency_is_missing():
        return 1
    from paddle_moe_ops.testing import selftest

    return selftest.main()


def _explain(arguments: argparse.Namespace) -> int:
    if _paddle_is_missing() or _a_dependency_is_missing():
        return 1
    import paddle_moe_ops

    try:
        text = paddle_moe_ops.explain(arguments.op)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 1 if re.search(r"^\w+: none \(", text, re.MULTILINE) else 0


def _bench(arguments: argparse.Namespace) -> int:
    if _paddle_is_missing() or _a_dependency_is_missing():
        return 1
    return bench.main(arguments)


if __name__ == "__main__":
    sys.exit(run())
