"""Votes every H steps in equal time: what the report may claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from local_study import Archive, Score, best_at, imported_study, with_all

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with imported_study() as found:
        yield found


def judge(
    study: Any,
    score: Score,
    blocks: Mapping[str, list[float]],
    missing: Callable[[Any], bool] = lambda run: False,
    more: tuple[str, ...] = (),
) -> Any:
    archive = Archive(score)
    made = archive.complete(study, "text-tuning", "text-8", "text-8-long", *more)
    for run in made:
        if not run.is_tuning and missing(run):
            del archive.found[run.name]
    targets = study.arrivals.find_targets("text", archive.read)
    entries = study.page.read_entries("text", archive)
    return study.claims_made.judge(entries, targets[0.8], blocks)


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


def test_diloco_of_another_h_forbids_ahead(study: Any) -> None:
    score = best_at(("scaled-plain", -0.01), ("diloco-32", -1.0))
    blocks = with_all(study, mean=1.0, scaled=0.8)
    assert judge(study, score, blocks).is_ahead == "yes"
    found = judge(study, score, blocks, more=("text-periods", "text-periods-long"))
    assert (found.diloco, found.is_ahead) == ("diloco-32", "no")


@pytest.mark.parametrize("method", ["diloco-8", "diloco-8-plain"])
@pytest.mark.parametrize("steps", [448, 1344])
def test_nothing_is_ahead_of_half_a_diloco(study: Any, method: str, steps: int) -> None:
    found = judge(
        study,
        best_at(("scaled-plain", -0.01)),
        with_all(study, mean=100.0, scaled=0.8),
        lambda run: (run.method, run.steps, run.seed) == (method, steps, 3),
    )
    assert (found.is_ten_times, found.diloco, found.is_ahead) == ("yes", None, "not yet")


def test_no_claim_is_judged_before_all_votes_are_there(study: Any) -> None:
    found = judge(
        study,
        best_at(("scaled-plain", -0.01), ("estimate-2-plain", -0.005)),
        with_all(study, mean=100.0, scaled=0.8),
        lambda run: ("estimate-2-plain" in run.method, run.steps, run.seed) == (True, 448, 3),
    )
    assert found.best == "local-8-scaled-plain"
    assert (found.is_ten_times, found.is_ahead) == ("not yet", "not yet")


def test_ten_times_is_judged_without_longer_runs_and_says_so(study: Any) -> None:
    score = best_at(("scaled-plain", -0.01), ("estimate-2-plain", -0.005))
    blocks = with_all(study, mean=100.0, scaled=0.8)
    assert judge(study, score, blocks).ten_times == "yes"
    found = judge(study, score, blocks, lambda run: "local" in run.method and run.steps > 448)
    assert found.ten_times.startswith("yes, without longer runs of ")
    assert "local-8-scaled-plain" in found.ten_times
    assert "local-8-estimate-2-plain" in found.ten_times


def test_targets_are_those_of_each_seed(study: Any) -> None:
    archive = Archive(lambda run: 2.0 + 0.1 * run.seed)
    archive.complete(study, "text-tuning", "text-8")
    targets = study.arrivals.find_targets("text", archive.read)
    assert targets[1.0] == pytest.approx({1: 2.1, 2: 2.2, 3: 2.3})
    assert targets[0.8] == pytest.approx({seed: 4 - 0.8 * (2 - 0.1 * seed) for seed in (1, 2, 3)})
