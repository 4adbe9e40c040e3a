# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Models that train in grids of Fleet's parallelisms, and the same training in one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer, dualpipev
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication
from paddle.distributed.fleet.utils import mix_precision_utils, tensor_fusion_helper
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    mark_as_sequence_parallel_parameter,
    register_sequence_parallel_allreduce_hooks,
)
from paddle.optimizer.lr import LRScheduler, StepDecay

from paddle_moe_ops import use_backend
from paddle_moe_ops.expert_parallel import (
    ClipGradByGlobalNorm,
    GradScaler,
    distributed_optimizer,
    gather_state_dict,
    is_expert_parameter,
    load_checkpoint,
    save_checkpoint,
)
from paddle_moe_ops.expert_parallel.fleet_optimizers import FleetClip

from .fleet_models import ROWS, Columns, Narrow, Split, Whole, mean_square, parts
from .fleets import groups_one_after_the_other, scale_on_a_cpu, start_fleet
from .test_expert_parallel_layer import HIDDEN, arrays
from .test_fleet import reduced_and_scattered

STEPS, CLIP = 3, 0.1
BAD_STEP = 1  # in which rank 1 has an infinity


def batch(grid: Grid, rank: int, step: int) -> Sequence[NDArray]:
    """Inputs and targets of one rank with a loss of its own, for all micro-batches of a step."""
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal([grid.turns * ROWS, HIDDEN]).astype(np.float32) for _ in range(2)]


class MasterSGD(paddle.optimizer.SGD):
    """SGD with master weights, which Paddle's operators ignore on a CPU."""

    @paddle.no_grad()
    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        parameter, gradient = param_and_grad
        if parameter.name not in self._master_weights:
            super()._append_optimize_op(block, param_and_grad)
            return
        master = self._master_weights[parameter.name]
        master.subtract_(gradient.astype("float32") * self.get_lr())
        paddle.assign(master.astype(parameter.dtype), parameter)


def optimizer_of(net: nn.Layer, grid: Grid) -> Any:
    """Momentum shows a wrong factor of a gradient at once; with clipping, every step is clipped."""
    trained = [each for each in net.parameters() if not each.stop_gradient]
    clip = None if grid.scaler else nn.ClipGradByGlobalNorm(CLIP)
    rate = 0.0003 if grid.scaler else 0.3
    if grid.adam:  # a small epsilon would turn roundings of small gradients into differences of updates
        rate = StepDecay(0.01, step_size=3)
        return paddle.optimizer.AdamW(rate, parameters=trained, grad_clip=clip, epsilon=1e-2)
    if grid.kind == "narrow":
        clip = ClipGradByGlobalNorm(CLIP)  # on a CPU, Paddle's has no norm of bfloat16
        return MasterSGD(rate, parameters=trained, grad_clip=clip, multi_precision=True)
    return paddle.optimizer.Momentum(rate, parameters=trained, grad_clip=clip)


def group_of(topology: Any, axis: str) -> Any:
    """The group of Fleet that shares the experts."""
    return getattr(topology, f"get_{axis}_parallel_group")()


def data_rank(topology: Any) -> int:
    """The number of this rank among those whose losses are averaged."""
    sharding = topology.get_sharding_parallel_world_size()
    return topology.get_data_parallel_rank() * sharding + topology.get_sharding_parallel_rank()


class Grid(NamedTuple):
    """A model in a topology of Fleet.

    Attributes:
        degrees: those of ``hybrid_configs`` above 1.
        axis: of the group that shares the experts, or "world".
        turns: micro-batches of a step.
        kind: see `parts`.
        blocks: see `parts`.
        sharding: options of ``sharding_configs``.
        pipeline: options of ``pp_configs``.
        main_grad: whether gradients are in float32.
        freezes: whether one matrix of the experts is not trained.
        interval: layers that the pipeline recomputes together.
        virtual: chunks of a stage.
        scaler: "fleet" or "ours", in training with an infinity; "" for none.
        divides_rows: whether model parallel ranks have their own tokens.
        parts: rows of a micro-batch on each rank that divides it; alike if empty.
        no_sync: whether all but the last micro-batch are in ``no_sync()``.
        adam: whether the optimizer is AdamW with a schedule of the learning rate.
    """

    degrees: dict[str, int]
    axis: str
    turns: int = 2
    kind: str = "plain"
    blocks: int = 2
    sharding: dict[str, Any] | None = None
    pipeline: dict[str, Any] | None = None
    main_grad: bool = False
    freezes: bool = False
    interval: int = 0
    virtual: int = 1
    scaler: str = ""
    divides_rows: bool = False
    parts: tuple[int, ...] = ()
    no_sync: bool = False
    adam: bool = False

    @property
    def losses(self) -> int:
        """The number of ranks whose losses are averaged."""
        return self.degrees.get("dp_degree", 1) * self.degrees.get("sharding_degree", 1)

    @property
    def parts_of_tokens(self) -> int:
        """The number of ranks that divide a batch."""
        return self.degrees.get("sep_degree", 1) * (self.degrees["mp_degree"] if self.divides_rows else 1)

    @property
    def processes(self) -> int:
        names = ("pp_degree", "mp_degree", "sep_degree")
        return self.losses * math.prod(self.degrees.get(name, 1) for name in names)


class Resumed(NamedTuple):
    """A part of a run, between checkpoints.

    Attributes:
        steps: of the run.
        data: in place of `batch`.
        load: the checkpoint to begin with.
        copy: where the loaded checkpoint is saved again, or "".
        save: where the end is saved, or "".
        steps_while_saving: steps that follow while the end is saved.
    """

    steps: range
    data: Callable[[Grid, int, int], Sequence[NDArray]]
    load: str
    copy: str = ""
    save: str = ""
    steps_while_saving: int = 0


def trained(grid: Grid, part: Resumed | None = None) -> Any:
    """This rank's part of the state before, the losses, the norms of gradients, and the state after.

    Args:
        grid: of all ranks.
        part: of a run that was interrupted, or None.
    """
    topology = start_fleet(grid.sharding, **grid.degrees)
    on_gloo, strategy = paddle.get_device() == "cpu", fleet.fleet._user_defined_strategy
    columns = topology.get_model_parallel_group() if "mp_degree" in grid.degrees else None
    group = paddle.distributed.get_group(0) if grid.axis == "world" else group_of(topology, grid.axis)
    share, rows = rows_of(grid, topology)
    strategy.pipeline_configs = {
        "accumulate_steps": grid.turns,
        "micro_batch_size": len(rows),
        "enable_partial_send_recv": False,
    }
    strategy.hybrid_configs["mp_configs"].need_broadcast_data = False
    for name, value in ({"use_batch_p2p_comm": not on_gloo} | (grid.pipeline or {})).items():
        setattr(strategy.hybrid_configs["pp_configs"], name, value)
    paddle.seed(7 + paddle.distributed.get_rank())
    with pytest.MonkeyPatch.context() as patch, for_this_device():
        for_this_backend(patch)
        made = parts(group, grid.kind, grid.blocks, columns)
        net: Any = in_stages(made, grid, topology) if "pp_degree" in grid.degrees else Whole(made)
        freeze(net, grid.freezes)
        if grid.divides_rows or grid.kind == "split":
            mark_parts(net, grid)
        if grid.main_grad:
            mix_precision_utils.MixPrecisionLayer(net, dtype="bfloat16")
        model = fleet.distributed_model(net)
        if grid.sharding:  # Fleet's second optimizer knows GPUs alone, and gloo lacks its collective
            patch.setattr(tensor_fusion_helper, "__current_device_type__", "gpu")
            patch.setattr(paddle.distributed, "reduce_scatter", reduced_and_scattered)
        optimizer = optimizer_of(net, grid)
        wrapped = mix_precision_utils.MixPrecisionOptimizer(optimizer) if grid.main_grad else optimizer
        optimizer = distributed_optimizer(wrapped)
        start, losses, scaler = state_of(net, group), [], scaler_of(grid.scaler)
        norms = norms_of(patch)

        def one(step: int, data: Callable[[Grid, int, int], Sequence[NDArray]] = batch) -> float:
            x, y = (paddle.to_tensor(each[share]) for each in data(grid, data_rank(topology), step))
            x.stop_gradient = False  # a rank without tokens has gradients of dense layers, too
            if scaler and (data_rank(topology), step) == (1, BAD_STEP):
                x = x.detach() * float("inf")
            return one_step(model, optimizer, scaler, [x, y], grid, len(rows))

        if part is not None:
            return resumed(part, model, optimizer, one)
        losses += [one(step) for step in range(STEPS)]
        load_master_weights(net, optimizer)
        return start, losses, norms, state_of(net, group)


def norms_of(patch: pytest.MonkeyPatch) -> list[float]:
    """A list that gets the norms by which Fleet's optimizers clip."""
    norms, squared = [], FleetClip.get_l2_norm_pow

    def kept(clip: FleetClip, *arguments: Any) -> Any:
        square, dtype = squared(clip, *arguments)
        norms.append(math.sqrt(square.item()))
        return square, dtype

    patch.setattr(FleetClip, "get_l2_norm_pow", kept)
    return norms


def resumed(part: Resumed, model: Any, optimizer: Any, one: Callable[..., float]) -> list[float]:
    """The losses of a part of a run; ``one`` trains a step on some data."""
    load_checkpoint(part.load, model, optimizer)
    if part.copy:
        save_checkpoint(part.copy, model, optimizer)
    losses = [one(step, part.data) for step in part.steps]
    if part.save:
        saving = save_checkpoint(part.save, model, optimizer, async_save=part.steps_while_saving > 0)
        for step in range(part.steps_while_saving):
            one(step, part.data)
        saving.wait()
    return losses


def load_master_weights(net: nn.Layer, optimizer: Any) -> None:
    """Set parameters of 16 bits to their master weights."""
    for each in net.sublayers():
        if isinstance(each, Narrow):
            each.to(dtype="float32")
    for each in net.parameters():
        if each.name in optimizer._master_weights:
            paddle.assign(optimizer._master_weights[each.name], each)


def one_step(model: Any, optimizer: Any, scaler: Any, data: list[Any], grid: Grid, rows: int) -> float:
    """Train on all micro-batches; the loss of this rank's tokens."""
    if "pp_degree" in grid.degrees:
        loss = float(model.train_batch(data, optimizer, **({"scaler": scaler} if scaler else {})).mean())
        next_rate(optimizer)
        return loss
    total = 0.0
    for turn in range(grid.turns):
        x, y = (each[turn * rows : (turn + 1) * rows] for each in data)
        with model.no_sync() if grid.no_sync and turn < grid.turns - 1 else contextlib.nullcontext():
            loss = mean_square(model(x), y) / grid.turns
            (scaler.scale(loss) if scaler else loss).backward()
        total += float(loss)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.clear_grad()
    next_rate(optimizer)
    return total


def next_rate(optimizer: Any) -> None:
    """Continue the schedule of the learning rate, if there is one."""
    if isinstance(optimizer._learning_rate, LRScheduler):
        optimizer._learning_rate.step()


def rows_of(grid: Grid, topology: Any) -> tuple[list[int], list[int]]:
    """The rows of a batch that this rank has, and those of a micro-batch."""
    count, place = topology.get_sep_parallel_world_size(), topology.get_sep_parallel_rank()
    if grid.divides_rows:
        ranks = topology.get_model_parallel_world_size()
        count, place = count * ranks, place * ranks + topology.get_model_parallel_rank()
    ends = np.cumsum(grid.parts)[:-1] if grid.parts else count
    rows = [int(each) for each in np.array_split(np.arange(ROWS), ends)[place]]
    return [turn * ROWS + row for turn in range(grid.turns) for row in rows], rows


def in_stages(made: list[Any], grid: Grid, topology: Any) -> PipelineLayer:
    """This rank's stage of a pipeline."""
    with groups_one_after_the_other():
        net = PipelineLayer(
            made,
            topology=topology.topology(),
            num_stages=grid.degrees["pp_degree"],
            loss_fn=mean_square,
            recompute_interval=grid.interval,
            recompute_ctx={"mp_group": topology.get_model_parallel_group(), "offload": False, "partition": False},
            num_virtual_pipeline_stages=grid.virtual if grid.virtual > 1 else None,
            seg_method="layer:Residual" if grid.virtual > 1 else "uniform",
            use_dualpipev=(grid.pipeline or {}).get("use_dualpipev", False),
        )
    if grid.kind == "tied" and topology.get_stage_id() > 0:
        net.shared_layers["tied"].weight.is_firstly_shared = False  # Fleet's mark, for the norm of gradients
    return net


def mark_parts(net: nn.Layer, grid: Grid) -> None:
    """Let Fleet add up the gradients of parameters that all model parallel ranks have, if each computes a part."""
    for name, each in net.named_parameters():
        is_of_all = grid.divides_rows and not (is_expert_parameter(each) and grid.axis in ("model", "expert", "world"))
        if is_of_all or (grid.kind == "split" and ".router." in name):
            mark_as_sequence_parallel_parameter(each)
    register_sequence_parallel_allreduce_hooks(net, grid.turns, False)


def scaler_of(name: str) -> Any:
    """A scaler of losses that does not change its scale, or none."""
    if not name:
        return None
    with paddle.amp.auto_cast(dtype="float16"):
        pass  # after float32 Paddle turns loss scaling off
    options = {"init_loss_scaling": 2.0**10, "use_dynamic_loss_scaling": False}
    if name == "fleet":
        return fleet.distributed_scaler(paddle.amp.GradScaler(**options))
    return GradScaler(**options)


@paddle.no_grad()
def unscaled(gradients: list[Any], scale: paddle.Tensor, _: list[Any], found: paddle.Tensor) -> None:
    """Paddle's operator on a custom device, where its own moves gradients to the host."""
    is_bad = not all(np.isfinite(each.numpy()).all() for each in gradients)
    paddle.assign(paddle.full_like(found, is_bad), found)
    for each in gradients:
        each.scale_(1.0 / float(scale.numpy().reshape(())))


def state_of(net: nn.Layer, group: Any) -> dict[str, Any]:
    """This rank's part of the state, with all experts, by the names in one process."""
    state = arrays(gather_state_dict(net, group))
    for name, layer in net.named_sublayers():
        if isinstance(layer, Columns) and layer.group is not None:
            state[f"{name}.columns"] = of_ranks(state[f"{name}.columns"], layer.group, -1)
        if isinstance(layer, Split) and layer.model is not None:
            gate_up, down = (f"{name}.moe.experts.{each}" for each in ("gate_up", "down"))
            both = [of_ranks(each, layer.model, -1) for each in np.split(state[gate_up], 2, -1)]
            state |= {gate_up: np.concatenate(both, -1), down: of_ranks(state[down], layer.model, 1)}
    if not getattr(net, "_model_chunks", None):
        return state
    named = {}
    for name, value in state.items():
        start, number, rest = name.split(".", 2)
        named[f"{int(start) + int(number)}.{rest}"] = value
    return named


def of_ranks(part: NDArray, group: Any, axis: int) -> NDArray:
    """The parts of a group's ranks together."""
    found: list[Any] = []
    paddle.distributed.all_gather(found, paddle.to_tensor(part), group=group)
    return np.concatenate([each.numpy() for each in found], axis)


def for_this_backend(patch: pytest.MonkeyPatch) -> None:
    """Let exchanges of one group match if they come one by one, as on a custom device.

    Ranks of the stub device send before they receive. On GPUs a rank that sends may wait until the other one receives,
    so every other rank receives first.
    """
    device = paddle.get_device()
    receives_first = not device.startswith(("cpu", "stub")) and paddle.distributed.get_rank() % 2 == 1
    send = {p2p_communication._send_on_calc_stream, paddle.distributed.isend}
    run = p2p_communication.batch_send_recv_on_calc_stream

    def ordered(ops: list[Any]) -> list[Any]:
        return sorted(ops, key=lambda each: (each.op in send) == receives_first)

    def exchange(pipeline: Any, *_: Any) -> None:  # without the streams and events of a GPU
        for ops in (pipeline.comm_forward_ops, pipeline.comm_backward_ops):
            for task in paddle.distributed.batch_isend_irecv(ordered(ops)) if ops else ():
                task.wait()
            ops.clear()
        pipeline._free_tensors()

    patch.setattr(p2p_communication, "batch_send_recv_on_calc_stream", lambda ops: run(ordered(ops)))
    patch.setattr(dualpipev.DualPipeVParallel, "_commit_and_wait_comm", exchange)
    patch.setattr(paddle.distributed.ParallelEnv, "_device_id", 0, raising=False)  # as on a GPU
    if device != "cpu":
        patch.setattr(paddle._legacy_C_ops, "check_finite_and_unscale", unscaled)
    else:
        scale_on_a_cpu(patch)


def for_this_device() -> Any:
    """The backend of the layers, which have no operators on the stub device."""
    return use_backend("reference") if paddle.get_device().startswith("stub") else contextlib.nullcontext()


def freeze(net: nn.Layer, freezes: bool) -> None:
    """Leave out one matrix of each layer of experts."""
    for name, each in net.named_parameters():
        if freezes and name.endswith("experts.down"):
            each.stop_gradient = True


def unrounded(one: NDArray, other: NDArray) -> NDArray:
    """A parameter's values on two ranks: the same, or master weights and these in bfloat16 on a rank without them."""
    if np.array_equal(one, other):
        return one
    first, second = (paddle.to_tensor(each).astype("bfloat16").astype("float32").numpy() for each in (one, other))
    np.testing.assert_array_equal(first, second)
    assert np.array_equal(first, one) or np.array_equal(second, other)
    return other if np.array_equal(first, one) else one


def assert_like_one_process(grid: Grid, got: list[Any]) -> float:
    """Compare with one process that has all experts and the batches of all ranks; gives the largest difference."""
    start: dict[str, Any] = {}
    end: dict[str, Any] = {}
    for first, _, _, last in got:
        for name, value in first.items():
            np.testing.assert_array_equal(start.setdefault(name, value), value, err_msg=name)
        for name, value in last.items():
            end[name] = unrounded(end[name], value) if name in end else value
    net = Whole(parts(None, grid.kind, grid.blocks))
    assert net.state_dict().keys() == start.keys()
    net.set_state_dict(start)
    freeze(net, grid.freezes)
    optimizer, losses, norms = optimizer_of(net, grid), [], []
    for step in range(STEPS):
        losses.append(0.0)
        for rank in range(grid.losses):
            x, y = (paddle.to_tensor(each) for each in batch(grid, rank, step))
            for turn in range(grid.turns):
                rows = slice(turn * ROWS, (turn + 1) * ROWS)
                loss = mean_square(net(x[rows]), y[rows]) / (grid.losses * grid.turns)
                loss.backward()
                losses[-1] += float(loss)
        squares = [float(each.grad.astype("float32").square().sum()) for each in optimizer._parameter_list]
        norms.append(math.sqrt(sum(squares)))
        if grid.scaler and step == BAD_STEP:
            losses[-1] = float("nan")
        else:
            optimizer.step()
        optimizer.clear_grad()
    of_ranks = np.mean([each for _, each, _, _ in got], 0) * (grid.parts_of_tokens)
    of_ranks[~np.isfinite(of_ranks)] = float("nan")
    tolerance = 1e-2 if grid.kind == "narrow" else 1e-5
    np.testing.assert_allclose(of_ranks, losses, rtol=tolerance)
    clips = not grid.scaler and bool(set(grid.degrees) - {"pp_degree"})  # Fleet's optimizer clips experts of one rank
    for _, _, found, _ in got if clips else ():  # clipping would hide a wrong factor of all gradients
        np.testing.assert_allclose(found, norms, rtol=tolerance)
        assert min(found) > 2 * CLIP  # else clipping is not tested
    load_master_weights(net, optimizer)
    worst = 0.0
    for key, expected in arrays(net.state_dict()).items():
        least_move = 0.02 * np.abs(expected - start[key]).max() if grid.kind == "narrow" else 0.0  # of gradients
        np.testing.assert_allclose(end[key], expected, rtol=0, atol=1e-6 + least_move, err_msg=key)
        worst = max(worst, float(np.abs(end[key] - expected).max()))
    moves = {key: np.abs(end[key] - start[key]).max() for key in start}
    least = 1e-5 if grid.scaler else 1e-4
    assert all(move > least for key, move in moves.items() if key.endswith("gate_up"))
    return worst
