// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Facts about tensors that Python code reads in every call (_native.py).
#include "paddle/python.h"

#ifndef PMO_PADDLE_2  // its tensors have no strides

namespace pmo {
namespace binding {
namespace {

// facts(*tensors) -> bytes with everything that launchers and checks read: dtypes, shapes, strides, alignments, places. None if
// one of them is not a dense tensor or has no memory
PyObject* facts(PyObject* const* objects, Py_ssize_t count) {
  std::vector<int64_t> words;
  words.reserve(static_cast<size_t>(count) * 7);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (objects[i] == Py_None) {
      words.push_back(-1);
      continue;
    }
    const bool is_tensor = paddle::pybind::PyCheckTensor(objects[i]);
    const paddle::Tensor* tensor = is_tensor ? &paddle::pybind::CastPyArg2Tensor(objects[i], i) : nullptr;
    if (tensor == nullptr || !tensor->is_dense_tensor() || !tensor->initialized()) return none();
    const common::DDim& sizes = tensor->dims();
    const common::DDim& strides = tensor->strides();
    words.push_back(sizes.size() | static_cast<int64_t>(tensor->dtype()) << 8 | (address_of(*tensor) & 15) << 16 |
                    static_cast<int64_t>(tensor->place().HashValue()) << 32);
    for (int axis = 0; axis < sizes.size(); ++axis) words.push_back(sizes[axis]);
    for (int axis = 0; axis < sizes.size(); ++axis) words.push_back(strides[axis]);
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.data()),
                                   static_cast<Py_ssize_t>(words.size() * sizeof words[0]));
}

// watch(*tensors) -> for each tensor a weak reference and its number of in-place changes
PyObject* watch(PyObject* const* objects, Py_ssize_t count) {
  PyObject* watched = PyTuple_New(2 * count);
  for (Py_ssize_t i = 0; watched != nullptr && i < count; ++i) {
    PyObject* reference = PyWeakref_NewRef(objects[i], nullptr);
    if (reference == nullptr) {
      Py_DECREF(watched);
      return nullptr;
    }
    const uint32_t version = paddle::pybind::CastPyArg2Tensor(objects[i], i).current_inplace_version();
    PyTuple_SetItem(watched, 2 * i, reference);
    PyTuple_SetItem(watched, 2 * i + 1, PyLong_FromUnsignedLong(version));
  }
  return watched;
}

// was_changed(result of watch) -> whether a tensor that still exists has changed since
PyObject* was_changed(PyObject* const* objects, Py_ssize_t count) {
  expect(count == 1 && PyTuple_Check(objects[0]));
  for (Py_ssize_t i = 0; i < PyTuple_Size(objects[0]); i += 2) {
    PyObject* tensor = PyWeakref_GetObject(PyTuple_GetItem(objects[0], i));
    if (tensor == nullptr) return nullptr;
    if (tensor == Py_None) continue;
    const uint32_t version = paddle::pybind::CastPyArg2Tensor(tensor, i).current_inplace_version();
    if (version != PyLong_AsUnsignedLong(PyTuple_GetItem(objects[0], i + 1))) return python_bool(true);
  }
  return python_bool(false);
}

// carries_graph(*values) -> whether one of them is a tensor that needs a gradient. None if a container would have to be searched
PyObject* carries_graph(PyObject* const* objects, Py_ssize_t count) {
  bool has_container = false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (paddle::pybind::PyCheckTensor(objects[i])) {
      if (!stops_gradient(objects[i])) return python_bool(true);
    } else {
      has_container |= PyTuple_Check(objects[i]) || PyList_Check(objects[i]) || PyDict_Check(objects[i]);
    }
  }
  return has_container ? none() : python_bool(false);
}

[[maybe_unused]] const bool are_announced = [] {
  python_functions().push_back({"_carries_graph", for_python<carries_graph>});
  python_functions().push_back({"_facts", for_python<facts>});
  python_functions().push_back({"_watch", for_python<watch>});
  python_functions().push_back({"_was_changed", for_python<was_changed>});
  return true;
}();

}  // namespace
}  // namespace binding
}  // namespace pmo

#endif
