// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The router's top-k and its gradient on the CPU. Threads own contiguous ranges of tokens and process them one by one.
//
// A token's values become integers in the order of choice (common/scoring.h). A partial sort moves the highest to the front,
// mostly with one comparison per expert. Bytes moved: T * E elements and T * K ids and weights; with scores, T * E elements more.
// The gradient reads and writes T * E elements.
#include "pmo/topk.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "common/checks.h"
#include "common/scoring.h"
#include "common/status.h"
#include "cpu/float_rows.h"
#include "cpu/pool.h"

namespace pmo {
namespace cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Cost of an expert for a thread, as the number of bytes that a copy moves in the same time.
constexpr int64_t kBytesPerExpert = 32;

// The sum of term(i) for i in [0, count), in the order of common/scoring.h.
template <typename Term>
float lane_sum(int64_t count, Term term) {
  float lanes[kScoreLanes] = {};
  int64_t first = 0;
  for (; first + kScoreLanes <= count; first += kScoreLanes) {
    for (int lane = 0; lane < kScoreLanes; ++lane) lanes[lane] += term(first + lane);
  }
  for (int64_t i = first; i < count; ++i) lanes[i - first] += term(i);
  for (int width = kScoreLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The scores of some logits, not rounded; they may overwrite the logits.
void activate(const float* logits, int64_t count, bool use_sigmoid, float* scores) {
  if (use_sigmoid) {
    for (int64_t i = 0; i < count; ++i) scores[i] = sigmoid(logits[i]);
    return;
  }
  uint32_t highest_key = 0;
  for (int64_t i = 0; i < count; ++i) highest_key = std::max(highest_key, key_of(logits[i]));
  const float highest = value_of(highest_key);
  for (int64_t i = 0; i < count; ++i) scores[i] = exp_minus(highest - logits[i]);
  const float sum = lane_sum(count, [&](int64_t i) { return scores[i]; });
  for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
}

template <typename Rows>
using Element = typename Rows::Element;

template <typename Rows>
void load(const void* array, int64_t first, int64_t count, float* values) {
  const auto* elements = static_cast<const Element<Rows>*>(array) + first;
  for (int64_t i = 0; i < count; ++i) values[i] = Rows::load(elements[i]);
}

template <typename Rows>
void store(const float* values, int64_t count, void* array, int64_t first) {
  auto* elements = static_cast<Element<Rows>*>(array) + first;
  for (int64_t i = 0; i < count; ++i) elements[i] = Rows::store(values[i]);
}

template <typename Rows>
void round_to(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = Rows::load(Rows::store(values[i]));
}

// Sorts the highest `count` candidates to the front, in descending order.
void sort_highest(uint64_t* candidates, int64_t size, int64_t count) {
  std::partial_sort(candidates, candidates + count, candidates + size, std::greater<uint64_t>());
}

// A thread's router, with memory for one token.
class Router {
 public:
  explicit Router(const pmo_topk_params& p)
      : p_(p),
        group_size_(p.num_experts / p.num_groups),
        logits_(p.num_experts),
        scores_(p.num_experts),
        weights_(p.topk),
        candidates_(p.num_experts),
        groups_(p.num_groups) {}

  template <typename Rows>
  void run(int64_t token) {
    load<Rows>(p_.gating, token * p_.gating_row_stride, p_.num_experts, logits_.data());
    if (p_.pre_act != 0 || p_.scores != nullptr) {
      activate(logits_.data(), p_.num_experts, p_.use_sigmoid != 0, scores_.data());
      round_to<Rows>(scores_.data(), p_.num_experts);
    }
    if (p_.scores != nullptr) store<Rows>(scores_.data(), p_.num_experts, p_.scores, token * p_.num_experts);
    choose();
    const std::vector<float>& values = p_.pre_act != 0 ? scores_ : logits_;
    int64_t* ids = p_.ids + token * p_.topk;
    for (int64_t k = 0; k < p_.topk; ++k) {
      ids[k] = place_of(candidates_[k]);
      weights_[k] = values[ids[k]];
    }
    weigh<Rows>();
    store<Rows>(weights_.data(), p_.topk, p_.weights, token * p_.topk);
  }

 private:
  // Moves the token's experts to the front of the candidates.
  void choose() {
    const float* values = p_.pre_act != 0 ? scores_.data() : logits_.data();
    const float* bias = p_.correction_bias;
    for (int64_t expert = 0; expert < p_.num_experts; ++expert) {
      candidates_[expert] = candidate(key_of(bias == nullptr ? values[expert] : values[expert] + bias[expert]), expert);
    }
    int64_t size = p_.num_experts;
    if (p_.topk_groups < p_.num_groups) size = keep_groups();
    sort_highest(candidates_.data(), size, p_.topk);
  }

  // Moves the candidates of the best groups to the front; returns their number.
  int64_t keep_groups() {
    const int64_t count = std::min(p_.scores_per_group, group_size_);
    for (int64_t group = 0; group < p_.num_groups; ++group) {
      uint64_t* members = candidates_.data() + group * group_size_;
      sort_highest(members, group_size_, count);
      float sum = value_of(static_cast<uint32_t>(members[0] >> 32));
      for (int64_t rank = 1; rank < count; ++rank) sum += value_of(static_cast<uint32_t>(members[rank] >> 32));
      groups_[group] = candidate(key_of(sum), group);
    }
    sort_highest(groups_.data(), p_.num_groups, p_.topk_groups);
    // In ascending order no group is overwritten before it is moved.
    std::sort(groups_.begin(), groups_.begin() + p_.topk_groups,
              [](uint64_t a, uint64_t b) { return place_of(a) < place_of(b); });
    for (int64_t rank = 0; rank < p_.topk_groups; ++rank) {
      const auto members = candidates_.begin() + place_of(groups_[rank]) * group_size_;
      std::copy(members, members + group_size_, candidates_.begin() + rank * group_size_);
    }
    return p_.topk_groups * group_size_;
  }

  // Computes the weights from the values that experts are chosen by, without the bias.
  template <typename Rows>
  void weigh() {
    if (p_.pre_act == 0) {
      activate(weights_.data(), p_.topk, p_.use_sigmoid != 0, weights_.data());
      round_to<Rows>(weights_.data(), p_.topk);
    }
    float divisor = 1.0f;
    if (p_.renormalize != 0) {
      float sum = lane_sum(p_.topk, [&](int64_t k) { return weights_[k]; });
      round_to<Rows>(&sum, 1);
      divisor = divisor_of(sum);
    }
    for (float& weight : weights_) weight = weight / divisor * p_.scaling_factor;
  }

  const pmo_topk_params& p_;
  const int64_t group_size_;
  std::vector<float> logits_, scores_, weights_;
  std::vector<uint64_t> candidates_, groups_;
};

// A thread's gradient of a router, with memory for one token.
class RouterBackward {
 public:
  explicit RouterBackward(const pmo_topk_backward_params& p)
      : p_(p), logits_(p.num_experts), scores_(p.num_experts), d_logits_(p.num_experts), weights_(p.topk), d_weights_(p.topk) {}

  template <typename Rows>
  void run(int64_t token) {
    const int64_t experts = p_.num_experts;
    ids_ = p_.ids + token * p_.topk;
    load<Rows>(p_.gating, token * p_.gating_row_stride, experts, logits_.data());
    // The slopes of sigmoids need no scores; among weights, only renormalised ones do.
    if (p_.pre_act != 0 || p_.d_scores != nullptr) activate(logits_.data(), experts, p_.use_sigmoid != 0, scores_.data());
    load_d_weights<Rows>(token);
    if (p_.d_scores != nullptr) {
      load<Rows>(p_.d_scores, token * experts, experts, d_logits_.data());
    } else {
      std::fill(d_logits_.begin(), d_logits_.end(), 0.0f);
    }
    p_.use_sigmoid != 0 ? through_sigmoid() : through_softmax();
    store<Rows>(d_logits_.data(), experts, p_.d_gating, token * experts);
  }

 private:
  bool is_expert(int64_t k) const { return ids_[k] >= 0 && ids_[k] < p_.num_experts; }

  // Loads the weights before renormalisation, their divisor, and the gradients of the quotients without the term that all slots
  // share. An invalid id has zeros.
  template <typename Rows>
  void load_d_weights(int64_t token) {
    const int64_t topk = p_.topk;
    for (int64_t k = 0; k < topk; ++k) {
      const float none = p_.pre_act != 0 ? 0.0f : -kInfinity;
      weights_[k] = is_expert(k) ? (p_.pre_act != 0 ? scores_[ids_[k]] : logits_[ids_[k]]) : none;
    }
    if (p_.pre_act == 0) activate(weights_.data(), topk, p_.use_sigmoid != 0, weights_.data());
    divisor_ = 1.0f;
    if (p_.d_weights == nullptr) {
      std::fill(d_weights_.begin(), d_weights_.end(), 0.0f);
      return;
    }
    load<Rows>(p_.d_weights, token * topk, topk, d_weights_.data());
    for (int64_t k = 0; k < topk; ++k) d_weights_[k] = is_expert(k) ? d_weights_[k] * p_.scaling_factor : 0.0f;
    if (p_.renormalize == 0) return;
    divisor_ = divisor_of(lane_sum(topk, [&](int64_t k) { return weights_[k]; }));
    // Computed from the quotients: a single weight, which is 1, has a gradient of exactly 0.
    const float through_sum = sum_of_products();
    for (float& d_weight : d_weights_) d_weight -= through_sum;
  }

  float sum_of_products() const {
    return lane_sum(p_.topk, [&](int64_t k) { return d_weights_[k] * (weights_[k] / divisor_); });
  }

  void through_sigmoid() {
    for (int64_t i = 0; i < p_.num_experts; ++i) d_logits_[i] *= sigmoid_slope(logits_[i]);
    add_d_weights([&](int64_t k) { return d_weights_[k] * (sigmoid_slope(logits_[ids_[k]]) / divisor_); });
  }

  void through_softmax() {
    const float of_weights = sum_of_products();
    const auto own = [&](int64_t k) { return d_weights_[k] * (weights_[k] / divisor_); };
    if (p_.pre_act != 0 || p_.d_scores != nullptr) {
      float dot = lane_sum(p_.num_experts, [&](int64_t i) { return d_logits_[i] * scores_[i]; });
      if (p_.pre_act != 0) dot += of_weights;
      for (int64_t i = 0; i < p_.num_experts; ++i) d_logits_[i] = scores_[i] * (d_logits_[i] - dot);
    }
    if (p_.pre_act != 0) {
      add_d_weights(own);
    } else {
      add_d_weights([&](int64_t k) { return own(k) - weights_[k] * of_weights; });
    }
  }

  template <typename Term>
  void add_d_weights(Term term) {
    for (int64_t k = 0; k < p_.topk; ++k) {
      if (is_expert(k)) d_logits_[ids_[k]] += term(k);
    }
  }

  const pmo_topk_backward_params& p_;
  const int64_t* ids_ = nullptr;
  float divisor_ = 1.0f;
  std::vector<float> logits_, scores_, d_logits_, weights_, d_weights_;
};

// Runs a worker of its own over each range of tokens.
template <typename Worker, typename Params>
int each_token(const Params& p) {
  return with_rows(p.dtype, [&](auto rows) -> int {
    parallel_ranges(p.num_tokens, p.num_tokens * p.num_experts * kBytesPerExpert, p.num_threads, [&](int64_t begin, int64_t end) {
      Worker worker(p);
      for (int64_t token = begin; token < end; ++token) worker.template run<decltype(rows)>(token);
    });
    return PMO_OK;
  });
}

int topk(const pmo_topk_params& p) {
  const int status = check_topk(p);
  return status != PMO_OK ? status : each_token<Router>(p);
}

int topk_backward(const pmo_topk_backward_params& p) {
  const int status = check_topk_backward(p);
  return status != PMO_OK ? status : each_token<RouterBackward>(p);
}

}  // namespace
}  // namespace cpu
}  // namespace pmo

extern "C" int pmo_topk_cpu(const pmo_topk_params* params, void* stream) { return pmo::run_cpu(params, stream, pmo::cpu::topk); }

extern "C" int pmo_topk_backward_cpu(const pmo_topk_backward_params* params, void* stream) {
  return pmo::run_cpu(params, stream, pmo::cpu::topk_backward);
}
