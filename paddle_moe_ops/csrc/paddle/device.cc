// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/device.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "paddle/binding.h"

#ifdef PMO_WITH_CUDA
#include <cuda_runtime.h>
#if defined(PADDLE_WITH_CUSTOM_DEVICE) && !defined(PADDLE_WITH_CUDA)
#include "paddle/phi/backends/all_context.h"
#include "paddle/phi/backends/context_pool.h"
#elif !defined(PADDLE_WITH_CUDA)
#error "PMO_WITH_CUDA needs PADDLE_WITH_CUDA or PADDLE_WITH_CUSTOM_DEVICE: how else would a tensor be on a GPU?"
#endif
#endif

namespace pmo {
namespace binding {
namespace {

#if !defined(PMO_WITH_CUDA)

constexpr char kDevices[] = "in CPU memory (this build has no GPU operators)";

bool is_nvidia_gpu(const paddle::Tensor&) { return false; }
void* stream_of(const paddle::Tensor&) { return nullptr; }

#elif defined(PADDLE_WITH_CUDA)

constexpr char kDevices[] = "in CPU memory or on an NVIDIA GPU";

bool is_nvidia_gpu(const paddle::Tensor& tensor) { return tensor.is_gpu(); }
void* stream_of(const paddle::Tensor& tensor) { return tensor.stream(); }

#else

constexpr char kDevices[] = "in CPU memory or on cuda_rig";

bool is_nvidia_gpu(const paddle::Tensor& tensor) {
  return tensor.is_custom_device() && tensor.place().GetDeviceType() == "cuda_rig";
}

void* stream_of(const paddle::Tensor& tensor) {
  const auto* context = static_cast<const phi::CustomContext*>(phi::DeviceContextPool::Instance().Get(tensor.place()));
  return context->stream();
}

#endif

// Zeros replace missing gradients, so they are hardly ever read. Pages released by madvise read as zeros, and cost nothing until
// they are read.
void fill_with_zeros(char* data, size_t bytes) {
#ifdef __linux__
  constexpr size_t kManyBytes = size_t{1} << 20;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t head = -reinterpret_cast<uintptr_t>(data) % page;
  const size_t whole = bytes < kManyBytes ? 0 : (bytes - head) / page * page;
  if (whole > 0 && madvise(data + head, whole, MADV_DONTNEED) == 0) {
    std::memset(data, 0, head);
    std::memset(data + head + whole, 0, bytes - head - whole);
    return;
  }
#endif
  std::memset(data, 0, bytes);
}

#ifdef PMO_WITH_CUDA
void check_cuda(cudaError_t error, const char* function) {
  if (error != cudaSuccess) fail_internally(std::string(function) + ": CUDA: " + cudaGetErrorString(error));
}

#endif

}  // namespace

bool has_place(const paddle::Tensor& tensor) {
#ifdef PMO_PADDLE_2
  return tensor.initialized();
#else
  return tensor.has_allocation() && tensor.place().GetType() != phi::AllocationType::UNDEFINED;
#endif
}

CurrentDevice::~CurrentDevice() {
#ifdef PMO_WITH_CUDA
  if (before_ >= 0) cudaSetDevice(before_);
#endif
}

void CurrentDevice::set([[maybe_unused]] int device, [[maybe_unused]] const char* function) {
#ifdef PMO_WITH_CUDA
  int current = -1;
  check_cuda(cudaGetDevice(&current), function);
  if (current == device) return;
  check_cuda(cudaSetDevice(device), function);
  before_ = current;
#endif
}

Target::Target(const char* function, std::initializer_list<const paddle::Tensor*> required,
               std::initializer_list<const paddle::Tensor*> optional)
    : function_(function) {
  const paddle::Tensor *first = nullptr, *without_elements = nullptr;
  const auto visit = [&](const paddle::Tensor* tensor) {
    if (!has_place(*tensor)) return;
    if (tensor->numel() == 0) {  // it may be on the host
      without_elements = tensor;
      return;
    }
    if (first == nullptr) first = tensor;
    require(tensor->place() == first->place(), function, "all tensors must be on one device");
  };
  for (const paddle::Tensor* tensor : required) {
    require(tensor->defined(), function, "a required tensor is missing");
    visit(tensor);
  }
  for (const paddle::Tensor* tensor : optional) {
    if (tensor != nullptr && tensor->defined()) visit(tensor);
  }
  if (first == nullptr) first = without_elements;
  if (first == nullptr) return;
  place_ = first->place();
  is_gpu_ = is_nvidia_gpu(*first);
  if (!is_gpu_ && !first->is_cpu()) fail(std::string(function) + ": every tensor must be " + kDevices);
  if (!is_gpu_) return;
  current_device_.set(place_.GetDeviceId(), function);
  stream_ = stream_of(*first);  // GPUPlace: the stream of the current device
}

#ifdef PMO_WITH_CUDA
// A stream that lives until the process ends; a later group with the same address reuses it.
struct GroupStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr, mark = nullptr;  // another thread's mark is later on the same stream
  mutable std::mutex mutex;                     // held while the event is in use

  // Enqueues a wait of stream `waits` for the work of `works` so far. The event may be recorded again once the wait is enqueued.
  void wait(cudaStream_t waits, cudaStream_t works, const char* function) const {
    const std::lock_guard<std::mutex> lock(mutex);
    check_cuda(cudaEventRecord(event, works), function);
    check_cuda(cudaStreamWaitEvent(waits, event, 0), function);
  }
};

namespace {

// The group's stream on the current device.
const GroupStream* stream_of_group(const void* group, const char* function) {
  static std::mutex mutex;
  static std::unordered_map<const void*, GroupStream> of_groups;  // addresses of its elements are stable
  const std::lock_guard<std::mutex> lock(mutex);
  GroupStream& group_stream = of_groups[group];
  if (group_stream.event == nullptr) {
    int lowest = 0, highest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), function);
    if (group_stream.stream == nullptr) {
      check_cuda(cudaStreamCreateWithPriority(&group_stream.stream, cudaStreamNonBlocking, highest), function);
    }
    if (group_stream.mark == nullptr) check_cuda(cudaEventCreateWithFlags(&group_stream.mark, cudaEventDisableTiming), function);
    check_cuda(cudaEventCreateWithFlags(&group_stream.event, cudaEventDisableTiming), function);
  }
  return &group_stream;
}

}  // namespace

SideStream::SideStream(const Target& target, const void* group)
    : main_(target),
      stream_(target.is_gpu_ ? stream_of_group(group, target.function_) : nullptr),
      target_(target, stream_ == nullptr ? target.stream_ : stream_->stream) {}

void SideStream::fork() const {
  if (stream_ != nullptr) stream_->wait(stream_->stream, static_cast<cudaStream_t>(main_.stream_), main_.function_);
}

void SideStream::join() const {
  if (stream_ != nullptr) stream_->wait(static_cast<cudaStream_t>(main_.stream_), stream_->stream, main_.function_);
}

void SideStream::mark() const {
  if (stream_ != nullptr) check_cuda(cudaEventRecord(stream_->mark, stream_->stream), main_.function_);
}

void SideStream::join_mark() const {
  if (stream_ == nullptr) return;
  check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(main_.stream_), stream_->mark, 0), main_.function_);
}
#else
SideStream::SideStream(const Target& target, const void*) : main_(target), target_(target, target.stream_) {}
void SideStream::fork() const {}
void SideStream::join() const {}
void SideStream::mark() const {}
void SideStream::join_mark() const {}
#endif

paddle::Tensor Target::zeros(const std::vector<int64_t>& shape, paddle::DataType dtype) const {
  paddle::Tensor tensor = empty(shape, dtype);
  const size_t bytes = static_cast<size_t>(tensor.numel()) * phi::SizeOf(dtype);
  if (bytes == 0) return tensor;
  if (is_gpu_) {
    clear(tensor.data(), static_cast<int64_t>(bytes));
  } else {
    fill_with_zeros(static_cast<char*>(tensor.data()), bytes);
  }
  return tensor;
}

void Target::clear(void* memory, int64_t bytes) const {
#ifdef PMO_WITH_CUDA
  if (is_gpu_) {
    check_cuda(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream_)), function_);
    return;
  }
#endif
  std::memset(memory, 0, static_cast<size_t>(bytes));
}

void Target::copy(const void* source, int64_t bytes, void* target) const {
#ifdef PMO_WITH_CUDA
  if (is_gpu_) {
    const auto stream = static_cast<cudaStream_t>(stream_);
    check_cuda(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream), function_);
    return;
  }
#endif
  std::memcpy(target, source, static_cast<size_t>(bytes));
}

void Target::copy_to_host(const void* source, int64_t bytes, void* target) const {
  if (bytes == 0) return;
#ifdef PMO_WITH_CUDA
  if (is_gpu_) {
    const auto stream = static_cast<cudaStream_t>(stream_);
    check_cuda(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream), function_);
    check_cuda(cudaStreamSynchronize(stream), function_);
    return;
  }
#endif
  std::memcpy(target, source, static_cast<size_t>(bytes));
}

#ifdef PMO_WITH_CUDA
paddle::Tensor Target::aligned(const paddle::Tensor& tensor) const {
  constexpr uintptr_t kWidestAccess = 16;
  if (!is_gpu_ || reinterpret_cast<uintptr_t>(tensor.data()) % kWidestAccess == 0) return tensor;
  paddle::Tensor copy = empty(tensor.shape(), tensor.dtype());
  this->copy(tensor.data(), tensor.numel() * static_cast<int64_t>(phi::SizeOf(tensor.dtype())), copy.data());
  return copy;
}
#else
paddle::Tensor Target::aligned(const paddle::Tensor& tensor) const { return tensor; }
#endif

}  // namespace binding
}  // namespace pmo
