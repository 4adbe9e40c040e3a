// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Which column-major scales are written once per token and turned by a second kernel (quantize.cu). Plain C++, tested without a GPU.
#pragma once

#include <cstdint>

#include "common/scales.h"

namespace pmo {
namespace cuda {

constexpr int64_t kManyWords = int64_t{1} << 19;  // below it a second launch takes longer than single words

inline bool may_turn_scales(const pmo_quantize_params& p) { return p.scale_layout == PMO_SCALES_BY_COLUMN && p.ue8m0 == 0; }

// Bytes of the tokens' scales.
inline int64_t token_scale_bytes(const pmo_quantize_params& p) {
  return p.num_tokens * ScaleLayout(p).groups * int64_t{sizeof(float)};
}

// Whether this call turns them. Without slots there is nothing to turn, and no map that tells rows of tokens from padding.
inline bool turns_scales(const pmo_quantize_params& p) {
  return may_turn_scales(p) && p.num_tokens * p.topk > 0 && p.workspace != nullptr && p.workspace_bytes >= token_scale_bytes(p);
}

// What a caller is asked for: 0 where single words are faster.
inline int64_t wanted_workspace_bytes(const pmo_quantize_params& p) {
  const bool is_worth_it = may_turn_scales(p) && p.num_rows * ScaleLayout(p).words >= kManyWords;
  return is_worth_it ? token_scale_bytes(p) : 0;
}

}  // namespace cuda
}  // namespace pmo
