"""A strategy's schedule as a small SVG: what every GPU of one node does in one simulated iteration."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from entrain_bench.answers.labels import spell
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells, run_one

# The same samples, model and node for every strategy: 32 charts with texts of very different lengths, 8 A40, two
# replicas. Planners choose by their own trials, which takes a second; the tuner of comparisons takes longer.
JOB = (
    *("workload=opencqa_ocr", "model=qwen25vl_llama3_1b", "cluster=tiny", "cluster.gpus_per_node=8"),
    *("layout.tp=1", "layout.dp=2", "global_batch=32", "microbatch_size=4", "iterations=1", "seed=0", "tuning=own"),
)
WORDS = (
    "8 A40 GPUs, DP 2, 32 samples of OpenCQA OCR in microbatches of 4, Qwen2.5-VL's vision encoder with Llama 3.2 1B"
)
BASELINE = "megatron"
# Pixels.
WIDTH = 720
LABEL = 158
ROW = 17
TOP = 22
AXIS = 26
# An encoder's and an LLM's hue, then those of further modules; light is forward, full backward, dark weights.
HUES = {"encoder": ("#7fb8d8", "#0173b2", "#014a73"), "llm": ("#f3c987", "#de8f05", "#8a5903")}
OTHER = ("#86cfb8", "#029e73", "#01614a")
PASSES = ("forward", "backward", "weight")
STEP, LINE = "#949494", "#8c8c8c"
# A block narrower than this has no room for its microbatch.
MIN_LETTER = 9.0
TICKS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A simulated iteration of a strategy.

    Attributes:
        actions: the timeline, one row an action and lane (``timeline_frame``).
        sides: role of each module.
        seconds: iteration time.
        bubble: idle share of GPU time.
        layout: in words.
    """

    actions: pd.DataFrame
    sides: dict[str, str]
    seconds: float
    bubble: float
    layout: str


def schedule_of(strategy: str, results: Results) -> Schedule:
    """Return a strategy's iteration of ``JOB``, simulated unless the folder of results has it.

    Raises:
        UserError: if the strategy cannot run the job.
    """
    (cell,) = compose_cells((f"strategy={strategy}", *JOB))
    record = results.read(cell.key)
    timeline = results.timeline(record) if record else None
    if record is None or timeline is None:
        record = run_one(cell, results)
        timeline = results.timeline(record)
    assert timeline is not None
    row = record.row()
    sides = {name: str(module["role"]) for name, module in cell.config.model["modules"].items()}
    return Schedule(timeline, sides, float(row["iteration_time_s"]), float(row["bubble_ratio"]), str(row["layout"]))


def command_of(strategy: str) -> str:
    """The command that simulates a strategy's iteration."""
    return " ".join(("entrain-bench", f"strategy={strategy}", *JOB))


def svg(schedule: Schedule, longest_s: float, baseline_s: float) -> str:
    """Return the picture: a row a GPU, a block a pass, the same time scale for all strategies.

    Args:
        schedule: what is drawn.
        longest_s: the end of the axis in seconds.
        baseline_s: iteration time of the baseline, marked by a line.
    """
    actions = schedule.actions
    gpus = int((schedule.actions["rank"] + schedule.actions["num_ranks"]).max())
    scale = (WIDTH - LABEL - 4) / longest_s
    height = TOP + ROW * gpus + AXIS
    text = alternative(schedule, baseline_s)
    parts = [
        f'<svg class="schedule" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(text)}">',
        *_legend(schedule),
        *(_row(gpu, places) for gpu, places in enumerate(_places(actions, gpus))),
    ]
    for row in actions.sort_values(["start_s", "lane"], kind="stable").to_dict("records"):
        parts += _blocks(row, schedule.sides, scale)
    parts += _axis(longest_s, scale, gpus)
    x = LABEL + baseline_s * scale
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 3}" y2="{TOP + ROW * gpus}" class="baseline"/>')
    return "\n".join([*parts, "</svg>"])


def alternative(schedule: Schedule, baseline_s: float) -> str:
    """The picture in a sentence."""
    return (
        f"Iteration time {schedule.seconds:.2f} s ({baseline_s / schedule.seconds:.2f}x over Megatron), "
        f"GPUs idle {100 * schedule.bubble:.0f}% of the time; layout: {schedule.layout}."
    )


def _blocks(row: Mapping[Hashable, Any], sides: Mapping[str, str], scale: float) -> list[str]:
    """The blocks of an action on every GPU of its lane, with its description on hover."""
    start = float(row["start_s"])
    end = float(row["end_s"])
    width = (end - start) * scale
    microbatch = int(row["parent"])
    module = str(row["module"])
    kind = str(row["pass"])
    colour = _hues(module, sides)[PASSES.index(kind)] if kind in PASSES else STEP
    what = f"{kind} {spell(module)}, microbatch {microbatch}" if kind in PASSES else kind.replace("_", " ")
    x = LABEL + start * scale
    first = int(row["rank"])
    count = int(row["num_ranks"])
    title = f"<title>{escape(what)}, {start:.3f} to {end:.3f} s</title>"
    found = []
    for gpu in range(first, first + count):
        y = TOP + ROW * gpu + 1
        found.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.4):.1f}" height="{ROW - 2}" fill="{colour}">{title}</rect>'
        )
        if kind in PASSES and width >= MIN_LETTER:
            ink = "light" if kind != "forward" else "dark"
            found.append(f'<text x="{x + width / 2:.1f}" y="{y + 11}" class="{ink}">{microbatch}</text>')
    return found


def _places(actions: pd.DataFrame, gpus: int) -> list[str]:
    """Which stages of which modules each GPU holds."""
    held = actions[actions["replica"] >= 0].drop_duplicates(["lane", "module", "stage"])
    texts: list[list[str]] = [[] for _ in range(gpus)]
    for _, rows in held.groupby(["rank", "module"], sort=True):
        first, count, module = rows.iloc[0][["rank", "num_ranks", "module"]]
        stages = "+".join(map(str, sorted(rows["stage"].unique())))
        for gpu in range(first, first + count):
            texts[gpu].append(f"{spell(module)} {stages}")
    return [", ".join(each) for each in texts]


def _row(gpu: int, place: str) -> str:
    y = TOP + ROW * gpu + 12
    return f'<text x="0" y="{y}" class="gpu">GPU {gpu}</text><text x="42" y="{y}" class="place">{escape(place)}</text>'


def _legend(schedule: Schedule) -> list[str]:
    """Legend of the colours, in one line above the rows."""
    present = {(str(m), str(k)) for m, k in zip(schedule.actions["module"], schedule.actions["pass"], strict=True)}
    found = []
    x = float(LABEL)
    for module in sorted({m for m, k in present if k in PASSES}, key=lambda name: schedule.sides[name]):
        for kind in (each for each in PASSES if (module, each) in present):
            found += _key(x, _hues(module, schedule.sides)[PASSES.index(kind)], label := f"{spell(module)} {kind}")
            x += 22 + 5.9 * len(label)
    return [*found, *_key(x, STEP, "gradients, step")]


def _key(x: float, colour: str, label: str) -> list[str]:
    return [
        f'<rect x="{x:.1f}" y="4" width="10" height="10" fill="{colour}"/>',
        f'<text x="{x + 14:.1f}" y="13" class="key">{escape(label)}</text>',
    ]


def _axis(longest_s: float, scale: float, gpus: int) -> list[str]:
    bottom = TOP + ROW * gpus
    step = next((each for each in TICKS if longest_s / each <= 8), TICKS[-1])
    found = [f'<line x1="{LABEL}" x2="{WIDTH - 4}" y1="{bottom}" y2="{bottom}" stroke="{LINE}"/>']
    for number in range(int(longest_s / step + 1e-9) + 1):
        x = LABEL + number * step * scale
        found.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 3}" stroke="{LINE}"/>')
        found.append(
            f'<text x="{x:.1f}" y="{bottom + 14}" class="tick">{number * step:g}{" s" if number else ""}</text>'
        )
    return found


def _hues(module: str, sides: Mapping[str, str]) -> Sequence[str]:
    return HUES.get(sides[module], OTHER)
