# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled operators, ``paddle_moe_ops._C``, through paddle.utils.cpp_extension.

The metadata is in pyproject.toml. Paddle's build prints a compile error and continues, which can end in an old
library with exit code 0, and it leaves object files in the wheel. The commands below delete files of an earlier
build, fail if a source fails, and record versions and flags of the build. They keep objects in build/objects: a
source is compiled again if it, a header it includes or the command changed.

If PADDLE_MOE_OPS_CORE_OBJECTS names a folder, such as build/core after `make core`, the library links the core's
objects from it, and only the bindings are compiled.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    # Without build isolation pip does not look at build-system.requires.
    raise SystemExit(
        f"paddle_moe_ops: setuptools must be 77 or newer, but {setuptools.__version__} is installed; "
        'run: pip install "setuptools>=77"'
    )

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
VERSION = runpy.run_path(str(ROOT / "paddle_moe_ops" / "_version.py"))["__version__"]
CHECK = runpy.run_path(str(ROOT / "paddle_moe_ops" / "_build_check.py"))  # the package itself would load the library

try:
    import paddle
    from paddle.utils import cpp_extension

    PaddleBuild = cpp_extension.BuildExtension
except ImportError as error:
    paddle = None
    PADDLE_ERROR = CHECK["paddle_problem"]() or f"Paddle's build tools cannot be imported ({error})"
    PaddleBuild = build_ext

CSRC = Path("paddle_moe_ops/csrc")
CORE = ("common/*.cc", "cpu/*.cc", "layer/*.cc")
OBJECTS = ROOT / "build" / "objects"
BINDINGS = ROOT / CSRC / "paddle"
# Paddle's headers take half of a binding's compile time, so they are precompiled. The name is that of a C++ source:
# setuptools then calls the C++ compiler.
BINDING_HEADER = OBJECTS / "binding_header.cc"
LIBRARY_FILES = ("_C.so", CHECK["LIBRARY_NAME"], "_C.py", CHECK["INFO_NAME"], "version.txt")

# Sums are the same bits on every machine: FMAs only where the source writes them, and no fast math.
CXX_FLAGS = ["-O3", "-g0", "-std=c++17", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
# Paddle's headers then omit pybind11, which no source uses and which takes half of the compile time.
PADDLE_FLAGS = ["-DPADDLE_NO_PYTHON"]
# Bindings contain no loop over rows.
BINDING_FLAGS = ["-O2"]
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-Xcompiler", "-ffp-contract=off"]

# Device code per architecture, and the first nvcc that supports it. Code for sm_XY also runs on later sm_X*.
CUDA_ARCHITECTURES = (
    (80, (11, 0)),
    (86, (11, 1)),
    (89, (11, 8)),
    (90, (11, 8)),
    (100, (12, 8)),
    (110, (13, 0)),
    (120, (12, 8)),
)


def sources_in(*patterns: str) -> list[str]:
    return sorted(path.as_posix() for pattern in patterns for path in CSRC.glob(pattern))


def nvcc_path() -> str | None:
    """Return the path of nvcc that Paddle's build calls, or None."""
    home = cpp_extension.cpp_extension.CUDA_HOME
    return shutil.which(str(Path(home) / "bin" / "nvcc")) if home else None


def nvcc_version(nvcc: str) -> tuple[int, int]:
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None:
        raise SystemExit(f"paddle_moe_ops: {nvcc} --version must name its release, but it printed:\n{text}")
    return int(found[1]), int(found[2])


def compression_flags(version: tuple[int, int]) -> list[str]:
    """Return flags that compress device code, to about a fifth, in a form that drivers of this CUDA read."""
    return ["--compress-mode=size"] if version >= (13, 0) else ["-Xfatbin=-compress-all"]


def gencode_flags(version: tuple[int, int]) -> list[str]:
    """Return flags for device code of every architecture that this nvcc supports, and for PTX of the newest one."""
    known = [architecture for architecture, first in CUDA_ARCHITECTURES if version >= first]
    # 9.0 is the only capability of its generation, so sm_90a code runs wherever sm_90 code does.
    names = ["90a" if a == 90 and version >= (12, 0) else str(a) for a in known]
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in names]
    return [*flags, f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"]


def choose_cuda() -> tuple[bool, str]:
    """Return whether the CUDA sources are compiled, and the reason.

    Under a CUDA build of Paddle only PADDLE_MOE_OPS_CUDA=0 skips them.
    """
    asked = os.environ.get("PADDLE_MOE_OPS_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"paddle_moe_ops: PADDLE_MOE_OPS_CUDA must be 0 or 1, but got {asked!r}")
    if asked == "0":
        return False, "PADDLE_MOE_OPS_CUDA=0"
    obstacle = None
    if not sources_in("cuda/**/*.cu"):
        obstacle = f"{CSRC}/cuda has no sources"
    elif nvcc_path() is None:
        obstacle = "nvcc was not found; set CUDA_HOME"
    elif not paddle.is_compiled_with_cuda():
        obstacle = "this Paddle is a CPU build"
    if asked and obstacle:
        raise SystemExit(f"paddle_moe_ops: PADDLE_MOE_OPS_CUDA=1, but {obstacle}")
    if obstacle and paddle.is_compiled_with_cuda():
        raise SystemExit(
            f"paddle_moe_ops: Paddle is compiled with CUDA, but {obstacle}, "
            "or PADDLE_MOE_OPS_CUDA=0 to build the CPU operators alone"
        )
    if obstacle:
        return False, obstacle
    return True, "PADDLE_MOE_OPS_CUDA=1" if asked else "Paddle is compiled with CUDA and nvcc is there"


def description(url: str) -> dict[str, Any]:
    """Return README and links of the metadata; with the project's URL, relative links become absolute ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not url:
        return {"long_description": text, "long_description_content_type": "text/markdown"}

    def absolute(link: re.Match[str]) -> str:
        before, target = link.groups()
        if target.startswith("../../"):  # a page of the project on GitHub, as README names it from a branch
            return f"{before}({url}/{target.removeprefix('../../')})"
        return f"{before}({url}/{'raw' if before.startswith('!') else 'blob'}/v{VERSION}/{target})"

    return {
        "long_description": re.sub(r"(!\[[^\]]*\]|\])\((?![a-z]+:|#)([^)\s]+)\)", absolute, text),
        "long_description_content_type": "text/markdown",
        "project_urls": {
            "Homepage": url,
            "Issues": f"{url}/issues",
            "Changelog": f"{url}/blob/v{VERSION}/CHANGELOG.md",
        },
    }


def version_with_paddle() -> str:
    """Return the version of the wheel: a library fits one minor version of Paddle, so the version names it."""
    asked = os.environ.get("PADDLE_MOE_OPS_LOCAL_VERSION", "")
    if asked and not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", asked):
        raise SystemExit(
            "paddle_moe_ops: PADDLE_MOE_OPS_LOCAL_VERSION must be letters a-z and digits with dots in between, "
            f"such as paddle33.cpu, but got {asked!r}"
        )
    return f"{VERSION}+{asked or local_version()}"


def local_version() -> str:
    """Return Paddle's minor version and the kind of kernels, such as ``paddle33.cpu`` or ``paddle33.cu126``."""
    major, minor = paddle.version.full_version.split(".")[:2]
    kernels = f"cu{paddle.version.cuda().replace('.', '')}" if USE_CUDA else "cpu"
    return f"paddle{major}{minor}.{kernels}"


def strict_compiler(base: type) -> type:
    """Return a subclass of the compiler class ``base`` that skips up-to-date objects and links only if all compiled."""

    class StrictCompiler(base):
        # Shared on purpose: Paddle compiles on copies of the compiler, one per source.
        failed: ClassVar[list[str]] = []
        header_lock: ClassVar[threading.Lock] = threading.Lock()

        def _compile(self, obj, src, ext, cc_args, extra_postargs, pp_opts):
            if Path(src).parent != BINDINGS:
                self._compile_if_changed(obj, src, ext, cc_args, extra_postargs, pp_opts)
                return
            flags = [*extra_postargs, *BINDING_FLAGS]
            with self.header_lock:
                # A compiler that rejects the precompiled header reads this source in its place.
                write_if_changed(BINDING_HEADER, '#include "paddle/binding.h"\n')
                header = str(BINDING_HEADER)
                self._compile_if_changed(f"{header}.gch", header, ext, [*cc_args, "-x", "c++-header"], flags, pp_opts)
            flags = [*flags, "-include", header]
            self._compile_if_changed(obj, src, ext, cc_args, flags, pp_opts, Path(f"{header}.gch"))

        def _compile_if_changed(self, obj, src, ext, cc_args, extra_postargs, pp_opts, *further: Path):
            depend = Path(obj).with_suffix(".d")
            stamp = Path(obj).with_suffix(".command")
            command = repr((self.compiler_so, src, cc_args, extra_postargs, pp_opts))
            if up_to_date(Path(obj), depend, stamp, command, *further):
                return
            stamp.unlink(missing_ok=True)
            Path(obj).unlink(missing_ok=True)
            try:
                super()._compile(obj, src, ext, cc_args, [*extra_postargs, "-MMD", "-MF", str(depend)], pp_opts)
            except CompileError:
                self.failed.append(src)
                raise
            stamp.write_text(command, encoding="utf-8")

        def link(self, *args, **kwargs):
            if self.failed:
                raise CompileError(f"these sources do not compile: {', '.join(sorted(self.failed))}")
            super().link(*args, **kwargs)

    return StrictCompiler


def commit() -> str | None:
    """Return the commit of this checkout, or None outside of one."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def up_to_date(obj: Path, depend: Path, stamp: Path, command: str, *further: Path) -> bool:
    """Return whether ``obj`` was compiled by ``command`` from the current ``further`` files and those in ``depend``."""
    if not (obj.exists() and depend.exists() and stamp.exists()) or stamp.read_text(encoding="utf-8") != command:
        return False
    _, _, listed = depend.read_text(encoding="utf-8").partition(": ")
    made = obj.stat().st_mtime_ns
    paths = [*further, *(Path(name) for name in shlex.split(listed.replace("\\\n", " ")))]
    return all(path.exists() and path.stat().st_mtime_ns <= made for path in paths)


class BuildOperators(PaddleBuild):
    """A strict form of Paddle's build_ext."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if paddle is None:
            return
        # An absolute folder keeps the objects out of build_lib, and so out of the wheel.
        self.build_temp = str(OBJECTS)
        # Recompile objects whose sources changed; always link the library again.
        self.force = True

    def run(self) -> None:
        if paddle is None:
            left_out = "if it is installed, --no-build-isolation was left out"
            raise SystemExit(f"{PADDLE_ERROR} ({left_out}); then {CHECK['INSTALL']}")
        started = time.monotonic()
        folders = self._library_folders()
        for folder in folders:
            for name in LIBRARY_FILES:
                (folder / name).unlink(missing_ok=True)
        super().run()
        for folder in folders:
            (folder / "version.txt").unlink(missing_ok=True)  # written by Paddle's build, of no use in a wheel
        target = folders[-1]
        library = target / CHECK["LIBRARY_NAME"]
        if (target / "_C.so").exists():
            # Python would import _C.so as an extension module; some versions of Paddle rename it later, some never.
            (target / "_C.so").replace(library)
        if not library.exists():
            raise CompileError(f"the build ended without {library}")
        info = self._build_info()
        (target / CHECK["INFO_NAME"]).write_text(json.dumps(info, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        self._print_summary(info, time.monotonic() - started)

    def build_extensions(self) -> None:
        compilers = {self.compiler.compiler_so[0], self.compiler.compiler_so_cxx[0], self.compiler.compiler_cxx[0]}
        missing = sorted(name for name in compilers if shutil.which(name) is None)
        if missing:
            raise SystemExit(
                f"paddle_moe_ops: the C++ compiler was not found ({', '.join(missing)}); install g++ "
                "(Debian, Ubuntu: apt-get install g++) or name another compiler in CC and CXX"
            )
        # Paddle's headers include it, and Paddle's build searches for it in that folder.
        header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
        if not header.is_file():
            raise SystemExit(
                f"paddle_moe_ops: the headers of this Python were not found ({header}); install them "
                "(Debian, Ubuntu: apt-get install python3-dev)"
            )
        self.compiler.__class__ = strict_compiler(self.compiler.__class__)
        super().build_extensions()

    def _library_folders(self) -> list[Path]:
        """Return the folders that this build writes library files to; the last one is the library's final folder."""
        folders = [Path(self.build_lib) / "paddle_moe_ops"]
        return [*folders, ROOT / "paddle_moe_ops"] if self.inplace else folders

    def _build_info(self) -> dict[str, Any]:
        compiler = self.compiler.compiler_so_cxx[0]
        version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
        extension = self.extensions[0]
        return {
            "compiler": version.splitlines()[0],
            "cuda": USE_CUDA,
            "cuda_reason": CUDA_REASON,
            "commit": commit(),
            "cxx_flags": CXX_FLAGS,
            "nvcc_flags": extension.extra_compile_args["nvcc"] if USE_CUDA else [],
            "paddle_commit": paddle.version.commit,
            "paddle_version": paddle.version.full_version,
            "sources": len(extension.sources) + len(extension.extra_objects),
            "sources_sha256": CHECK["sources_digest"](ROOT / CSRC),
        }

    def _print_summary(self, info: dict[str, Any], seconds: float) -> None:
        print(f"paddle_moe_ops: built {info['sources']} sources in {seconds:.1f} s")
        untested = ", newer than the tested ones" if CHECK["is_untested"](info["paddle_version"]) else ""
        print(f"  Paddle    {info['paddle_version']} (commit {info['paddle_commit'][:10]}){untested}")
        print(f"  compiler  {info['compiler']}")
        print(f"  flags     {' '.join(info['cxx_flags'])}")
        print(f"  CUDA      {'on' if info['cuda'] else 'off'}: {info['cuda_reason']}")
        if info["cuda"]:
            print(f"  nvcc      {' '.join(info['nvcc_flags'])}")


class CleanWheel(bdist_wheel):
    """A bdist_wheel that starts from an empty build folder, so that the wheel contains no file of an earlier build."""

    def run(self) -> None:
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


class PlainSource(sdist):
    """An sdist whose version names no Paddle: sources fit any supported one."""

    def finalize_options(self) -> None:
        self.distribution.metadata.version = VERSION
        super().finalize_options()


def core_objects() -> list[str]:
    """Return the core's objects in the folder that PADDLE_MOE_OPS_CORE_OBJECTS names, or [] if it names none."""
    asked = os.environ.get("PADDLE_MOE_OPS_CORE_OBJECTS", "")
    if not asked:
        return []
    objects = [Path(asked, *Path(source).with_suffix(".o").parts[-2:]) for source in sources_in(*CORE)]
    missing = [path.as_posix() for path in objects if not path.is_file()]
    if missing:
        raise SystemExit(f"paddle_moe_ops: PADDLE_MOE_OPS_CORE_OBJECTS is {asked!r}, but {missing[0]} does not exist")
    return [path.as_posix() for path in objects]


def operators_extension() -> setuptools.Extension:
    objects = core_objects()
    sources = sources_in(*(() if objects else CORE), "paddle/*.cc")
    # Messages name source files by the same relative path on every build machine.
    folders = (ROOT, Path(paddle.__file__).parents[1])
    relative_paths = [f"-ffile-prefix-map={folder}=." for folder in folders]
    arguments: dict[str, Any] = {
        "include_dirs": [f"{CSRC}/include", f"{CSRC}"],
        "depends": sources_in("**/*.h", "**/*.cuh"),
        "extra_compile_args": {"cxx": [*CXX_FLAGS, *PADDLE_FLAGS, *relative_paths], "nvcc": []},
        "extra_link_args": ["-pthread"],
        "extra_objects": objects,
    }
    if not USE_CUDA:
        extension = cpp_extension.CppExtension(sources, **arguments)
        # The library must not contain paths of the build machine; Paddle is loaded before the operators.
        extension.runtime_library_dirs = ["$ORIGIN/../paddle/base", "$ORIGIN/../paddle/libs"]
        return extension
    arguments["extra_compile_args"]["cxx"].append("-DPMO_WITH_CUDA")
    nvcc = nvcc_version(nvcc_path())
    arguments["extra_compile_args"]["nvcc"] = [*NVCC_FLAGS, *compression_flags(nvcc), *gencode_flags(nvcc)]
    return cpp_extension.CUDAExtension([*sources, *sources_in("cuda/**/*.cu")], **arguments)


DESCRIPTION = description(os.environ.get("REPO_URL", "").rstrip("/"))
COMMANDS = {"build_ext": BuildOperators, "bdist_wheel": CleanWheel, "sdist": PlainSource}
if paddle is None:
    # Metadata and the source distribution need no Paddle; build_ext reports that it is missing.
    extension = setuptools.Extension("paddle_moe_ops._C", [])
    setuptools.setup(version=VERSION, ext_modules=[extension], cmdclass=COMMANDS, **DESCRIPTION)
else:
    if CHECK["paddle_problem"]() is not None:
        raise SystemExit(CHECK["paddle_problem"]())
    USE_CUDA, CUDA_REASON = choose_cuda()
    cpp_extension.setup(
        name="paddle_moe_ops._C",
        version=version_with_paddle(),
        ext_modules=[operators_extension()],
        cmdclass=COMMANDS,
        **DESCRIPTION,
    )
