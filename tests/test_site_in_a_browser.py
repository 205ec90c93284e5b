"""Every page of the built site, opened as on a phone and as on a desktop."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = {"phone": 390, "desktop": 1280}
# How far text reaches beyond the window, but for tables and code, which scroll by themselves. The
# theme hides what is too wide, so that the width of the document does not tell.
HIDDEN_PIXELS = """() => {
    const article = document.querySelector("article") || document.body;
    const scrolls = each => getComputedStyle(each).overflowX === "auto";
    let furthest = window.innerWidth;
    const walk = each => {
        furthest = Math.max(furthest, each.getBoundingClientRect().right);
        if (!scrolls(each)) for (const inner of each.children) walk(inner);
    };
    walk(article);
    return Math.round(furthest - window.innerWidth);
}"""

ANSWERS = {
    "learning rate": "docs/recipe.html",
    "NCCL": "docs/how-to/several-gpus.html",
    "FSDP": "docs/how-to/several-gpus.html",
    "resume": "docs/how-to/checkpoints.html",
    "loss is NaN": "docs/how-to/diagnose.html",
}
FIRST_RESULT = "#search-results ul.search > li > a"
# The theme has two complementary landmarks, one of them without a name.
RULES_OF_THE_THEME = ("landmark-unique",)

GIVEN_UP = "net::ERR_ABORTED"
"""The next page opens before the last one has its icon. A missing icon is another failure."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    finished = subprocess.run(
        [*command, "-d", str(folder / "trees"), ".", str(folder / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def name_failure(request: Any) -> str:
    """Return what was asked for and why it failed."""
    return f"{request.url}: {request.failure}"


@pytest.mark.parametrize("device", WIDTHS)
def test_pages_fit_and_the_console_is_clean(site: Path, browser: Any, device: str) -> None:
    page = browser.new_page(viewport={"width": WIDTHS[device], "height": 844})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(f"failed: {name_failure(request)}"))
    faults: list[str] = []
    pages = sorted((site / "docs").rglob("*.html"))
    for path in pages:
        said.clear()
        page.goto(path.as_uri())
        too_wide = page.evaluate(HIDDEN_PIXELS)
        faults += [f"{path.stem}: {text}" for text in said if not text.endswith(GIVEN_UP)]
        faults += [f"{path.stem}: {too_wide} pixels too wide"] if too_wide > 0 else []
    page.close()
    assert faults == []
    assert len(pages) > 40


def test_first_page_leads_to_the_documents(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.wait_for_url("**/docs/index.html")
    assert page.title() == "distlion"
    page.close()


@pytest.mark.parametrize("asked", ANSWERS)
def test_first_result_of_a_search_is_the_page_that_answers(
    site: Path, browser: Any, asked: str
) -> None:
    page = browser.new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q={quote_plus(asked)}")
    page.wait_for_function("document.querySelector('.search-summary')?.innerText.includes('found')")
    assert page.get_attribute(FIRST_RESULT, "href").split("#")[0] == ANSWERS[asked]
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_break_no_rule_of_accessibility(site: Path, browser: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = browser.new_page(viewport={"width": 1280, "height": 844}, color_scheme=scheme)
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if scheme == "light":
        options["rules"] = {name: {"enabled": False} for name in RULES_OF_THE_THEME}
    else:  # only colors are others
        options["runOnly"] = ["color-contrast"]
    faults: list[str] = []
    for path in sorted((site / "docs").rglob("*.html")):
        page.goto(path.as_uri())
        found = axe.run(page, options=options).response["violations"]
        faults += [f"{path.stem}: {each['id']}: {each['nodes'][0]['html']}" for each in found]
    page.close()
    assert faults == []
