"""The packages of this repository that extras need: those of the checkout, or published ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

NEEDED = {"train": ("lab", ""), "netlab": ("lab", "[netlab]"), "flower": ("flower", "[flwr]")}
"""The folder of a package, and its extras, by the extra of distlion that needs it."""


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, dict[str, list[str]]]:
    """Add these packages; where ``DISTLION_RELEASE`` is set or the folder is absent, by version."""
    added = {}
    for extra, (folder, extras) in NEEDED.items():
        path = ROOT / folder
        is_published = bool(os.environ.get("DISTLION_RELEASE")) or not path.is_dir()
        where = f"=={project['version']}" if is_published else f" @ {path.as_uri()}"
        added[extra] = [f"distlion-{folder}{extras}{where}"]
    return {"optional-dependencies": added}
