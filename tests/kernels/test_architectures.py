"""The loops compiled for aarch64 and run in an emulator, against this machine's own: equal bits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"


def build(compiler: str, program: Path) -> None:
    """Compile the baseline alone: on this machine SSE2 or the like, on aarch64 NEON."""
    subprocess.run(
        [
            *(compiler, "-std=gnu++20", "-O3", "-ffp-contract=off", "-static", "-pthread"),
            *("-DDISTLION_INSTRUCTION_SET=baseline_loops", f"-I{ROOT}/csrc", "-o", program),
            *(ROOT / "csrc" / name for name in ("loops.cpp", "frames.cpp", "parallel.cpp")),
            *(Path(__file__).parent / "cross" / name for name in ("baseline.cpp", "print_ops.cpp")),
        ],
        check=True,
    )


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_program_fits_the_core() -> None:
    program = Path(__file__).parent / "cross" / "print_ops.cpp"
    flags = "-std=gnu++20", "-fsyntax-only", f"-I{ROOT}/csrc"
    subprocess.run(["c++", *flags, program], check=True)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason="needs the packages g++-aarch64-linux-gnu and qemu-user-static",
)
def test_neon_computes_the_bits_of_this_machine(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    build("c++", here)
    build(COMPILER, there)
    expected = subprocess.run([here], check=True, capture_output=True, text=True).stdout
    found = subprocess.run([EMULATOR, there], check=True, capture_output=True, text=True).stdout
    assert found.splitlines() == expected.splitlines()
    assert len(expected.splitlines()) > 100
