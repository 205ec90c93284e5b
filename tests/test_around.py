"""Of the tests around the library, `make test` runs a few: each folder has some."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import AROUND

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", AROUND, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_each_folder_around_the_library_has_a_smoke_test(folder: Path) -> None:
    tests = [path.read_text() for path in folder.rglob("test_*.py")]
    assert any("@pytest.mark.smoke" in test for test in tests)


def test_commands_have_smoke_tests() -> None:
    for name in ("train", "plan"):
        assert "@pytest.mark.smoke" in (ROOT / f"lab/tests/cli/test_{name}.py").read_text(), name


def test_unmarked_tests_of_a_library_package_are_not_around(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("around") is None
