# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Which methods of PaddleFormers are replaced, for which models, and whether they are the ones that are known."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import blocks

VERSIONS = ("1.2.0",)  # that the digests below were taken from, and the tests run with


@dataclass(frozen=True)
class Target:
    """A method that is replaced.

    Attributes:
        module: the module of the class.
        class_name: the class.
        method: the method's name.
        replacement: what replaces it.
        digests: methods that the replacement does the work of or depends on, each with the digest of its source. A name
            without a module is of the class.
    """

    module: str
    class_name: str
    method: str
    replacement: Callable[..., Any]
    digests: dict[str, str] = field(hash=False)

    @property
    def path(self) -> str:
        """Module, class and method."""
        return f"{self.module}.{self.class_name}.{self.method}"

    def load(self) -> type:
        """Import the class."""
        return getattr(importlib.import_module(self.module), self.class_name)


@dataclass(frozen=True)
class Model:
    """The methods that are replaced for models of one type.

    Attributes:
        targets: the methods.
        left: classes of the type that stay as they are, each with the reason.
    """

    targets: tuple[Target, ...]
    left: tuple[tuple[str, str], ...] = ()


def digest(function: object) -> str | None:
    """A number for the source of a function, the same in each installation of one version; None without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _stacked(module: str, class_name: str) -> Target:
    return Target(module, class_name, "forward", blocks.stacked_experts, {"forward": "5e5f486fa3c6c100"})


_TRANSFORMERS = "paddleformers.transformers"
_FLEET = "builds a model of PaddleFleet, which has other blocks; {}Deprecated has the ones that are patched"

_QWEN2 = f"{_TRANSFORMERS}.qwen2_moe.modeling"
_QWEN3 = f"{_TRANSFORMERS}.qwen3_moe.modeling"
_DEEPSEEK = f"{_TRANSFORMERS}.deepseek_v3.modeling"
_GLM4 = f"{_TRANSFORMERS}.glm4_moe.modeling"


def _fleet(*class_names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, _FLEET.format(name)) for name in class_names)


MODELS: dict[str, Model] = {
    "deepseek_v3": Model((_stacked(_DEEPSEEK, "DeepseekV3NaiveMoe"),)),
    "glm4_moe": Model((_stacked(_GLM4, "GLm4MoeNaiveMoe"),), _fleet("Glm4MoeForCausalLM")),
    "qwen2_moe": Model((_stacked(_QWEN2, "Qwen2MoeExperts"),), _fleet("Qwen2MoeForCausalLM")),
    "qwen3_moe": Model((_stacked(_QWEN3, "Qwen3MoeExperts"),), _fleet("Qwen3MoeForCausalLM")),
}
