import subprocess
import sys

import pytest
from typer.testing import CliRunner

from distlion_lab.cli import app


@pytest.mark.smoke
def test_no_command_shows_the_commands():
    assert "train" in CliRunner().invoke(app, []).output


@pytest.mark.parametrize("package", ["typer", pytest.param("transformers", marks=pytest.mark.slow)])
def test_missing_package_names_the_extra_in_one_line(package):
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['plan']\n"
        "from distlion.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert package in line
    assert 'pip install "distlion[train]"' in line
