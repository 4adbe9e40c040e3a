// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The one place that knows which device a tensor is on and which stream its kernels go to.
//
// Three builds: without PMO_WITH_CUDA there is the CPU alone. With it, NVIDIA GPUs are GPUPlace under a CUDA build of Paddle
// (PADDLE_WITH_CUDA), or the custom place "cuda_rig" of tools/gpu_rig under a CPU build of Paddle (PADDLE_WITH_CUSTOM_DEVICE).
#pragma once

#include <initializer_list>
#include <vector>

#include "paddle/extension.h"

namespace pmo {
namespace binding {

// False for tensors without elements that recompute by hooks unpacked: they have no memory, and `data()` throws.
bool has_place(const paddle::Tensor& tensor);

// Which GPU is the thread's current one.
class CurrentDevice {
 public:
  CurrentDevice() = default;
  // Goes back to the one before.
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  void set(int device, const char* function);

 private:
  int before_ = -1;  // if it was another
};

class Target {
 public:
  // The device that all tensors with elements are on. If none has elements, that of one with a place; if none has a place, the CPU. A GPU is
  // the thread's current one until the end of this object, for kernels go to the current one whatever their stream. Throws if tensors with
  // elements are on several devices or on one without kernels, and if a required one is undefined; optional ones may be null or undefined.
  Target(const char* function, std::initializer_list<const paddle::Tensor*> required,
         std::initializer_list<const paddle::Tensor*> optional = {});

  bool is_gpu() const { return is_gpu_; }
  void* stream() const { return stream_; }
  const paddle::Place& place() const { return place_; }

  // Tensors on the device: not written, and of zeros.
  paddle::Tensor empty(const std::vector<int64_t>& shape, paddle::DataType dtype) const {
    return paddle::empty(shape, dtype, place_);
  }
  paddle::Tensor empty_int32(const std::vector<int64_t>& shape) const { return empty(shape, paddle::DataType::INT32); }
  paddle::Tensor empty_float32(const std::vector<int64_t>& shape) const { return empty(shape, paddle::DataType::FLOAT32); }
  paddle::Tensor zeros(const std::vector<int64_t>& shape, paddle::DataType dtype) const;

  // On a GPU, contiguous rows at an odd address are copied: the order in which a dot product is added up follows the width of accesses,
  // and shall depend on shape and dtype alone.
  paddle::Tensor aligned(const paddle::Tensor& tensor) const;

  // Writes zeros to memory of the device, and copies from one place there to another.
  void clear(void* memory, int64_t bytes) const;
  void copy(const void* source, int64_t bytes, void* target) const;

  // Copies from the device to host memory and waits for it: on a GPU a synchronisation with the stream.
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

// The side stream of a group of ranks, for small kernels: it has the highest priority. Its work starts after all that the target's stream
// was given before `fork`, and the target's stream waits for it at `join`. Memory that its kernels use must live from fork to join.
// Groups have a stream each, since their barriers may be reached in another order on each rank. On a CPU everything runs at once.
class SideStream {
 public:
  // `group`: an address that is the group's own, such as that of its barrier's state.
  SideStream(const Target& target, const void* group);

  // The target's device with the side stream.
  const Target& target() const { return target_; }
  void fork() const;
  void join() const;

  // `mark` records how far the side stream is; `join_mark` waits for that alone. `join` must still follow.
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
