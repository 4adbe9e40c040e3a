// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Helpers for files that use Python objects, through Python's limited API alone, so that a library also runs on later versions.
#pragma once

#ifndef PADDLE_NO_PYTHON
#define PADDLE_NO_PYTHON  // Paddle's headers would include pybind11, which needs the full API
#endif
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <vector>

#include "paddle/binding.h"

namespace paddle {
namespace pybind {  // declared as in paddle/utils/pybind.h, which includes pybind11

bool PyCheckTensor(PyObject* object);
paddle::Tensor& CastPyArg2Tensor(PyObject* object, Py_ssize_t place);
PyObject* ToPyObject(const paddle::Tensor& value, bool none_if_not_initialized);

}  // namespace pybind
}  // namespace paddle

namespace pmo {
namespace binding {

// A scope that releases Python's lock.
class WithoutPython {
 public:
  WithoutPython() : state_(PyEval_SaveThread()) {}
  ~WithoutPython() { PyEval_RestoreThread(state_); }
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;

 private:
  PyThreadState* state_;
};

// Python's exception type for the current C++ exception, as Paddle chooses it.
PyObject* python_exception();

using PyFunction = PyObject* (*)(PyObject* bound, PyObject* const* objects, Py_ssize_t count);

// Checks an argument of a function that is no operator and that only this package calls.
inline void expect(bool holds) {
  if (!holds) fail("an argument is not what the function takes");
}

// True if a tensor needs no gradient.
bool stops_gradient(PyObject* tensor);

inline PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

inline PyObject* python_bool(bool value) {
  PyObject* answer = value ? Py_True : Py_False;
  Py_INCREF(answer);
  return answer;
}

// Address of a tensor; 0 without memory.
inline int64_t address_of(const paddle::Tensor& tensor) {
  return tensor.initialized() ? static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data())) : 0;
}

// A function of the module that is no operator: its name begins with an underscore.
struct PythonFunction {
  const char* name;
  PyFunction call;
};

std::vector<PythonFunction>& python_functions();

// `kFunction` with Python's calling convention. It may throw, and returns null after a Python error.
template <PyObject* (*kFunction)(PyObject* const* objects, Py_ssize_t count)>
PyObject* for_python(PyObject*, PyObject* const* objects, Py_ssize_t count) {
  try {
    return kFunction(objects, count);
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(python_exception(), error.what());
    return nullptr;
  }
}

}  // namespace binding
}  // namespace pmo
