// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The choices of pmo/layer.h for the current GPU.
#include <array>

#include "paddle/python.h"

#ifndef PMO_PADDLE_2  // whose module has no functions besides operators

#include "paddle/moe_mlp.h"

namespace pmo {
namespace binding {
namespace {

template <size_t kCount>
std::array<int64_t, kCount> integers(PyObject* const* objects) {
  std::array<int64_t, kCount> numbers;
  for (size_t i = 0; i < kCount; ++i) {
    numbers[i] = PyLong_AsLongLong(objects[i]);
    expect(PyErr_Occurred() == nullptr);
  }
  return numbers;
}

// layer_takes(x, M, E, d, n, float8 operands) -> whether the kernels run a layer of tokens like x
PyObject* layer_takes(PyObject* const* objects, Py_ssize_t count) {
  expect(count == 6 && paddle::pybind::PyCheckTensor(objects[0]));
  const paddle::Tensor& x = paddle::pybind::CastPyArg2Tensor(objects[0], 0);
  const auto [rows, experts, hidden, inner, float8] = integers<5>(objects + 1);
  const Target target(kMoeMlp, {&x});
  return python_bool(layer_has_kernels(target, x.dtype(), rows, experts, hidden, inner, float8 != 0));
}

// layer_plan(T, M, E, d, n, bytes of the chunk buffer, is a backward pass, pmo_layer_hidden, wants gradients of weights, float8
// operands, codes of the matrices are given, float8 operands of wgrads) -> row chunks, 0 if the GEMM gathers; columns of a chunk; bytes; tile rows of the GEMM
// that is summed
PyObject* layer_plan(PyObject* const* objects, Py_ssize_t count) {
  constexpr size_t kNumbers = 12;
  expect(count == kNumbers);
  const std::array<int64_t, kNumbers> numbers = integers<kNumbers>(objects);
  pmo_layer_facts f = {};
  f.struct_size = sizeof f;
  f.num_tokens = numbers[0];
  f.num_rows = numbers[1];
  f.num_experts = numbers[2];
  f.hidden = numbers[3];
  f.inner = numbers[4];
  f.workspace = numbers[5];
  f.backward = numbers[6] != 0;
  f.keeps_hidden = static_cast<int32_t>(numbers[7]);
  f.needs_d_weights = numbers[8] != 0;
  f.float8 = numbers[9] != 0;
  f.has_codes = numbers[10] != 0;
  f.float8_wgrads = f.backward != 0 && numbers[11] != 0;
  f.dtype = PMO_BFLOAT16;
#ifdef PMO_WITH_CUDA
  pmo_gpu_facts_cuda(&f.num_sms, &f.memory_gbps);
#endif
  pmo_layer_plan p;
  check_status(pmo_layer_plan_of(&f, &p), "explain");
  return Py_BuildValue("LLLi", static_cast<long long>(p.num_chunks), static_cast<long long>(p.chunk_columns),
                       static_cast<long long>(p.bytes), p.sum_tile_rows);
}

[[maybe_unused]] const bool is_announced = [] {
  python_functions().push_back({"_layer_takes", for_python<layer_takes>});
  python_functions().push_back({"_layer_plan", for_python<layer_plan>});
  return true;
}();

}  // namespace
}  // namespace binding
}  // namespace pmo

#endif
