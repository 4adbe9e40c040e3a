# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark in a process for each rank, and ends processes that fail or hang."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Worker", "in_processes"]

_POLL_S, _REASON_LENGTH = 0.1, 500

Worker = Callable[[int, int, str, dict[str, Any]], list[dict[str, Any]]]


def in_processes(worker: Worker, ranks: int, timeout: float, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a worker in a process for each rank.

    Args:
        worker: called with the rank, the number of ranks, the address of a rendezvous, and the options.
        ranks: number of processes.
        timeout: seconds until all of them are killed.
        options: for the worker.

    Returns:
        the lines of the worker, each that of the rank with the largest ``us``, or one line with ``failed``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    end = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        processes = [
            context.Process(target=_write, args=(file, worker, rank, ranks, address, options))
            for rank, file in enumerate(files)
        ]
        for each in processes:
            each.start()
        # One rank that fails ends all: the others would wait for it.
        while any(each.is_alive() for each in processes) and not any(each.exitcode for each in processes):
            if time.monotonic() > end:
                break
            time.sleep(_POLL_S)
        codes = [each.exitcode for each in processes]
        for each in processes:
            each.kill()
            each.join()
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    if any(codes):
        reasons = [f"rank {rank}: {each['failed']}" for rank, each in enumerate(found) if "failed" in each]
        return [{"failed": "; ".join(reasons) or f"exit codes {codes}"}]
    if None in codes:
        return [{"failed": f"no end after {timeout:g} s"}]
    of_ranks = zip(*(each["lines"] for each in found), strict=True)
    return [max(each, key=lambda line: line["us"]) for each in of_ranks]


def _write(file: Path, worker: Worker, rank: int, ranks: int, address: str, options: dict[str, Any]) -> None:
    """Run a worker, and write its lines or its error."""
    try:
        found: dict[str, Any] = {"lines": worker(rank, ranks, address, options)}
    except BaseException as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}"[:_REASON_LENGTH]}
    file.write_text(json.dumps(found))
    os._exit("failed" in found)  # without destructors of communication libraries, which may wait for other ranks
