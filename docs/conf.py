"""The site: built by Sphinx out of docs/, the results of benchmarks, and docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

import distlion

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from generated import describe_page, read_source, size_pictures, write_docstring, write_planner  # noqa: E402

project = "distlion"
author = "The distlion developers"
copyright = "The distlion developers"  # noqa: A001
version = release = distlion.__version__

# The source folder is the repository's root, so that one relative link serves readers of the
# repository and of the site, also into studies, the results of benchmarks and to examples.
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/gpu/QUEUE.md",
    "benchmarks/results/**.md",
    "netlab/README.md",
    "studies/**.md",
    "flower/README.md",
    "examples/recipes/README.md",
    "CHANGELOG.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["docs/**/__pycache__"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
# As GitHub names headings, which the check of links in tests/test_docs.py expects.
myst_heading_anchors = 4
highlight_language = "text"

default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Equation", ("Notes", "notes_style"), "Reference"]

html_theme = "furo"
html_title = "distlion"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
templates_path = ["_templates"]
# The first page of the site, which leads to that of the documents.
html_extra_path = ["_extra"]
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

# Both have enough contrast for every token on their own background.
pygments_style = "a11y-light"
pygments_dark_style = "monokai"


def setup(app: object) -> None:
    """Connect what is generated out of the package itself."""
    app.connect("source-read", read_source)  # type: ignore[attr-defined]
    app.connect("doctree-read", size_pictures)  # type: ignore[attr-defined]
    app.connect("html-page-context", describe_page)  # type: ignore[attr-defined]
    app.connect("build-finished", write_planner)  # type: ignore[attr-defined]
    # Before napoleon.
    app.connect("autodoc-process-docstring", write_docstring, priority=400)  # type: ignore[attr-defined]
