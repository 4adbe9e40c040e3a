# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE's dispatch with float8 rows, ``moe_gate_dispatch_and_quant`` of ``paddle.incubate.nn.functional``.

Rows are quantised by the rule of ``fp8_quant_blockwise`` (`paddle_moe_ops.reference.paddle_fp8`), in groups of 128
columns. `quantize_1x128` of this package has another rule: its scales are RN(amax / 448), with a lower limit of amax.
"""

from __future__ import annotations

import paddle
from paddle import Tensor

from .. import _checks
from .._graphs import is_graph_value, public
from ..backends import direct, resolve
from ._incubate_slots import maps_of_dispatch
from .fp8.operands import GROUP

__all__ = ["moe_gate_dispatch_and_quant"]

_DTYPES = (paddle.bfloat16, paddle.float16)


@public()
def moe_gate_dispatch_and_quant(
    x: Tensor,
    gate_logits: Tensor,
    corr_bias: Tensor | None,
    k: int,
    capacity: int,
    use_pad: bool,
    use_pow2_scale: bool,
) -> tuple[Tensor, ...]:
    """Dispatch as `moe_gate_dispatch` does, with rows as float8 codes and a scale for each 128 columns.

    No result has a gradient; a backward pass written by hand calls `moe_gate_dispatch_grad`. Each token is quantised
    once. Deterministic. No host synchronisation. Graphs are refused.

    Args:
        x: [T, H] bfloat16 or float16, H a multiple of 128.
        gate_logits: float32 [T, E], usually probabilities.
        corr_bias: float32 [E], added to the scores for the choice of experts only, or None.
        k: K.
        capacity: rows that an expert gets at most.
        use_pad: as in `moe_gate_dispatch`.
        use_pow2_scale: whether scales are powers of two.

    Returns:
        codes float8_e4m3fn [E * capacity or T*K, H]; scales float32 [rows, H / 128]; then combine_weights,
        scatter_index, expert_offset and expert_id of `moe_gate_dispatch`. Rows of no slot have codes 0 and scales 1.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong value or shape.
    """
    name = "moe_gate_dispatch_and_quant"
    if is_graph_value(x):
        _checks.bad_type(name, "x", "a tensor, outside of graphs", "a value of a static graph")
    _checks.flag(name, "use_pow2_scale", use_pow2_scale)
    maps, results = maps_of_dispatch(name, x, gate_logits, corr_bias, k, capacity, use_pad, _DTYPES)
    if x.shape[1] % GROUP:
        _checks.bad_value(name, "x", f"of shape [num_tokens, hidden] with hidden % {GROUP} == 0", list(x.shape))
    codes, scales, _, _ = direct("paddle_quantize", x, True, False, False, False, use_pow2_scale, False, False, 0.0)
    codes, scales = resolve("permute", codes).permute(codes, scales, maps, "all")
    is_free = (maps.row_to_token < 0).unsqueeze(-1)
    return codes, paddle.where(is_free, paddle.ones_like(scales), scales), *results
