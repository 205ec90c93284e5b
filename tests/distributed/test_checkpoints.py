"""Checkpoints of real workers: every momentum comes back, on all ranks or on none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from checkpoint.runs import Run, Tensors, Worker, make_model
from cluster import run_workers
from distlion import errors, faults
from distlion.checkpoint import read_extra
from distlion.checkpoint.folder import encode_latest
from distlion.peers import connections

pytestmark = pytest.mark.distributed

STEPS, SAVED_AT = 5, 2

SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "two bits, momenta averaged": lambda: {
        "aggregation": distlion.QuantizedVote(bits=2),
        "momentum_sync": distlion.MomentumSync(every=2),
    },
    "overlap": lambda: {"overlap": True, "bucket_elements": 50},
    "nodes": lambda: {"nodes": distlion.Nodes(ranks_per_node=2)},
}


def resume(rank: int, world_size: int, folder: str) -> list[str]:
    """Interrupt a run of each kind; return those that differ from an uninterrupted one."""
    wrong = []
    for name, settings in SETTINGS.items():
        whole = Worker(rank, **settings())
        losses = whole.train(0, STEPS)
        first = Worker(rank, **settings())
        first.train(0, SAVED_AT)
        first.save(f"{folder}/{name}", extra={"rank": rank})
        second = Worker(rank, **settings())
        second.train(0, 1)
        loaded = second.load(f"{folder}/{name}")
        same = second.train(SAVED_AT, STEPS) == losses[SAVED_AT:]
        if loaded.extra != {"rank": rank} or not same:
            wrong.append(name)
        if not all(map(torch.equal, second.tensors(), whole.tensors())):
            wrong.append(f"{name}: tensors")
    return wrong


def test_four_workers_resume_to_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    assert run_workers(resume, 4, str(tmp_path)) == [[]] * 4


def save_and_return(rank: int, world_size: int, folder: str, nodes: int | None) -> Tensors:
    worker = Worker(rank, nodes=None if nodes is None else distlion.Nodes(ranks_per_node=nodes))
    worker.train(0, SAVED_AT)
    worker.save(folder)
    return worker.tensors()


def load_and_return(
    rank: int, world_size: int, folder: str, rule: Any, nodes: int | None
) -> Tensors:
    worker = Worker(rank, nodes=None if nodes is None else distlion.Nodes(ranks_per_node=nodes))
    worker.load(folder, on_world_change=rule)
    found = worker.tensors()
    worker.train(SAVED_AT, SAVED_AT + 1)
    worker.optimizer.verify_replicas()
    return found


def momenta_of(tensors: Tensors) -> Tensors:
    n_entries = len(make_model().state_dict())
    return tensors[n_entries:]


@pytest.mark.slow
def test_virtual_workers_go_on_with_what_real_ones_saved_and_back(tmp_path: Path) -> None:
    saved = run_workers(save_and_return, 3, str(tmp_path / "real"), None)
    virtual = Run(3)
    virtual.load(tmp_path / "real")
    for rank, tensors in enumerate(saved):
        assert all(map(torch.equal, virtual.optimizer.exp_avg(rank), momenta_of(tensors)))
    virtual.save(tmp_path / "virtual")
    for rank, tensors in enumerate(
        run_workers(load_and_return, 3, str(tmp_path / "virtual"), "raise", None)
    ):
        assert all(map(torch.equal, momenta_of(tensors), momenta_of(saved[rank])))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_other_numbers_of_workers_begin_with_the_mean_of_their_neighbourhoods(
    tmp_path: Path, world_size: int
) -> None:
    saved = [momenta_of(each) for each in run_workers(save_and_return, 4, str(tmp_path), None)]
    found = run_workers(load_and_return, world_size, str(tmp_path), "map", None)
    momenta = [momenta_of(each) for each in found]
    for index in range(len(saved[0])):
        before = torch.stack([each[index] for each in saved]).double().mean(0)
        after = torch.stack([each[index] for each in momenta]).double().mean(0)
        # One rounding of each momentum to float32.
        bound = float(before.abs().max()) * torch.finfo(torch.float32).eps + 1e-12
        assert float((after - before).abs().max()) <= bound
    if world_size == 2:
        pair = torch.stack([each[0] for each in saved[2:]]).double().mean(0).float()
        assert torch.equal(momenta[1][0], pair)


@pytest.mark.slow
def test_nodes_of_another_size_are_another_number_of_voters(tmp_path: Path) -> None:
    saved = run_workers(save_and_return, 4, str(tmp_path), 2)
    # Two nodes of two are two voters: two workers take their momenta over as they are.
    found = run_workers(load_and_return, 2, str(tmp_path), "raise", None)
    for node, tensors in enumerate(found):
        pieces = [momenta_of(saved[2 * node + part]) for part in range(2)]
        for index, momentum in enumerate(momenta_of(tensors)):
            whole = torch.cat([pieces[0][index], pieces[1][index]])
            assert torch.equal(momentum.view(-1), whole)


def fail_on_one(rank: int, world_size: int, folder: str, disk: str) -> tuple[list[str], int, bool]:
    """Save where one rank's disk is full; then go on, save again, and load."""
    worker = Worker(rank)
    own = disk if rank == 1 else f"{folder}/{rank}"
    worker.train(0, 1)
    worker.save(own)
    expected = worker.tensors()
    worker.train(1, 2)
    texts = []
    for extra in (torch.zeros(2_000_000) if rank == 1 else None, lambda: 0):
        try:
            worker.save(own, extra)
        except errors.CheckpointError as error:
            texts.append(str(error))
    worker.load(own)
    same = all(map(torch.equal, worker.tensors(), expected))
    worker.train(1, 2)
    worker.save(own)
    return texts, worker.load(own).step, same


@pytest.mark.root
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_training_goes_on(
    tmp_path: Path, small_disk: Path
) -> None:
    for texts, step, same in run_workers(fail_on_one, 3, str(tmp_path), str(small_disk)):
        assert "failed on rank 1" in texts[0] and "No space left on device" in texts[0], texts
        assert "extra is a function" in texts[1]
        assert step == 2 and same


def load_elsewhere(rank: int, world_size: int, folder: str) -> str:
    worker = Worker(rank)
    worker.train(0, 1)
    worker.save(f"{folder}/{rank}")
    try:
        worker.load(f"{folder}/{1 - rank}")
    except errors.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_folders_of_other_hosts_lack_the_momenta_of_this_one_and_it_is_said(tmp_path: Path) -> None:
    for text in run_workers(load_elsewhere, 2, str(tmp_path)):
        assert "failed on ranks 0, 1" in text
        assert "process-00000.safetensors cannot be read" in text
        assert "was it written on this one?" in text


def meet_another_call(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    worker = Worker(rank)
    try:
        if rank == 1:
            worker.train(0, 1)
        else:
            worker.save(folder)
    except errors.DistlionError as error:
        return type(error).__name__, worker.optimizer.committed_step
    return "nothing", worker.optimizer.committed_step


def test_a_save_on_some_ranks_only_is_an_error_on_all(tmp_path: Path) -> None:
    folder = tmp_path / "never"
    for kind, step in run_workers(meet_another_call, 3, str(folder)):
        assert kind == errors.ConfigMismatchError.__name__
        assert step == 0
    assert not folder.exists()


def differ(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    worker = Worker(rank)
    worker.train(0, 1)
    if rank == 1:
        with torch.no_grad():
            worker.model[0].bias[3] += 1
    try:
        worker.save(folder)
    except errors.DistlionError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_replicas_that_differ_are_not_saved(tmp_path: Path) -> None:
    folder = tmp_path / "never"
    for kind, text in run_workers(differ, 3, str(folder)):
        assert kind == errors.ReplicaMismatchError.__name__
        assert "0.bias" in text
    assert not folder.exists()


def save_behind(rank: int, world_size: int, folder: str) -> tuple[bool, int]:
    """Step while a save is being written: it is held up until the steps are done."""
    import threading

    worker = Worker(rank)
    worker.train(0, SAVED_AT)
    expected = worker.tensors()
    stepped = threading.Event()
    hold = faults.arm(
        rank=rank,
        step=SAVED_AT,
        point="checkpoint",
        action=lambda place: stepped.wait(60) if place == "marked the folder" else None,
    )
    pending = distlion.save_checkpoint(
        folder, worker.model, worker.optimizer, worker.scheduler, async_=True
    )
    worker.train(SAVED_AT, STEPS)
    stepped.set()
    pending.wait()
    assert hold.fired
    worker.load(folder)
    return all(map(torch.equal, worker.tensors(), expected)), len(os.listdir(folder))


@pytest.mark.slow
def test_steps_go_on_while_a_save_is_written(tmp_path: Path) -> None:
    assert run_workers(save_behind, 3, str(tmp_path)) == [(True, 2)] * 3


def fail_alone(rank: int, world_size: int, folder: str) -> list[str]:
    """Whatever keeps rank 1 alone from its part is heard by all, and nobody is dead after it."""
    worker = Worker(rank)
    worker.train(0, 1)
    worker.save(folder)
    expected = worker.tensors()
    cycle: list[Any] = []
    cycle.append(cycle)
    odd = rank == 1
    other = Worker(rank)
    if odd:
        other.model.register_buffer("extra", torch.zeros(2))

    def refuse(state: Any) -> None:
        raise KeyError("a schedule of another kind")

    broken = Worker(rank)
    if odd:
        broken.scheduler.load_state_dict = refuse
    calls: list[Callable[[], Any]] = [
        lambda: worker.save(folder, cycle if odd else None),
        lambda: worker.save(folder, 10**5000 if odd else None),
        lambda: worker.save(None if odd else folder),  # type: ignore[arg-type]
        lambda: worker.load(None if odd else folder),  # type: ignore[arg-type]
        lambda: other.save(f"{folder}/other"),
        lambda: other.load(folder),
        lambda: broken.load(folder),
    ]
    found = []
    for call in calls:
        try:
            call()
        except errors.CheckpointError as error:
            found.append(str(error))
        else:
            found.append("nothing")
    for each in (worker, other, broken):
        each.train(1, 2)
    assert not all(map(torch.equal, worker.tensors(), expected))
    return found


def test_what_keeps_one_rank_from_its_part_is_heard_by_all_and_nobody_is_dead(
    tmp_path: Path,
) -> None:
    outcomes = run_workers(fail_alone, 3, str(tmp_path / "runs"))
    for outcome in outcomes:
        for text in outcome:
            assert "rank 1" in text, outcome
    for texts in zip(*outcomes, strict=True):
        assert len({text.split("] ", 1)[1] for text in texts}) == 1


def load_other_steps(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    worker = Worker(rank)
    own = f"{folder}/{rank}"
    for step in (1, 2):
        worker.train(step - 1, step)
        worker.save(own)
    if rank == 1:
        (Path(own) / "latest").write_bytes(encode_latest("step-000000000001"))
    try:
        worker.load(own)
    except errors.CheckpointError as error:
        text = str(error)
    return text, worker.load(f"{own}/step-000000000001").step


@pytest.mark.slow
def test_hosts_with_different_checkpoints_before_them_are_told_to_name_one(tmp_path: Path) -> None:
    for text, step in run_workers(load_other_steps, 2, str(tmp_path)):
        assert "steps 0: 2, 1: 1" in text and "name one that all of them have" in text
        assert step == 1


def load_own_things(rank: int, world_size: int, folder: str) -> tuple[Any, float]:
    worker = Worker(rank)
    loaded = worker.load(folder, on_world_change="map")
    return loaded.extra, float(worker.model.get_buffer("1.running_mean")[0])


def save_own_things(rank: int, world_size: int, folder: str) -> str:
    worker = Worker(rank)
    worker.model.get_buffer("1.running_mean").fill_(float(rank))
    worker.save(folder, {"rank": rank})
    # A second run: one rank gives the folder of the first, and the others one of their own.
    again = Worker(rank)
    asked = folder if rank == 1 else f"{folder}/again-{rank}"
    with pytest.raises(errors.CheckpointError) as refused:
        distlion.check_checkpoint_folder(asked, again.model, again.optimizer)
    worker.train(0, 1)
    distlion.check_checkpoint_folder(folder, worker.model, worker.optimizer)
    return str(refused.value).split("] ", 1)[1]


@pytest.mark.slow
def test_buffers_and_extra_come_from_whoever_stood_at_ones_place(tmp_path: Path) -> None:
    (said,) = set(run_workers(save_own_things, 4, str(tmp_path)))
    assert said.startswith("check_checkpoint_folder() failed on rank 1: ")
    assert "another optimizer, or by an earlier run" in said
    assert not list(tmp_path.glob("again-*"))
    assert [read_extra(tmp_path, process=rank) for rank in (0, 3)] == [{"rank": 0}, {"rank": 3}]
    found = run_workers(load_own_things, 2, str(tmp_path))
    assert found == [({"rank": 0}, 0.0), ({"rank": 2}, 2.0)]


def fail_to_connect(rank: int, world_size: int, folder: str, async_: bool) -> list[str]:
    """The connections for checkpoints fail once, on one rank; return the errors."""
    worker = Worker(rank)
    worker.train(0, 1)
    own_group = connections.own_group
    if rank == 1:

        def fail_once(*args: Any, **options: Any) -> Any:
            own_group(*args, **options)
            connections.own_group = own_group
            raise errors.ProcessGroupError("a cable was pulled")

        connections.own_group = fail_once
    said = []
    for step in (1, 2):
        try:
            distlion.save_checkpoint(folder, worker.model, worker.optimizer, async_=async_).wait()
        except errors.CheckpointError as error:
            said.append(str(error))
        worker.train(step, step + 1)
    worker.optimizer.verify_replicas()
    return said


@pytest.mark.parametrize("async_", [False, True])
def test_checkpoint_that_cannot_connect_fails_everywhere_and_steps_go_on(
    tmp_path: Path, async_: bool
) -> None:
    for said in run_workers(fail_to_connect, 2, str(tmp_path), async_):
        assert len(said) == 1
        assert "rank 1" in said[0]
        assert "a cable was pulled" in said[0]
    assert (tmp_path / "latest").exists()
