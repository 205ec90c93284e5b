"""Whether this machine can have a lab."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess


def find_obstacle() -> str | None:
    """Say why this machine cannot have a lab, or return None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a network lab needs root rights"
    if importlib.util.find_spec("pyroute2") is None:
        return "the package pyroute2 is not installed"
    if missing := [program for program in ("ip", "unshare") if shutil.which(program) is None]:
        return f"these tests look at the lab with {' and '.join(missing)}, not installed here"
    asked = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, check=False
    )
    return f"no network namespaces here: {asked.stderr.strip()}" if asked.returncode else None
