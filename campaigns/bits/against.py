"""Play cases with the library of another checkout, here and now, and compare."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bits import ledger
from bits.ledger import Digests

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / name) for name in ("tests", "campaigns"))
ASKED = """
from importlib import metadata, util
found = util.find_spec("distlion")
print(found and found.origin)
print(found and metadata.version("torch"))
"""


class CheckoutError(Exception):
    """The other checkout cannot be compared with this one."""


def compare(folder: Path, words: Sequence[str]) -> int:
    """Print the cases that differ; return 0 if there are none.

    Args:
        folder: A checkout of the library, in which `make` has made ``.venv``.
        words: Words that names of cases must contain.

    Raises:
        CheckoutError: It has no interpreter, imports another library, or has another torch.
    """
    # The interpreter stays a link: its target knows nothing of the environment.
    other = folder.absolute() / ".venv" / "bin" / "python"
    if not other.exists():
        raise CheckoutError(f"{other} does not exist. Expected a checkout that is built. Run make")
    origin, version = _ask(other)
    if not Path(origin).resolve().is_relative_to(folder.resolve()):
        raise CheckoutError(
            f"{other} imports {origin}. Expected a library below {folder}. Run make"
        )
    own_origin, own_version = _ask(Path(sys.executable))
    if version != own_version:
        raise CheckoutError(
            f"{folder} has torch {version}, and this checkout {own_version}. Expected the same, as "
            "some cases depend on it. Install one of them in both"
        )
    print(f"{own_origin} against {origin}", flush=True)
    found, before = (_play(each, words) for each in (Path(sys.executable), other))
    return report(ledger.compare(found, before, missing="not in the other checkout"), len(found))


def report(differences: Sequence[str], n_cases: int) -> int:
    """Print differences; return 0 if there are none."""
    print(*differences, f"{len(differences)} differences in {n_cases} cases", sep="\n")
    return 1 if differences else 0


def _ask(python: Path) -> tuple[str, str]:
    """Return where an interpreter finds the library, and its version of torch."""
    found = subprocess.run(
        [python, "-c", ASKED],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=_make_environment(),
    )
    origin, version = found.stdout.split("\n")[:2]
    return origin, version


def _play(python: Path, words: Sequence[str]) -> dict[str, Digests]:
    """Play cases of these tests with the library of an interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digests.json"
        command = [python, "-m", "bits", "play", "--out", path, *words]
        subprocess.run(command, check=True, env=_make_environment())
        return ledger.read(path)


def _make_environment() -> dict[str, str]:
    # Nothing is written into the other checkout.
    return {**os.environ, "PYTHONPATH": PATHS, "PYTHONDONTWRITEBYTECODE": "1"}
