# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""patch_paddle by families: what each replaces, and that Paddle gets its own objects back."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator
from types import ModuleType

import paddle
import paddle.incubate.nn.functional as F
import pytest
from paddle import _C_ops, _legacy_C_ops
from paddle.distributed.models.moe.utils import _number_count as number_count_imported_before
from paddle.distributed.models.moe.utils import _random_routing as random_routing_imported_before
from paddle.incubate.nn.functional import int_bincount as imported_before

from paddle_moe_ops import explain, patch_paddle, patched_paddle, unpatch_paddle
from paddle_moe_ops.compat import fp8

FAMILIES = {
    "permute": ["moe_permute", "moe_unpermute"],
    "incubate": [
        "build_src_rank_and_local_expert_id",
        "cal_aux_loss",
        "cal_aux_loss_grad",
        "expand_modality_expert_id",
        "int_bincount",
        "moe_combine",
        "moe_combine_auto",
        "moe_combine_auto_grad",
        "moe_combine_grad",
        "moe_combine_no_weight",
        "moe_combine_no_weight_grad",
        "moe_gate_dispatch",
        "moe_gate_dispatch_and_quant",
        "moe_gate_dispatch_auto",
        "moe_gate_dispatch_auto_grad",
        "moe_gate_dispatch_grad",
        "moe_gate_dispatch_partial_nosoftmaxtopk",
        "moe_gate_dispatch_partial_nosoftmaxtopk_grad",
        "moe_gate_dispatch_permute",
        "moe_gate_dispatch_permute_grad",
    ],
    "gemm": ["batched_gemm"],
    "fp8": [
        "fp8_gemm_blockwise",
        "fused_transpose_split_quant",
        "fp8_gemm_blockwise_",
        "fp8_quant_blockwise",
        "fused_act_dequant",
        "fused_stack_quant",
        "fused_stack_transpose_quant",
        "fused_swiglu_weighted_bwd",
        "fused_transpose_wlch_split_quant",
        "fused_weighted_swiglu_act_quant",
    ],
    "gshard": ["number_count", "assign_pos", "limit_by_capacity", "prune_gate_by_capacity", "random_routing"],
}
LEGACY = "random_routing"  # in paddle._legacy_C_ops
NAMES = ", ".join(map(repr, FAMILIES))
WRAPPED = [name for family in ("incubate", "gemm") for name in FAMILIES[family] if hasattr(F, name)]
FUNCTIONS = {name: getattr(paddle.nn.functional, name) for name in FAMILIES["permute"]}
FUNCTIONS |= {name: getattr(F, name) for name in ("fp8_gemm_blockwise", "fused_transpose_split_quant")}
PADDLES_CODE = {name: function.__code__ for name, function in FUNCTIONS.items()}
PADDLES_OPERATORS = dict(vars(_C_ops))
PADDLES_LEGACY_OPERATORS = dict(vars(_legacy_C_ops))
PADDLES_FUNCTIONS = {name: getattr(F, name) for name in WRAPPED}


@pytest.fixture(autouse=True)
def paddle_as_it_was() -> Iterator[None]:
    PADDLES_OPERATORS.update(vars(_C_ops))  # tests before may have wrapped operators for the process, to count changes
    yield
    unpatch_paddle()
    assert patched_families() == []
    for module, paddles in ((_C_ops, PADDLES_OPERATORS), (_legacy_C_ops, PADDLES_LEGACY_OPERATORS)):
        assert all(each is paddles[name] for name, each in vars(module).items())


def patched_families() -> list[str]:
    """The families that are replaced; checks that none is in part, and that nothing else is."""
    now = vars(_C_ops)
    replaced = {name for name, each in PADDLES_OPERATORS.items() if now[name] is not each}
    replaced |= {name for name, code in PADDLES_CODE.items() if FUNCTIONS[name].__code__ is not code}
    legacy = vars(_legacy_C_ops)
    assert legacy.keys() == PADDLES_LEGACY_OPERATORS.keys()
    replaced |= {name for name, each in PADDLES_LEGACY_OPERATORS.items() if legacy[name] is not each}
    found = [family for family, names in FAMILIES.items() if replaced & set(names)]
    assert replaced == {name for family in found for name in FAMILIES[family]}
    assert now.keys() == PADDLES_OPERATORS.keys()
    return found


@pytest.mark.parametrize(
    "families",
    [
        *((), ("permute",), ("incubate",), ["gshard"], ["gemm", "permute"], {"incubate", "gemm"}, ("fp8",)),
        ["fp8", "permute"],
    ],
    ids=lambda families: "-".join(sorted(families)),  # a set has no order that all workers agree on
)
def test_a_family_is_replaced_in_whole_and_alone(families):
    patch_paddle(families)
    assert patched_families() == [family for family in FAMILIES if family in families]


def test_without_families_it_is_the_pair_of_permute():
    patch_paddle()
    assert patched_families() == ["permute"]
    unpatch_paddle()
    with patched_paddle():
        assert patched_families() == ["permute"]


def test_families_add_up_and_go_one_by_one():
    patch_paddle(("incubate",))
    patch_paddle(("gemm", "incubate"))
    patch_paddle()
    assert patched_families() == ["permute", "incubate", "gemm"]
    unpatch_paddle(("incubate",))
    unpatch_paddle(("incubate",))
    assert patched_families() == ["permute", "gemm"]
    unpatch_paddle()
    assert patched_families() == []


def fail_inside(block, expected):
    with block:
        assert patched_families() == expected
        raise KeyError


def test_a_block_leaves_the_families_as_they_were():
    with patched_paddle(("gemm",)):
        with pytest.raises(KeyError):
            fail_inside(patched_paddle(("gemm", "incubate")), ["incubate", "gemm"])
        assert patched_families() == ["gemm"]
        with patched_paddle():
            assert patched_families() == ["permute", "gemm"]
        with patched_paddle("incubate"):
            assert patched_families() == ["incubate", "gemm"]
        assert patched_families() == ["gemm"]
    assert patched_families() == []


def test_of_blocks_that_overlap_the_last_one_to_end_restores_paddle():
    first, second = patched_paddle("gemm"), patched_paddle(("gemm", "gshard"))  # as of two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert patched_families() == ["gemm", "gshard"]
    second.__exit__(None, None, None)
    assert patched_families() == []


class Watched(ModuleType):
    """Paddle's module of operators, which calls a function in front of its first change."""

    def __init__(self, before_change):
        super().__init__("operators")
        self.__dict__.update(before_change=before_change)

    def __getattr__(self, name):
        return getattr(_C_ops, name)

    def __setattr__(self, name, value):
        before_change, self.__dict__["before_change"] = self.before_change, lambda: None
        before_change()
        setattr(_C_ops, name, value)


@pytest.mark.parametrize("change", ["patch_paddle", "unpatch_paddle", "enters a block", "leaves a block"])
def test_a_block_of_another_thread_waits_until_a_change_is_complete(change, monkeypatch):
    is_entered, is_changed = threading.Event(), threading.Event()
    seen = []

    def run_block():
        with patched_paddle("gemm"):
            seen.append(patched_families())
            is_entered.set()
            assert is_changed.wait(60)
            seen.append(patched_families())

    other = threading.Thread(target=run_block, daemon=True)

    def start_other():
        other.start()
        assert not is_entered.wait(0.2)  # it waits for this thread

    block = patched_paddle("gemm")
    if change == "unpatch_paddle":
        patch_paddle("gemm")
    elif change == "leaves a block":
        block.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(paddle, "_C_ops", Watched(start_other))
        if change == "patch_paddle":
            patch_paddle("gemm")
        elif change == "unpatch_paddle":
            unpatch_paddle("gemm")
        elif change == "enters a block":
            block.__enter__()
        else:
            block.__exit__(None, None, None)
        assert is_entered.wait(60)
        is_changed.set()
        other.join(60)
    if change == "enters a block":
        block.__exit__(None, None, None)
    assert seen == [["gemm"], ["gemm"]]
    assert patched_families() == (["gemm"] if change == "patch_paddle" else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_takes_one_name(family):
    with patched_paddle(family):
        assert patched_families() == [family]
    assert patched_families() == []


@pytest.mark.parametrize("call", [patch_paddle, unpatch_paddle, patched_paddle], ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    ("families", "error", "text"),
    [
        (("incubate", "int8"), ValueError, f"families must be one of {NAMES}, but got 'int8'"),
        ("int8", ValueError, f"families must be one of {NAMES}, but got 'int8'"),
        (None, TypeError, "families must be a tuple or list of names out of"),
    ],
    ids=str,
)
def test_bad_families_patch_nothing(families, error, text, call):
    name = "patch_paddle" if call is patched_paddle else call.__name__
    with pytest.raises(error, match=f"^{name}: {text}"):
        call(families).__enter__()
    assert patched_families() == []


@pytest.mark.parametrize("family", ["incubate", "gemm", "fp8", "gshard"])
def test_where_paddle_lacks_an_operator_nothing_is_patched(family, monkeypatch):
    name = FAMILIES[family][-1]
    module, text = (_legacy_C_ops, "_legacy_C_ops") if name == LEGACY else (_C_ops, "_C_ops")
    with monkeypatch.context() as patch:
        patch.delattr(module, name)
        with pytest.raises(RuntimeError, match=rf"^patch_paddle: paddle\.{text}\.{name} must exist"):
            patch_paddle(tuple(FAMILIES))
        assert "Paddle itself" in explain()
    assert patched_families() == []


@pytest.mark.parametrize("name", WRAPPED)
def test_paddles_function_stays_and_every_argument_arrives_under_its_name(name):
    signature = inspect.signature(PADDLES_FUNCTIONS[name])
    with patched_paddle(("incubate", "gemm")):
        assert getattr(F, name) is PADDLES_FUNCTIONS[name]
        assert inspect.signature(getattr(F, name)) == signature
        names = [each for each in signature.parameters if each != "name"]
        assert list(inspect.signature(getattr(_C_ops, name)).parameters) == names


@pytest.mark.parametrize("name", ["fp8_gemm_blockwise", "fused_transpose_split_quant"])
def test_functions_whose_code_is_replaced_keep_their_signature(name):
    signature = inspect.signature(FUNCTIONS[name])
    for _ in range(2):
        with patched_paddle("fp8"):
            assert getattr(F, name) is FUNCTIONS[name]
            assert inspect.signature(FUNCTIONS[name]) == signature
        assert inspect.signature(FUNCTIONS[name]) == signature
        assert patched_families() == []


@pytest.mark.parametrize("name", [each for each in fp8.__all__ if each != "fused_stack_quant"])
def test_functions_of_float8_have_paddles_signatures(name):
    names = [(each.name, each.default) for each in inspect.signature(getattr(F, name)).parameters.values()]
    assert [(each.name, each.default) for each in inspect.signature(getattr(fp8, name)).parameters.values()] == names


@pytest.mark.parametrize("lacking", ["fp8_gemm_blockwise", "fused_transpose_split_quant"])
def test_where_paddle_lacks_a_function_nothing_is_patched(lacking, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(F, lacking)
        with pytest.raises(RuntimeError, match=rf"^patch_paddle: paddle.incubate.nn.functional.{lacking} must be a"):
            patch_paddle(("permute", "fp8"))
    assert patched_families() == []


def test_functions_imported_before_and_operators_called_directly_are_routed_too():
    numbers = paddle.to_tensor([0, 2, 2])
    with patched_paddle(("incubate",)):
        assert imported_before(numbers, 0, 3, "int64").tolist() == [1, 0, 2]
        assert _C_ops.int_bincount(numbers, 0, 3, paddle.int32).tolist() == [1, 0, 2]


def test_gates_that_imported_their_functions_before_are_routed_too():
    ids = paddle.to_tensor([[1, 0], [1, -1]])
    with patched_paddle(("gshard",)):
        assert number_count_imported_before(ids, 2).tolist() == [1, 2]
        assert random_routing_imported_before(ids, paddle.ones([2, 2]), paddle.to_tensor([3.0, 1.0])).tolist() == [
            [1, -1],
            [1, -1],
        ]


def test_explain_names_the_families():
    with patched_paddle(("incubate",)):
        assert "moe_unpermute: Paddle itself; the family 'incubate': this package (patch_paddle)" in explain()
        assert "the family 'gemm'" not in explain()
    assert "the family" not in explain()


@pytest.mark.cpu_only
@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="Paddle has its own AsyncLoad")
def test_a_build_for_cpus_gets_copies_that_are_made_at_once():
    manipulation = importlib.import_module("paddle.incubate.tensor.manipulation")
    source = paddle.arange(5).astype("float32")
    source.stop_gradient = False
    parameter = paddle.create_parameter([2], "float32")
    target = paddle.zeros([4])
    with patched_paddle(("incubate",)):
        loader = manipulation.create_async_load()
        copy, task = manipulation.async_offload(source, loader)
        back, _ = manipulation.async_reload(parameter, loader)
        partial = manipulation.async_offload_with_offset(source, target, 1, 2, 2, loader)
    assert task.is_completed()
    assert partial.is_completed()
    task.cpu_wait()
    task.cuda_wait()
    assert copy.tolist() == source.tolist()
    assert copy.stop_gradient
    assert target.stop_gradient
    assert back.tolist() == parameter.tolist()
    assert target.tolist() == [0, 0, 1, 2]
    source.detach()[0] = 9.0
    assert source[0] == 9
    assert copy[0] == 0  # memory of its own
    assert not hasattr(paddle.base.core, "AsyncLoad")
    with patched_paddle(("permute", "gemm")):
        assert not hasattr(paddle.base.core, "AsyncLoad")


def test_paddles_own_async_load_stays(monkeypatch):
    own = object()
    monkeypatch.setattr(paddle.base.core, "AsyncLoad", own, raising=False)
    with patched_paddle(("incubate",)):
        assert paddle.base.core.AsyncLoad is own
    assert paddle.base.core.AsyncLoad is own
