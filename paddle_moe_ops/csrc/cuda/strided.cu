// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A contiguous copy of a matrix with any strides: one thread per element. For the rare operand that is neither contiguous nor made of
// contiguous rows. Bytes moved: two times the matrix at best, a 32-byte sector per element where the source's columns lie apart.
#include "pmo/strided.h"

#include "cuda/launch.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;

template <typename Element>
__global__ void copy_strided(pmo_copy_strided_params p) {
  const int64_t elements = p.num_rows * p.num_columns;
  const Element* source = static_cast<const Element*>(p.source);
  Element* target = static_cast<Element*>(p.target);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < elements; i += int64_t{gridDim.x} * kThreads) {
    target[i] = source[i / p.num_columns * p.row_stride + i % p.num_columns * p.column_stride];
  }
}

template <typename Element>
int launch(const pmo_copy_strided_params& p, cudaStream_t stream) {
  copy_strided<Element><<<grid_for(p.num_rows * p.num_columns, kThreads), kThreads, 0, stream>>>(p);
  PMO_CUDA_LAUNCHED("copy_strided");
  return PMO_OK;
}

int copy(const pmo_copy_strided_params& p, cudaStream_t stream) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_copy_strided_params), "struct_size",
              "the size of pmo_copy_strided_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE_COUNT(p.num_columns, "num_columns");
  if (p.num_rows * p.num_columns == 0) return PMO_OK;
  PMO_REQUIRE(p.source != nullptr, "source", "given");
  PMO_REQUIRE(p.target != nullptr, "target", "given");
  switch (p.itemsize) {
    case 1:
      return launch<uint8_t>(p, stream);
    case 2:
      return launch<uint16_t>(p, stream);
    case 4:
      return launch<uint32_t>(p, stream);
    case 8:
      return launch<uint64_t>(p, stream);
    default:
      return fail(PMO_INVALID_ARGUMENT, "itemsize must be 1, 2, 4 or 8");
  }
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_copy_strided_cuda(const pmo_copy_strided_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::copy);
}
