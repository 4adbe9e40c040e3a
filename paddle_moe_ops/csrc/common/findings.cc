// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Texts of findings of the checks, the same on every backend.
#include <algorithm>
#include <string>

#include "common/findings.h"
#include "common/padding.h"
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

// A count that includes its segment's padding is accepted too: dispatchers return such counts, and the segments are the same.
int report_counts(const pmo_route_params& p, const int32_t* routed_per_expert) {
  const int64_t alignment = p.padding_alignment;
  const auto is_right = [alignment](int64_t routed, int64_t given) {
    return given == routed || given == segment_rows(routed, alignment);
  };
  if ((p.checks & PMO_CHECK_COUNTS) == 0 || p.expected_per_expert == nullptr ||
      std::equal(routed_per_expert, routed_per_expert + p.num_experts, p.expected_per_expert, is_right)) {
    return PMO_OK;
  }
  const std::string padded = alignment == 1 ? "" : ", with or without the padding to a multiple of " + std::to_string(alignment);
  return fail(PMO_INVALID_DATA, "tokens_per_expert must be " + list_text(routed_per_expert, p.num_experts) +
                                    ", the rows routed to each expert" + padded + ", but got " +
                                    list_text(p.expected_per_expert, p.num_experts));
}

}  // namespace

std::string bad_id_text(int64_t num_experts, int64_t topk, int64_t slot, int64_t id) {
  return "routing must hold expert ids in [-1, " + std::to_string(num_experts) + "), but " + place_text(slot, topk, "slot") +
         " holds " + std::to_string(id);
}

int report_overflow(const pmo_route_params& p, const int32_t* routed_per_expert) {
  if ((p.checks & PMO_CHECK_OVERFLOW) == 0) return PMO_OK;
  bool dropped = false;
  const int64_t rows = each_segment(p.num_experts, p.padding_alignment, [&](int64_t expert, int64_t start) {
    const int64_t routed = routed_per_expert[expert];
    dropped = dropped || rows_inside(start, routed, p.num_rows) < routed;
    return routed;
  });
  if (!dropped) return PMO_OK;
  return fail(PMO_INVALID_DATA, "buffer_size must be at least " + std::to_string(rows) +
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

extern "C" int pmo_clean_rowmap_report(const pmo_clean_rowmap_params* params, const pmo_rowmap_findings* findings) {
  return pmo::guarded([&] {
    const pmo_clean_rowmap_params& p = *params;
    const pmo_rowmap_findings& found = *findings;
    const bool range = (p.checks & PMO_CHECK_RANGE) != 0;
    if (range && found.bad_id_place != PMO_NOWHERE) {
      return pmo::fail(PMO_INVALID_DATA, pmo::bad_id_text(p.num_experts, p.topk, found.bad_id_place, found.bad_id));
    }
    if (range && found.bad_row_place != PMO_NOWHERE) {
      return pmo::fail(PMO_INVALID_DATA, "zipped_expertwise_rowmap must hold rows in [-1, " + std::to_string(p.num_rows) +
                                             "), but " + pmo::place_text(found.bad_row_place, p.num_experts, "expert") +
                                             " holds " + std::to_string(found.bad_row));
    }
    if ((p.checks & PMO_CHECK_DUPLICATES) != 0 && found.repeat_place != PMO_NOWHERE) {
      return pmo::fail(PMO_INVALID_DATA, "zipped_expertwise_rowmap must name a row at most once, but row " +
                                             std::to_string(found.repeat_row) + " is at " +
                                             pmo::place_text(found.repeat_first, p.num_experts, "expert") + " and at " +
                                             pmo::place_text(found.repeat_place, p.num_experts, "expert"));
    }
    return static_cast<int>(PMO_OK);
  });
}

extern "C" int64_t pmo_padded_rows(const int32_t* counts, int64_t num_experts, int64_t padding_alignment) {
  return pmo::each_segment(num_experts, padding_alignment, [&](int64_t expert, int64_t) { return counts[expert]; });
}
