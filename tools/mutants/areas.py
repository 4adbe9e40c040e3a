# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Areas of sources, the tests that guard them, and excluded faults."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_OPERATORS = ("tests/ops/test_*.py", "tests/static/test_*.py", "tests/scenarios/test_*.py")
# These tests cover C++ or other processes, and take long.
LEFT_OUT = {f"tests/ops/test_{name}.py" for name in ("determinism", "huge_pages", "threads", "two_gpus")}
LEFT_OUT |= {f"tests/scenarios/test_{name}.py" for name in ("devices", "processes")}
_KERNELS = (
    *(f"gemm/{name}" for name in ("grouped_gemm", "kernels", "operands", "schedule", "swiglu", "wgrad")),
    *("launch/device", "launch/kernel_cache", "ops/numerics", "ops/permute", "ops/quantize", "ops/route"),
    *("ops/route_kernels", "ops/rowmap", "ops/sort_chunks", "ops/topk", "ops/unpermute", "ops/unpermute_backward"),
)


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


_EXPERTS = (
    *_tests("ops", "grouped_product", "expert_operators", "moe_mlp", "float8_operator", "grouped_gemm"),
    *_tests("static", "expert_programs", "float8_programs"),
)
_ROUTES = _tests("ops", "route", "capacity", "dropped_slots", "moe_permute")
_MOVEMENT = _tests(
    "ops", "permute", "unpermute", "sort_chunks", "moe_permute", "moe_unpermute", "second_order", "indexed"
)
_ALL_OPERATORS = (
    *_tests("ops", "operator_arguments", "direct_calls", "native_functions", "strides", "bad_arguments"),
    *_tests("ops", "quick_calls", "side_by_side", "every_argument"),
    *_tests("static", "operator_contract", "static_graph"),
    *_tests("scenarios", "messages"),
)
# Tests of single sources of csrc/paddle. pages.cc changes the speed alone; recording.cc is left to its own tests.
_TESTS_OF_OPERATORS = {
    **dict.fromkeys(("grouped", "grouped_product_op", "moe_mlp", "moe_mlp_op", "moe_mlp_float8_op"), _EXPERTS),
    "moe_mlp_quantized_op": _tests("ops", "quantized_matrices"),
    **dict.fromkeys(("route_op", "routing"), _ROUTES),
    **dict.fromkeys(("binding", "device", "direct", "tensor_facts"), ()),
    "moe_permute_op": _tests("ops", "moe_permute", "patch_paddle", "second_order"),
    "moe_unpermute_op": _tests("ops", "moe_unpermute", "patch_paddle", "second_order"),
    "movement": (*_MOVEMENT, *_tests("ops", "rank_operators")),
    "paddle_float8_op": _tests("ops", "paddle_fp8_quantize", "paddle_fp8_products", "incubate_quant"),
    "permute_op": _tests("ops", "permute", "second_order"),
    "unpermute_op": _tests("ops", "unpermute", "second_order"),
    "sort_chunks_op": _tests("ops", "sort_chunks", "second_order"),
    "quantize_op": _tests("ops", "quantize"),
    "ranks_op": _tests("ops", "rank_operators"),
    "row_id_map_op": _tests("ops", "transformer_engine", "transformer_engine_jax", "dispatch", "masked"),
    "topk_op": _tests("ops", "calculate_topk", "nn_router"),
}


class Area(NamedTuple):
    """An area: patterns of sources and of the test files that guard them, from the root of the repository.

    `python` is the path of the interpreter for the tests; if empty, that of the tool. `guards` has the test files of
    single sources of C++, by their stem. If `runs_slow`, tests marked slow run, too.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    python: str = ""
    guards: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    runs_slow: bool = False


def _ranks(
    sources: tuple[str, ...], tests: tuple[str, ...], others: tuple[str, ...] = (), *, runs_slow: bool = False
) -> Area:
    """Return an area of expert_parallel, whose lines run in processes that tests start."""
    return Area(
        tuple(f"paddle_moe_ops/expert_parallel/{name}.py" for name in sources),
        (*_tests("distributed", *tests), *others),
        runs_slow=runs_slow,
    )


AREAS = {
    "gradients": Area(
        tuple(f"paddle_moe_ops/backends/{name}.py" for name in ("gradients", "experts", "autograd")), _OPERATORS
    ),
    "fronts": Area(
        (
            *(f"paddle_moe_ops/{name}.py" for name in ("functional", "routing", "gemm")),
            *(f"paddle_moe_ops/{name}.py" for name in ("quantization", "_checks", "_graphs")),
            *(f"paddle_moe_ops/compat/{name}.py" for name in ("row_maps", "unsloth")),
            "paddle_moe_ops/compat/te_*.py",
        ),
        _OPERATORS,
    ),
    "nn": Area(
        ("paddle_moe_ops/nn/*.py",),
        (
            "tests/ops/test_nn*.py",
            *_tests("ops", "activations", "dropped_slots", "every_argument", "float8_hidden", "float8_mlp"),
            *_tests("ops", "python_calls", "sharded_experts", "side_by_side"),
            *_tests("distributed", "expert_parallel_errors", "expert_parallel_layer", "parameters_side_by_side"),
            *_tests("static", "expert_programs", "to_static"),
            *_tests("scenarios", "accumulating_layers", "float8_graphs", "float8_hidden_programs", "float8_programs"),
            *_tests("scenarios", "layer_programs", "layer_training", "messages", "recompute_of_nothing", "training"),
            *_tests("scenarios", "quantized_layers"),
        ),
    ),
    "patch": Area(
        (
            *(f"paddle_moe_ops/compat/{name}.py" for name in ("paddle", "_async_load")),
            *(f"paddle_moe_ops/compat/{name}.py" for name in ("gshard", "incubate_*", "_incubate_slots")),
            "paddle_moe_ops/compat/fp8/*.py",
            "paddle_moe_ops/compat/transformer_engine*.py",
        ),
        (
            "tests/ops/test_patch_*.py",
            *_tests("ops", "gshard", "incubate_*"),
            *_tests("scenarios", "float8_dispatch", "gshard_layers"),
            "tests/ops/test_paddle_fp8_*.py",
            "tests/ops/test_transformer_engine.py",
            "tests/packaging/test_migrating*.py",
            "tests/distributed/test_devices_of_arguments.py",
        ),
    ),
    "fastdeploy": Area(
        ("paddle_moe_ops/compat/fastdeploy/*.py", "paddle_moe_ops/reference/fastdeploy*.py"),
        (
            *("tests/ops/test_fastdeploy_*.py", "tests/ops/test_every_argument.py"),
            *("tests/scenarios/test_fastdeploy_calls.py", "tests/static/test_fastdeploy_programs.py"),
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
    # paddle_device.py needs a GPU, configurations change the speed alone.
    "triton": Area(
        tuple(f"paddle_moe_ops/triton/{name}.py" for name in _KERNELS),
        ("tests/triton/test_*.py", "tests/ops/test_triton_*.py"),
    ),
    "mlp": Area(
        (*(f"paddle_moe_ops/{name}.py" for name in ("mlp", "_matrices", "quantization", "backends/quantized")),),
        (
            *_tests("ops", "quantized_matrices", "quantize"),
            *_tests("ops", "moe_mlp", "lists_of_matrices", "biases", "activations", "quick_calls", "every_argument"),
            *_tests("ops", "float8_mlp", "float8_hidden", "float8_operator", "expert_operators", "memory"),
            *_tests("ops", "bad_arguments", "side_by_side", "amp_recompute", "explain_layer"),
            *_tests("static", "expert_programs", "float8_programs"),
            *_tests("scenarios", "messages"),
        ),
    ),
    "triton_layer": Area(
        tuple(f"paddle_moe_ops/triton/{name}.py" for name in ("gemm/types", "gemm/gather_heuristic", "gemm/mlp")),
        (
            *_tests("triton", "moe_mlp"),
            *_tests("ops", "moe_mlp", "explain_layer"),
        ),
    ),
    "exchange": _ranks(
        ("dispatch", "alltoall", "deep_ep"),
        (
            *("plans", "transports", "deep_ep", "arguments_stay", "expert_parallel_errors", "expert_parallel"),
            *("expert_parallel_layer", "calls_of_ranks", "programs_that_differ", "closed_layers"),
        ),
        _tests("ops", "sharded_experts"),
    ),
    "peers": _ranks(
        ("peer", "symmetric_memory", "symmetric_buffers"),
        (
            *("shared_buffers", "arguments_stay", "expert_parallel", "expert_parallel_errors"),
            *("calls_of_ranks", "ranks_that_do_not_come", "closed_layers"),
        ),
        _tests("ops", "rank_operators"),
    ),
    "averaging": _ranks(
        ("training",),
        ("grad_scaler", "accumulated_gradients", "average_gradients", "fleet"),
    ),
    "groups": _ranks(
        ("agreement", "transports"),
        (
            *("expert_parallel_errors", "programs_that_differ", "average_gradients", "ranks_that_do_not_come"),
            *("agreement", "transports", "calls_of_ranks", "shared_buffers", "expert_parallel"),
        ),
    ),
    # Copies of experts between ranks that share them need four ranks, whose tests are slow.
    "fleet": _ranks(
        ("fleet",), ("fleet", "fleet_programs", "grad_scaler"), _tests("ops", "sharded_experts"), runs_slow=True
    ),
    "states": _ranks(
        ("parameters", "checkpoint", "optimizers"),
        (
            *("parameters_side_by_side", "flex_checkpoints", "optimizer_states", "gathered_states"),
            *("fleet", "average_gradients", "accumulated_gradients"),
        ),
        _tests("ops", "sharded_experts", "optimizer_state_parts"),
        runs_slow=True,
    ),
    "integrations": Area(
        ("paddle_moe_ops/integrations/paddleformers/*.py",),
        ("tests/integrations/test_*.py",),
        ".venv-integrations/bin/python",
    ),
    "csrc_paddle": Area(
        tuple(f"paddle_moe_ops/csrc/paddle/{name}.cc" for name in _TESTS_OF_OPERATORS),
        tuple(dict.fromkeys(itertools.chain(_ALL_OPERATORS, *_TESTS_OF_OPERATORS.values()))),
        guards={source: (*tests, *_ALL_OPERATORS) for source, tests in _TESTS_OF_OPERATORS.items()},
    ),
    "csrc_layer": Area(
        ("paddle_moe_ops/csrc/layer/*.cc",),
        _tests("core", "layer", "layer_float8", "layer_plan"),
    ),
    "csrc_cpu": Area(
        ("paddle_moe_ops/csrc/cpu/*.cc", "paddle_moe_ops/csrc/common/*.cc"),
        ("tests/core/test_*.py",),
    ),
    "reference": Area(("paddle_moe_ops/reference/*.py",), ("tests/reference/test_*.py",)),
}


# Faults that leave the program correct: path, kind, regular expressions for the lines before the change, and the
# reason.
EQUIVALENT = (
    (r"expert_parallel/agreement\.py", "", r'name="expert_parallel_alone"', "a label that nothing reads"),
    (r"kernels/cpu\.py", "", r"getloadavg|_SECONDS_PER_TURN|_ASSUMED_CACHE|_flush_buffer", "code around a timing"),
    (r"kernels/cpu\.py", "", r"needed > left|needed / 1e9", "an estimate"),
    (r"kernels/cpu_arrays\.py", "", r"_WORKERS|_PERIOD|_CHUNK_ELEMENTS =", "sizes of pieces"),
    (r"kernels/cpu_arrays\.py", "", r"^    return problem\.case\.shape\.hidden \*", "an estimate"),
    (r"kernels/(inputs|cpu_check)\.py", "", r"_ORACLE_ELEMENTS =|chunk_elements =|elements //", "sizes of pieces"),
    (r"kernels/operators/", "", r"check\.chunks\(", "sizes of pieces"),
    (r"kernels/operators/", "", r'add_workspace\("(?!route)', "only CUDA kernels need one"),
    (r"kernels/operators/", "", r"case\.fill and \(", "an implementation for GPUs"),
    (r"kernels/operators/", "", r"return_scores", "outputs that no test reads"),
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
    (r"backends/", "arguments swapped", r"first_order_only\(", "any of the inputs may carry a graph"),
    (r"backends/gradients\.py", "constant", r"if mask_experts < 0 else", "a mask has one expert at least"),
    (
        r"backends/gradients\.py",
        "keyword dropped",
        r"row_to_slot\.clip\(min=0\)",
        "Paddle's gather reads the last element for -1, which becomes 0 like any",
    ),
    (
        r"backends/stacking\.py",
        "arithmetic|comparison",
        r"last = \(len\(parts\)|parts\[-1\]\.data_ptr\(\) ==",
        "slices are views, too, and take longer",
    ),
    (r"backends/matmul\.py", "", r"^            return _multiply\(x, w, weights, bias,", "the suites on a GPU see it"),
    (r"backends/compiled\.py", "", r"loader\.exec_module\(", "a module of C is complete when it is created"),
    (r"backends/base\.py", "elements swapped", r"^OPERATORS", "the order in which explain lists them"),
    (r"backends/reference\.py", "method dropped", r"d_gating\.astype", "its last bit is far below the tolerance"),
    (r"backends/reference\.py", "keyword dropped", r"fill_padding=", "zeros are as good as what is undefined"),
    (r"gemm\.py|compat/te_triton\.py", "", r"get_autocast_dtype\(\)\) for|limit or min\(room", "only on a GPU"),
    (r"", "opposite", r"np\.zeros\(0,", "nothing in it"),
    (r"triton/ops/permute\.py", "arguments swapped", r"copy_words\(", "sizes and addresses count alike"),
    (r"triton/ops/sort_chunks\.py", "", r"other=-1\) == ", "a value that no chunk is compared with"),
    (r"", "arguments swapped", r"swapaxes|\b(max|min)\(", "either way round"),
    (r"", "elements swapped", r"frozenset\(|isinstance\(|except \(", "in any order"),
    (r"", "", r"is_on_gpu\(|is_cpu_place\(|is_gpu_place\(", "the suites on a GPU see it"),
    (r"backends/gradients\.py", "", r"return both\(", "gradients that are not needed"),
    (r"gradients\.py", "condition dropped", r"if not paddle\.is_grad_enabled\(\) or value", "a shortcut"),
    (
        r"backends/experts\.py",
        "method dropped",
        r"each\.detach\(\) for each in made",
        "they are results of a node",
    ),
    (
        r"backends/experts\.py",
        "constant",
        r"\(\*self\.wanted, False\)\[:4\]",
        "the gradient of weights that are not given is dropped",
    ),
    (r"", "constant", r"reshape\(-1\)", "any negative number will do"),
    (r"_checks\.py", "method dropped", r"\.item\(\)", "operator.index reads a tensor as well"),
    (r"unsloth\.py", "method dropped", r"slot_to_row\.numpy\(\)\)", "NumPy takes a tensor as indices as well"),
    (r"te_jax\.py", "method dropped", r"0 <= shard_id\.item\(\) <", "a tensor of one number compares as it does"),
    (r"reference/topk\.py", "comparison", r"topk_groups < num_groups", "a shortcut: all groups are kept"),
    (r"reference/quantization\.py", "method dropped", r"\.copy\(\)\.view", "a copy of what no one else has"),
    (r"reference/(routing|paddle_api)\.py", "slice dropped", r"\[:1\]:$", "the first one raises"),
    (r"reference/arithmetic\.py", "elements swapped", r"to_float32\(a\), to_float32\(b\)", "factors"),
    (r"reference/gemm\.py", "method dropped", r"\.astype\(np\.float64\)", "the other factor is float64"),
    (r"reference/", "keyword dropped", r"np\.errstate\(", "warnings"),
    (r"triton/ops/route\.py", "opposite", r"8192 // width", "sizes of pieces"),
    (r"triton/ops/unpermute_backward\.py", "", r"programs_per_token = ", "how many programs share a token"),
    (
        r"triton/gemm/(grouped_gemm|operands|wgrad)\.py",
        "",
        r"descriptor_memory\(|try:|ALLOCATOR",
        "descriptors need a GPU",
    ),
    (r"expert_parallel/", "method dropped", r"\.keys\(\) & ", "keys take a dict as well"),
    (
        r"expert_parallel/alltoall\.py",
        "constant|elements swapped",
        r'^    more = \{"row_probs": None',
        "`permute` and `unpermute` do not read these",
    ),
    (
        r"expert_parallel/alltoall\.py",
        "constant|and, or|condition dropped",
        r"ids\.shape\[0\] == 0 or to_ranks\.num_rows == 0",
        "a shortcut: rows without a token become -1 below",
    ),
    (
        r"expert_parallel/alltoall\.py",
        "keyword dropped",
        r"buffer_size=most, validate=False",
        "the sender checked the ids",
    ),
    (
        r"expert_parallel/alltoall\.py",
        "condition negated",
        r"if has_gaps else tokens",
        "rows without a token become -1",
    ),
    (
        r"expert_parallel/alltoall\.py",
        "opposite|arithmetic|constant",
        r"rest = paddle\.zeros",
        "the words before them say that this rank raised, so nothing reads them",
    ),
    (
        r"expert_parallel/agreement\.py",
        "comparison",
        r"group\.rank < 0 and group\.ranks ==",
        "a group of this rank alone does what the one that replaces it does",
    ),
    (r"expert_parallel/agreement\.py", "slice dropped", r"words\[:-1\] != told\[0\]", "a shortcut to the checks below"),
    (
        r"expert_parallel/dispatch\.py",
        "constant|elements swapped",
        r"ep\._step\(\(0, 0, 0, True\)",
        "other ranks read that this one raised, and no further",
    ),
    (
        r"expert_parallel/symmetric_buffers\.py",
        "method dropped|statement dropped",
        r"^        (flags\.arrived|self\.state)\b.*(zero_|tolist)\(\)",
        "memory of a CPU begins with zeros, and nothing is pending there",
    ),
    (
        r"expert_parallel/symmetric_memory\.py",
        "",
        r"\bcuMem|shareable\(|_Access\(|_Location\(|_Properties\(|c_uint64|c_size_t\(|_ON_DEVICE|_driver\b|_Driver\b|_device_of",
        "memory of a GPU",
    ),
    (r"expert_parallel/symmetric_memory\.py", "constant", r"_RECOMMENDED_GRANULARITY =", "memory of a GPU"),
    (
        r"expert_parallel/symmetric_memory\.py",
        "constant",
        r"^_NO_ACCESS, _IN_PLACE =",
        "1 is PROT_READ for addresses that are mapped again, and MAP_SHARED, which the mapping has",
    ),
    (r"expert_parallel/symmetric_buffers\.py", "constant", r"^FETCHED_", "memory of a GPU"),
    (r"expert_parallel/peer\.py", "finally dropped", r"arrivals = ", "streams of a GPU join after an error"),
    (
        r"expert_parallel/peer\.py",
        "keyword dropped|constant",
        r"NEW_MEMORY, leaves_room=True",
        "how fast kernels of a GPU run",
    ),
    (r"symmetric_memory\.py", "constant", r"recv_fds\(from_other, 4, 1\)", "room for more files than the one sent"),
    (r"expert_parallel/deep_ep\.py", "method dropped", r"dense\(x\.detach\(\)\)", "a call runs without gradients"),
    (
        r"expert_parallel/alltoall\.py",
        "constant",
        r"columns\.append\(filled\(\[size, more\], 0",
        "nothing reads numbers of experts that a layer does not have",
    ),
    (r"expert_parallel/training\.py", "", r"BUCKET_BYTES =", "sizes of pieces"),
    (r"expert_parallel/training\.py", "keyword dropped", r"to_tensor\(\[state, ", "int64 is the default"),
    (r"expert_parallel/(training|fleet)\.py", "elements swapped", r"for name in \(", "in any order"),
    (r"expert_parallel/fleet\.py", "constant", r" else -1$", "any number that is no rank will do"),
    (
        r"expert_parallel/fleet\.py",
        "comparison",
        r"^                if self\._copies\.nranks > 1:",
        "a shortcut: a group of one rank adds nothing up",
    ),
    (
        r"expert_parallel/fleet\.py",
        "statement dropped",
        r"self\._set_inner_opt_attr\(",
        "Paddle keeps the list, and Fleet passes each step's parameters",
    ),
    (r"expert_parallel/training\.py", "constant", r"number = -1 if group is None", "any negative number will do"),
    (
        r"expert_parallel/training\.py",
        "condition dropped",
        r"each\.nranks > 1\]",
        "Paddle's all_reduce returns at once in a group of one rank",
    ),
    (r"expert_parallel/training\.py", "method dropped", r"= total\.astype\(", "the assignment to a slice casts"),
    (r"expert_parallel/peer\.py", "", r"scale_columns = float8, 0", "read with float8 alone, which sets it"),
    (
        r"nn/losses\.py|incubate_routing\.py|compat/fp8/",
        "with dropped",
        r"with without_autocast\(\)",
        "on a CPU mixed precision casts only products",
    ),
    (r"nn/experts\.py", "comparison", r"if alignment > 1 else None$", "a shortcut: offsets of groups without padding"),
    (r"nn/losses\.py", "method dropped", r"counts = mask\.astype", "a clip by a float returns floats"),
    (r"csrc/paddle/", "", r"place\(\) [!=]= target\.place\(\)", "the suites on a GPU see it"),
    (r"csrc/paddle/", "elements swapped", r"Target target\(", "whose devices are compared, in any order"),
    (r"/mlp\.py", "", r"_PASSED_KEPT", "how many checked calls are remembered"),
    (r"/mlp\.py", "arguments swapped", r"signature = _signature\(", "an order that all signatures have"),
    (r"/_matrices\.py", "constant", r"0 <= experts", "a plan has one expert at least"),
    (
        r"reference/fastdeploy\.py",
        "keyword dropped",
        r"wide\.max\(axis=-1",
        "a softmax of shifted numbers",
    ),
    (
        r"csrc/layer/plan\.cc",
        "constant",
        r"kMaxInnerOfWide =|kMaxInnerWithWaste =|kMaxColumnsOfGatheringWgrad =",
        "multiples of 8 are compared with these",
    ),
    (r"reference/chunks\.py", "slice dropped", r"\[:num_chunks\]", "the last one is not used"),
)


def is_equivalent(path: str, kind: str, old: str) -> bool:
    return any(
        re.search(where, path) and re.fullmatch(kinds or ".*", kind) and re.search(text, old, re.MULTILINE)
        for where, kinds, text, _ in EQUIVALENT
    )
