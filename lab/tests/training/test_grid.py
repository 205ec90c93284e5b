import pytest

from distlion_lab.training.compare_settings import make_grid


def test_grid_is_centered_on_the_base():
    assert make_grid(5e-4, points=3, factor=3) == (1.67e-4, 5e-4, 1.5e-3)


@pytest.mark.parametrize("points", [1, 2, 3, 4, 5])
def test_grid_has_the_points_asked_for_in_rising_order(points):
    grid = make_grid(0.1, points=points, factor=10)
    assert len(grid) == points
    assert list(grid) == sorted(set(grid))


def test_even_grid_lies_evenly_around_the_base():
    low, high = make_grid(1.0, points=2, factor=4)
    assert (low, high) == (0.5, 2.0)
