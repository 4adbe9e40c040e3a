// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Expert parallelism through shared memory (pmo/ranks.h). Python calls these operators directly, in dygraph only, and connects
// their gradients.
#include "pmo/ranks.h"

#include <optional>

#include "paddle/direct.h"
#include "paddle/movement.h"
#include "paddle/pages.h"
#include "paddle/rank_buffers.h"
#include "paddle/routing.h"

#ifndef PMO_PADDLE_2  // see window_op.cc

namespace {

using namespace pmo::binding;         // NOLINT: this file is the operators' own
using namespace pmo::binding::ranks;  // NOLINT

constexpr char kNotDense[] = "the rows must be contiguous";
constexpr char kEither[] = "either rows of this rank or memory that has them must be given";
constexpr char kNoLines[] = "the map must have a line for each row";

Outputs rank_plan(const paddle::Tensor& ids, const paddle::Tensor& probs, const paddle::Tensor& records, int64_t experts_per_rank,
                  int64_t rows_per_rank, int64_t capacity, bool by_row) {
  const Target target(kFunction, {&ids, &probs, &records});
  Tensors kept;
  pmo_rank_plan_params p = {};
  Outputs outputs = prepare_plan(target, ids, probs, records, experts_per_rank, rows_per_rank, capacity, &p, &kept);
  if (by_row) {
    outputs.push_back(target.empty_int32({p.num_ranks * rows_per_rank}));
    p.row_to_token = outputs.back().data<int32_t>();
  }
  paddle::Tensor workspace;
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) p.workspace_bytes = pmo_rank_plan_cuda_workspace_bytes(&p);
#endif
  if (p.workspace_bytes > 0) {
    workspace = target.empty({p.workspace_bytes}, paddle::DataType::UINT8);
    p.workspace = workspace.data();
  }
  check_status(PMO_CALL(target, rank_plan, &p), kFunction);
  return outputs;
}

// Allocates the outputs of rank_records and sets its params.
Outputs prepare_records(const Target& target, const paddle::Tensor& records, int64_t topk, int64_t rows_per_rank,
                        int64_t first_expert, int64_t num_experts, pmo_rank_records_params* p) {
  p->struct_size = sizeof(*p);
  p->num_ranks = ranks_of(records);
  p->rows_per_rank = rows_per_rank;
  p->topk = topk;
  p->first_expert = first_expert;
  p->num_experts = num_experts;
  p->records = regions(records, p->num_ranks, &p->region_bytes);
  paddle::Tensor ids = target.empty_int32({p->num_ranks * rows_per_rank, topk});
  paddle::Tensor probs = target.empty_float32({p->num_ranks * rows_per_rank, topk});
  paddle::Tensor rows = target.empty_int32({p->num_ranks * rows_per_rank, 1});
  p->ids = ids.data<int32_t>();
  p->probs = probs.data<float>();
  p->rows = rows.data<int32_t>();
  return {ids, probs, rows};
}

Outputs rank_records(const paddle::Tensor& records, int64_t topk, int64_t rows_per_rank, int64_t first_expert,
                     int64_t num_experts) {
  const Target target(kFunction, {&records});
  pmo_rank_records_params p = {};
  const Outputs outputs = prepare_records(target, records, topk, rows_per_rank, first_expert, num_experts, &p);
  check_status(PMO_CALL(target, rank_records, &p), kFunction);
  return outputs;
}

// Returns the calls of all ranks, int32 [P, PMO_CALL_WORDS].
Outputs rank_barrier(const paddle::Tensor& arrived, const paddle::Tensor& peers, const paddle::Tensor& state,
                     const paddle::Tensor& report, const std::vector<int>& call,
                     const paddle::optional<paddle::Tensor>& forward_calls, int gradient, int64_t timeout_ms) {
  const Target target(kFunction, {&arrived, &peers, &state, &report}, {forward_calls ? &*forward_calls : nullptr});
  pmo_rank_barrier_params p = {};
  const BarrierBuffers buffers = {arrived, peers, state, report, call, timeout_ms};
  const Outputs calls = {prepare_barrier(target, buffers, forward_calls ? &*forward_calls : nullptr, gradient, &p)};
  check_status(PMO_CALL(target, rank_barrier, &p), kFunction);
  return calls;
}

// Waits until all ranks have written their records. Returns the calls of all ranks, the outputs of rank_records, and the ten
// tensors of a plan of the ids.
//
// On a GPU the plan has rows for all slots, and work runs on the side stream. All outputs, and the workspace, must live until
// rank_join. It waits for all of them, or only for the outputs of rank_records: other barriers may follow, and rows be received,
// during the routing.
Outputs rank_arrivals(const paddle::Tensor& records, const paddle::Tensor& arrived, const paddle::Tensor& peers,
                      const paddle::Tensor& state, const paddle::Tensor& report, const std::vector<int>& call, int64_t timeout_ms,
                      int64_t topk, int64_t rows_per_rank, int64_t first_expert, int64_t num_experts) {
  static const std::vector<int> kNoCounts;
  const Target target(kFunction, {&records, &arrived, &peers, &state, &report});
  const SideStream side(target, mark_in(state));
  const Target& side_target = side.target();
  pmo_rank_barrier_params barrier = {};
  Outputs outputs = {prepare_barrier(target, {arrived, peers, state, report, call, timeout_ms}, nullptr, 0, &barrier)};
  pmo_rank_records_params p = {};
  const Outputs record_outputs = prepare_records(target, records, topk, rows_per_rank, first_expert, num_experts, &p);
  p.mark = barrier.state + 1;
  outputs.insert(outputs.end(), record_outputs.begin(), record_outputs.end());
  std::optional<Routing> routing;
  const auto prepare_plan = [&] {
    const int64_t room = target.is_gpu() ? p.num_ranks * rows_per_rank * std::min(topk, num_experts) : -1;
    const RouteAttributes attributes = {
        kFunction, {}, -1, num_experts, 1, room, kCountsFromRouting, kNoCounts, PMO_DUPLICATES_FIRST, 0};
    const Outputs plan = routing.emplace(side_target, attributes, record_outputs[0], nullptr, nullptr).outputs();
    outputs.insert(outputs.end(), plan.begin(), plan.end());
  };
  // On the side stream, memory freed before the fork may be reused, but no memory freed after it.
  if (target.is_gpu()) prepare_plan();
  side.fork();
  try {
    check_status(PMO_CALL(side_target, rank_barrier, &barrier), kFunction);
    check_status(PMO_CALL(side_target, rank_records, &p), kFunction);
    side.mark();
    if (!target.is_gpu()) prepare_plan();  // counts the ids
    routing->run();
  } catch (...) {
    side.join();
    throw;
  }
  outputs.push_back(routing->workspace());
  return outputs;
}

// Enqueues a wait of the stream for rank_arrivals of the group whose barrier has this state.
Outputs rank_join(const paddle::Tensor& state, bool waits_for_routing) {
  const Target target(kFunction, {&state});
  const SideStream side(target, mark_in(state));
  if (waits_for_routing) {
    side.join();
  } else {
    side.join_mark();
  }
  return {state};
}

// Sets the fields common to rank_send and rank_receive, from a symmetric buffer. `own_rows`: rows for each rank of an array for
// this rank itself, -1 for as many as in the buffer.
template <typename Params>
void set_exchange(Params* p, const paddle::Tensor& rows, const paddle::Tensor& token_rows, const paddle::Tensor& arrived,
                  const paddle::Tensor& peers, int64_t num_ranks, int64_t rank, int64_t fetched, int64_t own_rows) {
  p->struct_size = sizeof(Params);
  require_rank(token_rows, 2, kFunction, "the map");
  require_dtype(token_rows, paddle::DataType::INT32, kFunction, "the map");
  require_rank(arrived, 2, kFunction, "the window");
  require_dtype(arrived, rows.dtype(), kFunction, "the window");
  require_dtype(peers, rows.dtype(), kFunction, "the window");
  require_shape(peers, arrived.shape(), kFunction, "the window");
  require(num_ranks > 0 && arrived.shape()[0] % num_ranks == 0 && arrived.is_contiguous() && peers.is_contiguous(), kFunction,
          kNoMemory);
  p->num_tokens = token_rows.shape()[0];
  p->max_rows_per_token = token_rows.shape()[1];
  p->num_ranks = num_ranks;
  p->rank = rank;
  p->rows_per_rank = arrived.shape()[0] / num_ranks;
  p->own_rows_per_rank = own_rows < 0 ? p->rows_per_rank : own_rows;
  p->fetched = fetched;
  p->hidden = arrived.shape()[1];
  p->dtype = dtype_of(arrived, kFunction, "the window");
}

// Target of this rank's own rows: none, since they are read from the source; the symmetric buffer; new memory, which is returned.
enum OwnRows : int64_t { kStay, kToWindow, kToNewMemory };

// Stores rows of x for other ranks.
Outputs rank_send(const paddle::Tensor& x, const paddle::Tensor& token_rows, const paddle::Tensor& arrived,
                  const paddle::Tensor& peers, int64_t num_ranks, int64_t rank, int64_t fetched, int64_t own, bool leaves_room,
                  int64_t own_rows) {
  const Target target(kFunction, {&x, &token_rows, &arrived, &peers});
  require_rank(x, 2, kFunction, "x");
  pmo_rank_send_params p = {};
  set_exchange(&p, x, token_rows, arrived, peers, num_ranks, rank, fetched, own_rows);
  p.leaves_room = leaves_room;
  require_shape(x, {p.num_tokens, p.hidden}, kFunction, "x");
  const Matrix source(x);
  const paddle::Tensor rows = dense(token_rows);
  p.x = source.data;
  p.x_row_stride = source.row_stride;
  p.token_rows = rows.data<int32_t>();
  p.arrived = const_cast<void*>(arrived.data());
  p.peers = const_cast<void*>(peers.data());
  paddle::Tensor for_own = arrived;
  if (own == kToNewMemory) {
    for_own = target.empty({num_ranks * p.own_rows_per_rank, p.hidden}, x.dtype());
    prepare_pages(target, for_own);
  }
  p.own = own == kStay ? nullptr : for_own.data();
  check_status(PMO_CALL(target, rank_send, &p), kFunction);
  return {for_own};
}

// Sums the rows that ranks sent. Either `own` has the rows of this rank itself, or `to` already contains them. NaN if `state` is
// marked.
Outputs rank_receive(const paddle::Tensor& token_rows, const paddle::Tensor& arrived, const paddle::Tensor& peers,
                     const paddle::optional<paddle::Tensor>& own, const paddle::optional<paddle::Tensor>& to,
                     const paddle::Tensor& state, int64_t num_ranks, int64_t rank, int64_t fetched, int64_t own_rows) {
  const Target target(kFunction, {&token_rows, &arrived, &peers, &state}, {own ? &*own : nullptr, to ? &*to : nullptr});
  require(own.is_initialized() != to.is_initialized(), kFunction, kEither);
  const paddle::Tensor& given = own ? *own : *to;
  pmo_rank_receive_params p = {};
  set_exchange(&p, given, token_rows, arrived, peers, num_ranks, rank, fetched, own_rows);
  require_shape(given, {own ? num_ranks * p.own_rows_per_rank : p.num_tokens, p.hidden}, kFunction, "the rows");
  const Matrix source(given);
  const paddle::Tensor rows = dense(token_rows);
  paddle::Tensor out = given;
  if (own) {
    p.own = source.data;
    p.own_row_stride = source.row_stride;
    out = target.empty({p.num_tokens, p.hidden}, arrived.dtype());
    prepare_pages(target, out);
  }
  p.mark = mark_in(state);
  p.token_rows = rows.data<int32_t>();
  p.arrived = arrived.data();
  p.peers = peers.data();
  p.out = out.data();
  check_status(PMO_CALL(target, rank_receive, &p), kFunction);
  return {out};
}

// Quantises rows of x and stores them at the rows of token_rows in the buffers of all ranks; their scales are not sent.
Outputs rank_quantize(const paddle::Tensor& x, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_token,
                      const paddle::Tensor& window, bool ue8m0, float amax_min) {
  const Target target(kFunction, {&x, &token_rows, &row_to_token, &window});
  require_rank(x, 2, kFunction, "x");
  require(!row_to_token.shape().empty(), kFunction, kNoLines);
  require_dtype(window, paddle::DataType::FLOAT8_E4M3FN, kFunction, "the window");
  require_shape(window, {row_to_token.shape()[0], x.shape()[1]}, kFunction, "the window");
  require(window.is_contiguous(), kFunction, kNoMemory);
  const Outputs outputs = quantize_rows(target, kFunction, x, {&token_rows, &row_to_token, 0}, {ue8m0, false, amax_min}, &window);
  return {outputs[1]};
}

Outputs rank_put(const paddle::Tensor& row_values, const paddle::Tensor& window, int64_t rows_per_rank) {
  const Target target(kFunction, {&row_values, &window});
  pmo_rank_values_params p = {};
  p.struct_size = sizeof(p);
  p.num_ranks = ranks_of(window);
  p.rows_per_rank = rows_per_rank;
  require_rank(row_values, 2, kFunction, "the values");
  p.topk = row_values.shape()[1];
  require_shape(row_values, {p.num_ranks * rows_per_rank, p.topk}, kFunction, "the values");
  if (row_values.dtype() != paddle::DataType::INT32)
    require_dtype(row_values, paddle::DataType::FLOAT32, kFunction, "the values");
  const paddle::Tensor values = dense(row_values);
  p.row_values = values.data();
  p.window = regions(window, p.num_ranks, &p.region_bytes);
  check_status(PMO_CALL(target, rank_put, &p), kFunction);
  return {window};
}

// Values that all ranks stored in this rank's buffer: [P * S, columns], packed ue8m0 scales or float32 ones.
Outputs rank_take(const paddle::Tensor& window, int64_t rows_per_rank, int64_t columns, bool ue8m0) {
  const Target target(kFunction, {&window});
  pmo_rank_values_params p = {};
  p.struct_size = sizeof(p);
  p.num_ranks = ranks_of(window);
  p.rows_per_rank = rows_per_rank;
  p.topk = columns;
  p.window = regions(window, p.num_ranks, &p.region_bytes);
  paddle::Tensor values = target.empty({p.num_ranks * rows_per_rank, columns}, scales_dtype(ue8m0));
  p.slot_values = values.data();
  check_status(PMO_CALL(target, rank_take, &p), kFunction);
  return {values};
}

Outputs rank_get(const paddle::Tensor& window, const paddle::Tensor& ids, const paddle::Tensor& token_rows,
                 const paddle::Tensor& state, int64_t experts_per_rank, int64_t rows_per_rank) {
  const Target target(kFunction, {&window, &ids, &token_rows, &state});
  require_rank(ids, 2, kFunction, "ids");
  pmo_rank_values_params p = {};
  p.mark = mark_in(state);
  p.struct_size = sizeof(p);
  p.num_ranks = ranks_of(window);
  p.rows_per_rank = rows_per_rank;
  p.num_tokens = ids.shape()[0];
  p.topk = ids.shape()[1];
  p.experts_per_rank = experts_per_rank;
  require_shape(token_rows, {p.num_tokens, std::min(p.num_ranks, p.topk)}, kFunction, "token_rows");
  require_dtype(token_rows, paddle::DataType::INT32, kFunction, "token_rows");
  const paddle::Tensor dense_ids = dense(ids), rows = dense(token_rows);
  p.ids = dense_ids.data();
  p.ids_kind = index_kind(ids, kFunction, "ids");
  p.token_rows = rows.data<int32_t>();
  p.window = regions(window, p.num_ranks, &p.region_bytes);
  paddle::Tensor values = target.empty_float32(ids.shape());
  p.slot_values = values.data<float>();
  check_status(PMO_CALL(target, rank_get, &p), kFunction);
  return {values};
}

// Position of each row of the plan over all experts in a buffer for the rows of slots: [N, 1].
Outputs rank_rows(const paddle::Tensor& ids, const paddle::Tensor& token_rows, const paddle::Tensor& row_to_slot,
                  int64_t num_ranks, int64_t experts_per_rank, int64_t rows_per_rank) {
  const Target target(kFunction, {&ids, &token_rows, &row_to_slot});
  require_rank(ids, 2, kFunction, "ids");
  require_rank(row_to_slot, 1, kFunction, "row_to_slot");
  pmo_rank_rows_params p = {};
  p.struct_size = sizeof(p);
  p.num_tokens = ids.shape()[0];
  p.topk = ids.shape()[1];
  p.num_ranks = num_ranks;
  p.experts_per_rank = experts_per_rank;
  p.rows_per_rank = rows_per_rank;
  p.num_rows = row_to_slot.shape()[0];
  require_shape(token_rows, {p.num_tokens, std::min(num_ranks, p.topk)}, kFunction, "token_rows");
  for (const paddle::Tensor* map : {&token_rows, &row_to_slot}) require_dtype(*map, paddle::DataType::INT32, kFunction, "a map");
  const paddle::Tensor dense_ids = dense(ids), of_tokens = dense(token_rows), slots = dense(row_to_slot);
  p.ids = dense_ids.data();
  p.ids_kind = index_kind(ids, kFunction, "ids");
  p.token_rows = of_tokens.data<int32_t>();
  p.row_to_slot = slots.data<int32_t>();
  paddle::Tensor places = target.empty_int32({p.num_rows, 1});
  p.places = places.data<int32_t>();
  check_status(PMO_CALL(target, rank_rows, &p), kFunction);
  return {places};
}

// Fills rows with NaN if the code of any rank differs from this rank's; the rows must be contiguous.
Outputs rank_spoil(const paddle::Tensor& rows, const paddle::Tensor& codes, int64_t code) {
  const Target target(kFunction, {&rows, &codes});
  require_rank(codes, 1, kFunction, "the codes");
  require_dtype(codes, paddle::DataType::INT64, kFunction, "the codes");
  require(rows.is_contiguous(), kFunction, kNotDense);
  pmo_rank_spoil_params p = {};
  p.struct_size = sizeof(p);
  p.num_ranks = codes.shape()[0];
  p.data_bytes = rows.numel() * static_cast<int64_t>(phi::SizeOf(rows.dtype()));
  p.code = code;
  p.codes = codes.data<int64_t>();
  p.data = const_cast<void*>(rows.data());
  check_status(PMO_CALL(target, rank_spoil, &p), kFunction);
  return {rows};
}

}  // namespace

PMO_DIRECT(rank_spoil, rank_spoil);
PMO_DIRECT(rank_plan, rank_plan);
PMO_DIRECT(rank_records, rank_records);
PMO_DIRECT(rank_arrivals, rank_arrivals);
PMO_DIRECT(rank_join, rank_join);
PMO_DIRECT(rank_send, rank_send);
PMO_DIRECT(rank_receive, rank_receive);
PMO_DIRECT(rank_quantize, rank_quantize);
PMO_DIRECT(rank_put, rank_put);
PMO_DIRECT(rank_take, rank_take);
PMO_DIRECT(rank_get, rank_get);
PMO_DIRECT(rank_rows, rank_rows);
PMO_DIRECT(rank_barrier, rank_barrier);

#endif
