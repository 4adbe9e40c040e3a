# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Paddle's sharding of stage 3 for the dense parameters of a model; its experts stay whole on their ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import paddle
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import (
    GroupShardedStage3,
    _allgather_buffer,
    _TensorWrapper,
)

from .. import _checks
from .._graphs import context_manager
from .agreement import agree
from .fleet_optimizers import innermost_of
from .training import average_gradients

__all__ = ["FullyShardedModel", "Slice", "slice_of"]

_NAME = "group_sharded_parallel"
_PREFIX = "slice@"  # Paddle's, of the names of slices
_CLEARING = "clear_grad", "clear_gradients", "zero_grad"  # names of one method
_models: weakref.WeakSet[FullyShardedModel] = weakref.WeakSet()  # attributes of parameters would be copied with them


class Slice(NamedTuple):
    """This rank's part of a parameter that stage 3 divides.

    Attributes:
        values: [elements of this rank, some of them padding].
        name: the ``.name`` that the optimizer's states begin with.
        first: the first element in the flattened parameter.
        end: the element after the last one.
    """

    values: Tensor
    name: str
    first: int
    end: int


def slice_of(parameter: Tensor) -> Slice | None:
    """Return this rank's part of a parameter, and free the others' if they are here; None for a whole parameter."""
    for each in _models:
        if each._sliced.get(parameter.name) is parameter:
            return each._slice_of(parameter)
    return None


@context_manager
def _without_experts(model: nn.Layer, experts: Sequence[Tensor]) -> Iterator[None]:
    """Hide the parameters of experts from methods that walk through the parameters of a model."""
    hidden = {id(each) for each in experts}
    before = [(each, dict(each._parameters)) for each in model.sublayers(include_self=True)]
    for layer, parameters in before:
        for name, each in parameters.items():
            if id(each) in hidden:
                del layer._parameters[name]
    try:
        yield
    finally:
        for layer, parameters in before:
            layer._parameters.clear()
            layer._parameters.update(parameters)


def _in_structure(hook: Any, layer: nn.Layer, inputs: Any, outputs: Any) -> Any:
    """Run Paddle's hook, which returns a tuple of tensors, or the only one, and none of other structures."""
    made = hook(layer, inputs, tuple(paddle.utils.flatten(outputs)))
    return paddle.utils.pack_sequence_as(outputs, list(made) if isinstance(made, tuple) else [made])


class FullyShardedModel(GroupShardedStage3):
    """Paddle's model of stage 3, which gathers a dense layer before it runs and reduces its gradients.

    Args:
        model: has layers of experts.
        optimizer: of all its trained parameters; its methods are replaced.
        experts: parameters that only some ranks have.
        everyone: all ranks.
        **options: those of Paddle's class.
    """

    def __init__(
        self, model: nn.Layer, optimizer: Any, experts: Sequence[Tensor], everyone: Group, **options: Any
    ) -> None:
        with _without_experts(model, experts):
            super().__init__(model, optimizer, **options)
            self._names = {each.name: name for name, each in model.named_parameters()}
            self._dense = [(each, each.stop_gradient) for each in model.parameters()]
        self._experts, self._used = list(experts), set[str]()  # names with a gradient
        self._sliced = {each.name: each for layer in self._trainable_params.values() for each in layer}
        self._whole = sorted(self._unslice_params, key=lambda each: each.name)  # as in Paddle's buffers
        for each in self._sliced.values():
            self._optim._master_weights.pop(_PREFIX + each.name, None)  # created by the first step
        for each in self._whole:
            self._optim._master_weights.pop(each.name, None)
        for each, is_frozen in self._dense:
            if not is_frozen:
                each._register_backward_hook(functools.partial(self._note, each.name))
        # As parameters of the optimizer. A pass clears their values.
        self._parts = {name: self._part_of(each) for name, each in self._sliced.items() if not each.stop_gradient}
        self._list_parameters()
        self._restore_names()
        self.register_forward_pre_hook(self._check_parameters)  # a `forward` would be transformed by to_static
        _models.add(self)
        layout = [f"{self._names[each.name]} {each.shape}" for each in (*self._sliced.values(), *self._whole)]
        agree(_NAME, everyone, {"dense parameters in the order of their .name": layout})

    def counted(self) -> set[str]:
        """Return the names of the dense tensors that this rank counts in the norm of gradients: all parts."""
        whole = {each.name for each in self._whole} if self._group.rank == 0 else set()
        return whole | {each.name for each in self._parts.values()}

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the state of the model, whose parameters `get_all_parameters` has gathered.

        Raises:
            ValueError: a parameter is not gathered.
        """
        for each in self._sliced.values():
            if not each._is_initialized():
                expected = "gathered by get_all_parameters() on all ranks, or saved by save_checkpoint"
                _checks.bad_value(_NAME, f"parameter {self._names[each.name]!r}", expected, "divided between ranks")
        return super().state_dict(*arguments, **options)

    def set_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Raise ValueError: the values would be lost when parameters are gathered."""
        expected = "called before group_sharded_parallel; load_checkpoint loads after it"
        _checks.bad_value(_NAME, "set_state_dict", expected, "a call after it")

    @paddle.no_grad()
    def get_all_parameters(self, convert2cpu: bool = False, with_freeze_param: bool = True) -> None:
        """Gather the parameters on all ranks, until the next backward pass."""
        wanted = [each for each in self._sliced.values() if with_freeze_param or not each.stop_gradient]
        for each in wanted:
            self._slice_of(each)
        sizes, flow = self._param2buffer_size, self._task_flow
        _allgather_buffer(wanted, self._group, sizes, True, flow, sync_wait=True, convert2cpu=convert2cpu)
        for each in wanted if convert2cpu else ():
            flow.full_param.pop(each.name)[0]._share_buffer_to(each)

    def _note(self, name: str, *_: Any) -> None:
        self._used.add(name)

    def _check_parameters(self, *_: Any) -> None:
        """Raise if a dense parameter was frozen, trained or loaded in a way that Paddle does not notice."""
        for each, was_frozen in self._dense:
            if each.stop_gradient != was_frozen:
                expected = f"{was_frozen} as at the start, since Paddle has divided the dense parameters"
                name = self._names[each.name]
                _checks.bad_value(_NAME, f"stop_gradient of {name!r}", expected, each.stop_gradient)
        for each in self._sliced.values():
            if each.status == "part" and each._is_initialized() and not each.place.is_cpu_place():
                expected = "set before group_sharded_parallel, or by load_checkpoint"
                _checks.bad_value(_NAME, f"parameter {self._names[each.name]!r}", expected, "set to a whole value")

    @paddle.no_grad()
    def _slice_of(self, parameter: Tensor) -> Slice:
        """Return this rank's part of a parameter, and free the gathered values.

        Paddle gathers the parameters of the layer that ran next in the first pass. If another layer runs, or the
        backward pass ends there, the gathered values must not outlive a step.
        """
        gathered, task = self._task_flow.full_param.pop(parameter.name, (None, None))
        first, end = self._param2buffer[parameter.name][self._rank]
        if gathered is not None and task is not None:
            task.wait()
        if parameter.status == "all":
            parameter.fw_storage = gathered._slice(first, end).detach().clone()
            parameter.status, parameter.use_count = "part", 0
        parameter._clear_data()
        count = int(parameter._numel())
        return Slice(parameter.fw_storage, _PREFIX + parameter.name, min(first, count), min(end, count))

    def _restore_names(self) -> None:
        """Let functions of the optimizer see whole parameters and their names, not those of parts."""
        optimizer = innermost_of(self._optim)
        decays, ratio = (getattr(optimizer, name, None) for name in ("_apply_decay_param_fun", "_lr_ratio"))
        if decays is not None:
            optimizer._apply_decay_param_fun = lambda name: decays(name.removeprefix(_PREFIX))
        if ratio is not None:
            optimizer._lr_ratio = lambda each: ratio(self._sliced.get(each.name.removeprefix(_PREFIX), each))

    def _part_of(self, parameter: Tensor) -> Tensor:
        """Return a part as a parameter of the optimizer, with the settings of the whole."""
        parameter.fw_storage = made = _TensorWrapper(parameter)
        made.need_clip = getattr(parameter, "need_clip", True)
        return made

    def _list_parameters(self, unused: Collection[str] = ()) -> None:
        """Set the optimizer's parameters to parts, whole dense parameters except those without use, and experts."""
        whole = [each for each in self._whole if each.name not in unused]
        for each in {self._optim, innermost_of(self._optim)}:
            each._parameter_list = each._param_groups = [*self._parts.values(), *whole, *self._experts]

    def _update_params_slice(self) -> None:
        """Complete the gradients, and set the optimizer's parameters; once for each step."""
        self._check_parameters()
        for each in self._sliced.values():
            self._slice_of(each)
            if each.stop_gradient:
                continue
            self._parts[each.name] = made = self._part_of(each)
            gradient = each.bw_storage
            if gradient is None and each.name in self._used:  # zeros, as clear_grad() leaves in one process
                gradient = paddle.zeros_like(made, "float32" if self.use_main_grad else made.dtype)
            if self.use_main_grad:
                made.main_grad = gradient
            elif gradient is not None:
                made._copy_gradient_from(gradient)
        groups = [self._group] if self._dp_group is None else [self._group, self._dp_group]
        for storage in self._grad_storages.values():
            for group in groups:
                storage.buffer.scale_(1.0 / group.nranks)
                paddle.distributed.all_reduce(storage.buffer, group=group)
        self._list_parameters(self._unused(groups))

    def _unused(self, groups: Sequence[Group]) -> set[str]:
        """Return the whole dense parameters without a gradient on any rank, whose part of the buffer is zeros."""
        if not self._whole:
            return set()
        found = paddle.to_tensor([each.name in self._used for each in self._whole], dtype="int32")
        for group in groups:
            paddle.distributed.all_reduce(found, paddle.distributed.ReduceOp.MAX, group=group)
        return {each.name for each, is_used in zip(self._whole, found.tolist(), strict=True) if not is_used}

    def _clear_gradients(self, set_to_zero: bool = True) -> None:
        for each in self._sliced.values():
            each.bw_storage = None
        for part in self._parts.values():
            if self.use_main_grad:
                part.main_grad = None
            elif part.grad is not None:
                part.clear_gradient(False)
        for storage in self._grad_storages.values():
            storage.buffer.zero_()
        for each in self._experts:
            if getattr(each, "main_grad", None) is None:
                each.clear_gradient(set_to_zero)
            elif set_to_zero:
                each.main_grad.zero_()
            else:
                each.main_grad = None
        if not set_to_zero:
            self._used.clear()
        self._list_parameters()
        self._optim.update_scaler = None

    def _register_forward_all_hooks(self, sub_layer: nn.Layer, task_flow: Any) -> None:
        super()._register_forward_all_hooks(sub_layer, task_flow)
        hooks = sub_layer._forward_post_hooks
        last = next(reversed(hooks))
        hooks[last] = functools.partial(_in_structure, hooks[last])

    def _redefine_opt_step(self) -> None:
        step = self._optim.step

        def minimize(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError(f"{_NAME}: minimize() is not supported with level='p_g_os'; call step()")

        def step_with_experts() -> None:
            if not self._optim.update_scaler:  # a scaler calls it before it divides the gradients
                self._update_params_slice()
            average_gradients(self._experts)
            step()
            self._optim.update_scaler = None

        self._optim.step, self._optim.minimize = step_with_experts, minimize

    def _redefine_opt_clear(self) -> None:
        def clear(set_to_zero: bool = True) -> None:
            self._clear_gradients(set_to_zero)

        for name in _CLEARING:
            if hasattr(self._optim, name):
                setattr(self._optim, name, clear)
