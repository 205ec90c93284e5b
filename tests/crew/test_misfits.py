"""Newcomers that do not fit a crew end by themselves; those that train do not notice."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from crews import (
    GOAL,
    OPTIONS,
    STRUCK_AT,
    await_members,
    check_equal,
    host_store,
    make_crew,
    make_model,
    start,
    train,
)
from distlion.crew import CrewLion
from distlion.errors import DistlionError
from distlion.peers import session as session_module
from local_crews import connect

pytestmark = pytest.mark.distributed


def _flush() -> None:
    assert torch.set_flush_denormal(True)


def compare_with(line: str, link: Any, lines: Sequence[str], *, step: int) -> None:
    COMPARE(link, [*lines, line], step=step)


MISFITS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "another version": (
        lambda: setattr(session_module, "version", lambda name: "0.0.1"),
        {},
        "CrewError",
    ),
    "another protocol": (
        lambda: setattr(session_module, "PROTOCOL_VERSION", 0),
        {},
        "CrewError",
    ),
    # Members find this one in the handshake alone, when they have left their epoch for it.
    "a setting that it does not tell": (
        lambda: setattr(session_module, "compare", partial(compare_with, "another: 1")),
        {},
        "ConfigMismatchError",
    ),
    "other parameters": (lambda: None, {"params": [nn.Parameter(torch.zeros(3))]}, "CrewError"),
    "other buffers": (lambda: None, {"buffers": [torch.zeros(5)]}, "CrewError"),
    "another rule": (lambda: None, {"aggregation": distlion.Average()}, "CrewError"),
    "another momentum": (lambda: None, {"newcomers": "mean"}, "CrewError"),
    "denormals flushed": (_flush, {}, "KernelBackendError"),
    "another secret": (lambda: None, {"secret": "of another test"}, "CrewError"),
}


def restore() -> None:
    session_module.version = importlib.metadata.version
    session_module.PROTOCOL_VERSION, session_module.compare = PROTOCOL, COMPARE
    torch.set_flush_denormal(False)


PROTOCOL, COMPARE = session_module.PROTOCOL_VERSION, session_module.compare


def try_to_join(port: int, name: str) -> str:
    """Come to the crew as a misfit; return the error."""
    prepare, given, _ = MISFITS[name]
    options = {**OPTIONS["majority"], **given}
    of_crew = {key: options.pop(key) for key in ("newcomers", "secret") if key in options}
    params = options.pop("params", None) or list_params()
    try:
        with make_crew(port, min_workers=2, **of_crew) as crew:
            prepare()
            crew.optimizer(
                params,
                lr=1e-2,
                timeouts=distlion.Timeouts(step_s=4),
                replicas=distlion.Replicas(check_every=5),
                **options,
            )
    except DistlionError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        restore()
    return "it was let in"


def list_params() -> Any:
    return make_model(9).named_parameters()


def come_as_misfits(rank: int, size: int, port: int) -> Any:
    store = connect(port)
    if rank == size - 1:
        store.wait(["come"])
        refused = {name: try_to_join(port, name) for name in MISFITS}
        store.set("refused", "")
        crew = make_crew(port, min_workers=2)
        return refused, train(crew, OPTIONS["majority"], seed=rank, size=2, each=hold(crew, size))
    crew = make_crew(port, min_workers=2)

    def act(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
            while not store.check(["refused"]) and not crew.wants_change:
                crew._membership.ended.wait(0.05)
        hold(crew, size)(optimizer)

    return train(crew, OPTIONS["majority"], seed=rank, size=size - 1, each=act)


def hold(crew: distlion.Crew, size: int) -> Callable[[CrewLion], None]:
    return lambda optimizer: await_members(
        crew, size if optimizer.committed_step == GOAL - 2 else 0
    )


def test_no_misfit_ends_a_member() -> None:
    store = host_store()
    *results, (refused, last) = start(come_as_misfits, 3, store.port, timeout_s=120)
    check_equal([*results, last])
    found = {name: said.split(":")[0] for name, said in refused.items()}
    assert found == {name: kind for name, (_, _, kind) in MISFITS.items()}, refused
    assert len(last["epochs"][GOAL][1]) == 3
