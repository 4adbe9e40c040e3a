// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Vector accesses of up to 16 bytes to rows of any width, and conversion of elements to and from float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "common/dtypes.h"
#include "common/row_array.h"

namespace pmo {
namespace cuda {

// Type of a kBytes-byte access.
template <int kBytes>
struct AccessOf;
template <>
struct AccessOf<16> {
  using Type = uint4;
};
template <>
struct AccessOf<8> {
  using Type = uint2;
};
template <>
struct AccessOf<4> {
  using Type = uint32_t;
};
template <>
struct AccessOf<2> {
  using Type = uint16_t;
};
template <>
struct AccessOf<1> {
  using Type = uint8_t;
};
template <int kBytes>
using Vector = typename AccessOf<kBytes>::Type;

// Widest access, up to 16 bytes, that divides all addresses and lengths.
inline int widest_access(std::initializer_list<uintptr_t> values) {
  uintptr_t all = 16;
  for (const uintptr_t value : values) all |= value;
  int width = 16;
  while (all % width != 0) width /= 2;
  return width;
}

inline uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Widest access for the source lines of all tokens and for their rows.
inline int widest_access(const RowArray& array, int64_t num_tokens) {
  return widest_access({address(array.source), address(array.target), static_cast<uintptr_t>(array.row_bytes),
                        num_tokens > 1 ? static_cast<uintptr_t>(array.source_stride) : uintptr_t{0}});
}

// Returns body(std::integral_constant<int, width>()).
template <typename Body>
int with_width(int width, Body body) {
  switch (width) {
    case 16:
      return body(std::integral_constant<int, 16>());
    case 8:
      return body(std::integral_constant<int, 8>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 2:
      return body(std::integral_constant<int, 2>());
    default:
      return body(std::integral_constant<int, 1>());
  }
}

struct Float32Rows {
  using Element = float;
  static __device__ float load(float element) { return element; }
  static __device__ float store(float value) { return value; }
};

struct Float16Rows {
  using Element = __half;
  static __device__ float load(__half element) { return __half2float(element); }
  static __device__ __half store(float value) { return __float2half_rn(value); }
};

struct BFloat16Rows {
  using Element = __nv_bfloat16;
  static __device__ float load(__nv_bfloat16 element) { return __bfloat162float(element); }
  static __device__ __nv_bfloat16 store(float value) { return __float2bfloat16_rn(value); }
};

// Returns body(Rows()) for a dtype that is_sum_dtype accepts.
template <typename Body>
int with_rows(int32_t dtype, Body body) {
  return with_sum_dtype<Float32Rows, Float16Rows, BFloat16Rows>(dtype, body);
}

// Returns body(Rows(), elements per access) for the widest access that divides all of `values`. 0 elements: single elements are
// not aligned.
template <typename Body>
int with_rows(int32_t dtype, std::initializer_list<uintptr_t> values, Body body) {
  return with_rows(dtype, [&](auto rows) {
    return with_width(widest_access(values), [&](auto width) {
      constexpr int kWidth = decltype(width)::value / static_cast<int>(sizeof(typename decltype(rows)::Element));
      return body(rows, std::integral_constant<int, kWidth>());
    });
  });
}

// kWidth elements of a row as float32: one access.
template <typename Rows, int kWidth>
struct Elements {
  float values[kWidth];

  using Access = Vector<kWidth * sizeof(typename Rows::Element)>;

  __device__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = value;
  }

  // values = fma(addend, weight, values)
  __device__ void add(const Elements& addend, float weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = __fmaf_rn(addend.values[i], weight, values[i]);
  }

  __device__ Elements scaled(float weight) const {
    Elements product;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) product.values[i] = __fmul_rn(values[i], weight);
    return product;
  }

  // sum + the dot product with `other`, fma by fma in element order
  __device__ float dot(const Elements& other, float sum) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum = __fmaf_rn(values[i], other.values[i], sum);
    return sum;
  }

  __device__ void set(const Access& given) {
    typename Rows::Element elements[kWidth];
    memcpy(elements, &given, sizeof(given));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = Rows::load(elements[i]);
  }

  __device__ void store(void* row, int64_t vector) const {
    typename Rows::Element elements[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) elements[i] = Rows::store(values[i]);
    Access access;
    memcpy(&access, elements, sizeof(access));
    static_cast<Access*>(row)[vector] = access;
  }
};

}  // namespace cuda
}  // namespace pmo
