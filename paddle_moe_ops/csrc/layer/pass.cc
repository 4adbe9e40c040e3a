// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "layer/pass.h"

namespace pmo {
namespace layer {

Pass::Pass(const pmo_layer_facts& facts, const pmo_layer_params& params, const pmo_layer_kernels& kernels, void* stream)
    : p_(params),
      f_(facts),
      plan_(plan_of(facts)),
      layout_(layout_of(facts, plan_)),
      kernels_(kernels),
      stream_(stream),
      free_(static_cast<char*>(params.workspace)) {
  buffer_ = take(plan_.buffer_bytes);
  tables_ = static_cast<int32_t*>(take(4 * plan_.tables_size));
  shared_codes_ = take(shared_codes_bytes(f_, plan_));
}

void* Pass::take(int64_t bytes) {
  void* array = free_;
  free_ += aligned_bytes(bytes);
  return array;
}

int Pass::codes_of(const pmo_layer_codes& given, const Matrices& matrices, bool turns, pmo_layer_codes* codes) {
  *codes = given;
  if (f_.has_codes != 0) return PMO_OK;
  const Codes made = codes_in(matrix_codes_, f_.num_experts * matrices.rows * matrices.columns);
  *codes = {made.codes, made.scales};
  pmo_quantize_blocks_params q = {};
  q.struct_size = sizeof q;
  q.num_matrices = f_.num_experts;
  q.num_rows = matrices.rows;
  q.num_columns = matrices.columns;
  q.x = matrices.data;
  (turns ? q.turned_codes : q.codes) = made.codes;
  (turns ? q.turned_scales : q.scales) = made.scales;
  q.dtype = f_.dtype;
  q.amax_min = kAmaxMin;
  return kernels_.quantize_blocks(&q, stream_);
}

int Pass::compute_tables() {
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
  t.tile_rows = first_tile_rows();
  t.other_tile_rows = plan_.sum_tile_rows == t.tile_rows ? 0 : plan_.sum_tile_rows;
  return kernels_.tables(&t, stream_);
}

int32_t* Pass::tables_for(int32_t tile_rows) const { return tables_ + (tile_rows == first_tile_rows() ? 0 : layout_.size()); }

pmo_permute_params Pass::permutation(int64_t first_row, int64_t end_row) const {
  pmo_permute_params m = {};
  m.struct_size = sizeof m;
  m.num_tokens = f_.num_tokens;
  m.topk = p_.slots_per_token;
  m.num_rows = end_row - first_row;
  m.slot_to_row = p_.token_rows;
  m.row_to_token = p_.row_to_token + first_row;
  m.fill = PMO_FILL_ROWS;
  m.first_row = first_row;
  m.rows_end = rows_end();
  return m;
}

int Pass::permute(const Rows& tokens, int64_t first_row, int64_t end_row, const Columns& columns, Rows* rows) {
  *rows = {buffer_, end_row - first_row, columns.width, columns.width, first_row};
  pmo_permute_params m = permutation(first_row, end_row);
  m.hidden = columns.width;
  m.x = at(tokens.data, columns.first);
  m.x_row_stride = tokens.stride;
  m.rows = buffer_;
  m.dtype = f_.dtype;
  return kernels_.permute(&m, stream_);
}

int Pass::unpermute(const Columns& columns, void* out, bool overlaps) {
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
  u.overlaps = overlaps;
  return kernels_.unpermute(&u, stream_);
}

int Pass::clear_hidden() {
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

float* Pass::take_dots() {
  if (f_.needs_d_weights == 0) return nullptr;
  return static_cast<float*>(take(4 * f_.num_rows * divide_up(f_.inner, PMO_GROUPED_TILE_COLUMNS)));
}

int Pass::sum_dots(const float* dots) {
  if (dots == nullptr) return PMO_OK;
  pmo_row_sums_params s = {};
  s.struct_size = sizeof s;
  s.num_rows = f_.num_rows;
  s.width = divide_up(f_.inner, PMO_GROUPED_TILE_COLUMNS);
  s.values = dots;
  s.row_to_token = p_.row_to_token;
  s.out = p_.d_weights;
  return kernels_.row_sums(&s, stream_);
}

int Pass::wgrads(const void* scaled, const void* d_hidden) {
  if (f_.float8_wgrads != 0) {
    if (p_.d_down != nullptr) {
      PMO_TRY(float8_wgrad(d_out(), rows_of(scaled, f_.inner), false, p_.down_accumulation, p_.d_down));
    }
    if (p_.d_gate_up == nullptr) return PMO_OK;
    return float8_wgrad(x(), rows_of(d_hidden, 2 * f_.inner), true, p_.gate_up_accumulation, p_.d_gate_up);
  }
  if (p_.d_down != nullptr) {
    const Rows rows = rows_of(scaled, f_.inner);
    PMO_TRY(wgrad(d_out(), rows, plan_.gathers_d_out, p_.transpose, p_.down_accumulation, p_.d_down));
  }
  if (p_.d_gate_up == nullptr) return PMO_OK;
  const Rows rows = rows_of(d_hidden, 2 * f_.inner);
  return wgrad(x(), rows, plan_.gathers_x, !p_.transpose, p_.gate_up_accumulation, p_.d_gate_up);
}

// out [E, P, Q] = p^T q by expert, where p are token rows and q other rows, or the reverse.
int Pass::wgrad(const Rows& tokens, const Rows& rows, bool gathers, bool tokens_first, int32_t accumulation, void* out) {
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
  o.accumulation = accumulation;
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
    Rows permuted = rows_of(buffer_, columns.width);
    const bool is_there = buffer_has_d_out_ && tokens.data == p_.d_out && columns.width == f_.hidden;
    if (!is_there) PMO_TRY(permute(tokens, 0, f_.num_rows, columns, &permuted));
    buffer_has_d_out_ = false;
    return multiply(permuted, columns.first);
  });
}

int Pass::quantize_columns(const Rows& rows, const int32_t* row_to_token, const Columns& columns, bool by_blocks, void* memory,
                           Codes* codes) {
  const int64_t blocks = row_blocks(f_);
  *codes = codes_in(memory, blocks * columns.width * kGroup);
  pmo_quantize_columns_params q = {};
  q.struct_size = sizeof q;
  q.num_rows = f_.num_rows;
  q.num_sources = rows.count;
  q.num_columns = columns.width;
  q.num_experts = f_.num_experts;
  q.num_blocks = blocks;
  q.x = at(rows.data, columns.first);
  q.x_row_stride = rows.stride;
  q.row_to_token = row_to_token;
  q.first = tables_;
  q.stop = tables_ + layout_.stop();
  q.tiles = tables_ + layout_.tiles();
  q.codes = codes->codes;
  q.scales = codes->scales;
  q.dtype = f_.dtype;
  q.by_blocks = by_blocks;
  q.amax_min = kAmaxMin;
  return kernels_.quantize_columns(&q, stream_);
}

// out [E] = tokens^T rows, or rows^T tokens, by expert; the operand with a scale per column first, unless matrices are transposed.
int Pass::float8_wgrad(const Rows& tokens, const Rows& rows, bool by_columns, int32_t accumulation, void* out) {
  Codes of_rows;
  PMO_TRY(quantize_columns(rows, nullptr, {nullptr, 0, rows.width}, by_columns, shared_codes_, &of_rows));
  const bool are_rows_of_out = by_columns == (p_.transpose == 0);  // the columns of tokens
  for (int64_t first = 0; first < f_.hidden; first += plan_.wgrad_columns) {
    const Columns columns = {nullptr, first, std::min(plan_.wgrad_columns, f_.hidden - first)};
    Codes of_tokens;
    PMO_TRY(quantize_columns(tokens, p_.row_to_token, columns, !by_columns, buffer_, &of_tokens));
    const Codes &a = by_columns ? of_tokens : of_rows, &b = by_columns ? of_rows : of_tokens;
    pmo_grouped_outer_float8_params o = {};
    o.struct_size = sizeof o;
    o.num_experts = f_.num_experts;
    o.num_blocks = row_blocks(f_);
    o.a_columns = by_columns ? columns.width : rows.width;
    o.b_columns = by_columns ? rows.width : columns.width;
    o.out_rows = are_rows_of_out ? f_.hidden : rows.width;
    o.out_columns = are_rows_of_out ? rows.width : f_.hidden;
    (are_rows_of_out ? o.first_row : o.first_column) = first;
    o.a = a.codes;
    o.a_scales = a.scales;
    o.b = b.codes;
    o.b_scales = b.scales;
    o.tiles = tables_ + layout_.tiles();
    o.out = out;
    o.counters = tables_ + layout_.counters();
    o.transpose = p_.transpose;
    o.accumulation = accumulation;
    PMO_TRY(kernels_.wgrad_float8(&o, stream_));
  }
  return PMO_OK;
}

}  // namespace layer
}  // namespace pmo
