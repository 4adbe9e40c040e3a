# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices in float8, and the layer of experts on float8 operands, against the definitions in plain loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from paddle_moe_ops import reference
from paddle_moe_ops.reference import dequantize_1x128, dequantize_128x128, quantize_1x128, quantize_128x128

from .cases import SUM_DTYPES, assert_same_bits, floats_of_every_kind, ordinary_floats

SHAPES = [(0, 3, 5), (2, 0, 4), (3, 1, 1), (2, 7, 130), (1, 129, 127), (2, 256, 128), (1, 300, 200)]


@pytest.mark.parametrize("dtype", SUM_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_block_has_the_codes_of_its_rows_with_the_scale_of_its_largest_number(
    shape: tuple[int, int, int], dtype: DTypeLike
) -> None:
    w = floats_of_every_kind(shape, dtype, seed=1)
    codes, scales = quantize_128x128(w)
    experts, height, width = shape
    assert codes.shape == shape
    assert scales.shape == (experts, -(-height // 128), -(-width // 128))
    for expert, first, column in np.ndindex(scales.shape):
        place = expert, slice(128 * first, 128 * first + 128), slice(128 * column, 128 * column + 128)
        block = w[place].astype(np.float32)
        amax = max(np.abs(block[~np.isnan(block)]).max(initial=0), np.float32(1e-4))
        # A row whose largest magnitude may not be less than that of the block has the scale of the block.
        rows, by_row = quantize_1x128(block, amax_min=float(min(amax, np.finfo(np.float32).max)))
        assert_same_bits(codes[place], rows)
        assert (by_row == scales[expert, first, column]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed_matrices_have_transposed_codes_and_scales(shape: tuple[int, int, int]) -> None:
    w = floats_of_every_kind(shape, ml_dtypes.bfloat16, seed=2)
    codes, scales = quantize_128x128(w)
    turned, turned_scales = quantize_128x128(w.swapaxes(1, 2))
    assert_same_bits(turned.swapaxes(1, 2), codes)
    assert_same_bits(turned_scales.swapaxes(1, 2), scales)


def test_dequantised_matrices_are_near() -> None:
    w = ordinary_floats((3, 200, 300), np.float32, seed=3)
    codes, scales = quantize_128x128(w)
    near = dequantize_128x128(codes, scales, dtype=np.float32)
    step = np.repeat(np.repeat(scales, 128, 1)[:, :200], 128, 2)[:, :, :300]
    assert (np.abs(near - w) <= np.maximum(np.abs(w) / 16, step / 1024) * 1.001).all()
    assert (near != w).any()


class Layer:
    """Operands of a layer; experts without tokens, padding, and slots without an expert are among the routing."""

    def __init__(self, dtype: DTypeLike, *, weighted: bool, transpose: bool, d: int = 200, n: int = 136) -> None:
        rng = np.random.default_rng(5)
        ids = rng.integers(-1, 4, (40, 3))
        ids[ids == 2] = -1
        for row in ids:
            row[1:][row[1:] == row[0]] = -1
            row[2] = -1 if row[2] == row[1] else row[2]
        self.plan = reference.route(ids, rng.random(ids.shape, np.float32), num_experts=5, padding_alignment=4)
        self.x = ordinary_floats((40, d), dtype, seed=6)
        self.d_out = (ordinary_floats((40, d), np.float32, seed=7) * 1e-6).astype(np.float32).astype(dtype)
        self.gate_up = (ordinary_floats((5, d, 2 * n), np.float32, seed=8) * d**-0.5).astype(dtype)
        self.down = (ordinary_floats((5, n, d), np.float32, seed=9) * n**-0.5).astype(dtype)
        self.weights = self.plan.row_probs if weighted else None
        self.transpose = transpose

    def arguments(self) -> tuple:
        matrices = self.gate_up, self.down
        if self.transpose:
            matrices = tuple(np.ascontiguousarray(each.swapaxes(1, 2)) for each in matrices)
        return self.x, self.plan, *matrices, self.weights


def near_rows(x: NDArray) -> NDArray:
    return dequantize_1x128(*quantize_1x128(x, amax_min=2.0**-100), dtype=np.float32).astype(np.float64)


def near_matrix(w: NDArray) -> NDArray:
    codes, scales = quantize_128x128(w[None], amax_min=2.0**-100)
    return dequantize_128x128(codes, scales, dtype=np.float32)[0].astype(np.float64)


def swiglu(hidden: NDArray) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """SwiGLU of a row in the row's dtype; and gate, sigmoid of the gate, and up, in float64."""
    gate, up = np.split(hidden.astype(np.float64), 2)
    share = 1 / (1 + np.exp(-gate))
    return (gate * share * up).astype(np.float32).astype(hidden.dtype), gate, share, up


def kept_in_float8(hidden: NDArray) -> NDArray:
    """A row of the first product as it comes back, group by group."""
    found = hidden.astype(np.float32)
    for first in range(0, len(hidden), 128):
        group = found[first : first + 128]
        scale = np.maximum(np.abs(group).max(), np.float32(2.0**-100)) / np.float32(448)
        codes = (group * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn)
        found[first : first + 128] = codes.astype(np.float32) * scale
    return found.astype(hidden.dtype)


def loops(layer: Layer, hidden_in_float8: bool = False) -> dict[str, NDArray]:
    """The result and all gradients, row by row."""
    plan, dtype = layer.plan, layer.x.dtype
    x, d_out = near_rows(layer.x), near_rows(layer.d_out)
    sums = {
        "out": np.zeros(layer.x.shape),
        "x": np.zeros(layer.x.shape),
        "gate_up": np.zeros(layer.gate_up.shape),
        "down": np.zeros(layer.down.shape),
        "weights": np.zeros(plan.num_rows),
    }
    matrices = [(near_matrix(w1), near_matrix(w2)) for w1, w2 in zip(layer.gate_up, layer.down, strict=True)]
    for row, token in enumerate(plan.row_to_token):
        if token < 0:
            continue
        expert, weight = plan.row_to_expert[row], 1.0 if layer.weights is None else float(layer.weights[row])
        w1, w2 = matrices[expert]
        hidden = (x[token] @ w1).astype(np.float32).astype(dtype)
        sums["out"][token] += weight * (near_rows(swiglu(hidden)[0][None])[0] @ w2)
        act, gate, share, up = swiglu(kept_in_float8(hidden) if hidden_in_float8 else hidden)
        d_act = w2 @ d_out[token]
        sums["weights"][row] = d_act @ act.astype(np.float64)
        d_hidden = np.concatenate([up * share * (1 + gate * (1 - share)), gate * share]) * np.tile(weight * d_act, 2)
        d_hidden = d_hidden.astype(np.float32).astype(dtype)
        sums["x"][token] += w1 @ near_rows(d_hidden[None])[0]
        sums["gate_up"][expert] += np.outer(layer.x[token].astype(np.float64), d_hidden.astype(np.float64))
        sums["down"][expert] += np.outer(weight * act.astype(np.float64), layer.d_out[token].astype(np.float64))
    return sums


@pytest.mark.parametrize("in_float8", [False, True], ids=["hidden", "hidden in float8"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_layer_and_gradients_equal_loops(dtype: DTypeLike, weighted: bool, transpose: bool, in_float8: bool) -> None:
    layer = Layer(dtype, weighted=weighted, transpose=transpose)
    arguments, due = layer.arguments(), loops(layer, in_float8)
    out, hidden = reference.moe_mlp_float8(*arguments, transpose=transpose)
    options = {"transpose": transpose, "hidden_in_float8": in_float8}
    made = reference.moe_mlp_float8_backward(layer.d_out, *arguments, **options)
    assert not hidden[layer.plan.row_to_token < 0].any()
    matrices = made.gate_up, made.down
    if transpose:
        matrices = tuple(each.swapaxes(1, 2) for each in matrices)
    got = {"out": out, "x": made.x, "gate_up": matrices[0], "down": matrices[1], "weights": made.weights}
    assert (made.weights is None) == (not weighted)
    limit = 1e-5 if dtype == np.float32 else 1e-2
    for name, value in got.items():
        if value is not None:
            wide = value.astype(np.float64)
            assert np.linalg.norm(wide - due[name]) <= limit * np.linalg.norm(due[name]), name
            assert np.linalg.norm(due[name]) > 0, name


def cosine(a: NDArray, b: NDArray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize(("in_float8", "least"), [(False, 0.997), (True, 0.996)])
def test_directions_are_those_of_the_layer_in_float32(in_float8: bool, least: float) -> None:
    layer = Layer(ml_dtypes.bfloat16, weighted=True, transpose=False, d=256, n=128)
    arguments = layer.arguments()
    wide = [np.asarray(each, np.float32) if isinstance(each, np.ndarray) else each for each in arguments]
    out, _ = reference.moe_mlp_float8(*arguments)
    made = reference.moe_mlp_float8_backward(layer.d_out, *arguments, hidden_in_float8=in_float8)
    due_out, _ = reference.moe_mlp(*wide)
    due = reference.moe_mlp_backward(layer.d_out.astype(np.float32), *wide)
    assert 0.9975 <= cosine(out, due_out) < 0.99999
    assert least <= cosine(made.x, due.x) < 0.99999
    for name in ("gate_up", "down", "weights"):
        assert cosine(getattr(made, name), getattr(due, name)) >= least, name
