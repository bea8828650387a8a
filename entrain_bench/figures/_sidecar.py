"""What stands beside a figure: ``<name>.json`` with the command that draws it again, and a caption.

A file of its own and not a comment in the CSV: that one is read by whatever reads CSV, without being told of comments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.text import consecutive
from entrain_bench.records.cells import Cell


def sidecar(title: str, command: str, cells: Iterable[Cell]) -> bytes:
    """The file of a figure that is drawn of these cells.

    Returns:
        JSON: ``command``, ``caption``, ``setting`` (every value that the cells have, by its key), ``seeds``,
        ``cost_source`` by cluster.
    """
    configs = [cell.config for cell in cells]
    setting = {
        "cluster": _distinct(config.cluster["name"] for config in configs),
        "harness": _distinct(config.harness["label"] for config in configs),
        **{
            name: _distinct(getattr(config, name) for config in configs) for name in ("global_batch", "microbatch_size")
        },
        **{f"layout.{name}": _distinct(c.layout.values[name] for c in configs) for name in ("tp", "cp", "pp", "dp")},
    }
    seeds = sorted({config.seed for config in configs})
    sources = {str(config.cluster["name"]): cost_source(config.cluster) for config in configs}
    return described(title, command, setting, seeds, sources)


def described(
    title: str, command: str, setting: Mapping[str, Sequence[Any]], seeds: Sequence[int], sources: Mapping[str, str]
) -> bytes:
    """The same of a figure that is not drawn of cells."""
    texts = {name: ["null" if value is None else str(value) for value in values] for name, values in setting.items()}
    words = ", ".join(f"{name} {' or '.join(each)}" for name, each in texts.items())
    costs = ", ".join(f"{source} ({cluster})" for cluster, source in sorted(sources.items()))
    parts = (
        title,
        words and f"Setting: {words}.",
        f"Seeds: {consecutive(seeds)}." if seeds else "",
        costs and f"Costs: {costs}.",
    )
    content = {
        "command": command,
        "caption": " ".join(filter(None, parts)),
        "setting": {name: [*values] for name, values in setting.items()},
        "seeds": [*seeds],
        "cost_source": dict(sorted(sources.items())),
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
