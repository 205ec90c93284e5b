"""Plant each bug of the lists here in a copy of the package: a test that it names must fail.

python campaigns/mutations [WORDS OF A NAME]
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

from planted import OTHERS, Mutation
from planted_everywhere import EVERYWHERE

import distlion.kernels._cpu
import distlion.wire._endpoint

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutations"
LIMIT_S = 600
# Signals of bugs that end the tests' own process; others come from outside, as without memory.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
SOURCES = ("src", *(f"{folder}/src" for folder in OTHERS))


def make_tree() -> Path:
    """Copy the package, and make an interpreter that imports the copy; return the interpreter."""
    shutil.rmtree(TREE, ignore_errors=True)
    for folder in SOURCES:
        shutil.copytree(
            ROOT / folder, TREE / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    core = Path(distlion.kernels._cpu.__file__)
    shutil.copy(core, TREE / "src" / "distlion" / "kernels")
    place_endpoint(distlion.wire._endpoint.__file__)
    shutil.copytree(ROOT / "csrc", TREE / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", TREE)
    venv.create(TREE / "env", with_pip=False, symlinks=True)
    python = TREE / "env" / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([python, "-c", asked], text=True).strip())
    # In the order of their names: the copy shadows the package that is installed.
    (packages / "1_copy.pth").write_text("".join(f"{TREE / folder}\n" for folder in SOURCES))
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "2_others.pth").write_text("\n".join(others) + "\n")
    for name in ("distlion", *(f"distlion_{folder}" for folder in OTHERS)):
        found = subprocess.check_output([python, "-c", f"import {name}; print({name}.__file__)"])
        assert str(TREE) in found.decode(), found
    return python


def build(python: Path) -> None:
    """Build the endpoint of the copy, and put it in its place."""
    folder = TREE / "cmake"
    nanobind = subprocess.check_output([python, "-m", "nanobind", "--cmake_dir"], text=True)
    options = [f"-Dnanobind_DIR={nanobind.strip()}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", "-S", str(TREE), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--target", "_endpoint"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    place_endpoint(next(folder.glob("_endpoint*.so")))


def place_endpoint(built: str | Path) -> None:
    """Let the copy have an endpoint."""
    name = Path(distlion.wire._endpoint.__file__).name
    shutil.copy(built, TREE / "src" / "distlion" / "wire" / name)


def run_tests(python: Path, mutation: Mutation) -> int:
    """Return pytest's status."""
    tests = [str(ROOT / test) for test in mutation.test_paths]
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    options += ["-m", "slow" if mutation.is_slow else "not slow"]
    command = [python, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if mutation.interprets:
        environment["TRITON_INTERPRET"] = "1"
    try:
        finished = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1  # it hangs: that is noticed
    return finished.returncode


def plant(python: Path, mutation: Mutation) -> str:
    """Plant one bug, run its tests, take it back; return "killed", or what is wrong."""
    path = TREE / mutation.path
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return f"stands {text.count(mutation.old)} times in {mutation.file}: update its entry"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        if mutation.is_built:
            build(python)
        status = run_tests(python, mutation)
    finally:
        path.write_text(text)
        if mutation.is_built:
            place_endpoint(distlion.wire._endpoint.__file__)
    if status == 0:
        return "SURVIVED"
    is_noticed = status == 1 or -status in CRASHES
    return "killed" if is_noticed else f"no test ran: pytest ended with {status}"


def main(words: str) -> int:
    """Plant all bugs whose name holds ``words``; return 0 if each was killed."""
    chosen = [mutation for mutation in EVERYWHERE if words in mutation.name]
    python = make_tree()
    n_killed = 0
    for number, mutation in enumerate(chosen, start=1):
        started_s = time.monotonic()
        outcome = plant(python, mutation)
        n_killed += outcome == "killed"
        took_s = time.monotonic() - started_s
        print(f"{number:3d}/{len(chosen)} {took_s:4.0f} s  {mutation.name}: {outcome}", flush=True)
    print(f"{n_killed} passed, {len(chosen) - n_killed} failed")
    return 0 if chosen and n_killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
