// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/ids.h"
#include "common/status.h"

namespace pmo {
namespace {

constexpr int64_t kMaxRanks = 1024;

int check_sizes(int64_t num_ranks, int64_t rows_per_rank, int64_t topk) {
  PMO_REQUIRE(num_ranks >= 1 && num_ranks <= kMaxRanks, "num_ranks", "in [1, 1024]");
  PMO_REQUIRE_COUNT(rows_per_rank, "rows_per_rank");
  PMO_REQUIRE_SLOTS(rows_per_rank * num_ranks, topk, "topk");
  return PMO_OK;
}

// Checks regions that consist of a header and `slot_bytes` for each of [S, K] slots.
int check_regions(int64_t num_ranks, int64_t rows_per_rank, int64_t topk, int64_t region_bytes, int64_t header,
                  int64_t slot_bytes, const void* regions, const char* name) {
  if (const int status = check_sizes(num_ranks, rows_per_rank, topk)) return status;
  PMO_REQUIRE(region_bytes % 4 == 0 && region_bytes >= header + rows_per_rank * topk * slot_bytes, "region",
              "a multiple of 4 that holds a region");
  PMO_REQUIRE_ARRAY(static_cast<const int32_t*>(regions), 1, name);
  return PMO_OK;
}

constexpr int64_t kRecordBytes = 8;

}  // namespace

int check_rank_plan(const pmo_rank_plan_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_plan_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.experts_per_rank, "experts_per_rank");
  if (const int status = check_regions(p.num_ranks, p.rows_per_rank, p.topk, p.region_bytes, PMO_RECORDS_HEADER, kRecordBytes,
                                       p.records, "records")) {
    return status;
  }
  PMO_REQUIRE(p.capacity >= 0 && p.capacity <= p.rows_per_rank, "capacity", "from 0 to rows_per_rank");
  const int64_t slots = p.num_tokens * p.topk;
  PMO_REQUIRE(is_id_kind(p.ids_kind), "ids_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(is_id_array(p.ids, p.ids_kind, slots), "ids", "an array aligned to its element size");
  PMO_REQUIRE_ARRAY(p.probs, slots, "probs");
  PMO_REQUIRE_ARRAY(p.token_rows, slots, "token_rows");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.row_to_token, "row_to_token");
  PMO_REQUIRE_ARRAY(p.dropped, 1, "dropped");
  PMO_REQUIRE_ARRAY(p.routed, 1, "routed");
  return PMO_OK;
}

int check_rank_records(const pmo_rank_records_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_records_params of this library");
  PMO_REQUIRE_COUNT(p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE_COUNT(p.first_expert, "first_expert");
  if (const int status = check_regions(p.num_ranks, p.rows_per_rank, p.topk, p.region_bytes, PMO_RECORDS_HEADER, kRecordBytes,
                                       p.records, "records")) {
    return status;
  }
  PMO_REQUIRE_ARRAY(p.rows, p.num_ranks * p.rows_per_rank, "rows");
  PMO_REQUIRE_ARRAY(p.ids, p.num_ranks * p.rows_per_rank * p.topk, "ids");
  PMO_REQUIRE_ARRAY(p.probs, p.num_ranks * p.rows_per_rank * p.topk, "probs");
  return PMO_OK;
}

namespace {

int check_values(const pmo_rank_values_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_values_params of this library");
  PMO_REQUIRE_COUNT(p.topk, "topk");
  return check_regions(p.num_ranks, p.rows_per_rank, p.topk, p.region_bytes, 0, sizeof(float), p.window, "window");
}

}  // namespace

int check_rank_put(const pmo_rank_values_params& p) {
  if (const int status = check_values(p)) return status;
  PMO_REQUIRE_ARRAY(static_cast<const int32_t*>(p.row_values), p.num_ranks * p.rows_per_rank * p.topk, "row_values");
  return PMO_OK;
}

int check_rank_take(const pmo_rank_values_params& p) {
  if (const int status = check_values(p)) return status;
  PMO_REQUIRE_ARRAY(static_cast<int32_t*>(p.slot_values), p.num_ranks * p.rows_per_rank * p.topk, "slot_values");
  return PMO_OK;
}

int check_rank_get(const pmo_rank_values_params& p) {
  if (const int status = check_values(p)) return status;
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.experts_per_rank, "experts_per_rank");
  PMO_REQUIRE(is_id_kind(p.ids_kind), "ids_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(is_id_array(p.ids, p.ids_kind, p.num_tokens * p.topk), "ids", "an array aligned to its element size");
  PMO_REQUIRE_ARRAY(p.token_rows, p.num_tokens * p.topk, "token_rows");
  PMO_REQUIRE_ARRAY(static_cast<int32_t*>(p.slot_values), p.num_tokens * p.topk, "slot_values");
  return PMO_OK;
}

int check_rank_rows(const pmo_rank_rows_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_rows_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.experts_per_rank, "experts_per_rank");
  if (const int status = check_sizes(p.num_ranks, p.rows_per_rank, p.topk)) return status;
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  const int64_t slots = p.num_tokens * p.topk;
  PMO_REQUIRE(is_id_kind(p.ids_kind), "ids_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(is_id_array(p.ids, p.ids_kind, slots), "ids", "an array aligned to its element size");
  PMO_REQUIRE_ARRAY(p.token_rows, slots, "token_rows");
  PMO_REQUIRE_ARRAY(p.row_to_slot, p.num_rows, "row_to_slot");
  PMO_REQUIRE_ARRAY(p.places, p.num_rows, "places");
  return PMO_OK;
}

namespace {

// Checks the fields common to rank_send and rank_receive.
template <typename Params>
int check_rows(const Params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of the params struct of this library");
  if (const int status = check_sizes(p.num_ranks, p.rows_per_rank, 1)) return status;
  PMO_REQUIRE(p.rank >= 0 && p.rank < p.num_ranks, "rank", "one of num_ranks");
  PMO_REQUIRE(p.fetched >= 0 && p.fetched <= PMO_FETCHED_PERIOD, "fetched", "from 0 to PMO_FETCHED_PERIOD");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.max_rows_per_token, "max_rows_per_token");
  PMO_REQUIRE_COLUMNS(p.hidden, "hidden");
  PMO_REQUIRE(is_sum_dtype(p.dtype), "dtype", "float32, float16 or bfloat16");
  PMO_REQUIRE_ARRAY(p.token_rows, p.num_tokens * p.max_rows_per_token, "token_rows");
  const bool empty = p.num_ranks * p.rows_per_rank * p.hidden == 0;
  PMO_REQUIRE(empty || p.arrived != nullptr, "arrived", "given");
  PMO_REQUIRE(empty || p.peers != nullptr, "peers", "given");
  PMO_REQUIRE(p.own_rows_per_rank >= 0 && p.own_rows_per_rank <= p.rows_per_rank, "own_rows_per_rank", "from 0 to rows_per_rank");
  return PMO_OK;
}

}  // namespace

int check_rank_send(const pmo_rank_send_params& p) {
  if (const int status = check_rows(p)) return status;
  PMO_REQUIRE(p.x != nullptr || p.num_tokens * p.hidden == 0, "x", "given");
  return PMO_OK;
}

int check_rank_receive(const pmo_rank_receive_params& p) {
  if (const int status = check_rows(p)) return status;
  PMO_REQUIRE(p.own != nullptr || p.max_rows_per_token <= 1, "own", "given where tokens have several rows");
  PMO_REQUIRE(p.out != nullptr || p.num_tokens * p.hidden == 0, "out", "given");
  return PMO_OK;
}

int check_rank_barrier(const pmo_rank_barrier_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_barrier_params of this library");
  PMO_REQUIRE(p.timeout_ms >= 0, "timeout_ms", ">= 0");
  if (const int status = check_regions(p.num_ranks, 0, 0, p.region_bytes, PMO_BARRIER_REGION, 0, p.arrived, "arrived"))
    return status;
  PMO_REQUIRE_ARRAY(static_cast<const int32_t*>(p.peers), 1, "peers");
  PMO_REQUIRE_ARRAY(p.state, 2, "state");
  PMO_REQUIRE_ARRAY(p.call, PMO_CALL_WORDS, "call");
  PMO_REQUIRE_ARRAY(p.calls, p.num_ranks * PMO_CALL_WORDS, "calls");
  PMO_REQUIRE_ARRAY(p.report, 1 + p.num_ranks * PMO_CALL_WORDS, "report");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.forward_calls, "forward_calls");
  return PMO_OK;
}

namespace {

// Checks the barrier and the sizes of an exchange of few tokens.
int check_few(const pmo_rank_barrier_params& barrier, int64_t rank, int64_t lines_per_rank, const char* name,
              int64_t rows_per_rank, int64_t hidden, int32_t dtype) {
  if (const int status = check_rank_barrier(barrier)) return status;
  PMO_REQUIRE(barrier.num_ranks <= PMO_FEW_RANKS, "num_ranks", "in [1, 32]");
  PMO_REQUIRE(rank >= 0 && rank < barrier.num_ranks, "rank", "one of num_ranks");
  PMO_REQUIRE(lines_per_rank >= 0 && lines_per_rank <= PMO_FEW_TOKENS && lines_per_rank <= rows_per_rank, name,
              "from 0 to rows_per_rank and 256");
  PMO_REQUIRE_COLUMNS(hidden, "hidden");
  PMO_REQUIRE(is_sum_dtype(dtype), "dtype", "float32, float16 or bfloat16");
  return PMO_OK;
}

}  // namespace

int check_rank_dispatch(const pmo_rank_dispatch_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_dispatch_params of this library");
  PMO_REQUIRE(p.plan.topk <= PMO_FEW_RANKS, "topk", "at most 32");
  if (const int status = check_rank_plan(p.plan)) return status;
  PMO_REQUIRE(p.plan.num_ranks == p.barrier.num_ranks, "num_ranks", "the same for plan and barrier");
  if (const int status = check_few(p.barrier, p.rank, p.plan.capacity, "capacity", p.plan.rows_per_rank, p.hidden, p.dtype))
    return status;
  PMO_REQUIRE(p.plan.num_ranks * p.plan.experts_per_rank <= PMO_FEW_EXPERTS, "experts_per_rank", "at most 4096 experts in all");
  const int64_t lines = p.plan.num_ranks * p.plan.capacity;
  const bool empty = lines * p.hidden == 0;
  PMO_REQUIRE(p.x != nullptr || p.plan.num_tokens * p.hidden == 0, "x", "given");
  PMO_REQUIRE(empty || p.arrived != nullptr, "arrived", "given");
  PMO_REQUIRE(empty || p.peers != nullptr, "peers", "given");
  PMO_REQUIRE(empty || p.tokens != nullptr, "tokens", "given");
  PMO_REQUIRE_ARRAY(static_cast<const int32_t*>(p.arrived_records), 1, "arrived_records");
  PMO_REQUIRE_ARRAY(p.ids, lines * p.plan.topk, "ids");
  PMO_REQUIRE_ARRAY(p.probs, lines * p.plan.topk, "probs");
  PMO_REQUIRE_ARRAY(p.rows, lines, "rows");
  return PMO_OK;
}

int check_rank_combine(const pmo_rank_combine_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_combine_params of this library");
  PMO_REQUIRE_COUNT(p.rows_per_rank, "rows_per_rank");
  if (const int status = check_few(p.barrier, p.rank, p.lines_per_rank, "lines_per_rank", p.rows_per_rank, p.hidden, p.dtype)) {
    return status;
  }
  PMO_REQUIRE_SLOTS(p.num_tokens, p.max_rows_per_token, "max_rows_per_token");
  PMO_REQUIRE(p.max_rows_per_token <= PMO_FEW_RANKS, "max_rows_per_token", "at most 32");
  const int64_t lines = p.barrier.num_ranks * p.lines_per_rank;
  const bool empty = lines * p.hidden == 0;
  PMO_REQUIRE(empty || p.lines != nullptr, "lines", "given");
  PMO_REQUIRE(empty || p.arrived != nullptr, "arrived", "given");
  PMO_REQUIRE(empty || p.peers != nullptr, "peers", "given");
  PMO_REQUIRE(p.out != nullptr || p.num_tokens * p.hidden == 0, "out", "given");
  PMO_REQUIRE_ARRAY(p.rows, lines, "rows");
  PMO_REQUIRE_ARRAY(p.token_rows, p.num_tokens * p.max_rows_per_token, "token_rows");
  return PMO_OK;
}

int check_rank_spoil(const pmo_rank_spoil_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof p, "struct_size", "the size of pmo_rank_spoil_params of this library");
  PMO_REQUIRE(p.num_ranks >= 1 && p.num_ranks <= kMaxRanks, "num_ranks", "in [1, 1024]");
  PMO_REQUIRE(p.data_bytes >= 0, "data", "of >= 0 bytes");
  PMO_REQUIRE_ARRAY(p.codes, p.num_ranks, "codes");
  PMO_REQUIRE(p.data != nullptr || p.data_bytes == 0, "data", "given");
  return PMO_OK;
}

}  // namespace pmo
