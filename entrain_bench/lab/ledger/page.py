"""Predicted against published runs: tables of errors, and ``calibration.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.labels import MODEL_ERROR, ModelError
from entrain_bench.answers.statistics import kendall_tau
from entrain_bench.answers.text import load_template
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.lab.ledger.fit import (
    OF_KERNELS,
    Calibration,
    Ledger,
    complete_ledger,
    fit_ledger,
    fit_points,
    kernel_point,
    with_constants,
)
from entrain_bench.lab.ledger.jobs import OK, OOM, load_book, read_rows
from entrain_bench.lab.ledger.predict import OPEN, case_maker, make_entries, predictor
from entrain_bench.run.study import Output, Study

NEAR = 0.10
# Runs of a group from which their order tells something.
FEWEST_LAYOUTS = 5
# Columns that are written.
COLUMNS = (
    *("source", "row", "published_s", "predicted_s", "ratio", "published_gib", "predicted_gib"),
    *("outcome", "predicted_outcome", "status", "reason", "least_predicted_s", "greatest_predicted_s"),
)
OF_ERRORS = ("timed", "median ratio", "median error", "within 10%", "width")
# Columns that runs have in common, by name.
GROUPS = {"model": "kind", "TP": "tp", "sequence": "seq_len"} | {
    "attention": "attention_kernel",
    "recomputation": "recompute",
}
# Columns that runs of one job share, and those that one set of kernels adds; layouts of such runs are compared.
JOB = ("source", "model", "seq_len", "gpus", "global_batch", "gpu_type")
KERNELS = ("attention_kernel", "rmsnorm_kernel", "sequence_parallel", "zero_stage", "software")

# Title and a table of texts.
type Table = tuple[str, pd.DataFrame]


def make_tables(frame: pd.DataFrame, names: Mapping[str, str]) -> Iterator[Table]:
    """Return tables of rows' lines: by source, by common settings of runs, orders of layouts, and omitted rows.

    ``names`` are of sources. Rows that set a constant are in the first alone.
    """
    yield "Sources", sources_table(frame, names)
    frame = frame[frame["sets"] == ""]
    for name, column in GROUPS.items():
        # Numbers in their order, then texts in theirs.
        ordered = frame[frame["ratio"].notna()].sort_values(column, kind="stable")
        groups = ordered.groupby(ordered[column].map(_label), sort=False)
        if len(groups) > 1:
            yield f"By {name}", pd.DataFrame({name: str(label), **_errors(group)} for label, group in groups)
    if peaks := [*_peaks(frame)]:
        yield "Peaks by model", pd.DataFrame(peaks)
    if orders := [*_orders(frame)]:
        yield "Order of layouts", pd.DataFrame(orders)
    if counted := frame.loc[frame["reason"] != "", "reason"].value_counts().to_dict():
        reasons = sorted(counted, key=lambda reason: (-counted[reason], reason))
        yield "Rows left out", pd.DataFrame({"reason": reason, "rows": str(counted[reason])} for reason in reasons)


def _peaks(frame: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Errors of memory peaks by kind of model."""
    for kind, group in frame[frame["memory_ratio"].notna()].groupby("kind"):
        sizes = (group["memory_ratio"].astype(float) - 1.0).abs()
        shown = {"median error": f"{sizes.median():.1%}", "within 10%": f"{(sizes <= NEAR).mean():.0%}"}
        yield {"model": str(kind), "peaks": f"{len(group):,}", **shown}


def _label(value: Any) -> str:
    if pd.isna(value) or value == "":
        return "not stated"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def sources_table(frame: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """A row for every source in the order of the rows, and one of all. Rows that set a constant have their own."""
    rows = []
    held_out = frame[frame["sets"] == ""]
    for (name, sets), group in [*frame.groupby(["source", "sets"], sort=False), (("all", ""), held_out)]:
        peaks = (group["memory_ratio"].dropna().astype(float) - 1.0).abs()
        peak = "" if peaks.empty or name == "all" else f"{peaks.median():.0%}"
        source = names.get(str(name), str(name)) + (f": {sets} fitted to these" if sets else "")
        shown = {"source": source, "rows": f"{len(group):,}"}
        rows.append(shown | _errors(group) | {"fits or not": _fits(group), "peak error": peak})
    return pd.DataFrame(rows)


def _errors(group: pd.DataFrame) -> dict[str, str]:
    """Runs that have both times, and of them ``OF_ERRORS``."""
    timed = group[group["ratio"].notna()]
    if timed.empty:
        return dict.fromkeys(OF_ERRORS, "") | {"timed": "0"}
    ratios = timed["ratio"].astype(float)
    sizes = (ratios - 1.0).abs()
    width = (timed["greatest_predicted_s"] / timed["least_predicted_s"] - 1.0).astype(float).median()
    shown = f"{ratios.median():.3f}", f"{sizes.median():.1%}", f"{(sizes <= NEAR).mean():.0%}", f"{width:.0%}"
    return dict(zip(OF_ERRORS, (f"{len(timed):,}", *shown), strict=True))


def _fits(group: pd.DataFrame) -> str:
    """Return how many decided fits are predicted correctly, and how many depend on open values of rows."""
    predicted = group[group["outcome"].isin([OK, OOM]) & (group["predicted_outcome"] != "")]
    is_open = predicted["predicted_outcome"] == OPEN
    decided = predicted[~is_open]
    if decided.empty:
        return ""
    right = (decided["outcome"] == decided["predicted_outcome"]).sum()
    return f"{right} of {len(decided)}" + (f", {is_open.sum()} open" if is_open.any() else "")


def _orders(frame: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Kendall's tau over the layouts of each job that a source timed in several, one set of kernels at a time.

    ``spread``: how much slower the slowest is than the fastest; the last column, the one that is predicted to be.
    """
    timed = frame[frame["ratio"].notna()]
    for _, runs in timed.groupby([*JOB, *KERNELS], sort=False, dropna=False):
        if len(runs) < FEWEST_LAYOUTS:
            continue
        published = runs["published_s"].astype(float)
        # Equal predictions stay equal, also if ratios to published times round differently.
        predicted = decisive(published.to_numpy(np.float64) * runs["middle_ratio"].to_numpy(np.float64))
        row = runs.iloc[0]
        parts = [row["model"], f"{row['seq_len']:.0f} tokens", f"{row['gpus']:.0f} GPUs", row["attention_kernel"]]
        if row["sequence_parallel"] is not None:
            parts.append(f"sequence parallelism {'on' if row['sequence_parallel'] else 'off'}")
        yield {
            "job": ", ".join(filter(None, parts)),
            "layouts": str(len(runs)),
            "spread": f"{published.max() / published.min() - 1.0:.0%}",
            "Kendall's tau": f"{kendall_tau(published.tolist(), predicted.tolist()):.2f}",
            "lost by predicted best": f"{published.iloc[int(predicted.argmin())] / published.min() - 1.0:.1%}",
        }


def constants_table(study: Calibration) -> Table:
    """Return constants by device: prior, its reason, and fitted value (standard deviations of the log)."""
    problem = study.fit.problem
    spread = np.sqrt(np.diag(study.fit.covariance)).reshape(study.fit.at.shape)
    rows = []
    for index, constant in enumerate(problem.constants):
        row = {
            "constant": f"{constant.place}.{constant.field}",
            "expected": f"{constant.usual:g} ({constant.spread:.0%})",
        }
        for number, device in enumerate(problem.devices):
            fitted = constant.value(float(study.fit.factors(device)[index]))
            row[device] = f"{fitted:.2g} ({spread[number, index]:.0%})"
        rows.append(row | {"expected because": constant.why})
    title = f"Fitted constants (standard deviation); error of a source left out: {100 * study.fit.error:.1f}%"
    return title, pd.DataFrame(rows)


def kernels_table(ledger: Ledger) -> Table:
    """Constants fitted to each device's kernels, and errors of the committed constants."""
    rows = []
    for (device, kind), of_kind in groupby(ledger.kernels, key=attrgetter("device", "kind")):
        group = [*of_kind]
        constants = OF_KERNELS[kind]
        changes = partial(with_constants, constants)
        fit = fit_points([kernel_point(row, changes) for row in group], constants, iterations=4)
        fitted = zip(constants, np.exp(fit.at[0]).tolist(), strict=True)
        errors = [abs(row.predicted_s() / row.published_s - 1.0) for row in group]
        row = {"kernels": f"{device}, {kind}", "number": str(len(errors)), "median error": f"{median(errors):.0%}"}
        row |= {"largest error": f"{max(errors):.0%}"}
        rows.append(row | {"fitted": ", ".join(f"{one.field} {one.value(factor):.2g}" for one, factor in fitted)})
    return "Kernels", pd.DataFrame(rows)


def forwards_table(ledger: Ledger) -> Table:
    """Published ranges and predicted times of forwards."""
    rows = []
    for forward in ledger.forwards:
        predicted_ms = forward.predicted_ms()
        rows.append(
            {
                "forward": f"{forward.workload}, {forward.model}, {forward.module}",
                "published (ms)": f"{forward.least_ms:.0f} to {forward.most_ms:.0f}",
                "predicted (ms)": f"{predicted_ms:.0f}",
                "inside": "yes" if forward.least_ms <= predicted_ms <= forward.most_ms else "no",
            }
        )
    return "Forwards on the A40", pd.DataFrame(rows)


def model_error(frame: pd.DataFrame) -> ModelError:
    """Return the model error that figures state, of dense models without encoders, from the middle of ranges."""
    sizes = (frame.loc[frame["fitted"], "middle_ratio"].dropna().astype(float) - 1.0).abs()
    return ModelError(round(float(sizes.median()), 3), round(float((sizes <= NEAR).mean()), 2), len(sizes))


# The page, and its model error alone, for pages that show no table.
NAME = "calibration.md"
ERROR = "tables/model_error.md"


def calibration_output() -> Output:
    """The document; it needs no run."""
    details = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((config_tree() / "ledger").iterdir())]
    return Output("calibration", [], write_calibration, [NAME], files=[ERROR], details=details)


def write_calibration(study: Study) -> str:
    """Write ``calibration.md`` and its model error; return a difference from the error that figures state."""
    composer = Composer()
    book = load_book()
    make = case_maker(composer)
    entries = (entry for path in book.tables for entry in make_entries(read_rows(path), book, make))
    page, error = make_page(complete_ledger(entries, composer))
    write_atomically(study.results.root / NAME, page.encode())
    write_atomically(study.results.root / ERROR, f"{error.sentence}\n".encode())
    return "" if error == MODEL_ERROR else f"answers/labels.py: MODEL_ERROR must be {error!r}"


def make_page(ledger: Ledger) -> tuple[str, ModelError]:
    """Fit the constants; return the text of the document, and the model error."""
    fitted = fit_ledger(ledger)
    left_out = pd.DataFrame(fitted.left_out(ledger))
    predict = predictor()
    names = {name: source.name for name, source in load_book().sources.items()}
    committed = sources_table(pd.DataFrame(entry.line(predict) for entry in ledger.entries), names)
    error = model_error(left_out)
    tables = (
        *make_tables(left_out, names),
        ("Sources with the committed constants", committed),
        constants_table(fitted),
        forwards_table(ledger),
        kernels_table(ledger),
    )
    stated = {"model_error": error.sentence, "nearest": _errors(left_out[left_out["sets"] == ""])}
    return load_template("calibration.md.j2").render(tables=tables, **stated) + "\n", error
