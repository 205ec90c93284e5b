"""Samples of gradients are spread over all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from distlion.step.arrivals import SAMPLE_ELEMENTS, Arrivals

SHAPES = [(64, 147), (960, 9), (64, 4096), (1024, 1024), (768, 3072), (3072, 768), (128, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_are_in_all_rows_and_columns(shape: tuple[int, int]) -> None:
    places = Arrivals()._draw(torch.arange(shape[0] * shape[1]))
    assert places.unique().numel() == SAMPLE_ELEMENTS
    for numbers, size in ((places // shape[1], shape[0]), (places % shape[1], shape[1])):
        seen = {-1, size, *numbers.tolist()}
        ordered = sorted(seen)
        unseen = max(b - a - 1 for a, b in pairwise(ordered))
        assert unseen <= 0.2 * size


@pytest.mark.parametrize("n_elements", [1, 5, 63, 64, 65, 127, 128, 1000])
def test_samples_of_small_gradients_are_within_them(n_elements: int) -> None:
    places = Arrivals()._draw(torch.arange(n_elements))
    assert 0 <= int(places.min()) <= int(places.max()) < n_elements
    assert places.unique().numel() == min(n_elements, SAMPLE_ELEMENTS)
