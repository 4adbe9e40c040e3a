# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Leaves out what Triton's interpreter does again and again without any effect: most of the time of a launch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

# Caches of all launches: dtypes by name, attributes of block types by element and shape, attributes of tensors by the
# name of their type, and patches by the modules that a launch has called so far.
_DTYPES: dict[str, Any] = {}
_BLOCK_TYPES: dict[tuple[Any, ...], dict[str, Any]] = {}
_TENSORS: dict[str, dict[str, Any]] = {}
_PATCHES: dict[tuple[str, ...], list[tuple[Any, str, Any]]] = {}


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    """One launch in less time, with the same results.

    The interpreter puts its own functions in the place of Triton's at every call of a function; once a launch is enough
    for a module, and one search for these functions serves all launches. It makes a table of dtypes at every operation,
    and names and checks the type of every result; once for each type is enough. It looks for a common type of operands
    that have the same. It computes each integer operation a second time to see whether it overflows, and outside of its
    debug mode drops the answer.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, semantic = interpreter.interpreter_builder, type(interpreter.interpreter_semantic)
    patch, dtype_of, options = interpreter._patch_lang, interpreter._get_np_dtype, builder.options
    init_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    promote = semantic.binary_op_type_checking_impl
    patched: list[str] = []

    def patch_once(function: Any) -> Any:
        if function.__module__ in patched:  # by this launch, which is what undoes it
            return None
        patched.append(function.__module__)
        modules = tuple(patched)
        if modules not in _PATCHES:
            scope = patch(function)
            _PATCHES[modules] = [(target, name, vars(target)[name]) for target, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for target, name, value in _PATCHES[modules]:
            scope.set_attr(target, name, value)
        return scope

    def known_dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in _DTYPES:
            _DTYPES[name] = dtype_of(kind)
        return _DTYPES[name]

    def init_known_type(self: Any, element: Any, shape: Sequence[Any]) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in _BLOCK_TYPES:
            init_type(self, element, shape)
            _BLOCK_TYPES[key] = vars(self).copy()
        vars(self).update(_BLOCK_TYPES[key], element_ty=element)

    def init_tensor_of_known_type(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in _TENSORS:
            init_tensor(self, handle, kind)
            _TENSORS[kind.name] = vars(self).copy()
        vars(self).update(_TENSORS[kind.name], handle=handle, type=kind, dtype=kind.scalar)

    def promote_others(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is type(rhs) is tl.tensor and lhs.type == rhs.type and not (div_or_mod or lhs.dtype.is_ptr()):
            return lhs, rhs
        return promote(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_dtype_of
    tl.block_type.__init__, tl.tensor.__init__ = init_known_type, init_tensor_of_known_type
    semantic.binary_op_type_checking_impl = promote_others
    if not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype, builder.options = patch, dtype_of, options
        tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor
        semantic.binary_op_type_checking_impl = promote
