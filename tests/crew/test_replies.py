"""Pieces of parameters, copied after different steps, come to the same bits by replies."""

from __future__ import annotations

import pytest
import torch

import distlion
from distlion.crew import replies
from distlion.crew.replies import ReplayError, StepReply, cut_pieces
from distlion.votes.aggregation import Aggregation
from replied_run import Run, copy_piece, make_replica, pass_on

N_STEPS = 9
RULES: list[Aggregation] = [
    distlion.MajorityVote(),
    distlion.TernaryVote(),
    distlion.Average(),
    distlion.QuantizedVote(bits=3),
    distlion.FullPrecision(),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pieces_copied_after_different_steps_come_to_the_same_bits(
    rule: Aggregation, dtype: torch.dtype
) -> None:
    run = Run(rule, dtype, backwards=dtype is torch.bfloat16)
    replica, own = make_replica(run)
    order = torch.randperm(len(replica.pieces), generator=torch.Generator().manual_seed(3)).tolist()
    assert len(order) > N_STEPS
    share = -(-len(order) // N_STEPS)
    for step in range(N_STEPS):
        for number in order[share * step : share * (step + 1)]:
            replica.place(number, run.step, copy_piece(run, replica.pieces[number]))
        replica.replay(pass_on(run.commit()))
    replica.settle()
    assert replica.is_complete
    assert replica.find_steps() == {N_STEPS}
    for param, copy in zip(run.params, own, strict=True):
        assert torch.equal(param, copy)


def test_a_reply_that_is_replayed_twice_changes_nothing() -> None:
    run = Run(RULES[0], torch.float32)
    replica, own = make_replica(run)
    for number, piece in enumerate(replica.pieces):
        replica.place(number, 0, copy_piece(run, piece))
    reply = run.commit()
    replica.replay(reply)
    replica.replay(reply)
    replica.settle()
    assert all(map(torch.equal, run.params, own))


def test_a_missing_reply_is_noticed() -> None:
    run = Run(RULES[0], torch.float32)
    replica, _ = make_replica(run)
    replica.place(0, 0, copy_piece(run, replica.pieces[0]))
    run.commit()
    later = run.commit()
    with pytest.raises(ReplayError, match="before step 1 is missing"):
        replica.replay(later)


def test_a_piece_that_came_before_is_refused() -> None:
    run = Run(RULES[0], torch.float32)
    replica, _ = make_replica(run)
    values = copy_piece(run, replica.pieces[0])
    replica.place(0, 0, values)
    with pytest.raises(ReplayError, match="came before"):
        replica.place(0, 0, values)
    with pytest.raises(ReplayError, match="unknown"):
        replica.place(len(replica.pieces), 0, values)


@pytest.mark.parametrize("lost", ["step", "roster", "buckets", "coefficients"])
def test_a_reply_without_a_part_is_refused(lost: str) -> None:
    reply = Run(RULES[0], torch.float32).commit()
    described = {key: value for key, value in reply.describe().items() if key != lost}
    with pytest.raises(ReplayError, match="cannot be read"):
        StepReply.read(described, torch.cat([bucket.payload for bucket in reply.buckets]))


def test_pieces_are_whole_words_and_hold_every_element_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "PIECE_BYTES", 1024)
    params = [torch.zeros(1000), torch.zeros(0), torch.zeros(64), torch.zeros(40, 30).t()]
    pieces = cut_pieces(params)
    for index, param in enumerate(params):
        ranges = [(piece.start, piece.stop) for piece in pieces if piece.index == index]
        covered = [element for start, stop in ranges for element in range(start, stop)]
        assert covered == list(range(param.numel()))
        assert all(start % 64 == 0 for start, _ in ranges)
    assert sum(piece.index == 3 for piece in pieces) == 1
