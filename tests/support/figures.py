"""Made-up data for every figure, and what a drawn figure says."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from entrain_bench.answers.documents.mechanisms import read_mechanisms
from entrain_bench.answers.tables import rankings
from entrain_bench.answers.timelines import bars_of, memory_of
from entrain_bench.figures import measured_gantt
from entrain_bench.figures._style import Picture, styled
from entrain_bench.records.time_shares import TIME_SHARES

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
            "lower_bound_s": 0.6 * scale,
            "encoder_forward_std_ms": scale,
            "llm_forward_std_ms": scale / 3,
            **time_shares(strategies.index(strategy)),
        }
        labels = {"strategy": strategy, "workload": workload, "model": model, "cluster": "a40x64", "seed": seed}
        outcome: dict[str, Any] = numbers if state == "ok" else {"reason": "told so"}
        rows.append({"reason": ""} | labels | {"status": state} | outcome)
    return pd.DataFrame(rows)


def time_shares(place: int) -> dict[str, float]:
    """A third of the time is work; the rest is spread over the classes, more and more over the later ones."""
    parts = np.arange(1.0, len(TIME_SHARES)) ** (place / 4)
    return dict(zip(TIME_SHARES, [1 / 3, *(parts / parts.sum() * 2 / 3)], strict=True))


def actions(strategies: Sequence[str], workloads: Sequence[str] = TRACES[1:3]) -> pd.DataFrame:
    """A made-up timeline: 2 replicas of 2 encoder and 2 LLM stages, 6 microbatches."""
    rows = []
    for strategy, workload, model in itertools.product(strategies, workloads, MODELS):
        for replica, stage, microbatch, backward in itertools.product(range(2), range(4), range(6), range(2)):
            start = 2.0 * microbatch + backward + 0.1 * stage
            encodes = stage < 2
            place = {"lane": 4 * replica + stage, "rank": 2 * (4 * replica + stage), "stage": stage % 2}
            held = microbatch // 2 if encodes else microbatch
            memory = (20.0 + microbatch + replica) * GIB
            rows.append(
                {"strategy": strategy, "workload": workload, "model": model, "replica": replica, **place}
                | {"side": "encoder" if encodes else "llm", "module": "vision" if encodes else "llm"}
                | {"microbatch": held, "parent": held, "part": microbatch % 2 if encodes else 0}
                | {"pass": "backward" if backward else "forward", "start_s": start}
                | {"end_s": start + 0.5 + 0.1 * replica, "memory_bytes": memory}
                | {"memory_after_bytes": memory - backward * GIB}
            )
    frame = pd.DataFrame(rows)
    step = frame[(frame["microbatch"] == 0) & (frame["part"] == 0) & frame["pass"].eq("forward")]
    last: dict[str, Any] = {"pass": "optimizer", "start_s": 13.0, "end_s": 14.0}
    return pd.concat([frame, step.assign(replica=-1, microbatch=-1, part=-1, parent=-1, **last)], ignore_index=True)


def tokens(traces: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame(itertools.product(traces, [0.0, 0.5, 1.0]), columns=["workload", "probability"])
    # Half of the samples have no encoder tokens.
    return frame.assign(encoder_tokens=[0, 0, 900] * len(traces), llm_tokens=[10, 300, 70000] * len(traces))


def allocated(traces: Sequence[str]) -> pd.DataFrame:
    rows = itertools.product(MODELS, traces, [1, 4, 16], range(2, 15))
    frame = pd.DataFrame(rows, columns=["model", "workload", "batch_size", "encoder_gpus"])
    gpus = frame["encoder_gpus"]
    return frame.assign(
        llm_gpus=16 - gpus,
        encoder_stages=gpus // 2,
        llm_stages=8 - gpus // 2,
        share=np.where(gpus == 9, 0.9, np.where(gpus == 8, 0.1, 0.0)),
        num_draws=59,
        stable_batch=[0, 64] * (len(frame) // 2),
    )


def budgets(strategies: Sequence[str], traces: Sequence[str]) -> pd.DataFrame:
    """Runs that take twice as long with a budget of 12 as with more; of three families."""
    families = ["out_of_the_box", "published", "ours"]
    parts = []
    for budget in (12, 24, 48):
        rows = table(strategies, traces).assign(tuning_budget=budget)
        rows["strategy_family"] = [families[strategies.index(name) % 3] for name in rows["strategy"]]
        parts.append(rows.assign(iteration_time_s=rows["iteration_time_s"] * (2 if budget == 12 else 1)))
    return pd.concat(parts, ignore_index=True)


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


CHANGES = [
    *(f"some constant x {factor}" for factor in range(12)),
    "gradients after backward",
    "no sequence parallelism",
]


def changes(
    strategies: Sequence[str], traces: Sequence[str], rows: Sequence[str] = ("as usual", *CHANGES)
) -> pd.DataFrame:
    """Runs of rows in which the strategies change places one by one, the last first."""
    parts = []
    for place, row in enumerate(rows):
        data = table(strategies, traces)
        moved = data["strategy"].isin(strategies[len(strategies) - place :])
        parts.append(
            data.assign(row=row, iteration_time_s=data["iteration_time_s"].where(~moved, 0.1 * data["samples_per_s"]))
        )
    return pd.concat(parts, ignore_index=True)


def twins(strategies: Sequence[str], traces: Sequence[str]) -> pd.DataFrame:
    """Runs on traces and on their twins, which take a little longer the later the strategy."""
    parts = []
    for side in ("trace", "twin"):
        rows = table(strategies, traces)
        rows = rows[rows["model"] == MODELS[0]]
        slower = 1 + 0.01 * rows["strategy"].map(list(strategies).index) * (side == "twin")
        stated = {"trace": rows["workload"], "trace_label": "", "side": side}
        parts.append(rows.assign(**stated, iteration_time_s=rows["iteration_time_s"] * slower))
    return pd.concat(parts, ignore_index=True)


def gains() -> pd.DataFrame:
    """Gains of the mechanisms that fall from one to the next, less as the last; one has no result."""
    defined = read_mechanisms()
    rows = []
    for place, (name, mechanism) in enumerate(defined.mechanisms.items()):
        for switch, pair in (("alone", mechanism.alone), ("last", mechanism.last)):
            for number, job in enumerate(defined.jobs if pair else ()):
                gain = (0.4 - 0.06 * place) * (1.0 if switch == "alone" else 0.4) + 0.015 * number
                rows.append((name, switch, job, np.nan if number == 5 and place == 4 else gain, 2, "", ""))
    return pd.DataFrame(rows, columns=["mechanism", "switched", "job", "gain", "num_seeds", "reason", "runs_in"])


def bars(strategies: Sequence[str], traces: Sequence[str]) -> pd.DataFrame:
    return bars_of(table(strategies, traces[:1]), actions(strategies, traces[:1]))


def data_of(name: str, strategies: Sequence[str], traces: Sequence[str]) -> Any:
    """Data for any figure."""
    made: dict[str, Callable[[], Any]] = {
        "token_distributions": lambda: tokens(traces),
        "allocations": lambda: allocated(traces[:6]),
        "measured_gantt": lambda: pd.concat([bars(["one"], traces).assign(view=view) for view in measured_gantt.VIEWS]),
        "schedule_gantt": lambda: bars(strategies, traces),
        "memory_over_time": lambda: memory_of(table(strategies, traces[:1]), actions(strategies, traces[:1])),
        "tuning_budget": lambda: budgets(strategies, traces[:2]),
        "sensitivity": lambda: splits(traces[:4]),
        "context_length": lambda: contexts(strategies[:3]),
        "robustness": lambda: rankings(changes(strategies, traces[:2])),
        "twins": lambda: twins(strategies, traces[:4]),
        "out_of_the_box": lambda: changes(strategies, traces[:5], ["PP 1, DP 32", "PP 4, DP 8", "PP 8, DP 4"]),
        "mechanisms": gains,
    }
    return made.get(name, lambda: table(strategies, traces[:5]))()


def drawn(name: str, data: Any) -> Picture:
    with styled():
        made: Picture = importlib.import_module(f"entrain_bench.figures.{name}").draw(data)
    return made


def texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Every text that is drawn, with its place in pixels; ticks out of range are not drawn."""
    seen = []
    original = Text.draw

    def draw(self: Text, renderer: Any) -> None:
        if self.get_text().strip() and self.get_visible():
            seen.append(self)
        original(self, renderer)

    with monkeypatch.context() as patch, styled():
        patch.setattr(Text, "draw", draw)
        figure.draw_without_rendering()
    return {str(id(text)): [text, text.get_window_extent()] for text in seen}


def written(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return [text.get_text() for text, _ in texts(figure, monkeypatch).values()]
