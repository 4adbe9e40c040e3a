# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Code in docs/migrating*.md runs as it stands, and statements about Unsloth hold."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import paddle

from paddle_moe_ops import gemm, indexed, moe_unpermute, route
from paddle_moe_ops.compat import fastdeploy, paddlefleet
from paddle_moe_ops.compat.paddle import NAMES_OF_FAMILIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, OF_UNSLOTH, OF_FASTDEPLOY, OF_PADDLEFLEET = (
    (DOCS / f"migrating{name}.md").read_text(encoding="utf-8")
    for name in ("", "_unsloth", "_fastdeploy", "_paddlefleet")
)
SECTION = OF_UNSLOTH.partition("## From Unsloth's")[2].partition("\n## ")[0]
CALLS = re.findall(r"^\| `(.*?)` \|", SECTION.partition("| function |")[2].partition("\n\n")[0], re.MULTILINE)


def test_unsloths_calls_and_the_plan_give_the_same_output():
    names: dict = {}
    outputs = []
    for code in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL):
        exec(code, names)
        outputs.append(names["out"].numpy())
    by_indices, *by_plan = outputs
    assert len(by_plan) == 3  # step by step, with permutation and weights inside the products, and all of it to slots
    for each in by_plan:
        np.testing.assert_allclose(by_indices, each, rtol=1e-4, atol=1e-4 * np.abs(by_indices).max())


def test_the_table_of_incubate_has_every_name_of_every_family():
    section = PAGE.partition("## From `paddle.incubate.nn.functional`")[2].partition("\n## ")[0]
    written: dict[str, set[str]] = {}
    for family, names in re.findall(r"^\| (\w+) \| (`.*?`) \|", section, re.MULTILINE):
        written.setdefault(family, set()).update(re.findall(r"`(?:_(?:legacy_)?C_ops\.)?(\w+)`", names))
    assert written == {family: set(names) for family, names in NAMES_OF_FAMILIES.items()}


def test_the_page_of_fastdeploy_names_every_function():
    assert set(fastdeploy.__all__) <= set(re.findall(r"\w+", OF_FASTDEPLOY))


def test_the_layer_of_paddlefleets_operators_gives_the_sum_of_the_pair():
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", OF_PADDLEFLEET, re.DOTALL):
        exec(code, names)
    rows, rowmap, row_probs, _ = names["moe_permute"](
        names["x"], None, names["ids"], names["probs"], 4, names["counts"], 1
    )
    parts = zip(rows.split(names["counts"]), names["weights"], strict=True)
    rows = paddle.concat([paddle.matmul(part, weight) for part, weight in parts])
    given = rowmap, names["ids"], row_probs, 63, 4
    expected = moe_unpermute(rows, *given, using_weighted_combine=True)[0].numpy()
    np.testing.assert_allclose(names["out"].astype("float32").numpy(), expected, atol=2.0**-7 * np.abs(expected).max())


def test_the_table_of_paddlefleet_has_every_function():
    calls = re.findall(r"^\| `(\w+)\((.*?)\)` \|", OF_PADDLEFLEET, re.MULTILINE)
    expected = {name: list(inspect.signature(getattr(paddlefleet, name)).parameters) for name in paddlefleet.__all__}
    assert {name: arguments.split(", ") for name, arguments in calls} == expected


def test_the_table_has_a_call_of_every_function():
    functions = [call.partition("(")[0] for call in CALLS]
    assert set(functions) == {*indexed.__all__, *gemm.__all__}
    assert functions.count("grouped_gemm") == 3


def test_the_calls_of_the_table_give_what_numpy_says():
    """Each as it is written there, by position."""
    rng = np.random.default_rng(0)
    T, K, E, H, N = 7, 3, 5, 4, 6
    x, matrices = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, H), (E, N, H)))
    logits = rng.standard_normal((T, E)).astype(np.float32)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    ids = np.argsort(-scores, axis=1)[:, :K]
    weights = np.take_along_axis(scores, ids, axis=1)
    weights /= weights.sum(axis=1, keepdims=True)
    flat = ids.reshape(-1)
    gather = np.argsort(flat, kind="stable")
    sizes = np.bincount(flat, minlength=E)
    rows = x[gather // K]
    by_row = np.einsum("rh,rnh->rn", rows, matrices[flat[gather]])
    by_slot = by_row[np.argsort(gather)]
    plan = route(paddle.to_tensor(ids), num_experts=E)

    options = {"topk": K, "top_k": K, "num_experts": E, "plan": plan, "return_scatter_indices": True, "transpose": True}
    options |= {"use_sigmoid": False, "renormalize": True, "pre_act": True, "post_act": False}
    names = {
        **vars(indexed),
        "grouped_gemm": gemm.grouped_gemm,
        **options,
        "gather_indices": paddle.to_tensor(gather),
        "selected_experts": paddle.to_tensor(flat),
        "gating_output": paddle.to_tensor(logits),
        "weights": paddle.to_tensor(weights),
        "W": paddle.to_tensor(matrices),
        "m_sizes": paddle.to_tensor(sizes),
    }
    in_rows = paddle.to_tensor(rows)
    expected = {  # what X is, and the results
        "permute(": (paddle.to_tensor(x), [rows]),
        "unpermute(": (in_rows, [x.repeat(K, axis=0)]),
        "get_routing_indices(": (None, [sizes, gather, np.argsort(gather)]),
        "calculate_topk(": (None, [weights, ids]),
        "torch_grouped_gemm(": (in_rows, [by_row]),
        "permute_x=True": (paddle.to_tensor(x), [by_row]),
        "permute_y=True": (in_rows, [by_slot]),
        "topk_weights=weights": (in_rows, [weights.reshape(-1)[gather, None] * by_row]),
    }
    answered = set()
    for call in CALLS:
        (key,) = (key for key in expected if call.startswith(key) or key in call.partition("(")[2])
        X, wanted = expected[key]
        results = eval(call, {**names, "X": X})
        results = results if isinstance(results, tuple) else (results,)
        for got, due in zip(results, wanted, strict=True):
            np.testing.assert_allclose(got.numpy(), due, rtol=1e-5, atol=1e-5, err_msg=call)
        answered.add(key)
    assert answered == set(expected)
    by_name = indexed.calculate_topk(gating_output=names["gating_output"], top_k=K, use_sigmoid=False, renormalize=True)
    np.testing.assert_allclose(by_name[0].numpy(), weights, rtol=1e-5)
