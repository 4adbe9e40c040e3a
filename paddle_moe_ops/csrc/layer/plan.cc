// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "layer/plan.h"

#include <algorithm>

#include "common/matrix_layout.h"
#include "common/status.h"
#include "pmo/grouped.h"

namespace pmo {
namespace layer {
namespace {

constexpr int64_t kColumnStep = 256;  // column chunks are multiples of it, unless tiles of 192 columns fit better

// ---- kernel of a plain GEMM

// Minimum of the mean rows per expert for the ping-pong kernel. With 128 rows per expert, the wider tiles of the swap-AB kernel
// read each matrix less often. From this K on, the swap-AB kernel is faster.
constexpr int64_t kMinPingPongRows = 512, kMinSwapAbInner = 512;
// With many rows per expert, the ping-pong kernel also wins for longer K, since its epilogue overlaps the next mainloop. Its
// smaller tiles read operands more often than 160 x 256 ones, so K has a maximum: one for tiles of 192 columns, one for 128 columns
// on GPUs with at least this many GB/s per SM (H200: 37, H100: 25; no other GPU was measured).
constexpr int64_t kManyRows = 1024, kFastGbpsPerSm = 35;
constexpr int64_t kMaxInnerOfWide = 3072, kMaxInnerOfNarrow = 2048;
// Tiles of 192 columns are faster if they divide the width, and up to this K if at most 1/16 of the columns is wasted.
constexpr int64_t kMaxInnerWithWaste = 1024;

// ---- gather token rows inside the GEMM, or permute them first?

// Mean rows per expert up to which all GEMMs are memory-bound: one tile of the swap-AB kernel each. Gathering is then faster than
// permuting, also for wgrad.
constexpr int64_t kMemoryBoundRows = PMO_GROUPED_TURNED_ROWS;
// Largest n at which a gathering GEMM beats permute + GEMM: with one row chunk, and per pass over rows of d columns with several.
// Permuting reads and writes all rows, and reads all tokens once per chunk. Gathering slows the GEMM, whose time grows with n, by
// about a tenth. In the backward pass, three GEMMs read permuted rows faster, two of them wgrads. The cost of permuting depends on
// memory bandwidth, too.
struct GatherLimits {
  int64_t with_one_chunk, per_pass;
};
constexpr GatherLimits kForwardLimits = {1536, 680}, kBackwardLimits = {1024, 500}, kBackwardLimitsWithFastMemory = {768, 500};
// Gathering slows wgrad by about a seventh, and its time grows with the columns of the other operand.
constexpr int64_t kMaxColumnsOfGatheringWgrad = 1536;

// ---- kernel for few rows

// Limits of the kernel for few rows, which keeps no H and has no backward pass: mean rows per expert, and elements of W2 of experts
// that may have rows. On an H200 it is faster than the swap-AB kernel by a third for one token and by 1 to 2 % at 24 rows. If reading
// the matrices takes longer than a millisecond, the wider tiles of the swap-AB kernel are faster by 1 to 2 %.
constexpr int64_t kFewRows = 24, kMaxFewElements = int64_t{3} << 28;
// The same limit of rows if the kernel reads codes. Beside float8 codes there is the kernel for many rows; beside integers, values in
// memory, which take as long to compute as the kernel loses at some 700 rows.
constexpr int64_t kFewRowsOfFloat8 = 24, kFewRowsOfIntegers = 512;

bool has_few_rows(const pmo_layer_facts& f) {
  const bool takes = f.backward == 0 && f.keeps_hidden == PMO_LAYER_RECOMPUTES && f.num_tokens > 0;
  if (!takes || f.num_experts > PMO_GROUPED_MAX_FEW_EXPERTS) return false;
  const bool reads_codes = f.float8 != 0 || f.has_codes != 0;
  const int64_t most = f.float8 != 0 ? kFewRowsOfFloat8 : f.has_codes != 0 ? kFewRowsOfIntegers : kFewRows;
  if (f.num_rows > most * f.num_experts) return false;
  if (reads_codes) {
    const int64_t step = codes_in_16_bytes(f.float8 != 0 ? PMO_MATRIX_FLOAT8_128X128 : f.codes_format);
    return f.hidden % step == 0 && f.inner % step == 0;
  }
  return std::min(f.num_rows, f.num_experts) <= kMaxFewElements / std::max<int64_t>(f.hidden * f.inner, 1);
}

int64_t mean_rows(const pmo_layer_facts& f) { return f.num_rows / f.num_experts; }

// The largest multiple of 192 columns up to `most`, for a chunk of a plain GEMM; 0: no need.
int64_t fitting_columns(int64_t inner, int64_t most) {
  if (inner > kMaxInnerWithWaste || tile_columns(inner, most) == PMO_GROUPED_WIDE_COLUMNS) return 0;
  return most / PMO_GROUPED_WIDE_COLUMNS * PMO_GROUPED_WIDE_COLUMNS;
}

int64_t chunk_columns(const pmo_layer_facts& f) {
  const int64_t row_bytes = std::max<int64_t>(f.num_rows * kItemBytes, 1);
  const int64_t columns = f.workspace / row_bytes / kColumnStep * kColumnStep;
  const int64_t most = std::min(std::max(columns, kColumnStep), f.hidden);
  if (f.float8 != 0) return most;  // the float8 kernel has one tile width
  const int64_t fitting = fitting_columns(f.inner, most);
  const bool fits = most != f.hidden && fitting > 0 && plain_tile_rows(f, f.inner, fitting) == PMO_GROUPED_TILE_ROWS;
  return fits ? fitting : most;
}

// Rows of a row chunk: the last tile of a chunk may extend beyond it.
int64_t chunk_rows(const pmo_layer_facts& f) {
  int64_t rows = f.workspace / (f.float8 != 0 ? f.hidden + 4 * divide_up(f.hidden, kGroup) : f.hidden * kItemBytes);
  if (rows < f.num_rows) rows = std::max<int64_t>(rows - PMO_GROUPED_TURNED_ROWS, PMO_GROUPED_TURNED_ROWS);
  return std::max<int64_t>(std::min(rows, f.num_rows), 1);
}

bool gathers(const pmo_layer_facts& f, int64_t chunks) {
  if (f.num_tokens == 0 || f.float8 != 0) return false;
  if (f.num_rows <= kMemoryBoundRows * f.num_experts) return true;
  GatherLimits limits = kForwardLimits;
  if (f.backward != 0) limits = has_fast_memory(f) ? kBackwardLimitsWithFastMemory : kBackwardLimits;
  if (chunks <= 1) return f.inner <= limits.with_one_chunk;
  // n <= (2 + chunks T / M) per_pass, where the tokens are read once per chunk
  return f.num_rows * f.inner <= (2 * f.num_rows + chunks * f.num_tokens) * limits.per_pass;
}

// Columns of tokens that a wgrad with float8 operands takes at a time: as many as fit the chunk buffer, which no GEMM uses then.
int64_t wgrad_columns(const pmo_layer_facts& f, int64_t buffer_bytes) {
  const int64_t bytes = std::max<int64_t>(column_codes_bytes(row_blocks(f), kColumnStep, false), 1);
  return std::min(std::max(buffer_bytes / bytes, int64_t{1}) * kColumnStep, f.hidden);
}

// Codes and scales of the rows of a float8 pass, but for those that share memory with operands of wgrads.
int64_t float8_bytes(const pmo_layer_facts& f) {
  int64_t bytes = codes_bytes(f.num_tokens, f.hidden);
  if (f.backward == 0) bytes += codes_bytes(f.num_rows, f.inner);
  if (f.backward != 0 && f.keeps_hidden != PMO_LAYER_KEEPS_CODES) bytes += codes_bytes(f.num_rows, 2 * f.inner);
  return bytes;
}

}  // namespace

int64_t codes_bytes(int64_t rows, int64_t columns) {
  return aligned_bytes(rows * columns) + aligned_bytes(4 * rows * divide_up(columns, kGroup));
}

int64_t column_codes_bytes(int64_t blocks, int64_t columns, bool by_blocks) {
  return aligned_bytes(blocks * columns * kGroup) +
         aligned_bytes(4 * blocks * (by_blocks ? divide_up(columns, kGroup) : columns));
}

int64_t row_blocks(const pmo_layer_facts& f) { return std::min(f.num_rows / kGroup + f.num_experts, f.num_rows); }

int64_t shared_codes_bytes(const pmo_layer_facts& f, const pmo_layer_plan& plan) {
  if (plan.sum_tile_rows == PMO_GROUPED_FEW_ROWS) return 0;
  int64_t bytes = f.float8 != 0 ? codes_bytes(held_rows(f, plan), f.hidden) : 0;
  if (f.float8_wgrads != 0 && f.part != PMO_LAYER_DGRADS) {
    bytes = std::max(
        {bytes, column_codes_bytes(row_blocks(f), f.inner, false), column_codes_bytes(row_blocks(f), 2 * f.inner, true)});
  }
  return bytes;
}

int64_t matrix_codes_bytes(const pmo_layer_facts& f) {
  const int64_t blocks = divide_up(f.hidden, kGroup) * divide_up(2 * f.inner, kGroup);
  return aligned_bytes(f.num_experts * f.hidden * 2 * f.inner) + aligned_bytes(4 * f.num_experts * blocks);
}

bool has_fast_memory(const pmo_layer_facts& f) { return f.memory_gbps >= kFastGbpsPerSm * f.num_sms; }

int32_t tile_columns(int64_t inner, int64_t columns) {
  const int64_t wasted = round_up(columns, PMO_GROUPED_WIDE_COLUMNS) - columns;
  const bool is_wide = wasted == 0 || (wasted <= columns / 16 && inner <= kMaxInnerWithWaste);
  return is_wide ? PMO_GROUPED_WIDE_COLUMNS : PMO_GROUPED_TILE_COLUMNS;
}

int32_t plain_tile_rows(const pmo_layer_facts& f, int64_t inner, int64_t columns) {
  if (mean_rows(f) < kMinPingPongRows) return PMO_GROUPED_TURNED_ROWS;
  int64_t most = kMinSwapAbInner - 1;
  if (mean_rows(f) >= kManyRows && tile_columns(inner, columns) == PMO_GROUPED_WIDE_COLUMNS) {
    most = kMaxInnerOfWide;
  } else if (mean_rows(f) >= kManyRows && has_fast_memory(f)) {
    most = kMaxInnerOfNarrow;
  }
  return inner <= most ? PMO_GROUPED_TILE_ROWS : PMO_GROUPED_TURNED_ROWS;
}

int64_t held_rows(const pmo_layer_facts& f, const pmo_layer_plan& plan) {
  return std::min(plan.chunk_rows + PMO_GROUPED_TURNED_ROWS, f.num_rows);
}

GroupedLayout layout_of(const pmo_layer_facts& f, const pmo_layer_plan& plan) {
  return {f.num_experts, plan.num_chunks > 1 ? plan.num_chunks : 0};
}

pmo_layer_plan plan_of(const pmo_layer_facts& f) {
  pmo_layer_plan plan = {};
  const bool is_backward = f.backward != 0;
  plan.chunk_rows = chunk_rows(f);
  plan.num_chunks = divide_up(f.num_rows, plan.chunk_rows);
  plan.chunk_columns = chunk_columns(f);
  const bool few_rows = has_few_rows(f);
  plan.gathers = few_rows || gathers(f, plan.num_chunks);
  int64_t buffer = f.num_rows * plan.chunk_columns;
  if (plan.gathers) plan.num_chunks = 0;
  if (!plan.gathers && f.float8 == 0) buffer = std::max(buffer, held_rows(f, plan) * f.hidden);
  plan.buffer_bytes = std::min(buffer, f.num_rows * f.hidden) * kItemBytes;
  if (f.float8_wgrads != 0 && f.part != PMO_LAYER_DGRADS) {
    plan.wgrad_columns = wgrad_columns(f, plan.buffer_bytes);
    plan.buffer_bytes = std::max(plan.buffer_bytes, column_codes_bytes(row_blocks(f), plan.wgrad_columns, false));
  }
  // The buffer still contains its rows.
  const bool d_out_is_permuted = !plan.gathers && plan.num_chunks <= 1 && f.float8 == 0 && f.part == PMO_LAYER_WHOLE;
  const bool has_tokens = f.num_tokens > 0;
  plan.gathers_d_out = has_tokens && (plan.gathers || (!d_out_is_permuted && f.inner <= kMaxColumnsOfGatheringWgrad));
  plan.gathers_x = has_tokens && (plan.gathers || 2 * f.inner <= kMaxColumnsOfGatheringWgrad);
  plan.sum_tile_rows = plain_tile_rows(f, is_backward ? 2 * f.inner : f.inner, plan.chunk_columns);
  if (has_float8_tiles(f)) plan.sum_tile_rows = PMO_GROUPED_TILE_ROWS;
  if (few_rows) plan.sum_tile_rows = PMO_GROUPED_FEW_ROWS;
  const int64_t heights = has_float8_tiles(f) || plan.sum_tile_rows != PMO_GROUPED_TILE_ROWS ? 1 : 2;
  plan.tables_size = few_rows ? 0 : heights * layout_of(f, plan).size();
  const int64_t rows_bytes = f.num_rows * kItemBytes;
  plan.bytes = aligned_bytes(plan.buffer_bytes) + aligned_bytes(4 * plan.tables_size);
  const bool has_hidden = f.keeps_hidden == PMO_LAYER_KEEPS;
  const bool is_whole = f.part == PMO_LAYER_WHOLE;  // otherwise the caller has the memory
  if (is_whole && (is_backward || f.float8 == 0 || few_rows)) plan.bytes += aligned_bytes(rows_bytes * f.inner);
  if (is_whole && is_backward && !has_hidden) plan.bytes += aligned_bytes(rows_bytes * 2 * f.inner);
  if (f.float8 != 0 && !few_rows) plan.bytes += float8_bytes(f);
  plan.bytes += shared_codes_bytes(f, plan);
  if (f.float8 != 0 && f.has_codes == 0) plan.bytes += matrix_codes_bytes(f);
  if (is_backward && f.needs_d_weights) {
    plan.bytes += aligned_bytes(4 * f.num_rows * divide_up(f.inner, PMO_GROUPED_TILE_COLUMNS));
  }
  return plan;
}

}  // namespace layer
}  // namespace pmo

extern "C" int pmo_layer_plan_of(const pmo_layer_facts* facts, pmo_layer_plan* plan) {
  if (facts == nullptr || plan == nullptr) return pmo::fail(PMO_INVALID_ARGUMENT, "facts and plan must be given");
  if (const int status = pmo::layer::check_facts(*facts)) return status;
  *plan = pmo::layer::plan_of(*facts);
  return PMO_OK;
}
