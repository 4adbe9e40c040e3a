# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""`Report`, the result of `apply`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The methods that run on these operators after a call of `apply`, and those that do not.

    Attributes:
        subject: the name that was given, or the class of the model.
        version: the version of PaddleFormers.
        patched: the methods that were replaced, as "class.method" with the module in front, or with the path of the
            layer in the model.
        left: methods and layers that are unchanged, each with the reason.
    """

    subject: str
    version: str
    patched: tuple[str, ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """One line for each entry."""
        lines = [f"{self.subject} (PaddleFormers {self.version})"]
        lines += [f"  patched: {name}" for name in self.patched]
        lines += [f"  left: {name}: {reason}" for name, reason in self.left]
        return "\n".join(lines)
