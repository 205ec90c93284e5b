import math

import pytest
import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import DataError
from distlion_lab.tasks.base import seeded_generator
from distlion_lab.tasks.partition import ByBook, ByClass, Contiguous, Even

CLASSES = 10
PER_CLASS = 1000
LABELS = torch.arange(CLASSES * PER_CLASS) % CLASSES
WORLD_SIZES = range(1, 33)
IMAGE_PARTITIONS = [Even(), ByClass(0.3), ByClass(100.0)]
TEXT_PARTITIONS = [Even(), Contiguous(), ByBook()]
# An empty book, a book of one token, and 38 of some length.
BOOKS = [0, 1, *(1000 + 37 * number % 501 for number in range(38))]


def split_images(partition, *, seed=0, world_size, batch_size=1, labels=LABELS):
    return partition.split_images(labels, seed=seed, world_size=world_size, batch_size=batch_size)


def split_text(partition, *, world_size, books=BOOKS, block_tokens=64):
    return partition.split_text(books, world_size=world_size, block_tokens=block_tokens)


def tokens_of(spans):
    return sum(map(len, spans))


def count_labels(shards):
    """Return (workers, classes): the label histogram of each worker."""
    return torch.stack([torch.bincount(LABELS[shard], minlength=CLASSES) for shard in shards])


def text_of(books):
    """Return for each token the number of its book."""
    return [number for number, length in enumerate(books) for _ in range(length)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("partition", IMAGE_PARTITIONS, ids=repr)
def test_every_image_has_one_owner(partition, world_size):
    shards = split_images(partition, world_size=world_size)
    assert len(shards) == world_size
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(len(LABELS)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("partition", TEXT_PARTITIONS, ids=repr)
def test_every_token_has_one_owner(partition, world_size):
    shards = split_text(partition, world_size=world_size)
    assert len(shards) == world_size
    owned = sorted(place for spans in shards for span in spans for place in span)
    assert owned == list(range(sum(BOOKS)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("partition", TEXT_PARTITIONS, ids=repr)
def test_spans_of_a_rank_ascend_and_do_not_touch(partition, world_size):
    for spans in split_text(partition, world_size=world_size):
        ends = [place for span in spans for place in (span.start, span.stop)]
        assert ends == sorted(set(ends))


@pytest.mark.parametrize("partition", IMAGE_PARTITIONS, ids=repr)
def test_one_worker_has_all_images_in_the_same_order_under_each_partition(partition):
    (shard,) = split_images(partition, world_size=1, seed=3)
    assert torch.equal(shard, torch.randperm(len(LABELS), generator=seeded_generator(3)))


@pytest.mark.parametrize("partition", TEXT_PARTITIONS, ids=repr)
def test_one_worker_has_the_whole_text_in_one_span(partition):
    assert split_text(partition, world_size=1) == [[range(sum(BOOKS))]]


@pytest.mark.parametrize("partition", IMAGE_PARTITIONS, ids=repr)
def test_seed_alone_fixes_the_shards(partition):
    first = split_images(partition, world_size=5, seed=2)
    torch.manual_seed(1)
    again = split_images(partition, world_size=5, seed=2)
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("partition", IMAGE_PARTITIONS, ids=repr)
def test_another_seed_gives_other_shards(partition):
    first, second = (split_images(partition, world_size=5, seed=seed)[0] for seed in (2, 3))
    assert set(first.tolist()) != set(second.tolist())


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_concentration_of_classes_is_that_of_dirichlet_draws(alpha):
    # A Dirichlet draw p over N workers has E sum p^2 = (1 + alpha) / (1 + N alpha): 0.79, 0.40 and
    # 0.25 here. The 300 sums lie within [1/4, 1], so by Hoeffding their mean is off by 0.1 with
    # probability 2 exp(-2 * 300 * 0.1^2 / 0.75^2) < 5e-5. Cuts at whole images change a share by
    # 1/1000 at most; a draw is repeated, for a worker without any image, in one of 3,000 cases.
    world_size, seeds = 4, range(30)
    shares = (
        torch.cat(
            [
                count_labels(split_images(ByClass(alpha), seed=seed, world_size=world_size)).T
                for seed in seeds
            ]
        ).double()
        / PER_CLASS
    )
    expected = (1 + alpha) / (1 + world_size * alpha)
    assert float(shares.square().sum(dim=1).mean()) == pytest.approx(expected, abs=0.1)


def test_small_alpha_gives_workers_few_classes():
    # At alpha 0.05 a class has (1 + 8 * 0.05) / (1 + 0.05) = 1.33 owners in effect, so 8 workers
    # share 13 parts of classes, 1.7 each: the largest is more than half of a worker's images.
    tops = []
    for seed in range(20):
        counts = count_labels(split_images(ByClass(0.05), seed=seed, world_size=8)).double()
        tops.append(counts.max(dim=1).values / counts.sum(dim=1))
    assert torch.stack(tops).mean() > 0.5


def test_large_alpha_gives_every_worker_the_same_mix():
    # The deviation of a share is sqrt(1/4 * 3/4 / (4e6 + 1)) = 0.0002, a fifth of an image; cuts at
    # whole images add less than one. Five images are 20 deviations.
    counts = count_labels(split_images(ByClass(1e6), world_size=4))
    assert torch.all((counts - PER_CLASS // 4).abs() <= 5)


@pytest.mark.parametrize("world_size", [2, 8, 32])
def test_every_worker_has_the_images_of_a_batch(world_size):
    for seed in range(5):
        shards = split_images(ByClass(0.1), seed=seed, world_size=world_size, batch_size=32)
        assert min(map(len, shards)) >= 32


def test_shard_too_small_for_a_batch_in_all_draws_is_refused():
    with pytest.raises(DataError, match=r"alpha 0\.001 gives each of 32 workers the 64 images"):
        split_images(ByClass(0.001), world_size=32, batch_size=64)


def test_class_without_images_is_no_obstacle():
    labels = torch.tensor([0, 2] * 50)
    shards = split_images(ByClass(1.0), world_size=3, labels=labels)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(100))


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(InvalidArgumentError, match="alpha is"):
        ByClass(alpha)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_even_text_gives_every_rank_as_many_tokens(world_size):
    # 33 blocks at most for a rank, whose lengths differ by one token.
    sizes = [tokens_of(spans) for spans in split_text(Even(), world_size=world_size)]
    blocks = sum(BOOKS) // (world_size * 64)
    assert max(sizes) - min(sizes) <= blocks


def test_even_text_gives_every_rank_the_same_mix_of_books():
    books = [2000, 4000, 6000]
    number_of = text_of(books)
    for spans in split_text(Even(), world_size=4, books=books):
        owned = torch.tensor([number_of[place] for span in spans for place in span])
        # A block of 64 more or less of each book.
        assert torch.all((torch.bincount(owned) - torch.tensor(books) // 4).abs() <= 64)


def test_blocks_of_even_text_have_at_least_the_asked_length():
    for spans in split_text(Even(), world_size=3, block_tokens=100):
        assert min(map(len, spans)) >= 100


def test_even_text_too_short_for_blocks_has_one_part_for_each_rank():
    assert split_text(Even(), world_size=4, books=[40]) == [
        [range(10)],
        [range(10, 20)],
        [range(20, 30)],
        [range(30, 40)],
    ]


def test_contiguous_text_follows_the_order_of_ranks():
    shards = split_text(Contiguous(), world_size=3, books=[5, 5])
    assert shards == [[range(3)], [range(3, 6)], [range(6, 10)]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_book_has_one_owner(world_size):
    number_of = text_of(BOOKS)
    owners = [
        {number_of[place] for span in spans for place in span}
        for spans in split_text(ByBook(), world_size=world_size)
    ]
    assert sum(map(len, owners)) == len(set(number_of))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_books_are_dealt_about_evenly(world_size):
    # A rank was the lightest when its last book came: without that book it is below the mean.
    sizes = [tokens_of(spans) for spans in split_text(ByBook(), world_size=world_size)]
    assert max(sizes) <= sum(BOOKS) / world_size + max(BOOKS)


def test_books_are_dealt_from_the_longest_on():
    shards = split_text(ByBook(), world_size=2, books=[30, 50, 20, 40])
    # 50 to rank 0, 40 and 30 to rank 1, 20 to rank 0.
    assert shards == [[range(30, 100)], [range(30), range(100, 140)]]


def test_rank_beyond_the_number_of_books_owns_nothing():
    assert split_text(ByBook(), world_size=3, books=[5, 9]) == [[range(5, 14)], [range(5)], []]


@pytest.mark.parametrize("partition", [*IMAGE_PARTITIONS, *TEXT_PARTITIONS], ids=repr)
def test_repr_rebuilds_the_partition(partition):
    names = {kind.__name__: kind for kind in (ByBook, ByClass, Contiguous, Even)}
    assert eval(repr(partition), names) == partition
