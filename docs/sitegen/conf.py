"""Sphinx's configuration of the site; ``sitegen`` passes the folder of assembled pages."""

import json
import re
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from sitegen.pages import repository_address

HERE = Path(__file__).parent
# DataTables with all its parts, as itables carries them.
BUNDLE = files("itables") / "html"

project = "entrain-bench"
author = "The entrain-bench developers"
copyright = author  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
source_suffix = {".md": "markdown"}
include_patterns = [
    *("index.md", "README.md", "CONTRIBUTING.md", "docs/**.md", "results/README.md", "experiments/published/README.md"),
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
html_title = f"{project} {metadata.version(project)}"
html_static_path = [str(HERE / "static"), str(BUNDLE / "dt_bundle.css")]
html_css_files = ["dt_bundle.css", "site.css"]
html_js_files = ["tables.js"]
html_theme_options: dict[str, Any] = {
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": False,
    # Pages of wide tables have no list of their sections.
    "secondary_sidebar_items": {"**": ["page-toc"], "docs/claims": [], "docs/configuration": []},
    "footer_start": ["copyright"],
    "footer_end": [],
}
if repository := repository_address(HERE.parents[1]):
    html_theme_options["icon_links"] = [{"name": "Repository", "url": repository, "icon": "fa-brands fa-git-alt"}]
html_context = {"default_mode": "auto"}
html_sidebars: dict[str, list[str]] = {"index": []}


def setup(app: Any) -> None:
    """Join names that share a line of a docstring, and write DataTables.

    Of ``tp, cp: degrees.`` napoleon would take the first for a type.
    """
    shared = re.compile(r"^(\s+\w+(?:, \w+)+): ")

    def join(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
        lines[:] = [shared.sub(lambda names: names[0].replace(", ", ","), line, count=1) for line in lines]

    def write_bundle(app: Any) -> None:
        # A page that is opened as a file may load scripts, but no modules.
        text = f"globalThis.dataTables = {json.dumps((BUNDLE / 'dt_bundle.js').read_text())};\n"
        static = Path(app.outdir, "_static")
        static.mkdir(parents=True, exist_ok=True)
        (static / "datatables.js").write_text(text)

    # Before napoleon, whose priority is the default 500.
    app.connect("autodoc-process-docstring", join, priority=400)
    app.connect("builder-inited", write_bundle)
