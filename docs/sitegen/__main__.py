"""``python -m sitegen [--serve PORT]``: build the site, warnings as errors, check its links, and serve it."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sphinx.cmd.build import build_main

from entrain_bench.base.errors import UserError
from entrain_bench.records.records import Results
from sitegen.check import problems
from sitegen.pages import assemble

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "docs"
PORT = 8000


def build(root: Path, folder: Path) -> int:
    """Build the site into ``folder/html``; returns 0, or 1 if Sphinx warns or a link is broken.

    Runs of diagrams are kept in ``folder/results``; the next build takes them from there.
    """
    pages = assemble(root, Results(folder / "results"), folder / "source")
    source = folder / "source"
    html = folder / "html"
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--fresh-env", "--conf-dir", str(Path(__file__).parent)]
    if build_main([*options, "--builder", "html", "--doctree-dir", str(folder / "doctrees"), str(source), str(html)]):
        return 1
    found = problems(html)
    for line in found:
        print(line, file=sys.stderr)
    print(f"{len(pages)} pages in {html}, {len(found)} broken links")
    return int(bool(found))


def serve(html: Path, port: int) -> None:
    """Serve a folder until interrupted."""
    with server_of(html, port) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl+C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def server_of(html: Path, port: int) -> ThreadingHTTPServer:
    """A server of a folder that only this machine reaches; port 0 is a free one."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(SimpleHTTPRequestHandler, directory=str(html)))


def main() -> int:
    """Build, and with ``--serve`` serve what was built."""
    parser = argparse.ArgumentParser(prog="sitegen", description=__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", nargs="?", const=PORT, help="then serve it on 127.0.0.1")
    arguments = parser.parse_args()
    try:
        failed = build(ROOT, BUILD)
    except UserError as error:
        print(f"sitegen: {error}", file=sys.stderr)
        return 2
    if arguments.serve is not None and not failed:
        serve(BUILD / "html", arguments.serve)
    return failed


if __name__ == "__main__":
    sys.exit(main())
