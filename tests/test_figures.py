"""Figures on synthetic data: what they show, how missing data shows, and that the same data gives the same bytes."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.text import Text

import experiments
from entrain_bench.compose import compose_cells
from entrain_bench.errors import UserError
from entrain_bench.figures import forward_variability, memory_over_time, schedule_gantt, sensitivity
from entrain_bench.figures._cli import discover, main
from entrain_bench.figures._data import Runs, replica_lanes
from entrain_bench.figures._labels import distinct_labels, in_order, label_columns, names, orders
from entrain_bench.figures._runner import render
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, FONT_PT, SINGLE_COLUMN_IN, STYLE, strategy_colours

EXPERIMENTS = Path(experiments.__file__).parent
NAMES = list(discover())
TRACES, MODELS = ["chartqa", "opencqa_ocr", "coco", "mathvision", "sroie"], ["qwen25vl_llama3_1b", "qwen25vl_llama3_3b"]
ALL_TRACES = [*TRACES, "chartqa_qa", "nextqa", "librispeech"]
MANY = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "a_longer_name", "theta"]
GIB = 2**30


def table(
    strategies: Sequence[str], traces: Sequence[str] = TRACES[1:3], status: Callable[[str, str], str] = lambda *_: "ok"
) -> pd.DataFrame:
    """Runs of every strategy, trace, model and three seeds."""
    rows = []
    for strategy, workload, model, seed in itertools.product(strategies, traces, MODELS, range(3)):
        state = status(strategy, workload)
        scale = 30.0 ** (TRACES.index(workload) / 4) * (1 + 0.01 * seed + 0.1 * strategies.index(strategy))
        numbers = {
            "iteration_time_s": scale,
            "samples_per_s": 512 / scale,
            "tflops_per_gpu": 60 / (1 + strategies.index(strategy)),
            "bubble_ratio": 0.3 + 0.05 * strategies.index(strategy) + 0.01 * seed,
            "lower_bound_s": 0.6 * scale,
            "encoder_forward_std_ms": scale,
            "llm_forward_std_ms": scale / 3,
        }
        labels = {"strategy": strategy, "workload": workload, "model": model, "seed": seed}
        outcome: dict[str, Any] = numbers if state == "ok" else {"reason": "told so"}
        rows.append({"reason": ""} | labels | {"status": state} | outcome)
    return pd.DataFrame(rows)


def actions(strategies: Sequence[str], workloads: Sequence[str] = TRACES[1:3]) -> pd.DataFrame:
    """A made-up timeline: 2 replicas of 2 encoder and 2 LLM stages, 6 microbatches."""
    rows = []
    for strategy, workload, model in itertools.product(strategies, workloads, MODELS):
        for replica, stage, microbatch, backward in itertools.product(range(2), range(4), range(6), range(2)):
            start = 2.0 * microbatch + backward + 0.1 * stage
            rows.append(
                {
                    "strategy": strategy,
                    "workload": workload,
                    "model": model,
                    "side": "encoder" if stage < 2 else "llm",
                    "lane": 4 * replica + stage,
                    "module": "vision" if stage < 2 else "llm",
                    "stage": stage % 2,
                    "replica": replica,
                    "microbatch": microbatch // 2 if stage < 2 else microbatch,
                    "part": microbatch % 2 if stage < 2 else 0,
                    "pass": "backward" if backward else "forward",
                    "start_s": start,
                    "end_s": start + 0.5 + 0.1 * replica,
                    "memory_bytes": (20.0 + microbatch + replica) * GIB,
                    "memory_after_bytes": (20.0 + microbatch + replica - backward) * GIB,
                }
            )
    frame = pd.DataFrame(rows)
    step = frame[(frame["microbatch"] == 0) & (frame["part"] == 0) & frame["pass"].eq("forward")]
    last: dict[str, Any] = {"pass": "optimizer", "start_s": 13.0, "end_s": 14.0}
    return pd.concat([frame, step.assign(replica=-1, microbatch=-1, part=-1, **last)], ignore_index=True)


def views(traces: Sequence[str]) -> Runs:
    """One strategy simulated, measured and replayed."""
    timeline = actions(["one"], traces)
    timeline = timeline[timeline["model"] == MODELS[0]]
    runs = pd.DataFrame({"harness": ["simulate", "train"], "status": "ok", "reason": ""})
    return Runs(runs, pd.concat([timeline.assign(view=view) for view in ("simulate", "train", "replay")]))


def shares(traces: Sequence[str]) -> pd.DataFrame:
    rows = itertools.product(traces, [0, 1, 32, 1024], [0.05, 0.25, 0.5, 0.75, 0.95])
    frame = pd.DataFrame(rows, columns=["workload", "batch_size", "probability"])
    return frame.assign(num_draws=9, encoder_share=0.5 + (frame["probability"] - 0.5) / (1 + frame["batch_size"]))


def tokens(traces: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame(itertools.product(traces, [0.0, 0.5, 1.0]), columns=["workload", "probability"])
    # Half of the samples have no encoder tokens.
    return frame.assign(encoder_tokens=[0, 0, 900] * len(traces), llm_tokens=[10, 300, 70000] * len(traces))


def allocated(traces: Sequence[str]) -> pd.DataFrame:
    rows = itertools.product(MODELS, traces, [1, 4, 16], range(1, 8))
    frame = pd.DataFrame(rows, columns=["model", "workload", "batch_size", "encoder_stages"])
    share = np.where(frame["encoder_stages"] == 5, 0.9, np.where(frame["encoder_stages"] == 4, 0.1, 0.0))
    return frame.assign(
        llm_stages=8 - frame["encoder_stages"], share=share, num_draws=59, stable_batch=[0, 64] * (len(frame) // 2)
    )


def errors(strategies: Sequence[str], traces: Sequence[str]) -> pd.DataFrame:
    """Runs that take twice as long with an error of 0.5 as without."""
    parts = [table(strategies, traces).assign(belief_error=error) for error in (0.0, 0.25, 0.5)]
    data = pd.concat(parts, ignore_index=True)
    return data.assign(iteration_time_s=data["iteration_time_s"] * (1 + 2 * data["belief_error"]))


def splits(traces: Sequence[str]) -> pd.DataFrame:
    """Every split of 8 stages, 5 being the best; the planner's own is 4."""
    parts = []
    for forced in [None, *range(2, 8)]:
        stages = forced or 4
        rows = table(["one"], traces).assign(forced_stages=forced, encoder_stages=stages)
        parts.append(rows.assign(iteration_time_s=rows["iteration_time_s"] * (1 + 0.1 * abs(stages - 5))))
    return pd.concat(parts, ignore_index=True)


def contexts(strategies: Sequence[str]) -> pd.DataFrame:
    parts = [
        table(strategies, TRACES[:1]).assign(sequence_tokens=length, vision_share=share)
        for length, share in itertools.product([8192, 16384, 32768, 65536], [0.25, 0.5, 0.75])
    ]
    data = pd.concat(parts, ignore_index=True)
    return data[data["model"] == MODELS[0]]


def data_of(name: str, strategies: Sequence[str], traces: Sequence[str]) -> Any:
    """Data for any figure."""
    made: dict[str, Callable[[], Any]] = {
        "token_distributions": lambda: tokens(traces),
        "workload_ratio": lambda: shares(traces),
        "allocations": lambda: allocated(traces[:6]),
        "iteration_time": lambda: table(strategies, traces[:5]),
        "forward_variability": lambda: Runs(table(strategies, traces[:5]), actions(strategies, traces[:5])),
        "schedule_gantt": lambda: Runs(table(strategies, traces[:1]), actions(strategies, traces[:1])),
        "measured_gantt": lambda: views(traces[:1]),
        "memory_over_time": lambda: Runs(table(strategies, traces[:1]), actions(strategies, traces[:1])),
        "throughput": lambda: table(strategies, traces[:5]),
        "bubble_ratio": lambda: table(strategies, traces[:3]),
        "misprediction": lambda: errors(strategies, traces[:3]),
        "sensitivity": lambda: splits(traces[:4]),
        "context_length": lambda: contexts(strategies[:3]),
    }
    return made[name]()


def drawn(name: str, data: Any) -> tuple[Figure, pd.DataFrame]:
    with mpl.rc_context(STYLE):
        made: tuple[Figure, pd.DataFrame] = importlib.import_module(f"entrain_bench.figures.{name}").draw(data)
    return made


def texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Every text that is drawn, with its place in pixels; ticks out of range are not drawn."""
    seen = []
    original = Text.draw

    def draw(self: Text, renderer: Any) -> None:
        if self.get_text().strip() and self.get_visible():
            seen.append(self)
        original(self, renderer)

    with monkeypatch.context() as patch, mpl.rc_context(STYLE):
        patch.setattr(Text, "draw", draw)
        figure.draw_without_rendering()
    return {str(id(text)): [text, text.get_window_extent()] for text in seen}


def written(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return [text.get_text() for text, _ in texts(figure, monkeypatch).values()]


def test_every_figure_is_found_and_cites_what_it_corresponds_to() -> None:
    assert len(NAMES) >= 6
    for name in NAMES:
        module = importlib.import_module(f"entrain_bench.figures.{name}")
        assert "arXiv:" in (module.__doc__ or "")
        assert f"experiments/figure/{module.EXPERIMENT}.yaml" in (module.__doc__ or "")


def sweep_of(experiment: str) -> dict[str, Any]:
    sweep: dict[str, Any] = yaml.safe_load((EXPERIMENTS / "figure" / f"{experiment}.yaml").read_text())
    return {key: str(choices) for key, choices in sweep["hydra"]["sweeper"]["params"].items()}


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (EXPERIMENTS / "figure").glob("*.yaml")))
def test_every_sweep_composes(experiment: str) -> None:
    sweep = sweep_of(experiment)
    for group in ("strategy", "workload", "model", "cluster"):
        for choice in sweep.get(group, "").replace("glob(*)", "").split(","):
            assert not choice or (EXPERIMENTS / group / f"{choice}.yaml").is_file(), choice
    few = [f"{key}={choices.split(',')[-1]}" for key, choices in sweep.items() if choices != "glob(*)"]
    swept = [key for key, choices in sweep.items() if choices == "glob(*)"]
    count = len([*(EXPERIMENTS / "strategy").glob("*.yaml")]) if swept else 1
    assert len(compose_cells([f"figure={experiment}", *few], multirun=True)) == count


@pytest.mark.parametrize("experiment", ["iteration_time", "schedule_gantt", "misprediction", "bubble_ratio"])
def test_a_new_strategy_is_compared_without_being_listed(experiment: str) -> None:
    assert sweep_of(experiment)["strategy"] == "glob(*)"


def test_the_runs_of_the_gantt_are_runs_of_the_iteration_times() -> None:
    only = ["workload=opencqa_ocr", "model=qwen25vl_llama3_1b", "seed=0"]
    shared = [cell.config for cell in compose_cells(["figure=iteration_time", *only], multirun=True)]
    assert [cell.config for cell in compose_cells(["figure=schedule_gantt"], multirun=True)] == shared
    assert len(shared) >= 7


@pytest.mark.parametrize("name", NAMES)
def test_the_same_data_gives_the_same_bytes(name: str) -> None:
    module = importlib.import_module(f"entrain_bench.figures.{name}")
    data = data_of(name, MANY[:1], TRACES[:2])
    first, second = (render(lambda: module.draw(data)) for _ in range(2))
    assert first == second
    assert b"CreationDate" not in first["pdf"]
    assert b"/Subtype /Type3" not in first["pdf"]
    assert first["csv"].count(b"\n") > 3


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_fits_a_page_and_its_texts_are_legible(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, _ = drawn(name, data_of(name, MANY, ALL_TRACES))
    assert figure.get_figwidth() in (SINGLE_COLUMN_IN, DOUBLE_COLUMN_IN)
    placed = list(texts(figure, monkeypatch).values())
    assert len(placed) > 10
    page = figure.bbox
    for text, box in placed:
        assert text.get_fontsize() >= FONT_PT, text
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
        assert inside, f"clipped: {text}"
    for (one, a), (other, b) in itertools.combinations(placed, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one} overlaps {other}"


def test_iteration_times_are_means_over_seeds_with_their_spread_and_speedup() -> None:
    _, shown = drawn("iteration_time", table(["first", "second"], TRACES))
    (row,) = shown[
        (shown["workload"] == "chartqa") & (shown["model"] == MODELS[0]) & (shown["strategy"] == "second")
    ].to_dict("records")
    assert [row["least_s"], row["iteration_time_s"], row["most_s"]] == pytest.approx([1.1, 1.11, 1.12])
    assert row["lower_bound_s"] == pytest.approx(0.6 * 1.11)
    assert row["speedup"] == pytest.approx(1.01 / 1.11)


@pytest.mark.parametrize(
    ("name", "status"),
    [("iteration_time", "failed"), ("iteration_time", "skipped"), ("forward_variability", "missing")],
)
def test_a_run_without_result_shows_as_a_gap(name: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first", "second"], status=lambda *case: status if case == ("second", "coco") else "ok")
    times = actions(["first", "second"])
    times = times[(times["strategy"] != "second") | (times["workload"] != "coco")]
    figure, shown = drawn(name, data if name == "iteration_time" else Runs(data, times))
    assert written(figure, monkeypatch).count(status) == len(MODELS) * (1 if name == "iteration_time" else 2)
    if name == "iteration_time":
        assert set(shown[shown["iteration_time_s"].isna()]["status"]) == {status}


def test_nothing_but_gaps_still_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first"], status=lambda *_: "failed")
    none = pd.DataFrame(columns=["strategy", "workload", "model"])
    for figure, _ in (drawn("iteration_time", data), drawn("forward_variability", Runs(data, none))):
        assert "failed" in written(figure, monkeypatch)


def test_seeds_that_failed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first"])
    data.loc[(data["seed"] == 2) & (data["workload"] == "coco"), "status"] = "failed"
    figure, shown = drawn("iteration_time", data)
    assert written(figure, monkeypatch).count("2 of 3 seeds") == len(MODELS)
    assert shown[shown["workload"] == "coco"]["num_ok"].tolist() == [2, 2]


def test_forward_times_are_summed_over_stages_and_parts_once_an_action() -> None:
    frame = actions(["first"], ["coco"])
    frame = frame[frame["model"] == MODELS[0]]
    twice = pd.concat([frame, frame.assign(lane=frame["lane"] + 100)])
    forward = forward_variability.microbatch_forward(twice).groupby(["side", "replica"])["forward_ms"].apply(list)
    # Two stages of 0.5 s on replica 0 and 0.6 s on replica 1; encoder microbatches are in two parts.
    assert forward["encoder", 0] == pytest.approx([2000.0] * 3)
    assert forward["encoder", 1] == pytest.approx([2400.0] * 3)
    assert forward["llm", 1] == pytest.approx([1200.0] * 6)


def test_the_gantt_shows_the_slowest_replica_and_its_deferred_parts() -> None:
    frame = actions(["first"], ["coco"])
    shown = schedule_gantt.slowest_replica(frame[frame["model"] == MODELS[0]])
    assert set(shown["replica"]) == {1, -1}
    assert sorted(shown["lane"].unique()) == [0, 1, 2, 3]
    assert set(shown[shown["deferred"]]["part"]) == {1}
    assert set(shown[shown["deferred"]]["side"]) == {"encoder"}
    assert shown["deferred"].sum() == 3 * 2 * 2  # microbatches, stages, passes
    assert {"Vision forward", "Vision backward, deferred", "LLM forward"} < set(shown["kind"])


def test_the_gantt_says_why_a_strategy_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first", "second"], status=lambda *case: "failed" if case[0] == "second" else "ok")
    figure, _ = drawn("schedule_gantt", Runs(data, actions(["first"], TRACES[:1])))
    assert "failed: told so" in " ".join(" ".join(written(figure, monkeypatch)).split())
    with pytest.raises(UserError, match="timeline"):
        drawn("schedule_gantt", Runs(data, pd.DataFrame(columns=["strategy", "workload", "model"])))


def test_labels_are_derived_from_names_and_stay_apart() -> None:
    names = ["qwen25vl_llama3_1b", "whisper_qwen25_7b", "tiny", "chartqa", "opencqa_ocr", "x"]
    expected = ["Llama 1B", "Qwen 7B", "Tiny", "ChartQA", "OpenCQA OCR", "X"]
    assert list(distinct_labels(names).values()) == expected
    both = distinct_labels(["qwen25vl_llama3_1b", "qwen25vl_whisper_llama3_1b"])
    assert list(both.values()) == ["Qwen25vl Llama3 1B", "Qwen25vl Whisper Llama3 1B"]


def test_a_label_in_the_yaml_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first", "second"])
    data["workload_label"] = data["workload"].map({"coco": "COCO captions"}).fillna("")
    figure, shown = drawn("iteration_time", data)
    assert {"COCO captions", "OpenCQA OCR"} < set(written(figure, monkeypatch))
    assert "coco" in set(shown["workload"])


def test_unknown_names_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["iteration_tim"]) == 2
    message = capsys.readouterr().err
    assert "did you mean iteration_time?" in message
    assert all(name in message for name in NAMES)
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["allocations", "--results-dir", str(tmp_path / "file")]) == 2
    assert "results_dir=" in capsys.readouterr().err


def test_strategies_stand_in_their_display_order_with_the_same_colour_everywhere() -> None:
    cells = compose_cells(["strategy=entrain,dip,megatron", "model=tiny"], multirun=True)
    rows = pd.DataFrame([{"strategy": cell.config.strategy["name"], **label_columns(cell.config)} for cell in cells])
    unknown = pd.DataFrame([{"strategy": "mine", "strategy_label": "", "strategy_order": None}])
    ordered = in_order(pd.concat([unknown, rows], ignore_index=True))
    assert names(ordered, "strategy") == {"megatron": "Megatron", "entrain": "Entrain", "dip": "DIP", "mine": "Mine"}
    colours = strategy_colours(orders(ordered))
    assert len(set(colours.values())) == 4
    assert strategy_colours(orders(ordered[ordered["strategy"] == "dip"])) == {"dip": colours["dip"]}


@pytest.mark.parametrize("order", ["first", -1])
def test_a_display_order_that_is_no_place_is_named(order: object) -> None:
    (cell,) = compose_cells(["strategy=entrain", "model=tiny"])
    config = replace(cell.config, strategy={**cell.config.strategy, "display_order": order})
    with pytest.raises(UserError, match=f"strategy.display_order={order}: must be"):
        label_columns(config)


def test_times_are_relative_to_those_without_error() -> None:
    _, shown = drawn("misprediction", errors(["first"], TRACES[:1]))
    assert shown.groupby("belief_error")["relative_time"].unique().map(list).to_dict() == {
        0.0: [pytest.approx(1.0)],
        0.25: [pytest.approx(1.5)],
        0.5: [pytest.approx(2.0)],
    }


def test_splits_are_relative_to_the_best_and_the_planners_own_is_marked() -> None:
    _, shown = drawn("sensitivity", splits(TRACES[:1]))
    rows = shown[shown["model"] == MODELS[0]].set_index("encoder_stages")
    assert rows["relative_time"].to_dict() == pytest.approx({2: 1.3, 3: 1.2, 4: 1.1, 5: 1.0, 6: 1.1, 7: 1.2})
    assert rows["planned"].to_dict() == {2: False, 3: False, 4: True, 5: False, 6: False, 7: False}
    assert sensitivity.encoder_stages("llm tp2 cp1 pp3 dp4 layers 9; vision tp2 cp1 pp5 dp4 layers 7", "vision") == 5
    assert sensitivity.encoder_stages("nan", "vision") is None


def test_a_line_without_all_its_points_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = errors(["first", "second"], TRACES[:1])
    data.loc[(data["strategy"] == "second") & (data["belief_error"] == 0.5), ["status", "iteration_time_s"]] = (
        "failed",
        None,
    )
    figure, _ = drawn("misprediction", data)
    assert written(figure, monkeypatch).count("Second: 1 failed") == len(MODELS)


def test_memory_is_that_of_the_replica_with_the_highest_peak_and_changes_when_actions_end() -> None:
    frame = actions(["first"], ["coco"])
    shown = memory_over_time.peak_replica(frame[frame["model"] == MODELS[0]])
    assert shown["holds"].groupby(shown["lane"]).unique().map(list).tolist() == [["encoder"]] * 2 + [["llm"]] * 2
    lane = shown[shown["lane"] == 0]
    assert lane["memory_bytes"].max() == (20 + 5 + 1) * GIB
    assert np.all(np.diff(lane["time_s"]) >= 0)
    # The first backward ends at 1.6 s and frees a GiB, which the next forward takes again at 2 s, and one more.
    first = lane[lane["time_s"] <= 2.0][["time_s", "memory_bytes"]].to_numpy().tolist()
    assert first == [[0.0, 21 * GIB], [pytest.approx(1.6), 20 * GIB], [2.0, 22 * GIB]]
    with pytest.raises(UserError, match="memory"):
        drawn("memory_over_time", Runs(table(["first"]), frame.drop(columns="memory_bytes")))


def test_context_lengths_are_written_in_units_of_1024(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, _ = drawn("context_length", contexts(["first", "second"]))
    assert {"8K", "64K", "Llama 1B, 75 % vision tokens"} < set(written(figure, monkeypatch))


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


def test_a_schedule_that_could_not_be_trained_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    data = views(TRACES[:1])
    failed = data.table.assign(status=["ok", "failed"], reason=["", "no ranks here"])
    figure, shown = drawn("measured_gantt", Runs(failed, data.actions[data.actions["view"] == "simulate"]))
    assert written(figure, monkeypatch).count("failed: no ranks here") == 2
    assert set(shown["view"]) == {"simulate"}


def test_what_needs_training_is_drawn_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("entrain_bench.figures._runner.draw_figures", lambda names, _: asked.append(list(names)) or 0)
    assert main([]) == main(["measured_gantt"]) == 0
    assert asked == [[name for name in NAMES if name != "measured_gantt"], ["measured_gantt"]]
    assert len(asked[0]) == len(NAMES) - 1
