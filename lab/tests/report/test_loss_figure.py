import json

import pytest
from matplotlib import image

from distlion_lab.errors import DataError
from distlion_lab.report.loss_figure import draw_loss_figure, read_record, smooth


@pytest.fixture
def record_path(tmp_path):
    steps = list(range(40))
    record = {
        "settings": {"task": "text", "rule": "majority"},
        "world_size": 4,
        "bits_per_parameter": 1.5,
        "losses": {"step": steps, "loss": [5.0 - 0.05 * step for step in steps]},
        "evaluations": {"step": [0, 20, 40], "loss": [5.0, 4.0, 3.0]},
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    return path


def test_figure_is_a_png_with_something_drawn(record_path, tmp_path):
    draw_loss_figure(record_path, tmp_path / "loss.png")
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.std() > 0


def test_figure_is_the_same_to_the_byte_when_drawn_again(record_path, tmp_path):
    draw_loss_figure(record_path, tmp_path / "first.png")
    draw_loss_figure(record_path, tmp_path / "second.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_title_of_odd_characters_is_drawn_as_it_is(record_path, tmp_path):
    record = json.loads(record_path.read_text())
    record["settings"]["rule"] = "$\\frac$"
    record_path.write_text(json.dumps(record))
    draw_loss_figure(record_path, tmp_path / "loss.png")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", "4"),
        ("bits_per_parameter", []),
        ("settings", {}),
        ("losses", {"step": [1], "loss": [1.0, 2.0]}),
        ("evaluations", {"step": [1], "loss": [None]}),
    ],
)
def test_record_with_a_malformed_field_is_refused_and_the_field_named(record_path, name, value):
    record = json.loads(record_path.read_text())
    record_path.write_text(json.dumps(record | {name: value}))
    with pytest.raises(DataError, match=name):
        read_record(record_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"losses": {}}', "[" * 100_000])
def test_file_that_is_no_record_is_a_data_error(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(DataError, match="record"):
        read_record(path)


def test_smoothing_keeps_a_constant():
    assert smooth([2.5] * 30) == pytest.approx([2.5] * 30)


def test_smoothing_starts_at_the_first_value():
    assert smooth([7.0, 1.0])[0] == 7.0
