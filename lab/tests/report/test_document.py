from html.parser import HTMLParser

import pytest

from distlion_lab.report.document import (
    Code,
    Heading,
    Paragraph,
    Picture,
    Table,
    render_html,
    render_markdown,
)

BLOCKS = [
    Heading("A < B", level=1),
    Paragraph("It is `x & y`."),
    Table(["name", "value"], [["a|b", "1.5 ± 0.1"], ["c", "2"]]),
    Code("run --this"),
    Picture("figure.png", "What it shows.", b"\x89PNG"),
]


def test_markdown_has_all_blocks():
    assert render_markdown(BLOCKS) == (
        "# A < B\n\n"
        "It is `x & y`.\n\n"
        "| name | value |\n| --- | ---: |\n| a\\|b | 1.5 ± 0.1 |\n| c | 2 |\n\n"
        "```bash\nrun --this\n```\n\n"
        "![What it shows.](figure.png)\n\n*What it shows.*\n"
    )


def test_html_escapes_text_and_keeps_code():
    page = render_html(BLOCKS)
    assert "<h1>A &lt; B</h1>" in page
    assert "<title>A &lt; B</title>" in page
    assert "<code>x &amp; y</code>" in page
    assert '<td class="number">1.5 ± 0.1</td>' in page


def test_html_sets_a_unit_below_what_it_measures():
    page = render_html([Table(["error (%)", "f(x) or so"], [["1", "2"]])])
    assert '<th class="number">error<br><span>(%)</span></th>' in page
    assert '<th class="number">f(x) or so</th>' in page


def test_html_holds_its_pictures():
    assert 'src="data:image/png;base64,iVBORw=="' in render_html(BLOCKS)


def test_html_is_closed_in_order():
    class Checker(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("br", "img", "meta"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    checker = Checker()
    checker.feed(render_html(BLOCKS))
    assert checker.open == []


def test_html_knows_light_and_dark():
    assert "prefers-color-scheme: dark" in render_html(BLOCKS)


@pytest.mark.parametrize("cell", ["3", "-1.5", "1e-05", "+0.10 ± 0.02", "1 – 2", "0 of 3", "1,000"])
def test_numbers_are_set_flush_right(cell):
    assert "---:" in render_markdown([Table(["n"], [[cell]])])


@pytest.mark.parametrize("cell", ["majority", "e", "quantized-2", "none", ""])
def test_words_are_set_flush_left(cell):
    assert "---:" not in render_markdown([Table(["n"], [[cell]])])


def test_table_without_rows_is_its_head():
    assert render_markdown([Table(["a", "b"], [])]) == "| a | b |\n| --- | --- |\n"
