import pytest

from comparisons import write_comparison
from distlion.wire import LinkModel
from distlion_lab.report.comparison import ERROR, Spread, read_comparison
from distlion_lab.report.comparison_tables import (
    format_spread,
    pair,
    tabulate_methods,
    tabulate_outcome,
    tabulate_settings,
    tabulate_tuning,
)

LINK = LinkModel(latency_s=0.0, rate_bit_per_s=8e6)


def read(tmp_path, **changes):
    return read_comparison(write_comparison(tmp_path / "out", **changes))


def outcome(tmp_path, **changes):
    table = tabulate_outcome(read(tmp_path, **changes), 4, link=LINK, rate="8mbit")
    return [dict(zip(table.head, row, strict=True)) for row in table.rows]


def test_outcome_has_what_a_method_reached_and_what_it_cost(tmp_path):
    assert outcome(tmp_path)[0] == {
        "method": "majority",
        "test error (%)": "12.00 ± 1.00",
        "least to most": "11.00 – 13.00",
        "test loss (nats per prediction)": "0.5200 ± 0.0100",
        "minus global-lion": "-10.00 ± 0.00",
        "lr": "0.001",
        "lr at the edge": "",
        "bits up": "1",
        "bits down": "1",
        "MB sent": "0.0025",
        "ms a step at 8mbit/s": "20.2",
        "diverged": "0 of 3",
    }


def test_best_method_comes_first_whoever_it_is(tmp_path):
    rows = outcome(tmp_path, methods=("terngrad", "global-lion", "majority"))
    assert [row["method"] for row in rows] == ["terngrad", "global-lion", "majority"]


def test_method_that_diverged_comes_last_and_says_so(tmp_path):
    rows = outcome(tmp_path, untunable=("majority",))
    assert rows[-1]["method"] == "majority"
    assert rows[-1]["test error (%)"] == "diverged"
    assert rows[-1]["diverged"] == "at every lr"


def test_seeds_that_diverged_are_reported(tmp_path):
    (row,) = (r for r in outcome(tmp_path, diverged=("terngrad",)) if r["method"] == "terngrad")
    assert row["diverged"] == "1 of 3"
    assert row["test error (%)"] == "32.50 ± 0.71"


@pytest.mark.parametrize("changes", [{"methods": ("majority",)}, {"untunable": ("global-lion",)}])
def test_without_the_reference_nothing_is_compared_with_it(tmp_path, changes):
    assert all("minus global-lion" not in row for row in outcome(tmp_path, **changes))


def test_difference_is_taken_seed_by_seed(tmp_path):
    comparison = read(tmp_path, diverged=("terngrad",))
    cell, reference = comparison.cell("terngrad", 4), comparison.cell("global-lion", 4)
    difference = pair(cell, reference, ERROR)
    assert (difference.mean, difference.count) == (pytest.approx(10), 2)
    # All seeds differ by as much, though the seeds themselves lie apart.
    assert difference.sd == pytest.approx(0)


def test_tuning_shows_every_learning_rate_and_the_choice(tmp_path):
    table = tabulate_tuning(read(tmp_path, untunable=("terngrad",)))
    assert table.head[:4] == ["method", "workers", "lr 1", "loss"]
    assert table.rows[0] == [
        *("majority", "4", "0.0005", "1.1000", "0.001", "1.1000", "0.002", "1.1000"),
        *("0.001", ""),
    ]
    assert table.rows[-1][3::2] == ["diverged", "diverged", "diverged", ""]
    assert table.rows[-1][-2] == "none"


def test_methods_are_described(tmp_path):
    assert tabulate_methods(read(tmp_path)).rows[2] == [
        "terngrad",
        "what terngrad is",
        "terngrad()",
        "baseline",
        "0.1",
    ]


def test_settings_leave_out_what_does_not_apply(tmp_path):
    names = [name for name, _ in tabulate_settings(read(tmp_path)).rows]
    assert "batch size" in names
    assert "alpha" not in names


def test_single_run_has_no_deviation():
    assert format_spread(Spread.of([1.0]), 2) == "1.00"
    assert format_spread(Spread.of([1.0, 2.0]), 2, signed=True) == "+1.50 ± 0.71"
