"""What every backend does: where bits lie, what is left alone, and identities between ops.

That the arithmetic itself is right is shown by the numpy oracle in tests/distributed.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends import Backend, over_all
from distlion.kernels import BlockVotes, Coefficients, Coin, Coins, ReplyFormat, Segment
from distlion.kernels.coin import GOLDEN, MASK, mix
from distlion.kernels.contract import PARAM_DTYPES
from distlion.layout import BLOCK_WORDS, BucketLayout, fill_buckets, place_parameters

HYPER = Coefficients(beta1=0.9, beta2=0.99, lr=0.01, weight_decay=0.1)
SIZES = (1, 7, 63, 64, 65, 1000)
COINS = Coins(seed=3, step=4, voter=0)


def make_bucket(sizes: tuple[int, ...] = SIZES, n_shards: int = 1) -> BucketLayout:
    names = [f"p{index}" for index in range(len(sizes))]
    (bucket,) = fill_buckets(
        place_parameters(names, sizes), [0] * len(sizes), n_shards=n_shards, bucket_elements=1 << 30
    )
    return bucket


def make_segments(
    bucket: BucketLayout,
    device: torch.device,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    absent: frozenset[int] = frozenset(),
) -> list[Segment]:
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(n, generator=generator).to(device, dtype)

    return [
        Segment(
            slot,
            draw(slot.n_elements),
            None if index in absent else draw(slot.n_elements),
            draw(slot.n_elements),
            HYPER,
        )
        for index, slot in enumerate(bucket.slots)
    ]


def empty_planes(bucket: BucketLayout, planes: int, device: torch.device) -> Tensor:
    shape = (bucket.n_blocks, planes, BLOCK_WORDS)
    return torch.full(shape, -1, dtype=torch.int64, device=device)


def bit_of(packed: Tensor, plane: int, coordinate: int) -> int:
    """Read one bit by the definition of the layout, word by word."""
    word = coordinate // 64
    value = int(packed[word // BLOCK_WORDS, plane, word % BLOCK_WORDS]) & MASK
    return value >> (coordinate % 64) & 1


@over_all
def test_signs_lie_where_the_layout_says_and_spare_bits_are_zero(backend: Backend) -> None:
    bucket = make_bucket()
    segments = make_segments(bucket, backend.device)
    out = empty_planes(bucket, 1, backend.device)
    backend.kernels.encode_signs(segments, COINS.zero, out=out)
    expected = [0] * (bucket.n_blocks * BLOCK_WORDS * 64)
    for segment in segments:
        assert segment.grad is not None
        m, g = segment.exp_avg.cpu().numpy(), segment.grad.cpu().numpy()
        c = np.float32(0.9) * m + np.float32(1 - 0.9) * g
        start = segment.slot.bucket_word * 64
        expected[start : start + len(c)] = (c > 0).astype(int).tolist()
    assert [bit_of(out, 0, i) for i in range(len(expected))] == expected


@over_all
def test_ternary_planes_tell_minus_one_zero_and_one(backend: Backend) -> None:
    bucket = make_bucket((3,))
    (segment,) = make_segments(bucket, backend.device)
    assert segment.grad is not None
    segment.exp_avg.zero_()
    segment.grad.copy_(torch.tensor([-2.0, 0.0, 5.0]))
    out = empty_planes(bucket, 2, backend.device)
    backend.kernels.encode_ternary([segment], out=out)
    votes = [(bit_of(out, 0, i), bit_of(out, 1, i)) for i in range(3)]
    assert votes == [(0, 1), (0, 0), (1, 1)]


@over_all
def test_a_pair_is_the_signs_of_direction_and_gradient(backend: Backend) -> None:
    bucket = make_bucket((6,))
    (segment,) = make_segments(bucket, backend.device)
    assert segment.grad is not None
    # beta1 is 0.9: c is 0.9 m + 0.1 g.
    segment.exp_avg.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0]))
    segment.grad.copy_(torch.tensor([5.0, 5.0, -5.0, -5.0, 0.0, -0.0]))
    out = empty_planes(bucket, 2, backend.device)
    for coin in (COINS.zero, Coin(COINS.zero.key, not COINS.zero.inverted)):
        backend.kernels.encode_pairs([segment], coin, out=out)
        votes = [(bit_of(out, 0, i), bit_of(out, 1, i)) for i in range(6)]
        drawn = coin.word(0)
        second = Coin(mix(coin.key), coin.inverted).word(0)
        tossed = (drawn >> 4 & 1, second >> 4 & 1)
        assert votes == [(1, 1), (0, 1), (1, 0), (0, 0), tossed, (1, second >> 5 & 1)]


@over_all
def test_a_zero_direction_of_either_sign_takes_the_coin_of_its_coordinate(backend: Backend) -> None:
    bucket = make_bucket((5, 130))
    segments = make_segments(bucket, backend.device)
    for segment in segments:
        assert segment.grad is not None
        segment.exp_avg.fill_(-0.0)
        segment.grad.zero_()
    out = empty_planes(bucket, 1, backend.device)
    backend.kernels.encode_signs(segments, COINS.zero, out=out)
    coordinate = 64 + 70
    expected = COINS.zero.word(coordinate // 64) >> (coordinate % 64) & 1
    assert bit_of(out, 0, coordinate) == expected


@over_all
@pytest.mark.parametrize("encoder", ["signs", "ternary", "pairs", "levels", "directions"])
@pytest.mark.parametrize("bad", ["grad", "exp_avg"])
def test_a_parameter_that_is_not_finite_is_reported_and_written_as_zeros(
    encoder: str, bad: str, backend: Backend
) -> None:
    bucket = make_bucket((64, 64))
    segments = make_segments(bucket, backend.device)
    getattr(segments[1], bad)[3] = float("nan")
    planes = {"signs": 1, "ternary": 2, "pairs": 2, "levels": 4, "directions": 32}[encoder]
    out = empty_planes(bucket, planes, backend.device)
    k = backend.kernels
    encode = {
        "signs": lambda: k.encode_signs(segments, COINS.zero, out=out),
        "ternary": lambda: k.encode_ternary(segments, out=out),
        "pairs": lambda: k.encode_pairs(segments, COINS.zero, out=out),
        "levels": lambda: k.encode_levels(segments, COINS.zero, norm="l1", step=0.5, out=out),
        "directions": lambda: k.encode_directions(segments, dtype=torch.float32, out=out),
    }[encoder]
    assert encode().tolist() == [True, False]
    second = out.transpose(0, 1).flatten(1)[:, 1] if planes < 32 else out.view(-1)[32:64]
    assert not second.any()


@over_all
def test_a_direction_that_overflows_bfloat16_is_not_finite(backend: Backend) -> None:
    bucket = make_bucket((2,))
    (segment,) = make_segments(bucket, backend.device)
    assert segment.grad is not None
    segment.exp_avg.fill_(3.4e38)
    segment.grad.fill_(3.4e38)
    out = empty_planes(bucket, 16, backend.device)
    flags = backend.kernels.encode_directions([segment], dtype=torch.bfloat16, out=out)
    assert flags.tolist() == [False]


@over_all
def test_encoding_only_reads(backend: Backend) -> None:
    bucket = make_bucket()
    segments, untouched = (make_segments(bucket, backend.device) for _ in range(2))
    out = empty_planes(bucket, 3, backend.device)
    backend.kernels.encode_levels(segments, COINS.zero, norm="l1", step=0.5, out=out)
    for now, before in zip(segments, untouched, strict=True):
        assert now.grad is not None
        assert before.grad is not None
        assert torch.equal(now.grad, before.grad)
        assert torch.equal(now.exp_avg, before.exp_avg)
        assert torch.equal(now.param, before.param)


@over_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reply_format", list(ReplyFormat))
@pytest.mark.parametrize("stochastic", [False, True])
def test_commit_applies_a_reply_and_updates_the_momentum(
    dtype: torch.dtype, reply_format: ReplyFormat, stochastic: bool, backend: Backend
) -> None:
    bucket = make_bucket()
    planes = {ReplyFormat.SIGN: 1, ReplyFormat.TERNARY: 2, ReplyFormat.COUNT: 3}[reply_format]
    generator = torch.Generator().manual_seed(1)
    shape = (bucket.n_blocks, planes, BLOCK_WORDS)
    reply = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator).to(backend.device)
    present = [5, 5, 0, 5, 2, 5]
    rounding = COINS.rounding if stochastic else None
    fused = make_segments(bucket, backend.device, dtype=dtype, absent=frozenset({3}))
    apart = make_segments(bucket, backend.device, dtype=dtype, absent=frozenset({3}))
    backend.kernels.commit(fused, present, reply, reply_format=reply_format, rounding=rounding)
    absent = [segment._replace(grad=None) for segment in apart]
    backend.kernels.commit(absent, present, reply, reply_format=reply_format, rounding=rounding)
    backend.kernels.update_momentum(apart, present)
    for one, other in zip(fused, apart, strict=True):
        assert torch.equal(one.param, other.param)
        assert torch.equal(one.exp_avg, other.exp_avg)


@over_all
def test_where_nobody_voted_parameter_and_momentum_are_left_alone(backend: Backend) -> None:
    bucket = make_bucket((100,))
    segments, untouched = (make_segments(bucket, backend.device) for _ in range(2))
    reply = empty_planes(bucket, 1, backend.device)
    backend.kernels.commit(segments, [0], reply, reply_format=ReplyFormat.SIGN, rounding=None)
    assert torch.equal(segments[0].param, untouched[0].param)
    assert torch.equal(segments[0].exp_avg, untouched[0].exp_avg)


@over_all
def test_counting_shard_by_shard_equals_counting_the_bucket(backend: Backend) -> None:
    bucket = make_bucket((700, 3, 2000, 64), n_shards=3)
    generator = torch.Generator().manual_seed(2)
    shape = (4, bucket.n_blocks, 1, BLOCK_WORDS)
    votes = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator).to(backend.device)
    present = torch.rand(4, 4, generator=generator) < 0.7
    whole = empty_planes(bucket, 1, backend.device)
    backend.kernels.count_signs(BlockVotes(votes, present, bucket, 0), COINS.tie, out=whole)
    for shard in range(3):
        part = empty_planes(bucket, 1, backend.device)[: bucket.shard_blocks]
        blocks = slice(shard * bucket.shard_blocks, (shard + 1) * bucket.shard_blocks)
        shard_votes = BlockVotes(votes[:, blocks], present, bucket, blocks.start)
        backend.kernels.count_signs(shard_votes, COINS.tie, out=part)
        assert torch.equal(part, whole[blocks])


@over_all
@pytest.mark.parametrize("workers", [1, 2, 3, 127, 128, 300])
def test_a_count_of_any_number_of_workers_is_exact(workers: int, backend: Backend) -> None:
    bucket = make_bucket((64,))
    generator = torch.Generator().manual_seed(workers)
    votes = torch.zeros((workers, bucket.n_blocks, 1, BLOCK_WORDS), dtype=torch.int64)
    votes[:, 0, 0, 0] = torch.randint(-(2**63), 2**63 - 1, (workers,), generator=generator)
    out = empty_planes(bucket, workers.bit_length(), backend.device)
    present = torch.ones((workers, 1), dtype=torch.bool)
    cast = BlockVotes(votes.to(backend.device), present, bucket, 0)
    backend.kernels.count_ones(cast, out=out)
    for coordinate in (0, 1, 31, 63):
        ones = sum(int(word) >> coordinate & 1 for word in votes[:, 0, 0, 0])
        planes = range(workers.bit_length())
        assert sum(bit_of(out, plane, coordinate) << plane for plane in planes) == ones


@over_all
def test_stochastic_rounding_leaves_representable_values_and_is_unbiased(backend: Backend) -> None:
    n = 1 << 16
    bucket = make_bucket((n,))
    (segment,) = make_segments(bucket, backend.device, dtype=torch.bfloat16)
    still = Coefficients(0.0, 0.0, 0.0, 0.0)
    segment.param.fill_(1.0)
    reply = empty_planes(bucket, 1, backend.device)
    resting = Segment(segment.slot, segment.param, None, segment.exp_avg, still)
    backend.kernels.commit(
        [resting], [1], reply, reply_format=ReplyFormat.SIGN, rounding=COINS.rounding
    )
    assert bool((segment.param == 1.0).all())
    # S = 1 everywhere: 1 - lr lies a quarter of the way from 1 to the next lower value, 1 - 2^-8.
    lr = 2.0**-10
    moving = Segment(
        segment.slot, segment.param, None, segment.exp_avg, Coefficients(0.0, 0.0, lr, 0.0)
    )
    backend.kernels.commit(
        [moving], [1], reply, reply_format=ReplyFormat.SIGN, rounding=COINS.rounding
    )
    down = float((segment.param < 1.0).float().mean())
    # Standard deviation of the share is 0.0017; six of them: a false alarm in 5e8 seeds.
    assert abs(down - 0.25) < 6 * (0.25 * 0.75 / n) ** 0.5


@over_all
@given(n=st.integers(0, 200), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=30)
def test_digests_follow_their_equation(backend: Backend, n: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    unsigned = {2: np.uint16, 4: np.uint32}[tensor.element_size()]
    elements = tensor.view(torch.int16 if unsigned is np.uint16 else torch.int32).numpy()
    bits = elements.view(unsigned).tolist()
    total = sum(mix(u + (j + 1) * GOLDEN) for j, u in enumerate(bits))
    assert int(backend.kernels.digests([tensor.to(backend.device)])) & MASK == mix(n + total)


@over_all
def test_digests_see_a_single_flipped_bit(backend: Backend) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(backend.device)
    flipped = tensor.clone()
    flipped.view(torch.int32)[617] ^= 1 << 13
    first, second, third = backend.kernels.digests([tensor, flipped, tensor]).tolist()
    assert first == third != second


@over_all
@given(
    n=st.integers(0, 9000) | st.sampled_from([1, 7, 4095, 4096, 4097, 3 * 4096 + 5]),
    dtype=st.sampled_from(PARAM_DTYPES),
)
@settings(max_examples=30)
def test_square_sums_follow_their_equation(backend: Backend, n: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    numbers = tensor.tolist()
    numbers += [0.0] * (-n % 4096)
    expected = []
    for start in range(0, n, 4096):
        row = [number * number for number in numbers[start : start + 4096]]
        while len(row) > 1:
            half = len(row) // 2
            row = [row[j] + row[j + half] for j in range(half)]
        expected += row
    found = backend.kernels.square_sums(tensor.to(backend.device))
    assert torch.equal(found.cpu(), torch.tensor(expected, dtype=torch.float64))


@over_all
def test_square_sums_do_not_overflow_or_vanish(backend: Backend) -> None:
    """The largest and the smallest float32 have squares that float32 cannot hold."""
    for number in (torch.finfo(torch.float32).max, 2.0**-149):
        row = torch.full((4096,), number, device=backend.device)
        (total,) = backend.kernels.square_sums(row).tolist()
        assert total == 4096 * number * number > 0
