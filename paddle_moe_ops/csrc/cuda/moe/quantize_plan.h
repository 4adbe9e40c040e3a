// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Decision whether column-major scales are written once per token and transposed by a second kernel (quantize.cu). Plain C++,
// tested without a GPU.
#pragma once

#include <cstdint>

#include "common/scales.h"

namespace pmo {
namespace cuda {

// scale words; with fewer, a second launch takes longer than single-word stores
constexpr int64_t kMinWordsToTranspose = int64_t{1} << 19;

inline bool may_transpose_scales(const pmo_quantize_params& p) { return p.scale_layout == PMO_SCALES_BY_COLUMN && p.ue8m0 == 0; }

// Bytes of the scales of all tokens.
inline int64_t token_scale_bytes(const pmo_quantize_params& p) {
  return p.num_tokens * ScaleLayout(p).groups * int64_t{sizeof(float)};
}

// True if this call transposes scales. Without slots there are none, and no map tells rows of tokens from padding.
inline bool transposes_scales(const pmo_quantize_params& p) {
  return may_transpose_scales(p) && p.num_tokens * p.topk > 0 && p.workspace != nullptr &&
         p.workspace_bytes >= token_scale_bytes(p);
}

// Workspace that the call needs, in bytes; 0 if single-word stores are faster.
inline int64_t wanted_workspace_bytes(const pmo_quantize_params& p) {
  const bool is_worth_it = may_transpose_scales(p) && p.num_rows * ScaleLayout(p).words >= kMinWordsToTranspose;
  return is_worth_it ? token_scale_bytes(p) : 0;
}

}  // namespace cuda
}  // namespace pmo
