// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The routing step that `route` and `moe_permute` have in common.
#pragma once

#include "paddle/binding.h"
#include "pmo/permute.h"
#include "pmo/route.h"

namespace pmo {
namespace binding {

// Source of the number of rows per expert.
enum CountsSource {
  kCountsFromRouting = 0,
  kCountsFromList = 1,
  kCountsFromTensor = 2,
};

// Rows of the permuted buffer as far as attributes determine them; -1 = known only at run time. Never throws.
inline int64_t static_num_rows(int counts_source, const std::vector<int>& counts, int64_t padding_alignment,
                               int64_t buffer_size) {
  if (buffer_size >= 0) return buffer_size;
  if (counts_source != kCountsFromList || padding_alignment < 1) return -1;
  for (const int count : counts) {
    if (count < 0) return -1;
  }
  return pmo_padded_rows(counts.data(), static_cast<int64_t>(counts.size()), padding_alignment);
}

struct RouteAttributes {
  const char* function;
  Names names;
  int64_t topk;
  int64_t num_experts;
  int64_t padding_alignment;
  int64_t buffer_size;
  int counts_source;
  const std::vector<int>& counts;
  int duplicates;
  int checks;
};

// The routing of one call. The constructor counts if it must; `params` then waits for its outputs and run(). On a GPU it
// synchronises if the number of rows has to be read back, or if checks are enabled.
class Routing {
 public:
  Routing(const Target& target, const RouteAttributes& attributes, const paddle::Tensor& routing, const paddle::Tensor* probs,
          const paddle::Tensor* counts);

  // Allocates the ten tensors of a plan, which run() writes.
  Outputs outputs();

  // Writes the maps. If `permute` is given, also permutes its rows.
  void run(const pmo_permute_params* permute = nullptr);

  int64_t num_rows() const { return params.num_rows; }
  const paddle::Tensor& workspace() const { return workspace_; }
  const paddle::Tensor& routed_per_expert() const { return routed_per_expert_; }

  pmo_route_params params = {};

 private:
  void report(const int32_t* routed_per_expert);

  const Target& target_;
  RouteAttributes attributes_;
  paddle::Tensor routing_, probs_, workspace_, routed_per_expert_;
  std::vector<int32_t> expected_;
};

}  // namespace binding
}  // namespace pmo
