// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The Python module with the operators of paddle/direct.h.
#include "paddle/python.h"

#include <cstdlib>
#include <new>

#include "paddle/direct.h"

#ifndef PMO_PADDLE_2
#include "paddle/common/enforce.h"
#endif

namespace pmo {
namespace binding {

bool is_summed(const paddle::Tensor& rows) {
  const paddle::DataType dtype = rows.dtype();
  return dtype == paddle::DataType::FLOAT32 || dtype == paddle::DataType::BFLOAT16 || dtype == paddle::DataType::FLOAT16;
}

bool is_routemap(const paddle::Tensor& routemap) {
  const bool are_integers = routemap.dtype() == paddle::DataType::INT32 || routemap.dtype() == paddle::DataType::INT64;
  return are_integers && has_columns(routemap);
}

bool are_on_one_device(std::initializer_list<const paddle::Tensor*> tensors) {
  for (const paddle::Tensor* tensor : tensors) {
    if (tensor->place() != (*tensors.begin())->place()) return false;
  }
  return true;
}

std::vector<DirectOperator>& direct_operators() {
  static std::vector<DirectOperator> operators;
  return operators;
}

std::vector<PythonFunction>& python_functions() {
  static std::vector<PythonFunction> functions;
  return functions;
}

bool stops_gradient(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("stop_gradient");
  PyObject* stops = PyObject_GetAttr(tensor, name);
  Py_XDECREF(stops);  // True and False outlive it
  return stops == Py_True;
}

PyObject* python_exception() {
  try {
    throw;
#ifndef PMO_PADDLE_2
  } catch (const common::enforce::EnforceNotMet& error) {
    if (error.code() == common::ErrorCode::INVALID_ARGUMENT) return PyExc_ValueError;
    if (error.code() == common::ErrorCode::RESOURCE_EXHAUSTED) return PyExc_MemoryError;
    return PyExc_RuntimeError;
#endif
  } catch (const std::bad_alloc&) {
    return PyExc_MemoryError;
  } catch (const std::exception&) {
    return PyExc_RuntimeError;
  }
}

namespace {

DirectArgument read(PyObject* object) {
  DirectArgument argument;
  if (object == Py_None) return argument;
  if (paddle::pybind::PyCheckTensor(object)) {
    argument.kind = DirectArgument::kTensor;
    argument.tensor = paddle::pybind::CastPyArg2Tensor(object, 0);
  } else if (PyLong_Check(object)) {
    argument.kind = DirectArgument::kInteger;
    argument.integer = PyLong_AsLongLong(object);
    argument.number = static_cast<double>(argument.integer);
  } else if (PyFloat_Check(object)) {
    argument.kind = DirectArgument::kNumber;
    argument.number = PyFloat_AsDouble(object);
  } else {
    DirectArgument::expect(PyList_Check(object));
    const Py_ssize_t size = PyList_Size(object);
    const bool has_tensors = size > 0 && paddle::pybind::PyCheckTensor(PyList_GetItem(object, 0));
    argument.kind = has_tensors ? DirectArgument::kTensors : DirectArgument::kIntegers;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = PyList_GetItem(object, i);
      if (has_tensors) {
        DirectArgument::expect(paddle::pybind::PyCheckTensor(item));
        argument.tensors.push_back(paddle::pybind::CastPyArg2Tensor(item, 0));
        continue;
      }
      DirectArgument::expect(PyLong_CheckExact(item));  // subclasses would run Python code
      const long long integer = PyLong_AsLongLong(item);
      DirectArgument::expect(integer == static_cast<int>(integer));
      argument.integers.push_back(static_cast<int>(integer));
    }
  }
  DirectArgument::expect(PyErr_Occurred() == nullptr);  // the integers fit
  return argument;
}

using Arguments = std::vector<DirectArgument>;

Arguments read_all(const DirectOperator& callee, PyObject* const* objects, Py_ssize_t count) {
  require(count == static_cast<Py_ssize_t>(callee.num_arguments), callee.name, "the number of arguments is wrong");
  Arguments arguments;
  arguments.reserve(callee.num_arguments);
  for (Py_ssize_t i = 0; i < count; ++i) arguments.push_back(read(objects[i]));
  return arguments;
}

Outputs run(const DirectOperator& callee, const Arguments& arguments) {
  const WithoutPython released;
  return callee.run(arguments.data());
}

PyObject* results_of(const Outputs& outputs) {
  PyObject* results = PyTuple_New(static_cast<Py_ssize_t>(outputs.size()));
  for (size_t i = 0; results != nullptr && i < outputs.size(); ++i) {
    PyObject* const result = outputs[i].defined() ? paddle::pybind::ToPyObject(outputs[i], false) : none();
    PyTuple_SetItem(results, static_cast<Py_ssize_t>(i), result);
  }
  return results;
}

PyObject* call(const DirectOperator& callee, PyObject* const* objects, Py_ssize_t count) {
  return results_of(run(callee, read_all(callee, objects, count)));
}

// Python reads the values of environment variables.
bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] != 0;
}

// Returns the outputs; True if a gradient is needed and the arguments fit; None if Python must run its checks.
PyObject* call_quick(const DirectOperator& callee, PyObject* const* objects, Py_ssize_t count) {
  Outputs outputs;
  bool fits = false, needs_gradient = false;
  try {
    bool declines = is_set("PADDLE_MOE_OPS_BACKEND") || is_set("PADDLE_MOE_OPS_VALIDATE");
    for (Py_ssize_t i = 0; i < count && !declines; ++i) {
      if (paddle::pybind::PyCheckTensor(objects[i])) {
        needs_gradient |= !stops_gradient(objects[i]);
      } else {
        declines = !PyLong_CheckExact(objects[i]) && !PyList_Check(objects[i]);
      }
    }
    if (!declines) {
      const Arguments arguments = read_all(callee, objects, count);
      for (const DirectArgument& argument : arguments) {
        declines |= argument.kind == DirectArgument::kTensor && !argument.tensor.is_dense_tensor();
      }
      fits = !declines && callee.fits(arguments.data());
      if (fits && !needs_gradient) outputs = run(callee, arguments);
    }
  } catch (const std::exception&) {  // Python's checks report the error
  }
  PyErr_Clear();
  if (outputs.size() == 1) return paddle::pybind::ToPyObject(outputs[0], false);
  if (!outputs.empty()) return results_of(outputs);
  PyObject* answer = fits && needs_gradient ? Py_True : Py_None;
  Py_INCREF(answer);
  return answer;
}

extern "C" PyObject* call_from_python(PyObject* capsule, PyObject* const* objects, Py_ssize_t count) {
  try {
    const auto& callee = *static_cast<const DirectOperator*>(PyCapsule_GetPointer(capsule, nullptr));
    return callee.fits != nullptr ? call_quick(callee, objects, count) : call(callee, objects, count);
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(python_exception(), error.what());
    return nullptr;
  }
}

}  // namespace
}  // namespace binding
}  // namespace pmo

// The module's name is that of the library's file.
PyMODINIT_FUNC PyInit__C_pd_() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_pd_", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  static std::vector<PyMethodDef> methods;  // functions keep pointers to their definitions
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  const std::vector<pmo::binding::DirectOperator>& operators = pmo::binding::direct_operators();
  const std::vector<pmo::binding::PythonFunction>& functions = pmo::binding::python_functions();
  methods.reserve(operators.size() + functions.size());
  const auto add = [module](const char* name, pmo::binding::PyFunction call, PyObject* bound) {
    methods.push_back({name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr});
    PyObject* method = PyCFunction_NewEx(&methods.back(), bound, nullptr);
    return method != nullptr && PyModule_AddObject(module, name, method) == 0;
  };
  for (const pmo::binding::DirectOperator& each : operators) {
    PyObject* callee = PyCapsule_New(const_cast<pmo::binding::DirectOperator*>(&each), nullptr, nullptr);
    if (callee == nullptr) return nullptr;
    if (!add(each.name, pmo::binding::call_from_python, callee)) return nullptr;
  }
  for (const pmo::binding::PythonFunction& each : functions) {
    if (!add(each.name, each.call, nullptr)) return nullptr;
  }
  return module;
}
