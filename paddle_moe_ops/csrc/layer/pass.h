// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A pass of a layer: its workspace, and the launches that both kinds of operands share. Functions return a status; the first
// failure ends the pass.
#pragma once

#include <algorithm>

#include "common/scales.h"
#include "common/status.h"
#include "layer/plan.h"

#define PMO_TRY(call) \
  if (const int status = (call)) return status

namespace pmo {
namespace layer {

constexpr int64_t kAllRows = -1;

inline char* at(const void* array, int64_t elements) {
  return const_cast<char*>(static_cast<const char*>(array)) + elements * kItemBytes;
}

// Rows of an operand: all rows in expert order, a chunk of them, or tokens.
struct Rows {
  const void* data;
  int64_t count, width, stride;
  int64_t first_row = 0;
};

// A matrix of each expert as it is stored.
struct Matrices {
  const void* data;
  int64_t rows, columns;
};

// Columns of a result.
struct Columns {
  void* data;
  int64_t first, width;
};

// Codes, and scales, of which an operand has as many as its kernels ask for.
struct Codes {
  void* codes;
  float* scales;
};

// Codes of `bytes` bytes at the beginning of memory, and scales after them.
inline Codes codes_in(void* memory, int64_t bytes) {
  return {memory, reinterpret_cast<float*>(static_cast<char*>(memory) + aligned_bytes(bytes))};
}

class Pass {
 public:
  Pass(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream);

 protected:
  void* take(int64_t bytes);  // of the workspace
  // Rows of `columns` elements that outlive the pass if the caller gives memory for them.
  void* given_or_taken(void* given, int64_t columns) {
    return given != nullptr ? given : take(f_.num_rows * columns * kItemBytes);
  }

  Rows x() const { return {p_.x, f_.num_tokens, f_.hidden, p_.x_row_stride}; }
  Rows d_out() const { return {p_.d_out, f_.num_tokens, f_.hidden, p_.d_out_row_stride}; }
  Rows rows_of(const void* data, int64_t width) const { return {data, f_.num_rows, width, width}; }

  Matrices gate_up() const { return stored(p_.gate_up, f_.hidden, 2 * f_.inner); }
  Matrices down() const { return stored(p_.down, f_.inner, f_.hidden); }
  // Memory for float8 codes, which all matrices of a pass share; none is needed if codes are given.
  void take_matrix_codes() {
    if (f_.has_codes == 0) matrix_codes_ = take(matrix_codes_bytes(f_));
  }
  // Codes of a matrix: those given, or in the memory above. `turns`: of its transpose.
  int codes_of(const pmo_layer_codes& given, const Matrices& matrices, bool turns, pmo_layer_codes* codes);

  int compute_tables();  // tile schedules
  // Sets the fields of a GEMM that do not depend on its operands.
  template <typename Params>
  void set_schedule(Params* g, int32_t tile_rows, int64_t chunk) const {
    int32_t* const tables = tables_for(tile_rows);
    g->struct_size = sizeof *g;
    g->num_rows = f_.num_rows;
    g->num_experts = f_.num_experts;
    g->first = tables;
    g->stop = tables + layout_.stop();
    g->tiles = tables + layout_.tiles();
    g->window = tables + (chunk == kAllRows ? layout_.window_of_all_rows() : layout_.window() + chunk);
    g->counters = tables + layout_.counters();
  }

  // Calls function(first row, row after the last one, chunk) for each row chunk, including the rows that its last tile reads.
  template <typename Function>
  int each_row_chunk(const Function& function) {
    const int64_t chunks = layout_.num_chunks;
    if (chunks == 0) return function(0, f_.num_rows, kAllRows);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t first = chunk * plan_.chunk_rows;
      PMO_TRY(function(first, std::min(first + held_rows(f_, plan_), f_.num_rows), chunk));
    }
    return PMO_OK;
  }

  // Calls function(columns) for each column chunk of the rows of d columns.
  template <typename Function>
  int each_columns(const Function& function) {
    for (int64_t first = 0; first < f_.hidden; first += plan_.chunk_columns) {
      PMO_TRY(function(Columns{buffer_, first, std::min(plan_.chunk_columns, f_.hidden - first)}));
    }
    return PMO_OK;
  }

  // Fields of a launch that permutes rows [first_row, end_row).
  pmo_permute_params permutation(int64_t first_row, int64_t end_row) const;
  // Permutes a chunk of the rows of tokens into the buffer.
  int permute(const Rows& tokens, int64_t first_row, int64_t end_row, const Columns& columns, Rows* rows);
  // Columns of `out` [T, d] = sums of each token's rows in the buffer. `overlaps`: with the launch before it, which made them.
  int unpermute(const Columns& columns, void* out, bool overlaps = false);
  // Zeroes H in rows of no expert.
  int clear_hidden();
  // Room for the dot products of the gradient of the weights, or null if it is not needed; and that gradient.
  float* take_dots();
  int sum_dots(const float* dots);
  // dW2 = scaled^T dO and dW1 = X^T dH, where they are wanted.
  int wgrads(const void* scaled, const void* d_hidden);

  const pmo_layer_params& p_;
  const pmo_layer_facts& f_;
  const pmo_layer_plan plan_;
  const GroupedLayout layout_;
  const pmo_layer_kernels& kernels_;
  void* const stream_;
  void* buffer_ = nullptr;
  void* shared_codes_ = nullptr;   // memory of shared_codes_bytes
  bool buffer_has_d_out_ = false;  // whether the buffer contains all rows of dO

 private:
  Matrices stored(const void* data, int64_t inner, int64_t outer) const {
    return p_.transpose ? Matrices{data, outer, inner} : Matrices{data, inner, outer};
  }
  int wgrad(const Rows& tokens, const Rows& rows, bool gathers, bool tokens_first, int32_t accumulation, void* out);
  // The same with float8 operands; `by_columns`: whether tokens have a scale per column, and `rows` one per 128.
  int float8_wgrad(const Rows& tokens, const Rows& rows, bool by_columns, int32_t accumulation, void* out);
  int quantize_columns(const Rows& rows, const int32_t* row_to_token, const Columns& columns, bool by_blocks, void* memory,
                       Codes* codes);
  int32_t* tables_for(int32_t tile_rows) const;
  const int32_t* rows_end() const { return tables_ + layout_.stop() + f_.num_experts - 1; }  // end of the last expert's rows

  int32_t first_tile_rows() const { return has_float8_tiles(f_) ? PMO_GROUPED_TILE_ROWS : PMO_GROUPED_TURNED_ROWS; }

  char* free_;  // the rest of the workspace
  int32_t* tables_ = nullptr;
  void* matrix_codes_ = nullptr;
};

// A forward pass on the kernel for few rows, and a pass with float8 operands on others.
int run_few_rows(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream);
int run_float8(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream);

}  // namespace layer
}  // namespace pmo
