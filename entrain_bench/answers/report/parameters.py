"""Parameters of a choice as tables write them, and how those that share a name are told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd

# ``path=value`` of ``records.parameters_text``: values are JSON.
PARAMETER = re.compile(r'([^\s=]+)=("(?:[^"\\]|\\.)*"|\[[^\]]*\]|\S*)')


def parameters(text: str) -> dict[str, str]:
    """Values by their paths, each as it is written."""
    return dict(PARAMETER.findall(text))


def differing(own: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Values that the other does not have, by their paths."""
    return {path: text for path, text in own.items() if other.get(path) != text}


def suffixes(names: pd.Series[str], details: pd.Series[str]) -> pd.Series[str]:
    """What is put behind names to tell apart those with other details: " (num_trials=8)"; mostly nothing.

    The details that a name has most often need no words, unless others are as frequent.

    Args:
        names: of each run.
        details: of each run, as ``parameters`` reads them.
    """
    known: dict[tuple[str, str], str] = {}
    for name, mine in details.groupby(names, sort=False):
        counts = mine.value_counts().sort_index()
        usual = counts[counts == counts.max()].index.tolist()
        known |= {(str(name), str(text)): _suffix(str(text), usual, counts.index.tolist()) for text in counts.index}
    return pd.Series([known[pair] for pair in zip(names, details, strict=True)], index=names.index, dtype=str)


def _suffix(text: str, usual: Sequence[str], everything: Sequence[str]) -> str:
    own = parameters(text)
    known = [parameters(other) for other in everything]
    others = [parameters(other) for other in usual] if len(usual) == 1 else known
    paths = [path for path in own if any(other.get(path) != own[path] for other in _rivals(own, path, others, known))]
    return f" ({', '.join(f'{_short(path)}={own[path].strip(chr(34))}' for path in paths)})" if paths else ""


def _rivals(
    own: Mapping[str, str], path: str, others: Sequence[Mapping[str, str]], known: Sequence[Mapping[str, str]]
) -> Sequence[Mapping[str, str]]:
    """What a path tells apart from: of a part that the others do not have (``planner``), those that have it, too."""
    part = path.partition(".")[0]
    if part == path or part not in own or all(other.get(part) == own[part] for other in others):
        return others
    return [other for other in known if other.get(part) == own[part]]


def _short(path: str) -> str:
    return path.rpartition(".")[2]
