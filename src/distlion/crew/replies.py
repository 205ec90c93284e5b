"""Committed replies: kept by a member, and replayed by a worker that catches up.

Parameters are a function of earlier parameters and of the replies that followed, element by
element. So a *piece* of a parameter, copied after any step, comes to any later step by the replies
in between, and other pieces may have been copied after other steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from distlion.kernels.coin import Coins
from distlion.kernels.contract import Coefficients, Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.layout import WORD_ELEMENTS, BucketLayout, Slot, repack
from distlion.step.bucket import Bucket
from distlion.step.inputs import StepInputs
from distlion.step.param import VotingParam
from distlion.step.staging import bring_up
from distlion.votes.roster import Roster

PIECE_BYTES = 1 << 20
"""Most bytes of a piece. A commit may wait for the copy of one, which takes less than 1 ms."""


_OF_MOMENTA = (torch.float32, torch.bfloat16)


class ReplayError(Exception):
    """A reply does not follow the pieces that it is for."""


class BucketReply(NamedTuple):
    """The committed reply on one bucket.

    Attributes:
        members: Positions of the bucket's parameters among the trainable ones.
        present: For each of them, the number of votes.
        payload: The reply's bytes, uint8 on the CPU.
    """

    members: tuple[int, ...]
    present: tuple[int, ...]
    payload: Tensor


@dataclass(frozen=True)
class StepReply:
    """Everything but the parameters themselves that a commit needs.

    Attributes:
        step: Number of steps committed before it.
        roster: The voters of that step.
        coefficients: Hyperparameters of every param group in that step.
        seed: Seed of the coin of stochastic rounding; None to round to nearest.
        buckets: The reply on each bucket.
    """

    step: int
    roster: Roster
    coefficients: tuple[Coefficients, ...]
    seed: int | None
    buckets: tuple[BucketReply, ...]

    @classmethod
    def of(cls, inputs: StepInputs, buckets: Sequence[Bucket]) -> StepReply:
        """Copy the replies of a step that is being committed."""
        return cls(
            inputs.coins.step,
            buckets[0].vote.roster,
            tuple(inputs.coefficients),
            None if inputs.rounding is None else inputs.coins.seed,
            tuple(
                BucketReply(
                    bucket.layout.members,
                    tuple(bucket.reply.present.tolist()),
                    bucket.reply.payload.detach().cpu().reshape(-1).clone(),
                )
                for bucket in buckets
            ),
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of the replies."""
        return sum(bucket.payload.numel() for bucket in self.buckets)

    def describe(self) -> dict[str, Any]:
        """Return everything except payloads as numbers and lists."""
        roster = self.roster
        return {
            "step": self.step,
            "roster": [roster.ids, roster.owners, roster.weights, roster.epoch],
            "coefficients": self.coefficients,
            "seed": self.seed,
            "buckets": [
                [bucket.members, bucket.present, bucket.payload.numel()] for bucket in self.buckets
            ],
        }

    @classmethod
    def read(cls, described: Mapping[str, Any], payload: Tensor) -> StepReply:
        """Invert ``describe``, with the payloads of all buckets one after the other.

        Raises:
            ReplayError: It is not of this form.
        """
        try:
            sizes = [size for _, _, size in described["buckets"]]
            payloads = torch.split(payload, sizes)
            return cls(
                described["step"],
                Roster(*described["roster"]),
                tuple(Coefficients(*each) for each in described["coefficients"]),
                described["seed"],
                tuple(
                    BucketReply(tuple(members), tuple(present), part)
                    for (members, present, _), part in zip(
                        described["buckets"], payloads, strict=True
                    )
                ),
            )
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ReplayError(f"a reply that cannot be read: {error}") from error


@dataclass
class Piece:
    """A part of a parameter that is copied at once.

    Attributes:
        index: Number of the parameter among all of the optimizer.
        start, stop: Its elements; ``start`` is a multiple of 64.
        step: Number of steps in it; None until it has come.
    """

    index: int
    start: int
    stop: int
    step: int | None = None

    def segment(self, flat: Tensor, slot: Slot, coefficients: Coefficients) -> Segment:
        """Make its segment for the ops.

        Args:
            flat: All elements of the parameter, (n,).
            slot: The parameter's place in the bucket.
            coefficients: Its hyperparameters.
        """
        skipped = self.start // WORD_ELEMENTS
        place = slot._replace(
            n_elements=self.stop - self.start,
            first_word=slot.first_word + skipped,
            bucket_word=slot.bucket_word + skipped,
        )
        values = flat[self.start : self.stop]
        # Without a gradient no momentum is read, but it has to be of the dtype of one.
        momentum = values if values.dtype in _OF_MOMENTA else values.float()
        return Segment(place, values, None, momentum, coefficients)


def cut_pieces(params: Sequence[Tensor]) -> list[Piece]:
    """Cut parameters into pieces of whole words; one that is not contiguous stays whole."""
    pieces = []
    for index, param in enumerate(params):
        n = param.numel()
        fits = max(1, PIECE_BYTES // (param.element_size() * WORD_ELEMENTS)) * WORD_ELEMENTS
        length = fits if param.is_contiguous() else max(1, n)
        pieces += [Piece(index, at, min(n, at + length)) for at in range(0, n, length)]
    return pieces


class Replica:
    """The parameters of a worker that catches up, as far as they have come.

    Args:
        params: All parameters of the optimizer. Written.
        trained: The trainable ones among them, in order.

    Attributes:
        pieces: Their pieces.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        trained: Sequence[VotingParam],
    ) -> None:
        self._params, self._trained = [param.detach() for param in params], trained
        # A contiguous parameter is its own copy.
        self._flat = [param.contiguous().view(-1) for param in self._params]
        places = {id(param): index for index, param in enumerate(params)}
        self._index = [places[id(each.param)] for each in trained]
        self.pieces = cut_pieces(self._params)
        self._of: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            self._of.setdefault(piece.index, []).append(piece)
        self._n_left = len(self.pieces)

    @property
    def is_complete(self) -> bool:
        """True once all pieces have come."""
        return not self._n_left

    def find_steps(self) -> set[int | None]:
        """Return the numbers of steps in its pieces."""
        return {piece.step for piece in self.pieces}

    def place(self, number: int, step: int, values: Tensor) -> None:
        """Write a piece.

        Args:
            number: Its number among the pieces.
            step: Number of steps in it.
            values: Its bytes, uint8.

        Raises:
            ReplayError: There is no such piece, or it has come before.
        """
        if not 0 <= number < len(self.pieces) or self.pieces[number].step is not None:
            raise ReplayError(f"piece {number} of {len(self.pieces)} is unknown, or came before")
        piece = self.pieces[number]
        flat = self._flat[piece.index][piece.start : piece.stop]
        if values.numel() != flat.numel() * flat.element_size():
            raise ReplayError(f"piece {number} has {values.numel()} bytes")
        flat.copy_(values.view(flat.dtype))
        piece.step = step
        self._n_left -= 1

    @torch.no_grad()
    def replay(self, reply: StepReply) -> None:
        """Apply a step's reply to the pieces that were copied before it.

        Raises:
            ReplayError: A reply before it is missing.
        """
        before = [piece for piece in self.pieces if piece.step is not None]
        if any(piece.step < reply.step for piece in before if piece.step is not None):
            raise ReplayError(f"the reply of a step before step {reply.step} is missing")
        rounding = None if reply.seed is None else Coins(reply.seed, reply.step, 0).rounding
        for bucket in reply.buckets:
            layout = self._lay_out(bucket, reply.roster.n_shards)
            members = [self._trained[position] for position in bucket.members]
            moved, present = [], []
            for param, slot, n_votes in zip(members, layout.slots, bucket.present, strict=True):
                coefficients = reply.coefficients[param.group]
                for piece, flat in self._find(param.position):
                    if piece.step == reply.step:
                        moved.append(piece.segment(flat, slot, coefficients))
                        present.append(n_votes)
            if moved:
                device = moved[0].param.device
                payload = bring_up(bucket.payload, device)
                vote = members[0].rule.start(layout, reply.roster)
                vote.apply(choose_kernels(device), moved, present, payload, rounding)
        for piece in before:
            if piece.step == reply.step:
                piece.step += 1

    def settle(self) -> None:
        """Write parameters that are not contiguous."""
        for param, flat in zip(self._params, self._flat, strict=True):
            if not param.is_contiguous():
                param.copy_(flat.view(param.shape))

    def _find(self, position: int) -> Iterator[tuple[Piece, Tensor]]:
        index = self._index[position]
        for piece in self._of.get(index, []):
            yield piece, self._flat[index]

    def _lay_out(self, bucket: BucketReply, n_shards: int) -> BucketLayout:
        try:
            slots = [self._trained[position].whole_slot for position in bucket.members]
        except IndexError as error:
            raise ReplayError("a reply is on parameters that this worker lacks") from error
        return repack(BucketLayout(0, bucket.members, (), n_shards), slots)


class HasParameters(Protocol):
    """An optimizer, as both sides of a join see it."""

    @property
    def committed_step(self) -> int:
        """Number of committed steps."""
        ...

    def list_all(self) -> list[Tensor]:
        """List all parameters, in the order of their groups."""
        ...

    def make_replica(self) -> Replica:
        """Make the replica of them that a newcomer writes while it catches up."""
        ...
