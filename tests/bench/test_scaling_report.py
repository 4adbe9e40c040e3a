# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Recommendations of scaling.md follow from the model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.layer.shapes import Shape
from benchmarks.scaling import report, tables
from benchmarks.scaling.grids import GRIDS, LARGEST_GB, Grid, Model, choice, memory_of
from benchmarks.scaling.layers import predict
from benchmarks.scaling.picture import draw, points
from benchmarks.scaling.traffic import Layout
from benchmarks.scaling.ways import (
    BY_DOMAIN,
    BY_HAND,
    DOMAINS,
    EXACT,
    EXACT8,
    EXACT_MAY_COST,
    FEW_TOKENS,
    MODELS,
    MOST_EXPERTS,
    PEER,
    PLACES,
    REDUCED,
    REDUCED8,
    TOKENS,
    WAYS,
    Predictor,
    groups,
)

MACHINE, TWO_MACHINES, EIGHT_MACHINES = Layout.of(8, 8), Layout.of(16, 8), Layout.of(64, 8)
LARGE = [model for model in MODELS if model != "Mixtral 8x7B"]


@pytest.fixture(scope="module")
def calculated():
    return report.predictor_of(report.RESULTS)


@pytest.fixture(scope="module")
def predictor(calculated):
    return calculated[0]


@pytest.fixture(scope="module")
def page(calculated):
    return report.page(*calculated)


def test_the_command_writes_the_page_and_the_picture(calculated, page, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "predictor_of", lambda results: calculated)
    monkeypatch.setattr(report, "page", lambda *arguments: page if arguments == calculated else "")
    assert report.main(tmp_path, tmp_path / "page.md") == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page
    assert (tmp_path / report.PICTURE).read_text(encoding="utf-8").count("<svg") == 1
    assert "wrote" in capsys.readouterr().out


def test_without_results_nothing_is_written(tmp_path, capsys):
    assert report.main(tmp_path, tmp_path / "page.md") == 1
    assert "nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_a_picture_has_no_line_twice(calculated, tmp_path):
    found = points(calculated[0], calculated[1].two)
    for lines in found.values():
        kept = [tuple(line.items()) for line in lines.values()]
        assert len(set(kept)) == len(kept)
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10000


# ---- what the page says in words


def all_groups():
    return [group for group in groups(MOST_EXPERTS) if group.ranks > 8]


@pytest.mark.parametrize("tokens", [TOKENS, FEW_TOKENS])
def test_in_one_machine_ranks_write_to_each_others_memory(predictor, tokens):
    assert predictor.choice(MACHINE, tokens).way == PEER
    for model in MODELS:
        assert predictor.fastest(model, MACHINE, tokens) == PEER


def test_few_ranks_of_several_machines_reduce_and_many_need_not(predictor):
    for group in all_groups():
        choice, saved = predictor.choice(group), predictor.slower(group, EXACT, REDUCED)
        if group.ranks == 16:
            assert (choice.way, saved > EXACT_MAY_COST) == (REDUCED, True), group
        else:
            assert saved < 1.5 * EXACT_MAY_COST, group
        assert predictor.choice(group).narrow == REDUCED8, group


def test_with_few_tokens_fewer_collectives_are_faster(predictor):
    for group in all_groups():
        assert predictor.choice(group, FEW_TOKENS).way == EXACT, group
        assert predictor.slower(group, REDUCED, EXACT, FEW_TOKENS) > 0
        assert predictor.slower(group, BY_HAND, EXACT, FEW_TOKENS) < 0


def test_groups_that_stay_in_a_domain_are_faster_than_wide_ones(predictor):
    for model in LARGE:
        experts = predictor.shape(model).experts
        for gpus in (256, 2048):
            in_machine, in_domain, wide, _ = (
                predictor.tflops(model, group, predictor.fastest(model, group), gpus)
                for group in (place.group(experts, gpus) for place in PLACES)
            )
            assert min(in_machine, in_domain) > 1.5 * wide


def test_skewed_routing_costs_more_than_any_choice_of_training(predictor):
    for model in LARGE:
        for group in tables.spread(predictor, model):
            way = predictor.choice(group).way
            even, *uneven = (predictor.layer(model, group, way, TOKENS, each).us for each in ("even", "zipf", "demo"))
            choices = [predictor.us(model, group, each) for each in predictor.in_package(group)]
            assert max(uneven) / even > max(choices) / min(choices)


def test_other_networks_do_not_change_the_choice_across_machines(predictor):
    text = tables.other_machines(predictor, "DeepSeek-V3").splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text]
    assert len(rows) == 5
    assert {row[1].split(", ")[1] for row in rows} == {"`reduced`"}
    assert {row[2].split(", ")[1] for row in rows} == {"`exact`"}


def test_what_the_package_lacks_would_help_across_machines(predictor):
    for model in LARGE:
        best = predictor.us(model, TWO_MACHINES, predictor.fastest(model, TWO_MACHINES))
        assert predictor.us(model, TWO_MACHINES, BY_DOMAIN) < 0.8 * best
        best = predictor.us(model, EIGHT_MACHINES, predictor.fastest(model, EIGHT_MACHINES))
        assert predictor.overlap(model, EIGHT_MACHINES, REDUCED8)[1].us < 0.92 * best


# ---- what must be so whatever the numbers are


def pairs(predictor):
    """Groups of all models."""
    return [(model, group) for model in MODELS for group in groups(min(64, predictor.shape(model).experts))]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_more_bytes_are_never_faster(predictor, way):
    rng = np.random.default_rng(0)
    for model, group in pairs(predictor):
        if way not in predictor.ways(group):
            continue
        how = {"transport": way.transport, "combine": way.combine, "payload": way.payload}
        shape, traffic = predictor.shape(model), predictor.traffic(model, group)
        source, target = rng.integers(group.ranks, size=2)
        more = {name: getattr(traffic, name).astype(float) for name in ("rows", "tokens", "of_domains")}
        more["rows"][source, target] += 999
        more["tokens"][source, target] += 999
        more["of_domains"][source, target // group.domain] += 999
        wider = shape._replace(hidden=shape.hidden + 128)
        base = predict(predictor.machine, shape, traffic, **how)
        for other, of in ((traffic._replace(**more), shape), (traffic.scaled(TOKENS + 1), shape), (traffic, wider)):
            made = predict(predictor.machine, of, other, **how)
            assert made.us >= base.us, (model, group)
            assert made.sent_bytes >= base.sent_bytes, (model, group)


def test_a_slower_network_is_never_faster(predictor):
    network = predictor.machine.network
    for changed in ({"gbps": 0.9 * network.gbps}, {"us": network.us + 1}, {"message_us": network.message_us + 1}):
        other = predictor.on(dataclasses.replace(predictor.machine, network=dataclasses.replace(network, **changed)))
        for model, group in pairs(predictor):
            for way in predictor.ways(group):
                before, after = (each.us(model, group, way) for each in (predictor, other))
                assert after > before if group.domains > 1 else after == before, (model, group, way)


def test_float8_never_sends_more_bytes_than_bfloat16(predictor):
    for model, group in pairs(predictor):
        for narrow, wide in ((EXACT8, EXACT), (REDUCED8, REDUCED)):
            few, many = (predictor.layer(model, group, each) for each in (narrow, wide))
            assert few.sent_bytes < many.sent_bytes
            assert few.far_bytes <= many.far_bytes


def test_tokens_never_send_more_bytes_than_rows_and_wider_groups_not_fewer(predictor):
    for model, group in pairs(predictor):
        tokens, rows = (predictor.layer(model, group, each).sent_bytes for each in (EXACT, BY_HAND))
        assert tokens < 1.02 * rows  # tokens carry the numbers of their experts
    for model in LARGE:
        sizes = [predictor.layer(model, each, REDUCED).sent_bytes for each in groups(64, DOMAINS[:1])]
        assert sizes == sorted(sizes)


def test_peer_needs_one_domain_and_the_package_one_machine(predictor):
    for group in groups(MOST_EXPERTS):
        assert (PEER in predictor.ways(group)) == (group.domains == 1)
        assert (PEER in predictor.in_package(group)) == (group.ranks <= 8)
    with pytest.raises(ValueError, match="transport 'peer' needs one domain"):
        predictor.layer("DeepSeek-V3", TWO_MACHINES, PEER)


def test_groups_have_an_expert_for_each_rank():
    assert [group.ranks for group in groups(8)] == [8]
    assert groups(128) == [Layout(8, 8), Layout(16, 8), Layout(64, 8), Layout(128, 8), *groups(128, [72])[1:]]
    assert groups(128, [72])[1:] == [Layout(16, 16), Layout(64, 64), Layout(128, 64)]
    for place in PLACES:
        for gpus in (8, 64, 2048):
            group = place.group(128, gpus)
            assert 128 % group.ranks == 0
            assert group.ranks <= min(place.most, gpus)


def test_gradients_are_averaged_where_groups_repeat(predictor):
    assert predictor.gradient_us("DeepSeek-V3", MACHINE, 8) == 0
    few, many = (predictor.gradient_us("DeepSeek-V3", MACHINE, gpus) for gpus in (16, 2048))
    assert 0 < few < many < 2 * few
    assert predictor.tflops("DeepSeek-V3", MACHINE, PEER, 2048) < predictor.tflops("DeepSeek-V3", MACHINE, PEER, 8)


def test_a_model_without_a_trace_is_named(calculated):
    with pytest.raises(ValueError, match="DeepSeek-V3 must have a recorded trace of 8 of 256 experts, but has none"):
        Predictor(calculated[0].machine, []).layer("DeepSeek-V3", MACHINE, PEER, TOKENS, "demo")


def test_changes_of_time_are_shown_as_percent():
    assert [tables.percent(each) for each in (0.1, -0.004, 0.004, -0.05)] == ["+10 %", "0 %", "0 %", "-5 %"]


def test_models_have_the_parameters_that_their_names_say(predictor):
    totals = {name: model.parameters(predictor.shape(name)) / 1e9 for name, model in GRIDS.items()}
    assert totals == {"ERNIE-300B": pytest.approx(300, rel=0.005), "DeepSeek-V3": pytest.approx(671, rel=0.005)}


def test_the_memory_of_a_small_grid_is_that_of_counting_by_hand():
    """Two stages of two layers, one of them dense, on 256 ranks: 16 copies of 8 ranks with an expert each."""
    model = Model(4, 1, attention=1000, shared=2, vocabulary=10, embeddings=2, dense_inner=0, source="")
    memory = memory_of(model, Shape(3, 5, 7, 8, 2), Grid(2, MACHINE))
    experts, dense = 2 * 3 * 5 * 7, 2 * (1000 + 3 * 5 * 2 + 5 * 8) + 10 * 5
    assert memory.parameters == 6 * (experts + dense)
    assert memory.states == 12 * (experts / 16 + dense / 128)
    tokens, rows = 2 * 3 * 5, 4 * 3 * 2 * 7
    assert (memory.kept, memory.kept_x) == (2 * 2 * (2 * tokens + rows), 2 * 2 * 2 * tokens)


def test_the_chosen_grid_is_the_fastest_that_fits_and_stands_in_the_page(predictor, page):
    for name, model in GRIDS.items():
        for domain in DOMAINS:
            grid, keep = choice(predictor, name, domain)
            assert memory_of(model, predictor.shape(name), grid).gigabytes(keep) <= LARGEST_GB
            assert f"`pp_degree={grid.stages}`, groups of {grid.group.ranks} and" in " ".join(page.split())


def test_a_stage_more_waits_more_and_keeps_fewer_parameters(predictor):
    shape, model = predictor.shape("DeepSeek-V3"), GRIDS["DeepSeek-V3"]
    found = [
        (grid.bubble, -memory_of(model, shape, grid).parameters) for grid in (Grid(n, MACHINE) for n in (1, 2, 4, 8))
    ]
    assert found == sorted(found)
    assert found[0][0] == 0
