// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "common/chunks.h"

#include <string>
#include <vector>

#include "common/dtypes.h"
#include "common/ids.h"
#include "common/status.h"

namespace pmo {
namespace {

int report_sizes(const pmo_sort_chunks_params& p) {
  int64_t rows = 0;
  for (int64_t chunk = 0; chunk < p.num_chunks; ++chunk) {
    const int64_t size = id_at(p.split_sizes, p.split_sizes_kind, chunk);
    if (size < 0) {
      return fail(PMO_INVALID_DATA, "split_sizes must hold no negative numbers, but entry " + std::to_string(chunk) + " is " +
                                        std::to_string(size));
    }
    if (size > p.num_rows - rows) {
      return fail(PMO_INVALID_DATA, "split_sizes must add up to at most " + std::to_string(p.num_rows) +
                                        ", the number of rows, but the sum exceeds this at entry " + std::to_string(chunk));
    }
    rows += size;
  }
  return PMO_OK;
}

int report_order(const pmo_sort_chunks_params& p) {
  std::vector<int64_t> place(static_cast<size_t>(p.num_chunks), -1);
  for (int64_t entry = 0; entry < p.num_chunks; ++entry) {
    const int64_t chunk = id_at(p.order, p.order_kind, entry);
    if (chunk < 0 || chunk >= p.num_chunks) {
      if ((p.checks & PMO_CHECK_RANGE) == 0) continue;
      return fail(PMO_INVALID_DATA, "order must hold chunks in [0, " + std::to_string(p.num_chunks) + "), but entry " +
                                        std::to_string(entry) + " is " + std::to_string(chunk));
    }
    if (place[chunk] >= 0 && (p.checks & PMO_CHECK_DUPLICATES) != 0) {
      return fail(PMO_INVALID_DATA, "order must name every chunk once, but names chunk " + std::to_string(chunk) +
                                        " in entries " + std::to_string(place[chunk]) + " and " + std::to_string(entry));
    }
    if (place[chunk] < 0) place[chunk] = entry;
  }
  return PMO_OK;
}

}  // namespace

int check_sort_chunks(const pmo_sort_chunks_params& p) {
  PMO_REQUIRE(p.struct_size == sizeof(pmo_sort_chunks_params), "struct_size",
              "the size of pmo_sort_chunks_params of this library");
  PMO_REQUIRE_COUNT(p.num_rows, "num_rows");
  PMO_REQUIRE(p.num_chunks >= 0 && p.num_chunks <= kMaxSortedChunks, "num_chunks", "in [0, 2^20]");
  PMO_REQUIRE_COLUMNS(p.hidden, "hidden");
  PMO_REQUIRE(dtype_size(p.dtype) > 0, "dtype", "one of pmo_dtype");
  PMO_REQUIRE(is_id_kind(p.split_sizes_kind), "split_sizes_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(is_id_kind(p.order_kind), "order_kind", "PMO_ROUTING_IDS32 or PMO_ROUTING_IDS64");
  PMO_REQUIRE(is_id_array(p.split_sizes, p.split_sizes_kind, p.num_chunks), "split_sizes",
              "an array aligned to its element size");
  PMO_REQUIRE(is_id_array(p.order, p.order_kind, p.num_chunks), "order", "an array aligned to its element size");
  PMO_REQUIRE(p.out == nullptr || p.x != nullptr || p.num_rows * p.hidden == 0, "x", "given when out is wanted");
  PMO_REQUIRE_ARRAY(p.probs, p.probs_out == nullptr ? 0 : p.num_rows, "probs");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.probs_out, "probs_out");
  PMO_REQUIRE_OPTIONAL_ARRAY(p.source_to_dest, "source_to_dest");
  return PMO_OK;
}

int report_chunks(const pmo_sort_chunks_params& p) {
  if ((p.checks & PMO_CHECK_RANGE) != 0) {
    if (const int status = report_sizes(p)) return status;
  }
  return (p.checks & (PMO_CHECK_RANGE | PMO_CHECK_DUPLICATES)) == 0 ? PMO_OK : report_order(p);
}

}  // namespace pmo

extern "C" int pmo_sort_chunks_report(const pmo_sort_chunks_params* params) {
  if (params == nullptr) return pmo::fail(PMO_INVALID_ARGUMENT, "params must be given");
  return pmo::guarded([&] {
    if (const int status = pmo::check_sort_chunks(*params)) return status;
    return pmo::report_chunks(*params);
  });
}
