// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Host side of TMA: tensor maps, with 128-byte swizzle unless another is given, and the check for compute capability 9.0.
#pragma once

#include "cuda/driver.h"
#include "cuda/launch.h"

namespace pmo {
namespace cuda {

// Limits of the current device; an error unless it can run `kernel`.
inline int hopper_limits(const char* kernel, int* device, DeviceLimits* limits) {
  if (const int status = current_device(device, limits)) return status;
  if (limits->major == 9 && CUDART_VERSION >= 12000) return PMO_OK;
  return fail(PMO_INTERNAL,
              std::string("CUDA: ") + kernel + " needs compute capability 9.0 and a library built with CUDA 12 or newer");
}

// A tensor of up to three dimensions, innermost first, with the box of one TMA copy. strides[i] is the stride of dimension i + 1,
// in elements.
struct Tensor {
  const void* address;
  int rank;
  int64_t sizes[3];
  int64_t strides[2];
  int box[3];
};

// Encodes a tensor map; elements outside the tensor load as zeros. Returns a status.
inline int encode(const Tensor& tensor, CUtensorMapDataType type, int bytes, CUtensorMap* map,
                  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static const auto encoder = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  if (encoder == nullptr) return fail(PMO_INTERNAL, "CUDA: the driver has no cuTensorMapEncodeTiled");
  cuuint64_t sizes[3], strides[2];
  cuuint32_t box[3], steps[3];
  for (int i = 0; i < tensor.rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
    box[i] = static_cast<cuuint32_t>(tensor.box[i]);
    steps[i] = 1;
  }
  for (int i = 0; i + 1 < tensor.rank; ++i) strides[i] = static_cast<cuuint64_t>(tensor.strides[i]) * bytes;
  const CUresult result =
      encoder(map, type, static_cast<cuuint32_t>(tensor.rank), const_cast<void*>(tensor.address), sizes, strides, box, steps,
              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return fail(PMO_INTERNAL, "CUDA: cuTensorMapEncodeTiled: error " + std::to_string(result));
  return PMO_OK;
}

// The same for 16-bit elements.
inline int encode(const Tensor& tensor, bool is_bfloat16, CUtensorMap* map,
                  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  const CUtensorMapDataType type = is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(tensor, type, 2, map, promotion);
}

}  // namespace cuda
}  // namespace pmo
