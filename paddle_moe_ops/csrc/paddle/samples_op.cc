// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// Samples of matrices whose codes are kept, compared on their device without a host synchronisation. Python calls these operators
// directly, in dygraph only.
#include "paddle/direct.h"
#include "paddle/moe_mlp.h"
#include "pmo/samples.h"

#ifndef PMO_PADDLE_2  // Paddle before 3.0 has no float8

namespace {

using namespace pmo::binding;  // NOLINT: this file is the operators' own

constexpr char kValues[] = "the matrices must be contiguous, of 2 or 4 bytes for each element";
constexpr char kSamples[] = "the samples must be those of the matrices";

// Without `changed`, takes samples; otherwise compares them.
void run(const Target& target, const paddle::Tensor& values, int64_t step, const paddle::Tensor& samples,
         const paddle::Tensor* changed, const paddle::Tensor* scales) {
  pmo_samples_params p = {};
  p.struct_size = sizeof(p);
  p.num_samples = samples.numel();
  p.step = step;
  p.values = values.data();
  p.samples = const_cast<void*>(samples.data());
  if (changed != nullptr) p.changed = const_cast<int32_t*>(changed->data<int32_t>());
  if (scales != nullptr) {
    p.scales = const_cast<float*>(scales->data<float>());
    p.num_scales = scales->numel();
  }
  p.item_size = static_cast<int32_t>(phi::SizeOf(values.dtype()));
  check_status(PMO_CALL(target, samples, &p), kMoeMlp);
}

void require_values(const paddle::Tensor& values, int64_t count, int64_t step) {
  const size_t size = phi::SizeOf(values.dtype());
  require((size == 2 || size == 4) && values.is_contiguous(), kMoeMlp, kValues);
  require(count > 0 && step > 0 && step <= INT32_MAX && count <= INT32_MAX && (count - 1) * step < values.numel(), kMoeMlp,
          kSamples);
}

// -> samples [count] of values
Outputs take_samples(const paddle::Tensor& values, int64_t count, int64_t step) {
  const Target target(kMoeMlp, {&values});
  require_values(values, count, step);
  const paddle::Tensor samples = target.empty({count}, values.dtype());
  run(target, values, step, samples, nullptr, nullptr);
  return {samples};
}

// If a sample of the values differs from `samples`, sets the first element of `changed` to 1, and all scales to NaN. `changed` may be
// host memory, see the operator host_words.
Outputs compare_samples(const paddle::Tensor& values, int64_t step, const paddle::Tensor& samples, const paddle::Tensor& changed,
                        const paddle::Tensor& scales) {
  const Target target(kMoeMlp, {&values, &samples, &scales});
  require_values(values, samples.numel(), step);
  require_dtype(samples, values.dtype(), kMoeMlp, "the samples");
  require_dtype(changed, paddle::DataType::INT32, kMoeMlp, "the word");
  require_dtype(scales, paddle::DataType::FLOAT32, kMoeMlp, "the scales");
  require(changed.numel() > 0 && samples.is_contiguous() && scales.is_contiguous(), kMoeMlp, kSamples);
  run(target, values, step, samples, &changed, &scales);
  return {samples};
}

}  // namespace

PMO_DIRECT(take_samples, take_samples);
PMO_DIRECT(compare_samples, compare_samples);

#endif
