import pytest
from matplotlib import image

from distlion_lab.report.loss_figure import draw_loss_figure, smooth

STEPS = list(range(40))
RECORD = {
    "settings": {"task": "text", "rule": "majority"},
    "world_size": 4,
    "bits_per_parameter": 1.5,
    "losses": {"step": STEPS, "loss": [5.0 - 0.05 * step for step in STEPS]},
    "evaluations": {"step": [0, 20, 40], "loss": [5.0, 4.0, 3.0]},
}


def test_figure_is_a_png_with_something_drawn(tmp_path):
    draw_loss_figure(RECORD, tmp_path / "loss.png")
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.std() > 0


def test_figure_is_the_same_to_the_byte_when_drawn_again(tmp_path):
    draw_loss_figure(RECORD, tmp_path / "first.png")
    draw_loss_figure(RECORD, tmp_path / "second.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_title_of_odd_characters_is_drawn_as_it_is(tmp_path):
    settings = {"task": "text", "rule": "$\\frac$"}
    draw_loss_figure(RECORD | {"settings": settings}, tmp_path / "loss.png")


def test_smoothing_keeps_a_constant():
    assert smooth([2.5] * 30) == pytest.approx([2.5] * 30)


def test_smoothing_starts_at_the_first_value():
    assert smooth([7.0, 1.0])[0] == 7.0
