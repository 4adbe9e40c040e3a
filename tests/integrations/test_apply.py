# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`apply`: replacements, reports and errors; `remove` restores everything."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

import paddle_moe_ops
import paddle_moe_ops.integrations.paddleformers as pf

from .models import CASES, batch, build, loss_of, type_of

CASE = "qwen3_moe-stacked"


def load(path: str) -> tuple[type, str]:
    """The class and the method's name of a path that `supported` gives."""
    module, class_name, method = path.rsplit(".", 2)
    return getattr(importlib.import_module(module), class_name), method


def methods() -> dict[str, object]:
    """The attribute of each class that could be patched, under the method's name."""
    found = {}
    for each in pf.supported().values():
        for path in each.methods:
            cls, method = load(path)
            found[path] = vars(cls).get(method)
    return found


def test_every_type_that_is_listed_is_tested_with_each_method_of_its_own():
    elsewhere = {"glm4v_moe", "qwen3_next", "qwen3_vl_moe"}  # classes of the others; test_qwen3_vl.py
    assert {type_of(case) for case in CASES} == set(pf.supported()) - elsewhere
    for name, each in pf.supported().items():
        assert each.methods, name
        assert "1.2.0" in each.versions


@pytest.mark.parametrize("name", [*pf.supported(), "all"])
def test_names_patch_classes_and_remove_restores_the_very_functions(name):
    before = methods()
    report = pf.apply(name)
    after = methods()
    listed = [path for key, each in pf.supported().items() if name in (key, "all") for path in each.methods]
    assert set(report.patched) == set(listed)
    assert {path for path in after if after[path] is not before[path]} == set(listed)
    pf.remove(name)
    assert all(now is before[path] for path, now in methods().items())


def test_applying_twice_changes_nothing_and_one_removal_is_enough():
    before = methods()
    first = pf.apply("qwen3_moe")
    patched = methods()
    assert pf.apply("qwen3_moe") == first
    assert methods() == patched
    pf.remove("qwen3_moe")
    assert methods() == before
    pf.remove("qwen3_moe")
    assert methods() == before


@pytest.mark.parametrize(("one", "other"), [("glm4_moe", "glm4v_moe"), ("qwen2_moe", "qwen3_next")])
def test_types_that_share_classes_stay_patched_until_both_are_removed(one, other):
    before = methods()
    with pf.applied(other):
        patched = methods()
        pf.apply(one)
        pf.remove(one)
        assert methods() == patched
        pf.apply(one)
    assert methods() != before
    pf.remove(one)
    assert methods() == before


def test_a_type_stays_patched_after_two_others_are_removed():
    before = methods()
    for name in ("qwen2_moe", "qwen3_moe", "gpt_oss"):
        pf.apply(name)
    for name in ("gpt_oss", "qwen2_moe"):
        pf.remove(name)
    after = methods()
    assert {path for path in after if after[path] is not before[path]} == set(pf.supported()["qwen3_moe"].methods)
    assert "PaddleFormers on this package: qwen3_moe" in paddle_moe_ops.explain("route")


def test_a_context_restores_what_was_before():
    before = methods()
    with pf.applied("qwen3_moe"):
        patched = methods()
        with pf.applied("all"):
            assert methods() != patched
        assert methods() == patched
    assert methods() == before


def test_a_context_ends_with_an_error_too():
    before = methods()
    with pytest.raises(KeyError), pf.applied("all"):
        raise KeyError
    assert methods() == before


def test_a_model_of_its_own_is_patched_alone():
    before, model, other = methods(), build(CASE), build(CASE)
    original = type(model.model.layers[0].mlp.experts).forward
    with pf.applied(model) as report:
        assert methods() == before
        assert model.model.layers[0].mlp.experts.forward.__func__ is not original
        assert other.model.layers[0].mlp.experts.forward.__func__ is original
        assert any(name.startswith("model.layers.2.mlp.experts (Qwen3MoeExperts.forward)") for name in report.patched)
        assert pf.apply(model) == report
    assert model.model.layers[0].mlp.experts.forward.__func__ is original
    assert all("forward" not in vars(layer) for layer in model.sublayers(include_self=True))


def test_a_context_of_a_patched_model_leaves_it_patched():
    model = build(CASE)
    pf.apply(model)
    with pf.applied(model):
        pass
    assert "forward" in vars(model.model.layers[0].mlp.experts)


def test_a_subclass_is_patched_unless_it_has_a_method_of_its_own():
    model = build("qwen3_moe")
    block = model.model.layers[1].mlp
    block.__class__ = type("Renamed", (type(block),), {})
    assert "model.layers.1.mlp (Renamed.forward)" in pf.apply(model).patched
    pf.remove(model)
    block.__class__ = type("Changed", (type(block),), {"forward": lambda self, x: (x, None)})
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp \(Changed\.forward\): .*Changed\.forward is not the code"):
        pf.apply(model)
    assert "forward" not in vars(model.model.layers[0].mlp)


def test_removing_a_name_keeps_single_models_and_the_other_way_round():
    model = build(CASE)
    pf.apply(model)
    pf.apply("qwen3_moe")
    pf.remove("all")
    assert "forward" in vars(model.model.layers[0].mlp.experts)
    pf.apply("qwen3_moe")
    patched = methods()
    pf.remove(model)
    assert "forward" not in vars(model.model.layers[0].mlp.experts)
    assert methods() == patched


def test_a_copy_of_a_patched_model_runs_its_own_blocks():
    model = build(CASE)
    pf.apply(model)
    expected = float(loss_of(model, batch()))
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    assert float(loss_of(twin, batch())) == expected


def test_another_type_stays_as_it_is():
    other = build("deepseek_v3-stacked")
    expected = loss_of(other, batch()).numpy()
    with pf.applied("qwen3_moe"):
        assert loss_of(other, batch()).numpy() == expected


def test_the_report_says_what_was_left_and_why():
    report = pf.apply("qwen3_moe")
    assert report.version == "1.2.0"
    assert dict(report.left)["Qwen3MoeForCausalLM"].startswith("builds a model of PaddleFleet")
    assert "patched: paddleformers.transformers.qwen3_moe.modeling.Qwen3MoeExperts.forward" in str(report)
    assert "left: Qwen3MoeForCausalLM: builds" in str(report)


def test_explain_names_what_is_applied():
    assert "PaddleFormers" not in paddle_moe_ops.explain("route")
    pf.apply("qwen3_moe")
    assert "PaddleFormers on this package: qwen3_moe" in paddle_moe_ops.explain("route")


@pytest.mark.parametrize("wrong", ["qwen3", "", "ALL"])
def test_unknown_names_are_refused(wrong):
    for function in (pf.apply, pf.remove):
        with pytest.raises(ValueError, match=r"name_or_model must be one of .*'qwen3_moe'"):
            function(wrong)


def test_a_type_that_needs_the_operators_alone_says_which():
    for function in (pf.apply, pf.remove):
        with pytest.raises(ValueError, match=r"after patch_paddle\(\('permute', 'incubate', 'gemm'\)\) as they are"):
            function("ernie4_5_moe_vl")


def test_other_things_are_refused():
    for function in (pf.apply, pf.remove):
        with pytest.raises(TypeError, match=r"name_or_model must be a name or a paddle\.nn\.Layer, but got int"):
            function(3)


def test_a_model_without_known_blocks_is_refused():
    with pytest.raises(ValueError, match="the model must have blocks that supported"):
        pf.apply(paddle.nn.Linear(2, 3))


def test_a_block_of_another_class_is_named():
    class Other(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.experts = paddle.nn.LayerList([paddle.nn.Linear(2, 3)])

    with pytest.raises(ValueError, match=r"\(Other\): no replacement for this class"):
        pf.apply(Other())


def test_code_of_another_version_is_refused_and_nothing_is_patched(monkeypatch):
    cls, _ = load("paddleformers.transformers.qwen3_moe.modeling.Qwen3MoeExperts.forward")
    model = build(CASE)
    monkeypatch.setattr(cls, "forward", lambda self, x, ids, weights: x)
    before = methods()
    for what in ("qwen3_moe", "all", model):
        with pytest.raises(RuntimeError, match=r"Qwen3MoeExperts\.forward is not the code of PaddleFormers 1\.2\.0"):
            pf.apply(what)
        assert methods() == before
        assert not any("forward" in vars(layer) for layer in model.sublayers())


def test_a_layer_with_a_method_of_its_own_is_refused():
    model = build(CASE)
    experts = model.model.layers[1].mlp.experts
    experts.forward = experts.forward
    with pytest.raises(RuntimeError, match="replaced by something else"):
        pf.apply(model)
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_a_method_that_was_replaced_since_is_not_overwritten():
    path = "paddleformers.transformers.qwen3_moe.modeling.Qwen3MoeExperts.forward"
    cls, _ = load(path)
    pf.apply("qwen3_moe")
    ours = cls.forward
    cls.forward = theirs = lambda self, x, ids, weights: x
    with pytest.raises(RuntimeError, match="was replaced by something else since"):
        pf.remove()
    assert cls.forward is theirs
    cls.forward = ours


def test_tensor_parallel_processes_are_refused(monkeypatch):
    model, before = build(CASE), methods()
    groups = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
    monkeypatch.setattr(fleet.fleet, "_hcg", groups, raising=False)
    for what in ("qwen3_moe", "all", model):
        with pytest.raises(RuntimeError, match="tensor parallelism of size 2 is not supported"):
            pf.apply(what)
    assert methods() == before


def test_one_process_of_a_group_is_not_refused(monkeypatch):
    groups = SimpleNamespace(get_model_parallel_world_size=lambda: 1)  # as without expert parallelism
    monkeypatch.setattr(fleet.fleet, "_hcg", groups, raising=False)
    assert pf.apply("qwen3_moe").patched


def test_stacked_experts_with_another_activation_are_refused():
    model = build(CASE)
    model.model.layers[2].mlp.experts.act_fn = paddle.nn.GELU()
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts .*the activation is GELU instead of silu"):
        pf.apply(model)
    assert "forward" not in vars(model.model.layers[0].mlp.experts)
    with pf.applied("qwen3_moe"), pytest.raises(RuntimeError, match="Qwen3MoeExperts: the activation is GELU"):
        loss_of(model, batch())


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("tensor_model_parallel_size", 2, "tensor_model_parallel_size is 2"),
        ("sequence_parallel", True, "sequence_parallel is set"),
    ],
    ids=lambda each: each if isinstance(each, str) and "_" in each and " " not in each else "",
)
def test_blocks_that_are_configured_for_tensor_parallelism_are_refused(case, setting, value, reason):
    model = build(case)
    first, last = model.model.layers[1].mlp, model.model.layers[2].mlp
    last.config = copy.deepcopy(last.config)
    setattr(last.config, setting, value)
    with pytest.raises(ValueError, match=rf"layers\.2\.mlp .*: {reason}, which is not supported"):
        pf.apply(model)
    assert not any(name in vars(first) for name in ("forward", "moe"))
    with pf.applied(type_of(case)):
        first(paddle.zeros([1, 2, 48]))
        with pytest.raises(RuntimeError, match=f"{type(last).__name__}: {reason}"):
            last(paddle.zeros([1, 2, 48]))


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "ernie4_5_moe"])
def test_a_block_that_has_all_experts_runs_them_whatever_the_size_of_expert_parallelism(case, rng):
    block, x = build(case).model.layers[1].mlp, paddle.to_tensor(rng.standard_normal((2, 7, 48)), "float32")
    expected = block(x)
    block.config.expert_model_parallel_size = 4
    with pf.applied(block):
        found = block(x)
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("sequence_parallel", True, "sequence_parallel is set"),
        ("limit", 5.0, "alpha and limit are 1.702 and 5.0 instead of 1.702 and 7.0"),
        ("alpha", 1.0, "alpha and limit are 1.0 and 7.0 instead of 1.702 and 7.0"),
    ],
)
def test_experts_of_gpt_oss_with_other_settings_are_refused(name, value, reason):
    model = build("gpt_oss")
    setattr(model.model.layers[2].mlp.experts, name, value)
    with pytest.raises(ValueError, match=rf"layers\.2\.mlp\.experts .*: {reason}, which is not supported"):
        pf.apply(model)
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_layers_of_other_classes_in_a_model_are_reported():
    class Other(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.experts = paddle.nn.LayerList([paddle.nn.Linear(2, 3)])

    report = pf.apply(paddle.nn.Sequential(build("qwen3_moe"), Other()))
    assert report.left == (("1 (Other)", "no replacement for this class"),)
    assert report.patched == tuple(f"0.model.layers.{i}.mlp (Qwen3MoeSparseMoeBlock.forward)" for i in range(3))


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_importing_the_integration_imports_no_paddleformers():
    program = "import sys, paddle_moe_ops.integrations.paddleformers as pf; pf.supported()"
    assert "False" in run(f"{program}; print('paddleformers' in sys.modules)")


def test_without_paddlefleet_the_types_that_need_it_are_left():
    """In a process of its own, where the stand-ins of these tests are not installed."""
    out = run(
        "import paddle_moe_ops.integrations.paddleformers as pf\n"
        "try:\n    pf.apply('qwen3_moe')\n"
        "except RuntimeError as error:\n    print(error)\n"
        "try:\n    print(pf.apply('all'))\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    assert "apply: qwen3_moe cannot be imported from PaddleFormers: " in out
    reasons = [line for line in out.splitlines() if "cannot be imported" in line]
    assert len(reasons) == len(pf.supported()) - 2 + 1
    # PaddleFormers' own advice is `pip install paddlefleet`, a name that PyPI does not have.
    assert all("which is not on PyPI" in line and "pip install" not in line for line in reasons)
    patched = {line.split(".transformers.")[1].split(".")[0] for line in out.splitlines() if "patched: " in line}
    assert patched == {"ernie4_5_moe", "gpt_oss"}  # as README.md says
