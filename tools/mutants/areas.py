# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Areas of sources, and the tests that guard them."""

from __future__ import annotations

import itertools
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
    "index_add_op": _tests("ops", "paddlefleet", "dygraph_operators"),
    "paddle_float8_op": _tests("ops", "paddle_fp8_quantize", "paddle_fp8_products", "incubate_quant"),
    "paddle_float8_gemm_op": _tests("ops", "paddle_fp8_products", "dygraph_operators"),
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
            *(f"paddle_moe_ops/{name}.py" for name in ("quantization", "_checks", "_graphs", "_modes")),
            *(f"paddle_moe_ops/compat/{name}.py" for name in ("row_maps", "unsloth")),
            "paddle_moe_ops/compat/te_*.py",
        ),
        _OPERATORS,
    ),
    "quick": Area(
        ("paddle_moe_ops/_quick.py",),
        (
            *_tests("ops", "quick_calls", "quick_layers", "python_calls", "every_argument", "bad_arguments"),
            *_tests("ops", "moe_permute", "moe_unpermute", "permute", "unpermute", "moe_mlp", "backends"),
            *_tests("ops", "side_by_side", "calls_without_gradient", "amp_recompute", "explain_layer"),
            *_tests("static", "to_static", "widths"),
            *_tests("scenarios", "mlp_programs"),
        ),
    ),
    # These choose and describe the backend, the build and the settings of a process.
    "process": Area(
        (
            *(f"paddle_moe_ops/{name}.py" for name in ("__init__", "__main__", "_activations", "_build_check")),
            *(f"paddle_moe_ops/{name}.py" for name in ("_env", "_native", "_report", "_submodules", "explaining")),
        ),
        (
            *_tests("packaging", "build_check", "commands", "env_variables", "import", "public_api"),
            *_tests("ops", "activations", "backends", "biases", "explain_layer", "native_functions", "patch_families"),
            *_tests("ops", "patch_paddle", "quantized_matrices"),
            *_tests("static", "export"),
        ),
    ),
    "bench_command": Area(
        ("paddle_moe_ops/bench/*.py",),
        (*_tests("packaging", "bench", "bench_layers", "commands"), *_tests("bench", "layer_parts")),
    ),
    "testing": Area(
        ("paddle_moe_ops/testing/*.py",),
        (
            *_tests("ops", "testing_helpers"),
            *_tests("packaging", "commands", "docstring_examples", "demo_checks"),
        ),
    ),
    "nn": Area(
        ("paddle_moe_ops/nn/*.py",),
        (
            "tests/ops/test_nn*.py",
            *_tests("ops", "activations", "dropped_slots", "every_argument", "float8_hidden", "float8_mlp"),
            *_tests("ops", "memory", "python_calls", "sharded_experts", "side_by_side"),
            *_tests("distributed", "expert_load", "expert_parallel_errors", "expert_parallel_layer"),
            *_tests("distributed", "devices_of_arguments", "kept_matrices", "own_transports"),
            *_tests("distributed", "parameters_side_by_side"),
            *_tests("static", "expert_programs", "to_static"),
            *_tests("scenarios", "accumulating_layers", "float8_graphs", "float8_hidden_programs", "float8_programs"),
            *_tests("scenarios", "layer_programs", "layer_training", "messages", "recompute_of_nothing", "training"),
            *_tests("scenarios", "deferred_weight_gradients", "expert_load", "kept_matrices", "quantized_layers"),
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
            *_tests("distributed", "devices_of_arguments"),
        ),
    ),
    "paddlefleet": Area(
        ("paddle_moe_ops/compat/paddlefleet.py",),
        (
            *_tests("ops", "paddlefleet"),
            *_tests("scenarios", "paddlefleet_nodes", "swapped_imports"),
            *_tests("distributed", "devices_of_arguments"),
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
            *_tests("ops", "float8_activations", "float8_mlp", "float8_hidden", "float8_operator", "expert_operators"),
            *_tests("ops", "memory"),
            *_tests("ops", "bad_arguments", "side_by_side", "amp_recompute", "explain_layer"),
            *_tests("static", "expert_programs", "float8_programs"),
            *_tests("scenarios", "deferred_in_training", "deferred_weight_gradients", "deferred_schedules"),
            *_tests("scenarios", "float8_wgrads", "messages"),
            *_tests("distributed", "deferred_gradients"),
        ),
    ),
    "float8_layer": Area(
        ("paddle_moe_ops/_float8_layer.py",),
        (
            *_tests("ops", "float8_activations", "float8_mlp", "float8_hidden", "biases", "explain_layer"),
            *_tests("static", "float8_programs"),
            *_tests("scenarios", "float8_programs", "float8_graphs", "messages"),
        ),
    ),
    "triton_layer": Area(
        tuple(f"paddle_moe_ops/triton/{name}.py" for name in ("gemm/types", "gemm/gather_heuristic", "gemm/mlp")),
        (
            *_tests("triton", "moe_mlp"),
            *_tests("ops", "moe_mlp", "explain_layer"),
            *_tests("scenarios", "deferred_weight_gradients"),
        ),
    ),
    "triton_launch": Area(
        tuple(
            f"paddle_moe_ops/triton/{name}.py"
            for name in (
                *("gemm/bias_gradient", "gemm/gpu_facts", "launch/allocator", "launch/dry_run"),
                *("native_recording", "ops/row_id_map", "ops/row_sums", "recording"),
            )
        ),
        (
            *_tests("triton", "bias", "capture", "compile", "moe_mlp", "permute", "recording", "row_id_map"),
            *_tests("triton", "sort_chunks", "unpermute"),
            *_tests("ops", "biases", "explain_layer", "native_functions", "native_recordings", "triton_interpreted"),
            *_tests("ops", "triton_launch", "triton_products", "triton_runtime"),
        ),
    ),
    "exchange": _ranks(
        ("dispatch", "alltoall", "deep_ep", "hybrid_ep"),
        (
            *(
                "plans",
                "transports",
                "deep_ep",
                "hybrid_ep",
                "exchanges_in_flight",
                "arguments_stay",
                "expert_parallel_errors",
                "expert_parallel",
            ),
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
    "channels": _ranks(
        ("channels", "layer_exchanges"),
        (
            *("decoding", "plans", "transports", "exchange_handles", "exchanges_in_flight", "shared_buffers"),
            *("own_transports", "moved_experts", "arguments_stay", "calls_of_ranks", "programs_that_differ"),
            *("expert_parallel", "expert_parallel_errors", "expert_parallel_layer", "closed_layers"),
        ),
    ),
    "flights": _ranks(
        ("exchanges", "streams"),
        (
            *("exchanges_in_flight", "exchange_handles", "expert_parallel", "orders_and_modes", "timeline"),
            *("deferred_gradients", "side_streams", "shared_buffers"),
        ),
    ),
    "token_transports": _ranks(
        ("protocol", "received", "tokens"),
        (
            *("own_transports", "plans", "transports", "deep_ep", "expert_parallel_errors", "expert_parallel"),
            *("expert_parallel_layer", "arguments_stay", "calls_of_ranks", "programs_that_differ"),
            *("exchanges_in_flight", "exchange_handles"),
        ),
    ),
    "placement": _ranks(
        ("placement", "moving"),
        ("placement", "moved_experts", "placement_fleet", "own_transports", "expert_parallel_errors"),
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
    "fleet_optimizers": _ranks(
        ("fleet_optimizers", "loss_scaling"),
        ("fleet", "fleet_programs", "grad_scaler", "ranks_that_do_not_come"),
        (*_tests("ops", "sharded_experts"), *_tests("scenarios", "deferred_in_training", "deferred_schedules")),
        runs_slow=True,
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
    "checkpoints": _ranks(
        ("blocks", "distributed_checkpoint", "fully_sharded", "group_sharded", "shards", "tensor_files"),
        (
            *("blocks", "distributed_checkpoints", "distributed_checkpoint_errors", "group_sharded", "fleet_grids"),
            *("fully_sharded", "fully_sharded_states", "restarts"),
        ),
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
        _tests("core", "layer", "layer_codes", "layer_float8", "layer_plan"),
    ),
    # grouped_checks and float8_checks of common are those of kernels of a GPU, which have no twins on a CPU.
    "csrc_cpu": Area(
        (
            "paddle_moe_ops/csrc/cpu/*.cc",
            *(f"paddle_moe_ops/csrc/common/{name}.cc" for name in ("checks", "chunks", "findings", "status")),
            *(
                f"paddle_moe_ops/csrc/common/{name}_checks.cc"
                for name in ("grouped_row", "index_add", "paddle_float8", "rank", "sample")
            ),
        ),
        ("tests/core/test_*.py",),
    ),
    # The area of fastdeploy has those of its functions.
    "reference": Area(
        ("paddle_moe_ops/reference/[!f]*.py", "paddle_moe_ops/reference/float8_mlp.py"),
        (
            "tests/reference/test_*.py",
            *_tests("ops", "gshard", "incubate_*", "lists_of_matrices", "masked", "moe_mlp", "paddlefleet"),
            *_tests("ops", "paddle_fp8_quantize", "quantized_matrices", "rank_operators", "transformer_engine"),
            *_tests("core", "exchange", "few_tokens", "ranks", "row_id_map"),
            *_tests("scenarios", "float8_wgrads"),
        ),
    ),
}

# Python files of the package that no area has, each with its reason.
NO_AREA = {
    **dict.fromkeys(("masked.py", "dispatch.py", "indexed.py", "rowmaps.py"), "names of compat"),
    "_options.py": "types that only type checkers read, and their strings",
    "_version.py": "a string",
    "compat/__init__.py": "names",
    "expert_parallel/__init__.py": "names",
    "integrations/__init__.py": "names",
    **dict.fromkeys((f"triton/{name}__init__.py" for name in ("", "gemm/", "launch/", "ops/")), "a docstring"),
    **dict.fromkeys((f"triton/{name}/configs.py" for name in ("gemm", "ops")), "configurations change the speed alone"),
    "triton/launch/paddle_device.py": "needs a GPU",
}
