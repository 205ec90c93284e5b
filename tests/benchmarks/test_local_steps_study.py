"""Votes every H steps in equal time: what is run, what may be said, and the lab's exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlion.lab.training.methods import find_method
from local_study import imported_study

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

PROTOCOL = Path(__file__).resolve().parents[2] / "docs/explanation/local-steps-protocol.md"


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with imported_study() as found:
        yield found


Score = Callable[[Any], float]
"""The loss at the end of a run."""


def best_at(*factors: tuple[str, float], center: Mapping[str, float] | None = None) -> Score:
    """Score runs: rates near a center are best; a word in a name makes it better or worse."""

    def score(run: Any) -> float:
        best = (center or {}).get(run.task, 4e-3)
        loss = 2.0 + 0.1 * abs(math.log2(run.lr / best))
        return loss + sum(more for word, more in factors if word in run.method)

    return score


class Archive:
    """Records that end as a score says; curves fall to it in a straight line from 4."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self.found: dict[str, dict[str, Any]] = {}

    def read(self, name: str) -> Mapping[str, Any] | None:
        return self.found.get(name)

    def add(self, run: Any) -> None:
        end = self._score(run)
        record = {"diverged": None, "name": run.name, "bits_up": 1.0, "bits_down": 1.0}
        record |= {"parameters": 4_000_000, "validation": [[run.steps, end, 0.5]]}
        record["test_curve"] = [
            [step, 4 - (4 - end) * step / run.steps, 0.5] for step in range(0, run.steps + 1, 32)
        ]
        self.found[run.name] = record

    def complete(self, study: Any, *names: str, at_once: int | None = None) -> list[Any]:
        """Make every run that parts ask for; return them in order.

        Args:
            study: The modules.
            names: Of the parts.
            at_once: Runs to make before the list is asked for again; None for all of it.
        """
        parts = tuple(part for part in study.choices.PARTS if part.name in names)
        made: list[Any] = []
        while open_runs := study.choices.list_open_runs(parts, self.read)[:at_once]:
            for run in open_runs:
                self.add(run)
            made += open_runs
        return made


# What is run


def test_the_protocol_is_the_plan(study: Any) -> None:
    text = PROTOCOL.read_text()
    settings = study.contest.SETTINGS
    model = study.text.SmallGPT(**settings["text"].network)
    assert sum(param.numel() for param in model.parameters()) == 1_074_696
    for words in ("| 448 | 1,055 |", "1,056 steps", "4, 8, 16 and 32", "extended up to twice"):
        assert words in text
    assert [settings[task].steps for task in ("text", "images")] == [448, 1056]
    rules = text.partition("RULE is one of")[2].partition("OUTER")[0]
    assert all(f"`{rule}`" in rules for rule in study.contest.RULES)


@pytest.mark.parametrize("factor", [1, 3])
def test_every_score_follows_an_exchange_of_every_h(study: Any, factor: int) -> None:
    for setting in study.contest.SETTINGS.values():
        distance, rest = divmod(factor * setting.steps, factor * setting.evaluations)
        assert (rest, [distance % every for every in study.contest.PERIODS]) == (0, [0] * 4)


def test_all_methods_are_known_to_comparisons_or_to_the_study(study: Any) -> None:
    archive = Archive(best_at())
    made = archive.complete(study, "text-tuning")
    methods = {run.method for run in made}
    # Rank 4 has this name in the study's list alone.
    assert study.methods._UNDER_ADAMW["powersgd-adamw"].rank == 4
    assert "powersgd-adamw" in methods
    for method in methods - {"powersgd-adamw"}:
        assert find_method(method).name == method


def test_text_comes_first_and_then_images_at_the_first_h(study: Any) -> None:
    names = [part.name for part in study.choices.PARTS]
    assert names == [
        *("text-tuning", "text-8", "text-8-long"),
        *("images-tuning", "images-8", "images-8-long"),
        *("text-periods", "text-periods-long", "images-periods", "images-periods-long"),
    ]


def test_tuning_comes_before_what_it_decides(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.choices, "VOTES", ("scaled-plain", "majority-lion"))
    monkeypatch.setattr(study.choices, "ALWAYS", ("global-adamw", "majority"))
    made = Archive(best_at()).complete(study, "text-tuning", "text-8", "text-8-long", at_once=1)
    kinds = [(not run.is_tuning, run.steps > 448) for run in made]
    assert kinds == sorted(kinds)
    assert {run.seed for run in made if run.is_tuning} == {0}
    assert {run.seed for run in made if not run.is_tuning} == {1, 2, 3}


def test_the_best_two_votes_are_reported_and_the_simplest(study: Any) -> None:
    factors = (("estimate-2-plain", -0.2), ("majority-lion", -0.1))
    archive = Archive(best_at(*factors))
    archive.complete(study, "text-tuning")
    chosen = study.choices.choose_votes("text", archive.read)
    assert chosen == ["estimate-2-plain", "majority-lion", "scaled-plain"]
    made = archive.complete(study, "text-8")
    local = {run.method for run in made if run.method.startswith("local-")}
    outer = local - {"local-8-estimate-2-plain", "local-8-scaled-plain"}
    assert len(local) == 3
    assert outer.pop().startswith("local-8-majority-lion-")


@pytest.mark.parametrize(("behind", "is_run"), [(0.2, False), (0.05, True)])
def test_nesterovs_step_is_given_up_where_it_is_far_behind_with_two_rules(
    study: Any, behind: float, is_run: bool
) -> None:
    archive = Archive(best_at(("-nesterov", behind), ("residual-1-nesterov", 0.3)))
    made = archive.complete(study, "text-tuning", at_once=1)
    tuned = [run.method for run in made if run.method.endswith("-nesterov")]
    first = ["local-8-scaled-nesterov", "local-8-residual-1-nesterov"]
    assert [*dict.fromkeys(tuned)][:2] == first
    assert ("local-8-estimate-2-nesterov" in tuned) is is_run
    assert (len(study.choices.tune_votes("text", archive.read)) == 14) is is_run
    assert "scaled-plain" in study.choices.choose_votes("text", archive.read)


def test_a_vote_that_is_not_run_on_a_task_is_no_default(study: Any) -> None:
    def score(run: Any) -> float:
        better = -0.5 * ("estimate-2-nesterov" in run.method)
        worse = 0.5 * (run.task == "images" and "-nesterov" in run.method)
        return best_at(center={"images": 16e-3})(run) + better + worse

    archive = Archive(score)
    archive.complete(study, "text-tuning", "images-tuning")
    default = study.choices.choose_default(archive.read)
    assert len(default.scores) == 10
    assert default.chosen == "scaled-plain"


def test_no_rate_beyond_two_extensions_is_tried(study: Any) -> None:
    archive = Archive(best_at(center={"text": 1.0}))
    made = archive.complete(study, "text-tuning")
    rates = [run.lr for run in made if run.method == "diloco-8"]
    assert rates == [2e-3, 4e-3, 8e-3, 16e-3, 32e-3]


def test_an_outer_lion_is_tuned_at_the_rate_of_the_simplest_vote(study: Any) -> None:
    archive = Archive(best_at(center={"text": 8e-3}))
    made = archive.complete(study, "text-tuning")
    lions = [run for run in made if "feedback-2-lion" in run.method]
    assert {run.lr for run in lions} == {8e-3}
    rates = [float(run.method.rpartition("lion-")[2]) for run in lions]
    assert rates[:3] == [1.6e-3, 3.2e-3, 6.4e-3]


def test_longer_runs_and_other_periods_take_the_rate_of_the_first(study: Any) -> None:
    archive = Archive(best_at(center={"text": 8e-3}))
    archive.complete(study, "text-tuning")
    made = archive.complete(study, "text-8-long", "text-periods")
    assert not any(run.is_tuning for run in made)
    assert {run.lr for run in made if "scaled-plain" in run.method} == {8e-3}
    assert {run.method for run in made if run.steps == 1344} >= {"majority", "sparse-8", "diloco-8"}
    assert {run.method for run in made if "adam" in run.method} == {"powersgd-adamw"}
    assert {run.method for run in made if "sparse" in run.method and run.steps == 448} == {
        *("sparse-4", "sparse-16", "sparse-32")
    }


@pytest.mark.parametrize(
    ("better", "default"), [(-0.005, "scaled-plain"), (-0.2, "residual-1-plain")]
)
def test_the_simplest_vote_is_the_default_within_half_a_percent(
    study: Any, better: float, default: str
) -> None:
    archive = Archive(best_at(("residual-1-plain", better), center={"images": 16e-3}))
    archive.complete(study, "text-tuning")
    assert study.choices.choose_default(archive.read) is None
    archive.complete(study, "images-tuning")
    assert study.choices.choose_default(archive.read).chosen == default


# Seconds

BLOCKS = {
    "compute": [0.3, 0.1, 0.2],
    "mean": [6.0],
    "half": [3.0],
    "low rank": [0.1],
    "low rank 4": [0.2],
    "signs": [0.5],
    "sparse": [0.4],
    "majority": [0.5],
    "scaled": [0.8],
    "estimate-2": [1.6],
    "majority-lion": [0.7],
}


@pytest.mark.parametrize(
    ("method", "seconds"),
    [
        ("global-adamw", 6.2),
        ("fp16-adamw", 3.2),
        ("powersgd-1-adamw", 0.3),
        ("powersgd-adamw", 0.4),
        ("majority-betas-90-95", 0.7),
        ("local-8-scaled-plain", 0.3),
        ("local-16-estimate-2-nesterov", 0.3),
        ("local-4-majority-lion-0.001", 0.375),
        ("diloco-8-plain", 0.95),
        ("sparse-4", 0.3),
    ],
)
def test_a_step_pays_its_share_of_an_exchange(study: Any, method: str, seconds: float) -> None:
    pace = study.arrivals.find_pace(method, 448, BLOCKS)
    assert pace.seconds(100) == pytest.approx(100 * seconds)
    assert pace.step_at(pace.seconds(37.5)) == pytest.approx(37.5)


def test_one_bit_adam_pays_for_its_warm_up(study: Any) -> None:
    pace = study.arrivals.find_pace("one-bit-adam", 100, BLOCKS)
    assert pace.seconds(10) == pytest.approx(10 * 6.2)
    assert pace.seconds(50) == pytest.approx(20 * 6.2 + 30 * 0.7)
    assert [pace.step_at(pace.seconds(n)) for n in (5, 20, 70)] == pytest.approx([5, 20, 70])


def test_only_the_exchange_of_ddp_can_hide(study: Any) -> None:
    hidden = partial(study.arrivals.find_pace, steps=100, hides=True)
    assert hidden("global-adamw", blocks=BLOCKS).seconds(2) == 12.0
    assert hidden("global-adamw", blocks=BLOCKS | {"mean": [0.1]}).seconds(2) == pytest.approx(0.4)
    assert hidden("fp16-adamw", blocks=BLOCKS).seconds(2) == pytest.approx(6.4)
    assert hidden("global-adamw", blocks={}) is None


# What may be said


def judge(study: Any, score: Score, blocks: Mapping[str, list[float]]) -> Any:
    archive = Archive(score)
    archive.complete(study, "text-tuning", "text-8", "text-8-long")
    targets = study.arrivals.find_targets("text", archive.read)
    entries = study.page.read_entries("text", archive)
    return study.claims_made.judge(entries, targets[0.8], blocks)


def with_all(study: Any, **seconds: float) -> dict[str, list[float]]:
    """Return seconds of every exchange: those given, and a second for the others."""
    names = ("mean", "half", "low rank", "low rank 4", "signs", "sparse", "majority", "compute")
    every = (*names, *study.contest.RULES, *study.contest.LIONS)
    return {name: [seconds.get(name, 1.0)] for name in every}


@pytest.mark.parametrize(("mean_s", "answer"), [(100.0, "yes"), (9.0, "no")])
def test_ten_times_is_claimed_of_the_best_vote(study: Any, mean_s: float, answer: str) -> None:
    blocks = with_all(study, mean=mean_s, scaled=0.8)
    found = judge(study, best_at(("scaled-plain", -0.01)), blocks)
    assert (found.best, found.is_ten_times) == ("local-8-scaled-plain", answer)
    # DDP's 80 % of 448 steps, and as many in which the vote falls a little faster.
    reached = 0.8 * 448 * 2.0 / 2.01
    assert found.ratio == pytest.approx(0.8 * 448 * (1 + mean_s) / (reached * 1.1))
    assert (found.diloco, found.is_ahead) == ("diloco-8", "yes")


def test_a_seed_that_is_late_forbids_ten_times(study: Any) -> None:
    def score(run: Any) -> float:
        late = 1.2 if (run.seed, run.steps) == (3, 448) and "local" in run.method else 0.0
        late += 1.9 if run.steps > 448 else 0.0  # no longer run is of any help
        return best_at(("scaled-plain", -0.01))(run) + min(late, 1.9)

    found = judge(study, score, with_all(study, mean=100.0, scaled=0.8))
    assert found.is_ten_times == "no"


def test_a_longer_run_counts_where_it_is_sooner(study: Any) -> None:
    def score(run: Any) -> float:
        # Of local steps, only longer runs reach what DDP has reached.
        is_short = "local" in run.method and run.steps == 448
        return best_at(("scaled-plain", -0.01))(run) + 1.0 * is_short

    found = judge(study, score, with_all(study, mean=100.0, scaled=0.8))
    assert found.best == "local-8-scaled-plain, 3 x the steps"
    assert found.is_ten_times == "yes"


def test_diloco_that_is_sooner_forbids_ahead(study: Any) -> None:
    found = judge(study, best_at(("diloco-8", -1.0)), with_all(study, mean=1.0, scaled=0.8))
    assert found.is_ahead == "no"


def test_targets_are_those_of_each_seed(study: Any) -> None:
    archive = Archive(lambda run: 2.0 + 0.1 * run.seed)
    archive.complete(study, "text-tuning", "text-8")
    targets = study.arrivals.find_targets("text", archive.read)
    assert targets[1.0] == pytest.approx({1: 2.1, 2: 2.2, 3: 2.3})
    assert targets[0.8] == pytest.approx({seed: 4 - 0.8 * (2 - 0.1 * seed) for seed in (1, 2, 3)})


# The chain


def make_novels(study: Any) -> Any:
    windows = torch.randint(256, (64, 9), generator=torch.Generator().manual_seed(0)).byte()
    return study.text.Novels(windows.flatten(), windows[:32], windows[32:], "noise")


@pytest.mark.slow
def test_a_small_study_runs_from_tuning_to_its_page(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = {"width": 8, "layers": 1, "heads": 2, "context": 8}
    small = study.cells.Setting("text", 16, 8, 2, network)
    monkeypatch.setitem(study.contest.SETTINGS, "text", small)
    monkeypatch.setattr(study.contest, "MOST_RATES", 3)
    monkeypatch.setattr(study.contest, "WORKERS", 2)
    for name, kept in {
        "ALWAYS": ("global-adamw", "one-bit-adam"),
        "VOTES": ("scaled-plain", "feedback-2-lion"),
        "OTHERS": ("sparse",),
    }.items():
        monkeypatch.setattr(study.choices, name, kept)
    monkeypatch.setattr(study.page, "VOTES", study.choices.VOTES)
    novels, records = make_novels(study), study.archive.Records(tmp_path / "local_steps")

    class Data:
        tasks = ("text",)

        def build(self, config: Any) -> tuple[Any, str]:
            shared = {"workers": max(1, config.workers), "seed": config.seed, **network}
            task = study.text.TextTask(novels, batch=8, **shared)
            return task if config.is_tuning else study.curves.OnTest(task), "noise"

    study.program.run_all(records, Data(), ("text-tuning", "text-8", "text-8-long"))
    found = {record["config"]["method"]: record for record in records.read_all()}
    assert not any(record["diverged"] for record in found.values())
    assert {"local-8-scaled-plain", "sparse-8", "one-bit-adam"} <= set(found)
    reported = [each for each in records.read_all() if not each["config"]["is_tuning"]]
    assert {len(each["test_curve"]) for each in reported} == {2, 6}  # a score every 8 steps
    blocks = with_all(study, mean=9.0)
    save = {"task": "text", "conditions": {"cores": 2}, "seconds": {"10mbit": blocks}}
    study.laboratory.save(tmp_path / "local_steps" / "seconds_text.json", save)
    text = study.page.write_report(records, tmp_path).read_text()
    assert "| text-8-long | 3 | 3 | 0 |" in text
    assert "**Seconds to DDP's loss at 10 Mbit/s**" in text
    assert (tmp_path / "local_steps_text.png").stat().st_size > 0


def test_a_report_without_records_says_that_nothing_is_known(study: Any, tmp_path: Path) -> None:
    records = SimpleNamespace(read={}.get, folder=tmp_path)
    text = study.page.write_report(records, tmp_path).read_text()
    assert "| at least 10 times as fast as DDP | not yet |" in text
    assert "Seconds have not been measured yet." in text
    assert "| text-tuning | 18 | 0 | 54 |" in text


def test_whole_runs_are_beside_what_is_computed(study: Any, tmp_path: Path) -> None:
    config = {"method": "local-8-scaled-plain", "steps": 448, "seed": 1}
    whole = {"task": "text", "link": "10mbit", "config": config, "test_curve": [[448, 140.0, 2.0]]}
    study.laboratory.save(tmp_path / "whole_one.json", whole)
    save = {"task": "text", "conditions": {}, "seconds": {"10mbit": BLOCKS}}
    study.laboratory.save(tmp_path / "seconds_text.json", save)
    records = SimpleNamespace(read={}.get, folder=tmp_path)
    text = study.page.write_report(records, tmp_path).read_text()
    assert "| 140.0 | 134.4 | 2.0000 |" in text
