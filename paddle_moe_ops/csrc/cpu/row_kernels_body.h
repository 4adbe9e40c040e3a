// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The bodies behind row_kernels.h: plain loops that the compiler vectorises for the instruction set of the including file.
//
// Included once per variant, inside an anonymous namespace (so that no variant's code can stand in for another's when the linker
// merges inline functions) and after all standard headers (so that none of their code is compiled for the variant's target).
// Elements are loaded and stored through memcpy: rows may begin at any address.

constexpr int64_t kTileColumns = 512;  // float32 accumulators of a tile: 2 KiB, well inside the first-level cache
constexpr int kDotLanes = 16;

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename Storage>
inline Storage load_element(const void* row, int64_t column) {
  Storage element;
  std::memcpy(&element, static_cast<const char*>(row) + column * static_cast<int64_t>(sizeof(Storage)), sizeof(Storage));
  return element;
}

template <typename Storage>
inline void store_element(void* row, int64_t column, Storage element) {
  std::memcpy(static_cast<char*>(row) + column * static_cast<int64_t>(sizeof(Storage)), &element, sizeof(Storage));
}

struct Float32Rows {
  static float load(const void* row, int64_t column) { return load_element<float>(row, column); }
  static void store(void* row, int64_t column, float value) { store_element(row, column, value); }
};

struct BFloat16Rows {
  static float load(const void* row, int64_t column) {
    return bits_float(static_cast<uint32_t>(load_element<uint16_t>(row, column)) << 16);
  }
  static void store(void* row, int64_t column, float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;                        // rounding could carry a NaN into infinity
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    store_element(row, column, static_cast<uint16_t>(is_nan ? quiet_nan : rounded));
  }
};

struct Float16Rows {
  static float load(const void* row, int64_t column) {
    const uint32_t half = load_element<uint16_t>(row, column);
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t magnitude = (half & 0x7FFFu) << 13;
    const uint32_t exponent = half & 0x7C00u;
    const uint32_t normal = magnitude + (112u << 23);   // exponent bias 15 -> 127
    const uint32_t special = magnitude + (224u << 23);  // all-ones exponent stays all ones
    // A subnormal half is mantissa * 2^-24: put the mantissa under the exponent of 2^-14, take 2^-14 away again (exact).
    const float subnormal = bits_float(magnitude + (113u << 23)) - bits_float(113u << 23);
    const uint32_t finite = exponent == 0 ? float_bits(subnormal) : normal;
    return bits_float(sign | (exponent == 0x7C00u ? special : finite));
  }
  static void store(void* row, int64_t column, float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the result is subnormal: adding 0.5 puts the last place of the sum at 2^-24, and the addition rounds.
    const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    store_element(row, column, static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? special : finite)));
  }
};

template <typename Rows>
void sum_rows(const void* const* rows, const float* weights, int64_t count, int64_t hidden, void* out) {
  float sums[kTileColumns];
  for (int64_t begin = 0; begin < hidden; begin += kTileColumns) {
    const int64_t columns = std::min(kTileColumns, hidden - begin);
    for (int64_t j = 0; j < columns; ++j) sums[j] = -0.0f;
    for (int64_t i = 0; i < count; ++i) {
      const void* row = rows[i];
      if (weights == nullptr) {
        for (int64_t j = 0; j < columns; ++j) sums[j] += Rows::load(row, begin + j);
      } else {
        const float weight = weights[i];
        for (int64_t j = 0; j < columns; ++j) sums[j] = __builtin_fmaf(Rows::load(row, begin + j), weight, sums[j]);
      }
    }
    for (int64_t j = 0; j < columns; ++j) Rows::store(out, begin + j, sums[j]);
  }
}

template <typename Rows>
void scale_row(const void* in, float weight, int64_t hidden, void* out) {
  for (int64_t j = 0; j < hidden; ++j) Rows::store(out, j, Rows::load(in, j) * weight);
}

template <typename Rows>
float dot_rows(const void* a, const void* b, int64_t hidden) {
  float lanes[kDotLanes] = {};
  int64_t begin = 0;
  for (; begin + kDotLanes <= hidden; begin += kDotLanes) {
    for (int lane = 0; lane < kDotLanes; ++lane) {
      lanes[lane] = __builtin_fmaf(Rows::load(a, begin + lane), Rows::load(b, begin + lane), lanes[lane]);
    }
  }
  for (int lane = 0; begin + lane < hidden; ++lane) {
    lanes[lane] = __builtin_fmaf(Rows::load(a, begin + lane), Rows::load(b, begin + lane), lanes[lane]);
  }
  for (int width = kDotLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <typename Rows>
constexpr RowKernels kKernels = {sum_rows<Rows>, scale_row<Rows>, dot_rows<Rows>};

const RowKernels* kernels_for(int32_t dtype) {
  switch (dtype) {
    case PMO_FLOAT32:
      return &kKernels<Float32Rows>;
    case PMO_FLOAT16:
      return &kKernels<Float16Rows>;
    case PMO_BFLOAT16:
      return &kKernels<BFloat16Rows>;
    default:
      return nullptr;
  }
}
