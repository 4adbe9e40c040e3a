// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

#include "common/status.h"

namespace pmo {
namespace {
thread_local std::string last_error;
}  // namespace

int fail(pmo_status status, const std::string& text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();  // no memory for the text: the caller still sees the status
  }
  return status;
}

std::string list_text(const int32_t* values, int64_t size) {
  std::string text = "[";
  for (int64_t i = 0; i < size; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

}  // namespace pmo

extern "C" const char* pmo_last_error(void) { return pmo::last_error.c_str(); }
