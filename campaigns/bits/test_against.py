"""Two checkouts are compared on one machine: what differs is named, with or without a record."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import distlion.kernels._cpu
from bits import against

SOURCE = Path(distlion.__file__).parent
CASES = ["average / virtual / ma"]  # matrices, with and without a record


def make_checkout(folder: Path) -> Path:
    """Make a checkout whose interpreter imports a copy of the package; return the copy."""
    package = folder / "src" / "distlion"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(distlion.kernels._cpu.__file__, package / "kernels")
    venv.create(folder / ".venv", with_pip=False, symlinks=True)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = folder / ".venv" / "bin" / "python"
    packages = Path(subprocess.check_output([python, "-c", asked], text=True).strip())
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    # In the order of the names: the copy shadows the package that is installed.
    (packages / "1_copy.pth").write_text(f"{folder / 'src'}\n")
    (packages / "2_others.pth").write_text("\n".join(others) + "\n")
    return package


@pytest.mark.slow
def test_checkouts_are_compared_in_cases_without_records_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_checkout(tmp_path) / "kernels" / "orthogonal.py"
    assert against.compare(tmp_path, CASES) == 0
    text, iterations = path.read_text(), "ITERATIONS = 5"
    assert text.count(iterations) == 1
    path.write_text(text.replace(iterations, "ITERATIONS = 4"))
    assert against.compare(tmp_path, CASES) == 1
    name = "average / virtual / matrices, torch's products"
    assert f"{name}: parameters\n" in capsys.readouterr().out


def test_a_folder_that_is_no_built_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(against.CheckoutError, match=r"does not exist. Expected a checkout"):
        against.compare(tmp_path, [])
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(against.CheckoutError, match=r"imports .* Expected a library below"):
        against.compare(tmp_path, [])
