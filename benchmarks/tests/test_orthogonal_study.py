"""The study of orthogonalized votes: which runs it makes, and what it decides from records."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from programs import imported_by_name
from quality_records import Archive, best_at

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

MODULES = (
    "study_path",
    *("schedule", "variants", "feedback", "masked", "scoring", "methods"),
    *("runs", "archive", "work", "cells", "plan", "evidence", "images", "text", "sources"),
    *("settings", "design", "differences", "answers", "pictures", "pages", "reaching"),
    *("orthogonal_design", "orthogonal_answers", "orthogonal_pages"),
)
PROTOCOL = Path(__file__).resolve().parents[2] / "studies" / "orthogonal-protocol.md"
VOTES = "majority-orthogonal"
MEDIUM = {"width": 168, "layers": 3, "heads": 4, "context": 64}


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    with imported_by_name("quality", *MODULES) as found:
        yield found


def parts(quality: Any, *names: str) -> list[Any]:
    return [each for each in quality.orthogonal_design.ORTHOGONAL_PARTS if each.name in names]


def decide(quality: Any, score: Any, names: Sequence[str] | None = None) -> Any:
    archive = Archive(quality, score)
    archive.complete(parts(quality, *(names or quality.orthogonal_answers.NEEDED)))
    claims = quality.orthogonal_answers.list_orthogonal_claims(archive.find)
    return quality.orthogonal_answers.decide_recipe(claims)


def test_parts_are_those_of_the_protocol_in_its_order(quality: Any) -> None:
    table = PROTOCOL.read_text().partition("## Parts, in order")[2].partition("## ")[0]
    listed = re.findall(r"`(o-[a-z0-9-]+)`(?=[^|]*\|[^|\n]*\|$)", table, re.M)
    assert listed == [part.name for part in quality.orthogonal_design.ORTHOGONAL_PARTS]


def test_votes_that_lead_everywhere_become_the_recipe(quality: Any) -> None:
    answer = decide(quality, best_at((VOTES, -0.5)))
    assert (answer.text, len(answer.claims), answer.n_leading) == ("yes", 5, 5)


def test_nothing_is_decided_before_all_needed_parts_are_complete(quality: Any) -> None:
    needed = quality.orthogonal_answers.NEEDED
    for left_out in needed:
        names = [name for name in needed if name != left_out]
        assert decide(quality, best_at((VOTES, -0.5)), names).text == "not yet"


def test_a_lead_of_less_than_the_margin_on_text_decides_no(quality: Any) -> None:
    assert decide(quality, best_at((VOTES, -0.019))).text == "no"
    assert decide(quality, best_at((VOTES, -0.025))).text == "yes"


@pytest.mark.parametrize(("points", "text"), [(0.25, "yes"), (0.35, "no")])
def test_images_may_trail_by_the_margin_and_no_more(quality: Any, points: float, text: str) -> None:
    score = best_at((VOTES, -0.5))

    def but_images(run: Any) -> tuple[float, list[float]]:
        loss, units = score(run)
        is_worse = VOTES in run.method and run.task == "images"
        return loss, [unit + 0.5 + points for unit in units] if is_worse else units

    answer = decide(quality, but_images)
    assert answer.text == text
    assert [each.setting for each in answer.failing] == ([] if text == "yes" else ["images-3"])


def test_an_early_verdict_does_not_decide_no(quality: Any) -> None:
    """A lead that is not shown yet may be shown once other comparisons are complete."""
    score = best_at((VOTES, -0.05))

    def noisy(run: Any) -> tuple[float, list[float]]:
        loss, units = score(run)
        spread = 0.04 * (run.seed - 3) if VOTES in run.method else 0.0
        return loss, [unit + spread for unit in units]

    assert decide(quality, noisy, ["o-text"]).text == "not yet"
    assert decide(quality, noisy).text == "no"


def test_no_factor_is_advised_where_none_was_tried_everywhere(quality: Any) -> None:
    answers = quality.orthogonal_answers
    never = answers.RateCell("a", 4, 1.0, 9.0, dict.fromkeys(answers.FACTORS, math.inf))
    half = answers.RateCell("b", 4, 1.0, 0.5, {0.25: 0.1, 0.5: 0.0, 1.0: 0.2, 2.0: math.inf})
    assert answers.choose_factor([half]) == 0.5
    assert answers.choose_factor([half, never]) is None
    assert answers.choose_factor([]) is None


@pytest.mark.parametrize(("lost", "text"), [(0.009, "yes"), (0.011, "no")])
def test_every_second_step_is_an_option_if_it_loses_little(
    quality: Any, lost: float, text: str
) -> None:
    archive = Archive(quality, best_at(("-2-stale", lost), ("-2-lion", 0.1)))
    every = parts(quality, "o-every")
    first, *_ = quality.orthogonal_design.EVERY
    assert (
        quality.orthogonal_answers.decide_every(quality.orthogonal_answers.list_every(archive.find))
        == "not yet"
    )
    archive.complete(every)
    found = quality.orthogonal_answers.list_every(archive.find)
    assert found[0].method == first
    assert quality.orthogonal_answers.decide_every(found) == text


def test_text_with_32_workers_does_not_count(quality: Any) -> None:
    score = best_at((VOTES, -0.5))

    def but_32(run: Any) -> tuple[float, list[float]]:
        loss, units = score(run)
        is_worse = VOTES in run.method and run.workers == 32
        return loss, [unit + 1.0 for unit in units] if is_worse else units

    assert decide(quality, but_32).text == "yes"


def test_every_new_method_gets_as_many_decays_as_adamw(quality: Any) -> None:
    archive = Archive(quality, best_at())
    archive.complete(parts(quality, "o-means"))
    for family in ("orthogonal", "muon", "muon-sign"):
        trials = quality.design.choose_recipe(family, "text", archive.find).trials
        decays = {quality.methods.split_decay(name)[1] for name in trials}
        assert decays == {0.25, 1.0, 4.0}


def test_aim_has_five_seeds_of_votes_and_of_adamw(quality: Any) -> None:
    archive = Archive(quality, best_at())
    made = archive.complete(parts(quality, "o-aim"))
    runs = [run for run in made if run.steps == 4000 and run.network == MEDIUM]
    assert {(run.method.partition("-betas")[0], run.seed) for run in runs} == {
        (method, seed) for method in (VOTES, "global-adamw") for seed in range(1, 6)
    }


def test_rate_of_the_recipe_is_the_factor_of_adamws_that_loses_least(quality: Any) -> None:
    def score(run: Any) -> tuple[float, list[float]]:
        best = 5e-4 if VOTES in run.method else 1e-3
        loss = 2.0 + 0.1 * abs(torch.tensor(run.lr / best).log2().item())
        return loss, [loss, loss + 0.001]

    archive = Archive(quality, score)
    archive.complete(parts(quality, *quality.orthogonal_answers.NEEDED))
    cells = quality.orthogonal_answers.list_rate_cells(archive.find)
    assert {(cell.setting, cell.workers) for cell in cells} == {
        *(("text-small-1k", workers) for workers in (4, 8)),
        *((setting, 4) for setting in ("images-3", "text-medium-1k", "text-small-4k")),
    }
    assert quality.orthogonal_answers.choose_factor(cells) == 0.5
    assert all(cell.regrets[0.5] < 0.01 < cell.regrets[1.0] for cell in cells)


@pytest.mark.parametrize(("power", "text"), [(-1.0, "yes"), (0.0, "no"), (-2.0, "no")])
def test_factor_by_fan_in_is_taken_where_it_keeps_the_rate(
    quality: Any, power: float, text: str
) -> None:
    """The best rate goes with a power of the width, and the factor takes up half a power."""

    def score(run: Any) -> tuple[float, list[float]]:
        own = power + 0.5 * ("fan-in" in run.method)
        best = 1e-3 * (run.network.get("width", 64) / 64) ** own
        loss = 2.0 + 0.1 * abs(torch.tensor(run.lr / best).log2().item())
        return loss, [loss, loss + 0.001]

    archive = Archive(quality, score)
    archive.complete(parts(quality, "o-rates"))
    found = quality.orthogonal_answers.list_width_rates(archive.find)
    assert quality.orthogonal_answers.decide_fan_in(*found) == text


def test_report_shows_answers_rates_and_picture(quality: Any, tmp_path: Path) -> None:
    archive = Archive(quality, best_at((VOTES, -0.5)))
    archive.complete(parts(quality, *quality.orthogonal_answers.NEEDED))
    records = SimpleNamespace(read=archive.find)
    text = quality.orthogonal_pages.write_orthogonal_report(records, tmp_path).read_text()
    assert "| Does the recipe become orthogonalized votes? | yes | 5 | 5 | none |" in text
    assert "## Learning rate" in text
    assert (tmp_path / "orthogonal.png").stat().st_size > 0


def test_other_books_are_validated_and_tested_on(quality: Any, tmp_path: Path) -> None:
    text = quality.text
    names = {name for split in text.SPLITS for books in split for name in books}
    for number, name in enumerate(sorted(names)):
        words = bytes([65 + number]) * 100_000
        (tmp_path / f"{name}.txt").write_bytes(words)
    first, second = (text.Novels.read(tmp_path, context=8, split=split) for split in (0, 1))
    kept = [set(each.unique().tolist()) for each in (first.test, second.test)]
    assert not kept[0] & kept[1]
    assert kept[1] <= set(first.train.unique().tolist())
    assert not kept[1] & set(second.train.unique().tolist())


def test_rate_of_a_matrix_goes_by_its_fan_in(quality: Any) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 8), torch.nn.Linear(8, 64), torch.nn.Linear(64, 4)
    )
    run = quality.schedule.Run(lr=0.01, workers=2, steps=5, seed=0)
    name = quality.orthogonal_design.BY_FAN_IN
    groups = quality.methods.build_method(name, model, run).optimizer.param_groups
    factors = {
        tuple(param.shape): group.get("rate_factor", 1.0)
        for group in groups
        for param in group["params"]
    }
    assert factors[8, 16] == 2.0
    assert factors[64, 8] == pytest.approx(8**0.5)
    assert factors[4, 64] == 1.0  # the head is no hidden matrix
    decays = [group.get("rate_factor", 1.0) * group["weight_decay"] for group in groups]
    assert decays == pytest.approx([run.decay / run.lr] * len(groups))


def test_orthogonalizing_in_every_step_is_the_vote_of_the_library(quality: Any) -> None:
    """But for coins: no direction here is 0, and an odd number of workers has no ties."""
    run = quality.schedule.Run(lr=0.01, workers=3, steps=4, seed=0)

    def train(name: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 4, bias=False)),
            torch.nn.Linear(4, 3, bias=False),
        )
        method = quality.methods.build_method(name, model, run)
        chance = torch.Generator().manual_seed(1)
        for _ in range(3):
            for worker in range(3):
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=chance)
                model[2].weight.grad = None  # the mask on the head would toss coins
                method.collect(worker)
            method.step()
        return torch.cat([param.detach().flatten() for param in model[:2].parameters()])

    first, stale, lion, _ = quality.orthogonal_design.EVERY
    every = train(first)
    torch.testing.assert_close(every, train("majority-orthogonal-betas-90-95"))
    assert not torch.equal(every, train(stale))
    assert not torch.equal(train(stale), train(lion))
