#!/usr/bin/env python3
# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests on a GPU machine and writes their counts; see README.md in this folder.

    run.py unpack PART...            join the parts of Paddle and extract it to SITE
    run.py SUITE --out FOLDER        run one of the suites below and write FOLDER/SUITE.json
    run.py sanitize --out FOLDER     run the suites of compute-sanitizer one after the other
    run.py bench_cpu --out FILE      benchmark the CPU operators of the rig; other options are those of the benchmark
    run.py bench_parallel --out FILE benchmark expert parallelism between two GPUs
    run.py bench_calls --out FILE    time public functions
    run.py bench_serving --out FILE  decode with a whole model, whose dense operators run on the GPU

Every suite is one pytest command; its counts are those of pytest's own report, or of the sanitizer's.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import filecmp
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = Path("/tmp/paddle_site")
BUNDLE = ROOT / "build" / "gpu"
RIG = BUNDLE / "rig-2"
PLACE = BUNDLE / "place-2"
JITTER = BUNDLE / "jitter"

DEVICE = "cuda_rig:0"
# Needs an idle GPU: processes that share one are time-sliced.
BESIDE_TESTS = "tests/core/test_cuda_beside.py"
CORE_OPTIONS = ["--core-device=cuda", "-p", "no:cacheprovider"]
CORE_TESTS = ["tests/core", f"--ignore={BESIDE_TESTS}", *CORE_OPTIONS]
# -m "": tests marked slow are slow on CPUs only
HOPPER_FILES = [
    *(f"tests/core/test_grouped_{name}_cuda.py" for name in ("product", "wgrad", "float8", "float8_wgrad")),
    *("tests/core/test_layer.py", "tests/core/test_layer_float8.py"),
]
HOPPER_TESTS = [*HOPPER_FILES, *CORE_OPTIONS, "-m", ""]
LAYER_FUZZ = "tests/core/test_layer_fuzz.py"
# Cases of each fuzz test: 20,000 in all, which a test of this program counts.
FUZZ_CASES = 620
FUZZ_TESTS = [
    *(LAYER_FUZZ, "tests/core/test_fuzz.py", *CORE_OPTIONS),
    *(f"--fuzz-cases={FUZZ_CASES}", "-n", "8", "--dist=worksteal"),
]
# Memory that two ranks share. Captured graphs and side streams are left out: a sanitizer may serialise launches.
PEER_TESTS = [
    *(f"tests/distributed/test_{name}.py" for name in ("transports", "shared_buffers", "expert_parallel")),
    *(f"--device={DEVICE}", "--gpus=2"),
    *("-k", "(transports or shared or peers) and not gloo and not three and not four and not eight"),
]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Tests of each group of kernels, and the tools that can check them. initcheck sees the stores of its own process only,
# so it would report each value that a peer stored.
SANITIZED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "core": (
        [
            *(*CORE_TESTS, *(f"--ignore={name}" for name in (*HOPPER_FILES, LAYER_FUZZ))),
            *("-k", "not large", "--fuzz-cases=60", "-p", "no:faulthandler", "-n", "4"),
        ],
        TOOLS,
    ),
    "hopper": ([*HOPPER_TESTS, "-k", "not many_experts", "-p", "no:faulthandler", "-n", "4"], TOOLS),
    "peers": ([*PEER_TESTS, "-p", "no:faulthandler"], tuple(tool for tool in TOOLS if tool != "initcheck")),
}


def sanitizer_suite(tool: str, group: str) -> str:
    """Name of the suite that runs a tool over a group of SANITIZED."""
    return tool if group == "core" else f"{tool}_{group}"


SUITES = {
    "ops": ["tests/ops", "tests/static", f"--device={DEVICE}"],
    "scenarios": ["tests/scenarios", f"--device={DEVICE}"],
    "triton": ["tests/ops", "tests/scenarios", "--backend=triton", f"--device={DEVICE}"],
    "triton_kernels": ["tests/triton", "--core-device=cuda", "-p", "no:cacheprovider", "-m", "", "--fuzz-cases=20"],
    "core": [*CORE_TESTS, f"--ignore={LAYER_FUZZ}"],  # whose oracle takes minutes; "fuzz" has it
    "beside": [BESIDE_TESTS, *CORE_OPTIONS],
    "fuzz": FUZZ_TESTS,
    "jitter": HOPPER_TESTS,  # on a library whose tile schedulers are delayed at random
    **{sanitizer_suite(tool, group): tests for group, (tests, tools) in SANITIZED.items() for tool in tools},
    "place": ["tests/gpuplace", "--device=gpu:0"],
    "two_gpus": ["tests/ops/test_two_gpus.py", f"--device={DEVICE}", "--gpus=2"],
    # without tests of ended ranks, for which NCCL waits, and of three and more ranks, which need as many GPUs
    "distributed": [
        "tests/distributed",
        f"--device={DEVICE}",
        "--gpus=2",
        "-k",
        "not three and not four and not eight and not ended",
    ],
    "distributed_four": ["tests/distributed", f"--device={DEVICE}", "--gpus=4", "-m", "", "-k", "four and not ended"],
    "distributed_eight": ["tests/distributed", f"--device={DEVICE}", "--gpus=8", "-m", "", "-k", "eight and not ended"],
    "place_two_gpus": ["tests/gpuplace/test_two_gpus.py", "--device=gpu:0", "--gpus=2"],
}
PEER_SUITES = tuple(sanitizer_suite(tool, "peers") for tool in SANITIZED["peers"][1])
# Suites that run on Paddle with the plug-in, and on Paddle 2.6.2.
RIG_SUITES = (
    *("ops", "scenarios", "triton", "two_gpus", "distributed", "distributed_four", "distributed_eight"),
    *PEER_SUITES,
)
PLACE_SUITES = ("place", "place_two_gpus")
SANITIZERS = tuple(sanitizer_suite(tool, group) for group, (_, tools) in SANITIZED.items() for tool in tools)


def unpack(parts: list[Path]) -> None:
    """Join the parts of the archive and extract it to SITE, replacing any other Paddle."""
    shutil.rmtree(SITE, ignore_errors=True)
    archive = SITE.with_suffix(".tar.xz")
    with archive.open("wb") as joined:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, joined)
    with tarfile.open(archive) as tar:
        tar.extractall(SITE, filter="fully_trusted")
    archive.unlink()


def install_library(folder: Path) -> None:
    """Copy the operators that were built for this Paddle into the package.

    A library that a process has loaded is replaced by a new file: writing into it would change that process's code.
    """
    for name in ("_C_pd_.so", "_C.py", "_build_info.json"):
        source, target = folder / name, ROOT / "paddle_moe_ops" / name
        if not source.exists():  # the stub _C.py is for Paddle 3
            continue
        if not (target.exists() and filecmp.cmp(source, target, shallow=False)):
            copied = target.with_name(f"{name}.{os.getpid()}")
            shutil.copy(source, copied)
            copied.replace(target)


def environment(suite: str) -> dict[str, str]:
    """Return the environment in which the suite's process finds Paddle, the plug-in and the core."""
    env = dict(os.environ, CI="1", PYTHONPATH=str(ROOT))
    if suite not in RIG_SUITES:  # tests that load parts of the package without its Paddle side
        env["PMO_CORE_LIBRARY"] = str((JITTER if suite == "jitter" else RIG) / "libpmo_core.so")
    if suite in SANITIZERS:  # one allocation per PyTorch tensor, whose bounds are then checked
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if suite in (*RIG_SUITES, *PLACE_SUITES):
        env["PYTHONPATH"] = f"{SITE}:{ROOT}"
        env["LD_LIBRARY_PATH"] = f"{SITE}/paddle/libs:{RIG}:{env.get('LD_LIBRARY_PATH', '')}"
    if suite == "fuzz":  # the oracle of one worker must not use the others' cores
        env["OMP_NUM_THREADS"] = "1"
    if suite in PEER_SUITES:  # ranks wait for each other, and are slower
        env["PADDLE_MOE_OPS_TEST_SLOWNESS"] = "4"
    if suite in RIG_SUITES:
        env["CUSTOM_DEVICE_ROOT"] = str(RIG / "plugin")
        if (nccl := importlib.util.find_spec("nvidia.nccl")) is not None:  # PyTorch's
            env["RIG_NCCL"] = str(Path(nccl.submodule_search_locations[0]) / "lib" / "libnccl.so.2")
    return env


def parse_report(report: Path) -> ElementTree.Element:
    """Return the root of a JUnit report; an empty one if the run ended before it wrote its report."""
    return ElementTree.parse(report).getroot() if report.exists() else ElementTree.Element("testsuites")


def read_counts(report: Path) -> dict[str, object]:
    """Return the totals of a JUnit report, and the names of the tests that failed."""
    root = parse_report(report)
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for node in root.iter("testsuite"):
        for name in totals:
            totals[name] += int(node.get(name, 0))
    failed = totals["failures"] + totals["errors"]
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in root.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {"passed": totals["tests"] - failed - totals["skipped"], "failed": failed, "skipped": totals["skipped"]}
    return {**counts, "failed_tests": names}


def function_of(access: str) -> str:
    """Return "write f" for a line such as "Write access at void f<int>(int)+0x1 in a.cu:2"."""
    kind, _, name = access.strip().partition(" access at ")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    function = re.split(r"[(+]", name)[0].split()[-1]
    return f"{kind.lower()} {'::'.join(part for part in function.split('::') if part not in ('', 'pmo', 'cuda'))}"


def read_errors(output: str) -> dict[str, int]:
    """Return the first lines of a sanitizer's errors, with their counts; for races the pairs of accesses."""
    counts: collections.Counter[str] = collections.Counter()
    first = None
    # a line of pytest's dots may precede
    for line in re.findall(r"^\S*?========= (?!COMPUTE-SANITIZER|\w+ SUMMARY)(.+)$", output, re.MULTILINE):
        if (race := re.search(r"Race reported between (.+)", line)) is not None:
            first = function_of(race[1])
        elif first is not None and (other := re.match(r" +and (.+)", line)) is not None:
            counts[f"{first}, {function_of(other[1])}"] += 1
        elif not line.startswith(" "):
            first = None
            counts[line.strip()] += 1
    return dict(counts.most_common())


def read_fuzz(report: Path) -> dict[str, object]:
    """Return the number of cases in a JUnit report of fuzz tests, and the commands that repeat those that failed."""
    root = parse_report(report)
    found = [(node.get("name"), node.get("value", "")) for node in root.iter("property")]
    cases = sum(int(value) for name, value in found if name == "fuzz_cases")
    return {"fuzz_cases": cases, "repeat": [value for name, value in found if name == "repeat"]}


def machine(commit: Path) -> dict[str, str]:
    """Return the first GPU, driver, versions and commit (written to `commit` by `make gpu-bundle`)."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    gpu, driver = lines[0].split(", ")
    nvcc = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    return {
        "gpu": gpu,
        "driver": driver.strip(),
        "cuda": re.search(r"release (\S+),", nvcc)[1],
        "python": platform.python_version(),
        "commit": commit.read_text().strip() if commit.exists() else "unknown",
        "date": datetime.date.today().isoformat(),
    }


def machine_code(suite: str) -> dict[str, str]:
    """Return hashes of the machine code that a suite runs, by unit (machine_code.py), if its bundle records them."""
    file = (PLACE if suite in PLACE_SUITES else RIG) / "machine_code.json"
    users = {"jitter": ("jitter",), "rig": RIG_SUITES, "place": PLACE_SUITES}
    folders = {"core", *(folder for folder, suites in users.items() if suite in suites)}
    units = json.loads(file.read_text()) if file.exists() else {}
    return {name: unit["hash"] for name, unit in units.items() if name.partition("/")[0] in folders}


def run_suite(suite: str, out: Path, extra: list[str], limit: int) -> int:
    """Run one suite and write its counts; returns the exit status of pytest or the sanitizer, 124 after `limit` s."""
    out.mkdir(parents=True, exist_ok=True)
    bundle = PLACE if suite in PLACE_SUITES else RIG
    if suite in (*RIG_SUITES, *PLACE_SUITES):
        install_library(bundle)
    report = out / f"{suite}.xml"
    report.unlink(missing_ok=True)
    if suite == "fuzz" and not any(word.startswith("--fuzz-seed") for word in extra):  # new cases in each run
        extra = [*extra, f"--fuzz-seed={secrets.randbelow(2**31)}"]
    command = [sys.executable, "-m", "pytest", *SUITES[suite], "-q", f"--junitxml={report}", *extra]
    if suite in SANITIZERS:
        command = [
            "compute-sanitizer",
            f"--tool={suite.partition('_')[0]}",
            "--error-exitcode=99",
            "--target-processes=all",
            # Not NCCL's kernels. It asks for attributes of kernels that it has for other GPUs, which fails.
            *(["--kernel-regex", "kns=pmo", "--report-api-errors=no"] if suite in PEER_SUITES else []),
            *command,
        ]
    limited = ["timeout", "--kill-after=10", str(limit), *command]
    done = subprocess.run(
        limited, cwd=ROOT, env=environment(suite), text=True, capture_output=suite in SANITIZERS, check=False
    )
    shown = " ".join(command).replace(sys.executable, "python3").replace(f"{out}/", "results/")
    result = {"suite": suite, "command": shown, "exit_status": done.returncode}
    result.update(machine(bundle / "commit"))
    result["machine_code"] = machine_code(suite)
    if suite in SANITIZERS:
        print(done.stdout[-3000:], done.stderr[-1000:])
        found = re.findall(r"(ERROR SUMMARY|RACECHECK SUMMARY): (.*)", done.stdout + done.stderr)
        result["sanitizer"] = [text for _, text in found]
        result["errors"] = read_errors(done.stdout + done.stderr)
    result.update(read_counts(report))
    if suite == "fuzz":
        result.update(read_fuzz(report))
    (out / f"{suite}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return done.returncode


def bench_cpu(extra: list[str]) -> int:
    """Run the benchmark of the CPU operators on this machine's cores; `extra` are its options."""
    install_library(RIG)
    command = [sys.executable, "-m", "benchmarks.kernels", "--device", "cpu"]
    command += ["--core-library", str(RIG / "libpmo_core.so"), "--commit", (RIG / "commit").read_text().strip()]
    env = dict(environment("ops"), CUDA_VISIBLE_DEVICES="")
    env.pop("CUSTOM_DEVICE_ROOT")
    return subprocess.run([*command, *extra], cwd=ROOT, env=env, check=False).returncode


def bench_on_rig(module: str, suite: str, extra: list[str], **more: str) -> int:
    """Run a benchmark of Paddle's operators on the GPU, with options `extra`; `more` adds to a suite's environment."""
    install_library(RIG)
    command = [sys.executable, "-m", module, "--commit", (RIG / "commit").read_text().strip()]
    return subprocess.run([*command, *extra], cwd=ROOT, env={**environment(suite), **more}, check=False).returncode


def cublas() -> dict[str, str]:
    """Return the environment in which the plug-in's own kernels of Paddle's operators run, with PyTorch's cuBLAS."""
    wheels = [path for folder in map(Path, sys.path) for path in folder.glob("nvidia/*/lib/libcublas.so.*")]
    found = [*wheels, *Path("/usr/local/cuda/lib64").glob("libcublas.so.*")]
    if not found:
        raise SystemExit("run.py: neither PyTorch's wheels nor /usr/local/cuda have libcublas.so")
    return {"RIG_DEVICE_KERNELS": "1", "RIG_CUBLAS": str(found[0])}


def bench_serving(extra: list[str]) -> int:
    """Run the benchmark of a whole decoder, if the plug-in's own kernels of Paddle's operators pass their tests."""
    install_library(RIG)
    kernels = cublas()
    command = [sys.executable, "-m", "pytest", "tests/rig", f"--device={DEVICE}", "-q", "-p", "no:cacheprovider"]
    env = {**environment("ops"), **kernels}
    if status := subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
        return status
    return bench_on_rig("benchmarks.serving.whole_model", "ops", extra, **kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = ["bench_cpu", "bench_parallel", "bench_calls", "bench_serving"]
    parser.add_argument("what", choices=["unpack", "sanitize", *benchmarks, *SUITES])
    parser.add_argument("parts", nargs="*", type=Path, help="for unpack: the parts, in order")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu/results")))
    parser.add_argument("--limit", type=int, default=3600, help="seconds after which a suite is ended")
    parser.add_argument("--over", nargs="+", choices=list(SANITIZED), default=["core", "hopper"], help="for sanitize")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="for sanitize")
    arguments, extra = parser.parse_known_args()
    if arguments.what == "unpack":
        unpack(arguments.parts)
        return 0
    if arguments.what == "sanitize":
        suites = [sanitizer_suite(tool, group) for group in arguments.over for tool in arguments.tools]
        if unknown := [suite for suite in suites if suite not in SUITES and arguments.tools != list(TOOLS)]:
            parser.error(f"sanitize: no suite {', '.join(unknown)}; see README.md")
        statuses = [run_suite(suite, arguments.out, extra, arguments.limit) for suite in suites if suite in SUITES]
        return max(map(abs, statuses))
    if arguments.what == "bench_cpu":
        return bench_cpu([*extra, "--out", str(arguments.out)])
    if arguments.what == "bench_parallel":
        return bench_on_rig(
            "benchmarks.expert_parallel", "distributed", [*extra, "--out", str(arguments.out)], **cublas()
        )
    if arguments.what in ("bench_calls", "bench_serving"):
        options = ["--device", DEVICE, "--gpu", machine(RIG / "commit")["gpu"], "--out", str(arguments.out)]
        if arguments.what == "bench_calls":
            return bench_on_rig("benchmarks.public_calls", "ops", [*extra, *options])
        return bench_serving([*extra, *options, "--dense", "cuBLAS and plain kernels of the rig"])
    return run_suite(arguments.what, arguments.out, extra, arguments.limit)


if __name__ == "__main__":
    raise SystemExit(main())
