# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The row kernels of every instruction set give the same bits: compared in C++, one kernel at a
time."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import cpu_isas
from .compiling import CSRC, compile_cpp, row_kernel_objects, run_clean

pytestmark = [pytest.mark.cpu_only, pytest.mark.own_program]

PROGRAM = r"""
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/row_kernels.h"
#include "pmo/base.h"

using namespace pmo::cpu;

static std::mt19937_64 random_bits(1);

// Ordinary numbers, subnormals, huge ones, zeros, and any bits at all; infinities and NaN only among the last.
static uint32_t draw(int32_t dtype) {
  const uint32_t bits = static_cast<uint32_t>(random_bits());
  const uint32_t sign = bits & 0x80000000u;
  uint32_t value = bits;
  switch (random_bits() % 8) {
    case 0: value = sign; break;
    case 1: value = sign | (bits & 0x007FFFFFu); break;
    case 2: value = bits; break;
    default: value = sign | 0x3C000000u | (bits & 0x07FFFFFFu);
  }
  if (dtype == PMO_FLOAT32) return value;
  if (dtype == PMO_BFLOAT16) return value >> 16;
  const uint32_t half_sign = sign >> 16;
  switch (random_bits() % 8) {
    case 0: return half_sign;
    case 1: return half_sign | (bits & 0x03FFu);
    case 2: return bits & 0xFFFFu;
    default: return half_sign | 0x3000u | (bits & 0x0FFFu);
  }
}

static std::vector<char> draw_row(int32_t dtype, int64_t hidden, int64_t offset) {
  const int64_t size = dtype == PMO_FLOAT32 ? 4 : 2;
  std::vector<char> row(offset + hidden * size);
  for (int64_t j = 0; j < hidden; ++j) {
    const uint32_t value = draw(dtype);
    std::memcpy(row.data() + offset + j * size, &value, size);
  }
  return row;
}

static bool is_nan(int32_t dtype, const char* element) {
  uint32_t bits = 0;
  std::memcpy(&bits, element, dtype == PMO_FLOAT32 ? 4 : 2);
  if (dtype == PMO_FLOAT32) return (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return (bits & 0x7FFFu) > (dtype == PMO_BFLOAT16 ? 0x7F80u : 0x7C00u);
}

// Any NaN equals any NaN.
static bool same(int32_t dtype, const char* a, const char* b, int64_t count) {
  const int64_t size = dtype == PMO_FLOAT32 ? 4 : 2;
  for (int64_t i = 0; i < count * size; i += size) {
    if (std::memcmp(a + i, b + i, size) != 0 && !(is_nan(dtype, a + i) && is_nan(dtype, b + i))) return false;
  }
  return true;
}

// Bytes whose first element lies `offset` behind a line's beginning.
struct Buffer {
  std::vector<char> bytes;
  char* data;
  Buffer(int64_t size, int64_t offset) : bytes(size + offset + kLineBytes) {
    data = bytes.data() + (-reinterpret_cast<uintptr_t>(bytes.data()) % kLineBytes) + offset;
  }
};

static int compare(const char* name, int32_t dtype, const RowKernels& variant, int64_t hidden, int64_t count,
                   bool streams) {
  const RowKernels& generic = *row_kernels_generic(dtype);
  const int64_t bytes = hidden * (dtype == PMO_FLOAT32 ? 4 : 2);
  if (streams && bytes % kLineBytes != 0) return 0;
  std::vector<std::vector<char>> rows;
  std::vector<const void*> pointers;
  std::vector<float> weights;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = i % 5;  // odd addresses among them
    rows.push_back(draw_row(dtype, hidden, offset));
    pointers.push_back(rows.back().data() + offset);
    const uint32_t bits = draw(PMO_FLOAT32);
    weights.push_back(0);
    std::memcpy(&weights.back(), &bits, 4);
  }
  const RowList list = {pointers.data(), count};
  const RowList next = {pointers.data(), count / 2};
  int failures = 0;
  const auto check = [&](const char* kernel, bool equal) {
    if (equal) return;
    std::printf("%s %s differs: dtype %d, hidden %ld, rows %ld, streams %d\n", name, kernel, dtype, long(hidden),
                long(count), int(streams));
    ++failures;
  };
  const int64_t offset = streams ? 0 : count % 5;
  Buffer expected(bytes, offset), actual(bytes, offset);
  for (const float* w : {static_cast<const float*>(nullptr), static_cast<const float*>(weights.data())}) {
    generic.sum(list, {nullptr, 0}, w, hidden, false, expected.data);
    variant.sum(list, next, w, hidden, streams, actual.data);
    check("sum", same(dtype, expected.data, actual.data, hidden));
  }
  Buffer expected_rows(count * bytes, offset), actual_rows(count * bytes, offset);
  std::vector<void*> expected_outs, actual_outs;
  for (int64_t i = 0; i < count; ++i) {
    expected_outs.push_back(expected_rows.data + i * bytes);
    actual_outs.push_back(actual_rows.data + i * bytes);
  }
  const auto scale_one = [&](const void* in, int64_t i) {
    Targets target;
    target.add(expected_outs[i], weights[i]);
    generic.scale(in, {nullptr, 0}, target, hidden, false);
  };
  Targets targets;
  for (int64_t i = 0; i < count; ++i) {
    scale_one(pointers[0], i);
    targets.add(actual_outs[i], weights[i]);
    if (targets.count < kTargets && i + 1 < count) continue;
    variant.scale(pointers[0], next, targets, hidden, streams);
    targets.count = 0;
  }
  check("scale", same(dtype, expected_rows.data, actual_rows.data, count * hidden));
  std::vector<float> expected_dots(count), actual_dots(count);
  std::fill(actual_rows.data, actual_rows.data + count * bytes, 'x');
  const DotTerms none = {};
  const bool few = hidden % 3 == 0;
  const int64_t group = few ? kFewDotTerms : kDotTerms;
  for (int64_t begin = 0; begin < count; begin += group) {
    DotTerms terms = {};
    for (int64_t i = begin; i < std::min(begin + group, count); ++i) {
      // the same factor in all terms of a group, or in some
      const void* factor = pointers[(i / (few ? 6 : 12)) % count];
      const DotTerms term = {{factor}, {pointers[i]}, {weights[i]}, {actual_outs[i]}, 1};
      generic.dot(term, none, hidden, false, &expected_dots[i]);
      scale_one(term.a[0], i);
      terms.a[i - begin] = term.a[0];
      terms.rows[i - begin] = term.rows[0];
      terms.weights[i - begin] = term.weights[0];
      terms.outs[i - begin] = term.outs[0];
      ++terms.count;
    }
    variant.dot(terms, terms, hidden, streams, &actual_dots[begin]);
  }
  check("dot", same(PMO_FLOAT32, reinterpret_cast<char*>(expected_dots.data()),
                    reinterpret_cast<char*>(actual_dots.data()), count));
  if (streams) check("scale with dot", same(dtype, expected_rows.data, actual_rows.data, count * hidden));
  std::vector<uint8_t> expected_codes(hidden + 1), actual_codes(hidden + 1);
  std::vector<float> expected_scales(hidden / 128 + 1), actual_scales(hidden / 128 + 1);
  for (const bool ue8m0 : {false, true}) {
    generic.quantize(pointers[0], hidden, 1e-4f, ue8m0, expected_codes.data(), expected_scales.data());
    variant.quantize(pointers[0], hidden, 1e-4f, ue8m0, actual_codes.data(), actual_scales.data());
    check("quantize", expected_codes == actual_codes && expected_scales == actual_scales);
  }
  for (auto& code : actual_codes) code = static_cast<uint8_t>(random_bits());
  generic.dequantize(actual_codes.data(), actual_scales.data(), hidden, false, expected.data);
  variant.dequantize(actual_codes.data(), actual_scales.data(), hidden, streams, actual.data);
  check("dequantize", same(dtype, expected.data, actual.data, hidden));
  return failures;
}

// Any length from and to any address, to one target or several, and not a byte beside them.
static int copies(const char* name, const RowKernels& variant) {
  int failures = 0;
  for (int64_t bytes : {0, 1, 63, 64, 65, 127, 128, 190, 1000, 2048}) {
    for (int64_t offset = 0; offset < 2 * kLineBytes; offset += offset < 3 ? 1 : 31) {
      for (int64_t count : {int64_t{1}, int64_t{3}, kTargets}) {
        for (bool streams : {false, true}) {
          std::vector<char> in = draw_row(PMO_FLOAT32, bytes / 4 + 1, 1);
          Buffer out((2 * count + 1) * bytes, offset);
          std::fill(out.bytes.begin(), out.bytes.end(), 'x');
          std::vector<char> expected = out.bytes;
          char* data = expected.data() + (out.data - out.bytes.data());
          Targets targets;
          for (int64_t i = 0; i < count; ++i) {  // every other row of an array
            std::memcpy(data + (2 * i + 1) * bytes, in.data() + 1, bytes);
            targets.add(out.data + (2 * i + 1) * bytes);
          }
          const void* next = in.data();
          variant.copy(in.data() + 1, bytes, {&next, 1}, targets, streams);
          if (out.bytes == expected) continue;
          std::printf("%s copy differs: bytes %ld, offset %ld, targets %ld, streams %d\n", name, long(bytes),
                      long(offset), long(count), int(streams));
          ++failures;
        }
      }
    }
  }
  return failures;
}

static int compare_all(const char* name, const RowKernels* (*variant)(int32_t)) {
  if (variant(PMO_FLOAT32) == nullptr) return 0;
  std::printf("%s\n", name);
  int failures = copies(name, *variant(PMO_FLOAT32));
  for (int32_t dtype : {PMO_FLOAT32, PMO_FLOAT16, PMO_BFLOAT16}) {
    for (int64_t hidden : {1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 72, 96, 200, 512, 513, 1025, 7168}) {
      for (int64_t count : {1, 2, 3, 8, 65}) {
        for (int repeat = 0; repeat < (hidden > 1000 ? 1 : 10); ++repeat) {
          for (bool streams : {false, true}) failures += compare(name, dtype, *variant(dtype), hidden, count, streams);
        }
      }
    }
  }
  return failures;
}

int main() {
  int failures = compare_all("generic", row_kernels_generic);
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    failures += compare_all("avx2", row_kernels_avx2);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    failures += compare_all("avx512", row_kernels_avx512);
  }
#endif
  return failures == 0 ? 0 : 1;
}
"""


def test_variants_give_the_same_bits(tmp_path: Path) -> None:
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    compared = run_clean([str(compile_cpp(tmp_path / "compare", PROGRAM, *row_kernel_objects(), *flags))]).split()
    assert compared == cpu_isas.available()
