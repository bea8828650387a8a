"""Facts on strategies for readers: ``experiments/strategies.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated

import yaml

from entrain_bench.answers.labels import FAMILIES, spell
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.config.comments import first_sentence
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.simulate.rendezvous import BATCHED, RULES
from entrain_bench.specs.parse import OneOf, parse

FILE = "strategies.yaml"


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """One strategy in words: first what the file states, then what the strategy's YAML does.

    Attributes:
        paper: arXiv numbers.
        code: place of its authors' code; empty if we found none.
        balances: whose work it makes equal.
        runs_in: frameworks other than this suite that run it, with their limits.
        page: its page in ``docs/strategies``, with an anchor if the page has several strategies; empty: its own.
        transfers: how ranks must post receives so that no program deadlocks.
    """

    paper: tuple[str, ...] = ()
    code: str = ""
    balances: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    runs_in: tuple[str, ...] = ()
    page: str = ""
    transfers: Annotated[str, OneOf(RULES)] = BATCHED
    name: str = ""
    label: str = ""
    family: str = ""
    summary: str = ""
    order: float = 0.0


def strategy_facts() -> list[StrategyFacts]:
    """Return the facts on every strategy of the suite, in display order.

    Raises:
        UserError: for an entry without a strategy, a strategy without an entry, and an unknown or malformed key.
    """
    entries = yaml.safe_load((config_tree() / FILE).read_text())
    names = choices("strategy")
    for name in entries:
        if name not in names:
            raise unknown_choice(FILE, name, names)
    for name in names:
        if name not in entries:
            raise UserError(f"{FILE}: must have an entry {name}, as every strategy")
    facts = (_facts(name, parse(StrategyFacts, entries[name], f"{FILE}: {name}")) for name in names)
    return sorted(facts, key=lambda facts: (facts.order, facts.name))


@cache
def runs_in(name: str) -> tuple[str, ...] | None:
    """Return the frameworks that run a strategy, with their limits; None for a strategy that is not of the suite."""
    return next((facts.runs_in for facts in strategy_facts() if facts.name == name), None)


def _facts(name: str, stated: StrategyFacts) -> StrategyFacts:
    path = config_tree() / "strategy" / f"{name}.yaml"
    strategy = yaml.safe_load(path.read_text())
    return replace(
        stated,
        page=stated.page or f"{name}.md",
        name=name,
        label=str(strategy.get("label") or spell(name)),
        family=FAMILIES[str(strategy.get("family") or "")],
        summary=first_sentence(path),
        order=float(strategy.get("display_order", "inf")),
    )
