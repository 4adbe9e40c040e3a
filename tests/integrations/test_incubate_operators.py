# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""PaddleFormers' own block of ERNIE-4.5-MoE on the operators of patch_paddle(("incubate",)), no line of it replaced."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import numpy as np
import paddle.incubate.nn.functional as F
import pytest

from paddle_moe_ops import patched_paddle

from .models import assert_close, build, gradients, train

CASES = ["ernie4_5_moe", "ernie4_5_moe-padded"]
CALLERS = {
    "paddleformers.nn.moe.moe_allgather_layer": (
        "moe_gate_dispatch_partial_nosoftmaxtopk",
        "expand_modality_expert_id",
        "build_src_rank_and_local_expert_id",
    ),
    "paddleformers.nn.moe.topk_gate": ("cal_aux_loss", "int_bincount"),
    "paddleformers.nn.moe.moe_alltoall_layer": ("moe_combine",),
}


def call_paddle_again(monkeypatch: Any) -> None:
    """Give PaddleFormers Paddle's functions in place of the stand-ins that all these tests have."""
    for module, names in CALLERS.items():
        for name in names:
            monkeypatch.setattr(importlib.import_module(module), name, getattr(F, name))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_losses_are_those_of_plain_operators(case, bias, monkeypatch):
    expected, losses = (of(build(case, moe_use_aux_free=bias)) for of in (gradients, lambda model: train(model, 4)))
    call_paddle_again(monkeypatch)
    with patched_paddle(("incubate",)):
        assert_close(gradients(build(case, moe_use_aux_free=bias)), expected)
        np.testing.assert_allclose(train(build(case, moe_use_aux_free=bias), 4), losses, rtol=1e-5)


def test_both_modes_drop_the_same_tokens(monkeypatch):
    call_paddle_again(monkeypatch)
    with patched_paddle(("incubate",)):
        padded, unpadded = (gradients(build(case, moe_capacity=[1, 1, 1])) for case in reversed(CASES))
        assert_close(padded, unpadded)
        everything = gradients(build(CASES[0]))
    name = next(name for name in everything if "experts.0" in name)
    assert np.abs(everything[name] - unpadded[name]).max() > 0


def test_on_a_cpu_nothing_else_is_missing_once_fleet_is_initialised():
    """In a process of its own: PaddleFormers reads a name that it does not define where fleet was not initialised."""
    program = (
        "from tests.integrations import stubs; stubs.install()\n"
        "from paddle.distributed import fleet; fleet.init(is_collective=True)\n"
        "from paddle_moe_ops import patch_paddle; patch_paddle(('incubate',))\n"
        "from tests.integrations.models import build, train\n"
        "print('losses', *train(build('ernie4_5_moe'), 2))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("losses")]
    assert [float(each) for each in line.split()[1:]] == pytest.approx(train(build("ernie4_5_moe"), 2), rel=1e-5)
