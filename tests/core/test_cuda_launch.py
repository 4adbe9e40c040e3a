# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The host's side of a launch, without a GPU: compiled with a CUDA runtime of the tests, which runs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from .compiling import CSRC, compile_cpp, run_clean

pytestmark = [pytest.mark.cpu_only, pytest.mark.own_program]

FAKE_CUDA = Path(__file__).with_name("fake_cuda")
HEAD = r"""
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "cuda/launch.h"

using namespace pmo::cuda;

inline void kernel(int) {}
inline void other_kernel(int) {}

inline int launch_kernel(unsigned blocks) { return launch("kernel", kernel, {blocks, 128}, nullptr, 5); }

inline void show(const char* what, int status) {
  const char* text = status == PMO_OK ? "" : pmo_last_error();
  std::printf("%s: %d %s | left %d\n", what, status, text, int(cudaPeekAtLastError()));
}
"""


def run(folder: Path, code: str) -> list[str]:
    """The lines that a program prints."""
    includes = [f"-I{path}" for path in (FAKE_CUDA, CSRC, CSRC / "include")]
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", str(CSRC / "common" / "status.cc")]
    return run_clean([str(compile_cpp(folder / "program", HEAD + code, *includes, *options))]).splitlines()


ERRORS = r"""
int main() {
  show("good", launch_kernel(7));
  show("bad", launch_kernel(0));
  show("after a bad one", launch_kernel(7));
  fake::last_error = cudaErrorNotReady;  // as somebody's cudaStreamQuery leaves it
  show("beside a foreign error", launch_kernel(7));
  show("bad beside a foreign error", launch_kernel(0));
  fake::lost = cudaErrorIllegalAddress;
  show("after a kernel went wrong", launch_kernel(7));
  fake::lost = cudaSuccess;
  fake::attributes[cudaDevAttrComputeCapabilityMajor] = 7;
  fake::attributes[cudaDevAttrComputeCapabilityMinor] = 5;
  fake::before_launch = [] { return cudaErrorNoKernelImageForDevice; };
  show("on an old GPU", launch_kernel(7));
  std::printf("%d launches\n", fake::launches);
}
"""


def test_a_launch_reports_its_own_error_and_leaves_none_behind(tmp_path: Path) -> None:
    invalid = "CUDA: kernel: invalid configuration argument"
    lost = "CUDA: kernel: kernels launched before failed: an illegal memory access was encountered"
    old = (
        "CUDA: kernel: no kernel image is available for execution on the device; "
        "the kernels need compute capability 8.0 or newer, but this GPU has 7.5"
    )
    assert run(tmp_path, ERRORS) == [
        "good: 0  | left 0",
        f"bad: 3 {invalid} | left 0",
        "after a bad one: 0  | left 0",
        "beside a foreign error: 0  | left 600",
        f"bad beside a foreign error: 3 {invalid} | left 0",
        f"after a kernel went wrong: 3 {lost} | left 0",
        f"on an old GPU: 3 {old} | left 0",
        "3 launches",
    ]


SHARED_MEMORY = r"""
constexpr size_t kMost = 100 << 10;

static SharedMemoryLimit limit;

static int launch_with(size_t bytes) {
  if (const int status = limit.raise(kernel, fake::device, kMost)) return status;
  return launch("kernel", kernel, {7, 128, bytes}, nullptr, 5);
}

int main() {
  bool is_alone = true;
  fake::before_launch = [&] {
    if (is_alone) {  // between what this thread sets and what it launches, another one does both
      is_alone = false;
      std::thread([] { show("the other thread", launch_with(60 << 10)); }).join();
    }
    return cudaSuccess;
  };
  show("this thread", launch_with(90 << 10));
  for (int i = 0; i < 3; ++i) launch_with(80 << 10);
  std::printf("set %d times\n", fake::limits_set);
  fake::device = 3;
  show("another device", launch_with(90 << 10));
  std::printf("set %d times\n", fake::limits_set);
  SharedMemoryLimit of_other;
  if (of_other.raise(other_kernel, fake::device, kMost)) return 1;
  show("another kernel", launch("other_kernel", other_kernel, {7, 128, kMost}, nullptr, 5));
  show("more than that", launch_with(kMost + 1));
}
"""


def test_no_thread_lowers_the_shared_memory_that_another_is_about_to_use(tmp_path: Path) -> None:
    assert run(tmp_path, SHARED_MEMORY) == [
        "the other thread: 0  | left 0",
        "this thread: 0  | left 0",
        "set 1 times",
        "another device: 0  | left 0",
        "set 2 times",
        "another kernel: 0  | left 0",
        "more than that: 3 CUDA: kernel: another error | left 0",
    ]


ONCE = r"""
int main() {
  static OncePerDevice<int> squares;
  std::atomic<int> found{0}, wrong{0}, failed{0};
  const auto find = [&](int device) {
    int square = -1;
    const int status = squares.get(device, &square, [&](int* value) {
      if (found++ == 0) return 9;  // the very first attempt fails, and the next one succeeds
      *value = device * device;
      return 0;
    });
    failed += status == 9;
    wrong += status == 0 && square != device * device;
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) find(j % 16);
    });
  }
  for (auto& thread : threads) thread.join();
  std::printf("%d found, %d failed, %d wrong\n", found.load(), failed.load(), wrong.load());
  for (int i = 0; i < 3; ++i) find(1000);  // beyond what is kept
  std::printf("%d found, %d wrong\n", found.load(), wrong.load());

  fake::attributes[cudaDevAttrMultiProcessorCount] = 132;
  for (fake::device = 0; fake::device < 2; ++fake::device) {
    for (int i = 0; i < 3; ++i) {
      int device = -1;
      DeviceLimits limits;
      const int status = current_device(&device, &limits);
      std::printf("%d: %d of %d, %d reads\n", status, limits.multiprocessors, device, fake::attributes_read);
    }
  }
}
"""


def test_what_is_known_of_a_device_is_found_out_once(tmp_path: Path) -> None:
    assert run(tmp_path, ONCE) == [
        "17 found, 1 failed, 0 wrong",
        "20 found, 0 wrong",
        *["0: 132 of 0, 6 reads"] * 3,
        *["0: 132 of 1, 12 reads"] * 3,
    ]


GRIDS = r"""
int main() {
  struct Case {
    int64_t tokens, warps_of_token, warps_of_block;
  };
  const int64_t most = INT32_MAX;
  const Case cases[] = {{0, 3, 4},    {1, 1, 4},       {most, 1, 4},    {most, 4, 4},
                        {most, 5, 4}, {most, 8192, 4}, {1001, most, 8}, {1 << 20, (1 << 14) + 1, 8}};
  for (const Case& c : cases) {
    int64_t covered = 0, calls = 0, largest = 0;
    const int status = in_grids(c.tokens, c.warps_of_token, c.warps_of_block, [&](int64_t first, int64_t count) {
      if (first != covered) return 1;
      const int64_t blocks = (count * c.warps_of_token + c.warps_of_block - 1) / c.warps_of_block;
      // what grid_for clamps is lost, for kernels without a loop
      if (grid_for(blocks, 1, kMaxBlocksOfGrid) != static_cast<uint64_t>(blocks)) return 2;
      covered += count;
      largest = std::max(largest, blocks);
      ++calls;
      return 0;
    });
    std::printf("%d: %d %ld calls\n", status, covered == c.tokens, long(calls));
  }
  int calls = 0;
  const int status = in_grids(most, 8192, 4, [&](int64_t, int64_t) { return ++calls == 3 ? 7 : 0; });
  std::printf("status %d in call %d\n", status, calls);
}
"""


def test_tokens_that_are_too_many_for_a_grid_take_several(tmp_path: Path) -> None:
    *cases, last = run(tmp_path, GRIDS)
    assert cases == ["0: 1 1 calls"] * 4 + ["0: 1 2 calls", "0: 1 2049 calls", "0: 1 126 calls", "0: 1 2 calls"]
    assert last == "status 7 in call 3"
