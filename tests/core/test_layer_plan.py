# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Choices of a layer of experts, its workspace, and the facts and params that it refuses."""

from __future__ import annotations

import itertools
from ctypes import byref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .binding import Core, CoreError
from .layer import BACKWARD, FORWARD, H100, H200, Choices, Facts, Hidden, Kernels, LayerParams, Part, choices
from .operators.grouped_gemm import FEW_ROWS, PING_PONG, SWAP_AB
from .structs import DTYPES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GIB = 1 << 30
FLOAT8 = {"num_tokens": 40, "num_rows": 200, "num_experts": 2, "hidden": 784, "inner": 256}
FLOAT8 |= {"workspace": 1, "dtype": 2, "float8": 1}
# T, d, n, E, K
ERNIE_21B, ERNIE_300B, DSV3 = (16384, 2560, 1536, 64, 6), (16384, 8192, 3584, 64, 8), (4096, 7168, 2048, 256, 8)
SONIC_30B, FEW_TOKENS = (32768, 4096, 256, 256, 16), (64, 2560, 1536, 64, 6)


def of_model(
    core: Core, sizes: tuple[int, ...], which: int, gpu: tuple[int, int] = H100, workspace: int = GIB
) -> Choices:
    tokens, hidden, inner, experts, topk = sizes
    rows = {"num_tokens": tokens, "num_rows": tokens * topk, "num_experts": experts}
    facts = {"hidden": hidden, "inner": inner, "workspace": workspace, "num_sms": gpu[0], "memory_gbps": gpu[1]}
    options = {"dtype": DTYPES[BFLOAT16], "backward": which, "keeps_hidden": 1, "needs_d_weights": which}
    return choices(core, **rows, **facts, **options)


@pytest.mark.parametrize(
    ("sizes", "gpu", "forward", "backward"),
    [
        # chunks of rows (0: gathers), columns of a chunk, tile rows of the GEMM whose rows are summed
        (ERNIE_21B, H100, (0, 2560, SWAP_AB), (1, 2560, SWAP_AB)),
        (ERNIE_21B, H200, (0, 2560, PING_PONG), (1, 2560, SWAP_AB)),
        (ERNIE_300B, H100, (3, 4096, SWAP_AB), (3, 4096, SWAP_AB)),
        (DSV3, H100, (0, 7168, SWAP_AB), (0, 7168, SWAP_AB)),
        (SONIC_30B, H100, (0, 960, PING_PONG), (0, 960, PING_PONG)),
        (FEW_TOKENS, H100, (0, 2560, SWAP_AB), (0, 2560, SWAP_AB)),
    ],
)
def test_choices_for_models(
    core: Core,
    sizes: tuple[int, ...],
    gpu: tuple[int, int],
    forward: tuple[int, int, int],
    backward: tuple[int, int, int],
) -> None:
    for which, expected in ((FORWARD, forward), (BACKWARD, backward)):
        made = of_model(core, sizes, which, gpu)
        assert (made.num_chunks, made.chunk_columns, made.sum_tile_rows) == expected
        assert made.gathers == (made.num_chunks == 0)


@pytest.mark.parametrize(
    ("rows", "facts", "expected"),
    [
        (24, {}, FEW_ROWS),
        (25, {}, SWAP_AB),
        (24, {"keeps_hidden": Hidden.KEEPS}, SWAP_AB),
        (24, {"backward": 1}, SWAP_AB),
        (24, {"num_experts": 512, "num_rows": 24 * 512}, FEW_ROWS),
        (24, {"num_experts": 513, "num_rows": 24 * 513}, SWAP_AB),
        # the time of reading the matrices hides what a launch costs
        (16, {"num_experts": 256, "num_rows": 1, "hidden": 7168, "inner": 2048}, FEW_ROWS),
        (16, {"num_experts": 256, "num_rows": 54, "hidden": 7168, "inner": 2048}, FEW_ROWS),
        (16, {"num_experts": 256, "num_rows": 55, "hidden": 7168, "inner": 2048}, SWAP_AB),
        (16, {"num_experts": 54, "num_rows": 540, "hidden": 7168, "inner": 2048}, FEW_ROWS),
        (24, {"num_tokens": 0}, SWAP_AB),
        (0, {"num_tokens": 0}, SWAP_AB),
    ],
    ids=str,
)
def test_few_rows_without_h_have_a_kernel_of_their_own_which_needs_no_tables(
    core: Core, rows: int, facts: dict[str, int], expected: int
) -> None:
    made = plain_layer(core, rows, **{"hidden": 256, "inner": 128, **facts})
    assert made.sum_tile_rows == expected
    assert (made.tables_size == 0) == (expected == FEW_ROWS)


# Mean rows per expert up to which the kernel for few rows reads codes.
MAX_ROWS_OF_FLOAT8, MAX_ROWS_OF_INTEGERS = 24, 512


@pytest.mark.parametrize(
    ("rows", "facts", "expected"),
    [
        (MAX_ROWS_OF_FLOAT8, {"float8": 1}, FEW_ROWS),
        (MAX_ROWS_OF_FLOAT8, {"float8": 1, "has_codes": 1}, FEW_ROWS),
        (MAX_ROWS_OF_FLOAT8 + 1, {"float8": 1, "has_codes": 1}, PING_PONG),
        (MAX_ROWS_OF_FLOAT8, {"float8": 1, "keeps_hidden": Hidden.KEEPS_CODES}, PING_PONG),
        (MAX_ROWS_OF_FLOAT8, {"float8": 1, "backward": 1}, PING_PONG),
        # no limit of elements
        (16, {"float8": 1, "num_experts": 256, "num_rows": 4096, "hidden": 7168, "inner": 2048}, FEW_ROWS),
        *((MAX_ROWS_OF_INTEGERS, {"has_codes": 1, "codes_format": format}, FEW_ROWS) for format in range(3)),
        (MAX_ROWS_OF_INTEGERS + 1, {"has_codes": 1}, PING_PONG),
        (MAX_ROWS_OF_INTEGERS, {"has_codes": 1, "keeps_hidden": Hidden.KEEPS}, PING_PONG),
        # rows of codes are multiples of 16 bytes
        (16, {"has_codes": 1, "hidden": 48, "inner": 16}, FEW_ROWS),
        (16, {"has_codes": 1, "hidden": 48, "inner": 24}, SWAP_AB),
        (16, {"has_codes": 1, "hidden": 40, "inner": 16, "num_rows": 900}, SWAP_AB),
        (16, {"has_codes": 1, "codes_format": 1, "hidden": 96, "inner": 32}, FEW_ROWS),
        (16, {"has_codes": 1, "codes_format": 1, "hidden": 96, "inner": 48, "num_rows": 900}, SWAP_AB),
        (16, {"has_codes": 1, "codes_format": 2, "hidden": 80, "inner": 32, "num_rows": 900}, SWAP_AB),
    ],
    ids=str,
)
def test_few_rows_are_multiplied_by_codes_as_they_are(
    core: Core, rows: int, facts: dict[str, int], expected: int
) -> None:
    made = plain_layer(core, rows, **{"hidden": 256, "inner": 128, **facts})
    assert made.sum_tile_rows == expected
    assert (made.tables_size == 0) == (expected == FEW_ROWS)
    assert made.gathers == (expected == FEW_ROWS or "float8" not in facts)


def test_memory_of_few_rows_is_a_buffer_the_activations_and_codes_that_are_not_given(core: Core) -> None:
    rows, hidden, inner = 40, 256, 128
    sizes = {"num_tokens": 20, "num_rows": rows, "num_experts": 2, "hidden": hidden, "inner": inner}
    sizes |= {"workspace": GIB, "dtype": 2}
    of_rows = aligned(2 * rows * hidden) + aligned(2 * rows * inner)
    matrix = aligned(2 * hidden * 2 * inner) + aligned(4 * 2 * 2 * 2)
    assert choices(core, **sizes).bytes == of_rows
    assert choices(core, **sizes, has_codes=1).bytes == of_rows
    assert choices(core, **sizes, float8=1, has_codes=1).bytes == of_rows
    assert choices(core, **sizes, float8=1).bytes == of_rows + matrix


def plain_layer(core: Core, rows: int, hidden: int, inner: int, **facts: int) -> Choices:
    """Choices of a layer whose tokens have one slot each; ``rows`` of each of two experts."""
    sizes = {"num_tokens": 2 * rows, "num_rows": 2 * rows, "num_experts": 2, "hidden": hidden, "inner": inner}
    return choices(core, **{**sizes, "workspace": 1 << 50, "dtype": 2, "num_sms": 132, "memory_gbps": 3352, **facts})


@pytest.mark.parametrize(
    ("gpu", "rows", "inner", "columns", "expected"),
    [
        # by memory bandwidth
        (H200, 1024, 2048, 2560, PING_PONG),
        (H200, 1023, 2048, 2560, SWAP_AB),
        (H200, 1024, 2056, 2560, SWAP_AB),
        (H100, 1024, 2048, 2560, SWAP_AB),
        ((132, 35 * 132 - 1), 1024, 2048, 2560, SWAP_AB),
        ((66, 35 * 66), 1024, 2048, 2560, PING_PONG),
        ((132, 0), 1024, 2048, 2560, SWAP_AB),
        # short K
        (H100, 511, 504, 2560, SWAP_AB),
        (H100, 512, 504, 2560, PING_PONG),
        (H100, 512, 512, 2560, SWAP_AB),
        # tiles of 192 columns
        (H100, 1024, 3072, 768, PING_PONG),
        (H100, 1024, 3080, 768, SWAP_AB),
        (H100, 1023, 3072, 768, SWAP_AB),
        (H100, 1024, 1024, 4096, PING_PONG),
        (H100, 1024, 1032, 4096, SWAP_AB),
        (H100, 1024, 1024, 1024, SWAP_AB),
        (H100, 1024, 1024, 184, PING_PONG),
        (H100, 1024, 1024, 72, SWAP_AB),
    ],
    ids=str,
)
def test_the_kernel_of_summed_rows_on_both_sides_of_each_limit(
    core: Core, gpu: tuple[int, int], rows: int, inner: int, columns: int, expected: int
) -> None:
    facts = {"num_sms": gpu[0], "memory_gbps": gpu[1]}
    assert plain_layer(core, rows, columns, inner, **facts).sum_tile_rows == expected
    if inner % 16 == 0:  # K of the backward pass is 2n
        assert plain_layer(core, rows, columns, inner // 2, backward=1, **facts).sum_tile_rows == expected


@pytest.mark.parametrize(
    ("inner", "most", "expected"),
    [(504, 1024, 960), (1032, 1024, 1024), (1024, 2048, 2048), (504, 768, 768), (504, 256, 192), (2048, 256, 256)],
)
def test_column_chunks_fit_tiles_of_192_columns(core: Core, inner: int, most: int, expected: int) -> None:
    made = plain_layer(core, 1024, 4096, inner, workspace=2 * 1024 * 2 * most)
    assert made.chunk_columns == expected


@pytest.mark.parametrize(
    ("gpu", "backward", "rows", "inner", "expected"),
    [
        *[(gpu, which, 160, 4096, 1) for gpu in (H100, H200) for which in (FORWARD, BACKWARD)],
        *[(gpu, which, 161, 4096, 0) for gpu in (H100, H200) for which in (FORWARD, BACKWARD)],
        *[(gpu, FORWARD, 161, inner, int(inner == 1536)) for gpu in (H100, H200) for inner in (1536, 1544)],
        *[(H100, BACKWARD, 161, inner, int(inner == 1024)) for inner in (1024, 1032)],
        *[(H200, BACKWARD, 161, inner, int(inner == 768)) for inner in (768, 776)],
    ],
    ids=str,
)
def test_token_rows_are_gathered_up_to_each_limit(
    core: Core, gpu: tuple[int, int], backward: int, rows: int, inner: int, expected: int
) -> None:
    facts = {"num_sms": gpu[0], "memory_gbps": gpu[1], "backward": backward}
    made = plain_layer(core, rows, 64, inner, **facts)
    assert made.gathers == expected
    if backward:
        assert (made.gathers_x, made.gathers_d_out) == (expected, expected)
    assert plain_layer(core, rows, 64, inner, **facts, num_tokens=0).gathers == 0


@pytest.mark.parametrize(("backward", "per_pass"), [(FORWARD, 680), (BACKWARD, 500)], ids=["forward", "backward"])
@pytest.mark.parametrize("topk", [1, 4])
def test_with_several_row_chunks_token_rows_are_gathered_up_to_a_limit(
    core: Core, topk: int, backward: int, per_pass: int
) -> None:
    """n is at most (2 + chunks T / M) times the limit per pass over the rows."""
    rows, hidden = 4000, 64
    facts = {"backward": backward, "num_tokens": 2 * rows // topk, "workspace": (2 * rows + 1) * hidden}
    chunks = plain_layer(core, rows, hidden, 1 << 16, **facts).num_chunks
    assert chunks > 1
    limit = int((2 + chunks / topk) * per_pass) // 8 * 8
    assert plain_layer(core, rows, hidden, limit, **facts).gathers == 1
    above = plain_layer(core, rows, hidden, limit + 8, **facts)
    assert (above.gathers, above.gathers_d_out) == (0, int(limit + 8 <= 1536))


@pytest.mark.parametrize(("inner", "expected"), [(768, (1, 1)), (896, (0, 1)), (1536, (0, 1)), (1664, (0, 0))])
def test_wgrads_of_a_float8_layer_gather_tokens_next_to_few_columns(
    core: Core, inner: int, expected: tuple[int, int]
) -> None:
    made = plain_layer(core, 400, 64, inner, backward=1, float8=1)
    assert (made.gathers_x, made.gathers_d_out) == expected


def test_a_pass_fits_its_workspace_and_a_buffer_of_few_columns_of_all_rows(core: Core) -> None:
    for sizes, which, workspace in itertools.product((ERNIE_21B, ERNIE_300B, DSV3), (FORWARD, BACKWARD), (1, GIB)):
        made = of_model(core, sizes, which, workspace=workspace)
        rows = sizes[0] * sizes[4]
        assert made.buffer_bytes <= max(workspace, 256 * rows * 2)
        assert made.bytes >= made.buffer_bytes + 2 * rows * sizes[2]


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"hidden": 12}, "hidden"),
        ({"inner": 0}, "inner"),
        ({"workspace": 0}, "workspace"),
        ({"dtype": 0}, "dtype"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_rows": -1}, "num_rows"),
        ({"struct_size": 8}, "struct_size"),
    ],
    ids=lambda value: str(value),
)
def test_facts_that_no_layer_has_are_refused(core: Core, bad: dict[str, int], name: str) -> None:
    good = {"num_tokens": 4, "num_rows": 8, "num_experts": 2, "hidden": 16, "inner": 8, "workspace": 1, "dtype": 2}
    choices(core, **good)
    with pytest.raises(CoreError, match=f"^INVALID_ARGUMENT: {name} must be"):
        choices(core, **{**good, **bad})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"codes_format": 3, "float8": 0, "has_codes": 1, "keeps_hidden": 1},
            "codes_format must be a format of integers without float8 operands",
        ),
        (
            {"codes_format": -1, "float8": 0, "has_codes": 1, "keeps_hidden": 1},
            "codes_format must be a format of integers without float8 operands",
        ),
        ({"dtype": 1}, "dtype must be PMO_BFLOAT16 with float8 operands"),
        ({"hidden": 24}, "hidden must be a multiple of 16 with float8 operands"),
        ({"inner": 192}, "inner must be a multiple of 128 with float8 operands"),
        ({"keeps_hidden": 3}, "keeps_hidden must be one of pmo_layer_hidden"),
        ({"keeps_hidden": -1}, "keeps_hidden must be one of pmo_layer_hidden"),
        ({"keeps_hidden": 2, "float8": 0}, "keeps_hidden must be one of pmo_layer_hidden"),
    ],
    ids=lambda value: str(value),
)
def test_facts_that_no_float8_layer_has_are_refused(core: Core, bad: dict[str, int], message: str) -> None:
    for backward in (FORWARD, BACKWARD):
        choices(core, **FLOAT8, backward=backward, keeps_hidden=Hidden.KEEPS_CODES)
        with pytest.raises(CoreError) as caught:
            choices(core, **{**FLOAT8, "backward": backward, **bad})
        assert str(caught.value) == f"INVALID_ARGUMENT: {message}"


def test_float8_passes_neither_gather_tokens_nor_have_tiles_of_160_rows(core: Core) -> None:
    for which, workspace in itertools.product((FORWARD, BACKWARD), (1, GIB)):
        made = choices(core, **{**FLOAT8, "backward": which, "workspace": workspace})
        assert (made.gathers, made.sum_tile_rows) == (0, PING_PONG)
        assert made.chunk_columns == (256 if workspace == 1 else 784)
        assert made.buffer_bytes == 2 * 200 * made.chunk_columns  # permuted rows are codes, in memory of their own
        assert made.num_chunks == (2 if workspace == 1 else 1)


@pytest.mark.parametrize(
    ("rows", "float8", "num_heights"), [(511, 0, 1), (512, 0, 2), (511, 1, 1), (512, 1, 1)], ids=str
)
def test_tables_have_a_schedule_for_each_tile_height(core: Core, rows: int, float8: int, num_heights: int) -> None:
    sizes = {"num_tokens": rows, "num_rows": rows, "num_experts": 1, "hidden": 784, "inner": 256, "dtype": 2}
    made = choices(core, **sizes, workspace=GIB, float8=float8)
    assert made.tables_size == num_heights * 9  # 3 E + 6 without chunks


def test_a_workspace_for_all_rows_is_one_chunk(core: Core) -> None:
    """One byte less leaves room for the last tile: 160 rows."""
    sizes = {"num_tokens": 1000, "num_rows": 1000, "num_experts": 1, "hidden": 64, "inner": 3072, "dtype": 2}
    for workspace, num_chunks, chunk_rows in ((1000 * 128, 1, 1000), (1000 * 128 - 1, 2, 839)):
        made = choices(core, **sizes, workspace=workspace)
        assert (made.num_chunks, made.chunk_rows) == (num_chunks, chunk_rows)


def aligned(size: int) -> int:
    return -(-size // 256) * 256


def test_memory_of_a_float8_pass(core: Core) -> None:
    """Beside the buffer and the tables: codes of tokens, of chunks of their rows, of one matrix; A, or its gradient."""
    tokens, rows, experts, hidden, inner = 40, 200, 2, 784, 256
    given = {**FLOAT8, "workspace": GIB, "needs_d_weights": 1}
    matrix = aligned(experts * hidden * 2 * inner) + aligned(4 * experts * 7 * 4)

    def codes(rows: int, columns: int) -> int:
        return aligned(rows * columns) + aligned(4 * rows * -(-columns // 128))

    moved = codes(tokens, hidden) + codes(rows, hidden)
    of_dots = aligned(4 * rows * 2)
    act, wide = aligned(2 * rows * inner), aligned(4 * rows * inner)
    expected = {
        (FORWARD, Hidden.KEEPS): codes(rows, inner),
        (FORWARD, Hidden.KEEPS_CODES): codes(rows, inner),
        (BACKWARD, Hidden.KEEPS): act + of_dots + codes(rows, 2 * inner),
        (BACKWARD, Hidden.KEEPS_CODES): act + of_dots + wide,
        (BACKWARD, Hidden.RECOMPUTES): act + of_dots + wide + codes(rows, 2 * inner),
    }
    for (which, keeps), size in expected.items():
        made = choices(core, **given, backward=which, keeps_hidden=keeps)
        fixed = aligned(made.buffer_bytes) + aligned(4 * made.tables_size)
        assert made.buffer_bytes == 2 * rows * hidden
        assert made.bytes == fixed + moved + size + matrix
        with_codes = choices(core, **given, backward=which, keeps_hidden=keeps, has_codes=1)
        assert with_codes.bytes == made.bytes - matrix


def test_a_forward_pass_needs_no_memory_for_gradients(core: Core) -> None:
    sizes = {"num_tokens": 40, "num_rows": 80, "num_experts": 2, "hidden": 16, "inner": 136, "workspace": 1, "dtype": 2}
    forward = choices(core, **sizes).bytes
    assert choices(core, **sizes, needs_d_weights=1).bytes == forward
    backward = choices(core, **sizes, backward=1, keeps_hidden=1).bytes
    assert backward == forward
    of_hidden = choices(core, **sizes, backward=1).bytes - backward
    assert of_hidden == -(-80 * 2 * 136 * 2 // 256) * 256
    of_dots = choices(core, **sizes, backward=1, keeps_hidden=1, needs_d_weights=1).bytes - backward
    assert of_dots == -(-80 * 2 * 4 // 256) * 256  # two tiles of 128 columns


def call(core: Core, facts: Facts | None, params: LayerParams | None, kernels: Kernels | None) -> None:
    """The call itself, whose checks come first."""
    core.check(
        core.library.pmo_layer_run(*(None if each is None else byref(each) for each in (facts, params, kernels)), None)
    )


def test_a_missing_struct_is_refused(core: Core) -> None:
    structs: list[Any] = [Facts(), LayerParams(), Kernels()]
    for number in range(3):
        given = [None if place == number else each for place, each in enumerate(structs)]
        with pytest.raises(CoreError, match="facts, params and kernels must be given"):
            call(core, *given)


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"sizes_kind": 7}, "sizes_kind"),
        ({"offsets_kind": 7}, "sizes_kind"),
        ({"x": 8}, "x"),
        ({"x_row_stride": 12}, "x"),
        ({"x_row_stride": 8}, "x"),
        ({"d_out": 8}, "d_out"),
        ({"gate_up": None}, "gate_up"),
        ({"down": 4}, "down"),
        ({"hidden": None}, "hidden"),
        ({"d_weights": None}, "d_weights"),
        ({"workspace": None}, "workspace"),
        ({"struct_size": 8}, "struct_size"),
        ({"slots_per_token": -1}, "slots_per_token"),
        ({"gate_up_accumulation": 3}, "gate_up_accumulation"),
        ({"down_accumulation": -1}, "down_accumulation"),
    ],
    ids=lambda value: str(value),
)
def test_params_that_lead_out_of_their_arrays_are_refused(core: Core, bad: dict[str, Any], name: str) -> None:
    sizes = {"num_tokens": 4, "num_rows": 8, "num_experts": 2, "hidden": 16, "inner": 8, "workspace": 1, "dtype": 2}
    facts = Facts(**sizes, backward=1, keeps_hidden=1, needs_d_weights=1)
    numbers: dict[str, Any] = {"x_row_stride": 16, "d_out_row_stride": 16, "slots_per_token": 2}
    pointers: dict[str, Any] = dict.fromkeys(("x", "d_out", "gate_up", "down", "hidden", "d_weights", "workspace"), 16)
    for field, value in bad.items():
        (pointers if field in pointers else numbers)[field] = value
    params = LayerParams(**numbers)
    params.point_at(**{field: value or 0 for field, value in pointers.items()})
    with pytest.raises(CoreError, match=f"^INVALID_ARGUMENT: {name} must be"):
        call(core, facts, params, Kernels())


PART = {"num_tokens": 4, "num_rows": 8, "num_experts": 2, "hidden": 16, "inner": 128, "workspace": 1, "dtype": 2}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"part": 3}, "part must be a pmo_layer_part"),
        ({"part": -1}, "part must be a pmo_layer_part"),
        ({"part": Part.DGRADS, "backward": 0}, "PMO_LAYER_WHOLE in a forward pass"),
        ({"part": Part.WGRADS, "float8": 1}, "float8 must be 0 with PMO_LAYER_WGRADS"),
        ({"part": Part.WGRADS, "keeps_hidden": 1}, "keeps_hidden must be 0 with PMO_LAYER_WGRADS"),
        ({"part": Part.WGRADS, "needs_d_weights": 1}, "keeps_hidden must be 0 with PMO_LAYER_WGRADS"),
    ],
    ids=str,
)
def test_parts_of_a_backward_pass_that_do_not_exist_are_refused(
    core: Core, facts: dict[str, int], expected: str
) -> None:
    with pytest.raises(CoreError, match=expected):
        choices(core, **{**PART, "backward": 1, **facts})


@pytest.mark.parametrize(
    "facts", [{"backward": 1}, {"keeps_hidden": Hidden.KEEPS}, {"num_rows": 1025}], ids=["backward", "keeps H", "rows"]
)
def test_integer_codes_of_other_passes_are_refused(core: Core, facts: dict[str, int]) -> None:
    params = LayerParams(x_row_stride=16, d_out_row_stride=16, slots_per_token=2)
    hidden = ("hidden",) if "keeps_hidden" in facts else ()
    params.point_at(**dict.fromkeys({"x", "d_out", "workspace", "out", *hidden}, 16))
    with pytest.raises(CoreError, match=r"^INVALID_ARGUMENT: has_codes must be 0 where values are read"):
        call(core, Facts(**{**PART, "has_codes": 1, **facts}), params, Kernels())


@pytest.mark.parametrize(
    ("part", "keeps", "pointers", "name"),
    [
        (Part.WHOLE, Hidden.KEEPS, ("hidden", "scaled"), "scaled"),
        (Part.WHOLE, Hidden.KEEPS, ("hidden", "d_hidden"), "d_hidden"),
        (Part.DGRADS, Hidden.KEEPS, ("hidden",), "scaled"),
        (Part.DGRADS, Hidden.KEEPS, ("hidden", "scaled", "d_hidden"), "d_hidden"),
        (Part.DGRADS, Hidden.RECOMPUTES, ("scaled",), "d_hidden"),
        (Part.DGRADS, Hidden.KEEPS, ("hidden", "scaled", "d_down"), "d_gate_up"),
        (Part.WGRADS, Hidden.RECOMPUTES, ("d_down",), "scaled"),
        (Part.WGRADS, Hidden.RECOMPUTES, ("d_gate_up",), "d_hidden"),
        (Part.WGRADS, Hidden.RECOMPUTES, ("d_down", "scaled", "d_x"), "d_x"),
    ],
    ids=str,
)
def test_arrays_that_a_part_lacks_are_named(
    core: Core, part: Part, keeps: Hidden, pointers: tuple[str, ...], name: str
) -> None:
    params = LayerParams(x_row_stride=16, d_out_row_stride=16, slots_per_token=2)
    params.point_at(**dict.fromkeys({"x", "d_out", "workspace", "gate_up", "down", *pointers}, 16))
    with pytest.raises(CoreError, match=f"^INVALID_ARGUMENT: {name} must be"):
        call(core, Facts(**PART, backward=1, keeps_hidden=keeps, part=part), params, Kernels())


def test_parts_need_no_workspace_for_arrays_of_the_caller(core: Core) -> None:
    sizes = {**PART, "backward": 1, "workspace": 1 << 20}
    whole = choices(core, **sizes)
    for part in (Part.DGRADS, Part.WGRADS):
        made = choices(core, **sizes, part=part)
        rest = [each.bytes - -(-each.buffer_bytes // 256) * 256 for each in (whole, made)]
        assert rest[0] - rest[1] == 8 * 3 * 128 * 2


POINTERS = ("x", "d_out", "gate_up", "down", "d_weights", "workspace", "out", "d_x")
MATRICES = ("gate_up", "down", "turned_gate_up", "turned_down")
CODES = tuple(f"{matrix}_{part}" for matrix in MATRICES for part in ("codes", "scales"))


def float8_refusal(core: Core, facts: dict[str, int], pointers: set[str]) -> str:
    """The error of a float8 pass with these pointers."""
    params = LayerParams(x_row_stride=784, d_out_row_stride=784, slots_per_token=5)
    params.point_at(**dict.fromkeys(pointers, 16))
    with pytest.raises(CoreError) as caught:
        call(core, Facts(**FLOAT8, needs_d_weights=1, **facts), params, Kernels())
    return str(caught.value)


HIDDEN: dict[Hidden, set[str]] = {
    Hidden.RECOMPUTES: set(),
    Hidden.KEEPS: {"hidden"},
    Hidden.KEEPS_CODES: {"hidden", "hidden_scales"},
}


@pytest.mark.parametrize(
    ("backward", "keeps", "matrices"),
    [
        (FORWARD, Hidden.KEEPS, ("gate_up", "down")),
        (FORWARD, Hidden.RECOMPUTES, ("gate_up", "down")),
        (BACKWARD, Hidden.KEEPS, ("turned_gate_up", "turned_down")),
        (BACKWARD, Hidden.KEEPS_CODES, ("turned_gate_up", "turned_down")),
        (BACKWARD, Hidden.RECOMPUTES, ("gate_up", "turned_gate_up", "turned_down")),
    ],
    ids=str,
)
def test_missing_codes_are_named(core: Core, backward: int, keeps: Hidden, matrices: tuple[str, ...]) -> None:
    facts = {"backward": backward, "keeps_hidden": keeps, "has_codes": 1}
    for matrix, part in itertools.product(matrices, ("codes", "scales")):
        pointers = {*POINTERS, *CODES, *HIDDEN[keeps]} - {f"{matrix}_{part}"}
        message = float8_refusal(core, facts, pointers)
        assert message == f"INVALID_ARGUMENT: {matrix}_codes must be codes and scales"


@pytest.mark.parametrize("backward", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("keeps", list(Hidden), ids=str)
def test_scales_of_h_are_given_with_its_codes_only(core: Core, keeps: Hidden, backward: int) -> None:
    facts = {"backward": backward, "keeps_hidden": keeps}
    wrong = {"hidden_scales"} ^ HIDDEN[keeps]
    assert float8_refusal(core, facts, {*POINTERS, *wrong}) == (
        "INVALID_ARGUMENT: hidden_scales must be an array where facts.keeps_hidden is PMO_LAYER_KEEPS_CODES"
    )
