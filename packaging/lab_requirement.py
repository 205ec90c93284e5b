"""Which distlion-lab the extras of a build need: the one of the checkout, or a published one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAB = Path(__file__).resolve().parents[1] / "lab"


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, dict[str, list[str]]]:
    """Add distlion-lab to its extras; with ``DISTLION_RELEASE`` set, the published one."""
    is_published = bool(os.environ.get("DISTLION_RELEASE")) or not LAB.is_dir()
    where = f"=={project['version']}" if is_published else f" @ {LAB.as_uri()}"
    return {
        "optional-dependencies": {
            "train": [f"distlion-lab{where}"],
            "netlab": [f"distlion-lab[netlab]{where}"],
        }
    }
