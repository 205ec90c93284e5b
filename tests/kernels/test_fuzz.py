"""Random and damaged votes, as other ranks might send them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distlion.errors import InvalidArgumentError
from distlion.kernels import BlockVotes, Coin, Kernels
from distlion.kernels.contract import PARAM_DTYPES, SCALE_BLOCK_ELEMENTS
from distlion.kernels.cpu import INSTRUCTION_SETS, CpuKernels
from distlion.layout import BLOCK_WORDS, BucketLayout, Slot, count_words
from fuzz_settings import FUZZ, keep_on

REFERENCE = Kernels()
BACKENDS = [CpuKernels(name) for name in INSTRUCTION_SETS]
TIE = Coin(0x9E3779B97F4A7C15)
MARGIN = 64

# Counting.

OPS = (
    "signs",
    "signs or zero",
    "ternary",
    "pairs",
    "pairs or zero",
    "ones",
    "levels",
    "float32",
    "bfloat16",
)


def count(
    kernels: Kernels,
    op: str,
    votes: Tensor,
    present: Tensor,
    bucket: BucketLayout,
    first_block: int,
    out: Tensor,
) -> None:
    shard = BlockVotes(votes, present, bucket, first_block)
    if op in ("signs", "signs or zero"):
        kernels.count_signs(shard, TIE if op == "signs" else None, out=out)
    elif op == "ternary":
        kernels.count_ternary(shard, out=out)
    elif op in ("pairs", "pairs or zero"):
        kernels.count_pairs(shard, TIE if op == "pairs" else None, out=out)
    elif op == "ones":
        kernels.count_ones(shard, out=out)
    elif op == "levels":
        kernels.count_levels(shard, TIE, out=out)
    else:
        kernels.sum_directions(shard, dtype=getattr(torch, op), out=out)


def planes_of(op: str, n_workers: int, level_planes: int) -> tuple[int, int]:
    """Tell the planes of votes and of the reply."""
    return {
        "signs": (1, 1),
        "signs or zero": (1, 2),
        "ternary": (2, 2),
        "pairs": (2, 1),
        "pairs or zero": (2, 2),
        "ones": (1, n_workers.bit_length()),
        "levels": (level_planes, 1),
        "float32": (32, 2),
        "bfloat16": (16, 2),
    }[op]


def random_words(shape: tuple[int, ...], seed: int, *, sparse: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**63), 2**63 - 1, (*shape, BLOCK_WORDS), generator=generator)
    if sparse:  # so that workers agree often, and tie
        drawn &= drawn.roll(1, 0) & drawn.roll(1, 1)
    return drawn


def place_slots(sizes: list[int], gaps: list[int], first_bits: list[int]) -> tuple[Slot, ...]:
    slots = []
    word = 0
    for index, (size, gap, first_bit) in enumerate(zip(sizes, gaps, first_bits, strict=True)):
        slots.append(Slot(f"p{index}", size, word + 12345, word, first_bit))
        word += count_words(size) + gap
    return tuple(slots)


def in_margins(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Make a packed tensor and the memory around it."""
    n = BLOCK_WORDS
    for size in shape:
        n *= size
    memory = torch.full((n + 2 * MARGIN,), 0x1357_9BDF_0246_8ACE)
    return memory[MARGIN : MARGIN + n].view(*shape, BLOCK_WORDS), memory


def test_counts_of_random_votes_are_those_of_the_plain_kernels() -> None:
    @given(
        op=st.sampled_from(OPS),
        n_workers=st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 255, 300])),
        sizes=st.lists(st.integers(0, 700), min_size=1, max_size=5),
        gaps=st.lists(st.integers(0, 2), min_size=5, max_size=5),
        first_bits=st.lists(st.integers(0, 63), min_size=5, max_size=5),
        n_blocks=st.integers(1, 4),
        first_block=st.integers(0, 4),
        level_planes=st.integers(1, 8),
        share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        sparse=st.booleans(),
        seed=st.integers(0, 2**63 - 1),
    )
    @FUZZ
    def fuzz(
        op: str,
        n_workers: int,
        sizes: list[int],
        gaps: list[int],
        first_bits: list[int],
        n_blocks: int,
        first_block: int,
        level_planes: int,
        share: float,
        sparse: bool,
        seed: int,
    ) -> None:
        slots = place_slots(sizes, gaps[: len(sizes)], first_bits[: len(sizes)])
        bucket = BucketLayout(0, tuple(range(len(slots))), slots, 1)
        vote_planes, out_planes = planes_of(op, n_workers, level_planes)
        votes = random_words((n_workers, n_blocks, vote_planes), seed, sparse=sparse)
        generator = torch.Generator().manual_seed(seed)
        present = torch.rand(n_workers, len(slots), generator=generator) < share
        out, expected = in_margins((n_blocks, out_planes))
        count(REFERENCE, op, votes, present, bucket, first_block, out)
        for kernels in BACKENDS:
            out, memory = in_margins((n_blocks, out_planes))
            count(kernels, op, votes, present, bucket, first_block, out)
            assert torch.equal(memory, expected), kernels.instruction_set

    keep_on(fuzz)


ANY_SLOT = st.builds(
    Slot,
    st.just("any"),
    st.integers(0, 2000) | st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 40) | st.integers(0, 2**64 - 1),
    st.integers(0, 63) | st.integers(0, 2**64 - 1),
)
# More elements, words or blocks than this are refused.
MOST = 2**56
SIZES_OF_ARGUMENTS = (
    "workers",
    "blocks",
    "planes",
    "out blocks",
    "out planes",
    "present workers",
    "present slots",
)


def test_counts_of_any_shapes_and_slots_are_refused_or_stay_within_their_reply() -> None:
    @given(
        op=st.sampled_from(OPS),
        n_workers=st.integers(1, 5),
        n_blocks=st.integers(0, 3),
        level_planes=st.integers(1, 8),
        slots=st.lists(ANY_SLOT, max_size=4),
        first_block=st.integers(0, 4) | st.integers(0, 2**64 - 1),
        slips=st.dictionaries(st.sampled_from(SIZES_OF_ARGUMENTS), st.integers(0, 9), max_size=2),
        is_slip=st.booleans(),
    )
    @FUZZ
    def fuzz(
        op: str,
        n_workers: int,
        n_blocks: int,
        level_planes: int,
        slots: list[Slot],
        first_block: int,
        slips: dict[str, int],
        is_slip: bool,
    ) -> None:
        planes, out_planes = planes_of(op, n_workers, level_planes)
        right = (n_workers, n_blocks, planes, n_blocks, out_planes, n_workers, len(slots))
        sizes = dict(zip(SIZES_OF_ARGUMENTS, right, strict=True)) | (slips if is_slip else {})
        shape = (sizes["workers"], sizes["blocks"], sizes["planes"], BLOCK_WORDS)
        votes = torch.zeros(shape, dtype=torch.int64)
        present = torch.ones(sizes["present workers"], sizes["present slots"], dtype=torch.bool)
        bucket = BucketLayout(0, tuple(range(len(slots))), tuple(slots), 1)
        places = [first_block, *(n for slot in slots for n in (slot.n_elements, slot.bucket_word))]
        is_huge = max(places) > MOST or max((slot.first_bit for slot in slots), default=0) > 63
        for kernels in BACKENDS:
            out, memory = in_margins((sizes["out blocks"], sizes["out planes"]))
            before = memory.clone()
            try:
                count(kernels, op, votes, present, bucket, first_block, out)
            except InvalidArgumentError:
                assert is_slip or is_huge, "only sizes are refused"
                assert torch.equal(memory, before)
            assert torch.equal(memory[:MARGIN], before[:MARGIN])
            assert torch.equal(memory[-MARGIN:], before[-MARGIN:])

    keep_on(fuzz)


# Sums.


def test_square_sums_of_random_bits_are_those_of_the_plain_kernels() -> None:
    @given(
        dtype=st.sampled_from(PARAM_DTYPES),
        n=st.integers(0, 3 * SCALE_BLOCK_ELEMENTS + 9),
        offset=st.integers(0, 40),
        seed=st.integers(0, 2**63 - 1),
    )
    @FUZZ
    def fuzz(dtype: torch.dtype, n: int, offset: int, seed: int) -> None:
        words = random_words(((offset + n) // BLOCK_WORDS + 1,), seed, sparse=False)
        tensor = words.view(dtype).view(-1)[offset : offset + n]
        # Few random numbers are not finite, but one in most blocks is.
        if seed % 2:
            tensor.masked_fill_(~tensor.isfinite(), 1.0)
        expected = REFERENCE.square_sums(tensor)
        for kernels in BACKENDS:
            found = kernels.square_sums(tensor)
            assert torch.equal(found.isnan(), expected.isnan()), kernels.instruction_set
            assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))

    keep_on(fuzz)
