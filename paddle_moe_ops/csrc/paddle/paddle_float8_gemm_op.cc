// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// paddle_float8_gemm: codes [M, K] times codes [N, K] transposed -> bfloat16 [M, N], by the grouped GEMM of pmo/grouped_float8.h
// with one expert. For dygraph, without a gradient.
#include "common/arithmetic.h"
#include "paddle/direct.h"
#include "paddle/grouped.h"
#include "pmo/grouped_rows.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own
using pmo::divide_up;

constexpr char kFunction[] = "fp8_gemm_blockwise";
constexpr int64_t kGroup = 128;

void require_codes(const paddle::Tensor& codes, const Shape& shape, const char* name) {
  require_dtype(codes, paddle::DataType::FLOAT8_E4M3FN, kFunction, name);
  require_shape(codes, shape, kFunction, name);
}

void require_scales(const paddle::Tensor& scales, const Shape& shape, const char* name) {
  require_dtype(scales, paddle::DataType::FLOAT32, kFunction, name);
  require_shape(scales, shape, kFunction, name);
}

#ifdef PMO_WITH_CUDA
// Tables of one expert with all M rows; `sizes` is [M].
paddle::Tensor tables_of(const Target& target, const paddle::Tensor& sizes, int64_t num_rows) {
  const paddle::Tensor tables = target.empty_int32({pmo::GroupedLayout{1, 0}.size()});
  pmo_grouped_tables_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = num_rows;
  p.num_experts = 1;
  p.sizes = sizes.data();
  p.sizes_kind = p.offsets_kind = index_kind(sizes, kFunction, "sizes");
  p.tables = const_cast<int32_t*>(tables.data<int32_t>());
  p.tile_rows = PMO_GROUPED_TILE_ROWS;
  check_status(pmo_grouped_tables_cuda(&p, target.stream()), kFunction);
  return tables;
}

paddle::Tensor launch(const Target& target, const Float8& a, const Float8& b, const paddle::Tensor& sizes) {
  const int64_t rows = a.codes.shape()[0], columns = b.codes.shape()[0];
  const pmo::GroupedLayout layout = {1, 0};
  const paddle::Tensor on_device = integers_on(target, sizes), tables = tables_of(target, on_device, rows);
  auto* const table = const_cast<int32_t*>(tables.data<int32_t>());
  const paddle::Tensor x = target.aligned(dense(a.codes)), x_scales = dense(a.scales);
  const paddle::Tensor matrix = target.aligned(dense(b.codes)), matrix_scales = dense(b.scales);
  paddle::Tensor out = target.empty({rows, columns}, paddle::DataType::BFLOAT16);
  pmo_grouped_float8_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = p.num_sources = p.window_rows = rows;
  p.num_experts = 1;
  p.inner = a.codes.shape()[1];
  p.outer = p.width = columns;
  p.x = x.data();
  p.x_scales = x_scales.data<float>();
  p.matrix = matrix.data();
  p.matrix_scales = matrix_scales.data<float>();
  p.first = table;
  p.stop = table + layout.stop();
  p.tiles = table + layout.tiles();
  p.window = table + layout.window_of_all_rows();
  p.counters = table + layout.counters();
  p.out = out.data();
  p.result = PMO_GROUPED_PLAIN;
  check_status(pmo_grouped_float8_cuda(&p, target.stream()), kFunction);
  return out;
}
#endif

// The product, or nothing where there is no kernel. Scales are [M, K / 128] and [N / 128, K / 128], each rounded up.
Outputs gemm(const paddle::Tensor& a, const paddle::Tensor& a_scales, const paddle::Tensor& b, const paddle::Tensor& b_scales,
             [[maybe_unused]] const paddle::Tensor& sizes) {
  const Target target(kFunction, {&a, &a_scales, &b, &b_scales});
  require_codes(a, {-1, -1}, "a");
  const int64_t rows = a.shape()[0], inner = a.shape()[1];
  require_codes(b, {-1, inner}, "b");
  const int64_t columns = b.shape()[0];
  require_scales(a_scales, {rows, divide_up(inner, kGroup)}, "a_decode_scale");
  require_scales(b_scales, {divide_up(columns, kGroup), divide_up(inner, kGroup)}, "b_decode_scale");
  require_shape(sizes, {1}, kFunction, "sizes");
#ifdef PMO_WITH_CUDA
  if (rows > 0 && has_grouped_kernels(target, PMO_FLOAT8_E4M3FN, rows, 1, inner, columns)) {
    return {launch(target, {a, a_scales}, {b, b_scales}, sizes)};
  }
#endif
  return {};
}

}  // namespace

PMO_DIRECT(paddle_float8_gemm, gemm);

#endif
