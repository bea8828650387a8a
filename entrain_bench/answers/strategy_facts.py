"""Facts on strategies for readers: ``experiments/strategies.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.answers.labels import FAMILIES, spell
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.comments import first_sentence
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.simulate.rendezvous import BATCHED, RULES

FILE = "strategies.yaml"


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """One strategy in words.

    Attributes:
        name: as in ``strategy=name``.
        label: what figures call it.
        family: heading of its family.
        summary: first sentence of its YAML.
        order: place in figures.
        paper: arXiv numbers.
        code: where its authors' code is; empty if we found none.
        balances: whose work it makes equal.
        needs: what it asks of a job or a framework.
        runs_in: frameworks other than this suite that run it, with their limits; empty for none.
        page: its page in ``docs/strategies``, with an anchor if the page has several strategies.
        transfers: one of ``simulate.rendezvous.RULES``: how ranks must post receives so that no program of a model with
            one encoder deadlocks.
    """

    name: str
    label: str
    family: str
    summary: str
    order: float
    paper: tuple[str, ...] = ()
    code: str = ""
    balances: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    runs_in: tuple[str, ...] = ()
    page: str = ""
    transfers: str = BATCHED


# What the file states; the rest is in the strategy's YAML.
LISTS = ("paper", "balances", "needs", "runs_in")
TEXTS = ("code", "page", "transfers")


def strategy_facts() -> list[StrategyFacts]:
    """Return the facts on every strategy of the suite, in display order.

    Raises:
        UserError: for an entry without a strategy, a strategy without an entry, and an unknown or malformed key.
    """
    stated = yaml.safe_load((config_tree() / FILE).read_text())
    names = choices("strategy")
    for name in stated:
        if name not in names:
            raise unknown_choice(FILE, name, names)
    for name in names:
        if name not in stated:
            raise UserError(f"{FILE}: must have an entry {name}, as every strategy")
    return sorted((_facts(name, stated[name]) for name in names), key=lambda facts: (facts.order, facts.name))


@cache
def runs_in(name: str) -> tuple[str, ...] | None:
    """Return the frameworks that run a strategy, with their limits; None for a strategy that is not of the suite."""
    stated = yaml.safe_load((config_tree() / FILE).read_text())
    return _facts(name, stated[name]).runs_in if name in stated else None


def _facts(name: str, entry: Mapping[str, Any]) -> StrategyFacts:
    for key, value in entry.items():
        where = f"{FILE}: {name}.{key}"
        if key in TEXTS:
            require(isinstance(value, str), where, value, "a text")
        elif key in LISTS:
            is_list = isinstance(value, list) and all(isinstance(text, str) for text in value)
            require(is_list, where, value, "a list of texts")
        else:
            raise unknown_choice(f"{FILE}: {name}", key, [*LISTS, *TEXTS])
    if entry.get("transfers", BATCHED) not in RULES:
        raise unknown_choice(f"{FILE}: {name}.transfers", entry["transfers"], RULES)
    path = Path(config_tree()) / "strategy" / f"{name}.yaml"
    strategy = yaml.safe_load(path.read_text())
    stated: dict[str, Any] = {key: tuple(value) if key in LISTS else value for key, value in entry.items()}
    return StrategyFacts(
        name,
        label=str(strategy.get("label") or spell(name)),
        family=FAMILIES[str(strategy.get("family") or "")],
        summary=first_sentence(path),
        order=float(strategy.get("display_order", "inf")),
        **({"page": f"{name}.md"} | stated),
    )
