"""The coin: test vectors, pairing, independence of domains."""

import itertools

import pytest
import torch

from backends import Backend, over_all
from distlion.kernels import Coefficients, Coin, Coins, Segment
from distlion.kernels.coin import GOLDEN, MASK, mix
from distlion.kernels.contract import COIN_VECTORS, SPLITMIX64_FIRST
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Slot


def test_mix_gives_the_published_first_output_of_splitmix64() -> None:
    assert mix(GOLDEN) == SPLITMIX64_FIRST


@pytest.mark.parametrize(("where", "words"), COIN_VECTORS.items())
def test_coin_matches_its_test_vectors(
    where: tuple[int, int, int, str], words: tuple[int, int, int]
) -> None:
    seed, step, rank, domain = where
    coin = getattr(Coins(seed, step, rank), domain)
    assert tuple(coin.word(w) for w in (0, 1, 2**33)) == words


def draw(backend: Backend, coin: Coin, first_word: int, n_words: int) -> list[int]:
    """Draw words as a vote takes them where every direction is 0."""
    slot = Slot("zeros", n_words * WORD_ELEMENTS, first_word, 0)
    zeros = torch.zeros(slot.n_elements, device=backend.device)
    segment = Segment(slot, zeros, zeros, zeros, Coefficients(0.9, 0.99, 1e-3, 0.0))
    n_blocks = -(-n_words // BLOCK_WORDS)
    votes = torch.empty((n_blocks, 1, BLOCK_WORDS), dtype=torch.int64, device=backend.device)
    assert backend.kernels.encode_signs([segment], coin, out=votes).all()
    return [word & MASK for word in votes.flatten()[:n_words].tolist()]


@over_all
@pytest.mark.parametrize(("where", "words"), COIN_VECTORS.items())
def test_kernels_draw_the_test_vectors(
    where: tuple[int, int, int, str], words: tuple[int, int, int], backend: Backend
) -> None:
    seed, step, rank, domain = where
    coin = getattr(Coins(seed, step, rank), domain)
    assert tuple(draw(backend, coin, w, 1)[0] for w in (0, 1, 2**33)) == words


@over_all
def test_a_run_of_words_is_the_words_one_by_one(backend: Backend) -> None:
    for coin, first_word, n_words in itertools.product(
        (Coins(seed=5, step=3, voter=2).zero, Coin(0), Coin(2**64 - 1, inverted=True)),
        (0, 1, 2**33, 2**40 + 5),
        (1, 2, 7, 63, 64, 65, 300),
    ):
        expected = [coin.word(w) for w in range(first_word, first_word + n_words)]
        assert draw(backend, coin, first_word, n_words) == expected


@pytest.mark.parametrize("domain", ["tie", "zero"])
@pytest.mark.parametrize("step", [0, 2, 1000])
def test_tie_and_zero_coins_are_inverted_in_the_second_step_of_a_pair(
    domain: str, step: int
) -> None:
    first = getattr(Coins(9, step, 1), domain).word(42)
    second = getattr(Coins(9, step + 1, 1), domain).word(42)
    assert first ^ second == MASK


def test_rounding_coin_is_fresh_in_every_step() -> None:
    words = {Coins(9, step, 0).rounding.word(0) for step in range(100)}
    assert len(words) == 100


def test_zero_coins_of_ranks_differ_while_tie_and_rounding_coins_do_not() -> None:
    coins = [Coins(1, 4, rank) for rank in range(50)]
    assert len({coin.zero.key for coin in coins}) == 50
    assert len({coin.tie.key for coin in coins} | {coin.rounding.key for coin in coins}) == 2
