"""Who is ahead on each job: the fastest of all, the fastest published system, the simple baseline, and ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from entrain_bench.answers.comparison import Comparison, Verdict
from entrain_bench.answers.labels import OURS, cluster_label, families, names
from entrain_bench.answers.posterior import COVERAGE, Chance
from entrain_bench.answers.tables import JOB, compared
from entrain_bench.answers.text import listing, markdown_table, seconds

# Columns of the run table that say how many samples a GPU has.
SIZES = {"batch": "global_batch", "nodes": "cluster.num_nodes", "gpus_per_node": "cluster.gpus_per_node"}
PUBLISHED = "published"
# The rival that takes thirty lines: every sample dealt by longest processing time.
BASELINE = "lpt"
# A strategy ties with the fastest if it is the fastest in at least this share of the posterior draws: the part of them
# that lies beyond one end of the interval of a lead.
CLOSE = (1 - COVERAGE) / 2


@dataclass(frozen=True, slots=True)
class Place:
    """A strategy in a job: mean seconds per iteration, and its time over the fastest's (1 for the fastest).

    ``ties``: it is not told apart from the fastest, by paired seeds or under the posterior of the constants.
    """

    strategy: str
    time_s: float
    behind: float
    ties: bool


@dataclass(frozen=True, slots=True)
class JobRow:
    """The strategies that are ahead on one job; a place is None if no such strategy has a result at every seed."""

    model: str
    workload: str
    cluster: str
    samples_per_gpu: float
    fastest: Place | None
    published: Place | None
    baseline: Place | None
    ours: Place | None
    tied: Sequence[str]  # labels of all others that tie with the fastest, in their order


def job_rows(data: pd.DataFrame, odds: Mapping[tuple[str, str], Mapping[str, Chance]] = {}) -> list[JobRow]:
    """A row for every job of a run table with ``SIZES``, in the order of the table; ``odds`` by model and workload."""
    labels = {column: names(data, column) for column in ("strategy", *JOB)}
    family = families(data)
    rows = []
    for (model, workload), comparison in compared(data, JOB).items():
        first = data[(data["model"] == model) & (data["workload"] == workload)].iloc[0]
        places = _places(comparison, odds.get((model, workload), {}), labels["strategy"])
        of = {
            kind: next((place for name, place in places.items() if family[name] == kind), None)
            for kind in (PUBLISHED, OURS)
        }
        rows.append(
            JobRow(
                labels["model"][model],
                labels["workload"][workload],
                cluster_label(str(first["cluster"])),
                first["batch"] / (first["nodes"] * first["gpus_per_node"]),
                next(iter(places.values()), None),
                of[PUBLISHED],
                places.get(BASELINE),
                of[OURS],
                [place.strategy for place in [*places.values()][1:] if place.ties],
            )
        )
    return rows


def _places(comparison: Comparison[str], chances: Mapping[str, Chance], labels: Mapping[str, str]) -> dict[str, Place]:
    """The places of all strategies with a result at every seed, the fastest first."""
    places = {}
    for name in comparison.ranked:
        standing = comparison.standings[name]
        if standing.time is None or standing.verdict == Verdict.FAILED:
            continue
        likely = name in chances and chances[name].probability >= CLOSE
        behind = standing.behind.mean if standing.behind else 1.0
        places[name] = Place(labels[name], standing.time.mean, behind, name in comparison.best or likely)
    return places


def jobs_markdown(rows: Sequence[JobRow]) -> str:
    """The rows as text; the fastest is bold, and so is whoever ties with it."""
    heading = ["model, workload", "GPUs", "samples per GPU", "fastest", "published", "LPT", "ours", "ties"]
    table = [
        [
            f"{row.model} {row.workload}",
            row.cluster,
            f"{row.samples_per_gpu:g}",
            *(_cell(place, place == row.fastest) for place in (row.fastest, row.published, row.baseline, row.ours)),
            listing(row.tied) if row.tied else "none",
        ]
        for row in rows
    ]
    return markdown_table(heading, table, right=heading[2:3])


def _cell(place: Place | None, fastest: bool) -> str:
    if place is None:
        return "no result"
    behind = "" if fastest else f", {place.behind:.2f}x"
    mark = "**" if fastest or place.ties else ""
    return f"{mark}{place.strategy} {seconds(place.time_s)} s{mark}{behind}"
