# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The calls: `apply`, `applied`, `remove`, `supported`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from paddle import nn

from ... import _checks
from ..._graphs import context_manager
from ..._matrices import COMPUTE
from ..._options import ComputeFormat
from ...backends import register_note
from . import classes, instances
from .report import Report
from .targets import MODELS, VERSIONS

ALL = "all"
_ON_OPERATORS_ALONE = "ernie4_5_moe_vl"


@dataclass(frozen=True)
class Supported:
    """The methods and versions that `apply` supports for a type of model.

    Attributes:
        methods: the methods that it replaces.
        versions: versions of PaddleFormers that it is tested with.

    Examples:
        >>> import paddle_moe_ops.integrations.paddleformers as pf
        >>> for method in pf.supported()["ernie4_5_moe"].methods:
        ...     print(method)
        paddleformers.transformers.ernie4_5_moe.modeling...
    """

    methods: tuple[str, ...]
    versions: tuple[str, ...]


def supported() -> dict[str, Supported]:
    """List the types of models that `apply` knows; PaddleFormers need not be installed.

    Returns:
        the replaced methods by the name for `apply`, which is PaddleFormers' ``model_type``.

    Examples:
        >>> import paddle_moe_ops.integrations.paddleformers as pf
        >>> "ernie4_5_moe" in pf.supported()
        True
    """
    return {name: Supported(tuple(target.path for target in model.targets), VERSIONS) for name, model in MODELS.items()}


def apply(name_or_model: str | nn.Layer, *, compute: ComputeFormat = None) -> Report:
    """Let the Mixture-of-Experts blocks of a type of model, or of one model, run on these operators.

    With a name the methods of PaddleFormers' classes are replaced, for models that exist and for later ones. Types
    that share a class are patched together: glm4v_moe has the classes of glm4_moe, and qwen3_next those of qwen2_moe.
    With a model its own blocks get other methods, expert layers of PaddleFleet included, and no other model changes.
    Calling it again changes nothing but ``compute``.

    Either everything that can be patched is patched, or an error is raised and nothing is. If a patched class has a
    layer that cannot run on these operators, the first call of that layer raises a RuntimeError with the reason.

    Args:
        name_or_model: a name that `supported` lists, "all" for every type that can be imported, or a model or a part
            of one.
        compute: with a model, what its experts multiply, see `moe_mlp`. A float8 format is for experts that are SwiGLU
            without biases, in stacked matrices or in plain linear layers with the gate in that of the up projection.

    Returns:
        the patched methods, and the unchanged ones with the reason.

    Raises:
        TypeError: neither a name nor a layer.
        ValueError: a name that is not listed; a model without a known block, or with one that cannot be run, or not
            with ``compute``; ``compute`` with a name.
        RuntimeError: PaddleFormers, or something it needs for this type, cannot be imported; the code that would be
            replaced is not the code of a version that was tested; a tensor parallel group of more than one member.
    """
    report, _ = _apply(name_or_model, compute)
    return report


@context_manager
def applied(name_or_model: str | nn.Layer, *, compute: ComputeFormat = None) -> Iterator[Report]:
    """Apply inside a ``with`` block; afterwards the earlier state is restored.

    Args:
        name_or_model: as for `apply`.
        compute: as for `apply`.

    Yields:
        what `apply` returns.

    Raises:
        TypeError: see `apply`.
        ValueError: see `apply`.
        RuntimeError: see `apply`.
    """
    report, undo = _apply(name_or_model, compute)
    try:
        yield report
    finally:
        undo()


def remove(name_or_model: str | nn.Layer = ALL) -> None:
    """Undo `apply`: the methods are the original functions again. Unpatched names and models are ignored.

    A name undoes what was applied to classes, "all" for every type; it leaves single models as they are.

    Args:
        name_or_model: as for `apply`.

    Raises:
        TypeError: neither a name nor a layer.
        ValueError: a name that is not listed.
        RuntimeError: something else has replaced the method of a class since.
    """
    if isinstance(_checked("remove", name_or_model), str):
        classes.remove(_names("remove", name_or_model))
    else:
        instances.unbind(instances.bound(name_or_model))


def _apply(name_or_model: str | nn.Layer, compute: str | None) -> tuple[Report, Callable[[], None]]:
    """The report, and a function that undoes this call."""
    _checks.choice("apply", "compute", compute, COMPUTE)
    if isinstance(_checked("apply", name_or_model), str):
        if compute is not None:
            _checks.bad_value("apply", "compute", "None with a name", repr(compute))
        names = _names("apply", name_or_model)
        patched, left, new_names = classes.apply(names, skip_missing=name_or_model == ALL)
        return Report(name_or_model, _version(), patched, left), partial(classes.remove, new_names)
    patched, left, undo = instances.bind(name_or_model, compute)
    return Report(type(name_or_model).__name__, _version(), patched, left), undo


def _checked(function: str, name_or_model: str | nn.Layer) -> str | nn.Layer:
    if not isinstance(name_or_model, (str, nn.Layer)):
        _checks.bad_type(function, "name_or_model", "a name or a paddle.nn.Layer", type(name_or_model).__name__)
    return name_or_model


def _names(function: str, name: str) -> list[str]:
    if name == _ON_OPERATORS_ALONE:
        expected = "a type whose blocks are replaced"
        instead = f"{name!r}, whose blocks run after patch_paddle(('permute', 'incubate', 'gemm')) as they are"
        _checks.bad_value(function, "name_or_model", expected, instead)
    _checks.choice(function, "name_or_model", name, (ALL, *MODELS))
    return list(MODELS) if name == ALL else [name]


def _version() -> str:
    try:
        return importlib.metadata.version("paddleformers")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@register_note
def _state() -> str:
    names = ", ".join(sorted(classes.applied_names()))
    return names and f"blocks of PaddleFormers on this package: {names}"
