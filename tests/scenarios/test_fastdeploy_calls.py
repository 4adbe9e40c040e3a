# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The calls that FastDeploy's layers make, in their order, with FastDeploy's operators from this package.

Expected results come from a dense layer: all experts for all tokens, in float32, of bfloat16 tokens and matrices.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.nn.quant import weight_quantize

from paddle_moe_ops import QuantizedMatrices, dequantize_1x128, moe_mlp, patched_paddle, quantize_experts, route
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.compat import fastdeploy as ops
from paddle_moe_ops.reference import fastdeploy as oracle
from paddle_moe_ops.reference import fastdeploy_quantization, pack_int4
from paddle_moe_ops.testing.equality import assert_bits_equal
from paddle_moe_ops.testing.tolerances import assert_close_float8
from tests.ops.problems import tensor

T, H, I, E, K, ALIGNMENT = 37, 128, 64, 6, 3, 128  # noqa: E741
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOKENS = {0: "no token", 1: "one token", T: "some tokens"}
tokens = pytest.mark.parametrize("num_tokens", TOKENS, ids=TOKENS.values())


def numbers(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(BFLOAT16)


class Layer:
    """The parameters of a layer, and its results."""

    def __init__(self, rng, place) -> None:
        self.place = place
        self.up_gate, self.down = numbers(rng, E, H, 2 * I, scale=H**-0.5), numbers(rng, E, I, H, scale=I**-0.5)
        self.bias, self.down_bias = numbers(rng, E, 2 * I), numbers(rng, E, H)
        self.correction = (rng.permutation(E) / (4 * E)).astype(np.float32)

    def on_device(self, array):
        return tensor(array, self.place)

    def ffn(self, rows, counts, *, method="w16a16", weights=None, scales=(None, None), bias=None, low_latency=False):
        """The call of FastDeploy's compute_ffn."""
        weights = weights or (self.on_device(self.up_gate), self.on_device(self.down))
        bias = None if bias is None else self.on_device(bias)
        further = None, None, None, method, low_latency, -1, 128, "swiglu"
        return ops.moe_expert_ffn(rows, counts, *weights, None, bias, *scales, *further)

    def dense(self, x, of_pairs, bias=None, down_bias=None, rounded=np.asarray):
        """float32 [T, H] of tokens, their weights [T, E], the biases, and a function of the rows of each GEMM."""
        wide = rounded(x.astype(np.float32))
        columns = np.einsum("th,ehi->tei", wide, self.up_gate.astype(np.float32))
        columns += 0 if bias is None else bias.astype(np.float32)
        gate, up = columns[..., :I], columns[..., I:]
        gated = rounded(gate / (1 + np.exp(-gate)) * up)
        rows = np.einsum("tei,eih->teh", gated, self.down.astype(np.float32))
        rows += 0 if down_bias is None else down_bias.astype(np.float32)
        return np.einsum("te,teh->th", of_pairs, rows)


def weights_of_pairs(ids, weights):
    """float32 [T, E]."""
    out = np.zeros((len(ids), E), np.float32)
    for token, slot in np.argwhere(ids >= 0):
        out[token, ids[token, slot]] += weights[token, slot]
    return out


def in_float8(values, use_ue8m0=False):
    """Numbers of at most 128 columns, quantised and dequantised."""
    codes, scales = fastdeploy_quantization.quantize_groups(values, 128, use_ue8m0, offset=5e-7)
    factors = np.exp2(scales.astype(np.float32) - 127) if use_ue8m0 else scales
    return codes.astype(np.float32) * factors


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=1, keepdims=True)


def assert_close(got, expected):
    # Products of 128 terms are rounded to bfloat16 twice before they are summed.
    got = to_numpy(got)
    assert got.dtype == BFLOAT16
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=2.0**-6, atol=2.0**-5)


@pytest.fixture
def layer(rng, place):
    return Layer(rng, place)


@tokens
@pytest.mark.parametrize("has_bias", [False, True], ids=["softmax", "softmax and a correction bias"])
def test_tensor_parallel_experts_by_softmax(has_bias, num_tokens, layer, rng):
    x, logits = numbers(rng, num_tokens, H), rng.standard_normal((num_tokens, E)).astype(np.float32)
    bias = layer.on_device(layer.correction) if has_bias else None
    rows, ends, indices, weights, ids, experts, dequant_scale, most = ops.moe_expert_dispatch(
        layer.on_device(x), layer.on_device(logits), bias, None, K, False, "w16a16", topk_only_mode=False
    )
    assert (rows.shape, ends.dtype, ids.dtype) == ([num_tokens * K, H], paddle.int64, paddle.int32)
    assert most.shape == dequant_scale.shape == [1]
    out = ops.moe_expert_reduce(
        layer.ffn(rows, ends), weights, indices, ids, None, norm_topk_prob=True, routed_scaling_factor=1.0
    )
    scores = softmax(logits)
    order = np.argsort(-(scores + (layer.correction if has_bias else 0)), axis=1)[:, :K]
    chosen = np.take_along_axis(scores, order, axis=1)
    expected = weights_of_pairs(order, chosen / chosen.sum(axis=1, keepdims=True))
    assert_close(out, layer.dense(x, expected))
    assert np.bincount(experts.numpy(), minlength=E).cumsum().tolist() == ends.tolist()


@tokens
@pytest.mark.parametrize("gate", ["noaux_tc", "grouped_topk"])
def test_tensor_parallel_experts_by_groups(gate, num_tokens, layer, rng):
    x, logits = numbers(rng, num_tokens, H), rng.standard_normal((num_tokens, E)).astype(np.float32)
    gate_out, bias = layer.on_device(logits), layer.on_device(layer.correction)
    if gate == "noaux_tc":
        scores = paddle.nn.functional.sigmoid(gate_out)
        gate_out, values, chosen = ops.noaux_tc(scores, scores + bias, 3, 2, K, True, 2.5)
    else:
        gate_out, values, chosen = ops.grouped_topk(gate_out, bias, 3, 2, K, True, 2.5)
    rows, ends, indices, weights, ids, _, _, _ = ops.moe_expert_dispatch(
        layer.on_device(x), gate_out, None, None, K, False, "w16a16", topk_only_mode=True
    )
    out = ops.moe_expert_reduce(
        layer.ffn(rows, ends), weights, indices, ids, None, norm_topk_prob=False, routed_scaling_factor=1.0
    )
    expected = weights_of_pairs(chosen.numpy(), values.numpy())
    assert_close(out, layer.dense(x, expected))
    np.testing.assert_allclose(expected.sum(axis=1), 2.5, rtol=1e-5)
    groups = np.unique(chosen.numpy() // 2 + 10 * np.arange(num_tokens)[:, None])
    assert len(groups) <= 2 * num_tokens


@tokens
def test_tensor_parallel_experts_with_biases(num_tokens, layer, rng):
    x, logits = numbers(rng, num_tokens, H), rng.standard_normal((num_tokens, E)).astype(np.float32)
    rows, ends, indices, weights, ids, experts, _, _ = ops.moe_expert_dispatch(
        layer.on_device(x), layer.on_device(logits), None, None, K, False, "w16a16", topk_only_mode=False
    )
    out = layer.ffn(rows, ends, bias=layer.bias)
    further = ids, layer.on_device(layer.down_bias), True, 1.0
    out = ops.moe_expert_reduce(out, weights, indices, *further)
    divided = weights.numpy() / weights.numpy().sum(axis=1, keepdims=True)
    expected = weights_of_pairs(ids.numpy(), divided)
    assert_close(out, layer.dense(x, expected, layer.bias, layer.down_bias))
    assert experts.dtype == paddle.int32


@tokens
@pytest.mark.parametrize("one_expert", [False, True], ids=["spread", "all tokens on the same experts"])
def test_experts_behind_moe_permute(one_expert, num_tokens, layer, rng):
    x, logits = numbers(rng, num_tokens, H), rng.standard_normal((num_tokens, E)).astype(np.float32)
    if one_expert:
        logits[:] = np.arange(E)
    ids, weights = ops.moe_topk_select(layer.on_device(logits), None, K, True, False)
    ids_i32 = ids.astype(paddle.int32)
    with patched_paddle():
        rows, rowmap, row_weights, _ = paddle.nn.functional.moe_permute(
            hidden_states=layer.on_device(x),
            scale=None,
            expert_routemap_topk=ids_i32,
            expert_prob_topk=weights,
            num_experts=E,
            tokens_per_expert=[],
            padding_alignment=128,
            override_buffer_size=num_tokens * K + E * (128 - 1),
        )
        ends = ops.count_tokens_per_expert_func(ids, E, True)[2].cast(paddle.int64)
        out = layer.ffn(rows, ends)
        out, _ = paddle.nn.functional.moe_unpermute(
            hidden_states_unzipped=out,
            zipped_expertwise_rowmap=rowmap,
            expert_routemap_topk=ids_i32,
            token_prob_unzipped=row_weights,
            total_zipped_tokens=num_tokens,
            num_experts=E,
            using_weighted_combine=True,
        )
    assert_close(out, layer.dense(x, weights_of_pairs(ids.numpy(), weights.numpy())))


def received(rng, num_tokens):
    """Ids of local experts, some elsewhere, and weights; the last expert has no token."""
    ids = np.argsort(rng.random((num_tokens, E - 1)), axis=1)[:, :K].astype(np.int64)
    ids[rng.random(ids.shape) < 0.4] = -1
    return ids, rng.random(ids.shape).astype(np.float32)


@pytest.mark.parametrize("num_tokens", [1, T])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "biases"])
@pytest.mark.parametrize("padded", [False, True], ids=["counts as they are", "padded counts"])
def test_expert_parallel_prefill(padded, with_bias, num_tokens, layer, rng):
    x, (ids, weights) = numbers(rng, num_tokens, H), received(rng, num_tokens)
    counts = oracle.tokens_per_expert(ids, E)[1 if padded else 0].tolist()
    rows, indices, ends, of_rows, pairs, _, experts, _ = ops.ep_moe_expert_dispatch(
        *(layer.on_device(each) for each in (x, ids, weights)), None, counts, sum(counts), "w16a16"
    )
    assert rows.shape == [sum(counts), H]
    out = layer.ffn(rows, ends, bias=layer.bias if with_bias else None)
    if with_bias:
        # in float32: Paddle adds no bfloat16 on a CPU
        down_bias = paddle.index_select(layer.on_device(layer.down_bias).cast("float32"), experts.cast("int64"), axis=0)
        out = paddle.add(out.cast("float32"), down_bias).cast("bfloat16")
    out = ops.ep_moe_expert_combine(out, of_rows, indices, pairs, None, False, 1.0)
    biases = (layer.bias, layer.down_bias) if with_bias else (None, None)
    assert_close(out, layer.dense(x, weights_of_pairs(ids, weights), *biases))


@pytest.mark.parametrize("layout", ["some rows", "no rows", "all rows"])
def test_expert_parallel_decode(layout, layer, rng):
    capacity = 8
    rows = numbers(rng, E, capacity, H)
    counts = {"some rows": rng.integers(0, capacity + 1, E), "no rows": np.zeros(E), "all rows": np.full(E, capacity)}
    sizes = counts[layout].astype(np.int32)
    rows[np.arange(capacity) >= sizes[:, None]] = np.nan
    out = layer.ffn(layer.on_device(rows), layer.on_device(sizes).cast("int64"), low_latency=True)
    assert out.shape == [E, capacity, H]
    for expert, size in enumerate(sizes):
        of_pairs = np.eye(E, dtype=np.float32)[[expert] * size]
        assert_close(out[expert, :size], layer.dense(rows[expert, :size], of_pairs))


def masked_gemm(layer, codes, scales, counts, matrices):
    """DeepGEMM's masked product [E, M, N] of codes with matrices [E, D, N], here of dequantised rows."""
    experts, capacity, columns = codes.shape
    rows = dequantize_1x128(
        codes.reshape([-1, columns]), scales.reshape([experts * capacity, -1]), dtype=paddle.float32
    ).numpy()
    out = rows.reshape(experts, capacity, columns) @ matrices.astype(np.float32)
    out[np.arange(capacity) >= counts.numpy().reshape(-1, 1)] = np.nan
    return layer.on_device(out.astype(BFLOAT16))


@pytest.mark.parametrize("num_tokens", [1, T])
def test_masked_float8_prefill(num_tokens, layer, rng):
    x, (ids, weights), most = numbers(rng, num_tokens, H), received(rng, num_tokens), T + 3
    codes, scale = ops.per_token_quant(layer.on_device(x), 128, False)
    rows, scales, indices, counts = ops.prefill_permute_to_masked_gemm(codes, scale, layer.on_device(ids), E, most)
    columns = masked_gemm(layer, rows, scales, counts, layer.up_gate)
    rows, scales = ops.fused_mask_swiglu_fp8_quant(columns, counts.flatten(), 128, False)
    out = masked_gemm(layer, rows, scales, counts, layer.down)
    out = ops.depermute_prefill_combine(out, indices, layer.on_device(weights), num_tokens)
    assert_close_float8(to_numpy(out), layer.dense(x, weights_of_pairs(ids, weights), rounded=in_float8))


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["float32 scales", "ue8m0 scales"])
@pytest.mark.parametrize("in_ep", [False, True], ids=["one rank", "ranks"])
def test_contiguous_float8_prefill(in_ep, use_ue8m0, layer, rng):
    x, (ids, weights) = numbers(rng, T, H), received(rng, T)
    codes, scale = ops.per_token_quant_padding(layer.on_device(x), 128, use_ue8m0)
    on_device = [layer.on_device(each) for each in (ids, weights)]
    counts = ops.count_tokens_per_expert_func(on_device[0], E)
    padded = int(counts[1].sum()) if in_ep else -1
    rows, scales, indices, _, ends, of_rows, pairs, _, experts = ops.ep_moe_expert_dispatch_fp8(
        codes, scale[:T], *on_device, counts[0], counts[1], in_ep, padded
    )
    assert scales.strides == [1, rows.shape[0] + -rows.shape[0] % 4]

    def product(codes, scales, matrices):
        values = dequantize_1x128(codes, scales, dtype=paddle.float32).numpy()
        out = np.zeros((len(values), matrices.shape[2]), np.float32)
        for expert in range(E):
            out[experts.numpy() == expert] = values[experts.numpy() == expert] @ matrices[expert].astype(np.float32)
        return layer.on_device(out.astype(BFLOAT16))

    gated = paddle.nn.functional.swiglu(product(rows, scales, layer.up_gate).cast("float32")).cast("bfloat16")
    out = product(*ops.per_token_quant(gated, 128, use_ue8m0), layer.down)
    out = ops.ep_moe_expert_combine(out, of_rows, indices, pairs, None, False, 1.0)
    rounded = functools.partial(in_float8, use_ue8m0=use_ue8m0)
    assert_close_float8(to_numpy(out), layer.dense(x, weights_of_pairs(ids, weights), rounded=rounded))
    assert (ends.numpy() % ALIGNMENT == 0).all()


@pytest.mark.parametrize("algo", ["weight_only_int8", "weight_only_int4"])
def test_matrices_of_weight_quantize_give_the_bits_of_dequantised_ones(algo, layer, rng):
    x, logits = numbers(rng, T, H), rng.standard_normal((T, E)).astype(np.float32)
    rows, ends, *_ = ops.moe_expert_dispatch(
        layer.on_device(x), layer.on_device(logits), None, None, K, False, algo, topk_only_mode=False
    )
    packed, scales, plain = [], [], []
    for matrices in (layer.up_gate, layer.down):
        # Paddle quantises on the CPU, one expert at a time.
        made = [weight_quantize(tensor(each, paddle.CPUPlace()), algo, arch=80) for each in matrices]
        packed.append(layer.on_device(np.stack([codes.numpy() for codes, _ in made])))
        scales.append(layer.on_device(np.stack([to_numpy(scale) for _, scale in made])))
        codes = ops.from_weight_quantize(packed[-1], algo).numpy()
        values = fastdeploy_quantization.dequantize_weights(codes, to_numpy(scales[-1]), BFLOAT16)
        plain.append(layer.on_device(values))
    bits = 8 if algo == "weight_only_int8" else 4
    assert packed[0].shape == [E, 2 * I * bits // 8, H]
    got = layer.ffn(rows, ends, method=algo, weights=packed, scales=scales)
    assert_bits_equal(got, layer.ffn(rows, ends, weights=plain))
    errors = np.abs(to_numpy(got).astype(np.float32) - to_numpy(layer.ffn(rows, ends)).astype(np.float32))
    assert 0 < errors.mean() < (0.02 if bits == 8 else 0.3)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_matrices_of_weight_quantize_serve_in_a_layer_of_this_package(format, layer, rng):
    algo, made = f"weight_only_{format}", []
    for matrices in (layer.up_gate, layer.down):
        quantised = [weight_quantize(tensor(each, paddle.CPUPlace()), algo, arch=80) for each in matrices]
        codes = ops.from_weight_quantize(paddle.stack([each for each, _ in quantised]), algo).numpy()
        scales = paddle.stack([each for _, each in quantised]).astype("float32")
        stored = pack_int4(codes) if format == "int4" else codes
        made.append(QuantizedMatrices(layer.on_device(stored), layer.on_device(scales.numpy()), format))
    x, plan = layer.on_device(numbers(rng, T, H)), route(layer.on_device(rng.integers(0, E, (T, 1))), num_experts=E)
    matrices = (layer.on_device(each) for each in (layer.up_gate, layer.down))
    due = quantize_experts(*matrices, format=format)
    assert_bits_equal(moe_mlp(x, plan, None, *made), moe_mlp(x, plan, None, *due))


def test_tokens_that_all_have_their_experts_elsewhere(layer, rng):
    x, ids = numbers(rng, T, H), np.full((T, K), -1, np.int64)
    rows, indices, ends, of_rows, pairs, counts, _, _ = ops.ep_moe_expert_dispatch(
        *(layer.on_device(each) for each in (x, ids, np.ones((T, K), np.float32))), None, [0] * E, 0, "w16a16"
    )
    out = ops.ep_moe_expert_combine(layer.ffn(rows, ends), of_rows, indices, pairs, None, False, 1.0)
    assert_bits_equal(out, np.zeros((T, H), BFLOAT16))
    assert (counts.numpy() == 0).all()


def test_gradients_stop(layer, rng):
    x = layer.on_device(numbers(rng, T, H))
    x.stop_gradient = False
    logits = layer.on_device(rng.standard_normal((T, E)).astype(np.float32))
    rows, ends, indices, weights, ids, *_ = ops.moe_expert_dispatch(
        x * 2, logits, None, None, K, False, "w16a16", topk_only_mode=False
    )
    out = layer.ffn(rows, ends)
    results = rows, weights, out, ops.moe_expert_reduce(out, weights, indices, ids, None, True, 1.0)
    assert all(each.stop_gradient for each in results)
