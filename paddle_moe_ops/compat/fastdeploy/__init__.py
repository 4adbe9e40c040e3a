# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""FastDeploy's operators for Mixture-of-Experts layers, on this package's operators.

Names, order of arguments and results are those of ``fastdeploy.model_executor.ops.gpu``, where `patch_fastdeploy` puts
them. Results come in a list if there are several. They run on CPU and GPU tensors.

These are operators for inference: no result has a gradient (``stop_gradient`` is True). All raise TypeError or
ValueError for arguments of the wrong type, dtype, value or shape. Padding, which FastDeploy leaves unwritten, is
defined. Orders that FastDeploy leaves to atomic additions are fixed: tokens ascend.

In static graphs, and in programs that do not know the number of tokens, all but these run: functions that make float8
codes, that return lists of numbers, or that add to an argument.
"""

from __future__ import annotations

from .expert_parallel import (
    depermute_prefill_combine,
    ep_moe_expert_combine,
    ep_moe_expert_dispatch,
    ep_moe_expert_dispatch_fp8,
    prefill_permute_to_masked_gemm,
)
from .experts import moe_expert_ffn
from .patch import patch_fastdeploy, patched_fastdeploy, unpatch_fastdeploy
from .quantization import (
    fused_mask_swiglu_fp8_quant,
    masked_per_token_quant,
    per_token_quant,
    per_token_quant_padding,
)
from .selection import (
    count_tokens_per_expert_func,
    get_expert_token_num,
    grouped_topk,
    moe_redundant_topk_select,
    moe_topk_select,
    noaux_tc,
    noaux_tc_redundant,
)
from .tensor_parallel import moe_expert_dispatch, moe_expert_reduce
from .weights import from_weight_quantize, to_weight_quantize

__all__ = [
    "count_tokens_per_expert_func",
    "depermute_prefill_combine",
    "ep_moe_expert_combine",
    "ep_moe_expert_dispatch",
    "ep_moe_expert_dispatch_fp8",
    "from_weight_quantize",
    "fused_mask_swiglu_fp8_quant",
    "get_expert_token_num",
    "grouped_topk",
    "masked_per_token_quant",
    "moe_expert_dispatch",
    "moe_expert_ffn",
    "moe_expert_reduce",
    "moe_redundant_topk_select",
    "moe_topk_select",
    "noaux_tc",
    "noaux_tc_redundant",
    "patch_fastdeploy",
    "patched_fastdeploy",
    "per_token_quant",
    "per_token_quant_padding",
    "prefill_permute_to_masked_gemm",
    "to_weight_quantize",
    "unpatch_fastdeploy",
]
