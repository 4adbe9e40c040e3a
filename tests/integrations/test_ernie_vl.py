# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5-VL of PaddleFormers, whose text and images have experts of their own, under patch_paddle.

No line of it is replaced. The tower of the images is not run: PaddleFormers gives it bfloat16, which has no kernels on
a CPU. Random numbers replace its outputs; everything after it runs.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_moe_ops import patched_paddle

from . import kernels
from .models import assert_close

TEXT_EXPERTS, IMAGE_EXPERTS, TOPK, LENGTH = 6, 6, 2, 16
IMAGE_TOKEN, PATCHES, FEATURES = 90, (4, 4), 32
IN_ONE = 4  # patches that make one token
PLACES = [(0, slice(3, 7)), (1, slice(9, 13))]  # of images: batch and tokens
NUM_IMAGE_TOKENS = 4 * len(PLACES)
FAMILIES = ("permute", "incubate", "gemm")
MODES = ["v2-unpad", "v2", "v2-alltoall-unpad"]

SETTINGS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "fuse_rms_norm": False,
    "use_sparse_flash_attn": False,
    "tie_word_embeddings": True,
    "moe_num_experts": [TEXT_EXPERTS, IMAGE_EXPERTS],
    "moe_intermediate_size": [24, 16],
    "moe_layer_interval": 1,
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [2, 2],
    "moe_capacity": [64, 64, 64],
    "moe_k": TOPK,
    "moe_num_shared_experts": 1,
    "moe_use_aux_free": True,
    "moe_use_hard_gate": True,
    "im_patch_id": IMAGE_TOKEN,
    "max_text_id": 95,
    "pixel_hidden_size": FEATURES,
    "freq_allocation": 2,
    "vision_config": {"depth": 1, "embed_dim": FEATURES, "hidden_size": FEATURES, "num_heads": 2, "patch_size": 4},
}


def build(mode: str, **changes: Any) -> Any:
    """A new model; the values are the same each time, and the correction biases decide which experts are chosen."""
    package = "paddleformers.transformers.ernie4_5_moe_vl"
    config_class = importlib.import_module(f"{package}.model.configuration").Ernie4_5_VLMoeConfig
    model_class = importlib.import_module(f"{package}.modeling").Ernie4_5_VLMoeForConditionalGeneration
    config = config_class(**(SETTINGS | changes), moe_multimodal_dispatch_use_allgather=mode)
    paddle.seed(1)
    with paddle.utils.unique_name.guard():
        model = model_class(config)
    rng = np.random.default_rng(2)
    features = rng.standard_normal((len(PLACES) * 4 * IN_ONE, FEATURES))
    model.vision_model.extract_feature = lambda images, grid: paddle.to_tensor(features, "float32")
    if model.model.layers[1].mlp.use_correction_bias:
        for layer in model.model.layers[1:]:
            bias = layer.mlp.moe_statics.e_score_correction_bias
            bias.set_value(rng.uniform(-0.05, 0.05, bias.shape).astype("float32"))
    return model


def loss_of(model: Any, images: bool) -> paddle.Tensor:
    """The loss of predicting tokens, some of which are those of images."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, IMAGE_TOKEN - 1, (2, LENGTH))
    types = np.zeros((2, LENGTH + 1), np.int64)
    given: dict[str, Any] = {}
    if images:
        for row, places in PLACES:
            ids[row, places], types[row, places] = IMAGE_TOKEN, 1
        given["images"] = paddle.zeros([len(PLACES) * 4 * IN_ONE, 3 * 4 * 4], "bfloat16")
        given["grid_thw"] = paddle.to_tensor([[1, *PATCHES]] * len(PLACES))
        given["image_type_ids"] = paddle.zeros([len(PLACES)], "int64")
    positions = paddle.arange(LENGTH).reshape([1, LENGTH, 1]).expand([2, LENGTH, 3])
    tokens = paddle.to_tensor(ids)
    types_given = paddle.to_tensor(types)
    loss = model(tokens, positions, labels=tokens, token_type_ids=types_given, return_dict=False, **given)
    return loss[0]


def gradients(model: Any, images: bool) -> dict[str, np.ndarray | None]:
    """The gradient of each parameter, None for one without."""
    loss_of(model, images).backward()
    return {name: None if each.grad is None else each.grad.numpy() for name, each in model.named_parameters()}


def train(model: Any, images: bool, steps: int = 20) -> list[float]:
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        loss = loss_of(model, images)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def uses(model: Any) -> list[np.ndarray]:
    """Counts of the choices of each expert of each modality, layer by layer."""
    return [layer.mlp.moe_statics.expert_usage.numpy() for layer in model.model.layers[1:]]


@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("mode", MODES)
def test_both_modalities_give_the_gradients_of_plain_operators(mode, bias, images):
    with pytest.MonkeyPatch.context() as stand_ins:
        kernels.install_for_images(stand_ins)
        plain = build(mode, moe_use_aux_free=bias)
        expected = gradients(plain, images)
    model = build(mode, moe_use_aux_free=bias)
    with patched_paddle(FAMILIES):
        assert_close(gradients(model, images), expected, tolerance=1e-5)
    if bias:
        for got, wanted in zip(uses(model), uses(plain), strict=True):
            np.testing.assert_array_equal(got, wanted)
            num_text = 2 * LENGTH - NUM_IMAGE_TOKENS * images
            assert got.sum(1).tolist() == [num_text * TOPK, NUM_IMAGE_TOKENS * TOPK * images]


@pytest.mark.parametrize("mode", ["v2-unpad", "v2"])
def test_both_modalities_train_as_on_plain_operators(mode):
    with pytest.MonkeyPatch.context() as stand_ins:
        kernels.install_for_images(stand_ins)
        expected = train(build(mode), images=True)
    with patched_paddle(FAMILIES):
        found = train(build(mode), images=True)
    assert found[:5] == pytest.approx(expected[:5], abs=1e-5)
    assert found == pytest.approx(expected, abs=5e-3)
    assert expected[-1] < expected[0] - 0.5


def test_each_modality_teaches_its_own_experts():
    model = build("v2-unpad")
    with patched_paddle(FAMILIES):
        found = gradients(model, images=True)
        text_only = gradients(build("v2-unpad"), images=False)
    taught = {int(name.split(".experts.")[1].split(".")[0]) for name, each in found.items() if _moves(name, each)}
    assert {expert < TEXT_EXPERTS for expert in taught} == {True, False}
    taught = {int(name.split(".experts.")[1].split(".")[0]) for name, each in text_only.items() if _moves(name, each)}
    assert taught
    assert max(taught) < TEXT_EXPERTS


def _moves(name: str, gradient: np.ndarray | None) -> bool:
    return ".experts." in name and gradient is not None and bool(np.abs(gradient).max() > 0)


def test_without_the_operators_it_does_not_run():
    """On a CPU, where Paddle has no kernels: the tests above show something."""
    if paddle.is_compiled_with_cuda():
        pytest.skip("Paddle has the kernels")
    with pytest.raises(Exception, match=r"AsyncLoad|not registered"):
        loss_of(build("v2-unpad"), images=True)


def test_the_tower_of_images_wants_bfloat16():
    """The limit that docs/integrations.md states."""
    with patched_paddle(FAMILIES), pytest.raises(AssertionError, match=r"float32|FLOAT32"):
        build("v2-unpad").vision_forward(paddle.zeros([16, 48]), None, None, paddle.to_tensor([[1, 4, 4]]))
