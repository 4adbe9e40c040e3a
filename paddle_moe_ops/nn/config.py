# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The options of a mixture-of-experts block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

from .. import _checks
from .._options import Activation, Combine, ComputeFormat, Keep, QuantizeFormat, Scoring, TransportName
from ..expert_parallel.placement import as_option
from ..expert_parallel.protocol import Transport
from ..expert_parallel.transports import DEFAULT_TIMEOUT_S

__all__ = ["MoEConfig", "config_of", "options_of", "with_group"]

_Arguments = ParamSpec("_Arguments")

_NAME = "MoELayer"


@dataclass(frozen=True)
class MoEConfig:
    """Options of a `MoELayer`, which checks them.

    Attributes:
        hidden_size: H.
        intermediate_size: I of one expert.
        num_experts: E.
        topk: K.
        num_shared_experts: shared experts, 0 for none; they are one SwiGLU of size num_shared_experts * I.
        scoring: see TopKRouter.
        correction_bias: see TopKRouter.
        norm_topk_prob: see TopKRouter.
        num_groups: see TopKRouter.
        topk_groups: see TopKRouter.
        scores_per_group: see TopKRouter.
        scaling_factor: see TopKRouter.
        capacity_factor: see TopKRouter. The slots beyond an expert's capacity are dropped, the last tokens first: they
            add nothing to their token, which keeps the output of its other experts and of the shared experts.
        keep: see `moe_mlp`, which runs the experts.
        workspace_mb: see `moe_mlp`.
        accumulate: see `moe_mlp`, and `SwiGLUExperts` for traced layers.
        defer_dw: of the experts, see `moe_mlp`, and `SwiGLUExperts` for traced layers. Shared experts and the router do
            not defer.
        activation: of the experts, see `moe_mlp`. Shared experts are SwiGLU.
        expert_bias: whether the experts have biases, which begin as zeros. Shared experts have none.
        compute: of the experts, see `moe_mlp`; with a group only if ``combine="reduced"``. Shared experts run in the
            tokens' dtype.
        combine: with a group, the form in which rows return: see `expert_parallel.ExpertParallel`.
        payload: with a group, the format of sent tokens: see `expert_parallel.ExpertParallel`.
        tokens_per_rank: with a group, the number of tokens that each rank sends to each, if it should be the same in
            every call.
        transport: with a group, the transport of tokens: see `expert_parallel.ExpertParallel`.
        timeout: with a group, seconds that a rank waits for the others: see `expert_parallel.ExpertParallel`.
        placement: with a group, the rank of each expert: see `expert_parallel.ExpertParallel` and
            `expert_parallel.move_experts`.

    Examples:
        >>> from paddle_moe_ops.nn import MoEConfig, MoELayer
        >>> config = MoEConfig(64, 32, num_experts=8, topk=2, scoring="sigmoid")
        >>> MoELayer(config).config == config
        True
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    num_shared_experts: int = 1
    _: KW_ONLY
    scoring: Scoring = "softmax"
    correction_bias: bool = True
    norm_topk_prob: bool = True
    num_groups: int = 1
    topk_groups: int | None = None
    scores_per_group: int = 2
    scaling_factor: float = 1.0
    capacity_factor: float | None = None
    keep: Keep = "h"
    workspace_mb: int = 1024
    accumulate: bool = False
    defer_dw: bool | Literal["fleet"] = False
    activation: Activation = "swiglu"
    expert_bias: bool = False
    compute: ComputeFormat = None
    combine: Combine = "exact"
    payload: QuantizeFormat = None
    tokens_per_rank: int | None = None
    transport: TransportName | Transport = "auto"
    timeout: float = DEFAULT_TIMEOUT_S
    placement: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", as_option(self.placement))

    def __repr__(self) -> str:
        """The sizes, and the options that are not the defaults."""
        return f"MoEConfig({', '.join(f'{name}={value!r}' for name, value in self._changed().items())})"

    def _changed(self) -> dict[str, Any]:
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


def options_of(config: MoEConfig, construct: Callable[..., Any]) -> dict[str, Any]:
    """The options that are keyword-only arguments of another constructor, too."""
    parameters = inspect.signature(construct).parameters.values()
    names = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    return {name: value for name, value in vars(config).items() if name in names}


def config_of(*arguments: Any, **options: Any) -> MoEConfig:
    """The options of a layer from the arguments of its constructor."""
    if arguments and isinstance(arguments[0], MoEConfig):
        if len(arguments) > 1 or options:
            others = ", ".join([*map(repr, arguments[1:]), *options])
            _checks.bad_type(_NAME, "a MoEConfig", "the only argument besides group", f"{others} too")
        return arguments[0]
    try:
        _OF_CONFIG.bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"{_NAME}: {error}") from None
    return MoEConfig(*arguments, **options)


def with_group(of_config: inspect.Signature) -> inspect.Signature:
    group = inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any)
    return of_config.replace(parameters=[*of_config.parameters.values(), group])


_OF_CONFIG = inspect.signature(MoEConfig)

if TYPE_CHECKING:

    @dataclass(frozen=True)
    class ConfigAndGroup(MoEConfig):
        """The arguments of a `MoELayer`."""

        _: KW_ONLY
        group: Any = None

    def taking(
        arguments: Callable[_Arguments, Any],
    ) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Arguments], None]]:
        """Tell type checkers that a constructor takes the arguments of another callable."""
