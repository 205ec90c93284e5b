"""Settings of the whole test suite."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

# `import cluster` and `import oracle` work in every import mode of pytest.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import COVERAGE_VARIABLE, start_server

pytest_plugins = ["small_disk"]


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


@pytest.fixture(scope="session", autouse=True)
def one_server_of_forks() -> None:
    """Workers of the library's own launcher come from the server of tests/cluster.py too."""
    start_server()


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tests work on small tensors, often beside workers: a second thread only costs."""
    torch.set_num_threads(1)
