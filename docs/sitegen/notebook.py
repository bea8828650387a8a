"""A page whose Python runs when the site is built: every block is followed by what it prints and shows."""

from __future__ import annotations

import ast
import re
from base64 import b64encode
from contextlib import chdir, redirect_stdout
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from entrain_bench.base.errors import UserError

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def with_output(page: Path, folder: Path) -> str:
    """Return a page with the output of its Python blocks, which share their names; ``UserError`` if a block raises.

    Blocks run in the folder, which keeps ``results`` for the next time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {}
    text = page.read_text()
    with chdir(folder):
        return BLOCK.sub(lambda block: f"{block[0]}\n{_output(block[1], page.name, names)}\n", text)


def _output(code: str, page: str, names: dict[str, Any]) -> str:
    """Output of a block and its last expression as HTML; empty without either."""
    tree = ast.parse(code)
    end = tree.body[-1]
    last = ast.Expression(end.value) if isinstance(end, ast.Expr) else None
    if last:
        tree.body.pop()
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            exec(compile(tree, page, "exec"), names)  # noqa: S102
            value = eval(compile(last, page, "eval"), names) if last else None  # noqa: S307
    except Exception as error:
        raise UserError(f"{page}: a block fails ({type(error).__name__}: {error}):\n{code}") from error
    parts = [f"<pre>{escape(printed.getvalue())}</pre>"] if printed.getvalue() else []
    if value is not None:
        parts.append(_shown(value))
    return f'<div class="notebook-output">{"".join(parts)}</div>\n' if parts else ""


def _shown(value: object) -> str:
    """A value as a notebook shows it."""
    if isinstance(value, Figure):
        file = BytesIO()
        value.savefig(file, format="png", dpi=value.dpi)
        content = b64encode(file.getvalue()).decode()
        return f'<img alt="Picture that the code above draws" src="data:image/png;base64,{content}">'
    if hasattr(value, "_repr_html_"):
        # A blank line would end the block of HTML.
        return re.sub(r"\n\s*", "\n", str(value._repr_html_()))
    return f"<pre>{escape(repr(value))}</pre>"
