// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// sort_chunks: whole chunks of rows in another order. Two operators, with and without probabilities, because Paddle treats an
// optional input without elements as missing. A third one returns the map alone.
#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "pmo/sort_chunks.h"

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operator's own

constexpr char kFunction[] = "sort_chunks";
constexpr char kMapFunction[] = "chunk_sort_map";

PMO_ATTRIBUTES(Attributes, (int, checks, checks), (int64_t, hidden, hidden), (int, hidden_dtype, dtype));
PMO_ATTRIBUTES(AttributesWithProbs, (int, checks, checks), (int64_t, hidden, hidden), (int, hidden_dtype, dtype),
               (bool, need_x_grad, x_grad), (bool, need_probs_grad, prob_grad));
PMO_ATTRIBUTES(MapAttributes, (int64_t, buffer_size, buffer), (int, checks, checks));

// The sizes and the order of the chunks, and the params that describe them.
class Chunks {
 public:
  Chunks(const Target& target, const char* function, const paddle::Tensor& split_sizes, const paddle::Tensor& order, int checks)
      : target_(target), function_(function), split_sizes_(dense(split_sizes)), order_(dense(order)) {
    require_rank(split_sizes, 1, function, "split_sizes");
    require_shape(order, split_sizes.shape(), function, "order");
    params.struct_size = sizeof(params);
    params.num_chunks = split_sizes.shape()[0];
    params.split_sizes_kind = index_kind(split_sizes, function, "split_sizes");
    params.order_kind = index_kind(order, function, "order");
    params.split_sizes = split_sizes_.data();
    params.order = order_.data();
    params.checks = checks;
  }

  // Sum of the sizes; on a GPU a synchronisation.
  int64_t num_rows() const {
    const std::vector<int64_t> sizes = require_host_integers(target_, split_sizes_, function_, "split_sizes");
    int64_t rows = 0;
    for (const int64_t size : sizes) {
      require(size >= 0 && size <= INT32_MAX - rows, function_, "split_sizes must add up to less than 2^31");
      rows += size;
    }
    return rows;
  }

  void run() {
#ifdef PMO_WITH_CUDA
    if (target_.is_gpu()) {
      if (params.checks != 0) report();
      params.workspace_bytes = pmo_sort_chunks_cuda_workspace_bytes(&params);
    }
#endif
    paddle::Tensor workspace = target_.empty({params.workspace_bytes}, paddle::DataType::UINT8);
    params.workspace = workspace.data();
    check_status(PMO_CALL(target_, sort_chunks, &params), function_);
  }

  pmo_sort_chunks_params params = {};

 private:
  // Reports findings on a GPU; the CPU operator reports its own.
  void report() const {
    const std::vector<int64_t> sizes = require_host_integers(target_, split_sizes_, function_, "split_sizes");
    const std::vector<int64_t> order = require_host_integers(target_, order_, function_, "order");
    pmo_sort_chunks_params on_host = params;
    on_host.split_sizes = sizes.data();
    on_host.order = order.data();
    on_host.split_sizes_kind = on_host.order_kind = PMO_ROUTING_IDS64;
    check_status(pmo_sort_chunks_report(&on_host), function_);
  }

  const Target& target_;
  const char* function_;
  const paddle::Tensor split_sizes_, order_;
};

// Permutes rows, their probabilities, or both; a null pair is skipped.
void move_rows(const Target& target, Chunks* chunks, const paddle::Tensor* x, paddle::Tensor* out, const paddle::Tensor* probs,
               paddle::Tensor* probs_out, bool inverse) {
  pmo_sort_chunks_params& p = chunks->params;
  p.inverse = inverse;
  paddle::optional<Matrix> source;
  paddle::Tensor values;
  if (x != nullptr) {
    source = Matrix(*x);
    p.num_rows = x->shape()[0];
    p.hidden = x->shape()[1];
    p.dtype = dtype_of(*x, kFunction, "the rows");
    p.x = source->data;
    p.x_row_stride = source->row_stride;
    prepare_pages(target, *out);
    p.out = out->data();
  }
  if (probs != nullptr) {
    require_dtype(*probs, paddle::DataType::FLOAT32, kFunction, "the probabilities");
    values = dense(*probs);
    p.num_rows = values.numel();
    p.probs = values.data<float>();
    p.probs_out = probs_out->data<float>();
  }
  chunks->run();
}

template <typename RowAttributes>
Outputs sort_rows(const RowAttributes& a, const paddle::Tensor& x, const paddle::Tensor* probs, const paddle::Tensor& split_sizes,
                  const paddle::Tensor& order) {
  const Target target(kFunction, {&x, &split_sizes, &order}, {probs});
  require_rank(x, 2, kFunction, "x");
  require_described(x, a.hidden, a.hidden_dtype, kFunction);
  if (probs != nullptr) require_shape(*probs, {x.shape()[0]}, kFunction, "probs");
  Chunks chunks(target, kFunction, split_sizes, order, a.checks);
  paddle::Tensor out = target.empty(x.shape(), x.dtype());
  paddle::Tensor source_to_dest = target.empty_int32({x.shape()[0]});
  chunks.params.source_to_dest = source_to_dest.data<int32_t>();
  if (probs == nullptr) {
    move_rows(target, &chunks, &x, &out, nullptr, nullptr, false);
    return {out, source_to_dest};
  }
  paddle::Tensor probs_out = target.empty_float32(probs->shape());
  move_rows(target, &chunks, &x, &out, probs, &probs_out, false);
  return {out, probs_out, source_to_dest};
}

Outputs sort_chunks(const Attributes& a, const paddle::Tensor& x, const paddle::Tensor& split_sizes,
                    const paddle::Tensor& order) {
  return sort_rows(a, x, nullptr, split_sizes, order);
}

std::vector<Shape> sort_chunks_shapes(const Attributes&, const Shape& x, const Shape&, const Shape&) { return {x, {dim(x, 0)}}; }

std::vector<paddle::DataType> sort_chunks_dtypes(const paddle::DataType& x, const paddle::DataType&, const paddle::DataType&) {
  return {x, paddle::DataType::INT32};
}

Outputs sort_chunks_with_probs(const AttributesWithProbs& a, const paddle::Tensor& x, const paddle::Tensor& probs,
                               const paddle::Tensor& split_sizes, const paddle::Tensor& order) {
  require(probs.defined(), kFunction, "a required tensor is missing");
  return sort_rows(a, x, &probs, split_sizes, order);
}

std::vector<Shape> sort_chunks_with_probs_shapes(const AttributesWithProbs&, const Shape& x, const Shape& probs, const Shape&,
                                                 const Shape&) {
  return {x, probs, {dim(x, 0)}};
}

std::vector<paddle::DataType> sort_chunks_with_probs_dtypes(const paddle::DataType& x, const paddle::DataType&,
                                                            const paddle::DataType&, const paddle::DataType&) {
  return {x, paddle::DataType::FLOAT32, paddle::DataType::INT32};
}

// Permutes the gradients of a backward operator (inverse order), or of its own gradient (same order). The map is an input for the
// number of rows, which no other input has if the gradient of the rows is undefined. Gradients that are undefined or not needed
// are zeros.
Outputs move_gradients(const paddle::Tensor& split_sizes, const paddle::Tensor& order, const paddle::Tensor& source_to_dest,
                       const paddle::Tensor& d_out, const paddle::Tensor* d_probs_out, int64_t hidden, int hidden_dtype,
                       bool need_x_grad, bool need_probs_grad, bool inverse, const char* rows_name, const char* probs_name) {
  const Target target(kFunction, {&split_sizes, &order, &source_to_dest}, {&d_out, d_probs_out});
  const int64_t num_rows = source_to_dest.shape()[0];
  const auto dtype = static_cast<paddle::DataType>(hidden_dtype);
  require_gradient(d_out, {num_rows, hidden}, dtype, kFunction, rows_name);
  if (d_probs_out != nullptr) require_gradient(*d_probs_out, {num_rows}, paddle::DataType::FLOAT32, kFunction, probs_name);
  without_gradient({&split_sizes, &order, &source_to_dest});
  const bool moves_rows = need_x_grad && d_out.initialized();
  const bool moves_probs = need_probs_grad && d_probs_out != nullptr && d_probs_out->initialized();
  paddle::Tensor d_x =
      moves_rows ? target.empty(d_out.shape(), dtype) : target.zeros({num_rows, known_width(hidden, kFunction)}, dtype);
  paddle::Tensor d_probs = moves_probs ? target.empty_float32({num_rows}) : target.zeros({num_rows}, paddle::DataType::FLOAT32);
  if (moves_rows || moves_probs) {
    Chunks chunks(target, kFunction, split_sizes, order, 0);
    move_rows(target, &chunks, moves_rows ? &d_out : nullptr, &d_x, moves_probs ? d_probs_out : nullptr, &d_probs, inverse);
  }
  if (d_probs_out == nullptr) return {d_x};
  return {d_x, d_probs};
}

Outputs backward(const paddle::Tensor& split_sizes, const paddle::Tensor& order, const paddle::Tensor& source_to_dest,
                 const paddle::Tensor& d_out, const paddle::Tensor* d_probs_out, int64_t hidden, int hidden_dtype,
                 bool need_x_grad, bool need_probs_grad) {
  return move_gradients(split_sizes, order, source_to_dest, d_out, d_probs_out, hidden, hidden_dtype, need_x_grad,
                        need_probs_grad, true, "the gradient of the rows", "the gradient of the probabilities");
}

Outputs double_backward(const paddle::Tensor& split_sizes, const paddle::Tensor& order, const paddle::Tensor& source_to_dest,
                        const paddle::Tensor& dd_x, const paddle::Tensor* dd_probs, int64_t hidden, int hidden_dtype,
                        bool need_x_grad, bool need_probs_grad) {
  return move_gradients(split_sizes, order, source_to_dest, dd_x, dd_probs, hidden, hidden_dtype, need_x_grad, need_probs_grad,
                        false, "the gradient of the gradient of x", "the gradient of the gradient of probs");
}

Outputs sort_chunks_backward(const Attributes& a, const paddle::Tensor& split_sizes, const paddle::Tensor& order,
                             const paddle::Tensor& source_to_dest, const paddle::Tensor& d_out) {
  return backward(split_sizes, order, source_to_dest, d_out, nullptr, a.hidden, a.hidden_dtype, true, false);
}

std::vector<Shape> sort_chunks_backward_shapes(const Attributes& a, const Shape&, const Shape&, const Shape& source_to_dest,
                                               const Shape&) {
  return {{dim(source_to_dest, 0), a.hidden}};
}

std::vector<paddle::DataType> sort_chunks_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                          const paddle::DataType&, const paddle::DataType& d_out) {
  return {d_out};
}

Outputs sort_chunks_with_probs_backward(const AttributesWithProbs& a, const paddle::Tensor& split_sizes,
                                        const paddle::Tensor& order, const paddle::Tensor& source_to_dest,
                                        const paddle::Tensor& d_out, const paddle::Tensor& d_probs_out) {
  return backward(split_sizes, order, source_to_dest, d_out, &d_probs_out, a.hidden, a.hidden_dtype, a.need_x_grad,
                  a.need_probs_grad);
}

std::vector<Shape> sort_chunks_with_probs_backward_shapes(const AttributesWithProbs& a, const Shape&, const Shape&,
                                                          const Shape& source_to_dest, const Shape&, const Shape&) {
  return {{dim(source_to_dest, 0), a.hidden}, {dim(source_to_dest, 0)}};
}

std::vector<paddle::DataType> sort_chunks_with_probs_backward_dtypes(const paddle::DataType&, const paddle::DataType&,
                                                                     const paddle::DataType&, const paddle::DataType& d_out,
                                                                     const paddle::DataType&) {
  return {d_out, paddle::DataType::FLOAT32};
}

// A gradient and its own gradient have the same shapes and dtypes.
Outputs sort_chunks_double_backward(const Attributes& a, const paddle::Tensor& split_sizes, const paddle::Tensor& order,
                                    const paddle::Tensor& source_to_dest, const paddle::Tensor& dd_x) {
  return double_backward(split_sizes, order, source_to_dest, dd_x, nullptr, a.hidden, a.hidden_dtype, true, false);
}

Outputs sort_chunks_with_probs_double_backward(const AttributesWithProbs& a, const paddle::Tensor& split_sizes,
                                               const paddle::Tensor& order, const paddle::Tensor& source_to_dest,
                                               const paddle::Tensor& dd_x, const paddle::Tensor& dd_probs) {
  return double_backward(split_sizes, order, source_to_dest, dd_x, &dd_probs, a.hidden, a.hidden_dtype, a.need_x_grad,
                         a.need_probs_grad);
}

// The map alone; buffer_size -1: as many rows as the chunks have.
Outputs chunk_sort_map(const MapAttributes& a, const paddle::Tensor& split_sizes, const paddle::Tensor& order) {
  const Target target(kMapFunction, {&split_sizes, &order});
  Chunks chunks(target, kMapFunction, split_sizes, order, a.checks);
  require(a.buffer_size >= -1 && a.buffer_size <= INT32_MAX, kMapFunction,
          "the number of rows must be -1 (the chunks') or below 2^31");
  chunks.params.num_rows = a.buffer_size >= 0 ? a.buffer_size : chunks.num_rows();
  paddle::Tensor source_to_dest = target.empty_int32({chunks.params.num_rows});
  chunks.params.source_to_dest = source_to_dest.data<int32_t>();
  chunks.run();
  return {source_to_dest};
}

std::vector<Shape> chunk_sort_map_shapes(const MapAttributes& a, const Shape&, const Shape&) {
  return {{a.buffer_size >= 0 ? a.buffer_size : -1}};
}

std::vector<paddle::DataType> chunk_sort_map_dtypes(const paddle::DataType&, const paddle::DataType&) {
  return {paddle::DataType::INT32};
}

}  // namespace

PD_BUILD_OP(pmo_sort_chunks)
    .Inputs({"x", "split_sizes", "order"})
    .Outputs({"out", "source_to_dest"})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(sort_chunks))
    .SetInferShapeFn(PMO_INFER_SHAPE(sort_chunks_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(sort_chunks_dtypes));
PMO_DIRECT(sort_chunks, sort_chunks);

PD_BUILD_GRAD_OP(pmo_sort_chunks)
    .Inputs({"split_sizes", "order", "source_to_dest", paddle::Grad("out")})
    .Outputs({paddle::Grad("x")})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(sort_chunks_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(sort_chunks_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(sort_chunks_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_sort_chunks)
    .Inputs({"split_sizes", "order", "source_to_dest", paddle::Grad(paddle::Grad("x"))})
    .Outputs({paddle::Grad(paddle::Grad("out"))})
    .Attrs(Attributes::names())
    .SetKernelFn(PMO_KERNEL(sort_chunks_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(sort_chunks_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(sort_chunks_backward_dtypes));

PD_BUILD_OP(pmo_sort_chunks_with_probs)
    .Inputs({"x", "probs", "split_sizes", "order"})
    .Outputs({"out", "probs_out", "source_to_dest"})
    .Attrs(AttributesWithProbs::names())
    .SetKernelFn(PMO_KERNEL(sort_chunks_with_probs))
    .SetInferShapeFn(PMO_INFER_SHAPE(sort_chunks_with_probs_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(sort_chunks_with_probs_dtypes));
PMO_DIRECT(sort_chunks_with_probs, sort_chunks_with_probs);

PD_BUILD_GRAD_OP(pmo_sort_chunks_with_probs)
    .Inputs({"split_sizes", "order", "source_to_dest", paddle::Grad("out"), paddle::Grad("probs_out")})
    .Outputs({paddle::Grad("x"), paddle::Grad("probs")})
    .Attrs(AttributesWithProbs::names())
    .SetKernelFn(PMO_KERNEL(sort_chunks_with_probs_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(sort_chunks_with_probs_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(sort_chunks_with_probs_backward_dtypes));

PD_BUILD_DOUBLE_GRAD_OP(pmo_sort_chunks_with_probs)
    .Inputs({"split_sizes", "order", "source_to_dest", paddle::Grad(paddle::Grad("x")), paddle::Grad(paddle::Grad("probs"))})
    .Outputs({paddle::Grad(paddle::Grad("out")), paddle::Grad(paddle::Grad("probs_out"))})
    .Attrs(AttributesWithProbs::names())
    .SetKernelFn(PMO_KERNEL(sort_chunks_with_probs_double_backward))
    .SetInferShapeFn(PMO_INFER_SHAPE(sort_chunks_with_probs_backward_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(sort_chunks_with_probs_backward_dtypes));

PD_BUILD_OP(pmo_chunk_sort_map)
    .Inputs({"split_sizes", "order"})
    .Outputs({"source_to_dest"})
    .Attrs(MapAttributes::names())
    .SetKernelFn(PMO_KERNEL(chunk_sort_map))
    .SetInferShapeFn(PMO_INFER_SHAPE(chunk_sort_map_shapes))
    .SetInferDtypeFn(PMO_INFER_DTYPE(chunk_sort_map_dtypes));
PMO_DIRECT(chunk_sort_map, chunk_sort_map);
