# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Which sources are changed together, which tests guard them, and what is left out."""

from __future__ import annotations

import re
from typing import NamedTuple

_OPERATORS = ("tests/ops/test_*.py", "tests/static/test_*.py", "tests/scenarios/test_*.py")
# They are about C++ or about other processes, and take long.
LEFT_OUT = {f"tests/ops/test_{name}.py" for name in ("determinism", "huge_pages", "threads", "two_gpus")}
LEFT_OUT |= {f"tests/scenarios/test_{name}.py" for name in ("devices", "processes")}
_KERNELS = (
    *("grouped_gemm", "grouped_gemm_kernels", "handles", "launching", "permute", "quantize", "route", "route_kernels"),
    *("rowmap", "sort_chunks", "sums", "topk", "unpermute", "unpermute_backward"),
)


class Area(NamedTuple):
    """Patterns of sources and of the test files that guard them, from the root of the repository."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "gradients": Area(
        tuple(f"paddle_moe_ops/backends/{name}.py" for name in ("gradients", "product_calls", "nodes")), _OPERATORS
    ),
    "fronts": Area(
        (
            *(f"paddle_moe_ops/{name}.py" for name in ("functional", "routing", "gemm", "indexed", "dispatch")),
            *(f"paddle_moe_ops/{name}.py" for name in ("quantization", "rowmaps", "_checks", "_graphs")),
            "paddle_moe_ops/masked/*.py",
        ),
        _OPERATORS,
    ),
    "nn": Area(("paddle_moe_ops/nn/*.py",), _OPERATORS),
    "patch": Area(
        ("paddle_moe_ops/compat/*.py",),
        (
            "tests/ops/test_patch_*.py",
            "tests/ops/test_incubate_*.py",
            "tests/ops/test_transformer_engine.py",
            "tests/packaging/test_migrating*.py",
        ),
    ),
    "demo": Area(
        tuple(f"examples/demo/{name}.py" for name in ("checks", "purpose", "run", "training")),
        ("tests/packaging/test_demo*.py",),
    ),
    "bench": Area(
        (
            *(f"benchmarks/kernels/{name}.py" for name in ("check", "cpu_check", "cpu_arrays", "inputs", "cpu", "run")),
            "benchmarks/kernels/operators/*.py",
        ),
        ("tests/bench/test_*.py", "tests/triton/test_benchmark.py"),
    ),
    "backends": Area(("paddle_moe_ops/backends/*.py",), _OPERATORS),
    # _runtime.py needs a GPU, configurations change the speed alone.
    "triton": Area(
        tuple(f"paddle_moe_ops/triton/{name}.py" for name in _KERNELS),
        ("tests/triton/test_*.py", "tests/ops/test_triton_*.py"),
    ),
    "reference": Area(("paddle_moe_ops/reference/*.py",), ("tests/reference/test_*.py",)),
}


# Faults that make no wrong program: path, kind, what is in the lines before the change (regular expressions), and
# the reason.
EQUIVALENT = (
    (r"kernels/cpu\.py", "", r"getloadavg|_SECONDS_PER_TURN|_ASSUMED_CACHE|_flush_buffer", "what is around a time"),
    (r"kernels/cpu\.py", "", r"needed > left|needed / 1e9", "an estimate"),
    (r"kernels/cpu_arrays\.py", "", r"_WORKERS|_PERIOD|_CHUNK_ELEMENTS =", "sizes of pieces"),
    (r"kernels/cpu_arrays\.py", "", r"^    return problem\.case\.shape\.hidden \*", "an estimate"),
    (r"kernels/(inputs|cpu_check)\.py", "", r"_ORACLE_ELEMENTS =|chunk_elements =|elements //", "sizes of pieces"),
    (r"kernels/operators/", "", r"check\.chunks\(", "sizes of pieces"),
    (r"kernels/operators/", "", r'add_workspace\("(?!route)', "only CUDA kernels need one"),
    (r"kernels/operators/", "", r"case\.fill and \(", "an implementation for GPUs"),
    (r"kernels/operators/", "", r"return_scores", "outputs that are not looked at"),
    (r"kernels/operators/", "", r"torch|engine\.|index_select|row_id_map|\.long\(\)|d_probs", "seen on a GPU"),
    (r"demo/", "", r"_TOLERANCE\b", "a float does not equal its limit"),
    (r"demo/run\.py", "", r"Column\(|console=console|Console\(|f\"step ", "looks"),
    (r"demo/checks\.py", "arguments swapped", r"index_add\(", "Paddle takes PyTorch's order as well"),
    (r"demo/checks\.py", "elements swapped", r"differences =", "the larger one counts"),
    (r"demo/checks\.py", "constant", r"stable=True", "sums of a token's rows in another order"),
    (r"demo/checks\.py", "method dropped", r"bincount\(ids\.numpy", "NumPy reads a tensor as well"),
    (r"demo/training\.py", "", r"optimizer\.AdamW\(|beta|weight_decay|grad_clip", "any of them learns"),
    (r"demo/checks\.py", "", r"axis=|unsqueeze|shape\[-1\]|one_hot", "the last axis of a matrix is its second"),
    (r"", "keyword dropped", r"take_along_axis|argsort", "the last axis, which is the default"),
    (r"backends/gradients\.py", "arguments swapped", r"_is_wanted\(", "any of them may want a gradient"),
    (r"backends/base\.py", "elements swapped", r"^OPERATORS", "the order in which explain lists them"),
    (r"backends/reference\.py", "method dropped", r"d_gating\.astype", "its last bit is far below the tolerance"),
    (r"backends/reference\.py", "keyword dropped", r"fill_padding=", "zeros are as good as what is undefined"),
    (r"gemm\.py|masked/maps\.py", "", r"get_autocast_dtype\(\)\) for|limit or min\(room", "only on a GPU"),
    (r"", "opposite", r"np\.zeros\(0,", "nothing in it"),
    (r"triton/permute\.py", "arguments swapped", r"words_of\(", "sizes and addresses count alike"),
    (r"triton/sort_chunks\.py", "", r"other=-1\) == ", "what no chunk is compared with"),
    (r"", "arguments swapped", r"swapaxes|\b(max|min)\(", "either way round"),
    (r"", "elements swapped", r"frozenset\(|isinstance\(", "in any order"),
    (r"", "", r"is_on_gpu\(|is_cpu_place\(|is_gpu_place\(", "the suites on a GPU see it"),
    (r"backends/gradients\.py", "", r"return both\(", "what is not wanted"),
    (r"gradients\.py", "condition dropped", r"if not paddle\.is_grad_enabled\(\) or value", "a shortcut"),
    (
        r"backends/product_calls\.py",
        "method dropped",
        r"each\.detach\(\) for each in made",
        "they are results of a node",
    ),
    (r"", "constant", r"reshape\(-1\)", "any negative number will do"),
    (r"_checks\.py", "method dropped", r"\.item\(\)", "operator.index reads a tensor as well"),
    (r"reference/topk\.py", "comparison", r"topk_groups < num_groups", "a shortcut: all groups are kept"),
    (r"reference/quantization\.py", "method dropped", r"\.copy\(\)\.view", "a copy of what no one else has"),
    (r"reference/(routing|paddle_api)\.py", "slice dropped", r"\[:1\]:$", "the first one raises"),
    (r"reference/arithmetic\.py", "elements swapped", r"to_float32\(a\), to_float32\(b\)", "factors"),
    (r"reference/gemm\.py", "method dropped", r"\.astype\(np\.float64\)", "the other factor is float64"),
    (r"reference/", "keyword dropped", r"np\.errstate\(", "warnings"),
    (r"triton/route\.py", "opposite", r"8192 // width", "sizes of pieces"),
    (r"triton/unpermute_backward\.py", "", r"parts = ", "how many programs share a token"),
    (r"triton/grouped_gemm\.py", "", r"_descriptors\(|try:|ALLOCATOR", "descriptors need a GPU"),
    (r"reference/chunks\.py", "slice dropped", r"\[:num_chunks\]", "the last one is not used"),
)


def is_equivalent(path: str, kind: str, old: str) -> bool:
    return any(
        re.search(where, path) and re.fullmatch(kinds or ".*", kind) and re.search(text, old, re.MULTILINE)
        for where, kinds, text, _ in EQUIVALENT
    )
