# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Helpers of constructors that the layers share."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from paddle import Tensor, nn

from .. import _checks


def initial(fan_in: int) -> Any:
    """Initialiser of a weight whose product with inputs of variance 1 has variance 1."""
    return nn.initializer.Normal(std=fan_in**-0.5)


def weight(layer: nn.Layer, shape: list[int], fan_in: int) -> Tensor:
    """A parameter with that initialiser."""
    return layer.create_parameter(shape, default_initializer=initial(fan_in))


def misnamed(**names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of constructors: a keyword that other packages use raises and names the argument here."""

    def decorate(construct: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(construct)
        def call(self: Any, *arguments: Any, **keywords: Any) -> None:
            for given in names.keys() & keywords.keys():
                raise TypeError(f"{type(self).__name__}: the argument is called {names[given]}, but got {given}")
            construct(self, *arguments, **keywords)

        return call

    return decorate


def warn_user(message: str) -> None:
    """Warn about the line that called into the package, by Paddle's call of a layer or not."""
    packages, level, frame = (__name__.partition(".")[0], "paddle"), 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


class Size(int):
    """An int that is part of a program.

    If layers of one class are traced by bytecode and differ in an attribute that is a plain int, Paddle turns it into a
    tensor.
    """


def sizes(function: str, **given: Any) -> list[Size]:
    """Check sizes, ints >= 1."""
    return [Size(_checks.integer(function, name, size, 1)) for name, size in given.items()]


def casting_others(func: Callable[..., Tensor], kept: Sequence[Tensor | None]) -> Callable[..., Tensor]:
    """A function for ``nn.Layer._apply``, by which Paddle casts and moves layers, that casts no tensor of ``kept``."""

    def cast(tensor: Tensor, device: Any, dtype: Any, blocking: Any) -> Tensor:
        is_kept = any(tensor is each for each in kept)
        return func(tensor, device, tensor.dtype if is_kept else dtype, blocking)

    return cast


def described(weight: Tensor, **settings: Any) -> str:
    """The text of a layer for print(), in the form of Paddle's own layers."""
    named = (f"{name}={value}" for name, value in settings.items())
    return ", ".join((*named, f"dtype={_checks.dtype_name(weight.dtype)}"))
