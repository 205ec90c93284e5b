"""VotingMixin before a Trainer: what users meet beyond the exam."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import distlion
from cluster import run_workers
from distlion import errors
from integrations.hf_job import are_equal, error_of, load_momenta, make_trainer, state_of
from integrations.job import Job
from integrations.refusals import flip

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Facts = dict[str, Any]


# One process.


def ask_alone(rank: int, world_size: int, folder: str, saved_by_two: str) -> Facts:
    from unittest import mock

    from accelerate import Accelerator, DistributedType
    from transformers import Trainer

    from distlion.integrations import frameworks
    from distlion.integrations import transformers as ours
    from integrations.with_trainer import VotingTrainer

    facts: Facts = {}

    def refused(name: str, **options: Any) -> None:
        facts[name] = error_of(lambda: make_trainer(folder, 0, **options).train())

    refused("another optimizer", choice={"optimizers": (None, None)})
    refused("overlap", max_grad_norm=1.0, optimizer={"overlap": True})
    refused("clip_norm", max_grad_norm=1.0, optimizer={"clip_norm": distlion.ClipNorm(1.0)})
    refused("abstain", max_grad_norm=1.0, optimizer={"nonfinite": "abstain"})
    refused("weight_decay", optimizer={"weight_decay": 0.5})
    facts["behind"] = error_of(lambda: type("Behind", (Trainer, ours.VotingMixin), {}))
    from_trl = type("FromTrl", (VotingTrainer,), {"__module__": "trl.trainer"})
    for package, use in {
        "transformers": functools.partial(importlib.reload, ours),
        "accelerate": functools.partial(importlib.reload, ours),
        "trl": functools.partial(make_trainer, folder, 0, kind=from_trl),
    }.items():
        others = {"transformers": "5.0", "accelerate": "1.0", package: "7.3.1"}
        with mock.patch.object(frameworks, "version", side_effect=others.get):
            facts[package] = error_of(use)
    with mock.patch.object(Accelerator, "distributed_type", DistributedType.FSDP):
        refused("FSDP")
    facts["no hook"] = error_of(lambda: ours.check_trainer(object))

    trainer = make_trainer(folder, 0, learning_rate=0.5, save_strategy="steps", save_steps=2)
    trainer.create_optimizer()
    facts["groups"] = [
        {name: group[name] for name in ("lr", "weight_decay")}
        for group in trainer.optimizer.param_groups
    ]
    trainer = make_trainer(folder, 0, save_strategy="steps", save_steps=2)
    trainer.train()
    again = make_trainer(folder, 0)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    facts["alone resumes"] = are_equal(state_of(trainer), state_of(again))

    class MeanTrainer(VotingTrainer):
        on_world_change = "mean"

    facts["world change"] = error_of(lambda: load_momenta(make_trainer(folder, 0), saved_by_two))
    facts["mean"] = load_momenta(make_trainer(folder, 0, kind=MeanTrainer), saved_by_two)
    return facts


# Two processes.


def ask_two(rank: int, world_size: int, folder: str) -> Facts:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    return {
        **_resume(rank, folder),
        **_keep_best(rank, folder),
        "norms": _log_norms(rank, folder),
        "abstains": _abstain(rank, folder),
        **_save_over(rank, folder),
        **_meet_plain(rank, folder),
        **_meet_damage(rank, folder),
        "drift": _drift(rank, folder),
    }


SAVING = {"save_strategy": "steps", "save_steps": 2}


def _resume(rank: int, folder: str) -> Facts:
    facts: Facts = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        straight = make_trainer(f"{folder}/a", rank, **SAVING)
        straight.train()
        resumed = make_trainer(f"{folder}/b", rank, save_strategy="no")
        resumed.train(resume_from_checkpoint=f"{folder}/a/checkpoint-2")
    told = errors.OneWorkersStateWarning in [w.category for w in seen]
    facts["told of one worker's state"] = told
    facts["resumes with dropout"] = are_equal(state_of(straight), state_of(resumed))
    start = make_trainer(f"{folder}/b", rank)
    facts["momenta at step 2"] = load_momenta(start, f"{folder}/a/checkpoint-2")
    facts["drawn buffers"] = [float(each.model.drawn) for each in (straight, resumed)]
    resumed.train()  # goes on with its momentum, as a Trainer does
    facts["steps of two trainings"] = resumed.voter.committed_step
    return facts


def _keep_best(rank: int, folder: str) -> Facts:
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that it is the first, and not what training ends with
        "save_total_limit": 1,
    }
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    trainer = make_trainer(f"{folder}/c", rank, **best, **evaluating, save_steps=1)
    trainer.train()
    torch.distributed.barrier()
    place = Path(trainer.state.best_model_checkpoint)
    weights = load_file(place / "model.safetensors")
    present = trainer.model.state_dict()
    files = [each for each in place.rglob("*") if each.is_file()]
    return {
        "is best": all(torch.equal(weights[name], present[name]) for name in present),
        "best": place.name,
        "kept": sorted(each.name for each in Path(folder, "c").glob("checkpoint-*")),
        "files": sorted(str(each.relative_to(place)) for each in files),
    }


def _log_norms(rank: int, folder: str) -> dict[str, list[float]]:
    norms = {}
    for name, options in {
        "measured": {},
        "clipped": {"max_grad_norm": 1e-3},
        "overlap": {"optimizer": {"overlap": True, "bucket_elements": 256}},
    }.items():
        trainer = make_trainer(f"{folder}/d", rank, **options)
        trainer.train()
        norms[name] = [row["grad_norm"] for row in trainer.state.log_history[:-1]]
    return norms


def _save_over(rank: int, folder: str) -> Facts:
    facts: Facts = {}
    make_trainer(f"{folder}/h", rank, **SAVING).train()
    other = make_trainer(f"{folder}/h", rank, model=Job("", 1).make_model(rank), **SAVING)
    other.train()
    facts["saved over another run"] = sorted(os.listdir(f"{folder}/h/checkpoint-4/distlion"))
    os.makedirs(f"{folder}/e/checkpoint-2", exist_ok=True)
    if rank == 0:
        shutil.copytree(f"{folder}/a/checkpoint-2", f"{folder}/e/checkpoint-2", dirs_exist_ok=True)
        os.remove(f"{folder}/e/checkpoint-2/distlion/latest")
    torch.distributed.barrier()
    incomplete = make_trainer(f"{folder}/e", rank)
    facts["incomplete"] = error_of(lambda: incomplete.train(resume_from_checkpoint=True))
    return facts


def _meet_plain(rank: int, folder: str) -> Facts:
    from transformers import Trainer

    facts: Facts = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plain = make_trainer(f"{folder}/f", rank, kind=Trainer, **SAVING)
        plain.train()
    facts["plain Trainer warns"] = errors.IdenticalGradientsWarning in [w.category for w in seen]
    again = make_trainer(f"{folder}/f", rank)
    facts["plain checkpoint"] = error_of(
        lambda: again.train(resume_from_checkpoint=f"{folder}/f/checkpoint-2")
    )
    wrapped = make_trainer(f"{folder}/g", rank)
    wrapped.accelerator.prepare_model = type(wrapped.accelerator).prepare_model.__get__(
        wrapped.accelerator
    )
    facts["DDP"] = error_of(wrapped.train)
    return facts


def _meet_damage(rank: int, folder: str) -> Facts:
    """Resume from what is damaged for rank 1, and with another seed."""
    facts: Facts = {}
    copy = Path(folder, f"i{rank}", "checkpoint-2")
    shutil.copytree(f"{folder}/a/checkpoint-2", copy)
    if rank == 1:
        flip(next(copy.rglob("worker-00001.safetensors")))
    whole = f"{folder}/a/checkpoint-2"
    for name, checkpoint, options in (
        ("damaged", str(copy), {}),
        ("another seed", whole, {"optimizer": {"seed": 7}}),
    ):
        trainer = make_trainer(f"{folder}/i", rank, **options)
        before = [param.detach().clone() for param in trainer.model.parameters()]
        found = error_of(functools.partial(trainer.train, resume_from_checkpoint=checkpoint))
        facts[name] = (*found, all(map(torch.equal, before, trainer.model.parameters())))
    return facts


def _drift(rank: int, folder: str) -> tuple[type[BaseException], str]:
    """Change a parameter of rank 1 after the last step."""
    from transformers import TrainerCallback

    trainer = make_trainer(
        f"{folder}/j",
        rank,
        max_steps=2,
        optimizer={"replicas": distlion.Replicas(check_every=1000)},
    )

    class Drift(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 1 and state.global_step == 2:
                next(trainer.model.parameters()).data += 1

    trainer.add_callback(Drift())
    return error_of(trainer.train)


def _abstain(rank: int, folder: str) -> list[tuple[bool, bool]]:
    """Return which gradients of this rank were finite when the optimizer saw them."""
    from transformers import TrainerCallback

    trainer = make_trainer(f"{folder}/d", rank, max_steps=1, optimizer={"nonfinite": "abstain"})
    seen = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            seen.extend(bool(p.grad.isfinite().all()) for p in trainer.model.parameters())

    if rank == 1:
        trainer.model.inner.outer.weight.register_hook(lambda grad: grad * float("nan"))
    trainer.add_callback(Watch())
    trainer.train()
    return seen


@pytest.fixture(scope="module")
def two() -> Any:
    with tempfile.TemporaryDirectory(prefix="distlion-hf-") as folder:
        yield folder, run_workers(ask_two, 2, folder, timeout_s=150)


@pytest.fixture(scope="module")
def alone(two: Any, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = str(tmp_path_factory.mktemp("alone"))
    saved = f"{two[0]}/a/checkpoint-2"
    return run_workers(ask_alone, 1, folder, saved, process_group=False, timeout_s=150)[0]


def test_dropout_and_momenta_resume(two: Any) -> None:
    for facts in two[1]:
        assert facts["resumes with dropout"]
        assert facts["steps of two trainings"] == 8
        assert not facts["told of one worker's state"]


def test_buffers_begin_as_those_of_rank_0(two: Any) -> None:
    for facts in two[1]:
        assert facts["drawn buffers"] == [0.0, 0.0]


def test_checkpoint_holds_a_momentum_of_each_worker(two: Any) -> None:
    files = two[1][0]["files"]
    assert "optimizer.pt" not in files and "scheduler.pt" not in files
    assert "model.safetensors" in files and "trainer_state.json" in files
    momenta = [name for name in files if "worker-" in name]
    assert [Path(name).name for name in momenta] == [
        "worker-00000.safetensors",
        "worker-00001.safetensors",
    ]


def test_best_model_is_loaded_and_old_checkpoints_are_removed(two: Any) -> None:
    for facts in two[1]:
        assert facts["is best"] and facts["best"] == "checkpoint-1"
        assert facts["kept"] == ["checkpoint-1"]


def test_logged_norm_is_that_of_rank_0_before_clipping(two: Any) -> None:
    for facts in two[1][:1]:
        norms = facts["norms"]
        assert norms["measured"] == norms["overlap"] and len(norms["measured"]) == 4
        # The first gradient does not depend on clipping; later momenta do.
        assert norms["clipped"][0] == norms["measured"][0] > 1e-2


def test_replicas_that_differ_at_the_end_are_an_error(two: Any) -> None:
    for facts in two[1]:
        kind, text = facts["drift"]
        assert kind is errors.ReplicaMismatchError and "replicas differ" in text


def test_measuring_the_norm_spreads_no_nan(two: Any) -> None:
    assert two[1][0]["abstains"] == [True, True]
    assert two[1][1]["abstains"] == [True, False]


def test_folder_of_another_run_is_overwritten(two: Any) -> None:
    for facts in two[1]:
        assert facts["saved over another run"] == ["latest", "step-000000000004"]


def test_incomplete_checkpoint_is_refused_by_all(two: Any) -> None:
    for facts in two[1]:
        kind, said = facts["incomplete"]
        assert kind is errors.CheckpointError and "checkpoint-2/distlion/latest" in said


def test_damage_of_one_worker_is_refused_by_all_before_weights_are_loaded(two: Any) -> None:
    for facts in two[1]:
        kind, said, is_as_before = facts["damaged"]
        assert kind is errors.CheckpointError and "failed on rank 1" in said
        assert is_as_before


def test_what_does_not_fit_the_optimizer_is_refused_with_what_is_loaded(two: Any) -> None:
    for facts in two[1]:
        kind, said, is_as_before = facts["another seed"]
        assert kind is errors.CheckpointError and "seed=0" in said
        assert "The Trainer has already loaded the model" in said
        assert not is_as_before


def test_trainer_without_the_mixin_is_warned_of(two: Any) -> None:
    for facts in two[1]:
        assert facts["plain Trainer warns"]


def test_checkpoint_of_a_trainer_without_the_mixin_is_refused(two: Any) -> None:
    for facts in two[1]:
        kind, said = facts["plain checkpoint"]
        assert kind is errors.CheckpointError and "VotingMixin saves the momenta" in said


def test_model_under_ddp_is_refused(two: Any) -> None:
    for facts in two[1]:
        kind, said = facts["DDP"]
        assert kind is errors.UnsupportedTypeError and "DistributedDataParallel" in said


def test_another_number_of_workers_is_refused_or_mapped(two: Any, alone: Facts) -> None:
    kind, said = alone["world change"]
    assert kind is errors.CheckpointError
    assert "on_world_change" in said and "VotingMixin" in said
    first, second = (facts["momenta at step 2"] for facts in two[1])
    for mean, one, other in zip(alone["mean"], first, second, strict=True):
        assert not torch.equal(one, other)
        assert torch.equal(mean, ((one.double() + other.double()) / 2).float())


def test_one_process_trains_and_resumes(alone: Facts) -> None:
    assert alone["alone resumes"]


def test_optimizer_takes_the_trainers_lr_and_weight_decay(alone: Facts) -> None:
    assert [group["lr"] for group in alone["groups"]] == [0.5, 0.5]
    assert [group["weight_decay"] for group in alone["groups"]] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("case", "kind", "fragments"),
    [
        ("another optimizer", errors.UnsupportedTypeError, ["AdamW", "optimizer_cls_and_kwargs"]),
        ("overlap", errors.InvalidArgumentError, ["max_grad_norm=0", "overlap: votes leave"]),
        ("clip_norm", errors.InvalidArgumentError, ["max_grad_norm=0", "ClipNorm("]),
        ("abstain", errors.InvalidArgumentError, ["max_grad_norm=0", "abstain"]),
        ("weight_decay", errors.InvalidArgumentError, ["weight_decay=0.5", "TrainingArguments"]),
        ("FSDP", errors.UnsupportedTypeError, ["FSDP", "plain data parallelism"]),
        ("behind", TypeError, ["VotingMixin"]),
        ("transformers", errors.MissingDependencyError, ["transformers 7.3.1", "transformers 5"]),
        ("accelerate", errors.MissingDependencyError, ["accelerate 7.3.1", "accelerate 1"]),
        ("trl", errors.MissingDependencyError, ["trl 7.3.1", "trl 1"]),
        ("no hook", errors.MissingDependencyError, ["_save_optimizer_and_scheduler"]),
    ],
)
def test_what_would_be_lost_silently_is_refused(
    alone: Facts, case: str, kind: type, fragments: list[str]
) -> None:
    found, said = alone[case]
    assert found is kind, said
    for fragment in fragments:
        assert fragment in said
