# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every moe_* of the installed Paddle is served by patch_paddle, or listed in docs/migrating.md as not served."""

from __future__ import annotations

import re
from pathlib import Path

import paddle
import paddle.incubate.nn.functional
import pytest
from paddle import _C_ops
from paddle.distributed.models.moe import utils

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.compat.paddle import NAMES_OF_FAMILIES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| not served |")[2].partition("\n\n")[0]
NOT_SERVED = {
    name
    for first in re.findall(r"^\| (`.*?`) \|", TABLE, re.MULTILINE)
    for name in re.findall(r"`_C_ops\.(\w+)`", first)
}

# Paddle 3.2.2 and 3.3.1 have the same.
OPERATORS = {
    *(f"moe_combine{tail}" for tail in ("", "_auto", "_auto_grad", "_grad", "_no_weight", "_no_weight_grad")),
    *(f"moe_gate_dispatch{tail}" for tail in ("", "_and_quant", "_auto", "_auto_grad", "_grad")),
    *(f"moe_gate_dispatch_{tail}" for tail in ("partial_nosoftmaxtopk", "partial_nosoftmaxtopk_grad")),
    *("moe_gate_dispatch_permute", "moe_gate_dispatch_permute_grad", "moe_permute", "moe_unpermute"),
    *("moe_global_mesh_tensor", "moe_sub_mesh_tensors"),
}


def moe_names(module):
    return {name for name in dir(module) if name.startswith("moe_") and callable(getattr(module, name))}


def replaced(module, names):
    """The names that other objects, or functions with other code, stand for under patch_paddle."""
    before = {name: getattr(getattr(module, name), "__code__", getattr(module, name)) for name in names}
    with patched_paddle(("permute", "incubate", "gshard")):  # Paddle 3.2 lacks functions of the others
        now = {name: getattr(getattr(module, name), "__code__", getattr(module, name)) for name in names}
    return {name for name in names if now[name] is not before[name]}


def test_operators_are_served_or_listed():
    names = moe_names(_C_ops)
    assert names == OPERATORS
    served = replaced(_C_ops, names)
    assert names - served == NOT_SERVED
    assert not served & NOT_SERVED


def test_functions_of_paddle_are_served():
    names = moe_names(paddle.nn.functional)
    assert names == replaced(paddle.nn.functional, names) == set(NAMES_OF_FAMILIES["permute"])


def test_functions_of_incubate_call_served_operators():
    names = moe_names(paddle.incubate.nn.functional)
    assert names == {"moe_combine", "moe_combine_no_weight"} | {
        f"moe_gate_dispatch{tail}" for tail in ("", "_and_quant", "_partial_nosoftmaxtopk", "_permute")
    }
    assert names <= set(NAMES_OF_FAMILIES["incubate"])


def test_operators_of_gates_are_served():
    """The functions in paddle.distributed.models.moe.utils are the operators' names with an underscore."""
    functions = {name for name in vars(utils) if name.startswith("_") and callable(getattr(utils, name))}
    names = {name[1:] for name in functions if not name.startswith("__")}
    assert names == set(NAMES_OF_FAMILIES["gshard"])


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_what_is_not_served_is_an_operator_of_paddle(name):
    assert hasattr(_C_ops, name)
