# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the expert layer of PaddleFleet: its methods and attributes, in plain operators of Paddle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 48, 24, 9, 3
IDLE = 4  # no token chooses this expert


class Gate(nn.Layer):
    """A router with the eight results of PaddleFleet's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([HIDDEN, EXPERTS])

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> tuple[Any, ...]:
        """Capacity, weights, ids, probabilities [T, E], mask [T, E], priorities, and two losses."""
        logits = paddle.matmul(hidden_states.reshape([-1, HIDDEN]).astype("float32"), self.weight)
        logits = logits - 100.0 * F.one_hot(paddle.to_tensor(IDLE), EXPERTS)
        weights, ids = paddle.topk(F.softmax(logits), TOPK)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = F.one_hot(ids, EXPERTS)
        mask = chosen.sum(1)
        probs = (weights.unsqueeze(-1) * chosen).sum(1)
        return None, weights, ids, probs, mask, None, None, None


class StandardMLPExpert(nn.Layer):
    """An expert, which also returns a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up_gate_proj = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias_attr=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias_attr=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """The output, and no bias."""
        gate, up = self.up_gate_proj(hidden_states).chunk(2, axis=-1)
        return self.down_proj(F.silu(gate) * up), None


class GroupedMLPExpert(nn.Layer):
    """All experts in two matrices."""

    def __init__(self, hidden_act: Any = F.silu) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=True, hidden_act=hidden_act)
        self.weight1 = self.create_parameter([EXPERTS, HIDDEN, 2 * INTERMEDIATE])
        self.weight2 = self.create_parameter([EXPERTS, INTERMEDIATE, HIDDEN])
        self.calls = 0

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor, None]:
        """The outputs of rows in the order of the experts, and no bias."""
        self.calls += 1
        outputs, start = [permuted_local_hidden_states[:0]], 0
        for expert, count in enumerate(tokens_per_expert.tolist()):
            rows = permuted_local_hidden_states[start : start + count]
            gate, up = paddle.matmul(rows, self.weight1[expert]).chunk(2, axis=-1)
            outputs.append(paddle.matmul(self.config.hidden_act(gate) * up, self.weight2[expert]))
            start += count
        return paddle.concat(outputs), None


class MoELayer(nn.Layer):
    """A layer with stacked experts, or with experts that are layers, and a shared one."""

    def __init__(self, moe_expert_fusion: bool, hidden_act: Any = F.silu) -> None:
        super().__init__()
        self.config = SimpleNamespace()  # not PaddleFormers': it has no `get`
        self.num_experts, self.num_experts_per_tok = EXPERTS, TOPK
        self.moe_expert_fusion = moe_expert_fusion
        self.expert_model_parallel_size = self.tensor_model_parallel_size = 1
        self.sequence_parallel = self.using_sonic_moe = False
        self.fp8 = None
        self.gate, self.shared_experts = Gate(), StandardMLPExpert()
        if moe_expert_fusion:
            self.grouped_gemm_experts = GroupedMLPExpert(hidden_act)
        else:
            self.experts = nn.LayerList([StandardMLPExpert() for _ in range(EXPERTS)])

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, None]:
        """The output, and no bias."""
        tokens = hidden_states.reshape([-1, HIDDEN])
        _, weights, ids, probs, mask, *_ = self.gate(hidden_states, input_ids=input_ids)
        if self.moe_expert_fusion:
            out = self._forward_single_card_grouped_gemm_moe(tokens, mask, probs, ids, weights)
        else:
            out = self._forward_single_card_moe(tokens, ids, weights)
        return out.reshape(hidden_states.shape) + self.shared_experts(hidden_states)[0], None

    def _forward_single_card_moe(self, hidden_states: Tensor, selected_experts: Tensor, topk_weights: Tensor) -> Tensor:
        out = paddle.zeros_like(hidden_states)
        for expert, layer in enumerate(self.experts):
            token, slot = paddle.nonzero(selected_experts == expert, as_tuple=True)
            token, slot = token.flatten(), slot.flatten()
            if token.shape[0] == 0:
                continue
            rows = layer(paddle.gather(hidden_states, token))[0]
            weight = paddle.gather_nd(topk_weights, paddle.stack([token, slot], axis=1)).unsqueeze(-1)
            out = out + paddle.scatter_nd_add(paddle.zeros_like(out), token.unsqueeze(-1), rows * weight)
        return out

    def _forward_single_card_grouped_gemm_moe(
        self,
        hidden_states: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        topk_indices: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Tensor:
        expert, token = paddle.nonzero(routing_map.transpose([1, 0]), as_tuple=True)
        expert, token = expert.flatten(), token.flatten()
        rows = paddle.gather(hidden_states, token)
        rows = self.grouped_gemm_experts(rows, routing_map.sum(0).astype("int64"))[0]
        weight = paddle.gather_nd(probs, paddle.stack([token, expert], axis=1)).unsqueeze(-1)
        return paddle.scatter_nd_add(paddle.zeros_like(hidden_states), token.unsqueeze(-1), rows * weight)
