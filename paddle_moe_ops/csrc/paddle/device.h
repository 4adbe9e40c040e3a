// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Device of tensors and stream of their kernels.
//
// Three builds. Without PMO_WITH_CUDA: the CPU alone. With it, NVIDIA GPUs are GPUPlace under a CUDA build of Paddle
// (PADDLE_WITH_CUDA), or the custom place "cuda_rig" of tools/gpu_rig under a CPU build of Paddle (PADDLE_WITH_CUSTOM_DEVICE).
#pragma once

#include <initializer_list>
#include <vector>

#include "paddle/operator_api.h"

namespace pmo {
namespace binding {

// False for tensors without elements that recompute by hooks unpacked: they have no memory, and `data()` throws.
bool has_place(const paddle::Tensor& tensor);

// A scope in which another GPU is the thread's current one.
class CurrentDevice {
 public:
  CurrentDevice() = default;
  // Restores the previous current GPU.
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  void set(int device, const char* function);

 private:
  int before_ = -1;  // the previous GPU if it was another
};

class Target {
 public:
  // Chooses the device that all tensors with elements are on. If none has elements: the device of one with a place; if none has a
  // place: the CPU. A GPU is the thread's current one until the end of this object, because kernels launch on the current GPU
  // whatever their stream. Throws if tensors with elements are on several devices or on one without kernels, or if a required
  // tensor is undefined. Optional ones may be null or undefined.
  Target(const char* function, std::initializer_list<const paddle::Tensor*> required,
         std::initializer_list<const paddle::Tensor*> optional = {});

  bool is_gpu() const { return is_gpu_; }
  void* stream() const { return stream_; }
  const paddle::Place& place() const { return place_; }

  // Tensors on the device, uninitialised or zeros.
  paddle::Tensor empty(const std::vector<int64_t>& shape, paddle::DataType dtype) const {
    return paddle::empty(shape, dtype, place_);
  }
  paddle::Tensor empty_int32(const std::vector<int64_t>& shape) const { return empty(shape, paddle::DataType::INT32); }
  paddle::Tensor empty_float32(const std::vector<int64_t>& shape) const { return empty(shape, paddle::DataType::FLOAT32); }
  paddle::Tensor zeros(const std::vector<int64_t>& shape, paddle::DataType dtype) const;

  // Returns contiguous rows at an aligned address, on a GPU by a copy if necessary. The summation order of a dot product follows
  // the width of accesses, and must depend on shape and dtype alone.
  paddle::Tensor aligned(const paddle::Tensor& tensor) const;

  // Zero and copy memory of the device.
  void clear(void* memory, int64_t bytes) const;
  void copy(const void* source, int64_t bytes, void* target) const;

  // Copies from the device to host memory and waits for it: a synchronisation with the stream on a GPU.
  void copy_to_host(const void* source, int64_t bytes, void* target) const;

 private:
  friend class SideStream;
  Target(const Target& of, void* stream) : function_(of.function_), place_(of.place_), is_gpu_(of.is_gpu_), stream_(stream) {}

  const char* function_;
  paddle::Place place_ = paddle::CPUPlace();
  bool is_gpu_ = false;
  void* stream_ = nullptr;
  CurrentDevice current_device_;
};

struct GroupStream;

// The side stream of a group of ranks, for small kernels, with the highest priority. Its work starts after all work that was
// enqueued on the target's stream before `fork`; the target's stream waits for it at `join`. Memory that its kernels use must
// live from fork to join. Each group has its own stream, since ranks may reach the barriers of groups in different orders. On a
// CPU all calls run synchronously.
class SideStream {
 public:
  // `group`: an address unique to the group, such as that of its barrier's state.
  SideStream(const Target& target, const void* group);

  // The target's device with the side stream.
  const Target& target() const { return target_; }
  void fork() const;
  void join() const;

  // `mark` records an event on the side stream; `join_mark` waits for that event alone. `join` must still follow.
  void mark() const;
  void join_mark() const;

 private:
  const Target& main_;
  const GroupStream* stream_ = nullptr;  // none on a CPU
  Target target_;
};

}  // namespace binding
}  // namespace pmo

// Calls the operator's CPU or CUDA entry point.
#ifdef PMO_WITH_CUDA
#define PMO_CALL(target, name, ...) \
  ((target).is_gpu() ? pmo_##name##_cuda(__VA_ARGS__, (target).stream()) : pmo_##name##_cpu(__VA_ARGS__, nullptr))
#else
#define PMO_CALL(target, name, ...) pmo_##name##_cpu(__VA_ARGS__, nullptr)
#endif
