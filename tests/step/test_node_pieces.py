"""What each rank of a node keeps of a parameter."""

from __future__ import annotations

import torch

from distlion.step.nodes import NodePieces

# Cut for three ranks, these leave the turn at another rank.
UNEVEN = torch.zeros(4 * 4096 + 1)
NEXT = torch.zeros(5 * 4096)


def test_a_parameter_that_was_refused_does_not_move_the_pieces_of_the_next_one() -> None:
    undisturbed, undone = NodePieces(3, 0), NodePieces(3, 0)
    for pieces in (undisturbed, undone):
        pieces.cut(UNEVEN)
    refused = torch.zeros(4096)
    undone.cut(refused)
    undone.forget([refused])
    for pieces in (undisturbed, undone):
        pieces.cut(NEXT)
    assert undone.of(NEXT) == undisturbed.of(NEXT)
    assert undone.of(refused) == ((0, 4096),)  # nobody's piece: as where there are no nodes


def test_a_parameter_that_was_kept_moves_the_pieces_of_the_next_one() -> None:
    alone, behind = NodePieces(3, 0), NodePieces(3, 0)
    behind.cut(torch.zeros(4096))
    for pieces in (alone, behind):
        pieces.cut(NEXT)
    assert behind.of(NEXT) != alone.of(NEXT)
