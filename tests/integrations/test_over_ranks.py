# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose experts are spread over two processes train as those of PaddleFormers in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from tests.distributed.processes import Processes

from . import ranks
from .models import assert_close, build, loss_of

WITHOUT_LOSSES = {"router_aux_loss_coef": 0.0}  # of the router: each rank would have its own
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 10}, "ModularMoELayer"),
    "qwen3_moe-unnormalised": ("qwen3_moe-unnormalised", {"num_experts": 10}, "ModularMoELayer"),
    "deepseek_v3": ("deepseek_v3", {}, "DeepseekV3MoEFlexToken"),
    "glm4_moe": ("glm4_moe", {"seq_length": 17}, "Glm4MoeFlexMoE"),
    "glm4_moe-unified": ("glm4_moe", {"use_unified_moe": True}, "ModularMoELayer"),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_group": "world", "router_z_loss_coef": 0.0, "moe_orthogonal_loss_lambda": 0.0},
        "Ernie4_5_MoeSparseMoeBlock",
    ),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EACH = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def two():
    """Two processes with Fleet's groups."""
    made = Processes(2, "gloo")
    yield made
    made.stop()


def settings(name: str) -> dict[str, Any]:
    """Keyword arguments of the programs of `ranks` for a case."""
    case, changes, _ = CASES[name]
    return {"case": case, **WITHOUT_LOSSES, **changes}


def alone(
    case: str, steps: int = 1, biased: bool = False, **changes: Any
) -> tuple[dict[str, NDArray], list[tuple[float, dict[str, NDArray]]]]:
    """PaddleFormers in one process on the sequences of all ranks: first state, losses and gradients.

    Args:
        case: of `models.CASES`.
        steps: how many, of plain gradient descent.
        biased: whether a correction bias lets no token choose an expert of the second rank.
        **changes: settings; the group is left out.
    """
    model = build(case, **{key: each for key, each in changes.items() if key != "moe_group"})
    if biased:
        for key, value in model.state_dict().items():
            if key.endswith("e_score_correction_bias"):
                value.set_value((paddle.arange(10) < 5).astype("float32").reshape(value.shape) * 100.0)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    found = []
    for _ in range(steps):
        total = 0.0
        for rank in range(2):
            tokens, share = ranks.part(rank)
            loss = loss_of(model, tokens) * share
            loss.backward()
            total += float(loss)
        found.append((total, {key: p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None}))
        ranks.descend(model)
    return state, found


def assert_like_one_process(of_ranks, expected, tolerance):
    """Losses add up, gradients too; those of an expert are where it is."""
    for step, (loss, gradients) in enumerate(expected):
        found = [each[step] for each in of_ranks]
        assert sum(each[0] for each in found) == pytest.approx(loss, abs=1e-5)
        for name, value in gradients.items():
            there = [each[1][name] for each in found if name in each[1]]
            assert len(there) == (1 if ".experts." in name else 2), name
            largest = np.abs(value).max()
            np.testing.assert_allclose(sum(there), value, rtol=0, atol=tolerance * max(largest, 1e-8), err_msg=name)


@EACH
def test_a_rank_has_half_of_the_experts(two, name):
    first, second = two.call(ranks.block_name, settings(name))
    assert first == (CASES[name][2], [True] * 5 + [False] * 5)
    assert second == (CASES[name][2], [False] * 5 + [True] * 5)


@pytest.mark.parametrize(
    ("case", "class_name", "holds"),
    [
        ("qwen3_moe-stacked", "ModularMoELayer", [True] * 5 + [False] * 5),
        ("deepseek_v3-stacked", "DeepseekV3MoEFlexToken", [True] * 5 + [False] * 5),
        ("glm4_moe-stacked", "Glm4MoeFlexMoE", [True] * 5 + [False] * 5),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock", [True] * 10),
        ("qwen2_moe-stacked", "Qwen2MoeSparseMoeBlock", []),
        ("gpt_oss", "GptOssMLP", []),
    ],
)
def test_what_paddleformers_builds_for_stacked_experts_and_other_types(two, case, class_name, holds):
    """docs/integrations.md says so: no stacked experts over ranks, and types with all experts on each rank."""
    changes = {"num_experts": 10} if case.startswith("qwen") else {}
    assert two.call(ranks.block_name, {"case": case, **changes})[0] == (class_name, holds)


@EACH
@pytest.mark.parametrize("options", [{"patch": "class"}, {"patch": "model"}, {"hooks": True}], ids=str)
def test_losses_and_gradients_are_those_of_one_process(two, name, options):
    state, expected = alone(**settings(name))
    of_ranks = two.call(ranks.trained, {**settings(name), "state": state, **options})
    assert_like_one_process([each.steps for each in of_ranks], expected, 5e-6)
    assert any(CASES[name][2] in each for each in of_ranks[0].patched)


@EACH
def test_training_goes_on_like_that(two, name):
    state, expected = alone(**settings(name), steps=4)
    of_ranks = two.call(ranks.trained, {**settings(name), "state": state, "steps": 4})
    assert_like_one_process([each.steps for each in of_ranks], expected, 2e-4)
    assert expected[-1][0] < expected[0][0] - 0.05


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *((name, FULL) for name in CASES),
        ("ernie4_5_moe", {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ],
)
def test_recomputed_layers_give_the_same_gradients(two, name, recompute):
    state, expected = alone(**settings(name))
    of_ranks = two.call(ranks.trained, {**settings(name), "state": state, **recompute})
    assert_like_one_process([each.steps for each in of_ranks], expected, 5e-6)
    if name == "ernie4_5_moe":
        assert sum(int(each.usage.sum()) for each in of_ranks) == 3 * sum(ranks.LENGTHS)  # counted once


@pytest.mark.parametrize(
    ("name", "evaluates"),
    [*((name, False) for name in CASES if name != "ernie4_5_moe"), ("glm4_moe", True)],
)
def test_losses_and_gradients_are_those_of_paddleformers_on_the_same_ranks(two, name, evaluates):
    """In evaluation mode the router's loss has no gradient."""
    program = {**settings(name), "state": alone(**settings(name))[0], "router_aux_loss_coef": 0.1}
    program["evaluates"] = evaluates
    expected = two.call(ranks.trained, {**program, "patch": "nothing"})
    for found, theirs in zip(two.call(ranks.trained, program), expected, strict=True):
        assert found.patched
        assert not theirs.patched
        assert found.steps[0][0] == pytest.approx(theirs.steps[0][0], abs=1e-5)
        assert_close(found.steps[0][1], theirs.steps[0][1])


@pytest.mark.parametrize("hooks", [False, True], ids=["lists", "layers"])
@pytest.mark.parametrize("name", ["ernie4_5_moe", "deepseek_v3", "glm4_moe", "glm4_moe-unified"])
def test_a_rank_whose_experts_get_no_token_takes_part(two, name, hooks):
    state, expected = alone(**settings(name), steps=2, biased=True)
    program = {**settings(name), "state": state, "steps": 2, "hooks": hooks}
    of_ranks = [each.steps for each in two.call(ranks.trained, program)]
    idle = {key: each for key, each in of_ranks[1][0][1].items() if ".experts." in key}
    assert idle
    assert all(not each.any() for each in idle.values())
    for _, gradients in expected:
        for key in idle:
            gradients.setdefault(key, np.zeros_like(idle[key]))  # GLM-4 in one process gives none
    assert_like_one_process(of_ranks, expected, 2e-5)


@EACH
def test_evaluation_gives_the_logits_of_one_process(two, name):
    state, _ = alone(**settings(name))
    model = build(**{key: each for key, each in settings(name).items() if key != "moe_group"})
    model.set_state_dict({key: paddle.to_tensor(each) for key, each in state.items()})
    model.eval()
    for rank, found in enumerate(two.call(ranks.logits, {**settings(name), "state": state})):
        with paddle.no_grad():
            expected = model(input_ids=ranks.part(rank)[0], return_dict=True).logits.numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen2_moe-stacked", "gpt_oss"])
def test_types_with_all_experts_on_each_rank_exchange_nothing(two, case):
    state, [(loss, expected)] = alone(case, **WITHOUT_LOSSES)
    program = {"case": case, "state": state, **WITHOUT_LOSSES}
    of_ranks = [each.steps[0] for each in two.call(ranks.trained, program)]
    assert sum(each[0] for each in of_ranks) == pytest.approx(loss, abs=1e-5)
    for name, value in expected.items():
        there = [each[1][name] for each in of_ranks if name in each[1]]
        np.testing.assert_allclose(sum(there), value, rtol=0, atol=5e-6 * max(np.abs(value).max(), 1e-8), err_msg=name)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("tensor_model_parallel_size", 2, "tensor_model_parallel_size is 2"),
        ("sequence_parallel", True, "sequence_parallel is set"),
    ],
)
@EACH
def test_blocks_that_are_configured_for_tensor_parallelism_are_refused(two, name, setting, value, reason):
    for answer in two.call(ranks.answer_to, {**settings(name), "setting": setting, "value": value}):
        assert f"model.layers.2.mlp ({CASES[name][2]}." in answer
        assert answer.endswith(f": {reason}, which is not supported")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("is_mp_moe", "its experts are spread over the ranks of a tensor parallel group"),
        ("global_aux_loss", "global_aux_loss is set for 2 ranks"),
    ],
)
def test_blocks_of_ernie_that_cannot_be_run_are_refused(two, setting, reason):
    for answer in two.call(ranks.answer_to, {**settings("ernie4_5_moe"), "setting": setting, "value": True}):
        assert answer.endswith(f": {reason}, which is not supported")


@pytest.mark.parametrize("length", [7, 19], ids=["fewer tokens than experts", "more"])
@pytest.mark.parametrize("aux_free", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_block_of_ernie_counts_and_weighs_as_paddleformers_does(two, scoring, aux_free, length, rng):
    changes = {"scoring_func": scoring, "moe_use_aux_free": aux_free, "router_aux_loss_coef": 0.5}
    changes |= {"router_z_loss_coef": 0.25, "moe_orthogonal_loss_lambda": 0.125}
    model = build("ernie4_5_moe", **changes)
    block = model.model.layers[1].mlp
    if aux_free:
        bias = block.moe_statics.e_score_correction_bias
        bias.set_value(paddle.to_tensor(rng.uniform(-0.1, 0.1, bias.shape), "float32"))
    tokens = [rng.standard_normal((1, length, 48)).astype(np.float32) for _ in range(2)]
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    of_ranks = two.call(ranks.block_of_ernie, {"state": state, "tokens": tokens, **changes})

    x = paddle.to_tensor(np.concatenate(tokens), stop_gradient=False)
    out, weights, _, _ = block(x)
    (out * out).sum().backward()
    expected = {key: p.grad.numpy() for key, p in block.named_parameters() if p.grad is not None}
    expected |= {"x": x.grad.numpy(), "out": out.detach().numpy(), "weights": weights.numpy()}
    for key, value in expected.items():
        there = [found[key] for found, _, _ in of_ranks if key in found]
        joined = np.concatenate(there) if key in ("x", "out", "weights") else sum(there)
        np.testing.assert_allclose(joined, value, rtol=0, atol=5e-6 * np.abs(value).max(), err_msg=key)
    for rank, (_, (ours, theirs), (usage, counts)) in enumerate(of_ranks):
        for found, value in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(found, value, rtol=0, atol=5e-6 * np.abs(value).max())
        if aux_free:
            own = np.arange(10) // 5 == rank
            np.testing.assert_array_equal(usage, np.where(own, counts, 0))
