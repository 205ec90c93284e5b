from __future__ import annotations

import pytest

from obstacle import find_obstacle


@pytest.fixture(scope="session")
def namespaces_work() -> None:
    """Skip the test where namespaces do not work."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)


@pytest.fixture(scope="module")
def shared_lab(namespaces_work):
    """Three hosts without limits, for tests that leave them as they were."""
    from distlion_netlab import Lab

    with Lab(3) as lab:
        yield lab
