"""The server of clients' votes, which keeps the parameters and uses no network."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distlion.errors import CheckpointError, InvalidArgumentError, NonFiniteError
from distlion.kernels import FLOAT32_MAX, Coins
from distlion_flower.ballot import Ballot, Call
from distlion_flower.count import BallotCount, weigh
from distlion_flower.places import Places
from distlion_flower.refusals import Refusal, find_fault
from distlion_flower.settings import ServerSettings

logger = logging.getLogger("distlion")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round.

    Attributes:
        round: Number of the round, from 0.
        committed: False for a void round, which leaves parameters and momentum unchanged: too few
            ballots were taken, or a parameter would not stay finite.
        taken: Nodes of the counted ballots, in order.
        votes: Number of votes of each of them; empty for a void round.
        lost: Number of nodes that were asked and sent nothing.
        refused: Number of ballots that were not taken, by reason.
        counted_bytes: Bytes of the counted votes, all of them together.
    """

    round: int
    committed: bool
    taken: tuple[int, ...]
    votes: tuple[int, ...]
    lost: int
    refused: Mapping[Refusal, int]
    counted_bytes: int


@dataclass
class _OpenRound:
    """Ballots of the round in progress."""

    call: Call
    lr: float
    asked: frozenset[int]
    answered: set[int] = field(default_factory=set)
    ballots: dict[int, Ballot] = field(default_factory=dict)
    refused: Counter[Refusal] = field(default_factory=Counter)


class VoteServer:
    """A server that keeps parameters, which clients move by votes, round by round.

    A round is atomic: ``finish`` commits all ballots taken, or nothing. Ballots are checked on
    arrival, kept packed, and counted in the order of their nodes, so the outcome does not depend on
    timing. Faults of a ballot are counted and logged, and never raised.

    Args:
        params: Parameters by name; copied to the CPU.
        settings: Settings of the count and of the step.

    Attributes:
        places: Places of elements.
        params: Parameters by name; written by ``finish``.
        refused: Number of ballots that were not taken in all rounds, by reason.

    Raises:
        InvalidArgumentError: There is nothing to vote on.
        NonFiniteError: A parameter is not finite.
        UnsupportedTypeError: Votes do not support a dtype.

    Notes:
        Memory holds the parameters, a momentum in float32, and one bit an element of each ballot
        taken. Counting needs up to 24 bytes an element more. None of it grows with rounds.
        An array that half of the clients or more do not train has a median scale of 0. It does not
        move in such a round, and a warning names it once. With any other rule, a single client
        could decide how far such an array moves.
    """

    def __init__(self, params: Mapping[str, Tensor], settings: ServerSettings) -> None:
        self.settings = settings
        self.params = {name: param.detach().cpu().clone() for name, param in params.items()}
        self.places = Places.of(self.params)
        _check_finite(self.params)
        self.refused: Counter[Refusal] = Counter()
        self._count = BallotCount(self.places)
        self._voted = [self.places.names[number] for number in self.places.bucket.members]
        self._momentum = [
            torch.zeros(slot.n_elements, dtype=torch.float32, device="cpu")
            for slot in self.places.bucket.slots
        ]
        self._reach: tuple[float, ...] = ()
        self._next_round = 0
        self._untrained: set[str] = set()
        self._open: _OpenRound | None = None

    @property
    def next_round(self) -> int:
        """Number of the next round; void rounds count."""
        return self._next_round

    @property
    def in_progress(self) -> bool:
        """True between ``begin`` and ``finish``."""
        return self._open is not None

    @property
    def payload_bytes(self) -> int:
        """Bytes of a vote, without its round, number of examples and checksum."""
        return self._count.shape.vote_bytes

    def begin(self, nodes: Iterable[int]) -> Call:
        """Begin a round.

        Args:
            nodes: Clients to ask.

        Returns:
            The call to send to them with ``params``.

        Raises:
            InvalidArgumentError: A round is in progress, or the rate of the new one is out of
                range.
        """
        if self._open is not None:
            raise InvalidArgumentError(
                f"begin() while round {self._open.call.round} is in progress. Call finish() first"
            )
        settings = self.settings
        lr = settings.lr_of(self._next_round)
        call = Call(self._next_round, settings.rule, settings.spread, self._reach)
        self._open = _OpenRound(call, lr, frozenset(nodes))
        return call

    def take(self, node: object, ballot: Ballot | Refusal) -> Refusal | None:
        """Take a node's ballot, or return the reason to refuse it; raise nothing.

        Args:
            node: Sender of the ballot, by the transport's knowledge.
            ballot: The ballot, or a fault that is already known.
        """
        current = self._open
        if current is None:
            self.refused[Refusal.ROUND] += 1
            return Refusal.ROUND
        fault = self._judge(current, node, ballot)
        if fault is not None:
            current.refused[fault] += 1
            self.refused[fault] += 1
            logger.info(
                "round %d: a ballot of node %s is not taken: %s",
                current.call.round,
                node,
                fault.value,
            )
        return fault

    def finish(self) -> Outcome:
        """End the round: move the parameters by the ballots taken, or leave all unchanged.

        Raises:
            InvalidArgumentError: No round is in progress.
        """
        current = self._open
        if current is None:
            raise InvalidArgumentError("finish() without a round. Call begin() first")
        self._open = None
        self._next_round += 1
        nodes = sorted(current.ballots)
        ballots = [current.ballots[node] for node in nodes]
        enough, diverged = len(nodes) >= self.settings.min_replies, None
        votes = self._weigh(ballots) if enough else []
        if enough:
            diverged = self._commit(current, ballots, votes)
        committed = enough and diverged is None
        outcome = Outcome(
            current.call.round,
            committed,
            tuple(nodes),
            tuple(votes) if committed else (),
            len(current.asked) - len(current.answered),
            dict(current.refused),
            sum(len(ballot.payload) for ballot in ballots),
        )
        if diverged is not None:
            logger.warning("%s", _describe_divergence(outcome, diverged, self.params[diverged]))
        elif not committed:
            logger.warning("%s", _describe_void(outcome, len(current.asked), self.settings))
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """Return the server's state besides the parameters: tensors and numbers."""
        momentum = dict(zip(self._voted, self._momentum, strict=True))
        return {
            "round": self._next_round,
            "reach": list(self._reach),
            "momentum": {name: each.clone() for name, each in momentum.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``: all of it, or nothing.

        Raises:
            CheckpointError: The state belongs to another model, is not finite, or is no such state.
        """
        try:
            number, reach = int(state["round"]), tuple(float(each) for each in state["reach"])
            momentum = [state["momentum"][name].detach().float() for name in self._voted]
            sizes = [each.numel() for each in momentum]
            others = sorted(set(state["momentum"]) - set(self._voted))
            finite = all(0 <= b <= FLOAT32_MAX for b in reach)
            finite = finite and all(bool(each.isfinite().all()) for each in momentum)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"the state of the server lacks something ({error!r}); expected the result of "
                "state_dict() of a server with the same model"
            ) from error
        expected = [each.numel() for each in self._momentum]
        if sizes != expected or others or len(reach) not in (0, len(expected)) or number < 0:
            more = f" and also {', '.join(others)}" if others else ""
            raise CheckpointError(
                f"the state of the server belongs to another model, with parameters of {sizes} "
                f"elements{more}; expected {expected}"
            )
        if not finite:
            raise CheckpointError(
                "the state of the server has a reach below 0 or a number that is not finite. "
                "Expected the result of state_dict(). Load an older one"
            )
        self._next_round, self._reach = number, reach
        self._momentum = [each.reshape(-1).cpu().clone() for each in momentum]

    def _judge(self, current: _OpenRound, node: object, ballot: Ballot | Refusal) -> Refusal | None:
        """Keep a valid ballot; return the fault of any other."""
        if type(node) is not int or node not in current.asked:
            return Refusal.NODE
        current.answered.add(node)
        if isinstance(ballot, Refusal):
            return ballot
        if node in current.ballots:
            return Refusal.SECOND
        if type(ballot.node) is not int or ballot.node != node:
            return Refusal.NODE
        fault = find_fault(
            ballot,
            current.call,
            self._count.shape,
            len(self._voted),
            max_scale=self.settings.max_scale,
        )
        if fault is None:
            current.ballots[node] = ballot
        return fault

    def _weigh(self, ballots: list[Ballot]) -> list[int]:
        if self.settings.weights == "equal":
            return [1] * len(ballots)
        examples = [ballot.n_examples for ballot in ballots]
        return weigh(examples, max_weight=self.settings.max_weight)

    @torch.no_grad()
    def _commit(self, current: _OpenRound, ballots: list[Ballot], votes: list[int]) -> str | None:
        """Compute the outcome of the votes, then move momentum and parameters by it.

        Returns:
            None, or the name of a parameter that would not stay finite; then nothing has moved.
        """
        settings, count = self.settings, self._count
        sent = count.read_scales(ballots)
        scales = sent.median(0).values  # the lower one
        reach: tuple[float, ...] = ()
        if settings.rule == "stochastic":
            reach = tuple((scales * settings.spread).tolist())
            moves = count.mean_of_signs(ballots, votes, current.call.reach or reach)
        elif settings.rule == "majority":
            tie = Coins(settings.seed, current.call.round, 0).tie
            moves = count.majority(ballots, votes, scales, tie)
        else:
            moves = count.mean_of_scaled_signs(ballots, votes, scales * settings.max_weight)
        moved = []
        # Products and sums are separate: fused, they would round differently on other machines.
        for name, old, move in zip(self._voted, self._momentum, moves, strict=True):
            momentum, param = old * settings.momentum + move, self.params[name]
            after = param.float().reshape(-1) - momentum * current.lr
            moved.append((param, after.view(param.shape).to(param.dtype), momentum))
            if not (moved[-1][1].isfinite().all() and momentum.isfinite().all()):
                return name
        for param, after, _ in moved:
            param.copy_(after)
        self._momentum, self._reach = [momentum for _, _, momentum in moved], reach
        self._warn_of_untrained(current.call.round, sent, scales)
        return None

    def _warn_of_untrained(self, round_number: int, sent: Tensor, scales: Tensor) -> None:
        """Warn once of each parameter that some clients train, and half or more do not."""
        stuck = ((scales == 0) & (sent > 0).any(0)).tolist()
        names = [name for name, is_so in zip(self._voted, stuck, strict=True) if is_so]
        new = [name for name in names if name not in self._untrained]
        self._untrained.update(new)
        if new:
            logger.warning(
                "round %d: half of the clients or more did not train %s, so it does not move. "
                "Expected most clients to train each array of the vote. Freeze it on all clients, "
                "or train it on more of them",
                round_number,
                ", ".join(new),
            )


def _check_finite(params: Mapping[str, Tensor]) -> None:
    for name, param in params.items():
        if not param.isfinite().all():
            raise NonFiniteError(
                f"{name} is not finite before the first round. Expected finite parameters. Fix "
                "it, or leave it out of the vote"
            )


def _describe_divergence(outcome: Outcome, name: str, param: Tensor) -> str:
    return (
        f"round {outcome.round} is void: {name} would not be finite in {param.dtype}. Expected "
        "finite parameters and momentum. Lower lr, or max_scale. Parameters stay as they are"
    )


def _describe_void(outcome: Outcome, n_asked: int, settings: ServerSettings) -> str:
    refused = "".join(f", {n} not taken ({why.value})" for why, n in outcome.refused.items())
    return (
        f"round {outcome.round} is void: of {n_asked} clients asked, {len(outcome.taken)} voted, "
        f"{outcome.lost} sent nothing{refused}. Expected min_replies={settings.min_replies} votes. "
        "Parameters stay as they are. Ask more clients in a round, or lower min_replies"
    )
