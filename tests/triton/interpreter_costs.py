# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Leaves out what Triton's interpreter does again and again without any effect: most of the time of a launch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    """One launch in less time, with the same results.

    The interpreter puts its own functions in the place of Triton's at every call of a function; once a launch is enough
    for a module. It makes a table of dtypes at every operation; one is enough. It computes each integer operation a
    second time to see whether it overflows, and outside of its debug mode drops the answer.
    """
    from triton.runtime import interpreter

    patch, dtype_of, builder = interpreter._patch_lang, interpreter._get_np_dtype, interpreter.interpreter_builder
    options, patched = builder.options, set()

    def patch_once(function: Any) -> Any:
        if function.__module__ in patched:  # by this launch, which is what undoes it
            return None
        patched.add(function.__module__)
        return patch(function)

    def known_dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in _DTYPES:
            _DTYPES[name] = dtype_of(kind)
        return _DTYPES[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_dtype_of
    if not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype, builder.options = patch, dtype_of, options


_DTYPES: dict[str, Any] = {}
