"""Names of strategies, workloads and models in figures, sources of costs, and facts on strategies for readers."""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pandas as pd
import yaml

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.comments import first_sentence
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.costs.profiled.times import ProfiledDevice
from entrain_bench.specs.parse import parse

# The column of a strategy's YAML key ``display_order``.
ORDER = "strategy_order"
# The column of its key ``family``, and the names of families; others are the user's own.
FAMILY = "strategy_family"
OURS = "ours"
FAMILIES = {
    "published": "Published systems",
    "out_of_the_box": "From frameworks",
    "simple": "Simple baselines",
    OURS: "Ours",
    "": "Yours",
}
PUBLISHED = "published"
# Keys of a strategy's ``switch_on`` for engines that run it unmodified; and the column with the framework's name.
SWITCH_ON = "switch_on"
# Jobs as Megatron-LM's multimodal code runs them.
MEGATRON_JOB = ("encoder_sp=false", "encoder_cp=false", "layout.recompute_rule=with_llm")
# One copy of the model on every rank, with one switch for recomputation; losses are PyTorch's, as in transformers.
REPLICATED_JOB = (
    *(f"layout.{name}=1" for name in ("tp", "cp", "pp")),
    "layout.recompute_rule=together",
    "cross_entropy=eager",
)
# Each with its job.
FRAMEWORKS = {"megatron": ("Megatron-LM", MEGATRON_JOB), "sharded": ("HF Trainer", REPLICATED_JOB)}
TODAY = "strategy_today"

# Shorter words are taken for abbreviations.
ABBREVIATION_LETTERS = 3
# Words that are spelled otherwise than in title case.
SPELLED = {
    "dflop": "DFLOP",
    "internvl": "InternVL",
    "internvl15": "InternVL 1.5",
    "llama3": "Llama 3",
    "llavaov": "LLaVA-OneVision",
    "mixed": "mixed",
    "multi": "several images",
    "qwen25": "Qwen2.5",
    "qwen25vl": "Qwen2.5-VL",
    "single": "single images",
    "video": "video",
    "vit": "ViT",
}


def label_columns(config: RunConfig) -> dict[str, Any]:
    """Labels that the YAMLs of a run state themselves (``label: COCO``), empty where they state none, order and family.

    ``UserError`` for a ``display_order`` that is not a number, and for an unknown ``family``.
    """
    groups = {"strategy": config.strategy, "workload": config.workload, "model": config.model}
    order = config.strategy.get("display_order")
    require(
        order is None or (isinstance(order, int) and order >= 0), "strategy.display_order", order, "null or 0, 1, ..."
    )
    family = str(config.strategy.get("family") or "")
    if family not in FAMILIES:
        raise unknown_choice("strategy.family", family, [*filter(None, FAMILIES)])
    stated = {f"{group}_label": str(values.get("label", "")) for group, values in groups.items()}
    return stated | {ORDER: order, FAMILY: family, TODAY: framework_of(config.content())}


def framework_of(config: Mapping[str, Any]) -> str:
    """Return the framework that runs a configured run's strategy today, as its YAML says; empty if none does.

    A framework may need values of options (``switch_on: {megatron: [strategy.planner.placement=first_stage]}``).
    """
    switches = config["strategy"].get(SWITCH_ON) or {}
    require(isinstance(switches, Mapping), f"strategy.{SWITCH_ON}", switches, "a mapping of lists of overrides")
    for key, (framework, job) in FRAMEWORKS.items():
        if key in switches and all(_has(config, text) for text in (*job, *switches[key])):
            return framework
    return ""


def _has(config: Mapping[str, Any], override: str) -> bool:
    """Whether a configuration has the value that an override gives."""
    path, _, text = override.partition("=")
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return bool((list(value) if isinstance(value, tuple) else value) == yaml.safe_load(text))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """The rows by the display order of their strategies; strategies that state none come last, as they come."""
    return table.sort_values(ORDER, kind="stable", na_position="last", ignore_index=True)


def orders(table: pd.DataFrame) -> dict[str, int | None]:
    """Display order of every strategy of a table, in order of appearance; None where none is stated."""
    return {
        name: int(order) if pd.notna(order) else None for name, order in _stated(table, ORDER, "display_order").items()
    }


def families(table: pd.DataFrame) -> dict[str, str]:
    """Family of every strategy of a table, in order of appearance; empty where none is stated."""
    return {name: str(family or "") for name, family in _stated(table, FAMILY, "family").items()}


def frameworks(table: pd.DataFrame) -> dict[str, str]:
    """Framework that runs a strategy of a table today, in order of appearance; empty where none does."""
    return {name: str(framework or "") for name, framework in _stated(table, TODAY, "").items()}


def _stated(table: pd.DataFrame, column: str, key: str, group: str = "strategy") -> dict[str, Any]:
    """Facts on every value of a group: those of the table's column, or else of the choice's YAML."""
    firsts = table.drop_duplicates(group)
    values = [str(value) for value in firsts[group]]
    found = firsts[column] if column in table else [_choice(group, value).get(key) for value in values]
    return dict(zip(values, found, strict=True))


@cache
def _choice(group: str, name: str) -> Mapping[str, Any]:
    path = config_tree() / group / f"{name}.yaml"
    return (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}


def names(table: pd.DataFrame, column: str) -> dict[str, str]:
    """Label of every value of a column, in order of appearance; one that is stated takes precedence."""
    stated = _stated(table, f"{column}_label", "label", column)
    derived = distinct_labels(stated)
    return {value: label if isinstance(label, str) and label else derived[value] for value, label in stated.items()}


def distinct_labels(values: Iterable[str]) -> dict[str, str]:
    """Short labels, or the whole names of those that would share one."""
    values = list(values)
    short = {value: _short(value) for value in values}
    taken = [*short.values()]
    return {value: label if taken.count(label) == 1 else spell(value) for value, label in short.items()}


def model_size(model: str) -> float:
    """Billions of weights as a model's name states them; 0 if it states none."""
    words = model.lower().replace("-", "_").split("_")
    sizes = [float(word[:-1]) for word in words if word.endswith("b") and word[:-1].replace(".", "", 1).isdigit()]
    return max(sizes, default=0.0)


def cluster_label(name: str) -> str:
    """A cluster by its GPUs: ``a40x64`` and ``64xa40`` become 64 A40; others keep their name."""
    found = re.fullmatch(r"(?P<device>[a-z]\w*?)x(?P<gpus>\d+)", name) or re.fullmatch(
        r"(?P<gpus>\d+)x(?P<device>[a-z]\w*)", name
    )
    return f"{found['gpus']} {found['device'].upper()}" if found else name


def spell(name: str) -> str:
    """A name as people say it: ``chartqa`` becomes ChartQA, ``dflop_mixed`` DFLOP mixed, ``vit1b`` ViT 1B."""
    return " ".join(_spell_word(word) for word in name.split("_") if word)


def _short(name: str) -> str:
    """A model by its LLM's family and size, anything else in full: ``qwen25vl_llama3_1b`` becomes Llama 1B."""
    *_, family, size = ["", "", *name.split("_")]
    if family and re.fullmatch(r"[0-9.]+b", size):
        return f"{_spell_word(family.rstrip('0123456789.'))} {size.upper()}"
    return spell(name)


def _spell_word(word: str) -> str:
    if sized := re.fullmatch(r"([a-z]+)([0-9.]+b)", word):
        return " ".join(_spell_word(part) for part in sized.groups())
    if word in SPELLED:
        return SPELLED[word]
    if len(word) <= ABBREVIATION_LETTERS or re.fullmatch(r"[0-9.]+b", word):
        return word.upper()
    stem, answering = re.fullmatch(r"(.+?)([cv]?qa)?", word).groups(default="")  # type: ignore[union-attr]
    return stem[0].upper() + stem[1:] + answering.upper()


PROFILED = "profiled"
FITTED = "fitted"
DERIVED = "derived"


@cache
def _fitted_devices() -> frozenset[str]:
    with (config_tree() / "cluster" / "sources.csv").open(newline="") as rows:
        return frozenset(row["part"] for row in csv.DictReader(rows) if row["obtained"] == FITTED)


def cost_source(cluster: Mapping[str, Any]) -> str:
    """Return the source of a cluster's constants: timed on a device, fitted to published times, or derived."""
    if ProfiledDevice.of(cluster):
        return PROFILED
    return FITTED if cluster["device"].get("name") in _fitted_devices() else DERIVED


# Facts on strategies, in the configuration tree.
FACTS = "strategies.yaml"


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """One strategy in words: first from the file, then from the strategy's YAML.

    Attributes:
        paper: arXiv numbers.
        code: place of its authors' code; empty if we found none.
        balances: whose work it makes equal.
        runs_in: frameworks other than this suite that run it, with their limits.
        page: its page in ``docs/strategies``, with an anchor if the page has several strategies; empty: its own.
    """

    paper: tuple[str, ...] = ()
    code: str = ""
    balances: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    runs_in: tuple[str, ...] = ()
    page: str = ""
    name: str = ""
    label: str = ""
    family: str = ""
    summary: str = ""
    order: float = 0.0


def strategy_facts() -> list[StrategyFacts]:
    """Return the facts on every strategy of the suite, in display order; ``UserError`` if it lacks a strategy."""
    entries = yaml.safe_load((config_tree() / FACTS).read_text())
    names = choices("strategy")
    for name in entries:
        if name not in names:
            raise unknown_choice(FACTS, name, names)
    for name in names:
        if name not in entries:
            raise UserError(f"{FACTS}: must have an entry {name}, as every strategy")
    facts = (_facts(name, parse(StrategyFacts, entries[name], f"{FACTS}: {name}")) for name in names)
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


@dataclass(frozen=True, slots=True)
class ModelError:
    """Relative error of simulated iteration times over published times, each source left out of the fit.

    ``close`` is the share of times within 10%.
    """

    median: float
    close: float
    num_times: int

    @property
    def sentence(self) -> str:
        """The error in words."""
        return (
            f"Model error: median {100 * self.median:.1f}%, {100 * self.close:.0f}% within 10%, "
            f"over {self.num_times:,} published iteration times (each publication held out of the fit)."
        )


# Computed for docs/calibration.md, which is not made if they differ.
MODEL_ERROR = ModelError(median=0.037, close=0.75, num_times=1118)
