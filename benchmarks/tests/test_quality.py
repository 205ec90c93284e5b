"""The comparison with AdamW: what is run, what may be said of it, and its methods."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from programs import imported_by_name
from quality_records import Archive, best_at

pytest.importorskip("matplotlib")
stats = pytest.importorskip("scipy.stats")

MODULES = (
    "study_path",
    *("schedule", "variants", "feedback", "masked", "scoring", "methods"),
    *("runs", "archive", "work", "cells", "plan", "evidence", "images", "text", "sources"),
    *("settings", "design", "differences", "answers", "pictures", "pages", "reaching"),
)
PROTOCOL = Path(__file__).resolve().parents[2] / "studies" / "quality-protocol.md"
# Float32 sums in another order.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    """The modules of the program."""
    with imported_by_name("quality", *MODULES) as found:
        yield found


def part(quality: Any, name: str) -> Any:
    return next(each for each in quality.design.PARTS if each.name == name)


# What is run


@pytest.mark.smoke
def test_parts_are_those_of_the_protocol_in_its_order(quality: Any) -> None:
    table = PROTOCOL.read_text().partition("## Order and budget")[2]
    assert re.findall(r"^\| `([a-z-]+)`", table, re.M) == [p.name for p in quality.design.PARTS]


def test_steps_of_settings_are_those_of_the_protocol(quality: Any) -> None:
    text = PROTOCOL.read_text()
    for words in ("1,000, 4,000, 16,000", "| 1,000, 4,000 |", "1,055", "3,516", "10,547"):
        assert words in text
    names = {name for each in quality.design.PARTS for name in each.settings}
    settings = quality.settings.SETTINGS.items()
    steps = [setting.steps for name, setting in settings if name in names]
    assert steps == [1000, 4000, 16000, 1000, 4000, 1000, 1055, 3516, 10547]


def test_decay_is_tried_only_with_the_betas_that_won(quality: Any) -> None:
    archive = Archive(quality, best_at(("betas-90-99", -0.3), ("decay-4", -0.2)))
    made = archive.complete([part(quality, "text-base")])
    decays = {run.method for run in made if "decay" in run.method and "adamw" in run.method}
    assert decays == {f"global-adamw-betas-90-99-decay-{factor}" for factor in ("025", "4")}
    recipe = quality.design.choose_recipe("adamw", "text", archive.find)
    assert recipe.method == "global-adamw-betas-90-99-decay-4"


def test_every_family_gets_as_many_decays_as_adamw(quality: Any) -> None:
    archive = Archive(quality, best_at())
    made = archive.complete([part(quality, "text-base")])
    for family in quality.settings.FAMILIES.values():
        tried = {run.method for run in made if run.method.startswith(family.candidates[0])}
        assert len({name for name in tried if "-decay-" in name}) >= 2


def test_recipe_of_the_base_is_run_in_longer_settings(quality: Any) -> None:
    archive = Archive(quality, best_at(("betas-90-99", -0.3), ("decay-4", -0.2)))
    made = archive.complete([part(quality, "text-base"), part(quality, "text-longest")])
    adamw = [run for run in made if run.steps == 16000 and "adamw" in run.method]
    assert {run.method for run in adamw} == {"global-adamw-betas-90-99-decay-4"}
    assert sorted(run.seed for run in adamw) == [1, 2, 3]


def test_longest_settings_have_the_rate_of_the_next_shorter_one(quality: Any) -> None:
    def score(run: Any) -> tuple[float, list[float]]:
        best = 4e-3 if run.steps == 4000 else 1e-3
        return 2.0 + abs(math.log2(run.lr / best)), [2.0] * 8

    archive = Archive(quality, score)
    made = archive.complete([part(quality, "text-base"), part(quality, "text-longest")])
    assert {run.lr for run in made if run.steps == 16000} == {4e-3}


def test_five_seeds_where_claims_are_decided(quality: Any) -> None:
    archive = Archive(quality, best_at())
    made = archive.complete([part(quality, "images-base")])
    seeds = {run.seed for run in made if run.method == quality.settings.CAUTIOUS}
    assert seeds == {0, 1, 2, 3, 4, 5}


# The page


@pytest.mark.slow
def test_the_page_is_what_the_program_writes(quality: Any) -> None:
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    folders = (results / "runs", results / quality.pages.CONTROLS)
    finds = (quality.archive.Records(folder).read for folder in folders)
    blocks = list(quality.pages._lay_out(*finds))
    page = quality.pages.render_markdown(blocks)
    assert (results / "quality.md").read_text("utf-8") == page


# What may be said


def test_interval_and_p_value_are_those_of_a_t_test_where_seeds_vary_most(quality: Any) -> None:
    by_seed = np.array([0.3, 0.1, 0.5, 0.2])
    half, p = quality.differences.spread(np.repeat(by_seed[:, None], 6, axis=1))
    expected = stats.ttest_1samp(by_seed, 0.0)
    low, high = expected.confidence_interval(0.95)
    assert half == pytest.approx((high - low) / 2)
    assert p == pytest.approx(expected.pvalue)


def test_interval_and_p_value_are_those_over_units_where_these_vary_most(quality: Any) -> None:
    units = np.array([1.0, -0.5, 0.7, 0.9, -0.2, 0.4])
    half, p = quality.differences.spread(np.repeat(units[None], 3, axis=0))
    error = units.std(ddof=1) / math.sqrt(6)
    assert half == pytest.approx(stats.norm.ppf(0.975) * error)
    assert p == pytest.approx(2 * stats.norm.sf(units.mean() / error))


@pytest.mark.parametrize("seed", range(5))
def test_discoveries_are_those_of_scipy(quality: Any, seed: int) -> None:
    p_values = np.random.default_rng(seed).beta(0.3, 1.0, 20)
    limit = quality.differences.find_limit(list(p_values))
    adjusted = stats.false_discovery_control(p_values)
    assert list(p_values <= limit) == list(adjusted <= 0.05)


def test_no_discovery_among_large_p_values(quality: Any) -> None:
    assert quality.differences.find_limit([0.2, 0.9]) < 0


def difference(quality: Any, mean: float, half: float, p: float) -> Any:
    """A complete difference on text, whose margin is 0.01."""
    cell = SimpleNamespace(setting=quality.settings.SETTINGS["text-small-1k"])
    ending = SimpleNamespace(cell=cell, is_whole=True)
    return quality.differences.Difference(ending, ending, 5, mean, mean - half, mean + half, p)


@pytest.mark.parametrize(
    ("mean", "half", "p", "verdict"),
    [
        (0.002, 0.005, 0.4, "matches"),
        (-0.002, 0.001, 0.001, "matches"),  # shown, and within the margin
        (0.05, 0.01, 0.001, "trails"),
        (-0.05, 0.01, 0.001, "leads"),
        (0.05, 0.06, 0.2, "inconclusive"),
        (math.inf, math.inf, 0.0, "trails"),
    ],
)
def test_verdict(quality: Any, mean: float, half: float, p: float, verdict: str) -> None:
    (decided,) = quality.differences.decide([difference(quality, mean, half, p)])
    assert decided.verdict.value == verdict


def test_difference_that_one_test_alone_would_show_is_lost_among_many(quality: Any) -> None:
    many = [difference(quality, 0.05, 0.06, 0.9) for _ in range(19)]
    decided = quality.differences.decide([difference(quality, 0.05, 0.04, 0.04), *many])
    assert decided[0].verdict.value == "inconclusive"


# Defaults


def answers(quality: Any, *factors: tuple[str, float], parts: Sequence[str]) -> dict[str, str]:
    archive = Archive(quality, best_at(*factors))
    chosen = [part(quality, name) for name in parts]
    archive.complete(chosen)
    claims = quality.answers.list_claims(archive.find)
    return {each.question.split()[1]: each.text for each in quality.answers.list_answers(claims)}


def test_short_betas_that_lead_everywhere_become_the_default(quality: Any) -> None:
    found = answers(quality, ("majority-betas-90-95", -0.5), parts=quality.settings.NEEDED)
    assert found["betas"] == "yes"
    assert found["cautious"] == "no"  # of the winning betas' votes, those without a mask lead


def test_no_default_is_decided_before_the_parts_that_it_needs(quality: Any) -> None:
    found = answers(quality, ("majority-betas-90-95", -0.5), parts=("text-base",))
    assert found["betas"] == "not yet"


def test_one_cell_that_is_worse_by_more_than_the_margin_decides_no(quality: Any) -> None:
    score = best_at(("majority-betas-90-95", -0.5))

    def but_one(run: Any) -> tuple[float, list[float]]:
        loss, units = score(run)
        is_worse = (run.method, run.workers, run.task) == ("majority-betas-90-95", 8, "text")
        return loss, [unit + 1.0 for unit in units] if is_worse else units

    archive = Archive(quality, but_one)
    archive.complete([part(quality, name) for name in quality.settings.NEEDED])
    betas, *_ = quality.answers.list_answers(quality.answers.list_claims(archive.find))
    assert (betas.text, [each.cell.workers for each in betas.failing]) == ("no", [8])


def test_masks_at_the_counter_become_a_rule_where_they_lead_with_32_workers(quality: Any) -> None:
    found = answers(quality, ("masked", -0.5), parts=("text-base", "images-base", "workers"))
    assert found["a"] == "yes"
    worse = answers(quality, ("masked", 0.5), parts=("text-base", "images-base", "workers"))
    assert worse["a"] == "no"


def test_report_names_what_leads(quality: Any, tmp_path: Path) -> None:
    archive = Archive(quality, best_at(("majority-betas-90-95", -0.5)))
    archive.complete([part(quality, "text-base")])
    path = quality.pages.write_report(SimpleNamespace(read=archive.find), tmp_path)
    row = next(line for line in path.read_text().splitlines() if "95 - majority |" in line)
    assert row.endswith("| leads |")
    assert (tmp_path / "quality.png").stat().st_size > 0


def test_report_says_what_one_bit_in_the_reply_costs(quality: Any, tmp_path: Path) -> None:
    archive = Archive(quality, best_at(("masked-coin", 0.25)))
    archive.complete([quality.design.REPLIES])
    path = quality.pages.write_report(SimpleNamespace(read=archive.find), tmp_path)
    text = path.read_text()
    assert "Text, 32 workers, 5 seeds: with a coin" in text
    assert "two bits down: +0.250 nats, +0.250 to +0.250." in text


def test_steps_to_a_close_target_lie_on_the_line_between_scores(quality: Any) -> None:
    archive = Archive(quality, best_at(("cautious", 0.5)))
    names = ("text-base", "images-base", "text-longer", "images-longer", "images-longest")
    archive.complete([part(quality, name) for name in names])
    reached = list(quality.reaching.list_reached(archive.find))
    found = {(each.setting, each.method): each.describe() for each in reached}
    adamw = next(words for (_, method), words in found.items() if method.startswith("global-adamw"))
    assert adamw == "3,960 (3,960 to 3,960)"  # the loss falls by 1 from step 2,000 on
    cautious = quality.settings.CAUTIOUS
    assert found["text-small-4k", cautious] == "0 of 5 seeds reach it"
    assert found["images-30", cautious] == "10,020 (10,020 to 10,020)"
    assert {setting for setting, _ in found} == {"text-small-4k", "images-30"}


def test_votes_that_diverged_reach_no_target_but_are_listed(quality: Any) -> None:
    archive = Archive(quality, best_at(("cautious", math.inf)))
    archive.complete([part(quality, name) for name in ("text-base", "text-longer")])
    found = {each.method: each.describe() for each in quality.reaching.list_reached(archive.find)}
    assert found[quality.settings.CAUTIOUS] == "0 of 5 seeds reach it"


# Methods


def run_of(quality: Any, **changes: Any) -> Any:
    return replace(quality.schedule.Run(lr=0.01, workers=3, steps=10, seed=1), **changes)


def drive(method: Any, params: Sequence[nn.Parameter], steps: int, workers: int) -> np.ndarray:
    """Give seeded gradients, and return them (steps, workers, n)."""
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(steps, workers, params[0].numel(), generator=generator)
    for step in range(steps):
        for worker in range(workers):
            params[0].grad = grads[step, worker].view_as(params[0]).clone()
            method.collect(worker)
        method.step()
    return grads.double().numpy()


def test_mask_at_the_counter_keeps_elements_whose_majorities_differ(quality: Any) -> None:
    param = nn.Parameter(torch.zeros(200))
    run = run_of(quality)
    method = quality.methods.build_method("masked-betas-90-95", _hold(param), run)
    grads = drive(method, [param], 4, 3)
    x, momenta = np.zeros(200), np.zeros((3, 200))
    for step_grads in grads:
        directions = 0.9 * momenta + 0.1 * step_grads
        momenta = 0.95 * momenta + 0.05 * step_grads
        voted, fresh = np.sign(directions).sum(0), np.sign(step_grads).sum(0)
        x = (1 - run.decay) * x - 0.01 * np.sign(voted) * (voted * fresh > 0)
    np.testing.assert_allclose(param.detach().numpy(), x, atol=TOLERANCE)
    assert np.count_nonzero(x) > 0
    assert (method.up_bits_per_parameter, method.down_bits_per_parameter) == (2.0, 2.0)


def test_coin_moves_what_the_mask_at_the_counter_would_hold(quality: Any) -> None:
    ends, run = [], run_of(quality, workers=4)  # of whose signs two and two cancel
    for name in ("masked", "masked-coin"):
        param = nn.Parameter(torch.zeros(200))
        method = quality.methods.build_method(f"{name}-betas-90-95", _hold(param), run)
        drive(method, [param], 1, 4)
        ends.append(param.detach().clone())
        down = method.down_bits_per_parameter
    held, moved = ends[0] == 0, ends[1]
    assert down == 1.0
    assert 0 < int(held.sum()) < 200
    assert torch.equal(moved[~held], ends[0][~held])
    np.testing.assert_allclose(moved[held].abs().numpy(), 0.01, atol=TOLERANCE)
    assert moved[held].unique().numel() == 2


def test_one_bit_adam_is_adamw_while_it_warms_up(quality: Any) -> None:
    ours, theirs = nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))
    run = run_of(quality, steps=20)
    method = quality.methods.build_method("one-bit-adam", _hold(ours), run)
    grads = drive(method, [ours], 4, 3)  # a fifth of the steps
    adamw = torch.optim.AdamW([theirs], run.lr, weight_decay=run.decay / run.lr)
    for step_grads in grads:
        theirs.grad = torch.from_numpy(step_grads.mean(0)).float()
        adamw.step()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_one_bit_adam_sends_signs_and_keeps_the_rest_afterwards(quality: Any) -> None:
    """An independent float64 loop, with its own errors and a second moment that stays."""
    param, n = nn.Parameter(torch.zeros(40)), 40
    run = run_of(quality, steps=10)
    method = quality.methods.build_method("one-bit-adam", _hold(param), run)
    grads = drive(method, [param], 6, 3)

    def compress(values: np.ndarray) -> np.ndarray:
        return np.linalg.norm(values) / math.sqrt(n) * np.where(values < 0, -1.0, 1.0)

    x, m, v = np.zeros(n), np.zeros(n), np.zeros(n)
    errors, server = np.zeros((3, n)), np.zeros(n)
    for step, step_grads in enumerate(grads):
        if step < 2:
            mean = step_grads.mean(0)
            m, v = 0.9 * m + 0.1 * mean, 0.999 * v + 0.001 * mean**2
        else:
            rest = 0.9 * m + 0.1 * step_grads + errors
            sent = np.stack([compress(each) for each in rest])
            errors = rest - sent
            total = sent.mean(0) + server
            m = compress(total)
            server = total - m
        root = np.sqrt(v / (1 - 0.999 ** min(step + 1, 2))) + 1e-8
        x = (1 - run.decay) * x - run.lr * (m / (1 - 0.9 ** (step + 1))) / root
    np.testing.assert_allclose(param.detach().numpy(), x, rtol=1e-3, atol=1e-5)


def test_decay_at_the_end_of_a_name_multiplies_it(quality: Any) -> None:
    weights = []
    for name in ("majority", "majority-decay-4", "majority-decay-025"):
        param = nn.Parameter(torch.ones(8))
        method = quality.methods.build_method(name, _hold(param), run_of(quality, workers=1))
        (group,) = method.optimizer.param_groups
        weights.append(group["weight_decay"])
    assert weights == pytest.approx([0.01, 0.04, 0.0025])


def _hold(param: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", param)
    return module
