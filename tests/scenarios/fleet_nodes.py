# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of an expert layer as PaddleFleet composes them: unzip, grouped GEMM, zip, with backward passes by hand.

T tokens, H hidden size, I intermediate size, E experts, K slots of a token, N rows of the permuted buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_moe_ops.compat import paddlefleet


class Functions(NamedTuple):
    """The functions of a node that Paddle has too."""

    moe_permute: Callable[..., Any]
    moe_unpermute: Callable[..., Any]
    batched_gemm: Callable[..., Any]


class Routing(NamedTuple):
    """The routed tokens of a rank."""

    ids: Tensor  # int32 [T, K], -1 for experts of other ranks
    probs: Tensor  # float32 [T, K]
    tokens_per_expert: list[int]
    alignment: int

    @property
    def padded(self) -> list[int]:
        return [-(-count // self.alignment) * self.alignment for count in self.tokens_per_expert]


class UnZip:
    """Tokens to rows, and the gradients of rows and probabilities back to tokens and slots."""

    def __init__(self, functions: Functions, routing: Routing) -> None:
        self.functions, self.routing = functions, routing
        self.rowmap: Any = None

    def forward(self, x: Tensor, fill_output: bool = True) -> tuple[Tensor, Tensor]:
        ids, probs, counts, alignment = self.routing
        rows, self.rowmap, row_probs, scale = self.functions.moe_permute(
            x,
            None,
            ids,
            probs,
            num_experts=len(counts),
            tokens_per_expert=counts,
            padding_alignment=alignment,
            do_gather=fill_output,
        )
        assert scale.shape[0] == 0
        return rows, row_probs

    def backward(self, d_rows: Tensor, d_probs: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        maps = self.rowmap, self.routing.ids
        return self.functions.moe_unpermute(d_rows, *maps, d_probs, num_tokens, len(self.routing.tokens_per_expert))


class Zip:
    """Rows to the sums of tokens, and the gradients of those back to rows."""

    def __init__(self, functions: Functions, routing: Routing) -> None:
        self.functions, self.routing = functions, routing

    def forward(self, rows: Tensor, rowmap: Tensor, row_probs: Tensor, num_tokens: int) -> Tensor:
        counts = self.routing.tokens_per_expert
        return self.functions.moe_unpermute(rows, rowmap, self.routing.ids, row_probs, num_tokens, len(counts))[0]

    def backward(self, d_out: Tensor) -> Tensor:
        ids, probs, counts, alignment = self.routing
        given = ids, probs, len(counts), counts, alignment
        return self.functions.moe_permute(d_out, None, *given, do_gather=True)[0]


class Gemms:
    """SwiGLU experts [E, H, 2I] and [E, I, H], weighted between the GEMMs; gradients are added to main_grad."""

    def __init__(self, functions: Functions, w1: Tensor, w2: Tensor) -> None:
        self.functions, self.w1, self.w2 = functions, w1, w2
        self.main_grad = [paddle.zeros(weight.shape) for weight in (w1, w2)]

    def forward(self, rows: Tensor, row_probs: Tensor, sizes: list[int], first: int = 0) -> Tensor:
        """Expert outputs of the rows of experts [first, first + len(sizes))."""
        hidden = self._hidden(self._product(rows, self.w1, sizes, first))
        weighted = (hidden * row_probs.unsqueeze(-1)).astype(rows.dtype)
        return self._product(weighted, self.w2, sizes, first)

    def backward(
        self, d_out: Tensor, rows: Tensor, row_probs: Tensor, sizes: list[int], first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows [N, H] and of their probabilities [N]; the first GEMM is recomputed."""
        probs = row_probs.unsqueeze(-1)
        out1 = self._product(rows, self.w1, sizes, first).astype("float32")
        gate, up = out1.chunk(2, axis=-1)
        hidden = self._hidden(out1)
        d_weighted = self._product(d_out, self.w2, sizes, first, trans_rhs=True).astype("float32")
        d_probs = (d_weighted * hidden).sum(-1)
        d_hidden = d_weighted * probs
        sigmoid = F.sigmoid(gate)
        d_gate = d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_out1 = paddle.concat([d_gate, d_hidden * F.silu(gate)], axis=-1).astype(rows.dtype)
        self._add_grad(1, (hidden * probs).astype(rows.dtype), d_out, sizes, first)
        self._add_grad(0, rows, d_out1, sizes, first)
        return self._product(d_out1, self.w1, sizes, first, trans_rhs=True), d_probs

    def _product(self, rows: Tensor, weight: Tensor, sizes: list[int], first: int, **options: bool) -> Tensor:
        return self.functions.batched_gemm(rows, weight[first : first + len(sizes)], sizes, **options)

    def _add_grad(self, number: int, rows: Tensor, d_rows: Tensor, sizes: list[int], first: int) -> None:
        grad = self.functions.batched_gemm(rows, d_rows, sizes, trans_lhs=True).astype("float32")
        self.main_grad[number][first : first + len(sizes)] += grad

    @staticmethod
    def _hidden(out1: Tensor) -> Tensor:
        gate, up = out1.astype("float32").chunk(2, axis=-1)
        return F.silu(gate) * up


class Mlp:
    """The whole layer in one piece."""

    def __init__(self, functions: Functions, gemms: Gemms, routing: Routing) -> None:
        self.gemms, self.routing = gemms, routing
        self.unzip, self.zip = UnZip(functions, routing), Zip(functions, routing)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.rows, self.row_probs = self.unzip.forward(x)
        out = self.gemms.forward(self.rows, self.row_probs, self.routing.padded)
        return self.zip.forward(out, self.unzip.rowmap, self.row_probs, x.shape[0])

    def backward(self, d_out: Tensor) -> tuple[Tensor, Tensor]:
        d_rows = self.zip.backward(d_out)
        d_rows, d_probs = self.gemms.backward(d_rows, self.rows, self.row_probs, self.routing.padded)
        return self.unzip.backward(d_rows, d_probs, d_out.shape[0])


class Pieces(NamedTuple):
    """Sizes of the pieces in which a layer is computed: rows of an expert, and tokens of a sum (None: all)."""

    rows: int
    tokens: int | None


class MlpByExpert(Mlp):
    """The layer expert by expert, in pieces of rows that are gathered when they are needed."""

    def __init__(self, functions: Functions, gemms: Gemms, routing: Routing, pieces: Pieces) -> None:
        super().__init__(functions, gemms, routing)
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        rows, self.row_probs = self.unzip.forward(x, fill_output=False)
        assert rows.shape[0] == 0
        out = self._nothing(x)
        for expert, start in self._experts():
            rows, index = self._gather(x, expert)
            for part in self._parts(rows):
                probs = self.row_probs[start:][part]
                expert_out = self.gemms.forward(rows[part], probs, [rows[part].shape[0]], expert)
                out = self._add(out, expert_out, index[part], x.shape[0])
        return self._merged(out, x)

    def backward(self, d_out: Tensor) -> tuple[Tensor, Tensor]:
        d_x, d_probs = self._nothing(d_out), []
        for expert, start in self._experts():
            d_rows, index = self._gather(d_out, expert)
            rows, _ = self._gather(self.x, expert)
            found = [paddle.zeros([0])]
            for part in self._parts(rows):
                given = d_rows[part], rows[part], self.row_probs[start:][part]
                d_part, d_part_probs = self.gemms.backward(*given, [rows[part].shape[0]], expert)
                d_x = self._add(d_x, d_part, index[part], d_out.shape[0])
                found.append(d_part_probs)
            d_probs.append(paddle.concat(found))
        given = d_probs, self.unzip.rowmap, self.routing.ids
        return self._merged(d_x, d_out), paddlefleet.tokens_zip_prob(*given)

    def _experts(self) -> list[tuple[int, int]]:
        """Each expert and the first of its rows."""
        padded = self.routing.padded
        return [(expert, sum(padded[:expert])) for expert in range(len(padded))]

    def _gather(self, x: Tensor, expert: int) -> tuple[Tensor, Tensor]:
        given = self.unzip.rowmap, expert, self.routing.tokens_per_expert, self.routing.alignment
        rows, scale, index = paddlefleet.tokens_unzip_gather(x, None, *given)
        assert scale.shape[0] == 0
        assert index.shape == [self.routing.tokens_per_expert[expert]]
        return rows, index

    def _parts(self, rows: Tensor) -> list[slice]:
        end, size = rows.shape[0], self.pieces.rows
        return [slice(start, min(start + size, end)) for start in range(0, end, size)]

    def _nothing(self, x: Tensor) -> Any:
        """Sums without rows, in float32."""
        num_tokens, hidden = x.shape
        if self.pieces.tokens is None or num_tokens == 0:
            return paddle.zeros([0, hidden])
        starts = range(0, num_tokens, self.pieces.tokens)
        return [paddle.zeros([min(self.pieces.tokens, num_tokens - start), hidden]) for start in starts]

    def _add(self, out: Any, rows: Tensor, index: Tensor, num_tokens: int) -> Any:
        if isinstance(out, Tensor):
            return paddlefleet.tokens_zip_unique_add(out, rows, index, num_tokens)
        return paddlefleet.tokens_zip_unique_add_subbatch(out, rows, index, num_tokens, self.pieces.tokens)

    def _merged(self, out: Any, like: Tensor) -> Tensor:
        if isinstance(out, Tensor) and out.shape[0] == 0:  # no row was added
            out = paddle.zeros(like.shape)
        return paddlefleet.merge_subbatch_cast(out, like.dtype)


class MlpByRows(MlpByExpert):
    """The layer in pieces of the permuted rows, whichever experts they belong to."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.rows, self.row_probs = self.unzip.forward(x)
        index, out = self._index(x), self._nothing(x)
        for part in self._parts(self.rows):
            expert_out = self.gemms.forward(self.rows[part], self.row_probs[part], self._sizes(part))
            out = self._add(out, expert_out, index[part], x.shape[0])
        return self._merged(out, x)

    def backward(self, d_out: Tensor) -> tuple[Tensor, Tensor]:
        d_rows = self.zip.backward(d_out)
        index, d_x, d_probs = self._index(d_out), self._nothing(d_out), []
        for part in self._parts(self.rows):
            given = d_rows[part], self.rows[part], self.row_probs[part]
            d_part, d_part_probs = self.gemms.backward(*given, self._sizes(part))
            d_x = self._add(d_x, d_part, index[part], d_out.shape[0])
            d_probs.append(d_part_probs)
        given = d_probs or [paddle.zeros([0])], self.unzip.rowmap, self.routing.ids, self.pieces.rows
        return self._merged(d_x, d_out), paddlefleet.tokens_zip_prob_seq_subbatch(*given)

    def _index(self, x: Tensor) -> Tensor:
        num_experts, num_rows = len(self.routing.padded), self.rows.shape[0]
        return paddlefleet.tokens_unzip_slice(x, self.unzip.rowmap, num_experts, num_rows, 0, num_rows + 1)

    def _sizes(self, part: slice) -> list[int]:
        """The rows of each expert in a part."""
        sizes, start = [], 0
        for count in self.routing.padded:
            sizes.append(max(min(start + count, part.stop) - max(start, part.start), 0))
            start += count
        return sizes


class MlpLayer(paddle.autograd.PyLayer):
    """A node of autograd around one of the above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, node: Mlp) -> Tensor:
        ctx.node = node
        out = node.forward(x)
        out.stop_gradient = False
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        return ctx.node.backward(d_out)
