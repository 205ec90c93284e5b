"""What the site says of the package out of the package, and the check of its links."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import distlion
from distlion import errors
from distlion.wire import frame

DOCS = Path(__file__).resolve().parent.parent / "docs"
REFERENCE = DOCS / "reference"


def load(name: str) -> ModuleType:
    """Import a program of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_described() -> set[str]:
    """Return the names that pages of the reference take their docstrings from."""
    named: set[str] = set()
    for page in REFERENCE.glob("*.md"):
        module = ""
        for kind, name in re.findall(
            r"^\.\. (?:py:)?(currentmodule|auto\w+|data):: (\S+)", page.read_text(), re.MULTILINE
        ):
            if kind == "currentmodule":
                module = f"{name}."
            elif name.startswith("distlion."):
                named.add(name)
            else:
                named.add(module + name)
    return named


def test_every_page_is_in_the_navigation() -> None:
    listed = {DOCS / "index.md"}
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"```{toctree}\n(.*?)```", page.read_text(), re.DOTALL):
            entries = [line for line in block.splitlines() if line and line[0] != ":"]
            names = [re.sub(r".*<(.+)>", r"\1", line) for line in entries]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    pages = {page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0][0] != "_"}
    assert pages - listed == set()


def test_studies_and_results_are_outside_of_navigation_and_search() -> None:
    for name in ("studies/protocol", "benchmarks/results/study"):
        source = ["# Title\n"]
        load("generated").read_source(None, name, source)
        assert source == ["---\nnosearch: true\norphan: true\n---\n# Title\n"]
    source = ["# Title\n"]
    load("generated").read_source(None, "flower/README", source)
    assert source == ["---\norphan: true\n---\n# Title\n"]
    source = ["# Title\n"]
    load("generated").read_source(None, "docs/faq", source)
    assert source == ["# Title\n"]


def test_answers_have_entries_of_the_index_below_their_headings() -> None:
    generated = load("generated")
    for name in generated.ANSWERS:
        page = (DOCS.parent / f"{name}.md").read_text()
        assert generated.index_answers(name, page) != page
    diagnose = generated.index_answers(
        "docs/how-to/diagnose", "# Title\n\n## The loss is NaN\nText"
    )
    assert diagnose.startswith("# Title\n\n## The loss is NaN\n\n```{index} ! loss is NaN\n```\n")
    with pytest.raises(ValueError, match="no heading"):
        generated.index_answers("docs/how-to/diagnose", "# Title\n")


@pytest.mark.parametrize("name", distlion.__all__)
def test_public_name_is_in_the_reference(name: str) -> None:
    assert f"distlion.{name}" in list_described()


def test_every_error_is_in_the_reference_with_what_to_do() -> None:
    page = (REFERENCE / "errors.md").read_text()
    names = {
        name
        for name, item in vars(errors).items()
        if inspect.isclass(item) and issubclass(item, (errors.DistlionError, Warning))
    }
    rows = dict(re.findall(r"^`(\w+)`\n: (.+?)\n\n", page, re.MULTILINE | re.DOTALL))
    assert names - {"DistlionError", "StepError"} == set(rows)
    assert all("**Do:**" in text for text in rows.values())


def test_header_on_the_page_is_that_of_the_wire() -> None:
    page = (DOCS.parent / "studies" / "wire-format.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (\d+) \|", page, re.MULTILINE)
    fields = frame.HEADER_TYPE.fields
    assert fields is not None
    assert rows == [
        (str(offset), name, str(kind.itemsize)) for name, (kind, offset) in fields.items()
    ]
    for kind in (*frame.ChunkKind, *frame.Status):
        assert re.search(rf"^\| {kind.value} \| `{kind.name}` \|", page, re.MULTILINE), kind
    assert f"version {frame.PROTOCOL_VERSION}" in page


def test_every_command_has_a_section_with_its_options() -> None:
    pytest.importorskip("typer")
    text = load("generated").write_commands()
    for name in ("train", "compare", "plan", "doctor", "netlab run", "checkpoint verify"):
        assert f"## distlion {name}\n" in text
        assert f"usage: distlion {name} " in text.replace("Usage", "usage")
    assert "--on-world-change" in text
    assert "│" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_every_field_of_a_record_is_described() -> None:
    pytest.importorskip("transformers")
    from distlion_lab.training.record import Record

    fields = dict(load("generated").list_fields(Record))
    assert set(fields) == set(Record.__dataclass_fields__)
    assert all(text.endswith(".") for text in fields.values())


def test_equation_is_shown_as_written_and_stars_mean_themselves() -> None:
    lines = [
        "Do it (N, *shape).",
        "",
        "Equation:",
        "    a = b * c",
        "",
        "Args:",
        "    d: ``*e``, |f|.",
    ]
    load("generated").write_docstring(None, "", "", None, None, lines)
    assert lines == [
        "Do it (N, \\*shape).",
        "",
        "**Equation**",
        "",
        ".. code-block:: text",
        "",
        "        a = b * c",
        "",
        "Args:",
        "    d: ``*e``, \\|f\\|.",
    ]


def test_link_check_finds_what_is_broken_and_what_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "a").mkdir(parents=True)
    (site / "a" / "index.html").write_text('<p id="here">')
    (site / "index.html").write_text(
        '<a href="a/#here"></a><a href="a/index.html#gone"></a><a href="b.html"></a>'
        '<a href="https://example.org/"></a><link rel="canonical" href="https://example.org/c">'
        '<script src="https://example.org/x.js"></script><img src="data:,"><a href="#top"></a>'
    )
    faults, external = load("site_links").check_site(site)
    assert faults == [
        "index.html: a/index.html#gone leads to no such place in the page",
        "index.html: b.html leads to no file",
        "index.html: #top leads to no such place in the page",
        "index.html: https://example.org/x.js is loaded from elsewhere",
    ]
    assert external == {
        "https://example.org/",
        "https://example.org/c",
        "https://example.org/x.js",
    }


def test_running_text_below_an_equation_is_running_text() -> None:
    lines = ["Equation:", "    x = y", "", "    (Lion, arXiv:1, with ``z``.) *", "", "Args:"]
    load("generated").write_docstring(None, "", "", None, None, lines)
    assert lines[2:] == [
        ".. code-block:: text",
        "",
        "        x = y",
        "",
        "(Lion, arXiv:1, with ``z``.) \\*",
        "",
        "Args:",
    ]


def test_page_is_described_by_its_first_running_text_cut_at_a_word() -> None:
    nodes = pytest.importorskip("docutils.nodes")
    from docutils.utils import new_document

    page = new_document("page")
    title = nodes.title("", "Title")
    listed = nodes.list_item("", nodes.paragraph("", "In a list."))
    text = nodes.paragraph("", 'Say "it" in\nwords. ' + "more " * 40)
    page += nodes.section("", title, nodes.bullet_list("", listed), text)
    context = {"body": "", "metatags": "<meta>"}
    load("generated").describe_page(None, "", "", context, page)
    described = re.fullmatch(
        r'<meta><meta name="description" content="(.*)">', str(context["metatags"])
    )
    assert described is not None
    assert described[1].startswith("Say &quot;it&quot; in words. more")
    assert described[1].endswith(" more ...")
    assert len(described[1]) <= 160 + 2 * len("quot;")


def test_code_and_tables_that_scroll_are_reached_by_keys() -> None:
    pytest.importorskip("docutils")
    context = {"body": '<pre><span></span>a\n</pre><div class="table-wrapper docutils">'}
    load("generated").describe_page(None, "", "", context, None)
    assert context["body"] == (
        '<pre tabindex="0"><span></span>a\n</pre><div tabindex="0" class="table-wrapper docutils">'
    )


def test_lines_of_a_long_signature_are_no_definitions() -> None:
    pytest.importorskip("docutils")
    context = {"body": '(\n\n<dl>\n<dd><em class="sig-param">a</em></dd></dl><dl>\n<dt>b</dt>'}
    load("generated").describe_page(None, "", "", context, None)
    assert context["body"] == (
        '(\n\n<dl role="none">\n<dd><em class="sig-param">a</em></dd></dl><dl>\n<dt>b</dt>'
    )
