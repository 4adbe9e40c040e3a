// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/rank_buffers.h"

#include <algorithm>

#ifndef PMO_PADDLE_2  // see window_op.cc

namespace pmo {
namespace binding {
namespace ranks {
namespace {

constexpr char kNoReport[] = "the report must have a word and a call for each rank";
constexpr char kNoCall[] = "a call must have 8 words";

}  // namespace

void* regions(const paddle::Tensor& window, int64_t num_ranks, int64_t* region_bytes) {
  require_rank(window, 2, kFunction, "the window");
  require_dtype(window, paddle::DataType::UINT8, kFunction, "the window");
  require(window.shape()[0] == num_ranks && window.is_contiguous(), kFunction, kNoMemory);
  *region_bytes = window.shape()[1];
  return const_cast<void*>(window.data());
}

int64_t ranks_of(const paddle::Tensor& window) {
  require_rank(window, 2, kFunction, "the window");
  return window.shape()[0];
}

Outputs prepare_plan(const Target& target, const paddle::Tensor& ids, const paddle::Tensor& probs, const paddle::Tensor& records,
                     int64_t experts_per_rank, int64_t rows_per_rank, int64_t capacity, pmo_rank_plan_params* p, Tensors* kept) {
  require_rank(ids, 2, kFunction, "ids");
  require_shape(probs, ids.shape(), kFunction, "probs");
  require_dtype(probs, paddle::DataType::FLOAT32, kFunction, "probs");
  kept->push_back(dense(ids));
  p->ids = kept->back().data();
  kept->push_back(dense(probs));
  p->probs = kept->back().data<float>();
  p->struct_size = sizeof(*p);
  p->num_tokens = ids.shape()[0];
  p->topk = ids.shape()[1];
  p->num_ranks = ranks_of(records);
  p->experts_per_rank = experts_per_rank;
  p->rows_per_rank = rows_per_rank;
  p->capacity = capacity;
  p->ids_kind = index_kind(ids, kFunction, "ids");
  p->records = regions(records, p->num_ranks, &p->region_bytes);
  paddle::Tensor token_rows = target.empty_int32({p->num_tokens, std::min(p->num_ranks, p->topk)});
  paddle::Tensor dropped = target.empty_int32({});
  paddle::Tensor routed = target.empty_int32({p->num_ranks * experts_per_rank});
  p->token_rows = token_rows.data<int32_t>();
  p->dropped = dropped.data<int32_t>();
  p->routed = routed.data<int32_t>();
  return {token_rows, dropped, routed};
}

const int32_t* mark_in(const paddle::Tensor& state) {
  require_dtype(state, paddle::DataType::INT32, kFunction, "the state");
  require_shape(state, {2}, kFunction, "the state");
  return state.data<int32_t>() + 1;
}

paddle::Tensor prepare_barrier(const Target& target, const BarrierBuffers& buffers, const paddle::Tensor* forward_calls,
                               int gradient, pmo_rank_barrier_params* p) {
  p->struct_size = sizeof(*p);
  p->num_ranks = ranks_of(buffers.arrived);
  p->timeout_ms = buffers.timeout_ms;
  int64_t of_peers = 0;
  p->arrived = regions(buffers.arrived, p->num_ranks, &p->region_bytes);
  p->peers = regions(buffers.peers, p->num_ranks, &of_peers);
  require(of_peers == p->region_bytes, kFunction, kNoMemory);
  p->state = const_cast<int32_t*>(mark_in(buffers.state)) - 1;
  const int64_t words = p->num_ranks * PMO_CALL_WORDS;
  require_dtype(buffers.report, paddle::DataType::INT32, kFunction, "the report");
  require(buffers.report.numel() == 1 + words, kFunction, kNoReport);
  p->report = const_cast<int32_t*>(buffers.report.data<int32_t>());
  require(buffers.call.size() == PMO_CALL_WORDS, kFunction, kNoCall);
  p->call = buffers.call.data();
  if (forward_calls != nullptr) {
    require_dtype(*forward_calls, paddle::DataType::INT32, kFunction, "the calls");
    require_shape(*forward_calls, {p->num_ranks, PMO_CALL_WORDS}, kFunction, "the calls");
    p->forward_calls = forward_calls->data<int32_t>();
  }
  p->gradient = gradient;
  paddle::Tensor calls = target.empty_int32({p->num_ranks, PMO_CALL_WORDS});
  p->calls = calls.data<int32_t>();
  return calls;
}

}  // namespace ranks
}  // namespace binding
}  // namespace pmo

#endif
