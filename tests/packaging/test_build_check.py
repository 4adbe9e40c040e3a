# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A library built for another Paddle is refused with a reason and a remedy; one that fits is not."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest

from paddle_moe_ops import _build_check
from paddle_moe_ops.backends import compiled

BUILT = {"paddle_version": "3.3.1", "paddle_commit": "a" * 40, "cuda": False}


@pytest.mark.parametrize(
    ("version", "commit", "with_cuda"),
    [
        ("3.3.1", "a" * 40, False),
        ("3.3.1", "a" * 40, True),
        ("3.3.0", "b" * 40, False),
    ],
    ids=["same build", "same build with CUDA", "other release of the same minor version"],
)
def test_library_that_fits_is_accepted(version, commit, with_cuda):
    assert _build_check.compare(BUILT, version, commit, with_cuda) is None


@pytest.mark.parametrize(
    ("info", "version", "commit", "reason"),
    [
        (BUILT, "3.4.0", "b" * 40, "it was built for Paddle 3.3.1, but Paddle 3.4.0 is running"),
        (BUILT, "3.30.1", "b" * 40, "it was built for Paddle 3.3.1, but Paddle 3.30.1 is running"),
        (
            BUILT,
            "3.3.1",
            "b" * 40,
            "it was built for Paddle 3.3.1 of commit aaaaaaaaaa, but commit bbbbbbbbbb",
        ),
        (
            {**BUILT, "cuda": True},
            "3.3.1",
            "a" * 40,
            "it was built with CUDA, but this Paddle (3.3.1) is a CPU",
        ),
        (None, "3.3.1", "a" * 40, "the package was not built"),
    ],
    ids=["minor version", "minor version of two digits", "commit", "CUDA", "not built"],
)
def test_library_that_does_not_fit_is_refused_with_a_remedy(info, version, commit, reason):
    text = _build_check.compare(info, version, commit, with_cuda=False)
    assert text.startswith(reason)
    assert not text.endswith(".")  # a sentence may go on after it
    assert "pip install --no-build-isolation" in text


def test_package_of_this_environment_was_built_for_its_paddle():
    import paddle

    info = _build_check.build_info()
    assert (info["paddle_version"], info["paddle_commit"]) == (
        paddle.version.full_version,
        paddle.version.commit,
    )
    assert _build_check.mismatch() is None


def test_build_records_no_date_and_no_path():
    assert set(_build_check.build_info()) == {
        "commit",
        "compiler",
        "cuda",
        "cuda_reason",
        "cxx_flags",
        "nvcc_flags",
        "paddle_commit",
        "paddle_version",
        "sources",
        "sources_sha256",
    }


@pytest.mark.parametrize("version", ["2.6.2", "3.0.0", "3.1.1", "3.1.0.dev20250101"])
def test_paddle_before_3_2_is_too_old(version):
    assert _build_check.is_too_old(version)
    assert not _build_check.is_untested(version)


@pytest.mark.parametrize("version", ["3.2.0", "3.2.2", "3.3.1"])
def test_tested_versions_are_neither_too_old_nor_untested(version):
    assert not _build_check.is_too_old(version)
    assert not _build_check.is_untested(version)


@pytest.mark.parametrize("version", ["3.4.0", "3.10.0", "4.0.0", "0.0.0"])
def test_later_versions_and_development_builds_are_untested(version):
    assert not _build_check.is_too_old(version)
    assert _build_check.is_untested(version)


def test_digest_changes_with_the_name_and_the_text_of_a_source(tmp_path):
    def digest(**files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "cpu").mkdir(parents=True)
        for name, text in files.items():
            (folder / "cpu" / name.replace("_", ".")).write_text(text, encoding="utf-8")
        return _build_check.sources_digest(folder)

    same = digest(one_cc="1", two_h="2")
    assert same == digest(one_cc="1", two_h="2", notes_txt="of no interest")
    assert len({same, digest(one_cc="1", two_h="3"), digest(one_cc="1", three_h="2"), digest(one_cc="1")}) == 4


CUDA = {**BUILT, "cuda": True, "nvcc_flags": ["-O3", "-gencode=arch=compute_80,code=sm_80"]}
CUDA["nvcc_flags"] += ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]


@pytest.mark.parametrize(
    ("flags", "capability", "fits"),
    [
        (CUDA["nvcc_flags"], (8, 0), True),
        (CUDA["nvcc_flags"], (8, 9), True),
        (CUDA["nvcc_flags"], (9, 0), True),
        (CUDA["nvcc_flags"], (12, 0), True),
        (CUDA["nvcc_flags"], (7, 5), False),
        (["-gencode=arch=compute_90,code=sm_90"], (8, 9), False),
        (["-gencode=arch=compute_90a,code=sm_90a"], (9, 0), True),
        (["-gencode=arch=compute_90,code=sm_90"], (10, 0), False),
        (["-gencode=arch=compute_86,code=sm_86"], (8, 0), False),
        (["-gencode=arch=compute_100,code=sm_100"], (10, 3), True),
        ([], (8, 0), True),
    ],
)
def test_kernels_fit_later_gpus_of_their_generation_and_portable_ones_all_later_gpus(flags, capability, fits):
    problem = _build_check.gpu_problem({**CUDA, "nvcc_flags": flags}, capability)
    assert (problem is None) == fits
    if problem is not None:
        assert problem.endswith(f"but that of the GPU is {capability[0]}.{capability[1]}")


def test_a_library_without_gpu_kernels_fits_no_gpu():
    info = {**BUILT, "cuda_reason": "nvcc was not found"}
    assert _build_check.gpu_problem(info, (9, 0)) == (
        f"the library was built without GPU kernels (nvcc was not found); {_build_check.REBUILD}"
    )


def test_the_gpus_of_the_machine_are_looked_at_one_by_one(monkeypatch):
    capabilities = [(9, 0), (7, 5), (8, 6)]
    monkeypatch.setattr(_build_check, "build_info", lambda: CUDA)
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", capabilities.__getitem__)
    found = compiled.gpus_without_kernels.__wrapped__()
    assert found == {1: "the library has kernels for compute capability 8.0, 9.0, but that of the GPU is 7.5"}
    monkeypatch.setattr(compiled, "gpus_without_kernels", lambda: found)
    places = [SimpleNamespace(is_gpu_place=lambda: True, gpu_device_id=lambda gpu=gpu: gpu) for gpu in range(3)]
    monkeypatch.setattr(compiled, "Tensor", SimpleNamespace)
    problems = [compiled.backend.cannot_run_on(SimpleNamespace(place=place)) for place in places]
    assert problems == [None, found[1], None]
    assert compiled.backend.cannot_run_on(SimpleNamespace(place=SimpleNamespace(is_gpu_place=lambda: False))) is None
