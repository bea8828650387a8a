"""Predicted against measured: what programs and pairs of strategies come to, of the rows of ``fidelity.csv``."""

from __future__ import annotations

import json
from itertools import combinations

import pandas as pd
from scipy.stats import kendalltau

from entrain_bench.answers.statistics import LEVEL, ratio_chance, ratio_interval

GROUP = ["num_ranks", "workload", "seed"]


def pair_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a pair of strategies of a group: how much faster the second is, measured and predicted.

    The measured one has its 95% interval, ``low`` to ``high``, and the chance to measure as much where nothing is
    gained. ``sign_error``: the interval excludes 1, and the prediction is on the other side.
    """
    pairs = []
    for group, members in rows.groupby(GROUP, sort=False):
        for one, other in combinations(members.to_dict("records"), 2):
            # Repetition by repetition, for strategies took turns.
            times = [json.loads(str(row["repetitions_s"])) for row in (one, other)]
            measured = ratio_interval(*times)
            predicted = one["predicted_s"] / other["predicted_s"]
            names = dict(zip(GROUP, group, strict=True)) | {"slow": one["strategy"], "fast": other["strategy"]}
            ends = {"measured_speedup": measured.mean, "low": measured.low, "high": measured.high}
            error = {"predicted_speedup": predicted, "error": predicted / measured.mean - 1.0}
            wrong = measured.excludes(1.0) and (measured.mean - 1.0) * (predicted - 1.0) < 0
            pairs.append({**names, **ends, "chance": ratio_chance(*times), **error, "sign_error": wrong})
    return pd.DataFrame(pairs)


def rank_correlations(rows: pd.DataFrame) -> pd.Series:
    """Kendall's tau of measured and predicted iteration times over the strategies of each group."""
    groups = rows.groupby(GROUP, sort=False)
    return pd.Series(
        {name: kendalltau(members["measured_s"], members["predicted_s"]).statistic for name, members in groups}
    )


def summary(rows: pd.DataFrame, pairs: pd.DataFrame) -> dict[str, float]:
    """Return the numbers with targets, and further numbers.

    Of many pairs without any difference, intervals of one in twenty exclude 1. ``sure_sign_errors`` are those of
    differences that are significant for all pairs together (Bonferroni).
    """
    names = ("iteration_error", "core_error", "replay_error", "action_error", "repeat_error", "memory_error")
    # A file of an earlier version has no ``repeat_error``.
    errors = {name: float(rows[name].abs().median()) for name in names if name in rows}
    return {
        "num_programs": float(len(rows)),
        **errors,
        "bubble_error": float((rows["predicted_bubble"] - rows["measured_bubble"]).abs().median()),
        "speedup_error": float(pairs["error"].abs().median()),
        "sign_errors": float(pairs["sign_error"].sum()),
        "sure_sign_errors": float((pairs["sign_error"] & (pairs["chance"] < LEVEL / len(pairs))).sum()),
        "num_pairs": float(len(pairs)),
        "kendall_tau": float(rank_correlations(rows).mean()),
        "noise": float(rows["noise"].median()),
    }
