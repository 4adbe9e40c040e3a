# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`samples`: elements of an array that are copied, or compared with earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..guards import MakeOutput, guarded_outputs
from ..structs import Bytes, Floats, Int, Int32s, Params, Size, fields
from .base import TOO_MANY, Operator

if TYPE_CHECKING:
    from ..binding import Core
    from ..inputs import Draw, Small


class SamplesParams(Params):
    """pmo_samples_params"""

    _fields_ = fields(
        (Size, "struct_size num_samples step"),
        (Bytes, "values samples"),
        (Int32s, "changed"),
        (Floats, "scales"),
        (Size, "num_scales"),
        (Int, "item_size num_threads"),
    )


def take_samples(core: Core, values: NDArray, count: int, step: int) -> NDArray:
    with guarded_outputs() as output:
        samples = output((count,), values.dtype)
        sizes = {"num_samples": count, "step": step, "item_size": values.itemsize}
        core.run("samples", SamplesParams(values=values, samples=samples, **sizes))
    return samples


def compare_samples(
    core: Core, values: NDArray, samples: NDArray, step: int, num_scales: int
) -> tuple[NDArray, NDArray]:
    """The word and the scales after the call; they were 7 before."""
    changed, scales = np.full([1], 7, np.int32), np.full([num_scales], 7, np.float32)
    sizes = {"num_samples": len(samples), "step": step, "item_size": values.itemsize, "num_scales": num_scales}
    core.run("samples", SamplesParams(values=values, samples=samples, changed=changed, scales=scales, **sizes))
    return changed, scales


def _valid(core: Core, output: MakeOutput, s: Small) -> Params:
    values, samples = np.arange(40, dtype=np.float32), np.zeros(8, np.float32)
    results = {"changed": output((1,), np.int32), "scales": output((3,), np.float32)}
    sizes = {"num_samples": 8, "step": 5, "item_size": 4, "num_scales": 3}
    return SamplesParams(values=values, samples=samples, **results, **sizes)


def _fuzzed(core: Core, output: MakeOutput, s: Draw) -> Params:
    values, step = s.data(s.N, s.H + 1).ravel(), s.between(1, 9)
    count = -(-len(values) // step)
    results = {"changed": output((1,), np.int32), "scales": output((s.S,), np.float32)} if s.below(2) else {}
    samples = s.data(1, count).ravel() if results else output((count,), np.float32)
    sizes = {"num_samples": count, "step": step, "num_scales": s.S if results else 0}
    return SamplesParams(values=values, samples=samples, item_size=int(s.rng.choice([2, 3, 4])), **results, **sizes)


OPERATORS = (
    Operator(
        name="samples",
        valid=_valid,
        bad_fields={
            "num_samples": (-1, TOO_MANY),
            "step": (-1, 0, TOO_MANY),
            "item_size": (-1, 0, 1, 3, 8),
            "num_scales": (-1, TOO_MANY),
        },
        required=("values", "samples", "scales"),
        aligned=("values", "samples", "changed", "scales"),
        fuzzed=_fuzzed,
    ),
)
