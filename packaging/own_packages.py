"""The packages of this repository that extras need: those of the checkout, or published ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

NEEDED = {"train": ("lab",), "netlab": ("lab", "netlab"), "flower": ("flower[flwr]",)}
"""Folders of packages, with the extras that are wanted, by the extra of distlion."""


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, dict[str, list[str]]]:
    """Add these packages; where ``DISTLION_RELEASE`` is set or the folder is absent, by version."""
    added = {
        extra: [_require(each, project["version"]) for each in packages]
        for extra, packages in NEEDED.items()
    }
    return {"optional-dependencies": added}


def _require(package: str, version: str) -> str:
    path = ROOT / package.partition("[")[0]
    is_published = bool(os.environ.get("DISTLION_RELEASE")) or not path.is_dir()
    return f"distlion-{package}" + (f"=={version}" if is_published else f" @ {path.as_uri()}")
