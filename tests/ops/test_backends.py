# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of a backend, automatic and explicit, and the fallback if it cannot run."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_moe_ops import _build_check, explain, masked, moe_permute, permute, route, use_backend
from paddle_moe_ops.backends import OPERATORS, _load, _problem, compiled, resolve
from paddle_moe_ops.backends import reference as reference_backend
from tests.ops.problems import make_problem, tensor
from tests.packaging.subprocesses import copy_without_library, run_forked
from tests.params import SMALL

pytestmark = pytest.mark.compiled_only

MISSING = f"the compiled library _C_pd_.so is missing; build it: {_build_check.INSTALL}"
NAMES = "compiled, triton, paddle, reference"
COMPILED = [operator for operator in OPERATORS if operator != "grouped_gemm"]
NO_GPU = "Triton kernels need an NVIDIA GPU, and this is a build of Paddle without GPUs"


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(compiled, "LIBRARY", Path("/nowhere/_C_pd_.so"))
    monkeypatch.setattr(compiled, "_library_problem", compiled._library_problem.__wrapped__)
    monkeypatch.setattr(compiled.backend, "unavailable", compiled._library_problem)


def raises(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def triton_unavailable() -> str | None:
    return _load("triton").unavailable()


def chosen() -> str:
    return resolve("route").name


# ---- choice


@pytest.mark.parametrize("operator", COMPILED)
def test_the_compiled_operators_run_unless_something_else_is_asked_for(operator):
    assert resolve(operator).name == "compiled"


def test_a_grouped_product_runs_on_triton_where_it_can_and_on_paddles_matmul_elsewhere(place):
    on_triton = triton_unavailable() is None
    assert resolve("grouped_gemm").name == ("triton" if on_triton else "paddle")
    narrow, wide = (tensor(np.ones((2, 2), dtype), place) for dtype in (np.float16, np.float32))
    with_triton = "triton" if on_triton and _load("triton").cannot_run_on(narrow) is None else "paddle"
    assert resolve("grouped_gemm", narrow).name == with_triton
    assert resolve("grouped_gemm", wide).name == "paddle"
    assert resolve("grouped_gemm", paddle.static.InputSpec([2, 2], "float16")).name == "paddle"
    for name in ("compiled", "paddle"):
        with use_backend(name):
            assert resolve("grouped_gemm", wide).name == "paddle"
    with use_backend("paddle"):
        assert resolve("grouped_gemm", narrow).name == "paddle"
        assert chosen() == "compiled"


def test_choices_nest_and_end_with_their_block():
    with use_backend("reference"):
        assert chosen() == "reference"
        with use_backend("compiled"):
            assert chosen() == "compiled"
        assert chosen() == "reference"
    assert chosen() == "compiled"


def test_a_choice_ends_when_its_block_is_left_by_an_error():
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert chosen() == "compiled"


def test_a_choice_holds_for_its_own_thread_only():
    seen = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == ["compiled"]


def test_the_variable_chooses_and_an_empty_one_does_not(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "reference")
    assert chosen() == "reference"
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "")
    assert chosen() == "compiled"


def test_use_backend_goes_before_the_variable(monkeypatch):
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "reference")
    with use_backend("compiled"):
        assert chosen() == "compiled"


@pytest.mark.parametrize("name", ["cuda", "", "Compiled", None])
def test_a_backend_that_does_not_exist_is_refused_at_once(name):
    with raises(ValueError, f"use_backend: name must be one of {NAMES}, but got {name!r}"), use_backend(name):
        pytest.fail("the block was entered")


def test_a_bad_variable_is_refused_by_every_operator(monkeypatch, rng, place):
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "fast")
    text = f"PADDLE_MOE_OPS_BACKEND must be one of {NAMES}, but got 'fast'"
    with raises(ValueError, text):
        route(tensor(make_problem(rng, SMALL).ids, place), num_experts=SMALL.E)
    assert f"chosen by: {text}" in explain("route")


# ---- the operators run on the backend that was chosen


def spy(monkeypatch, name):
    """Records calls of a method of the oracle's backend."""
    calls = []
    method = getattr(reference_backend.ReferenceKernels, name)

    def recorded(self, *arguments, **options):
        calls.append(name)
        return method(self, *arguments, **options)

    monkeypatch.setattr(reference_backend.ReferenceKernels, name, recorded)
    return calls


def test_the_chosen_backend_runs(monkeypatch, rng, place):
    calls = spy(monkeypatch, "route")
    ids = tensor(make_problem(rng, SMALL).ids, place)
    route(ids, num_experts=SMALL.E)
    assert calls == []
    with use_backend("reference"):
        route(ids, num_experts=SMALL.E)
    assert calls == ["route"]


def test_backward_stays_on_the_backend_that_ran_forward(monkeypatch, rng, place):
    calls = spy(monkeypatch, "permute_backward")
    problem = make_problem(rng, SMALL)
    x = tensor(problem.x, place, gradient=True)
    plan = route(tensor(problem.ids, place), num_experts=SMALL.E)
    compiled_rows, _ = permute(x, plan)
    with use_backend("reference"):
        reference_rows, _ = permute(x, plan)
        compiled_rows.sum().backward()
    assert calls == []
    compiled_gradient = x.grad.numpy()
    x.clear_grad()
    reference_rows.sum().backward()
    assert calls == ["permute_backward"]
    np.testing.assert_array_equal(x.grad.numpy(), compiled_gradient)


def test_backends_may_be_mixed_in_one_graph(rng, place):
    problem = make_problem(rng, SMALL)
    x, probs = tensor(problem.x, place, gradient=True), tensor(problem.probs, place, gradient=True)
    plan = route(tensor(problem.ids, place), probs, num_experts=SMALL.E)
    with use_backend("reference"):
        rows, _ = permute(x, plan)
    (rows * plan.row_probs.unsqueeze(-1)).sum().backward()
    expected = np.where(problem.ids >= 0, problem.x.sum(axis=1, keepdims=True), 0)
    np.testing.assert_allclose(probs.grad.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert x.grad.shape == x.shape


# ---- a backend that cannot run


def test_an_explicit_choice_that_cannot_run_is_an_error_with_the_alternatives(without_library, rng, place, monkeypatch):
    problem = make_problem(rng, SMALL)
    tensors = tensor(problem.x, place), None, tensor(problem.ids, place), tensor(problem.probs, place)
    text = "moe_permute: the backend 'compiled' chosen by {} cannot run here: " + MISSING
    text += ". Backends that can: " + ("reference" if triton_unavailable() else "triton, reference")
    with use_backend("compiled"), raises(RuntimeError, text.format("use_backend")):
        moe_permute(*tensors, SMALL.E, None, 1)
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "compiled")
    with raises(RuntimeError, text.format("PADDLE_MOE_OPS_BACKEND")):
        moe_permute(*tensors, SMALL.E, None, 1)
    with use_backend("reference"):
        assert len(moe_permute(*tensors, SMALL.E, None, 1)) == 4


def test_the_oracle_never_stands_in_silently(without_library, rng, place):
    ids = tensor(make_problem(rng, SMALL).ids, place)
    triton_is_wrong = _problem("triton", ids)
    if triton_is_wrong is None:
        assert resolve("route", ids).name == "triton"
        return
    text = f"route: no backend can run it here: compiled: {MISSING}; triton: {triton_is_wrong}. "
    with raises(RuntimeError, text + "The slow NumPy oracle runs everywhere: use_backend('reference')"):
        route(ids, num_experts=SMALL.E)


def test_a_package_without_its_library_can_be_imported_and_used_on_request(tmp_path):
    copy_without_library(tmp_path)
    done = run_forked(
        "import paddle, paddle_moe_ops as ops\n"
        "ids = paddle.zeros([2, 1], dtype='int32')\n"
        "try:\n"
        "    ops.route(ids, num_experts=1)\n"
        "    print(ops.explain('route').splitlines()[0])\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "with ops.use_backend('reference'):\n"
        "    print(ops.route(ids, num_experts=1).tokens_per_expert.tolist())\n",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    outcome, counts = done.stdout.splitlines()
    if triton_unavailable():
        assert outcome.startswith(f"route: no backend can run it here: compiled: {MISSING}; triton: ")
    else:
        assert outcome == "route: triton in dygraph, none in static graphs"
    assert counts == "[2]"


# ---- explain

PADDLE = "backend paddle (GEMMs by kernels of this package, or by Paddle's matmul)"


def test_explain_names_a_backend_for_every_operator():
    lines = explain().splitlines()
    on_triton = "grouped_gemm: triton in dygraph, paddle in static graphs"
    assert lines == [
        *(f"{operator}: compiled" for operator in COMPILED),
        "grouped_gemm: paddle" if triton_unavailable() else on_triton,
        "moe_mlp: decided by the backend of grouped_gemm, and the arguments: "
        "explain('moe_mlp', x, plan, probs, gate_up, down)",
        "chosen by: automatic (first available)",
        "backends on this machine, for all of these operators:",
        "backend compiled: available",
        f"backend triton (dygraph only): {'unavailable: ' + NO_GPU if triton_unavailable() else 'available'}",
        f"{PADDLE}: available",
        "backend reference (on request only): available",
        "paddle.nn.functional.moe_permute and moe_unpermute: Paddle itself",
    ]


@pytest.mark.parametrize("with_triton", [True, False])
def test_explain_names_gpus_without_compiled_kernels(with_triton, monkeypatch):
    monkeypatch.setattr(compiled, "gpus_without_kernels", lambda: {1: "it is too old"})
    monkeypatch.setattr(_load("triton"), "unavailable", lambda: None if with_triton else "it is missing")
    lines = explain("route").splitlines()
    what = "triton, in dygraph," if with_triton else "none"
    assert lines[0] == f"route: compiled; {what} on GPUs without compiled kernels"
    assert "GPU 1 runs on no compiled kernels: it is too old" in lines
    with use_backend("compiled"):
        assert explain("route").splitlines()[0] == "route: compiled"


@pytest.mark.parametrize("operator", OPERATORS)
def test_explain_of_one_operator_follows_the_choice(operator, monkeypatch):
    with use_backend("reference"):
        assert explain(operator).splitlines()[:2] == [f"{operator}: reference", "chosen by: use_backend"]
    monkeypatch.setenv("PADDLE_MOE_OPS_BACKEND", "reference")
    assert explain(operator).splitlines()[:2] == [f"{operator}: reference", "chosen by: PADDLE_MOE_OPS_BACKEND"]


def test_explain_says_why_a_backend_is_missing(without_library):
    text = explain("unpermute")
    assert f"backend compiled: unavailable: {MISSING}\n" in text
    missing = "none (unpermute: no backend can run it here: "
    assert text.startswith(
        f"unpermute: {missing if triton_unavailable() else 'triton in dygraph, none in static graphs'}"
    )


def test_explain_names_no_backend_for_static_graphs_where_only_triton_runs(without_library, monkeypatch):
    monkeypatch.setattr(_load("triton"), "unavailable", lambda: None)
    assert explain("unpermute").splitlines()[0] == "unpermute: triton in dygraph, none in static graphs"


def test_explain_says_which_backends_do_not_have_the_operator():
    lines = explain("permute").splitlines()
    assert "backends on this machine, for permute:" in lines
    assert f"{PADDLE}: has no permute" in lines
    assert f"{PADDLE}: available" in explain("grouped_gemm").splitlines()
    assert f"{PADDLE}: available" in explain().splitlines()


def test_explain_refuses_an_operator_that_does_not_exist():
    with raises(ValueError, f"explain: operator must be one of {', '.join(OPERATORS)}, moe_mlp, but got 'sort'"):
        explain("sort")


def routes(ids):
    return route(ids, num_experts=3)[0]


def makes_a_map(ids):
    return masked.make_row_id_map(ids > 0)[0]


def reads_a_map(ids):
    return masked.moe_unpermute(ids.astype("float32"), ids[:, :1].flatten(), map_type="index")


@pytest.mark.compiled_only
@pytest.mark.parametrize("program", [routes, makes_a_map, reads_a_map])
def test_the_oracle_says_that_it_cannot_run_in_a_static_graph(program):
    ids = paddle.to_tensor([[0, 1, 2], [1, 2, 0]], dtype="int32")
    with (
        use_backend("reference"),
        pytest.raises(RuntimeError, match="the backend 'reference' chosen by use_backend cannot run here"),
    ):
        paddle.jit.to_static(program, full_graph=True)(ids)
