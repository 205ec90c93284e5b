"""Inner optimizers in the study of local steps: what is run, seconds, and what may be said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion.local.inner_optimizers import InnerOptimizers
from distlion.optim import Lion
from local_study import Archive, best_at, imported_study, with_all

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

PROTOCOL = Path(__file__).resolve().parents[2] / "studies/local-steps-protocol.md"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
PARTS = ("inner-tuning", "inner-8", "inner-32", "inner-8-long", "inner-32-long")
NEW = (
    "local-8-scaled-plain-over-muon",
    "local-8-residual-2-plain-over-muon",
    "diloco-8-plain-over-muon",
    "local-8-scaled-plain-over-grouped-lion",
    "local-8-residual-2-plain-over-grouped-lion",
)
SMALL = {"width": 8, "layers": 1, "heads": 2, "context": 8}


def score_at_centers(run: Any) -> float:
    """Score runs: the center of the rates is best, and so is the two-bit vote, as it was."""
    center = 1e-3 if run.method.endswith("-over-grouped-lion") else 4e-3
    return best_at(("residual-2-plain", -0.2), center={"text": center})(run)


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with imported_study() as found:
        yield found


# What is run


def test_the_protocol_names_the_methods_and_the_number_of_runs(study: Any) -> None:
    text = PROTOCOL.read_text().partition("## Inner optimizers that orthogonalize")[2]
    archive = Archive(score_at_centers)
    archive.complete(study, "text-tuning", "text-8")
    # Of longer runs, these two were complete when the part was added.
    for run in study.choices.PARTS[2].list_open(archive.read):
        if run.method in ("local-8-scaled-plain", "diloco-8-plain"):
            archive.add(run)
    counts = {name: len(archive.complete(study, name)) for name in PARTS}
    assert counts == dict(zip(PARTS, (15, 15, 24, 18, 24), strict=True))
    for name in ("`-over-muon`", "`-over-grouped-lion`", "`match_rms_adamw`", "H = 8 and 32"):
        assert name in text
    assert "| `inner-tuning` | 15, 1 more for each edge |" in text
    for name in PARTS[1:]:
        assert f"| `{name}` | {counts[name]} |" in text


def test_all_inner_optimizers_are_tuned_at_the_first_h_alone(study: Any) -> None:
    archive = Archive(best_at())
    made = archive.complete(study, "inner-tuning")
    assert {run.seed for run in made} == {0}
    assert all(run.is_tuning and run.steps == 448 and run.workers == 8 for run in made)
    adamw = {"local-8-scaled-plain", "local-8-residual-2-plain", "diloco-8-plain"}
    assert {run.method for run in made} == {*NEW, *adamw}
    first = {m: [run.lr for run in made if run.method == m][:3] for m in (NEW[0], NEW[3])}
    assert first == {NEW[0]: [2e-3, 4e-3, 8e-3], NEW[3]: [5e-4, 1e-3, 2e-3]}


def test_other_periods_and_longer_runs_take_the_rate_of_the_first(study: Any) -> None:
    archive = Archive(best_at(center={"text": 8e-3}))
    made = archive.complete(study, *PARTS)
    later = [run for run in made if not run.is_tuning]
    assert {run.lr for run in later if "muon" in run.method} == {8e-3}
    assert {run.steps for run in later} == {448, 1344}
    assert {run.seed for run in later} == {1, 2, 3}
    assert not any("lion" in run.method and "diloco" in run.method for run in made)
    assert all(
        int(run.method.split("-")[1]) in (8, 32) and study.contest.is_run(run.method)
        for run in later
    )


def test_runs_over_adamw_are_those_of_the_first_parts(study: Any) -> None:
    archive = Archive(best_at())
    archive.complete(study, "text-tuning", "text-8", "text-periods")
    made = archive.complete(study, "inner-tuning", "inner-32")
    shared = [run.method for run in made if "-over-" not in run.method]
    # The two-bit vote is not among the best two here.
    assert set(shared) == {"local-32-residual-2-plain"}


def test_claims_of_the_first_parts_do_not_know_them(study: Any) -> None:
    archive = Archive(best_at())
    archive.complete(study, "text-tuning", "text-8", *PARTS)
    entries = study.page.read_entries("text", archive)
    assert not any("-over-" in entry.method for entry in entries)


@pytest.mark.parametrize(
    "word",
    [
        *("local-16-scaled-plain-over-muon", "local-8-estimate-1-plain-over-muon"),
        *("diloco-8-plain-over-grouped-lion", "diloco-8-over-muon", "sparse-8-over-muon"),
        *("majority-over-muon", "local-8-scaled-plain-over-lion", "global-adamw-over-muon"),
    ],
)
def test_an_inner_optimizer_that_is_not_compared_is_refused(
    study: Any, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study.program.main(["run", "--methods", word])
    assert f"there is no method '{word}'" in capsys.readouterr().err


# The optimizers


def build(study: Any, method: str) -> Any:
    model = study.text.SmallGPT(**SMALL)
    run = study.schedule.Run(lr=4e-3, workers=2, steps=16, seed=0)
    return model, study.methods.build_method(method, model, run)


def test_matrices_are_hidden_ones_and_the_embedding_is_the_head(study: Any) -> None:
    model, method = build(study, "local-8-scaled-plain-over-muon")
    inner = method.optimizer
    assert isinstance(inner, InnerOptimizers)
    muon, adamw = inner.optimizers
    (matrices,) = muon.param_groups
    assert [tuple(each.shape) for each in matrices["params"]] == [
        *((24, 8), (8, 8), (32, 8), (8, 32))
    ]
    assert isinstance(muon, torch.optim.Muon)
    assert (matrices["adjust_lr_fn"], matrices["momentum"]) == ("match_rms_adamw", 0.95)
    # Decay times rate is that of all methods; norms and biases have none.
    groups = [*muon.param_groups, *adamw.param_groups]
    assert sorted(group["lr"] * group["weight_decay"] for group in groups) == [0, 1e-4, 1e-4]
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])


def test_grouped_lion_has_the_groups_of_group_params(study: Any) -> None:
    _, method = build(study, "local-8-residual-2-plain-over-grouped-lion")
    assert isinstance(method.optimizer, Lion)
    groups = method.optimizer.param_groups
    kinds = [(each["orthogonalize"], each["cautious"]) for each in groups]
    assert kinds == [(True, False), (False, True), (False, True)]
    assert {each["betas"] for each in groups} == {(0.9, 0.95)}


def test_means_of_deltas_take_several_optimizers_too(study: Any) -> None:
    model, method = build(study, "diloco-8-plain-over-muon")
    before = [param.detach().clone() for param in model.parameters()]
    for step in range(8):
        for group in method.optimizer.param_groups:
            group["lr"] = 1e-3
        for worker in range(2):
            generator = torch.Generator().manual_seed(10 * step + worker)
            windows = torch.randint(256, (2, 8), generator=generator)
            model(windows).square().mean().backward()
            method.collect(worker)
        method.step()
    assert not any(map(torch.equal, before, model.parameters()))
    assert method.up_bits_per_parameter == 4.0


def test_other_methods_have_no_inner_optimizer(study: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="before -over-muon"):
        build(study, "majority-over-muon")


@pytest.mark.parametrize("method", NEW)
def test_a_few_steps_of_each_method_lower_the_loss(study: Any, method: str) -> None:
    windows = torch.randint(8, (64, 9), generator=torch.Generator().manual_seed(0)).byte()
    novels = study.text.Novels(windows.flatten(), windows[:32], windows[32:], "noise")
    setting = study.cells.Setting("text", 16, 8, 2, SMALL)
    cell = study.contest.ContestCell(setting, method, 2)
    config = cell.config(1e-2, 1, is_tuning=False)
    task = study.text.TextTask(novels, batch=8, workers=2, seed=1, **SMALL)
    record = study.runs.Trainer(config, task, lambda done: None).run()
    assert record["diverged"] is None
    assert record["train_loss"][-1] < record["train_loss"][0] - 0.5


# Seconds


def save_seconds(folder: Path, adamw: float = 0.1, **others: float) -> None:
    seconds = {"compute": [adamw], **{f"compute over {k}": [v] for k, v in others.items()}}
    record = {"conditions": {"cores": 2}, "seconds": seconds}
    (folder / "seconds_inner_text.json").write_text(json.dumps(record))


def test_computing_is_scaled_by_steps_that_were_timed_in_turns(study: Any, tmp_path: Path) -> None:
    blocks = with_all(study, compute=0.2, scaled=0.8, mean=8.0)
    record = {"seconds": {"10mbit": blocks}}
    (tmp_path / "seconds_text.json").write_text(json.dumps(record))
    read = lambda: study.arrivals.read_blocks(tmp_path, "text", "10mbit")  # noqa: E731
    pace = study.arrivals.find_pace
    assert pace("local-8-scaled-plain-over-muon", 448, read()) is None
    save_seconds(tmp_path, muon=0.15)
    assert pace("local-8-scaled-plain-over-muon", 448, read()).seconds(8) == pytest.approx(3.2)
    assert pace("diloco-8-plain-over-muon", 448, read()).seconds(8) == pytest.approx(10.4)
    assert pace("local-8-scaled-plain", 448, read()).seconds(8) == pytest.approx(2.4)
    assert pace("local-8-scaled-plain-over-grouped-lion", 448, read()) is None
    (tmp_path / "seconds_images.json").write_text(json.dumps(record))
    assert study.arrivals.read_blocks(tmp_path, "images", "10mbit") == blocks


def test_steps_of_all_inner_optimizers_are_timed_in_turns(study: Any) -> None:
    called: list[str] = []
    steps = {name: (lambda name=name: called.append(name)) for name in "abc"}
    seconds = study.inner_seconds.take_turns(steps, 2)
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2, "c": 2}
    turns = "".join(called[::4])
    assert turns == "cab" + "abc" + "bca"


def test_a_record_of_steps_has_the_seconds_of_each(study: Any, tmp_path: Path) -> None:
    windows = torch.randint(256, (64, 65), generator=torch.Generator().manual_seed(0)).byte()
    novels = study.text.Novels(windows.flatten(), windows[:32], windows[32:], "noise")

    class Data:
        def build(self, config: Any) -> tuple[Any, str]:
            shared = {"batch": config.batch, "workers": config.workers, "seed": 0}
            return study.text.TextTask(novels, **shared, **config.network), "noise"

    study.inner_seconds.time_inners(tmp_path, Data(), 1)
    record = study.arrivals.read_inner_seconds(tmp_path)
    names = ["compute", "compute over muon", "compute over grouped-lion"]
    assert [*record["seconds"]] == names
    assert all(seconds > 0 for (seconds,) in record["seconds"].values())


# What may be said


def write_records(study: Any, score: Any) -> Any:
    archive = Archive(score)
    archive.complete(study, "text-tuning", "text-8", *PARTS)
    return archive


def test_verdicts_come_from_longer_runs_and_the_soonest_votes(study: Any) -> None:
    # A run that ends lower is at the target sooner.
    archive = write_records(study, best_at(("-over-muon", -0.3), ("-over-grouped-lion", 0.3)))
    entries = study.inner_page.read_inner_entries(archive)
    page = study.inner_page
    assert page.find_verdict(entries, "muon") == "leads (-0.300)"
    assert page.find_verdict(entries, "grouped-lion").startswith("trails")
    targets = study.arrivals.find_targets("text", archive.read)[0.8]
    blocks = with_all(study, compute=0.2) | {"compute over muon": [0.2]}
    assert page.find_sooner(entries, "muon", targets, blocks) == "yes"
    assert page.find_sooner(entries, "grouped-lion", targets, blocks) == "not yet"
    slower = blocks | {"compute over muon": [0.8], "compute over grouped-lion": [0.2]}
    assert page.find_sooner(entries, "muon", targets, slower) == "no"
    assert page.find_sooner(entries, "grouped-lion", targets, slower) == "no"


def test_nothing_is_said_before_all_seeds_are_there(study: Any, tmp_path: Path) -> None:
    archive = write_records(study, best_at())
    gone = [name for name in archive.found if "-over-muon" in name and "_s3_" in name]
    for name in gone:
        del archive.found[name]
    entries = study.inner_page.read_inner_entries(archive)
    assert study.inner_page.find_verdict(entries, "muon") == "not yet"
    records = SimpleNamespace(read={}.get, folder=tmp_path)
    text = study.inner_page.write_inner_report(records, tmp_path).read_text()
    assert "| Muon, with AdamW for the rest | not yet | not yet |" in text
    assert "have not been timed yet" in text
    assert "| inner-tuning | 8 | 0 | 24 |" in text


def test_the_page_shows_what_votes_cost_more(study: Any, tmp_path: Path) -> None:
    score = best_at(("scaled-plain-over-muon", 0.1), ("residual-2-plain-over-muon", -0.1))
    archive = write_records(study, score)
    save_seconds(tmp_path, muon=0.15)
    found = SimpleNamespace(read=archive.read, folder=tmp_path)
    text = study.inner_page.write_inner_report(found, tmp_path).read_text()
    costs = text.partition("**What a vote costs**")[2].partition("**Seconds")[0]
    (row,) = [line for line in costs.splitlines() if "| local-8-scaled-plain-over-muon |" in line]
    assert row.split("|")[3].strip() == "+0.100"
    assert row.split("|")[5].strip().startswith("+0.100 (")
    assert "| compute over muon | 0.15 (0.15 - 0.15) |" in text


@pytest.mark.slow
def test_the_page_is_what_the_program_writes(study: Any) -> None:
    page = RESULTS / "local_steps_inners.md"
    if not page.exists():
        pytest.skip("its runs have not been made yet")
    records = study.archive.Records(RESULTS / "local_steps")
    blocks = list(study.inner_page._lay_out(records))
    assert page.read_text("utf-8") == study.page.render_markdown(blocks)
