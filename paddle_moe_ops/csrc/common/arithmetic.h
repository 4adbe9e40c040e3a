// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Integer arithmetic, on hosts and GPUs.
#pragma once

// Marks functions that run on the host and on the GPU.
#ifdef __CUDACC__
#define PMO_ANYWHERE __host__ __device__
#else
#define PMO_ANYWHERE
#endif

namespace pmo {

// ceil(total / piece); neither may be negative.
template <typename Total, typename Piece>
PMO_ANYWHERE constexpr auto divide_up(Total total, Piece piece) {
  return (total + piece - 1) / piece;
}

// The smallest multiple of `piece` that is not less than `total`.
template <typename Total, typename Piece>
PMO_ANYWHERE constexpr auto round_up(Total total, Piece piece) {
  return divide_up(total, piece) * piece;
}

}  // namespace pmo
