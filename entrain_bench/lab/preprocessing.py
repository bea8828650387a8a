"""Train on pictures made on the spot; write ``results/preprocessing.csv`` and a figure after each repetition.

Inputs are made by the ranks, by their threads, and by DataLoader workers, in turn, several times over.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.artist import Artist
from matplotlib.patches import Patch
from numpy.typing import NDArray
from PIL import Image

from entrain_bench.answers.statistics import mean_interval, ratio_interval
from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, Picture, legend_above, palette, panels
from entrain_bench.lab.measuring import allowed_cores, last_line, run_python, write_outputs
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from entrain_bench.train.settings import PREPROCESSING

TITLE = "Preprocessing in the rank, a thread or a process: waits for inputs, iteration time and CPU time by image size."
REPETITIONS = 5
PICTURES = 128
SEED = 0
COMMAND = "make preprocessing"
NUM_RANKS = 2
SCAN_S = 600.0
ITERATIONS = 4
BATCH = 8
METRICS = ("iteration_time_s", "input_stall_s", "input_stall_mean_s", "loss")
# LLM tokens that a picture becomes, whatever its size: pictures differ in what they take to read and decode.
PICTURE_TOKENS = 64
SETTING = (
    "harness=train",
    "harness.device=cpu",
    "harness.data=files",
    f"harness.num_ranks={NUM_RANKS}",
    "model=tiny",
    f"cluster=hostx{NUM_RANKS}",
    "strategy=megatron",
    "workload=trace",
    f"workload.max_image_tokens={PICTURE_TOKENS}",
    "layout.tp=1",
    "layout.dp=1",
    f"global_batch={BATCH}",
    "microbatch_size=2",
    f"iterations={ITERATIONS}",
)
# Width and height in pixels: of web pages and datasets of photographs; of a screen; of a telephone's camera.
SIZES = ((640, 480), (1600, 1200), (3264, 2448))


@dataclass(frozen=True, slots=True)
class Prepared:
    """Pictures of one size: their shape trace, mean encoded size, and median CPU seconds to read one's pixels."""

    name: str
    trace: Path
    picture_bytes: float
    decode_s: float


def prepare_pictures(folder: Path, width: int, height: int, num: int, seed: int) -> Prepared:
    """Make pictures, and scan them as a user does; ``ExecutionError`` if they cannot be scanned."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{width}x{height}"
    path = folder / f"{name}.parquet"
    trace = folder / f"{name}-trace.parquet"
    num_bytes, first = write_pictures(path, num, width, height, seed)
    trace.unlink(missing_ok=True)
    scan = [f"source.path={path}", f"output={trace}", "tokenizer=bytes", *SETTING[4:6], "layout.tp=1"]
    log = folder / "scan.log"
    if wrong := run_python(["-m", "entrain_bench.cli", "trace", *scan], log, SCAN_S, {}):
        raise ExecutionError(f"{path}: cannot be scanned: {wrong} ({last_line(log)})")
    decode_s = []
    for content in first:
        started = process_time()
        np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        decode_s.append(process_time() - started)
    return Prepared(name, trace, num_bytes / num, float(np.median(decode_s)))


def measure(pictures: Sequence[Prepared], repetitions: int) -> Iterator[pd.DataFrame]:
    """Train every way on all pictures, in turn; yields all runs so far after each repetition.

    Columns: ``repetition``, ``size``, ``preprocessing``, metrics of the run, ``run_s`` and ``cpu_s`` of all its
    processes, start included, and ``load``, the machine's load average before it.
    """
    rows = []
    for repetition in range(repetitions):
        # Another order every time: what else the machine does changes over minutes.
        shift = repetition % len(PREPROCESSING)
        for prepared in pictures:
            for mode in (*PREPROCESSING[shift:], *PREPROCESSING[:shift]):
                given = [*SETTING, f"workload.path={prepared.trace}", f"harness.preprocessing={mode}", "mlflow=false"]
                (cell,) = compose_cells(given)
                load = os.getloadavg()[0]
                started = perf_counter()
                cpu_s = children_cpu_s()
                metrics = run_experiment(cell.config).metrics
                row: dict[str, object] = {"repetition": repetition, "size": prepared.name, "preprocessing": mode}
                row |= {name: metrics[name] for name in METRICS} | {"cpu_s": children_cpu_s() - cpu_s}
                rows.append(row | {"run_s": perf_counter() - started, "load": load})
                texts = (f"{key}={v:.4g}" if isinstance(v, float) else f"{v}" for key, v in rows[-1].items())
                print(*texts, flush=True)
        yield pd.DataFrame(rows)


def children_cpu_s() -> float:
    """CPU time of what this process's children have started and seen end: ranks and their workers."""
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
# Octaves of the texture that pictures are cut from: each twice as fine, and as strong as this share of the one before.
OCTAVES = 9
DECAY = 0.62
# What sensors add to each colour, of 255.
NOISE = 8.0

# Pictures that are returned, to be decoded.
KEPT = 16


def write_pictures(path: Path, num: int, width: int, height: int, seed: int) -> tuple[int, list[bytes]]:
    """Write rows of a picture (pixels) and a caption; returns all pictures' bytes, and the first ``KEPT`` pictures."""
    rng = np.random.default_rng(seed)
    texture = _texture(rng, width, height)
    contents = list[bytes]()
    texts = []
    for _ in range(num):
        top = rng.integers(height)
        left = rng.integers(width)
        cut = texture[top : top + height, left : left + width]
        buffer = io.BytesIO()
        Image.fromarray(cut[:, :: rng.choice((-1, 1))]).save(buffer, "JPEG", quality=QUALITY)
        contents.append(buffer.getvalue())
        letters = rng.integers(ord("a"), ord("z") + 1, CAPTION_CHARS, np.uint8)
        texts.append([{"user": "", "assistant": letters.tobytes().decode()}])
    images = [[{"bytes": content, "path": f"{number}.jpg"}] for number, content in enumerate(contents)]
    pq.write_table(pa.table({"images": images, "texts": texts}), path, row_group_size=ROW_GROUP)
    return sum(map(len, contents)), contents[:KEPT]


def _texture(rng: np.random.Generator, width: int, height: int) -> NDArray[np.uint8]:
    """A texture twice as wide and high as a picture, rougher at smaller scales ``[rows, columns, 3]``."""
    size = (2 * width, 2 * height)
    total = np.zeros((size[1], size[0], 3), np.float32)
    for octave in range(OCTAVES):
        side = 2 ** (octave + 1)
        coarse = rng.integers(0, 256, (side, side, 3), np.uint8)
        fine = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.float32)
        total += DECAY**octave * (fine - 127.5)
    total *= 127.5 / np.abs(total).max()
    total += rng.normal(127.5, NOISE, total.shape).astype(np.float32)
    return total.clip(0, 255).astype(np.uint8)


LABELS = {"inline": "The rank itself", "thread": "A thread of each rank", "processes": "A DataLoader worker"}
QUANTITIES = ("input_stall_s", "iteration_time_s", "cpu_s")
# The setting that others are compared with, repetition by repetition: a machine's speed changes over minutes.
COMPARED_WITH = "inline"
PANELS = {
    "input_stall_s": "Wait for inputs (s per iteration)",
    "iteration_time_s_ratio": "Iteration time, relative",
    "cpu_s_ratio": "CPU time of the run, relative",
}
FILLED = 0.8


def summary(runs: pd.DataFrame, pictures: Sequence[Prepared]) -> pd.DataFrame:
    """Means over repetitions with 95% intervals, a row a size and way to make inputs.

    Columns ``*_ratio`` are geometric means of ratios to ``COMPARED_WITH`` in the same repetition.
    """
    rows = list[dict[str, object]]()
    for prepared in pictures:
        of_size = runs[runs["size"] == prepared.name].sort_values("repetition", kind="stable")
        values = {mode: of_size[of_size["preprocessing"] == mode] for mode in PREPROCESSING}
        inline = values[COMPARED_WITH]
        for mode, of_mode in values.items():
            intervals = {name: mean_interval(of_mode[name].tolist()) for name in QUANTITIES}
            for name in QUANTITIES[1:]:
                intervals[f"{name}_ratio"] = ratio_interval(of_mode[name].tolist(), inline[name].tolist())
            row = {"size": prepared.name, "picture_kb": prepared.picture_bytes / 1e3}
            row |= {"decode_ms": prepared.decode_s * 1e3, "preprocessing": mode}
            row |= {"repetitions": len(of_mode), "load_average": of_mode["load"].mean()}
            for name, interval in intervals.items():
                row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            rows.append(row)
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, cores: int) -> Picture:
    """Draw a panel per quantity, with a group of bars per image size."""
    figure, axes = panels(1, len(PANELS), DOUBLE_COLUMN_IN, 2.45)
    colours = palette(PREPROCESSING)
    sizes = dict([*table.groupby("size", sort=False)])
    width = FILLED / len(PREPROCESSING)
    for panel, (name, title) in zip(axes, PANELS.items(), strict=True):
        for step, (mode, own) in enumerate(table.groupby("preprocessing", sort=False)):
            places = [place + (step + 0.5) * width - FILLED / 2 for place in range(len(sizes))]
            panel.bar(places, own[name], 0.9 * width, color=colours[str(mode)])
            ends = own[f"{name}_low"].clip(lower=0), own[f"{name}_high"]
            panel.vlines(places, *ends, color=INK, linewidth=0.7, zorder=3)
        if name.endswith("_ratio"):
            panel.axhline(1, color=INK, linewidth=0.5)
        labels = [f"{size}".replace("x", " x ") + _note(rows, name) for size, rows in sizes.items()]
        panel.set_xticks(range(len(sizes)), labels)
        panel.tick_params(axis="x", length=0)
        panel.grid(visible=False, axis="x")
        panel.set(title=title, ylim=(0, None))
    handles: list[Artist] = [Patch(facecolor=colours[mode], label=LABELS[mode]) for mode in PREPROCESSING]
    legend_above(figure, handles)
    largest = [*sizes][-1]
    ratios = table[table["size"] == largest].set_index("preprocessing")["iteration_time_s_ratio"]
    best = str(ratios.idxmin())
    load = f"load average {table['load_average'].min():.0f} to {table['load_average'].max():.0f}"
    name = largest.replace("x", " x ")
    message = (
        f"Images of {name}: {LABELS[best].lower()} takes {ratios[best]:.2f} times as long as the rank itself. "
        f"{NUM_RANKS} ranks and, in the last case, their DataLoader workers on {cores} cores ({load}); {BATCH} images "
        "per iteration. Left: bytes of an image and CPU time to decode it. Middle, right: ratios to the rank itself, "
        f"with its seconds; {table['repetitions'].min()} repetitions, 95% intervals."
    )
    return Picture(figure, table, message)


def _note(rows: pd.DataFrame, name: str) -> str:
    """Below a size, what decides there: a picture's cost, or the time that others are relative to."""
    if name.endswith("_ratio"):
        own = rows[rows["preprocessing"] == COMPARED_WITH].iloc[0]
        return f"\n{own[name.removesuffix('_ratio')]:.1f} s"
    return f"\n{rows['picture_kb'].iloc[0]:.0f} kB\n{rows['decode_ms'].iloc[0]:.0f} ms"


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the measurement."""
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="runs of each kind")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="pictures of each size")


def run(options: Namespace) -> int:
    """Make pictures, train on them, and draw what came out after each repetition; ``UserError`` for bad options."""
    for name in ("repetitions", "pictures"):
        require(getattr(options, name) >= 1, f"--{name}", getattr(options, name), "at least 1")
    if sys.platform != "linux":
        raise UserError(f"{COMMAND} needs Linux: it shares memory and reads CPU times in /proc")
    folder = options.results_dir / "preprocessing"
    print("making pictures", flush=True)
    prepared = [prepare_pictures(folder, *size, options.pictures, SEED) for size in SIZES]
    cores = len(allowed_cores())
    setting = {"ranks": [NUM_RANKS], "cores": [cores], "global_batch": [BATCH], "iterations": [ITERATIONS]}
    for rows in measure(prepared, options.repetitions):
        drawn = partial(draw, summary(rows, prepared), cores)
        write_outputs(options.results_dir, rows, "preprocessing", TITLE, drawn, COMMAND, setting, [SEED], "measured")
    return 0
