// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Exchange of few tokens between processes of one machine, from the steps of other exchanges.
#include <cmath>
#include <cstring>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/regions.h"
#include "common/status.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

// Params of rank_send or rank_receive with the fields that have one name in both.
template <typename Params>
Params rows_params(const pmo_rank_combine_params& p) {
  Params made = {};
  made.struct_size = sizeof made;
  made.num_ranks = p.barrier.num_ranks;
  made.rank = p.rank;
  made.rows_per_rank = p.rows_per_rank;
  made.hidden = p.hidden;
  made.arrived = p.arrived;
  made.peers = p.peers;
  made.own_rows_per_rank = p.lines_per_rank;
  made.dtype = p.dtype;
  made.num_threads = p.num_threads;
  return made;
}

int dispatch(const pmo_rank_dispatch_params& p) {
  if (const int status = check_rank_dispatch(p)) return status;
  if (const int status = pmo_rank_plan_cpu(&p.plan, nullptr)) return status;
  const pmo_rank_send_params send = sent_tokens(p);
  if (const int status = pmo_rank_send_cpu(&send, nullptr)) return status;
  if (const int status = pmo_rank_barrier_cpu(&p.barrier, nullptr)) return status;
  const bool is_spoiled = p.barrier.state[1] != 0;
  const int64_t lines = p.plan.num_ranks * p.plan.capacity, row_bytes = p.hidden * dtype_size(p.dtype);
  parallel_ranges(lines, lines * row_bytes * 2, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      const ArrivedLine arrived(p, line);
      bool has_token = false;
      for (int64_t k = 0; k < p.plan.topk; ++k) {
        const int32_t id = arrived.id(p, k);
        p.ids[line * p.plan.topk + k] = id;
        p.probs[line * p.plan.topk + k] = is_spoiled ? NAN : id >= 0 ? arrived.prob(p, k) : 0.0f;
        has_token |= id >= 0;
      }
      p.rows[line] = has_token ? static_cast<int32_t>(arrived.row(p)) : -1;
      if (row_bytes == 0) continue;
      char* const target = static_cast<char*>(p.tokens) + line * row_bytes;
      if (is_spoiled) {
        std::memset(target, 0xFF, row_bytes);
      } else if (!has_token) {
        std::memset(target, 0, row_bytes);
      } else if (arrived.rank != p.rank) {
        std::memcpy(target, static_cast<const char*>(p.arrived) + arrived.row(p) * row_bytes, row_bytes);
      }
    }
  });
  return PMO_OK;
}

int combine(const pmo_rank_combine_params& p) {
  if (const int status = check_rank_combine(p)) return status;
  auto send = rows_params<pmo_rank_send_params>(p);
  send.num_tokens = p.barrier.num_ranks * p.lines_per_rank;
  send.max_rows_per_token = 1;
  send.x = p.lines;
  send.x_row_stride = p.line_stride;
  send.token_rows = p.rows;
  if (const int status = pmo_rank_send_cpu(&send, nullptr)) return status;
  if (const int status = pmo_rank_barrier_cpu(&p.barrier, nullptr)) return status;
  auto receive = rows_params<pmo_rank_receive_params>(p);
  receive.num_tokens = p.num_tokens;
  receive.max_rows_per_token = p.max_rows_per_token;
  receive.token_rows = p.token_rows;
  receive.own = p.lines;
  receive.own_row_stride = p.line_stride;
  receive.mark = p.barrier.state + 1;
  receive.out = p.out;
  return pmo_rank_receive_cpu(&receive, nullptr);
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_rank_dispatch_cpu(const pmo_rank_dispatch_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::dispatch);
}

extern "C" int pmo_rank_combine_cpu(const pmo_rank_combine_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::combine);
}
