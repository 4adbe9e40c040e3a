// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Memory ceilings: kernels that move bytes as the operators do, without maps and without arithmetic.
//
// All work on vectors of 16 bytes. `n` vectors are on the small side; the large side holds `fold` streams of n vectors and `extra`
// vectors of one more stream, so any ratio of bytes can be made. A thread takes vector i of every stream; grids stride.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// Loads in flight per thread while streams are read.
constexpr int kBatch = 8;

__device__ uint4 mixed(uint4 a, uint4 b) { return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w); }

struct Streams {
  int64_t n;
  int64_t fold;
  int64_t extra;

  __device__ int64_t count(int64_t i) const { return fold + (i < extra ? 1 : 0); }
};

__device__ int64_t first() { return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; }
__device__ int64_t stride() { return gridDim.x * static_cast<int64_t>(blockDim.x); }

__global__ void empty() {}

// n vectors written
__global__ void write(uint4* y, Streams s) {
  for (int64_t i = first(); i < s.n; i += stride()) y[i] = make_uint4(1, 2, 3, static_cast<uint32_t>(i));
}

// n vectors read; the write never happens, but the compiler cannot know
__global__ void __launch_bounds__(1024) read(const uint4* x, uint4* y, Streams s) {
  uint4 sum = make_uint4(0, 0, 0, 0);
  int64_t i = first();
  for (; i + (kBatch - 1) * stride() < s.n; i += kBatch * stride()) {
    uint4 values[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) values[j] = __ldcs(x + i + j * stride());
#pragma unroll
    for (int j = 0; j < kBatch; ++j) sum = mixed(sum, values[j]);
  }
  for (; i < s.n; i += stride()) sum = mixed(sum, __ldcs(x + i));
  if (sum.x == 0x12345678u && sum.y == 0x9abcdef0u && sum.z == 0x0fedcba9u) y[0] = sum;
}

// one read, many writes
__global__ void fanout(const uint4* x, uint4* y, Streams s) {
  for (int64_t i = first(); i < s.n; i += stride()) {
    const uint4 value = __ldcs(x + i);
    const int64_t count = s.count(i);
    for (int64_t j = 0; j < count; ++j) y[j * s.n + i] = value;
  }
}

// many reads, one write
__global__ void __launch_bounds__(1024) reduce(const uint4* x, uint4* y, Streams s) {
  for (int64_t i = first(); i < s.n; i += stride()) {
    const int64_t count = s.count(i);
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (int64_t base = 0; base < count; base += kBatch) {
      uint4 values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        values[j] = base + j < count ? __ldcs(x + (base + j) * s.n + i) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) sum = mixed(sum, values[j]);
    }
    y[i] = sum;
  }
}

// one read for all, and one read and one write for each: the gradient of a weighted sum
__global__ void __launch_bounds__(1024) exchange(const uint4* x, const uint4* z, uint4* y, Streams s) {
  for (int64_t i = first(); i < s.n; i += stride()) {
    const int64_t count = s.count(i);
    const uint4 value = __ldcs(x + i);
    for (int64_t base = 0; base < count; base += kBatch) {
      uint4 values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (base + j < count) values[j] = __ldcs(z + (base + j) * s.n + i);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (base + j < count) y[(base + j) * s.n + i] = mixed(values[j], value);
      }
    }
  }
}

}  // namespace

enum Kind { kEmpty, kWrite, kRead, kFanout, kReduce, kExchange };

// Launches one probe and returns the CUDA error code.
extern "C" int pmo_probe(int kind, const void* x, const void* z, void* y, int64_t n, int64_t fold, int64_t extra, int grid,
                         int block, void* stream) {
  const auto* from = static_cast<const uint4*>(x);
  const auto* others = static_cast<const uint4*>(z);
  auto* to = static_cast<uint4*>(y);
  const Streams streams = {n, fold, extra};
  auto s = static_cast<cudaStream_t>(stream);
  switch (kind) {
    case kEmpty:
      empty<<<1, 32, 0, s>>>();
      break;
    case kWrite:
      write<<<grid, block, 0, s>>>(to, streams);
      break;
    case kRead:
      read<<<grid, block, 0, s>>>(from, to, streams);
      break;
    case kFanout:
      fanout<<<grid, block, 0, s>>>(from, to, streams);
      break;
    case kReduce:
      reduce<<<grid, block, 0, s>>>(from, to, streams);
      break;
    case kExchange:
      exchange<<<grid, block, 0, s>>>(from, others, to, streams);
      break;
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
  return static_cast<int>(cudaGetLastError());
}
