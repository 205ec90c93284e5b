"""What keeps the numbers of a comparison from ranking its methods is said."""

import pytest

from distlion_lab.report.comparison import Cell, Comparison
from distlion_lab.report.comparison_warnings import list_warnings


def make_comparison(*, seeds=3, steps=200, lr=2.0, workers=(4,)):
    cells = tuple(Cell("majority", each, (1.0, 2.0, 3.0), (), lr, ()) for each in workers)
    return Comparison({"settings": {"seeds": seeds, "steps": steps}}, cells)


def test_long_runs_of_enough_seeds_inside_their_grids_have_no_warning():
    assert list_warnings(make_comparison()) == []


@pytest.mark.parametrize("small", [{"seeds": 2}, {"steps": 199}, {"seeds": 1, "steps": 60}])
def test_few_seeds_and_short_runs_are_warned_of(small):
    (warning,) = list_warnings(make_comparison(**small))
    assert "too little to rank methods" in warning
    assert "--seeds 3 --steps 200" in warning


@pytest.mark.parametrize("lr", [1.0, 3.0])
def test_a_rate_at_the_edge_is_warned_of_with_its_method(lr):
    (warning,) = list_warnings(make_comparison(lr=lr))
    assert "edge of its grid for majority with 4 workers" in warning


def test_many_rates_at_the_edge_are_counted():
    (warning,) = list_warnings(make_comparison(lr=1.0, workers=range(1, 10)))
    assert "majority with 5 workers and 4 more" in warning
