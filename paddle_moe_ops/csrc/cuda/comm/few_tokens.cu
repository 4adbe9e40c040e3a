// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Exchange of few tokens between GPUs that map each other's memory, in one launch each way; pmo/ranks.h defines the regions.
//
// Each kernel sends, meets the other ranks (cuda/comm/meeting.cuh) and receives. CTAs wait for each other and for those of other
// GPUs, so that a grid has at most one CTA per SM. The last CTA that has sent tells the ranks; every CTA waits for them.
//
// * dispatch: a warp has a piece of a token's row, loads it and stores it in row t of its region at each rank with one of the
//   token's experts, for this rank itself in its line. Threads write the records, one CTA counts the tokens of each expert in
//   shared memory. After the barrier a warp has a piece of a line: it copies a row that arrived, or zeros the line.
// * combine: warps store lines in the rows of their tokens' owners. After the barrier a warp has a piece of a token, and sums its
//   lines in float32 in the order of ranks.
//
// Latency-bound: the barrier takes two accesses of another GPU's memory, one after the other.
//
// Bytes moved, with X bytes of rows that go to other ranks and as many that come: link X each way; memory of dispatch X + T H
// elements read, X + P L H elements written, of combine 2 X + T H elements read, X + T H elements written.
#include <algorithm>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/regions.h"
#include "cuda/comm/meeting.cuh"
#include "cuda/vectors.cuh"
#include "cuda/warp.cuh"

namespace pmo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMoved = 4;   // accesses of a row that a lane moves
constexpr int kSummed = 2;  // accesses of a row that a lane sums

static_assert(PMO_FEW_RANKS <= kWarpSize, "a lane for each rank, slot and row of a token");

// Pieces of rows, shared out to the warps of a grid.
struct Pieces {
  int64_t count;
  int parts;  // of a row
  int values;
  int64_t accesses;

  // Calls visit(row, the lane's first access, whether this is the row's first piece).
  template <typename Visit>
  __device__ void each(const Visit& visit) const {
    const int64_t warps = int64_t{gridDim.x} * kWarps;
    for (int64_t piece = blockIdx.x + int64_t{threadIdx.x / kWarpSize} * gridDim.x; piece < count; piece += warps) {
      const auto row = static_cast<uint32_t>(piece) / static_cast<uint32_t>(parts);
      const auto part = static_cast<uint32_t>(piece) - row * parts;
      visit(int64_t{row}, int64_t{part} * (values * kWarpSize) + threadIdx.x % kWarpSize, part == 0);
    }
  }
};

// Rows of `accesses`, in pieces of 32 * values. Rows without columns have one piece, which moves nothing.
Pieces pieces_of(int64_t rows, int64_t accesses, int values) {
  const int64_t parts = std::max<int64_t>(1, divide_up(accesses, int64_t{values} * kWarpSize));
  return {rows * parts, static_cast<int>(parts), values, accesses};
}

template <typename Access, int kCount>
struct Values {
  Access held[kCount];

  __device__ void load(const void* row, int64_t first, int64_t accesses) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i * kWarpSize < accesses) held[i] = static_cast<const Access*>(row)[first + i * kWarpSize];
    }
  }
  __device__ void store(void* row, int64_t first, int64_t accesses) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i * kWarpSize < accesses) static_cast<Access*>(row)[first + i * kWarpSize] = held[i];
    }
  }
  __device__ void fill(int byte) { memset(held, byte, sizeof held); }
};

// Meets the other ranks, after the writes of all CTAs of the grid. Returns true if ranks are in different calls, now or earlier.
__device__ bool meet(const pmo_rank_barrier_params& p, const Call& own, int32_t* counter) {
  __shared__ bool is_last;
  const uint32_t round = next_round(p);
  const bool was_marked = *static_cast<volatile int32_t*>(p.state + 1) != 0;
  __syncthreads();  // all threads have read the state, and written
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = atomicInc(reinterpret_cast<unsigned*>(counter), gridDim.x - 1) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  const int rank = static_cast<int>(threadIdx.x);
  bool differs = false;
  if (rank < p.num_ranks) {
    if (is_last) signal(p, own, round, rank);
    wait_for(p, round, rank);
    differs = is_in_another_call(p, own, round, rank, is_last ? p.calls : nullptr);
  }
  const bool any_differs = __syncthreads_or(differs) != 0;
  if (is_last) {
    if (any_differs) mark(p, p.calls, PMO_CALLS_DIFFER);
    if (threadIdx.x == 0) p.state[0] = static_cast<int32_t>(round);
  }
  return any_differs || was_marked;
}

// Calls visit(rank) for the ranks in a mask, beginning after this one, so that no two ranks write to one at the same time.
template <typename Visit>
__device__ void each_rank(uint32_t mask, int64_t own, const Visit& visit) {
  const uint32_t after = own + 1 < kWarpSize ? ~0u << (own + 1) : 0;
  for (uint32_t part : {mask & after, mask & ~after}) {
    for (; part != 0; part &= part - 1) visit(__ffs(static_cast<int>(part)) - 1);
  }
}

// Ranks with an expert of a token, as a mask; by all lanes.
__device__ uint32_t ranks_of_token(const pmo_rank_plan_params& p, int64_t token) {
  const int lane = threadIdx.x % kWarpSize;
  const int32_t rank = lane < p.topk ? rank_of_slot(p, token * p.topk + lane) : -1;
  return __reduce_or_sync(kAllLanes, rank >= 0 ? 1u << rank : 0u);
}

// Records of tokens in row t of each region.
__device__ void write_records(const pmo_rank_plan_params& p) {
  const int64_t slots = p.num_tokens * p.topk, threads = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < slots * p.num_ranks; i += threads) {
    const auto rank = static_cast<uint32_t>(i) / static_cast<uint32_t>(slots);
    const auto slot = static_cast<uint32_t>(i) - rank * static_cast<uint32_t>(slots);
    const auto token = slot / static_cast<uint32_t>(p.topk);
    record_slot(p, token, slot - token * p.topk, rank, token);
  }
  if (blockIdx.x == 0 && threadIdx.x < p.num_ranks) {
    *Records(p.records, p.region_bytes, threadIdx.x, p.rows_per_rank, p.topk).count = static_cast<int32_t>(p.num_tokens);
  }
}

// Tokens of each expert, by the last CTA.
__device__ void count_experts(const pmo_rank_plan_params& p) {
  __shared__ int32_t counts[PMO_FEW_EXPERTS];
  if (blockIdx.x + 1 != gridDim.x) return;
  const auto experts = static_cast<int>(p.num_ranks * p.experts_per_rank);
  for (int expert = threadIdx.x; expert < experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  for (int64_t slot = threadIdx.x; slot < p.num_tokens * p.topk; slot += kThreads) {
    const int64_t token = slot / p.topk, expert = first_choice(p, token, slot - token * p.topk);
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < experts; expert += kThreads) p.routed[expert] = counts[expert];
  if (threadIdx.x == 0) *p.dropped = 0;
}

template <typename Access>
__device__ void send_tokens(const pmo_rank_dispatch_params& p, const Pieces& pieces, int64_t row_bytes, int64_t stride) {
  const int lane = threadIdx.x % kWarpSize;
  pieces.each([&](int64_t token, int64_t first, bool is_first) {
    Values<Access, kMoved> values;
    values.load(static_cast<const char*>(p.x) + token * stride, first, pieces.accesses);
    const uint32_t ranks = ranks_of_token(p.plan, token);
    each_rank(ranks, p.rank, [&](int rank) {
      char* const target = rank == p.rank ? static_cast<char*>(p.tokens) + (rank * p.plan.capacity + token) * row_bytes
                                          : static_cast<char*>(p.peers) + (rank * p.plan.rows_per_rank + token) * row_bytes;
      values.store(target, first, pieces.accesses);
    });
    // ascending rows, -1 last; lane r has rank r
    const int64_t columns = max_rows_per_token(p.plan.num_ranks, p.plan.topk);
    if (!is_first) return;
    const bool goes = (ranks >> lane & 1) != 0;
    const int before = __popc(ranks & ((1u << lane) - 1)), all = __popc(ranks);
    int32_t* const rows = p.plan.token_rows + token * columns;
    if (goes) rows[before] = static_cast<int32_t>(lane * p.plan.rows_per_rank + token);
    if (lane >= all && lane < columns) rows[lane] = -1;
  });
}

template <typename Access>
__device__ void receive_lines(const pmo_rank_dispatch_params& p, const Pieces& pieces, int64_t row_bytes, bool is_spoiled) {
  const int lane = threadIdx.x % kWarpSize;
  pieces.each([&](int64_t number, int64_t first, bool is_first) {
    const ArrivedLine line(p, number);
    const int32_t id = lane < p.plan.topk ? line.id(p, lane) : -1;
    const bool has_token = __any_sync(kAllLanes, id >= 0);
    if (is_first) {
      if (lane < p.plan.topk) {
        p.ids[number * p.plan.topk + lane] = id;
        p.probs[number * p.plan.topk + lane] = is_spoiled ? NAN : id >= 0 ? line.prob(p, lane) : 0.0f;
      }
      if (lane == 0) p.rows[number] = has_token ? static_cast<int32_t>(line.row(p)) : -1;
    }
    if (has_token && !is_spoiled && line.rank == p.rank) return;  // already there
    Values<Access, kMoved> values;
    if (has_token && !is_spoiled) {
      values.load(static_cast<const char*>(p.arrived) + line.row(p) * row_bytes, first, pieces.accesses);
    } else {
      values.fill(is_spoiled ? 0xFF : 0);
    }
    values.store(static_cast<char*>(p.tokens) + number * row_bytes, first, pieces.accesses);
  });
}

// `sends`: whether this kernel sends the tokens, which are at most as many as lines of a rank.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    dispatch_few(const __grid_constant__ pmo_rank_dispatch_params p, const __grid_constant__ Call own, Pieces tokens,
                 Pieces lines, int64_t row_bytes, int64_t stride, bool sends) {
  using Access = Vector<kBytes>;
  if (sends) {
    send_tokens<Access>(p, tokens, row_bytes, stride);
    write_records(p.plan);
    count_experts(p.plan);
  }
  const bool is_spoiled = meet(p.barrier, own, p.counter);
  receive_lines<Access>(p, lines, row_bytes, is_spoiled);
}

// Number of CTAs: enough for all pieces, at most one per SM.
int grid_of(int64_t pieces, unsigned* blocks) {
  int device = 0;
  DeviceLimits limits;
  if (const int status = current_device(&device, &limits)) return status;
  *blocks = static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(divide_up(pieces, kWarps), limits.multiprocessors)));
  return PMO_OK;
}

bool sends_in_place(const pmo_rank_dispatch_params& p) { return p.plan.num_tokens <= p.plan.capacity; }

int dispatch(const pmo_rank_dispatch_params& p, cudaStream_t stream) {
  if (const int status = check_rank_dispatch(p)) return status;
  PMO_REQUIRE_ARRAY(p.counter, 1, "counter");
  const bool sends = sends_in_place(p);
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype), stride = p.x_row_stride * dtype_size(p.dtype);
  if (!sends) {
    pmo_rank_plan_params plan = p.plan;
    plan.workspace = p.workspace;
    plan.workspace_bytes = p.workspace_bytes;
    if (const int status = pmo_rank_plan_cuda(&plan, stream)) return status;
    const pmo_rank_send_params send = sent_tokens(p);
    if (const int status = pmo_rank_send_cuda(&send, stream)) return status;
  }
  const uintptr_t between = p.plan.num_tokens > 1 ? static_cast<uintptr_t>(stride) : 0;
  const int width = widest_access(
      {address(p.x), address(p.arrived), address(p.peers), address(p.tokens), static_cast<uintptr_t>(row_bytes), between});
  return with_width(width, [&](auto bytes) -> int {
    constexpr int kBytes = decltype(bytes)::value;
    const Pieces tokens = pieces_of(p.plan.num_tokens, row_bytes / kBytes, kMoved);
    const Pieces lines = pieces_of(p.plan.num_ranks * p.plan.capacity, row_bytes / kBytes, kMoved);
    unsigned blocks = 0;
    if (const int status = grid_of(std::max(tokens.count, lines.count), &blocks)) return status;
    return launch("dispatch_few", dispatch_few<kBytes>, {blocks, kThreads}, stream, p, Call(p.barrier), tokens, lines, row_bytes,
                  stride, sends);
  });
}

template <typename Rows, int kWidth>
__global__ void __launch_bounds__(kThreads)
    combine_few(const __grid_constant__ pmo_rank_combine_params p, const __grid_constant__ Call own, Pieces lines, Pieces tokens,
                int64_t row_bytes, int64_t stride) {
  using Access = Vector<kWidth * sizeof(typename Rows::Element)>;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t own_begin = p.rank * p.lines_per_rank, num_rows = p.barrier.num_ranks * p.rows_per_rank;
  lines.each([&](int64_t line, int64_t first, bool) {
    const int32_t row = __ldg(p.rows + line);
    if (row < 0 || row >= num_rows || (line >= own_begin && line < own_begin + p.lines_per_rank)) return;
    Values<Access, kMoved> values;
    values.load(static_cast<const char*>(p.lines) + line * stride, first, lines.accesses);
    values.store(static_cast<char*>(p.peers) + row * row_bytes, first, lines.accesses);
  });
  const bool is_spoiled = meet(p.barrier, own, p.counter);
  tokens.each([&](int64_t token, int64_t first, bool) {
    auto* const out = reinterpret_cast<Access*>(static_cast<char*>(p.out) + token * row_bytes);
    const int32_t row = lane < p.max_rows_per_token ? __ldg(p.token_rows + token * p.max_rows_per_token + lane) : -1;
    const auto* source = static_cast<const char*>(p.arrived) + row * row_bytes;
    if (const int64_t place = row - p.rank * p.rows_per_rank; place >= 0 && place < p.rows_per_rank) {
      source = static_cast<const char*>(p.lines) + (own_begin + place) * stride;
    }
    unsigned left = __ballot_sync(kAllLanes, row >= 0 && row < num_rows);
    const int count = __popc(left);
    Elements<Rows, kWidth> sums[kSummed];
    Values<Access, kSummed> last;  // of the last row: the result if it is the only one
#pragma unroll
    for (int i = 0; i < kSummed; ++i) sums[i].fill(count == 0 ? 0.0f : -0.0f);
    for (; left != 0; left &= left - 1) {
      const auto from = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(source), __ffs(static_cast<int>(left)) - 1);
      last.load(reinterpret_cast<const char*>(from), first, tokens.accesses);
#pragma unroll
      for (int i = 0; i < kSummed; ++i) {
        if (first + i * kWarpSize >= tokens.accesses) continue;
        Elements<Rows, kWidth> loaded;
        loaded.set(last.held[i]);
        sums[i].add(loaded, 1.0f);
      }
    }
    if (is_spoiled) last.fill(0xFF);
    if (is_spoiled || count == 1) return last.store(out, first, tokens.accesses);
#pragma unroll
    for (int i = 0; i < kSummed; ++i) {
      if (first + i * kWarpSize < tokens.accesses) sums[i].store(out, first + i * kWarpSize);
    }
  });
}

int combine(const pmo_rank_combine_params& p, cudaStream_t stream) {
  if (const int status = check_rank_combine(p)) return status;
  PMO_REQUIRE_ARRAY(p.counter, 1, "counter");
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype), stride = p.line_stride * dtype_size(p.dtype);
  const int64_t lines = p.barrier.num_ranks * p.lines_per_rank;
  const uintptr_t between = lines > 1 ? static_cast<uintptr_t>(stride) : 0;
  return with_rows(
      p.dtype,
      {address(p.lines), address(p.arrived), address(p.peers), address(p.out), static_cast<uintptr_t>(row_bytes), between},
      [&](auto rows, auto width) -> int {
        constexpr int kWidth = decltype(width)::value;
        if constexpr (kWidth == 0) {
          return fail(PMO_INVALID_ARGUMENT, "lines and out must be aligned to their element size");
        } else {
          const Pieces sent = pieces_of(lines, p.hidden / kWidth, kMoved);
          const Pieces tokens = pieces_of(p.num_tokens, p.hidden / kWidth, kSummed);
          unsigned blocks = 0;
          if (const int status = grid_of(std::max(sent.count, tokens.count), &blocks)) return status;
          return launch("combine_few", combine_few<decltype(rows), kWidth>, {blocks, kThreads}, stream, p, Call(p.barrier), sent,
                        tokens, row_bytes, stride);
        }
      });
}

}  // namespace
}  // namespace cuda
}  // namespace pmo

extern "C" int64_t pmo_rank_dispatch_cuda_workspace_bytes(const pmo_rank_dispatch_params* params) {
  if (params == nullptr || pmo::cuda::sends_in_place(*params)) return 0;
  return pmo_rank_plan_cuda_workspace_bytes(&params->plan);
}

extern "C" int pmo_rank_dispatch_cuda(const pmo_rank_dispatch_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::dispatch);
}

extern "C" int pmo_rank_combine_cuda(const pmo_rank_combine_params* params, void* stream) {
  return pmo::cuda::run_cuda(params, stream, pmo::cuda::combine);
}
