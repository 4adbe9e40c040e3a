# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's text: the source of Python's standard library, which every machine has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT_EVERY = 10


class StandardLibrary(NamedTuple):
    """Bytes to learn from and bytes to measure on, uint8, and how many files each came from."""

    train: np.ndarray
    held_out: np.ndarray
    train_files: int
    held_out_files: int


def load_standard_library() -> StandardLibrary:
    """Read the top-level modules of the standard library, sorted by name; every tenth is held out."""
    paths = sorted(Path(os.path.dirname(os.__file__)).glob("*.py"))
    files = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in paths]
    held_out = files[::HELD_OUT_EVERY]
    train = [data for i, data in enumerate(files) if i % HELD_OUT_EVERY]
    return StandardLibrary(np.concatenate(train), np.concatenate(held_out), len(train), len(held_out))


def random_windows(data: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` windows of ``length`` bytes at random places, int64 [count, length]."""
    return _windows(data, rng.integers(0, len(data) - length + 1, size=count), length)


def even_windows(data: np.ndarray, count: int, length: int) -> np.ndarray:
    """``count`` windows of ``length`` bytes, spread evenly over the data, int64 [count, length]."""
    return _windows(data, np.linspace(0, len(data) - length, count).astype(np.int64), length)


def _windows(data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(length)].astype(np.int64)
