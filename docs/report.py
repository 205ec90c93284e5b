"""Make build/report.pdf out of studies/report.md, by pandoc and Typst."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pypandoc
import typst

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "studies" / "report.md"
AUTHOR = "The distlion developers"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)]+)\)")
PICTURE = re.compile(r"(!\[[^\]]*\]\()\.\./([^)]+\))")
# Of the text's width. Pictures are drawn for phones, with letters larger than paper needs.
PICTURE_WIDTH = "44%"
HEADER = """
#set page(paper: "a4", margin: (x: 2.3cm, y: 2.4cm), numbering: "1")
#set text(font: "Libertinus Serif", size: 10pt)
#set par(justify: true, leading: 0.6em)
#show raw: set text(font: "DejaVu Sans Mono", size: 8pt)
#show table: set text(size: 8.5pt)
#show figure: set block(breakable: true)
#show heading: set block(above: 1.3em, below: 0.8em)
"""


def name_files(text: str) -> str:
    """Put the path of each linked file of the repository behind the link's words."""

    def name(found: re.Match[str]) -> str:
        file = (SOURCE.parent / found[2].split("#")[0]).resolve().relative_to(ROOT)
        return f"{found[1]} (`{file}`)"

    return LINK.sub(name, text)


def write_report(path: Path) -> None:
    """Write the report as a PDF.

    Args:
        path: The file to write.
    """
    title, _, body = name_files(SOURCE.read_text("utf-8")).partition("\n")
    with_images = PICTURE.sub(rf"\g<1>{ROOT}/\g<2>{{width={PICTURE_WIDTH}}}", body)
    written = pypandoc.convert_text(
        with_images,
        "typst",
        format="markdown-implicit_figures-smart+pipe_tables",
        extra_args=["--shift-heading-level-by=-1", "--wrap=none"],
    )
    words = title.removeprefix("# ")
    front = f'#set document(title: "{words}", author: "{AUTHOR}")\n'
    front += (
        f"#align(center)[#text(size: 16pt, weight: 700)[{words}]\\\n#v(4pt){AUTHOR}]\n#v(10pt)\n"
    )
    source = path.with_suffix(".typ")
    source.write_text(HEADER + front + written, "utf-8")
    typst.compile(str(source), output=str(path), root="/")
    source.unlink()


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "report.pdf")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_report(out)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")
