// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// quantize on the CPU: every source row is read once, quantised into thread-local memory, and written to each of its rows.
//
// Threads own contiguous token ranges; a row belongs to one slot, hence to one thread. A second pass zeroes the padding. Bytes
// moved: T * H elements and N * (H + 4 C).
#include "pmo/quantize.h"

#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/padding.h"
#include "common/scales.h"
#include "common/status.h"
#include "cpu/padding.h"
#include "cpu/pool.h"
#include "cpu/row_kernels.h"

namespace pmo {
namespace cpu {
namespace {

// The float32 scales of a row, or their exponents packed.
void pack_scales(const std::vector<float>& scales, bool ue8m0, std::vector<uint32_t>* words) {
  if (!ue8m0) {
    std::memcpy(words->data(), scales.data(), scales.size() * sizeof(float));
    return;
  }
  words->assign(words->size(), 0);
  for (size_t group = 0; group < scales.size(); ++group) {
    uint32_t bits;
    std::memcpy(&bits, &scales[group], sizeof(bits));
    (*words)[group / kPackedScales] |= bits >> 23 << (8 * (group % kPackedScales));
  }
}

void quantize_tokens(const pmo_quantize_params& p, const ScaleLayout& layout, int64_t begin, int64_t end, bool streams) {
  const auto quantize_row = row_kernels(p.dtype).quantize;
  const RowWriter writer(streams);
  const char* x = static_cast<const char*>(p.x);
  const int64_t x_stride = p.x_row_stride * dtype_size(p.dtype);
  std::vector<uint8_t> codes(p.hidden);
  std::vector<float> scales(layout.groups);
  std::vector<uint32_t> words(layout.words);
  for (int64_t token = begin; token < end; ++token) {
    bool quantized = false;
    TargetBatches targets(
        [&](const Targets& batch) { writer.copy(batch, reinterpret_cast<const char*>(codes.data()), p.hidden); });
    for (int64_t k = 0; k < p.topk; ++k) {
      const int64_t row = p.slot_to_row == nullptr ? token : p.slot_to_row[token * p.topk + k];
      if (row < 0 || row >= p.num_rows) continue;
      if (!quantized) {
        quantize_row(x + token * x_stride, p.hidden, p.amax_min, p.ue8m0 != 0, codes.data(), scales.data());
        pack_scales(scales, p.ue8m0 != 0, &words);
        quantized = true;
      }
      targets.add(static_cast<char*>(p.codes) + row * p.hidden);
      uint32_t* row_words = static_cast<uint32_t*>(p.scales) + row * layout.row_step;
      for (int64_t word = 0; word < layout.words; ++word) row_words[word * layout.word_step] = words[word];
    }
    targets.finish();
  }
}

// Zeroes the column-major scales of padding rows and of rows from N on.
void zero_padding_columns(const pmo_quantize_params& p, const ScaleLayout& layout) {
  const bool has_map = has_row_map(p);
  const int64_t bytes = has_map ? layout.words * p.num_rows * int64_t{sizeof(int32_t)} : 0;
  parallel_ranges(layout.words, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t word = begin; word < end; ++word) {
      uint32_t* line = static_cast<uint32_t*>(p.scales) + word * layout.word_step;
      for (int64_t row = 0; has_map && row < p.num_rows; ++row) {
        if (is_padding(p.row_to_token[row])) line[row] = 0;
      }
      for (int64_t row = p.num_rows; row < layout.rows; ++row) line[row] = 0;
    }
  });
}

int quantize(const pmo_quantize_params& p) {
  if (const int status = check_quantize(p)) return status;
  if (p.hidden == 0 || p.num_rows == 0) return PMO_OK;
  const ScaleLayout layout(p);
  const int64_t scale_bytes = layout.words * int64_t{sizeof(int32_t)};
  const int64_t bytes = p.num_tokens * p.hidden * dtype_size(p.dtype) + p.num_rows * (p.hidden + scale_bytes);
  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads,
                  [&](int64_t begin, int64_t end) { quantize_tokens(p, layout, begin, end, streams); });
  if (fills(p, PMO_FILL_ROWS) && has_row_map(p)) {
    zero_padding_rows(static_cast<char*>(p.codes), p.hidden, p.num_rows, p.row_to_token, p.num_threads);
  }
  if (!fills(p, PMO_FILL_SCALES)) return PMO_OK;
  if (p.scale_layout == PMO_SCALES_BY_COLUMN) {
    zero_padding_columns(p, layout);
  } else if (has_row_map(p)) {
    zero_padding_rows(static_cast<char*>(p.scales), scale_bytes, p.num_rows, p.row_to_token, p.num_threads);
  }
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_quantize_cpu(const pmo_quantize_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::quantize);
}
