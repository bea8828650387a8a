"""Sphinx's configuration of the site; ``sitegen`` passes the folder of assembled pages."""

import re
from pathlib import Path
from typing import Any

project = "entrain-bench"
author = "The entrain-bench developers"
copyright = author  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "docs/**.md", "results/README.md", "experiments/published/README.md"),
    *("workloads/traces/PROVENANCE.md", "examples/*_sampler/README.md"),
]
highlight_language = "none"
# Commands have two hyphens.
smartquotes = False

myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 4

toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_theme_options = {
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_context = {"default_mode": "auto"}
html_sidebars: dict[str, list[str]] = {"README": []}


def setup(app: Any) -> None:
    """Join names that share a line of a docstring (``tp, cp: degrees.``): napoleon would take the first for a type."""
    shared = re.compile(r"^(\s+\w+(?:, \w+)+): ")

    def join(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
        lines[:] = [shared.sub(lambda names: names[0].replace(", ", ","), line, count=1) for line in lines]

    # Before napoleon, whose priority is the default 500.
    app.connect("autodoc-process-docstring", join, priority=400)
