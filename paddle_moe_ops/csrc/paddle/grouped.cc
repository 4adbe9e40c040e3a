// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/grouped.h"

#include <algorithm>

#include "common/matrix_layout.h"
#include "common/scales.h"
#include "paddle/pages.h"
#include "pmo/grouped_float8.h"
#include "pmo/grouped_rows.h"

namespace pmo {
namespace binding {
namespace {

int64_t bytes_of(const paddle::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(phi::SizeOf(tensor.dtype())); }

// Paddle's matmul, written to existing memory; releases without that overload allocate a tensor.
template <typename Tensor>
auto matmul_into(const Tensor& x, const Tensor& y, bool transpose_x, bool transpose_y, Tensor* out, int)
    -> decltype(paddle::matmul(x, y, transpose_x, transpose_y, paddle::optional<Tensor*>(out)), void()) {
  paddle::matmul(x, y, transpose_x, transpose_y, paddle::optional<Tensor*>(out));
}
template <typename Tensor>
void matmul_into(const Tensor& x, const Tensor& y, bool transpose_x, bool transpose_y, Tensor* out, long) {
  *out = paddle::matmul(x, y, transpose_x, transpose_y);
}

int32_t capability_here([[maybe_unused]] const Target& target) {
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) return pmo_grouped_capability_cuda();
#endif
  return 0;
}

}  // namespace

paddle::Tensor in_dtype(const Target& target, const paddle::Tensor& tensor, paddle::DataType dtype) {
  if (tensor.dtype() == dtype) return tensor;
  if (tensor.numel() == 0) return target.empty(tensor.shape(), dtype);
  return tensor.cast(dtype);
}

int32_t grouped_dtype(paddle::DataType dtype) {
  if (dtype == paddle::DataType::FLOAT16) return PMO_FLOAT16;
  return dtype == paddle::DataType::BFLOAT16 ? PMO_BFLOAT16 : PMO_FLOAT32;
}

bool has_grouped_kernels(const Target& target, int32_t dtype, int64_t num_rows, int64_t num_experts, int64_t inner,
                         int64_t outer) {
  pmo_grouped_facts facts = {};
  facts.struct_size = sizeof(facts);
  facts.num_rows = num_rows;
  facts.num_experts = num_experts;
  facts.inner = inner;
  facts.outer = outer;
  facts.dtype = dtype;
  facts.capability = capability_here(target);
  return pmo_grouped_takes(&facts) != 0;
}

paddle::Tensor integers_on(const Target& target, const paddle::Tensor& integers) {
  const paddle::Tensor on_any = dense(integers);
  return on_any.place() == target.place() ? on_any : on_any.copy_to(target.place(), true);
}

Matrix readable_rows(const Target& target, const paddle::Tensor& rows) {
  Matrix given(rows);
  const int64_t row_bytes = given.row_stride * static_cast<int64_t>(phi::SizeOf(rows.dtype()));
  const bool is_aligned = row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(given.data) % 16 == 0;
  if (is_aligned && given.row_stride >= rows.shape()[1]) return given;
  return Matrix(target.aligned(dense(rows)));
}

Shape ExpertMatrices::shape() const {
  if (values.defined()) return values.shape();
  const MatrixLayout layout(of_codes.format, of_codes.inner, of_codes.outer, of_codes.transpose);
  return {of_codes.codes.shape()[0], layout.rows, layout.columns};
}

void require_codes(const ExpertMatrices::Codes& codes, const char* function, const char* name) {
  const int32_t format = codes.format;
  require(format >= PMO_MATRIX_INT8 && format <= PMO_MATRIX_FLOAT8_128X128, function, "the format is unknown");
  require(codes.codes.defined() && codes.scales.defined(), function, "a required tensor is missing");
  require_rank(codes.codes, 3, function, name);
  const paddle::DataType dtype = codes.codes.dtype();
  if (format != PMO_MATRIX_FLOAT8_128X128) {
    require_dtype(codes.codes, is_int4(format) ? paddle::DataType::UINT8 : paddle::DataType::INT8, function, name);
  } else if (dtype != paddle::DataType::INT8 && dtype != paddle::DataType::UINT8) {
#ifndef PMO_PADDLE_2
    require_dtype(codes.codes, paddle::DataType::FLOAT8_E4M3FN, function, name);
#endif
  }
  const MatrixLayout layout(format, codes.inner, codes.outer, codes.transpose);
  const int64_t experts = codes.codes.shape()[0];
  require_shape(codes.codes, {experts, layout.code_rows, layout.code_columns}, function, name);
  const bool by_output = format == PMO_MATRIX_INT8 || format == PMO_MATRIX_INT4;
  require_dtype(codes.scales, paddle::DataType::FLOAT32, function, "the scales");
  require_shape(codes.scales, by_output ? Shape{experts, codes.outer} : Shape{experts, layout.scale_rows, layout.scale_columns},
                function, "the scales");
}

paddle::Tensor dequantised(const Target& target, const char* function, const ExpertMatrices::Codes& codes) {
  paddle::Tensor values = target.empty(ExpertMatrices(codes).shape(), codes.dtype);
  prepare_pages(target, values);
  dequantise(target, function, codes, 0, values.shape()[0], &values);
  return values;
}

void dequantise(const Target& target, const char* function, const ExpertMatrices::Codes& codes, int64_t first, int64_t count,
                paddle::Tensor* values) {
  const MatrixLayout layout(codes.format, codes.inner, codes.outer, codes.transpose);
  pmo_dequantize_matrices_params p = {};
  p.struct_size = sizeof(p);
  p.num_matrices = count;
  p.inner = codes.inner;
  p.outer = codes.outer;
  p.codes = static_cast<const char*>(codes.codes.data()) + first * layout.code_rows * layout.code_columns;
  p.scales = codes.scales.data<float>() + first * layout.scale_rows * layout.scale_columns;
  p.out = values->data();
  p.format = codes.format;
  p.transpose = codes.transpose;
  p.dtype = grouped_dtype(codes.dtype);
  p.widens = values->dtype() != codes.dtype;
  check_status(PMO_CALL(target, dequantize_matrices, &p), function);
}

Grouped::Grouped(const Target& target, const char* function, const paddle::Tensor& sizes, const paddle::Tensor* offsets,
                 int64_t num_rows)
    : target_(target), function_(function), sizes_(integers_on(target, sizes)), num_rows_(num_rows), experts_(sizes.shape()[0]) {
  index_kind(sizes, function, "sizes");
  if (offsets == nullptr) return;
  require_rank(*offsets, 1, function, "offsets");
  require(offsets->shape()[0] >= experts_, function, "offsets must have one entry for each expert at least");
  index_kind(*offsets, function, "offsets");
  offsets_ = integers_on(target, *offsets);
}

paddle::Tensor Grouped::tables_of(int32_t tile_rows) const {
  pmo_grouped_tables_params p = {};
  p.struct_size = sizeof(p);
  p.num_rows = num_rows_;
  p.num_experts = experts_;
  p.sizes = sizes_.data();
  p.sizes_kind = p.offsets_kind = index_kind(sizes_, function_, "sizes");
  if (offsets_.defined()) {
    p.offsets = offsets_.data();
    p.offsets_kind = index_kind(offsets_, function_, "offsets");
  }
  paddle::Tensor tables = target_.empty_int32({layout().size()});
  p.tables = tables.data<int32_t>();
  p.tile_rows = tile_rows;
  check_status(PMO_CALL(target_, grouped_tables, &p), function_);
  return tables;
}

int32_t* Grouped::table(int64_t place) const {
  if (!tables_.defined()) tables_ = tables_of(PMO_GROUPED_TURNED_ROWS);
  return tables_.data<int32_t>() + place;
}

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

paddle::Tensor Grouped::fake_quantised_columns(const paddle::Tensor& rows, bool by_blocks) const {
  const Matrix readable = readable_rows(target_, rows);
  const paddle::Tensor tables = tables_of(PMO_GROUPED_TILE_ROWS);
  paddle::Tensor values = target_.empty(rows.shape(), paddle::DataType::FLOAT32);
  pmo_quantize_columns_params p = {};
  p.struct_size = sizeof p;
  p.num_rows = p.num_sources = num_rows_;
  p.num_columns = rows.shape()[1];
  p.num_experts = experts_;
  p.num_blocks = num_rows_;
  p.x = readable.data;
  p.x_row_stride = readable.row_stride;
  p.first = tables.data<int32_t>();
  p.stop = p.first + layout().stop();
  p.tiles = p.first + layout().tiles();
  p.values = values.data<float>();
  p.dtype = dtype_of(rows, function_, "x");
  p.by_blocks = by_blocks;
  p.amax_min = pmo::kAmaxMin;
  check_status(PMO_CALL(target_, quantize_columns, &p), function_);
  return values;
}

#endif

bool Grouped::has_kernels(paddle::DataType dtype, int64_t inner, int64_t outer) const {
  return has_grouped_kernels(target_, grouped_dtype(dtype), num_rows_, experts_, inner, outer);
}

paddle::Tensor Grouped::gemm(const paddle::Tensor& rows, const ExpertMatrices& matrices, bool transpose,
                             paddle::DataType dtype) const {
  const Shape shape = matrices.shape();
  const MatrixSizes sizes(shape, transpose);
  if (has_kernels(matrices.dtype(), sizes.inner, sizes.outer)) {
    paddle::Tensor out = target_.empty({num_rows_, sizes.outer}, matrices.dtype());
    launch(rows, matrices.values.defined() ? matrices.values : dequantised(target_, function_, matrices.of_codes), transpose,
           &out);
    return in_dtype(target_, out, dtype);
  }
  const paddle::DataType summed = matmul_dtype(matrices.dtype());
  const paddle::Tensor source = dense(in_dtype(target_, rows, summed));
  const ExpertMatrices stored = matrices.values.defined() ? ExpertMatrices(dense(matrices.values)) : matrices;
  paddle::Tensor out = target_.empty({num_rows_, sizes.outer}, summed);
  prepare_pages(target_, out);
  int64_t done = 0;
  each([&](int64_t expert, int64_t begin, int64_t end) {
    clear_rows(&out, done, sizes.inner == 0 ? end : begin);
    done = end;
    if (begin == end || sizes.inner == 0 || sizes.outer == 0) return;
    multiply(view(source, begin, end - begin, sizes.inner), matrix_of(stored, expert, summed), false, transpose,
             view(out, begin, end - begin, sizes.outer));
  });
  clear_rows(&out, done, num_rows_);
  return in_dtype(target_, out, dtype);
}

paddle::Tensor Grouped::wgrad(const paddle::Tensor& p, const paddle::Tensor& q, paddle::DataType dtype) const {
  const int64_t height = p.shape()[1], width = q.shape()[1];
#ifdef PMO_WITH_CUDA
  if (has_kernels(dtype, height, width)) {
    paddle::Tensor out = target_.empty({experts_, height, width}, dtype);
    const Matrix rows_of_p = readable_rows(target_, in_dtype(target_, p, dtype)),
                 rows_of_q = readable_rows(target_, in_dtype(target_, q, dtype));
    pmo_grouped_outer_params params = {};
    params.struct_size = sizeof(params);
    params.num_rows = num_rows_;
    params.num_experts = experts_;
    params.p_columns = params.out_rows = height;
    params.q_columns = params.out_columns = width;
    params.p_row_stride = rows_of_p.row_stride;
    params.q_row_stride = rows_of_q.row_stride;
    params.p = rows_of_p.data;
    params.q = rows_of_q.data;
    params.first = table(0);
    params.stop = table(layout().stop());
    params.out = out.data();
    params.dtype = dtype_of(out, function_, "the matrices");
    params.counters = table(layout().counters());
    check_status(pmo_grouped_outer_cuda(&params, target_.stream()), function_);
    return out;
  }
#endif
  const paddle::DataType summed = matmul_dtype(dtype);
  const paddle::Tensor of_p = dense(in_dtype(target_, p, summed)), of_q = dense(in_dtype(target_, q, summed));
  paddle::Tensor out = target_.empty({experts_, height, width}, summed);
  prepare_pages(target_, out);
  each([&](int64_t expert, int64_t begin, int64_t end) {
    if (begin == end) clear_rows(&out, expert * height, (expert + 1) * height);
    if (begin == end || height * width == 0) return;
    multiply(view(of_p, begin, end - begin, height), view(of_q, begin, end - begin, width), true, false,
             view(out, expert * height, height, width));
  });
  return in_dtype(target_, out, dtype);
}

void Grouped::launch([[maybe_unused]] const paddle::Tensor& rows, [[maybe_unused]] const paddle::Tensor& matrices,
                     [[maybe_unused]] bool transpose, [[maybe_unused]] paddle::Tensor* out) const {
#ifdef PMO_WITH_CUDA
  const MatrixSizes sizes(matrices.shape(), transpose);
  const Matrix source = readable_rows(target_, in_dtype(target_, rows, matrices.dtype()));
  const paddle::Tensor factors = target_.aligned(dense(matrices));
  pmo_grouped_product_params params = {};
  params.struct_size = sizeof(params);
  params.num_rows = params.num_sources = params.window_rows = num_rows_;
  params.num_experts = experts_;
  params.inner = sizes.inner;
  params.outer = params.width = sizes.outer;
  params.x = source.data;
  params.x_row_stride = source.row_stride;
  params.matrix = factors.data();
  params.first = table(0);
  params.stop = table(layout().stop());
  params.tiles = table(layout().tiles());
  params.window = table(layout().window_of_all_rows());
  params.counters = table(layout().counters());
  params.tile_rows = PMO_GROUPED_TURNED_ROWS;
  params.out = out->data();
  params.dtype = dtype_of(matrices, function_, "the matrices");
  params.transpose = transpose;
  check_status(pmo_grouped_product_cuda(&params, target_.stream()), function_);
  pmo_grouped_clear_params clear = {};
  clear.struct_size = sizeof(clear);
  clear.num_rows = num_rows_;
  clear.num_experts = experts_;
  clear.row_size = sizes.outer * static_cast<int64_t>(phi::SizeOf(out->dtype()));
  clear.first = params.first;
  clear.stop = params.stop;
  clear.rows = out->data();
  check_status(pmo_grouped_clear_cuda(&clear, target_.stream()), function_);
#endif
}

const std::vector<int32_t>& Grouped::on_host() const {
  if (host_.empty()) {
    host_.resize(static_cast<size_t>(2 * experts_));
    target_.copy_to_host(table(0), 2 * experts_ * static_cast<int64_t>(sizeof(int32_t)), host_.data());
  }
  return host_;
}

// function(expert, first row, row after the last one)
template <typename Function>
void Grouped::each(const Function& function) const {
  const std::vector<int32_t>& groups = on_host();
  for (int64_t expert = 0; expert < experts_; ++expert) {
    function(expert, int64_t{groups[static_cast<size_t>(expert)]}, int64_t{groups[static_cast<size_t>(experts_ + expert)]});
  }
}

// Paddle's CPU matmul does not support 16-bit floats.
paddle::DataType Grouped::matmul_dtype(paddle::DataType dtype) const {
  return target_.is_gpu() ? dtype : paddle::DataType::FLOAT32;
}

// Rows of a dense tensor, viewed as a tensor of `columns` columns.
paddle::Tensor Grouped::view(const paddle::Tensor& tensor, int64_t first, int64_t rows, int64_t columns) const {
  const int64_t offset = first * columns * static_cast<int64_t>(phi::SizeOf(tensor.dtype()));
  auto* data = const_cast<char*>(static_cast<const char*>(tensor.data())) + offset;
  return paddle::from_blob(data, {rows, columns}, tensor.dtype(), phi::DataLayout::NCHW, target_.place());
}

paddle::Tensor Grouped::matrix_of(const ExpertMatrices& matrices, int64_t expert, paddle::DataType dtype) const {
  const Shape shape = matrices.shape();
  if (matrices.values.defined()) return in_dtype(target_, view(matrices.values, expert * shape[1], shape[1], shape[2]), dtype);
  paddle::Tensor matrix = target_.empty({shape[1], shape[2]}, dtype);
  dequantise(target_, function_, matrices.of_codes, expert, 1, &matrix);
  return matrix;
}

void Grouped::multiply(const paddle::Tensor& x, const paddle::Tensor& y, bool transpose_x, bool transpose_y,
                       paddle::Tensor part) const {
  void* const memory = part.data();
  const int64_t bytes = bytes_of(part);
  matmul_into(x, y, transpose_x, transpose_y, &part, 0);
  if (part.data() != memory) target_.copy(part.data(), bytes, memory);
}

// Zeroes rows [begin, end), each as long as the tensor's last dimension.
void Grouped::clear_rows(paddle::Tensor* out, int64_t begin, int64_t end) const {
  const int64_t row_bytes = out->shape().back() * static_cast<int64_t>(phi::SizeOf(out->dtype()));
  if (begin < end && row_bytes > 0) target_.clear(static_cast<char*>(out->data()) + begin * row_bytes, (end - begin) * row_bytes);
}

}  // namespace binding
}  // namespace pmo
