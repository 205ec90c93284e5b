"""A report of headings, paragraphs, tables and figures, as Markdown or as one page of HTML."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

_CODE = re.compile(r"`([^`]+)`")
# A number, also with a standard deviation, a range, and "1 of 3".
_NUMBER = re.compile(r"[+\-]?\d[\d.,e+\-]*( (±|–|of) [\d.,e+\-]+)?")
# The unit at the end of a column's head.
_UNIT = re.compile(r" (\([^()]+\))$")


@dataclass(frozen=True)
class Heading:
    """A heading of level 1, 2 or 3."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; text in `backquotes` is code."""

    text: str


@dataclass(frozen=True)
class Code:
    """A block of code, such as a command."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table of plain text; columns of numbers are set flush right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG with its file name and a caption."""

    name: str
    caption: str
    png: bytes


Block = Heading | Paragraph | Code | Table | Picture


def render_markdown(blocks: Sequence[Block]) -> str:
    """Render a report with its pictures in the same folder."""
    return "\n\n".join(_to_markdown(block) for block in blocks) + "\n"


def render_html(blocks: Sequence[Block]) -> str:
    """Render a report as one page, light and dark, that needs no other file and no network."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(_to_html(block) for block in blocks)
    return _PAGE.format(title=html.escape(title), style=_STYLE, body=body)


def _to_markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Code(text):
            return f"```bash\n{text}\n```"
        case Table(head, rows):
            rules = ["---:" if right else "---" for right in _find_numeric(block)]
            lines = [head, rules, *rows]
            return "\n".join(f"| {' | '.join(map(_escape_cell, line))} |" for line in lines)
        case Picture(name, caption, _):
            return f"![{caption}]({name})\n\n*{caption}*"


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _to_html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Code(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"
        case Table():
            return _table_to_html(block)
        case Picture(_, caption, png):
            data = base64.b64encode(png).decode()
            return (
                f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
                f"<figcaption>{_inline(caption)}</figcaption></figure>"
            )


def _table_to_html(table: Table) -> str:
    classes = [' class="number"' if right else "" for right in _find_numeric(table)]

    def row(cells: Sequence[str], tag: str) -> str:
        inner = "".join(
            f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, classes, strict=True)
        )
        return f"<tr>{inner}</tr>"

    rows = "\n".join(row([_inline(cell) for cell in cells], "td") for cells in table.rows)
    # A unit is set below what it measures, so that columns are as narrow as their numbers.
    head = row([_UNIT.sub(r"<br><span>\1</span>", _inline(cell)) for cell in table.head], "th")
    return f"{_SCROLLED}<table><thead>{head}</thead>\n<tbody>{rows}</tbody></table></div>"


def _find_numeric(table: Table) -> list[bool]:
    """Return for each column True if most of its filled cells are numbers."""
    columns = [[cell for cell in column if cell] for column in zip(*table.rows, strict=True)]
    if not columns:
        return [False] * len(table.head)
    return [2 * sum(map(_is_number, column)) > len(column) for column in columns]


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _inline(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


# A table wider than the page scrolls in a box, which the keyboard reaches too.
_SCROLLED = '<div class="table" role="group" aria-label="table" tabindex="0">'

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --line: #d0d0d0; --soft: #f4f4f2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #17181a; --line: #44474c; --soft: #222428; }
}
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.3rem; margin-top: 2.2rem; }
h3 { font-size: 1.05rem; margin-top: 1.6rem; }
p { max-width: 48rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { padding: 0.3rem 0.45rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { border-bottom-width: 2px; vertical-align: bottom; line-height: 1.3; }
th span { font-weight: normal; }
td:first-child { min-width: 7rem; }
td.number { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--soft); padding: 0.8rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; }
code { font-size: 0.92em; }
figure { margin: 1.5rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); }
figcaption { font-size: 0.9rem; max-width: 48rem; }
@media (max-width: 46rem) {
  body { padding: 1rem; }
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
