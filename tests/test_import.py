"""Importing distlion brings names only: no optional package, no thread, no changed setting."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import distlion

OPTIONAL_PACKAGES = [
    "accelerate",
    "datasets",
    "lightning",
    "matplotlib",
    "pyroute2",
    "rich",
    "safetensors",
    "sklearn",
    "transformers",
    "triton",
    "typer",
]
COSTLY_MODULES = ["torch.distributed.checkpoint"]
UNASKED_MODULES = ["distlion_lab", "distlion_netlab"]
"""Ours, which training with the optimizer alone does not need."""

OBSERVE = """
import importlib, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch.distributed

def observe():
    return {
        "modules": sorted(sys.modules),
        "torch_random_state": torch.get_rng_state().tolist(),
        "torch_seed": torch.initial_seed(),
        "numpy_random_state": repr(numpy.random.get_state()),
        "python_random_state": hash(random.getstate()),
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "threads_of_torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad_enabled": torch.is_grad_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "flushes_denormals": (torch.tensor(2.0**-140) * 0.5).item() == 0.0,
        "process_group": torch.distributed.is_initialized(),
        "python_threads": sorted(thread.name for thread in threading.enumerate()),
        "system_threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 0,
        "environment": sorted(os.environ.items()),
        "working_directory": os.getcwd(),
        "signal_handlers": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "warning_filters": repr(warnings.filters),
        "log_handlers": repr(logging.getLogger().handlers),
        "exception_hook": repr(sys.excepthook),
    }

def mark():
    for stream in (sys.stdout, sys.stderr):
        print("MARK", file=stream, flush=True)

warnings.simplefilter("always")
observe()  # what the observation itself imports or starts
before = observe()
mark()
importlib.import_module("distlion")
mark()
print(json.dumps({"before": before, "after": observe()}))
"""


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    """Run source in a fresh interpreter, outside of coverage and of any launcher's world."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COV") and name not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.run(
        [sys.executable, "-c", source],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def fresh_import() -> subprocess.CompletedProcess[str]:
    """Import torch, then distlion, in a fresh interpreter that observes itself before and after."""
    finished = run_python(OBSERVE)
    assert finished.returncode == 0, finished.stderr
    return finished


@pytest.fixture(scope="module")
def observations(fresh_import: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Return the state of that interpreter before and after."""
    result: dict[str, dict[str, Any]] = json.loads(fresh_import.stdout.split("MARK\n")[-1])
    return result


@pytest.mark.parametrize("name", [*OPTIONAL_PACKAGES, *COSTLY_MODULES, *UNASKED_MODULES])
def test_import_leaves_alone_what_is_not_needed(
    name: str, observations: dict[str, dict[str, Any]]
) -> None:
    before, after = observations["before"]["modules"], observations["after"]["modules"]
    assert "distlion.optim" in after
    imported = set(after) - set(before)
    assert not {module for module in imported if f"{module}.".startswith(f"{name}.")}


def test_import_changes_no_state_of_the_process(
    observations: dict[str, dict[str, Any]],
) -> None:
    before, after = observations["before"], observations["after"]
    changed = {
        name: (before[name], after[name])
        for name in before
        if name != "modules" and before[name] != after[name]
    }
    assert changed == {}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_import_prints_and_warns_nothing(
    stream: str, fresh_import: subprocess.CompletedProcess[str]
) -> None:
    _, during_import, _ = getattr(fresh_import, stream).split("MARK\n")
    assert during_import == ""


@pytest.mark.slow
def test_import_works_where_no_optional_package_is_installed() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in OPTIONAL_PACKAGES)
    finished = run_python(f"import sys; {blocked}import distlion; print(distlion.__version__)")
    assert finished.stderr == ""
    assert finished.stdout.strip() == distlion.__version__


def test_public_names_are_sorted_and_unique() -> None:
    assert distlion.__all__ == sorted(set(distlion.__all__))


@pytest.mark.parametrize("name", distlion.__all__)
def test_public_name_exists(name: str) -> None:
    assert hasattr(distlion, name)


def test_package_holds_public_names_and_nothing_else() -> None:
    names = {
        name
        for name, value in vars(distlion).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert names | {"__version__"} == set(distlion.__all__)


def test_version_is_that_of_the_installed_package() -> None:
    assert distlion.__version__ == importlib.metadata.version("distlion")


def test_no_module_of_crews_imports_one_that_imports_it_even_for_types() -> None:
    folder = Path(distlion.__file__).parent / "crew"
    imported = {
        f"distlion.crew.{path.stem}": {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        for path in folder.glob("*.py")
    }
    assert len(imported) > 10
    assert set(imported) <= set(TopologicalSorter(imported).static_order())
