// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/routing.h"

#include <limits>

namespace pmo {
namespace binding {
namespace {

std::vector<int32_t> counts_of(const Target& target, const paddle::Tensor& tensor, const char* function) {
  require_rank(tensor, 1, function, "tokens_per_expert");
  const std::vector<int64_t> given = require_host_integers(target, dense(tensor), function, "tokens_per_expert");
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i] >= 0 && given[i] <= std::numeric_limits<int32_t>::max()) continue;
    fail(std::string(function) + ": tokens_per_expert must hold counts in [0, 2^31), but entry " + std::to_string(i) + " is " +
         std::to_string(given[i]));
  }
  return std::vector<int32_t>(given.begin(), given.end());
}

int32_t routing_kind(const paddle::Tensor& routing, const char* function) {
  if (routing.dtype() == paddle::DataType::BOOL) return PMO_ROUTING_MASK;
  return index_kind(routing, function, "the routing");
}

int64_t workspace_bytes(const Target& target, const pmo_route_params& params) {
#ifdef PMO_WITH_CUDA
  if (target.is_gpu()) return pmo_route_cuda_workspace_bytes(&params);
#else
  static_cast<void>(target);
#endif
  return pmo_route_cpu_workspace_bytes(&params);
}

}  // namespace

Routing::Routing(const Target& target, const RouteAttributes& attributes, const paddle::Tensor& routing,
                 const paddle::Tensor* probs, const paddle::Tensor* counts)
    : target_(target), attributes_(attributes) {
  const char* function = attributes.function;
  require_rank(routing, 2, function, "the routing");
  routing_ = dense(routing);
  if (probs != nullptr) {
    require_dtype(*probs, paddle::DataType::FLOAT32, function, "the probabilities");
    require_shape(*probs, routing.shape(), function, "the probabilities");
    probs_ = dense(*probs);
  }
  params.struct_size = sizeof(params);
  params.routing_kind = routing_kind(routing, function);
  const bool mask = params.routing_kind == PMO_ROUTING_MASK;
  params.num_tokens = routing.shape()[0];
  params.topk = mask ? attributes.topk : routing.shape()[1];
  params.num_experts = attributes.num_experts;
  require(!mask || routing.shape()[1] == attributes.num_experts, function, "the mask must have num_experts columns");
  params.padding_alignment = attributes.padding_alignment;
  params.routing = routing_.data();
  params.probs = probs == nullptr ? nullptr : probs_.data<float>();
  params.duplicates = attributes.duplicates;
  params.checks = attributes.checks;

  params.workspace_bytes = workspace_bytes(target, params);
  // 0 means an unusable size, which pmo_last_error() names; it must not be used for an allocation.
  if (params.workspace_bytes == 0) check_status(PMO_INVALID_ARGUMENT, function, attributes.names);
  require(attributes.buffer_size >= -1 && attributes.buffer_size <= std::numeric_limits<int32_t>::max(), function,
          "the static buffer must have -1 (none) or 0 to 2^31 - 1 rows");

  // A wrong list would leave holes or drop rows. Finding it costs a synchronisation on a GPU, so it is checked there only under
  // validation.
  const bool check_counts = !target.is_gpu() || params.checks != 0;
  if (attributes.buffer_size < 0 && attributes.counts_source != kCountsFromRouting && check_counts) {
    if (attributes.counts_source == kCountsFromTensor) {
      require(counts != nullptr, function, "tokens_per_expert is missing");
      expected_ = counts_of(target, *counts, function);
    } else {
      expected_.assign(attributes.counts.begin(), attributes.counts.end());
    }
    require(static_cast<int64_t>(expected_.size()) == attributes.num_experts, function,
            "tokens_per_expert must have num_experts entries");
    params.expected_per_expert = expected_.data();
    params.checks |= PMO_CHECK_COUNTS;
  }
  workspace_ = target_.empty({params.workspace_bytes}, paddle::DataType::UINT8);
  params.workspace = workspace_.data();
  routed_per_expert_ = target_.empty_int32({attributes.num_experts});
  params.routed_per_expert = routed_per_expert_.data<int32_t>();

  params.num_rows =
      static_num_rows(attributes.counts_source, attributes.counts, attributes.padding_alignment, attributes.buffer_size);
  const bool must_count = params.num_rows < 0;
  // On a GPU the routing kernels also count; separate launches are worth it only for a count that the host reads.
  if (!target.is_gpu() || must_count || params.checks != 0) {
    check_status(PMO_CALL(target, route_count, &params), function, attributes.names);
  }
  if (must_count || (target.is_gpu() && params.checks != 0)) {
    std::vector<int32_t> routed(static_cast<size_t>(params.num_experts));
    target.copy_to_host(params.routed_per_expert, params.num_experts * static_cast<int64_t>(sizeof(int32_t)), routed.data());
    if (must_count) params.num_rows = pmo_padded_rows(routed.data(), params.num_experts, params.padding_alignment);
    if (target.is_gpu() && params.checks != 0) report(routed.data());
  }
  if (params.num_rows > std::numeric_limits<int32_t>::max()) {
    fail(std::string(function) + ": padding_alignment must give a buffer of fewer than 2^31 rows, but " +
         std::to_string(attributes.padding_alignment) + " gives " + std::to_string(params.num_rows));
  }
}

// Reports findings on a GPU; CPU operators report theirs themselves.
void Routing::report(const int32_t* routed_per_expert) {
  pmo_route_findings findings;
  target_.copy_to_host(params.workspace, sizeof(findings), &findings);
  check_status(pmo_route_report(&params, &findings, routed_per_expert), attributes_.function, attributes_.names);
}

void Routing::run(const pmo_permute_params* permute) {
#ifdef PMO_WITH_CUDA
  if (target_.is_gpu()) {
    check_status(pmo_route_permute_cuda(&params, permute, target_.stream()), attributes_.function, attributes_.names);
    return;
  }
#endif
  check_status(pmo_route_cpu(&params, nullptr), attributes_.function, attributes_.names);
  if (permute != nullptr) check_status(pmo_permute_cpu(permute, nullptr), attributes_.function, attributes_.names);
}

Outputs Routing::outputs() {
  const int64_t rows = num_rows(), experts = attributes_.num_experts;
  paddle::Tensor slot_to_row = target_.empty_int32({params.num_tokens, params.topk});
  paddle::Tensor token_rows = target_.empty_int32({params.num_tokens, params.topk});
  paddle::Tensor row_to_token = target_.empty_int32({rows});
  paddle::Tensor row_to_slot = target_.empty_int32({rows});
  paddle::Tensor row_to_expert = target_.empty_int32({rows});
  paddle::Tensor row_probs = target_.empty_float32({probs_.defined() ? rows : 0});
  paddle::Tensor clamped_counts = target_.empty_int32({experts});
  paddle::Tensor expert_offsets = target_.empty_int32({experts + 1});
  paddle::Tensor overflow = target_.empty_int32({});
  params.slot_to_row = slot_to_row.data<int32_t>();
  params.token_rows = token_rows.data<int32_t>();
  params.row_to_token = row_to_token.data<int32_t>();
  params.row_to_slot = row_to_slot.data<int32_t>();
  params.row_to_expert = row_to_expert.data<int32_t>();
  params.row_probs = probs_.defined() ? row_probs.data<float>() : nullptr;
  params.tokens_per_expert = clamped_counts.data<int32_t>();
  params.expert_offsets = expert_offsets.data<int32_t>();
  params.overflow = overflow.data<int32_t>();
  return {slot_to_row, token_rows,     row_to_token,   row_to_slot,        row_to_expert,
          row_probs,   clamped_counts, expert_offsets, routed_per_expert_, overflow};
}

}  // namespace binding
}  // namespace pmo
