# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_gate_dispatch_and_quant of paddle.incubate.nn.functional, patched, against the oracle, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import paddle
import paddle.incubate.nn.functional as F
import pytest

from paddle_moe_ops import patched_paddle
from paddle_moe_ops.reference import incubate_quant as oracle
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.problems import ordinary, tensor
from tests.pairwise import pairwise_of

T, H, E, K = 23, 256, 6, 3
BF16 = ml_dtypes.bfloat16
powers = pytest.mark.parametrize("pow2", [True, False], ids=["powers of two", "quotients"])


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with patched_paddle("incubate"):
        yield


def assert_results(got, expected):
    for number, (result, wanted) in enumerate(zip(got, expected, strict=True)):
        if number == 0:  # a NaN's code has bits, too
            result, wanted = result.view("uint8"), wanted.view(np.uint8)
        assert_bits_equal(result, wanted, what=f"result {number}")


def scores(rng, num_tokens=T):
    return rng.integers(1, 9, (num_tokens, E)).astype(np.float32) / 16


def quantised_rows(x, pow2, place):
    """Codes, and scales, of rows in their own order."""
    one = tensor(np.ones((len(x), 1), np.float32), place)
    codes, scales, *_ = F.moe_gate_dispatch_and_quant(tensor(x, place), one, None, 1, len(x), True, pow2)
    return codes.view("uint8").numpy(), scales.numpy()


@pairwise_of(
    pytest.mark.parametrize("use_pad", [True, False], ids=["padded", "not padded"]),
    pytest.mark.parametrize("capacity", [0, 4, 9, T]),
    pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"]),
    pytest.mark.parametrize("dtype", [BF16, np.float16], ids=["bfloat16", "float16"]),
    powers,
)
def test_results(use_pad, capacity, has_bias, dtype, pow2, rng, place, backend):
    x, gate = ordinary(rng, (T, H), dtype), scores(rng)
    bias = rng.integers(-4, 5, E).astype(np.float32) / 16 if has_bias else None
    tensors = [None if each is None else tensor(each, place) for each in (x, gate, bias)]
    got = F.moe_gate_dispatch_and_quant(*tensors, K, capacity, use_pad, pow2)
    *expected, _ = oracle.moe_gate_dispatch_and_quant(x, gate, bias, K, capacity, use_pad, pow2)
    assert_results(got, expected)
    assert all(each.stop_gradient for each in got)


@powers
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 1025])
def test_any_number_of_tokens(num_tokens, pow2, rng, place):
    x, gate = ordinary(rng, (num_tokens, 128), BF16), scores(rng, num_tokens)
    got = F.moe_gate_dispatch_and_quant(tensor(x, place), tensor(gate, place), None, 2, 300, True, pow2)
    assert_results(got, oracle.moe_gate_dispatch_and_quant(x, gate, None, 2, 300, True, pow2)[:-1])


GROUPS = {  # of the first numbers, the others being 0: scale with quotients, scale with powers of two, first codes
    "zeros": ([0.0, -0.0], 1.0, 1.0, [0x00, 0x80]),
    "NaN alone": ([np.nan, 0.0], 1.0, 1.0, [0x7F, 0x00]),
    "NaN beside a number": ([448.0, np.nan, -448.0], 1.0, 1.0, [0x7E, 0x7F, 0xFE]),
    "infinity": ([np.inf, 1.0, -1.0], np.inf, np.inf, [0x7F, 0x00, 0x80]),
    "a power of two": ([7.0, 3.5], 2.0**-6, 2.0**-6, [0x7E, 0x76]),
    "more than a power of two": ([8.0, 1.0], None, 2.0**-5, [0x78, 0x60]),
    "so small that the quotient overflows": ([2.0**-130, 0.0], 2.0**-127 / (2 - 2.0**-7), 2.0**-127, None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_whose_results_are_known(name, place):
    numbers, quotient, power, codes = GROUPS[name]
    x = np.zeros((1, 128), BF16)
    x[0, : len(numbers)] = numbers
    of_powers, scale = quantised_rows(x, True, place)
    assert scale[0, 0] == np.float32(power)
    if codes is not None:
        assert of_powers[0, : len(codes)].tolist() == codes
    if quotient is not None:
        with np.errstate(under="ignore"):
            assert quantised_rows(x, False, place)[1][0, 0] == np.float32(quotient)


GOOD = {
    "x": lambda: paddle.ones([T, H]).astype("bfloat16"),
    "gate_logits": lambda: paddle.ones([T, E]),
    "corr_bias": lambda: None,
    "k": lambda: K,
    "capacity": lambda: 4,
    "use_pad": lambda: True,
    "use_pow2_scale": lambda: True,
}
BAD = [
    ("x", lambda: paddle.ones([T, H]), TypeError, "x must be of dtype bfloat16 or float16, but got float32"),
    (
        "x",
        lambda: paddle.ones([T, 100]).astype("bfloat16"),
        ValueError,
        r"x must be of shape \[num_tokens, hidden\] with hidden % 128 == 0, but got \[23, 100\]",
    ),
    (
        "gate_logits",
        lambda: paddle.ones([T + 1, E]),
        ValueError,
        r"gate_logits must be of shape \[23, num_experts\], but got \[24, 6\]",
    ),
    ("corr_bias", lambda: paddle.ones([E + 1]), ValueError, r"corr_bias must be of shape \[6\], but got \[7\]"),
    ("k", lambda: E + 1, ValueError, "k must be at most 6, the experts of gate_logits, but got 7"),
    ("capacity", lambda: -1, ValueError, "capacity must be from 0 to 2147483647, but got -1"),
    ("use_pad", lambda: 1, TypeError, "use_pad must be a bool, but got 1 of type int"),
    ("use_pow2_scale", lambda: None, TypeError, "use_pow2_scale must be a bool, but got None of type NoneType"),
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"), BAD, ids=[f"{number} {n}" for number, (n, *_) in enumerate(BAD)]
)
def test_bad_arguments(argument, value, error, text):
    arguments = {name: make() for name, make in {**GOOD, argument: value}.items()}
    with pytest.raises(error, match=f"^moe_gate_dispatch_and_quant: {text}$"):
        F.moe_gate_dispatch_and_quant(**arguments)


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
def test_a_graph_is_refused():
    def scales(x, gate):
        return F.moe_gate_dispatch_and_quant(x, gate, None, K, 4, True, True)[1]

    program = paddle.jit.to_static(scales, full_graph=True)
    with pytest.raises(TypeError, match="moe_gate_dispatch_and_quant: x must be a tensor, outside of graphs"):
        program(GOOD["x"](), GOOD["gate_logits"]())
