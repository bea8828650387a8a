"""Train on pictures made on the spot; write ``results/preprocessing.csv`` and a figure after each repetition.

Inputs are made by the ranks, by their threads, and by DataLoader workers, in turn, several times over.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import seaborn as sns
from PIL import Image

from entrain_bench.answers.statistics import Interval, mean_interval, ratio_interval
from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, Picture, legend_above, palette, panels
from entrain_bench.lab.measuring import allowed_cores, last_line, run_python, write_outputs
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from entrain_bench.train.settings import PREPROCESSING

TITLE = "Preprocessing in the rank, a thread or a process: waits for inputs, iteration time and CPU time by image size."
SEED = 0
COMMAND = "make preprocessing"
NUM_RANKS = 2
SCAN_S = 600.0
ITERATIONS = 4
BATCH = 8
SETTING = (
    "harness=train",
    "harness.device=cpu",
    "harness.data=files",
    f"harness.num_ranks={NUM_RANKS}",
    "model=tiny",
    f"cluster=hostx{NUM_RANKS}",
    "strategy=megatron",
    "workload=trace",
    # LLM tokens of every picture: pictures differ only in the time to read and decode them.
    "workload.max_image_tokens=64",
    "layout.tp=1",
    "layout.dp=1",
    f"global_batch={BATCH}",
    "microbatch_size=2",
    f"iterations={ITERATIONS}",
)
# Width and height in pixels: of web pages and datasets of photographs; of a screen; of a telephone's camera.
SIZES = ((640, 480), (1600, 1200), (3264, 2448))


def prepare_pictures(folder: Path, width: int, height: int, num: int, seed: int) -> Path:
    """Make pictures, and scan them as a user does; return their shape trace. ``ExecutionError`` if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{width}x{height}.parquet"
    trace = folder / f"{width}x{height}-trace.parquet"
    write_pictures(path, num, width, height, seed)
    trace.unlink(missing_ok=True)
    scan = [f"source.path={path}", f"output={trace}", "tokenizer=bytes", *SETTING[4:6], "layout.tp=1"]
    log = folder / "scan.log"
    if wrong := run_python(["-m", "entrain_bench.cli", "trace", *scan], log, SCAN_S, {}):
        raise ExecutionError(f"{path}: cannot be scanned: {wrong} ({last_line(log)})")
    return trace


def measure(traces: Mapping[str, Path], repetitions: int) -> Iterator[pd.DataFrame]:
    """Train every way on the traces of all sizes, in turn; yields all runs so far after each repetition.

    Columns: ``repetition``, ``size``, ``preprocessing``, metrics of the run, ``cpu_s`` of all its processes, start
    included, and ``load``, the machine's load average before it.
    """
    rows = []
    for repetition in range(repetitions):
        # A different order every time, because the machine's load changes over minutes.
        shift = repetition % len(PREPROCESSING)
        for size, trace in traces.items():
            for mode in (*PREPROCESSING[shift:], *PREPROCESSING[:shift]):
                given = [*SETTING, f"workload.path={trace}", f"harness.preprocessing={mode}", "mlflow=false"]
                (cell,) = compose_cells(given)
                load = os.getloadavg()[0]
                cpu_s = children_cpu_s()
                metrics = run_experiment(cell.config).metrics
                row: dict[str, object] = {"repetition": repetition, "size": size, "preprocessing": mode}
                row |= {name: metrics[name] for name in ("iteration_time_s", "input_stall_s")} | {
                    "cpu_s": children_cpu_s() - cpu_s
                }
                rows.append(row | {"load": load})
                print(rows[-1], flush=True)
        yield pd.DataFrame(rows)


def children_cpu_s() -> float:
    """Return the CPU seconds of ended descendants of this process: ranks and their workers."""
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            values = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if values[1] == str(os.getpid()):
            ticks += int(values[13]) + int(values[14])
    return ticks / os.sysconf("SC_CLK_TCK")


QUALITY = 85
CAPTION_CHARS = 120
ROW_GROUP = 32
# Pixels between the random colors of a picture: smooth areas with edges, as in photographs.
GRAIN = 16


def write_pictures(path: Path, num: int, width: int, height: int, seed: int) -> None:
    """Write rows of a picture and of a caption."""
    rng = np.random.default_rng(seed)
    images = []
    texts = []
    for number in range(num):
        coarse = rng.integers(0, 256, (-(-height // GRAIN), -(-width // GRAIN), 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((width, height)).save(buffer, "JPEG", quality=QUALITY)
        images.append([{"bytes": buffer.getvalue(), "path": f"{number}.jpg"}])
        letters = rng.integers(ord("a"), ord("z") + 1, CAPTION_CHARS, np.uint8)
        texts.append([{"user": "", "assistant": letters.tobytes().decode()}])
    pq.write_table(pa.table({"images": images, "texts": texts}), path, row_group_size=ROW_GROUP)


LABELS = {"inline": "The rank itself", "thread": "A thread of each rank", "processes": "A DataLoader worker"}
# Baseline setting, compared per repetition because a machine's speed changes over minutes.
COMPARED_WITH = "inline"
PANELS = {
    "input_stall_s": "Wait for inputs (s per iteration)",
    "iteration_time_s_ratio": "Iteration time, relative",
    "cpu_s_ratio": "CPU time of the run, relative",
}


def interval(values: pd.Series, relative: bool) -> Interval:
    """Return the mean of a column with its 95% CI; the geometric mean for ratios."""
    return ratio_interval(values.tolist(), [1.0] * len(values)) if relative else mean_interval(values.tolist())


def draw(runs: pd.DataFrame, cores: int) -> Picture:
    """Draw a panel per quantity, with a group of bars per image size; the table is of runs.

    Columns ``*_ratio`` are relative to ``COMPARED_WITH`` in the same repetition.
    """
    case = ["repetition", "size"]
    compared = runs.loc[runs["preprocessing"] == COMPARED_WITH, [*case, "iteration_time_s", "cpu_s"]]
    table = runs.merge(compared, "left", case, suffixes=("", "_compared"))
    for name in ("iteration_time_s", "cpu_s"):
        table[f"{name}_ratio"] = table[name] / table.pop(f"{name}_compared")
    figure, axes = panels(1, len(PANELS), DOUBLE_COLUMN_IN, 2.45)
    bars: Any = {"palette": palette(LABELS.values()), "err_kws": {"color": INK, "linewidth": 0.7}}
    for panel, (name, title) in zip(axes, PANELS.items(), strict=True):
        mean = partial(interval, relative=name.endswith("_ratio"))
        bars |= {"estimator": lambda of: mean(of).mean, "errorbar": lambda of: (mean(of).low, mean(of).high)}  # noqa: B023
        sns.barplot(table, x="size", y=name, hue=table["preprocessing"].map(LABELS), ax=panel, **bars)
        panel.grid(visible=False, axis="x")
        panel.set(title=title, ylim=(0, None), xlabel="", ylabel="")
        handles, _ = panel.get_legend_handles_labels()
        panel.legend().remove()
    legend_above(figure, handles)
    largest = table["size"].iloc[-1]
    of_size = table[table["size"] == largest].groupby("preprocessing")["iteration_time_s_ratio"]
    means = of_size.agg(lambda of: interval(of, relative=True).mean)
    best = str(means.idxmin())
    load = f"load average {table['load'].min():.0f} to {table['load'].max():.0f}"
    message = (
        f"Images of {largest}: {LABELS[best].lower()} takes {means[best]:.2f} times as long as the rank itself. "
        f"{NUM_RANKS} ranks and, in the last case, their DataLoader workers on {cores} cores ({load}); {BATCH} images "
        f"per iteration. Middle, right: ratios to the rank itself; {table['repetition'].nunique()} repetitions, 95% CI."
    )
    return Picture(figure, table, message)


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the measurement."""
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each kind")
    parser.add_argument("--pictures", type=int, default=128, help="pictures of each size")


def run(options: Namespace) -> int:
    """Make pictures, train on them, and draw results after each repetition; ``UserError`` for bad options."""
    for name in ("repetitions", "pictures"):
        require(getattr(options, name) >= 1, f"--{name}", getattr(options, name), "at least 1")
    if sys.platform != "linux":
        raise UserError(f"{COMMAND} needs Linux: it shares memory and reads CPU times in /proc")
    folder = options.results_dir / "preprocessing"
    print("making pictures", flush=True)
    traces = {f"{size[0]}x{size[1]}": prepare_pictures(folder, *size, options.pictures, SEED) for size in SIZES}
    cores = len(allowed_cores())
    setting = {"ranks": [NUM_RANKS], "cores": [cores], "global_batch": [BATCH], "iterations": [ITERATIONS]}
    for rows in measure(traces, options.repetitions):
        drawn = partial(draw, rows, cores)
        write_outputs(options.results_dir, rows, "preprocessing", TITLE, drawn, COMMAND, setting, [SEED])
    return 0
