"""Local steps under frameworks: the bits of a plain loop, evaluations and saves after a vote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import run_workers
from integrations.exam import tell_place
from integrations.local_job import EVERY, FRAMEWORKS, Ended, LocalJob, train_plainly, train_under

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS, SAVED_AT, EVALUATION = 8, 4, 5
PACKAGES = {"Trainer": "transformers", "Accelerate": "accelerate", "Fabric": "lightning"}


def sit(rank: int, world_size: int, framework: str, jobs: list[LocalJob]) -> list[Ended]:
    """Do jobs one after the other; a framework of no name is a plain loop."""
    tell_place(rank, world_size)
    return [
        train_under(framework, job, rank) if framework else train_plainly(job, rank) for job in jobs
    ]


def make_jobs(folder: Path) -> list[LocalJob]:
    """A run that saves inside of a period and evaluates, and one that goes on from there."""
    saved, resumed = str(folder / "saved"), str(folder / "resumed")
    Path(saved).mkdir()
    Path(resumed).mkdir()
    return [
        LocalJob(saved, 2, STEPS, save_at=SAVED_AT, evaluation=EVALUATION, clip_norm=0.5),
        LocalJob(
            resumed,
            2,
            STEPS,
            resume=saved,
            first_step=SAVED_AT,
            evaluation=EVALUATION,
            clip_norm=0.5,
        ),
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    jobs = make_jobs(tmp_path_factory.mktemp("plain"))[:1]
    return run_workers(sit, 2, "", jobs, timeout_s=90)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_framework_has_the_bits_of_a_plain_loop(framework: str, plain: Any, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(framework, "lightning"))
    found = run_workers(sit, 2, framework, make_jobs(tmp_path), timeout_s=180)
    for rank in range(2):
        (expected,), (whole, resumed) = plain[rank], found[rank]
        # Every third step, before the save, before the evaluation, and at the end.
        assert expected.votes == STEPS // EVERY + 3
        for ended in (whole, resumed):
            assert ended.steps == STEPS
            assert ended.votes == expected.votes
            assert all(map(torch.equal, ended.params, expected.params))
            assert all(map(torch.equal, ended.moments, expected.moments))
        assert whole.losses == expected.losses
        assert resumed.losses[-(STEPS - SAVED_AT) :] == expected.losses[SAVED_AT:]
    moments = [found[rank][0].moments[0] for rank in range(2)]
    assert not torch.equal(*moments)  # each worker's own
