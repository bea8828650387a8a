"""``python -m sitegen``: assemble pages in ``build/docs/source``; build ``build/docs/html``, warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from entrain_bench.base.errors import UserError
from entrain_bench.records.records import Results
from sitegen.pages import assemble

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "docs"


def build(root: Path, folder: Path) -> int:
    """Build the site into ``folder/html``; returns 1 if Sphinx warns, else 0.

    ``folder/results`` keeps the simulated runs for the next build.
    """
    source, html = folder / "source", folder / "html"
    assemble(root, Results(folder / "results"), source)
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--fresh-env", "--conf-dir", str(Path(__file__).parent)]
    failed = build_main([*options, "--doctree-dir", str(folder / "doctrees"), str(source), str(html)])
    if not failed:
        print(f"built {html}/index.html")
    return int(bool(failed))


def main() -> int:
    """Build the site of this repository."""
    try:
        return build(ROOT, BUILD)
    except UserError as error:
        print(f"sitegen: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
