# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The row kernels of every instruction set give the same bits: compiled and compared in C++, since the library
chooses one by itself."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from .compiling import CSRC, compile_cpp, run_clean

pytestmark = pytest.mark.cpu_only

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

static int compare(const char* name, int32_t dtype, const RowKernels& variant, int64_t hidden, int64_t count) {
  const RowKernels& generic = *row_kernels_generic(dtype);
  const int64_t bytes = hidden * (dtype == PMO_FLOAT32 ? 4 : 2);
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
  std::vector<char> expected(bytes), actual(bytes);
  int failures = 0;
  const auto check = [&](const char* kernel, bool equal) {
    if (equal) return;
    std::printf("%s %s differs: dtype %d, hidden %ld, rows %ld\n", name, kernel, dtype, long(hidden), long(count));
    ++failures;
  };
  for (const float* w : {static_cast<const float*>(nullptr), static_cast<const float*>(weights.data())}) {
    generic.sum(pointers.data(), w, count, hidden, expected.data());
    variant.sum(pointers.data(), w, count, hidden, actual.data());
    check("sum", same(dtype, expected.data(), actual.data(), hidden));
  }
  generic.scale(pointers[0], weights[0], hidden, expected.data());
  variant.scale(pointers[0], weights[0], hidden, actual.data());
  check("scale", same(dtype, expected.data(), actual.data(), hidden));
  const float dots[] = {generic.dot(pointers[0], pointers[count - 1], hidden),
                        variant.dot(pointers[0], pointers[count - 1], hidden)};
  check("dot", same(PMO_FLOAT32, reinterpret_cast<const char*>(&dots[0]), reinterpret_cast<const char*>(&dots[1]), 1));
  return failures;
}

static int compare_all(const char* name, const RowKernels* (*variant)(int32_t)) {
  if (variant(PMO_FLOAT32) == nullptr) return 0;
  std::printf("%s\n", name);
  int failures = 0;
  for (int32_t dtype : {PMO_FLOAT32, PMO_FLOAT16, PMO_BFLOAT16}) {
    for (int64_t hidden : {1, 7, 15, 16, 17, 31, 72, 200, 511, 512, 513, 1025, 7168}) {
      for (int64_t count : {1, 2, 3, 8, 65}) {
        for (int repeat = 0; repeat < (hidden > 1000 ? 1 : 10); ++repeat) {
          failures += compare(name, dtype, *variant(dtype), hidden, count);
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


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def test_variants_give_the_same_bits(tmp_path: Path) -> None:
    sources = sorted(str(path) for path in (CSRC / "cpu").glob("row_kernels_*.cc"))
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    compared = run_clean([str(compile_cpp(tmp_path / "compare", PROGRAM, *sources, *flags))]).split()
    expected = ["generic"]
    if platform.machine() == "x86_64" and {"avx2", "fma"} <= processor_flags():
        expected.append("avx2")
        if {"avx512f", "avx512bw", "avx512vl"} <= processor_flags():
            expected.append("avx512")
    assert compared == expected
