// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The kernels that Paddle needs on every device, for "stub_rig": copies of strided tensors. It falls back to the CPU for others.
#include <cstring>
#include <vector>

#include "paddle/phi/core/kernel_registry.h"

namespace {

// Copies element by element; dimensions and strides by axis, in elements.
template <typename T>
void CopyStrided(const T* from, const int64_t* from_strides, T* to, const int64_t* to_strides, const int64_t* dims, int axes) {
  if (axes == 0) {
    *to = *from;
    return;
  }
  for (int64_t i = 0; i < dims[0]; ++i) {
    CopyStrided(from + i * from_strides[0], from_strides + 1, to + i * to_strides[0], to_strides + 1, dims + 1, axes - 1);
  }
}

template <typename T, typename Context>
void Contiguous(const Context& context, const phi::DenseTensor& in, phi::DenseTensor* out) {
  phi::DenseTensorMeta meta = in.meta();
  meta.strides = meta.calc_strides(in.dims());
  meta.offset = 0;
  out->set_meta(meta);
  T* to = context.template Alloc<T>(out);
  CopyStrided(in.data<T>(), in.strides().Get(), to, out->strides().Get(), in.dims().Get(), in.dims().size());
}

template <typename T, typename Context>
void StridedCopy(const Context&, const phi::DenseTensor& in, const std::vector<int64_t>& dims,
                 const std::vector<int64_t>& strides, int64_t offset, phi::DenseTensor* out) {
  phi::DenseTensorMeta meta = in.meta();
  meta.dims = common::make_ddim(dims);
  meta.strides = common::make_ddim(strides);
  meta.offset = offset;
  out->set_meta(meta);
  CopyStrided(in.data<T>(), in.strides().Get(), out->data<T>(), meta.strides.Get(), in.dims().Get(), in.dims().size());
}

}  // namespace

#define REGISTER(name, function)                                                                                           \
  PD_REGISTER_PLUGIN_KERNEL(name, stub_rig, ALL_LAYOUT, function, bool, uint8_t, int8_t, int16_t, int32_t, int64_t, float, \
                            double, phi::dtype::float16, phi::dtype::bfloat16, phi::dtype::float8_e4m3fn,                  \
                            phi::dtype::float8_e5m2) {}
REGISTER(contiguous, Contiguous)
REGISTER(strided_copy, StridedCopy)
