"""A page whose Python runs when the site is built: every block with what it prints and shows below it."""

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


def executed(text: str, source: str, folder: Path) -> str:
    """Return a page with the output of its Python blocks, which share their names.

    Args:
        text: the page.
        source: its path, for errors.
        folder: where the blocks run, made if it is not there; it keeps ``results`` for the next time.

    Raises:
        UserError: if a block raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {}

    def with_output(found: re.Match[str]) -> str:
        return f"{found[0]}\n{_output(found[1], source, names)}\n"

    with chdir(folder):
        return BLOCK.sub(with_output, text)


def _output(code: str, source: str, names: dict[str, Any]) -> str:
    """Output of a block and its last expression as HTML; empty without either."""
    tree = ast.parse(code)
    printed = StringIO()
    value = None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    try:
        with redirect_stdout(printed):
            exec(compile(tree, source, "exec"), names)  # noqa: S102
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), source, "eval"), names)  # noqa: S307
    except Exception as error:
        raise UserError(f"{source}: a block fails ({type(error).__name__}: {error}):\n{code}") from error
    parts = [f"<pre>{escape(printed.getvalue())}</pre>"] if printed.getvalue() else []
    parts += [_shown(value)] if value is not None else []
    return f'<div class="notebook-output">{"".join(parts)}</div>\n' if parts else ""


def _shown(value: object) -> str:
    """A value as a notebook shows it."""
    if isinstance(value, Figure):
        file = BytesIO()
        value.savefig(file, format="png", dpi=value.dpi, metadata={"Software": None})
        alternative = "Picture that the code above draws"
        return f'<img alt="{alternative}" src="data:image/png;base64,{b64encode(file.getvalue()).decode()}">'
    if hasattr(value, "_repr_html_"):
        # A blank line would end the block of HTML.
        return re.sub(r"\n\s*", "\n", str(value._repr_html_()))
    return f"<pre>{escape(repr(value))}</pre>"
