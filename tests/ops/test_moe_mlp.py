# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""moe_mlp: the whole layer of experts as one call, with gradients, on every backend; Triton's kernels interpreted."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import paddle
import pytest

from paddle_moe_ops import moe_mlp, reference, route, use_backend
from paddle_moe_ops.backends import gradients as adapter
from paddle_moe_ops.backends.arrays import to_numpy
from paddle_moe_ops.backends.experts import MoeMlp
from paddle_moe_ops.testing.equality import assert_bits_equal
from tests.ops.interpreting import SHAPE
from tests.ops.problems import make_problem, ordinary, plan_tensors, tensor
from tests.pairwise import in_turn, pairwise
from tests.params import EMPTY, MANY_EXPERTS, ODD, ONE_TOKEN, PADDED, SUM_DTYPES

D, N = 10, 6
FORMS = ("by row", "by slot", "flat by slot", "none")
BY_FORM = pytest.mark.parametrize("form", FORMS)
BY_LAYOUT = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
BY_DTYPE = pytest.mark.parametrize("dtype", SUM_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
BACKENDS = pytest.mark.parametrize("name", [None, "reference"], ids=["automatic", "reference"])
BUFFER_SIZES = {"exact": -1, "small buffer": 40, "large buffer": 4000}
LAYOUTS = {"plain": False, "transposed": True}
AXES = {
    "form": FORMS,
    "transpose": LAYOUTS,
    "dtype": SUM_DTYPES,
    "name": {"automatic": None, "reference": "reference"},
}


class Layer:
    """Operands of a layer over a problem's routing, and the oracle's results for them."""

    def __init__(self, rng, shape, dtype=np.float32, *, transpose=False, form="by slot", sizes=(D, N), **options):
        self.problem, self.transpose, self.form = make_problem(rng, shape), transpose, form
        self.plan = self.problem.plan(**options)
        d, n = sizes
        gate_up, down = ordinary(rng, (shape.E, d, 2 * n), dtype), ordinary(rng, (shape.E, n, d), dtype)
        if transpose:
            gate_up, down = (np.ascontiguousarray(each.swapaxes(1, 2)) for each in (gate_up, down))
        self.arrays = {"x": ordinary(rng, (shape.T, d), dtype), "gate_up": gate_up, "down": down}
        probs = {"by row": self.plan.row_probs, "flat by slot": self.problem.probs.ravel(), "none": None}
        if form != "none":
            self.arrays["probs"] = probs.get(form, self.problem.probs)
        self.d_out = ordinary(rng, (shape.T, d), dtype)

    def leaves(self, place):
        return {name: tensor(array, place, gradient=True) for name, array in self.arrays.items()}

    def call(self, leaves, place, **options):
        order = {"by row": "row", "flat by slot": "slot"}.get(self.form)
        plan, matrices = plan_tensors(self.plan, place), (leaves["gate_up"], leaves["down"])
        options = {"transpose": self.transpose, "weights_by": order, **options}
        return moe_mlp(leaves["x"], plan, leaves.get("probs"), *matrices, **options)

    def run(self, place, **options):
        """The result and the gradient of each leaf."""
        leaves = self.leaves(place)
        out = self.call(leaves, place, **options)
        paddle.autograd.backward([out], [tensor(self.d_out, place)])
        return {"out": out, **{name: leaf.grad for name, leaf in leaves.items()}}

    def due(self):
        """Expected outputs and gradients, in float64."""
        wide = {name: array.astype(np.float64) for name, array in self.arrays.items()}
        weights = None if self.form == "none" else self.plan.row_probs
        arguments = wide["x"], self.plan, wide["gate_up"], wide["down"], weights
        out, _ = reference.moe_mlp(*arguments, transpose=self.transpose)
        made = reference.moe_mlp_backward(self.d_out.astype(np.float64), *arguments, transpose=self.transpose)
        due = {"out": out, "x": made.x, "gate_up": made.gate_up, "down": made.down, "probs": made.weights}
        if "slot" in self.form:
            rows = self.plan.slot_to_row
            by_slot = np.where(rows >= 0, np.append(made.weights, 0)[rows], 0)
            due["probs"] = by_slot.reshape(self.arrays["probs"].shape)
        return due


def assert_close(made, due, dtype):
    """Relative to the norm: some roundings to the dtype on the way, and sums in float32."""
    limit = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[np.dtype(dtype).name]
    for name, got in made.items():
        got, expected = to_numpy(got).astype(np.float64), due[name]
        assert got.shape == expected.shape, name
        assert np.linalg.norm(got - expected) <= limit * np.linalg.norm(expected), name


@pairwise(AXES, others_are_slow=True)
def test_result_and_gradients(form, transpose, dtype, name, rng, place):
    layer = Layer(rng, PADDED, dtype, transpose=transpose, form=form)
    with use_backend(name) if name else contextlib.nullcontext():
        assert_close(layer.run(place), layer.due(), dtype)


@pairwise(
    {
        "sizes": [(1, 1), (7, 3), (72, 16)],
        "shape": [EMPTY, ONE_TOKEN, ODD, MANY_EXPERTS],
        "buffer_size": BUFFER_SIZES,
        "name": AXES["name"],
    },
    empty={"shape": [EMPTY]},
    others_are_slow=True,
)
def test_any_routing_and_sizes(sizes, shape, buffer_size, name, rng, place):
    layer = Layer(rng, shape, sizes=sizes, buffer_size=buffer_size)
    with use_backend(name) if name else contextlib.nullcontext():
        assert_close(layer.run(place), layer.due(), np.float32)


@pytest.mark.cpu_only
@pairwise({"transpose": LAYOUTS, "keep": ["h", "x"], "form": ["by slot", "none"]}, others_are_slow=True)
def test_interpreted_kernels_with_gradients(interpreted, transpose, keep, form, rng):
    layer = Layer(rng, PADDED._replace(T=5, A=8), np.float16, transpose=transpose, form=form, sizes=(40, 24))
    with use_backend("triton"):
        made = layer.run("cpu", keep=keep, workspace_mb=1)
    assert_close(made, layer.due(), np.float16)
    assert interpreted.launches.count("grouped_gemm_kernel") == (4 if keep == "h" else 5)
    assert interpreted.launches.count("swiglu_gradient_kernel") == 1


@pytest.mark.cpu_only
@in_turn({"form": FORMS, "keep": ["h", "x"]})
def test_weights_by_slot_take_one_more_launch_forward_and_none_backward(interpreted, form, keep, rng):
    """Without kernels for Hopper, whose product makes SwiGLU's gradient and so saves the eighth."""
    with use_backend("triton"):
        Layer(rng, SHAPE, np.float16, form=form, sizes=(16, 8)).run("cpu", keep=keep)
    ends = interpreted.launches.index("unpermute_kernel") + 1  # of the forward pass
    rows_are_gathered, made_again = 4, 0 if keep == "h" else 2  # where they are moved, it takes five
    backward = interpreted.launches[ends:]
    assert (ends, len(backward)) == (rows_are_gathered + form.endswith("by slot"), 8 + made_again)
    assert ("permute_and_sum_kernel" in backward) == form.endswith("by slot")
    assert interpreted.launches.count("schedule_kernel") == 1


@pytest.mark.sampled(2, 1)
@pytest.mark.cpu_only
@pytest.mark.parametrize("wanted", ["x", "gate_up", "down", "probs"])
def test_one_gradient_alone_by_interpreted_kernels(interpreted, wanted, rng):
    """The gradient of the probabilities alone has a launch of its own: no launch permutes rows, which would sum it."""
    layer = Layer(rng, SHAPE, np.float16, sizes=(16, 8))
    with use_backend("triton"):
        expected, leaves = layer.run("cpu"), layer.leaves("cpu")
        for each, leaf in leaves.items():
            leaf.stop_gradient = each != wanted
        before = len(interpreted.launches)
        paddle.autograd.backward([layer.call(leaves, "cpu")], [tensor(layer.d_out, "cpu")])
    assert_bits_equal(leaves[wanted].grad, expected[wanted], what=wanted)
    assert ("row_sums_kernel" in interpreted.launches[before:]) == (wanted == "probs")


@pytest.mark.sampled(2)
@pytest.mark.cpu_only
@pytest.mark.parametrize("form", FORMS)
def test_a_second_call_repeats_the_launches_of_the_first_with_its_own_tensors(interpreted, form, rng, monkeypatch):
    layers = [Layer(rng, SHAPE, np.float16, form=form, sizes=(16, 8)) for _ in range(2)]
    with use_backend("triton"):
        layers[0].plan = layers[1].plan  # as many rows
        layers[0].problem = layers[1].problem
        if form != "none":
            layers[0].arrays["probs"] = layers[1].arrays["probs"] / 2
        layers[0].run("cpu")
        launches = interpreted.launches.copy()
        for name in ("moe_mlp", "moe_mlp_backward"):
            monkeypatch.setattr(f"paddle_moe_ops.triton.gemm.mlp.{name}", None)
        made = layers[1].run("cpu")
    assert interpreted.launches == 2 * launches
    assert_close(made, layers[1].due(), np.float16)


@BACKENDS
@pytest.mark.parametrize("options", [{"keep": "x"}, {"workspace_mb": 1}, {"workspace_mb": 4096}], ids=str)
def test_what_is_kept_and_how_much_memory_there_is_change_no_bit(options, name, rng, place):
    layer = Layer(rng, ODD)
    with use_backend(name) if name else contextlib.nullcontext():
        before, made = layer.run(place), layer.run(place, **options)
    for each, expected in before.items():
        assert_bits_equal(made[each], expected, what=each)


def test_tokens_of_more_dimensions(rng, place):
    layer = Layer(rng, ODD._replace(T=12))
    leaves = layer.leaves(place)
    flat = layer.call(leaves, place)
    leaves["x"] = leaves["x"].reshape([2, 2, 3, D])
    made = layer.call(leaves, place)
    assert made.shape == [2, 2, 3, D]
    assert_bits_equal(made.reshape([12, D]), flat, what="out")


@pytest.mark.parametrize("wanted", ["x", "gate_up", "down", "probs"])
@BACKENDS
def test_one_gradient_alone(wanted, name, rng, place):
    layer = Layer(rng, ODD)
    with use_backend(name) if name else contextlib.nullcontext():
        expected, leaves = layer.run(place), layer.leaves(place)
        for each, leaf in leaves.items():
            leaf.stop_gradient = each != wanted
        out = layer.call(leaves, place)
        paddle.autograd.backward([out], [tensor(layer.d_out, place)])
    assert_bits_equal(leaves[wanted].grad, expected[wanted], what=wanted)
    assert all(leaf.grad is None for each, leaf in leaves.items() if each != wanted)


@pytest.mark.parametrize("keep", ["h", "x"])
def test_kept_are_the_tokens_the_first_product_and_the_weights(keep, rng, place, monkeypatch):
    """4 bytes a number here: 4 T d + 8 N n, 4 N weights, and the matrices, which are there anyway."""
    kept = []
    save = adapter.Call.save

    def record(call, *tensors, **options):
        save(call, *tensors, **options)
        kept.extend(call.saved)

    monkeypatch.setattr(adapter.Call, "save", record)
    layer = Layer(rng, ODD)
    with use_backend("reference"):
        layer.call(layer.leaves(place), place, keep=keep)
    rows, tokens = layer.plan.num_rows, len(layer.arrays["x"])
    matrices = sum(layer.arrays[name].nbytes for name in ("gate_up", "down"))
    given = 4 * tokens * D + 4 * rows + matrices
    assert sum(each.size * 4 for each in kept) == given + (8 * rows * N if keep == "h" else 0)


@pytest.mark.cpu_only
@pytest.mark.parametrize("workspace_mb", [1, 4096])
@pytest.mark.parametrize("keep", ["h", "x"])
def test_triton_keeps_tables_of_tiles_as_well(interpreted, keep, workspace_mb, rng, monkeypatch):
    """2 T d + 4 N n bytes of 16-bit numbers, 4 N of weights, and 4 E + 7 integers that say where tiles are."""
    kept = []
    run = MoeMlp.run

    def record(call):
        made = run(call)
        kept.extend([*call.saved, call.tables])
        return made

    monkeypatch.setattr(MoeMlp, "run", record)
    layer = Layer(rng, SHAPE, np.float16, sizes=(16, 8))
    with use_backend("triton"):
        layer.call(layer.leaves("cpu"), "cpu", keep=keep, workspace_mb=workspace_mb)
    rows, tokens = layer.plan.num_rows, len(layer.arrays["x"])
    matrices = sum(layer.arrays[name].nbytes for name in ("gate_up", "down"))
    given = 2 * tokens * 16 + 4 * rows + matrices + 4 * (4 * SHAPE.E + 7)
    assert sum(each.size * each.element_size() for each in kept) == given + (4 * rows * 8 if keep == "h" else 0)


@pytest.mark.cpu_only
def test_a_first_product_that_was_overwritten_is_not_used_again(interpreted, rng):
    layer = Layer(rng, SHAPE, np.float16, sizes=(16, 8))
    for keep in ("h", "x"):
        leaves = layer.leaves("cpu")
        inputs = list(leaves.values())
        with use_backend("triton"):
            loss = layer.call(leaves, "cpu", keep=keep).sum()
            first = paddle.grad([loss], inputs, retain_graph=True)
            if keep == "h":
                text = "moe_mlp: a backward pass on the backend 'triton' has overwritten the first product"
                with pytest.raises((RuntimeError, OSError), match=text):  # the latter is Paddle's, around ours
                    paddle.grad([loss], inputs)
                continue
            for got, expected in zip(paddle.grad([loss], inputs), first, strict=True):
                assert_bits_equal(got, expected)


def test_nothing_is_kept_where_no_one_wants_a_gradient(rng, place, monkeypatch):
    seen = []
    layer = Layer(rng, ODD)
    with use_backend("reference"), paddle.no_grad():
        kernels = adapter.WithGradients
        original = kernels.moe_mlp

        def spy(backend, *arguments):
            made = original(backend, *arguments)
            seen.append(made.stop_gradient)
            return made

        monkeypatch.setattr(kernels, "moe_mlp", spy)
        layer.call(layer.leaves(place), place)
    assert seen == [True]


def start_of(kind, leaf):
    """Set the existing gradient of a leaf, of one kind."""
    if kind == "main_grad of None":
        leaf.main_grad = None
    elif kind == "grad":
        (leaf * 3.0).sum().backward()
    elif kind.startswith("main_grad"):
        leaf.main_grad = paddle.full(leaf.shape, 0.5, kind.split()[-1])
        if leaf.main_grad.place != leaf.place:
            leaf.main_grad = leaf.main_grad._copy_to(leaf.place, True)


@BACKENDS
@pytest.mark.parametrize(
    "kind", ["main_grad of None", "main_grad of float32", "main_grad of bfloat16", "grad", "nothing"]
)
def test_gradients_of_matrices_are_added_to_what_is_there(kind, name, rng, place):
    dtype = "bfloat16" if kind.endswith("bfloat16") else "float32"
    layer = Layer(rng, ODD, SUM_DTYPES[[np.dtype(each).name for each in SUM_DTYPES].index(dtype)])
    with use_backend(name) if name else contextlib.nullcontext():
        expected = layer.run(place)
        leaves = layer.leaves(place)
        for matrix in ("gate_up", "down"):
            start_of(kind, leaves[matrix])
        for _ in range(2):
            out = layer.call(leaves, place, accumulate=True)
            paddle.autograd.backward([out], [tensor(layer.d_out, place)])
    for matrix in ("gate_up", "down"):
        leaf = leaves[matrix]
        got = leaf.main_grad if kind.startswith("main_grad") else leaf.grad
        if kind.startswith("main_grad"):
            assert leaf.grad is None
        assert got.dtype == (paddle.float32 if kind == "main_grad of None" else getattr(paddle, dtype))
        start = {"grad": 3.0, "nothing": 0.0, "main_grad of None": 0.0}.get(kind, 0.5)
        due = start + 2 * to_numpy(expected[matrix]).astype(np.float64)
        error = np.abs(to_numpy(got).astype(np.float64) - due)
        assert error.max() <= (2**-7 if dtype == "bfloat16" else 1e-6) * np.abs(due).max()
    for other in ("x", "probs"):  # on a CPU, calls that accumulate round in other places
        twice = 2 * to_numpy(expected[other]).astype(np.float64)
        error = np.abs(to_numpy(leaves[other].grad).astype(np.float64) - twice)
        assert error.max() <= (2**-6 if dtype == "bfloat16" else 1e-6) * np.abs(twice).max()


@pytest.mark.cpu_only
def test_accumulation_neither_copies_matrices_nor_joins_their_gradients(rng, place):
    """The gradient of each matrix is the only allocation of its size."""
    core = paddle.base.core
    experts, hidden, inner = 32, 64, 128
    gate_up, down = (
        paddle.create_parameter(shape, "float32") for shape in ([experts, hidden, 2 * inner], [experts, inner, hidden])
    )
    for each in (gate_up, down):
        each.main_grad = paddle.zeros_like(each)
    size = 4 * (gate_up.size + down.size)
    x = tensor(rng.standard_normal((4, hidden)).astype(np.float32), place)
    plan = route(paddle.to_tensor(rng.integers(0, experts, (4, 1))), num_experts=experts)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    before = core.host_memory_stat_current_value("Allocated", 0)
    moe_mlp(x, plan, None, gate_up, down, accumulate=True).sum().backward()
    assert core.host_memory_stat_peak_value("Allocated", 0) - before < 1.3 * size
    assert float(gate_up.main_grad.abs().max()) > 0


def test_a_parameter_that_wants_no_gradient_gets_none(rng, place):
    layer = Layer(rng, ODD)
    leaves = layer.leaves(place)
    leaves["down"].stop_gradient = True
    leaves["down"].main_grad = None
    layer.call(leaves, place, accumulate=True).sum().backward()
    assert leaves["down"].main_grad is None
    assert leaves["gate_up"].grad is not None


BAD = {
    "another activation": (
        {"activation": "gelu"},
        "activation must be one of 'swiglu', 'geglu', 'geglu_tanh', 'swiglu_oai', but got 'gelu'",
    ),
    "another thing to keep": ({"keep": "a"}, "keep must be one of 'h', 'x', 'h_fp8', but got 'a'"),
    "no workspace": ({"workspace_mb": 0}, "workspace_mb must be from 1 to 2147483647, but got 0"),
    "flat weights": (
        {"probs": lambda leaves: leaves["probs"].flatten()},
        "weights_by must be 'row' or 'slot' with flat probs and a plan, but got None",
    ),
    "an odd number of columns": (
        {"gate_up": lambda leaves: leaves["gate_up"][:, :, 1:]},
        "gate_up must be of 2 * n columns, n of the gate and n that it gates, n >= 1, but got 11",
    ),
    "no columns": (
        {"gate_up": lambda leaves: leaves["gate_up"][:, :, :0]},
        "gate_up must be of 2 * n columns, n of the gate and n that it gates, n >= 1, but got 0",
    ),
    "no columns in float8": (
        {"gate_up": lambda leaves: leaves["gate_up"][:, :, :0], "compute": "fp8_1x128"},
        "gate_up must be of 2 * n columns, n of the gate and n that it gates, n >= 1, but got 0",
    ),
    "another inner size": (
        {"down": lambda leaves: leaves["down"][:, 1:]},
        f"down must be of shape [{ODD.E}, 6, 10], but got [{ODD.E}, 5, 10]",
    ),
    "matrices of fewer experts": (
        {"gate_up": lambda leaves: leaves["gate_up"][1:]},
        f"gate_up must be of shape [{ODD.E}, 10, 2 * n], but got [{ODD.E - 1}, 10, 12]",
    ),
    "matrices that are no leaves": (
        {"gate_up": lambda leaves: leaves["gate_up"] * 1, "accumulate": True},
        "gate_up must be a leaf, such as a parameter, with accumulate, but got the result of another operator",
    ),
}


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(changes, text, rng, place):
    layer = Layer(rng, ODD)
    leaves = layer.leaves(place)
    plan = plan_tensors(layer.plan, place)
    arguments = {"x": leaves["x"], "plan": plan, **leaves}
    arguments |= {name: value(leaves) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=f"^{re.escape('moe_mlp: ' + text)}$"):
        moe_mlp(**arguments)


LIKE_ONE_BEFORE = {
    "another T": (
        lambda of: {"plan": of(T=ODD.T - 1)},
        f"x must be of shape [{ODD.T - 1}, hidden]",
    ),
    "another K": (
        lambda of: {"plan": of(K=ODD.K + 1)},
        "probs must be of shape [",
    ),
    "another E": (lambda of: {"plan": of(E=ODD.E + 1)}, f"gate_up must be of shape [{ODD.E + 1}, 10, 2 * n]"),
    "no bool": (lambda of: {"transpose": 0}, "transpose must be a bool, but got 0 of type int"),
    "another bool": (lambda of: {"accumulate": 0}, "accumulate must be a bool, but got 0 of type int"),
    "no int": (lambda of: {"workspace_mb": 1024.0}, "workspace_mb must be an int, but got float"),
}


@pytest.mark.parametrize(("changes", "text"), LIKE_ONE_BEFORE.values(), ids=LIKE_ONE_BEFORE.keys())
def test_a_call_that_differs_from_one_before_in_one_thing_is_checked(changes, text, rng, place):
    layer = Layer(rng, ODD, buffer_size=200)
    leaves = layer.leaves(place)
    layer.call(leaves, place, workspace_mb=1024)

    def plan_of(**sizes):
        return plan_tensors(make_problem(rng, ODD._replace(**sizes)).plan(buffer_size=200), place)

    arguments = {**leaves, "plan": plan_tensors(layer.plan, place), "workspace_mb": 1024, **changes(plan_of)}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape('moe_mlp: ' + text)}"):
        moe_mlp(**arguments)


def test_a_call_with_another_number_of_rows_than_one_before_is_checked(rng, place):
    layer = Layer(rng, ODD, form="by row")
    leaves = layer.leaves(place)
    layer.call(leaves, place)
    layer.plan = layer.problem.plan(buffer_size=layer.plan.num_rows + 1)
    with pytest.raises(ValueError, match=rf"^moe_mlp: probs must be of shape \[{layer.plan.num_rows}\] by row of plan"):
        layer.call(leaves, place)


@pytest.mark.cpu_only
def test_dtypes_that_mixed_precision_takes_are_checked_outside_of_it(rng, monkeypatch):
    layer = Layer(rng, ODD)
    leaves = layer.leaves("cpu")
    leaves |= {name: leaves[name].detach().astype("float16") for name in ("gate_up", "down")}
    monkeypatch.setattr(paddle.amp, "is_autocast_enabled", lambda: True)
    layer.call(leaves, "cpu")
    monkeypatch.undo()
    with pytest.raises(TypeError, match=r"^moe_mlp: gate_up must be of dtype float32, but got float16"):
        layer.call(leaves, "cpu")


@pytest.mark.parametrize("strided", [False, True], ids=["another shape", "strided"])
def test_a_main_grad_of_another_layout_is_refused(strided, rng, place):
    layer = Layer(rng, ODD)
    leaves = layer.leaves(place)
    held = paddle.zeros([ODD.E, D, N]).transpose([0, 2, 1]) if strided else paddle.zeros([3])
    leaves["down"].main_grad = held
    given = f"float32 {list(held.shape)}{', not contiguous,' * strided} on {held.place}"
    text = "a parameter whose main_grad is contiguous, float32, of its shape and place, but got one whose main_grad is"
    with pytest.raises(ValueError, match=f"^{re.escape(f'moe_mlp: down must be {text} {given}')}$"):
        layer.call(leaves, place, accumulate=True)


def test_the_same_bits_in_every_run(rng, place):
    layer = Layer(rng, ODD, SUM_DTYPES[-1])
    first, second = layer.run(place), layer.run(place)
    for name, expected in first.items():
        assert_bits_equal(second[name], expected, what=name)
