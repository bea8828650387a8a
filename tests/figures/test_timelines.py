"""Figures of timelines on made-up ones: which replica, deferred parts, memory."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from entrain_bench.answers.timelines import bars_of, kinds_of, memory_of, peak_replica, replica_lanes, slowest_replica
from entrain_bench.base.errors import UserError
from support.figures import GIB, MODELS, TRACES, actions, drawn, table, written


def test_the_gantt_shows_the_slowest_replica_and_its_deferred_parts() -> None:
    frame = actions(["first"], ["coco"])
    shown = slowest_replica(frame[frame["model"] == MODELS[0]])
    assert set(shown["replica"]) == {1, -1}
    assert sorted(shown["lane"].unique()) == [0, 1, 2, 3]
    assert set(shown[shown["deferred"]]["part"]) == {1}
    assert set(shown[shown["deferred"]]["side"]) == {"encoder"}
    assert shown["deferred"].sum() == 3 * 2 * 2  # microbatches, stages, passes
    assert {"Vision forward", "Vision backward, deferred", "LLM forward"} < {*kinds_of(shown)}


@pytest.mark.wide
def test_the_gantt_shows_the_ranks_of_a_widest_group_with_its_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    # On four ranks: a group of two on ranks 2 and 3, then single ranks; ranks 0 and 1 end last.
    passes = [(2, 5, 0.0, 1.0, "ranks 2-3 cp2"), (3, 5, 0.0, 1.0, "ranks 2-3 cp2"), (2, 2, 1.0, 2.0, "rank 2")]
    passes += [(3, 3, 1.0, 3.0, "rank 3"), (0, 0, 0.0, 9.0, "rank 0"), (1, 1, 0.0, 9.0, "rank 1")]
    frame = pd.DataFrame(passes, columns=["lane", "replica", "start_s", "end_s", "group"])
    labels = {"strategy": "first", "side": "llm", "module": "llm", "stage": 0, "part": 0, "pass": "forward"}
    frame = frame.assign(**labels, microbatch=frame["replica"], rank=frame["lane"], num_ranks=1)
    figure, shown, _ = drawn("schedule_gantt", bars_of(table(["first"], TRACES[:1]), frame))
    assert shown["group"].tolist() == ["ranks 2-3 cp2"] * 2 + ["rank 2", "rank 3"]
    texts = written(figure, monkeypatch)
    assert {"Rank 2", "Rank 3", "cp2"} <= set(texts)
    assert not {"Rank 0", "Rank 1"} & set(texts)


@pytest.mark.wide
def test_the_gantt_says_why_a_strategy_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first", "second"], status=lambda *case: "failed" if case[0] == "second" else "ok")
    figure, _, _ = drawn("schedule_gantt", bars_of(data, actions(["first"], TRACES[:1])))
    assert "failed: told so" in " ".join(" ".join(written(figure, monkeypatch)).split())
    with pytest.raises(UserError, match="timeline"):
        bars_of(data, pd.DataFrame(columns=["strategy", "workload", "model"]))


def test_memory_is_that_of_the_replica_with_the_highest_peak_and_changes_when_actions_end() -> None:
    frame = actions(["first"], ["coco"])
    shown = peak_replica(frame[frame["model"] == MODELS[0]])
    assert shown["holds"].groupby(shown["lane"]).unique().map(list).tolist() == [["encoder"]] * 2 + [["llm"]] * 2
    lane = shown[shown["lane"] == 0]
    assert lane["bytes"].max() == (20 + 5 + 1) * GIB
    assert np.all(np.diff(lane["time_s"]) >= 0)
    # The first backward ends at 1.6 s and frees a GiB, which the next forward takes again at 2 s, and one more.
    first = lane[lane["time_s"] <= 2.0][["time_s", "bytes"]].to_numpy().tolist()
    assert first == [[0.0, 21 * GIB], [pytest.approx(1.6), 20 * GIB], [2.0, 22 * GIB]]
    with pytest.raises(UserError, match="memory"):
        memory_of(table(["first"]), frame.drop(columns="memory_bytes"))


def test_a_replica_is_the_lanes_of_the_llm_and_of_the_encoders_that_feed_it() -> None:
    columns = ["lane", "side", "replica"]
    # Two encoder replicas on lanes 0 and 1 feed four LLM replicas on lanes 2 to 5.
    islands = [(0, "encoder", 0), (1, "encoder", 1), *((2 + r, "llm", r) for r in range(4)), (1, "encoder", -1)]
    shown = replica_lanes(pd.DataFrame(islands, columns=columns), 2)
    assert shown.to_numpy().tolist() == [[0, "encoder", 1], [1, "llm", 2], [0, "encoder", -1]]
    # Colocated: every lane of the LLM replica encodes something itself.
    both = [(lane, "encoder", lane) for lane in range(4)] + [(lane, "llm", lane // 2) for lane in range(4)]
    shown = replica_lanes(pd.DataFrame(both, columns=columns), 1)
    assert shown.to_numpy().tolist() == [[0, "encoder", 2], [1, "encoder", 3], [0, "llm", 1], [1, "llm", 1]]
