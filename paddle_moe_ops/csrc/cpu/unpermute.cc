// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute and its gradient on the CPU. Threads own contiguous token ranges; a token's rows are read and its output row is
// written by one thread, in one order, so the result does not depend on the threads.
//
// Bytes moved: unpermute (N + T) * H; its gradient (T + N) * H for d_rows and N * H more for d_weights.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/status.h"
#include "cpu/padding.h"
#include "cpu/pool.h"
#include "cpu/row_kernels.h"
#include "pmo/permute.h"

namespace pmo {
namespace cpu {
namespace {

// Position of a row's weight, or -1.
template <typename Params>
int64_t weight_place(const Params& p, int64_t row) {
  const int64_t place = p.weight_index == nullptr ? row : p.weight_index[row];
  return place >= 0 && place < p.num_weights ? place : -1;
}

template <typename Params>
float weight_of(const Params& p, int64_t row) {
  const int64_t place = weight_place(p, row);
  return place < 0 ? 0.0f : p.weights[place];
}

// The usable rows of one token, gathered for the row kernels.
template <typename Params>
class TokenRows {
 public:
  explicit TokenRows(const Params& p)
      : params_(p),
        rows_(static_cast<size_t>(p.max_rows_per_token)),
        pointers_(rows_.size()),
        weights_(p.weights == nullptr ? 0 : rows_.size()) {}

  void collect(int64_t token) {
    const int32_t* listed = params_.token_rows + token * params_.max_rows_per_token;
    count_ = 0;
    for (int64_t i = 0; i < params_.max_rows_per_token && listed[i] != -1; ++i) {
      if (listed[i] >= 0 && listed[i] < params_.num_rows) rows_[count_++] = listed[i];
    }
    for (size_t i = 0; i < (weights_.empty() ? 0 : count_); ++i) weights_[i] = weight_of(params_, rows_[i]);
  }

  // Where the rows lie in a matrix with `row_bytes` from one row to the next.
  const void* const* locate(const void* base, int64_t row_bytes) {
    for (size_t i = 0; i < count_; ++i) pointers_[i] = static_cast<const char*>(base) + rows_[i] * row_bytes;
    return pointers_.data();
  }

  int64_t count() const { return static_cast<int64_t>(count_); }
  int32_t row(int64_t i) const { return rows_[i]; }
  const float* weights() const { return weights_.empty() ? nullptr : weights_.data(); }
  // Whether the sum is the bare row: no arithmetic touches it.
  bool is_copy() const { return count_ == 1 && (weights_.empty() || params_.copy_single_row != 0); }

 private:
  const Params& params_;
  std::vector<int32_t> rows_;
  std::vector<const void*> pointers_;
  std::vector<float> weights_;
  size_t count_ = 0;
};

int unpermute(const pmo_unpermute_params& p) {
  if (const int status = check_unpermute(p)) return status;
  if (p.num_tokens * p.hidden == 0) return PMO_OK;

  const int64_t itemsize = dtype_size(p.dtype);
  const int64_t out_bytes = p.hidden * itemsize;
  const RowKernels& kernels = row_kernels(p.dtype);
  const int64_t bytes = (p.num_rows + p.num_tokens) * out_bytes;
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    TokenRows<pmo_unpermute_params> token_rows(p);
    for (int64_t token = begin; token < end; ++token) {
      token_rows.collect(token);
      const void* const* rows = token_rows.locate(p.rows, p.rows_row_stride * itemsize);
      char* out = static_cast<char*>(p.out) + token * out_bytes;
      if (token_rows.count() == 0) {
        std::memset(out, 0, out_bytes);
      } else if (token_rows.is_copy()) {
        std::memcpy(out, rows[0], out_bytes);
      } else {
        kernels.sum(rows, token_rows.weights(), token_rows.count(), p.hidden, out);
      }
    }
  });
  return PMO_OK;
}

int unpermute_backward(const pmo_unpermute_backward_params& p) {
  if (const int status = check_unpermute_backward(p)) return status;

  const int64_t itemsize = dtype_size(p.dtype);
  const int64_t row_bytes = p.hidden * itemsize;
  const bool write_rows = p.d_rows != nullptr && row_bytes > 0;
  if (write_rows) zero_rows_without_token(static_cast<char*>(p.d_rows), row_bytes, p.num_rows, p.row_to_token, p.num_threads);
  if (p.d_weights != nullptr) std::fill(p.d_weights, p.d_weights + p.num_weights, 0.0f);
  if (row_bytes == 0 || (p.d_rows == nullptr && p.d_weights == nullptr)) return PMO_OK;

  const RowKernels& kernels = row_kernels(p.dtype);
  const int64_t bytes = (p.num_rows + p.num_tokens) * row_bytes;
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    TokenRows<pmo_unpermute_backward_params> token_rows(p);
    for (int64_t token = begin; token < end; ++token) {
      token_rows.collect(token);
      const char* d_out = static_cast<const char*>(p.d_out) + token * p.d_out_row_stride * itemsize;
      const void* const* rows = p.d_weights == nullptr ? nullptr : token_rows.locate(p.rows, p.rows_row_stride * itemsize);
      const bool copy = token_rows.weights() == nullptr || token_rows.is_copy();
      for (int64_t i = 0; i < token_rows.count(); ++i) {
        const int64_t row = token_rows.row(i);
        char* d_row = static_cast<char*>(p.d_rows) + row * row_bytes;
        if (write_rows && copy) std::memcpy(d_row, d_out, row_bytes);
        if (write_rows && !copy) kernels.scale(d_out, token_rows.weights()[i], p.hidden, d_row);
        const int64_t place = p.d_weights == nullptr || copy ? -1 : weight_place(p, row);
        if (place >= 0) p.d_weights[place] = kernels.dot(d_out, rows[i], p.hidden);
      }
    }
  });
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_unpermute_cpu(const pmo_unpermute_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::unpermute);
}

extern "C" int pmo_unpermute_backward_cpu(const pmo_unpermute_backward_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::unpermute_backward);
}
