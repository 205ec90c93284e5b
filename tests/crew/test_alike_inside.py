"""Whole parameters and buffers become equal on all processes of a machine."""

from __future__ import annotations

from typing import Any

from torch import nn

import distlion
from crews import host_store, make_crew, make_model, start
from distlion.errors import ProcessGroupError, ReplicaMismatchError
from machines import LANES, TIMEOUTS, backward, connect_machine, digest


def differ_inside(rank: int, size: int, port: int, is_late: bool) -> Any:
    """Parameters differ between the processes of a machine, one that is not trained too."""
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    model = make_model(rank)
    model[0].bias.requires_grad_(False).fill_(float(rank))
    try:
        with crew:
            optimizer = crew.optimizer(model.named_parameters(), lr=1e-2, timeouts=TIMEOUTS)
            backward(model, optimizer.committed_step, machine, lane)
            optimizer.step()
            if is_late:
                model[0].bias.fill_(float(rank))
                optimizer.form(())
    except ReplicaMismatchError as error:
        return str(error)
    return digest(model)


def test_processes_of_a_machine_begin_with_equal_parameters() -> None:
    store = host_store()
    results = start(differ_inside, 2 * LANES, store.port, False)
    assert isinstance(results[0], bytes) and len(set(results)) == 1
    store = host_store()
    for said in start(differ_inside, 2 * LANES, store.port, True):
        assert "replicas differ in 0.bias" in said


def average_statistics(rank: int, size: int, port: int) -> dict[str, Any]:
    """Average buffers where there is no epoch yet, inside one, and after it."""
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(float(rank))
    refused = []

    def try_now() -> None:
        try:
            distlion.average_buffers(model)
        except ProcessGroupError as error:
            refused.append(str(error))

    try_now()
    with crew:
        optimizer = crew.optimizer(model.named_parameters(), lr=1e-2, timeouts=TIMEOUTS)
        distlion.average_buffers(model)
        mean = model[1].running_mean.tolist()
        backward(model, optimizer.committed_step, machine, lane)
        optimizer.step()
        distlion.average_buffers(model)
        equal = model[1].running_mean.tolist()
    try_now()
    return {"mean": mean, "equal": equal, "refused": refused}


def test_buffers_are_averaged_over_all_processes_of_all_machines() -> None:
    store = host_store()
    results = start(average_statistics, 2 * LANES, store.port)
    for each in results:
        assert each["mean"] == [1.5] * 4
        assert each["equal"] == results[0]["equal"] != each["mean"]
        assert len(each["refused"]) == 2
        assert all("inside `with crew:`" in said for said in each["refused"])
