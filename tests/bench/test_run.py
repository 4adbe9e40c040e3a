# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""A run checks before it times, takes turns between implementations, and fills all fields of a row."""

from __future__ import annotations

import pytest

from benchmarks.kernels.device import Body, Implementation, Unsupported
from benchmarks.kernels.operators import minimum_bytes
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.run import Runner, Settings
from benchmarks.kernels.shapes import SHAPES, Case, Operation, Shape

from .fake_device import COPY_GBPS, FakeDevice, implementation

PLAIN, WEIGHTED = Operation("unpermute", "plain"), Operation("unpermute", "weighted")
CASE = Case(Shape("small", 40, 3, 7, 16), "uniform")


def measure(device, cases=(CASE,), operations=(PLAIN,), **settings):
    runner = Runner(device, device.implementations, Settings(modes=("graph",), **settings), COPY_GBPS)
    reported = []
    rows = runner.measure(cases, operations, reported.append)
    assert reported == rows
    return {row.impl: row for row in rows}


def test_a_wrong_result_is_not_timed():
    device = FakeDevice([implementation("wrong", error=1e-3), implementation("right")])
    rows = measure(device)
    assert rows["wrong"].failed
    assert rows["wrong"].check == "failed: out: something else"
    assert rows["wrong"].us is None
    assert rows["right"].us == 10.0
    assert {name for name, _, _ in device.sampled} == {"right"}


def test_an_implementation_that_breaks_is_reported_and_the_others_are_timed():
    def prepare(operation, inputs):
        def run():
            raise RuntimeError("no such kernel")

        return Body(run)

    rows = measure(FakeDevice([Implementation("broken", ("unpermute:plain",), prepare), implementation("right")]))
    assert rows["broken"].check == "failed: no such kernel"
    assert rows["right"].us == 10.0


def test_what_cannot_do_a_problem_says_why_and_fails_nothing():
    def prepare(operation, inputs):
        raise Unsupported("no padding rows")

    row = measure(FakeDevice([Implementation("picky", ("*",), prepare)]))["picky"]
    assert row.check == "skipped: no padding rows"
    assert row.us is None
    assert not row.failed


def test_the_others_are_measured_after_one_that_cannot_do_the_problem():
    def prepare(operation, inputs):
        raise Unsupported("no padding rows")

    device = FakeDevice([Implementation("picky", ("*",), prepare), implementation("right")])
    rows = measure(device)
    assert rows["picky"].us is None
    assert rows["right"].us == 10.0


def test_a_mode_that_fails_leaves_the_other_modes():
    class OnlyEager(FakeDevice):
        def capture(self, body, mode):
            if mode == "graph":
                raise RuntimeError("no graph")
            return super().capture(body, mode)

    device = OnlyEager([implementation("a")])
    runner = Runner(device, device.implementations, Settings(modes=("graph", "eager")), COPY_GBPS)
    rows = {row.mode: row for row in runner.measure([CASE], [PLAIN], lambda row: None)}
    assert (rows["graph"].check, rows["graph"].us) == ("failed: no graph", None)
    assert (rows["eager"].check, rows["eager"].us) == ("bits", 10.0)


def test_memory_is_given_back_after_each_operation_and_each_case():
    released = []

    class Counting(FakeDevice):
        def release(self):
            released.append(len(self.sampled))

    device = Counting([implementation("a")])
    runner = Runner(device, device.implementations, Settings(modes=("graph",), rounds=1), COPY_GBPS)
    runner.measure([CASE, CASE], [PLAIN, WEIGHTED], lambda row: None)
    assert released == [1, 2, 2, 3, 4, 4]


def test_operations_that_are_not_offered_have_no_row():
    device = FakeDevice([implementation("sums", operations=("unpermute:*",)), implementation("other", operations=())])
    rows = measure(device, operations=[PLAIN, Operation("permute", "bf16")])
    assert list(rows) == ["sums"]


def test_samples_are_taken_in_turns():
    device = FakeDevice([implementation("a"), implementation("b")])
    rows = measure(device, samples=7, rounds=3)
    assert device.sampled == [("a", True, 3), ("b", True, 3)] * 3
    assert rows["a"].samples == 9


def test_cold_and_warm_are_rows_of_their_own():
    device = FakeDevice([implementation("a")])
    runner = Runner(device, device.implementations, Settings(modes=("graph", "eager"), colds=(True, False)), COPY_GBPS)
    rows = runner.measure([CASE], [PLAIN], lambda row: None)
    assert [(row.mode, row.cold) for row in rows] == [
        ("graph", True),
        ("graph", False),
        ("eager", True),
        ("eager", False),
    ]


def test_a_row_relates_its_time_to_bytes_copy_and_probe():
    row = measure(FakeDevice([implementation("a")], {"a": 16.0}))["a"]
    expected = minimum_bytes(PLAIN, make_problem(CASE)).total
    assert row.min_bytes == expected
    assert row.gbps == pytest.approx(expected / 16.0 / 1e3)
    assert row.frac_copy == pytest.approx(row.gbps / COPY_GBPS)
    assert (row.probe, row.probe_us, row.frac_probe) == ("reduce", 8.0, 0.5)
    assert (row.tokens, row.topk, row.experts, row.hidden, row.buffer_rows) == (40, 3, 7, 16, 120)
    assert row.launches == 2


def test_without_probes_a_row_has_no_ceiling():
    row = measure(FakeDevice([implementation("a")]), probes=False)["a"]
    assert row.probe is None
    assert row.frac_probe is None


# A shape of the published table, small enough to be summed here.
PUBLISHED = Case(SHAPES["tileops-32"], "uniform")


def test_published_times_are_scaled_by_the_copy_speed():
    device = FakeDevice([])
    row = measure(device, [PUBLISHED], [WEIGHTED])["paddle (published, scaled)"]
    assert row.us == pytest.approx(28.4 * 4230 / COPY_GBPS)
    assert row.check == "published"
    assert "4.23 TB/s" in row.note
    assert row.frac_copy == pytest.approx(row.min_bytes / row.us / 1e3 / COPY_GBPS)


@pytest.mark.parametrize(
    "case",
    [PUBLISHED._replace(alignment=128), PUBLISHED._replace(routing="zipf"), CASE],
    ids=["padding", "routing", "shape"],
)
def test_published_times_stand_only_beside_the_case_they_are_about(case):
    assert measure(FakeDevice([]), [case], [WEIGHTED]) == {}
