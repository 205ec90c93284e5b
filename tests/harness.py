"""Settings of the whole test suite."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# `import cluster` and `import oracle` work in every import mode of pytest.
sys.path.insert(0, str(Path(__file__).resolve().parent))

# torch asks a name server for each address that it connects to: a lost answer takes 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from cluster import COVERAGE_VARIABLE, start_server
from forked_programs import Programs

pytest_plugins = ["small_disk"]

# No limit on the time of an example: a machine under load exceeds any.
settings.register_profile("distlion", deadline=None)
settings.load_profile("distlion")

ROOT = Path(__file__).resolve().parents[1]

APART = tuple(
    ROOT / name
    for name in ("tests/crew", "tests/distributed", "tests/integrations", "campaigns/fuzz")
)
"""Folders whose tests `make test` runs beside all others: together they take as long."""

AROUND = tuple(
    ROOT / name for name in ("lab/tests", "netlab/tests", "flower/tests", "benchmarks/tests")
)
"""Folders of which `make test` runs only what is marked `smoke`."""


@functools.cache
def _is_in(path: Path, folders: tuple[Path, ...]) -> bool:
    """Return whether a module of tests is in one of the folders; thousands of its tests ask."""
    return any(path.is_relative_to(folder) for folder in folders)


def pytest_configure(config: pytest.Config) -> None:
    """Tell workers where to write their coverage, where pytest-cov measures it."""
    plugin = config.pluginmanager.get_plugin("_cov")
    measurement = getattr(getattr(plugin, "cov_controller", None), "cov", None)
    if measurement is None:
        os.environ.pop(COVERAGE_VARIABLE, None)
        return
    os.environ[COVERAGE_VARIABLE] = json.dumps(
        {
            "data_file": os.path.abspath(measurement.config.data_file),
            "config_file": measurement.config.config_file or False,
            "source": measurement.config.source,
            "branch": measurement.config.branch,
        }
    )


ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)
"""How a module marks all of its tests as slow."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module of which the chosen marks leave out every test, unless it is named."""
    chosen, here = config.option.markexpr, config.invocation_params.dir
    named = (here / argument.partition("::")[0] for argument in config.args)
    if not collection_path.name.startswith("test_") or collection_path in named:
        return None
    text = collection_path.read_text()
    is_left_out = ("not slow" in chosen and ALL_SLOW.search(text) is not None) or (
        "not around" in chosen
        and _is_in(collection_path, AROUND)
        and "pytest.mark.smoke" not in text
    )
    return is_left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` runs apart, or not at all, before it is chosen by its mark."""
    for item in items:
        if _is_in(item.path, APART):
            item.add_marker("apart")
        if _is_in(item.path, AROUND) and item.get_closest_marker("smoke") is None:
            item.add_marker("around")


@pytest.fixture(scope="session", autouse=True)
def one_server_of_forks(request: pytest.FixtureRequest) -> None:
    """Workers of the library's own launcher come from the server of tests/cluster.py too."""
    # The server imports for seconds: not for tests that start no workers.
    items = [item for item in request.session.items if item.get_closest_marker("distributed")]
    if items:
        marks = {mark.name for item in items for mark in item.iter_markers()}
        start_server(
            {part for item in items for part in item.path.parts} | marks & {"slow", "around"}
        )


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Run programs in forks of one interpreter, which all tests of a session share."""
    with Programs() as programs:
        yield programs


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tests work on small tensors, often beside workers: a second thread only costs."""
    torch.set_num_threads(1)
