// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The C library returns freed blocks of CPU memory to the system. So an output is often new to the process, and each of its pages
// is allocated when it is first written. Both calls of madvise make that cheaper. Results do not depend on whether the system
// follows them. Blocks that already have pages are skipped, to save the time of the calls.
#include "paddle/pages.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "common/arithmetic.h"
#include "cpu/pool.h"

namespace pmo {
namespace binding {

#if defined(__linux__) && defined(MADV_HUGEPAGE)
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;       // on x86-64, and on aarch64 with pages of 4 KiB
constexpr uintptr_t kReusedBytes = uintptr_t{128} << 10;  // the C library keeps smaller blocks
constexpr int kPopulateWrite = 23;                        // MADV_POPULATE_WRITE of Linux 5.14, which older headers do not have

// Tests one page: blocks that were used before have all of their pages, new ones have none.
bool is_new(uintptr_t address, uintptr_t page) {
  unsigned char in_memory = 0;
  return mincore(reinterpret_cast<void*>(address), page, &in_memory) == 0 && (in_memory & 1) == 0;
}

}  // namespace

void prepare_pages(const Target& target, const paddle::Tensor& output) {
  const uintptr_t bytes = static_cast<uintptr_t>(output.numel()) * phi::SizeOf(output.dtype());
  if (target.is_gpu() || bytes < kReusedBytes) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t data = reinterpret_cast<uintptr_t>(output.data());
  const uintptr_t begin = round_up(data, page);
  const uintptr_t end = (data + bytes) / page * page;
  if (begin + page > end) return;
  if (!is_new(end - page, page)) return;
  if (round_up(begin, kHugePage) + kHugePage <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  // Several threads write a larger output, and populate its pages in parallel.
  if (bytes <= static_cast<uintptr_t>(cpu::kOneThreadBytes)) madvise(reinterpret_cast<void*>(begin), end - begin, kPopulateWrite);
}
#else
void prepare_pages(const Target&, const paddle::Tensor&) {}
#endif

}  // namespace binding
}  // namespace pmo
