// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The texts for what the checks found, the same on every backend.
#include <algorithm>
#include <string>

#include "common/findings.h"
#include "common/status.h"
#include "pmo/route.h"

namespace pmo {
namespace {

std::string place_text(int64_t flat, int64_t columns, const char* column_name) {
  return "token " + std::to_string(flat / columns) + ", " + column_name + " " + std::to_string(flat % columns);
}

int report_data(const pmo_route_params& p, const pmo_route_findings& found) {
  const bool mask = p.routing_kind == PMO_ROUTING_MASK;
  if ((p.checks & PMO_CHECK_RANGE) != 0 && found.bad_place != PMO_NOWHERE) {
    if (!mask) return fail(PMO_INVALID_DATA, bad_id_text(p.num_experts, p.topk, found.bad_place, found.bad_value));
    return fail(PMO_INVALID_DATA, "routing must set at most topk=" + std::to_string(p.topk) + " experts per token, but token " +
                                      std::to_string(found.bad_place) + " sets " + std::to_string(found.bad_value));
  }
  if ((p.checks & PMO_CHECK_DUPLICATES) != 0 && found.duplicate_place != PMO_NOWHERE) {
    return fail(PMO_INVALID_DATA, "routing must name an expert at most once per token, but token " +
                                      std::to_string(found.duplicate_place / p.topk) + " names expert " +
                                      std::to_string(found.duplicate_expert) + " in slots " +
                                      std::to_string(found.duplicate_first % p.topk) + " and " +
                                      std::to_string(found.duplicate_place % p.topk));
  }
  if ((p.checks & PMO_CHECK_NAN) != 0 && found.nan_place != PMO_NOWHERE) {
    return fail(PMO_INVALID_DATA, "probs must not hold NaN, but " +
                                      place_text(found.nan_place, mask ? p.num_experts : p.topk, mask ? "expert" : "slot") +
                                      " does");
  }
  return PMO_OK;
}

}  // namespace

std::string bad_id_text(int64_t num_experts, int64_t topk, int64_t slot, int64_t id) {
  return "routing must hold expert ids in [-1, " + std::to_string(num_experts) + "), but " + place_text(slot, topk, "slot") +
         " holds " + std::to_string(id);
}

int check_route_sizes(const pmo_route_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_route_params), "struct_size", "the size of pmo_route_params of this library");
  PMO_REQUIRE_SLOTS(p.num_tokens, p.topk, "topk");
  PMO_REQUIRE_EXPERTS(p.num_experts, "num_experts");
  PMO_REQUIRE(p.padding_alignment >= 1 && p.padding_alignment <= kMaxIndex, "padding_alignment", "in [1, 2^31)");
  PMO_REQUIRE(p.routing_kind >= PMO_ROUTING_IDS32 && p.routing_kind <= PMO_ROUTING_MASK, "routing_kind",
              "one of pmo_routing_kind");
  PMO_REQUIRE(p.duplicates == PMO_DUPLICATES_FIRST || p.duplicates == PMO_DUPLICATES_EACH, "duplicates", "one of pmo_duplicates");
  PMO_REQUIRE(p.routing_kind != PMO_ROUTING_MASK || p.topk <= p.num_experts, "topk", "at most num_experts for a mask");
  return PMO_OK;
}

int report_counts(const pmo_route_params& p, const int32_t* routed_per_expert) {
  if ((p.checks & PMO_CHECK_COUNTS) == 0 || p.expected_per_expert == nullptr ||
      std::equal(routed_per_expert, routed_per_expert + p.num_experts, p.expected_per_expert)) {
    return PMO_OK;
  }
  return fail(PMO_INVALID_DATA, "tokens_per_expert must be " + list_text(routed_per_expert, p.num_experts) +
                                    ", the rows routed to each expert, but got " +
                                    list_text(p.expected_per_expert, p.num_experts));
}

int report_overflow(const pmo_route_params& p, const int32_t* routed_per_expert) {
  if ((p.checks & PMO_CHECK_OVERFLOW) == 0) return PMO_OK;
  int64_t row = 0;
  bool dropped = false;
  for (int64_t expert = 0; expert < p.num_experts; ++expert) {
    const int64_t end = row + routed_per_expert[expert];
    dropped = dropped || (routed_per_expert[expert] > 0 && end > p.num_rows);
    row = (end + p.padding_alignment - 1) / p.padding_alignment * p.padding_alignment;
  }
  if (!dropped) return PMO_OK;
  return fail(PMO_INVALID_DATA, "buffer_size must be at least " + std::to_string(row) +
                                    ", the padded rows of this routing, but got " + std::to_string(p.num_rows));
}

int report_findings(const pmo_route_params& p, const pmo_route_findings& found, const int32_t* routed_per_expert) {
  if (const int status = report_data(p, found)) return status;
  return report_counts(p, routed_per_expert);
}

}  // namespace pmo

extern "C" int pmo_route_report(const pmo_route_params* params, const pmo_route_findings* findings,
                                const int32_t* routed_per_expert) {
  return pmo::guarded([&] {
    if (const int status = pmo::report_findings(*params, *findings, routed_per_expert)) return status;
    return pmo::report_overflow(*params, routed_per_expert);
  });
}

extern "C" int64_t pmo_padded_rows(const int32_t* counts, int64_t num_experts, int64_t padding_alignment) {
  int64_t rows = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    rows += (counts[expert] + padding_alignment - 1) / padding_alignment * padding_alignment;
  }
  return rows;
}
