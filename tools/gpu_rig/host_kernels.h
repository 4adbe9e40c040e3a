// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// A kernel for the custom device from a CPU kernel of Paddle: copies inputs to the host, runs the CPU kernel, copies outputs
// back. If the device has a kernel of its own for the arguments, that one runs instead.
//
// Copies move whole memory blocks of tensors, once per call; an image on the host has the block's size. So strides, offsets,
// views and outputs that share memory with an input are the same on both sides, and need no code of their own.
//
// Paddle's CPU has no float16 or bfloat16 form of some kernels (`add`, `matmul`). The float32 form computes those, and its result
// is rounded once, like that of a GPU kernel.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/common/memory_utils.h"
#include "paddle/phi/core/kernel_registry.h"

namespace rig {

// The device's own kernel of a name, null if there is none: a function of the kernel's arguments that returns false for
// arguments that it does not take. Weak: plug-ins may have none at all.
__attribute__((weak)) void* FindDeviceKernel(const char* name);

inline void Check(C_Status status) {
  if (status != C_SUCCESS) PADDLE_THROW(common::errors::External("%s: a copy to or from the host failed", kDeviceType));
}

inline phi::KernelKey CpuKey(phi::DataType dtype) { return {phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, dtype}; }

// The CPU kernel of a name and dtype; null if Paddle has none.
inline const phi::Kernel* FindCpuKernel(const char* name, phi::DataType dtype) {
  const auto& kernels = phi::KernelFactory::Instance().kernels();
  const auto found = kernels.find(name);
  if (found == kernels.end()) return nullptr;
  const auto kernel = found->second.find(CpuKey(dtype));
  return kernel == found->second.end() ? nullptr : &kernel->second;
}

inline const phi::CPUContext& CpuContext() {
  return *static_cast<const phi::CPUContext*>(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()));
}

inline void Cast(const phi::DenseTensor& from, phi::DenseTensor* to, phi::DataType dtype) {
  using Function = void (*)(const phi::CPUContext&, const phi::DenseTensor&, phi::DataType, phi::DenseTensor*);
  FindCpuKernel("cast", from.dtype())->GetVariadicKernelFn<Function>()(CpuContext(), from, dtype, to);
}

// The host side of one kernel call. Tensors of the dtype `widened` are float32 for the CPU kernel; UNDEFINED: no tensor is
// widened.
class HostCall {
 public:
  HostCall(const phi::CustomContext& context, phi::DataType widened, bool writes)
      : context_(context), widened_(widened), writes_(writes) {}

  // ---- argument of the CPU kernel for an argument of the device kernel

  const phi::DenseTensor& Argument(const phi::DenseTensor& tensor) { return *Input(tensor); }

  paddle::optional<phi::DenseTensor> Argument(const paddle::optional<phi::DenseTensor>& tensor) {
    if (tensor) return *Input(*tensor);
    return paddle::none;
  }

  // The tensors are DenseTensor, or TensorBase, which may be another type in other programs.
  template <typename Tensor>
  std::vector<const Tensor*> Argument(const std::vector<const Tensor*>& tensors) {
    std::vector<const Tensor*> images;
    for (const Tensor* tensor : tensors) {
      if (tensor == nullptr || phi::DenseTensor::classof(tensor)) {
        images.push_back(tensor == nullptr ? nullptr : Input(*static_cast<const phi::DenseTensor*>(tensor)));
      } else {
        PADDLE_THROW(common::errors::Unimplemented("%s: tensors must be dense", kDeviceType));
      }
    }
    return images;
  }

  phi::DenseTensor* Argument(phi::DenseTensor* output) {
    if (output == nullptr) return nullptr;
    phi::DenseTensor* image = Image(*output);
    phi::DenseTensor* computed = image->dtype() == widened_ ? Widened(*image) : image;
    outputs_.push_back({output, image, computed});
    return computed;
  }

  std::vector<phi::DenseTensor*> Argument(const std::vector<phi::DenseTensor*>& outputs) {
    std::vector<phi::DenseTensor*> images;
    for (phi::DenseTensor* output : outputs) images.push_back(Argument(output));
    return images;
  }

  template <typename Attribute>
  const Attribute& Argument(const Attribute& attribute) {
    return attribute;
  }

  // Copies the outputs of the CPU kernel to the device.
  void ReturnOutputs() {
    for (const Output& output : outputs_) {
      if (output.computed != output.image && output.computed->has_allocation()) {
        output.image->Resize(output.computed->dims());
        Cast(*output.computed, output.image, widened_);
      }
      Return(*output.image, output.tensor);
    }
  }

 private:
  using Block = std::shared_ptr<phi::Allocation>;

  struct Output {
    phi::DenseTensor* tensor;    // on the device
    phi::DenseTensor* image;     // on the host
    phi::DenseTensor* computed;  // output of the CPU kernel: the image, or its float32 form
  };

  const phi::DenseTensor* Input(const phi::DenseTensor& tensor) {
    phi::DenseTensor* image = Image(tensor);
    if (!image->has_allocation() && image->numel() == 0) {  // some kernels read the address nevertheless
      image->ResetHolder(phi::memory_utils::AllocShared(phi::CPUPlace(), 64));
    }
    if (image->dtype() != widened_ || !HasValues(*image)) return image;
    phi::DenseTensor* wide = Widened(*image);
    Cast(*image, wide, phi::DataType::FLOAT32);
    return wide;
  }

  // False for some inputs of gradients: Paddle keeps only their shape, with a block of no bytes.
  static bool HasValues(const phi::DenseTensor& tensor) {
    return tensor.has_allocation() && (tensor.numel() == 0 || tensor.Holder()->size() > 0);
  }

  // A float32 tensor of the shape, without memory.
  phi::DenseTensor* Widened(const phi::DenseTensor& image) {
    images_.emplace_back(Block(), phi::DenseTensorMeta(phi::DataType::FLOAT32, image.dims(), image.layout()));
    return &images_.back();
  }

  // Returns the tensor with the same strides and offset in the block's image. An input in host memory stays there; Return
  // replaces such an output.
  phi::DenseTensor* Image(const phi::DenseTensor& tensor) {
    Block block = tensor.Holder();
    if (block != nullptr && block->place() == context_.GetPlace()) block = ImageOf(block);
    images_.emplace_back(block, tensor.meta());
    return &images_.back();
  }

  Block ImageOf(const Block& device) {
    Block& image = device_to_host_[device];
    if (image == nullptr) {
      image = phi::memory_utils::AllocShared(phi::CPUPlace(), device->size());
      Check(CopyToHost(image->ptr(), device->ptr(), device->size(), context_.stream()));
      host_to_device_[image] = device;
    }
    return image;
  }

  void Return(const phi::DenseTensor& image, phi::DenseTensor* output) {
    const Block& host = image.Holder();
    if (host == nullptr) return;
    Block& device = host_to_device_[host];
    if (device == nullptr) {  // the kernel allocated it
      device = phi::memory_utils::AllocShared(context_.GetPlace(), host->size(), phi::Stream(StreamId()));
    }
    if (writes_) Check(CopyToDevice(device->ptr(), host->ptr(), host->size(), context_.stream()));
    output->clear();
    output->set_meta(image.meta());
    output->ResetHolder(device);
  }

  phi::StreamId StreamId() const { return reinterpret_cast<phi::StreamId>(context_.stream()); }

  const phi::CustomContext& context_;
  const phi::DataType widened_;
  const bool writes_;
  std::deque<phi::DenseTensor> images_;  // a deque keeps their addresses
  std::vector<Output> outputs_;
  std::map<Block, Block> device_to_host_, host_to_device_;
};

// The CPU kernel that computes a kernel of the device, and the dtype that it computes in float32, if there is one.
struct HostForm {
  const phi::Kernel* kernel;  // null if there is none
  phi::DataType widened;
  bool writes;  // false: it only allocates, and nothing is copied

  static HostForm Find(const char* name, phi::DataType dtype) {
    const phi::Kernel* kernel = FindCpuKernel(name, dtype);
    const bool narrow = dtype == phi::DataType::FLOAT16 || dtype == phi::DataType::BFLOAT16;
    const bool writes = std::string(name) != "empty";
    if (kernel != nullptr || !narrow) return {kernel, phi::DataType::UNDEFINED, writes};
    return {FindCpuKernel(name, phi::DataType::FLOAT32), dtype, writes};
  }
};

// One kernel of the device; the first call looks up how it is computed.
struct DeviceKernel {
  const char* name;
  phi::DataType dtype;
  std::once_flag looked_up{};
  HostForm form{};
  void* own = nullptr;

  constexpr DeviceKernel(const char* name, phi::DataType dtype) : name(name), dtype(dtype) {}

  void LookUp() {
    std::call_once(looked_up, [this] {
      form = HostForm::Find(name, dtype);
      if (FindDeviceKernel != nullptr) own = FindDeviceKernel(name);
    });
  }
};

// Code that all kernels of one type share, so that it is compiled once; Function is `void(const phi::CPUContext&, ...)`.
template <typename Function>
struct HostFunction;

template <typename... Arguments>
struct HostFunction<void (*)(const phi::CPUContext&, Arguments...)> {
  using CpuFunction = void (*)(const phi::CPUContext&, Arguments...);
  using OwnFunction = bool (*)(const phi::DeviceContext&, Arguments...);

  static void Run(DeviceKernel& kernel, const phi::DeviceContext& context, Arguments... arguments) {
    kernel.LookUp();
    if (kernel.own != nullptr && reinterpret_cast<OwnFunction>(kernel.own)(context, arguments...)) return;
    RunOnHost(kernel.form, static_cast<const phi::CustomContext&>(context), arguments...);
  }

  // Entry point for Paddle's executor, which passes the arguments in a phi::KernelContext.
  static void RunInProgram(DeviceKernel& kernel, phi::KernelContext* context) {
    kernel.LookUp();
    called = &kernel.form;
    phi::KernelImpl<decltype(&RunCalled), &RunCalled>::Compute(context);
  }

  static phi::KernelArgsDef Declared() {
    phi::KernelArgsDef declared;
    phi::KernelArgsParseFunctor<CpuFunction>::Parse(CpuKey(phi::DataType::FLOAT32), &declared);
    return declared;
  }

 private:
  static void RunOnHost(const HostForm& form, const phi::CustomContext& context, Arguments... arguments) {
    HostCall call(context, form.widened, form.writes);
    form.kernel->GetVariadicKernelFn<CpuFunction>()(CpuContext(), call.Argument(arguments)...);
    call.ReturnOutputs();
  }
  static void RunCalled(const phi::CustomContext& context, Arguments... arguments) { RunOnHost(*called, context, arguments...); }
  static thread_local const HostForm* called;
};

template <typename... Arguments>
thread_local const HostForm* HostFunction<void (*)(const phi::CPUContext&, Arguments...)>::called = nullptr;

// Entry points of one kernel of the device; Name::kText is its name. There are thousands, so they contain one call each.
template <typename Name, phi::DataType dtype, typename Function>
struct HostKernel;

template <typename Name, phi::DataType dtype, typename... Arguments>
struct HostKernel<Name, dtype, void (*)(const phi::CPUContext&, Arguments...)> {
  using Shared = HostFunction<void (*)(const phi::CPUContext&, Arguments...)>;
  static inline DeviceKernel kernel{Name::kText, dtype};

  static void Run(const phi::DeviceContext& context, Arguments... arguments) { Shared::Run(kernel, context, arguments...); }
  static void RunInProgram(phi::KernelContext* context) { Shared::RunInProgram(kernel, context); }
};

// Throws if the kernel of that name has other arguments than the declaration in the table.
inline void CheckArguments(const char* name, const phi::KernelArgsDef& declared, const phi::KernelArgsDef& registered) {
  const auto same = [](const auto& left, const auto& right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                      [](const auto& a, const auto& b) { return a.type_index == b.type_index; });
  };
  if (same(declared.input_defs(), registered.input_defs()) && same(declared.output_defs(), registered.output_defs()) &&
      same(declared.attribute_defs(), registered.attribute_defs())) {
    return;
  }
  PADDLE_THROW(common::errors::InvalidArgument("%s: the kernel `%s` has other arguments than declared", kDeviceType, name));
}

inline void Register(const char* name, phi::DataType dtype, const phi::KernelArgsDef& declared, phi::KernelFn run_in_program,
                     void* run) {
  const HostForm form = HostForm::Find(name, dtype);
  if (form.kernel == nullptr) return;
  CheckArguments(name, declared, form.kernel->args_def());
  phi::Kernel kernel(run_in_program, run);
  const phi::Backend backend = paddle::experimental::StringToBackend(kDeviceType);
  *kernel.mutable_args_def() = form.kernel->args_def();
  const auto move = [&](phi::TensorArgDef& tensor) {
    if (tensor.backend == phi::Backend::CPU) tensor.SetBackend(backend);
    if (form.widened == dtype && tensor.dtype == phi::DataType::FLOAT32) tensor.SetDataType(dtype);
  };
  for (auto& input : kernel.mutable_args_def()->input_defs()) move(input);
  for (auto& output : kernel.mutable_args_def()->output_defs()) move(output);
  const phi::KernelKey key(backend, phi::DataLayout::ALL_LAYOUT, dtype);
  phi::CustomKernelMap::Instance().RegisterCustomKernel(name, key, kernel);
}

// Registers the kernel for every dtype that its CPU kernel has.
template <typename Name, typename Function, phi::DataType... dtypes>
void RegisterAll() {
  const phi::KernelArgsDef declared = HostFunction<Function>::Declared();
  (Register(Name::kText, dtypes, declared, HostKernel<Name, dtypes, Function>::RunInProgram,
            reinterpret_cast<void*>(HostKernel<Name, dtypes, Function>::Run)),
   ...);
}

}  // namespace rig
