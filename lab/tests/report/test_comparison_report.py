import json
import re

import pytest
from matplotlib import image

from comparisons import write_comparison
from distlion.wire import LinkModel
from distlion_lab.errors import DataError
from distlion_lab.report.comparison import read_comparison
from distlion_lab.report.comparison_report import build_report, write_comparison_report
from distlion_lab.report.document import Heading, Picture

LINK = LinkModel(latency_s=1e-4, rate_bit_per_s=1e9)
FIGURES = ["bits.png", "bytes.png", "seconds.png", "steps.png", "workers.png"]


def write(folder):
    return write_comparison_report(folder, link=LINK, rate="1gbit")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(write_comparison(tmp_path_factory.mktemp("report") / "out"))


@pytest.fixture(scope="module")
def folder(written):
    return written[-1].parent


def test_report_is_figures_markdown_and_a_page(written):
    assert {path.name for path in written} == {*FIGURES, "report.html", "report.md"}
    assert all(path.exists() for path in written)
    assert written[-1].name == "report.html"


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_a_png_with_something_drawn_and_markdown_shows_it(folder, name):
    assert image.imread(folder / name).std() > 0
    assert f"]({name})" in (folder / "report.md").read_text()


@pytest.mark.parametrize("figures", [(), ("bits.png",)])
def test_only_figures_that_are_asked_for_are_drawn(folder, figures):
    comparison = read_comparison(folder)
    blocks = build_report(comparison, link=LINK, rate="1gbit", figures=figures)
    assert [block.name for block in blocks if isinstance(block, Picture)] == list(figures)
    headings = [block.text for block in blocks if isinstance(block, Heading)]
    assert ("Figures" in headings) == bool(figures)


def test_page_needs_nothing_else(folder):
    page = (folder / "report.html").read_text()
    sources = re.findall(r"(?:src|href)\s*=\s*[\"']([^\"']*)", page)
    assert len(sources) == len(FIGURES)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|url\(|@import|<script|<link", page)


@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_report_states_how_methods_were_tuned_and_how_to_repeat(folder, name):
    text = (folder / name).read_text()
    for part in (
        "Every method got the same budget",
        "3 learning rates",
        "seed 0, which is reported nowhere",
        "validation half",
        "distlion compare --task images",
        "1,000 parameters",
        "4 workers",
        "8 workers",
    ):
        assert part in text


def test_choice_at_the_edge_is_warned_of(folder, tmp_path):
    # All choices of the made-up records are in the middle.
    assert "at the edge of its grid" not in (folder / "report.md").read_text()
    other = write_comparison(tmp_path / "out")
    index = other / "comparison.json"
    index.write_text(index.read_text().replace('"lr": 0.001, "runs"', '"lr": 0.002, "runs"'))
    assert "at the edge of its grid" in write_and_read(other)


def write_and_read(folder):
    write(folder)
    return (folder / "report.md").read_text()


def test_scale_of_all_learning_rates_is_reported(tmp_path):
    folder = write_comparison(tmp_path / "out")
    index = json.loads((folder / "comparison.json").read_text())
    index["settings"]["lr_scale"] = 0.5
    (folder / "comparison.json").write_text(json.dumps(index))
    assert "around a default of its own (all of them times 0.5), one" in write_and_read(folder)


@pytest.mark.parametrize("changes", [{"diverged": ("majority",)}, {"untunable": ("majority",)}])
def test_divergence_is_reported(tmp_path, changes):
    text = write_and_read(write_comparison(tmp_path / "out", **changes))
    assert "| 1 of 3 |" in text or "| at every lr |" in text


def test_text_is_reported_by_its_loss(tmp_path):
    text = write_and_read(write_comparison(tmp_path / "out", task="text"))
    assert "Test loss against steps" in text
    assert "error" not in text


def test_one_seed_and_one_number_of_workers_make_a_report(tmp_path):
    text = write_and_read(write_comparison(tmp_path / "out", seeds=1, workers=(2,)))
    assert "have 1 seed;" in text


def test_folder_without_a_comparison_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match=r"comparison\.json"):
        write(tmp_path)
