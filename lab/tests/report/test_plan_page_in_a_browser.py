"""The planner's page as a reader has it: in Chromium, with sliders, at two widths."""

import json

import pytest
from typer.testing import CliRunner

from distlion_lab.cli import app

PLAN = {"--params": "350e6", "--nodes": "12", "--link": "1gbit", "--compute-s": "0.5"}
SIZES = {"phone": (375, 812), "desktop": (1280, 900)}

pytestmark = pytest.mark.slow


def run_plan(*more, **changes):
    given = PLAN | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    words = [word for pair in given.items() for word in pair]
    result = CliRunner().invoke(app, ["plan", *words, *more])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture(params=SIZES, name="page")
def open_page(request, browser, tmp_path):
    """The page, whose console must stay clean and which may ask for no other file."""
    path = tmp_path / "plan.html"
    run_plan("--html", str(path))
    width, height = SIZES[request.param]
    page = browser.new_page(viewport={"width": width, "height": height})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda wanted: asked.append(wanted.url))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert said == []
    assert asked == [path.as_uri()]


def read_page(page):
    """Return the advice, and the seconds of a step by method."""
    rows = page.locator("#methods tr").all()
    seconds = {
        row.get_attribute("data-method"): float(row.get_attribute("data-step-s")) for row in rows
    }
    return page.locator("#advice").inner_text(), seconds


def expected_of(**changes):
    record = json.loads(run_plan("--json", **changes))
    seconds = {}
    for forecast in record["forecasts"]:
        seconds.setdefault(forecast["method"], forecast["step_s"])
    return record["advice"]["text"], seconds


def move(page, slider, position):
    page.locator(f"#{slider}").evaluate(
        "(input, to) => { input.value = to; input.dispatchEvent(new Event('input')); }", position
    )
    return page.locator(f"label[for={slider}] output").inner_text()


def assert_shows(page, **changes):
    advice, seconds = read_page(page)
    expected_advice, expected_seconds = expected_of(**changes)
    assert advice == expected_advice
    assert seconds == pytest.approx(expected_seconds, rel=1e-12)


def test_page_opens_with_the_plan_that_it_was_made_for(page):
    assert_shows(page)


def test_sliders_move_every_number_to_that_of_the_command(page):
    rates, machines = [], []
    for position in (0, 14, 28, 35):
        rates.append(move(page, "rate", position))
        number, unit = rates[-1].split()
        assert_shows(page, link=number + unit.removesuffix("/s").lower())
    move(page, "rate", 14)
    for position in (0, 7, 19):
        machines.append(move(page, "nodes", position))
        assert_shows(page, link="1gbit", nodes=machines[-1].replace(",", ""))
    assert len({*rates, *machines}) == 7
    for position, count in ((0, "1e6"), (25, "120e6")):
        move(page, "n_params", position)
        assert_shows(page, link="1gbit", nodes="1024", params=count)
    move(page, "compute_s", 61)
    assert_shows(page, link="1gbit", nodes="1024", params="120e6", compute_s="100")


def test_page_fits_its_window_and_draws_a_curve_for_each_ticked_method(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#chart .curve").count() == 4
    page.locator("#methods input:not(:checked)").first.check()
    assert page.locator("#chart .curve").count() == 5
    for path in page.locator("#chart .curve").all():
        assert "NaN" not in path.get_attribute("d")
