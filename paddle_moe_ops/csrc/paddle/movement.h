// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Core calls that several operators make: rows to expert order, rows back, and values per slot.
#pragma once

#include "paddle/binding.h"
#include "pmo/permute.h"
#include "pmo/route.h"

namespace pmo {
namespace binding {

// Moves x [T, H] (unless `rows` is null) and scale [T, S] (unless null) to expert order.
void permute_rows(const char* function, const paddle::Tensor& x, const paddle::Tensor* scale, const paddle::Tensor& slot_to_row,
                  const paddle::Tensor& row_to_token, int fill, paddle::Tensor* rows, paddle::Tensor* row_scales);

// The float32 weight of each row, and where it stands: per row, or at a position that `index` [N] gives.
struct Weights {
  const paddle::Tensor* values = nullptr;
  const paddle::Tensor* index = nullptr;
  bool copy_single_row = false;
};

// sum of each token's rows -> [T, H]
paddle::Tensor sum_rows(const char* function, const paddle::Tensor& rows, const paddle::Tensor& token_rows,
                        const Weights& weights);

// The gradients of sum_rows; a null output is not computed. `rows` may be null unless d_weights is wanted.
void sum_rows_backward(const char* function, const paddle::Tensor& d_out, const paddle::Tensor* rows,
                       const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token, const Weights& weights,
                       paddle::Tensor* d_rows, paddle::Tensor* d_weights);

// [T, K] value of each slot's row, 0 where it has none.
paddle::Tensor gather_slots(const char* function, const paddle::Tensor& slot_to_row, const paddle::Tensor& row_values);

// row_values[N] = the slots' values, summed in slot order and added to what is there if `accumulate`.
void scatter_slots(const char* function, const paddle::Tensor& slot_to_row, const paddle::Tensor& slot_values, bool accumulate,
                   paddle::Tensor* row_values);

}  // namespace binding
}  // namespace pmo
