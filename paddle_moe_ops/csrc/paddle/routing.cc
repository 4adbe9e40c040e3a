// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "paddle/routing.h"

#include <limits>

namespace pmo {
namespace binding {
namespace {

std::vector<int32_t> counts_of(const paddle::Tensor& tensor, const char* function) {
  require_rank(tensor, 1, function, "tokens_per_expert");
  const paddle::Tensor counts = dense(tensor);
  const int64_t size = counts.numel();
  if (counts.dtype() == paddle::DataType::INT32) {
    return std::vector<int32_t>(counts.data<int32_t>(), counts.data<int32_t>() + size);
  }
  require_dtype(counts, paddle::DataType::INT64, function, "tokens_per_expert");
  std::vector<int32_t> result(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    const int64_t count = counts.data<int64_t>()[i];
    // no such count can be right: -1 makes the comparison with the routed rows fail
    result[i] = count < 0 || count > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(count);
  }
  return result;
}

int32_t routing_kind(const paddle::Tensor& routing, const char* function) {
  switch (routing.dtype()) {
    case paddle::DataType::INT32:
      return PMO_ROUTING_IDS32;
    case paddle::DataType::INT64:
      return PMO_ROUTING_IDS64;
    case paddle::DataType::BOOL:
      return PMO_ROUTING_MASK;
    default:
      fail(std::string(function) + ": the routing has the wrong dtype");
  }
}

}  // namespace

Routing::Routing(const RouteAttributes& attributes, const paddle::Tensor& routing, const paddle::Tensor* probs,
                 const paddle::Tensor* counts)
    : attributes_(attributes) {
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

  params.workspace_bytes = pmo_route_cpu_workspace_bytes(&params);
  // 0 says that a size is unusable, and pmo_last_error() which; nothing may be allocated by it.
  if (params.workspace_bytes == 0) check_status(PMO_INVALID_ARGUMENT, function, attributes.names);
  require(attributes.buffer_size >= -1 && attributes.buffer_size <= std::numeric_limits<int32_t>::max(), function,
          "the static buffer must have -1 (none) or 0 to 2^31 - 1 rows");

  if (attributes.buffer_size < 0 && attributes.counts_source != kCountsFromRouting) {
    if (attributes.counts_source == kCountsFromTensor) {
      require(counts != nullptr, function, "tokens_per_expert is missing");
      expected_ = counts_of(*counts, function);
    } else {
      expected_.assign(attributes.counts.begin(), attributes.counts.end());
    }
    require(static_cast<int64_t>(expected_.size()) == attributes.num_experts, function,
            "tokens_per_expert must have num_experts entries");
    params.expected_per_expert = expected_.data();
    params.checks |= PMO_CHECK_COUNTS;  // a wrong list would leave holes or run past the buffer: never unchecked
  }

  workspace_ = paddle::empty({params.workspace_bytes}, paddle::DataType::UINT8, routing.place());
  params.workspace = workspace_.data();
  routed_per_expert_ = empty_int32({attributes.num_experts}, routing);
  params.routed_per_expert = routed_per_expert_.data<int32_t>();
  check_status(pmo_route_count_cpu(&params, nullptr), function, attributes.names);

  params.num_rows = attributes.buffer_size >= 0
                        ? attributes.buffer_size
                        : pmo_padded_rows(params.routed_per_expert, attributes.num_experts, attributes.padding_alignment);
  require(params.num_rows <= std::numeric_limits<int32_t>::max(), function, "the permuted buffer must have fewer than 2^31 rows");
}

void Routing::run() { check_status(pmo_route_cpu(&params, nullptr), attributes_.function, attributes_.names); }

}  // namespace binding
}  // namespace pmo
