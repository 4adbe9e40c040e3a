// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Values of int8 and int4 codes in registers: code * scale, rounded once to 16 bits, two at a time.
//
// In an element of T whose upper bits are 0, the lower eight are a linear number: subnormal, or with the exponent after that of the
// subnormal ones, in the same units. A code's bits with the sign flipped are unsigned there, so one packed fused multiply-add yields
// (bits - offset) * scale, exactly rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/gemm/epilogue.cuh"

namespace pmo {
namespace cuda {

#ifdef PMO_SM90A

// (word & mask) ^ flipped in one instruction; the compiler splits it if both are constants.
__device__ inline uint32_t and_xor(uint32_t word, uint32_t mask, uint32_t flipped) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(made) : "r"(word), "r"(mask), "r"(flipped));
  return made;
}

// Two elements of T as one operand.
template <typename T>
struct Packed {
  using Both = __nv_bfloat162;
  static constexpr int kBias = 127, kMantissa = 7;
  static constexpr int kUnits[2] = {127, 6};  // 2 to their sum is 1 over the unit
};

template <>
struct Packed<__half> {
  using Both = __half2;
  static constexpr int kBias = 15, kMantissa = 10;
  static constexpr int kUnits[2] = {12, 12};
};

// kPlain: one packed FMA. kReduced: the FMA on 2^-6 of the scale, then a product with 2^6, since factors of scales from 2^-5 (bfloat16)
// or 2^-8 (float16) on are infinite. kFloat32: scales that T can't represent, or from 2^1 or 2^-2 on.
enum Arithmetic { kPlain, kReduced, kFloat32 };

// Scale of a matrix column. The unit of a code in linear bits is 1, or 16 if kHigh.
template <int kBits, typename T>
struct Scale {
  static constexpr int kOffset = kBits == 8 ? 7 : 3;  // its power of two
  static constexpr int kReduction = 6;

  float value;
  uint32_t factor, high_factor, offset, last;  // of packed arithmetic
  Arithmetic arithmetic;

  Scale() = default;

  // Products with powers of two are exact: scales grow by factor and offset, factor is 0 or at least 1, and float16 scales from 2^-8
  // on are at least 2^-14 after 2^-6.
  __device__ explicit Scale(float given) : value(given) {
    using Of = Packed<T>;
    constexpr int kLargest = Of::kBias + 1 - Of::kUnits[0] - Of::kUnits[1];  // its factor is infinite
    const uint32_t stored = Pair<T>::pack(given, given);
    const float magnitude = fabsf(given);
    const bool is_large = magnitude >= power_of_two(kLargest);
    const uint32_t packed = product(stored, is_large ? power(-kReduction) : power(0));
    factor = product(product(packed, power(Of::kUnits[0])), power(Of::kUnits[1]));
    high_factor = product(factor, power(-4));
    offset = product(packed, power(kOffset) | 0x80008000);
    last = is_large ? power(kReduction) : power(0);
    const bool is_exact = Pair<T>::unpack(stored).x == given && magnitude < power_of_two(kLargest + kReduction);
    arithmetic = !is_exact ? kFloat32 : is_large ? kReduced : kPlain;
  }

  // Values of two codes in linear bits.
  template <Arithmetic kArithmetic, bool kHigh>
  __device__ uint32_t times(uint32_t bits) const {
    if constexpr (kArithmetic == kFloat32) {
      return Pair<T>::pack(__fmul_rn(code_of<kHigh>(bits, 0x7640), value), __fmul_rn(code_of<kHigh>(bits, 0x7642), value));
    } else {
      const auto made = __hfma2(both(bits), both(kHigh ? high_factor : factor), both(offset));
      const uint32_t word = reinterpret_cast<const uint32_t&>(made);
      return kArithmetic == kReduced ? product(word, last) : word;
    }
  }

 private:
  using Both = typename Packed<T>::Both;
  static __device__ const Both& both(const uint32_t& word) { return reinterpret_cast<const Both&>(word); }
  static __device__ uint32_t product(uint32_t a, uint32_t b) {
    const Both made = __hmul2(both(a), both(b));
    return reinterpret_cast<const uint32_t&>(made);
  }
  static __device__ constexpr uint32_t power(int of_two) {
    return ((Packed<T>::kBias + of_two) << Packed<T>::kMantissa) * 0x10001u;
  }
  static __device__ float power_of_two(int power) { return __int_as_float((127 + power) << 23); }

  // A code in float32: its bits become the last bits of a power of two, where they have the code's place.
  template <bool kHigh>
  static __device__ float code_of(uint32_t bits, uint32_t selector) {
    constexpr int kPower = kHigh ? 19 : 23;
    constexpr uint32_t kMagic = (127 + kPower) << 23;
    static_assert(kMagic % (1 << 16) == 0, "bits are in the low byte");
    return __uint_as_float(__byte_perm(bits, kMagic, selector)) - ((1 << kOffset) + (1 << kPower));
  }
};

#endif  // PMO_SM90A

}  // namespace cuda
}  // namespace pmo
