// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// unpermute and its gradient on the CPU. Threads own contiguous token ranges. One thread reads a token's rows and writes its
// output row, in one order, so the result does not depend on the number of threads.
//
// Bytes moved: unpermute (N + T) * H; its gradient (T + N) * H for d_rows and N * H more for d_weights.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/dtypes.h"
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
  return place < 0 ? 0.0f : with_plain_nan(p.weights[place]);
}

constexpr int64_t kFewRows = 3;  // of a token: more rows saturate the memory without grouping

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

  __attribute__((always_inline)) void prefetch_beginnings() const {
    if (count() > kFewRows) return;
    for (int64_t i = 0; i < count(); ++i) prefetch_beginning(pointers_[i], params_.hidden * dtype_size(params_.dtype));
  }

  RowList list() const { return {pointers_.data(), count()}; }
  int64_t count() const { return static_cast<int64_t>(count_); }
  int32_t row(int64_t i) const { return rows_[i]; }
  const float* weights() const { return weights_.empty() ? nullptr : weights_.data(); }
  // True if the sum is the bare row, without arithmetic.
  bool is_copy() const { return count_ == 1 && (weights_.empty() || params_.copy_single_row != 0); }

 private:
  const Params& params_;
  const int64_t row_stride_bytes_;
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
  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(streams);
    constexpr int64_t kLists = kPrefetchTokens + 1;
    std::vector<TokenRows<pmo_unpermute_params>> lists(kLists, {p, p.rows_row_stride * itemsize});
    for (int64_t token = begin; token < std::min(begin + kPrefetchTokens, end); ++token) lists[token % kLists].collect(token);
    for (int64_t token = begin; token < end; ++token) {
      const TokenRows<pmo_unpermute_params>& rows = lists[token % kLists];
      const RowList next = token + 1 < end ? lists[(token + 1) % kLists].list() : RowList{nullptr, 0};
      if (token + kPrefetchTokens < end) {
        TokenRows<pmo_unpermute_params>& later = lists[(token + kPrefetchTokens) % kLists];
        later.collect(token + kPrefetchTokens);
        later.prefetch_beginnings();
      }
      char* out = static_cast<char*>(p.out) + token * p.out_row_stride * itemsize;
      if (rows.count() == 0) {
        std::memset(out, 0, out_bytes);
      } else if (rows.is_copy()) {
        writer.copy(out, static_cast<const char*>(rows.list().rows[0]), out_bytes, next);
      } else {
        kernels.sum(rows.list(), next, rows.weights(), p.hidden, writer.streams_whole(out, out_bytes), out);
      }
    }
  });
  return PMO_OK;
}

// A queue that groups the dot products of several tokens. A group runs once the next one is known, so that it can prefetch.
class DotQueue {
 public:
  DotQueue(const pmo_unpermute_backward_params& p, bool scales)
      : params_(p),
        kernel_(row_kernels(p.dtype).dot),
        row_bytes_(p.hidden * dtype_size(p.dtype)),
        scales_(scales),
        group_(best_group(p, scales)) {}

  // Queues a product whose result is stored to d_weights[place].
  void push(const void* a, const void* row, float weight, void* out, int64_t place) {
    prefetch_beginning(row, row_bytes_);
    Group& group = groups_[last_];
    DotTerms& terms = group.terms;
    terms.a[terms.count] = a;
    terms.rows[terms.count] = row;
    terms.weights[terms.count] = weight;
    terms.outs[terms.count] = out;
    group.places[terms.count++] = place;
    if (terms.count < group_) return;
    run_first();
  }

  void finish() {
    run_first();
    run_first();
  }

 private:
  struct Group {
    DotTerms terms = {};
    int64_t places[kDotTerms];
  };

  // The terms of a token share a factor: kDotTerms if whole tokens fill the groups, kFewDotTerms if most tokens have fewer rows.
  static int64_t best_group(const pmo_unpermute_backward_params& p, bool scales) {
    if (scales) return p.num_rows > kFewRows * p.num_tokens ? kFewDotTerms : kTwoDotTerms;
    return p.max_rows_per_token % kDotTerms == 0 ? kDotTerms : kFewDotTerms;
  }

  void run_first() {
    Group& group = groups_[1 - last_];
    float products[kDotTerms];
    kernel_(group.terms, groups_[last_].terms, params_.hidden, scales_, products);
    for (int64_t i = 0; i < group.terms.count; ++i) {
      if (group.places[i] >= 0) params_.d_weights[group.places[i]] = products[i];
    }
    group.terms.count = 0;
    last_ = 1 - last_;
  }

  const pmo_unpermute_backward_params& params_;
  void (*const kernel_)(const DotTerms&, const DotTerms&, int64_t, bool, float*);
  const int64_t row_bytes_;
  const bool scales_;
  const int64_t group_;
  Group groups_[2];
  int last_ = 0;  // the group that is being filled
};

// The gradient of unpermute, one token after the other.
class TokenGradient {
 public:
  TokenGradient(const pmo_unpermute_backward_params& p, bool streams)
      : params_(p),
        kernels_(row_kernels(p.dtype)),
        row_bytes_(p.hidden * dtype_size(p.dtype)),
        d_out_stride_(p.d_out_row_stride * dtype_size(p.dtype)),
        writer_(streams),
        streams_whole_(writer_.streams_whole(static_cast<const char*>(p.d_rows), row_bytes_)),
        one_pass_(p.d_rows != nullptr && p.d_weights != nullptr && streams_whole_),
        dots_(p, one_pass_) {}

  void run(int64_t token, const TokenRows<pmo_unpermute_backward_params>& rows) {
    const char* d_out = static_cast<const char*>(params_.d_out) + token * d_out_stride_;
    const bool copy = rows.weights() == nullptr || rows.is_copy();
    const void* following = d_out + d_out_stride_;
    const RowList next = {&following, token + 1 < params_.num_tokens ? 1 : 0};
    if (token + kPrefetchTokens < params_.num_tokens) prefetch_beginning(d_out + kPrefetchTokens * d_out_stride_, row_bytes_);
    TargetBatches targets([&](const Targets& batch) {
      if (copy) {
        writer_.copy(batch, d_out, row_bytes_, next);
      } else {
        kernels_.scale(d_out, next, batch, params_.hidden, streams_whole_);
      }
    });
    for (int64_t i = 0; i < rows.count(); ++i) {
      const int32_t row = rows.row(i);
      char* d_row = params_.d_rows == nullptr ? nullptr : static_cast<char*>(params_.d_rows) + row * row_bytes_;
      if (params_.d_weights != nullptr && !copy) {
        dots_.push(d_out, rows.list().rows[i], rows.weights()[i], d_row, weight_place(params_, row));
        if (one_pass_) continue;
      }
      if (d_row == nullptr) continue;
      targets.add(d_row, copy ? 1.0f : rows.weights()[i]);
    }
    targets.finish();
  }

  void finish() { dots_.finish(); }

 private:
  const pmo_unpermute_backward_params& params_;
  const RowKernels& kernels_;
  const int64_t row_bytes_, d_out_stride_;
  const RowWriter writer_;
  const bool streams_whole_;
  const bool one_pass_;  // for the gradients of rows and of weights
  DotQueue dots_;
};

int unpermute_backward(const pmo_unpermute_backward_params& p) {
  if (const int status = check_unpermute_backward(p)) return status;

  const int64_t itemsize = dtype_size(p.dtype);
  const int64_t row_bytes = p.hidden * itemsize;
  const bool write_rows = p.d_rows != nullptr && row_bytes > 0;
  if (write_rows) zero_padding_rows(static_cast<char*>(p.d_rows), row_bytes, p.num_rows, p.row_to_token, p.num_threads);
  if (p.d_weights != nullptr) std::fill(p.d_weights, p.d_weights + p.num_weights, 0.0f);
  if (row_bytes == 0 || (p.d_rows == nullptr && p.d_weights == nullptr)) return PMO_OK;

  const int64_t passes = (p.d_rows == nullptr ? 0 : 1) + (p.d_weights == nullptr ? 0 : 1);
  const int64_t bytes = (passes * p.num_rows + p.num_tokens) * row_bytes;
  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    TokenGradient gradient(p, streams);
    TokenRows<pmo_unpermute_backward_params> rows(p, p.rows_row_stride * itemsize);
    for (int64_t token = begin; token < end; ++token) {
      rows.collect(token);
      gradient.run(token, rows);
    }
    gradient.finish();
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
