// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// dequantize on the CPU: threads own contiguous ranges of rows. Bytes moved: N * (H + 4 C) and N * H elements.
#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/scales.h"
#include "common/status.h"
#include "cpu/pool.h"
#include "cpu/row_kernels.h"
#include "cpu/streaming.h"
#include "pmo/quantize.h"

namespace pmo {
namespace cpu {
namespace {

// The scales of a row as float32.
void read_scales(const pmo_dequantize_params& p, const ScaleLayout& layout, int64_t row, std::vector<float>* scales) {
  const uint32_t* words = static_cast<const uint32_t*>(p.scales) + row * layout.row_step;
  const int64_t per_word = p.ue8m0 != 0 ? kPackedScales : 1;
  for (int64_t group = 0; group < layout.groups; ++group) {
    uint32_t bits = words[group / per_word * layout.word_step];
    if (p.ue8m0 != 0) bits = (bits >> (8 * (group % kPackedScales)) & 0xFFu) << 23;
    std::memcpy(&(*scales)[group], &bits, sizeof(bits));
  }
}

int dequantize(const pmo_dequantize_params& p) {
  if (const int status = check_dequantize(p)) return status;
  if (p.hidden == 0 || p.num_rows == 0) return PMO_OK;
  const ScaleLayout layout(p);
  const auto dequantize_row = row_kernels(p.dtype).dequantize;
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype);
  const int64_t bytes = p.num_rows * (p.hidden + layout.words * int64_t{sizeof(int32_t)} + row_bytes);
  const bool beyond = beyond_caches(bytes);
  parallel_ranges(p.num_rows, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(beyond);
    char* out = static_cast<char*>(p.out);
    const bool streams = writer.streams_whole(out, row_bytes);
    std::vector<float> scales(layout.groups);
    for (int64_t row = begin; row < end; ++row) {
      read_scales(p, layout, row, &scales);
      const auto* codes = static_cast<const uint8_t*>(p.codes) + row * p.codes_row_stride;
      dequantize_row(codes, scales.data(), p.hidden, streams, out + row * row_bytes);
    }
  });
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_dequantize_cpu(const pmo_dequantize_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::dequantize);
}
