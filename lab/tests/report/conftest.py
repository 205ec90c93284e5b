"""Chromium for the tests of pages. It comes with the system; nothing is downloaded here."""

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """A running browser; a machine without one skips the test."""
    chromium = next(filter(None, map(shutil.which, NAMES)), "")
    if not chromium:
        pytest.skip("there is no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root has no sandbox; the page is ours.
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()
