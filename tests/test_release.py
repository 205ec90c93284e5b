"""A release has one version, one list of Pythons and one chain of jobs, wherever they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]


def read_yaml(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / path).read_text("utf-8"))
    return found


def list_pythons() -> list[str]:
    pattern = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    return [found[1] for line in PROJECT["classifiers"] if (found := pattern.fullmatch(line))]


def test_one_version_and_one_date() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    version, date = re.findall(r"^## \[(\d\S*)\] - (\S+)$", changelog, re.MULTILINE)[0]
    assert PROJECT["version"] == version or PROJECT["version"].endswith(".dev0")
    citation = read_yaml("CITATION.cff")
    assert (citation["version"], citation["date-released"]) == (version, date)
    for folder in ("lab", "netlab", "flower"):
        around = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
        assert around["version"] == PROJECT["version"]
        own = [each for each in around["dependencies"] if each.startswith("distlion")]
        assert own != []
        assert all(each.endswith(f"=={PROJECT['version']}") for each in own)
    assert read_yaml("packaging/conda/recipe.yaml")["context"]["version"] == version


def test_every_package_tells_type_checkers_that_it_is_annotated() -> None:
    folders = [path.parent for path in ROOT.glob("*/src/*/__init__.py")] + [ROOT / "src/distlion"]
    assert len(folders) == 4
    assert [each.name for each in folders if not (each / "py.typed").is_file()] == []


def test_every_python_has_a_wheel_and_is_tested() -> None:
    pythons = list_pythons()
    assert len(pythons) >= 5
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    built = [f"cp{python.replace('.', '')}-*" for python in pythons]
    assert PYPROJECT["tool"]["cibuildwheel"]["build"] == built
    assert PYPROJECT["tool"]["scikit-build"]["wheel"]["py-api"] + "-*" in built
    tests = read_yaml(".github/workflows/test.yml")["jobs"]["matrix"]["strategy"]["matrix"]
    assert tests["python"] == pythons


def test_the_core_keeps_to_the_stable_interface_of_one_wheel_for_many_pythons() -> None:
    """Macros that reach into objects are not in it; compilers of 3.10 and 3.11 take them."""
    macro = re.compile(r"\bPy[A-Z][A-Za-z]*_[A-Z]{2,}[A-Z_]*\b")
    assert macro.findall("PyList_GET_ITEM(list, 0) PyBytes_AS_STRING(bytes)") != []
    sources = sorted((ROOT / "csrc").glob("*pp"))
    assert len(sources) > 10
    found = {path.name: macro.findall(path.read_text("utf-8")) for path in sources}
    assert {name: macros for name, macros in found.items() if macros} == {}


def test_wheels_are_built_on_the_systems_that_are_tested() -> None:
    release, test = (
        read_yaml(f".github/workflows/{name}.yml")["jobs"] for name in ("release", "test")
    )
    built = release["wheels"]["strategy"]["matrix"]["os"]
    assert built == test["matrix"]["strategy"]["matrix"]["os"]
    assert len(built) == 3


def test_only_a_tag_publishes_and_only_after_every_other_job() -> None:
    jobs = read_yaml(".github/workflows/release.yml")["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    before, waiting = set(), ["publish"]
    while waiting:
        needed = jobs[waiting.pop()].get("needs", [])
        waiting += [needed] if isinstance(needed, str) else needed
        before |= set(waiting)
    assert before == set(jobs) - {"publish"}
    may_publish = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert may_publish == ["publish"]


def test_files_are_counted_and_checked_before_they_are_published() -> None:
    jobs = read_yaml(".github/workflows/release.yml")["jobs"]
    commands = "\n".join(step.get("run", "") for step in jobs["check"]["steps"])
    assert "twine check --strict dist/*" in commands
    # Python 3.10 and 3.11 have a wheel each, later ones share one; and there are the sdist, and the
    # wheels of distlion-lab, distlion-netlab and distlion-flower.
    own = [python for python in list_pythons() if python in ("3.10", "3.11")]
    systems = jobs["wheels"]["strategy"]["matrix"]["os"]
    assert f"= {(len(own) + 1) * len(systems) + 4}\n" in commands


def test_the_guide_to_releases_names_every_project_that_is_published() -> None:
    """PyPI refuses the files of one that was not registered, after it took those before."""
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = guide.split("## Release\n")[1].split("\n## ")[0]
    projects = [
        tomllib.loads(path.read_text("utf-8"))["project"]["name"]
        for path in [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]
    ]
    assert len(projects) == 4
    assert [name for name in projects if f"`{name}`" not in section] == []


def test_the_page_on_pypi_links_to_the_repository() -> None:
    """The commands that rewrite README.md leave no link to a file."""
    steps = read_yaml(".github/workflows/release.yml")["jobs"]["sdist"]["steps"]
    (commands,) = (step["run"] for step in steps if "sed" in step.get("run", ""))
    assert commands.count("sed -i -E") == 2
    links = r"\]\(([^:)]+)\)"
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(re.findall(links, text)) > 10
    for pattern, place in re.findall(r"s#(.+?)#\\1\$here/(raw|blob)", commands):
        text = re.sub(pattern, rf"\1https://host/{place}/\2)", text)
    assert re.findall(links, text) == []
    assert "](https://host/raw/benchmarks/results/front.png)" in text
