import dataclasses

import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.training.capacity import Machine, check_capacity, read_machine
from distlion_lab.training.run import load_task, train
from distlion_lab.training.train_settings import TaskName, TrainSettings

GIB = 1 << 30
PLENTY = 1 << 60


@pytest.fixture(scope="module")
def task():
    return load_task(make_settings())


def make_settings(**given):
    return TrainSettings.with_defaults(TaskName.IMAGES, **given)


@pytest.mark.parametrize(
    ("cores", "threads", "most"), [(1, 1, 4), (2, 1, 8), (16, 1, 64), (16, 8, 8), (2, 8, 4)]
)
def test_cores_hold_four_threads_each_and_four_workers_always(task, cores, threads, most):
    machine = Machine(cores=cores, memory_bytes=PLENTY)
    check_capacity(make_settings(workers=most, threads=threads), task, machine)
    with pytest.raises(InvalidArgumentError, match=f"hold {most}; use {most} or --oversub"):
        check_capacity(make_settings(workers=most + 1, threads=threads), task, machine)


def test_memory_holds_as_many_as_256_mib_and_16_bytes_a_parameter_allow(task):
    n_params = sum(param.numel() for param in task.build_model(seed=0).parameters())
    machine = Machine(cores=64, memory_bytes=3 * ((GIB >> 2) + 16 * n_params))
    check_capacity(make_settings(workers=3), task, machine)
    with pytest.raises(InvalidArgumentError, match="of free memory hold 3"):
        check_capacity(make_settings(workers=4), task, machine)


def test_one_worker_is_never_refused(task):
    check_capacity(make_settings(workers=1), task, Machine(cores=1, memory_bytes=0))


def test_unknown_memory_refuses_nobody(task):
    check_capacity(make_settings(workers=4), task, Machine(cores=1, memory_bytes=None))


def test_this_machine_has_cores_and_memory():
    machine = read_machine()
    assert machine.cores >= 1
    assert all(value is None or value > 0 for value in dataclasses.astuple(machine))


def test_a_thousand_workers_are_refused_before_one_is_started(tmp_path, monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("workers were started")

    monkeypatch.setattr("distlion_lab.training.run.run_workers", start)
    monkeypatch.setattr("distlion_lab.training.run.read_machine", lambda: Machine(8, PLENTY))
    with pytest.raises(InvalidArgumentError, match="workers is 1000"):
        train(make_settings(workers=1000), run_dir=tmp_path / "run", observe=print)
    with pytest.raises(AssertionError, match="were started"):
        train(
            make_settings(workers=1000),
            run_dir=tmp_path / "run",
            observe=print,
            oversubscribe=True,
        )
