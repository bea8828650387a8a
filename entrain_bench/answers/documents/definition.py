"""Claims and tables are defined by one YAML each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import config_tree


def load_definition[T](path: Path, parse: Callable[[str, Mapping[str, Any]], T]) -> T:
    """What ``parse`` makes of a file's name and of the values in it.

    Raises:
        UserError: naming the file and what is wrong in it.
    """
    values = yaml.safe_load(path.read_text())
    try:
        return parse(path.stem, values)
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from error


def source_of(kind: str, name: str) -> str:
    """A link from a page of ``docs/strategies`` to the YAML of a table of ours; the name of another's."""
    ours = (config_tree() / kind / f"{name}.yaml").is_file()
    return f"[{name}](../../experiments/{kind}/{name}.yaml)" if ours else name
