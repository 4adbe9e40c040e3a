# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Put this package's operators into FastDeploy's module of operators, and take them out again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ... import _checks
from ..._graphs import context_manager
from . import expert_parallel, experts, quantization, selection, tensor_parallel

__all__ = ["patch_fastdeploy", "patched_fastdeploy", "unpatch_fastdeploy"]

_PLACE = "fastdeploy.model_executor.ops.gpu"
_MODULES = (tensor_parallel, experts, expert_parallel, selection, quantization)
_OPERATORS: dict[str, Callable[..., Any]] = {name: getattr(each, name) for each in _MODULES for name in each.__all__}
_ABSENT = object()
_originals: dict[ModuleType, dict[str, Any]] = {}  # FastDeploy's own operators while they are replaced


def patch_fastdeploy(module: ModuleType | None = None) -> None:
    """Replace the operators in FastDeploy's module by those of this package, and add those that it lacks.

    FastDeploy looks most operators up in ``fastdeploy.model_executor.ops.gpu`` at every call; some of its modules
    import names when they are loaded, so patch before layers are imported. A module that is patched already stays so.

    Args:
        module: the module of operators; None: that of FastDeploy, which is imported.

    Raises:
        TypeError: ``module`` is not a module.
        ImportError: FastDeploy is not installed.
    """
    module = _module("patch_fastdeploy", module)
    if module not in _originals:
        _originals[module] = {name: getattr(module, name, _ABSENT) for name in _OPERATORS}
        for name, operator in _OPERATORS.items():
            setattr(module, name, operator)


def unpatch_fastdeploy(module: ModuleType | None = None) -> None:
    """Give FastDeploy's module its own operators back; a module that is not patched stays as it is.

    Args:
        module: as in `patch_fastdeploy`.

    Raises:
        TypeError: ``module`` is not a module.
        ImportError: FastDeploy is not installed.
    """
    module = _module("unpatch_fastdeploy", module)
    for name, operator in _originals.pop(module, {}).items():
        if operator is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, operator)


@context_manager
def patched_fastdeploy(module: ModuleType | None = None) -> Iterator[None]:
    """Apply `patch_fastdeploy` inside a ``with`` block; afterwards the earlier state is restored.

    Args:
        module: as in `patch_fastdeploy`.
    """
    module = _module("patched_fastdeploy", module)
    was_patched = module in _originals
    patch_fastdeploy(module)
    try:
        yield
    finally:
        if not was_patched:
            unpatch_fastdeploy(module)


def _module(function: str, module: Any) -> ModuleType:
    if module is None:
        return importlib.import_module(_PLACE)
    _checks.instance(function, "module", module, ModuleType, "a module or None")
    return module
