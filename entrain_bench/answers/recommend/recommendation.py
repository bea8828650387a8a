"""The recommendation for a job: who is the fastest, with what plan, why, and how firm that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.comparison import FAILED, FASTEST, Comparison, Standing
from entrain_bench.answers.recommend.evidence import ASSUMPTIONS, Firm, firm, mean_of, spent_s
from entrain_bench.answers.recommend.race import standings
from entrain_bench.answers.recommend.strategy_race import Raced, StrategyRace, StrategyVariant
from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import Layout
from entrain_bench.program.layout_json import layout_to_json
from entrain_bench.records.records import Record
from entrain_bench.run.experiment import prepare

# Strategies behind the fastest whose time and firmness are looked into.
NUM_RIVALS = 2
# Seeds at which assumptions are changed: as many runs as a round of the race.
NUM_CHANGED = 1


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What is known of a job.

    Attributes:
        variant: the fastest.
        config: its run at the first seed.
        num_gpus: of the cluster.
        raced: the race.
        comparison: of all, at the seeds that each ran.
        reasons: why strategies have no result, by name; of those that have none under any overrides.
        baseline: the strategy that the speedup is over; empty if it is the fastest.
        layout: the fastest's at the first seed.
        num_replicas: of the LLM in it.
        num_alike: seeds of the fastest at which it plans the same layout.
        peak_bytes: its highest memory of a GPU at any seed.
        budget_bytes, capacity_bytes: what programs may use of a GPU, and what it has.
        bound_s: what no layout is below (``cluster_bound_s``), mean over seeds.
        layout_bound_s: of any order and assignment under its layout.
        spent: where time goes (``spent_s``), for the fastest and its rivals at the seeds that they share.
        firm: what changed assumptions do, at ``changed_seeds``.
        changed_seeds: the first ones of the race.
        spent_seeds: those that the fastest and its rivals share.
        records: of the fastest, by seed.
    """

    variant: StrategyVariant
    config: RunConfig
    num_gpus: int
    raced: Raced
    comparison: Comparison[str]
    reasons: Mapping[str, str]
    baseline: str
    layout: Layout
    num_replicas: int
    num_alike: int
    peak_bytes: float
    budget_bytes: float
    capacity_bytes: float
    bound_s: float
    layout_bound_s: float
    spent: Mapping[str, Mapping[str, float]]
    firm: Sequence[Firm]
    changed_seeds: Sequence[int]
    spent_seeds: Sequence[int]
    records: Sequence[Record]

    @property
    def best(self) -> str:
        """The name of the fastest."""
        return self.variant.name

    @property
    def standing(self) -> Standing:
        """How the fastest does."""
        return self.comparison.standings[self.best]

    @property
    def seeds(self) -> list[int]:
        """Those of the fastest."""
        return sorted(self.raced.times[self.best])


def answer_of(
    runner: StrategyRace, raced: Raced, baseline: str, refusals: Mapping[str, str], given: Collection[str]
) -> Recommendation | None:
    """The answer of a race; None if nobody has a result. Runs the fastest and its rivals under changed assumptions.

    Args:
        runner: that of the race.
        raced: what it found.
        baseline: what the speedup is over.
        refusals: why results of strategies are not taken, by name.
        given: keys of the user's overrides; assumptions about these stay as they are.
    """
    anyone, times = next(iter(raced.times.items()))
    iterations = runner.config(anyone, min(times)).iterations
    comparison = standings(raced.times, baseline, iterations)
    if not comparison.with_verdict(FASTEST):
        return None
    (best,) = comparison.with_verdict(FASTEST)
    lost = comparison.with_verdict(FAILED)
    ranked = [name for name in comparison.ranked if name not in lost]
    rivals = [name for name in ranked if comparison.standings[name].behind][:NUM_RIVALS]
    seeds = sorted(raced.times[best])
    shared = [seed for seed in seeds if all(seed in raced.times[name] for name in rivals)]
    own = runner.records([best], seeds)
    layouts = [runner.layout(best, seed) for seed in seeds]
    config = runner.config(best, seeds[0])
    job = prepare(config).job
    placed = {runner.variants[name].strategy for name in ranked}
    variants = {name for name, each in runner.variants.items() if each.strategy in placed}
    reasons = {name: reason_of(runner, raced, name) for name in lost}
    return Recommendation(
        variant=runner.variants[best],
        config=config,
        num_gpus=job.cluster.num_ranks,
        raced=raced,
        comparison=comparison,
        reasons={name: refusals.get(name, reason) for name, reason in reasons.items() if name not in variants},
        baseline="" if best == baseline else baseline,
        layout=layouts[0],
        num_replicas=layouts[0].modules[job.model.llm_index].dp,
        num_alike=sum(layout_to_json(layout) == layout_to_json(layouts[0]) for layout in layouts),
        peak_bytes=max(record.metrics["peak_memory_bytes"] for record in own),
        budget_bytes=job.memory_budget_bytes,
        capacity_bytes=float(job.cluster.device.memory_bytes),
        bound_s=mean_of(own, "cluster_bound_s"),
        layout_bound_s=mean_of(own, "lower_bound_s"),
        spent={name: spent_s(runner.records([name], shared)) for name in (best, *rivals)},
        firm=firmness(runner, raced, [best, *rivals], given),
        changed_seeds=seeds[:NUM_CHANGED],
        spent_seeds=shared,
        records=own,
    )


def firmness(runner: StrategyRace, raced: Raced, names: Sequence[str], given: Collection[str]) -> list[Firm]:
    """What changed assumptions do to the first of some strategies and to the others, at the first seeds."""
    seeds = runner.job.seeds(NUM_CHANGED)
    usual = {seed: raced.times[names[0]][seed] for seed in seeds}
    changes = {label: change for label, change in ASSUMPTIONS.items() if change.partition("=")[0] not in given}
    runner.fetch((name, seed, (change,)) for seed in seeds for change in changes.values() for name in names)
    return [firm(label, names[0], usual, runner.times(names, seeds, [change])) for label, change in changes.items()]


def reason_of(runner: StrategyRace, raced: Raced, name: str) -> str:
    """Why a strategy has no result, at the first of its seeds without one."""
    seeds = sorted(raced.times[name])
    for seed, record in zip(seeds, runner.records([name], seeds), strict=True):
        if record.status != "ok":
            return f"at seed {seed}: {record.reason}" if seed != seeds[0] else record.reason
    return ""
