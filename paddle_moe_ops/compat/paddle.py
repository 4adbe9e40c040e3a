# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Route ``paddle.nn.functional.moe_permute`` and ``moe_unpermute`` to this package, and back.

The code inside Paddle's two function objects is replaced, not the names that refer to them. So callers that imported
the functions earlier, under whatever name, are routed here too. `unpatch_paddle` gives them Paddle's code back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import paddle

from .. import _checks, functional
from ..backends import register_note
from ..backends.base import FLOAT8

__all__ = ["patch_paddle", "patched_paddle", "unpatch_paddle"]

_originals: dict[FunctionType, CodeType] = {}  # Paddle's own code while it is replaced


def moe_permute(
    hidden_states: Any,
    scale: Any,
    expert_routemap_topk: Any,
    expert_prob_topk: Any,
    num_experts: Any,
    tokens_per_expert: Any,
    padding_alignment: Any,
    do_gather: Any = True,
    *others: Any,
    **keywords: Any,
) -> Any:
    """Run `functional.moe_permute` with Paddle's tolerance: ids that name no expert are passed over, on a CPU too.

    As in Paddle's newest version, float8 rows are not gathered without their scale.
    """
    keywords.setdefault("validate", False)
    if scale is None and do_gather and getattr(hidden_states, "dtype", None) in FLOAT8:
        _checks.bad_value("moe_permute", "scale", "given with float8 rows, unless do_gather=False", None)
    routing = expert_routemap_topk, expert_prob_topk, num_experts, tokens_per_expert
    return functional.moe_permute(hidden_states, scale, *routing, padding_alignment, do_gather, *others, **keywords)


def moe_unpermute(*arguments: Any, **keywords: Any) -> Any:
    """Run `functional.moe_unpermute` with Paddle's numbers: a token with exactly one row is not weighted."""
    keywords.setdefault("compat", "paddle")
    keywords.setdefault("validate", False)
    return functional.moe_unpermute(*arguments, **keywords)


# The code that Paddle's functions get. It runs with the globals of Paddle's module, so it imports what it calls.


def _call_moe_permute(*arguments: Any, **keywords: Any) -> Any:
    from paddle_moe_ops.compat import paddle as ours

    return ours.moe_permute(*arguments, **keywords)


def _call_moe_unpermute(*arguments: Any, **keywords: Any) -> Any:
    from paddle_moe_ops.compat import paddle as ours

    return ours.moe_unpermute(*arguments, **keywords)


_STAND_INS: dict[str, CodeType] = {
    "moe_permute": _call_moe_permute.__code__,
    "moe_unpermute": _call_moe_unpermute.__code__,
}


def _paddle_function(name: str) -> FunctionType:
    function = getattr(paddle.nn.functional, name, None)
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        raise RuntimeError(
            f"patch_paddle: paddle.nn.functional.{name} must be a plain function, as in Paddle 3.3, but is {function!r}"
        )
    return function


def patch_paddle() -> None:
    """Make Paddle's moe_permute and moe_unpermute run on this package, everywhere in the process.

    Numbers are Paddle's, even where this package decides otherwise. A token with exactly one row stays unweighted in
    the weighted combine, and ids outside [0, num_experts) are passed over on a CPU too. As in Paddle's newest version,
    float8 rows need their scale where they are gathered. The signature stays Paddle's. Gradients, the CPU, more dtypes
    and widths, and the keyword arguments of this package's functions are new. Calling it again changes nothing.

    Raises:
        RuntimeError: this Paddle has no such functions.
    """
    functions = {name: _paddle_function(name) for name in _STAND_INS}  # all or none
    for name, function in functions.items():
        if function not in _originals:
            signature = inspect.signature(function)
            _originals[function] = function.__code__
            function.__code__ = _STAND_INS[name]
            function.__signature__ = signature  # type: ignore[attr-defined]  # that of the new code says nothing


def unpatch_paddle() -> None:
    """Give Paddle's functions their own code back; without a patch it changes nothing."""
    while _originals:
        function, code = _originals.popitem()
        function.__code__ = code
        del function.__signature__  # type: ignore[attr-defined]


@contextlib.contextmanager
def patched_paddle() -> Iterator[None]:
    """Apply `patch_paddle` inside a ``with`` block; afterwards the state is what it was before."""
    was_patched = bool(_originals)
    patch_paddle()
    try:
        yield
    finally:
        if not was_patched:
            unpatch_paddle()


@register_note
def _state() -> str:
    who = "this package (patch_paddle)" if _originals else "Paddle itself"
    return f"paddle.nn.functional.moe_permute and moe_unpermute: {who}"
