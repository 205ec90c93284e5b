import json

import pytest

from comparisons import make_record, write_comparison
from distlion.wire import LinkModel
from distlion_lab.errors import DataError
from distlion_lab.report.comparison import ACCURACY, ERROR, LOSS, Cell, Spread, read_comparison

LINK = LinkModel(latency_s=1e-3, rate_bit_per_s=1e6)


def make_cell(*records, grid=(1e-3,), lr=1e-3):
    return Cell("majority", 4, grid, (), lr, records)


def test_spread_has_mean_sample_deviation_and_extremes():
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0, 1.0, 3.0, 3)


def test_spread_of_one_value_has_no_width():
    assert Spread.of([2.0]) == Spread(2.0, 0.0, 2.0, 2.0, 1)


def test_accuracy_and_error_are_percentages_that_add_up_to_100():
    record = make_record(test_accuracy=0.75)
    assert ACCURACY.read(record)[-1] == 75
    assert ERROR.read(record)[-1] == 25


def test_curve_is_taken_over_seeds():
    cell = make_cell(make_record(test_loss=1.0), make_record(test_loss=0.5))
    steps, spreads = cell.curve(LOSS)
    assert steps == [0, 5, 10]
    assert [spread.mean for spread in spreads] == [2.0, 1.375, 0.75]


def test_seeds_that_diverged_are_counted_and_left_out():
    cell = make_cell(make_record(test_loss=1.0), make_record(diverged=True))
    assert cell.diverged == 1
    assert cell.final(LOSS) == Spread(1.0, 0.0, 1.0, 1.0, 1)


def test_nothing_is_left_where_all_diverged():
    cell = make_cell(make_record(diverged=True))
    assert cell.final(LOSS) is None
    assert cell.curve(LOSS) == ([], [])


@pytest.mark.parametrize(("lr", "at_edge"), [(1, True), (2, False), (3, True)])
def test_choice_at_the_edge_of_its_grid_is_noticed(lr, at_edge):
    assert make_cell(grid=(1, 2, 3), lr=lr).is_at_edge == at_edge


def test_single_learning_rate_has_no_edge():
    assert not make_cell(grid=(1,), lr=1).is_at_edge


def test_step_is_compute_latency_of_the_rounds_and_bytes():
    # 2 rounds of 1 ms, and 8 * 250 bits at 1 Mbit/s.
    cell = make_cell(make_record(bits=1.0))
    assert cell.step_s(LINK, compute_s=0.5) == pytest.approx(0.5 + 2e-3 + 2e-3)


def test_folder_is_read_whole(tmp_path):
    comparison = read_comparison(write_comparison(tmp_path / "out"))
    assert comparison.methods == ["majority", "global-lion", "terngrad"]
    assert len(comparison.cells) == 6
    assert len(comparison.records) == 6 * (3 + 3)
    assert comparison.compute_s == 0.02
    assert comparison.cell("terngrad", 8).final(ERROR).mean == pytest.approx(32)


@pytest.mark.parametrize(("task", "outcome"), [("images", ERROR), ("text", LOSS)])
def test_images_are_judged_by_error_and_text_by_loss(tmp_path, task, outcome):
    assert read_comparison(write_comparison(tmp_path / "out", task=task)).outcome == outcome


def test_record_that_is_missing_is_named(tmp_path):
    folder = write_comparison(tmp_path / "out")
    (folder / "runs" / "majority-4-2.json").unlink()
    with pytest.raises(DataError, match=r"majority-4-2\.json.*run distlion compare again"):
        read_comparison(folder)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"settings": {}})])
def test_index_of_something_else_is_a_data_error(tmp_path, content):
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(DataError, match=r"comparison\.json"):
        read_comparison(tmp_path)


def damage(folder, name, change):
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: index["cells"].pop(), "one for each"),
        (lambda index: index["cells"].append(index["cells"][0]), "one for each"),
        (lambda index: index["cells"][0].update(runs=["../../secret.json"]), "runs"),
        (lambda index: index["cells"][0]["tuning"][0].update(run="/etc/x.json"), "run"),
        (lambda index: index["cells"][0]["grid"].pop(), "learning rates"),
        (lambda index: index["settings"].update(workers=[0]), "one for each"),
        (lambda index: index["settings"].update(lr_scale="x"), "lr_scale"),
        (lambda index: index["methods"].pop("majority"), "methods"),
        (lambda index: index["methods"]["majority"].pop("kind"), "kind"),
        (lambda index: index["methods"].update({"$x$": {}}), "letters"),
    ],
)
def test_index_that_does_not_fit_is_refused(tmp_path, change, said):
    folder = write_comparison(tmp_path / "out")
    damage(folder, "comparison.json", change)
    with pytest.raises(DataError, match=f"comparison.json.*{said}"):
        read_comparison(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.pop("timing"), "timing"),
        (lambda record: record["series"]["test_loss"].pop(), "unequal lengths"),
        (
            lambda record: record["series"].update({name: [] for name in record["series"]}),
            "no eval",
        ),
        (lambda record: record.update(rounds=float("inf")), "rounds"),
    ],
)
def test_record_that_lacks_something_is_refused_and_named(tmp_path, change, said):
    folder = write_comparison(tmp_path / "out")
    damage(folder, "runs/majority-4-1.json", change)
    with pytest.raises(DataError, match=f"majority-4-1.json.*{said}"):
        read_comparison(folder)


def test_runs_that_were_evaluated_at_different_steps_are_refused(tmp_path):
    folder = write_comparison(tmp_path / "out")
    damage(
        folder, "runs/majority-4-1.json", lambda record: record["series"].update(step=[0, 5, 11])
    )
    with pytest.raises(DataError, match="different steps"):
        read_comparison(folder)
