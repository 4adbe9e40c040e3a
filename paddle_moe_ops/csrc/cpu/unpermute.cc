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
#include "cpu/streaming.h"
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
  TokenRows(const Params& p, int64_t row_stride_bytes)
      : params_(p),
        row_stride_bytes_(row_stride_bytes),
        rows_(static_cast<size_t>(p.max_rows_per_token)),
        pointers_(p.rows == nullptr ? 0 : rows_.size()),
        weights_(p.weights == nullptr ? 0 : rows_.size()) {}

  void collect(int64_t token) {
    const int32_t* listed = params_.token_rows + token * params_.max_rows_per_token;
    count_ = 0;
    for (int64_t i = 0; i < params_.max_rows_per_token && listed[i] != -1; ++i) {
      if (listed[i] >= 0 && listed[i] < params_.num_rows) rows_[count_++] = listed[i];
    }
    const char* base = static_cast<const char*>(params_.rows);
    for (size_t i = 0; i < (pointers_.empty() ? 0 : count_); ++i) pointers_[i] = base + rows_[i] * row_stride_bytes_;
    for (size_t i = 0; i < (weights_.empty() ? 0 : count_); ++i) weights_[i] = weight_of(params_, rows_[i]);
  }

  RowList list() const { return {pointers_.data(), count()}; }
  int64_t count() const { return static_cast<int64_t>(count_); }
  int32_t row(int64_t i) const { return rows_[i]; }
  const float* weights() const { return weights_.empty() ? nullptr : weights_.data(); }
  // Whether the sum is the bare row: no arithmetic touches it.
  bool is_copy() const { return count_ == 1 && (weights_.empty() || params_.copy_single_row != 0); }

 private:
  const Params& params_;
  const int64_t row_stride_bytes_;
  std::vector<int32_t> rows_;
  std::vector<const void*> pointers_;
  std::vector<float> weights_;
  size_t count_ = 0;
};

// Calls visit(token, its rows, the rows to prefetch) for the tokens of a range. Rows that lie in the caches need no prefetch.
template <typename Params, typename Visit>
void visit_tokens(const Params& p, int64_t row_stride_bytes, bool prefetches, int64_t begin, int64_t end, Visit visit) {
  TokenRows<Params> lists[] = {{p, row_stride_bytes}, {p, row_stride_bytes}};
  if (begin < end) lists[begin % 2].collect(begin);
  for (int64_t token = begin; token < end; ++token) {
    TokenRows<Params>& next = lists[(token + 1) % 2];
    const bool has_next = token + 1 < end;
    if (has_next) next.collect(token + 1);
    visit(token, lists[token % 2], has_next && prefetches ? next.list() : RowList{nullptr, 0});
  }
}

int unpermute(const pmo_unpermute_params& p) {
  if (const int status = check_unpermute(p)) return status;
  if (p.num_tokens * p.hidden == 0) return PMO_OK;

  const int64_t itemsize = dtype_size(p.dtype);
  const int64_t out_bytes = p.hidden * itemsize;
  const RowKernels& kernels = row_kernels(p.dtype);
  const int64_t bytes = (p.num_rows + p.num_tokens) * out_bytes;
  const bool large = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(large);
    visit_tokens(p, p.rows_row_stride * itemsize, large, begin, end,
                 [&](int64_t token, const TokenRows<pmo_unpermute_params>& rows, const RowList& next) {
                   char* out = static_cast<char*>(p.out) + token * out_bytes;
                   if (rows.count() == 0) {
                     std::memset(out, 0, out_bytes);
                   } else if (rows.is_copy()) {
                     writer.copy(out, static_cast<const char*>(rows.list().rows[0]), out_bytes);
                   } else {
                     kernels.sum(rows.list(), next, rows.weights(), p.hidden, writer.streams_whole(out, out_bytes), out);
                   }
                 });
  });
  return PMO_OK;
}

// The gradient of one token after the other.
class TokenGradient {
 public:
  TokenGradient(const pmo_unpermute_backward_params& p, bool streams)
      : params_(p),
        kernels_(row_kernels(p.dtype)),
        row_bytes_(p.hidden * dtype_size(p.dtype)),
        writer_(streams),
        targets_(p.d_rows == nullptr ? 0 : static_cast<size_t>(p.max_rows_per_token)),
        products_(p.d_weights == nullptr ? 0 : static_cast<size_t>(p.max_rows_per_token)) {}

  void run(const char* d_out, const TokenRows<pmo_unpermute_backward_params>& rows, const RowList& next) {
    if (rows.count() == 0) return;
    const bool copy = rows.weights() == nullptr || rows.is_copy();
    if (params_.d_weights != nullptr && !copy) {
      kernels_.dot(d_out, rows.list(), next, params_.hidden, products_.data());
      for (int64_t i = 0; i < rows.count(); ++i) {
        const int64_t place = weight_place(params_, rows.row(i));
        if (place >= 0) params_.d_weights[place] = products_[i];
      }
    }
    if (params_.d_rows == nullptr) return;
    char* d_rows = static_cast<char*>(params_.d_rows);
    for (int64_t i = 0; i < rows.count(); ++i) targets_[i] = d_rows + rows.row(i) * row_bytes_;
    if (!copy) {
      kernels_.scale(d_out, rows.weights(), params_.hidden, writer_.streams_whole(d_rows, row_bytes_), targets_.data(),
                     rows.count());
      return;
    }
    for (int64_t i = 0; i < rows.count(); ++i) writer_.copy(static_cast<char*>(targets_[i]), d_out, row_bytes_);
  }

 private:
  const pmo_unpermute_backward_params& params_;
  const RowKernels& kernels_;
  const int64_t row_bytes_;
  const RowWriter writer_;
  std::vector<void*> targets_;
  std::vector<float> products_;
};

int unpermute_backward(const pmo_unpermute_backward_params& p) {
  if (const int status = check_unpermute_backward(p)) return status;

  const int64_t itemsize = dtype_size(p.dtype);
  const int64_t row_bytes = p.hidden * itemsize;
  const bool write_rows = p.d_rows != nullptr && row_bytes > 0;
  if (write_rows) zero_rows_without_token(static_cast<char*>(p.d_rows), row_bytes, p.num_rows, p.row_to_token, p.num_threads);
  if (p.d_weights != nullptr) std::fill(p.d_weights, p.d_weights + p.num_weights, 0.0f);
  if (row_bytes == 0 || (p.d_rows == nullptr && p.d_weights == nullptr)) return PMO_OK;

  const int64_t passes = (p.d_rows == nullptr ? 0 : 1) + (p.d_weights == nullptr ? 0 : 1);
  const int64_t bytes = (passes * p.num_rows + p.num_tokens) * row_bytes;
  const bool large = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    TokenGradient gradient(p, large);
    visit_tokens(p, p.rows_row_stride * itemsize, large, begin, end,
                 [&](int64_t token, const TokenRows<pmo_unpermute_backward_params>& rows, const RowList& next) {
                   gradient.run(static_cast<const char*>(p.d_out) + token * p.d_out_row_stride * itemsize, rows, next);
                 });
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
