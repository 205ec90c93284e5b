"""Every page of the built site, opened as on a phone and as on a desktop."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
