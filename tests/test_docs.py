"""Check the names, links, code blocks and commands in the documents.

Fenced blocks that are checked:

    ```python          must compile, and what it takes from distlion must exist
    ```python run      is also executed, in a fresh interpreter without a process group
    ```diff            must compile before and after, and what it takes from distlion must exist
    ```bash            every `distlion` command must exist with its options, every `make` target,
                       every file of the project; so must those in a block without a language
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

import distlion
from forked_programs import Programs
from source_names import is_in_source

ROOT = Path(__file__).resolve().parent.parent
USER_DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
RECORDS = [*ROOT.glob("studies/*.md"), *ROOT.glob("benchmarks/**/*.md")]
GUIDES = [*ROOT.glob("[a-z]*/README.md"), *ROOT.glob("examples/*/README.md")]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *USER_DOCUMENTS, *GUIDES, *RECORDS})
SHELLS = ("bash", "sh", "shell", "console")
PROGRAMS = ("distlion", "make", "pip", "python", "torchrun")
HELP_OPTIONS = {"--help", "-h"}

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^\n`]*)$")
INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE_LINK = re.compile(r"^ {0,3}\[[^\]^]+\]:\s+<?(\S+?)>?\s*$", re.MULTILINE)
HTML_LINK = re.compile(r"<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
HTML_ANCHOR = re.compile(r"<a\b[^>]*?\b(?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    document: Path
    line: int
    info: tuple[str, ...]
    code: str

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def split_markdown(document: Path, text: str) -> tuple[str, list[Block]]:
    """Return the text without its fenced blocks, and the blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    code: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opening is None:
            if fence is None:
                prose.append(line)
            else:
                opening, code, start = fence, [], number
        elif fence and fence["fence"].startswith(opening["fence"]) and not fence["info"].strip():
            info = tuple(opening["info"].split())
            blocks.append(Block(document, start, info, "\n".join(code) + "\n"))
            opening = None
        else:
            code.append(line.removeprefix(opening["indent"]))
    if opening is not None:
        raise ValueError(f"{document}:{start}: the code block is never closed")
    return "\n".join(prose), blocks


@functools.cache
def read_document(document: Path) -> tuple[str, list[Block]]:
    """Return what ``split_markdown`` finds in a file, which hundreds of tests ask."""
    return split_markdown(document, document.read_text())


def read_blocks(documents: list[Path]) -> list[Block]:
    return [block for document in documents for block in read_document(document)[1]]


def find_anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to headings, and those set by hand."""
    anchors: set[str] = set()
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower())
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 1
        while (anchor := slug if number == 1 else f"{slug}-{number - 1}") in anchors:
            number += 1
        anchors.add(anchor)
    return anchors | set(HTML_ANCHOR.findall(text))


def find_links(prose: str) -> list[str]:
    text = INLINE_CODE.sub("", prose)
    return INLINE_LINK.findall(text) + REFERENCE_LINK.findall(text) + HTML_LINK.findall(text)


def find_broken_links(document: Path, text: str) -> list[str]:
    """Return relative links without a file, or whose heading the file does not have."""
    prose, _ = split_markdown(document, text)
    broken = []
    for link in find_links(prose):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = document.parent / name if name else document
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md":
            held = prose if target == document else read_document(target)[0]
            if anchor not in find_anchors(held):
                broken.append(link)
    return broken


def find_unknown_names(tree: ast.AST) -> list[str]:
    """Return what a program takes from distlion and distlion does not have."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            used |= {f"{node.module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
    return sorted(
        name for name in used if name.split(".")[0] == "distlion" and not can_resolve(name)
    )


def can_resolve(name: str) -> bool:
    """Return whether a dotted name leads somewhere: modules first, then attributes."""
    found: object = distlion
    path = "distlion"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ModuleNotFoundError:
            return False
        except distlion.errors.MissingDependencyError:
            return is_in_source(name)
    return True


def read_commands() -> dict[str, set[str]]:
    """Return the options of every subcommand; those of distlion itself stand under ''.

    Commands of a group are named with it: "netlab run".
    """
    typer_main = pytest.importorskip("typer.main")
    from distlion.checkpoint import command as checkpoint
    from distlion.crew import command as crew
    from distlion_lab.cli import app
    from distlion_netlab.command import netlab_app

    known = {"": {"--version"}}
    pending = list(typer_main.get_command(app).commands.items())
    pending.append(("netlab", typer_main.get_command(netlab_app)))
    for name, subcommand in pending:
        inner = getattr(subcommand, "commands", {})
        pending += [(f"{name} {inner_name}", each) for inner_name, each in inner.items()]
        params = subcommand.params
        known[name] = {
            option for param in params for option in [*param.opts, *param.secondary_opts]
        }
    parsers = [crew.make_parser(), checkpoint.make_parser()]
    for parser in parsers:
        known[parser.prog.removeprefix("distlion ")] = set(parser._option_string_actions)
        for action in parser._actions:
            parsers += action.choices.values() if isinstance(action.choices, dict) else ()
    return known


def read_make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def shell_lines(block: Block) -> str:
    """Return a block's commands; one without a language may hold anything else beside them."""
    if block.info:
        return block.code if block.info[0] in SHELLS else ""
    lines = block.code.splitlines()
    return "\n".join(line for line in lines if line.split()[:1] and line.split()[0] in PROGRAMS)


def split_commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each simple command in a shell block; prompts and comments are dropped."""
    for line in code.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in shlex.split(line.strip().removeprefix("$ "), comments=True):
            if word in ("|", "&&", "||", ";", "&", "--"):
                yield words
                words = []
            else:
                words.append(word)
        yield words


def find_command_faults(
    words: list[str], commands: dict[str, set[str]], make_targets: set[str]
) -> list[str]:
    """Return what one shell command asks of this project and this project does not have."""
    if words[:1] == ["make"]:
        targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        return [f"make {target}" for target in targets if target not in make_targets]
    faults = [
        word
        for word in words
        if re.fullmatch(r"(examples|benchmarks|campaigns|tests|docs)/[\w./-]+", word)
        and not (ROOT / word).exists()
    ]
    if "install" in words or "distlion" not in words:
        return faults
    arguments = words[words.index("distlion") + 1 :]
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if " ".join(arguments[:2]) in commands:
        name = " ".join(arguments[:2])
    if name not in commands:
        return [*faults, f"distlion {name}"]
    options = {word.split("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}
    unknown = options - commands[name] - HELP_OPTIONS
    return [*faults, *(f"distlion {name} {option}".replace("  ", " ") for option in unknown)]


@functools.cache
def code_of(document: Path) -> str:
    """Return everything in a document that is set as code."""
    prose, blocks = read_document(document)
    inline = [code for _, code in INLINE_CODE.findall(prose)]
    return "\n".join([*inline, *(block.code for block in blocks)])


def python_blocks() -> list[Block]:
    return [block for block in read_blocks(DOCUMENTS) if block.info[:1] == ("python",)]


def by_place(value: object) -> str | None:
    if isinstance(value, Block):
        return value.place
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


def test_documents_are_there() -> None:
    names = {str(document.relative_to(ROOT)) for document in DOCUMENTS}
    assert {"README.md", "CHANGELOG.md", "docs/index.md", "studies/README.md"} <= names


@pytest.mark.parametrize("name", distlion.__all__)
def test_public_name_is_documented(name: str) -> None:
    documented = "\n".join(code_of(document) for document in USER_DOCUMENTS)
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", documented)


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_place)
def test_relative_links_lead_somewhere(document: Path) -> None:
    assert find_broken_links(document, document.read_text()) == []


def test_index_of_studies_links_every_page() -> None:
    index = ROOT / "studies" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve() for link in find_links(index.read_text())
    }
    pages = {*ROOT.glob("studies/*.md"), *ROOT.glob("benchmarks/results/*.md")}
    assert pages - linked == {index}


def test_included_files_are_there() -> None:
    included = [
        block for block in read_blocks(DOCUMENTS) if block.info[:1] == ("{literalinclude}",)
    ]
    assert included
    for block in included:
        assert (block.document.parent / block.info[1]).is_file(), block.place


@pytest.mark.parametrize("block", python_blocks(), ids=by_place)
def test_python_block_compiles_and_its_names_exist(block: Block) -> None:
    tree = ast.parse(block.code, filename=block.place)
    assert find_unknown_names(tree) == []


@pytest.mark.parametrize(
    "block", [block for block in python_blocks() if "run" in block.info], ids=by_place
)
def test_python_block_marked_run_runs(block: Block, programs: Programs, tmp_path: Path) -> None:
    ended = programs.run(block.code, tmp_path)
    assert ended.status == 0, f"{block.place}\n{ended.text}"


def apply_diff(block: Block) -> tuple[str, str]:
    """Return the program before and after a change."""
    lines = [line or " " for line in block.code.splitlines()]
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    return before, "\n".join(line[1:] for line in lines if line[0] in " +")


def diff_blocks() -> list[Block]:
    return [block for block in read_blocks(DOCUMENTS) if block.info[:1] == ("diff",)]


@pytest.mark.parametrize("block", diff_blocks(), ids=by_place)
def test_diff_has_programs_on_both_sides_whose_names_exist(block: Block) -> None:
    for code in apply_diff(block):
        assert find_unknown_names(ast.parse(code, filename=block.place)) == []


def test_diff_in_the_readme_runs_when_it_is_applied(programs: Programs, tmp_path: Path) -> None:
    (diff,) = (block for block in diff_blocks() if block.document.name == "README.md")
    _, after = apply_diff(diff)
    started = (
        "import torch\nimport torch.distributed as dist\nimport distlion\n"
        "model, loss_fn = torch.nn.Linear(4, 1), torch.nn.functional.mse_loss\n"
        "loader = [(torch.ones(2, 4), torch.ones(2, 1))] * 3\n"
    )
    ended = "\nassert optimizer.committed_step == 3\ndist.destroy_process_group()\n"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found = programs.run(started + after + ended, tmp_path, **alone)
    assert found.status == 0, found.text


def test_commands_in_shell_blocks_exist() -> None:
    commands, make_targets = read_commands(), read_make_targets()
    checked: set[str] = set()
    faults = []
    for block in read_blocks(DOCUMENTS):
        for words in split_commands(shell_lines(block)):
            checked |= set(words)
            found = find_command_faults(words, commands, make_targets)
            faults += [f"{block.place}: {fault}" for fault in found]
    assert faults == []
    # Otherwise nothing of ours was checked.
    assert {"distlion", "make"} <= checked


def test_every_command_is_documented() -> None:
    documented = "\n".join(code_of(document) for document in [*USER_DOCUMENTS, *GUIDES])
    missing = [name for name in read_commands() if f"distlion {name}".strip() not in documented]
    assert missing == []


def test_link_check_finds_missing_file_and_missing_heading(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    text = (
        "# One & two\n[a](page.md#one--two) [b](#one--two) `[d](gone.md)`\n"
        "[c](https://example.org/x)\n"
        "[e](gone.md) ![f](gone.png) [g](#three)\n\n[h]: gone/\n```text\n[i](gone.md)\n```\n"
    )
    document.write_text(text)
    assert sorted(find_broken_links(document, text)) == ["#three", "gone.md", "gone.png", "gone/"]


def test_name_check_finds_what_distlion_does_not_have() -> None:
    program = (
        "import distlion\nfrom distlion.errors import StepError, NoSuchError\n"
        "distlion.Lion\ndistlion.lion.x\nother.Lion\n"
    )
    assert find_unknown_names(ast.parse(program)) == [
        "distlion.errors.NoSuchError",
        "distlion.lion",
        "distlion.lion.x",
    ]


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("$ distlion train --steps 3 # as a test", []),
        ("torchrun --nproc-per-node 2 -m distlion train --steps=3", []),
        ("pip install -e .[train] && distlion --help", []),
        ("distlion lab run --hosts 2 -- distlion train --steps 3", []),
        ("distlion lab run --host 2", ["distlion lab run --host"]),
        ("distlion tran --steps 3", ["distlion tran"]),
        ("distlion train --stepps 3", ["distlion train --stepps"]),
        ("make test PYTHON=python3 tset", ["make tset"]),
        ("python examples/00_gone.py", ["examples/00_gone.py"]),
    ],
)
def test_command_check_finds_unknown_commands(line: str, faults: list[str]) -> None:
    commands = {"": {"--version"}, "train": {"--steps"}, "lab": set(), "lab run": {"--hosts"}}
    found = [
        fault
        for words in split_commands(line)
        for fault in find_command_faults(words, commands, {"test"})
    ]
    assert found == faults
