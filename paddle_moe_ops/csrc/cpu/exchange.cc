// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Exchange of rows between ranks on the CPU, through memory that processes share; pmo/ranks.h describes its layout.
//
// Threads own contiguous ranges of tokens, as in permute and unpermute. Sending reads T * H elements and writes one row per sent
// row. Receiving reads N * H elements and writes T * H.
#include <cstring>
#include <vector>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/regions.h"
#include "common/status.h"
#include "cpu/pool.h"
#include "cpu/row_kernels.h"
#include "cpu/streaming.h"
#include "pmo/ranks.h"

namespace pmo {
namespace cpu {
namespace {

int send(const pmo_rank_send_params& p) {
  if (const int status = check_rank_send(p)) return status;
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype), stride = p.x_row_stride * dtype_size(p.dtype);
  if (row_bytes == 0) return PMO_OK;
  const int64_t bytes = p.num_tokens * (1 + p.max_rows_per_token) * row_bytes;
  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(streams);
    for (int64_t token = begin; token < end; ++token) {
      const char* source = static_cast<const char*>(p.x) + token * stride;
      const int32_t* rows = p.token_rows + token * p.max_rows_per_token;
      for (int64_t i = 0; i < p.max_rows_per_token; ++i) {
        if (char* const target = sent_to(p, rows[i], row_bytes)) writer.copy(target, source, row_bytes);
      }
    }
  });
  return PMO_OK;
}

int receive(const pmo_rank_receive_params& p) {
  if (const int status = check_rank_receive(p)) return status;
  const int64_t row_bytes = p.hidden * dtype_size(p.dtype), own_stride = p.own_row_stride * dtype_size(p.dtype);
  if (row_bytes == 0) return PMO_OK;
  const RowKernels& kernels = row_kernels(p.dtype);
  const int64_t bytes = p.num_tokens * (1 + p.max_rows_per_token) * row_bytes;
  if (is_marked(p.mark)) {
    std::memset(p.out, 0xFF, p.num_tokens * row_bytes);
    return PMO_OK;
  }
  const bool streams = beyond_caches(bytes);
  parallel_ranges(p.num_tokens, bytes, p.num_threads, [&](int64_t begin, int64_t end) {
    const RowWriter writer(streams);
    std::vector<const void*> rows;
    for (int64_t token = begin; token < end; ++token) {
      const int32_t* listed = p.token_rows + token * p.max_rows_per_token;
      rows.clear();
      for (int64_t i = 0; i < p.max_rows_per_token && listed[i] != -1; ++i) {
        if (!is_received(p, listed[i])) continue;
        rows.push_back(received_from(p, listed[i], row_bytes, own_stride));
      }
      char* const out = static_cast<char*>(p.out) + token * row_bytes;
      if (rows.empty()) {
        std::memset(out, 0, row_bytes);
      } else if (rows.size() > 1) {
        const RowList list = {rows.data(), static_cast<int64_t>(rows.size())};
        kernels.sum(list, {nullptr, 0}, nullptr, p.hidden, writer.streams_whole(out, row_bytes), out);
      } else if (rows[0] != nullptr) {
        writer.copy(out, static_cast<const char*>(rows[0]), row_bytes);
      }
    }
  });
  return PMO_OK;
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_rank_send_cpu(const pmo_rank_send_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::send);
}

extern "C" int pmo_rank_receive_cpu(const pmo_rank_receive_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::receive);
}
