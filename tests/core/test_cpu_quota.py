# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The quota of a container limits the CPU threads: files of control groups, as several systems show them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from .compiling import CSRC, compile_cpp, run_clean

pytestmark = [pytest.mark.cpu_only, pytest.mark.own_program]

OPTIONS = [f"-I{CSRC}", f"-I{CSRC / 'include'}", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
CODE = '#include "cpu/quota.h"\nextern "C" int cores(const char* root) { return pmo::cpu::cores_of_quota(root); }\n'

GROUP = "sys/fs/cgroup"
V1 = f"{GROUP}/cpu,cpuacct"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("quota") / "quota.so"
    return ctypes.CDLL(str(compile_cpp(target, CODE, str(CSRC / "cpu" / "quota.cc"), *OPTIONS, "-fPIC", "-shared")))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")


def v1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


def own(*lines: str) -> dict[str, str]:
    return {"proc/self/cgroup": "\n".join(lines)}


HOST_V1 = "12:pids:/x", "4:cpu,cpuacct:/docker/abc", "1:name=systemd:/x"
SYSTEMS = {
    "nothing is known": ({}, 0),
    "no group has a file": (own("0::/a/b"), 0),
    "version 2, own group": ({**own("0::/a/b"), f"{GROUP}/a/b/cpu.max": "200000 100000"}, 2),
    "version 2, without a limit": ({**own("0::/a/b"), f"{GROUP}/a/b/cpu.max": "max 100000"}, 0),
    "version 2, a container that is its own root": ({**own("0::/"), f"{GROUP}/cpu.max": "250000 100000"}, 3),
    "version 2, part of a core": ({**own("0::/a"), f"{GROUP}/a/cpu.max": "1 100000"}, 1),
    "version 2, exactly whole cores": ({**own("0::/a"), f"{GROUP}/a/cpu.max": "500000 50000"}, 10),
    "version 2, a group above is tighter": (
        {**own("0::/a/b/c"), f"{GROUP}/a/cpu.max": "150000 100000", f"{GROUP}/a/b/c/cpu.max": "400000 100000"},
        2,
    ),
    "version 2, a group above is wider": (
        {**own("0::/a/b"), f"{GROUP}/a/cpu.max": "900000 100000", f"{GROUP}/a/b/cpu.max": "400000 100000"},
        4,
    ),
    "version 2, another group is none of ours": ({**own("0::/a"), f"{GROUP}/b/cpu.max": "100000 100000"}, 0),
    "version 2, a path of the host": ({**own("0::/../../a"), f"{GROUP}/cpu.max": "300000 100000"}, 3),
    "version 2, a colon in the path": ({**own("0::/a:b"), f"{GROUP}/a:b/cpu.max": "300000 100000"}, 3),
    "version 2, nonsense": ({**own("0::/a"), f"{GROUP}/a/cpu.max": "many"}, 0),
    "version 2, a period of nothing": ({**own("0::/a"), f"{GROUP}/a/cpu.max": "100000 0"}, 0),
    "version 2, more than there are numbers for": ({**own("0::/a"), f"{GROUP}/a/cpu.max": f"{2**62} 1"}, 2**31 - 1),
    "version 1, own group": ({**own(*HOST_V1), **v1(f"{V1}/docker/abc", 350000)}, 4),
    "version 1, without a limit": ({**own(*HOST_V1), **v1(f"{V1}/docker/abc", -1)}, 0),
    "version 1, mounted alone": ({**own("3:cpu:/a"), **v1(f"{GROUP}/cpu/a", 200000, 50000)}, 4),
    "version 1, mounted under one of its names": ({**own(*HOST_V1), **v1(f"{GROUP}/cpu/docker/abc", 200000)}, 2),
    "version 1, a container knows its path on the host": ({**own(*HOST_V1), **v1(V1, 200000)}, 2),
    "version 1, a group above is tighter": (
        {**own(*HOST_V1), **v1(f"{V1}/docker", 100000), **v1(f"{V1}/docker/abc", 300000)},
        1,
    ),
    "version 1, other controllers have none": ({**own("4:cpuacct:/a", "3:cpuset:/a"), **v1(f"{V1}/a", 100000)}, 0),
    "version 1, half of the files": ({**own(*HOST_V1), f"{V1}/docker/abc/cpu.cfs_quota_us": "100000"}, 0),
    "both, the tighter one": (
        {**own(*HOST_V1, "0::/u"), **v1(f"{V1}/docker/abc", 500000), f"{GROUP}/unified/u/cpu.max": "200000 100000"},
        2,
    ),
    "lines that are none": ({**own("", "nonsense", "0:", "0::/a"), f"{GROUP}/a/cpu.max": "200000 100000"}, 2),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_lowest_limit_counts(library: ctypes.CDLL, tmp_path: Path, system: str) -> None:
    files, expected = SYSTEMS[system]
    write(tmp_path, files)
    assert library.cores(str(tmp_path).encode()) == expected


# A machine of 128 cores whose files are elsewhere.
POOL = r"""
#include <dlfcn.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cpu/pool.h"
#include "pmo/base.h"

template <typename Open>
static FILE* open_below(const char* name, const char* path, const char* mode) {
  const std::string moved = std::string(std::getenv("ROOT")) + path;
  return reinterpret_cast<Open>(dlsym(RTLD_NEXT, name))(moved.c_str(), mode);
}
extern "C" FILE* fopen(const char* path, const char* mode) { return open_below<decltype(&fopen)>("fopen", path, mode); }
extern "C" FILE* fopen64(const char* path, const char* mode) {
  return open_below<decltype(&fopen)>("fopen64", path, mode);
}
extern "C" int sched_getaffinity(pid_t, size_t size, cpu_set_t* cores) noexcept {
  CPU_ZERO_S(size, cores);
  for (int core = 0; core < 128; ++core) CPU_SET_S(core, size, cores);
  return 0;
}

int main() {
  std::printf("default %d\n", pmo_num_threads());
  std::printf("asked for %d\n", pmo::cpu::resolve_threads(7));
  pmo_set_num_threads(5);
  std::printf("set %d\n", pmo_num_threads());
  pmo_set_num_threads(0);
  std::printf("default again %d\n", pmo_num_threads());
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    sources = [str(CSRC / "cpu" / name) for name in ("pool.cc", "quota.cc")]
    target = tmp_path_factory.mktemp("pool") / "pool"
    return str(compile_cpp(target, POOL, *sources, *OPTIONS, "-D_GNU_SOURCE", "-ldl"))


@pytest.mark.parametrize(("limit", "threads"), [("200000 100000", 2), ("max 100000", 128), ("90000000 100000", 128)])
def test_the_pool_follows_the_quota_unless_it_is_told_a_number(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, threads: int
) -> None:
    write(tmp_path, {**own("0::/a"), f"{GROUP}/a/cpu.max": limit})
    monkeypatch.setenv("ROOT", str(tmp_path))
    lines = [f"default {threads}", "asked for 7", "set 5", f"default again {threads}"]
    assert run_clean([program]).splitlines() == lines
