"""The settings in which a claim is measured, and the one rule that makes a fair setting of a published one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from entrain_bench.answers.documents.definition import merge_overrides, override_key
from entrain_bench.base.errors import require

# Overrides of all runs, of the runs in the numerator, and of the runs that they are compared with.
SIDES = ("common", "of", "to")
# Overrides that replace those of a setting, by side.
type Change = Mapping[str, Sequence[str]]
STRATEGY = "strategy"
# What a fair setting leaves to the tuner, for every strategy.
FREE = (
    *("tuning=equal", "layout.tp=null", "layout.cp=null", "layout.pp=null", "layout.dp=null"),
    *("layout.recompute=null", "microbatch_size=null"),
)
# Keys of a strategy's options and parts, and with those of its layout, its tuning and a device that is not published.
PARTS = (f"{STRATEGY}.", f"{STRATEGY}/")
TUNED = ("layout.", "microbatch_size", *PARTS, "tuning", "cluster.device.")
BASELINE = "megatron"
FAIR_WORDS = (
    "One rule for all claims: the same job for both sides; degrees, microbatch size and recomputation are free and "
    "tuned in the same way; where systems are compared, the tuned Megatron baseline is one of them."
)


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number comes out of runs.

    For every workload and model, the mean of a side's configurations counts, or the configuration that is greatest or
    least on average. The two sides are compared seed by seed. Then cases are combined.

    Attributes:
        metric: a column of the table of runs, or a number that ``claims`` derives from it.
        pick_of, pick_to: which configuration of a side counts (mean, max, min).
        over: how workloads and models are combined (mean, max, min).
        samples: for GPU days the cell that states the number of samples.
    """

    metric: str
    pick_of: str = "mean"
    pick_to: str = "mean"
    over: str = "mean"
    samples: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """Overrides of both sides, and of the situation that they are compared in (``at``); without ``to`` one side."""

    of: tuple[str, ...]
    to: tuple[str, ...] = ()
    at: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimSetting:
    """The runs behind a number.

    Attributes:
        words: the setting in words, and which parts of it were chosen here.
        measure: how its number comes out of its runs.
        common: overrides of all runs.
        situations: one, or two whose ratio is the number: the first over the second.
    """

    words: str
    measure: Measure
    common: tuple[str, ...]
    situations: tuple[Situation, ...]

    @property
    def pairs(self) -> list[list[tuple[str, ...]]]:
        """The sweeps to run: for every situation the numerator, and the denominator if there is one."""
        return [[(*self.common, *one.at, *side) for side in (one.of, one.to) if side] for one in self.situations]

    @property
    def sweeps(self) -> list[tuple[str, ...]]:
        """The same, one after another."""
        return [side for pair in self.pairs for side in pair]

    @property
    def is_comparison(self) -> bool:
        """Whether two sides or two situations are compared; otherwise the metric itself is the number."""
        return len(self.sweeps) > 1

    def changed(self, change: Change) -> ClaimSetting:
        """The setting with overrides of the same keys replaced, and others added.

        What one side alone changes of ``common``, the other side keeps.

        Raises:
            UserError: for a key that distinguishes the two situations.
        """
        everywhere, of, to = (set(map(override_key, change.get(side, ()))) for side in SIDES)
        for key in (override_key(text) for one in self.situations for text in one.at):
            require(key not in everywhere | of | to, "change", key, "a key other than those of at and against")
        kept = _without(self.common, everywhere)
        split = [text for text in kept if override_key(text) in of | to]

        def side(texts: tuple[str, ...], name: str, keys: set[str]) -> tuple[str, ...]:
            return (*_without((*split, *texts), everywhere | keys), *change.get(name, ())) if texts else ()

        situations = [replace(one, of=side(one.of, "of", of), to=side(one.to, "to", to)) for one in self.situations]
        common = (*_without(kept, of | to), *change.get("common", ()))
        return replace(self, common=common, situations=tuple(situations))


def fair_setting(published: ClaimSetting, stated: Change, measure: Measure, words: str = "") -> ClaimSetting:
    """The published job, tuned in the same way for both sides.

    The strategies stay, everything else of a strategy, its layout and its device goes. If both sides are one strategy,
    the parts that distinguish them stay. ``stated`` changes the job and names the baseline.

    Raises:
        UserError: if ``stated`` fixes what the rule leaves free, or the sides differ in more than the strategy and the
            size of the cluster, or the tuned baseline is missing.
    """
    for text in stated.get("common", ()):
        require(_is_job(text), "fair.common", text, "of the job; strategies are tuned by one rule")
    shared = [text for text in published.common if override_key(text) == STRATEGY or _is_part(text)]
    common = merge_overrides(filter(_is_job, published.common), stated.get("common", ()))
    situations = [_fair_situation(one, shared, stated) for one in published.situations]
    return ClaimSetting(f"{words} {FAIR_WORDS}".strip(), measure, (*FREE, *common), tuple(situations))


def _fair_situation(published: Situation, shared: Sequence[str], stated: Change) -> Situation:
    both = {"of": merge_overrides(shared, published.of), "to": merge_overrides(shared, published.to)}
    sides = {name: merge_overrides(filter(_is_of_side, side), stated.get(name, ())) for name, side in both.items()}
    alone = _strategies(sides["of"]) == _strategies(sides["to"])
    if alone:
        for name, side in both.items():
            sides[name] = merge_overrides([*sides[name], *filter(_is_part, side)], stated.get(name, ()))
    for text in (*sides["of"], *sides["to"]):
        allowed = _is_of_side(text) or (alone and _is_part(text))
        require(allowed, "fair", text, "a strategy, a part of one compared with itself, or the cluster's size")
    compared = alone or BASELINE in {*_strategies(sides["of"]), *_strategies(sides["to"])}
    require(bool(sides["to"]) and compared, "fair.to", sides["to"], f"given, with strategy={BASELINE} on one side")
    return Situation(tuple(sides["of"]), tuple(sides["to"]), tuple(filter(_is_job, published.at)))


def _is_job(override: str) -> bool:
    """Whether an override is of the training job, not of a strategy, its layout or its tuning."""
    return override_key(override) != STRATEGY and not override_key(override).startswith(TUNED)


def _is_of_side(override: str) -> bool:
    """Whether fair sides may differ in an override: the strategy, or the size of the cluster."""
    key = override_key(override)
    return (key == STRATEGY or key.split(".")[0] == "cluster") and not key.startswith(TUNED)


def _is_part(override: str) -> bool:
    return override_key(override).startswith(PARTS)


def _strategies(overrides: Iterable[str]) -> tuple[str, ...]:
    names = [text.partition("=")[2] for text in overrides if override_key(text) == STRATEGY]
    return tuple(names[-1].split(",")) if names else ()


def _without(overrides: Iterable[str], keys: set[str]) -> tuple[str, ...]:
    return tuple(text for text in overrides if override_key(text) not in keys)
