"""Rules as values: what is refused, and the bits that they take."""

import pytest
import torch

from distlion import (
    Average,
    FullPrecision,
    MajorityVote,
    MaskedVote,
    QuantizedVote,
    TernaryVote,
)
from distlion.errors import CheckpointError, InvalidArgumentError, UnsupportedTypeError
from distlion.votes import Aggregation
from distlion.votes.registry import parse_rule


@pytest.mark.parametrize(
    "text",
    [
        "Unknown()",
        "__import__('os').system('true')",
        "MajorityVote(tie='heads')",
        "MajorityVote('random')",
        "MajorityVote",
        "QuantizedVote(bits=99)",
        "QuantizedVote(volume=3)",
        "FullPrecision(dtype=torch.save)",
        "1 +",
        "",
    ],
)
def test_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be rebuilt"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: MajorityVote(tie="even"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: MaskedVote(tie="even"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: QuantizedVote(bits=0), InvalidArgumentError),
        (lambda: QuantizedVote(bits=9), InvalidArgumentError),
        (lambda: QuantizedVote(bits=2.0), UnsupportedTypeError),  # type: ignore[arg-type]
        (lambda: QuantizedVote(norm="l2"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: QuantizedVote(step=0.0), InvalidArgumentError),
        (lambda: QuantizedVote(step=float("nan")), InvalidArgumentError),
        (lambda: FullPrecision(dtype=torch.float16), InvalidArgumentError),
    ],
)
def test_a_rule_out_of_range_is_refused_when_made(make, error) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match="expected"):
        make()


@pytest.mark.parametrize(("workers", "bits"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_average_replies_with_the_bits_of_a_count(workers: int, bits: int) -> None:
    assert Average().reply_planes(workers) == bits


@pytest.mark.parametrize(
    ("rule", "up", "down"),
    [
        (MajorityVote(), 1, 1),
        (MajorityVote(tie="zero"), 1, 2),
        (TernaryVote(), 2, 2),
        (MaskedVote(), 2, 2),
        (MaskedVote(tie="random"), 2, 1),
        (Average(), 1, 3),
        (QuantizedVote(bits=5), 5, 1),
        (FullPrecision(), 32, 2),
        (FullPrecision(dtype=torch.bfloat16), 16, 2),
    ],
    ids=repr,
)
def test_bits_up_and_down_at_five_workers(rule: Aggregation, up: int, down: int) -> None:
    assert (rule.vote_planes, rule.reply_planes(5)) == (up, down)
