# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Cases, as in `cases`, of the forms of arguments that TransformerEngine's callers use."""

from __future__ import annotations

import numpy as np

from paddle_moe_ops import dispatch, masked, sort_chunks
from paddle_moe_ops.compat import transformer_engine, transformer_engine_jax
from tests.static.cases import Case
from tests.static.inputs import BUFFER, SMALL_BUFFER, A, Inputs, chunk_inputs, mask_inputs

SCALES = 2


def inputs_of_masks(mask_dtype: type, probs_dtype: type = np.float32):
    """Masks in another dtype, and probabilities of which some are 0."""

    def make(rng: np.random.Generator, tokens: int) -> Inputs:
        inputs = mask_inputs(rng, tokens)
        probs = np.where(rng.random(inputs["probs"].shape) < 0.3, 0, inputs["probs"])
        return {**inputs, "mask": inputs["mask"].astype(mask_dtype), "probs": probs.astype(probs_dtype)}

    return make


def half_chunks(x, sizes, order, probs):
    out, probs_out, source_to_dest = sort_chunks(x, sizes, order, probs.astype("float16"))
    chunk_map = masked.make_chunk_sort_map(sizes, order, 500)
    back, probs_back = masked.sort_chunks_by_map(out, source_to_dest, probs_out.astype("bfloat16"), is_forward=False)
    return out, probs_out.astype("float32"), back, probs_back.astype("float32"), chunk_map


def map_of_named_mask(x, mask, probs):
    row_id_map, num_out = masked.make_row_id_map(mask=mask, num_out_tokens=SMALL_BUFFER)
    rows, row_probs, _ = masked.permute_with_mask_map(x, row_id_map, SMALL_BUFFER, probs)
    return row_id_map, num_out, rows, row_probs


def as_many_rows_as_are_routed(x, mask, probs):
    rows, row_probs, row_id_map = masked.moe_permute_with_probs(x, probs, mask)
    alone, _ = masked.moe_permute(x, mask)
    return rows, row_probs, row_id_map, alone


def without_rows(x, mask, probs):
    rows, row_probs, row_id_map = masked.moe_permute_with_probs(x, probs, mask, 0)
    return row_id_map, row_probs, masked.moe_unpermute(rows, row_id_map, probs)


def dispatch_without_rows(x, mask, probs):
    rows, row_probs, row_id_map, _, counts = dispatch.token_dispatch(x, mask, 0, probs, A)
    return rows, row_probs, row_id_map, counts


def blank_rows_and_scales(x, mask, probs):
    options = {"scale": x[:, :SCALES].detach(), "zero_prob_as_padding": True}
    rows, row_probs, row_id_map, row_scale = masked.moe_permute_with_probs(x, probs, mask, BUFFER, **options)
    return rows, row_probs, row_scale, masked.moe_unpermute(rows, row_id_map, probs)


def scales_of_bytes(x, mask, probs):
    scale = (x[:, :SCALES].detach().abs() * 100).astype("uint8")
    rows, row_probs, _, row_scale = masked.moe_permute_with_probs(x, probs, mask, BUFFER, scale=scale)
    alone, _, same_scale = masked.moe_permute(x, mask, BUFFER, scale=scale)
    return rows, row_probs, row_scale, alone, same_scale


def blank_rows_and_padding(x, mask, probs):
    counts, options = mask.astype("int32").sum(0), {"scale": x[:, :SCALES].detach(), "zero_prob_as_padding": True}
    made = masked.moe_permute_and_pad_with_probs(x, probs, mask, counts, A, **options)
    rows, row_probs, row_id_map, pad_offsets, targets, row_scale = made
    if pad_offsets is not None:
        pad_offsets = pad_offsets.astype("int64")
    out = masked.moe_unpermute(rows, row_id_map, probs, pad_offsets=pad_offsets)
    return rows, row_probs, targets, row_scale, out


def by_transformer_engine(x, mask, probs):
    rows, row_probs, row_id_map = transformer_engine.moe_permute_with_probs(x, probs, mask, SMALL_BUFFER)
    return rows, row_probs, row_id_map, transformer_engine.moe_unpermute(rows, row_id_map, probs, x.shape)


def by_transformer_engine_padded(x, mask, probs):
    counts = mask.astype("int32").sum(0)
    made = transformer_engine.moe_permute_and_pad_with_probs(x, probs, mask, counts, A)
    rows, row_probs, row_id_map, pad_offsets, _ = made
    out = transformer_engine.moe_unpermute(rows, row_id_map, None, x.shape, "mask", probs, pad_offsets)
    return rows, row_probs, row_id_map, out


def by_transformer_engine_jax(x, mask, probs):
    """Batches of one sequence."""
    rows, row_probs, row_id_map, pad_offsets, counts = transformer_engine_jax.token_dispatch(
        x.unsqueeze(0), mask.unsqueeze(0), BUFFER, probs.unsqueeze(0), A
    )
    out = transformer_engine_jax.token_combine(rows, row_id_map, probs.unsqueeze(0), pad_offsets.astype("int64"))
    return rows, row_probs, counts, out


def experts_of_floats(x, mask, probs):
    return transformer_engine_jax.routing_map_to_selected_experts(probs, mask, 3)


def limited_map(x, mask, probs):
    """Sizes read from the tensors, as callers write it."""
    (tokens, hidden), experts = x.shape, mask.shape[1]
    row_id_map = transformer_engine.make_row_id_map(mask, tokens, experts, SMALL_BUFFER)
    rows, _, row_probs = transformer_engine.permute_with_mask_map(
        x, row_id_map, probs, None, None, tokens, experts, SMALL_BUFFER, hidden, None
    )
    out, _ = transformer_engine.unpermute_with_mask_map(rows, row_id_map, probs, None, None, tokens, experts, hidden)
    return row_id_map, rows, row_probs, out


BOTH = ("x", "probs")
FORMS = (
    Case("half-chunk-probs", half_chunks, chunk_inputs(), BOTH),
    Case("named-mask", map_of_named_mask, inputs_of_masks(np.int8), BOTH),
    Case("all-routed", as_many_rows_as_are_routed, inputs_of_masks(np.bool_), BOTH),
    Case("no-rows", without_rows, inputs_of_masks(np.int64), BOTH),
    Case("no-rows-dispatch", dispatch_without_rows, inputs_of_masks(np.float32), BOTH),
    Case("blank-rows", blank_rows_and_scales, inputs_of_masks(np.bool_), BOTH),
    Case("blank-rows-float16", blank_rows_and_scales, inputs_of_masks(np.int8, np.float16), BOTH),
    Case("scales-of-bytes", scales_of_bytes, inputs_of_masks(np.bool_), BOTH),
    Case("blank-rows-padded", blank_rows_and_padding, inputs_of_masks(np.bool_), BOTH),
    Case("transformer-engine", by_transformer_engine, inputs_of_masks(np.int32), BOTH),
    Case("transformer-engine-padded", by_transformer_engine_padded, inputs_of_masks(np.int32), BOTH),
    Case("transformer-engine-jax", by_transformer_engine_jax, inputs_of_masks(np.float32), BOTH),
    Case("transformer-engine-jax-experts", experts_of_floats, inputs_of_masks(np.float32), ("probs",)),
    Case("transformer-engine-limit", limited_map, inputs_of_masks(np.uint8), BOTH),
)
