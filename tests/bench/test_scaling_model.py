# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The model of many GPUs: its calibration, its checks and its parts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.layer.shapes import Shape
from benchmarks.scaling.calibration import calibrated, corrected, exchanges_of
from benchmarks.scaling.check import compared, foretold, predicted_us
from benchmarks.scaling.exchanges import Exchanges, rows_per_rank
from benchmarks.scaling.fitting import fitted
from benchmarks.scaling.layers import gradient_us, overlapped, pipeline, predict
from benchmarks.scaling.machines import Local, Machine, Nccl, Peer, Products
from benchmarks.scaling.measured import WHATS, load_exchanges
from benchmarks.scaling.traces import drawn
from benchmarks.scaling.traffic import Layout, count, steps

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
GPU = "NVIDIA H200"
SHAPES = {"small": (1024, 384, 16, 4), "wide": (4096, 2048, 8, 2), "deep": (2048, 4096, 32, 8)}
TOKENS = 1501
PRODUCTS = Products((1.5e-9, 0.0, 1e-6, 2e-6, 0.0))
MACHINE = Machine(
    name="made up",
    local=Local(5.0, 4000.0, 1e-5),
    forward=PRODUCTS,
    backward=PRODUCTS,
    peer=Peer(400.0, 4.0, 350.0, 50.0, 15.0, 2500.0, 3000.0),
    nccl=Nccl(300.0, 40.0),
)


def line(what, shape, us=1.0, **others):
    names = dict(zip(("hidden", "inner", "experts", "topk"), SHAPES[shape], strict=True))
    return {"what": what, "shape": shape, "tokens": TOKENS, "ranks": 2, "bytes": 0, "us": us, **names, **others}


def write(path, lines):
    machine = {"machine": True, "gpus": [GPU, GPU], "ranks": 2}
    path.write_text("".join(json.dumps(each) + "\n" for each in [machine, *lines]))


@pytest.fixture
def made_up(tmp_path):
    """A file of times that a known machine would have; gives the file, its lines and that machine."""
    real = calibrated(RESULTS, RESULTS / "h200x2-expert-parallel.jsonl")
    machine = dataclasses.replace(
        real,
        peer=Peer(411.0, 3.0, 377.0, 61.0, 17.0, 2222.0, 3333.0),
        nccl=Nccl(299.0, 44.0),
        forward=dataclasses.replace(real.forward, slowdown=1.07, fixed_us=123.0),
        backward=dataclasses.replace(real.backward, slowdown=1.11, fixed_us=321.0),
    )
    path = tmp_path / "made-up.jsonl"
    lines = [line(what, shape) for shape in SHAPES for what in WHATS]
    write(path, lines)
    for each, exchange in zip(lines, exchanges_of(load_exchanges(path)[1]), strict=True):
        step = (exchange.by_hand if each["what"] == "rows_alltoall" else exchange.steps)[0]
        times = {"layer_forward": 2, "layer_backward": 2, "layer": 4}.get(each["what"], 1)
        each["bytes"] = times * int(step._replace(line_bytes=step.row_bytes).bytes_sent()[1])
        given = exchange.line._replace(bytes=each["bytes"])
        exchange.line = given
        each["us"] = predicted_us(machine, exchange)
    write(path, lines)
    return path, lines, machine


def test_the_calibration_finds_the_machine_that_made_the_times(made_up):
    path, _, machine = made_up
    found = calibrated(RESULTS, path)
    for part in ("peer", "nccl"):
        for field in dataclasses.fields(getattr(machine, part)):
            expected = getattr(getattr(machine, part), field.name)
            assert getattr(getattr(found, part), field.name) == pytest.approx(expected, rel=1e-3), field.name
    for backward in (False, True):
        expected = machine.products(backward)
        assert found.products(backward).slowdown == pytest.approx(expected.slowdown, rel=1e-3)
        assert found.products(backward).fixed_us == pytest.approx(expected.fixed_us, rel=1e-2)


def test_a_shape_is_predicted_from_the_others(made_up):
    path, _, _ = made_up
    assert all(abs(each.held_out_error) < 0.01 for each in compared(RESULTS, path)[1])


def test_only_lines_that_agree_in_time_and_bytes_pass(made_up):
    path, lines, _ = made_up
    assert all(each.passed for each in compared(RESULTS, path)[1])
    lines[len(WHATS) + WHATS.index("dispatch_without_copy")]["us"] *= 1.5
    lines[3]["bytes"] += 2
    write(path, lines)
    found = compared(RESULTS, path)[1]
    assert (("wide", "dispatch_without_copy"), False) in [((each.shape, each.what), each.passed) for each in found]
    assert [number for number, each in enumerate(found) if not each.bytes_match] == [3]
    assert not found[3].passed


def test_the_measurements_between_two_gpus_are_reproduced():
    assert all(each.passed for each in compared(RESULTS, RESULTS / "h200x2-expert-parallel.jsonl")[1])


def test_four_ranks_are_predicted_by_what_two_took():
    of_two, of_four = (RESULTS / f"h200x{ranks}-expert-parallel.jsonl" for ranks in (2, 4))
    assert {each.ranks for each in load_exchanges(of_four)[1]} == {4}
    machine = calibrated(RESULTS, of_two)
    found, again = foretold(machine, of_four), foretold(corrected(machine, of_four), of_four)
    assert all(each.bytes_match and abs(each.error) < 0.2 for each in found)
    assert sum(each.passed for each in found) >= 0.9 * len(found)
    assert all(each.passed for each in again if each.what != "rows_alltoall")  # which is not the package's way


def test_a_correction_needs_more_ranks_than_two():
    of_two = RESULTS / "h200x2-expert-parallel.jsonl"
    with pytest.raises(ValueError, match="must have all exchanges between more than two ranks"):
        corrected(calibrated(RESULTS, of_two), of_two)


def test_a_file_without_a_machine_is_refused(tmp_path):
    (tmp_path / "file.jsonl").write_text('{"what": "dispatch"}\n')
    with pytest.raises(ValueError, match="the first line must describe the machine"):
        load_exchanges(tmp_path / "file.jsonl")


def test_a_gpu_of_which_nothing_is_known_is_refused(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"machine": true, "gpus": ["other", "other"]}\n')
    with pytest.raises(ValueError, match=r"must have \*-layer.jsonl and \*-targets.jsonl of other"):
        calibrated(RESULTS, path)


def test_fits_have_no_negative_factors():
    features = [[1, 1, 0], [1, 2, 0], [1, 3, 5], [1, 4, 1]]
    assert fitted(features, [3, 5, 7, 9]).tolist() == pytest.approx([1, 2, 0])
    assert fitted(features, [1.5, 1.4, 1.3, 1.2])[1] == 0
    assert fitted([[1], [2]], [5, 8], [2, 2]).tolist() == pytest.approx([3])


def test_rows_of_a_rank_fill_whole_pages():
    assert rows_per_rank(8192, 4096) == 8192
    assert rows_per_rank(1, 4096) == 512
    assert rows_per_rank(8192, 14336) == 8192
    assert rows_per_rank(1025, 14336) == 2048


def traffic_of(ranks, domain, kind="uniform", tokens=2048):
    return count(drawn(kind, 64, 8, 8, tokens), Layout.of(ranks, domain))


def exchanges(traffic, transport, combine="reduced"):
    made = Exchanges(MACHINE, traffic, 4096, combine=combine, transport=transport)
    return made, steps(traffic, 4096, combine=combine, dedup=transport != "rows")


def test_a_push_takes_as_long_as_its_bytes():
    traffic = traffic_of(8, 8)
    made, (dispatch, *_) = exchanges(traffic, "peer")
    most = max(dispatch.bytes_sent().max(), dispatch.bytes_received().max())
    assert made.push_us(dispatch) == pytest.approx(most / 350e3)


def test_an_all_to_all_waits_for_the_slower_of_both_links():
    near, far = traffic_of(8, 8), traffic_of(8, 2)
    made, (dispatch, *_) = exchanges(near, "alltoall")
    own = 2 * np.diag(dispatch.lines).max() * dispatch.line_bytes / 4000e3
    assert made.all_to_all_us(dispatch) == pytest.approx(40 + own + dispatch.busiest() / 300e3)
    made, (dispatch, *_) = exchanges(far, "alltoall")
    crossing = dispatch.busiest(~far.layout.near())
    assert made.all_to_all_us(dispatch) == pytest.approx(40 + own + crossing / 45e3 + 10 + 6 * 1)


def test_by_domain_sends_each_token_over_the_network_once():
    traffic = traffic_of(16, 8)
    by_domain, all_steps = exchanges(traffic, "by_domain")
    flat, _ = exchanges(traffic, "alltoall")
    for step in all_steps:
        assert by_domain.us(step) < 0.6 * flat.us(step)
    one = traffic.of_domains[:8, 1].max() * all_steps[0].line_bytes / 45e3
    assert by_domain._through_domains_us(all_steps[0]) == pytest.approx(one + 10 + 1, rel=0.02)


def test_in_one_domain_by_domain_is_peer():
    traffic = traffic_of(8, 8)
    (by_domain, all_steps), (peer, _) = exchanges(traffic, "by_domain"), exchanges(traffic, "peer")
    assert [by_domain.us(step) for step in all_steps] == [peer.us(step) for step in all_steps]


SHAPE = Shape(2048, 4096, 1024, 64, 8)


def test_one_rank_exchanges_nothing():
    made = predict(MACHINE, SHAPE, traffic_of(1, 8), transport="peer")
    assert made.forward.dispatch_us == made.backward.combine_us == made.sent_bytes == 0
    assert made.forward.us == made.forward.products_us > 0


def test_the_busiest_rank_sets_the_time_of_the_products():
    even, hot = (predict(MACHINE, SHAPE, traffic_of(8, 8, kind), transport="peer") for kind in ("uniform", "zipf"))
    assert hot.imbalance > 1.3 * even.imbalance
    assert hot.forward.products_us == pytest.approx(even.forward.products_us * hot.imbalance / even.imbalance, rel=0.02)
    assert hot.tflops < even.tflops
    assert hot.forward.flops == even.forward.flops


def test_float8_halves_what_a_dispatch_sends():
    traffic = traffic_of(16, 8)
    narrow, wide = (predict(MACHINE, SHAPE, traffic, transport="alltoall", payload=each) for each in ("fp8", "bf16"))
    assert narrow.forward.dispatch_us < 0.75 * wide.forward.dispatch_us
    assert narrow.backward == wide.backward


@pytest.mark.parametrize("transport", ["alltoall", "by_domain"])
def test_float8_is_made_and_undone_on_the_way(transport):
    traffic = traffic_of(16, 8)
    made, _ = exchanges(traffic, transport)
    narrow, wide = (steps(traffic, 4096, combine="reduced", payload=each)[0] for each in ("fp8", "bf16"))
    sent, received = narrow.lines.sum(1).max(), narrow.lines.sum(0).max()
    both = 4096 + 4 * 32 + 2 * 4096
    assert made._narrowing_us(narrow) == pytest.approx(2 * 5.0 + (sent + received) * both / 4000e3)
    assert made._narrowing_us(wide) == 0
    as_bytes = narrow._replace(row_bytes=made.row_bytes)  # as many bytes travel, but they are no float8
    scales = 40 + 10 + 8 * 1 if transport == "alltoall" else made.keep_us(narrow) - made.keep_us(as_bytes)
    assert made.us(narrow) - made.us(as_bytes) == pytest.approx(made._narrowing_us(narrow) + scales)


def test_by_hand_the_numbers_of_rows_travel_first():
    for traffic, network in ((traffic_of(8, 8), 0), (traffic_of(16, 8), 10 + 8 * 1)):
        made, all_steps = exchanges(traffic, "rows")
        waits = [made.us(step) - made.rows_us(step) for step in all_steps]
        assert waits == pytest.approx([40 + network + 20 + 5, 0, 0, 0])


def test_bytes_over_the_network_are_counted_by_transport():
    traffic = traffic_of(16, 8)
    flat, by_domain = (predict(MACHINE, SHAPE, traffic, transport=each) for each in ("alltoall", "by_domain"))
    assert flat.sent_bytes == by_domain.sent_bytes
    assert by_domain.far_bytes == pytest.approx(4 * 2048 * 0.997 * 2 * 4096, rel=0.01)
    assert flat.far_bytes > 2.5 * by_domain.far_bytes


@pytest.mark.parametrize(
    ("dispatch", "products", "combine", "expected"),
    [
        (1, 10, 1, 1 + 4 * 10 + 1),  # the exchanges hide
        (10, 1, 10, 8 * 10),  # the products hide, but for the first ones, which a dispatch hides
        (0, 3, 0, 12),
    ],
)
def test_a_pipeline_hides_what_is_shorter(dispatch, products, combine, expected):
    assert pipeline(dispatch, products, combine, 4) == expected


def test_one_chunk_is_no_pipeline():
    assert pipeline(2, 3, 4, 1) == 9
    traffic = traffic_of(8, 8)
    made = overlapped(MACHINE, SHAPE, traffic, 1, transport="peer")
    assert made == predict(MACHINE, SHAPE, traffic, transport="peer")


def test_chunks_help_where_exchanges_take_long_and_not_where_they_are_short():
    far, near = traffic_of(16, 8), traffic_of(2, 8)
    assert (
        overlapped(MACHINE, SHAPE, far, 4, transport="alltoall").us
        < 0.95 * predict(MACHINE, SHAPE, far, transport="alltoall").us
    )
    assert overlapped(MACHINE, SHAPE, near, 8, transport="peer").us > predict(MACHINE, SHAPE, near, transport="peer").us


def test_gradients_of_groups_that_repeat_cross_the_network():
    size = 2 * 3 * 4096 * 1024 * 64 / 8
    assert gradient_us(MACHINE, SHAPE, 8, 8) == 0
    assert gradient_us(MACHINE, SHAPE, 8, 32) == pytest.approx(2 * 0.75 * size / 45e3)


def test_counts_scale_with_the_tokens():
    traffic = traffic_of(8, 8, tokens=512)
    twice = traffic.scaled(1024)
    assert (twice.tokens == 2 * traffic.tokens).all()
    assert twice.imbalance == traffic.imbalance


def test_the_correction_finds_the_speed_to_several_ranks(tmp_path):
    of_two, of_four = (RESULTS / f"h200x{ranks}-expert-parallel.jsonl" for ranks in (2, 4))
    machine = calibrated(RESULTS, of_two)
    several = {"peer": 0.8, "nccl": 0.7}
    slower = {name: dataclasses.replace(getattr(machine, name), several=share) for name, share in several.items()}
    slower = dataclasses.replace(machine, **slower)
    about, *lines = of_four.read_text().splitlines()
    made = [each for each in map(json.loads, lines) if each["what"] in WHATS]
    for each, exchange in zip(made, exchanges_of(load_exchanges(of_four)[1]), strict=True):
        each["us"] = predicted_us(slower, exchange)
    path = tmp_path / "four.jsonl"
    path.write_text("\n".join([about, *map(json.dumps, made)]))
    found = corrected(machine, path)
    assert (found.peer.several, found.nccl.several) == pytest.approx((0.8, 0.7), rel=1e-3)
    assert corrected(found, path) == found
