"""Tables of runs compared to the last digit."""

from __future__ import annotations

import pandas as pd
import pytest

from entrain_bench.answers.compare import drifts
from entrain_bench.base.errors import UserError


def table(*rows: dict[str, str]) -> pd.DataFrame:
    base = {"strategy": "a", "workload": "w", "model": "m", "cluster": "c", "seed": "0", "status": "ok", "reason": ""}
    base |= {"layout_tp": "2", "iteration_time_s": "1.5", "mfu": "0.25", "planning_time_s": "0.1", "key": "k"}
    base |= {"assignment_time_s": "0.0"}
    return pd.DataFrame([{**base, **row} for row in rows])


def test_wall_times_and_keys_are_no_drift() -> None:
    one = table({}, {"seed": "1"})
    assert drifts(one, table({"seed": "1"}, {"planning_time_s": "9", "key": "other"})) == []


def test_a_value_that_moved_is_named_with_its_run() -> None:
    (line,) = drifts(table({}, {"seed": "1"}), table({}, {"seed": "1", "iteration_time_s": "1.5000000000000002"}))
    assert line == "a w m c 1: iteration_time_s 1.5 -> 1.5000000000000002 (+2.2e-16)"
    (line,) = drifts(table({}), table({"status": "failed"}))
    assert line == "a w m c 0: status ok -> failed"


def test_runs_that_are_gone_and_new_are_told_apart_by_what_differs() -> None:
    found = drifts(table({}, {"layout_tp": "4"}), table({}, {"layout_tp": "8"}))
    assert found == ["a w m c 0 layout_tp=4: gone", "a w m c 0 layout_tp=8: new"]


def test_tables_that_cannot_be_compared() -> None:
    with pytest.raises(UserError, match="duplicate run"):
        drifts(table({}, {}), table({}))


def test_a_setting_that_was_not_known_had_its_default() -> None:
    after = table({"new": "false"}, {"new": "false", "seed": "1"}, {"new": "true"})
    found = drifts(table({}, {"seed": "1", "iteration_time_s": "3.0"}), after)
    assert found == [
        "column new: new",
        "a w m c 1 new=false: iteration_time_s 3.0 -> 1.5 (-5.0e-01)",
        "a w m c 0 new=true: new",
    ]
    assert drifts(table({}), table({}).drop(columns="mfu")) == ["column mfu: gone"]
    # A folder without a reference.
    assert drifts(table({})[:0], table({})) == ["a w m c 0: new"]


def test_a_metric_that_a_run_is_older_than_has_not_moved() -> None:
    older, newer = table({}, {"seed": "1"}), table({}, {"seed": "1", "mfu": "0.5"})
    assert drifts(older, newer.assign(time_step_share="0.1")) == ["a w m c 1: mfu 0.25 -> 0.5 (+1.0e+00)"]
    # A table may hold runs of several ages; one that is there has moved, one that is gone as well.
    some = older.assign(time_step_share=["", "0.1"])
    assert drifts(some, newer.assign(mfu="0.25", time_step_share="0.2")) == [
        "a w m c 1: time_step_share 0.1 -> 0.2 (+1.0e+00)"
    ]
    assert len(drifts(some, older)) == 1
    # Without a result a run has no metric that could be missing.
    failed = table({"status": "failed", "mfu": ""})
    assert [line.split()[5] for line in drifts(failed, table({}))] == ["status", "mfu"]
