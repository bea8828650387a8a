"""Leaders of each job: the fastest overall, the fastest published, and the fastest that a framework runs today."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import yaml

from entrain_bench.answers.comparison import Times, geometric_mean
from entrain_bench.answers.labels import (
    MEGATRON_JOB,
    REPLICATED_JOB,
    SWITCH_ON,
    TODAY,
    cluster_label,
    families,
    frameworks,
    names,
)
from entrain_bench.answers.places import Place, places_of, published, today
from entrain_bench.answers.tables import JOB, compared
from entrain_bench.answers.text import listing, markdown_table, seconds, times
from entrain_bench.config.tree import config_tree
from entrain_bench.run.study import SweepOverrides
from entrain_bench.specs.sharding import ZERO1, ZERO2, ZERO3

# Columns of the run table that say how many samples a GPU has.
SIZES = {"batch": "global_batch", "nodes": "cluster.num_nodes", "gpus_per_node": "cluster.gpus_per_node"}
# Data parallelism in HF Trainer: of optimizer states and gradients by DeepSpeed, of weights, too, by FSDP.
SHARDED_LABELS = {"ZeRO-1": ZERO1, "ZeRO-2": ZERO2, "FSDP": ZERO3}
# The rival that takes thirty lines: every sample dealt by longest processing time.
BASELINE = "lpt"


@dataclass(frozen=True, slots=True)
class JobRow:
    """The strategies that are ahead on one job; a place is None if no such strategy has a result at every seed."""

    model: str
    workload: str
    cluster: str
    samples_per_gpu: float
    fastest: Place | None
    published: Place | None
    today: Place | None
    baseline: Place | None
    tied: Sequence[str]  # labels of all others that tie with the fastest, in their order


@dataclass(frozen=True, slots=True)
class Summary:
    """One place of every job: how often each strategy has it, and its time over the fastest's."""

    wins: Mapping[str, int]
    least: float
    greatest: float
    mean: float
    num_jobs: int

    @classmethod
    def of(cls, places: Sequence[Place | None]) -> "Summary | None":
        """Sum up; None if no job has such a place."""
        known = [place for place in places if place]
        if not known:
            return None
        ratios = [place.behind for place in known]
        counts = Counter(f"{one.name} in {one.framework}" if one.framework else one.name for one in known)
        return cls(dict(counts.most_common()), min(ratios), max(ratios), geometric_mean(ratios), len(known))


def today_sweeps(sweep: str) -> dict[str, SweepOverrides]:
    """Return a figure's sweeps of strategies as frameworks run them today, by label."""
    megatron, fsdp = (
        yaml.safe_load((config_tree() / "strategy" / f"{name}.yaml").read_text())[SWITCH_ON]
        for name in ("megatron", "fsdp")
    )
    replicated = (sweep, "strategy=fsdp", *REPLICATED_JOB, *fsdp["sharded"])
    # Interleaved pipelines have no place for an encoder in Megatron-LM, so there megatron_schedules is megatron.
    return {"Megatron": (sweep, "strategy=megatron", *MEGATRON_JOB, *megatron["megatron"])} | {
        label: (*replicated, f"layout.sharding={kind}") for label, kind in SHARDED_LABELS.items()
    }


def with_today(data: pd.DataFrame, today: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a run table with the runs of strategies as frameworks run them, by label: they have names of their own."""
    named = [runs.assign(strategy=f"{label} today", strategy_label=label) for label, runs in today.items()]
    return pd.concat([data.assign(**{TODAY: ""}), *named], ignore_index=True)


def job_rows(data: pd.DataFrame, draws: Mapping[tuple[str, str], Mapping[str, Times]] = {}) -> list[JobRow]:
    """A row for every job of a run table with ``SIZES``, in the order of the table.

    ``draws``: seconds by posterior draw of strategies, by model and workload (``posterior.times_of``).
    """
    labels = {column: names(data, column) for column in ("strategy", *JOB)}
    stated = (labels["strategy"], frameworks(data), families(data))
    rows = []
    for (model, workload), comparison in compared(data, JOB).items():
        first = data[(data["model"] == model) & (data["workload"] == workload)].iloc[0]
        places = places_of(comparison, *stated, draws.get((model, workload), {}))
        rows.append(
            JobRow(
                labels["model"][model],
                labels["workload"][workload],
                cluster_label(str(first["cluster"])),
                first["batch"] / (first["nodes"] * first["gpus_per_node"]),
                next(iter(places.values()), None),
                published(places.values()),
                today(places.values()),
                places.get(BASELINE),
                [place.name for place in [*places.values()][1:] if place.ties and not place.framework],
            )
        )
    return rows


def ahead(rows: Sequence[JobRow]) -> dict[str, Any]:
    """Return who is ahead over all jobs as plain values; a template words them (``sentences.jinja``)."""
    kinds = {kind: Summary.of([getattr(row, kind) for row in rows]) for kind in ("fastest", "published", "today")}
    tied = sum(bool(row.tied) for row in rows)
    return {"num_jobs": len(rows), "num_tied": tied} | {k: asdict(one) if one else None for k, one in kinds.items()}


def jobs_markdown(rows: Sequence[JobRow]) -> str:
    """The rows as text; the fastest and strategies that tie with it are bold."""
    heading = ["model, workload", "GPUs", "samples per GPU", "fastest", "fastest published", "in a framework today"]
    heading += ["LPT", "ties"]
    table = [
        [
            f"{row.model} {row.workload}",
            row.cluster,
            f"{row.samples_per_gpu:g}",
            _cell(row.fastest),
            _cell(row.published),
            _cell(row.today, f" ({row.today.framework})" if row.today else ""),
            _cell(row.baseline),
            listing(row.tied) if row.tied else "none",
        ]
        for row in rows
    ]
    return markdown_table(heading, table, right=heading[2:3])


def _cell(place: Place | None, where: str = "") -> str:
    if place is None:
        return "no result"
    mark = "**" if place.ties else ""
    behind = f", {times(place.behind)}" if place.behind != 1 else ""
    return f"{mark}{place.name}{where} {seconds(place.time_s)} s{mark}{behind}"
