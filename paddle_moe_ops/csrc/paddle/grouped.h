// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Rows in groups, one of each expert, and their products with the experts' matrices, on any device.
//
// On a GPU that pmo_grouped_takes names, the kernels of pmo/grouped.h make them, from tables that stay on the device. Elsewhere every product
// is Paddle's matmul, group by group, written where it belongs: the gradient of the matrices is never put together from parts, and its memory,
// which on a CPU is new to the process at every pass, comes in large pages. On a GPU this needs the groups on the host, a synchronisation.
#pragma once

#include "paddle/binding.h"
#include "pmo/grouped.h"
#include "pmo/grouped_float8.h"

namespace pmo {
namespace binding {

// How the matrices [E, D, N] lie, or [E, N, D] transposed.
struct MatrixSizes {
  int64_t inner, outer;

  MatrixSizes(const Shape& matrices, bool transpose)
      : inner(dim(matrices, transpose ? 2 : 1)), outer(dim(matrices, transpose ? 1 : 2)) {}
};

// A tensor of the target in a dtype; no copy if it has it.
paddle::Tensor in_dtype(const Target& target, const paddle::Tensor& tensor, paddle::DataType dtype);

// Numbers in float8: codes of rows [M, columns] with a scale for each 128 columns, or of matrices with one for each 128 x 128 elements.
struct Float8 {
  paddle::Tensor codes, scales;
};

class Grouped {
 public:
  // sizes [E], which the caller has checked, and offsets [E] or longer, or null where the groups follow each other; either may be in host
  // memory. Groups are cut so that all rows are among the `num_rows`. Kernels make `tile_rows` of them at once.
  Grouped(const Target& target, const char* function, const paddle::Tensor& sizes, const paddle::Tensor* offsets,
          int64_t num_rows, int32_t tile_rows = PMO_GROUPED_TURNED_ROWS);

  // Whether the kernels make products of this dtype and these sizes here.
  bool has_kernels(paddle::DataType dtype, int64_t inner, int64_t outer) const;
  // The same of float8 operands, for which tiles must have PMO_GROUPED_TILE_ROWS rows.
  bool has_float8_kernels(int64_t inner, int64_t outer) const;

  // rows [M, D] times the matrix of each row's group -> [M, N] of `dtype`, zeros in rows of no group. The sums are rounded to the dtype of
  // the matrices first, but on a CPU, where they are float32.
  paddle::Tensor product(const paddle::Tensor& rows, const paddle::Tensor& matrices, bool transpose,
                         paddle::DataType dtype) const;

  // p [M, P], q [M, Q] -> [E, P, Q] of `dtype`, which is that of the matrices: the sums of p^T q over the rows of each group
  paddle::Tensor outer(const paddle::Tensor& p, const paddle::Tensor& q, paddle::DataType dtype) const;

  // The same without zeros: a launch of the kernel for a result, whose params get x, the matrix and the tables. `hidden`, `weights`, ... are
  // the caller's to set, and rows of no group are left as they are.
  void launch(pmo_grouped_product_params params, const paddle::Tensor& rows, const paddle::Tensor& matrices, bool transpose,
              paddle::Tensor* out) const;

  // The same of float8 operands: rows, and matrices [E, N, D], where D is the length of the contraction. A gated result need not have `out`.
  void launch_float8(pmo_grouped_float8_params params, const Float8& rows, const Float8& matrices, paddle::Tensor* out) const;

  // Zeros in what launches leave as it is.
  void clear_others(paddle::Tensor* out) const;

  int64_t num_rows() const { return num_rows_; }

 private:
  const int32_t* table(int64_t place) const { return tables_.data<int32_t>() + place; }
  template <typename Params>
  void set_tables(Params* params) const;
  bool takes(int32_t dtype, int64_t inner, int64_t outer) const;
  const std::vector<int32_t>& on_host() const;
  template <typename Function>
  void each(const Function& function) const;
  paddle::DataType summed_dtype(paddle::DataType dtype) const;
  paddle::Tensor view(const paddle::Tensor& tensor, int64_t first, int64_t rows, int64_t columns) const;
  void multiply(const paddle::Tensor& x, const paddle::Tensor& y, bool transpose_x, bool transpose_y, paddle::Tensor part) const;
  void clear_rows(paddle::Tensor* out, int64_t begin, int64_t end) const;
  Matrix readable(const paddle::Tensor& rows) const;

  const Target& target_;
  const char* function_;
  int64_t num_rows_, experts_;
  int32_t tile_rows_;
  paddle::Tensor tables_;  // first [E], stop [E], tiles [E + 1], window [4]
  mutable std::vector<int32_t> host_;
};

}  // namespace binding
}  // namespace pmo
