import json

import pytest
from matplotlib.colors import to_rgb

from comparisons import write_comparison
from distlion.wire import LinkModel
from distlion_lab.report.comparison import read_comparison
from distlion_lab.report.comparison_figures import (
    draw_bits,
    draw_bytes,
    draw_course,
    draw_seconds,
    draw_workers,
)

METHODS = ["majority", "global-lion", "terngrad"]
LINK = LinkModel(latency_s=0.0, rate_bit_per_s=8e6)


def draw_link_seconds(comparison):
    return draw_seconds(comparison, LINK, rate="8mbit")


ALL = [draw_course, draw_bytes, draw_link_seconds, draw_workers, draw_bits]
PANELS = [draw_course, draw_bytes, draw_link_seconds, draw_bits]


@pytest.fixture
def comparison(tmp_path):
    return read_comparison(write_comparison(tmp_path / "out"))


def lines_of(axes):
    """Return the curves by label; error bars keep theirs apart."""
    found = {line.get_label(): line for line in axes.get_lines()}
    found |= {bars.get_label(): bars[0] for bars in axes.containers}
    return {name: line for name, line in found.items() if not name.startswith("_")}


@pytest.mark.parametrize("draw", ALL)
def test_every_panel_shows_every_method(comparison, draw):
    for axes in draw(comparison).axes:
        assert list(lines_of(axes)) == METHODS


@pytest.mark.parametrize("draw", ALL)
def test_legend_names_every_method_once(comparison, draw):
    (legend,) = draw(comparison).legends
    assert [text.get_text() for text in legend.get_texts()] == METHODS


@pytest.mark.parametrize("draw", PANELS)
def test_there_is_a_panel_for_each_number_of_workers(comparison, draw):
    assert [axes.get_title() for axes in draw(comparison).axes] == ["4 workers", "8 workers"]


@pytest.mark.parametrize("workers", [(1,), (1, 2, 3), (4, 8, 16, 32), (1, 2, 3, 4, 5)])
def test_any_number_of_panels_fits(tmp_path, workers):
    comparison = read_comparison(write_comparison(tmp_path / "out", workers=workers))
    assert len(draw_course(comparison).axes) == len(workers)


@pytest.mark.parametrize("draw", ALL)
def test_axes_are_labeled(comparison, draw):
    first, *_ = draw(comparison).axes
    assert first.get_xlabel()
    assert first.get_ylabel()


def test_units_are_reported(comparison):
    assert "(%)" in draw_course(comparison).axes[0].get_ylabel()
    assert "(MB)" in draw_bytes(comparison).axes[0].get_xlabel()
    assert "8mbit/s (s)" in draw_link_seconds(comparison).axes[0].get_xlabel()
    assert "nats" in draw_link_seconds(comparison).axes[0].get_ylabel()


def test_methods_differ_without_color(comparison):
    lines = lines_of(draw_course(comparison).axes[0]).values()
    assert len({line.get_marker() for line in lines}) == len(METHODS)
    assert len({line.get_linestyle() for line in lines}) == len(METHODS)
    assert len({to_rgb(line.get_color()) for line in lines}) == len(METHODS)


def test_course_is_the_mean_over_seeds(comparison):
    line = lines_of(draw_course(comparison).axes[0])["majority"]
    assert list(line.get_xdata()) == [0, 5, 10]
    # Seeds end at 0.89, 0.88 and 0.87.
    assert line.get_ydata()[-1] == pytest.approx(88)


def test_band_reaches_from_the_least_to_the_most(comparison):
    band = draw_course(comparison).axes[0].collections[0]
    ends = band.get_paths()[0].vertices
    assert ends[:, 1].max() == pytest.approx(89)
    assert {round(y, 6) for x, y in ends if x == 10} == {87, 89}


def test_bytes_and_seconds_begin_after_the_first_step(comparison):
    sent = lines_of(draw_bytes(comparison).axes[0])["majority"]
    assert list(sent.get_xdata()) == pytest.approx([250 * 10 / 1e6, 250 * 15 / 1e6])
    seconds = lines_of(draw_link_seconds(comparison).axes[0])["majority"]
    # 20 ms of compute in a step, and what was sent until then at 1 MB/s.
    assert list(seconds.get_xdata()) == pytest.approx([5 * 0.02 + 0.0025, 10 * 0.02 + 0.00375])


def test_final_error_against_workers_has_bars_of_the_deviation(comparison):
    (axes,) = draw_workers(comparison).axes
    bars = axes.containers[0]
    assert list(bars[0].get_ydata()) == pytest.approx([12, 12])
    segments = bars[2][0].get_segments()
    assert segments[0][:, 1] == pytest.approx([11, 13])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["4", "8"]


def test_methods_stand_beside_each_other_around_their_number_of_workers(comparison):
    (axes,) = draw_workers(comparison).axes
    places = [float(line.get_xdata()[0]) for line in lines_of(axes).values()]
    assert len(set(places)) == len(METHODS)
    assert all(3.5 < place < 4.5 for place in places)


def test_bits_are_those_up_and_down(comparison):
    axes = draw_bits(comparison).axes[0]
    places = {name: float(line.get_xdata()[0]) for name, line in lines_of(axes).items()}
    assert places == {"majority": 2, "global-lion": 64, "terngrad": 4}
    assert axes.get_xscale() == "log"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("draw", ALL)
def test_workers_that_send_nothing_can_be_drawn(tmp_path, draw):
    folder = write_comparison(tmp_path / "out", workers=(1,))
    for path in (folder / "runs").iterdir():
        record = json.loads(path.read_text()) | {"sent_bytes_per_step": 0.0}
        record |= {"up_bits_per_parameter": 0.0, "down_bits_per_parameter": 0.0}
        path.write_text(json.dumps(record))
    draw(read_comparison(folder)).canvas.draw()


@pytest.mark.parametrize("draw", ALL)
def test_method_that_diverged_keeps_its_place_in_the_legend(tmp_path, draw):
    folder = write_comparison(tmp_path / "out", untunable=("terngrad",), diverged=("majority",))
    figure = draw(read_comparison(folder))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == METHODS
    assert len(lines_of(figure.axes[0])["terngrad"].get_xdata()) == 0
