// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// index_add: rows are added to their tokens in place (pmo/index_add.h), for dygraph. It has no gradient.
#include "pmo/index_add.h"

#include <cstdint>

#include "paddle/direct.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "index_add";

// The tokens are in tensors of `piece_tokens`, the last with the rest. Rows from the end of the index on are padding.
Outputs index_add(const Tensors& pieces, const paddle::Tensor& rows, const paddle::Tensor& row_to_token, int64_t piece_tokens) {
  require_rank(rows, 2, kFunction, "x_unzipped");
  require_rank(row_to_token, 1, kFunction, "idx_unzipped");
  require(row_to_token.shape()[0] <= rows.shape()[0], kFunction, "x_unzipped must have a row for each token of idx_unzipped");
  require(piece_tokens >= 0 && piece_tokens <= INT32_MAX, kFunction, "the tokens of a tensor must be in [0, 2^31)");
  pmo_index_add_params p = {};
  p.struct_size = sizeof(p);
  p.index_kind = index_kind(row_to_token, kFunction, "idx_unzipped");
  p.num_rows = row_to_token.shape()[0];
  p.hidden = rows.shape()[1];
  p.rows_dtype = dtype_of(rows, kFunction, "x_unzipped");
  const Matrix source(rows);
  const paddle::Tensor index = dense(row_to_token);
  p.rows = source.data;
  p.rows_row_stride = source.row_stride;
  p.row_to_token = index.data();
  for (const paddle::Tensor& piece : pieces) {
    const Target target(kFunction, {&piece, &rows, &row_to_token});
    require_shape(piece, {-1, p.hidden}, kFunction, "x_zipped");
    p.num_tokens = piece.shape()[0];
    require(p.num_tokens <= piece_tokens, kFunction, "x_zipped must have at most the tokens of a tensor");
#ifndef PMO_PADDLE_2  // its operators receive contiguous tensors
    require(piece.is_contiguous(), kFunction, "x_zipped must be contiguous");
#endif
    if (p.num_tokens == 0) continue;
    paddle::Tensor out = piece;
    p.dtype = dtype_of(out, kFunction, "x_zipped");
    p.out = out.data();
    const paddle::Tensor workspace = target.is_gpu() ? target.empty_int32({2, p.num_tokens}) : paddle::Tensor();
    p.workspace = target.is_gpu() ? const_cast<int32_t*>(workspace.data<int32_t>()) : nullptr;
    check_status(PMO_CALL(target, index_add, &p), kFunction);
    p.first_token += piece_tokens;
  }
  return {};
}

}  // namespace

PMO_DIRECT(index_add, index_add);
