#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Installs the package as the README says, in new environments of several Pythons and Paddles, and uses it.

    tools/fresh_environments.py [--pythons "python3.10 /opt/python3.13/bin/python3"] [--paddles "3.2.2 3.3.1"]

An environment is `python -m venv` and a copy of this checkout without anything built. In it run the lines of the
README's install section as they stand; a constraint for pip picks the version of Paddle. Then the README's quick start
runs in the checkout and in another folder. Each environment takes a few minutes, most of them for the compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHONS = "python3.10 python3.11 python3.12 python3.13"
PADDLES = "3.2.2 3.3.1"
QUICK_START_PRINTS = "[6, 8] [6, 8]"


class StepError(Exception):
    """A step that did not do what it should; the text says which and shows its output."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", default=os.environ.get("PYTHONS") or PYTHONS, help="interpreters (PYTHONS)")
    parser.add_argument("--paddles", default=os.environ.get("PADDLES") or PADDLES, help="versions (PADDLES)")
    options = parser.parse_args()
    pythons = {name: version_of(name) for name in options.pythons.split()}
    missing = [name for name, version in pythons.items() if version is None]
    if missing:
        print(f"these interpreters do not run: {' '.join(missing)}; name those to use in PYTHONS", file=sys.stderr)
        return 2
    failed = 0
    for name, version in pythons.items():
        for paddle in options.paddles.split():
            started = time.monotonic()
            try:
                check_environment(name, paddle)
                verdict = "passed"
            except StepError as failure:
                failed += 1
                verdict = f"FAILED: {failure}"
            print(f"Python {version}, Paddle {paddle}, {time.monotonic() - started:.0f} s: {verdict}", flush=True)
    return 1 if failed else 0


def version_of(python: str) -> str | None:
    """The version of an interpreter, or None if there is none of that name."""
    try:
        done = subprocess.run([python, "-V"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split()[1]


def check_environment(python: str, paddle: str) -> None:
    """Everything that the README promises, with one Python and one Paddle.

    Raises:
        StepError: something went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="fresh-environment-") as name:
        folder = Path(name)
        checkout, elsewhere = folder / "checkout", folder / "elsewhere"
        copy_checkout(checkout)
        elsewhere.mkdir()
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        (folder / "constraints.txt").write_text(f"paddlepaddle=={paddle}\n", encoding="utf-8")
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PADDLE_MOE_OPS_", "PYTHON", "VIRTUAL_ENV"))
        }
        environment["PATH"] = f"{folder / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
        environment["PIP_CONSTRAINT"] = str(folder / "constraints.txt")
        environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"

        def run(command: str, where: Path) -> subprocess.CompletedProcess[str]:
            arguments = ["bash", "-ec", command]
            return subprocess.run(arguments, cwd=where, env=environment, capture_output=True, text=True)

        def expect(command: str, where: Path, text: str) -> None:
            done = run(command, where)
            if done.returncode or text not in done.stdout.splitlines()[-1]:
                raise StepError(f"{command!r} in {where.name} should end with {text!r}:\n{done.stdout}{done.stderr}")

        one_line = run("pip install --no-build-isolation .", checkout)
        told = re.findall(r"^ *(paddle_moe_ops: setuptools .*; run: pip install .*)", one_line.stderr, re.MULTILINE)
        if len(told) != 1 or "Traceback" in one_line.stderr:
            raise StepError(f"pip should say in one line that setuptools is missing or old:\n{one_line.stderr}")

        expect(install_lines(), checkout, "selftest passed")
        for where in (checkout, elsewhere):
            (where / "quick_start.py").write_text(quick_start(), encoding="utf-8")
            expect("python quick_start.py", where, QUICK_START_PRINTS)
            expect("python -m paddle_moe_ops selftest", where, "selftest passed")
        minor = paddle.rpartition(".")[0]
        version = "python -c \"from importlib.metadata import version; print(version('paddle-moe-ops'))\""
        expect(version, elsewhere, f"+paddle{minor}")


def copy_checkout(target: Path) -> None:
    """The files that git knows or would add, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # not deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def install_lines() -> str:
    """The commands of the README's install section."""
    section = README.partition("\n## Install\n")[2].partition("\n## ")[0]
    return "\n".join(re.findall(r"^    (\S.*)$", section, re.MULTILINE))


def quick_start() -> str:
    """The README's quick start."""
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]


if __name__ == "__main__":
    sys.exit(main())
