// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// sort_chunks: a copy of a buffer [R, H] of chunks of rows in which every chunk is shifted by its own distance
// (pmo/sort_chunks.h).
//
// Every CTA computes the table of chunks (starts and targets) in shared memory. The buffer is cut into units of 8 x 32 accesses
// (4 KiB at 16 bytes), which may begin and end within rows. A warp loads a unit and stores it, one run of accesses per chunk that
// it touches: mostly one. The loads of the first unit overlap the computation of the table. With more chunks than a CTA has
// threads, a separate kernel computes the table once, in the workspace: in every CTA it would cost up to a quarter of the
// bandwidth. Threads also process rows, for the map and the probabilities.
//
// One CTA per unit is faster than a persistent kernel: 0.95 and 0.88 of a plain copy on an H200, 32768 rows of 14 KiB. CTAs of
// 256 threads are faster than 512 and 1024.
//
// Memory-bound: 2 R H itemsize bytes, and per row 4 of the map and 8 of the probabilities.
#include <climits>

#include "common/chunks.h"
#include "common/dtypes.h"
#include "common/ids.h"
#include "common/status.h"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kUnroll = 8;  // accesses of a lane in flight
constexpr int kUnit = kUnroll * kWarpSize;
constexpr int64_t kSharedChunks = kThreads;
constexpr int kTableThreads = 1024;

// Kernel parameters: the params, and lengths in accesses.
struct SortWork {
  pmo_sort_chunks_params p;
  int32_t* table;  // in the workspace, or null: every CTA computes it
  int64_t row_length, total;
  int64_t x_stride;  // bytes
  bool dense;
};

// Starts and targets of the chunks; the rows after them count as one more chunk. [C + 1] each.
struct Table {
  int32_t* starts;
  int32_t* targets;
  int64_t num_chunks;

  __device__ Table(int32_t* memory, int64_t num_chunks)
      : starts(memory), targets(memory + num_chunks + 1), num_chunks(num_chunks) {}

  // Chunk of a row: the last one that begins at or before it. Called by a warp, one row for all lanes: each step narrows the
  // search to a 32nd.
  __device__ int32_t find_by_warp(int64_t row) const {
    const int lane = threadIdx.x % kWarpSize;
    int32_t low = 0, count = static_cast<int32_t>(num_chunks) + 1;  // the chunk is in [low, low + count)
#pragma unroll 1
    while (count > 1) {
      const int32_t step = divide_up(count, kWarpSize), place = lane * step;
      const bool reached = place < count && starts[low + place] <= row;
      const int32_t last = (__popc(__ballot_sync(kAllLanes, reached)) - 1) * step;
      low += last;
      count = min(step, count - last);
    }
    return low;
  }

  // The same by one thread.
  __device__ int32_t find(int64_t row) const {
    int32_t low = 0, high = static_cast<int32_t>(num_chunks);
#pragma unroll 1
    while (low < high) {
      const int32_t middle = (low + high + 1) / 2;
      if (starts[middle] <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
  __device__ int64_t end(int32_t chunk, int64_t num_rows) const { return chunk == num_chunks ? num_rows : starts[chunk + 1]; }
  __device__ int64_t shift(int32_t chunk) const { return int64_t{targets[chunk]} - starts[chunk]; }
};

// Exclusive prefix sum and total over the CTA, saturated at `limit` (below 2^31). Called by all threads.
template <int kBlock>
struct BlockScan {
  static constexpr int kBlockWarps = kBlock / kWarpSize;
  uint32_t before, total;

  __device__ BlockScan(uint32_t value, uint32_t limit) {
    __shared__ uint32_t warp_sums[kBlockWarps];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    uint32_t sum = value;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum = min(sum + other, limit);
    }
    before = __shfl_up_sync(kAllLanes, sum, 1);
    if (lane == 0) before = 0;
    if (lane == kWarpSize - 1) warp_sums[warp] = sum;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int other = 0; other < kBlockWarps; ++other) {
      if (other == warp) before = min(before + total, limit);
      total = min(total + warp_sums[other], limit);
    }
    __syncthreads();  // before warp_sums is overwritten
  }
};

// Fills the table, by all threads of the CTA. Until a chunk's target is known, its element holds the first entry of `order` that
// names it (kUnnamed: none). A target is stored as its complement, which is no entry, until all are known.
constexpr int32_t kUnnamed = INT_MAX;

template <int kBlock>
__device__ void fill(const Table& table, const pmo_sort_chunks_params& p) {
  const auto limit = static_cast<uint32_t>(p.num_rows);
  const int64_t chunks = p.num_chunks;
#pragma unroll 1
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kBlock) table.targets[chunk] = kUnnamed;
  __syncthreads();
  uint32_t rows = 0;
#pragma unroll 1
  for (int64_t first = 0; first < chunks; first += kBlock) {
    const int64_t chunk = first + threadIdx.x;
    const int64_t size = chunk < chunks ? id_at(p.split_sizes, p.split_sizes_kind, chunk) : 0;
    const int64_t named = chunk < chunks ? id_at(p.order, p.order_kind, chunk) : -1;
    const BlockScan<kBlock> scan(static_cast<uint32_t>(max(int64_t{0}, min(size, p.num_rows))), limit);
    if (chunk < chunks) table.starts[chunk] = static_cast<int32_t>(min(rows + scan.before, limit));
    if (named >= 0 && named < chunks) atomicMin(table.targets + named, static_cast<int32_t>(chunk));
    rows = min(rows + scan.total, limit);
  }
  if (threadIdx.x == 0) table.starts[chunks] = table.targets[chunks] = static_cast<int32_t>(rows);
  __syncthreads();
  const auto size_of = [&](int64_t chunk) { return static_cast<uint32_t>(table.starts[chunk + 1] - table.starts[chunk]); };
  uint32_t placed = 0;
#pragma unroll 1
  for (int64_t first = 0; first < chunks; first += kBlock) {
    const int64_t entry = first + threadIdx.x;
    const int64_t named = entry < chunks ? id_at(p.order, p.order_kind, entry) : -1;
    const bool counts = named >= 0 && named < chunks && table.targets[named] == entry;
    const BlockScan<kBlock> scan(counts ? size_of(named) : 0, limit);
    if (counts) table.targets[named] = ~static_cast<int32_t>(placed + scan.before);
    placed += scan.total;
  }
  __syncthreads();
#pragma unroll 1
  for (int64_t first = 0; first < chunks; first += kBlock) {
    const int64_t chunk = first + threadIdx.x;
    const int32_t target = chunk < chunks ? table.targets[chunk] : 0;
    uint32_t before = placed;
    if (placed < rows) {  // chunks that no entry names
      const BlockScan<kBlock> scan(target == kUnnamed ? size_of(chunk) : 0, limit);
      before = placed + scan.before;
      placed += scan.total;
    }
    if (chunk < chunks) table.targets[chunk] = target == kUnnamed ? static_cast<int32_t>(before) : ~target;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kTableThreads) make_table(SortWork work) {
  fill<kTableThreads>(Table(work.table, work.p.num_chunks), work.p);
}

// A lane's accesses of a unit, in registers.
template <int kBytes>
struct Unit {
  using Access = Vector<kBytes>;
  Access values[kUnroll];

  // Calls visit(index, value) for the lane's accesses in [begin, end) of the unit from access `first` on.
  template <typename Visit>
  __device__ void each(int64_t first, int64_t begin, int64_t end, Visit visit) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t place = first + i * kWarpSize + threadIdx.x % kWarpSize;
      if (place >= begin && place < end) visit(place, values[i]);
    }
  }

  __device__ void load(const SortWork& work, int64_t first, int64_t begin, int64_t end, int64_t shift) {
    each(first, begin, end, [&](int64_t place, Access& value) {
      const int64_t source = place + shift;
      const int64_t row = work.dense ? 0 : source / work.row_length;
      const int64_t offset = row * work.x_stride + (source - row * work.row_length) * kBytes;
      value = __ldg(reinterpret_cast<const Access*>(static_cast<const char*>(work.p.x) + offset));
    });
  }

  __device__ void store(const SortWork& work, int64_t first, int64_t begin, int64_t end, int64_t shift) {
    each(first, begin, end, [&](int64_t place, Access& value) { static_cast<Access*>(work.p.out)[place + shift] = value; });
  }
};

__device__ void sort_rows(const SortWork& work, const Table& table) {
  const pmo_sort_chunks_params& p = work.p;
  if (p.source_to_dest == nullptr && p.probs_out == nullptr) return;
#pragma unroll 1
  for (int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x; row < p.num_rows; row += int64_t{gridDim.x} * kThreads) {
    const int64_t to = row + table.shift(table.find(row));
    if (p.source_to_dest != nullptr) p.source_to_dest[row] = static_cast<int32_t>(to);
    if (p.probs_out != nullptr) p.probs_out[p.inverse != 0 ? row : to] = p.probs[p.inverse != 0 ? to : row];
  }
}

template <int kBytes, bool kInverse>
__global__ void __launch_bounds__(kThreads) move_chunks(SortWork work) {
  __shared__ int32_t shared_table[2 * (kSharedChunks + 1)];
  const pmo_sort_chunks_params& p = work.p;
  const int64_t step = int64_t{gridDim.x} * kWarps * kUnit;
  int64_t first = (blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarpSize) * kUnit;
  Unit<kBytes> unit;
  if (!kInverse) unit.load(work, first, first, work.total, 0);
  const Table table(work.table == nullptr ? shared_table : work.table, p.num_chunks);
  if (work.table == nullptr) fill<kThreads>(table, p);
  sort_rows(work, table);
#pragma unroll 1
  while (first < work.total) {
    const int64_t last = min(first + kUnit, work.total);
#pragma unroll 1
    for (int64_t begin = first; begin < last;) {
      const int32_t chunk = table.find_by_warp(begin / work.row_length);
      const int64_t end = min(last, table.end(chunk, p.num_rows) * work.row_length);
      const int64_t shift = table.shift(chunk) * work.row_length;
      if (kInverse) {
        unit.load(work, first, begin, end, shift);
      } else {
        unit.store(work, first, begin, end, shift);
      }
      begin = end;
    }
    if (kInverse) unit.store(work, first, first, last, 0);
    first += step;
    if (!kInverse) unit.load(work, first, first, work.total, 0);
  }
}

int64_t workspace_bytes(const pmo_sort_chunks_params& p) {
  return p.num_chunks <= kSharedChunks ? 0 : 2 * (p.num_chunks + 1) * static_cast<int64_t>(sizeof(int32_t));
}

int sort_chunks(const pmo_sort_chunks_params& p, cudaStream_t stream) {
  if (const int status = check_sort_chunks(p)) return status;
  const int64_t needed = workspace_bytes(p);
  PMO_REQUIRE(
      needed == 0 || (p.workspace != nullptr && address(p.workspace) % sizeof(int32_t) == 0 && p.workspace_bytes >= needed),
      "workspace", "4-byte aligned and as large as pmo_sort_chunks_cuda_workspace_bytes says");
  if (p.num_rows == 0) return PMO_OK;
  SortWork work = {p, needed == 0 ? nullptr : static_cast<int32_t*>(p.workspace), 1, 0, 0, true};
  const int64_t itemsize = dtype_size(p.dtype);
  const int64_t row_bytes = p.hidden * itemsize;
  int width = 1;
  if (p.out != nullptr && row_bytes > 0) {
    work.x_stride = p.x_row_stride * itemsize;
    work.dense = p.num_rows == 1 || work.x_stride == row_bytes;
    width = widest_access({address(p.x), address(p.out), static_cast<uintptr_t>(row_bytes),
                           work.dense ? uintptr_t{0} : static_cast<uintptr_t>(work.x_stride)});
    work.row_length = row_bytes / width;
    work.total = p.num_rows * work.row_length;
  }
  if (work.table != nullptr) {
    if (const int status = launch("make_table", make_table, {1, kTableThreads}, stream, work)) return status;
  }
  const unsigned for_rows = grid_for(p.num_rows, kThreads), for_units = grid_for(work.total, kWarps * kUnit);
  const unsigned blocks = for_rows > for_units ? for_rows : for_units;
  return with_width(width, [&](auto bytes) -> int {
    constexpr int kBytes = decltype(bytes)::value;
    const auto kernel = p.inverse != 0 ? move_chunks<kBytes, true> : move_chunks<kBytes, false>;
    return launch("move_chunks", kernel, {blocks, kThreads}, stream, work);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int pmo_sort_chunks_cuda(const pmo_sort_chunks_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::sort_chunks);
}

extern "C" int64_t pmo_sort_chunks_cuda_workspace_bytes(const pmo_sort_chunks_params* params) {
  return params == nullptr || pmo::check_sort_chunks(*params) != 0 ? 0 : pmo::cuda::workspace_bytes(*params);
}
