// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// index_add on the CPU: threads own contiguous ranges of tokens and read the whole index. So rows of a token are added in order.
#include "common/index_add.h"
#include "common/checks.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

template <typename Out, typename Rows>
void add_row(const typename Rows::Element* row, int64_t columns, typename Out::Element* out) {
  for (int64_t i = 0; i < columns; ++i) out[i] = Out::store(Out::load(out[i]) + Rows::load(row[i]));
}

template <typename Out, typename Rows>
int add(const pmo_index_add_params& p) {
  const auto* rows = static_cast<const typename Rows::Element*>(p.rows);
  auto* out = static_cast<typename Out::Element*>(p.out);
  const auto bytes_of_column = static_cast<int64_t>(2 * sizeof(typename Out::Element) + sizeof(typename Rows::Element));
  parallel_ranges(p.num_tokens, p.num_rows * p.hidden * bytes_of_column, p.num_threads, [&](int64_t begin, int64_t end) {
    with_ids(p.row_to_token, p.index_kind, [&](const auto* row_to_token) {
      for (int64_t row = 0; row < p.num_rows; ++row) {
        const int64_t line = line_of(p, row_to_token, row);
        if (line < begin || line >= end) continue;
        add_row<Out, Rows>(rows + row * p.rows_row_stride, p.hidden, out + line * p.hidden);
      }
    });
  });
  return PMO_OK;
}

int index_add(const pmo_index_add_params& p) {
  if (const int status = check_index_add(p)) return status;
  if (p.num_rows == 0 || p.num_tokens == 0 || p.hidden == 0) return PMO_OK;
  if (p.dtype == PMO_BFLOAT16) return add<BFloat16Rows, BFloat16Rows>(p);
  return p.rows_dtype == PMO_BFLOAT16 ? add<Float32Rows, BFloat16Rows>(p) : add<Float32Rows, Float32Rows>(p);
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_index_add_cpu(const pmo_index_add_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::index_add);
}
