import subprocess
import sys

import pytest
from typer.testing import CliRunner

import distlion
from distlion.lab.cli import app


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_version_is_that_of_the_package():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"distlion {distlion.__version__}\n"


def test_no_command_shows_the_commands():
    assert "train" in CliRunner().invoke(app, []).output


def test_module_runs_the_command_line():
    command = [sys.executable, "-m", "distlion", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"distlion {distlion.__version__}\n"


def test_missing_interface_package_names_the_extra_in_one_line():
    code = "import sys; sys.modules['typer'] = None; from distlion.__main__ import main; main()"
    result = run_python(code)
    assert result.returncode == 1
    assert result.stderr.strip().endswith('pip install "distlion[train]"')
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_missing_training_package_names_the_extra_in_one_line():
    code = (
        "import sys; sys.modules['transformers'] = None; from distlion.__main__ import main; main()"
    )
    result = run_python(code)
    assert result.returncode == 1
    assert 'pip install "distlion[train]"' in result.stderr
    assert "Traceback" not in result.stderr
