// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// index_add: out[row_to_token[r] - first_token] += rows[r], in ascending order of r (pmo/index_add.h).
//
// count_rows: a thread per row counts the rows of each token and finds the first of them, by atomics on integers. add_rows: the CTA
// of a token's first row adds that row. If the token has further rows, each warp of the CTA searches the index for them and the
// CTA adds them in order. A thread owns columns of the token, so threads need no barrier and no float atomics.
//
// Memory-bound: N H (2 itemsize + itemsize of rows) bytes. A token whose rows repeat reads the index after its first row once more.
#include <algorithm>
#include <cstdint>

#include "common/checks.h"
#include "common/index_add.h"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorColumns = 8;

// Per token of out: N minus its first row, or 0, and the number of its rows.
struct RowsOfTokens {
  int32_t *first_from_end, *count;

  explicit RowsOfTokens(const pmo_index_add_params& p) : first_from_end(p.workspace), count(p.workspace + p.num_tokens) {}
};

template <typename Id>
__global__ void __launch_bounds__(kThreads)
    count_rows(const __grid_constant__ pmo_index_add_params p, const __grid_constant__ RowsOfTokens tokens) {
  const auto* row_to_token = static_cast<const Id*>(p.row_to_token);
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < p.num_rows; row += int64_t{gridDim.x} * kThreads) {
    const int64_t line = line_of(p, row_to_token, row);
    if (line < 0) continue;
    atomicMax(tokens.first_from_end + line, static_cast<int32_t>(p.num_rows - row));
    atomicAdd(tokens.count + line, 1);
  }
}

// Elements of a vector of kColumns that one access of up to 16 bytes loads or stores.
template <typename Rows, int kColumns>
constexpr int kAccessColumns =
    kColumns < 16 / static_cast<int>(sizeof(typename Rows::Element)) ? kColumns
                                                                     : 16 / static_cast<int>(sizeof(typename Rows::Element));

template <typename Rows, int kColumns>
__device__ void load_columns(const typename Rows::Element* row, float (&values)[kColumns]) {
  using Part = Elements<Rows, kAccessColumns<Rows, kColumns>>;
#pragma unroll
  for (int i = 0; i < kColumns; i += kAccessColumns<Rows, kColumns>) {
    Part part;
    part.set(*reinterpret_cast<const typename Part::Access*>(row + i));
#pragma unroll
    for (int j = 0; j < kAccessColumns<Rows, kColumns>; ++j) values[i + j] = part.values[j];
  }
}

template <typename Rows, int kColumns>
__device__ void store_columns(const float (&values)[kColumns], typename Rows::Element* row) {
  using Part = Elements<Rows, kAccessColumns<Rows, kColumns>>;
#pragma unroll
  for (int i = 0; i < kColumns; i += kAccessColumns<Rows, kColumns>) {
    Part part;
#pragma unroll
    for (int j = 0; j < kAccessColumns<Rows, kColumns>; ++j) part.values[j] = values[i + j];
    part.store(row + i, 0);
  }
}

template <typename Out, typename Rows, int kColumns>
__device__ void add_row(const pmo_index_add_params& p, int64_t row, int64_t line) {
  const auto* source = static_cast<const typename Rows::Element*>(p.rows) + row * p.rows_row_stride;
  auto* target = static_cast<typename Out::Element*>(p.out) + line * p.hidden;
#pragma unroll 1
  for (int64_t column = int64_t{threadIdx.x} * kColumns; column < p.hidden; column += kThreads * kColumns) {
    float sums[kColumns], addends[kColumns];
    load_columns<Rows>(source + column, addends);
    load_columns<Out>(target + column, sums);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] = __fadd_rn(sums[i], addends[i]);
    store_columns<Out>(sums, target + column);
  }
}

// The first row from `row` on that belongs to a token, or N; by all lanes of a warp.
template <typename Id>
__device__ int64_t next_row(const pmo_index_add_params& p, const Id* row_to_token, int64_t row, int64_t line) {
#pragma unroll 1
  for (; row < p.num_rows; row += kWarpSize) {
    const int64_t own = row + threadIdx.x % kWarpSize;
    const unsigned found = __ballot_sync(kAllLanes, own < p.num_rows && line_of(p, row_to_token, own) == line);
    if (found != 0) return row + __ffs(found) - 1;
  }
  return p.num_rows;
}

template <typename Id, typename Out, typename Rows, int kColumns>
__global__ void __launch_bounds__(kThreads)
    add_rows(const __grid_constant__ pmo_index_add_params p, const __grid_constant__ RowsOfTokens tokens) {
  const auto* row_to_token = static_cast<const Id*>(p.row_to_token);
#pragma unroll 1
  for (int64_t first = blockIdx.x; first < p.num_rows; first += gridDim.x) {
    const int64_t line = line_of(p, row_to_token, first);
    if (line < 0 || __ldg(tokens.first_from_end + line) != p.num_rows - first) continue;
    int64_t row = first;
    for (int32_t left = __ldg(tokens.count + line); left > 0 && row < p.num_rows; --left) {
      add_row<Out, Rows, kColumns>(p, row, line);
      if (left > 1) row = next_row(p, row_to_token, row + 1, line);
    }
  }
}

template <typename Id, typename Out, typename Rows>
int launch_additions(const pmo_index_add_params& p, cudaStream_t stream) {
  const RowsOfTokens tokens(p);
  PMO_CUDA(cudaMemsetAsync(p.workspace, 0, 2 * static_cast<size_t>(p.num_tokens) * sizeof(int32_t), stream));
  const int status = launch("count_rows", count_rows<Id>, {grid_for(p.num_rows, kThreads), kThreads}, stream, p, tokens);
  if (status != PMO_OK) return status;
  const auto stride = static_cast<uintptr_t>(p.num_rows > 1 ? p.rows_row_stride : 0) * sizeof(typename Rows::Element);
  const bool vectors = widest_access({address(p.rows), stride, address(p.out)}) == 16 && p.hidden % kVectorColumns == 0;
  const auto kernel = vectors ? add_rows<Id, Out, Rows, kVectorColumns> : add_rows<Id, Out, Rows, 1>;
  return launch("add_rows", kernel, {grid_for(p.num_rows, 1), kThreads}, stream, p, tokens);
}

template <typename Id>
int with_dtypes(const pmo_index_add_params& p, cudaStream_t stream) {
  if (p.dtype == PMO_BFLOAT16) return launch_additions<Id, BFloat16Rows, BFloat16Rows>(p, stream);
  if (p.rows_dtype == PMO_BFLOAT16) return launch_additions<Id, Float32Rows, BFloat16Rows>(p, stream);
  return launch_additions<Id, Float32Rows, Float32Rows>(p, stream);
}

int index_add(const pmo_index_add_params& p, cudaStream_t stream) {
  if (const int status = check_index_add(p)) return status;
  if (p.num_rows == 0 || p.num_tokens == 0 || p.hidden == 0) return PMO_OK;
  PMO_REQUIRE_ARRAY(p.workspace, 1, "workspace");
  return p.index_kind == PMO_ROUTING_IDS64 ? with_dtypes<int64_t>(p, stream) : with_dtypes<int32_t>(p, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_index_add_cuda(const pmo_index_add_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::index_add);
}
