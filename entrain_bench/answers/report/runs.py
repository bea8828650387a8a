"""Runs as the page compares them: who competes, on what, and under which setting."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from entrain_bench.answers.labels import in_order, names
from entrain_bench.answers.report.commands import setting_overrides
from entrain_bench.answers.report.parameters import suffixes
from entrain_bench.records.records import DEGREES, RECOMPUTE, SETTINGS

PARTS = ["planner", "assigner", "scheduler"]
# Groups whose choices carry parameters of their own, in the column ``<group>_parameters``.
NAMED = ["model", "workload", "cluster", "harness"]
SETTING = ["cluster", "harness", *SETTINGS, *DEGREES, RECOMPUTE]
CASE = ["model", "workload"]
# What makes two rows the same run, by whatever code.
IDENTITY = [
    *(name for group in ("strategy", *NAMED) for name in (group, f"{group}_parameters")),
    *PARTS,
    *SETTINGS,
    *DEGREES,
    RECOMPUTE,
    "seed",
]


@dataclass(frozen=True, slots=True)
class Runs:
    """What is compared.

    Attributes:
        table: one row a run, strategies in display order. ``strategy``, ``workload``, ``model``, ``cluster`` and their
            labels tell apart what was swept; ``setting`` is how a run's setting differs from the main one, empty there.
        main: the main setting, as overrides.
        num_older: runs left out because other code has run them since.
        num_variants: runs left out because their strategy has other parameters more often in their setting.
    """

    table: pd.DataFrame
    main: str
    num_older: int
    num_variants: int


def compared(rows: pd.DataFrame, usual: Mapping[str, str]) -> Runs:
    """The runs to compare.

    Of a strategy with several parameters in one setting those count that have the most runs there, and of those the
    ones that have the most in all settings.

    Args:
        rows: one row a run, oldest first: the columns of ``IDENTITY``, ``SETTING`` and ``CASE`` as text, metrics,
            ``strategy_order`` and labels.
        usual: settings that nobody has to name, by column.
    """
    newest = rows.drop_duplicates(IDENTITY, keep="last").sort_values(IDENTITY, kind="stable", ignore_index=True)
    table = newest
    for group in NAMED:
        table = _told_apart(table, group, table[f"{group}_parameters"])
    details = table["strategy_parameters"]
    for part in PARTS:
        details = f"{part}=" + table[part] + " " + details
    table = _most_frequent(_told_apart(table, "strategy", details), newest["strategy"])
    main = _main_setting(table, usual)
    settings = {values: _difference(values, main) for values in table[SETTING].itertuples(index=False, name=None)}
    mine = [settings[values] for values in table[SETTING].itertuples(index=False, name=None)]
    table = in_order(table.assign(setting=mine))
    main_text = _difference(main, tuple(usual.get(name, "") for name in SETTING))
    return Runs(table, main_text or "the defaults", len(rows) - len(newest), len(newest) - len(table))


def _told_apart(table: pd.DataFrame, group: str, details: pd.Series[str]) -> pd.DataFrame:
    """The table with names and labels of a group that say what differs."""
    labels, behind = names(table, group), suffixes(table[group], details)
    return table.assign(**{group: table[group] + behind, f"{group}_label": table[group].map(labels) + behind})


def _most_frequent(table: pd.DataFrame, strategies: pd.Series[str]) -> pd.DataFrame:
    """The runs of those variants of every strategy that have the most runs in a setting; of equals, in all settings."""
    keys = [*SETTING, "of"]
    counted = table.assign(of=strategies)
    for variant in ([*keys, "strategy"], ["of", "strategy"]):
        counted["runs"] = table.groupby([table.get(name, strategies) for name in variant])["seed"].transform("size")
        counted = counted[counted["runs"] == counted.groupby(keys, sort=False)["runs"].transform("max")]
    return counted.drop(columns=["of", "runs"]).reset_index(drop=True)


def _main_setting(table: pd.DataFrame, usual: Mapping[str, str]) -> tuple[str, ...]:
    """The setting with the most to compare; of several the one that is nearest to what nobody has to name."""

    def rank(setting: tuple[str, ...], runs: pd.DataFrame) -> tuple[Any, ...]:
        unusual = sum(usual.get(name) != value for name, value in zip(SETTING, setting, strict=True))
        cases = len(runs[CASE].drop_duplicates())
        return (runs["strategy"].nunique() < 2, -cases, -len(runs), unusual, setting)

    groups = {tuple(map(str, key)): runs for key, runs in table.groupby(SETTING, sort=False)}
    return min(groups, key=lambda setting: rank(setting, groups[setting]))


def _difference(values: Sequence[Hashable], others: Sequence[Hashable]) -> str:
    """Overrides of the settings in which values are not the others."""
    pairs = zip(SETTING, map(str, values), map(str, others), strict=True)
    differing = [(name, value) for name, value, other in pairs if value != other]
    # What has no override must not look like the other.
    texts = (setting_overrides(name, value) or [f"{name}={value or 'default'}"] for name, value in differing)
    return " ".join(override for each in texts for override in each)
