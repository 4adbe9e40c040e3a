// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Exchange of few tokens between ranks (pmo/ranks.h). Python calls these operators directly, in dygraph only, and connects their
// gradients.
#include <algorithm>

#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/rank_buffers.h"
#include "paddle/routing.h"

#ifndef PMO_PADDLE_2  // see window_op.cc

namespace {

using namespace pmo::binding;         // NOLINT: this file is the operators' own
using namespace pmo::binding::ranks;  // NOLINT

// Addresses of the regions of rows, whose number is returned.
template <typename Params>
int64_t set_rows(const paddle::Tensor& arrived, const paddle::Tensor& peers, int64_t num_ranks, int64_t rank,
                 const paddle::Tensor& counter, Params* p) {
  require_rank(arrived, 2, kFunction, "the window");
  require_shape(peers, arrived.shape(), kFunction, "the window");
  require_dtype(peers, arrived.dtype(), kFunction, "the window");
  require(num_ranks > 0 && arrived.shape()[0] % num_ranks == 0 && arrived.is_contiguous() && peers.is_contiguous(), kFunction,
          kNoMemory);
  require_dtype(counter, paddle::DataType::INT32, kFunction, "the counter");
  require_shape(counter, {1}, kFunction, "the counter");
  p->struct_size = sizeof(Params);
  p->rank = rank;
  p->hidden = arrived.shape()[1];
  p->arrived = const_cast<void*>(arrived.data());
  p->peers = const_cast<void*>(peers.data());
  p->counter = const_cast<int32_t*>(counter.data<int32_t>());
  p->dtype = dtype_of(arrived, kFunction, "the window");
  return arrived.shape()[0] / num_ranks;
}

// Returns the calls of all ranks; the received tokens, their ids, probabilities and rows; token_rows, dropped and routed of this
// rank's tokens; the ten tensors of a plan of the ids, on a GPU with rows for all slots.
Outputs rank_dispatch(const paddle::Tensor& x, const paddle::Tensor& ids, const paddle::Tensor& probs,
                      const paddle::Tensor& arrived_rows, const paddle::Tensor& peer_rows, const paddle::Tensor& arrived_records,
                      const paddle::Tensor& peer_records, const paddle::Tensor& counter, const paddle::Tensor& arrived,
                      const paddle::Tensor& peers, const paddle::Tensor& state, const paddle::Tensor& report,
                      const std::vector<int>& call, int64_t timeout_ms, int64_t rank, int64_t experts_per_rank,
                      int64_t capacity) {
  static const std::vector<int> kNoCounts;
  const Target target(kFunction, {&x, &ids, &probs, &arrived_rows, &peer_rows, &arrived_records, &peer_records, &counter,
                                  &arrived, &peers, &state, &report});
  pmo_rank_dispatch_params p = {};
  Tensors kept;
  Outputs outputs = {prepare_barrier(target, {arrived, peers, state, report, call, timeout_ms}, nullptr, 0, &p.barrier)};
  const int64_t num_ranks = p.barrier.num_ranks;
  const int64_t rows_per_rank = set_rows(arrived_rows, peer_rows, num_ranks, rank, counter, &p);
  const Outputs own = prepare_plan(target, ids, probs, peer_records, experts_per_rank, rows_per_rank, capacity, &p.plan, &kept);
  int64_t region_bytes = 0;
  p.arrived_records = regions(arrived_records, num_ranks, &region_bytes);
  require(region_bytes == p.plan.region_bytes, kFunction, kNoMemory);
  require_shape(x, {p.plan.num_tokens, p.hidden}, kFunction, "x");
  require_dtype(x, arrived_rows.dtype(), kFunction, "x");
  const Matrix source(x);
  p.x = source.data;
  p.x_row_stride = source.row_stride;
  const int64_t lines = num_ranks * capacity, topk = p.plan.topk;
  paddle::Tensor tokens = target.empty({lines, p.hidden}, x.dtype());
  paddle::Tensor line_ids = target.empty_int32({lines, topk});
  paddle::Tensor line_probs = target.empty_float32({lines, topk});
  paddle::Tensor rows = target.empty_int32({lines, 1});
  p.tokens = tokens.data();
  p.ids = line_ids.data<int32_t>();
  p.probs = line_probs.data<float>();
  p.rows = rows.data<int32_t>();
  outputs.insert(outputs.end(), {tokens, line_ids, line_probs, rows});
  outputs.insert(outputs.end(), own.begin(), own.end());
  paddle::Tensor workspace;
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) p.workspace_bytes = pmo_rank_dispatch_cuda_workspace_bytes(&p);
#endif
  if (p.workspace_bytes > 0) {
    workspace = target.empty({p.workspace_bytes}, paddle::DataType::UINT8);
    p.workspace = workspace.data();
  }
  check_status(PMO_CALL(target, rank_dispatch, &p), kFunction);
  const int64_t room = target.is_gpu() ? lines * std::min(topk, experts_per_rank) : -1;
  const RouteAttributes attributes = {
      kFunction, {}, -1, experts_per_rank, 1, room, kCountsFromRouting, kNoCounts, PMO_DUPLICATES_FIRST, 0};
  Routing routing(target, attributes, line_ids, nullptr, nullptr);
  const Outputs plan = routing.outputs();
  routing.run();
  outputs.insert(outputs.end(), plan.begin(), plan.end());
  return outputs;
}

// Returns the calls of all ranks and the sums of this rank's tokens. `rows` and `token_rows` are those of rank_dispatch.
Outputs rank_combine(const paddle::Tensor& lines, const paddle::Tensor& rows, const paddle::Tensor& token_rows,
                     const paddle::Tensor& arrived_rows, const paddle::Tensor& peer_rows, const paddle::Tensor& counter,
                     const paddle::Tensor& arrived, const paddle::Tensor& peers, const paddle::Tensor& state,
                     const paddle::Tensor& report, const std::vector<int>& call, int64_t timeout_ms, int64_t rank) {
  const Target target(kFunction,
                      {&lines, &rows, &token_rows, &arrived_rows, &peer_rows, &counter, &arrived, &peers, &state, &report});
  pmo_rank_combine_params p = {};
  const paddle::Tensor calls = prepare_barrier(target, {arrived, peers, state, report, call, timeout_ms}, nullptr, 0, &p.barrier);
  const int64_t num_ranks = p.barrier.num_ranks;
  p.rows_per_rank = set_rows(arrived_rows, peer_rows, num_ranks, rank, counter, &p);
  require_rank(rows, 2, kFunction, "the map");
  require_rank(token_rows, 2, kFunction, "the map");
  for (const paddle::Tensor* map : {&rows, &token_rows}) require_dtype(*map, paddle::DataType::INT32, kFunction, "the map");
  p.lines_per_rank = rows.shape()[0] / num_ranks;
  require_shape(rows, {num_ranks * p.lines_per_rank, 1}, kFunction, "the map");
  require_shape(lines, {num_ranks * p.lines_per_rank, p.hidden}, kFunction, "the rows");
  require_dtype(lines, arrived_rows.dtype(), kFunction, "the rows");
  const paddle::Tensor of_lines = dense(rows), of_tokens = dense(token_rows);
  p.num_tokens = token_rows.shape()[0];
  p.max_rows_per_token = token_rows.shape()[1];
  const Matrix source(lines);
  p.lines = source.data;
  p.line_stride = source.row_stride;
  p.rows = of_lines.data<int32_t>();
  p.token_rows = of_tokens.data<int32_t>();
  paddle::Tensor out = target.empty({p.num_tokens, p.hidden}, lines.dtype());
  p.out = out.data();
  check_status(PMO_CALL(target, rank_combine, &p), kFunction);
  return {calls, out};
}

}  // namespace

PMO_DIRECT(rank_dispatch, rank_dispatch);
PMO_DIRECT(rank_combine, rank_combine);

#endif
