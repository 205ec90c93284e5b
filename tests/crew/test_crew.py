"""What a crew refuses, and whom it does not trust; a sampler that follows its members."""

from __future__ import annotations

import math
import os
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distlion
from crews import OPTIONS, check_equal, host_store, make_crew, start, train
from distlion.crew import CrewSampler, lifeline
from distlion.crew.carried import CarriedState, decode_state, encode_state
from distlion.crew.crew import SECRET_VARIABLE
from distlion.errors import CrewError


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
    "endpoint",
    [
        *("", "::1", "host", "host:", ":29400", "host:abc", "host:70000", "host:0", "[::1]"),
        *("a b:1", "head..local:1", f"{'a' * 64}:1"),
    ],
)
def test_an_address_without_host_or_port_is_refused(endpoint: str) -> None:
    with pytest.raises(distlion.errors.InvalidArgumentError) as caught:
        distlion.Crew(endpoint, secret="of this test")
    assert f"endpoint={endpoint!r}: expected" in str(caught.value)


@pytest.mark.parametrize("endpoint", [29400, None, b"host:29400", ("host", 29400)])
def test_an_address_that_is_no_text_is_refused(endpoint: Any) -> None:
    with pytest.raises(distlion.errors.UnsupportedTypeError) as caught:
        distlion.Crew(endpoint, secret="of this test")
    assert f"endpoint={endpoint!r}: expected" in str(caught.value)


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    store = dist.TCPStore("::1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    crew = distlion.Crew(f"[::1]:{store.port}", secret="of this test", store_timeout_s=30)
    assert crew.id == 0
    crew._membership.rendezvous.end()


def test_the_limit_of_a_silent_store_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    store, limits = host_store(), list[float]()
    begin = lifeline.Lifeline.__init__
    monkeypatch.setattr(
        lifeline.Lifeline,
        "__init__",
        lambda self, connect, limit_s, **more: (
            limits.append(limit_s),
            begin(self, connect, limit_s, **more),
        )[1],
    )
    crew = make_crew(store.port, store_timeout_s=33)
    assert limits == [33]
    made = crew._membership.rendezvous._connections.main.made
    assert made.timeout.total_seconds() == 33
    crew._membership.rendezvous.end()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"store_timeout_s": 0}, "store_timeout_s=0"),
        ({"store_timeout_s": 1e12}, "expected at most 1,000,000,000 seconds"),
        ({"min_workers": 1}, "min_workers=1"),
        ({"min_workers": 4, "max_workers": 3}, "max_workers=3"),
        ({"newcomers": "ones"}, "newcomers='ones'"),
        ({"run_id": ""}, "run_id=''"),
        ({"wait_timeout_s": -1}, "wait_timeout_s=-1"),
        ({"wait_timeout_s": math.nan}, "wait_timeout_s=nan"),
    ],
)
def test_wrong_arguments_of_a_crew(options: dict[str, Any], words: str) -> None:
    with pytest.raises(distlion.errors.InvalidArgumentError, match=words):
        make_crew(1, **options)


@pytest.mark.parametrize("name", ["min_workers", "max_workers", "wait_timeout_s"])
def test_arguments_of_a_crew_that_are_no_numbers(name: str) -> None:
    for value in ("3", None):
        with pytest.raises(distlion.errors.UnsupportedTypeError, match=f"{name}={value!r}"):
            make_crew(1, **{name: value})


def test_a_secret_of_the_environment_may_be_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), b"w\xf6rter")
    store = host_store()
    crew = distlion.Crew(f"127.0.0.1:{store.port}", store_timeout_s=20)
    crew._membership.rendezvous.end()


def test_buffers_that_are_no_tensors_are_refused() -> None:
    store, model = host_store(), nn.BatchNorm1d(3)
    with pytest.raises(distlion.errors.UnsupportedTypeError, match="buffers has a tuple: expected"):
        make_crew(store.port).optimizer(model.parameters(), buffers=model.named_buffers())


@pytest.mark.parametrize("option", ["process_group", "nodes", "momentum_sync"])
def test_options_that_a_crew_cannot_have_are_refused_by_name(option: str) -> None:
    store = host_store()
    crew = make_crew(store.port)
    with pytest.raises(distlion.errors.InvalidArgumentError, match=f"{option}= cannot be used"):
        crew.optimizer([nn.Parameter(torch.zeros(3))], **{option: object()})


def test_steps_that_need_a_new_backward_pass_are_not_tried_again() -> None:
    store = host_store()
    crew = make_crew(store.port)
    with pytest.raises(distlion.errors.InvalidArgumentError, match="retry=True cannot be used"):
        crew.optimizer([nn.Parameter(torch.zeros(3))], retry=True, overlap=True)


class FixedCrew:
    """Stands in for a crew, of which a sampler reads rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.lane, self.n_lanes = rank, size, 0, 1
        self.next_rank: int | None = None

    def admit(self) -> None:
        if self.next_rank is not None:
            self.rank, self.next_rank = self.next_rank, None

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


@pytest.mark.parametrize(("name", "value"), [("n_examples", 0), ("batch_size", -1)])
def test_a_sampler_without_examples_is_refused(name: str, value: int) -> None:
    with pytest.raises(distlion.errors.InvalidArgumentError, match=f"{name}={value}"):
        CrewSampler(FixedCrew(0, 2), **{"n_examples": 60, "batch_size": 5, name: value})  # type: ignore[arg-type]


def test_newcomers_are_let_in_before_examples_are_dealt() -> None:
    crew, other = FixedCrew(1, 3), FixedCrew(2, 3)
    sampler, expected = (CrewSampler(each, 60, 5, seed=3) for each in (crew, other))  # type: ignore[arg-type]
    crew.next_rank = 2
    assert sampler.take() == expected.take()


def test_nobody_is_let_in_before_the_optimizer_is_made() -> None:
    assert not make_crew(host_store().port).admit()


def test_what_is_carried_arrives_as_it_left() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5])
    state = {"schedule": schedule.state_dict(), "betas": (0.9, 0.95), "text": "a\nb"}
    arrived = decode_state(encode_state(state))
    assert arrived == state
    assert type(arrived["schedule"]["milestones"]) is Counter
    assert 3 in arrived["schedule"]["milestones"]


class Held:
    """Is carried, with a state that is given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@pytest.mark.parametrize("value", [torch.zeros(2), object()])
def test_a_state_that_cannot_be_carried_is_refused_at_once(value: object) -> None:
    with pytest.raises(CrewError, match="carried"):
        CarriedState().add({"held": Held({"value": value})})


def test_a_tensor_that_cannot_be_carried_is_found() -> None:
    state = {"rates": [0.1], "best": ({"loss": torch.zeros(2)},)}
    with pytest.raises(CrewError, match=re.escape("what is carried.best.0.loss is a tensor")):
        encode_state(state)


@pytest.mark.parametrize("value", [3, None, [Held({})]])
def test_what_has_no_state_is_not_carried(value: Any) -> None:
    with pytest.raises(distlion.errors.UnsupportedTypeError, match=r"held=.*expected an object"):
        CarriedState().add({"held": value})


@pytest.mark.parametrize("value", [{1, 2}, print, torch.zeros(2)])
def test_a_group_that_no_newcomer_can_be_given_is_refused_at_once(value: object) -> None:
    store, group = host_store(), {"params": [nn.Parameter(torch.zeros(3))], "own": value}
    with pytest.raises(CrewError, match=re.escape("0.own")):
        make_crew(store.port).optimizer([group])


def test_two_things_cannot_be_carried_by_one_name() -> None:
    carried, held = CarriedState(), Held({})
    carried.add({"held": held})
    carried.add({"held": held})
    with pytest.raises(distlion.errors.InvalidArgumentError, match="'held' is carried already"):
        carried.add({"held": Held({})})


def start_again(rank: int, size: int, port: int) -> dict[str, Any]:
    """One worker was started again by its host's torchrun, the other one was not."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    return train(make_crew(port, min_workers=size), OPTIONS["majority"], seed=rank, size=size)


def test_members_may_be_at_different_starts_of_torchrun() -> None:
    store = host_store()
    check_equal(start(start_again, 2, store.port))


def count_hooks(rank: int, size: int, port: int) -> tuple[int, int]:
    """Train beside an optimizer without a crew; return calls of step() and of a hook."""
    distlion.DistributedLion([nn.Parameter(torch.zeros(3))]).step()
    counted: Counter[str] = Counter()

    def note(optimizer: distlion.crew.CrewLion) -> None:
        if not counted:
            optimizer.register_step_post_hook(lambda *args: counted.update(["hook"]))
        else:
            counted.update(["step"])
        counted.update(["note"])

    train(make_crew(port), OPTIONS["majority"], seed=rank, size=size, goal=5, each=note)
    return counted["step"], counted["hook"]


def test_hooks_of_a_step_are_called_once() -> None:
    store = host_store()
    for calls, hooks in start(count_hooks, 2, store.port):
        assert calls == hooks >= 5
