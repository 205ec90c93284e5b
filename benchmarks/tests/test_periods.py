"""Votes every H steps: what is run and in which order, who has won, and what the lab times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cluster import run_workers
from distlion.votes import MajorityVote
from distlion_lab.baselines.virtual import VirtualBaseline
from distlion_lab.training.methods import find_method
from distlion_lab.training.workers import MethodRun
from programs import BENCHMARKS, imported_by_name, imported_modules

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

with imported_modules(BENCHMARKS / "study", "scaled_votes") as (scaled_votes,):
    build_scaled = scaled_votes.build_scaled

MODULES = (
    "target_path",
    "study_path",
    "schedule",
    "variants",
    "feedback",
    "scoring",
    "scaled_votes",
    "methods",
    "runs",
    "archive",
    "work",
    "cells",
    "plan",
    "evidence",
    "images",
    "text",
    "settings",
    "curves",
    "host",
    "laboratory",
    "drawing",
    "outcome",
    "design",
    "local_host",
    "results",
    "picture",
    "tables",
)
# Sums of a few float32 in another order.
TOLERANCE = 1e-6


@contextmanager
def imported_periods() -> Iterator[Any]:
    """The modules of the program and of those that it is made of."""
    with imported_by_name("periods", *MODULES) as found:
        yield found


@pytest.fixture(scope="module")
def periods() -> Iterator[Any]:
    with imported_periods() as found:
        yield found


# What is run


def test_the_network_is_that_of_the_protocol(periods: Any) -> None:
    model = periods.text.SmallGPT(**periods.design.TEXT.network)
    assert sum(param.numel() for param in model.parameters()) == 1_074_696


def test_every_score_is_taken_after_an_exchange_of_every_method(periods: Any) -> None:
    setting = periods.design.TEXT
    distance, rest = divmod(setting.steps, setting.evaluations)
    assert rest == 0
    assert all(distance % every == 0 for every in periods.design.PERIODS)


def test_all_methods_of_the_plan_are_known_to_comparisons(periods: Any) -> None:
    for way in periods.design.WAYS:
        for outer in periods.design.OUTERS:
            cell = periods.design.make_local_cell(way, 32, outer)
            run = MethodRun([("w", nn.Parameter(torch.ones(3)))], 0.1, 0.0, 2, 32, 0)
            assert build_scaled(cell.method, run) or find_method(cell.method)


def tuned(periods: Any, cell: Any, losses: dict[float, float]) -> dict[str, Any]:
    """Return records of tuning runs at rates, by name."""
    return {
        cell.tuning(rate).name: {"diverged": None, "validation": [[1, loss, 0.5]]}
        for rate, loss in losses.items()
    }


def tune_votes(periods: Any, *, nesterov: float, plain: float) -> dict[str, Any]:
    """Return records of both outer steps, whose best validation losses are given."""
    design = periods.design
    first = design.make_local_cell("majority-every", 8, "")
    second = design.make_local_cell("majority-every", 8, "-plain")
    records = tuned(periods, first, {2e-3: nesterov, 4e-3: 9.0, 1e-3: 9.0, 8e-3: 9.0})
    return records | tuned(periods, second, {4e-3: 9.0, 8e-3: plain, 2e-3: 9.0, 16e-3: 9.0})


def test_everything_is_tuned_before_anything_is_reported(periods: Any) -> None:
    runs = periods.design.list_open_runs({}.get)
    assert all(run.is_tuning and run.seed == 0 for run in runs)
    # AdamW, two votes in each step, and two outer steps for votes and for means: three rates each.
    assert len({run.name for run in runs}) == len(runs) == 21
    assert not any("-32" in run.method for run in runs)


@pytest.mark.parametrize(("nesterov", "plain", "outer"), [(2.0, 2.1, ""), (2.1, 2.0, "-plain")])
def test_the_outer_step_is_chosen_by_validation(
    periods: Any, nesterov: float, plain: float, outer: str
) -> None:
    records = tune_votes(periods, nesterov=nesterov, plain=plain)
    assert periods.design.choose_outer("majority-every", records.get) == outer
    assert periods.design.choose_outer("diloco", records.get) is None


def test_more_local_steps_take_the_outer_step_and_begin_around_the_rate_of_fewer(
    periods: Any,
) -> None:
    records = tune_votes(periods, nesterov=2.1, plain=2.0)
    runs = periods.design.list_open_runs(records.get)
    mine = [run for run in runs if run.method.startswith("majority-every")]
    tuning = [(run.method, run.lr) for run in mine if run.is_tuning]
    assert tuning == [("majority-every-32-plain", lr) for lr in (4e-3, 8e-3, 16e-3)]
    reported = [(run.method, run.lr, run.seed) for run in mine if not run.is_tuning]
    assert reported == [("majority-every-8-plain", 8e-3, seed) for seed in (1, 2, 3)]
    assert [run.is_tuning for run in runs] == sorted((r.is_tuning for r in runs), reverse=True)


def test_a_reported_run_leaves_a_curve_of_test_data_and_its_bits(
    periods: Any, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(256, (64, 9), generator=generator).byte()
    novels = periods.text.Novels(windows.flatten(), windows[:32], windows[32:], "noise")
    network = {"width": 8, "layers": 1, "heads": 2, "context": 8}
    cell = periods.design.make_local_cell("majority-every", 8, "-plain")
    config = replace(
        cell.config(1e-3, 1, is_tuning=False), steps=16, evaluations=2, batch=8, network=network
    )

    class Data:
        def build(self, config: Any) -> tuple[Any, str]:
            task = periods.text.TextTask(novels, batch=8, workers=8, seed=1, **network)
            return periods.curves.OnTest(task), "noise"

    records = periods.archive.Records(tmp_path)
    assert periods.work.perform(records, config, partial(periods.curves.make, Data()))
    record = records.read(config.name)
    assert [row[0] for row in record["test_curve"]] == [8, 16]
    tensors = len(periods.text.SmallGPT(**network).state_dict())
    bits = (1 + 32 * tensors / record["parameters"]) / 8
    assert record["bits_up"] == record["bits_down"] == pytest.approx(bits)


# What the records say

BLOCKS = {
    "none": [0.3, 0.1, 0.2],
    "global-adamw": [6.0],
    "majority": [0.5],
    "exchange of votes": [0.8, 0.8],
    "exchange of means": [6.4],
    "period of votes": [2.52],
    "period of means": [8.8],
}


def test_a_step_takes_a_local_step_and_its_share_of_an_exchange(periods: Any) -> None:
    find = periods.results.find_step_s
    assert find("majority-every-8-plain", BLOCKS) == pytest.approx(0.2 + 0.8 / 8)
    assert find("diloco-32", BLOCKS) == pytest.approx(0.2 + 6.4 / 32)
    assert find("global-adamw", BLOCKS) == 6.0
    assert find("majority", BLOCKS) == 0.5
    assert find("majority-betas-90-95", BLOCKS) == 0.5
    assert find("majority", {}) is None


def test_hosts_with_cores_of_their_own_are_spared_the_wait_for_others(
    periods: Any, tmp_path: Path
) -> None:
    found = {"hosts": 8, "conditions": {"cores": 2}, "seconds": BLOCKS}
    periods.laboratory.save(tmp_path / "steps_10mbit.json", found)
    blocks = periods.results.read_blocks(tmp_path, "10mbit", own_cores=True)
    # Of a local step of 0.2 s, 3/4 are a wait.
    assert blocks["none"] == pytest.approx([0.15, -0.05, 0.05])
    assert blocks["majority"] == pytest.approx([0.35])
    assert blocks["exchange of votes"] == BLOCKS["exchange of votes"]
    assert periods.results.read_blocks(tmp_path, "10mbit") == BLOCKS


def test_losses_between_scores_lie_on_straight_lines(periods: Any) -> None:
    curve = [[32, 3.0, 0.1], [64, 2.0, 0.2]]
    found = [periods.results.find_loss(curve, step) for step in (31, 32, 40, 64, 99)]
    assert found == [None, 3.0, pytest.approx(2.75), 2.0, 2.0]


@pytest.mark.parametrize(
    ("votes", "other", "won"),
    [
        ((1, 2, 3), (2, 3, 4), True),
        ((1, 2, 3), (2, 3, math.inf), True),
        ((1, 2, 3), (9, 1.9, 9), False),
        ((1, 2, math.inf), (math.inf, math.inf, math.inf), False),
    ],
)
def test_votes_have_won_if_they_are_first_with_every_seed(
    periods: Any, votes: tuple[float, ...], other: tuple[float, ...], won: bool
) -> None:
    slower = dict.fromkeys((1, 2, 3), 99.0)
    others = [slower, dict(enumerate(other, 1))]
    assert periods.results.has_won(dict(enumerate(votes, 1)), others) is won


def make_method(periods: Any, method: str, end: float, *, diverged: int | None = None) -> Any:
    """Return a method whose seeds fall from 4 nats in a straight line, and one may diverge."""
    cell = periods.design.make_cell(method)
    choice = periods.cells.Choice({}, (), 1e-3, False)
    curves = {seed: [[0, 4.0, 0.0], [100, end, 0.0]] for seed in (1, 2, 3)}
    title, lost = periods.results.make_title(method), frozenset({diverged} - {None})
    row = periods.outcome.Row(cell, title, choice, curves, lost)
    record = {"bits_up": 1.0, "bits_down": 1.0, "parameters": 4_000_000, "diverged": None}
    records = dict.fromkeys((1, 2, 3), record)
    if diverged is not None:
        records[diverged] = record | {"bits_up": 0.0, "bits_down": 0.0, "diverged": 3}
    ending = periods.evidence.Ending(cell, choice, records)
    return periods.results.Method(row, ending)


def make_methods(periods: Any, *, votes: float) -> list[Any]:
    ends = {"global-adamw": 2.0, "majority": 2.2, "majority-betas-90-95": 2.1}
    ends |= {"diloco-8": 2.2, "diloco-32": 2.4}
    ends |= {"majority-every-8": votes, "majority-every-32": 3.5}
    return [make_method(periods, method, end) for method, end in ends.items()]


@pytest.mark.parametrize(("votes", "verdict"), [(2.2, "won"), (2.9, "not won")])
def test_a_link_says_who_is_first_there(periods: Any, votes: float, verdict: str) -> None:
    target = periods.settings.Target("close", 3.0)
    _, _, lines = periods.tables.tabulate_winners(
        make_methods(periods, votes=votes), target, find_blocks
    )
    link, mine, others, ratio, found = lines[0]
    assert (link, found) == ("10 Mbit/s", verdict)
    # 0.3 s for each of 100 / (4 - end) steps; of the others 0.4 s for each of 62.5, the least.
    assert mine == f"votes every 8 steps, {0.3 * 100 / (4 - votes):.1f} s"
    assert others == "means every 32 steps, 25.0 s"
    assert ratio == f"{25 / (30 / (4 - votes)):.2f}x"
    assert lines[1][1] == "missing"


def test_a_seed_that_diverged_reaches_no_target_and_wins_nothing(periods: Any) -> None:
    methods = make_methods(periods, votes=2.2)
    place = [method.name for method in methods].index("majority-every-8")
    methods[place] = make_method(periods, "majority-every-8", 2.2, diverged=1)
    target = periods.settings.Target("close", 3.0)
    reached = methods[place].seconds(target, BLOCKS)
    assert [math.isfinite(reached[seed]) for seed in (1, 2, 3)] == [False, True, True]
    assert methods[place].bits == 2.0
    _, _, lines = periods.tables.tabulate_winners(methods, target, find_blocks)
    assert lines[0][-1] == "not won"


def test_only_the_closer_target_as_measured_decides(periods: Any) -> None:
    def head(name: str, **more: str) -> str:
        target = periods.settings.Target(name, 3.0)
        return periods.tables.tabulate_winners([], target, find_blocks, **more)[1][-1]

    assert head("close") == "votes"
    assert head("rough") == head("close", condition=", estimated") == "votes (decides nothing)"


def find_blocks(link: str) -> dict[str, list[float]]:
    """Only one link has been timed."""
    return BLOCKS if link == "10mbit" else {}


def test_equal_bytes_are_those_of_whole_runs(periods: Any) -> None:
    methods = make_methods(periods, votes=2.2)
    _, head, lines = periods.tables.tabulate_bytes(methods)
    # 448 steps of 2 bits for 4 million parameters.
    assert head[1] == "448 MB: all of majority vote in each step"
    assert lines[1][1] == "2.200"


def test_a_run_that_takes_less_than_another_is_marked_where_it_has_ended(periods: Any) -> None:
    cheap, dear = (make_method(periods, name, 2.2) for name in ("majority", "diloco-8"))
    for record in dear.ending.records.values():
        record["bits_up"] = 3.0
    _, head, lines = periods.tables.tabulate_bytes([cheap, dear])
    assert head[1:] == [
        "448 MB: all of majority vote in each step",
        "896 MB: all of means every 8 steps",
    ]
    assert lines[0][1:] == ["2.200", "2.200 (end)"]


def test_a_method_without_any_curve_yet_has_no_loss_at_equal_bytes(periods: Any) -> None:
    known, open_one = (make_method(periods, name, 2.2) for name in ("majority", "diloco-8"))
    open_one.row.curves.clear()
    _, _, lines = periods.tables.tabulate_bytes([known, open_one])
    assert lines[0][1] == "2.200"
    assert set(lines[1][1:]) == {"-"}


def test_periods_are_compared_with_the_sum_of_their_parts(periods: Any) -> None:
    _, _, lines = periods.tables.tabulate_steps([], find_blocks)
    votes, means = lines[-2:]
    assert votes[1] == "+5.0%"  # 2.52 s against 8 x 0.2 + 0.8
    assert means[1] == "+10.0%"  # 8.8 s against 8 x 0.2 + 6.4
    assert votes[2] == "missing"


def test_a_report_without_records_says_what_is_missing(periods: Any, tmp_path: Path) -> None:
    records = periods.archive.Records(tmp_path / "periods")
    text = periods.tables.write_report(records, tmp_path)
    assert "the outer step of votes is not chosen" in text
    assert "majority vote in each step: 0 of 3 seeds" in text
    assert "steps at 10 Mbit/s are not timed" in text
    assert (tmp_path / "periods.png").exists()


# What the lab times

SHAPES = ((4, 5), (7,))


def draw_tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def agree_for_real(rank: int, world_size: int, way: str) -> list[Tensor]:
    """Return what the hosts of the lab would step on, in a worker's process."""
    with imported_periods() as found:
        anchor = [nn.Parameter(each) for each in draw_tensors(9)]
        agree = getattr(found.local_host, f"agree_by_{way}")(anchor)
        with torch.no_grad():
            agree(draw_tensors(10 + rank))  # of which nothing may be left in the next one
            return [each.clone() for each in agree(draw_tensors(rank))]


def build_virtual(way: str, params: list[nn.Parameter]) -> Any:
    if way == "mean":
        return VirtualBaseline(torch.optim.SGD(params, 1.0), workers=3)
    named = [(str(place), param) for place, param in enumerate(params)]
    run = MethodRun(named, lr=1.0, weight_decay=0.0, workers=3, steps=1, seed=0)
    return scaled_votes.ScaledVotes(
        run, rule=MajorityVote(), make_optimizer=lambda _: torch.optim.SGD(params, 1.0)
    )


@pytest.mark.parametrize("way", ["votes", "mean"])
def test_hosts_agree_on_what_virtual_workers_agree_on(way: str) -> None:
    params = [nn.Parameter(each) for each in draw_tensors(9)]
    virtual = build_virtual(way, params)
    for rank in range(3):
        for param, delta in zip(params, draw_tensors(rank), strict=True):
            param.grad = delta
        virtual.collect(rank)
    virtual.step()
    for outcomes in run_workers(agree_for_real, 3, way):
        for param, start, outcome in zip(params, draw_tensors(9), outcomes, strict=True):
            torch.testing.assert_close(param.detach(), start - outcome, rtol=0, atol=TOLERANCE)
