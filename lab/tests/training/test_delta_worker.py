"""``distlion train --every``: settings, real workers beside virtual ones, and resumed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import run_workers
from distlion.errors import InvalidArgumentError
from distlion_lab.errors import WorkerFailedError
from distlion_lab.names import name_rule
from distlion_lab.training.checkpoints import CheckpointSettings
from distlion_lab.training.delta_worker import find_delta_rule
from distlion_lab.training.loop import TrainingLoop
from distlion_lab.training.run import load_task, train
from distlion_lab.training.run_settings import RunSettings
from distlion_lab.training.train_settings import Overlap, TrainSettings
from distlion_lab.training.virtual_loop import VirtualLoop
from distlion_lab.training.workers import MethodRun, digest_parameters

pytestmark = pytest.mark.distributed

CONFIG = (
    '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, '
    '"n_head": 2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0}'
)
STEPS, EVERY = 8, 3


def ignore(progress: object) -> None:
    pass


def make_settings(folder: Path, **given: Any) -> TrainSettings:
    config = folder / "config.json"
    if not config.exists():
        config.write_text(CONFIG)
    options = {"workers": 2, "steps": STEPS, "eval_every": 4, "batch_size": 2, "warmup_steps": 3}
    options |= {"exchange": "all-reduce", "every": EVERY, "model_config": config}
    return TrainSettings.with_defaults(**options | given)


# Settings


def test_local_steps_are_those_of_adamw_with_scaled_votes() -> None:
    settings = TrainSettings.with_defaults(every=8)
    assert (settings.rule, settings.lr, settings.weight_decay) == ("scaled", 1e-3, 0.1)
    assert settings.method.votes
    assert "ScaledVote() of deltas of 8 steps of AdamW" in settings.method.definition
    assert TrainSettings.with_defaults().rule == "majority-cautious-betas-90-95"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0}, "every=0: expected 1 or more"),
        ({"rule": "scaled"}, "rule scaled votes on deltas of local steps. Set every"),
        ({"every": 4, "rule": "majority"}, "does not vote on deltas, as --every 4 needs it"),
        ({"every": 4, "overlap": Overlap.ON}, "overlap is on with every 4"),
        ({"every": 4, "momentum_sync_every": 2}, "momentum_sync_every is 2 with every 4"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        TrainSettings.with_defaults(**given)


def test_a_crew_of_local_workers_has_no_local_steps(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--every cannot be used with --crew"):
        train(make_settings(tmp_path), run_dir=tmp_path / "run", observe=ignore, crew=True)


def test_a_rule_is_named_with_its_steps() -> None:
    assert name_rule({"rule": "majority"}) == "majority"
    assert name_rule({"rule": "scaled", "every": 8}) == "scaled every 8 steps"
    # Of a record of an earlier version.
    named = name_rule({"rule": "scaled", "every": 8, "delay": 2})
    assert named == "scaled every 8 steps, taken 2 later"


# Real workers


def train_real(rank: int, world_size: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Train; return the digest of this worker's parameters, its record, and what was told."""
    settings, seen = make_settings(folder / str(rank), **given), []
    loop = TrainingLoop(settings, load_task(settings), seen.append)
    record = loop.run()
    return {
        "sha256": digest_parameters(loop._worker.model),
        "record": record,
        "places": [each.members for each in seen],
    }


def run_real(folder: Path, **given: Any) -> list[dict[str, Any]]:
    for rank in range(2):
        (folder / str(rank)).mkdir()
    found: list[dict[str, Any]] = run_workers(train_real, 2, folder, given)
    return found


def run_virtual(folder: Path, method: str) -> Any:
    """Train virtual workers on the same batches, at the same rates."""
    real = make_settings(folder)
    names = ("task", "data", "partition", "alpha", "tokenizer", "model_config", "workers", "seed")
    names += ("lr", "weight_decay", "steps", "schedule", "warmup_steps", "batch_size", "device")
    shared = {name: getattr(real, name) for name in names}
    settings = RunSettings(**shared, method=method, eval_every=STEPS)
    return VirtualLoop(settings, load_task(real), ignore).run()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_real(tmp_path_factory.mktemp("real"))


def test_real_workers_end_where_virtual_ones_end(
    real: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = run_virtual(tmp_path, f"local-{EVERY}-scaled-plain").parameters_sha256
    assert [each["sha256"] for each in real] == [expected] * 2


def test_a_run_ends_with_a_vote_and_says_how_many_there_were(real: list[dict[str, Any]]) -> None:
    record = real[0]["record"]
    assert record.replicas_equal
    assert record.traffic["steps"] == 3  # after steps 3, 6 and 8
    places = real[0]["places"]
    assert (places[0], places[EVERY + 1], places[-1]) == ("0 votes", "1 vote", "3 votes")


def test_bits_are_shared_out_over_the_steps(real: list[dict[str, Any]]) -> None:
    record = real[0]["record"]
    sent = record.traffic["last_sent_bytes"]
    assert record.bits_per_parameter == pytest.approx(
        8 * sent / record.trainable_parameters / EVERY
    )


def test_evaluations_score_the_common_point_and_change_nothing(
    real: list[dict[str, Any]], tmp_path: Path
) -> None:
    # Another worker scores other batches: with parameters of its own the sums would differ.
    often = run_real(tmp_path, eval_every=1)
    assert often[0]["sha256"] == real[0]["sha256"]
    losses = often[0]["record"].evaluations["loss"]
    assert losses[1] == losses[2] == losses[0]  # no vote yet
    assert losses[3] != losses[2]
    assert losses[4] == losses[5] == losses[3]


# Runs that are resumed


class StoppedError(Exception):
    """Ends a run in the middle, on every worker."""


def interrupt(rank: int, world_size: int, folder: Path, given: dict[str, Any]) -> None:
    """Train until step 5, with a checkpoint after each step: the last one inside of a period."""
    settings = make_settings(folder, **given)
    loop = TrainingLoop(
        settings,
        load_task(settings),
        ignore,
        checkpoints=CheckpointSettings(every=1),
        run_dir=folder / "run",
    )
    step_once = loop._step

    def stop(step: int) -> None:
        if step == 5:
            raise StoppedError
        step_once(step)

    loop._step = stop  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        loop.run()


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    folder.mkdir()
    settings = make_settings(folder)
    run_workers(interrupt, 2, folder, {})
    resumed = train(
        settings,
        run_dir=folder / "run",
        observe=ignore,
        checkpoints=CheckpointSettings(resume=True),
    )
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = train(make_settings(whole), run_dir=whole / "run", observe=ignore)
    assert resumed is not None
    assert expected is not None
    assert resumed.losses["loss"] == expected.losses["loss"]
    assert resumed.final_validation_loss == expected.final_validation_loss


def test_another_number_of_local_steps_does_not_resume(tmp_path: Path) -> None:
    make_settings(tmp_path)
    run_workers(interrupt, 2, tmp_path, {})
    settings = make_settings(tmp_path, every=EVERY + 1)
    with pytest.raises(WorkerFailedError, match="votes every 3 steps, and this optimizer every 4"):
        train(
            settings,
            run_dir=tmp_path / "run",
            observe=ignore,
            checkpoints=CheckpointSettings(resume=True),
        )


def test_the_record_holds_h(tmp_path: Path) -> None:
    train(make_settings(tmp_path, steps=2), run_dir=tmp_path / "run", observe=ignore)
    settings = json.loads((tmp_path / "run" / "record.json").read_text())["settings"]
    assert (settings["every"], settings["rule"]) == (EVERY, "scaled")


def test_scoring_puts_parameters_back(tmp_path: Path) -> None:
    found = run_workers(score_between_votes, 2)
    for before, inside, after, common in found:
        assert torch.equal(before, after)
        assert torch.equal(inside, common)
        assert not torch.equal(before, common)


def score_between_votes(rank: int, world_size: int) -> tuple[torch.Tensor, ...]:
    model = torch.nn.Linear(3, 2)
    params = list(model.named_parameters())
    run = MethodRun(params, lr=0.1, weight_decay=0.0, workers=world_size, steps=4, seed=0)
    start = find_delta_rule("scaled", every=4).start
    assert start is not None
    worker = start(model, run, {})
    for param in model.parameters():
        param.grad = torch.full_like(param, 1.0 + rank)
    worker.optimizer.step()
    before = model.weight.detach().clone()
    with worker.scoring():
        inside = model.weight.detach().clone()
    after = model.weight.detach().clone()
    return before, inside, after, worker.optimizer.common_point[0].clone()
