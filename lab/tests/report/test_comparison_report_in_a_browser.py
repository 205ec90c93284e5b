"""The page of a comparison in Chromium, at two widths."""

import pytest

from comparisons import write_comparison
from distlion.wire import LinkModel
from distlion_lab.report.comparison_report import write_comparison_report

LINK = LinkModel(latency_s=1e-4, rate_bit_per_s=1e9)
METHODS = ("majority-cautious-betas-90-95", "majority-sync-10-attention", "global-lion")
OVERFLOWS = "element => element.scrollWidth - element.clientWidth"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = write_comparison(tmp_path_factory.mktemp("report") / "out", methods=METHODS)
    return write_comparison_report(folder, link=LINK, rate="1gbit")[-1].as_uri()


def open_page(browser, address, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(address)
    assert page.locator("thead").first.locator("th").count() == 12
    assert page.locator("html").evaluate(OVERFLOWS) == 0
    return page


def test_every_column_fits_on_a_laptop(browser, address):
    page = open_page(browser, address, 1280)
    assert [table.evaluate(OVERFLOWS) for table in page.locator(".table").all()] == [0] * 5
    page.close()


def test_tables_scroll_on_a_phone_and_the_method_stays_in_sight(browser, address):
    page = open_page(browser, address, 390)
    table = page.locator(".table").first
    assert table.evaluate(OVERFLOWS) > 0
    method = table.locator("tbody td").first
    before = method.bounding_box()
    table.evaluate("element => { element.scrollLeft = 300; }")
    assert table.evaluate("element => element.scrollLeft") == 300
    assert method.bounding_box() == before
    page.close()
