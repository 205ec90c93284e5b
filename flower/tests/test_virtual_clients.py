"""Many clients in one process: the server's arithmetic, and memory for those that vote."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distlion_flower
from distlion.errors import InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from distlion.kernels import Coins
from distlion_flower import ServerSettings, VoteServer, cast_ballot, find_deltas


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))


def move(model: nn.Module, client: int, number: int) -> None:
    generator = torch.Generator().manual_seed(1000 * client + number)
    for param in model.parameters():
        param.data.add_(torch.randn(param.shape, generator=generator), alpha=0.1)


@pytest.mark.smoke
@pytest.mark.parametrize("rule", ["stochastic", "majority", "residual"])
def test_rounds_equal_those_of_a_server_and_its_clients(rule: str) -> None:
    model, settings = make_model(), {"lr": 0.5, "momentum": 0.8}
    clients = distlion_flower.VirtualClients(
        model.named_parameters(), clients=20, seed=3, rule=rule, **settings
    )
    twin = make_model()
    server = VoteServer(
        dict(twin.named_parameters()), ServerSettings(rule=rule, seed=3, **settings)
    )
    residuals: dict[int, list[torch.Tensor]] = {}
    for number in range(6):
        drawn = clients.draw(7)
        call = server.begin(drawn)
        for client in drawn:
            for name, param in model.named_parameters():
                assert torch.equal(param, server.params[name])
            move(model, client, number)
            moved = {name: param.detach().clone() for name, param in model.named_parameters()}
            clients.collect(client, n_examples=client + 1)
            deltas = find_deltas(server.places, server.params, moved)
            zeros = [torch.zeros(delta.shape) for delta in deltas]
            ballot = cast_ballot(
                call,
                server.places,
                deltas,
                client + 1,
                node=client,
                coins=Coins(3, number, client),
                residuals=residuals.setdefault(client, zeros) if rule == "residual" else (),
            )
            assert server.take(client, ballot) is None
        assert clients.step() == server.finish()
        for name, param in model.named_parameters():
            assert torch.equal(param, server.params[name])


def count_live_elements() -> int:
    gc.collect()
    return sum(each.numel() for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def test_memory_is_that_of_the_clients_of_a_round() -> None:
    model = nn.Linear(100, 100)
    clients = distlion_flower.VirtualClients(model.parameters(), clients=1_000_000, min_replies=50)
    before = count_live_elements()
    kept = []
    for number in range(3):
        for client in clients.draw(50):
            move(model, client, number)
            clients.collect(client)
        open_round = clients.server._open
        assert open_round is not None
        kept.append(sum(len(each.payload) for each in open_round.ballots.values()))
        assert clients.step().committed
        assert clients.server._open is None
    # 10,100 parameters: 158 words of 64, 20 blocks of 64 bytes, and 64 bytes of scales.
    assert kept == [50 * (158 + 2 + 8) * 8] * 3
    assert count_live_elements() == before


def test_a_lost_client_leaves_nothing_behind() -> None:
    model = make_model()
    clients = distlion_flower.VirtualClients(model.named_parameters(), clients=5)
    start = [param.detach().clone() for param in model.parameters()]
    first, second, *_ = clients.draw(4)
    move(model, first, 0)
    clients.reset()
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    move(model, second, 0)
    clients.collect(second)
    outcome = clients.step()
    assert (outcome.taken, outcome.lost) == ((second,), 3)


def test_frozen_parameters_stay() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    clients = distlion_flower.VirtualClients(model.parameters(), clients=3)
    for client in clients.draw(3):
        model[1].weight.data.add_(0.1)
        clients.collect(client)
    clients.step()
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[1].weight, make_model()[1].weight)


def test_a_vote_that_fails_changes_nothing_of_its_client() -> None:
    model = make_model()
    clients = distlion_flower.VirtualClients(model.named_parameters(), clients=2, rule="residual")
    clients.begin([0])
    with pytest.raises(InvalidArgumentError, match="client 1 in round 0 is not taken"):
        clients.collect(1)
    move(model, 0, 0)
    clients.collect(0)
    kept = [each.clone() for each in clients._residuals[0]]
    move(model, 0, 1)
    with pytest.raises(InvalidArgumentError, match="has voted already"):
        clients.collect(0)
    assert list(clients._residuals) == [0]
    clients.step()
    clients.begin([0])
    model[0].weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        clients.collect(0)
    assert all(torch.equal(a, b) for a, b in zip(kept, clients._residuals[0], strict=True))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"clients": 0}, InvalidArgumentError),
        ({"clients": 2.0}, UnsupportedTypeError),
        ({"clients": 2, "rate": 1.0}, InvalidArgumentError),
        ({"clients": 2, "momentum": 1.0}, InvalidArgumentError),
    ],
)
def test_arguments_out_of_range_are_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        distlion_flower.VirtualClients(make_model().parameters(), **given)


def test_calls_out_of_turn_are_refused() -> None:
    clients = distlion_flower.VirtualClients(make_model().parameters(), clients=3)
    assert (clients.clients, clients.payload_bytes) == (3, 128)
    with pytest.raises(InvalidArgumentError, match="without a round"):
        clients.collect(0)
    with pytest.raises(InvalidArgumentError, match=r"draw\(4\)"):
        clients.draw(4)
    with pytest.raises(InvalidArgumentError, match=r"clients \[3\]"):
        clients.begin([3])
    clients.draw(1)
    with pytest.raises(InvalidArgumentError, match="in progress"):
        clients.draw(1)


@pytest.mark.parametrize("rule", ["stochastic", "residual"])
def test_numbers_of_clients_may_be_numpys_or_torchs(rule: str) -> None:
    ends = []
    for numbers in ([3, 1], np.array([3, 1]), torch.tensor([3, 1])):
        model = make_model()
        clients = distlion_flower.VirtualClients(model.parameters(), clients=4, rule=rule)
        clients.begin(numbers)
        for client in numbers:
            move(model, int(client), 0)
            clients.collect(client, n_examples=2)
        assert clients.step().taken == (1, 3)
        ends.append([param.detach().clone() for param in model.parameters()])
    for end in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], end, strict=True))


@pytest.mark.parametrize("number", [1.0, "1", None])
def test_what_is_no_number_of_a_client_is_refused(number: Any) -> None:
    clients = distlion_flower.VirtualClients(make_model().parameters(), clients=3)
    with pytest.raises(UnsupportedTypeError, match=r"draw\(\) got"):
        clients.draw(number)
    with pytest.raises(UnsupportedTypeError, match=r"begin\(\) got"):
        clients.begin([number])
    clients.draw(3)
    with pytest.raises(UnsupportedTypeError, match=r"collect\(\) got"):
        clients.collect(number)


def test_a_client_that_moved_too_far_is_told_what_to_do() -> None:
    model = make_model()
    clients = distlion_flower.VirtualClients(model.parameters(), clients=1, max_scale=0.1)
    clients.draw(1)
    model[0].weight.data.add_(10)
    with pytest.raises(InvalidArgumentError, match=r"too large\. Lower .* raise max_scale"):
        clients.collect(0)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (make_model(), UnsupportedTypeError, "Linear as entry 0"),
        ([{"params": list(make_model().parameters())}], UnsupportedTypeError, "dict as entry 0"),
        (make_model().state_dict(), UnsupportedTypeError, "str as entry 0"),
        ([("a", torch.nn.Parameter(torch.ones(2)))] * 2, InvalidArgumentError, "'a' twice"),
    ],
)
def test_what_are_no_parameters_is_refused(params: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        distlion_flower.VirtualClients(params, clients=3)
