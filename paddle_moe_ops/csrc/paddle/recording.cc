// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Repeats recorded calls of triton/recording.py without Python: memory for the results, addresses, launches.
//
// The GPU's driver is given by the addresses of its functions. So this needs no CUDA, and tests can run it without launching anything.
#include "paddle/python.h"

#ifndef PMO_PADDLE_2  // where tensors have no strides

#include <cstring>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

namespace pmo {
namespace binding {
namespace {

constexpr char kCapsule[] = "paddle_moe_ops recording";

// In the order of ITEM_BYTES in triton/launch/device.py.
constexpr paddle::DataType kDtypes[] = {
    paddle::DataType::FLOAT32,     paddle::DataType::FLOAT16, paddle::DataType::BFLOAT16, paddle::DataType::FLOAT8_E4M3FN,
    paddle::DataType::FLOAT8_E5M2, paddle::DataType::INT32,   paddle::DataType::INT64,    paddle::DataType::BOOL};

// Functions of CUDA's driver.
using CurrentContext = int (*)(void** context);
using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                             void** extra);
using ErrorText = int (*)(int status, const char** text);

// An address among a launch's parameters: its position, the array that it points into, and the offset there.
struct Place {
  int64_t position, array, offset;
};

struct Launch {
  int64_t function;
  unsigned programs, threads, shared_bytes;
  std::vector<int64_t> parameters;  // each at a multiple of its size, as in a struct
  std::vector<int64_t> positions;   // of each parameter, in bytes
  std::vector<Place> places;
};

struct Result {
  bool is_none;
  int64_t dtype;
  Shape shape;
};

struct Recording {
  int64_t current_context, launch_kernel, error_text;
  int64_t context;
  std::vector<Result> results;
  int64_t workspace_bytes;
  std::vector<int64_t> offsets;  // where arrays are in the workspace
  std::vector<Launch> launches;
};

template <typename Type>
Type at(int64_t address) {
  return reinterpret_cast<Type>(static_cast<uintptr_t>(address));
}

// Reads what triton/native_recording.py writes: 64-bit integers, and before each list its length.
class Reader {
 public:
  Reader(const char* bytes, Py_ssize_t size) : bytes_(bytes), count_(static_cast<size_t>(size) / sizeof(int64_t)) {}

  int64_t integer() {
    if (next_ >= count_) throw std::runtime_error("a recording ends too early");
    int64_t value;
    std::memcpy(&value, bytes_ + sizeof value * next_++, sizeof value);
    return value;
  }

  std::vector<int64_t> integers() {
    std::vector<int64_t> values(static_cast<size_t>(integer()));
    for (int64_t& value : values) value = integer();
    return values;
  }

 private:
  const char* bytes_;
  size_t count_, next_ = 0;
};

Launch read_launch(Reader& reader) {
  Launch launch;
  launch.function = reader.integer();
  launch.programs = static_cast<unsigned>(reader.integer());
  launch.threads = static_cast<unsigned>(reader.integer());
  launch.shared_bytes = static_cast<unsigned>(reader.integer());
  launch.parameters = reader.integers();
  launch.positions = reader.integers();
  launch.places.resize(static_cast<size_t>(reader.integer()));
  for (Place& place : launch.places) place = {reader.integer(), reader.integer(), reader.integer()};
  const auto bytes = static_cast<int64_t>(sizeof(int64_t) * launch.parameters.size());
  for (const int64_t position : launch.positions) expect(position >= 0 && position < bytes);
  for (const Place& place : launch.places) expect(place.position >= 0 && place.position <= bytes - 8);
  return launch;
}

std::unique_ptr<Recording> read_recording(Reader& reader) {
  auto recording = std::make_unique<Recording>();
  recording->current_context = reader.integer();
  recording->launch_kernel = reader.integer();
  recording->error_text = reader.integer();
  recording->context = reader.integer();
  recording->results.resize(static_cast<size_t>(reader.integer()));
  for (Result& result : recording->results) {
    result.dtype = reader.integer();
    result.is_none = result.dtype < 0;
    expect(result.dtype < static_cast<int64_t>(std::size(kDtypes)));
    if (!result.is_none) result.shape = reader.integers();
  }
  recording->workspace_bytes = reader.integer();
  recording->offsets = reader.integers();
  for (const int64_t offset : recording->offsets) expect(offset >= 0 && offset <= recording->workspace_bytes);
  recording->launches.resize(static_cast<size_t>(reader.integer()));
  for (Launch& launch : recording->launches) launch = read_launch(reader);
  return recording;
}

extern "C" void delete_recording(PyObject* capsule) { delete static_cast<Recording*>(PyCapsule_GetPointer(capsule, kCapsule)); }

// new_recording(bytes) -> capsule
PyObject* new_recording(PyObject* const* objects, Py_ssize_t count) {
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  expect(count == 1);
  if (PyBytes_AsStringAndSize(objects[0], &bytes, &size) != 0) return nullptr;
  Reader reader(bytes, size);
  std::unique_ptr<Recording> recording = read_recording(reader);
  PyObject* capsule = PyCapsule_New(recording.get(), kCapsule, delete_recording);
  if (capsule != nullptr) recording.release();
  return capsule;
}

void enqueue(const Recording& recording, const Launch& launch, const std::vector<int64_t>& starts, int64_t stream) {
  std::vector<int64_t> parameters = launch.parameters;
  char* bytes = reinterpret_cast<char*>(parameters.data());
  for (const Place& place : launch.places) {
    const int64_t address = starts.at(static_cast<size_t>(place.array)) + place.offset;
    std::memcpy(bytes + place.position, &address, sizeof address);
  }
  std::vector<void*> pointers;
  pointers.reserve(launch.positions.size());
  for (const int64_t position : launch.positions) pointers.push_back(bytes + position);
  const int status =
      at<LaunchKernel>(recording.launch_kernel)(at<void*>(launch.function), launch.programs, 1, 1, launch.threads, 1, 1,
                                                launch.shared_bytes, at<void*>(stream), pointers.data(), nullptr);
  if (status == 0) return;
  const char* text = nullptr;
  at<ErrorText>(recording.error_text)(status, &text);
  throw std::runtime_error(std::string("Triton Error [CUDA]: ") + (text == nullptr ? "unknown error" : text));
}

// Makes the results. False if launches of this thread would go to another device.
bool run(const Recording& recording, const Tensors& inputs, int64_t stream, Tensors* results) {
  void* context = nullptr;
  if (at<CurrentContext>(recording.current_context)(&context) != 0 || context != at<void*>(recording.context)) return false;
  std::vector<int64_t> starts;
  starts.reserve(inputs.size() + recording.results.size() + recording.offsets.size());
  const paddle::Tensor* like = nullptr;
  for (const paddle::Tensor& input : inputs) {
    if (like == nullptr && input.defined()) like = &input;
    starts.push_back(input.defined() ? address_of(input) : 0);
  }
  expect(like != nullptr);
  for (const Result& result : recording.results) {
    paddle::Tensor made;
    if (!result.is_none) made = paddle::empty(result.shape, kDtypes[result.dtype], like->place());
    starts.push_back(result.is_none ? 0 : address_of(made));
    results->push_back(std::move(made));
  }
  paddle::Tensor workspace;  // in use until all is enqueued; what is enqueued later waits for it
  if (recording.workspace_bytes > 0) {
    workspace = paddle::empty({recording.workspace_bytes / 4}, paddle::DataType::INT32, like->place());
    const int64_t start = address_of(workspace);
    for (const int64_t offset : recording.offsets) starts.push_back(start + offset);
  }
  for (const Launch& launch : recording.launches) enqueue(recording, launch, starts, stream);
  return true;
}

// repeat(recording, stream, *inputs) -> results, each a tensor or None; or None
PyObject* repeat(PyObject* const* objects, Py_ssize_t count) {
  expect(count >= 2);
  const auto* recording = static_cast<const Recording*>(PyCapsule_GetPointer(objects[0], kCapsule));
  if (recording == nullptr) return nullptr;
  const auto stream = static_cast<int64_t>(PyLong_AsUnsignedLongLong(objects[1]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  Tensors inputs(static_cast<size_t>(count) - 2), results;  // these own the tensors: other threads may change the objects
  for (Py_ssize_t i = 2; i < count; ++i) {
    if (objects[i] != Py_None) inputs[static_cast<size_t>(i) - 2] = paddle::pybind::CastPyArg2Tensor(objects[i], i);
  }
  bool is_done;
  {
    const WithoutPython released;
    is_done = run(*recording, inputs, stream, &results);
  }
  if (!is_done) return none();
  PyObject* list = PyTuple_New(static_cast<Py_ssize_t>(results.size()));
  for (size_t i = 0; list != nullptr && i < results.size(); ++i) {
    PyTuple_SetItem(list, static_cast<Py_ssize_t>(i),
                    recording->results[i].is_none ? none() : paddle::pybind::ToPyObject(results[i], false));
  }
  return list;
}

[[maybe_unused]] const bool are_announced = [] {
  python_functions().push_back({"_new_recording", for_python<new_recording>});
  python_functions().push_back({"_repeat", for_python<repeat>});
  return true;
}();

}  // namespace
}  // namespace binding
}  // namespace pmo

#endif
