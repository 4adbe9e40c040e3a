# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Route Paddle's Mixture-of-Experts functions to this package, and back, by families.

"permute": the code inside the function objects ``moe_permute`` and ``moe_unpermute`` is replaced, not the names that
refer to them. So callers that imported the functions earlier, under whatever name, are routed here too.

Other families: the operators in ``paddle._C_ops`` and ``paddle._legacy_C_ops`` are replaced. The functions of
``paddle.incubate.nn.functional`` and ``paddle.distributed.models.moe`` look them up there at every call. So these
functions stay as they are, with their signatures; callers that imported them earlier are routed here too, and so are
calls of ``paddle._C_ops.<name>``. Two functions of
"fp8" fail before they call their operators; their code is replaced too.

`unpatch_paddle` gives Paddle its own code and operators back.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import paddle
from paddle.base import core

from .. import _checks, functional
from .._graphs import FLOAT8, context_manager
from ..backends import register_note
from . import (
    _async_load,
    fp8,
    gshard,
    incubate_auto,
    incubate_backward,
    incubate_dispatch,
    incubate_gemm,
    incubate_quant,
    incubate_routing,
)
from .fp8.operators import OPERATORS as _FLOAT8_OPERATORS

__all__ = ["patch_paddle", "patched_paddle", "unpatch_paddle"]

_originals: dict[str, dict[FunctionType, CodeType]] = {}  # Paddle's own code while it is replaced, by family
_operators: dict[str, dict[str, Any]] = {}  # Paddle's own operators while they are replaced, by family
_blocks: dict[str, int] = {}  # running blocks of `patched_paddle` that patched a family, in all threads
_lock = threading.RLock()  # of the four
_place_of_name: dict[str, int] = {}  # where `name`, Paddle's last argument, is in the functions that were replaced


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
    """Run `functional.moe_permute` with Paddle's tolerance: ids that name no expert are ignored, on a CPU too.

    As in Paddle's newest version, float8 rows are not gathered without their scale.
    """
    keywords.setdefault("validate", False)
    others = _without_name("moe_permute", others, keywords, before=8)
    if scale is None and do_gather and getattr(hidden_states, "dtype", None) in FLOAT8:
        _checks.bad_value("moe_permute", "scale", "given with float8 rows, unless do_gather=False", None)
    routing = expert_routemap_topk, expert_prob_topk, num_experts, tokens_per_expert
    return functional.moe_permute(hidden_states, scale, *routing, padding_alignment, do_gather, *others, **keywords)


def moe_unpermute(*arguments: Any, **keywords: Any) -> Any:
    """Run `functional.moe_unpermute` with Paddle's numbers: a token with exactly one row is not weighted."""
    keywords.setdefault("compat", "paddle")
    keywords.setdefault("validate", False)
    arguments = _without_name("moe_unpermute", arguments, keywords)
    if "use_mix_precision" in keywords:  # as Paddle 3.2 calls it
        keywords["using_mix_precision"] = keywords.pop("use_mix_precision")
    return functional.moe_unpermute(*arguments, **keywords)


def _without_name(function: str, arguments: tuple[Any, ...], keywords: dict[str, Any], before: int = 0) -> Any:
    """Positional arguments without `name`, which becomes a keyword: in Paddle 3.2 fewer come before it."""
    place = _place_of_name.get(function, -1) - before
    if len(arguments) != place + 1:
        return arguments
    keywords["name"] = arguments[place]
    return arguments[:place]


# The code that replaces that of Paddle's functions. It runs with the globals of Paddle's module, so it imports its
# callees.


def _call_moe_permute(*arguments: Any, **keywords: Any) -> Any:
    from paddle_moe_ops.compat import paddle as ours

    return ours.moe_permute(*arguments, **keywords)


def _call_moe_unpermute(*arguments: Any, **keywords: Any) -> Any:
    from paddle_moe_ops.compat import paddle as ours

    return ours.moe_unpermute(*arguments, **keywords)


def _call_fused_transpose_split_quant(*arguments: Any, **keywords: Any) -> Any:
    from paddle_moe_ops.compat import fp8

    return fp8.fused_transpose_split_quant(*arguments, **keywords)


def _call_fp8_gemm_blockwise(*arguments: Any, **keywords: Any) -> Any:
    from paddle_moe_ops.compat import fp8

    return fp8.fp8_gemm_blockwise(*arguments, **keywords)


_STAND_INS: dict[str, dict[str, CodeType]] = {
    "permute": {"moe_permute": _call_moe_permute.__code__, "moe_unpermute": _call_moe_unpermute.__code__},
    # The first has the order of arguments of newer Paddle only, the second asks for the properties of a GPU.
    "fp8": {
        "fused_transpose_split_quant": _call_fused_transpose_split_quant.__code__,
        "fp8_gemm_blockwise": _call_fp8_gemm_blockwise.__code__,
    },
}
_MODULES = {"permute": "paddle.nn.functional", "fp8": "paddle.incubate.nn.functional"}
_OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "incubate": {
        name: getattr(module, name)
        for module in (incubate_dispatch, incubate_routing, incubate_quant, incubate_backward, incubate_auto)
        for name in module.__all__
    },
    "gemm": {"batched_gemm": incubate_gemm.batched_gemm},
    "fp8": _FLOAT8_OPERATORS,
    "gshard": {name: getattr(gshard, name) for name in gshard.__all__},
}
_LEGACY = {"random_routing"}  # operators that Paddle's functions look up in paddle._legacy_C_ops
NAMES_OF_FAMILIES = {
    "permute": tuple(_STAND_INS["permute"]),
    **{family: tuple(names) for family, names in _OPERATORS.items()},
    "fp8": tuple(fp8.__all__),
}
_FAMILIES = tuple(NAMES_OF_FAMILIES)
_LOADER = "AsyncLoad"  # a class of paddle.base.core in builds for GPUs
_Families = Sequence[str] | str


def _paddle_function(module: str, name: str) -> FunctionType:
    function = getattr(importlib.import_module(module), name, None)
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        raise RuntimeError(
            f"patch_paddle: {module}.{name} must be a plain function, as in Paddle 3.3, but is {function!r}"
        )
    return function


def _module_of(name: str) -> str:
    """The module of paddle in which Paddle's functions look an operator up."""
    return "_legacy_C_ops" if name in _LEGACY else "_C_ops"


def _paddle_operator(name: str) -> Any:
    module = _module_of(name)
    operator = getattr(getattr(paddle, module), name, None)
    if operator is None:
        raise RuntimeError(f"patch_paddle: paddle.{module}.{name} must exist, as in Paddle 3.3, but does not")
    return operator


def _checked(function: str, families: Any) -> tuple[str, ...]:
    """The families, each once."""
    families = (families,) if isinstance(families, str) else families
    if not isinstance(families, (tuple, list, set, frozenset)):
        _checks.bad_type(function, "families", f"a tuple or list of names out of {_FAMILIES}", repr(families))
    for family in families:
        _checks.choice(function, "families", family, _FAMILIES)
    return tuple(family for family in _FAMILIES if family in families)


def _patched() -> tuple[str, ...]:
    """The families that are patched now."""
    return tuple(family for family in _FAMILIES if family in _originals or family in _operators)


def patch_paddle(families: _Families = ("permute",)) -> None:
    """Make families of Paddle's Mixture-of-Experts functions run on this package, everywhere in the process.

    "permute", ``paddle.nn.functional.moe_permute`` and ``moe_unpermute``: numbers are Paddle's, even where this
    package decides otherwise. A token with exactly one row stays unweighted in the weighted combine, and ids outside
    [0, num_experts) are ignored on a CPU too. As in Paddle's newest version, float8 rows need their scale where
    they are gathered. The signature stays Paddle's. Gradients, running on a CPU, more dtypes and widths, and the
    keyword arguments of this package's functions are new.

    "incubate", the operators of ERNIE's models in ``paddle.incubate.nn.functional``: moe_gate_dispatch,
    moe_gate_dispatch_and_quant, moe_gate_dispatch_permute, moe_gate_dispatch_partial_nosoftmaxtopk, moe_combine,
    moe_combine_no_weight, cal_aux_loss, int_bincount, expand_modality_expert_id, build_src_rank_and_local_expert_id,
    the operators ``paddle._C_ops.<name>_grad`` of their gradients, and ``moe_gate_dispatch_auto`` and
    ``moe_combine_auto`` on dense tensors. "gemm": ``batched_gemm``. "fp8": the functions of
    `paddle_moe_ops.compat.fp8`, and their operators. "gshard": number_count, assign_pos,
    limit_by_capacity, prune_gate_by_capacity and random_routing, the operators of the gates of
    ``paddle.incubate.distributed.models.moe.MoELayer``. All are new on a CPU. In a CPU-only build of Paddle, "incubate"
    also adds ``paddle.base.core.AsyncLoad``, which that build lacks and ERNIE's models use: its copies are synchronous.

    Families that are patched already stay so.

    Args:
        families: names of families, or one name.

    Raises:
        TypeError: families is not a list of names.
        ValueError: there is no such family.
        RuntimeError: this Paddle lacks a function of them; then nothing is patched.

    Examples:
        >>> import paddle
        >>> import paddle.nn.functional as F
        >>> from paddle_moe_ops import patch_paddle, unpatch_paddle
        >>> patch_paddle()
        >>> x, ids = paddle.randn([3, 64]), paddle.to_tensor([[0, 2], [2, 1], [0, 1]], "int32")
        >>> F.moe_permute(x, None, ids, paddle.rand([3, 2]), 4, [2, 2, 2, 0], padding_alignment=1)[0].shape
        [6, 64]
        >>> unpatch_paddle()
    """
    chosen = _checked("patch_paddle", families)
    with _lock:
        _patch(chosen)


def _patch(chosen: tuple[str, ...]) -> None:
    before = _patched()
    added = [family for family in chosen if family not in before]
    functions = {  # all of the families, or none
        family: {name: _paddle_function(_MODULES[family], name) for name in _STAND_INS[family]}
        for family in added
        if family in _STAND_INS
    }
    operators = {
        family: {name: _paddle_operator(name) for name in _OPERATORS[family]}
        for family in added
        if family in _OPERATORS
    }
    for family, by_name in functions.items():
        _originals[family] = {function: function.__code__ for function in by_name.values()}
        for name, function in by_name.items():
            signature = inspect.signature(function)
            function.__code__ = _STAND_INS[family][name]
            _place_of_name[name] = [*signature.parameters, "name"].index("name")
            function.__signature__ = signature  # type: ignore[attr-defined]  # that of the new code says nothing
    for family in operators:
        _operators[family] = operators[family]
        for name, stand_in in _OPERATORS[family].items():
            setattr(getattr(paddle, _module_of(name)), name, stand_in)
    if "incubate" in added and not hasattr(core, _LOADER):
        setattr(core, _LOADER, _async_load.AsyncLoad)


def unpatch_paddle(families: _Families = _FAMILIES) -> None:
    """Give Paddle its own functions back; families that are not patched stay as they are.

    Args:
        families: names of families, as in `patch_paddle`; by default all.

    Raises:
        TypeError: families is not a list of names.
        ValueError: there is no such family.

    Examples:
        >>> from paddle_moe_ops import patch_paddle, unpatch_paddle
        >>> patch_paddle(("permute", "gemm"))
        >>> unpatch_paddle("gemm")
        >>> unpatch_paddle()  # the others
    """
    chosen = _checked("unpatch_paddle", families)
    with _lock:
        _unpatch(chosen)


def _unpatch(chosen: Sequence[str]) -> None:
    for family in chosen:
        for function, code in _originals.pop(family, {}).items():
            function.__code__ = code
            del function.__signature__  # type: ignore[attr-defined]
        for name, operator in _operators.pop(family, {}).items():
            setattr(getattr(paddle, _module_of(name)), name, operator)
    if "incubate" in chosen and getattr(core, _LOADER, None) is _async_load.AsyncLoad:
        delattr(core, _LOADER)


@context_manager
def patched_paddle(families: _Families = ("permute",)) -> Iterator[None]:
    """Apply `patch_paddle` inside a ``with`` block; afterwards the earlier state is restored.

    The whole process is patched. If blocks of several threads overlap, the last one to end restores it.

    Args:
        families: names of families, as in `patch_paddle`.

    Examples:
        >>> import paddle
        >>> from paddle.incubate.nn.functional import batched_gemm
        >>> from paddle_moe_ops import patched_paddle
        >>> rows, matrices = paddle.randn([6, 64]), paddle.randn([3, 64, 32])
        >>> with patched_paddle(["gemm"]):
        ...     batched_gemm(rows, matrices, [1, 3, 2]).shape
        [6, 32]
    """
    chosen = _checked("patch_paddle", families)
    with _lock:
        before = _patched()
        _patch(chosen)
        added = [family for family in chosen if family not in before or family in _blocks]
        for family in added:
            _blocks[family] = _blocks.get(family, 0) + 1
    try:
        yield
    finally:
        with _lock:
            for family in added:
                _blocks[family] -= 1
            ended = [family for family in added if not _blocks[family]]
            for family in ended:
                del _blocks[family]
            _unpatch(ended)


@register_note
def _state() -> str:
    who = "this package (patch_paddle)" if "permute" in _originals else "Paddle itself"
    others = [f"; the family {family!r}: this package (patch_paddle)" for family in _operators]
    return f"paddle.nn.functional.moe_permute and moe_unpermute: {who}{''.join(others)}"
