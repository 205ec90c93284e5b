"""A server and many clients in one process; some of them vote in each round."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels import Coins
from distlion.numpy_numbers import as_python
from distlion_flower.ballot import Call, cast_ballot
from distlion_flower.places import find_deltas
from distlion_flower.refusals import Refusal
from distlion_flower.server import Outcome, VoteServer
from distlion_flower.settings import ServerSettings

_ONE_VOTE = "Expected one vote of each client that draw() has returned"
_ADVICE = {
    Refusal.SCALE: "Lower the local learning rate, raise max_scale, or give it up by reset()"
}


class VirtualClients:
    """Train as a server with many clients would, in one process, with the same votes.

    The clients share the model: it holds the server's parameters whenever a client's turn begins.
    The client trains it; ``collect`` casts its vote and restores the server's parameters.

    Args:
        params: The model's parameters, or (name, parameter) pairs; frozen ones are left out.
            Buffers, such as BatchNorm's, are neither restored between clients nor voted on.
        clients: Number of clients.
        seed: Seed of the draw of clients, of their random numbers, and of ties.
        settings: Settings of the server, as for ``distlion_flower.bridge.Votes``: ``rule``,
            ``lr``, ``momentum``, ``spread``, ``weights``, ``max_weight``, ``min_replies``,
            ``max_scale``.

    Raises:
        InvalidArgumentError: A value is out of range.
        UnsupportedTypeError: A parameter or argument is of a kind without support.

    Notes:
        Memory holds the server's parameters and momentum, and one bit per parameter for each vote
        of the round in progress. With rule "residual" it also holds a float32 residual for each
        client that has ever voted. Clients that do not vote take no memory.

    Example:
        >>> params = model.named_parameters()
        >>> clients = distlion_flower.VirtualClients(params, clients=1000, lr=0.3)
        >>> for _ in range(rounds):
        ...     for client in clients.draw(50):
        ...         train_locally(model, data_of[client])
        ...         clients.collect(client, n_examples=len(data_of[client]))
        ...     clients.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        *,
        clients: int,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        clients = as_python(clients)
        if not isinstance(clients, int) or isinstance(clients, bool):
            raise UnsupportedTypeError(f"clients={clients!r}: expected an integer")
        if clients < 1:
            raise InvalidArgumentError(f"clients={clients}: expected 1 or more")
        unknown = set(settings) - {field.name for field in dataclasses.fields(ServerSettings)}
        if unknown:
            raise InvalidArgumentError(
                f"VirtualClients has no argument {', '.join(sorted(unknown))}; expected those of "
                "distlion_flower.bridge.Votes"
            )
        self._stage = _name_trained(params)
        self.server = VoteServer(self._stage, ServerSettings(**settings, seed=seed))
        self._n_clients, self._seed = clients, seed
        self._generator = torch.Generator().manual_seed(seed)
        self._residuals: dict[int, list[Tensor]] = {}
        self._call: Call | None = None

    @property
    def clients(self) -> int:
        """Number of clients."""
        return self._n_clients

    @property
    def payload_bytes(self) -> int:
        """Bytes of a client's vote in a round."""
        return self.server.payload_bytes

    def draw(self, n_clients: int) -> list[int]:
        """Begin a round with clients drawn uniformly at random.

        Args:
            n_clients: Number of clients that are asked to vote.

        Returns:
            Their numbers. Clients that are not collected count as lost.

        Raises:
            InvalidArgumentError: There are fewer clients, or a round is in progress.
            UnsupportedTypeError: ``n_clients`` is no integer.
        """
        n_clients = _read_index("draw()", n_clients)
        if not 1 <= n_clients <= self._n_clients:
            raise InvalidArgumentError(
                f"draw({n_clients}): expected 1 to {self._n_clients}, the number of clients"
            )
        drawn: list[int] = torch.randperm(self._n_clients, generator=self._generator, device="cpu")[
            :n_clients
        ].tolist()
        self.begin(drawn)
        return drawn

    def begin(self, clients: Iterable[int]) -> None:
        """Begin a round with the clients of these numbers, from 0 on.

        Raises:
            InvalidArgumentError: One is out of range, or a round is in progress.
            UnsupportedTypeError: One is no integer.
        """
        asked = [_read_index("begin()", client) for client in clients]
        wrong = [client for client in asked if not 0 <= client < self._n_clients]
        if wrong:
            raise InvalidArgumentError(
                f"clients {wrong} were asked; expected numbers from 0 to {self._n_clients - 1}"
            )
        self._call = self.server.begin(asked)
        self.reset()

    @torch.no_grad()
    def collect(self, client: int, n_examples: int = 1) -> None:
        """Cast a client's vote on how far it moved the model, and restore the model.

        Args:
            client: One of the drawn clients.
            n_examples: Number of its examples.

        Raises:
            InvalidArgumentError: It was not drawn or has voted, or a number is out of range.
            NonFiniteError: A parameter is not finite. The model stays as the client left it;
                ``reset`` gives up the client.
            UnsupportedTypeError: A number is no integer.
        """
        client = _read_index("collect()", client)
        server, call = self.server, self._call
        if call is None or not server.in_progress:
            raise InvalidArgumentError(f"collect({client}) without a round. Call draw() before")
        deltas = find_deltas(server.places, server.params, self._stage)
        kept: list[Tensor] = []
        if call.rule == "residual":
            found = self._residuals.get(client)
            kept = [torch.zeros(each.shape, dtype=torch.float32, device="cpu") for each in deltas]
            if found is not None:
                kept = [each.clone() for each in found]
        ballot = cast_ballot(
            call,
            server.places,
            deltas,
            n_examples,
            node=client,
            coins=Coins(self._seed, call.round, client),
            residuals=kept,
        )
        refusal = server.take(client, ballot)
        if refusal is not None:
            raise InvalidArgumentError(
                f"the vote of client {client} in round {call.round} is not taken: {refusal.value}. "
                f"{_ADVICE.get(refusal, _ONE_VOTE)}"
            )
        if kept:
            self._residuals[client] = kept
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the server's parameters in the model, for example if a client is lost."""
        for name, param in self._stage.items():
            param.copy_(self.server.params[name])

    def step(self) -> Outcome:
        """End the round: the server counts, and the model holds its new parameters.

        Raises:
            InvalidArgumentError: No round is in progress.
        """
        outcome = self.server.finish()
        self.reset()
        return outcome


def _name_trained(params: Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the trained parameters by name.

    Raises:
        InvalidArgumentError: Two have one name.
        UnsupportedTypeError: Something else is among them.
    """
    if not isinstance(params, Iterable):
        raise UnsupportedTypeError(
            f"params is {type(params).__name__}; expected parameters, such as "
            "model.named_parameters()"
        )
    trained: dict[str, Tensor] = {}
    for number, entry in enumerate(params):
        pair: Any = entry if isinstance(entry, tuple) else (f"parameter {number}", entry)
        if len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise UnsupportedTypeError(
                f"params has {type(pair[-1]).__name__} as entry {number}; expected tensors or "
                "(name, tensor) pairs, such as model.named_parameters()"
            )
        name, param = pair
        if name in trained:
            raise InvalidArgumentError(f"params has {name!r} twice; expected a name for each")
        if param.requires_grad:
            trained[name] = param
    return trained


def _read_index(what: str, number: object) -> int:
    """Return a number as a Python integer; numpy's and torch's are accepted too.

    Raises:
        UnsupportedTypeError: It is no integer.
    """
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise UnsupportedTypeError(f"{what} got {number!r}; expected an integer") from error
