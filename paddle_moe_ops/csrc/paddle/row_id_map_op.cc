// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Conversions between a plan and the maps of other packages, and values between the slots and the rows of such maps.
#include "paddle/direct.h"
#include "paddle/movement.h"
#include "pmo/row_id_map.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operators' own

constexpr char kMake[] = "make_row_id_map";
constexpr char kRead[] = "read_rowmap";
constexpr char kSlots[] = "slots_to_rows";
constexpr char kRows[] = "rows_to_slots";

PMO_ATTRIBUTES(MakeAttributes, (int64_t, num_experts, num_experts));
PMO_ATTRIBUTES(ReadAttributes, (bool, is_row_id_map, id_map), (int64_t, buffer_size, buffer), (int, checks, checks));

const int32_t* int32_data(const paddle::Tensor& map, const char* function, const char* name) {
  require_dtype(map, paddle::DataType::INT32, function, name);
  return map.data<int32_t>();
}

// pad_offsets [E] of a map that does not count padding; undefined if the map counts it.
paddle::Tensor dense_offsets(const paddle::optional<paddle::Tensor>& pad_offsets, int64_t num_experts, const char* function) {
  if (!pad_offsets) return paddle::Tensor();
  require_shape(*pad_offsets, {num_experts}, function, "pad_offsets");
  return dense(*pad_offsets);
}

Outputs make_row_id_map(const MakeAttributes& a, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_expert,
                        const paddle::optional<paddle::Tensor>& pad_offsets) {
  const Target target(kMake, {&token_rows, &row_to_expert}, {pad_offsets ? &*pad_offsets : nullptr});
  require_rank(token_rows, 2, kMake, "token_rows");
  require_rank(row_to_expert, 1, kMake, "row_to_expert");
  require(a.num_experts >= 1 && a.num_experts <= (int64_t{1} << 16), kMake, "num_experts must be in [1, 2^16]");
  const paddle::Tensor rows = dense(token_rows), experts = dense(row_to_expert);
  const paddle::Tensor offsets = dense_offsets(pad_offsets, a.num_experts, kMake);
  paddle::Tensor row_id_map = target.empty_int32({token_rows.shape()[0], 2 * a.num_experts + 1});
  pmo_row_id_map_params p = {};
  p.struct_size = sizeof(p);
  p.num_tokens = token_rows.shape()[0];
  p.topk = token_rows.shape()[1];
  p.num_experts = a.num_experts;
  p.num_rows = row_to_expert.shape()[0];
  p.token_rows = int32_data(rows, kMake, "token_rows");
  p.row_to_expert = int32_data(experts, kMake, "row_to_expert");
  p.pad_offsets = pad_offsets ? int32_data(offsets, kMake, "pad_offsets") : nullptr;
  p.row_id_map = row_id_map.data<int32_t>();
  check_status(PMO_CALL(target, make_row_id_map, &p), kMake);
  return {row_id_map};
}

std::vector<Shape> make_row_id_map_shapes(const MakeAttributes& a, const Shape& token_rows, const Shape&,
                                          const paddle::optional<Shape>&) {
  return {{dim(token_rows, 0), 2 * a.num_experts + 1}};
}

std::vector<paddle::DataType> make_row_id_map_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                     const paddle::optional<paddle::DataType>&) {
  return {paddle::DataType::INT32};
}

// [T, E] rows from [T, 2E + 1].
paddle::Tensor rowmap_of(const Target& target, const paddle::Tensor& row_id_map,
                         const paddle::optional<paddle::Tensor>& pad_offsets) {
  const int64_t columns = row_id_map.shape()[1];
  require(columns % 2 == 1 && columns > 1, kRead, "the map must have 2 * num_experts + 1 columns");
  const int64_t num_experts = columns / 2;
  const paddle::Tensor offsets = dense_offsets(pad_offsets, num_experts, kRead);
  paddle::Tensor rowmap = target.empty_int32({row_id_map.shape()[0], num_experts});
  pmo_row_id_map_params p = {};
  p.struct_size = sizeof(p);
  p.num_tokens = row_id_map.shape()[0];
  p.num_experts = num_experts;
  p.pad_offsets = pad_offsets ? int32_data(offsets, kRead, "pad_offsets") : nullptr;
  p.row_id_map = const_cast<int32_t*>(row_id_map.data<int32_t>());  // only read
  p.rowmap = rowmap.data<int32_t>();
  check_status(PMO_CALL(target, read_row_id_map, &p), kRead);
  return rowmap;
}

// The number of rows may be on another device than the map, so this function has its own target.
int64_t rows_of_buffer(const paddle::optional<paddle::Tensor>& num_rows, int64_t buffer_size) {
  const Target target(kRead, {}, {num_rows ? &*num_rows : nullptr});
  require(buffer_size >= -1 && buffer_size <= INT32_MAX, kRead, "the buffer must have 0 to 2^31 - 1 rows");
  if (buffer_size >= 0) return buffer_size;
  require(num_rows && num_rows->numel() == 1, kRead, "the number of rows is missing");
  const int64_t rows = require_host_integers(target, *num_rows, kRead, "the number of rows")[0];
  require(rows >= 0 && rows <= INT32_MAX, kRead, "the buffer must have 0 to 2^31 - 1 rows");
  return rows;
}

// The maps of a plan whose slot e is expert e, from [T, E] rows or (is_row_id_map) from TransformerEngine's form of them. `num_rows` is
// read, which synchronises a GPU, if buffer_size is -1.
Outputs read_rowmap(const ReadAttributes& a, const paddle::Tensor& map, const paddle::optional<paddle::Tensor>& pad_offsets,
                    const paddle::optional<paddle::Tensor>& num_rows) {
  const Target target(kRead, {&map}, {pad_offsets ? &*pad_offsets : nullptr});
  require_rank(map, 2, kRead, "the map");
  require_dtype(map, paddle::DataType::INT32, kRead, "the map");
  const paddle::Tensor dense_map = dense(map);
  const paddle::Tensor rowmap = a.is_row_id_map ? rowmap_of(target, dense_map, pad_offsets) : dense_map;
  const int64_t rows = rows_of_buffer(num_rows, a.buffer_size);
  paddle::Tensor slot_to_row = target.empty_int32(rowmap.shape());
  paddle::Tensor token_rows = target.empty_int32(rowmap.shape());
  paddle::Tensor row_to_token = target.empty_int32({rows});
  paddle::Tensor row_to_slot = target.empty_int32({rows});
  paddle::Tensor row_to_expert = target.empty_int32({rows});
  pmo_clean_rowmap_params p = {};
  p.struct_size = sizeof(p);
  p.num_tokens = rowmap.shape()[0];
  p.topk = p.num_experts = rowmap.shape()[1];
  p.num_rows = rows;
  p.rowmap = rowmap.data<int32_t>();
  p.checks = a.checks;
  p.token_rows = token_rows.data<int32_t>();
  p.row_to_token = row_to_token.data<int32_t>();
  p.slot_to_row = slot_to_row.data<int32_t>();
  p.row_to_slot = row_to_slot.data<int32_t>();
  p.row_to_expert = row_to_expert.data<int32_t>();
  clean_rowmap(target, kRead, {{"zipped_expertwise_rowmap", "row_id_map"}}, &p);
  return {slot_to_row, token_rows, row_to_token, row_to_slot, row_to_expert};
}

std::vector<Shape> read_rowmap_shapes(const ReadAttributes& a, const Shape& map, const paddle::optional<Shape>&,
                                      const paddle::optional<Shape>&) {
  const int64_t columns = dim(map, 1);
  const Shape slots = {dim(map, 0), a.is_row_id_map && columns > 0 ? columns / 2 : columns};
  const Shape rows = {a.buffer_size >= 0 ? a.buffer_size : -1};
  return {slots, slots, rows, rows, rows};
}

std::vector<paddle::DataType> read_rowmap_dtypes(const paddle::DataType&, const paddle::optional<paddle::DataType>&,
                                                 const paddle::optional<paddle::DataType>&) {
  return std::vector<paddle::DataType>(5, paddle::DataType::INT32);
}

// row_to_slot determines the number of rows, also for the gradients.
int64_t num_rows_of(const paddle::Tensor& row_to_slot, const char* function) {
  require_rank(row_to_slot, 1, function, "row_to_slot");
  return row_to_slot.shape()[0];
}

Outputs values_of_rows(const Target& target, const paddle::Tensor& slot_values, const paddle::Tensor& slot_to_row,
                       const paddle::Tensor& row_to_slot, const char* function) {
  paddle::Tensor row_values = target.empty_float32({num_rows_of(row_to_slot, function)});
  scatter_slots(target, function, slot_to_row, slot_values, false, &row_values);
  return {row_values};
}

Outputs slots_to_rows(const paddle::Tensor& slot_values, const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_slot) {
  const Target target(kSlots, {&slot_values, &slot_to_row, &row_to_slot});
  return values_of_rows(target, slot_values, slot_to_row, row_to_slot, kSlots);
}

std::vector<Shape> slots_to_rows_shapes(const Shape&, const Shape&, const Shape& row_to_slot) { return {{dim(row_to_slot, 0)}}; }

Outputs slots_to_rows_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_slot,
                               const paddle::Tensor& d_row_values) {
  const Target target(kSlots, {&slot_to_row, &row_to_slot, &d_row_values});
  require_gradient(d_row_values, {num_rows_of(row_to_slot, kSlots)}, paddle::DataType::FLOAT32, kSlots,
                   "the gradient of the rows");
  without_gradient({&slot_to_row, &row_to_slot});
  return {gather_slots(target, kSlots, slot_to_row, d_row_values)};
}

std::vector<Shape> slots_to_rows_backward_shapes(const Shape& slot_to_row, const Shape&, const Shape&) { return {slot_to_row}; }

Outputs slots_to_rows_double_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_slot,
                                      const paddle::Tensor& dd_slot_values) {
  const Target target(kSlots, {&slot_to_row, &row_to_slot, &dd_slot_values});
  require_gradient(dd_slot_values, slot_to_row.shape(), paddle::DataType::FLOAT32, kSlots,
                   "the gradient of the gradient of the slots");
  return values_of_rows(target, dd_slot_values, slot_to_row, row_to_slot, kSlots);
}

std::vector<Shape> slots_to_rows_double_backward_shapes(const Shape&, const Shape& row_to_slot, const Shape&) {
  return {{dim(row_to_slot, 0)}};
}

Outputs rows_to_slots(const paddle::Tensor& row_values, const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_slot) {
  const Target target(kRows, {&row_values, &slot_to_row, &row_to_slot});
  require_shape(row_values, {num_rows_of(row_to_slot, kRows)}, kRows, "the values of the rows");
  return {gather_slots(target, kRows, slot_to_row, row_values)};
}

std::vector<Shape> rows_to_slots_shapes(const Shape&, const Shape& slot_to_row, const Shape&) { return {slot_to_row}; }

Outputs rows_to_slots_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_slot,
                               const paddle::Tensor& d_slot_values) {
  const Target target(kRows, {&slot_to_row, &row_to_slot, &d_slot_values});
  require_gradient(d_slot_values, slot_to_row.shape(), paddle::DataType::FLOAT32, kRows, "the gradient of the slots");
  without_gradient({&slot_to_row, &row_to_slot});
  return values_of_rows(target, d_slot_values, slot_to_row, row_to_slot, kRows);
}

std::vector<Shape> rows_to_slots_backward_shapes(const Shape&, const Shape& row_to_slot, const Shape&) {
  return {{dim(row_to_slot, 0)}};
}

Outputs rows_to_slots_double_backward(const paddle::Tensor& slot_to_row, const paddle::Tensor& row_to_slot,
                                      const paddle::Tensor& dd_row_values) {
  const Target target(kRows, {&slot_to_row, &row_to_slot, &dd_row_values});
  require_gradient(dd_row_values, row_to_slot.shape(), paddle::DataType::FLOAT32, kRows,
                   "the gradient of the gradient of the rows");
  return {gather_slots(target, kRows, slot_to_row, dd_row_values)};
}

std::vector<Shape> rows_to_slots_double_backward_shapes(const Shape& slot_to_row, const Shape&, const Shape&) {
  return {slot_to_row};
}

std::vector<paddle::DataType> values_dtypes(const paddle::DataType&, const paddle::DataType&, const paddle::DataType&) {
  return {paddle::DataType::FLOAT32};
}

}  // namespace

PD_BUILD_OP(pmo_make_row_id_map)
    .Inputs({"token_rows", "row_to_expert", paddle::Optional("pad_offsets")})
    .Outputs({"row_id_map"})
    .Attrs(MakeAttributes::names())
    .SetKernelFn(PMO_KERNEL(make_row_id_map))
    .SetInferShapeFn(PMO_INFER_SHAPE(make_row_id_map_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(make_row_id_map_dtypes));
PMO_DIRECT(make_row_id_map, make_row_id_map);

PD_BUILD_OP(pmo_read_rowmap)
    .Inputs({"map", paddle::Optional("pad_offsets"), paddle::Optional("num_rows")})
    .Outputs({"slot_to_row", "token_rows", "row_to_token", "row_to_slot", "row_to_expert"})
    .Attrs(ReadAttributes::names())
    .SetKernelFn(PMO_KERNEL(read_rowmap))
    .SetInferShapeFn(PMO_INFER_SHAPE(read_rowmap_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(read_rowmap_dtypes));
PMO_DIRECT(read_rowmap, read_rowmap);

PD_BUILD_OP(pmo_slots_to_rows)
    .Inputs({"slots", "slot_to_row", "row_to_slot"})
    .Outputs({"rows"})
    .SetKernelFn(PMO_KERNEL(slots_to_rows))
    .SetInferShapeFn(PMO_INFER_SHAPE(slots_to_rows_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(values_dtypes));
PMO_DIRECT(slots_to_rows, slots_to_rows);

PD_BUILD_GRAD_OP(pmo_slots_to_rows)
    .Inputs({"slot_to_row", "row_to_slot", paddle::Grad("rows")})
    .Outputs({paddle::Grad("slots")})
    .SetKernelFn(PMO_KERNEL(slots_to_rows_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(slots_to_rows_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(values_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_slots_to_rows)
    .Inputs({"slot_to_row", "row_to_slot", paddle::Grad(paddle::Grad("slots"))})
    .Outputs({paddle::Grad(paddle::Grad("rows"))})
    .SetKernelFn(PMO_KERNEL(slots_to_rows_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(slots_to_rows_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(values_dtypes));

PD_BUILD_OP(pmo_rows_to_slots)
    .Inputs({"rows", "slot_to_row", "row_to_slot"})
    .Outputs({"slots"})
    .SetKernelFn(PMO_KERNEL(rows_to_slots))
    .SetInferShapeFn(PMO_INFER_SHAPE(rows_to_slots_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(values_dtypes));
PMO_DIRECT(rows_to_slots, rows_to_slots);

PD_BUILD_GRAD_OP(pmo_rows_to_slots)
    .Inputs({"slot_to_row", "row_to_slot", paddle::Grad("slots")})
    .Outputs({paddle::Grad("rows")})
    .SetKernelFn(PMO_KERNEL(rows_to_slots_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(rows_to_slots_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(values_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_rows_to_slots)
    .Inputs({"slot_to_row", "row_to_slot", paddle::Grad(paddle::Grad("rows"))})
    .Outputs({paddle::Grad(paddle::Grad("slots"))})
    .SetKernelFn(PMO_KERNEL(rows_to_slots_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(rows_to_slots_double_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(values_dtypes));
