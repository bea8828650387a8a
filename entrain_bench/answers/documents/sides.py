"""The settings in which a claim is measured, and the one rule that makes a fair setting of a published one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from entrain_bench.answers.documents.definition import Overrides, overrides
from entrain_bench.records.records import METRICS
from entrain_bench.specs.parse import OneOf

# Overrides of all runs, of the runs in the numerator, and of the runs that they are compared with.
SIDES = ("common", "of", "to")
# Numbers that are derived: from a run's layout the encoders' pipeline stages and their ranks in a replica, GPU days of
# the samples that a cell states, and products of two columns.
ENCODER_STAGES = "encoder_stages"
ENCODER_GPUS = "encoder_gpus"
GPU_DAYS = "gpu_days"
PRODUCTS = {"idle_time_s": ("bubble_ratio", "iteration_time_s")}
MEMORY = "peak_memory_bytes"
Pick = Annotated[str, OneOf(("mean", "max", "min"))]
STRATEGY = "strategy"
# Keys that a fair setting leaves to the tuner, for every strategy.
FREE = (
    *("tuning=equal", "layout.tp=null", "layout.cp=null", "layout.pp=null", "layout.dp=null"),
    *("layout.recompute=null", "microbatch_size=null"),
)
# Keys of a strategy's options and parts, and with those of its layout, its tuning and a device that is not published.
PARTS = (f"{STRATEGY}.", f"{STRATEGY}/")
TUNED = ("layout.", "microbatch_size", *PARTS, "tuning", "cluster.device.")
FAIR_WORDS = (
    "One rule for all claims: the same job for both sides; degrees, microbatch size and recomputation are free and "
    "tuned in the same way; where systems are compared, the tuned Megatron baseline is one of them."
)

# Overrides that replace those of a setting, by side.
type Change = Mapping[str, Overrides]


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number comes out of runs.

    For every workload and model, the mean of a side's configurations counts, or the configuration that is greatest or
    least on average. The two sides are compared seed by seed. Then cases are combined.

    Attributes:
        metric: a column of the table of runs, or a number that is derived from it.
        pick_of, pick_to: which configuration of a side counts.
        over: how workloads and models are combined.
        samples: for GPU days the cell that states the number of samples.
    """

    metric: Annotated[str, OneOf((*METRICS, *PRODUCTS, ENCODER_STAGES, ENCODER_GPUS, GPU_DAYS))]
    pick_of: Pick = "mean"
    pick_to: Pick = "mean"
    over: Pick = "mean"
    samples: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """Overrides of both sides, and of the situation that they are compared in (``at``); without ``to`` one side."""

    of: Overrides
    to: Overrides = field(default_factory=dict)
    at: Overrides = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClaimSetting:
    """The runs behind a number.

    Attributes:
        words: the setting in words, and which parts of it were chosen here.
        common: overrides of all runs.
        situations: one, or two whose ratio is the number: the first over the second.
    """

    words: str
    measure: Measure
    common: Overrides
    situations: tuple[Situation, ...]

    @property
    def pairs(self) -> list[list[tuple[str, ...]]]:
        """The sweeps to run: for every situation the numerator, and the denominator if there is one."""
        return [
            [(*self.common.values(), *one.at.values(), *side.values()) for side in (one.of, one.to) if side]
            for one in self.situations
        ]

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
        """
        everywhere, of, to = (change.get(side, {}) for side in SIDES)
        kept = _without(self.common, everywhere)
        split = {key: text for key, text in kept.items() if key in of or key in to}

        def side(texts: Overrides, own: Overrides) -> Overrides:
            return _without(split | texts, {*everywhere, *own}) | own if texts else {}

        situations = [replace(one, of=side(one.of, of), to=side(one.to, to)) for one in self.situations]
        return replace(self, common=_without(kept, split) | everywhere, situations=tuple(situations))


def fair_setting(published: ClaimSetting, stated: Change, measure: Measure, text: str = "") -> ClaimSetting:
    """The published job, tuned in the same way for both sides.

    The strategies stay, everything else of a strategy, its layout and its device goes. If both sides are one strategy,
    the parts that distinguish them stay. ``stated`` changes the job and names the baseline.
    """
    job = stated.get("common", {})
    common = overrides(FREE) | {key: text for key, text in published.common.items() if _is_job(key)} | job
    situations = tuple(_fair_situation(published.common, one, stated) for one in published.situations)
    return ClaimSetting(f"{text} {FAIR_WORDS}".strip(), measure, common, situations)


def _fair_situation(common: Overrides, published: Situation, stated: Change) -> Situation:
    shared = {key: text for key, text in common.items() if key == STRATEGY or key.startswith(PARTS)}
    both = {"of": shared | published.of, "to": shared | published.to}
    of, to = ((side | stated.get(name, {})).get(STRATEGY, "") for name, side in both.items())

    def may_differ(key: str) -> bool:
        is_of_side = key == STRATEGY or (key.split(".")[0] == "cluster" and not key.startswith(TUNED))
        return is_of_side or (of == to and key.startswith(PARTS))

    sides = {
        name: {key: text for key, text in side.items() if may_differ(key)} | stated.get(name, {})
        for name, side in both.items()
    }
    return Situation(**sides, at={key: text for key, text in published.at.items() if _is_job(key)})


def _is_job(key: str) -> bool:
    """Whether a key is of the training job, not of a strategy, its layout or its tuning."""
    return key != STRATEGY and not key.startswith(TUNED)


def _without(texts: Overrides, keys: Iterable[str]) -> Overrides:
    return {key: text for key, text in texts.items() if key not in {*keys}}
