"""Whole runs of local steps in the lab: which are started, and what the report says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlion_lab.errors import WorkerFailedError
from local_study import Archive, best_at, imported_study, with_all

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")

PLACE = {"cpu": "one", "cpu_capability": "AVX2", "threads": 1, "versions": {"torch": "2.13"}}
VOTE = "local-8-scaled-plain"


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    with imported_study() as found:
        yield found


class Folder(Archive):
    """Records with a folder for what the lab finds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(best_at())
        self.folder = folder

    def save_whole(self, study: Any, method: str, seconds: float, **found: Any) -> Any:
        """Save a run with seed 1 whose loss falls in a straight line from 4 to 2."""
        run = study.timing.configure_whole(self, method, seed=1, is_long=False)
        curve = [[step, seconds * step / 448, 4 - 2 * step / 448] for step in range(0, 449, 32)]
        whole = {"task": "text", "link": "10mbit", "config": asdict(run), "test_curve": curve}
        whole |= {"parameters_sha256": "ab", **PLACE, **found}
        study.laboratory.save(self.folder / f"whole_{run.method}.json", whole)
        return run

    def describe(self, study: Any) -> dict[str, list[str]]:
        """Return the cells of the report's rows of whole runs, by the first one."""
        text = study.page.write_report(self, self.folder).read_text()
        table = text.partition("## Whole runs in the lab")[2]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        return {row[0]: row[1:] for row in rows if row}


@pytest.fixture
def folder(study: Any, tmp_path: Path) -> Folder:
    archive = Folder(tmp_path)
    archive.complete(study, "text-tuning", "text-8")
    blocks = with_all(study, mean=9.0)
    save = {"task": "text", "conditions": {}, "seconds": {"10mbit": blocks}}
    study.laboratory.save(tmp_path / "seconds_text.json", save)
    return archive


def test_whole_runs_are_beside_what_is_computed(study: Any, folder: Folder) -> None:
    folder.save_whole(study, "global-adamw", 4480.0)
    folder.save_whole(study, VOTE, 448.0)
    rows = folder.describe(study)
    # Each loss falls as DDP's does, so it is there after the same share of its steps.
    seconds = ["224.0", "358.4", "448.0"]
    own = ["448.0", "504.0", *seconds, "10.0x", "2.0000", "2.0000", "-"]
    assert rows[f"{VOTE} (local steps)"] == ["10 Mbit/s", "1", *own]
    assert rows["global-adamw"][2:8] == ["4480.0", "4480.0", "2240.0", "3584.0", "4480.0", "1.0x"]


def test_a_whole_run_alone_has_no_ratio(study: Any, folder: Folder) -> None:
    folder.save_whole(study, VOTE, 448.0)
    assert folder.describe(study)[f"{VOTE} (local steps)"][7] == "-"


def test_what_was_noted_of_a_whole_run_stands_below_the_table(study: Any, folder: Folder) -> None:
    folder.save_whole(study, "global-adamw", 4480.0, note="Other programs ran beside it.")
    folder.save_whole(study, VOTE, 448.0)
    text = study.page.write_report(folder, folder.folder).read_text()
    assert text.count("`global-adamw`: Other programs ran beside it.") == 1


def test_ddp_on_another_link_gives_no_ratio(study: Any, folder: Folder) -> None:
    folder.save_whole(study, "global-adamw", 4480.0, link="1mbit")
    folder.save_whole(study, VOTE, 448.0)
    assert folder.describe(study)[f"{VOTE} (local steps)"][7] == "-"


@pytest.mark.parametrize(
    ("virtual", "answer"),
    [
        ({"parameters_sha256": "ab", **PLACE}, "yes"),
        ({"parameters_sha256": "cd", **PLACE}, "no"),
        ({"parameters_sha256": "cd", **PLACE, "cpu": "two"}, "-"),
        ({"parameters_sha256": "cd", **PLACE, "versions": {"torch": "2.11"}}, "-"),
        (PLACE, "-"),
    ],
)
def test_parameters_are_compared_with_the_virtual_run(
    study: Any, folder: Folder, virtual: dict[str, Any], answer: str
) -> None:
    run = folder.save_whole(study, VOTE, 448.0)
    folder.found[run.name] |= virtual
    assert folder.describe(study)[f"{VOTE} (local steps)"][-1] == answer


def test_the_virtual_ddp_of_one_worker_is_compared_by_its_loss(study: Any, folder: Folder) -> None:
    run = folder.save_whole(study, "global-adamw", 4480.0)
    folder.found[replace(run, workers=0).name] |= {"parameters_sha256": "cd", **PLACE}
    assert folder.describe(study)["global-adamw"][-2:] == ["2.0000", "-"]


def test_what_is_timed_on_a_link_stays_if_another_link_fails(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(job: Any) -> dict[str, Any]:
        (link,) = job.links
        if link == "1mbit":
            raise WorkerFailedError("rank 3 is gone")
        times = {link: {"mean": [float(job.repetitions)]}}
        return {
            "task": job.task,
            "conditions": {"cores": 2},
            "seconds": times,
            "cpu_seconds": times,
        }

    monkeypatch.setattr(study.timing, "run_job", run)
    data = SimpleNamespace(tasks=("text",), folder=lambda task: tmp_path)
    study.timing.time_all(tmp_path, data, ["10mbit"], 8)
    with pytest.raises(WorkerFailedError):
        study.timing.time_all(tmp_path, data, ["100mbit", "1mbit"], 4)
    found = study.arrivals.read_seconds(tmp_path, "text")
    assert found["seconds"] == {"10mbit": {"mean": [8.0]}, "100mbit": {"mean": [4.0]}}
    assert found["conditions"] == {"10mbit": {"cores": 2}, "100mbit": {"cores": 2}}
