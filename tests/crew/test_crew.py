"""Workers of a crew are lost, return and join; those who train stay equal to the last bit."""

from __future__ import annotations

import os
import pickle
import signal
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distlion
from cluster import WorkerDiedError, run_workers
from distlion import faults
from distlion.crew import CrewLion, CrewSampler
from distlion.errors import CrewError

GOAL = 60
STRUCK_AT = 20

OPTIONS: dict[str, dict[str, Any]] = {
    "majority": {"exchange": distlion.AllReduce()},
    "feedback": {"exchange": distlion.AllReduce(), "aggregation": distlion.FeedbackVote()},
    "server": {"exchange": distlion.ParameterServer(), "aggregation": distlion.Average()},
    "overlap": {"exchange": distlion.AllGather(), "overlap": True, "bucket_elements": 600},
}


def host_store() -> Any:
    """Keep a store in this process, which outlives all workers."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )


start = partial(run_workers, process_group=False)


def make_crew(port: int, **options: Any) -> distlion.Crew:
    return distlion.Crew(f"127.0.0.1:{port}", secret="of this test", wait_timeout_s=30, **options)


def await_members(crew: distlion.Crew, size: int) -> None:
    """Wait until the crew has so many members, or has to form anew for more."""
    while crew.size < size and not crew.wants_change:
        crew._ended.wait(0.05)


def train(
    crew: distlion.Crew,
    options: dict[str, Any],
    *,
    seed: int,
    size: int = 3,
    goal: int = GOAL,
    each: Callable[[CrewLion], None] = lambda optimizer: None,
) -> dict[str, Any]:
    """Train to the goal; return digests by step, epochs by step, and the last rate.

    Args:
        crew: The crew.
        options: Of the optimizer.
        seed: Of the weights, which differ: those of the most advanced worker count.
        size: Members with whom the second step is taken: some may be slow to start.
        goal: Steps.
        each: Called after each call of ``step()``, and before the first one.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    digests, epochs = {}, {}
    with crew:
        optimizer = crew.optimizer(
            model.named_parameters(), lr=1e-2, step_timeout_s=4, check_every=5, **options
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        crew.carry(scheduler=scheduler)
        each(optimizer)
        while optimizer.committed_step < goal:
            generator = torch.Generator().manual_seed(1000 * optimizer.committed_step + crew.id)
            inputs = torch.randn(4, 8, generator=generator)
            nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
            if optimizer.step():
                scheduler.step()
                step = optimizer.committed_step
                epochs[step] = (crew.epoch.number, crew.epoch.roster.ids)
                digests[step] = b"".join(bytes(p.detach().numpy()) for p in model.parameters())
            optimizer.zero_grad()
            await_members(crew, size if optimizer.committed_step == 1 else 0)
            each(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"digests": digests, "epochs": epochs, "rates": rates, "id": crew.id}


def check_equal(results: list[dict[str, Any]], *, goal: int = GOAL) -> None:
    """Check that no step has two outcomes, and that all came to the goal."""
    seen: dict[int, set[bytes]] = {}
    for result in results:
        assert max(result["digests"]) == goal
        for step, digest in result["digests"].items():
            seen.setdefault(step, set()).add(digest)
    assert all(len(digests) == 1 for digests in seen.values())
    assert len({tuple(result["rates"]) for result in results}) == 1
    rosters: dict[int, set[tuple[int, ...]]] = {}
    for result in results:
        for number, ids in result["epochs"].values():
            rosters.setdefault(number, set()).add(ids)
    assert all(len(found) == 1 for found in rosters.values())


def die_at(rank: int, size: int, port: int, name: str, point: faults.Point) -> dict[str, Any]:
    crew = make_crew(port, min_workers=2, max_workers=size)
    if rank == 0:  # it arms the fault for itself: its place is known once the epoch is formed

        def die(optimizer: CrewLion) -> None:
            if optimizer.committed_step == STRUCK_AT and not faults.armed:
                faults.arm(
                    rank=crew.place,
                    step=STRUCK_AT,
                    point=point,
                    action=lambda _: os.kill(os.getpid(), signal.SIGKILL),
                )

        return train(crew, OPTIONS[name], seed=rank, each=die)
    return train(crew, OPTIONS[name], seed=rank)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("majority", "before_step"),
        ("feedback", "before_commit"),
        ("server", "framed"),
        ("overlap", "after_encode"),
        ("majority", "after_commit"),
    ],
)
def test_others_go_on_when_a_worker_is_killed(name: str, point: faults.Point) -> None:
    store = host_store()
    dead, *results = start(die_at, 3, store.port, name, point, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    check_equal(results)
    for result in results:
        before, after = result["epochs"][STRUCK_AT], result["epochs"][GOAL]
        assert before[0] < after[0]
        assert len(before[1]) == 3
        assert len(after[1]) == 2


def join_late(rank: int, size: int, port: int, name: str, newcomers: Any) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2, max_workers=size, newcomers=newcomers)
    goal = 400
    momenta: list[torch.Tensor] = []

    def note(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
        # Others wait here for the newcomer: otherwise they might have finished before it came.
        await_members(crew, size if optimizer.committed_step == goal - 1 else 0)
        if crew.size == size and not momenta:
            momenta.append(
                optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].clone()
            )

    result = train(crew, OPTIONS[name], seed=rank, size=size - 1, goal=goal, each=note)
    return {**result, "momentum": momenta[0]}


@pytest.mark.parametrize(
    ("name", "newcomers"),
    [("majority", "zeros"), ("feedback", "donor"), ("overlap", "mean")],
)
def test_a_newcomer_has_the_parameters_of_the_others(name: str, newcomers: str) -> None:
    store = host_store()
    results = start(join_late, 3, store.port, name, newcomers)
    check_equal(results, goal=400)
    last = results[-1]
    assert min(last["digests"]) > STRUCK_AT
    assert len(last["epochs"][400][1]) == 3
    momenta = [result["momentum"] for result in results]
    if newcomers == "zeros":
        assert not momenta[-1].any()
    elif newcomers == "donor":
        assert any(torch.equal(momenta[-1], other) for other in momenta[:-1])
    else:
        torch.testing.assert_close(momenta[-1], (momenta[0] + momenta[1]) / 2)


def join_as_a_stranger(rank: int, size: int, port: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
        crew = make_crew(port, min_workers=2)
        try:
            crew.optimizer([nn.Parameter(torch.zeros(3))])
        except CrewError as error:
            return str(error)
        finally:
            store.set("refused", "")

    def hold(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
        if optimizer.committed_step == GOAL - 1:
            while not store.check(["refused"]) and not crew.wants_change:
                crew._ended.wait(0.05)

    crew = make_crew(port, min_workers=2)
    return train(crew, OPTIONS["majority"], seed=rank, size=size - 1, each=hold)


def test_a_newcomer_with_other_parameters_is_refused_and_the_others_go_on() -> None:
    store = host_store()
    *results, refused = start(join_as_a_stranger, 3, store.port)
    check_equal(results)
    assert "same script" in refused
    assert {len(ids) for result in results for _, ids in result["epochs"].values()} == {2}


def be_stopped(rank: int, size: int, port: int) -> dict[str, Any]:
    crew = make_crew(port, min_workers=2, max_workers=size)
    goal, woken = 400, []

    def act(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT and not woken:
            woken.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank and crew.size < size and not woken:
            woken.append(True)
            before = {member.id: member for member in first}
            gone = before.keys() - {member.id for member in crew.epoch.members}
            os.kill(before[gone.pop()].pid, signal.SIGCONT)
        if rank and crew.size == size and not first:
            first.extend(crew.epoch.members)
        await_members(crew, size if optimizer.committed_step == goal - 1 else 0)

    first: list[Any] = []
    return {**train(crew, OPTIONS["majority"], seed=rank, goal=goal, each=act), "struck": woken}


def test_a_worker_that_was_stopped_comes_back_with_the_parameters_of_the_others() -> None:
    store = host_store()
    results = start(be_stopped, 3, store.port)
    check_equal(results, goal=400)
    assert results[0]["struck"]
    assert len(results[0]["epochs"][400][1]) == 3
    assert STRUCK_AT + 1 not in results[0]["digests"] or len(results[0]["digests"]) < 400


def lose_all_others(rank: int, size: int, port: int) -> Any:
    endpoint, secret = f"127.0.0.1:{port}", "of this test"
    crew = distlion.Crew(endpoint, secret=secret, min_workers=2, wait_timeout_s=8)

    def die(optimizer: CrewLion) -> None:
        if rank == 0 and optimizer.committed_step == STRUCK_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(crew, OPTIONS["majority"], seed=rank, size=size, each=die)


def test_one_worker_never_trains_alone() -> None:
    store = host_store()
    dead, error = start(lose_all_others, 2, store.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    assert isinstance(error, CrewError)
    assert "fewer than 2 workers" in str(error)


class Hostile:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_state_that_is_not_signed_is_not_unpickled(tmp_path: Path) -> None:
    store, mark = host_store(), tmp_path / "ran"
    state = pickle.dumps(Hostile(mark))
    store.set("torch.rendezvous.run", b64encode(state).decode())
    crew = make_crew(store.port)
    param = nn.Parameter(torch.zeros(3))
    with pytest.raises(CrewError, match="was not signed"):
        crew.optimizer([param])
    assert not mark.exists()
    pickle.loads(state)  # the trap works
    assert mark.exists()


def test_two_secrets_do_not_meet() -> None:
    store = host_store()
    first = distlion.Crew(f"127.0.0.1:{store.port}", secret="one", wait_timeout_s=5)
    with pytest.raises(CrewError, match="fewer than 2"):
        first.optimizer([nn.Parameter(torch.zeros(3))])
    second = distlion.Crew(f"127.0.0.1:{store.port}", secret="two", wait_timeout_s=5)
    with pytest.raises(CrewError, match="was not signed"):
        second.optimizer([nn.Parameter(torch.zeros(3))])


def test_without_a_store_the_error_says_how_to_start_one() -> None:
    store = host_store()
    port = store.port
    del store
    with pytest.raises(CrewError, match=f"distlion crew --port {port}"):
        make_crew(port)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_workers": 1}, "min_workers=1"),
        ({"min_workers": 4, "max_workers": 3}, "max_workers=3"),
        ({"newcomers": "ones"}, "newcomers='ones'"),
        ({"run_id": ""}, "run_id=''"),
    ],
)
def test_wrong_arguments_of_a_crew(options: dict[str, Any], words: str) -> None:
    with pytest.raises(distlion.errors.InvalidArgumentError, match=words):
        make_crew(1, **options)


@pytest.mark.parametrize("option", ["process_group", "nodes", "momentum_sync"])
def test_options_that_a_crew_cannot_have_are_refused_by_name(option: str) -> None:
    store = host_store()
    crew = make_crew(store.port)
    with pytest.raises(distlion.errors.InvalidArgumentError, match=f"{option}= cannot be used"):
        crew.optimizer([nn.Parameter(torch.zeros(3))], **{option: object()})


class FixedCrew:
    """Stands in for a crew, of which a sampler reads place and size."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size

    def carry(self, **carried: Any) -> None:
        self.carried = carried


def test_members_take_each_example_once_while_their_number_changes() -> None:
    crews = [FixedCrew(place, 4) for place in range(4)]
    samplers = [CrewSampler(crew, 60, 5, seed=3) for crew in crews]  # type: ignore[arg-type]
    taken = [each.take() for each in samplers]
    for each in samplers:
        each.advance()
    for crew in crews[:2]:  # two of them are lost before the second step is committed
        crew.size = 2
    for _ in range(4):
        taken += [each.take() for each in samplers[:2]]
        for each in samplers[:2]:
            each.advance()
    newcomer = CrewSampler(FixedCrew(2, 3), 60, 5, seed=3)  # type: ignore[arg-type]
    newcomer.load_state_dict(samplers[0].state_dict())
    assert sorted(number for part in taken for number in part) == list(range(60))
    assert newcomer.cursor == 60
