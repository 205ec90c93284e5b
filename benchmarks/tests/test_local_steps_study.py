"""Votes every H steps in equal time: what is run, seconds, and the report."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlion_lab.training.methods import find_method
from local_study import Archive, best_at, imported_study, with_all

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

PROTOCOL = Path(__file__).resolve().parents[2] / "studies/local-steps-protocol.md"


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with imported_study() as found:
        yield found


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


@pytest.mark.smoke
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
        *("inner-tuning", "inner-8", "inner-32", "inner-8-long", "inner-32-long"),
    ]


def test_tuning_comes_before_what_it_decides(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.choices, "VOTES", ("scaled-plain", "estimate-1-plain"))
    monkeypatch.setattr(study.choices, "ALWAYS", ("global-adamw", "majority"))
    made = Archive(best_at()).complete(study, "text-tuning", "text-8", "text-8-long", at_once=1)
    kinds = [(not run.is_tuning, run.steps > 448) for run in made]
    assert kinds == sorted(kinds)
    assert {run.seed for run in made if run.is_tuning} == {0}
    assert {run.seed for run in made if not run.is_tuning} == {1, 2, 3}


def test_the_best_two_votes_are_reported_and_the_simplest(study: Any) -> None:
    factors = (("estimate-2-plain", -0.2), ("estimate-1-plain", -0.1))
    archive = Archive(best_at(*factors))
    archive.complete(study, "text-tuning")
    chosen = study.choices.choose_votes("text", archive.read)
    assert chosen == ["estimate-2-plain", "estimate-1-plain", "scaled-plain"]
    made = archive.complete(study, "text-8")
    local = {run.method for run in made if run.method.startswith("local-")}
    assert local == {f"local-8-{kind}" for kind in chosen}


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
    assert (len(study.choices.tune_votes("text", archive.read)) == 12) is is_run
    assert "scaled-plain" in study.choices.choose_votes("text", archive.read)


def test_a_vote_that_is_not_run_on_a_task_is_no_default(study: Any) -> None:
    def score(run: Any) -> float:
        better = -0.5 * ("estimate-2-nesterov" in run.method)
        worse = 0.5 * (run.task == "images" and "-nesterov" in run.method)
        return best_at(center={"images": 16e-3})(run) + better + worse

    archive = Archive(score)
    archive.complete(study, "text-tuning", "images-tuning")
    default = study.choices.choose_default(archive.read)
    assert len(default.scores) == 8
    assert default.chosen == "scaled-plain"


def test_no_rate_beyond_two_extensions_is_tried(study: Any) -> None:
    archive = Archive(best_at(center={"text": 1.0}))
    made = archive.complete(study, "text-tuning")
    rates = [run.lr for run in made if run.method == "diloco-8"]
    assert rates == [2e-3, 4e-3, 8e-3, 16e-3, 32e-3]


def test_what_the_library_no_longer_has_is_shown_and_not_run(study: Any) -> None:
    archive = Archive(best_at())
    assert not any("lion" in run.method for run in archive.complete(study, "text-tuning"))
    assert "majority-lion" not in study.choices.tune_votes("text", archive.read)
    cell = study.contest.make_local_cell("text", "majority-lion", archive.read)
    while wanted := study.cells.choose_rate(cell, archive.read).wanted:  # as it was run once
        for run in wanted:
            archive.add(run)
    assert "majority-lion" in study.choices.tune_votes("text", archive.read)
    assert "majority-lion" not in study.choices.choose_votes("text", archive.read)
    assert not archive.complete(study, "text-tuning")


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
}


@pytest.mark.parametrize(
    ("method", "seconds"),
    [
        ("global-adamw", 6.2),
        ("fp16-adamw", 3.2),
        ("majority-betas-90-95", 0.7),
        ("local-8-scaled-plain", 0.3),
        ("local-16-estimate-2-nesterov", 0.3),
        ("diloco-8-plain", 0.95),
        ("sparse-4", 0.3),
    ],
)
def test_a_step_pays_its_share_of_an_exchange(study: Any, method: str, seconds: float) -> None:
    pace = study.arrivals.find_pace(method, 448, BLOCKS)
    assert pace.seconds(100) == pytest.approx(100 * seconds)
    assert pace.step_at(pace.seconds(37.5)) == pytest.approx(37.5)


@pytest.mark.parametrize(("rank", "seconds"), [("-1", 0.3), ("", 0.4)])
def test_powersgd_pays_for_two_steps_in_32_bits(study: Any, rank: str, seconds: float) -> None:
    pace = study.arrivals.find_pace(f"powersgd{rank}-adamw", 448, BLOCKS)
    assert pace.seconds(100) == pytest.approx(2 * 6.2 + 98 * seconds)


def test_one_bit_adam_pays_for_its_warm_up(study: Any) -> None:
    pace = study.arrivals.find_pace("one-bit-adam", 100, BLOCKS)
    assert pace.seconds(10) == pytest.approx(10 * 6.2)
    assert pace.seconds(50) == pytest.approx(20 * 6.2 + 30 * 0.7)
    assert [pace.step_at(pace.seconds(n)) for n in (5, 20, 70)] == pytest.approx([5, 20, 70])


def read_traffic(study: Any, method: str, bits: float) -> Any:
    archive = Archive(best_at())
    cell = study.contest.make_cell("text", method)
    for run in archive.complete(study, "text-tuning", "text-8"):
        archive.found[run.name] |= {"bits_up": bits, "bits_down": bits}
    return study.arrivals.Entry.read(cell, archive.read).traffic


def test_one_bit_adam_sends_more_while_it_warms_up(study: Any) -> None:
    # 4 million parameters: 32 bits each way are 32 MB in each of 90 of 448 steps, and 1 bit 1 MB.
    traffic = read_traffic(study, "one-bit-adam", (90 * 32 + 358 * 1) / 448)
    assert traffic.at(10) == pytest.approx(10 * 32)
    assert traffic.at(448) == pytest.approx(90 * 32 + 358)
    steps = (5, 90, 91, 300)
    assert [traffic.step_at(traffic.at(n)) for n in steps] == pytest.approx(steps)


def test_other_methods_send_equally_much_in_each_step(study: Any) -> None:
    traffic = read_traffic(study, "majority", 1.0)
    assert traffic.at(10) == pytest.approx(10.0)
    assert traffic.step_at(25.0) == pytest.approx(25.0)


def test_the_table_and_the_picture_pay_for_the_warm_up(study: Any) -> None:
    archive = Archive(best_at())
    for run in archive.complete(study, "text-tuning", "text-8"):
        bits = (90 * 32 + 358) / 448 if run.method == "one-bit-adam" else 4.0
        archive.found[run.name] |= {"bits_up": bits, "bits_down": bits}
    entries = study.page.read_entries("text", archive)
    rows = {row[0]: row[1:] for row in study.page._tabulate_bytes(entries).rows}
    # 4 MB in each of 448 steps pay for 56 steps of the warm-up.
    assert rows["1-bit Adam"][:2] == ["7228", f"{4 - 2 * 56 / 448:.3f}"]
    panels = study.page._collect_panels(entries, {link: {} for link in study.page.LINK_TITLES})
    step_32 = panels["megabytes up and down"]["1-bit Adam"][1]
    assert step_32[0] == pytest.approx(32 * 32)


def test_only_the_exchange_of_ddp_can_hide(study: Any) -> None:
    hidden = partial(study.arrivals.find_pace, steps=100, hides=True)
    assert hidden("global-adamw", blocks=BLOCKS).seconds(2) == 12.0
    assert hidden("global-adamw", blocks=BLOCKS | {"mean": [0.1]}).seconds(2) == pytest.approx(0.4)
    assert hidden("fp16-adamw", blocks=BLOCKS).seconds(2) == pytest.approx(6.4)
    assert hidden("global-adamw", blocks={}) is None


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
        "VOTES": ("scaled-plain", "estimate-1-plain"),
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
    save = {"task": "text", "conditions": {"10mbit": {"cores": 2}}, "seconds": {"10mbit": blocks}}
    study.laboratory.save(tmp_path / "local_steps" / "seconds_text.json", save)
    text = study.page.write_report(records, tmp_path).read_text()
    assert "| text-8-long | 3 | 3 | 0 |" in text
    assert "**Seconds to DDP's loss at 10 Mbit/s**" in text
    assert (tmp_path / "local_steps_text.png").stat().st_size > 0


@pytest.mark.parametrize(
    "word",
    [
        *("local-8-scaled", "local-8-typo", "local-7-scaled-plain", "local-08-scaled-plain"),
        *("adamw", "sparse-8-plain", "sparse-0", "diloco-5", "local-8-majority-lion"),
        "local-8-majority-lion-0.0016",
    ],
)
def test_a_method_that_is_not_run_is_refused(
    study: Any, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study.program.main(["run", "--methods", "sparse-8", word])
    assert f"there is no method '{word}'" in capsys.readouterr().err


def test_a_report_without_records_says_that_nothing_is_known(study: Any, tmp_path: Path) -> None:
    records = SimpleNamespace(read={}.get, folder=tmp_path)
    text = study.page.write_report(records, tmp_path).read_text()
    assert "| at least 10 times as fast as DDP | not yet |" in text
    assert "Seconds have not been measured yet." in text
    assert "| text-tuning | 18 | 0 | 54 |" in text


def test_the_report_shows_seconds_on_a_core_where_they_were_measured(
    study: Any, tmp_path: Path
) -> None:
    save = {"task": "text", "conditions": {}, "seconds": {"10mbit": BLOCKS}}
    save["cpu_seconds"] = {"10mbit": {"sparse": [0.3, 0.1, 0.2]}}
    study.laboratory.save(tmp_path / "seconds_text.json", save)
    records = SimpleNamespace(read={}.get, folder=tmp_path)
    text = study.page.write_report(records, tmp_path).read_text()
    assert "| exchange: sparse | 0.4 (0.4 - 0.4); 0.2 |" in text
    assert "| exchange: signs | 0.5 (0.5 - 0.5) |" in text


def test_a_delay_hides_an_exchange_behind_local_steps(study: Any) -> None:
    late = importlib.import_module("late")
    seconds = {
        variant: late.Variant(*variant).seconds_of(80, compute_s=0.05, exchange_s=0.4)
        for variant in ((1, 0), (1, 4), (1, 7), (4, 0), (4, 1))
    }
    assert seconds == pytest.approx({(1, 0): 10, (1, 4): 8, (1, 7): 6.5, (4, 0): 16, (4, 1): 14})
    assert late.Variant(4, 1).method == "local-8-scaled-plain-parts-4-late-1"


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ({1: 51.0}, "lost"),
        ({1: None}, "lost"),
        ({1: 40.0}, "not yet"),
        ({1: 48.0, 2: 49.0, 3: 49.0}, "lost"),  # sooner, by less than 5 %
        ({1: 47.0, 2: 47.0, 3: 47.0}, "wins"),
    ],
)
def test_a_late_variant_wins_where_each_seed_is_sooner(
    study: Any, own: dict[int, float | None], verdict: str
) -> None:
    late = importlib.import_module("late")
    assert late.judge(own, {1: 50.0, 2: 50.0, 3: 50.0}) == verdict
