"""Bugs to plant in recursive doubling: sums that travel, and who hears of what."""

from __future__ import annotations

from planted import Mutation

DOUBLING = ("wire/test_recursive_doubling.py",)
EXAM = ("wire/test_pattern_contract.py",)

DOUBLED = (
    Mutation(
        "a carry is lost where two sums meet",
        "kernels/sums.py",
        "carry = (a & b) | (half & carry)",
        "carry = a & b",
        DOUBLING,
    ),
    Mutation(
        "a tie counts as a majority where votes are summed in parts",
        "kernels/sums.py",
        "planes[0, run.words] |= tied[run.words] & flips",
        "planes[0, run.words] |= tied[run.words]",
        DOUBLING,
    ),
    Mutation(
        "who is absent counts as a vote against, summed in parts",
        "kernels/sums.py",
        "runs = cut_runs(bucket, present, 0, n_words // BLOCK_WORDS, device=device)",
        "runs = cut_runs(bucket, present | True, 0, n_words // BLOCK_WORDS, device=device)",
        DOUBLING,
    ),
    Mutation(
        "the bits of negative levels are not inverted, summed in parts",
        "kernels/sums.py",
        "(planes[1:] ^ ~sign) & mask",
        "planes[1:] & mask",
        DOUBLING,
    ),
    Mutation(
        "ranks beyond the power of two get no vote",
        "wire/recursive_doubling.py",
        "return size + max(0, min(first + size, n - _largest_power(n)) - first)",
        "return size",
        DOUBLING,
    ),
    Mutation(
        "a rank does not check what it sends itself",
        "wire/recursive_doubling.py",
        "    if read_chunk(link.kernels, raw, shape.sum_chunk(meeting.gives), like) is not None:\n",
        "    if meeting.gives:\n",
        EXAM,
    ),
    Mutation(
        "a sum of votes of different steps goes on",
        "wire/recursive_doubling.py",
        "            and header.step == first.step\n",
        "",
        EXAM,
    ),
    Mutation(
        "an error that one worker found is forgotten by doubling",
        "wire/recursive_doubling.py",
        "            header.status is Status.OK\n            and header.step",
        "            header.step",
        EXAM,
    ),
    Mutation(
        "auto chooses a pattern that cannot carry the votes",
        "wire/cost.py",
        "[each for each in PATTERNS.values() if each.carries(shape, weighted=weighted)]",
        "list(PATTERNS.values())",
        ("wire/test_choice.py",),
    ),
    Mutation(
        "a sum is a bit too short for all votes against zero",
        "layout.py",
        "return (n_votes * ((1 << vote_planes) - 1)).bit_length()",
        "return max(1, (n_votes * ((1 << vote_planes) - 1) - 1).bit_length())",
        DOUBLING,
    ),
)
