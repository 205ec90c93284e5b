"""Check every link of the built site, and list those that leave it.

    python docs/site_links.py build/site

Links within the site must lead to a file, and to a place in it where they name one. Nothing may be
loaded from elsewhere: the site works offline, and no other host learns who reads it. Links to other
hosts are written to `external-links.txt` beside the site, for a check that has a network.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = ("script", "link", "img", "iframe", "source", "video", "audio")
# What a browser does not load: a page's own address, other forms of it.
UNLOADED_LINKS = ("canonical", "next", "prev", "index", "search", "author")


@dataclass
class Page(HTMLParser):
    """The places that a page has, what it links to and what it loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value is not None}
        if "id" in named:
            self.ids.add(named["id"])
        if tag == "a" and "name" in named:
            self.ids.add(named["name"])
        for name in ("href", "src"):
            if name in named:
                is_loaded = tag in LOADED and named.get("rel") not in UNLOADED_LINKS
                (self.loaded if is_loaded else self.links).append(named[name])


def read_pages(site: Path) -> dict[Path, Page]:
    """Parse all pages of a site."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        page = pages[path.resolve()] = Page()
        page.feed(path.read_text(encoding="utf-8"))
    return pages


def find_fault(path: Path, link: str, pages: dict[Path, Page]) -> str | None:
    """Return what is wrong with a link inside the site."""
    parts = urlsplit(link)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target = target / "index.html"
    if not target.is_file():
        return "leads to no file"
    is_named = parts.fragment and target in pages
    if is_named and unquote(parts.fragment) not in pages[target].ids:
        return "leads to no such place in the page"
    return None


def check_site(site: Path) -> tuple[list[str], set[str]]:
    """Return the faults of all links, and the links that leave the site."""
    pages = read_pages(site)
    faults, external = [], set()
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for link in [*page.links, *page.loaded]:
            scheme, host, *_ = urlsplit(link)
            if scheme == "data":
                continue
            if scheme or host:
                external.add(link)
                if link in page.loaded:
                    faults.append(f"{where}: {link} is loaded from elsewhere")
            elif fault := find_fault(path, link, pages):
                faults.append(f"{where}: {link} {fault}")
    return faults, external


def main(site: Path) -> int:
    """Print what is wrong, and write the list of links to other hosts."""
    faults, external = check_site(site)
    listing = site.parent / "external-links.txt"
    listing.write_text("".join(f"{link}\n" for link in sorted(external)), encoding="utf-8")
    print("".join(f"{fault}\n" for fault in faults), end="")
    print(f"{len(read_pages(site))} pages, {len(faults)} broken links; {listing} has the others")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
