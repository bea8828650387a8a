"""The command line that runs a row of the table of runs again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from entrain_bench.records.records import DEGREES, RECOMPUTE, SETTINGS

COMMAND = "entrain-bench"
# Keys whose empty text means null; any other is empty where a run is older than the key.
NULLABLE = frozenset({*DEGREES, RECOMPUTE, "microbatch_size"})
LISTS = frozenset({RECOMPUTE, "freeze"})


def setting_overrides(column: str, text: str) -> list[str]:
    """The overrides that a setting's text in the table stands for."""
    if column == "speed":
        return [f"speed.{factor}" for factor in text.split()]
    key = column.replace("layout_", "layout.", 1) if column in (*DEGREES, RECOMPUTE) else column
    if not text:
        return [f"{key}=null"] if column in NULLABLE else [f"{key}=[]"] if column in LISTS else []
    if column in LISTS:
        return [f"{key}=[{'' if text == 'none' else text.replace('+', ',')}]"]
    return [f"{key}={text.lower() if text in ('True', 'False') else text}"]


def differing_settings(row: Mapping[str, str], usual: Mapping[str, str]) -> list[str]:
    """Overrides of every setting of a row that nobody has by default."""
    names = [name for name in (*SETTINGS, *DEGREES, RECOMPUTE) if row[name] != usual.get(name)]
    return [override for name in names for override in setting_overrides(name, row[name])]


def sweep_command(strategies: Sequence[str], shared: Sequence[str], seeds: Iterable[int]) -> str:
    """One command for several strategies and seeds."""
    numbers = [*seeds]
    sweep = ["--multirun"] if len(strategies) * len(numbers) > 1 else []
    words = [*sweep, f"strategy={','.join(strategies)}", *shared, f"seed={','.join(map(str, numbers))}"]
    return shlex.join([COMMAND, *words])


def commands_of(overrides: Mapping[str, Sequence[str]], shared: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """The commands of several strategies under the same setting: one for all that need nothing but their name.

    Args:
        overrides: of each strategy, its choice first.
        shared: of all.
        seeds: of all.
    """
    simple = [each[0].partition("=")[2] for each in overrides.values() if len(each) == 1]
    lines = [sweep_command(simple, shared, seeds)] if simple else []
    return lines + [
        sweep_command([choice.partition("=")[2]], [*own, *shared], seeds) for choice, *own in overrides.values() if own
    ]
