// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Grouped GEMM and wgrad on any device: rows in groups, one group per expert, times the experts' matrices.
//
// On a GPU that pmo_grouped_takes accepts, the kernels of pmo/grouped.h compute them, from tables that stay on the device.
// Elsewhere every GEMM is one call of Paddle's matmul per group, which writes to its part of the output. So the wgrad is never
// concatenated, and its memory, new to the process at every pass on a CPU, is in huge pages. On a GPU this path copies the tables
// to the host, a synchronisation.
#pragma once

#include "common/grouped_layout.h"
#include "paddle/binding.h"
#include "pmo/grouped.h"
#include "pmo/grouped_float8.h"
#include "pmo/matrices.h"

namespace pmo {
namespace binding {

// Sizes of matrices [E, D, N], or [E, N, D] transposed.
struct MatrixSizes {
  int64_t inner, outer;

  MatrixSizes(const Shape& matrices, bool transpose)
      : inner(dim(matrices, transpose ? 2 : 1)), outer(dim(matrices, transpose ? 1 : 2)) {}
};

// Casts a tensor of the target; returns the tensor itself if it has the dtype.
paddle::Tensor in_dtype(const Target& target, const paddle::Tensor& tensor, paddle::DataType dtype);

// Dense integers on the device: sizes that a program has as constants may be in host memory.
paddle::Tensor integers_on(const Target& target, const paddle::Tensor& integers);

// Rows that TMA can load: at multiples of 16 bytes, without overlap.
Matrix readable_rows(const Target& target, const paddle::Tensor& rows);

// pmo_dtype of GEMM operands, PMO_FLOAT32 if no kernel has them.
int32_t grouped_dtype(paddle::DataType dtype);

// True if the kernels support a GEMM of operands of a pmo_dtype on the target.
bool has_grouped_kernels(const Target& target, int32_t dtype, int64_t num_rows, int64_t num_experts, int64_t inner,
                         int64_t outer);

// Float8 codes and scales: rows [M, columns] have one scale per 128 columns, matrices one per 128 x 128 elements.
struct Float8 {
  paddle::Tensor codes, scales;
};

// The matrices of experts: values [E, A, B], or codes that each GEMM dequantises.
struct ExpertMatrices {
  // Codes as pmo/matrices.h describes them: D inputs and N outputs, [E, N, D] if they are stored transposed.
  struct Codes {
    paddle::Tensor codes, scales;
    int32_t format;  // a pmo_matrix_format
    int64_t inner, outer;
    bool transpose;
    paddle::DataType dtype;  // of the values
  };

  paddle::Tensor values;  // undefined: codes
  Codes of_codes = {};

  ExpertMatrices(const paddle::Tensor& values) : values(values) {}  // NOLINT: a conversion
  explicit ExpertMatrices(const Codes& codes) : of_codes(codes) {}

  Shape shape() const;  // [E, A, B]
  paddle::DataType dtype() const { return values.defined() ? values.dtype() : of_codes.dtype; }
};

// Checks shapes and dtypes of codes and scales.
void require_codes(const ExpertMatrices::Codes& codes, const char* function, const char* name);

// The values of all matrices, in new memory.
paddle::Tensor dequantised(const Target& target, const char* function, const ExpertMatrices::Codes& codes);

// Writes the values of `count` matrices from `first` on. `values` may be float32 in place of their dtype, to which they are
// rounded all the same.
void dequantise(const Target& target, const char* function, const ExpertMatrices::Codes& codes, int64_t first, int64_t count,
                paddle::Tensor* values);

class Grouped {
 public:
  // `sizes` [E] have been checked by the caller. `offsets` have at least E entries; null: the groups are contiguous. Either may
  // be in host memory. Groups are cut at `num_rows`.
  Grouped(const Target& target, const char* function, const paddle::Tensor& sizes, const paddle::Tensor* offsets,
          int64_t num_rows);

  // Grouped GEMM: rows [M, D] times the matrix of each row's group -> [M, N] of `dtype`, zeros in rows of no group. Kernels and
  // Paddle's GPU matmul round to the dtype of the matrices first; on a CPU the results are float32.
  // Codes are dequantised expert by expert, and only those of experts with rows, where there are no kernels.
  paddle::Tensor gemm(const paddle::Tensor& rows, const ExpertMatrices& matrices, bool transpose, paddle::DataType dtype) const;

  // Grouped wgrad: p [M, P], q [M, Q] -> p^T q over the rows of each group, [E, P, Q] of `dtype`, which is that of the matrices.
  paddle::Tensor wgrad(const paddle::Tensor& p, const paddle::Tensor& q, paddle::DataType dtype) const;

  // Values of rows [M, D] that are quantised as an operand of wgrads, by row blocks of each group, in float32: `by_blocks` as in
  // pmo_quantize_columns_params. Rows of no group are not written.
  paddle::Tensor fake_quantised_columns(const paddle::Tensor& rows, bool by_blocks) const;

  int64_t num_rows() const { return num_rows_; }

 private:
  GroupedLayout layout() const { return {experts_, 0}; }
  // An entry of the tables for tiles of PMO_GROUPED_TURNED_ROWS rows, which are computed at the first call.
  int32_t* table(int64_t place) const;
  paddle::Tensor tables_of(int32_t tile_rows) const;
  bool has_kernels(paddle::DataType dtype, int64_t inner, int64_t outer) const;
  // Launches the grouped GEMM kernel, which does not write rows of no group, and zeroes these.
  void launch(const paddle::Tensor& rows, const paddle::Tensor& matrices, bool transpose, paddle::Tensor* out) const;
  const std::vector<int32_t>& on_host() const;
  template <typename Function>
  void each(const Function& function) const;
  paddle::DataType matmul_dtype(paddle::DataType dtype) const;
  paddle::Tensor view(const paddle::Tensor& tensor, int64_t first, int64_t rows, int64_t columns) const;
  void multiply(const paddle::Tensor& x, const paddle::Tensor& y, bool transpose_x, bool transpose_y, paddle::Tensor part) const;
  // The matrix of one expert, of `dtype`.
  paddle::Tensor matrix_of(const ExpertMatrices& matrices, int64_t expert, paddle::DataType dtype) const;
  void clear_rows(paddle::Tensor* out, int64_t begin, int64_t end) const;

  const Target& target_;
  const char* function_;
  paddle::Tensor sizes_, offsets_;
  int64_t num_rows_, experts_;
  mutable paddle::Tensor tables_;  // of pmo/grouped_rows.h for one tile height, without chunks
  mutable std::vector<int32_t> host_;
};

}  // namespace binding
}  // namespace pmo
