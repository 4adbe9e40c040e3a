# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""paddle.jit.to_static(full_graph=True) transforms the source of its callers, and no source of this package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.jit.dy2static.convert_call_func import convert_call
from paddle.jit.dy2static.program_translator import _FUNCTION_CACHE, convert_to_static

import paddle_moe_ops
from paddle_moe_ops import (
    Float8Matrices,
    Plan,
    QuantizedMatrices,
    discard_dw,
    explain,
    flush_dw,
    moe_mlp,
    patch_paddle,
    patched_paddle,
    permute,
    quantize_experts,
    quantized_experts,
    route,
    unpatch_paddle,
    use_backend,
)
from paddle_moe_ops.compat import (
    fastdeploy,
    fp8,
    gshard,
    incubate_dispatch,
    incubate_gemm,
    incubate_quant,
    incubate_routing,
    paddlefleet,
    transformer_engine,
    transformer_engine_jax,
)
from paddle_moe_ops.nn import (
    ExpertLoad,
    MoEConfig,
    MoELayer,
    RouterOutput,
    SwiGLU,
    SwiGLUExperts,
    TopKRouter,
    attach_loss,
    keep_float8_matrices,
    lay_side_by_side,
    load_balance_loss,
    router_z_loss,
    set_is_first_microbatch,
)
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.every_call import CALLS as OWN_CALLS
from tests.ops.every_call import IDS, PROBS, ROUTED, A, E, H, K, S, T, made_of, ones
from tests.ops.fastdeploy_calls import DYGRAPH_NAMES, FASTDEPLOY_CALLS
from tests.ops.further_calls import OF_GSHARD, OF_INCUBATE
from tests.packaging.public_api import public_modules

pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")

FOLDER = str(Path(paddle_moe_ops.__file__).parent)
# For arrays of NumPy, for several processes, or for models of PaddleFormers.
CALLS = [*OWN_CALLS, *FASTDEPLOY_CALLS]
NO_PROGRAMS = ("reference", "testing", "expert_parallel", "integrations")
OF_DYGRAPH = {ExpertLoad, attach_loss, discard_dw, flush_dw, lay_side_by_side, quantize_experts, quantized_experts}
OF_DYGRAPH |= {gshard.assign_pos, incubate_quant.moe_gate_dispatch_and_quant}
OF_DYGRAPH |= {fastdeploy.patch_fastdeploy, fastdeploy.patched_fastdeploy, fastdeploy.unpatch_fastdeploy}
OF_DYGRAPH |= {getattr(fastdeploy, name) for name in DYGRAPH_NAMES}
OF_DYGRAPH |= {getattr(paddlefleet, name) for name in paddlefleet.__all__}
OF_DYGRAPH |= {getattr(fp8, name) for name in fp8.__all__}


def modules() -> Iterator[Any]:
    yield paddle_moe_ops
    for found in pkgutil.walk_packages(paddle_moe_ops.__path__, "paddle_moe_ops."):
        if found.name.rpartition(".")[2] not in ("__main__", "_C", "_C_pd_"):  # a script, and the library
            yield importlib.import_module(found.name)


def is_ours(value: Any) -> bool:
    return inspect.isfunction(value) and inspect.unwrap(value).__code__.co_filename.startswith(FOLDER)


def functions() -> dict[str, FunctionType]:
    """All functions and methods, but for context managers of `triton`, which knows no Paddle."""
    found = {}
    for module in modules():
        for value in vars(module).values():
            members = vars(value).values() if inspect.isclass(value) else [value]
            for each in filter(is_ours, members):
                is_wrapped = not each.__code__.co_filename.startswith(FOLDER)
                if not (is_wrapped and each.__module__.startswith("paddle_moe_ops.triton.")):
                    found[f"{each.__module__}.{each.__qualname__}"] = each
    return found


def test_no_function_would_be_transformed():
    found = functions()
    assert len(found) > 1000
    assert {name for name, each in found.items() if convert_call(each) is not each} == set()


def test_no_layer_would_be_transformed_that_is_given_to_to_static():
    layers = {value for module in modules() for value in vars(module).values() if inspect.isclass(value)}
    layers = {each for each in layers if issubclass(each, nn.Layer) and is_ours(vars(each).get("forward"))}
    assert {MoELayer, SwiGLU, SwiGLUExperts, TopKRouter} <= layers
    assert {each for each in layers if convert_to_static(each.forward) is not each.forward} == set()


# ---- programs: each a function that makes, from a place, a function and its inputs

Program = Callable[[Any], tuple[Callable[..., Any], list[Any]]]


def program_of(function: Any, arguments: dict[str, Any]) -> Program:
    """A call; its arrays are inputs of the program, apart from those of plans."""
    names = [name for name, value in arguments.items() if isinstance(value, np.ndarray)]

    def make(place: Any) -> tuple[Callable[..., Any], list[Any]]:
        made = {name: made_of(value, place) for name, value in arguments.items()}
        inputs = [made.pop(name) for name in names]

        @paddle.jit.not_to_static  # the caller's own
        def given(tensors):
            return {**made, **dict(zip(names, tensors, strict=True))}

        def call(tensors):
            return function(**given(tensors))

        return call, [inputs]

    return make


def calls() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A call of each function of the package's own families, and of those with other packages' arguments."""
    by_name = {}
    for call in CALLS:
        module = importlib.import_module(f"paddle_moe_ops.{call.name.rpartition('.')[0]}")
        by_name[call.name], function = call.arguments, getattr(module, call.function)
        if function not in OF_DYGRAPH:
            yield call.name, function, call.arguments
    sizes = {"num_tokens": T, "num_experts": E, "hidden_size": H, "scale_hidden_dim": S, "num_out_tokens": ROUTED}
    sizes |= {"num_splits": 3}
    for module, family in ((transformer_engine, "masked"), (transformer_engine_jax, "dispatch")):
        for name in module.__all__:
            function, given = getattr(module, name), dict(by_name[f"{family}.{name}"])
            given |= {"merging_probs": given.get("merging_probs", given.get("probs")), **sizes}
            given |= {"row_id_map": given.get("row_id_map", given.get("chunk_map"))}
            if "fwd_input" in given:
                given |= {"num_out_tokens": len(given["fwd_input"])}
            parameters = inspect.signature(function).parameters
            yield f"{module.__name__}.{name}", function, {each: given[each] for each in parameters if each in given}
    slots = {"x": ones(T * K, H), "scatter_index": np.arange(T * K, dtype=np.int32).reshape(T, K)}
    gate = {"x": ones(T, H), "gate_logits": ones(T, E), "corr_bias": None, "k": K, "capacity": A}
    lengths = {"num_experts": E, "use_group": True, "moe_k": K}
    arguments = {
        "moe_gate_dispatch": gate | {"use_pad": True},
        "moe_gate_dispatch_permute": gate | {"world_size": E},
        "moe_gate_dispatch_partial_nosoftmaxtopk": {
            "x": ones(T, H),
            "combine_weights": PROBS,
            "expert_id": IDS,
            "k": K,
            "capacity": A,
            "num_experts": E,
            "use_pad": True,
            "expert_start_index": 0,
            "expert_end_index": 2,
            "reverse_token_drop": False,
        },
        "moe_combine": slots | {"combine_weights": PROBS},
        "moe_combine_no_weight": slots | {"combine_weight": PROBS},
        "moe_combine_grad": slots | {"combine_weights": PROBS, "grad_y": ones(T, H)},
        "cal_aux_loss": {
            "gate_prob": ones(T, E),
            "dispatch_mask": np.array([2, 1, 1]),
            "tokens_mask": None,
            "dispatch_tokens_mask": None,
            "clip_min": 1e-6,
            **lengths,
        },
        "cal_aux_loss_grad": {
            "gate_prob": ones(T, E),
            "seqlen_float": ones(),
            "ce": ones(E),
            "l_aux_loss_grad": ones(),
            **lengths,
        },
        "int_bincount": {"x": IDS.ravel().clip(0), "low": 0, "high": E, "dtype": paddle.int64},
        "expand_modality_expert_id": {
            "expert_id": IDS.clip(0),
            "num_expert_per_modality": 2,
            "group_size": 3,
            "modality_offset": 1,
            "is_group_expert": True,
        },
        "build_src_rank_and_local_expert_id": {
            "expert_num_global_tensor": np.array([1, 0, 2, 1]),
            "expert_num_global": [1, 0, 2, 1],
            "num_local_experts": 2,
        },
        "batched_gemm": {"lhs": ones(4, H), "rhs": ones(2, H, 3), "batch_sizes": [1, 3]},
    }
    for call in (*OF_INCUBATE, *OF_GSHARD):
        family, _, function = call.name.rpartition(".")
        if family in ("compat.gshard", "compat.incubate_auto", "compat.incubate_backward", "compat.incubate_quant"):
            function = getattr(importlib.import_module(f"paddle_moe_ops.{family}"), call.function)
            if function not in OF_DYGRAPH:
                yield call.name, function, call.arguments
    for module in (incubate_dispatch, incubate_gemm, incubate_routing):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name), arguments[name]


def with_guards(place: Any) -> tuple[Callable[..., Any], list[Any]]:
    counts = np.bincount(IDS[IDS >= 0], minlength=E).tolist()

    def run(x, ids, probs):
        unpatch_paddle()
        with patched_paddle(("permute", "incubate")):
            rows = paddle.nn.functional.moe_permute(x, None, ids, probs, E, counts, A)
        patch_paddle()
        again = paddle.nn.functional.moe_permute(x, None, ids, probs, E, counts, A)
        unpatch_paddle()
        with use_backend("compiled"):
            plan = route(ids, probs, num_experts=E)
            plan = Plan(*plan)
            tokens, _ = permute(x, plan)
        explain()
        return rows[0], again[0], tokens

    return run, [made_of(each, place) for each in (ones(T, H), IDS, PROBS)]


def with_layers(place: Any) -> tuple[Callable[..., Any], list[Any]]:
    paddle.seed(5)
    layer, router, shared, experts = (
        MoELayer(MoEConfig(H, 4, E, K)),
        TopKRouter(H, E, K),
        SwiGLU(H, 4),
        SwiGLUExperts(E, H, 4),
    )
    matrices = experts.gate_up, experts.down

    def run(x):
        ids, probs, scores, logits = RouterOutput(*router(x))
        plan = route(ids, num_experts=E)
        set_is_first_microbatch(layer)
        keep_float8_matrices(layer)
        kept = Float8Matrices()
        out = layer(x) + shared(x) + experts(x, plan=plan, probs=probs, combine=True)
        if kept.is_empty:
            out = out + moe_mlp(x, plan, probs, *matrices)
        weighted = experts.weighted_rows(x, plan, probs)
        losses = layer.aux_loss, layer.z_loss, load_balance_loss(scores, ids), router_z_loss(logits)
        return out, weighted, *losses

    return run, [paddle.randn([T, H])]


def with_codes(place: Any) -> tuple[Callable[..., Any], list[Any]]:
    experts = SwiGLUExperts(E, H, 4).quantize("int8")
    x, ids = made_of(ones(T, H), place), made_of(IDS, place)

    def run(x, ids):
        gate_up = QuantizedMatrices(experts.gate_up_codes, experts.gate_up_scales, "int8", True)
        down = QuantizedMatrices(experts.down_codes, experts.down_scales, "int8", True)
        plan = route(ids, num_experts=E)
        return moe_mlp(x, plan, None, gate_up, down), experts(x, plan=plan, combine=True)

    return run, [x, ids]


PROGRAMS: dict[str, tuple[Program, set[Any]]] = {
    **{name: (program_of(function, arguments), {function}) for name, function, arguments in calls()},
    "guards": (with_guards, {unpatch_paddle, patched_paddle, patch_paddle, use_backend, route, Plan, permute, explain}),
    "codes": (with_codes, {QuantizedMatrices}),
    "layers": (
        with_layers,
        {
            MoEConfig,
            MoELayer,
            TopKRouter,
            SwiGLU,
            SwiGLUExperts,
            RouterOutput,
            keep_float8_matrices,
            set_is_first_microbatch,
            Float8Matrices,
            moe_mlp,
        }
        | {load_balance_loss, router_z_loss},
    ),
}


def test_no_public_name_is_left_out():
    called = OF_DYGRAPH.union(*(names for _, names in PROGRAMS.values()))
    left = {
        f"{module.__name__}.{name}"
        for module in public_modules()
        for name in module.__all__
        if module.__name__.split(".")[1:2] not in [[family] for family in NO_PROGRAMS]
        if callable(getattr(module, name)) and getattr(module, name) not in called
    }
    assert left == set()


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from flat(each)
    elif isinstance(value, paddle.Tensor):
        yield value


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_results_of_dygraph_and_no_source_of_the_package(name, place):
    run, inputs = PROGRAMS[name][0](place)
    expected = list(flat(run(*inputs)))
    got = list(flat(paddle.jit.to_static(run, full_graph=True)(*inputs)))
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        if name == "layers":  # whose router is Paddle's own matmul
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)
        else:
            assert_bits_equal(one, other)
    transformed = {each for each in _FUNCTION_CACHE._converted_static_func_caches if is_ours(each)}
    assert transformed == set()
