"""What pages say of the package out of the package itself: commands, tables of a record's fields.

A page has a line `<!-- generated: NAME -->`, in the place of which Sphinx reads what a function of
`PARTS` returns.
"""

from __future__ import annotations

import ast
import html
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any
from unittest import mock

MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)
# Below 80 columns help has no frames.
COLUMNS = 79
# Search engines show about so many characters of a page's description.
DESCRIPTION_CHARACTERS = 160
# A picture of 4.8 inches has letters as large as the text beside it then.
PIXELS_PER_INCH = 110
PLANNER = "planner.html"
BACK = '<nav style="margin-bottom: 1rem"><a href="index.html">Documentation of distlion</a></nav>'
LAYOUT = '<dl role="none">\n<dd><em class="sig-param">'
# Pages that others link to, but that neither the navigation nor the search lists.
RECORDS = ("benchmarks/", "studies/")
# Guides of other distributions and for contributors: in the search, not in the navigation.
GUIDES = ("flower/", "examples/", "netlab/", "CONTRIBUTING", "ARCHITECTURE")
# What readers search for, and the heading below which the answer stands. Such an entry of the index
# comes before all other results of a search.
ANSWERS = {
    "docs/recipe": {"## The learning rate": ["learning rate"]},
    "docs/how-to/several-gpus": {"## GPUs": ["NCCL", "GPU"], "## FSDP2": ["FSDP", "FSDP2"]},
    "docs/how-to/checkpoints": {"# Save, load and resume": ["resume", "checkpoint"]},
    "docs/how-to/diagnose": {"## The loss is NaN": ["loss is NaN", "NaN"]},
    "docs/how-to/clipping": {"# Clip gradients": ["gradient clipping"]},
    "docs/how-to/slow-link": {"## Overlap": ["overlap"], "## Own sockets": ["firewall"]},
    "docs/how-to/crew": {"# Workers that come and go": ["crew", "spot instances"]},
    "docs/how-to/fine-tune": {"# Fine-tune a pretrained network": ["fine-tuning", "LoRA"]},
    "docs/how-to/images": {"# Images with Lightning on four machines": ["BatchNorm"]},
}
# What the planner's page opens with.
PLANNED = ("--params", "350e6", "--nodes", "8", "--link", "1gbit", "--compute-s", "0.5")


def write_commands() -> str:
    """Write a section for each command: what its `--help` prints."""
    from typer.main import get_command

    from distlion.__main__ import write_help
    from distlion.checkpoint import command as checkpoint
    from distlion.crew import command as crew
    from distlion_lab.cli import app
    from distlion_netlab.command import netlab_app

    with mock.patch.dict(os.environ, COLUMNS=str(COLUMNS)):
        commands = {"distlion": write_help()}
        for name, command in get_command(app).commands.items():
            commands |= walk_commands(command, f"distlion {name}", None)
        commands |= walk_commands(get_command(netlab_app), "distlion netlab", None)
        for module in (crew, checkpoint):
            commands |= walk_parsers(module.make_parser())
        return "\n".join(f"## {name}\n\n```text\n{text}\n```\n" for name, text in commands.items())


def walk_parsers(parser: ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield name and help of a command and of all those below it."""
    yield parser.prog, parser.format_help().strip("\n")
    for action in parser._actions:
        for inner in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from walk_parsers(inner)


def walk_commands(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """Yield name and help of a command of typer and of all those below it."""
    command.rich_markup_mode = None
    context = command.make_context(
        name if parent is None else name.split()[-1],
        [],
        parent,
        resilient_parsing=True,
        terminal_width=COLUMNS,
    )
    yield name, command.get_help(context).strip("\n")
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from walk_commands(inner, f"{name} {inner_name}", context)


def list_fields(described: type) -> list[tuple[str, str]]:
    """Return the fields that the sections Args and Attributes of a docstring describe."""
    lines = (described.__doc__ or "").expandtabs().splitlines()
    fields: list[tuple[str, str]] = []
    inside = False
    for line in lines:
        if re.match(r"    \S", line):
            inside = line.strip() in ("Args:", "Attributes:")
        elif inside and (field := re.match(r"        (\w+): (.*)", line)):
            fields.append((field[1], field[2]))
        elif inside and line.strip() and fields:
            fields[-1] = (fields[-1][0], f"{fields[-1][1]} {line.strip()}")
    return [(name, text.replace("``", "`")) for name, text in fields]


def write_record() -> str:
    """Write what each field of `record.json` means."""
    from distlion_lab.training.record import Record

    return "\n\n".join(f"`{name}`\n: {text}" for name, text in list_fields(Record))


def link_planner(folder: str = "../") -> str:
    """Link the planner's page, which only the site has; by default from one folder below it."""
    address = f"{folder}{PLANNER}"
    return f'<p><a href="{address}">An example of a plan: advice, table and curves</a></p>'


def write_planner(app: Any, failure: Exception | None) -> None:
    """Write the planner's page into the site that was built."""
    if failure is None and app.builder.format == "html":
        page = Path(app.outdir) / "docs" / PLANNER
        subprocess.run(
            [sys.executable, "-m", "distlion", "plan", *PLANNED, "--html", str(page)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        text = page.read_text()
        if "<body>" not in text:
            raise ValueError("the planner's page has no <body>, where the link back would go")
        page.write_text(text.replace("<body>", f"<body>\n{BACK}", 1))


def write_flower() -> str:
    """Write a section for each name of a module that needs packages the site is not built with."""
    [folder] = find_spec("distlion_flower").submodule_search_locations or [""]
    sections = []
    for node in ast.parse(Path(folder, "bridge.py").read_text()).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        made = node
        if isinstance(node, ast.ClassDef):
            [made] = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        assert isinstance(made, ast.FunctionDef)
        arguments = ast.unparse(made.args).removeprefix("self, ")
        text = f"{node.name}({arguments})\n\n{ast.get_docstring(node)}"
        sections.append(f"### {node.name}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


PARTS = {
    "commands": write_commands,
    "flower": write_flower,
    "planner": link_planner,
    "planner-here": lambda: link_planner(""),
    "record": write_record,
}


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Put into a page what is generated for it, and over one without a title its name.

    Navigation and search leave out studies and the results of benchmarks. The navigation leaves
    out guides of other distributions and of examples.
    """
    del app
    source[0] = MARK.sub(lambda mark: PARTS[mark[1]](), source[0])
    if not re.search(r"^# ", source[0], re.MULTILINE):
        title = docname.rsplit("/", 1)[-1].replace("_", " ").capitalize()
        source[0] = f"# {title}\n\n{source[0]}"
    source[0] = index_answers(docname, source[0])
    if docname.startswith(RECORDS):
        source[0] = f"---\nnosearch: true\norphan: true\n---\n{source[0]}"
    elif docname.startswith(GUIDES):
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def index_answers(docname: str, text: str) -> str:
    """Put main entries of the index, marked `!`, below the headings of ``ANSWERS``."""
    for heading, entries in ANSWERS.get(docname, {}).items():
        before, found, after = f"\n{text}".partition(f"\n{heading}\n")
        if not found:
            raise ValueError(f"{docname} has no heading {heading!r}, which searches should find")
        index = "".join(f"\n```{{index}} ! {entry}\n```\n" for entry in entries)
        text = f"{before}{found}{index}{after}".removeprefix("\n")
    return text


def describe_page(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Describe a page by its first paragraph, and make it right for keyboards and screen readers.

    Sphinx sets each parameter of a long signature as a definition without a term, which a screen
    reader would announce. Code and tables that are wider than the page scroll, so keys must
    reach them.
    """
    del app, pagename, templatename
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    body = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    context["body"] = body.replace('<dl>\n<dd><em class="sig-param">', LAYOUT)
    if doctree is not None and (text := find_description(doctree)):
        context["metatags"] += f'<meta name="description" content="{html.escape(text)}">'


def size_pictures(app: Any, doctree: Any) -> None:
    """Show each picture as wide as it was drawn, if the page has room, and link it to its file.

    Sphinx sets the link where a width is given.
    """
    from docutils import nodes
    from PIL import Image

    for node in doctree.findall(nodes.image):
        file = Path(app.srcdir, node["uri"])
        if file.suffix == ".png":
            with Image.open(file) as picture:
                dpi, _ = picture.info.get("dpi", (PIXELS_PER_INCH, None))
                node["width"] = f"{round(picture.width / dpi * PIXELS_PER_INCH)}px"


def find_description(doctree: Any) -> str:
    """Return the first paragraph of a page's running text, cut at a word."""
    from docutils import nodes

    sections = (nodes.document, nodes.section)
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if isinstance(paragraph.parent, sections) and text:
            return shorten(text, DESCRIPTION_CHARACTERS, placeholder=" ...")
    return ""


def write_docstring(
    app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]
) -> None:
    """Turn what a docstring has as plain text into reStructuredText.

    Equations are set as they are written, up to running text below them. Stars and bars mean
    themselves.
    """
    del app, what, name, item, options
    shown: list[str] = []
    inside = ""  # "equation", or the "text" below one
    for line in lines:
        if re.fullmatch(r"Equation(,.*)?:", line):
            inside = "equation"
            shown += [f"**{line[:-1]}**", "", ".. code-block:: text", ""]
            continue
        if line.strip() and not line.startswith(" "):
            inside = ""
        elif inside and is_running_text(line) and not shown[-1].strip():
            inside = "text"
        if inside == "equation":
            shown.append(f"    {line}".replace("``", "") if line.strip() else line)
        elif line.lstrip().startswith((">>>", "...")):
            shown.append(line)
        else:
            shown.append(escape(line.lstrip() if inside else line))
    lines[:] = shown


def is_running_text(line: str) -> bool:
    """Return whether a line below an equation begins a sentence."""
    return bool(re.match(r"\s+\(?[A-Z][a-z]+[ ,]", line)) and " = " not in line


def escape(line: str) -> str:
    """Escape stars and bars outside of ``code``."""
    parts = line.split("``")
    parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
    return "``".join(parts)
