// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Launches of a pass, in the order of pmo/layer.h. Every function returns a status; the first failure ends the pass.
#include <algorithm>

#include "common/status.h"
#include "layer/plan.h"

#define PMO_TRY(call) \
  if (const int status = (call)) return status

namespace pmo {
namespace layer {
namespace {

constexpr int64_t kAllRows = -1;

char* at(const void* array, int64_t elements) {
  return const_cast<char*>(static_cast<const char*>(array)) + elements * kItemBytes;
}

// Rows of an operand: all rows in expert order, a chunk of them, or tokens.
struct Rows {
  const void* data;
  int64_t count, width, stride;
  int64_t first_row = 0;
};

// Columns of a result.
struct Columns {
  void* data;
  int64_t first, width;
};

class Pass {
 public:
  Pass(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream)
      : p_(params),
        f_(facts),
        plan_(plan_of(facts)),
        layout_(layout_of(facts, plan_)),
        kernels_(kernels),
        stream_(stream),
        free_(static_cast<char*>(params.workspace)) {
    buffer_ = take(plan_.buffer_bytes);
    tables_ = static_cast<int32_t*>(take(4 * plan_.tables_size));
    act_ = take(f_.num_rows * f_.inner * kItemBytes);
  }

  int forward() {
    PMO_TRY(compute_tables());
    PMO_TRY(activations(p_.hidden));
    if (p_.hidden != nullptr && p_.clears_hidden) PMO_TRY(clear_hidden());
    return gemm_unpermute({act_, f_.num_rows, f_.inner, f_.inner}, p_.down, f_.hidden, p_.transpose, p_.weights, p_.out);
  }

  int backward() {
    void* hidden = p_.hidden;
    if (!f_.keeps_hidden) hidden = take(f_.num_rows * 2 * f_.inner * kItemBytes);
    PMO_TRY(compute_tables());
    if (!f_.keeps_hidden) PMO_TRY(activations(hidden));
    PMO_TRY(activation_gradients(hidden));
    buffer_has_d_out_ = plan_.num_chunks == 1;
    const Rows scaled = {act_, f_.num_rows, f_.inner, f_.inner}, d_hidden = {hidden, f_.num_rows, 2 * f_.inner, 2 * f_.inner};
    if (p_.d_down != nullptr) PMO_TRY(wgrad(d_out(), scaled, plan_.gathers_d_out, p_.transpose, p_.d_down));
    if (p_.d_gate_up != nullptr) PMO_TRY(wgrad(x(), d_hidden, plan_.gathers_x, !p_.transpose, p_.d_gate_up));
    if (p_.d_x == nullptr) return PMO_OK;
    return gemm_unpermute(d_hidden, p_.gate_up, f_.hidden, !p_.transpose, nullptr, p_.d_x);
  }

 private:
  void* take(int64_t bytes) {
    void* array = free_;
    free_ += aligned_bytes(bytes);
    return array;
  }

  Rows x() const { return {p_.x, f_.num_tokens, f_.hidden, p_.x_row_stride}; }
  Rows d_out() const { return {p_.d_out, f_.num_tokens, f_.hidden, p_.d_out_row_stride}; }

  // ---- tile schedules

  int compute_tables() {
    pmo_grouped_tables_params t = {};
    t.struct_size = sizeof t;
    t.num_rows = f_.num_rows;
    t.num_experts = f_.num_experts;
    t.num_chunks = layout_.num_chunks;
    t.chunk_rows = plan_.chunk_rows;
    t.sizes = p_.sizes;
    t.offsets = p_.offsets;
    t.sizes_kind = p_.sizes_kind;
    t.offsets_kind = p_.offsets_kind;
    t.tables = tables_;
    t.tile_rows = PMO_GROUPED_TURNED_ROWS;
    t.other_tile_rows = plan_.sum_tile_rows == PMO_GROUPED_TURNED_ROWS ? 0 : plan_.sum_tile_rows;
    return kernels_.tables(&t, stream_);
  }

  int32_t* tables_for(int32_t tile_rows) const { return tables_ + (tile_rows == PMO_GROUPED_TURNED_ROWS ? 0 : layout_.size()); }

  const int32_t* rows_end() const { return tables_ + layout_.stop() + f_.num_experts - 1; }  // end of the last expert's rows

  // ---- token rows

  // Permutes a chunk of the rows of tokens into the buffer.
  int permute(const Rows& tokens, int64_t first_row, int64_t end_row, const Columns& columns, Rows* rows) {
    *rows = {buffer_, end_row - first_row, columns.width, columns.width, first_row};
    pmo_permute_params m = {};
    m.struct_size = sizeof m;
    m.num_tokens = f_.num_tokens;
    m.topk = p_.slots_per_token;
    m.num_rows = rows->count;
    m.hidden = columns.width;
    m.x = at(tokens.data, columns.first);
    m.x_row_stride = tokens.stride;
    m.slot_to_row = p_.token_rows;
    m.row_to_token = p_.row_to_token + first_row;
    m.rows = buffer_;
    m.dtype = f_.dtype;
    m.fill = PMO_FILL_ROWS;
    m.first_row = first_row;
    m.rows_end = rows_end();
    return kernels_.permute(&m, stream_);
  }

  // Calls function(rows, chunk) for the tokens, which GEMMs gather, or for each chunk of their permuted rows. A chunk includes the
  // rows that its last tile reads.
  template <typename Function>
  int each_chunk(const Rows& tokens, const Function& function) {
    if (plan_.gathers) return function(tokens, kAllRows);
    const int64_t chunks = layout_.num_chunks;
    for (int64_t chunk = 0; chunk < std::max<int64_t>(chunks, 1); ++chunk) {
      const int64_t first = chunk * plan_.chunk_rows;
      const int64_t end = chunks == 0 ? f_.num_rows : std::min(first + plan_.chunk_rows + PMO_GROUPED_TURNED_ROWS, f_.num_rows);
      Rows rows;
      PMO_TRY(permute(tokens, first, end, {nullptr, 0, f_.hidden}, &rows));
      PMO_TRY(function(rows, chunks == 0 ? kAllRows : chunk));
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

  // ---- GEMMs

  int launch(pmo_grouped_product_params g, const Rows& rows, const void* matrix, int64_t outer, bool transpose,
             const Columns& out, int64_t chunk) {
    int32_t* tables = tables_for(g.tile_rows);
    g.struct_size = sizeof g;
    g.num_rows = f_.num_rows;
    g.num_sources = rows.count;
    g.num_experts = f_.num_experts;
    g.inner = rows.width;
    g.outer = outer;
    g.first_column = out.first;
    g.width = out.width;
    g.first_row = rows.first_row;
    g.window_rows = chunk == kAllRows ? f_.num_rows : rows.count;
    g.x = rows.data;
    g.x_row_stride = rows.stride;
    g.matrix = matrix;
    g.first = tables;
    g.stop = tables + layout_.stop();
    g.tiles = tables + layout_.tiles();
    g.window = tables + (chunk == kAllRows ? layout_.window_of_all_rows() : layout_.window() + chunk);
    g.counters = tables + layout_.counters();
    g.out = out.data;
    g.dtype = f_.dtype;
    g.transpose = transpose;
    g.tile_columns = tile_columns(g.inner, g.width);
    return kernels_.gemm(&g, stream_);
  }

  // A, and H unless it is null.
  int activations(void* hidden) {
    pmo_grouped_product_params g = {};
    g.result = PMO_GROUPED_GATED;
    g.tile_rows = PMO_GROUPED_TURNED_ROWS;
    g.gathers = plan_.gathers;
    g.row_to_token = plan_.gathers ? p_.row_to_token : nullptr;
    g.hidden = hidden;
    return each_chunk(x(), [&](const Rows& rows, int64_t chunk) {
      return launch(g, rows, p_.gate_up, 2 * f_.inner, p_.transpose, {act_, 0, f_.inner}, chunk);
    });
  }

  int clear_hidden() {
    pmo_grouped_clear_params c = {};
    c.struct_size = sizeof c;
    c.num_rows = f_.num_rows;
    c.num_experts = f_.num_experts;
    c.row_size = 2 * f_.inner * kItemBytes;
    c.first = tables_;
    c.stop = tables_ + layout_.stop();
    c.rows = p_.hidden;
    return kernels_.clear(&c, stream_);
  }

  // Replaces H by its gradient and A by s A; computes the gradients of the weights.
  int activation_gradients(void* hidden) {
    const int64_t tiles = divide_up(f_.inner, PMO_GROUPED_TILE_COLUMNS);
    float* const dots = f_.needs_d_weights ? static_cast<float*>(take(4 * f_.num_rows * tiles)) : nullptr;
    pmo_grouped_product_params g = {};
    g.result = PMO_GROUPED_GRADIENT;
    g.tile_rows = PMO_GROUPED_TURNED_ROWS;
    g.gathers = plan_.gathers;
    g.row_to_token = p_.row_to_token;
    g.weights = p_.weights;
    g.hidden = hidden;
    g.d_weights = dots;
    PMO_TRY(each_chunk(d_out(), [&](const Rows& rows, int64_t chunk) {
      return launch(g, rows, p_.down, f_.inner, !p_.transpose, {act_, 0, f_.inner}, chunk);
    }));
    if (dots == nullptr) return PMO_OK;
    pmo_row_sums_params s = {};
    s.struct_size = sizeof s;
    s.num_rows = f_.num_rows;
    s.width = tiles;
    s.values = dots;
    s.row_to_token = p_.row_to_token;
    s.out = p_.d_weights;
    return kernels_.row_sums(&s, stream_);
  }

  // out [T, d] = sums of each token's rows of a plain GEMM.
  int gemm_unpermute(const Rows& source, const void* matrix, int64_t outer, bool transpose, const float* weights, void* out) {
    buffer_has_d_out_ = false;
    return each_columns([&](const Columns& columns) {
      pmo_grouped_product_params g = {};
      g.result = PMO_GROUPED_PLAIN;
      g.tile_rows = plan_.sum_tile_rows;
      g.weights = weights;
      PMO_TRY(launch(g, source, matrix, outer, transpose, columns, kAllRows));
      pmo_unpermute_params u = {};
      u.struct_size = sizeof u;
      u.num_tokens = f_.num_tokens;
      u.max_rows_per_token = p_.slots_per_token;
      u.num_rows = f_.num_rows;
      u.hidden = columns.width;
      u.rows = columns.data;
      u.rows_row_stride = columns.width;
      u.token_rows = p_.token_rows;
      u.out = at(out, columns.first);
      u.out_row_stride = f_.hidden;
      u.dtype = f_.dtype;
      return kernels_.unpermute(&u, stream_);
    });
  }

  // out [E, P, Q] = p^T q by expert, where p are token rows and q other rows, or the reverse.
  int wgrad(const Rows& tokens, const Rows& rows, bool gathers, bool tokens_first, void* out) {
    pmo_grouped_outer_params o = {};
    o.struct_size = sizeof o;
    o.num_rows = f_.num_rows;
    o.num_experts = f_.num_experts;
    o.out_rows = tokens_first ? f_.hidden : rows.width;
    o.out_columns = tokens_first ? rows.width : f_.hidden;
    o.first = tables_;
    o.stop = tables_ + layout_.stop();
    o.out = out;
    o.counters = tables_ + layout_.counters();
    o.dtype = f_.dtype;
    const auto multiply = [&](const Rows& of_tokens, int64_t first) {
      const Rows &p = tokens_first ? of_tokens : rows, &q = tokens_first ? rows : of_tokens;
      o.p = p.data;
      o.q = q.data;
      o.p_columns = p.width;
      o.q_columns = q.width;
      o.p_row_stride = p.stride;
      o.q_row_stride = q.stride;
      o.first_p = tokens_first ? first : 0;
      o.first_q = tokens_first ? 0 : first;
      return kernels_.wgrad(&o, stream_);
    };
    if (gathers) {
      o.gathered = tokens_first ? PMO_GROUPED_GATHERS_P : PMO_GROUPED_GATHERS_Q;
      o.num_sources = tokens.count;
      o.row_to_token = p_.row_to_token;
      return multiply(tokens, 0);
    }
    return each_columns([&](const Columns& columns) {
      Rows permuted = {buffer_, f_.num_rows, columns.width, columns.width};
      const bool is_there = buffer_has_d_out_ && tokens.data == p_.d_out && columns.width == f_.hidden;
      if (!is_there) PMO_TRY(permute(tokens, 0, f_.num_rows, columns, &permuted));
      buffer_has_d_out_ = false;
      return multiply(permuted, columns.first);
    });
  }

  const pmo_layer_params& p_;
  const pmo_layer_facts& f_;
  const pmo_layer_plan plan_;
  const GroupedLayout layout_;
  const pmo_layer_kernels& kernels_;
  void* const stream_;
  char* free_;  // the rest of the workspace
  void *buffer_ = nullptr, *act_ = nullptr;
  int32_t* tables_ = nullptr;
  bool buffer_has_d_out_ = false;
};

}  // namespace
}  // namespace layer
}  // namespace pmo

extern "C" int pmo_layer_run(const pmo_layer_facts* facts, const pmo_layer_params* params, const pmo_layer_kernels* kernels,
                             void* stream) {
  if (facts == nullptr || params == nullptr || kernels == nullptr) {
    return pmo::fail(PMO_INVALID_ARGUMENT, "facts, params and kernels must be given");
  }
  return pmo::guarded([&] {
    PMO_TRY(pmo::layer::check_layer(*facts, *params));
    pmo::layer::Pass pass(*facts, *params, *kernels, stream);
    return facts->backward == 0 ? pass.forward() : pass.backward();
  });
}
