// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The choices of pmo/layer.h for the current GPU, for explain.
#include "paddle/python.h"

#ifndef PMO_PADDLE_2  // whose module has no functions besides operators

#include "pmo/layer.h"

namespace pmo {
namespace binding {
namespace {

// layer_plan(T, M, E, d, n, bytes of the chunk buffer, is a backward pass, keeps H, wants gradients of weights) -> row chunks, 0 if
// the GEMM gathers; columns of a chunk; bytes; tile rows of the GEMM that is summed
PyObject* layer_plan(PyObject* const* objects, Py_ssize_t count) {
  expect(count == 9);
  int64_t numbers[9];
  for (Py_ssize_t i = 0; i < count; ++i) {
    numbers[i] = PyLong_AsLongLong(objects[i]);
    expect(PyErr_Occurred() == nullptr);
  }
  pmo_layer_facts f = {};
  f.struct_size = sizeof f;
  f.num_tokens = numbers[0];
  f.num_rows = numbers[1];
  f.num_experts = numbers[2];
  f.hidden = numbers[3];
  f.inner = numbers[4];
  f.workspace = numbers[5];
  f.backward = numbers[6] != 0;
  f.keeps_hidden = numbers[7] != 0;
  f.needs_d_weights = numbers[8] != 0;
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
  python_functions().push_back({"_layer_plan", for_python<layer_plan>});
  return true;
}();

}  // namespace
}  // namespace binding
}  // namespace pmo

#endif
