// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Arithmetic on whole rows, compiled once per instruction set and chosen at run time.
//
// Every variant returns the same bits: sums follow the order of pmo_unpermute, the dot product the 16 lanes and the tree of
// pmo_unpermute_backward. Fused multiply-adds are explicit (never left to the compiler's contraction).
#pragma once

#include <cstdint>

namespace pmo {
namespace cpu {

// A weight as the kernels require it: any NaN may be replaced by another. If the low half of a NaN is zero, it stays zero in
// products and sums with bfloat16 rows. Rounding to bfloat16 then needs no case for NaN.
inline float with_plain_nan(float weight) { return weight == weight ? weight : __builtin_nanf(""); }

// Rows at any addresses.
struct RowList {
  const void* const* rows;
  int64_t count;
};

// Rows written from one source row in one pass: the loaded source stays in registers.
constexpr int64_t kTargets = 16;

struct Targets {
  void* rows[kTargets];
  float weights[kTargets];  // of rows that are scaled
  int64_t count = 0;

  void add(void* row, float weight = 1.0f) {
    rows[count] = row;
    weights[count++] = weight;
  }
};

// Passes rows to write(targets) in batches of kTargets.
template <typename Write>
class TargetBatches {
 public:
  explicit TargetBatches(Write write) : write_(write) {}

  void add(void* row, float weight = 1.0f) {
    if (targets_.count == kTargets) finish();
    targets_.add(row, weight);
  }

  // Passes the last, incomplete batch.
  void finish() {
    if (targets_.count > 0) write_(targets_);
    targets_.count = 0;
  }

 private:
  const Write write_;
  Targets targets_;
};

// Number of dot products that run interleaved: one alone waits for its own chain of multiply-adds. Fastest: 8 if they share a
// factor and nothing else is written, 2 if they share none and something is written, otherwise 4.
constexpr int64_t kDotTerms = 8;
constexpr int64_t kFewDotTerms = 4;
constexpr int64_t kTwoDotTerms = 2;

struct DotTerms {
  const void* a[kDotTerms];
  const void* rows[kDotTerms];
  float weights[kDotTerms];
  void* outs[kDotTerms];
  int64_t count;
};

// `next` names rows that the caller needs after this call. Their lines are prefetched during the call, since no hardware
// prefetcher can predict the rows of the next token. It may be empty.
//
// `weights` have passed with_plain_nan.
//
// `streams` uses non-temporal stores (cpu/streaming.h): the output must then consist of whole aligned lines of kLineBytes. `copy`
// requires less: distances between its targets that are multiples of `bytes`.
struct RowKernels {
  // out[H] = sum over at least one row; weights NULL = plain. At most one rounding to the row type, at the end.
  void (*sum)(const RowList& rows, const RowList& next, const float* weights, int64_t hidden, bool streams, void* out);
  // target[H] = its weight * in[H]; at least one
  void (*scale)(const void* in, const RowList& next, const Targets& targets, int64_t hidden, bool streams);
  // products[i] = sum of a[j] * row[j] of at most kDotTerms terms, fastest with one of the numbers above. With `scales` the same
  // pass streams out[H] = weight * a[H] of each: interleaved loads and stores reach more bandwidth than separate passes. (Plain
  // stores among the loads take longer than a pass of their own.)
  void (*dot)(const DotTerms& terms, const DotTerms& next, int64_t hidden, bool scales, float* products);
  // The codes[H] and scales[ceil(H / 128)] of a row by the rule of pmo_quantize_*; scales of ue8m0 are powers of two.
  void (*quantize)(const void* in, int64_t hidden, float amax_min, bool ue8m0, uint8_t* codes, float* scales);
  // out[H] = codes[H], each group of 128 times its scale
  void (*dequantize)(const uint8_t* codes, const float* scales, int64_t hidden, bool streams, void* out);
  // target = in, from and to any address; at least one
  void (*copy)(const void* in, int64_t bytes, const RowList& next, const Targets& targets, bool streams);
};

constexpr int64_t kLineBytes = 64;

// Prefetches the beginning of a row that is needed kPrefetchTokens tokens later. A hardware prefetcher predicts the lines of a
// page only after it has seen some of them. The row kernels prefetch as far as the next token: too late if a token has one or two
// rows of a page or two. The target is the second-level cache, which has room for later tokens. Always inlined, as are functions
// that only call this one: GCC takes a function that only prefetches for one without effect, and drops its calls.
__attribute__((always_inline)) inline void prefetch_beginning(const void* row, int64_t bytes) {
  constexpr int64_t kPrefetchBytes = 512;
  for (int64_t place = 0; place < (bytes < kPrefetchBytes ? bytes : kPrefetchBytes); place += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(row) + place, 0, 2);
  }
}
constexpr int64_t kPrefetchTokens = 2;

// Element types of rows, for overloads.
struct Float32 {
  static constexpr int64_t kBytes = 4;
};
struct Float16 {
  static constexpr int64_t kBytes = 2;
};
struct BFloat16 {
  static constexpr int64_t kBytes = 2;
};

// The fastest variant that this processor runs and pmo_set_max_cpu_isa allows. Types other than PMO_FLOAT32, PMO_FLOAT16 and
// PMO_BFLOAT16 have copy only.
const RowKernels& row_kernels(int32_t dtype);

// The variants, one translation unit each; NULL if the build target lacks the instruction set.
const RowKernels* row_kernels_generic(int32_t dtype);
const RowKernels* row_kernels_avx2(int32_t dtype);
const RowKernels* row_kernels_avx512(int32_t dtype);

}  // namespace cpu
}  // namespace pmo
