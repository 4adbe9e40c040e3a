# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The dependency rule: who may import or include whom, read from the sources."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "paddle_moe_ops"
CSRC = PACKAGE / "csrc"

# From the public functions down; a module imports from its own layer and from those below.
LAYERS = (
    {"integrations"},
    {"nn", "masked", "dispatch", "indexed", "rowmaps", "compat"},
    {"expert_parallel"},
    {"explaining"},
    {"mlp"},
    {"gemm", "_float8_layer"},
    {
        *("_activations", "_checks", "_matrices", "_quick"),
        *("functional", "quantization", "routing"),
    },
    {"backends"},
    {"backends.triton", "backends.matmul", "backends.reference"},
    {"backends.layers"},
    {"backends.samples"},
    {"backends.compiled"},
    {
        *(
            "backends.accumulation",
            "backends.arrays",
            "backends.autograd",
            "backends.base",
            "backends.changes",
            "backends.deferred",
            "backends.experts",
            "backends.float8_products",
            "backends.gradients",
            "backends.groups",
            "backends.host_checks",
            "backends.quantized",
            "backends.stacking",
            "backends.triton_arrays",
            "backends.triton_products",
        ),
        *("reference", "triton"),
    },
)
# May be imported from anywhere and import no layer.
HELPERS = {"_build_check", "_env", "_graphs", "_modes", "_native", "_options", "_submodules", "_version"}
# Programs above all layers; no layer imports them.
TOOLS = {"__init__", "__main__", "_report", "bench", "testing"}


@functools.cache
def python_modules() -> dict[str, Path]:
    """Module names below the package (`backends.compiled`, `backends` for its __init__) and their files."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        modules[".".join(parts)] = path
    modules.pop("_C", None)  # written by the build
    return modules


def unit_of(module: str) -> str:
    """The row of the tables above that a module belongs to."""
    known = set().union(*LAYERS, HELPERS, TOOLS)
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in known:
            return ".".join(parts[:length])
    raise AssertionError(f"{module} is listed in none of LAYERS, HELPERS and TOOLS")


def layer_of(unit: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if unit in layer), None)


def imports_of(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import at any depth, those for type checkers included."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


@functools.cache
def imported_names(module: str, path: Path) -> set[str]:
    """Absolute names of all modules, and of their members, that a file imports by these statements."""
    package = ["paddle_moe_ops", *module.split(".")]
    if path.name != "__init__.py":
        package = package[:-1]
    names = set()
    for node in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names.update(".".join([*base, alias.name]) for alias in node.names)
    return names


@functools.cache
def modules_imported(module: str, path: Path) -> set[str]:
    """The modules of this package that a module imports, without the package itself."""
    modules = python_modules()
    found = set()
    for name in imported_names(module, path):
        first, _, rest = name.partition(".")
        while first == "paddle_moe_ops" and rest and rest not in modules:
            rest = rest.rpartition(".")[0]  # the last part was a function or class
        if first == "paddle_moe_ops" and rest:
            found.add(rest)
    return found - {module}


def own_imports(module: str, path: Path) -> set[str]:
    """The units of this package that a module imports."""
    return {unit_of(name) for name in modules_imported(module, path)} - {unit_of(module)}


MODULES = sorted(python_modules().items())


def test_modules_import_only_from_their_own_layer_and_below():
    wrong = []
    for module, path in MODULES:
        unit = unit_of(module)
        imports = own_imports(module, path)
        if unit in TOOLS:
            continue
        wrong += [f"{module} imports {other}, a program" for other in imports & TOOLS]
        layer = layer_of(unit)
        for other in imports - HELPERS - TOOLS:
            if layer is None:
                wrong.append(f"{module} is a helper, but imports {other}")
            elif layer_of(other) < layer:
                wrong.append(f"{module} imports {other} from a layer above")
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    """Imports for type checkers count as well."""
    imports = {module: modules_imported(module, path) for module, path in MODULES}
    while outermost := [module for module, others in imports.items() if not others & imports.keys()]:
        for module in outermost:
            del imports[module]
    assert not imports


def test_no_module_imports_what_is_not_installed_with_the_package():
    for module, path in MODULES:
        others = {name.split(".")[0] for name in imported_names(module, path)} & {
            "benchmarks",
            "examples",
            "tests",
            "tools",
        }
        assert not others, module


def test_only_the_chooser_imports_backend_implementations():
    implementations = {"backends.compiled", "backends.triton", "backends.matmul", "backends.reference"}
    importers = {name for name, path in MODULES if own_imports(name, path) & implementations}
    # Other backends leave whole layers, and Paddle's matmul of groups in host memory, to operators of the library.
    assert importers - {"backends"} <= {"_report", "backends.layers", "backends.matmul", "backends.samples"}


def test_reference_imports_nothing_of_ours_and_no_framework():
    reference = [(module, path) for module, path in MODULES if module.split(".")[0] == "reference"]
    assert reference
    for module, path in reference:
        assert own_imports(module, path) == set(), module
        frameworks = {name.split(".")[0] for name in imported_names(module, path)} & {"paddle", "torch", "triton"}
        assert not frameworks, module


def test_triton_kernels_import_no_framework():
    for module, path in MODULES:
        if module.startswith("triton.") and module != "triton.launch.paddle_device":
            frameworks = {name.split(".")[0] for name in imported_names(module, path)} & {"paddle", "torch"}
            assert not frameworks, module


def test_folders_of_triton_import_only_those_below():
    order = ["launch", "ops", "gemm"]
    for module, path in MODULES:
        folder = module.split(".")[1] if module.startswith("triton.") and module.count(".") == 2 else None
        if folder is not None:
            imported = {each.split(".")[1] for each in modules_imported(module, path) if each.startswith("triton.")}
            assert not imported & set(order[order.index(folder) + 1 :]), module


def test_only_env_reads_the_environment():
    readers = {
        name
        for name, path in MODULES
        if re.search(r"\bos\.(environ|environb|getenv|getenvb|putenv)\b", path.read_text(encoding="utf-8"))
        or imported_names(name, path) & {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
    }
    assert readers == {"_env"}


def test_only_graphs_makes_tensors_contiguous():
    """Paddle's `Tensor.contiguous` moves the caller's own tensor to other memory: `_graphs.dense` copies."""
    users = {
        name
        for name, path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("contiguous", "contiguous_")
    }
    assert users == set()


def included(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def test_only_the_bindings_include_paddle():
    sources = [path for path in CSRC.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}]
    users = {path for path in sources if any(name.startswith("paddle/") for name in included(path))}
    assert users, "the bindings include headers of Paddle"
    assert {path.relative_to(CSRC).parts[0] for path in users} == {"paddle"}


def test_core_headers_do_not_depend_on_kernels_or_bindings():
    for path in (CSRC / "include").rglob("*.h"):
        ours = [name for name in included(path) if name.split("/")[0] in {"common", "cpu", "cuda", "paddle"}]
        assert not ours, path
    for path in (CSRC / "common").iterdir():
        ours = [name for name in included(path) if name.split("/")[0] in {"cpu", "cuda"}]
        assert not ours, path


def test_sources_have_different_names():
    """Paddle 3.2 builds all objects into one folder."""
    names = Counter(path.name for suffix in ("cc", "cu") for path in CSRC.rglob(f"*.{suffix}"))
    assert not [name for name, count in names.items() if count > 1]
